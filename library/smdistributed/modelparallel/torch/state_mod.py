"""What `smp.init` sets up, for the rest of the package and for scripts that look (`smp.state.cfg`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from smdistributed.core.launch import read_launch, set_torch_environment
from smdistributed.core.mail import Access, Mail
from smdistributed.core.torch.backend import BACKEND, register
from smdistributed.core.torch.devices import select_device
from smdistributed.modelparallel.backend.config import read_config, read_verify_steps
from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.backend.job import Job, refuse_dataparallel
from smdistributed.modelparallel.backend.limits import timeout_seconds
from smdistributed.modelparallel.backend.meeting import meet
from smdistributed.modelparallel.backend.ranks import GROUPS, Grid
from smdistributed.modelparallel.backend.recording import start_timeline
from smdistributed.modelparallel.torch import devices
from smdistributed.modelparallel.torch.comm import open_post
from smdistributed.modelparallel.torch.messages import Kind, receive
from smdistributed.modelparallel.torch.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.module_manager import ModuleManager
    from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer


class State(Job):
    """Set by `init`; before, only `initialized` may be asked."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.is_tracing = False
        self.verify_steps = 0
        self.model: DistributedModel | None = None
        self.optimizer: DistributedOptimizer | None = None
        self._process_groups: dict[tuple[int, ...], Any] = {}

    @property
    def module_manager(self) -> ModuleManager:
        """The modules of the script's model, by name, and their stages."""
        return self.the_model().manager

    def the_model(self) -> DistributedModel:
        """The model that the script wrapped. Raises StepUsageError when it has none."""
        if self.model is None:
            raise StepUsageError("There is no smp.DistributedModel yet: wrap the model before the first step.")
        return self.model

    def init(self, argument: Mapping[str, Any] | None) -> None:
        """Read the configuration and meet the other ranks. Calling it again does nothing."""
        if self.initialized:
            return
        refuse_dataparallel()
        set_torch_environment(os.environ)
        self.cfg = read_config(argument, os.environ)
        self.verify_steps = read_verify_steps(os.environ)
        launch = read_launch()
        register()
        self._meet(launch.rank, launch.world_size)
        self.rank = dist.get_rank()
        self.local_rank, self.local_size = launch.local_rank, launch.local_world_size or launch.world_size
        self.grid = Grid.of(self.cfg, dist.get_world_size())
        for name in GROUPS:
            for ranks in self.grid.groups(name):
                self._open_group(ranks)
        if torch.cuda.is_available():
            select_device()
        devices.note()
        store = PrefixStore("smp", dist.distributed_c10d._get_default_store())
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        is_on_one_host = launch.local_world_size == self.grid.size  # a script may have made a larger group itself
        meet(store, self.rank, self.grid.size, master, is_on_one_host, self._open_mail)
        start_timeline(self.rank, self.grid.size)
        # A launch by AWS's mpirun has no LOCAL_RANK. By it accelerate takes every rank for a replica, with other data.
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
            os.environ.pop("LOCAL_RANK", None)
        self.begin()

    def process_group(self, name: str) -> Any:
        """torch.distributed's group of the ranks of `group(name)`."""
        return self._process_groups[self.group(name)]

    def _meet(self, rank: int, size: int) -> None:
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
        """That of the groups: of itself `smddp`, which uses NCCL for CUDA tensors where every rank has a device."""
        return BACKEND if self.cfg.ddp_dist_backend == "auto" else self.cfg.ddp_dist_backend

    def _open_group(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._process_groups:
            return
        is_world = len(ranks) == dist.get_world_size() and dist.get_backend() == self._backend  # else the script's own
        group = dist.group.WORLD if is_world else dist.new_group(list(ranks), backend=self._backend)
        self._process_groups[ranks] = group

    def _open_mail(self, access: Access) -> Mail:
        seconds = timeout_seconds()
        mail = Mail(self.rank, access, self._deliver, self._lost, seconds)
        self.post = open_post(mail, self.rank, seconds)
        self.stage = Stage(mail, self.group_of("PP_GROUP"), self.rank, self._module, seconds)
        return mail

    def group_of(self, name: str) -> tuple[int, ...]:
        return self.grid.group(name, self.rank)

    def _module(self, name: str) -> Any:
        return self.module_manager.modules[name]

    def _deliver(self, source: int, head: bytes, bodies: Sequence[bytearray]) -> None:
        try:
            message = receive(source, head, bodies)
        except Exception as error:  # a receiving thread has no caller
            self.stage.fail(error)
            return
        if message.kind is Kind.OBJECT:
            self.post.deliver(source, message.call, message)
        else:
            self.stage.deliver(message)

    def _lost(self, source: int) -> None:
        self.stage.lost(source)
        self.post.lost(source)


state = State()
