"""What differs between two images: per package and per layer, in uncompressed and compressed bytes. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.layers.inventory import Inventory, Layer, Sum
from shoal.layers.owners import Owner
from shoal.sources.steps import one_line

State = Literal["new", "gone", "grown", "shrunk", "same"]
_SHELL = re.compile(r"(\|\d+ (\S+=\S* )*)?/bin/sh -c (#\(nop\) +)?|# buildkit\s*$")


@dataclass(frozen=True)
class Change:
    """A package or a layer in two images; None: it is not in that one. `kind` is its owner's, or "layer"."""

    kind: str
    name: str
    before: Sum | None
    after: Sum | None
    versions: tuple[str, str] = ("", "")

    @property
    def bytes(self) -> int:
        """How much it has grown, uncompressed."""
        return (self.after or Sum()).bytes - (self.before or Sum()).bytes

    @property
    def compressed(self) -> int:
        """How much it has grown, compressed."""
        return (self.after or Sum()).compressed - (self.before or Sum()).compressed

    @property
    def state(self) -> State:
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        if not self.bytes:
            return "same"
        return "grown" if self.bytes > 0 else "shrunk"

    @property
    def version(self) -> str:
        """Its version, or both."""
        before, after = self.versions
        return f"{before} → {after}" if before and after and before != after else after or before

    @property
    def is_told(self) -> bool:
        """Whether there is something to tell: another size, or another version."""
        return self.state != "same" or self.versions[0] != self.versions[1]


@dataclass(frozen=True)
class Comparison:
    """Two images and what has changed, the largest change first; the layers in the second image's order."""

    before: Inventory
    after: Inventory
    packages: tuple[Change, ...]
    layers: tuple[Change, ...]

    @property
    def whole(self) -> Change:
        """The images as a whole."""
        return Change("image", self.after.name, self.before.sum, self.after.sum)


def compare(before: Inventory, after: Inventory) -> Comparison:
    """Return what differs between two images."""
    packages = sorted(_packages(before, after), key=lambda change: (-abs(change.bytes), change.kind, change.name))
    return Comparison(before, after, tuple(packages), tuple(_layers(before.layers, after.layers)))


def title(layer: Layer) -> str:
    """Return what made a layer, on one line."""
    return one_line(_SHELL.sub("", layer.command)) or "a layer of which the image does not say what made it"


def _packages(before: Inventory, after: Inventory) -> Iterator[Change]:
    old, new = before.owners, after.owners
    versions = before.versions, after.versions
    for owner in {**new, **old}:
        yield Change(owner.kind, owner.name, old.get(owner), new.get(owner), _both(versions, owner))


def _both(versions: tuple[dict[Owner, str], dict[Owner, str]], owner: Owner) -> tuple[str, str]:
    return versions[0].get(owner, ""), versions[1].get(owner, "")


def _layers(before: Sequence[Layer], after: Sequence[Layer]) -> Iterator[Change]:
    """Yield the layers of both; those of the same content are the same, and others of the same command, in turn."""
    digests = {layer.digest for layer in before} & {layer.digest for layer in after} - {""}
    old, new = _named(before, digests), _named(after, digests)
    for key, layer in new.items():
        yield Change("layer", title(layer), old[key].sum if key in old else None, layer.sum)
    for key, layer in old.items():
        if key not in new:
            yield Change("layer", title(layer), layer.sum, None)


def _named(layers: Iterable[Layer], digests: set[str]) -> dict[tuple[str, int], Layer]:
    """Return the layers by their digest, if it is among `digests`, else their command, and their turn."""
    turns: Counter[str] = Counter()
    named = {}
    for layer in layers:
        name = layer.digest if layer.digest in digests else f"command {layer.command}"
        named[name, turns[name]] = layer
        turns[name] += 1
    return named
