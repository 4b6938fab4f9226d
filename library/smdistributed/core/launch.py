"""The launch environment: this process's rank, the number of ranks, and how the ranks find each other.

This module reads it, and sets the variables that torch reads. There are two families of variables:

1. RANK and WORLD_SIZE, with LOCAL_RANK (or SMDATAPARALLEL_LOCAL_RANK) and LOCAL_WORLD_SIZE: torchrun, `train`.
2. OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE: Open MPI's mpirun.

The first family wins if it is set: torch's own `env://` reads it, and a launcher inside mpirun (torchrun on every host)
sets it again. The second family completes the first if both name the same rank. RANK and WORLD_SIZE can be left over
from the process that called mpirun: a world of one, or a script that `train` starts once on each host. (Its values are
SM_CURRENT_HOST_RANK and SM_HOST_COUNT.) Then mpirun's family wins. Other contradictions are an error, because each
rank would train alone. With neither family, no launcher started the process: a job of one rank.

The ranks meet at MASTER_ADDR:MASTER_PORT, or at SMDATAPARALLEL_SERVER_ADDR:SMDATAPARALLEL_SERVER_PORT (set by the data
parallel launcher on several hosts). If mpirun started all ranks on this host, they can meet in its session directory.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_RANK_NAMES = ("RANK", "WORLD_SIZE")
_MPI_NAMES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_HOST_NAMES = ("SM_CURRENT_HOST_RANK", "SM_HOST_COUNT")
_MASTER_NAMES = (("MASTER_ADDR", "MASTER_PORT"), ("SMDATAPARALLEL_SERVER_ADDR", "SMDATAPARALLEL_SERVER_PORT"))
_LOCAL_RANK_NAMES = ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK")
_PORT_SECONDS, _PORT_POLL_SECONDS = 300.0, 0.01


class LaunchError(RuntimeError):
    """The launch environment is incomplete or contradicts itself; the message names the variables and the fix."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True)
class Launch:
    """This process's rank in its job. Ranks count from 0; `local_` means among the ranks of this host."""

    launched: bool
    """False: no launcher started this process; it is a job of one rank."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """None: the launcher did not say."""
    master: Address | None
    """None: no address was given, or a job of one needs none."""
    session_dir: Path | None
    """A directory of this job, which all its ranks see and its launcher removes; None: there is none."""

    @property
    def is_on_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def job(self) -> str:
        """A text that is the same on all ranks of the job, and different for most jobs; empty if unknown."""
        address = f"{self.master.host}:{self.master.port}" if self.master else ""
        return str(self.session_dir or address)


_ALONE = Launch(launched=False, rank=0, world_size=1, local_rank=0, local_world_size=1, master=None, session_dir=None)


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads the launch environment (default: `os.environ`); without a launcher it is a job of one rank.

    Raises:
        LaunchError: If a variable is invalid, one of a pair or the local rank is missing, or the two families
            contradict each other.
    """
    env = os.environ if environ is None else environ
    named, mpi = _rank_and_size(env, _RANK_NAMES), _rank_and_size(env, _MPI_NAMES)
    is_leftover = _is_leftover(env, named, mpi)
    if is_leftover:
        named = None
    place = named or mpi
    if place is None:
        _refuse_local_rank_alone(env)
        return _ALONE
    if named and mpi:
        _refuse_contradiction(named, mpi)
    rank, world_size = place
    local_names, local_size_names = _local_rank_names(named is not None, mpi == place)
    local_world_size = _read_first_integer(env, local_size_names, 1, world_size)
    local_rank = _read_first_integer(env, local_names, 0, (local_world_size or world_size) - 1)
    if local_rank is None:
        raise LaunchError(
            f"This process is rank {rank} of {world_size}, but its local rank is missing. "
            f"Fix: set {local_names[0]} to a number from 0 to the ranks on this host less one."
        )
    session_dir = _session_dir(env) if local_world_size == world_size and mpi == place else None
    return Launch(
        launched=True,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        # The address of the process that called mpirun may be another host's.
        master=_read_master(env) if world_size > 1 and not (is_leftover and session_dir) else None,
        session_dir=session_dir,
    )


