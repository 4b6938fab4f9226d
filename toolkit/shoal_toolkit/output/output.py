"""Writes the output of ranks and launchers to the log: with prefixes or as JSON. Keeps the end of each rank's stderr.

Also reads the metrics in the output of ranks, and closes their file. A line gets the prefix `[rank,host]` if several
ranks share the log. Otherwise bytes pass unchanged. No two writers that pass through here share a line.

With JSON, events or metrics, all output on stdout and stderr passes through here. Events are on stdout only, so that
both streams keep their order. Otherwise a script without a launcher writes
to stdout itself, and sidecars write to both.
"""

from __future__ import annotations

import os

from shoal_toolkit.fast_typing import TYPE_CHECKING, NamedTuple, Protocol
from shoal_toolkit.log import JSON, PLAIN, PREFIXED, STDERR, STDOUT, set_log_writer
from shoal_toolkit.output.lines import JsonLines, Lines, OutputEvents, Tail
from shoal_toolkit.output.pipes import FlowControl, Sink
from shoal_toolkit.system.loop import Loop

if TYPE_CHECKING:  # few jobs define metrics
    from shoal_toolkit.output.metrics import MetricLineReader, MetricsFile


class Formatter(Protocol):
    """Brings a stream into the form of the log."""

    def feed(self, data: bytes) -> bytes: ...
    def flush(self) -> bytes: ...


class _Stream(NamedTuple):
    """The handlers of one stream of a rank, or of the launcher."""

    formatter: Formatter | None
    tail: Tail | None
    metrics: MetricLineReader | None


class Output:
    """Writes to stdout and stderr of `train` on this host. Creating it sends the log through it, until `close`."""

    def __init__(
        self,
        loop: Loop,
        flow: FlowControl,
        prefixed: bool,
        as_json: bool,
        metrics: MetricsFile | None,
        as_events: bool = False,
    ) -> None:
        out = Sink(loop, STDOUT, flow)
        # One queue if both are the same file (2>&1): a write that ends within a line would let the other stream in.
        shared = as_events or os.path.sameopenfile(STDOUT, STDERR)
        self._sinks = {STDOUT: out, STDERR: out if shared else Sink(loop, STDERR, flow)}
        self._form = JSON if as_json else PREFIXED if prefixed else PLAIN
        self._as_events = as_events
        self._metrics = metrics
        self._streams: dict[tuple[int, int | None], _Stream] = {}
        self._writer_of: dict[Sink, int | None] = {}  # the rank that wrote last
        self._tails: dict[int, Tail] = {}
        set_log_writer(lambda data: self._write(STDERR, None, data))

    @property
    def reads_all(self) -> bool:
        """Whether stdout of a process must pass through here even if no other process writes to the log."""
        return self._as_events or self._form == JSON or self._metrics is not None

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return all(sink.empty for sink in self._sinks.values())

    def write_rank(self, stream: int, rank: int, host: str, data: bytes) -> None:
        """Writes output of a rank, reads its metrics, and keeps the end of its stderr."""
        handlers = self._streams.get((stream, rank)) or self._add_stream(stream, rank, host)
        if handlers.tail is not None:
            handlers.tail.add(data)
        self._write(stream, rank, handlers.formatter.feed(data) if handlers.formatter is not None else data)
        if handlers.metrics is not None:
            handlers.metrics.feed(data)

    def write_launcher(self, stream: int, host: str, data: bytes) -> None:
        """Writes output of the launcher, of a sidecar or of the set-up."""
        formatter = (self._streams.get((stream, None)) or self._add_stream(stream, None, host)).formatter
        self._write(stream, None, formatter.feed(data) if formatter is not None else data)

    def add_tail(self, rank: int, text: str) -> None:
        """Adds the end of stderr of a rank on another host, for `stderr_tail`. Writes nothing."""
        self._tails.setdefault(rank, Tail()).add(text.encode("utf-8", "backslashreplace"))

    def stderr_tail(self, rank: int) -> str:
        """Returns the end of stderr of a rank; empty if nothing is known."""
        return self._tails[rank].text() if rank in self._tails else ""

    def forget_tails(self) -> None:
        """Forgets the end of each stderr: the ranks are started again."""
        for tail in self._tails.values():
            tail.clear()

    def flush(self) -> None:
        """Writes incomplete last lines: no more output will come."""
        for (stream, rank), handlers in self._streams.items():
            if handlers.metrics is not None:
                handlers.metrics.flush()
            if handlers.formatter is not None:
                self._write(stream, rank, handlers.formatter.flush())

    def drop(self) -> None:
        """Discards all waiting and later output, because its reader has gone."""
        for sink in self._sinks.values():
            sink.drop()

    def close(self) -> None:
        """Writes everything, blocking if needed, and closes the metrics file. Later log lines go directly to stderr."""
        set_log_writer(None)
        for sink in self._sinks.values():
            sink.close()
        if self._metrics is not None:
            self._metrics.close()

    def _add_stream(self, stream: int, rank: int | None, host: str) -> _Stream:
        formatter: Formatter | None = None
        if self._as_events:
            formatter = OutputEvents(host, rank, stream, self._form)
        elif self._form == JSON:
            formatter = JsonLines(host, rank, stream)
        elif self._form == PREFIXED and rank is not None:
            formatter = Lines(f"[{rank},{host}] ".encode())
        tail = metrics = None
        if rank is not None:
            tail = self._tails.setdefault(rank, Tail()) if stream == STDERR else None
            metrics = self._metrics.reader(rank, host) if self._metrics is not None else None
        self._streams[stream, rank] = _Stream(formatter, tail, metrics)
        return self._streams[stream, rank]

    def _write(self, stream: int, writer: int | None, data: bytes) -> None:
        if not data:
            return
        sink = self._sinks[stream]
        if writer != self._writer_of.get(sink):
            self._writer_of[sink] = writer
            if sink.last != b"\n":
                data = b"\n" + data  # another writer's line, or progress bar, has not ended
        sink.write(data)
