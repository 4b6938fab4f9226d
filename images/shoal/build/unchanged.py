"""What `shoal build` found up to date, remembered, so that the next one can say so before anything large is imported.

Remembered is that all of a command's images were up to date, with the state of every file that goes into an answer (as
git's index does: size, inode, time of the last change of status, which nothing can set back) and with the images that
the engine had. Where one differs, this knows nothing, and the builder finds out as it always does. The standard library
only, and of that what loads in milliseconds: the builder's own imports take longer than Docker's client needs in all.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_INPUTS = ("buildspec.yml", "dockerfiles", "library", "toolkit")
_VARIABLES = ("DOCKER_BUILDKIT", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION")
_SOCKET = "/var/run/docker.sock"
_PATIENCE = 10
"""Seconds for the engine to answer."""
_SETTLED = 2 * 10**9
"""Nanoseconds: the coarsest clock of a file system (FAT's). Files that changed later than this may change unseen."""


class Question(NamedTuple):
    """The words of a command, the file of what is remembered, the state of all inputs, and whether that has settled."""

    words: tuple[str, ...]
    file: Path
    state: str
    settled: bool


def question(arguments: list[str], start: Path) -> Question | None:
    """Return what a command line asks; None where it is not `build` of nothing but names, or outside a checkout."""
    if arguments[:1] != ["build"] or any(word.startswith("-") for word in arguments):
        return None
    root = next((directory for directory in (start, *start.parents) if (directory / "buildspec.yml").is_file()), None)
    if root is None:
        return None
    started = time.time_ns()
    state = hashlib.sha256()
    newest = 0
    try:
        for path, status in _files(root):
            newest = max(newest, status.st_ctime_ns)
            state.update(f"{path}\0{status.st_size}\0{status.st_ino}\0{status.st_ctime_ns}\n".encode())
    except OSError:
        return None  # the builder has the words for what is missing
    state.update("\0".join([sys.version, *(os.environ.get(name, "") for name in _VARIABLES)]).encode())
    file = root / ".cache" / "shoal" / "unchanged.json"
    return Question(tuple(arguments), file, state.hexdigest(), newest < started - _SETTLED)


def answer(asked: Question) -> list[str] | None:
    """Return the lines that `build` printed last time, if it would print them again; else None."""
    found = _known(asked).get(json.dumps(asked.words))
    try:
        if found and all(_held(tag) == held for tag, held in found["images"].items()):
            return [str(line) for line in found["lines"]]
    except (OSError, ValueError, KeyError):
        pass  # the builder has the words for an engine that does not answer
    return None


def remember(asked: Question, lines: Iterable[str], tags: Iterable[str]) -> None:
    """Keep what `build` printed of images that are all up to date, and the engine's IDs of all tags behind it.

    A tag that the engine does not have is kept as such: the answer ends when it comes.
    """
    if not asked.settled:
        return
    try:
        held = {tag: _held(tag) for tag in tags}
    except (OSError, ValueError, KeyError):
        return
    known = _known(asked)
    known[json.dumps(asked.words)] = {"lines": list(lines), "images": held}
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    part = asked.file.with_name(f"{asked.file.name}.{os.getpid()}")
    part.write_text(json.dumps({"state": asked.state, "answers": known}))
    part.replace(asked.file)


def _known(asked: Question) -> dict[str, Any]:
    """Return the answers that hold for this state of the inputs."""
    try:
        document = json.loads(asked.file.read_bytes())
        return dict(document["answers"]) if document["state"] == asked.state else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the inputs under the checkout, this package, and the directory of the packages that it stands on."""
    for name in _INPUTS:
        yield from _walk(root / name)
    yield from _walk(Path(__file__).parents[1])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(sys.prefix, "lib", version, "site-packages")
    yield str(packages), packages.stat()


def _walk(path: Path | str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files under a directory, or the one file; `scandir`, because `Path` takes three times as long."""
    if isinstance(path, Path) and path.is_file():
        yield str(path), path.stat()
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name != "__pycache__":
            yield from _walk(entry.path) if entry.is_dir() else [(entry.path, entry.stat())]


def _held(tag: str) -> list[str | None]:
    """Return what the engine calls itself and its ID of that tag, None if it has none. Raises OSError, ValueError."""
    where = os.environ.get("DOCKER_HOST") or f"unix://{_SOCKET}"
    if not where.startswith("unix://"):
        raise ValueError("over a network or SSH, only the SDK knows the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(where.removeprefix("unix://"))
        connection.sendall(f"GET /images/{tag}/json HTTP/1.0\r\n\r\n".encode())
        with connection.makefile("rb") as stream:
            head, _, body = stream.read().partition(b"\r\n\r\n")
    status, *headers = head.decode("latin-1").split("\r\n")
    engine = next((header for header in headers if header.startswith("Server:")), "")
    if status.split()[1:2] == ["404"]:
        return [engine, None]
    return [engine, str(json.loads(body)["Id"])]
