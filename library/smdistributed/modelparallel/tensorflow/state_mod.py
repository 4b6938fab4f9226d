"""What `smp.init` sets up, for the rest of the package and for scripts that look (`smp.state.cfg`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from smdistributed.core.options import warn_without_effect
from smdistributed.core.store import open_store
from smdistributed.core.tensorflow.devices import take_gpu
from smdistributed.core.tensorflow.group import Group, open_group
from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.context import Context, start_timeline
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.backend.ranks import Grid
from smdistributed.modelparallel.backend.rendezvous import connect_ranks
from smdistributed.modelparallel.backend.transport import Access, Transport
from smdistributed.modelparallel.tensorflow.messages import Messages
from smdistributed.modelparallel.tensorflow.variables import own_variable

_ABSENT = (
    "uneven_microbatches",
    "shard_optimizer_state",
    "fp16",
    "bf16",
    "xla",
    "skip_tracing",
    "delayed_parameter_initialization",
)


class State(Context):
    """Set by `init`; before, only `initialized` may be asked."""

    messages: Messages
    replicas: Group | None = None
    """The ranks that have this rank's stage, where there are several."""
    steps = 0
    """How many functions under smp.step have been traced."""
    seed: int
    """A number that all stages have drawn together."""
    sums = 0
    """How many sums over the stages have been traced."""

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.group("PP_GROUP").index(self.rank)

    def init(self, argument: Mapping[str, Any] | None) -> None:
        """Read the configuration and meet the other ranks. Calling it again does nothing."""
        if self.initialized:
            return
        launch = self.configure(argument)
        _refuse_absent(self.cfg)
        self.grid = Grid.of(self.cfg, launch.world_size)
        take_gpu(launch.local_rank)
        store = open_store(launch)
        master = launch.master.host if launch.master else "127.0.0.1"
        connect_ranks(
            store.prefixed("smp"), self.rank, launch.world_size, master, launch.is_on_one_host, self._open_transport
        )
        # Whoever is connected hears who ends.
        self.seed = self.objects.gather(secrets.randbits(31), self.grid.group("PP_GROUP", self.rank))[0]
        peers = self.grid.group("DP_GROUP", self.rank)
        if len(peers) > 1:
            self.replicas = open_group(launch, store, peers)
        start_timeline(self.rank, launch.world_size)
        self.begin()

    # Made when they are needed: with its first variable TensorFlow begins, and scripts set it up after smp.init.

    @cached_property
    def anchor(self) -> Any:
        """A variable that is never changed: see `optimizers`."""
        return own_variable(0.0, "smp_anchor")

    @cached_property
    def _turn(self) -> Any:
        return own_variable(0, "smp_turn", trainable=False)

    def take_turn(self) -> Any:
        """An operation that runs after the former one that this has given, also where functions call each other."""
        return self._turn.assign_add(1, read_value=False)

    def _open_transport(self, access: Access) -> Transport:
        self.messages = Messages(self.rank, access)
        self.objects = self.messages.objects
        return self.messages.transport


def _refuse_absent(config: Config) -> None:
    for name in _ABSENT:
        if getattr(config, name):
            raise SMPUnsupportedError(f"{name!r} is not implemented for TensorFlow: leave it out, or set it to false.")
    for name in ("ddp_port", "ddp_dist_backend"):
        if getattr(config, name) != getattr(Config, name):
            warn_without_effect(f"{name!r} of mp_parameters", "it concerns PyTorch")


state = State()
