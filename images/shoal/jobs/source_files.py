"""The files of a job's source directory: which of them reach the hosts, and how they are read.

`shoal run`, with Docker and without, and `shoal deploy kubernetes` read the source here. Files beside a script may be
from somebody else. So each name is opened relative to its directory, without following a link. A file that is exchanged
for a link meanwhile is an error. A link that stays in the directory stays a link.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from shoal.clean_text import clean_text
from shoal.docker_client.archive import set_time
from shoal.errors import UsageError
from shoal.limits import Room

LARGE = 2**30
"""The size of a source, in bytes, from which a note asks whether it contains data."""
_MAX_DEPTH = 100
"""The number of nested directories. Each one is open while those in it are read."""
_MAX_LINKS = 40
"""How many links lead to one file at most, as in Linux."""
_CONTENT = 2**16
"""The number of bytes at the beginning of a file in which a rule's content is searched."""
_NAMED = 8
"""How many files a note names."""
_CHUNK = 2**20
_KEPT, _SECRET, _SKIPPED = "", "may hold a secret", "is not a file"
_RESULTS = "results or checkpoints of jobs"
_IGNORED = {"__pycache__": "bytecode", ".git": "the history of git"}
_MARKED = ((("pyvenv.cfg",), "a virtual environment"), (("request.json", "log.jsonl"), _RESULTS))
"""Directories that are left out, by files in them. Logs and hyperparameters of a job may have secrets."""
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class SecretRule(NamedTuple):
    """Files that are left out unless the user includes them."""

    pattern: str
    """As in `--include`: see `matches`."""
    content: str = ""
    """A regular expression for the beginning of the file; empty: the name is enough."""


_PRIVATE_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY"
SECRET_RULES = (
    *map(SecretRule, (".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd")),
    *map(SecretRule, (".npmrc", ".yarnrc.yml", ".pypirc", "pip.conf", ".git-credentials", ".dockercfg")),
    *map(SecretRule, ("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx")),
    *map(SecretRule, (".ssh/", ".aws/", ".azure/", ".gnupg/", ".kube/", ".config/gcloud/", ".config/gh/")),
    *map(SecretRule, (".docker/config.json", ".huggingface/", ".cache/huggingface/token", ".streamlit/secrets.toml")),
    *map(SecretRule, (".vault-token", ".databrickscfg", ".s3cfg", ".boto", "rclone.conf", ".*_history")),
    *map(SecretRule, ("kaggle.json", "credentials.json", "client_secret*.json", "kubeconfig", "*.kubeconfig")),
    *map(SecretRule, ("secrets.yml", "secrets.yaml", "secrets.json", "secrets.toml", "terraform.tfstate*")),
    SecretRule("*.pem", _PRIVATE_KEY),
    SecretRule("*.json", rf'"private_key"\s*:\s*"{_PRIVATE_KEY}'),
    SecretRule("*.tfvars"),
    # The record of a job has the values of --env. The second form is of an earlier version.
    SecretRule("request.json", r'\A\s*\{\s*"(?:request"\s*:\s*\{\s*"source|image"\s*:.*"engine)"\s*:'),
    SecretRule("*", r"\A# Job [^\n]*, written by `shoal deploy kubernetes`"),  # it has the secret of its job
)
"""What is left out. The script itself is not, and neither is `_PUBLIC`."""
_PUBLIC = ("*.pub", ".env.example", ".env.sample", ".env.template", ".env.dist")
_BY_NAME = tuple(rule.pattern for rule in SECRET_RULES if not rule.content)
_BY_CONTENT = tuple(rule for rule in SECRET_RULES if rule.content)


@dataclass(frozen=True)
class Selection:
    """A source directory, and the user's options about it."""

    directory: Path
    entry_point: str | None = None
    """The script, relative to the directory. No rule for secrets applies to it."""
    follow_links: bool = False
    """Whether links that leave the directory are replaced by a copy of their target."""
    include: tuple[str, ...] = ()
    """Patterns of files that would be left out: see `matches`."""
    elsewhere: tuple[Path, ...] = ()
    """Directories that are left out: results and checkpoints of jobs."""

    @property
    def script(self) -> str:
        """The normal form of the script's path; empty for a module."""
        is_module = self.entry_point is None or self.entry_point.startswith("-m ")
        return "" if is_module else os.path.normpath(self.entry_point or "")

    def fail(self, name: str, problem: str) -> UsageError:
        """Returns an error about a file in the directory."""
        return UsageError(_clean(f"--source {self.directory}: {name}: {problem}"))


