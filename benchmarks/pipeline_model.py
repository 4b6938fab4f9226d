"""A pipeline as the schedule of the library runs it, without ranks: the turns of each stage, and a picture.

It runs `smdistributed.modelparallel.backend.schedule` itself. The times are a model: all stages take equally long,
messages take no time, and the loss is on the first stage.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smdistributed.modelparallel.backend.schedule import Schedule, Turn, TurnKind

FORWARD, BACKWARD = 1.0, 2.0
PICTURE = Path(__file__).resolve().parents[1] / "docs/pipeline.svg"
SCALE, ROW, LEFT, TOP = 26, 34, 70, 40
COLORS = {TurnKind.FORWARD: "#4c78a8", TurnKind.BACKWARD: "#f58518"}


@dataclass(frozen=True)
class Span:
    """A turn of a stage, from `begin` to `end`."""

    stage: int
    turn: Turn
    begin: float
    end: float


class Model:
    """One step. active: as `active_microbatches`. simple: all forwards come first."""

    def __init__(self, stages: int, microbatches: int, active: int | None = None, simple: bool = False) -> None:
        self.stages, self.microbatches, self.simple = stages, microbatches, simple
        window = microbatches if simple else (active or stages + 2)
        self._schedules = [Schedule(window - (0 if simple else stage)) for stage in range(stages)]
        self._waiting: list[list[Turn]] = [[] for _ in range(stages)]
        self._busy = [False] * stages
        self._losses = 0
        self._order = itertools.count()
        self._ends: list[tuple[float, int, Span]] = []

    def run(self) -> Iterator[Span]:
        """What is done, in the order in which it ends."""
        self._waiting[0] = [Turn(TurnKind.FORWARD, microbatch) for microbatch in range(self.microbatches)]
        now = 0.0
        self._begin(now)
        while self._ends:
            now, _, span = heapq.heappop(self._ends)
            self._busy[span.stage] = False
            self._end(span)
            while self._ends and self._ends[0][0] == now:
                _, _, other = heapq.heappop(self._ends)
                self._busy[other.stage] = False
                self._end(other)
                yield other
            self._begin(now)
            yield span

    def _begin(self, now: float) -> None:
        for stage, waiting in enumerate(self._waiting):
            index = None if self._busy[stage] else self._schedules[stage].choose(waiting)
            if index is not None:
                turn = waiting.pop(index)
                seconds = {TurnKind.FORWARD: FORWARD, TurnKind.BACKWARD: BACKWARD, TurnKind.RESUME: 0.0}[turn.kind]
                self._busy[stage] = True
                heapq.heappush(self._ends, (now + seconds, next(self._order), Span(stage, turn, now, now + seconds)))

    def _end(self, span: Span) -> None:
        turn, last = span.turn, self.stages - 1
        if turn.kind is TurnKind.RESUME:  # the loss
            self._losses += 1
            ready = [turn.microbatch]
            if self.simple:
                ready = list(range(self.microbatches)) if self._losses == self.microbatches else []
            self._waiting[last] += [Turn(TurnKind.BACKWARD, microbatch) for microbatch in ready]
        elif turn.kind is TurnKind.FORWARD:
            forward = span.stage < last
            kind, to = (TurnKind.FORWARD, span.stage + 1) if forward else (TurnKind.RESUME, 0)
            self._waiting[to].append(Turn(kind, turn.microbatch))
        else:
            self._schedules[span.stage].finish(turn.microbatch)
            if span.stage:
                self._waiting[span.stage - 1].append(turn)


def bubble(model: Model) -> float:
    """The share of the step in which a stage idles."""
    return 1 - model.microbatches * (FORWARD + BACKWARD) / max(span.end for span in model.run())


def picture(stages: int, microbatches: int) -> str:
    """An SVG of both pipelines."""
    rows = []
    for number, simple in enumerate((True, False)):
        model = Model(stages, microbatches, simple=simple)
        spans = [span for span in model.run() if span.turn.kind in COLORS]
        name = "simple: all forwards first" if simple else "interleaved: backwards as soon as they can"
        rows.append(
            (TOP + number * (stages * ROW + 2 * TOP), f"{name}; idle {bubble_of(spans, microbatches):.0%}", spans)
        )
    width = LEFT + SCALE * max(span.end for _, _, spans in rows for span in spans) + 20
    height = 2 * (stages * ROW + 2 * TOP)
    body = "".join(_row(top, title, spans, stages) for top, title, spans in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def bubble_of(spans: list[Span], microbatches: int) -> float:
    return 1 - microbatches * (FORWARD + BACKWARD) / max(span.end for span in spans)


def _row(top: int, title: str, spans: list[Span], stages: int) -> str:
    parts = [f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{title}</text>']
    parts += [f'<text x="10" y="{top + s * ROW + 20}">stage {s}</text>' for s in range(stages)]
    for span in sorted(spans, key=lambda span: (span.stage, span.begin)):
        x, y, width = LEFT + SCALE * span.begin, top + span.stage * ROW, SCALE * (span.end - span.begin)
        fill, middle = COLORS[span.turn.kind], x + width / 2
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width - 1:.0f}" height="{ROW - 6}" rx="3" fill="{fill}"/>'
            f'<text x="{middle:.0f}" y="{y + 19}" fill="white" text-anchor="middle">{span.turn.microbatch}</text>'
        )
    return "".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", default=PICTURE, help="the picture (docs/pipeline.svg)")
    parser.parse_args().output.write_text(picture(4, 8))