def set_torch_environment(environ: MutableMapping[str, str]) -> None:
    """Sets the variables that torch's `env://` reads (RANK, WORLD_SIZE, MASTER_ADDR, …) if mpirun started this process.

    Also sets SMDATAPARALLEL_LOCAL_RANK to LOCAL_RANK, for scripts and for transformers. If RANK is set, and is not left
    over from the process that called mpirun, nothing else changes. Without a master's address, rank 0 reserves a free
    port of this host and writes it into the job's session directory. The other ranks wait for that. Raises LaunchError
    as `read_launch`, and if the ranks have neither an address nor a directory in common.
    """
    is_leftover = _is_leftover(environ, _rank_and_size(environ, _RANK_NAMES), _rank_and_size(environ, _MPI_NAMES))
    if "RANK" in environ and not is_leftover:
        if "LOCAL_RANK" in environ:
            environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", environ["LOCAL_RANK"])
        return
    launch = read_launch(environ)
    if not launch.launched:
        return
    named = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        **dict.fromkeys(_LOCAL_RANK_NAMES, launch.local_rank),
    }
    if launch.local_world_size is not None:
        named["LOCAL_WORLD_SIZE"] = launch.local_world_size
    has_address = "MASTER_ADDR" in environ and (launch.master is not None or launch.session_dir is None)
    environ.update({name: str(value) for name, value in named.items()})
    if not has_address and (launch.master or launch.session_dir or launch.world_size == 1):
        master = master_address(launch)
        environ.update(MASTER_ADDR=master.host, MASTER_PORT=str(master.port))


def set_local_rank(environ: MutableMapping[str, str]) -> None:
    """Sets SMDATAPARALLEL_LOCAL_RANK in a launcher's process. Raises LaunchError if its variables are wrong."""
    launch = read_launch(environ)
    if launch.launched:
        environ["SMDATAPARALLEL_LOCAL_RANK"] = str(launch.local_rank)


def is_launched_as_rank(environ: Mapping[str, str]) -> bool:
    """Whether mpirun or torchrun (of any number of ranks), or another launcher of several ranks, started this process.

    A script that `train` starts once per host is not a rank. Raises LaunchError as `read_launch` does.
    """
    if "TORCHELASTIC_RUN_ID" in environ or _rank_and_size(environ, _MPI_NAMES) is not None:
        return True
    named = _rank_and_size(environ, _RANK_NAMES)
    return named is not None and named[1] > 1 and not _is_host_rank(environ, named)


def master_address(launch: Launch) -> Address:
    """Returns where the ranks meet: the master's address, or a port of this host that rank 0 writes for the others.

    Raises LaunchError if several ranks have neither an address nor a directory in common.
    """
    if launch.master is None and launch.session_dir is None and launch.world_size > 1:
        raise no_master_error(launch)
    return launch.master or Address("127.0.0.1", _agreed_port(launch))


def no_master_error(launch: Launch) -> LaunchError:
    return LaunchError(
        f"This process is rank {launch.rank} of {launch.world_size}, but the address where the ranks meet is missing. "
        "Fix: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there."
    )


def _agreed_port(launch: Launch) -> int:
    """Returns a free port of this host. Rank 0 writes it to a file. The others raise LaunchError if it is late."""
    if launch.rank == 0 or launch.session_dir is None:
        port = _reserved_port()
    if launch.session_dir is None:
        return port
    path = launch.session_dir / "smdistributed-port"
    if launch.rank == 0:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(str(port))
        unfinished.replace(path)
        atexit.register(path.unlink, missing_ok=True)  # a later program of the same mpirun uses another port
        return port
    deadline = time.monotonic() + _PORT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Rank 0 has not imported smdistributed within {_PORT_SECONDS:.0f} s, and rank {launch.rank} waits for "
                f"it to write its port to {path}. Fix: set MASTER_ADDR and MASTER_PORT, or import it on all ranks."
            )
        time.sleep(_PORT_POLL_SECONDS)
    return int(path.read_text())


