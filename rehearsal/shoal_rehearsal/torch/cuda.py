"""Replaces the functions of torch.cuda and torch.accelerator, cuDNN's and NVTX's, and torch.Generator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import DeviceLike
from shoal_rehearsal.torch.overrides import is_on_cuda

NAME = "Shoal rehearsal (no GPU)"
CAPABILITY = (8, 0)
MEMORY_BYTES = 40 << 30  # as reported; no memory is counted
_rng_states: dict[int, torch.Tensor] = {}


class Properties:
    """Replaces the result of torch.cuda.get_device_properties, with the figures of an A100."""

    name = NAME
    major, minor = CAPABILITY
    total_memory = MEMORY_BYTES
    multi_processor_count = 108
    is_integrated = is_multi_gpu_board = 0
    gcnArchName = ""  # noqa: N815 (torch's name)

    def __repr__(self) -> str:
        return f"_CudaDeviceProperties(name='{NAME}', major={self.major}, minor={self.minor})"


class Device:
    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else devices.index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = devices.make_current(self.idx)

    def __exit__(self, *_: object) -> None:
        devices.make_current(self.prev_idx)


class DeviceOf(Device):
    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.get_device() if is_on_cuda(tensor) else None)


def patch(count: int) -> None:
    """Replaces torch.cuda, torch.accelerator, cuDNN's and NVTX's functions and torch.Generator, for `count` devices.

    Functions about used memory return 0. Types such as torch.cuda.FloatTensor are replaced too.
    """
    devices.set_count(count)
    cuda: Any = torch.cuda
    # Torch's own check the GPUs. Others are from packages that torch's initialization of CUDA should call.
    devices.queue(call for call, _ in cuda._queued_calls if not getattr(call, "__module__", "").startswith("torch."))
    _replace(cuda, _DEVICES)
    _replace(cuda, dict.fromkeys(_NOTHING, lambda *args, **kwargs: None))
    _replace(cuda, dict.fromkeys(_ZERO, lambda *args, **kwargs: 0))
    _replace(cuda, _RANDOM)
    _replace(cuda.random, _RANDOM)
    cuda.default_generators = tuple(torch.Generator() for _ in range(count))
    _replace(cuda.memory, {name: getattr(cuda, name) for name in (*_NOTHING, *_ZERO) if hasattr(cuda.memory, name)})
    _replace(cuda.nvtx, _NVTX)
    if hasattr(torch, "accelerator"):
        _replace(torch.accelerator, _ACCELERATOR)
    _replace(torch._C, {"_get_accelerator": lambda check=None: torch.device("cuda")})
    _replace(torch.backends.cudnn, _CUDNN)
    _replace(cuda.nccl, {"version": lambda: (2, 21, 5)})
    if hasattr(torch, "get_device_module"):
        module_of: Any = torch.get_device_module
        of_cuda = {"get_device_module": lambda device=None: module_of("cuda" if device is None else device)}
        _replace(torch, of_cuda)
    _patch_generator()
    for name in _TYPES:
        setattr(cuda, f"{name}Tensor", _TensorType(f"{name}Tensor", (), {}))


def _replace(module: Any, names: dict[str, Any]) -> None:
    for name, value in names.items():
        if hasattr(module, name):
            setattr(module, name, value)


def _ordinal(device: Any) -> int:
    """Returns the ordinal of a device. Raises ValueError for another type, RuntimeError if there is no such device."""
    return int(devices.resolve(device).index)


def set_device(device: DeviceLike) -> None:
    """Makes a device current. Raises as CUDA does if there is none; a negative ordinal changes nothing."""
    devices.make_current(device if isinstance(device, int) else _ordinal(device))


def current_device() -> int:
    """Returns the ordinal of the current device, and prints the notice when first called."""
    devices.count()
    return devices.current()


def get_device_properties(device: DeviceLike = None) -> Properties:
    """Returns emulated properties. Raises AssertionError as torch does if there is no such device."""
    if not 0 <= devices.index_of(device) < devices.count():
        raise AssertionError("Invalid device id")
    return Properties()


def get_device_name(device: DeviceLike = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    found = get_device_properties(device)
    return found.major, found.minor


def synchronize(device: DeviceLike = None) -> None:
    """Returns at once: all work is done. Raises as CUDA does if there is no such device."""
    _ordinal(device)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Returns free and total bytes, which are always equal. Raises as CUDA does if there is no such device."""
    _ordinal(device)
    return MEMORY_BYTES, MEMORY_BYTES


