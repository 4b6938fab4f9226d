"""Remembers `shoal build` commands that had nothing to do, to answer the next one before anything large is imported.

An answer is kept with the IDs of Docker's images, and with the state of every file that it depends on. The state is
size, inode, and time of the last status change, as in git's index. Nothing can set that time back. If one differs,
there is no answer, and the builder decides. Imports from the standard library load in a few milliseconds: not
pathlib, typing, hashlib or http. See docs/decisions/remembering-builds.md.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from shoal import trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

_INPUTS = ("buildspec.yml", "dockerfiles", "library", "rehearsal", "toolkit")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = os.path.join(_PACKAGE, "definitions")
_VARIABLES = ("DOCKER_BUILDKIT", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION")
_SOCKET = "/var/run/docker.sock"
_PATIENCE = 10
"""Seconds for Docker to answer."""
_MOST_DEPTH = 100  # as in shoal.limits, which takes longer to import
_MOST_CHARACTERS = 16 * 1024**2
"""Characters of the saved answers that are read. They have kilobytes."""
_SETTLED = 2 * 10**9
"""Nanoseconds: the coarsest clock of a file system (FAT's). A younger file may change again unnoticed."""


class BuildCommand:
    """A command line, and the state of all inputs. They are `settled` if none changed in the last seconds."""

    def __init__(self, words: list[str], file: str, state: list[str], settled: bool) -> None:
        self.key = json.dumps(words)
        self.file = file
        self.state = state
        self.settled = settled


def read_command(arguments: list[str], start: str) -> BuildCommand | None:
    """Return the command with the state of all its inputs; None unless it is `build` with names or `--all` alone.

    It is None outside a project.

    It also is None if an input is missing: the builder then reports it.
    """
    if arguments[:1] != ["build"] or any(word.startswith("-") and word != "--all" for word in arguments):
        return None
    root = os.path.abspath(start)
    while not os.path.isfile(os.path.join(root, "buildspec.yml")):
        if root == (root := os.path.dirname(root)):
            return None
    started = time.time_ns()
    try:
        files = list(_files(root))
    except OSError:
        return None  # the builder reports what is missing
    state = [f"{path} {status.st_size} {status.st_ino} {status.st_ctime_ns}" for path, status in files]
    state += [sys.version, *(os.environ.get(name, "") for name in _VARIABLES)]
    settled = max(status.st_ctime_ns for _, status in files) < started - _SETTLED
    return BuildCommand(arguments, os.path.join(root, ".cache", "shoal", "unchanged.json"), state, settled)


def find_answer(command: BuildCommand) -> list[str] | None:
    """Return the lines that the command printed last time, if it would print the same now; else None.

    Reads the saved answers, and asks Docker for the IDs of the images. No error is raised.
    """
    found = _load_answers(command).get(command.key)
    try:
        if found and all(_ask_docker(tag) == held for tag, held in found["images"].items()):
            return [str(line) for line in found["lines"]]
    except (OSError, ValueError, KeyError):
        pass  # the builder reports a Docker that does not answer
    return None


def save_answer(command: BuildCommand, lines: Iterable[str], images: Mapping[str, str | None]) -> None:
    """Save the lines that a build printed when all images were up to date.

    Nothing is saved if an input changed in the last seconds, Docker does not answer on a local socket, or the file
    cannot be written. Answers for another state of the inputs are dropped.

    Args:
        lines: The printed lines.
        images: The IDs by tag that the builder saw; None: Docker has no such image. If one differs now, nothing is
            saved. If one differs later, the answer is no longer valid.
    """
    if not command.settled:
        return
    part = f"{command.file}.{os.getpid()}"
    try:
        held = {tag: _ask_docker(tag) for tag in images}
        if any(held[tag][1] != image_id for tag, image_id in images.items()):
            return
        answers = {**_load_answers(command), command.key: {"lines": list(lines), "images": held}}
        os.makedirs(os.path.dirname(command.file), exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"state": command.state, "answers": answers}, file)
        os.replace(part, command.file)
    except (OSError, ValueError, KeyError):
        if os.path.exists(part):
            os.remove(part)


def _load_answers(command: BuildCommand) -> dict[str, Any]:
    """Return the answers for this state of the inputs.

    There are none if the file is missing, damaged, about another state, or if others can write to it.
    """
    try:
        if trust.find_stranger(command.file):
            return {}
        # A project that was copied from elsewhere may have a pipe, a link, an endless or a nested file there.
        with os.fdopen(trust.open_own(command.file, os.O_RDONLY), encoding="utf-8") as file:
            document = json.loads(file.read(_MOST_CHARACTERS))
        return dict(document["answers"]) if document["state"] == command.state else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the inputs in the project, the files of this package, and the directory of the installed packages.

    An input that the project lacks is in this package, if that is from a wheel. Raises OSError if one is missing.
    """
    for name in _INPUTS:
        own = os.path.join(root, name)
        yield from _walk(own if os.path.exists(own) else os.path.join(_INSTALLED, name))
    if os.path.exists(ignored := os.path.join(root, ".gitignore")):  # it decides what is in a wheel
        yield from _walk(ignored)
    yield from _walk(_PACKAGE)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.path.join(sys.prefix, "lib", version, "site-packages")
    yield packages, os.stat(packages)


def _walk(path: str, depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files under a directory without `__pycache__`, or the one file.

    Raises OSError if it is missing, deeply nested, or a link to a directory, which may be any: the builder decides
    about it.
    """
    if not os.path.isdir(path):
        yield path, os.stat(path)
        return
    if depth > _MOST_DEPTH:
        raise OSError(f"{path[:200]}…: in too many directories")
    if os.path.islink(path):
        raise OSError(f"{path}: a link to a directory")
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name != "__pycache__":
            yield from _walk(entry.path, depth + 1) if entry.is_dir() else [(entry.path, entry.stat())]


def _ask_docker(tag: str) -> list[str | None]:
    """Return Docker's name of itself, and its ID of the tag or None. Raises OSError, ValueError.

    It asks a local socket without Docker's SDK, because importing that is slow. Another DOCKER_HOST is a ValueError.
    """
    where = os.environ.get("DOCKER_HOST") or f"unix://{_SOCKET}"
    if not where.startswith("unix://"):
        raise ValueError("only the SDK connects over a network or SSH")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(where.removeprefix("unix://"))
        connection.sendall(f"GET /images/{tag}/json HTTP/1.0\r\n\r\n".encode())
        with connection.makefile("rb") as stream:
            head, _, body = stream.read().partition(b"\r\n\r\n")
    status, *headers = head.decode("latin-1").split("\r\n")
    server = next((header for header in headers if header.startswith("Server:")), "")
    if status.split()[1:2] == ["404"]:
        return [server, None]
    return [server, str(json.loads(body)["Id"])]
