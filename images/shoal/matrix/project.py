"""A project: image definitions in a directory. How it is found, the paths in it, and the pip layers that have locks.

It is a checkout, a directory that `shoal init` has written, or the definitions that are installed with this package.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal import trust
from shoal.errors import SpecError, UsageError
from shoal.limits import MOST_DEPTH
from shoal.matrix.spec import ImageSpec

LAYERS = ("cuda", "framework", "mpi", "aws", "everyday")
"""The pip layers of an image, the one that changes least first. Each has a lock file. Lean images lack the last."""
CHILD_LAYERS = ("framework",)
"""The pip layers of an image that extends another: it installs only what the other does not have."""


_PARTS = ("buildspec.yml", "dockerfiles", "checkpoint", "library", "rehearsal", "toolkit", ".gitignore", ".cache/shoal")
"""The files and directories of a project that commands read, write or remove."""
_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = _PACKAGE / "definitions"
"""The image definitions in a wheel of this package. A checkout does not have this directory."""
_OWN_ROOTS = (INSTALLED, _PACKAGE.parents[1])
"""The projects that this package is installed from, so that their code runs already."""


@dataclass(frozen=True)
class Project:
    """A project, by its root directory."""

    root: Path

    @property
    def buildspec(self) -> Path:
        return self.root / "buildspec.yml"

    @property
    def templates(self) -> Path:
        """The directory of the templates, and of the locks, schemas and rendered Dockerfiles."""
        return self.root / "dockerfiles"

    @property
    def cache(self) -> Path:
        """The directory of caches and logs: in the checkout of this package or a project that is trusted by name.

        Other projects use the user's. One that was copied from elsewhere may bring a cache with a base image, which
        all projects would use then. The user's is made if it is missing, before another user makes it.

        Raises `SpecError` if others can change the user's.
        """
        if self.root == INSTALLED or not self.may_run_code():
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one would be in the project
            return _check_cache((base if base.is_absolute() else Path.home() / ".cache") / "shoal")
        return self.root / ".cache" / "shoal"

    def part(self, name: str) -> Path:
        """Returns a package such as `toolkit`: the project's own, or else the one that `shoal` comes with.

        Raises `SpecError` if it is the project's own and may not run code here: to build a package runs its backend.
        """
        own = self.root / name
        if not own.exists():
            return find_shipped().root / name
        if not self.may_run_code():
            raise SpecError(
                f"{own}: to build this package runs code of its pyproject.toml on this machine. Fix: remove it, so that"
                f" images get the one that comes with shoal, or if you trust it: {trust.advise_trust(self.root)}"
            )
        return own

    def may_run_code(self) -> bool:
        """Returns whether code of the project may run on this machine: it is this checkout, or trusted by name.

        A project that was copied from elsewhere may have files of others, though they belong to this user.
        """
        return self.root.resolve() in _OWN_ROOTS or trust.is_inside(self.root, trust.read_trusted())

    def schema(self, name: str) -> Path:
        return self.templates / "schema" / f"{name}.json"

    def lock_directory(self, spec: ImageSpec) -> Path:
        """Returns the directory of an image's locks. Its variants share them."""
        return self.templates / "requirements" / f"{spec.repository}-{spec.runtime_version_tag}"

    def rendered(self, spec: ImageSpec) -> Path:
        """Returns the path of an image's generated Dockerfile."""
        return self.templates / "rendered" / spec.repository / spec.version_tag / "Dockerfile"


def find(start: Path) -> Project:
    """Returns the project that contains `start`, or else the definitions that this package comes with.

    Raises `UsageError` if there is neither, and `SpecError` if others can change the project's files.
    """
    return _find_above(start) or find_shipped()


def find_editable(start: Path) -> Project:
    """Returns the project that contains `start`, for a command that writes to it.

    Raises `UsageError` without one, and `SpecError` if others can change its files.
    """
    if found := _find_above(start):
        return found
    raise UsageError(
        f"No buildspec.yml in {start} or above it, and this command changes files of a project."
        " Fix: shoal init DIRECTORY, and run the command there"
    )


