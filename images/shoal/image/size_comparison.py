"""Compares the sizes of two images, per package and per layer, in uncompressed and compressed bytes.

It only computes: `size` prints the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.image.inventory import Inventory, Layer, Sum
from shoal.sources.steps import one_line

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
