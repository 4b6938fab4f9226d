"""The document of `shoal size --json`: the inventories of images, and how two images differ, as plain records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.layers.inventory import Inventory, Layer
from shoal.layers.owners import DebianPackage, PythonDistribution
from shoal.report.size_comparison import Change, Comparison, State


@dataclass(frozen=True)
class OwnerSize:
    """The part of a layer that a package or a directory owns."""

    kind: str
    """`python`, `debian`, `other` (a directory) or `tar` (bytes that belong to no file)."""
    name: str
    bytes: int
    compressed: int
    hidden: int
    hidden_compressed: int
    files: int


@dataclass(frozen=True)
class PackageSize:
    """The part of an image that a package or a directory owns."""

    kind: str
    name: str
    version: str
    """Empty if it is unknown."""
    bytes: int
    compressed: int
    hidden: int
    hidden_compressed: int
    files: int


@dataclass(frozen=True)
class LayerSize:
    """A layer of an image."""

    digest: str
    """The digest of its tar archive; empty if it is unknown."""
    command: str
    """The command that made it; empty if it is unknown."""
    bytes: int
    compressed: int
    hidden: int
    hidden_compressed: int
    files: int
    owners: Sequence[OwnerSize]


@dataclass(frozen=True)
class ImageSize:
    """An image."""

    name: str
    bytes: int
    """The bytes of the layers' tar archives."""
    compressed: int
    """The bytes after gzip."""
    hidden: int
    """The bytes of files that a later layer deletes or overwrites."""
    hidden_compressed: int
    files: int
    """The number of entries in the archives, except directories."""
    layers: Sequence[LayerSize]
    """Lowest first."""
    owners: Sequence[PackageSize]
    """Over all layers, the largest first."""
    debian_packages: Sequence[DebianPackage]
    python_distributions: Sequence[PythonDistribution]


@dataclass(frozen=True)
class SizeChange:
    """A package or a layer in two images."""

    kind: str
    name: str
    state: State
    version: str
    """The version, or both versions if they differ."""
    bytes: int
    """The change of its bytes."""
    compressed: int


@dataclass(frozen=True)
class ImageChange:
    """The change from the first image to the second one."""

    packages: Sequence[SizeChange]
    """Those that have changed."""
    layers: Sequence[SizeChange]
    kind: str
    name: str
    state: State
    version: str
    bytes: int
    """The change of the whole image."""
    compressed: int


@dataclass(frozen=True)
class SizeDocument:
    """The inventories of one image or two. Sizes are in bytes."""

    images: Sequence[ImageSize]
    difference: ImageChange | None
    """Only of two images; otherwise there is no such key."""


def make_document(inventories: Sequence[Inventory], comparison: Comparison | None) -> SizeDocument:
    """Return the document of images, and of their comparison if there is one."""
    images = [_describe_image(of) for of in inventories]
    return SizeDocument(images, _describe_comparison(comparison) if comparison else None)


def format_document(inventories: Sequence[Inventory], comparison: Comparison | None) -> str:
    """Return the document as JSON. Without a comparison, it has no key `difference`."""
    document = asdict(make_document(inventories, comparison))
    return json.dumps({key: value for key, value in document.items() if value is not None}, indent=2) + "\n"


def _describe_image(of: Inventory) -> ImageSize:
    return ImageSize(
        name=of.name,
        **asdict(of.sum),
        layers=[_describe_layer(layer) for layer in of.layers],
        owners=[
            PackageSize(**asdict(owner), version=of.versions.get(owner, ""), **asdict(sums))
            for owner, sums in of.owners.items()
        ],
        debian_packages=of.debian,
        python_distributions=of.python,
    )


def _describe_layer(layer: Layer) -> LayerSize:
    owners = [OwnerSize(**asdict(owner), **asdict(sums)) for owner, sums in layer.owners.items()]
    return LayerSize(digest=layer.digest, command=layer.command, **asdict(layer.sum), owners=owners)


def _describe_comparison(comparison: Comparison) -> ImageChange:
    packages = [_describe_change(change) for change in comparison.packages if change.is_changed]
    layers = [_describe_change(change) for change in comparison.layers]
    return ImageChange(packages, layers, **asdict(_describe_change(comparison.total)))


def _describe_change(change: Change) -> SizeChange:
    return SizeChange(change.kind, change.name, change.state, change.version, change.bytes, change.compressed)
