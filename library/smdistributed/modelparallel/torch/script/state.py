"""The state of this process after `smp.init`. `state` is the one instance: public functions read it, others get it.

Scripts read it too: `smp.state.cfg`, `smp.state.module_manager`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from smdistributed.core.launch import set_torch_environment
from smdistributed.core.torch.backend import BACKEND, register
from smdistributed.core.torch.devices import select_device
from smdistributed.modelparallel.backend.config import VERIFY_VARIABLE, read_verify_steps, timeout_seconds
from smdistributed.modelparallel.backend.context import GROUPS, Context, Grid, start_timeline
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.backend.rendezvous import connect_ranks
from smdistributed.modelparallel.backend.transport import Access, Transport
from smdistributed.modelparallel.torch.nn.tensor_group import TensorGroup, set_tensor_group
from smdistributed.modelparallel.torch.pipeline.messages import MessageKind, open_object_exchange, receive
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.pipeline.stage import Stage
from smdistributed.modelparallel.torch.pipeline.tasks import remember_device
from smdistributed.modelparallel.torch.script.gradients import StepGradients
from smdistributed.modelparallel.torch.script.half_precision import MasterWeights
from smdistributed.modelparallel.torch.script.optimizer_shards import OptimizerShards


class WrappedModel(nn.Module):
    """The part of the script's model that the optimizer and the steps use. `DistributedModel` is the only subclass."""

    module: nn.Module
    """The script's own model."""
    manager: ModuleManager
    gradients: StepGradients

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks that hold one replica together, with sharded data parallelism; else none."""
        raise NotImplementedError

    optimizer_shards: OptimizerShards | None
    partitioned: bool
    """Whether it is decided which stage has which module."""


class WrappedOptimizer(torch.optim.Optimizer):
    """The part of the script's optimizer that the model uses. `DistributedOptimizer` is the only subclass."""

    optimizer: torch.optim.Optimizer
    """The script's own optimizer."""
    master_weights: MasterWeights


class TorchState(Context):
    """Set by `init`; before, only `initialized` may be read."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.is_tracing = False
        self.verify_steps = 0
        """How many steps are run again without stages."""
        self.model: WrappedModel | None = None
        self.optimizer: WrappedOptimizer | None = None
        self._process_groups: dict[tuple[int, ...], Any] = {}

    @property
    def module_manager(self) -> ModuleManager:
        """The modules of the script's model, by name, and their stages. Raises StepUsageError without a model."""
        if self.model is None:
            raise StepUsageError("There is no smp.DistributedModel yet. Fix: wrap the model before the first step.")
        return self.model.manager

    def init(self, argument: Mapping[str, Any] | None) -> None:
        """Connects this rank, and starts the transport's threads. See `script.init`, which lists the errors."""
        if self.initialized:
            return
        set_torch_environment(os.environ)
        launch = self.configure(argument)
        self.verify_steps = read_verify_steps(os.environ)
        self._refuse_to_verify_parts()
        register()
        self._start_process_group(launch.rank, launch.world_size)
        self.rank = dist.get_rank()
        self.grid = Grid.of(self.cfg, dist.get_world_size())
        for name in GROUPS:
            for ranks in self.grid.groups(name):
                self.open_group(ranks)
        self.open_tensor_group()
        if torch.cuda.is_available():
            select_device()
        remember_device()
        store = PrefixStore("smp", dist.distributed_c10d._get_default_store())
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        is_on_one_host = launch.local_world_size == self.grid.size  # a script may have made a larger group itself
        connect_ranks(store, self.rank, self.grid.size, master, is_on_one_host, self._open_transport)
        start_timeline(self.rank, self.grid.size)
        # AWS's mpirun sets no LOCAL_RANK. If it is set, accelerate takes every rank for a replica with data of its own.
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
            os.environ.pop("LOCAL_RANK", None)
        self.begin()

    def _refuse_to_verify_parts(self) -> None:
        """Raises SMPUnsupportedError if steps are to be verified and no rank has whole parameters."""
        for name in ("tensor_parallel_degree", "sharded_data_parallel_degree") if self.verify_steps else ():
            if getattr(self.cfg, name) > 1:
                raise SMPUnsupportedError(
                    f"{VERIFY_VARIABLE} is set, and {name!r} is {getattr(self.cfg, name)}: no rank has whole "
                    f"parameters to compare with. Fix: unset {VERIFY_VARIABLE}, or set {name!r} to 1."
                )

    def process_group(self, name: str) -> Any:
        return self._process_groups[self.group(name)]

    def process_group_of(self, ranks: tuple[int, ...]) -> Any:
        """torch's group of these ranks, which `open_group` has made."""
        return self._process_groups[ranks]

    def open_tensor_group(self) -> None:
        """Makes TP_GROUP the group of tensor-parallel modules."""
        ranks, cfg = self.grid.group("TP_GROUP", self.rank), self.cfg
        group, size = self._process_groups[ranks], len(ranks)
        place = ranks.index(self.rank)
        set_tensor_group(TensorGroup(group, place, size, cfg.prescaled_batch, cfg.tensor_parallel_seed))

    def _start_process_group(self, rank: int, size: int) -> None:
        """Makes torch's default process group, unless the script has made one. May set MASTER_PORT (`ddp_port`)."""
        if dist.is_initialized():
            return
        if self.cfg.ddp_port is not None:
            os.environ.setdefault("MASTER_PORT", str(self.cfg.ddp_port))
        if size == 1 and "RANK" not in os.environ:
            dist.init_process_group(self._backend, store=HashStore(), rank=rank, world_size=size)
        else:
            dist.init_process_group(self._backend)

    @property
    def _backend(self) -> str:
        """The groups' backend. `smddp` uses NCCL for CUDA tensors if every rank has a device of its own."""
        return BACKEND if self.cfg.ddp_dist_backend == "auto" else self.cfg.ddp_dist_backend

    def open_group(self, ranks: tuple[int, ...]) -> None:
        """Makes torch's group of these ranks, unless there is one. All ranks of the job call it, in the same order."""
        if ranks in self._process_groups:
            return
        is_world = (
            len(ranks) == dist.get_world_size() and dist.get_backend() == self._backend
        )  # otherwise the script's own
        group = dist.group.WORLD if is_world else dist.new_group(list(ranks), backend=self._backend)
        self._process_groups[ranks] = group

    def _open_transport(self, access: Access) -> Transport:
        """Makes the transport, which starts threads, and the object exchange and the stage that use it."""
        seconds = timeout_seconds()
        transport = Transport(self.rank, access, self._deliver, self._lose, seconds)
        self.objects = open_object_exchange(transport, self.rank, seconds)
        stages, partners = (self.grid.group(name, self.rank) for name in ("PP_GROUP", "TP_GROUP"))
        self.stage = Stage(transport, stages, self.rank, self._find_module, seconds, partners)
        return transport

    def _find_module(self, name: str) -> nn.Module:
        return self.module_manager.modules[name]

    def _deliver(self, source: int, head: bytes, bodies: Sequence[bytearray]) -> None:
        """Called on receiving threads: hands a message to its receiver. An error fails the pipeline."""
        try:
            message = receive(source, head, bodies)
        except Exception as error:  # a receiving thread has no caller
            self.stage.failures.fail(error)
            return
        if message.kind is MessageKind.OBJECT:
            self.objects.deliver(source, message.call, message)
        else:
            self.stage.deliver(message)

    def _lose(self, source: int) -> None:
        """Called on a receiving thread when the connection to a rank has ended: its waiters fail."""
        self.stage.failures.fail_by_loss(source)
        self.objects.lost(source)


state = TorchState()
