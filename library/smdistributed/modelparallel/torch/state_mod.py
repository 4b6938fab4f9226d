"""What `smp.init` sets up, for the rest of the package and for scripts that look (`smp.state.cfg`)."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from smdistributed.core.launch import fill_in, read_launch
from smdistributed.core.mail import Mail, own_address
from smdistributed.core.torch.backend import BACKEND, register
from smdistributed.core.torch.devices import take_device
from smdistributed.modelparallel.backend.config import Config, read_config, read_verify_steps
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, StepUsageError
from smdistributed.modelparallel.backend.ranks import GROUPS, Grid
from smdistributed.modelparallel.torch import devices
from smdistributed.modelparallel.torch.comm import Post
from smdistributed.modelparallel.torch.messages import Kind, receive
from smdistributed.modelparallel.torch.observation import start_timeline
from smdistributed.modelparallel.torch.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.module_manager import ModuleManager
    from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer

_SECRET_BYTES = 16


class State:
    """Set by `init`; before, only `initialized` may be asked."""

    cfg: Config
    grid: Grid
    rank: int
    local_rank: int
    local_size: int
    stage: Stage
    post: Post

    def __init__(self) -> None:
        self.initialized = False
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
        _refuse_dataparallel()
        fill_in(os.environ)
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
            take_device()
        devices.note()
        self._exchange_addresses()
        start_timeline(self.rank, self.grid.size)
        # A launch by AWS's mpirun has no LOCAL_RANK. By it accelerate takes every rank for a replica, with other data.
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
            os.environ.pop("LOCAL_RANK", None)
        self.initialized = True

    def group(self, name: str) -> tuple[int, ...]:
        """The ranks of this rank's group of that name (a key of `backend.ranks.GROUPS`)."""
        self.require()
        return self.grid.group(name, self.rank)

    def process_group(self, name: str) -> Any:
        """torch.distributed's group of the ranks of `group(name)`."""
        return self._process_groups[self.group(name)]

    def require(self) -> None:
        """Raises StepUsageError before `smp.init`."""
        if not self.initialized:
            raise StepUsageError("smp.init() has not been called: call it first, on every rank.")

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

    def _exchange_addresses(self) -> None:
        store = PrefixStore("smp", dist.distributed_c10d._get_default_store())
        if self.rank == 0:
            store.set("secret", secrets.token_hex(_SECRET_BYTES // 2))
        mail = Mail(self.rank, bytes(store.get("secret")), self._deliver, self._lost)
        self.post = Post(mail, self.rank)
        self.stage = Stage(mail, self.group_of("PP_GROUP"), self.rank, self._module)
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        store.set(str(self.rank), f"{self._own_address(master)} {mail.port}")
        others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        mail.meet({rank: _address(store.get(str(rank)).decode(), master) for rank in others})

    def group_of(self, name: str) -> tuple[int, ...]:
        return self.grid.group(name, self.rank)

    def _own_address(self, master: str) -> str:
        """Where others find this host; `-`: where they find the master, which this host knows as itself."""
        address = own_address(master)
        return "-" if address.startswith("127.") else address

    def _module(self, name: str) -> Any:
        return self.module_manager.modules[name]

    def _deliver(self, source: int, head: bytes, bodies: Sequence[bytearray]) -> None:
        message = receive(source, head, bodies)
        if message.kind is Kind.OBJECT:
            self.post.deliver(message)
        else:
            self.stage.deliver(message)

    def _lost(self, source: int) -> None:
        self.stage.lost(source)
        self.post.lost(source)


def _address(text: str, master: str) -> tuple[str, int]:
    host, port = text.split()
    return (master if host == "-" else host), int(port)


def _refuse_dataparallel() -> None:
    if "smdistributed.dataparallel" in sys.modules:
        raise SMPConfigError(
            'Using "modelparallel" and "dataparallel" in one job is not supported: this process has imported '
            "smdistributed.dataparallel. For replicas of a partitioned model set 'ddp' to true in mp_parameters."
        )


state = State()
