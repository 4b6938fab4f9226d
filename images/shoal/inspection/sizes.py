"""What the size of an image is made of: its base, the wheels, Debian's packages, and the rest.

All in uncompressed bytes as the engine counts an image's layers. For a few seconds' work; `shoal report size` reads the
layers themselves, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import docker

from shoal.inspection import sandbox

MIB = 1024**2
_DPKG = ["dpkg-query", "--show", "--showformat=${Package} ${Installed-Size}\n"]


@dataclass(frozen=True)
class Parts:
    """An image's bytes. wheels: of the files that the installed distributions record, bytecode included. debian: of the
    packages that the base lacks, as dpkg tells them, which is about what they take. visible: of what any user of a
    container sees; the rest is in layers below others, deleted or replaced. nobodys: by directory, of no package.
    """

    tag: str
    total: int
    base: int
    wheels: int
    debian: int
    visible: int
    nobodys: Mapping[str, int]

    @property
    def rest(self) -> int:
        """What is neither: bytecode of Debian's Python, its virtual environment, dpkg's own files."""
        return self.total - self.base - self.wheels - self.debian

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.tag}: {_mib(self.total)}"
        for name in ("base", "wheels", "debian", "rest"):
            yield f"{_mib(getattr(self, name)):>12}  {name}"
        yield f"{_mib(max(0, self.total - self.visible)):>12}  of it in lower layers, where no container sees it"
        for path, count in sorted(self.nobodys.items(), key=lambda item: -item[1])[:5]:
            yield f"{_mib(count):>12}  in {path}, of no package"


def read(client: docker.DockerClient, tag: str, base: str) -> Parts:
    """Ask the image, and `base`, the one below all others. Raises ImageError where one is not there, or no Python."""
    said = sandbox.ask(client, tag, "sizes_probe.py")
    packages, below = (_packages(client, image) for image in (tag, base))
    return Parts(
        tag=tag,
        total=client.images.get(tag).attrs["Size"],
        base=client.images.get(base).attrs["Size"],
        debian=sum(size for name, size in packages.items() if name not in below),
        **said,
    )


def _packages(client: docker.DockerClient, tag: str) -> dict[str, int]:
    """The bytes that Debian's packages take, by name."""
    rows = (line.split() for line in sandbox.said(client, tag, _DPKG).splitlines())
    return {name: int(kib) * 1024 for name, kib in rows}


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
