"""What the stages of a step send and receive, as each of them tells the others. Needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.pipeline import Event


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from a stage to another. number: counts the transfers of a call of the model, in an order in
    which none depends on a later one. what: it is, to people."""

    number: int
    source: int
    target: int
    what: str

    def other(self, stage: int) -> int:
        """The stage at the other end."""
        return self.target if stage == self.source else self.source


class Key(NamedTuple):
    """Of what is sent or received: backward is 0 forward, else counts the backward passes through that call of the
    model. Both ends make the same one."""

    microbatch: int
    call: int
    backward: int
    number: int


class Entry(NamedTuple):
    """kind: as in `backend.pipeline.Event`. transfer: None for "begin"."""

    key: Key
    kind: str
    transfer: Transfer | None

    @property
    def event(self) -> Event:
        """For the pipeline's order."""
        return Event(self.key.microbatch, self.key.backward > 0, self.kind, "/".join(map(str, self.key)))


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """A stage's, in the order of their microbatches, and of what depends on what: calls, then backward passes; of a
    call by the numbers of the transfers, and backwards by them the other way round."""
    phases = dict.fromkeys(entry.key[:3] for entry in entries)
    place = {phase: number for number, phase in enumerate(phases)}

    def at(entry: Entry) -> tuple[int, int, int]:
        key = entry.key
        return key.microbatch, place[key[:3]], -key.number if key.backward else key.number

    return sorted(entries, key=at)


def missing(everybody: Sequence[Sequence[Entry]]) -> Iterator[tuple[int, Entry]]:
    """What stages must do besides, each with its number: send where a gradient is awaited that is nothing, receive
    where one comes that nobody needs.

    Raises SMPRuntimeError for a message whose other end is missing for any other reason.
    """
    entries = [entry for own in everybody for entry in own]
    sent = {entry.key: entry.transfer for entry in entries if entry.kind == "send" and entry.transfer}
    received = {entry.key: entry.transfer for entry in entries if entry.kind == "receive" and entry.transfer}
    passes = [{entry.key[:3] for entry in own} for own in everybody]
    for key in sorted(received.keys() - sent.keys()):
        transfer = received[key]
        if key.backward == 0 or key[:3] not in passes[transfer.target]:
            raise SMPRuntimeError(_unanswered(key, transfer))
        yield transfer.target, Entry(key, "send", transfer)
    for key in sorted(sent.keys() - received.keys()):
        transfer = sent[key]
        if key.backward == 0:
            raise SMPRuntimeError(_unanswered(key, transfer))
        yield transfer.source, Entry(key, "receive", transfer)


def _unanswered(key: Key, transfer: Transfer) -> str:
    if key.backward:
        return (
            f"Stage {transfer.source} computes gradients, and stage {transfer.target}, which uses {transfer.what}, "
            "computes none: use a tape or the optimizer's get_gradients, which hand gradients on where a stage trains "
            "nothing, in place of tf.gradients."
        )
    return (
        f"{transfer.what[0].upper()}{transfer.what[1:]} goes from stage {transfer.source} to stage {transfer.target}, "
        "and only one of them knows: every rank must call the model in the same way."
    )
