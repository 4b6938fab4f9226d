"""Says whether NCCL on this host can use EFA, and names the missing parts. Loads no library and starts no process.

NCCL needs AWS's plugin (aws-ofi-nccl), the plugin needs libfabric, and libfabric's provider needs rdma-core's libefa
and libibverbs. Directories are searched as the dynamic loader does: LD_LIBRARY_PATH, /etc/ld.so.conf, the system's own.
The versions of these files are not checked. No part of this has run on EFA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.files import list_names, read_text
from shoal_toolkit.job.devices import Nic

_LIBRARIES = ("libefa.so.1", "libibverbs.so.1", "libfabric.so.1")
_PROVIDER = "libfabric/libefa-fi.so"  # in Open MPI's wheel. AWS's libfabric has the provider in itself
_SYSTEM = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib", "usr/local/lib")


class EfaState(NamedTuple):
    """Whether NCCL uses EFA on a host: one line, and the missing parts if there is a card that it could use."""

    line: str
    missing: str


def describe_efa(nics: Sequence[Nic], gpus: int, environ: Mapping[str, str], root: str = "/") -> EfaState:
    """Returns whether NCCL can use EFA on this host.

    Args:
        nics: The cards under /sys/class/infiniband.
        gpus: The number of GPUs. Without them, nothing uses EFA: MPI and gloo stay on TCP.
        environ: The environment of the ranks.
        root: The directory under which etc and lib are.
    """
    cards = [nic for nic in nics if nic.driver == "efa"]
    if not cards:
        return EfaState("not used: no EFA card under /sys/class/infiniband", "")
    names = ", ".join(nic.name for nic in cards)
    if not gpus:
        return EfaState(f"not used: no GPU. Only NCCL uses the card {names}", "")
    directories = list(_list_directories(environ, root))
    missing = [*_find_missing_nodes(cards), *_find_missing_files(directories, environ)]
    if missing:
        return EfaState(f"not used, although there is {names}", ", ".join(missing))
    return EfaState(f"used by NCCL: {names}", "")


def describe_mpi(command: Sequence[str]) -> str:
    """Returns how the ranks of an mpirun command send MPI messages to other hosts; empty if `pml` is not among it."""
    if "pml" not in command[:-1]:
        return ""
    pml = command[command.index("pml") + 1]
    return "TCP, not EFA (pml ob1)" if pml == "ob1" else f"as pml {pml} chooses, which your options name"


def _find_missing_nodes(cards: Sequence[Nic]) -> Iterator[str]:
    closed = [nic.name for nic in cards if not nic.usable]
    if closed:
        yield f"the node of {', '.join(closed)} in /dev/infiniband (docker run --device)"


def _find_missing_files(directories: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yields what NCCL lacks for EFA: libraries, libfabric's provider, the plugin, and the choice of the provider."""
    found = {name: _find(directories, name) for name in _LIBRARIES}
    yield from (name for name, path in found.items() if not path)
    wheel = os.path.join(os.path.dirname(found["libfabric.so.1"]), os.path.dirname(_PROVIDER))
    if found["libfabric.so.1"] and os.path.isdir(wheel) and not list_names(wheel, prefix="libefa-fi.so"):
        yield _PROVIDER
    plugin = environ.get("NCCL_NET_PLUGIN", "")
    names = (plugin, f"libnccl-net-{plugin}.so") if plugin else ("libnccl-net.so",)
    if not any(_find(directories, name) for name in names):
        yield f"NCCL's plugin {names[-1]} (aws-ofi-nccl)"
    provider = environ.get("FI_PROVIDER", "efa")
    if "efa" not in provider.split(","):
        yield f"efa in FI_PROVIDER, which is {provider!r}"


def _find(directories: Sequence[str], name: str) -> str:
    """Returns the path of a library as the loader finds it; empty if there is none. A name can be a path."""
    return next((path for path in (os.path.join(each, name) for each in directories) if os.path.isfile(path)), "")


def _list_directories(environ: Mapping[str, str], root: str) -> Iterator[str]:
    yield from filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    configured = os.path.join(root, "etc/ld.so.conf.d")
    texts = [read_text(root, "etc/ld.so.conf")]
    texts += [read_text(configured, name) for name in sorted(list_names(configured)) if name.endswith(".conf")]
    for line in "\n".join(texts).splitlines():
        if line.strip().startswith("/"):
            yield os.path.join(root, line.strip().lstrip("/"))
    yield from (os.path.join(root, name) for name in _SYSTEM)
