"""`smp.init`, and the functions of `smp` about the job that are specific to torch. For the others see `backend.api`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from smdistributed.modelparallel.torch.nn.replacement import mark_inside
from smdistributed.modelparallel.torch.plan.construction import delay_param_initialization
from smdistributed.modelparallel.torch.script.sharding import require_torch
from smdistributed.modelparallel.torch.script.state import state


def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the configuration and connects to the other ranks (AWS API). Every rank calls it, before anything else.

    It also makes torch's process groups, and selects this rank's GPU. Under mpirun it sets torch's environment
    variables, and removes LOCAL_RANK: use `smp.local_rank()`. Calling it again does nothing.

    Args:
        config: `mp_parameters`. Keys of the launch (SM_HP_MP_PARAMETERS) win over it.

    Raises:
        SMPConfigError: If a key is unknown or its value is not allowed. Also if SMP_VERIFY_STEPS is wrong, or
            smdistributed.dataparallel is imported.
        SMPUnsupportedError: If a key is not implemented, or needs a newer torch.
        TimelineError: If the file of SMP_TIMELINE cannot be written.
        LaunchError: If the environment does not say which rank this is.
    """
    state.init(config)
    if state.cfg.sharded_data_parallel_degree > 1:
        require_torch()


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Constructs a model inside `with` (AWS API 1.10). It sets torch's default dtype there.

    With `delayed_parameter_initialization` in mp_parameters it also acts as `delay_param_initialization`.

    Args:
        tensor_parallelism: Whether it also acts as `smp.tensor_parallelism`, with the options.
        dtype: The dtype of parameters; None: torch's default.
        **options: See `smp.tensor_parallelism`.

    Raises:
        StepUsageError: Before `smp.init`.
        TypeError: If an option is unknown.
    """
    state.require()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with (
            mark_inside("smp.model_creation", tensor_parallelism, options),
            delay_param_initialization(state.cfg.delayed_parameter_initialization),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def is_tracing() -> bool:
    """Whether the model is being traced, on the meta device, to decide its partition."""
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