def get_rng_state(device: DeviceLike = "cuda") -> torch.Tensor:
    """Returns a device's stored state; zeros if none. Random numbers come from the CPU's generator."""
    state = _rng_states.get(_ordinal(device))
    return torch.zeros(16, dtype=torch.uint8) if state is None else state.clone()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "cuda") -> None:
    _rng_states[_ordinal(device)] = new_state.clone()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(ordinal) for ordinal in range(devices.count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for ordinal, state in enumerate(new_states):
        set_rng_state(state, ordinal)


class _TensorType(type):
    """Replaces types such as torch.cuda.FloatTensor, which create a tensor or are used in isinstance."""

    @property
    def cuda_type_name(cls) -> str:
        return f"torch.cuda.{cls.__name__}"

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        return getattr(torch, cls.__name__)(*args).cuda()  # type: ignore[no-any-return]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.type() == cls.cuda_type_name


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _patch_generator() -> None:
    """Replaces torch.Generator by a subclass: with device "cuda" it is a generator of the CPU."""

    base: Any = torch._C.Generator

    class Kind(type(base)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)  # of which torch's own generators are, and those that it makes below

    class Generator(base, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return base.__new__(cls, "cpu" if devices.is_cuda(device) else device)

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator  # type: ignore[misc]


_DEVICES: dict[str, Any] = {
    "is_available": lambda: devices.count() > 0,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *args, **kwargs: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": devices.count,
    "device": Device,
    "device_of": DeviceOf,
    "set_device": set_device,
    "current_device": current_device,
    "get_device_properties": get_device_properties,
    "get_device_name": get_device_name,
    "get_device_capability": get_device_capability,
    "can_device_access_peer": lambda device, peer_device: True,
    "synchronize": synchronize,
    "mem_get_info": mem_get_info,
    "memory_stats": lambda device=None: {},
    "memory_summary": lambda device=None, abbreviated=False: "no memory is counted in a rehearsal",
    "memory_snapshot": lambda *args, **kwargs: [],
    "get_arch_list": lambda: ["sm_80"],
    "_lazy_init": lambda: None,
    "_lazy_call": lambda call, **kwargs: call(),
    "_get_device_index": lambda device, optional=False, allow_cpu=False: _ordinal(device),
    "_exchange_device": devices.make_current,
    "_maybe_exchange_device": devices.make_current,
}
_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_NOTHING = (
    *("init", "empty_cache", "ipc_collect", "set_per_process_memory_fraction", "set_sync_debug_mode"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "_sleep"),
    "reset_accumulated_memory_stats",
)
_ZERO = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached"),
    *("max_memory_cached", "utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
)
_RANDOM: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "seed": lambda: None,
    "seed_all": lambda: None,
    "initial_seed": lambda: 0,
    "get_rng_state": get_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state": set_rng_state,
    "set_rng_state_all": set_rng_state_all,
}
_NVTX: dict[str, Callable[..., Any]] = {
    "range_push": lambda msg: 0,
    "range_pop": lambda: 0,
    "range_start": lambda msg: 0,
    "range_end": lambda range_id: None,
    "mark": lambda msg: None,
    "range": _nothing,
}
_CUDNN: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_acceptable": lambda tensor: False,  # so that torch does not call cuDNN's functions, which the CPU lacks
    "version": lambda: 8902,
}
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "is_available": lambda: devices.count() > 0,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "device_count": devices.count,
    "current_device_index": current_device,
    "current_device_idx": current_device,
    "set_device_index": set_device,
    "set_device_idx": set_device,
    "synchronize": synchronize,
    "empty_cache": lambda: None,
    "device_index": Device,
}
