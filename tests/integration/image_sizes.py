"""The parts of an image's size: its base, the wheels, Debian packages and the rest.

All sizes are uncompressed bytes, as Docker counts an image's layers. This takes seconds; `shoal size` reads the
layers themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker

from shoal.image import facts

MIB = 1024**2
_PROBE = Path(__file__).with_name("image_sizes_probe.py")
_DPKG = ["dpkg-query", "--show", "--showformat=${Package} ${Installed-Size}\n"]


@dataclass(frozen=True)
class ImageParts:
    """The parts of an image, in bytes."""

    tag: str
    total: int
    base: int
    wheels: int
    """The files that the installed distributions record, bytecode included."""
    debian: int
    """The packages that the base lacks, by dpkg's Installed-Size, which is approximate."""
    visible: int
    """What an unprivileged user sees in a container; the rest is deleted or replaced by later layers."""
    unowned: Mapping[str, int]
    """Files that belong to no package, by directory."""

    @property
    def rest(self) -> int:
        """What is in none of the parts: bytecode of Debian's Python, its virtual environment, files of dpkg."""
        return self.total - self.base - self.wheels - self.debian

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.tag}: {_format_mib(self.total)}"
        for name in ("base", "wheels", "debian", "rest"):
            yield f"{_format_mib(getattr(self, name)):>12}  {name}"
        yield f"{_format_mib(max(0, self.total - self.visible)):>12}  of it in lower layers, where no container sees it"
        for path, count in sorted(self.unowned.items(), key=lambda item: -item[1])[:5]:
            yield f"{_format_mib(count):>12}  in {path}, of no package"


def measure_parts(client: docker.DockerClient, tag: str, base: str) -> ImageParts:
    """Measure an image. Raises `ImageError` if Docker lacks it, or it has no Python.

    Args:
        client: Docker.
        tag: The tag of the image.
        base: The tag of the Debian image below all its layers.
    """
    found = facts.run_probe(client, tag, _PROBE)
    packages, below = (_package_sizes(client, image) for image in (tag, base))
    return ImageParts(
        tag=tag,
        total=client.images.get(tag).attrs["Size"],
        base=client.images.get(base).attrs["Size"],
        debian=sum(size for name, size in packages.items() if name not in below),
        **found,
    )


def _package_sizes(client: docker.DockerClient, tag: str) -> dict[str, int]:
    """Return the bytes that Debian packages take, by name."""
    rows = (line.split() for line in facts.run_command(client, tag, _DPKG).splitlines())
    return {name: int(kib) * 1024 for name, kib in rows}


def _format_mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
