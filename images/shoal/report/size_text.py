"""The sizes of images in words, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.layers.inventory import Inventory, Sum
from shoal.report.formats import format_byte_change, format_bytes, format_count, format_share
from shoal.report.size_comparison import Change, Comparison

KINDS = {
    "python": "Python distribution",
    "debian": "Debian package",
    "other": "other files, by directory",
    "tar": "archive headers and padding",
}
"""The names of the kinds of owners, in the order of the pictures."""


def summarize_size(inventory: Inventory) -> Iterator[str]:
    """Yield sentences on an image's size: bytes, layers, packages, the largest, and bytes wasted by later layers."""
    sizes = inventory.sum
    layers = format_count(len(inventory.layers), "layer")
    yield f"{inventory.name}: {format_bytes(sizes.bytes)} in {layers}, {format_bytes(sizes.compressed)} compressed."
    yield (
        f"{format_count(len(inventory.python), 'Python distribution')}, "
        f"{format_count(len(inventory.debian), 'Debian package')}; largest: {', '.join(_list_largest(inventory))}."
    )
    if sizes.hidden:
        yield (
            f"{format_bytes(sizes.hidden)} ({format_share(sizes.hidden, sizes.bytes)}) is wasted, "
            f"{format_bytes(sizes.hidden_compressed)} compressed: it is deleted or replaced by later layers."
        )
    else:
        yield "Nothing is wasted: no layer deletes or replaces files of another."


def summarize_comparison(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences that summarize how the sizes of two images differ."""
    total = comparison.total
    before = total.before or Sum()
    if not total.bytes:
        yield f"{comparison.after.name} and {comparison.before.name} have the same size."
    else:
        word = "larger" if total.bytes > 0 else "smaller"
        share = format_share(abs(total.bytes), before.bytes)
        yield (
            f"{comparison.after.name} is {format_bytes(abs(total.bytes))} ({share}) {word} than"
            f" {comparison.before.name}; compressed: {format_byte_change(total.compressed)}."
        )
    yield f"Packages and directories: {_count_states(comparison.packages)}. Layers: {_count_states(comparison.layers)}."


def _list_largest(inventory: Inventory) -> list[str]:
    named = [item for item in inventory.owners.items() if item[0].kind != "tar"]
    return [f"{owner.name} {format_bytes(of.bytes)}" for owner, of in named[:3]] or ["none"]


def _count_states(changes: tuple[Change, ...]) -> str:
    """Return how many changes have each state, such as "2 new, 1 gone"; "none" without changes."""
    found = [change.state for change in changes]
    counts = [f"{found.count(state)} {state}" for state in ("new", "gone", "grown", "shrunk", "same") if state in found]
    return ", ".join(counts) or "none"
