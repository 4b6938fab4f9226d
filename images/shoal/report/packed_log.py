"""The log in the page of a job: compressed, in the form that a browser's DecompressionStream reads."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.jobs.job_log import Line

_LEVEL = 6
_MAX_LINE = 4_000  # characters
_MAX_TEXT = 32_000_000
"""The most characters of all lines together, so that a browser can search them quickly."""
_MAX_UNPACKED = 5 * _MAX_TEXT  # bytes: four for a character, and the rest for times, hosts and ranks
_MARGIN = 0.97
_LINE_OVERHEAD = 30


class PackedLog(NamedTuple):
    """The lines of a log that fit into a page."""

    lines: Sequence[Line]
    omitted: int
    """How many lines are left out."""
    omitted_at: int
    """The index in `lines` before which they are left out."""
    data: str
    """The lines in base64: columns of hosts, times, hosts' indexes, ranks and texts as JSON, compressed by zlib."""


def pack_log(lines: Sequence[Line], omitted: int, omitted_at: int, most: int) -> PackedLog:
    """Returns a log that takes at most `most` bytes, without its middle if necessary. Long lines are cut.

    Args:
        lines: The lines.
        omitted: How many more lines are left out already.
        omitted_at: The index before which they are left out; it matters only if there are some.
        most: The size of `data`.
    """
    lines = [_cut_line(line) for line in lines]
    sizes = [_LINE_OVERHEAD + len(line.text) for line in lines]
    # The part before lines that are left out already must stay apart from the part after them.
    split = omitted_at if omitted else len(lines) // 2
    budget = min(sum(sizes), _MAX_TEXT)
    while True:
        head = _count_fitting(sizes[:split], budget if budget >= sum(sizes) else budget // 2)
        tail = _count_fitting(sizes[split:][::-1], budget if budget >= sum(sizes) else budget // 2)
        kept = [*lines[:head], *lines[len(lines) - tail :]]
        data = _encode(kept)
        if len(data) <= most or not kept:
            left_out = omitted + len(lines) - len(kept)
            return PackedLog(kept, left_out, head if left_out else 0, data)
        budget = int(budget * min(most / len(data), 1) * _MARGIN)


def _encode(lines: Sequence[Line]) -> str:
    hosts = list(dict.fromkeys(line.host for line in lines))
    indexes = {host: index for index, host in enumerate(hosts)}
    times = [round(line.seconds * 100) for line in lines]
    columns = [
        hosts,
        [after - before for before, after in itertools.pairwise([0, *times])],
        [indexes[line.host] for line in lines],
        [line.rank for line in lines],
        [line.text for line in lines],
    ]
    text = json.dumps(columns, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), _LEVEL)).decode()


def unpack_log(data: str) -> list[Line]:
    """Returns the lines of `PackedLog.data`. Raises ValueError if it is something else."""
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(base64.b64decode(data, validate=True), _MAX_UNPACKED)
        hosts, steps, indexes, ranks, texts = json.loads(text)
        times = itertools.accumulate(steps)
        rows = zip(times, indexes, ranks, texts, strict=True)
        return [Line(time / 100, hosts[index], rank, text) for time, index, rank, text in rows]
    except (zlib.error, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a packed log: {error}") from error


def _count_fitting(sizes: Iterable[int], budget: int) -> int:
    return sum(1 for _ in itertools.takewhile(lambda total: total <= budget, itertools.accumulate(sizes)))


def _cut_line(line: Line) -> Line:
    more = len(line.text) - _MAX_LINE
    return line._replace(text=f"{line.text[:_MAX_LINE]}… ({more} characters more)") if more > 0 else line
