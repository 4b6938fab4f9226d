"""The messages between the stages of a step. Every stage describes its own to the others. Needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.pipeline import StageEvent


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from one stage to another in a call of the model."""

    number: int
    """Counts the transfers of a call, in an order in which none depends on a later one."""
    source: int
    target: int
    what: str
    """The tensor, in words for error messages."""

    def other(self, stage: int) -> int:
        return self.target if stage == self.source else self.source


class MessageKey(NamedTuple):
    """Identifies a message: sender and receiver make equal keys."""

    microbatch: int
    call: int
    """Counts the model's calls in a microbatch."""
    backward: int
    """0 in the forward pass, else counts the backward passes through that call."""
    number: int


class TensorMessage(NamedTuple):
    """One end of a message, or the begin of a pass."""

    key: MessageKey
    kind: str
    """As in `backend.pipeline.StageEvent`: "begin", "send" or "receive"."""
    transfer: Transfer | None
    """None for "begin"."""

    @property
    def event(self) -> StageEvent:
        """The message as the pipeline's scheduler takes it."""
        return StageEvent(self.key.microbatch, self.key.backward > 0, self.kind, "/".join(map(str, self.key)))


def sort_messages(messages: Sequence[TensorMessage]) -> list[TensorMessage]:
    """Sorts by microbatch and pass, then by transfer: ascending in forward passes, descending in backward passes."""
    passes = dict.fromkeys(message.key[:3] for message in messages)
    place = {each: number for number, each in enumerate(passes)}

    def order(message: TensorMessage) -> tuple[int, int, int]:
        key = message.key
        return key.microbatch, place[key[:3]], -key.number if key.backward else key.number

    return sorted(messages, key=order)


def find_missing(by_stage: Sequence[Sequence[TensorMessage]]) -> Iterator[tuple[int, TensorMessage]]:
    """Yields stages and the messages that they must add: gradients that are zero or unused there.

    Raises SMPRuntimeError for a message that only one end knows for any other reason.
    """
    messages = [message for own in by_stage for message in own]
    sent = {message.key: message.transfer for message in messages if message.kind == "send" and message.transfer}
    received = {message.key: message.transfer for message in messages if message.kind == "receive" and message.transfer}
    passes = [{message.key[:3] for message in own} for own in by_stage]
    for key in sorted(received.keys() - sent.keys()):
        transfer = received[key]
        if key.backward == 0 or key[:3] not in passes[transfer.target]:
            raise SMPRuntimeError(_unmatched(key, transfer))
        yield transfer.target, TensorMessage(key, "send", transfer)
    for key in sorted(sent.keys() - received.keys()):
        transfer = sent[key]
        if key.backward == 0:
            raise SMPRuntimeError(_unmatched(key, transfer))
        yield transfer.source, TensorMessage(key, "receive", transfer)


def _unmatched(key: MessageKey, transfer: Transfer) -> str:
    if key.backward:
        return (
            f"Stage {transfer.source} computes gradients, and stage {transfer.target}, which uses {transfer.what}, "
            "computes none. Fix: use a tape or the optimizer's get_gradients, which hand gradients on where a stage "
            "trains nothing, in place of tf.gradients."
        )
    return (
        f"{transfer.what[0].upper()}{transfer.what[1:]} goes from stage {transfer.source} to stage {transfer.target}, "
        "and only one of them knows. Fix: call the model in the same way on every rank."
    )
