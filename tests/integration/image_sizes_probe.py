"""Prints, as JSON, how many bytes belong to wheels, and which to no package. Runs in containers."""

import csv
import functools
import importlib.metadata
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DEPTH = 3  # how many directories of a path are reported


def main() -> None:
    wheels = set(list_recorded())
    debian = {
        resolve(line) for path in Path("/var/lib/dpkg/info").glob("*.list") for line in path.read_text().splitlines()
    }
    sizes = dict(list_files("/", os.lstat("/").st_dev))
    unowned: Counter[str] = Counter()
    for path in sizes.keys() - wheels - debian:
        unowned["/".join(path.split("/")[: DEPTH + 1])] += sizes[path]
    facts = {
        "wheels": sum(sizes[path] for path in wheels & sizes.keys()),
        "visible": sum(sizes.values()),
        "unowned": dict(unowned.most_common(20)),
    }
    print(json.dumps(facts))


def list_recorded() -> Iterator[str]:
    """Yield the paths of all files of wheels. As pip wrote them down: `Distribution.files` takes a second more."""
    for found in importlib.metadata.distributions():
        directory = str(found.locate_file(""))
        for row in csv.reader((found.read_text("RECORD") or "").splitlines()):
            yield os.path.normpath(os.path.join(directory, row[0]))  # noqa: PTH118


def resolve(path: str) -> str:
    """Return the path without links in its directory: dpkg lists files in /lib, which is a link to /usr/lib."""
    return resolve_directory(os.path.dirname(path)).rstrip("/") + "/" + os.path.basename(path)  # noqa: PTH119, PTH120


@functools.cache
def resolve_directory(path: str) -> str:
    return os.path.realpath(path)


def list_files(path: str, device: int) -> Iterator[tuple[str, int]]:
    """Yield the image's files and their sizes, less closed directories and what Docker mounts (on other devices)."""
    try:
        entries = list(os.scandir(path))
    except PermissionError:
        return
    for entry in entries:
        found = entry.stat(follow_symlinks=False)
        if found.st_dev == device and entry.is_dir(follow_symlinks=False):
            yield from list_files(entry.path, device)
        elif found.st_dev == device:
            yield entry.path, found.st_size


if __name__ == "__main__":
    main()
