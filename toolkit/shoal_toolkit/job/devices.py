"""Counts the GPUs and Neuron devices that one process would see. Lists network cards, also those it cannot use.

GPUs are the device nodes in the container, without those that CUDA_VISIBLE_DEVICES hides. All GPUs in MIG mode count as
one: CUDA shows a process only the first MIG instance (NVIDIA's MIG user guide, "CUDA Device Enumeration").
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.files import list_names, read_text


class Nic(NamedTuple):
    """A network card that programs use without the kernel: one of /sys/class/infiniband."""

    name: str
    driver: str  # such as "efa", "mlx5_core"
    device: str  # the PCI device, such as "0xefa1"
    usable: bool  # whether this container has its device node


def count_gpus(root: str, devices: Iterable[str], environ: Mapping[str, str]) -> int:
    """Returns how many GPUs a process would see, from the names under /dev and from CUDA_VISIBLE_DEVICES.

    All GPUs in MIG mode count as one, if the container has an instance. NVIDIA_VISIBLE_DEVICES is meant for the
    container runtime. But if it says "none", the device nodes that a privileged container has all the same don't count.
    """
    minors = list_numbers("nvidia", devices)
    if not minors or environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
        return 0
    cut = [minor for minor in minors if list_names(_mig_directory(root, minor), prefix="gi")]
    present = len(minors) - len(cut) + (1 if any(_has_mig_instance(root, minor) for minor in cut) else 0)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else count_visible(visible, present)


def list_numbers(kind: str, devices: Iterable[str]) -> list[str]:
    """Returns the numbers of the devices of a kind, such as "0" for nvidia0."""
    return [name[len(kind) :] for name in devices if name.startswith(kind) and name[len(kind) :].isdigit()]


def count_visible(visible: str, present: int) -> int:
    """Returns how many of the present GPUs CUDA_VISIBLE_DEVICES leaves visible.

    As CUDA and torch read it, the list ends at the first entry that does not exist or is of another kind than the
    first: "0,-1,1" is one GPU. A GPU that is named twice leaves none. Of several MIG instances, a process sees the
    first.
    """
    words = [word.strip() for word in visible.split(",")]
    kind = words[0][:4] if words[0].startswith(("GPU-", "MIG-")) else ""
    taken: list[str] = []
    for word in words:
        if not (word.startswith(kind) if kind else word.isdecimal() and int(word) < present):
            break
        if word in taken:
            return 0
        taken.append(word)
    return min(len(taken), 1 if kind == "MIG-" else present)


def _has_mig_instance(root: str, minor: str) -> bool:
    """Whether this container has the device node of a compute instance of a GPU in MIG mode."""
    mig, nodes = _mig_directory(root, minor), list_names(root, "dev/nvidia-caps")
    instances = [(gi, ci) for gi in list_names(mig, prefix="gi") for ci in list_names(mig, gi, prefix="ci")]
    texts = (read_text(mig, gi, ci, "access") for gi, ci in instances)
    numbers = (re.search(r"^DeviceFileMinor:\s*(\d+)", text, re.MULTILINE) for text in texts)
    return any(number is not None and f"nvidia-cap{number[1]}" in nodes for number in numbers)


def _mig_directory(root: str, minor: str) -> str:
    return os.path.join(root, "proc/driver/nvidia/capabilities", f"gpu{minor}", "mig")


def read_nics(root: str = "/") -> tuple[Nic, ...]:
    """Returns the network cards of /sys/class/infiniband. It also lists cards that this container can't use."""
    directory = os.path.join(root, "sys/class/infiniband")
    nodes = list_names(root, "dev/infiniband")
    return tuple(
        Nic(
            name,
            driver=os.path.basename(_read_link(os.path.join(directory, name, "device/driver"))),
            device=read_text(directory, name, "device/device").strip(),
            usable=any(verbs in nodes for verbs in list_names(directory, name, "device/infiniband_verbs")),
        )
        for name in sorted(list_names(directory))
    )


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
