"""Replaces torch.cuda's streams and events. All work is done at once, so streams have nothing to order."""

from __future__ import annotations

import time
from typing import Any

import torch

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import DeviceLike


class Stream:
    def __init__(self, device: DeviceLike = None, priority: int = 0, **_: Any) -> None:
        self.device = devices.resolve(device)
        self.priority = priority
        self.cuda_stream = 0

    @property
    def device_index(self) -> int:
        return int(self.device.index)

    def synchronize(self) -> None:
        """Returns at once: all work is done."""

    def wait_event(self, event: Event) -> None:
        """Returns at once: all work is done."""

    def wait_stream(self, stream: Stream) -> None:
        """Returns at once: all work is done."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """Replaces torch.cuda.Event. Times are real times of the CPU."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Returns milliseconds between recorded events with timing. Raises ValueError, or RuntimeError in torch 2.0."""
        error = RuntimeError if torch.__version__.startswith("2.0.") else ValueError
        if not (self.enable_timing and end_event.enable_timing):
            raise error("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise error("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded - self._recorded) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once: all work is done."""

    def wait(self, stream: Stream | None = None) -> None:
        """Returns at once: all work is done."""


class StreamContext:
    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def current_stream(device: DeviceLike = None) -> Stream:
    """Returns a stream of the device; all are equal."""
    return Stream(device)


def patch(_: int) -> None:
    """Replaces streams, events and Tensor.record_stream: they do nothing, or measure the CPU's time."""
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "set_stream": lambda stream: None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    # torch would reject these streams
    setattr(torch.Tensor, "record_stream", lambda self, stream: None)  # noqa: B010
    for name in ("Stream", "Event"):
        setattr(torch.cuda.streams, name, replaced[name])
    if hasattr(torch, "accelerator"):
        for name in ("current_stream", "set_stream"):
            setattr(torch.accelerator, name, replaced[name])
