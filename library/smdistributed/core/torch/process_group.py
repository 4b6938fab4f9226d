"""The process group behind the backend `smddp`: torch.distributed's collectives on this library's engines.

Tensors on the CPU go through the engine that the ranks have agreed on (`engine_selection`), those on CUDA devices through NCCL,
messages from one rank to another through gloo. A call goes the same way on every rank.
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
from types import FrameType, MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core import timeline
from smdistributed.core.engines import Engine, MonitoredEngine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.torch import buckets, observation
from smdistributed.core.torch.devices import open_cuda, take_device
from smdistributed.core.torch.engine_selection import open_engine
from smdistributed.core.torch.ordered import Ordered
from smdistributed.core.torch.sparse import all_reduce_sparse
from smdistributed.core.torch.tensors import (
    DTYPES,
    OPS,
    Flattened,
    flat_of,
    premultiplied_by,
    read_only,
    require_alike,
    require_parts,
    size_of,
)
from smdistributed.core.torch.torchs_own import TorchsOwn
from smdistributed.core.torch.untraced import untraced

_log = logging.getLogger(__name__)
_Tensors = Sequence[torch.Tensor]
_Work = Any
_Base: Any = dist.ProcessGroup  # its methods have overloads; torch calls those below by position


@untraced
class ProcessGroup(_Base):  # type: ignore[misc]
    """The ranks of one group of torch.distributed.

    others: torch's backends that carry the tensors on a type of device instead of this library's, by that type: "gloo",
    or "nccl" for "cuda", as asked for by `init_process_group("cpu:gloo,cuda:smddp")`.
    """

    # What torch asks of a backend that can do more.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_tensor_alloc = supports_time_estimate = False

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, others: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(rank, size)
        self._others = dict(others)
        if not dist.is_initialized():  # the first group, of all ranks
            take_device()
        self._store, self._rank, self._timeout = store, rank, timeout
        self._name = self._description = ""
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._torchs: dict[str, Any] = {"gloo": gloo}  # and "cuda", when a tensor on such a device comes
        self._engine, self.engine = open_engine(PrefixStore("smddp", store), rank, size, timeout, gloo)
        if isinstance(self._engine, MonitoredEngine):
            group = weakref.ref(self)  # the engine must not keep the group
            self._engine.watch.about = lambda size: buckets.described(size, group())
        self._ordered = Ordered(f"smddp-{rank}")
        self._operations: dict[tuple[torch.dtype, Any], str] = {}
        self._close = weakref.finalize(self, _close, self._ordered, self._engine, self._torchs, os.getpid())
        _log.info("smddp: rank %d of %d, engine %s", rank, size, self.engine)

    @property
    def gloo(self) -> Any:
        """torch's own group of the same ranks, in C++, which carries messages."""
        return self._torchs["gloo"]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name under which the backend is registered."""
        return "smddp"

    @property
    def _device_types(self) -> list[torch.device]:
        """On what the group takes tensors; torch's own property knows only of backends that are written in C++."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch asks for more of: its own NCCL, where that has begun to carry the tensors, else this."""
        carrier = self._torchs.get("cuda") if device.type == "cuda" else None
        return carrier.backend if isinstance(carrier, TorchsOwn) else self

    # torch keeps the two with the backends of a group, of which one in Python has none; meshes ask for the name.
    def setGroupName(self, name: str) -> None:  # noqa: N802 (torch's name)
        """Take the name that torch gives to the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        """Return the group's name: torch.distributed.ProcessGroup.group_name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 (torch's name)
        """Take the description that torch gives to the group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 (torch's name)
        """Return the group's description: torch.distributed.ProcessGroup.group_desc."""
        return self._description

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_reduce."""
        options = opts or dist.AllreduceOptions()
        other = self._other(tensors)
        if other is not None:
            return other.allreduce(list(tensors), options)
        return self._run("all_reduce", lambda: self._reduce(tensors, options.reduceOp), tensors, opts)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_reduce_coalesced."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.reduce; what the other ranks hold stays as it was."""
        options = opts or dist.ReduceOptions()
        other = self._other(tensors)
        if other is not None:
            return other.reduce(list(tensors), options)
        return self._run("reduce", lambda: self._reduce(tensors, options.reduceOp, options.rootRank), tensors, opts)

    def _reduce(self, tensors: _Tensors, operation: Any, root: int = -1) -> None:
        for tensor in tensors:
            op, factor = self._operation(tensor, operation)
            if tensor.layout is not torch.strided:
                self._reduce_sparse(tensor, op, root, factor)
                continue
            if factor is None and tensor.dim() == 1 and tensor.is_contiguous() and not tensor.is_complex():
                self._engine.all_reduce(flat_of(tensor), op, root)  # a bucket, or a short message: nothing to prepare
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
        if root != -1 or factor is not None:
            raise SMDDPError("The backend smddp sums sparse tensors on all ranks alone: use all_reduce, or to_dense().")
        all_reduce_sparse(self._engine, self._rank, self.size(), tensor, op)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.broadcast."""
        options = opts or dist.BroadcastOptions()
        other = self._other(tensors)
        if other is not None:
            return other.broadcast(list(tensors), options)

        def collective() -> None:
            for tensor in tensors:
                with Flattened(tensor) as flat:
                    self._engine.broadcast(flat_of(flat), options.rootRank)

        return self._run("broadcast", collective, tensors, opts)

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather; tensors of several sizes are broadcast one by one."""
        other = self._other(inputs)
        if other is not None:
            return other.allgather(list(map(list, outputs)), list(inputs))

        def collective() -> None:
            for parts, tensor in zip(outputs, inputs):
                if all(part.numel() == tensor.numel() for part in parts):
                    self._gather(parts, tensor)
                else:
                    self._gather_uneven(parts, tensor)

        return self._run("all_gather", collective, [part for parts in outputs for part in parts], opts)

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
        """See torch.distributed.all_gather_into_tensor."""
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def allgather_into_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather_into_tensor; several at once."""
        other = self._other(inputs)
        if other is not None:
            return other.allgather_into_tensor_coalesced(list(outputs), list(inputs))

        def collective() -> None:
            for output, tensor in zip(outputs, inputs):
                with Flattened(output) as flat:
                    given = read_only(tensor)
                    if flat.numel() != self.size() * given.numel():
                        raise SMDDPError(
                            f"The output of an all_gather has {flat.numel()} elements: give it those of all "
                            f"{self.size()} ranks, {given.numel()} each."
                        )
                    parts = list(flat.view(self.size(), given.numel()))
                    require_parts("output of an all_gather", parts, given.dtype, self.size())
                    self._engine.gather(flat_of(given), list(map(flat_of, parts)))

        return self._run("all_gather_into_tensor", collective, outputs, opts)

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_gather_coalesced: `outputs` has a list for each rank."""
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs, opts)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.gather."""
        options = opts or dist.GatherOptions()
        other = self._other(inputs)
        if other is not None:
            return other.gather(list(map(list, outputs)), list(inputs), options)
        parts = list(outputs[0]) if outputs else []
        return self._run("gather", lambda: self._gather(parts, inputs[0], options.rootRank), parts or inputs, opts)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> _Work:
        """See torch.distributed.scatter."""
        options = opts or dist.ScatterOptions()
        other = self._other(outputs)
        if other is not None:
            return other.scatter(list(outputs), list(map(list, inputs)), options)
        parts = list(inputs[0]) if inputs else []

        def collective() -> None:
            with Flattened(outputs[0]) as flat:
                given = list(map(read_only, parts))
                if options.rootRank == self._rank:
                    require_alike("inputs of a scatter", given, flat, self.size())
                self._engine.scatter(list(map(flat_of, given)), flat_of(flat), options.rootRank)

        return self._run("scatter", collective, outputs, opts)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> _Work:
        """See torch.distributed.reduce_scatter; tensors of several sizes are reduced one by one."""
        options = opts or dist.ReduceScatterOptions()
        other = self._other(outputs)
        if other is not None:
            return other.reduce_scatter(list(outputs), list(map(list, inputs)), options)

        def collective() -> None:
            for output, parts in zip(outputs, inputs):
                if all(part.numel() == output.numel() for part in parts):
                    self._reduce_scatter(output, parts, options.reduceOp)
                else:
                    self._reduce_scatter_uneven(output, parts, options.reduceOp)

        return self._run("reduce_scatter", collective, outputs, opts)

    def _reduce_scatter(self, output: torch.Tensor, parts: _Tensors, operation: Any) -> None:
        op, factor = self._operation(output, operation)
        given = list(map(read_only, parts))
        if factor is not None:
            given = [part * factor for part in given]
        with Flattened(output) as flat:
            require_alike("inputs of a reduce_scatter", given, flat, self.size())
            self._engine.reduce_scatter(list(map(flat_of, given)), flat_of(flat), op)

    def _reduce_scatter_uneven(self, output: torch.Tensor, parts: _Tensors, operation: Any) -> None:
        for rank, part in enumerate(parts):
            reduced = part.clone()
            self._reduce([reduced], operation, rank)
            if rank == self._rank:
                output.copy_(reduced)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        """See torch.distributed.reduce_scatter_tensor."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.reduce_scatter_tensor; several at once."""
        other = self._other(outputs)
        if other is not None:
            return other.reduce_scatter_tensor_coalesced(
                list(outputs), list(inputs), opts or dist.ReduceScatterOptions()
            )
        parts = [list(tensor.reshape(self.size(), *output.shape)) for output, tensor in zip(outputs, inputs)]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> _Work:
        """See torch.distributed.all_to_all."""
        other = self._other([*outputs, *inputs])
        if other is not None:
            return other.alltoall(list(outputs), list(inputs), opts or dist.AllToAllOptions())

        def collective() -> None:
            with ExitStack() as given_back:
                flats = [given_back.enter_context(Flattened(output)) for output in outputs]
                given = list(map(read_only, inputs))
                require_parts("inputs of an all_to_all", given, flats[0].dtype if flats else None, self.size())
                require_parts("outputs of an all_to_all", flats, given[0].dtype, self.size())
                self._engine.all_to_all(list(map(flat_of, given)), list(map(flat_of, flats)))

        return self._run("all_to_all", collective, outputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> _Work:
        """See torch.distributed.all_to_all_single."""
        other = self._other([output])
        if other is not None:
            options = opts or dist.AllToAllOptions()
            return other.alltoall_base(output, tensor, list(output_sizes), list(input_sizes), options)

        def collective() -> None:
            with Flattened(output) as flat:
                into = _rows(flat, output, output_sizes or self._even(output))
                given = read_only(tensor)
                rows = _rows(given, tensor, input_sizes or self._even(tensor))
                require_parts("input of an all_to_all", rows, flat.dtype, self.size())
                require_parts("output of an all_to_all", into, flat.dtype, self.size())
                self._engine.all_to_all(list(map(flat_of, rows)), list(map(flat_of, into)))

        return self._run("all_to_all_single", collective, [output], opts)

    def _even(self, tensor: torch.Tensor) -> list[int]:
        rows, rest = divmod(tensor.shape[0], self.size())
        if rest:
            raise SMDDPError(f"all_to_all_single: {tensor.shape[0]} rows for {self.size()} ranks: give split sizes.")
        return [rows] * self.size()

    def barrier(self, opts: Any = None) -> _Work:
        """See torch.distributed.barrier."""
        return self._run("barrier", self._engine.barrier, [], opts)

    def send(self, tensors: _Tensors, rank: int, tag: int) -> _Work:
        """See torch.distributed.send."""
        return (self._other(tensors) or self._torchs["gloo"]).send(list(tensors), rank, tag)

    def recv(self, tensors: _Tensors, rank: int, tag: int) -> _Work:
        """See torch.distributed.recv."""
        return (self._other(tensors) or self._torchs["gloo"]).recv(list(tensors), rank, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> _Work:
        """See torch.distributed.recv without a source."""
        return (self._other(tensors) or self._torchs["gloo"]).recv_anysource(list(tensors), tag)

    # Their names since torch 2.13.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def set_timeout(self, timeout: timedelta) -> None:
        """See torch.distributed.distributed_c10d._set_pg_timeout."""
        self._timeout = timeout
        self._torchs["gloo"].set_timeout(timeout)
        self._engine.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Give up the engines; done as well when the group is no longer used, and when the process ends."""
        self._close()

    def _operation(self, tensor: torch.Tensor, operation: Any) -> tuple[str, Any]:
        """The reduction by its name, and the factor of a premultiplied sum.

        Raises SMDDPError where the engine has none such for the tensor.
        """
        kind = getattr(operation, "op", operation)
        found = self._operations.get((tensor.dtype, kind))
        if found is None:
            found = self._operations[tensor.dtype, kind] = self._find_operation(tensor, kind)
        return found, premultiplied_by(operation) if kind == dist.ReduceOp.PREMUL_SUM else None

    def _find_operation(self, tensor: torch.Tensor, kind: Any) -> str:
        op = "sum" if kind == dist.ReduceOp.PREMUL_SUM else OPS.get(kind, str(kind))
        by_parts = op in ("sum", "avg") or not tensor.is_complex()  # as the real and the imaginary ones
        dtype = torch.view_as_real(tensor).dtype if tensor.is_complex() else tensor.dtype
        if not by_parts or not self._engine.reduces(DTYPES.get(dtype, ""), op):
            raise SMDDPError(f"The backend smddp does not reduce {tensor.dtype} with {op}: convert the tensor first.")
        return op

    def _run(self, name: str, collective: Callable[[], None], result: _Tensors, opts: Any) -> _Work:
        def named() -> None:
            try:
                collective()
            except CollectiveError as error:
                bucket = buckets.described(size_of(result[0]), self) if result else ""
                raise SMDDPError(f"{error}{bucket and f'{chr(10)}The tensor is {bucket}.'}") from None

        if timeline.recorder is not None:
            named = self._observed(name, named, result)
        return self._ordered.run(named, result, _is_async(opts))

    def _observed(self, name: str, collective: Callable[[], None], result: _Tensors) -> Callable[[], None]:
        """The same, recorded in the timeline."""
        about = {
            "operation": name,
            "bytes": sum(size_of(tensor) for tensor in result),
            "engine": self.engine.split(":")[0],
        }
        about["dtype"] = str(result[0].dtype).removeprefix("torch.") if result else ""
        if self is not dist.group.WORLD:
            about["group"] = self.group_name
        return observation.observed(name, collective, about, self._ordered)

    def _cuda(self) -> Any:
        """What carries tensors on CUDA devices."""
        if "cuda" not in self._torchs:
            store = PrefixStore("cuda", self._store)
            asked = "cuda:nccl" if self._others.get("cuda") == "nccl" else ""
            self._torchs["cuda"] = open_cuda(store, self._rank, self.size(), self._timeout, weakref.proxy(self), asked)
        return self._torchs["cuda"]

    def _other(self, tensors: _Tensors) -> Any:
        """What carries these tensors instead of this group's engine; None: nothing does."""
        kind = "cuda" if _on_cuda(tensors) else "cpu"
        if self._others.get(kind) == "gloo":
            return TorchsOwn(self._torchs["gloo"])
        return self._cuda() if kind == "cuda" else None


def _close(ordered: Ordered, engine: Engine, torchs: dict[str, Any], pid: int) -> None:
    """Give up what a group holds, unless a collective that cannot end still uses it.

    gloo's threads must not outlive the interpreter: letting go of a tensor then, they would abort the process. In a
    process that was forked they are not there, and gloo would wait for them: there it is never freed.
    """
    if os.getpid() != pid:
        for group in torchs.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    elif ordered.close():
        engine.close()
        torchs.clear()


def _is_async(opts: Any) -> bool | None:
    """Whether the caller wants a handle; None: it takes one, and may be torch's C++.

    Newer versions of torch say so in the options. Before, its functions in Python have an argument for it, which only
    their frame tells: without that, each collective would pass through the thread.
    """
    if _TELLS_ASYNC:
        return getattr(opts, "asyncOp", True)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    found = frame.f_locals.get("async_op") if frame else None
    return None if found is None else bool(found)


_TELLS_ASYNC = hasattr(dist.AllreduceOptions(), "asyncOp")  # not in torch 2.0
_BETWEEN = (__name__, untraced.__module__)  # modules whose frames lie between a caller and `_is_async`


def _on_cuda(tensors: _Tensors) -> bool:
    return tensors[0].is_cuda if len(tensors) == 1 else any(tensor.is_cuda for tensor in tensors)


def _rows(flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> _Tensors:
    """Cut a tensor's flat form into so many rows each."""
    row = tensor[0].numel() * (2 if tensor.is_complex() else 1) if tensor.shape[0] else 0
    return torch.split(flat, [size * row for size in sizes])
