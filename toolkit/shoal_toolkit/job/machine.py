"""What this machine has: CPUs, GPUs, network interfaces, mpirun. Read from files, without starting a process.

CPUs respect the affinity mask and the quotas of the cgroup and of those above it (a container with half a machine has
half its CPUs).

GPUs are those that one process would see: the device nodes that the container was given, less those that
CUDA_VISIBLE_DEVICES hides. GPUs that are cut into MIG instances count as one together, however many instances there
are: CUDA shows a process the first of them only (NVIDIA's MIG user guide, "CUDA Device Enumeration").
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping

from shoal_toolkit.light_typing import NamedTuple

# What lies beside mpirun → Open MPI's series. The last is MPICH's and Intel's.
_DECIDED_FROM = (("prterun", 5), ("prted", 5), ("orterun", 4), ("orted", 4), ("mpiexec.hydra", 0))


class Nic(NamedTuple):
    """A network card that programs reach without the kernel: one of /sys/class/infiniband."""

    name: str
    driver: str  # such as "efa", "mlx5_core"
    device: str  # the PCI device, such as "0xefa1"
    usable: bool  # whether this container was given its device node


class Machine(NamedTuple):
    """One host's machine. `interface_note` says why this interface is used; `interface_replaced`: not the configured
    one."""

    cpus: int
    gpus: int
    interface: str
    interface_note: str
    python: str
    mpirun: str  # empty when there is none
    interface_replaced: bool = False
    open_mpi: int = 4  # 4 or 5: Open MPI's series, where mpirun is its; 0 where it is another MPI's
    neuron_devices: int = 0
    nics: tuple[Nic, ...] = ()


def read_machine(environ: Mapping[str, str], wanted_interface: str, peers: Iterable[str], root: str = "/") -> Machine:
    """Look at this machine. `peers` are the hosts that the interface must reach."""
    interface, note, replaced = choose_interface(wanted_interface, peers, root)
    mpirun = find_program("mpirun", environ)
    devices = _names(root, "dev")
    return Machine(
        cpus=count_cpus(root),
        gpus=count_gpus(root, devices, environ),
        interface=interface,
        interface_note=note,
        interface_replaced=replaced,
        python=sys.executable,
        mpirun=mpirun,
        open_mpi=open_mpi_series(mpirun, environ) if mpirun else 0,
        neuron_devices=len(_numbered("neuron", devices)),
        nics=read_nics(root),
    )


# GPUs


def count_gpus(root: str, devices: Iterable[str], environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process would see, from the names under /dev and from CUDA_VISIBLE_DEVICES.

    NVIDIA_VISIBLE_DEVICES is for the container runtime, which gives the nodes; but where it says that there shall be
    none, the nodes of a privileged container do not count.
    """
    minors = _numbered("nvidia", devices)
    if not minors or environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
        return 0
    cut = [minor for minor in minors if _names(_mig(root, minor), prefix="gi")]
    present = len(minors) - len(cut) + (1 if any(_mig_instances(root, minor) for minor in cut) else 0)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else count_visible(visible, present)


def _numbered(kind: str, devices: Iterable[str]) -> list[str]:
    """Return the numbers of the devices of a kind, such as nvidia0."""
    return [name[len(kind) :] for name in devices if name.startswith(kind) and name[len(kind) :].isdigit()]


def count_visible(visible: str, present: int) -> int:
    """Return how many of the GPUs that are present CUDA_VISIBLE_DEVICES leaves.

    As in CUDA, and in torch's reading of it: the list ends at the first entry that does not exist or is of another kind
    than the first ("0,-1,1" is one GPU), and a GPU that is named twice leaves none. Of MIG instances one process sees
    the first.
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


def _mig_instances(root: str, minor: str) -> list[str]:
    """Return the compute instances of a GPU in MIG mode whose device nodes this container was given."""
    mig, nodes = _mig(root, minor), _names(root, "dev/nvidia-caps")
    found = []
    for instance in (os.path.join(gi, ci) for gi in _names(mig, prefix="gi") for ci in _names(mig, gi, prefix="ci")):
        access = _read(os.path.join(mig, instance, "access"))
        number = re.search(r"^DeviceFileMinor:\s*(\d+)", access, re.MULTILINE)
        if number and f"nvidia-cap{number.group(1)}" in nodes:
            found.append(instance)
    return found


def _mig(root: str, minor: str) -> str:
    """The directory in which the driver lists the MIG instances of a GPU."""
    return os.path.join(root, "proc/driver/nvidia/capabilities", f"gpu{minor}", "mig")


# CPUs


def count_cpus(root: str = "/") -> int:
    """Return the CPUs that this process may use, rounded up where a quota gives part of one."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return max(1, min(allowed, -(-int(quota * 1000) // 1000))) if quota else allowed


