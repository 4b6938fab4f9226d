"""The figures of images' sizes in words: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.layers.inventory import Inventory, Sum
from shoal.report.size_comparison import Change, Comparison
from shoal.report.timeline_text import amount, counted, percent

KINDS = {
    "python": "Python distribution",
    "debian": "Debian package",
    "other": "other files, by directory",
    "tar": "the archives themselves",
}
"""The kinds of owners, in the order of the pictures."""


def headline(inventory: Inventory) -> Iterator[str]:
    """Yield the sentences that say how large an image is."""
    of = inventory.sum
    layers = counted(len(inventory.layers), "layer")
    yield f"{inventory.name}: {amount(of.bytes)} in {layers}, {amount(of.compressed)} compressed."
    yield (
        f"{counted(len(inventory.python), 'Python distribution')}, {counted(len(inventory.debian), 'Debian package')}; "
        f"the largest: {', '.join(_largest(inventory))}."
    )
    if of.hidden:
        yield (
            f"{amount(of.hidden)} ({share(of.hidden, of.bytes)}) is waste, {amount(of.hidden_compressed)} compressed: "
            "in a lower layer, and hidden by a later one."
        )
    else:
        yield "Nothing is waste: no layer hides what a lower one holds."


def verdict(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences that say how two images differ."""
    whole = comparison.whole
    before = whole.before or Sum()
    if not whole.bytes:
        yield f"{comparison.after.name} is as large as {comparison.before.name}."
    else:
        word = "larger" if whole.bytes > 0 else "smaller"
        yield (
            f"{comparison.after.name} is {amount(abs(whole.bytes))} ({share(abs(whole.bytes), before.bytes)}) {word} "
            f"than {comparison.before.name}; compressed: {signed(whole.compressed)}."
        )
    yield f"Packages and directories: {_states(comparison.packages)}. Layers: {_states(comparison.layers)}."


def signed(count: int) -> str:
    """Return a difference of bytes with its sign, three digits and its unit."""
    return f"{'+' if count > 0 else '−'}{amount(abs(count))}" if count else "±0 B"


def share(part: int, whole: int) -> str:
    """Return a part as a percentage, or that it is less than one."""
    if not whole:
        return percent(None)
    return "less than 1%" if 0 < part < whole / 100 else percent(part / whole)


def _largest(inventory: Inventory) -> list[str]:
    named = [item for item in inventory.owners.items() if item[0].kind != "tar"]
    return [f"{owner.name} {amount(of.bytes)}" for owner, of in named[:3]] or ["none"]


def _states(changes: tuple[Change, ...]) -> str:
    found = [change.state for change in changes]
    told = [f"{found.count(state)} {state}" for state in ("new", "gone", "grown", "shrunk", "same") if state in found]
    return ", ".join(told) or "none"
