"""The state that `smp.init` sets up. Scripts may read it, for example `smp.state.cfg`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from smdistributed.core.options import warn_without_effect
from smdistributed.core.store import open_store
from smdistributed.core.tensorflow.group import Group, open_group, take_gpu
from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.context import Context, Grid, start_timeline
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.backend.rendezvous import connect_ranks
from smdistributed.modelparallel.backend.transport import Access, Transport
from smdistributed.modelparallel.tensorflow.stage_variables import create_library_variable
from smdistributed.modelparallel.tensorflow.tensor_exchange import TensorExchange

_UNSUPPORTED = (
    "uneven_microbatches",
    "shard_optimizer_state",
    "sharded_data_parallel_degree",
    "tensor_parallel_degree",
    "offload_activations",
    "fp16",
    "bf16",
    "xla",
    "skip_tracing",
    "delayed_parameter_initialization",
)


class TensorFlowState(Context):
    tensors: TensorExchange
    replicas: Group | None = None
    """The ranks with the same stage as this rank; None if it is the only one."""
    steps = 0
    """The number of steps that have been traced."""
    seed: int
    """A random number, the same on all stages."""
    sums = 0
    """The number of sums over the stages that have been traced."""

    @property
    def stage(self) -> int:
        return self.group("PP_GROUP").index(self.rank)

    def init(self, argument: Mapping[str, Any] | None) -> None:
        """Connects this rank: see `smp.init`, which lists the errors."""
        if self.initialized:
            return
        launch = self.configure(argument)
        _reject_unsupported(self.cfg)
        self.grid = Grid.of(self.cfg, launch.world_size)
        take_gpu(launch.local_rank)
        store = open_store(launch)
        master = launch.master.host if launch.master else "127.0.0.1"
        connect_ranks(
            store.prefixed("smp"), self.rank, launch.world_size, master, launch.is_on_one_host, self._open_transport
        )
        # Connects the stages, so that each notices when another ends.
        self.seed = self.objects.gather(secrets.randbits(31), self.grid.group("PP_GROUP", self.rank))[0]
        peers = self.grid.group("DP_GROUP", self.rank)
        if len(peers) > 1:
            self.replicas = open_group(launch, store, peers)
        start_timeline(self.rank, launch.world_size)
        self.begin()

    # Created when needed: the first variable initializes TensorFlow, which scripts configure after smp.init.

    @cached_property
    def anchor(self) -> Any:
        """A trainable variable that is never changed: see `StepGraph.anchors`."""
        return create_library_variable(0.0, "smp_anchor")

    @cached_property
    def _turn(self) -> Any:
        return create_library_variable(0, "smp_turn", trainable=False)

    def next_in_order(self) -> Any:
        """Returns an operation that runs after the previous one that it returned, in other graphs too."""
        return self._turn.assign_add(1, read_value=False)

    def _open_transport(self, access: Access) -> Transport:
        """Makes the transport, which starts threads, and the exchanges of tensors and objects that use it."""
        self.tensors = TensorExchange(self.rank, access)
        self.objects = self.tensors.objects
        return self.tensors.transport


def _reject_unsupported(config: Config) -> None:
    for name in _UNSUPPORTED:
        if getattr(config, name) != getattr(Config, name):
            raise SMPUnsupportedError(f"{name!r} is not implemented for TensorFlow. Fix: leave it out.")
    for name in ("ddp_port", "ddp_dist_backend"):
        if getattr(config, name) != getattr(Config, name):
            warn_without_effect(f"{name!r} of mp_parameters", "it concerns PyTorch")


state = TensorFlowState()
