"""The process group of the backend `smddp`: torch.distributed's collectives on communication engines.

CPU tensors go through the communication engine that the ranks have selected (`engine_selection`). CUDA tensors go
through NCCL, or through copies on the host (`devices`). Messages of CPU tensors between two ranks go through gloo. A
call takes the same path on every rank.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from types import FrameType, MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.engines import Engine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.native import supports_reduction
from smdistributed.core.network_engines import MonitoredEngine
from smdistributed.core.torch.bucket_names import describe_bucket
from smdistributed.core.torch.collective_queue import CollectiveQueue
from smdistributed.core.torch.devices import NativeBackend, open_cuda, select_device
from smdistributed.core.torch.engine_selection import open_engine
from smdistributed.core.torch.recording import record_collective
from smdistributed.core.torch.tensors import (
    DTYPES,
    OPS,
    Flattened,
    all_reduce_sparse,
    flat_of,
    premultiplied_by,
    read_only,
    require_alike,
    require_parts,
    size_of,
)
from smdistributed.core.torch.untraced import untraced

_log = logging.getLogger(__name__)
_Tensors = Sequence[torch.Tensor]
_Work = Any
_Base: Any = dist.ProcessGroup  # its methods have overloads; torch calls those below by position


@untraced
class ProcessGroup(_Base):  # type: ignore[misc]
    """The ranks of one torch.distributed group. Creating the first group selects this rank's CUDA device.

    `others` has, by device type, the torch backends that carry tensors instead of this library: "gloo", or "nccl" for
    "cuda". `init_process_group("cpu:gloo,cuda:smddp")` requests them.
    """

    # Abilities that torch asks a backend for.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_tensor_alloc = supports_time_estimate = False

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, others: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(rank, size)
        self._others = dict(others)
        if not dist.is_initialized():  # the first group, of all ranks
            select_device()
        self._store, self._rank, self._timeout = store, rank, timeout
        self._name = self._description = ""
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._torchs: dict[str, Any] = {"gloo": gloo}  # and "cuda", after the first CUDA tensor
        self._engine, self.engine = open_engine(PrefixStore("smddp", store), rank, size, timeout, gloo)
        if isinstance(self._engine, MonitoredEngine):
            group = weakref.ref(self)  # the monitor must not keep the group alive
            self._engine.monitor.describe_tensor = lambda size: describe_bucket(size, group())
        self._queue = CollectiveQueue(f"smddp-{rank}")
        self._close = weakref.finalize(self, _close, self._queue, self._engine, self._torchs, os.getpid())
        _log.info("smddp: rank %d of %d, communication engine %s", rank, size, self.engine)

    @property
    def gloo(self) -> Any:
        """torch's own gloo group of the same ranks, in C++, which carries messages."""
        return self._torchs["gloo"]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "smddp"

    @property
    def _device_types(self) -> list[torch.device]:
        """The device types of the tensors that the group takes; torch's own property knows only C++ backends."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """Returns the backend of a device: torch's own NCCL once it carries CUDA tensors, else this group."""
        carrier = self._torchs.get("cuda") if device.type == "cuda" else None
        return carrier.backend if isinstance(carrier, NativeBackend) else self

    # torch stores name and description in a group's C++ backends, which this group lacks; device meshes read the name.
    def setGroupName(self, name: str) -> None:  # noqa: N802 (torch's name)
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 (torch's name)
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 (torch's name)
        return self._description

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> _Work:
        options = opts or dist.AllreduceOptions()
        carrier = self._carrier(tensors)
        if carrier is not None:
            return carrier.allreduce(list(tensors), options)
        return self._queue.run(
            self, "all_reduce", partial(self._reduce, tensors, options.reduceOp), tensors, _is_async(opts)
        )

    def average_in_int8(self, tensor: torch.Tensor, lost: torch.Tensor) -> _Work:
        """Averages a contiguous float32 tensor on the CPU over all ranks, in place (`Engine.all_reduce_int8`)."""
        collective = partial(self._engine.all_reduce_int8, flat_of(tensor), "avg", flat_of(lost))
        return self._queue.run(self, "all_reduce_int8", collective, [tensor], True)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> _Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.reduce; the tensors of other ranks keep their elements."""
        options = opts or dist.ReduceOptions()
        carrier = self._carrier(tensors)
        if carrier is not None:
            return carrier.reduce(list(tensors), options)
        return self._queue.run(
            self, "reduce", partial(self._reduce, tensors, options.reduceOp, options.rootRank), tensors, _is_async(opts)
        )

    def _reduce(self, tensors: _Tensors, operation: Any, root: int = -1) -> None:
        """Reduces in place, sparse tensors too. Preparing a tensor in the caller's thread is slower."""
        for tensor in tensors:
            op, factor = _operation(tensor.dtype, operation)
            if tensor.layout is not torch.strided:
                self._reduce_sparse(tensor, op, root, factor)
                continue
            if factor is None and tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in DTYPES:
                self._engine.all_reduce(flat_of(tensor), op, root)  # a bucket or a short message
                continue
            with Flattened(tensor) as flat:
                if factor is None:
                    self._engine.all_reduce(flat_of(flat), op, root)
                    continue
                multiplied = flat * factor
                self._engine.all_reduce(flat_of(multiplied), op, root)
                if root in (-1, self._rank):
                    flat.copy_(multiplied)

    def _reduce_sparse(self, tensor: torch.Tensor, op: str, root: int, factor: Any) -> None:
        """Sums or averages a sparse tensor on all ranks, in place. Raises SMDDPError for one root, or with a factor."""
        if root != -1 or factor is not None:
            raise SMDDPError(
                "The backend smddp sums sparse tensors only on all ranks. Fix: use all_reduce, or to_dense()."
            )
        all_reduce_sparse(self._engine, self._rank, self.size(), tensor, op)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.broadcast. Several tensors go one after the other; sparse ones raise SMDDPError."""
        options = opts or dist.BroadcastOptions()
        carrier = self._carrier(tensors)
        if carrier is not None:
            return carrier.broadcast(list(tensors), options)

        def collective() -> None:
            for tensor in tensors:
                with Flattened(tensor) as flat:
                    self._engine.broadcast(flat_of(flat), options.rootRank)

        return self._queue.run(self, "broadcast", collective, tensors, _is_async(opts))

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather; tensors of several sizes are broadcast one by one."""
        carrier = self._carrier(inputs)
        if carrier is not None:
            return carrier.allgather(list(map(list, outputs)), list(inputs))

        def collective() -> None:
            for parts, tensor in zip(outputs, inputs):
                if all(part.numel() == tensor.numel() for part in parts):
                    self._gather(parts, tensor)
                else:
                    self._gather_uneven(parts, tensor)

        return self._queue.run(
            self, "all_gather", collective, [part for parts in outputs for part in parts], _is_async(opts)
        )

    def _gather(self, outputs: _Tensors, tensor: torch.Tensor, root: int = -1) -> None:
        with ExitStack() as given_back:
            flats = [given_back.enter_context(Flattened(output)) for output in outputs]
            given = read_only(tensor)
            if root in (-1, self._rank):
                require_alike("outputs of a gather", flats, given, self.size())
            self._engine.gather(flat_of(given), list(map(flat_of, flats)), root)

    def _gather_uneven(self, outputs: _Tensors, tensor: torch.Tensor) -> None:
        require_parts("outputs of an all_gather", outputs, tensor.dtype, self.size())
        outputs[self._rank].copy_(tensor)
        for rank, output in enumerate(outputs):
            with Flattened(output) as flat:
                self._engine.broadcast(flat_of(flat), rank)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def allgather_into_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather_into_tensor; several at once. Raises SMDDPError for wrong sizes."""
        carrier = self._carrier(inputs)
        if carrier is not None:
            return carrier.allgather_into_tensor_coalesced(list(outputs), list(inputs))

        def collective() -> None:
            for output, tensor in zip(outputs, inputs):
                with Flattened(output) as flat:
                    given = read_only(tensor)
                    if flat.numel() != self.size() * given.numel():
                        raise SMDDPError(
                            f"The output of an all_gather has {flat.numel()} elements. Fix: give it the elements of "
                            f"all {self.size()} ranks, {given.numel()} each."
                        )
                    parts = list(flat.view(self.size(), given.numel()))
                    require_parts("output of an all_gather", parts, given.dtype, self.size())
                    self._engine.gather(flat_of(given), list(map(flat_of, parts)))

        return self._queue.run(self, "all_gather_into_tensor", collective, outputs, _is_async(opts))

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs, opts)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.gather. Sizes or dtypes that do not fit raise SMDDPError, here or in `wait`."""
        options = opts or dist.GatherOptions()
        carrier = self._carrier(inputs)
        if carrier is not None:
            return carrier.gather(list(map(list, outputs)), list(inputs), options)
        parts = list(outputs[0]) if outputs else []
        return self._queue.run(
            self, "gather", lambda: self._gather(parts, inputs[0], options.rootRank), parts or inputs, _is_async(opts)
        )

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> _Work:
        """See torch.distributed.scatter. Errors are as in `gather`. Only the root's inputs are checked and read."""
        options = opts or dist.ScatterOptions()
        carrier = self._carrier(outputs)
        if carrier is not None:
            return carrier.scatter(list(outputs), list(map(list, inputs)), options)
        parts = list(inputs[0]) if inputs else []

        def collective() -> None:
            with Flattened(outputs[0]) as flat:
                given = list(map(read_only, parts))
                if options.rootRank == self._rank:
                    require_alike("inputs of a scatter", given, flat, self.size())
                self._engine.scatter(list(map(flat_of, given)), flat_of(flat), options.rootRank)

        return self._queue.run(self, "scatter", collective, outputs, _is_async(opts))

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> _Work:
        """See torch.distributed.reduce_scatter; tensors of several sizes are reduced one by one."""
        options = opts or dist.ReduceScatterOptions()
        carrier = self._carrier(outputs)
        if carrier is not None:
            return carrier.reduce_scatter(list(outputs), list(map(list, inputs)), options)

        def collective() -> None:
            for output, parts in zip(outputs, inputs):
                if all(part.numel() == output.numel() for part in parts):
                    self._reduce_scatter(output, parts, options.reduceOp)
                else:
                    self._reduce_scatter_uneven(output, parts, options.reduceOp)

        return self._queue.run(self, "reduce_scatter", collective, outputs, _is_async(opts))

    def _reduce_scatter(self, output: torch.Tensor, parts: _Tensors, operation: Any) -> None:
        """Reduces parts of one size, the r-th into rank r's `output`; the inputs keep their elements."""
        op, factor = _operation(output.dtype, operation)
        given = list(map(read_only, parts))
        if factor is not None:
            given = [part * factor for part in given]
        with Flattened(output) as flat:
            require_alike("inputs of a reduce_scatter", given, flat, self.size())
            self._engine.reduce_scatter(list(map(flat_of, given)), flat_of(flat), op)

    def _reduce_scatter_uneven(self, output: torch.Tensor, parts: _Tensors, operation: Any) -> None:
        """Reduces part after part, each on its rank, for parts of several sizes; the inputs keep their elements."""
        for rank, part in enumerate(parts):
            reduced = part.clone()
            self._reduce([reduced], operation, rank)
            if rank == self._rank:
                output.copy_(reduced)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> _Work:
        carrier = self._carrier(outputs)
        if carrier is not None:
            return carrier.reduce_scatter_tensor_coalesced(
                list(outputs), list(inputs), opts or dist.ReduceScatterOptions()
            )
        parts = [list(tensor.reshape(self.size(), *output.shape)) for output, tensor in zip(outputs, inputs)]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_to_all. Errors are as in `gather`. One CUDA tensor makes all go to its carrier."""
        carrier = self._carrier([*outputs, *inputs])
        if carrier is not None:
            return carrier.alltoall(list(outputs), list(inputs), opts or dist.AllToAllOptions())

        def collective() -> None:
            with ExitStack() as given_back:
                flats = [given_back.enter_context(Flattened(output)) for output in outputs]
                given = list(map(read_only, inputs))
                require_parts("inputs of an all_to_all", given, flats[0].dtype if flats else None, self.size())
                require_parts("outputs of an all_to_all", flats, given[0].dtype, self.size())
                self._engine.all_to_all(list(map(flat_of, given)), list(map(flat_of, flats)))

        return self._queue.run(self, "all_to_all", collective, outputs, _is_async(opts))

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> _Work:
        """See torch.distributed.all_to_all_single. Errors are as in `gather`."""
        carrier = self._carrier([output])
        if carrier is not None:
            options = opts or dist.AllToAllOptions()
            return carrier.alltoall_base(output, tensor, list(output_sizes), list(input_sizes), options)

        def collective() -> None:
            with Flattened(output) as flat:
                into = _rows(flat, output, output_sizes or self._even(output))
                given = read_only(tensor)
                rows = _rows(given, tensor, input_sizes or self._even(tensor))
                require_parts("input of an all_to_all", rows, flat.dtype, self.size())
                require_parts("output of an all_to_all", into, flat.dtype, self.size())
                self._engine.all_to_all(list(map(flat_of, rows)), list(map(flat_of, into)))

        return self._queue.run(self, "all_to_all_single", collective, [output], _is_async(opts))

    def _even(self, tensor: torch.Tensor) -> list[int]:
        """Returns equal numbers of rows for all ranks. Raises SMDDPError if the rows cannot be divided so."""
        rows, rest = divmod(tensor.shape[0], self.size())
        if rest:
            raise SMDDPError(
                f"all_to_all_single: {tensor.shape[0]} rows for {self.size()} ranks. Fix: give split sizes."
            )
        return [rows] * self.size()

    def barrier(self, opts: Any = None) -> _Work:
        return self._queue.run(self, "barrier", self._engine.barrier, [], _is_async(opts))

    def send(self, tensors: _Tensors, rank: int, tag: int) -> _Work:
        return (self._carrier(tensors) or self._torchs["gloo"]).send(list(tensors), rank, tag)

    def recv(self, tensors: _Tensors, rank: int, tag: int) -> _Work:
        return (self._carrier(tensors) or self._torchs["gloo"]).recv(list(tensors), rank, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> _Work:
        return (self._carrier(tensors) or self._torchs["gloo"]).recv_anysource(list(tensors), tag)

    # Their names since torch 2.13.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long ranks wait for each other, except in a carrier of CUDA tensors that is open already."""
        self._timeout = timeout
        self._torchs["gloo"].set_timeout(timeout)
        self._engine.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Closes all backends, as happens when the group is no longer used, or the process ends."""
        self._close()

    def explained(self, error: CollectiveError, result: _Tensors) -> SMDDPError:
        """Returns the error for the caller of a failed collective; it names the gradients' bucket if there is one."""
        bucket = describe_bucket(size_of(result[0]), self) if result else ""
        return SMDDPError(f"{error}{bucket and f'{chr(10)}The tensor is {bucket}.'}")

    def recorded(self, name: str, collective: Callable[[], object], result: _Tensors) -> Callable[[], object]:
        """Returns a collective that records a span: `operation`, `bytes`, `engine`, `dtype`, and maybe `group`."""
        about = {
            "operation": name,
            "bytes": sum(size_of(tensor) for tensor in result),
            "engine": self.engine.split(":")[0],
        }
        about["dtype"] = str(result[0].dtype).removeprefix("torch.") if result else ""
        if self is not dist.group.WORLD:
            about["group"] = self.group_name
        return record_collective(name, collective, about, self._queue)

    def _cuda(self) -> Any:
        """Returns the carrier of CUDA tensors. All ranks make the first call, which opens it and raises its errors."""
        if "cuda" not in self._torchs:
            store = PrefixStore("cuda", self._store)
            requested = "cuda:nccl" if self._others.get("cuda") == "nccl" else ""
            on_cpu = weakref.proxy(self)
            self._torchs["cuda"] = open_cuda(store, self._rank, self.size(), self._timeout, on_cpu, requested)
        return self._torchs["cuda"]

    def _carrier(self, tensors: _Tensors) -> Any:
        """Returns the carrier of these tensors (for CUDA see `_cuda`); None: the group's communication engine is."""
        kind = "cuda" if _on_cuda(tensors) else "cpu"
        if self._others.get(kind) == "gloo":
            return NativeBackend(self._torchs["gloo"])
        return self._cuda() if kind == "cuda" else None


def _close(queue: CollectiveQueue, engine: Engine, torchs: dict[str, Any], pid: int) -> None:
    """Frees a group's communication engine, unless a collective that cannot end still uses it, and its torch groups.

    gloo's threads must not outlive the interpreter: freeing a tensor then would abort the process. A process that `pid`
    forked does not have these threads, and gloo would wait for them; there gloo is never freed.
    """
    if os.getpid() != pid:
        for group in torchs.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    elif queue.close():
        engine.close()
        torchs.clear()


def _is_async(opts: Any) -> bool | None:
    """Whether the caller needs a handle; None: it does, and may be torch's C++.

    Newer versions of torch say so in the options. In older ones only the frame of torch's Python function knows it, as
    the argument `async_op`. Without reading that, each collective would pass through the queue's thread.
    """
    if _TELLS_ASYNC:
        return getattr(opts, "asyncOp", True)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    found = frame.f_locals.get("async_op") if frame else None
    return None if found is None else bool(found)


_TELLS_ASYNC = hasattr(dist.AllreduceOptions(), "asyncOp")  # not in torch 2.0
_BETWEEN = (__name__, untraced.__module__)  # modules that have frames between a caller and `_is_async`


@cache
def _find_operation(dtype: torch.dtype, kind: Any) -> str:
    op = "sum" if kind == dist.ReduceOp.PREMUL_SUM else OPS.get(kind, str(kind))
    by_parts = op in ("sum", "avg") or not dtype.is_complex  # the real and the imaginary parts
    real = torch.view_as_real(torch.empty(0, dtype=dtype)).dtype if dtype.is_complex else dtype
    if not by_parts or not supports_reduction(DTYPES.get(real, ""), op):
        raise SMDDPError(f"The backend smddp does not reduce {dtype} with {op}. Fix: convert the tensor first.")
    return op


def _operation(dtype: torch.dtype, operation: Any) -> tuple[str, Any]:
    """Returns a reduction's name, and a premultiplied sum's factor or None. Raises SMDDPError if the dtype has none."""
    kind = getattr(operation, "op", operation)
    return _find_operation(dtype, kind), premultiplied_by(operation) if kind == dist.ReduceOp.PREMUL_SUM else None


def _on_cuda(tensors: _Tensors) -> bool:
    return tensors[0].is_cuda if len(tensors) == 1 else any(tensor.is_cuda for tensor in tensors)


def _rows(flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> _Tensors:
    """Cuts a tensor's flat form into parts of that many rows each; they are views."""
    row = tensor[0].numel() * (2 if tensor.is_complex() else 1) if tensor.shape[0] else 0
    return torch.split(flat, [size * row for size in sizes])
