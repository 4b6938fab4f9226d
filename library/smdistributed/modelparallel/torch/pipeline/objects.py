"""Python objects between ranks as torch messages: tensors arrive on the kind of device that they were sent from."""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.messages import Kind, Message, send
from smdistributed.modelparallel.torch.pipeline.packing import pack, unpack


def open_object_exchange(transport: Transport, rank: int, seconds: float) -> ObjectExchange:
    """Makes this rank's object exchange; deliver messages of `Kind.OBJECT` to it.

    Args:
        transport: Carries the messages.
        rank: This process's rank in the job.
        seconds: How long `receive` waits.

    Returns:
        The exchange. Sending and receiving use `transport` only when they are called.
    """

    def send_object(to: int, channel: str, obj: object) -> None:
        body, tensors = pack(obj)
        send(transport, to, Kind.OBJECT, 0, call=channel, about=body, tensors=tensors)

    return ObjectExchange(rank, send_object, _read, seconds)


def _read(message: Message) -> Any:
    return unpack(message.about, [tensor for tensor in message.all_here() if tensor is not None])
