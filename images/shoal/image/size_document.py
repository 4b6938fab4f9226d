"""The document of `shoal size --json`: the inventories of images, and how two images differ, as plain records.

A record has the fields of its bases first, the last base's before all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.image.inventory import Change, Comparison, Inventory, Layer, State, Sum, compare_sizes
from shoal.image.owners import DebianPackage, FileOwner, PythonDistribution


@dataclass(frozen=True)
class OwnerSize(Sum, FileOwner):
    """The part of a layer that a package or a directory owns."""


@dataclass(frozen=True)
class _Package(FileOwner):
    version: str
    """Empty if it is unknown."""


@dataclass(frozen=True)
class PackageSize(Sum, _Package):
    """The part of an image that a package or a directory owns."""


@dataclass(frozen=True)
class _Layer:
    digest: str
    """The digest of its tar archive; empty if it is unknown."""
    command: str
    """The command that made it; empty if it is unknown."""


@dataclass(frozen=True)
class LayerSize(Sum, _Layer):
    """A layer of an image."""

    owners: Sequence[OwnerSize] = ()


@dataclass(frozen=True)
class _Image:
    name: str


@dataclass(frozen=True)
class ImageSize(Sum, _Image):
    """An image."""

    layers: Sequence[LayerSize] = ()
    """Lowest first."""
    owners: Sequence[PackageSize] = ()
    """Over all layers, the largest first."""
    debian_packages: Sequence[DebianPackage] = ()
    python_distributions: Sequence[PythonDistribution] = ()


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
class _Changes:
    packages: Sequence[SizeChange]
    """Those that have changed."""
    layers: Sequence[SizeChange]


@dataclass(frozen=True)
class ImageChange(SizeChange, _Changes):
    """The change from the first image to the second one."""


@dataclass(frozen=True)
class SizeDocument:
    """The inventories of one image or two. Sizes are in bytes."""

    images: Sequence[ImageSize]
    difference: ImageChange | None
    """None for one image."""


def make_document(inventories: Sequence[Inventory]) -> SizeDocument:
    """Returns the document of one image, or of two and their difference."""
    comparison = compare_sizes(*inventories) if len(inventories) == 2 else None
    images = [_describe_image(of) for of in inventories]
    return SizeDocument(images, _describe_comparison(comparison) if comparison else None)


def _describe_image(of: Inventory) -> ImageSize:
    versions = of.versions
    return ImageSize(
        name=of.name,
        **asdict(of.sum),
        layers=[_describe_layer(layer) for layer in of.layers],
        owners=[
            PackageSize(**asdict(owner), version=versions.get(owner, ""), **asdict(sums))
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
