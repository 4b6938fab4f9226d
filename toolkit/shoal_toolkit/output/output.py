"""What becomes of the output that comes to this host: marks, the end kept for the failure file, JSON, metrics.

A line is marked `[rank,host]` where several ranks share the log. Else bytes pass as they are. Everything that is
written on stdout and stderr while the job runs goes through here, so that nobody speaks into another's line.
"""

from __future__ import annotations

import os

from shoal_toolkit import log
from shoal_toolkit.job.contract import HYPERPARAMETERS, Paths
from shoal_toolkit.light_typing import TYPE_CHECKING, Protocol
from shoal_toolkit.output.streams import Flow, Lines, Sink, Tail
from shoal_toolkit.system.loop import Loop

if TYPE_CHECKING:  # few jobs have them
    from shoal_toolkit.output.metrics import Meter, Metrics

STDOUT, STDERR = 1, 2
METRICS = "metrics.json"
METRICS_KEY = "sagemaker_metric_definitions"


class Form(Protocol):
    """Gives a stream its form in the log."""

    def feed(self, data: bytes) -> bytes: ...
    def flush(self) -> bytes: ...


class _Voice:
    """One stream of one rank, or of the launcher (rank None)."""

    def __init__(self, form: Form | None, tail: Tail | None, meter: Meter | None) -> None:
        self.form = form
        self.tail = tail
        self.meter = meter


class Output:
    """stdout and stderr of this host's `train`, and what is read from them."""

    def __init__(self, loop: Loop, flow: Flow, marked: bool, as_json: bool, metrics: Metrics | None) -> None:
        out = Sink(loop, STDOUT, flow)
        # One queue where both are one file (2>&1): a write that ends within a line would else let the other one in.
        self._sinks = {STDOUT: out, STDERR: out if os.path.sameopenfile(STDOUT, STDERR) else Sink(loop, STDERR, flow)}
        self._marked = marked
        self._as_json = as_json
        self._metrics = metrics
        self._voices: dict[tuple[int, int | None], _Voice] = {}
        self._speaker: dict[Sink, int | None] = {}
        self._tails: dict[int, Tail] = {}
        log.speak_through(self._say)

    @property
    def reads_all(self) -> bool:
        """Whether stdout of a process must pass through here too, although it shares the log with nobody."""
        return self._as_json or self._metrics is not None

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return all(sink.empty for sink in self._sinks.values())

    def rank(self, stream: int, rank: int, host: str, data: bytes) -> None:
        """Take output of a rank, as it comes."""
        voice = self._voices.get((stream, rank)) or self._new_voice(stream, rank, host)
        if voice.tail is not None:
            voice.tail.add(data)
        if voice.meter is not None:
            voice.meter.feed(data)
        self._put(stream, rank, voice.form.feed(data) if voice.form is not None else data)

    def launcher(self, stream: int, host: str, data: bytes) -> None:
        """Take words of the launcher, or of what runs beside the script."""
        voice = self._voices.get((stream, None)) or self._new_voice(stream, None, host)
        self._put(stream, None, voice.form.feed(data) if voice.form is not None else data)

    def remember(self, rank: int, text: str) -> None:
        """Take the end of what a rank wrote to stderr on another host."""
        self._tails.setdefault(rank, Tail()).add(text.encode("utf-8", "backslashreplace"))

    def tail(self, rank: int) -> str:
        """Return the end of what a rank wrote to stderr."""
        return self._tails[rank].text() if rank in self._tails else ""

    def flush(self) -> None:
        """Pass on what has no end of line: nothing more is to come."""
        for (stream, rank), voice in self._voices.items():
            if voice.meter is not None:
                voice.meter.flush()
            if voice.form is not None:
                self._put(stream, rank, voice.form.flush())

    def drop(self) -> None:
        """Give up what nobody reads."""
        for sink in self._sinks.values():
            sink.drop()

    def close(self) -> None:
        """Say from now on directly what is to say."""
        log.speak_through(None)
        for sink in self._sinks.values():
            sink.close()
        if self._metrics is not None:
            self._metrics.close()

    def _new_voice(self, stream: int, rank: int | None, host: str) -> _Voice:
        tail = self._tails.setdefault(rank, Tail()) if rank is not None and stream == STDERR else None
        voice = _Voice(self._form(stream, rank, host), tail, self._meter(rank, host))
        self._voices[stream, rank] = voice
        return voice

    def _form(self, stream: int, rank: int | None, host: str) -> Form | None:
        if self._as_json:
            from shoal_toolkit.output.jsonlines import JsonLines

            return JsonLines(host, rank, stream)
        return Lines(f"[{rank},{host}] ".encode()) if self._marked and rank is not None else None

    def _meter(self, rank: int | None, host: str) -> Meter | None:
        if self._metrics is None or rank is None:
            return None
        from shoal_toolkit.output.metrics import Meter

        return Meter(self._metrics, rank, host)

    def _say(self, data: bytes) -> None:
        self._put(STDERR, None, data)

    def _put(self, stream: int, speaker: int | None, data: bytes) -> None:
        if not data:
            return
        sink = self._sinks[stream]
        if speaker != self._speaker.get(sink):
            self._speaker[sink] = speaker
            if sink.last != b"\n":
                data = b"\n" + data  # another's line, or progress bar, has not ended
        sink.write(data)


def defines_metrics(paths: Paths, code_dir: str) -> bool:
    """Whether a job may define metrics: only then is it worth the time to read their definitions."""
    if any(os.path.isfile(os.path.join(directory, METRICS)) for directory in (paths.config, code_dir)):
        return True
    try:
        with open(os.path.join(paths.config, HYPERPARAMETERS), "rb") as file:
            return METRICS_KEY.encode() in file.read()
    except OSError:
        return False
