"""The inventory of an image: its layers, its packages, and the bytes of each owner. Plain data, for any report.

Sizes are bytes of the layers' tar archives. Every byte has an owner. So the owners' sums add up to the sizes of
the layers, and these add up to the size of the image, uncompressed and compressed. Two inventories can be compared.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice
from typing import Literal

from shoal.errors import ImageError
from shoal.image import archive
from shoal.image.archive import OPAQUE, WHITEOUT, Entry, LayerTar
from shoal.image.owners import (
    STATUS,
    TAR,
    DebianPackage,
    FileOwner,
    Owners,
    PythonDistribution,
    debian_packages,
    python_distributions,
)
from shoal.limits import MOST_OWNERS
from shoal.sources.steps import one_line

_Key = tuple[int, int]
"""An entry: the number of its layer, and its place in it."""


@dataclass(frozen=True)
class Sum:
    """Bytes of layers' tar archives, uncompressed and compressed by gzip."""

    bytes: int = 0
    """The bytes of tar archives."""
    compressed: int = 0
    """The bytes after gzip."""
    hidden: int = 0
    """The bytes of files that a later layer deletes or overwrites: they are shipped, but no container sees them."""
    hidden_compressed: int = 0
    files: int = 0
    """The number of entries, except directories."""

    def __add__(self, other: Sum) -> Sum:
        return Sum(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Layer:
    """A layer: the digest of its tar, the command that made it (both empty if unknown), and the sum of each owner."""

    digest: str
    command: str
    owners: Mapping[FileOwner, Sum]

    @property
    def sum(self) -> Sum:
        return total(self.owners.values())


@dataclass(frozen=True)
class Inventory:
    """An image: its layers, lowest first, and the packages that its containers have, sorted."""

    name: str
    layers: tuple[Layer, ...]
    debian: tuple[DebianPackage, ...]
    python: tuple[PythonDistribution, ...]

    @property
    def sum(self) -> Sum:
        return total(layer.sum for layer in self.layers)

    @property
    def owners(self) -> dict[FileOwner, Sum]:
        """The sum of each owner over all layers, the largest first."""
        sums: dict[FileOwner, Sum] = {}
        for owner, of in chain.from_iterable(layer.owners.items() for layer in self.layers):
            sums[owner] = sums.get(owner, Sum()) + of
        return dict(sorted(sums.items(), key=lambda item: (-item[1].bytes, item[0])))

    @property
    def versions(self) -> dict[FileOwner, str]:
        """The versions of the packages. Several versions of one package are joined by commas."""
        found: dict[FileOwner, dict[str, None]] = {}
        pairs = chain(
            ((FileOwner("debian", package.name), package.version) for package in self.debian),
            ((FileOwner("python", distribution.name), distribution.version) for distribution in self.python),
        )
        for owner, version in pairs:
            found.setdefault(owner, {})[version] = None
        return {owner: ", ".join(versions) for owner, versions in found.items()}


def read_inventory(name: str, chunks: Iterable[bytes], known: archive.Blobs | None = None) -> Inventory:
    """Returns the inventory of an image, from the archive that `docker save` writes.

    `known` is as in `archive.read_layers`. Raises `ImageError`, with `name`, if it is not an archive of one image.
    """
    return make_inventory(name, archive.read_layers(name, chunks, known))


def make_inventory(name: str, layers: Sequence[LayerTar]) -> Inventory:
    """Returns the inventory of an image from its layers, lowest first. Raises `ImageError` for too many packages."""
    owners = Owners(layer.entries for layer in layers)
    visible = _visible(layers)
    seen = Counter(chain.from_iterable(visible.values()))
    texts = dict(_texts(layers, visible))
    debian = tuple(sorted(islice(debian_packages(texts.get(STATUS, b"")), MOST_OWNERS)))
    python = tuple(sorted(islice(python_distributions(texts, owners), MOST_OWNERS)))
    if MOST_OWNERS in (len(debian), len(python)):
        raise ImageError(f"{name}: {MOST_OWNERS:,} packages or more in it. Fix: do not trust this image")
    found = tuple(_layer(number, layer, owners, seen) for number, layer in enumerate(layers))
    return Inventory(name, found, debian, python)


def total(sums: Iterable[Sum]) -> Sum:
    """Returns the sum of sums."""
    return sum(sums, Sum())


def _layer(number: int, layer: LayerTar, owners: Owners, seen: Mapping[_Key, int]) -> Layer:
    """`seen` has a number above 0 for each entry that the image shows, by the numbers of the layer and of the entry."""
    sums: dict[FileOwner, Sum] = {}
    for place, entry in enumerate(layer.entries):
        owner = owners.find_owner(entry)
        is_hidden = owner != TAR and not seen[number, place]
        sums[owner] = sums.get(owner, Sum()) + _sum(layer, entry.begin, entry.end, owner, is_hidden)
    end = layer.entries[-1].end if layer.entries else 0
    sums[TAR] = sums.get(TAR, Sum()) + _sum(layer, end, layer.measured.bytes, TAR, False)
    return Layer(layer.digest, layer.command, sums)


def _sum(layer: LayerTar, begin: int, end: int, owner: FileOwner, is_hidden: bool) -> Sum:
    size, compressed = end - begin, layer.measured.compressed_before(end) - layer.measured.compressed_before(begin)
    return Sum(size, compressed, size * is_hidden, compressed * is_hidden, int(owner != TAR))


def _visible(layers: Sequence[LayerTar]) -> dict[str, tuple[_Key, ...]]:
    """Returns the entries that a container sees, by path, without directories; for a hard link with those it shares."""
    visible: dict[str, tuple[_Key, ...]] = {}
    for number, layer in enumerate(layers):
        hidden = _HiddenPaths(layer.entries)
        visible = {path: keys for path, keys in visible.items() if not hidden.hides(path)}
        for place, entry in enumerate(layer.entries):
            if entry.kind != "directory" and not entry.is_whiteout:
                shared = visible.get(entry.target, ()) if entry.kind == "hardlink" else ()
                visible[entry.path] = ((number, place), *shared)
    return visible


class _HiddenPaths:
    """The paths of lower layers that a layer hides, because it deletes or replaces them."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._trees: set[str] = set()
        self._paths: set[str] = set()
        for entry in entries:
            directory, _, name = entry.path.rpartition("/")
            if name == OPAQUE:
                self._trees.add(f"{directory}/")
            elif entry.is_whiteout:
                self._remove(f"{directory}/{name.removeprefix(WHITEOUT)}".lstrip("/"))
            elif entry.kind == "directory":
                self._paths.add(entry.path)
            else:
                self._remove(entry.path)

    def hides(self, path: str) -> bool:
        return path in self._paths or any(above in self._trees for above in _directories(path))

    def _remove(self, path: str) -> None:
        self._paths.add(path)
        self._trees.add(f"{path}/")


def _directories(path: str) -> Iterator[str]:
    """Yields the directories above a path, each with its slash. The root is the slash alone."""
    yield "/"
    end = path.find("/")
    while end >= 0:
        yield path[: end + 1]
        end = path.find("/", end + 1)


def _texts(layers: Sequence[LayerTar], visible: Mapping[str, tuple[_Key, ...]]) -> Iterator[tuple[str, bytes]]:
    for path, keys in visible.items():
        number, place = keys[0]
        text = layers[number].entries[place].text
        if text is not None:
            yield path, text


State = Literal["new", "gone", "grown", "shrunk", "same"]
_SHELL = re.compile(r"(\|\d+ (\S+=\S* )*)?/bin/sh -c (#\(nop\) +)?|# buildkit\s*$")


@dataclass(frozen=True)
class Change:
    """A package or a layer in two images; None: not in that image. `kind` is its owner's kind, or "layer"."""

    kind: str
    name: str
    before: Sum | None
    after: Sum | None
    versions: tuple[str, str] = ("", "")

    @property
    def bytes(self) -> int:
        """The change of its uncompressed size."""
        return (self.after or Sum()).bytes - (self.before or Sum()).bytes

    @property
    def compressed(self) -> int:
        """The change of its compressed size."""
        return (self.after or Sum()).compressed - (self.before or Sum()).compressed

    @property
    def state(self) -> State:
        """How its uncompressed size changed."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        if not self.bytes:
            return "same"
        return "grown" if self.bytes > 0 else "shrunk"

    @property
    def version(self) -> str:
        """Its version, or both versions if they differ."""
        before, after = self.versions
        return f"{before} → {after}" if before and after and before != after else after or before

    @property
    def is_changed(self) -> bool:
        """Whether its size or version differs."""
        return self.state != "same" or self.versions[0] != self.versions[1]


@dataclass(frozen=True)
class Comparison:
    """Two images and their changes: packages by the size of the change, layers in the second image's order."""

    before: Inventory
    after: Inventory
    packages: tuple[Change, ...]
    layers: tuple[Change, ...]

    @property
    def total(self) -> Change:
        """The change of the whole image."""
        return Change("image", self.after.name, self.before.sum, self.after.sum)


def compare_sizes(before: Inventory, after: Inventory) -> Comparison:
    """Returns the changes from one image to another. Packages are matched by name, layers by content or command."""
    packages = sorted(
        _compare_packages(before, after), key=lambda change: (-abs(change.bytes), change.kind, change.name)
    )
    return Comparison(before, after, tuple(packages), tuple(_compare_layers(before.layers, after.layers)))


def layer_title(layer: Layer) -> str:
    """Returns the command that made a layer, shortened to one line; "unknown command" if there is none."""
    return one_line(_SHELL.sub("", layer.command)) or "unknown command"


def _compare_packages(before: Inventory, after: Inventory) -> Iterator[Change]:
    old, new = before.owners, after.owners
    old_versions, new_versions = before.versions, after.versions
    for owner in {**new, **old}:
        versions = old_versions.get(owner, ""), new_versions.get(owner, "")
        yield Change(owner.kind, owner.name, old.get(owner), new.get(owner), versions)


def _compare_layers(before: Sequence[Layer], after: Sequence[Layer]) -> Iterator[Change]:
    """Matches layers by content or, in order, by command."""
    digests = {layer.digest for layer in before} & {layer.digest for layer in after} - {""}
    old, new = _key_layers(before, digests), _key_layers(after, digests)
    for key, layer in new.items():
        yield Change("layer", layer_title(layer), old[key].sum if key in old else None, layer.sum)
    for key, layer in old.items():
        if key not in new:
            yield Change("layer", layer_title(layer), layer.sum, None)


def _key_layers(layers: Iterable[Layer], digests: set[str]) -> dict[tuple[str, int], Layer]:
    """Returns the layers by digest (if it is in `digests`) or command, and by how often that occurred before."""
    turns: Counter[str] = Counter()
    named = {}
    for layer in layers:
        name = layer.digest if layer.digest in digests else f"command {layer.command}"
        named[name, turns[name]] = layer
        turns[name] += 1
    return named
