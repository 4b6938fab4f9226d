"""Emulates GPUs in TensorFlow: replaces the functions that list and configure them.

Operations on `/GPU:0` run on the CPU by TensorFlow's own soft placement, and a tensor's `device` is the CPU.
"""

from __future__ import annotations

import functools
import operator
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from shoal_rehearsal.settings import prepare_notice, print_notice

if TYPE_CHECKING:
    from shoal_rehearsal.settings import RehearsalSettings

_GPU = "GPU"
_MEMORY = {"current": 0, "peak": 0}


class EmulatedGpus:
    def __init__(self, count: int) -> None:
        self.physical = [tf.config.PhysicalDevice(f"/physical_device:{_GPU}:{i}", _GPU) for i in range(count)]
        self.visible = list(self.physical)
        self.growing: dict[str, bool] = {}

    def logical(self) -> list[Any]:
        return [tf.config.LogicalDevice(f"/device:{_GPU}:{i}", _GPU) for i in range(len(self.visible))]

    def has(self, device: Any) -> bool:
        return device in self.physical


def emulate_gpus(settings: RehearsalSettings) -> None:
    """Patches tf.config, tf.test and strategies for good, and hides real GPUs. Prepares the notice.

    Operations on GPUs run on the CPU, by soft placement, which it turns on.
    """
    real = tf.config.list_physical_devices(_GPU)
    prepare_notice(settings, len(real))
    if real:
        tf.config.set_visible_devices([], _GPU)
    tf.config.set_soft_device_placement(True)
    gpus = EmulatedGpus(settings.gpus)
    for module in (tf.config, tf.config.experimental):
        for name, stand_in in {**_list_functions(gpus), **_device_functions(gpus)}.items():
            _replace(module, name, stand_in)
    _patch_strategies(gpus)
    _replace(tf.test, "is_gpu_available", lambda real: lambda *_, **__: True)
    _replace(tf.test, "gpu_device_name", lambda real: lambda: f"/device:{_GPU}:0")
    _replace(tf.test, "is_built_with_cuda", lambda real: lambda: True)


def _patch_strategies(gpus: EmulatedGpus) -> None:
    """Lets strategies that use all GPUs of a process warn that they have one replica: they see real devices only."""
    for name in ("MirroredStrategy", "experimental.CentralStorageStrategy"):
        kind = operator.attrgetter(name)(tf.distribute)
        kind.__init__ = _warning(kind.__init__, name, gpus)


def _warning(construct: Callable[..., None], name: str, gpus: EmulatedGpus) -> Callable[..., None]:
    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        wanted = len(gpus.visible)
        if self.num_replicas_in_sync < wanted:
            warnings.warn(
                f"SHOAL REHEARSAL: tf.distribute.{name} has {self.num_replicas_in_sync} replica here, and {wanted} on "
                f"{wanted} GPUs: it sees real devices only. A batch per replica that the script computes differs. To "
                f'rehearse {wanted} replicas, pass devices=["/cpu:0", ...] after tf.config.'
                "set_logical_device_configuration, or use one rank for each GPU.",
                stacklevel=2,
            )

    return init


def _replace(module: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
    if hasattr(module, name):
        setattr(module, name, stand_in(getattr(module, name)))


def _list_functions(gpus: EmulatedGpus) -> dict[str, Callable[[Any], Any]]:
    """Returns makers of stand-ins for the functions of tf.config that take a device type (None: all), by name.

    A maker gets the real function, for other types. Listing devices prints the notice.
    """

    def listing(found: Callable[[], list[Any]]) -> Callable[[Any], Any]:
        def stand_in(real: Any) -> Any:
            def answer(device_type: str | None = None) -> list[Any]:
                print_notice()
                # Without GPUs, which are hidden. Also for GPUs: TensorFlow's first listing may call other packages.
                others = [device for device in real(device_type) if device.device_type != _GPU]
                return others + (found() if device_type in (_GPU, None) else [])

            return answer

        return stand_in

    def set_visible(real: Any) -> Any:
        def stand_in(devices: Any, device_type: str | None = None) -> None:
            is_one = isinstance(devices, tf.config.PhysicalDevice)  # which is a tuple, too
            devices_given = [devices] if is_one else list(devices)
            emulated = [device for device in devices_given if gpus.has(device)]
            if device_type == _GPU:
                _require_known(gpus, devices_given)
                gpus.visible = emulated
                return
            if device_type is None:
                gpus.visible = emulated
            real([device for device in devices_given if not gpus.has(device)], device_type)

        return stand_in

    return {
        "list_physical_devices": listing(lambda: list(gpus.physical)),
        "get_visible_devices": listing(lambda: list(gpus.visible)),
        "list_logical_devices": listing(gpus.logical),
        "set_visible_devices": set_visible,
    }


def _device_functions(gpus: EmulatedGpus) -> dict[str, Callable[[Any], Any]]:
    """Returns makers of stand-ins for the functions of tf.config that take a device, by name.

    A maker gets the real function, for other devices. Emulated GPUs use no memory, and ignore logical devices.
    """

    def of_gpu(answer: Callable[..., Any]) -> Callable[[Any], Any]:
        def stand_in(real: Any) -> Any:
            def either(device: Any, *args: Any, **kwargs: Any) -> Any:
                return answer(device, *args, **kwargs) if _is_gpu(gpus, device) else real(device, *args, **kwargs)

            return either

        return stand_in

    def grow(device: Any, enable: bool) -> None:
        gpus.growing[device.name] = enable

    return {
        "set_memory_growth": of_gpu(grow),
        "get_memory_growth": of_gpu(lambda device: gpus.growing.get(device.name, False)),
        "get_device_details": of_gpu(lambda device: {"device_name": "emulated", "compute_capability": (8, 0)}),
        "get_memory_info": of_gpu(lambda device: dict(_MEMORY)),
        "reset_memory_stats": of_gpu(lambda device: None),
        "get_memory_usage": of_gpu(lambda device: 0),
        "set_logical_device_configuration": of_gpu(lambda device, configurations: None),
        "set_virtual_device_configuration": of_gpu(lambda device, configurations: None),
        "get_logical_device_configuration": of_gpu(lambda device: None),
    }


def _is_gpu(gpus: EmulatedGpus, device: Any) -> bool:
    return gpus.has(device) or (isinstance(device, str) and re.search(r"\bGPU\b", device, re.IGNORECASE) is not None)


def _require_known(gpus: EmulatedGpus, devices: list[Any]) -> None:
    for device in devices:
        if not gpus.has(device):
            raise ValueError(f"Unrecognized device: {getattr(device, 'name', device)!r}: there are {gpus.physical}.")