def _reserved_port() -> int:
    """Returns a port that no other process gets while this one lives."""
    reservation = socket.socket()
    # It does not listen, so that a server may share the port: all store servers set SO_REUSEADDR.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    atexit.register(reservation.close)  # which keeps the socket until then
    port: int = reservation.getsockname()[1]
    return port


def _rank_and_size(env: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    if not _is_pair_set(env, names):
        return None
    world_size = _read_integer(env, names[1], 1, None)
    return _read_integer(env, names[0], 0, world_size - 1), world_size


def _is_pair_set(env: Mapping[str, str], names: tuple[str, str]) -> bool:
    for present, other in (names, names[::-1]):
        if present in env and other not in env:
            raise LaunchError(f"{present}={env[present]} is set, but {other} is not. Fix: set both or neither.")
    return names[0] in env


def _read_integer(env: Mapping[str, str], name: str, lowest: int, highest: int | None) -> int:
    allowed = f"{lowest} or more" if highest is None else f"from {lowest} to {highest}"
    try:
        value = int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} is not an integer. Allowed: {allowed}.") from None
    if value < lowest or (highest is not None and value > highest):
        raise LaunchError(f"{name}={value} is out of range. Allowed: {allowed}.")
    return value


def _read_first_integer(env: Mapping[str, str], names: Iterable[str], lowest: int, highest: int) -> int | None:
    present = next((name for name in names if name in env), None)
    return None if present is None else _read_integer(env, present, lowest, highest)


def _local_rank_names(named: bool, mpi: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ranks = (_LOCAL_RANK_NAMES if named else ()) + (("OMPI_COMM_WORLD_LOCAL_RANK",) if mpi else ())
    sizes = (("LOCAL_WORLD_SIZE",) if named else ()) + (("OMPI_COMM_WORLD_LOCAL_SIZE",) if mpi else ())
    return ranks, sizes


def _refuse_local_rank_alone(env: Mapping[str, str]) -> None:
    for name in _LOCAL_RANK_NAMES:
        if name in env:
            raise LaunchError(
                f"{name}={env[name]} is set, but RANK and WORLD_SIZE are not. Fix: set all three or none."
            )


def _is_leftover(env: Mapping[str, str], named: tuple[int, int] | None, mpi: tuple[int, int] | None) -> bool:
    """Whether the first family is left over from the process that called mpirun, the only one of its job or host.

    It is not if both families agree, or torchrun runs inside mpirun and has set it again.
    """
    if named is None or mpi is None or "TORCHELASTIC_RUN_ID" in env:
        return False
    local_size = env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if named == mpi and env.get("LOCAL_WORLD_SIZE", local_size) == local_size:
        return False
    return named[1] == 1 or _is_host_rank(env, named)


def _is_host_rank(env: Mapping[str, str], named: tuple[int, int]) -> bool:
    """Whether `train` has set rank and world size for a script that it starts once on each host."""
    return [str(number) for number in named] == [env.get(name) for name in _HOST_NAMES]


def _refuse_contradiction(named: tuple[int, int], mpi: tuple[int, int]) -> None:
    """Raises LaunchError unless both families agree, or a launcher inside mpirun has started a larger job."""
    if named != mpi and named[1] <= mpi[1]:
        raise LaunchError(
            f"RANK={named[0]} WORLD_SIZE={named[1]} contradict mpirun, which started this process as rank {mpi[0]} "
            f"of {mpi[1]}. Fix: unset RANK and WORLD_SIZE before you call mpirun."
        )


def _read_master(env: Mapping[str, str]) -> Address | None:
    for names in _MASTER_NAMES:
        if _is_pair_set(env, names):
            return Address(env[names[0]], _read_integer(env, names[1], 1, 65535))
    return None


def _session_dir(env: Mapping[str, str]) -> Path | None:
    directory = env.get("PMIX_SERVER_TMPDIR")
    return Path(directory) if directory else None