def find_shipped() -> Project:
    """Returns the definitions in this package's wheel or, if it is installed from a checkout, that checkout.

    Raises `UsageError` if there is neither.
    """
    for root in _OWN_ROOTS:
        if (root / "buildspec.yml").is_file():
            return Project(root)
    raise UsageError(
        "This installation of shoal has no image definitions. Fix: install a wheel that `make wheels` built"
    )


def _find_above(start: Path) -> Project | None:
    """Raises `SpecError` if others can change the files of the project, or one of its links leaves it."""
    for directory in (start, *start.parents):
        if (directory / "buildspec.yml").is_file():
            if directory.resolve() not in _OWN_ROOTS:
                _check_trust(directory)
            return Project(directory)
    return None


def _check_trust(root: Path) -> None:
    """Raises `SpecError` if others can change the files of a project, or one of its links leaves it."""
    if words := trust.find_stranger(root):
        raise _refuse(root, words, root)
    named = trust.read_trusted()
    inside = named | {str(root.resolve())}
    is_named = trust.is_inside(root, named)
    for name in (".cache", *_PARTS):
        for path, status in _walk(str(root / name), deep=name != ".cache"):
            if stat.S_ISLNK(status.st_mode) and not trust.is_inside(path, inside):
                raise _refuse(root, f"the link {path} leaves the project", Path(path).resolve())
            if not is_named and (words := trust.describe_stranger(path, status)):
                raise _refuse(root, words, root)


def _check_cache(path: Path) -> Path:
    """Makes the user's cache if possible, and returns it. Raises `SpecError` if others can change what is in it."""
    with contextlib.suppress(OSError):  # builds work without a cache
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and not trust.is_inside(path, trust.read_trusted()):
        found = (trust.describe_stranger(place, status) for place, status in _walk(str(path), deep=True))
        if words := trust.find_stranger(path) or next(filter(None, found), None):
            raise SpecError(
                f"{path}: the cache of builds has packages and base images, but {words}. Fix: set XDG_CACHE_HOME to"
                f" another directory, or if you trust all that is in it: {trust.advise_trust(path)}"
            )
    return path


def _refuse(root: Path, words: str, directory: Path) -> SpecError:
    return SpecError(
        f"{root}: this directory has a buildspec.yml, which decides what commands run here, but {words}. Fix: work in"
        f" another directory, or if you trust all that is in it: {trust.advise_trust(directory)}"
    )


def _walk(path: str, *, deep: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yields a file, if it exists, and if `deep`, all below it. No link is followed. Raises `SpecError` if too deep."""
    pending = [(path, 0)]
    while pending:
        path, depth = pending.pop()
        with contextlib.suppress(FileNotFoundError):  # another command may remove files of the cache meanwhile
            status = os.lstat(path)
            yield path, status
            if depth > MOST_DEPTH:
                raise SpecError(f"{path[:200]}…: in more than {MOST_DEPTH} directories. Fix: remove them")
            if deep and stat.S_ISDIR(status.st_mode):
                pending += [(entry.path, depth + 1) for entry in os.scandir(path)]


@dataclass(frozen=True)
class Removed:
    """A file that was removed."""

    path: Path
    bytes: int


def prune_cache(cache: Path, bases: Collection[Path]) -> list[Removed]:
    """Removes logs of builds, installed copies of our packages, and archives of base images.

    Args:
        cache: The directory of caches. Other files in it stay.
        bases: The archives of base images to keep.

    Returns:
        The files that were removed. Another command may have removed some of the others meanwhile.
    """
    paths = [path for glob in ("logs/*.log", "installed/*.tar", "base-*.tar") for path in sorted(cache.glob(glob))]
    removed = []
    for path in paths:
        if path not in bases:
            with contextlib.suppress(FileNotFoundError):
                removed.append(Removed(path, path.stat().st_size))
                path.unlink()
    return removed
