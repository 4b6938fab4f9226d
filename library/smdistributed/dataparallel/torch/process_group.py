"""The process group behind the backend `smddp`.

Ranks that share a host, and tensors on the CPU, go through shared memory; what this engine has no collective for, and
ranks on several hosts, through gloo, and CUDA tensors through NCCL. A call goes the same way on every rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _create_work_from_future  # type: ignore[attr-defined]

from smdistributed.core.meeting import LostRankError
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.torch.ordered import Ordered
from smdistributed.dataparallel.torch.shared_memory import SharedMemory, open_shared_memory

ENGINES = ("auto", "shm", "gloo")
_AT_ONCE_BYTES = 64 << 10  # a thread would take longer than the collective

_log = logging.getLogger(__name__)
_Tensors = Sequence[torch.Tensor]


_Base: Any = dist.ProcessGroup  # its methods have overloads; torch calls those below by position
_Work = Any


class ProcessGroup(_Base):  # type: ignore[misc]
    """The ranks of one group of torch.distributed."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._nccl: Any = None
        self._shared, self.engine = _engine(PrefixStore("shm", store), rank, size, timeout)
        self._ordered = Ordered(f"smddp-{rank}")

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name under which the backend is registered."""
        return "smddp"

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_reduce."""
        options = opts or dist.AllreduceOptions()
        op, shared = _operation(options), self._shared_for(tensors)
        if shared is None and not tensors[0].is_cuda and tensors[0].layout == torch.strided:
            return self._all_reduce_by_gloo(tensors, op, options)
        if shared is None or not shared.reduces(op):
            return self._other(tensors).allreduce(list(tensors), options)
        return self._run(shared.all_reduce, [(tensor, op) for tensor in tensors], tensors, options)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_reduce_coalesced."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.broadcast."""
        options, shared = opts or dist.BroadcastOptions(), self._shared_for(tensors)
        if shared is None:
            return self._other(tensors).broadcast(list(tensors), options)
        return self._run(shared.broadcast, [(tensor, options.rootRank) for tensor in tensors], tensors, options)

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather."""
        shared = self._shared_for(inputs)
        if shared is None or not _alike(outputs, inputs):
            return self._other(inputs).allgather(list(map(list, outputs)), list(inputs))
        gathered = [tensor for parts in outputs for tensor in parts]
        return self._run(shared.all_gather, list(zip(outputs, inputs)), gathered, opts)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather_into_tensor."""
        shared = self._shared_for([tensor])
        if shared is None:
            return self._other([tensor])._allgather_base(output, tensor)
        parts = list(output.view(self.size(), tensor.numel()))
        return self._run(shared.all_gather, [(parts, tensor)], [output], opts)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> _Work:
        """See torch.distributed.reduce_scatter."""
        options = opts or dist.ReduceScatterOptions()
        op, shared = _operation(options), self._shared_for(outputs)
        if shared is None or not shared.reduces(op):
            return self._other(outputs).reduce_scatter(list(outputs), list(map(list, inputs)), options)
        calls = [(output, parts, op) for output, parts in zip(outputs, inputs)]
        return self._run(shared.reduce_scatter, calls, outputs, options)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        """See torch.distributed.reduce_scatter_tensor."""
        return self.reduce_scatter([output], [list(tensor.view(self.size(), *output.shape))], opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

    def barrier(self, opts: Any = None) -> _Work:
        """See torch.distributed.barrier."""
        shared = self._shared
        if shared is None:
            return self._gloo.barrier(opts or dist.BarrierOptions())
        return self._run(shared.barrier, [()], [], opts)

    def set_timeout(self, timeout: timedelta) -> None:
        """See torch.distributed.distributed_c10d._set_pg_timeout."""
        self._gloo.set_timeout(timeout)
        if self._shared is not None:
            self._shared.set_timeout(timeout)

    def shutdown(self) -> None:
        """End the threads of this group: those of gloo that outlive the interpreter would abort the process."""
        self._ordered.close()
        self._gloo = self._nccl = None

    def _all_reduce_by_gloo(self, tensors: _Tensors, op: Any, options: Any) -> _Work:
        """gloo has no average, and is wrong where a tensor's elements do not lie side by side (torch 2.13)."""
        dense = [tensor.contiguous() for tensor in tensors]
        average = op == dist.ReduceOp.AVG

        def finish(done: Any) -> _Tensors:
            done.value()  # raises what the work raised
            for tensor, reduced in zip(tensors, dense):
                if average:
                    reduced.div_(self.size())
                if reduced is not tensor:
                    tensor.copy_(reduced)
            return tensors

        if average:
            options.reduceOp = dist.ReduceOp.SUM
        work = self._gloo.allreduce(dense, options)
        simple = not average and all(reduced is tensor for tensor, reduced in zip(tensors, dense))
        return work if simple else _create_work_from_future(work.get_future().then(finish))

    def _run(
        self, collective: Callable[..., None], calls: Sequence[tuple[Any, ...]], result: _Tensors, opts: Any
    ) -> _Work:
        def named() -> None:
            try:
                for arguments in calls:
                    collective(*arguments)
            except LostRankError as error:
                raise SMDDPError(str(error)) from None

        small = sum(tensor.nbytes for tensor in result) <= _AT_ONCE_BYTES
        return self._ordered.run(named, list(result), small or not getattr(opts, "asyncOp", True))

    def _shared_for(self, tensors: _Tensors) -> SharedMemory | None:
        on_cpu = all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)
        return self._shared if on_cpu else None

    def _other(self, tensors: Any) -> Any:
        """Return torch's own group for tensors: gloo, or NCCL for those on a CUDA device."""
        tensor = _first(tensors)
        if tensor is None or not tensor.is_cuda:
            return self._gloo
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            self._nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", self._store), self.rank(), self.size(), options)
        return self._nccl


