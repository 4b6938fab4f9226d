"""Objects between ranks as torch's messages: their tensors arrive on the kind of device that they were on."""

from __future__ import annotations

from typing import Any

from smdistributed.core.mail import Mail
from smdistributed.modelparallel.backend.post import Post
from smdistributed.modelparallel.torch.messages import Kind, Message, send
from smdistributed.modelparallel.torch.packing import pack, unpack


def open_post(mail: Mail, rank: int, seconds: float) -> Post:
    """The post of this rank, which is to be given messages of Kind.OBJECT. seconds: how long it waits for one."""

    def send_object(to: int, box: str, obj: object) -> None:
        body, tensors = pack(obj)
        send(mail, to, Kind.OBJECT, 0, call=box, about=body, tensors=tensors)

    return Post(rank, send_object, _read, seconds)


def _read(message: Message) -> Any:
    return unpack(message.about, [tensor for tensor in message.all_here() if tensor is not None])
