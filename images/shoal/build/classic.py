"""The classic builder's progress stream → events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shoal.build.events import Event, Failed, Output, Step

_STEP = re.compile(r"^Step (\d+)/(\d+) : (.*)", re.DOTALL)


def events(stream: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Translate the engine's JSON objects into events."""
    step: Step | None = None
    cached = False
    for entry in stream:
        text = str(entry.get("stream", ""))
        if match := _STEP.match(text):
            if step:
                yield _ended(step, "cached" if cached else "done")
            step = Step(match[1], int(match[1]), int(match[2]), match[3].strip(), "started")
            cached = False
            yield step
        elif "error" in entry:
            if step:
                yield _ended(step, "failed", str(entry["error"]))
                step = None
            yield Failed(str(entry["error"]))
        elif step:
            cached = cached or "---> Using cache" in text
            yield from (Output(step.key, line) for line in re.split(r"[\r\n]+", text) if line)
    if step:
        yield _ended(step, "cached" if cached else "done")


def _ended(step: Step, state: Any, error: str = "") -> Step:
    return Step(step.key, step.number, step.total, step.command, state, error=error)
