"""Says, as JSON, whose the bytes are where it runs. The text of this file is what a container's Python is given."""

import functools
import importlib.metadata
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DEPTH = 3  # directories of a path that are told


def main() -> None:
    wheels = {
        os.path.normpath(file.locate()) for found in importlib.metadata.distributions() for file in found.files or ()
    }
    debian = {
        real(line) for path in Path("/var/lib/dpkg/info").glob("*.list") for line in path.read_text().splitlines()
    }
    sizes = dict(below("/", os.lstat("/").st_dev))
    nobodys: Counter[str] = Counter()
    for path in sizes.keys() - wheels - debian:
        nobodys["/".join(path.split("/")[: DEPTH + 1])] += sizes[path]
    facts = {
        "wheels": sum(Path(path).stat().st_size for path in wheels if Path(path).is_file()),
        "visible": sum(sizes.values()),
        "nobodys": dict(nobodys.most_common(20)),
    }
    print(json.dumps(facts))


def real(path: str) -> str:
    """The path as the file system has it: /lib is a link to /usr/lib, and dpkg's lists have both names."""
    return directory(os.path.dirname(path)).rstrip("/") + "/" + os.path.basename(path)  # noqa: PTH119, PTH120


@functools.cache
def directory(path: str) -> str:
    return os.path.realpath(path)


def below(path: str, device: int) -> Iterator[tuple[str, int]]:
    """Yield the image's files with their bytes, but for directories that are closed to this user. What the engine
    mounts is on other devices."""
    try:
        entries = list(os.scandir(path))
    except PermissionError:
        return
    for entry in entries:
        found = entry.stat(follow_symlinks=False)
        if found.st_dev == device and entry.is_dir(follow_symlinks=False):
            yield from below(entry.path, device)
        elif found.st_dev == device:
            yield entry.path, found.st_size


if __name__ == "__main__":
    main()
