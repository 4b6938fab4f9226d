"""What this machine has: CPUs, GPUs, network interfaces, mpirun. Read from files, without starting a process.

CPUs respect the affinity mask and the cgroup quota (a container with half a machine has half its CPUs); GPUs are the
device nodes that the container was given, less those that CUDA_VISIBLE_DEVICES hides.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Machine(NamedTuple):
    """One host's machine. `interface_note` says why the interface is not the configured one, else it is empty."""

    cpus: int
    gpus: int
    interface: str
    interface_note: str
    python: str
    mpirun: str  # empty when there is none


def read_machine(environ: Mapping[str, str], wanted_interface: str, peers: Iterable[str]) -> Machine:
    """Look at this machine. `peers` are the hosts that the interface must reach."""
    interface, note = choose_interface(wanted_interface, peers)
    return Machine(
        cpus=count_cpus(),
        gpus=count_gpus(os.listdir("/dev"), environ),
        interface=interface,
        interface_note=note,
        python=sys.executable,
        mpirun=find_program("mpirun", environ),
    )


def count_gpus(devices: Iterable[str], environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process would see, from the names under /dev and CUDA_VISIBLE_DEVICES.

    As in CUDA, the list ends at the first index that does not exist: "0,-1,1" is one GPU.
    """
    present = sum(1 for name in devices if re.fullmatch(r"nvidia\d+", name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    count = 0
    for entry in visible.split(","):
        word = entry.strip()
        if not word.startswith(("GPU-", "MIG-")) and not (word.isdecimal() and int(word) < present):
            break
        count += 1
    return count


def count_cpus(root: str = "/") -> int:
    """Return the CPUs that this process may use, rounded up where a quota gives part of one."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(root)
    return max(1, min(allowed, -(-int(quota * 1000) // 1000))) if quota else allowed


def _quota(root: str) -> float | None:
    """Return the CPUs that the cgroup allows (version 2, else 1), None without a limit."""
    limit = _read(os.path.join(root, "sys/fs/cgroup/cpu.max")).split()
    if not limit:
        limit = [
            _read(os.path.join(root, "sys/fs/cgroup/cpu", name)).strip()
            for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
    if len(limit) != 2 or not all(word.isdigit() for word in limit) or int(limit[1]) == 0:
        return None
    return int(limit[0]) / int(limit[1])


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of a program: on PATH, or beside this Python (a venv that is not activated); empty if absent."""
    directories = [*environ.get("PATH", os.defpath).split(os.pathsep), os.path.dirname(sys.executable)]
    for directory in directories:
        path = os.path.join(directory, name)
        if directory and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def choose_interface(wanted: str, peers: Iterable[str]) -> tuple[str, str]:
    """Return the interface to use, and why where it is not the wanted one.

    resourceconfig.json may name one that does not exist (the SDK's local mode says "ethwe"): then the one that routes
    to a peer, else that of the default route, else the first that is there.
    """
    names = sorted(os.listdir("/sys/class/net"))
    if wanted in names:
        return wanted, ""
    addresses = (address for peer in peers if (address := _resolve(peer)))
    chosen = route_interface(_read("/proc/net/route"), next(addresses, "0.0.0.0"))
    if chosen not in names:
        chosen = next((name for name in names if name != "lo"), "lo")
    there = ", ".join(names)
    return chosen, f"network_interface_name is {wanted!r}, which is not an interface here ({there}): using {chosen!r}"


def route_interface(table: str, address: str) -> str:
    """Return the interface of the most specific route to an IPv4 address, from the text of /proc/net/route."""
    target = _as_number(address)
    best, best_mask = "", -1
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        network, mask = _swapped(fields[1]), _swapped(fields[7])
        if target & mask == network and mask > best_mask:
            best, best_mask = fields[0], mask
    return best


def _as_number(address: str) -> int:
    number = 0
    for part in address.split("."):
        number = number * 256 + int(part)
    return number


def _swapped(word: str) -> int:
    """The table holds addresses as hexadecimal in the byte order of the machine."""
    return int.from_bytes(bytes.fromhex(word), sys.byteorder)


def _resolve(host: str) -> str:
    """Return an IPv4 address of a host, empty when its name is not known (yet)."""
    import socket  # only where the interface has to be guessed

    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _read(path: str) -> str:
    """Return a file's text, empty where the kernel does not offer it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
