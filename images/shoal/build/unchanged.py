"""What `shoal build` found up to date, remembered, so that the next one can say so before anything large is imported.

Remembered is that all of a command's images were up to date, with the state of every file that goes into an answer (as
git's index does: size, inode, time of the last change of status, which nothing can set back) and with the images that
the engine had. Where one differs, this knows nothing, and the builder finds out as it always does. Of the standard
library, only what loads in a few milliseconds: not pathlib, typing, hashlib, http.
docs/decisions/remembering-builds.md.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

_INPUTS = ("buildspec.yml", "dockerfiles", "library", "rehearsal", "toolkit")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_VARIABLES = ("DOCKER_BUILDKIT", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION")
_SOCKET = "/var/run/docker.sock"
_PATIENCE = 10
"""Seconds for the engine to answer."""
_SETTLED = 2 * 10**9
"""Nanoseconds: the coarsest clock of a file system (FAT's). Files that changed later than this may change unseen."""


class Question:
    """What a command asks: its words, and the state of all inputs, unless they have not `settled`."""

    def __init__(self, words: list[str], file: str, state: list[str], settled: bool) -> None:
        self.key = json.dumps(words)
        self.file = file
        self.state = state
        self.settled = settled


def question(arguments: list[str], start: str) -> Question | None:
    """Return what a command line asks; None where it is not `build` of nothing but names, or outside a checkout."""
    if arguments[:1] != ["build"] or any(word.startswith("-") for word in arguments):
        return None
    root = os.path.abspath(start)
    while not os.path.isfile(os.path.join(root, "buildspec.yml")):
        if root == (root := os.path.dirname(root)):
            return None
    started = time.time_ns()
    try:
        files = list(_files(root))
    except OSError:
        return None  # the builder has the words for what is missing
    state = [f"{path} {status.st_size} {status.st_ino} {status.st_ctime_ns}" for path, status in files]
    state += [sys.version, *(os.environ.get(name, "") for name in _VARIABLES)]
    settled = max(status.st_ctime_ns for _, status in files) < started - _SETTLED
    return Question(arguments, os.path.join(root, ".cache", "shoal", "unchanged.json"), state, settled)


def answer(asked: Question) -> list[str] | None:
    """Return the lines that `build` printed last time, if it would print them again; else None."""
    found = _known(asked).get(asked.key)
    try:
        if found and all(_held(tag) == held for tag, held in found["images"].items()):
            return [str(line) for line in found["lines"]]
    except (OSError, ValueError, KeyError):
        pass  # the builder has the words for an engine that does not answer
    return None


def remember(asked: Question, lines: Iterable[str], images: Mapping[str, str | None]) -> None:
    """Keep what `build` printed of images that are all up to date, with the IDs by tag that the builder has seen.

    A tag that the engine does not have (None) is kept as such: the answer ends when it comes. Nothing is kept where the
    engine has changed meanwhile, or where the file cannot be written.
    """
    if not asked.settled:
        return
    part = f"{asked.file}.{os.getpid()}"
    try:
        held = {tag: _held(tag) for tag in images}
        if any(held[tag][1] != image_id for tag, image_id in images.items()):
            return
        known = {**_known(asked), asked.key: {"lines": list(lines), "images": held}}
        os.makedirs(os.path.dirname(asked.file), exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"state": asked.state, "answers": known}, file)
        os.replace(part, asked.file)
    except (OSError, ValueError, KeyError):
        if os.path.exists(part):
            os.remove(part)


def _known(asked: Question) -> dict[str, Any]:
    """Return the answers that hold for this state of the inputs."""
    try:
        with open(asked.file, encoding="utf-8") as file:
            document = json.load(file)
        return dict(document["answers"]) if document["state"] == asked.state else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the inputs under the checkout, this package, and the directory of the packages that it stands on."""
    for name in _INPUTS:
        yield from _walk(os.path.join(root, name))
    if os.path.exists(ignored := os.path.join(root, ".gitignore")):  # it decides what is in a wheel
        yield from _walk(ignored)
    yield from _walk(_PACKAGE)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.path.join(sys.prefix, "lib", version, "site-packages")
    yield packages, os.stat(packages)


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files under a directory, or the one file."""
    if not os.path.isdir(path):
        yield path, os.stat(path)
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
