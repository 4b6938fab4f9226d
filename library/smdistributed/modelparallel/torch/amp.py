"""`smp.amp`: a GradScaler for automatic mixed precision, over stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.torch.script.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.script.state import state


class GradScaler(torch.cuda.amp.GradScaler):
    """torch's GradScaler, over stages and shares: if gradients overflow on one rank, all skip the step (AWS API)."""

    def unscale_(self, optimizer: Any) -> None:
        """Divides this rank's gradients by the scale, and notes overflows on any of the replica. All ranks call it.

        Copies of parameters first get the gradients. Does nothing if the scaler is disabled.
        """
        if not self.is_enabled():
            return
        self._make_scale()
        optimizer = _wrapper_of(optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.update_master_grads()  # what is updated may be copies
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        group = state.process_group("WORLD" if state.cfg.shard_optimizer_state else "MP_GROUP")
        worst = torch.tensor([max([float(value) for value in found.values()], default=0.0)], device=device_of(group))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        for key in list(found) or [_own_device()]:
            found[key] = worst.to(_own_device())

    def _make_scale(self) -> None:
        """Makes the scale: torch does it when a loss is scaled, which only the first stage does."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(_own_device())

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer, or skips the step after an overflow: see torch's GradScaler. All ranks call it.

        First calls `unscale_` if the script has not.
        """
        optimizer = _wrapper_of(optimizer)
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def _wrapper_of(optimizer: Any) -> Any:
    """The DistributedOptimizer that wraps this optimizer, if one does: only its step knows replicas and copies."""
    wrapper = state.optimizer
    return wrapper if wrapper is not None and optimizer is wrapper.optimizer else optimizer


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
