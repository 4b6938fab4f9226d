"""Initialisation, and what is torch's of the functions of `smp` that concern the job: see `backend.api`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.state_mod import state


def init(config: Mapping[str, Any] | None = None) -> None:
    """Read the configuration and meet the other ranks; every rank calls it, before anything else (AWS API).

    config: `mp_parameters`; those of the launch (SM_HP_MP_PARAMETERS) win over it.

    Raises SMPConfigError, which names the key and what is allowed, and LaunchError when the environment does not say
    which rank this is.
    """
    state.init(config)


def is_tracing() -> bool:
    """Whether the model is being traced, on the meta device, to decide how it is cut."""
    return state.is_tracing


def get_world_process_group() -> Any:
    """torch.distributed's group of all ranks."""
    return state.process_group("WORLD")


def get_mp_process_group() -> Any:
    """torch.distributed's group of `get_mp_group()`."""
    return state.process_group("MP_GROUP")


def get_pp_process_group() -> Any:
    """torch.distributed's group of `get_pp_group()`."""
    return state.process_group("PP_GROUP")


def get_dp_process_group() -> Any:
    """torch.distributed's group of `get_dp_group()`."""
    return state.process_group("DP_GROUP")


def get_tp_process_group() -> Any:
    """torch.distributed's group of `get_tp_group()`."""
    return state.process_group("TP_GROUP")


def get_rdp_process_group() -> Any:
    """torch.distributed's group of `get_rdp_group()`."""
    return state.process_group("RDP_GROUP")