def cpu_quota(root: str) -> float | None:
    """Return the CPUs that this process's cgroup and all those above it allow, None without a limit."""
    base = os.path.join(root, "sys/fs/cgroup")
    limits = []
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [_read(os.path.join(cgroup, "cpu.max")).split() for cgroup in _upwards(base, path)]
        elif "cpu" in controllers.split(","):
            limits += [_version_1(cgroup) for cgroup in _upwards(os.path.join(base, "cpu"), path)]
    quotas = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and all(map(str.isdigit, limit))]
    return min(quotas, default=None)


def _upwards(mount: str, path: str) -> list[str]:
    """Return the directories of a cgroup and of those above it.

    Without a namespace of its own a container reads where it is on the host. That does not exist in its own mount,
    whose top is then the container's cgroup.
    """
    parts = path.split("/")[1:] if path != "/" else []
    return [os.path.join(mount, *parts[:depth]) for depth in range(len(parts) + 1)]


def _version_1(cgroup: str) -> list[str]:
    quota = _read(os.path.join(cgroup, "cpu.cfs_quota_us")).strip()  # -1: no limit
    return [quota, _read(os.path.join(cgroup, "cpu.cfs_period_us")).strip()] if quota.isdigit() else []


# Network


def read_nics(root: str = "/") -> tuple[Nic, ...]:
    """Return the network cards of /sys/class/infiniband. It shows the host's even where a container has no access."""
    directory = os.path.join(root, "sys/class/infiniband")
    nodes = _names(root, "dev/infiniband")
    return tuple(
        Nic(
            name,
            driver=os.path.basename(_link(os.path.join(directory, name, "device/driver"))),
            device=_read(os.path.join(directory, name, "device/device")).strip(),
            usable=any(verbs in nodes for verbs in _names(directory, name, "device/infiniband_verbs")),
        )
        for name in sorted(_names(directory))
    )


def choose_interface(wanted: str, peers: Iterable[str], root: str = "/") -> tuple[str, str, bool]:
    """Return the interface to use, why, and whether it replaces the wanted one.

    resourceconfig.json may name one that does not exist (the SDK's local mode says "ethwe"): then the one that routes
    to a peer, else that of the default route, else the first that is up.
    """
    names = sorted(_names(root, "sys/class/net"))
    if wanted in names:
        return wanted, f"interface {wanted}: network_interface_name (default eth0) names it, and it is here", False
    addresses = (address for peer in peers if (address := _resolve(peer)))
    chosen = route_interface(_read(os.path.join(root, "proc/net/route")), next(addresses, "0.0.0.0"))
    reason = "the route to the other hosts, or to the network, goes over it"
    if chosen not in names:
        states = {name: _read(os.path.join(root, "sys/class/net", name, "operstate")).strip() for name in names}
        up = (name for name, state in states.items() if name != "lo" and state != "down")
        chosen, reason = next(up, "lo"), "it is the first that is up"
    there = ", ".join(names)
    note = f"network_interface_name is {wanted!r}, which is not an interface here ({there}): using {chosen!r}: {reason}"
    return chosen, note, True


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


# Programs


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of a program: on PATH, or beside this Python (a venv that is not activated); empty if absent."""
    directories = [*environ.get("PATH", os.defpath).split(os.pathsep), os.path.dirname(sys.executable)]
    for directory in directories:
        path = os.path.join(directory, name)
        if directory and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def open_mpi_series(mpirun: str, environ: Mapping[str, str]) -> int:
    """Return whether an mpirun is Open MPI's 4 or 5, from the programs beside it or else on PATH; 0 for neither.

    Open MPI 5.0 brings PRRTE (prterun, prted) where 4.1 has ORTE (orterun, orted). Distributions make mpirun a link:
    both its own and its target's directory count.
    """
    target = os.path.realpath(mpirun) if os.path.islink(mpirun) else mpirun
    if os.path.basename(target).endswith((".hydra", ".mpich")):
        return 0
    for directory in (os.path.dirname(mpirun), os.path.dirname(target)):
        for name, series in _DECIDED_FROM:
            if os.path.exists(os.path.join(directory, name)):
                return series
    return next((series for name, series in _DECIDED_FROM if find_program(name, environ)), 0)


# Files


def _names(*path: str, prefix: str = "") -> list[str]:
    """Return the names in a directory, none where there is no such directory."""
    try:
        return [name for name in os.listdir(os.path.join(*path)) if name.startswith(prefix)]
    except OSError:
        return []


def _link(path: str) -> str:
    """Return a link's target, empty where there is no such link."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    """Return a file's text, empty where the kernel does not offer it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
