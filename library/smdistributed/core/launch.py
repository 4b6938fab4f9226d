"""The launch environment: which rank this process is, of how many, and how the ranks find each other.

The only module that reads it, and fills in what torch reads. Two families of variables tell it, by these rules:

1. RANK and WORLD_SIZE, with LOCAL_RANK (or SMDATAPARALLEL_LOCAL_RANK) and LOCAL_WORLD_SIZE: torchrun, `train`.
2. OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE: Open MPI's mpirun.

The first family decides where it is there, because it is what torch's own `env://` reads and what a launcher inside
mpirun (torchrun on every host) sets anew; the second fills in what the first leaves out, when both tell the same rank.
RANK and WORLD_SIZE of the one process that called mpirun are left over, and mpirun's family decides: a world of one,
and what `train` gives a script that it starts once on each host (as SM_CURRENT_HOST_RANK and SM_HOST_COUNT). Other
families that cannot both be true are an error: each rank would else train alone. With neither, no launcher started the
process: a job of one.

The ranks meet at MASTER_ADDR:MASTER_PORT, else at SMDATAPARALLEL_SERVER_ADDR:SMDATAPARALLEL_SERVER_PORT (set by the
data parallel launcher on several hosts), else, when mpirun started them all on this host, in its session directory.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

_RANK_NAMES = ("RANK", "WORLD_SIZE")
_MPI_NAMES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_HOST_NAMES = ("SM_CURRENT_HOST_RANK", "SM_HOST_COUNT")
_MASTER_NAMES = (("MASTER_ADDR", "MASTER_PORT"), ("SMDATAPARALLEL_SERVER_ADDR", "SMDATAPARALLEL_SERVER_PORT"))
_LOCAL_RANK_NAMES = ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK")
_PORT_SECONDS, _PORT_LOOK_SECONDS = 300.0, 0.01
_reservations: list[socket.socket] = []


class LaunchError(RuntimeError):
    """The launch environment is incomplete or contradicts itself; the message names the variables and what to do."""


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens: a host name or IP address, and a TCP port."""

    host: str
    port: int


@dataclass(frozen=True)
class Launch:
    """This process's place in its job. Ranks count from 0; `local_` means among the ranks of this host."""

    launched: bool
    """False: no launcher started this process, it is a job of one."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """None: the launcher did not say."""
    master: Address | None
    """None: no address was given, or a job of one needs none."""
    session_dir: Path | None
    """A directory of this job alone, which all its ranks see and its launcher removes; None: there is none."""

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are on this host: they need no address that others reach."""
        return self.local_world_size == self.world_size


_ALONE = Launch(launched=False, rank=0, world_size=1, local_rank=0, local_world_size=1, master=None, session_dir=None)


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launch environment (`os.environ` by default) by the rules at the top of this module.

    Raises LaunchError when a variable is not an integer or out of range, when one of a pair is missing, when the local
    rank is missing, and when the two families contradict each other.
    """
    env = os.environ if environ is None else environ
    named, mpi = _place(env, _RANK_NAMES), _place(env, _MPI_NAMES)
    is_callers = _is_the_callers(env, named, mpi)
    if is_callers:
        named = None
    place = named or mpi
    if place is None:
        _refuse_local_rank_alone(env)
        return _ALONE
    if named and mpi:
        _refuse_leftovers(named, mpi)
    rank, world_size = place
    local_names, local_size_names = _local_names(named is not None, mpi == place)
    local_world_size = _first_integer(env, local_size_names, 1, world_size)
    local_rank = _first_integer(env, local_names, 0, (local_world_size or world_size) - 1)
    if local_rank is None:
        raise LaunchError(
            f"This process is rank {rank} of {world_size}, but no local rank is given: "
            f"set {local_names[0]}, from 0 to the ranks on this host less one."
        )
    session_dir = _session_dir(env) if local_world_size == world_size and mpi == place else None
    return Launch(
        launched=True,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        # The caller's may be another host's.
        master=_master(env) if world_size > 1 and not (is_callers and session_dir) else None,
        session_dir=session_dir,
    )


def fill_in(environ: MutableMapping[str, str]) -> None:
    """Set what torch's `env://` reads (RANK, WORLD_SIZE, MASTER_ADDR, …) where mpirun started this process.

    And SMDATAPARALLEL_LOCAL_RANK, as LOCAL_RANK is, for scripts and for transformers. Nothing else is changed where
    RANK is set, unless it is that of the process which called mpirun. Without a master's address, rank 0 leaves a free
    port of this host in the job's session directory, for which the others wait. Raises LaunchError as `read_launch`
    does, and where they have neither an address nor a directory.
    """
    is_callers = _is_the_callers(environ, _place(environ, _RANK_NAMES), _place(environ, _MPI_NAMES))
    if "RANK" in environ and not is_callers:
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
        master = meeting_place(launch)
        environ.update(MASTER_ADDR=master.host, MASTER_PORT=str(master.port))


def name_local_rank(environ: MutableMapping[str, str]) -> None:
    """Set SMDATAPARALLEL_LOCAL_RANK where a launcher started this process. Raises LaunchError as `read_launch` does."""
    launch = read_launch(environ)
    if launch.launched:
        environ["SMDATAPARALLEL_LOCAL_RANK"] = str(launch.local_rank)


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of several ranks a host started this process: not one that `train` starts once on each host.

    Raises LaunchError as `read_launch` does.
    """
    if "TORCHELASTIC_RUN_ID" in environ or _place(environ, _MPI_NAMES) is not None:
        return True
    named = _place(environ, _RANK_NAMES)
    return named is not None and named[1] > 1 and not _is_of_host(environ, named)


