"""Commands on the packages in images: `lock`, `upgrade` and `bundle`.

`lock` pins them and renders the Dockerfiles. `upgrade` does so with newer releases. `bundle` downloads them for offline
builds.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shoal import docker_client
from shoal.builds import bundle, debian_lock
from shoal.commands.common import (
    BUILD,
    AsJson,
    Images,
    Skip,
    app,
    open_project,
    print_json,
    progress_console,
    raise_stale,
)
from shoal.console import CleanConsole, print_line, print_lines
from shoal.docker_client.images import find_image
from shoal.errors import BaseImageError, BuildError, DockerError, ImageError, OutdatedError, SpecError
from shoal.formats import format_count
from shoal.image import advisories
from shoal.jobs import locked_image
from shoal.matrix import spec
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.sources import lock, lock_changes, render, upgrade
from shoal.sources.releases import Indexes

_CHECK_HELP = (
    "Write nothing, and ask no network; fail if a lock or Dockerfile is stale. With --bases: ask the mirror, and fail"
    " if Debian has other versions now."
)


@dataclass(frozen=True)
class Upgrade:
    """The changes by newer releases."""

    changes: Sequence[upgrade.EntryChange]
    """The edits in buildspec.yml and versions.yml."""
    locks: Sequence[lock_changes.LockChange]
    """The changes of images' packages."""
    debian: Sequence[debian_lock.LockResult]
    """The locks of Debian's packages; none if packages were named, or Docker does not answer."""
    closed: Sequence[str] | None
    """The vulnerabilities that are closed; null without `--advisories`."""
    notes: Sequence[str]
    """Releases that are not taken, and indexes that do not answer."""


@app.command("lock", rich_help_panel=BUILD, epilog="More: CONTRIBUTING.md")
def lock_images(
    images: Images = None,
    skip: Skip = None,
    bases: Annotated[
        bool,
        typer.Option("--bases", help="Lock base images and Debian packages instead, in dockerfiles/debian/."),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help=_CHECK_HELP)] = False,
    as_json: AsJson = False,
) -> None:
    """Pin the Python packages of images, with hashes, in dockerfiles/requirements/, and render the Dockerfiles.

    Child images are locked too if their locks no longer fit, unless you --skip them.

    Example: shoal lock pytorch
    """
    here, matrix = open_project(to_write=not check)
    if bases:
        _lock_bases(here, matrix, matrix.choose(images or (), skip or ()), check=check, as_json=as_json)
        return
    if check:
        _check_locks(here, matrix, matrix.choose(images or (), skip or ()), as_json=as_json)
        return
    chosen = {image.tag for image in matrix.choose(images or (), skip or ())}
    progress = progress_console(as_json)
    made = _lock(here, matrix, matrix.choose(skip=skip or ()), chosen, progress)
    if as_json:
        print_json(made)
    else:
        print_lines(map(str, made.rendered))


def _lock(
    here: Project, matrix: BuildSpec, images: list[ImageSpec], chosen: Collection[str], progress: Console
) -> lock.LockedImages:
    """Locks the `images` that are chosen by tag, and children if their locks no longer fit. Renders Dockerfiles."""
    locks: list[lock.LockFile] = []
    locked: set[Path] = set()
    try:
        for image in images:  # parents first
            if _needs_lock(here, matrix, image, chosen, locked):
                locks += _lock_image(here, matrix, image, progress)
                locked.add(here.lock_directory(image))
    finally:  # if a child cannot be resolved, the images before it stay locked
        variants = [image for image in matrix.images if here.lock_directory(image) in locked]
        files = render.write_files(render.render_all(here, variants))
    return lock.LockedImages(locks, files)


def _lock_image(here: Project, matrix: BuildSpec, image: ImageSpec, progress: Console) -> list[lock.LockFile]:
    """Resolves and writes the lock files of an image, and prints a line for each."""
    with progress.status(escape(f"resolving {image.tag}")):
        paths = lock.lock_image(here, matrix, image)
    locks = [lock.LockFile(image.tag, path, len(lock.read_lock(path))) for path in paths]
    for found in locks:
        print_line(f"{found.pins:3} pins  {found.path}", progress)
    return locks


def _check_locks(here: Project, matrix: BuildSpec, images: list[ImageSpec], *, as_json: bool) -> None:
    """Raises `SpecError` if locks or Dockerfiles of images are stale. Writes nothing."""
    files = render.check_files(render.render_all(here, images))
    if as_json:
        locks = [
            lock.LockFile(image.tag, here.lock_directory(image) / f"{layer}.txt", len(found))
            for image in images
            if lock.are_current(here, matrix, image)
            for layer, found in lock.read_image_pins(here, matrix, image).items()
        ]
        print_json(lock.LockedImages(locks, files))
    raise_stale(here, matrix, images, files)


def _lock_bases(here: Project, matrix: BuildSpec, images: list[ImageSpec], *, check: bool, as_json: bool) -> None:
    """With `check`, writes nothing, and raises `SpecError` if the locks have changed."""
    say = functools.partial(print_line, on=progress_console(as_json))
    locks = []
    for made in debian_lock.lock_systems(here, matrix, images, say, write=not check):
        locks.append(made)
        say(f"{made.packages:3} packages  {made.path}{'' if made.changes else ': unchanged'}")
        for change in made.changes:
            say(f"    {change}")
    if as_json:
        print_json(locks)
    if check and (changed := [made.suite for made in locks if made.changes]):
        raise SpecError(f"Debian {', '.join(changed)} has other packages or base images now. Fix: shoal lock --bases")


