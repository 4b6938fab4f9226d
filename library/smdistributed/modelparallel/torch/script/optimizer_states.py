"""The state of `smp.DistributedOptimizer`: of this rank, of its replica, and of all stages."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.model import script_model
from smdistributed.modelparallel.torch.script.optimizer_shards import OptimizerShards
from smdistributed.modelparallel.torch.script.sharding import make_whole, pack_parts, place_like
from smdistributed.modelparallel.torch.script.state import TorchState, WrappedOptimizer


class OptimizerStates(WrappedOptimizer):
    """The methods of `smp.DistributedOptimizer` about its state dicts, and about the owners of its parameters."""

    _state: TorchState

    @property
    def _shards(self) -> OptimizerShards | None:
        """With `shard_optimizer_state`, the owners of parameters; None before the model is placed."""
        return self._state.model.optimizer_shards if self._state.model else None

    def owner_of(self, parameter: nn.Parameter) -> int:
        """The replica that updates a parameter of the optimizer; the first without `shard_optimizer_state`."""
        (original,) = self.master_weights.model_parameters([parameter])
        return self._shards.owner_of(original) if self._shards else 0

    def own_parameters(self) -> list[tuple[int, nn.Parameter]]:
        """The parameters that this rank updates, with their numbers. Parameters of other stages have no elements."""
        given = enumerate(self.master_weights.parameters())
        return [(number, parameter) for number, parameter in given if parameter.numel() and self._owns(parameter)]

    def _owns(self, parameter: nn.Parameter) -> bool:
        return self._shards is None or self.owner_of(parameter) == self._shards.mine

    # --- state dicts

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The wrapped optimizer's state dict for this stage, with the single-precision copies and the loss scale.

        Args:
            gather_if_shard: With `shard_optimizer_state` or `sharded_data_parallel_degree`, whether it includes the
                shares of all replicas. All ranks of RDP_GROUP must then call it.

        Returns:
            `state`, `param_groups`, `masters`, `loss_scale`, and `gathered`: whether all shares are in it.
        """
        local, sharded = self.local_parts(), self._state.cfg.shard_optimizer_state
        if sharded and gather_if_shard:
            own = {key: local[key] for key in ("state", "masters")}
            parts = self._state.objects.gather(own, self._state.group("RDP_GROUP"))
            local.update({key: _merge(part[key] for part in parts) for key in own})
        if self._state.cfg.sharded_data_parallel_degree > 1:
            change = functools.partial(tree_map, make_whole) if gather_if_shard else pack_parts
            local.update({key: change(local[key]) for key in ("state", "masters")})
        local["gathered"] = gather_if_shard or not sharded
        return local

    def local_parts(self) -> dict[str, Any]:
        """Returns the state, options, copies and loss scale of this rank, with split tensors. Gathers nothing."""
        local = self.optimizer.state_dict()
        if self._shards:
            originals = self.master_weights.model_parameters(self.master_weights.parameters())
            local["state"] = self._shards.select_own(local["state"], originals)
        local["masters"] = self.master_weights.values()
        local["loss_scale"] = self.master_weights.scale.state_dict()
        return local

    def orig_state_dict(self) -> dict[str, Any]:
        """Returns `local_state_dict` with this rank's share alone. Published scripts compare it with saved shares."""
        return self.local_state_dict(gather_if_shard=False)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The wrapped optimizer's state dict for all stages; all ranks of a replica call it. Shares are joined.

        Args:
            gather_to_rank0: Whether only the first stage gets it; the others get an empty one.

        Returns:
            As `local_state_dict`.
        """
        return self.with_other_stages(self.join_shares(self.local_state_dict()), gather_to_rank0)

    def join_shares(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns a result of `local_state_dict` with whole tensors instead of shares. TP_GROUP calls it."""
        parameters, found = self.master_weights.parameters(), {}
        for key in ("state", "masters"):
            found[key] = {
                number: tree_map(functools.partial(make_whole, like=parameters[number]), value)
                for number, value in local[key].items()
            }
        return {**local, **found}

    def with_other_stages(self, local: dict[str, Any], gather_to_rank0: bool = False) -> dict[str, Any]:
        """Adds the other stages' states to a result of `local_state_dict`. All ranks of a replica call it."""
        ranks, kept = self._state.group("PP_GROUP"), {key: local[key] for key in ("state", "masters")}
        if gather_to_rank0:
            parts = self._state.objects.gather_to_first(kept, ranks, "state")
        else:
            parts = self._state.objects.gather(kept, ranks)
        return {**local, **{key: _merge(part[key] for part in parts) for key in kept}} if parts else {}

    def save_optimizer_backcompat(
        self, cast_to_cpu: bool = True, gather_if_shard: bool = True, fp32_states_only: bool = False
    ) -> dict[str, Any]:
        """Returns `local_state_dict` in the form that `load_optimizer_backcompat` takes (AWS API 1.10).

        Args:
            cast_to_cpu: Whether tensors are copied to the CPU.
            gather_if_shard: See `local_state_dict`. Save a dict that is not gathered by `smp.save(..., v3=True)`.
            fp32_states_only: Leave out the wrapped optimizer's state: only single-precision copies and the loss scale.
        """
        local = self.local_state_dict(bool(gather_if_shard))
        if fp32_states_only:
            del local["state"]
        return tree_map(_to_cpu, local) if cast_to_cpu else local

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], gather_if_shard: bool = False) -> None:
        """Loads what `save_optimizer_backcompat` returned (AWS API 1.10).

        Args:
            state_dict: The state.
            gather_if_shard: Whether it must hold every replica's share.

        Raises:
            SMPRuntimeError: If it must, and does not.
        """
        if gather_if_shard and not state_dict.get("gathered", True):
            raise SMPRuntimeError(
                "load_optimizer_backcompat: this optimizer state has the share of one replica only. Fix: save it with "
                "gather_if_shard=True, or load every replica's own with gather_if_shard=False."
            )
        self.load_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict: at once if the model is placed, else as soon as it is.

        States of other stages' parameters are ignored, and with `shard_optimizer_state` states of other replicas'
        shares.

        Args:
            state_dict: A result of `state_dict` or `local_state_dict`.

        Raises:
            StepUsageError: If there is no `DistributedModel`.
        """
        saved, master = dict(state_dict), self.master_weights

        def load(*_: Any) -> None:
            if "loss_scale" in saved:
                master.scale.load_state_dict(saved["loss_scale"])
            master.make_copies()
            own = dict(self.own_parameters())
            if "state" in saved:
                here = {i: _place_state(state, own[i]) for i, state in saved["state"].items() if i in own}
                self.optimizer.load_state_dict({"state": here, "param_groups": saved["param_groups"]})
            masters = saved.get("masters", {})
            master.load_values({i: place_like(value, own[i]) for i, value in masters.items() if i in own})
            saved.clear()  # the model may keep this function

        script_model(self._state).when_placed(load)


def _place_state(state: Any, parameter: nn.Parameter) -> Any:
    """Returns copies of the tensors in the state of one parameter, split as the parameter is."""
    if not isinstance(state, Mapping):
        return state
    placed = {key: place_like(value, parameter) for key, value in state.items()}
    # A tensor may still be in a file, which the script may write again.
    return {key: v.clone() if v is state[key] and isinstance(v, torch.Tensor) else v for key, v in placed.items()}


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _merge(parts: Iterable[Mapping[int, Any]]) -> dict[int, Any]:
    """Merges dicts into one that is sorted by key; of equal keys the last one counts."""
    found = {key: value for part in parts for key, value in part.items()}
    return {key: found[key] for key in sorted(found)}
