"""Says, as JSON, which files there are where it runs. The text of this file is what a container's Python is given."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
HEADER = 16  # of bytecode: four bytes each for a magic number, flags, the source's time and its size
LABEL = "security.selinux"  # which the engine gives, a new one to each container
DPKG = "/var/lib/dpkg"


def main() -> None:
    mounted = mounts(Path("/proc/self/mountinfo").read_text())
    owner = owners(DPKG)
    files = {path: {**about(path, found), "package": owner.get(path, "")} for path, found in below("/", mounted)}
    print(json.dumps({"files": files, "packages": packages(DPKG)}))


def mounts(text: str) -> set[str]:
    """Return where something is mounted. Devices do not tell: with some storage drivers a mount is on the root's own,
    and with others the root's files are on several."""
    points = (line.split(" ")[4] for line in text.splitlines())
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point) for point in points}


def below(directory: str, mounted: Collection[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what the image has, and nothing that the engine mounts."""
    for entry in os.scandir(directory):
        if entry.path not in mounted:
            yield entry.path, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from below(entry.path, mounted)


def packages(dpkg: str) -> dict[str, str]:
    """Return the versions of the installed packages of Debian; none where there is no dpkg."""
    status = Path(dpkg, "status")
    text = status.read_text(errors="replace") if status.is_file() else ""
    stanzas = (dict(re.findall(r"^(Package|Version|Status): (.*)$", part, re.MULTILINE)) for part in text.split("\n\n"))
    return {of["Package"]: of["Version"] for of in stanzas if of.get("Status", "").endswith(" installed")}


def owners(dpkg: str) -> dict[str, str]:
    """Return the package of Debian that each path belongs to, as its lists say."""
    found = {}
    for listing in sorted(Path(dpkg, "info").glob("*.list")):
        name = listing.stem.partition(":")[0]  # less its architecture
        for path in listing.read_text(errors="replace").splitlines():
            directory, _, last = path.rpartition("/")
            found[f"{resolved(directory)}/{last}"] = name
        kept = listing.parent.glob(f"{listing.stem}.*")
        found.update({str(path): name for path in kept if path.stem == listing.stem})  # python3 is not python3.11
    return found


@functools.cache
def resolved(directory: str) -> str:
    """Lists of packages may say /lib, which is a link to /usr/lib."""
    return os.path.realpath(directory).rstrip("/")


def about(path: str, found: os.stat_result) -> dict[str, Any]:
    content, source_time = ("", 0)
    if stat.S_ISLNK(found.st_mode):
        content = str(Path(path).readlink())
    elif stat.S_ISREG(found.st_mode):
        content, source_time = digest(path)
    return {
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "time": found.st_mtime_ns,
        "content": content,
        "source_time": source_time,
        "attributes": attributes(path),
    }


def attributes(path: str) -> Mapping[str, str]:
    """Return the extended attributes, hexadecimal: what a program may do that its user may not, say."""
    with contextlib.suppress(OSError):  # not of this file system
        names = set(os.listxattr(path, follow_symlinks=False)) - {LABEL}
        return {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in sorted(names)}
    return {}


def digest(path: str) -> tuple[str, int]:
    """The SHA-256 of a file; of bytecode, without its source's time, which stands beside it."""
    with Path(path).open("rb") as file:
        head = file.read(HEADER)
        time = b""
        if path.endswith(".pyc") and head[4:8] == bytes(4):  # valid while its source has this time
            head, time = head[:8] + bytes(4) + head[12:], head[8:12]
        sum_ = hashlib.sha256(head)
        while block := file.read(BLOCK):
            sum_.update(block)
    return sum_.hexdigest(), int.from_bytes(time, "little")


if __name__ == "__main__":
    main()
