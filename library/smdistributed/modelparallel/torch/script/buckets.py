"""Buckets of parameters: their gradients, or their values, travel to the replicas in one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.torch.nn.module import split_of

_BROADCAST_BYTES = 25 << 20  # as DistributedDataParallel has it


@dataclass(frozen=True)
class Replicas:
    """Ranks that have the same parameters. Averages are sums over `ranks`, divided by `divisor`."""

    group: Any
    ranks: Sequence[int]
    divisor: float


def by_replicas(tensors: Iterable[Any], replicas: tuple[Replicas, Replicas]) -> Iterator[tuple[Replicas, list[Any]]]:
    """Yields which replicas have which tensors, in their order. `replicas`: of whole ones, and of TP_GROUP's shares."""
    given = list(tensors)
    for its_replicas, is_share in zip(replicas, (False, True)):
        its = [tensor for tensor in given if (split_of(tensor) is not None) is is_share]
        if its:
            yield its_replicas, its


class Bucket:
    """Parameters with gradients that travel together to `replicas`, and their copy `flat` while it does.

    `owner`: the replica that alone keeps the averages; None: all do. `is_early`: whether a gradient has changed since
    the copy.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Replicas, owner: int | None = None) -> None:
        self.parameters, self.replicas, self.owner = parameters, replicas, owner
        self.flat: torch.Tensor | None = None
        self.work: Any = None
        self.is_early = False

    @property
    def sets_averages_apart(self) -> bool:
        """Whether later gradients are averaged without the average of earlier steps, and then added to it.

        An average of equal averages is the same, unless one replica alone has it, or the divisor counts other ranks.
        """
        return self.owner is not None or self.replicas.divisor != len(self.replicas.ranks)

    def wait(self) -> None:
        """Waits for the averages, which are then in `flat`. A hook gives a future of the tensor, or of a list of it.

        A bucket without `flat` stays here.
        """
        if self.work is None:
            return
        value = self.work.wait()
        if isinstance(value, list):
            (value,) = value
        if isinstance(value, torch.Tensor):
            self.flat = value


class HookedBucket:
    """A bucket as communication hooks get it, with the methods of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket, index: int, count: int) -> None:
        self._bucket, self._index, self._count = bucket, index, count

    def index(self) -> int:
        """The number of the bucket, from 0, in the order of sending."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last bucket of the step."""
        return self._index == self._count - 1

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket in one vector."""
        assert self._bucket.flat is not None
        return self._bucket.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces the vector."""
        self._bucket.flat = tensor

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the bucket."""
        return list(self._bucket.parameters)

    def gradients(self) -> list[torch.Tensor]:
        """The parts of the vector, with the shapes of the parameters."""
        parts = self.buffer().split([parameter.numel() for parameter in self._bucket.parameters])  # type: ignore[no-untyped-call]
        return [part.view_as(parameter) for part, parameter in zip(parts, self._bucket.parameters)]


def broadcast_in_buckets(tensors: Iterable[torch.Tensor], group: Any, source: int) -> None:
    """Copies tensors of rank `source` of the job to the group, many in one message. Empty ones are left out."""
    given = [tensor.detach() for tensor in tensors if tensor.numel()]
    if given:
        dist._broadcast_coalesced(group, given, _BROADCAST_BYTES, dist.get_group_rank(group, source))  # type: ignore[attr-defined]


def split_into_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yields consecutive parameters of the same dtype and device, about `bucket_bytes` at a time."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not alike or size >= bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
