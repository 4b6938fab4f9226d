"""The order of a static graph's messages, on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.pipeline import StageEvent, order


def chain(stages: int, microbatches: int, has_backward: bool = True) -> list[list[StageEvent]]:
    """What stages send and receive where each uses the output of the one before; outputs of the last go to all."""
    programs: list[list[StageEvent]] = [[] for _ in range(stages)]
    for m in range(microbatches):
        for stage, program in enumerate(programs):
            last = stage == stages - 1
            program.append(StageEvent(m, False, "begin", f"{m} {stage}"))
            if stage:
                program.append(StageEvent(m, False, "receive", f"{m} from {stage - 1}"))
            if not last:
                program.append(StageEvent(m, False, "send", f"{m} from {stage}"))
                program.append(StageEvent(m, False, "receive", f"{m} to {stage}"))
            else:
                program += [StageEvent(m, False, "send", f"{m} to {other}") for other in range(stages - 1)]
            if not has_backward:
                continue
            kind, label = ("begin", f"{m} back") if last else ("receive", f"{m} back from {stage + 1}")
            program.append(StageEvent(m, True, kind, label))
            if stage:
                program.append(StageEvent(m, True, "send", f"{m} back from {stage}"))
    return programs


def ends(programs: list[list[StageEvent]], orders: list[list[int]]) -> bool:
    """Whether all end that keep to these orders, where sending waits for nobody."""
    sent: set[str] = set()
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for stage, places in enumerate(orders):
            while at[stage] < len(places):
                event = programs[stage][places[at[stage]]]
                if event.kind == "receive" and event.label not in sent:
                    break
                if event.kind == "send":
                    sent.add(event.label)
                at[stage] += 1
                moved = True
    return at == [len(places) for places in orders]


@given(stages=st.integers(2, 6), microbatches=st.integers(1, 9), active=st.integers(1, 9), simple=st.booleans())
def test_every_order_can_be_kept(stages: int, microbatches: int, active: int, simple: bool) -> None:
    programs = chain(stages, microbatches)
    orders = order(programs, active, simple)
    assert ends(programs, orders)
    for program, places in zip(programs, orders):
        assert sorted(places) == list(range(len(program)))
        for m in range(microbatches):
            own = [place for place in places if program[place].microbatch == m]
            assert own == sorted(own)


def in_flight(program: list[StageEvent], places: list[int]) -> int:
    """The most microbatches that a stage has begun and not ended."""
    left = {m: sum(event.microbatch == m for event in program) for m in {event.microbatch for event in program}}
    whole, most = dict(left), 0
    for place in places:
        left[program[place].microbatch] -= 1
        most = max(most, sum(0 < left[m] < whole[m] for m in left))
    return most


@pytest.mark.parametrize(("active", "most"), [(2, [2, 1]), (4, [4, 3])])
def test_no_more_are_in_flight_than_may_be(active: int, most: list[int]) -> None:
    programs = chain(2, 8)
    orders = order(programs, active, simple=False)
    assert all(in_flight(p, places) <= limit for p, places, limit in zip(programs, orders, most))


def test_the_simple_pipeline_has_all_forwards_first() -> None:
    programs = chain(3, 4)
    for program, places in zip(programs, order(programs, 1, simple=True)):
        backwards = [program[place].is_backward for place in places]
        assert backwards == sorted(backwards)


def test_the_first_stage_goes_on_while_the_others_compute() -> None:
    program, places = chain(2, 3)[0], order(chain(2, 3), 4, simple=False)[0]
    first = [program[place] for place in places[:4]]
    assert [(event.microbatch, event.kind) for event in first] == [(0, "begin"), (0, "send"), (1, "begin"), (1, "send")]


def test_without_backwards_nothing_limits_what_is_in_flight() -> None:
    programs = chain(2, 6, has_backward=False)
    assert ends(programs, order(programs, 1, simple=False))


def test_a_missing_message_is_reported() -> None:
    programs = chain(2, 1)
    del programs[0][1]
    with pytest.raises(SMPRuntimeError, match=r"wait for each other forever.*0 from 0"):
        order(programs, 4, simple=False)
