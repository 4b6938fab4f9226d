"""Prints, as JSON, how many bytes belong to wheels, and which to no package. Runs in containers."""

import functools
import importlib.metadata
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DEPTH = 3  # how many directories of a path are reported


def main() -> None:
    wheels = {
        os.path.normpath(file.locate()) for found in importlib.metadata.distributions() for file in found.files or ()
    }
    debian = {
        resolve(line) for path in Path("/var/lib/dpkg/info").glob("*.list") for line in path.read_text().splitlines()
    }
    sizes = dict(list_files("/", os.lstat("/").st_dev))
    unowned: Counter[str] = Counter()
    for path in sizes.keys() - wheels - debian:
        unowned["/".join(path.split("/")[: DEPTH + 1])] += sizes[path]
    facts = {
        "wheels": sum(Path(path).stat().st_size for path in wheels if Path(path).is_file()),
        "visible": sum(sizes.values()),
        "unowned": dict(unowned.most_common(20)),
    }
    print(json.dumps(facts))


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
