"""Reads the facts about this machine that a launch needs. Starts no process.

These are CPUs, the number of GPUs, Neuron devices, network cards and interface, MPI, torch's version, and the table
entry of the instance type. It reads files. It looks up the other hosts' names only if the configured network interface
does not exist.

CPUs respect the affinity mask, the quotas of all cgroups of this process, and SHOAL_CPUS: a container with half a
machine has half its CPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from shoal_toolkit.fast_typing import TYPE_CHECKING, Any, NamedTuple
from shoal_toolkit.files import list_names, read_table, read_text
from shoal_toolkit.job.settings import is_members_only

if TYPE_CHECKING:  # most machines have none
    from shoal_toolkit.job.devices import Nic

# A program next to mpirun → the series of Open MPI. The last is MPICH's and Intel's.
_SERIES_OF_PROGRAM = (("prterun", 5), ("prted", 5), ("orterun", 4), ("orted", 4), ("mpiexec.hydra", 0))


LIBRARY_COMMANDS = ("smddprun", "smddpmprun")
_PEER_FILTER = "smdistributed/core/_peer_filter.so"
CPUS = "SHOAL_CPUS"  # job/settings.py checks its value


class Machine(NamedTuple):
    """The hardware and the installed programs of one host."""

    cpus: int
    gpus: int
    interface: str
    interface_note: str  # why this interface is used
    python: str
    mpirun: str  # its path; empty if there is none
    interface_replaced: bool = False  # the configured interface does not exist
    open_mpi: int = 4  # the series of Open MPI, 4 or 5; 0 if mpirun is of another MPI
    neuron_devices: int = 0
    nics: tuple[Nic, ...] = ()
    torch: str = ""  # the installed version
    library_commands: frozenset[str] = frozenset()  # the installed ones of LIBRARY_COMMANDS
    mpirun_options: Mapping[str, Any] = {}  # data/mpirun.json, if there is an mpirun
    instance: Mapping[str, Any] = {}  # the entry of the instance type in data/instances.json
    has_fewer_cpus: bool = False  # than programs see: a quota or SHOAL_CPUS limits them
    name: str = ""  # its host name, which Open MPI uses
    peer_filter: str = ""  # the library that refuses strangers, if SHOAL_MEMBERS_ONLY is 1


def read_machine(
    environ: Mapping[str, str],
    wanted_interface: str,
    peers: Iterable[str],
    instance_type: str = "local",
    root: str = "/",
) -> Machine:
    """Returns the hardware and programs of this machine.

    Args:
        environ: The environment of `train`.
        wanted_interface: The network interface that resourceconfig.json names.
        peers: Names of the hosts that the interface must reach.
        instance_type: Such as ml.p4d.24xlarge.
        root: The directory under which dev, proc and sys are.
    """
    interface, note, replaced = choose_interface(wanted_interface, peers, root)
    mpirun = find_program("mpirun", environ)
    gpus, neuron_devices, nics = _read_devices(root, environ)
    cpus = count_cpus(environ, root)
    return Machine(
        cpus=cpus,
        gpus=gpus,
        interface=interface,
        interface_note=note,
        interface_replaced=replaced,
        python=sys.executable,
        mpirun=mpirun,
        open_mpi=find_open_mpi_series(mpirun, environ) if mpirun else 0,
        neuron_devices=neuron_devices,
        nics=nics,
        torch=find_installed_version("torch", sys.path),
        library_commands=frozenset(name for name in LIBRARY_COMMANDS if find_program(name, environ)),
        mpirun_options=read_table("mpirun") if mpirun else {},
        instance=read_instance(instance_type),
        has_fewer_cpus=cpus < len(os.sched_getaffinity(0)),
        name=os.uname().nodename,
        peer_filter=_find_peer_filter(sys.path) if is_members_only(environ) else "",
    )


def read_instance(instance_type: str) -> Mapping[str, Any]:
    """Returns the entry of an instance type in data/instances.json; empty if there is none."""
    if not instance_type.startswith("ml."):
        return {}
    found: Mapping[str, Any] = read_table("instances")["instances"].get(instance_type, {})
    return found


def _read_devices(root: str, environ: Mapping[str, str]) -> tuple[int, int, tuple[Nic, ...]]:
    """Returns how many GPUs and Neuron devices a process would see, and the network cards."""
    names = list_names(root, "dev")
    has_cards = bool(list_names(root, "sys/class/infiniband"))
    if not has_cards and not any(name.startswith(("nvidia", "neuron")) for name in names):
        return 0, 0, ()
    from shoal_toolkit.job.devices import count_gpus, list_numbers, read_nics

    return count_gpus(root, names, environ), len(list_numbers("neuron", names)), read_nics(root)


# CPUs


def count_cpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Returns how many CPUs this host may use, at least 1. A quota is rounded up, and SHOAL_CPUS lowers the number."""
    counts = [len(os.sched_getaffinity(0))]
    if quota := read_cpu_quota(root):
        counts.append(-(-int(quota * 1000) // 1000))
    if (own := environ.get(CPUS, "")).isdecimal():
        counts.append(int(own))
    return max(1, min(counts))


def read_cpu_quota(root: str) -> float | None:
    """Returns the number of CPUs that the cgroups of this process allow; None without a limit."""
    base = os.path.join(root, "sys/fs/cgroup")
    limits = []
    for line in read_text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [read_text(cgroup, "cpu.max").split() for cgroup in _cgroup_and_parents(base, path)]
        elif "cpu" in controllers.split(","):
            limits += [_read_version_1_quota(cgroup) for cgroup in _cgroup_and_parents(os.path.join(base, "cpu"), path)]
    quotas = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and all(map(str.isdigit, limit))]
    return min(quotas, default=None)


def _cgroup_and_parents(mount: str, path: str) -> list[str]:
    """A container without a cgroup namespace reads its path on the host. Its mount has only the top of that."""
    parts = path.split("/")[1:] if path != "/" else []
    return [os.path.join(mount, *parts[:depth]) for depth in range(len(parts) + 1)]


def _read_version_1_quota(cgroup: str) -> list[str]:
    """Returns quota and period of a cgroup of version 1, in microseconds; empty without a limit."""
    quota = read_text(cgroup, "cpu.cfs_quota_us").strip()  # -1: no limit
    return [quota, read_text(cgroup, "cpu.cfs_period_us").strip()] if quota.isdigit() else []


# Network


def choose_interface(wanted: str, peers: Iterable[str], root: str = "/") -> tuple[str, str, bool]:
    """Chooses the network interface for the job.

    resourceconfig.json may name one that does not exist (the SDK's local mode says "ethwe"), and other platforms name
    none. Then it is the interface of the route to a peer. Without one, it is the interface of the default route, or
    the first that is up.

    Args:
        wanted: The name in resourceconfig.json; empty without one.
        peers: Names of the other hosts.
        root: The directory under which proc and sys are.

    Returns:
        The interface, why it was chosen, and whether it replaces another one that was wanted.
    """
    names = sorted(list_names(root, "sys/class/net"))
    if wanted in names:
        return wanted, f"interface {wanted}: network_interface_name (default eth0) names it, and it exists", False
    addresses = (address for peer in peers if (address := _resolve_host(peer)))
    address = next(addresses, "0.0.0.0")
    chosen = "lo" if address.startswith("127.") else find_route_interface(read_text(root, "proc/net/route"), address)
    reason = "the route to the other hosts, or to the network, goes over it"
    if chosen not in names:
        states = {name: read_text(root, "sys/class/net", name, "operstate").strip() for name in names}
        up = (name for name, state in states.items() if name != "lo" and state != "down")
        chosen, reason = next(up, "lo"), "it is the first that is up"
    if not wanted:
        return chosen, f"interface {chosen}: {reason}", False
    there = ", ".join(names)
    note = f"network_interface_name is {wanted!r}, which is not an interface here ({there}): using {chosen!r}: {reason}"
    return chosen, note, True


def find_route_interface(table: str, address: str) -> str:
    """Returns the interface of the most specific route to an IPv4 address; empty if there is none.

    Of equally specific routes the first in the table counts. Flags and metrics are not read.

    Args:
        table: The text of /proc/net/route.
        address: Such as "10.0.0.2".
    """
    target = _ipv4_to_int(address)
    best, best_mask = "", -1
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        network, mask = _hex_to_int(fields[1]), _hex_to_int(fields[7])
        if target & mask == network and mask > best_mask:
            best, best_mask = fields[0], mask
    return best


def _ipv4_to_int(address: str) -> int:
    number = 0
    for part in address.split("."):
        number = number * 256 + int(part)
    return number


def _hex_to_int(word: str) -> int:
    """Converts an address of /proc/net/route, hexadecimal in the machine's byte order, as `_ipv4_to_int` does."""
    return int.from_bytes(bytes.fromhex(word), sys.byteorder)


def _resolve_host(host: str) -> str:
    import socket  # slow to import, and rarely needed

    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


# Programs


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Returns the path of a program on PATH or next to this Python (a venv that is not activated).

    Args:
        name: The name of the program.
        environ: The environment, with PATH.

    Returns:
        Its path; empty if it is not installed.
    """
    directories = [*environ.get("PATH", os.defpath).split(os.pathsep), os.path.dirname(sys.executable)]
    for directory in directories:
        path = os.path.join(directory, name)
        if directory and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def find_open_mpi_series(mpirun: str, environ: Mapping[str, str]) -> int:
    """Returns the series of Open MPI, 4 or 5, to which an mpirun belongs; 0 if it is of another MPI or unknown.

    The programs next to it, or else on PATH, decide: 4.1 has orterun and orted, 5.0 prterun and prted. Distributions
    make mpirun a link, so that the directories of both the link and its target count.
    """
    target = os.path.realpath(mpirun) if os.path.islink(mpirun) else mpirun
    if os.path.basename(target).endswith((".hydra", ".mpich")):
        return 0
    for directory in (os.path.dirname(mpirun), os.path.dirname(target)):
        for name, series in _SERIES_OF_PROGRAM:
            if os.path.exists(os.path.join(directory, name)):
                return series
    return next((series for name, series in _SERIES_OF_PROGRAM if find_program(name, environ)), 0)


def _find_peer_filter(path: Sequence[str]) -> str:
    places = (os.path.join(directory, _PEER_FILTER) for directory in path)
    return next(filter(os.path.exists, places), "")


def find_installed_version(package: str, path: Sequence[str]) -> str:
    """Returns the version of an installed package from the name of its dist-info directory; empty if absent.

    Importing the package, torch for example, would take seconds.

    Args:
        package: Its name, with underscores.
        path: Directories, such as sys.path.
    """
    for directory in path:
        for name in list_names(directory or os.curdir, prefix=f"{package}-"):
            if name.endswith(".dist-info"):
                return name[len(package) + 1 : -len(".dist-info")]
    return ""