def _needs_lock(
    here: Project, matrix: BuildSpec, image: ImageSpec, chosen: Collection[str], locked: Collection[Path]
) -> bool:
    # Variants of an image share a lock.
    if here.lock_directory(image) in locked:
        return False
    parent = matrix.parent(image)
    parent_locked = parent is not None and here.lock_directory(parent) in locked
    return image.tag in chosen or (parent_locked and not lock.are_current(here, matrix, image))


@app.command("upgrade", rich_help_panel=BUILD, epilog="More: CONTRIBUTING.md")
def upgrade_releases(
    packages: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PACKAGE]...", help="Packages of buildspec.yml and versions.yml. Default: all."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if there are newer releases, such as in a weekly job.")
    ] = False,
    known: Annotated[
        Path | None,
        typer.Option("--advisories", help="Report written by `pip-audit --format json`: names what is closed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask the package indexes for newer releases, edit buildspec.yml and dockerfiles/versions.yml, lock and render.

    Without PACKAGE, all locks are renewed too, with Debian's. A new minor release of a framework gets an entry beside
    the old one. Entries with `hold` stay.

    Example: shoal upgrade --check
    """
    here, matrix = open_project(to_write=not check)
    report = advisories.read_report(known) if known else None
    say = functools.partial(print_line, on=progress_console(as_json))
    indexes = Indexes()
    with upgrade.copy_project(here) as scratch:
        changes, notes = upgrade.edit_files(scratch, packages or (), indexes)
        after = spec.load(scratch.buildspec)
        stale = {image.tag for image in after.images if not packages or not lock.are_current(scratch, after, image)}
        _lock(scratch, after, list(after.images), stale, CleanConsole(quiet=True))
        locks = list(lock_changes.list_changes(here, scratch, after, indexes))
        if not check:
            upgrade.write_back(scratch, here, matrix, after)
    notes += [f"{address} cannot be reached. Its releases are not known" for address in indexes.unreachable]
    debian = [] if packages else _upgrade_debian(here, after, notes, write=not check)
    closed = _list_closed(report, locks)
    if as_json:
        print_json(Upgrade(changes, locks, debian, closed, notes))
    for line in _describe(Upgrade(changes, locks, debian, closed, notes)):
        say(line)
    if check and (changes or locks or any(made.changes for made in debian)):
        raise OutdatedError("there are newer releases. Fix: shoal upgrade")


def _upgrade_debian(here: Project, matrix: BuildSpec, notes: list[str], *, write: bool) -> list[debian_lock.LockResult]:
    """Locks Debian's packages. Returns the locks that it made; a failure, such as without Docker, becomes a note."""
    made: list[debian_lock.LockResult] = []
    try:
        made.extend(debian_lock.lock_systems(here, matrix, matrix.images, lambda _: None, write=write))
    except (DockerError, BuildError, BaseImageError) as error:
        notes.append(f"Debian's packages are not known: {error}")
    return made


def _list_closed(report: advisories.AuditReport | None, locks: list[lock_changes.LockChange]) -> list[str] | None:
    """Returns the vulnerabilities that the changes close, each once; None without a report."""
    if report is None:
        return None
    changes = [(each.name, each.before, each.after) for lock in locks for each in lock.packages if each.before]
    return sorted(set(advisories.list_closed(report, changes)))


def _describe(found: Upgrade) -> Iterator[str]:
    yield from map(str, found.changes)
    for change in found.locks:
        yield str(change)
        yield from (f"    {package}" for package in (() if change.is_new else change.packages))
    for made in found.debian:
        yield f"Debian {made.suite}: {format_count(len(made.changes), 'change')}"
    yield from (f"! {note}" for note in found.notes)
    if found.closed is None:
        yield "! vulnerabilities were not asked for: --advisories reads a report of pip-audit (docs/security.md)"
    yield from (f"closes {line}" for line in found.closed or ())
    if not (found.changes or found.locks or any(made.changes for made in found.debian)):
        yield "✓ nothing newer"


_LOCK_HELP = (
    "Directory of a script with a lock file: its packages are added, for each image, which must be built. Repeatable."
)


def _add_lock(tag: str, source: Path, target: Path, say: Callable[[str], object]) -> None:
    client = docker_client.connect()
    if find_image(client, tag) is None:
        raise ImageError(f"--lock {source}: {tag} is not built. Fix: shoal build {tag}")
    locked_image.download_lock(client, tag, source, target, say)


@app.command("bundle", rich_help_panel=BUILD, epilog="More: docs/offline.md")
def bundle_images(
    directory: Annotated[Path, typer.Argument(help="Output directory; existing files are kept.")],
    images: Images = None,
    skip: Skip = None,
    lock_of: Annotated[list[Path] | None, typer.Option("--lock", metavar="SOURCE", help=_LOCK_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Download base images, packages and wheels for offline builds with `shoal build --bundle`.

    Keep the printed digest separately: builds check with it that the bundle was not changed.

    Example: shoal bundle my-bundle pytorch
    """
    here, matrix = open_project()
    say = functools.partial(print_line, on=progress_console(as_json))
    chosen = matrix.choose(images or (), skip or ())
    locks = [functools.partial(_add_lock, image.tag, source, say=say) for source in lock_of or () for image in chosen]
    made = bundle.fill_bundle(here, matrix, chosen, directory, say, locks)
    if as_json:
        print_json(made)
    say(f"✓ {directory}: {made.bytes / 1024**2:,.0f} MiB, digest sha256:{made.digest}")
    names = shlex.join([*(images or ["--all"]), *(word for name in skip or () for word in ("--skip", name))])
    say(f"to use it: shoal build {names} --bundle {directory} --bundle-digest sha256:{made.digest}")
