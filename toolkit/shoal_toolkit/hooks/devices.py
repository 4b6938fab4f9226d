"""Gives each rank the GPU of its local rank, if the script selects none: in torch, TensorFlow and JAX.

A framework opens its devices when the script first uses them. The device is chosen at that moment, from the variables
of that time: `sidecars/standby.py` imports a framework before it knows the rank. Nothing is opened earlier, and
CUDA_VISIBLE_DEVICES stays as it is. `smdistributed` selects a device by the same rule, for jobs without `train`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# torchrun's and ours, then mpirun's. A script that `train` starts once on a host has the first, with a size of 1. If it
# calls mpirun, its ranks have both.
_LOCAL = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))


def find_local_device(count: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the ordinal of the GPU of this process's local rank: the local rank, modulo the number of GPUs.

    If a launcher shows each rank its own GPU only, that is number 0.

    Args:
        count: The number of GPUs that this process sees.

    Returns:
        None if the framework's default stays: the host has one rank, or there is no GPU.
    """
    for rank_name, size_name in _LOCAL:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank) % count if count and int(rank) < int(size) else None
    return None


def _extend_torch_cuda(cuda: ModuleType) -> None:
    """Queues the choice. A set_device of the script initializes CUDA too, and counts because it comes later."""

    def select() -> None:
        device = find_local_device(cuda.device_count())
        if device is not None:
            cuda.set_device(device)

    cuda._lazy_call(select)


def _extend_tensorflow(tf: ModuleType) -> None:
    """Makes only the local rank's GPU visible, until the script calls set_visible_devices."""
    context: Any = sys.modules.get("tensorflow.python.eager.context")
    if context is None:  # another version: all GPUs stay visible
        return
    initialize: Callable[..., None] = context.Context._initialize_physical_devices
    is_chosen = False

    def initialize_and_choose(self: Any, *args: Any, **keywords: Any) -> None:
        nonlocal is_chosen
        initialize(self, *args, **keywords)
        if is_chosen:
            return
        is_chosen = True  # the calls below come here
        gpus = tf.config.list_physical_devices("GPU")
        device = find_local_device(len(gpus))
        if device is not None and tf.config.get_visible_devices("GPU") == gpus:
            tf.config.set_visible_devices([gpus[device]], "GPU")
        is_chosen = bool(gpus)  # a rehearsal may add some later

    context.Context._initialize_physical_devices = initialize_and_choose


def _extend_jax(bridge: ModuleType) -> None:
    """Sets jax_cuda_visible_devices when JAX first opens its backends, unless it is set."""
    opened: Callable[[], Any] = bridge.backends
    is_chosen = False

    def backends() -> Any:
        nonlocal is_chosen
        if not is_chosen:
            is_chosen = True
            config: Any = sys.modules["jax"].config
            # JAX cannot count GPUs without opening them.
            device = find_local_device(_count_visible(os.environ))
            if device is not None and config.read("jax_cuda_visible_devices") == "all":
                config.update("jax_cuda_visible_devices", str(device))
        return opened()

    bridge.backends = backends  # type: ignore[attr-defined]


def _count_visible(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return int(environ.get("SM_NUM_GPUS") or 0)


# The module that is extended after its code has run → its function.
EXTENSIONS: Mapping[str, Callable[[ModuleType], None]] = {
    "torch.cuda": _extend_torch_cuda,
    "tensorflow": _extend_tensorflow,
    "jax._src.xla_bridge": _extend_jax,
}
