"""The scaling curves as one SVG file, for light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log2
from textwrap import wrap
from typing import Any

WIDTH, HEIGHT = 880, 570
LEFT, RIGHT, TOP, BOTTOM = 70, 850, 120, 440  # of the plot
STYLE = """
  svg { font: 14px system-ui, sans-serif }
  .page { fill: #fff } text { fill: #1f2933 } .title { font-size: 20px; font-weight: 600 }
  .quiet { fill: #5c6773; font-size: 12px }
  .warning { fill: #b4540a; font-weight: 600 } .grid { stroke: #d9dee4 } .curve { fill: none; stroke-width: 2.5 }
  .c0 { stroke: #0b6bcb } .c1 { stroke: #12855a; stroke-dasharray: 7 4 } .c2 { stroke: #a33ea1; stroke-dasharray: 2 4 }
  .point { fill: #d1495b; stroke: #fff; stroke-width: 2 } .published { fill: #b03548; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d } text { fill: #e4e8ec } .quiet { fill: #9aa5b1 } .warning { fill: #f0a35e }
    .grid { stroke: #333b45 } .c0 { stroke: #58a6ff } .c1 { stroke: #3fc18a } .c2 { stroke: #d98ad7 }
    .point { fill: #ff7b8a; stroke: #14181d } .published { fill: #ff97a3 }
  }"""


def draw(ranks: Sequence[int], curves: Mapping[str, Sequence[float]], constants: Mapping[str, Any]) -> str:
    """Return the SVG: scaling efficiency (0 to 1) against ranks, and the published figures."""

    def x(number: float) -> float:
        return LEFT + (RIGHT - LEFT) * log2(number / ranks[0]) / log2(ranks[-1] / ranks[0])

    parts = ['<rect class="page" width="100%" height="100%" rx="8"/>', *heading(constants), *grid()]
    parts.append(f'<rect class="page" x="{LEFT + 4}" y="{BOTTOM - 84}" width="580" height="76"/>')  # behind the legend
    parts += [text(x(number), BOTTOM + 20, f"{number:,}", "quiet", "middle") for number in ranks]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "ranks (8 on each host)", "quiet", "middle"))
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(at):.1f},{y(share):.1f}" for at, share in zip(ranks, curve))
        parts.append(f'<polyline class="curve c{number}" points="{points}"/>')
        parts += legend(number, f"{name}: {curve[-1]:.0%} on {ranks[-1]:,} ranks")
    for found in constants["published"]:
        at, share = x(found["ranks"]), y(found["efficiency"])
        parts.append(f'<circle class="point" cx="{at:.1f}" cy="{share:.1f}" r="6"/>')
        label = f"published: {found['name']}, {found['efficiency']:.0%}"
        parts.append(text(at - 6, share - 14, label, "published", "end"))
    parts += footing(constants)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Modelled scaling efficiency">'
    return "\n".join([head, f"<style>{STYLE}\n</style>", *parts, "</svg>", ""])


def y(share: float) -> float:
    """The height at which a share is drawn."""
    return BOTTOM - (BOTTOM - TOP) * share


def heading(constants: Mapping[str, Any]) -> list[str]:
    """The title and the warning."""
    return [
        text(LEFT - 50, 36, "Scaling efficiency of BERT-large, modelled", "title"),
        text(LEFT - 50, 60, "A model with assumed constants, not a measurement.", "warning"),
        text(LEFT - 50, 82, constants["training"]["what"], "quiet"),
        text(LEFT - 50, 104, "computation ÷ time of the step", "quiet"),
    ]


def grid() -> list[str]:
    """The lines of 0 to 100 %."""
    return [
        part
        for percent in range(0, 101, 20)
        for height in [y(percent / 100)]
        for part in (
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>',
            text(LEFT - 10, height + 4, f"{percent} %", "quiet", "end"),
        )
    ]


def legend(number: int, label: str) -> list[str]:
    """A curve's line and name, inside the plot at the lower left."""
    height = BOTTOM - 66 + 22 * number
    line = f'<line class="curve c{number}" x1="{LEFT + 14}" x2="{LEFT + 48}" y1="{height}" y2="{height}"/>'
    return [line, text(LEFT + 58, height + 5, label)]


def footing(constants: Mapping[str, Any]) -> list[str]:
    """The assumptions of the curves."""
    training, host, network = constants["training"], constants["host"], constants["network"]
    said = (
        f"Assumed: {1000 * training['compute_seconds']:.0f} ms of computation a step, {training['overlap']:.0%} of "
        f"which hide communication; {host['bytes_per_second'] / 1e9:g} GB/s between the GPUs of a host; "
        f"{network['bytes_per_second'] / 1e9:g} GB/s and {1e6 * network['latency_seconds']:g} µs between hosts; "
        f"buckets of {training['bucket_bytes'] / 1e6:g} MB. Sources: benchmarks/data/scale.json. "
        + " ".join(f"Published, on their own machines: {found['source']}." for found in constants["published"])
    )
    return [text(LEFT - 50, BOTTOM + 72 + 18 * line, words, "quiet") for line, words in enumerate(wrap(said, 125))]


def text(at: float, height: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{at:.1f}" y="{height:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