def create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Make a group, as torch.distributed asks for one."""
    return ProcessGroup(store, rank, size, timeout)


def _delegate(name: str, torchs: str) -> None:
    def call(self: ProcessGroup, tensors: Any, *arguments: Any) -> _Work:
        return getattr(self._other((tensors, arguments)), torchs)(tensors, *arguments)

    call.__name__, call.__doc__ = name, f"See torch.distributed: torch's own {torchs}."
    setattr(ProcessGroup, name, call)


for _name in (
    *("reduce", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
):
    _delegate(_name, _name)
# Their names since torch 2.13.
_delegate("all_to_all_single", "alltoall_base")
_delegate("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_delegate("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def _engine(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[SharedMemory | None, str]:
    """Return the shared memory of the ranks, if any, and the engine's name with the reason for it."""
    wanted = os.environ.get("SMDDP_ENGINE") or "auto"
    if wanted not in ENGINES:
        raise SMDDPError(f"SMDDP_ENGINE={wanted!r} is not an engine: use one of {', '.join(ENGINES)}.")
    if wanted == "gloo":
        return None, "gloo: SMDDP_ENGINE asks for it"
    shared = open_shared_memory(store, rank, size, timeout)
    if isinstance(shared, SharedMemory):
        return shared, "shm: all ranks share this host's memory"
    if wanted == "shm":
        raise SMDDPError(f"SMDDP_ENGINE=shm, and the ranks share no memory ({shared}).")
    _log.info("smddp: engine gloo, as the ranks share no memory (%s)", shared)
    return None, f"gloo: {shared}"


def _operation(options: Any) -> Any:
    return getattr(options.reduceOp, "op", options.reduceOp)


def _alike(outputs: Sequence[_Tensors], inputs: _Tensors) -> bool:
    return all(part.shape == tensor.shape for parts, tensor in zip(outputs, inputs) for part in parts)


def _first(arguments: Any) -> torch.Tensor | None:
    """Return the first tensor in nested sequences: on all ranks but one, a gather has no outputs."""
    if isinstance(arguments, torch.Tensor):
        return arguments
    nested = arguments if isinstance(arguments, (list, tuple)) else ()
    return next((found for found in map(_first, nested) if found is not None), None)
