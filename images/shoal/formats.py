"""Formats numbers for people: times, bytes, bandwidths, percentages and counts."""

from __future__ import annotations

NONE = "–"
"""Stands for a number that is not known."""
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def format_time(nanoseconds: int | None) -> str:
    """Returns a duration with three digits and its unit; None is `NONE`."""
    return NONE if nanoseconds is None else _scale(nanoseconds, _TIMES)


def format_bytes(count: int) -> str:
    """Returns a number of bytes with three digits and its unit (MB: 10⁶ bytes); 0 is `NONE`."""
    return _scale(count, _BYTES) if count else NONE


def format_byte_change(count: int) -> str:
    """Returns a difference in bytes with its sign, three digits and its unit."""
    return f"{'+' if count > 0 else '−'}{format_bytes(abs(count))}" if count else "±0 B"


def format_bandwidth(value: float | None) -> str:
    """Returns a bandwidth in GB/s (10⁹ bytes per second); None is `NONE`."""
    return NONE if value is None else f"{value:#.3g} GB/s"


def format_percent(part: float | None) -> str:
    """Returns a fraction of 1 as a whole percentage; None is `NONE`."""
    return NONE if part is None else f"{part:.0%}"


def format_share(part: int, whole: int) -> str:
    """Returns `part / whole` as a percentage, or "less than 1%"; `NONE` if `whole` is 0."""
    if not whole:
        return NONE
    return "less than 1%" if 0 < part < whole / 100 else format_percent(part / whole)


def format_count(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _scale(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Returns a value in the largest unit that is not larger than it, otherwise in the last one."""
    size, unit = next(((size, unit) for size, unit in units if abs(value) >= size), units[-1])
    scaled = value / size
    digits = 0 if size == 1 else 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{scaled:.{digits}f} {unit}"