@dataclass(frozen=True)
class SourceFile:
    """A file, link or directory in the source."""

    name: str
    """Its path, relative to the source."""
    mode: int
    """As in `os.stat`: kind and permissions."""
    size: int = 0
    seconds: float = 0.0
    """When it was changed, in seconds since 1970."""
    link: str = ""
    """The target of a link, which stays a link."""
    leads_to: str = ""
    """The path to which it leads in the end, relative to the source; empty for a link to nothing or itself."""
    left_out: str = ""
    """Why it is left out; empty: it is packed. Then the files in a directory are not listed."""
    detail: str = ""
    """The kind of a special file."""
    descriptor: int = field(default=-1, compare=False)
    """The open file, until the next one is read."""

    @property
    def is_packed(self) -> bool:
        """Whether it is a file or a link that reaches the hosts."""
        return not self.left_out and not stat.S_ISDIR(self.mode)


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern is about a file, without regard to upper and lower case.

    Args:
        pattern: With `*` and `?`. Without a slash it is about the file's name, otherwise about its path or the end of
            it. With a slash at its end it is about all files in such a directory.
        name: The file's path, relative to the source.
    """
    return bool(_compile_pattern(pattern).match(f"/{name.lower()}"))


@functools.cache
def _compile_pattern(*patterns: str) -> re.Pattern[str]:
    """Returns the expression for patterns, for a path in lower case after a slash."""
    expressions = []
    for pattern in patterns:
        plain = pattern.lower().removeprefix("./")
        star = ".*" if "/" in plain else "[^/]*"
        expression = "".join({"*": star, "?": "[^/]"}.get(letter, re.escape(letter)) for letter in plain)
        expressions.append(expression + (".*" if plain.endswith("/") else ""))
    return re.compile(rf"(?:.*/)(?:{'|'.join(expressions)})\Z", re.DOTALL)


def read_source(selection: Selection) -> Iterator[SourceFile]:
    """Yields each file, link and directory of a source, also what is left out. A file is open until the next one.

    Raises:
        UsageError: If a link leaves the source, something cannot be read or was exchanged meanwhile, or the script is
            left out.
    """
    check_directory(selection)
    try:
        with _open(selection.directory, None, selection.follow_links) as top:
            yield from _read_directory(selection, _Directory(top, "", "", (_identify(os.fstat(top)),)))
    except OSError as error:
        raise _convert_error(selection, str(error.filename or "."), error) from error


def check_directory(selection: Selection) -> None:
    """Raises `UsageError` if the source itself is a link, unless links are followed."""
    directory = selection.directory
    if directory.is_symlink() and not selection.follow_links:
        real = os.path.realpath(directory)
        raise UsageError(
            _clean(
                f"--source {directory}: a link to {real}. Fix: name {real} itself if that is the code, or add"
                " --follow-links"
            )
        )


class _Directory(NamedTuple):
    descriptor: int
    prefix: str
    """Its path with a slash at the end, relative to the source; empty for the source."""
    real: str
    """The same for a directory to which a followed link has led, relative to the root; empty for others."""
    above: tuple[tuple[int, int], ...]
    """The identities of it and of the directories above it."""


def _read_directory(selection: Selection, directory: _Directory) -> Iterator[SourceFile]:
    if len(directory.above) > _MAX_DEPTH:
        raise selection.fail(directory.prefix, f"more than {_MAX_DEPTH} directories deep. Fix: move it elsewhere")
    for base in sorted(os.listdir(directory.descriptor)):  # noqa: PTH208 -- a Path has no descriptor
        try:
            yield from _read_entry(selection, directory, base)
        except OSError as error:
            raise _convert_error(selection, directory.prefix + base, error) from error


def _read_entry(selection: Selection, directory: _Directory, base: str) -> Iterator[SourceFile]:
    """Yields a file, a link, or a directory and all that is in it."""
    name, real = directory.prefix + base, directory.real and directory.real + base
    status = os.stat(base, dir_fd=directory.descriptor, follow_symlinks=False)
    is_link = stat.S_ISLNK(status.st_mode)
    if is_link:
        target = os.readlink(base, dir_fd=directory.descriptor)
        # In a directory to which a link has led, a relative target is relative to another place.
        end = None if directory.real else _resolve(selection.directory, name, target)
        if end is not None:
            reason = _find_secret_rule(selection, [name], b"")
            link = _simplify_link(name, target, end)
            yield SourceFile(name, status.st_mode, link=link, leads_to=end, left_out=reason)
            return
        if reason := _find_ignored_link(selection, name):
            yield SourceFile(name, status.st_mode, link=target, left_out=reason)
            return
        if not selection.follow_links:
            raise selection.fail(
                name,
                f"a link to {target}, outside the source. Fix: remove it, copy the files that the job needs in its"
                " place, or add --follow-links",
            )
        status = os.stat(base, dir_fd=directory.descriptor)
        real = os.path.realpath(selection.directory / name).lstrip("/")
    names = [name, real] if real else [name]
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # a device may act when it is opened
        detail = _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
        yield SourceFile(name, status.st_mode, left_out=_SKIPPED, detail=detail)
        return
    with _open(base, directory.descriptor, is_link) as descriptor:
        yield from _read_opened(selection, directory, names, descriptor)


def _read_opened(
    selection: Selection, parent: _Directory, names: Sequence[str], descriptor: int
) -> Iterator[SourceFile]:
    """Yields a file, or a directory and all in it. `names`: its path, and after a followed link its real one."""
    status = os.fstat(descriptor)
    found = SourceFile(names[0], status.st_mode, status.st_size, status.st_mtime, descriptor=descriptor)
    if stat.S_ISREG(status.st_mode):
        beginning = os.pread(descriptor, _CONTENT, 0)
        yield replace(found, left_out=_find_secret_rule(selection, names, beginning))
        return
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "it was exchanged meanwhile")
    reason = _find_directory_rule(selection, descriptor, names, status, parent)
    yield replace(found, size=0, left_out=reason)
    if not reason:
        real = f"{names[1]}/" if len(names) > 1 else ""
        inside = _Directory(descriptor, f"{names[0]}/", real, (*parent.above, _identify(status)))
        yield from _read_directory(selection, inside)


def _find_directory_rule(
    selection: Selection, descriptor: int, names: Sequence[str], status: os.stat_result, parent: _Directory
) -> str:
    """Returns why a directory is left out; empty if it is not. A host has its own packages."""
    if _identify(status) in parent.above:
        return "a link to a directory around it"
    if any(_is_directory(place, status) for place in selection.elsewhere):
        return _RESULTS
    if any(matches(pattern, name) for pattern in selection.include for name in names):
        return _KEPT
    for name in names:
        if reason := _IGNORED.get(name.rpartition("/")[2]):
            return reason
    for marks, reason in _MARKED:
        with contextlib.suppress(FileNotFoundError):
            for mark in marks:
                os.stat(mark, dir_fd=descriptor, follow_symlinks=False)
            return reason
    return _KEPT


def _find_ignored_link(selection: Selection, name: str) -> str:
    """Returns why a link that leaves the source is left out; empty if it is not. Nothing is opened through it."""
    if any(matches(pattern, name) for pattern in selection.include):
        return _KEPT
    (mark,), reason = _MARKED[0]
    is_environment = (selection.directory / name / mark).exists()
    return _IGNORED.get(name.rpartition("/")[2], reason if is_environment else _KEPT)


def _find_secret_rule(selection: Selection, names: Sequence[str], beginning: bytes) -> str:
    """Returns why a file is left out; empty if it is not. `names`: its path, and its real one behind a link."""
    asked = any(matches(pattern, name) for pattern in selection.include for name in names)
    if asked or names[0] == selection.script or _compile_pattern(*_PUBLIC).match(f"/{names[-1].lower()}"):
        return _KEPT
    if any(_compile_pattern(*_BY_NAME).match(f"/{name.lower()}") for name in names):
        return _SECRET
    text = beginning.decode("latin-1")
    rules = (rule for rule in _BY_CONTENT if any(matches(rule.pattern, name) for name in names))
    return _SECRET if any(re.search(rule.content, text, re.DOTALL) for rule in rules) else _KEPT


def _resolve(source: Path, name: str, target: str) -> str | None:
    """Returns None for a link that leads out of the source, or only in between; empty for a loop. Opens no file."""
    place = name.split("/")[:-1]
    steps = [target]
    for _ in range(2 * _MAX_LINKS):  # each link leaves the rest of a path for later
        path = steps.pop()
        if path.startswith("/"):
            return None
        parts = [part for part in path.split("/") if part not in ("", ".")]
        for index, part in enumerate(parts):
            if part == ".." and not place:
                return None
            if part == "..":
                place.pop()
            else:
                place.append(part)
                with contextlib.suppress(OSError):  # no link, or nothing
                    steps += ["/".join(parts[index + 1 :]), str(source.joinpath(*place).readlink())]
                    place.pop()
                    break
        if not steps:
            return "/".join(place)
    return ""


def _simplify_link(name: str, target: str, end: str) -> str:
    """Returns a target without `..` after other names, which `train` does not accept in an archive."""
    climbs_later = ".." in re.sub(r"\A(\.\./+)+", "", target).split("/")
    return os.path.relpath(end, Path(name).parent) if end and climbs_later else target


@contextlib.contextmanager
def _open(name: str | Path, directory: int | None, follow: bool) -> Iterator[int]:
    """Opens a file or directory for reading, and closes it at the end. Without `follow` a link raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_directory(place: Path, status: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(place.stat(), status)
    return False


def _convert_error(selection: Selection, name: str, error: OSError) -> UsageError:
    fix = {
        PermissionError: f"Fix: make it readable for you (chmod u+r {shlex.quote(name)}), or move it out of the source",
        FileNotFoundError: "Fix: remove it if it is a link to nothing. If files change all the time, copy the code",
    }.get(type(error), "Fix: move it out of the source. If files change all the time, copy the code")
    return selection.fail(name, f"cannot be read: {error.strerror or error}. {fix}")


def list_source(selection: Selection) -> list[SourceFile]:
    """Returns the files, links and directories of `read_source`, closed.

    Raises:
        UsageError: As `read_source`, and if the script is in a directory that is left out.
    """
    files = [replace(each, descriptor=-1) for each in read_source(selection)]
    if lost := _find_around((each for each in files if each.left_out), selection.script):
        raise UsageError(
            _clean(
                f"--entry-point {selection.entry_point}: {lost.name} is left out ({lost.left_out}). Fix: move the"
                f" script out of it, or --include {shlex.quote(lost.name)}"
            )
        )
    return files


def copy_source(selection: Selection, target: Path) -> None:
    """Copies a source into a new directory, which only this user can read. Files keep their permissions and times.

    Raises:
        DiskError: If a file has grown meanwhile, and does not fit any more, or there are millions of files.
        UsageError: If it cannot be read, or does not fit on the disk.
    """
    size = sum(each.size for each in list_source(selection) if each.is_packed)
    if size > (free := shutil.disk_usage(target.parent).free):
        raise UsageError(
            f"--source {selection.directory}: {_format_size(size)} do not fit on the disk of {target.parent}, which has"
            f" {_format_size(free)}. Fix: move data out of the source, and use --channel NAME=DIR"
        )
    target.mkdir(mode=0o700)
    room = Room(target)  # files may have grown since
    for each in read_source(selection):
        place = target / each.name
        if each.left_out:
            continue
        room.take(each.name, each.size)
        if each.link:
            place.symlink_to(each.link)
        elif stat.S_ISDIR(each.mode):
            place.mkdir()
        else:
            copy_file(each, place)


def copy_file(source: SourceFile, place: Path) -> None:
    """Copies an open file, as long as it was when it was opened. Bits such as setuid are dropped."""
    rest = source.size
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        while rest and (chunk := os.read(source.descriptor, min(rest, _CHUNK))):
            out.write(chunk)
            rest -= len(chunk)
        os.fchmod(out.fileno(), stat.S_IMODE(source.mode) & 0o777)
    set_time(place, source.seconds)


def describe_source(selection: Selection, files: Sequence[SourceFile]) -> list[str]:
    """Returns notes for the user: files that the hosts may miss, and whether the source has data."""
    notes = []
    if secrets := [each.name for each in files if each.left_out == _SECRET]:
        notes.append(
            f"left out of the job, as they may hold secrets: {_join_names(secrets)}. To include one:"
            f" --include {shlex.quote(secrets[0])}"
        )
    if skipped := [f"{each.name} ({each.detail})" for each in files if each.left_out == _SKIPPED]:
        notes.append(f"left out of the job, as they are not files: {_join_names(skipped)}")
    packed = [each for each in files if each.is_packed]
    if (size := sum(each.size for each in packed)) > LARGE:
        notes.append(
            f"--source {selection.directory}: {_format_size(size)} in {len(packed)} files are copied to each host."
            " --channel NAME=DIR mounts data instead"
        )
    left_out = [each for each in files if each.left_out]
    if lost := [each for each in packed if each.leads_to and _find_around(left_out, each.leads_to)]:
        notes.append(
            "links to files that are left out of the job:"
            f" {_join_names([f'{each.name} -> {each.link}' for each in lost])}. Fix: copy the files in their place"
        )
    for pattern in selection.include:
        if not any(matches(pattern, each.name) for each in files):
            notes.append(f"--include {pattern}: no such file in {selection.directory}")
    return [_clean(note) for note in notes]


def _find_around(files: Iterable[SourceFile], name: str) -> SourceFile | None:
    return next((each for each in files if f"{name}/".startswith(f"{each.name}/")), None)


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more (--list-files)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def list_rows(files: Iterable[SourceFile]) -> list[tuple[str, str, str]]:
    """Returns a row for each file, link and left out directory: path, size in bytes, and target or reason."""
    rows = []
    for each in files:
        if each.left_out or each.is_packed:
            size = str(each.size) if stat.S_ISREG(each.mode) else ""
            reason = f"left out: {each.detail or each.left_out}" if each.left_out else each.link and f"-> {each.link}"
            rows.append((_clean(each.name), size, _clean(reason)))
    return rows


def _clean(text: str) -> str:
    """Returns a clean text with the name of a file, on one line: the name may have line ends."""
    return clean_text(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def _format_size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
