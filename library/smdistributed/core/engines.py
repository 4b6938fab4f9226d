"""The interface of communication engines, which move flat tensors between the ranks of a group.

`ShmEngine` uses memory that the ranks of one host share. `NetworkEngine` uses the messages of a `TensorTransport` such
as MPI. `HierarchicalEngine` uses both: each byte leaves a host once. `MonitoredEngine` wraps the last two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from smdistributed.core.flat import Flat

Flats = Sequence[Flat]


class Request(Protocol):
    """A message in transit, or a barrier."""

    def wait(self) -> object:
        """Blocks until the message's memory may be used. Raises RuntimeError if it fails or takes too long."""


class TensorTransport(Protocol):
    """Point-to-point messages between ranks, by numbers of their own. A message keeps its memory's owner alive."""

    def send(self, message: Flat, rank: int, tag: int) -> Request:
        """Starts to send a message; the receiver expects the same tag and size."""

    def recv(self, message: Flat, rank: int, tag: int) -> Request:
        """Starts to receive a message into the memory of `message`."""

    def barrier(self) -> Request:
        """Starts a barrier of all ranks."""

    def set_timeout(self, seconds: float) -> None:
        """Sets how long later messages may take."""


class Engine(ABC):
    """Collectives of flat tensors. All ranks of the group call the same methods in the same order, from one thread.

    The caller keeps the tensors' memory alive until the call returns. A root of -1 means all ranks. Collectives raise
    CollectiveError if a rank has ended, is late or calls another collective; the group is unusable afterwards.
    """

    @abstractmethod
    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        """Combines elements over all ranks into `flat`; on ranks other than `root` it keeps its elements.

        `source` has this rank's elements, if they are not in `flat`; then `flat` is uninitialized except on `root`.
        """

    def all_reduce_int8(self, flat: Flat, op: str, lost: Flat) -> None:
        """Sums or averages float32 elements over all ranks, into `flat`; messages between hosts carry int8.

        All ranks get the same bits. `lost`, of the same length, is zero before the first call. It then holds this
        rank's rounding errors. The next call for this tensor adds them (error feedback). In shared memory nothing is
        rounded.
        """
        self.all_reduce(flat, op)

    @abstractmethod
    def broadcast(self, flat: Flat, root: int) -> None:
        """Copies the root's `flat` into every rank's."""

    @abstractmethod
    def gather(self, flat: Flat, outputs: Flats, root: int = -1) -> None:
        """Copies every rank's `flat` into the root's `outputs`, in rank order; other ranks pass no outputs."""

    @abstractmethod
    def scatter(self, inputs: Flats, flat: Flat, root: int) -> None:
        """Copies the root's `inputs`, in rank order, into each rank's `flat`; other ranks pass no inputs."""

    @abstractmethod
    def reduce_scatter(self, inputs: Flats, flat: Flat, op: str) -> None:
        """Combines `inputs[r]` over all ranks into rank r's `flat`."""

    @abstractmethod
    def all_to_all(self, inputs: Flats, outputs: Flats) -> None:
        """Copies `inputs[r]` to rank r, into its `outputs` at this rank's place; sizes may differ, also be 0."""

    @abstractmethod
    def barrier(self) -> None:
        """Blocks until every rank has called it."""

    @abstractmethod
    def set_timeout(self, seconds: float) -> None:
        """Sets how long ranks wait for each other."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends the group for this rank, and tells the other ranks of its host if it can."""

    @abstractmethod
    def close(self) -> None:
        """Frees memory and connections; no collective may follow."""