def meeting_place(launch: Launch) -> Address:
    """Where the ranks meet: the master's address, else a port of this host on which they agree as `fill_in` tells.

    Raises LaunchError when several ranks have neither an address nor a directory in common.
    """
    if launch.master is None and launch.session_dir is None and launch.world_size > 1:
        raise nowhere_to_meet(launch)
    return launch.master or Address("127.0.0.1", _agreed_port(launch))


def nowhere_to_meet(launch: Launch) -> LaunchError:
    """What is raised where several ranks have neither an address nor a directory in common."""
    return LaunchError(
        f"This process is rank {launch.rank} of {launch.world_size}, but nothing says where the ranks meet: "
        "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there."
    )


def _agreed_port(launch: Launch) -> int:
    """A port that is free on this host, the same on all ranks: rank 0 writes it down, the others wait for that."""
    if launch.rank == 0 or launch.session_dir is None:
        port = _reserved_port()
    if launch.session_dir is None:
        return port
    path = launch.session_dir / "smdistributed-port"
    if launch.rank == 0:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(str(port))
        unfinished.replace(path)
        atexit.register(path.unlink, missing_ok=True)  # a later program of the same mpirun has another
        return port
    deadline = time.monotonic() + _PORT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Rank 0 has not imported smdistributed within {_PORT_SECONDS:.0f} s, rank {launch.rank} waits for the "
                f"port that it writes to {path}: set MASTER_ADDR and MASTER_PORT, or import it on all ranks."
            )
        time.sleep(_PORT_LOOK_SECONDS)
    return int(path.read_text())


def _reserved_port() -> int:
    """A port on which this process can listen, and which the system gives to no other one while this process lives.

    Bound by a socket that does not listen, so that a server may share it: all servers for a store set SO_REUSEADDR.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    _reservations.append(reservation)
    port: int = reservation.getsockname()[1]
    return port


def _place(env: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    """Rank and world size by these names, or None when neither is set."""
    if not _both_or_neither(env, names):
        return None
    world_size = _integer(env, names[1], 1, None)
    return _integer(env, names[0], 0, world_size - 1), world_size


def _both_or_neither(env: Mapping[str, str], names: tuple[str, str]) -> bool:
    for present, other in (names, names[::-1]):
        if present in env and other not in env:
            raise LaunchError(f"{present}={env[present]} is set, but {other} is not: set both or neither.")
    return names[0] in env


def _integer(env: Mapping[str, str], name: str, lowest: int, highest: int | None) -> int:
    allowed = f"{lowest} or more" if highest is None else f"from {lowest} to {highest}"
    try:
        value = int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} is not an integer: it must be {allowed}.") from None
    if value < lowest or (highest is not None and value > highest):
        raise LaunchError(f"{name}={value} is out of range: it must be {allowed}.")
    return value


def _first_integer(env: Mapping[str, str], names: Iterable[str], lowest: int, highest: int) -> int | None:
    present = next((name for name in names if name in env), None)
    return None if present is None else _integer(env, present, lowest, highest)


def _local_names(named: bool, mpi: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the local rank and of the local world size, in order, given which families tell this rank."""
    ranks = (_LOCAL_RANK_NAMES if named else ()) + (("OMPI_COMM_WORLD_LOCAL_RANK",) if mpi else ())
    sizes = (("LOCAL_WORLD_SIZE",) if named else ()) + (("OMPI_COMM_WORLD_LOCAL_SIZE",) if mpi else ())
    return ranks, sizes


def _refuse_local_rank_alone(env: Mapping[str, str]) -> None:
    for name in _LOCAL_RANK_NAMES:
        if name in env:
            raise LaunchError(f"{name}={env[name]} is set, but RANK and WORLD_SIZE are not: set all three or none.")


def _is_the_callers(env: Mapping[str, str], named: tuple[int, int] | None, mpi: tuple[int, int] | None) -> bool:
    """Whether the first family is of the process that called mpirun: the only one of its job, or of its host.

    torchrun inside mpirun has named this process anew.
    """
    if named is None or mpi is None or "TORCHELASTIC_RUN_ID" in env:
        return False
    local_size = env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if named == mpi and env.get("LOCAL_WORLD_SIZE", local_size) == local_size:
        return False
    return named[1] == 1 or _is_of_host(env, named)


def _is_of_host(env: Mapping[str, str], named: tuple[int, int]) -> bool:
    """Whether this is the place of a script that `train` starts once on each host."""
    return [str(number) for number in named] == [env.get(name) for name in _HOST_NAMES]


def _refuse_leftovers(named: tuple[int, int], mpi: tuple[int, int]) -> None:
    """A launcher inside mpirun makes a job larger than mpirun's; another rank of one no larger is left over."""
    if named != mpi and named[1] <= mpi[1]:
        raise LaunchError(
            f"RANK={named[0]} WORLD_SIZE={named[1]} contradict mpirun, which started this process as rank {mpi[0]} "
            f"of {mpi[1]}: unset RANK and WORLD_SIZE where mpirun is called."
        )


def _master(env: Mapping[str, str]) -> Address | None:
    for names in _MASTER_NAMES:
        if _both_or_neither(env, names):
            return Address(env[names[0]], _integer(env, names[1], 1, 65535))
    return None


def _session_dir(env: Mapping[str, str]) -> Path | None:
    directory = env.get("PMIX_SERVER_TMPDIR")
    return Path(directory) if directory else None
