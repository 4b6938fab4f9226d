"""Keeps a process with imported frameworks on this host, which forks the ranks (sidecars/standby.py).

Ranks of torchrun's launcher and of mpirun are forked from the first start on (`LaunchPlan.forks_ranks`). The imports
begin when this host is set up, while the hosts meet. A script that each host runs once starts as usual; the standby
imports its frameworks 5 s later, and forks it at a restart. Without a standby that answers, a new process forks the
ranks of torchrun's launcher, without imports, and ranks of mpirun run their command themselves.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from functools import partial

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.files import list_names
from shoal_toolkit.plan.launcher import STANDBY
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.plan.rank_shell import HAND_OVER, RANKS, SHELL_VARIABLES, SOCKET
from shoal_toolkit.run.ranks import make_run_directory, remove_run_directory
from shoal_toolkit.sidecars import hand_over
from shoal_toolkit.system.loop import READ, Loop, Timer
from shoal_toolkit.system.process import MARK, kill_left_behind, read_start_time, signal_group, spawn

_START_SECONDS = 5.0  # after the script, which imports its frameworks at that time
_IMPORT_SECONDS = 120.0  # that a start waits for a standby that is importing
_ANSWER_SECONDS = 5.0
_NUMBER = struct.Struct("!I")
_SET_CHILD_SUBREAPER = 36  # of prctl


class StandbyProcess(NamedTuple):
    """A process that imports the frameworks of a script."""

    pid: int
    mark: str  # of the processes that it forks
    server: socket.socket
    directory: str  # with its socket, for ranks of mpirun; empty without

    def end(self) -> None:
        """Ends the process; processes that it has forked go on."""
        self.server.close()
        signal_group(self.pid, signal.SIGKILL)
        if self.directory:
            remove_run_directory(self.directory)


def start_process(plan: LaunchPlan, environ: Mapping[str, str], mark: str, early: bool = False) -> StandbyProcess:
    """Starts a process that imports the frameworks of the plan's script. Raises LaunchError or OSError.

    Args:
        environ: The environment of the script.
        mark: A random word for the environment of the processes that it forks.
        early: Whether the source may still change, so that nothing of it may be imported.
    """
    python, *arguments = plan.script
    server, *theirs = socket.socketpair()  # to this process and, under mpirun, one that listens for ranks
    directory = make_run_directory() if plan.by_mpirun else ""
    try:
        if directory:
            theirs.append(socket.socket(socket.AF_UNIX))
            theirs[-1].bind(os.path.join(directory, SOCKET))
            theirs[-1].listen(max(plan.ranks.values()))
        for each in theirs:
            os.set_inheritable(each.fileno(), True)
        numbers = ",".join(str(each.fileno()) for each in theirs)
        argv = [python, "-m", STANDBY, *(["--early"] if early else []), numbers, *arguments]
        with open(os.devnull, "wb") as null:
            pid = spawn(argv, build_environment(plan, environ, mark), plan.cwd, null.fileno(), null.fileno())
    except (LaunchError, OSError):
        server.close()
        if directory:
            remove_run_directory(directory)
        raise
    finally:
        for each in theirs:
            each.close()
    return StandbyProcess(pid, mark, server, directory)


def build_environment(plan: LaunchPlan, environ: Mapping[str, str], mark: str) -> dict[str, str]:
    """Returns the environment of a standby: with Open MPI's libraries next to Python, which mpirun adds too."""
    env = {**environ, MARK: f"{environ.get(MARK, '')} {mark}".strip()}
    libraries = os.path.join(os.path.dirname(os.path.dirname(plan.script[0])), "lib")
    if plan.by_mpirun and list_names(libraries, prefix="libopen-pal.so"):
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (libraries, env.get("LD_LIBRARY_PATH"))))
    return env


class Standby:
    """The standby of this host. Creating it starts nothing."""

    def __init__(self, loop: Loop, plan: LaunchPlan, environ: Mapping[str, str]) -> None:
        self.mark = os.urandom(8).hex()  # of the processes that it forks
        self._loop = loop
        self.plan = plan  # of the next start
        self._environ = environ
        self.directory = ""  # with its socket, for ranks of mpirun
        self._server: socket.socket | None = None
        self._pid = 0
        self._is_ready = False
        self._on_ready: Callable[[bool], None] | None = None
        self._timer = Timer(0, lambda: None)

    def prepare(self) -> None:
        """Starts the standby in 5 s, if it has not been started."""
        if self._pid == 0:
            self._timer.cancel()
            self._timer = self._loop.call_later(_START_SECONDS, self.start_now)

    def start_now(self) -> None:
        """Starts the standby, if none runs."""
        if self._pid <= 0:
            self._timer.cancel()
            self._start()

    def _start(self) -> None:
        """Starts the process. An error leaves this host without a standby."""
        try:
            self.adopt(start_process(self.plan, self._environ, self.mark))
        except (LaunchError, OSError):
            self.close()

    def adopt(self, process: StandbyProcess) -> None:
        """Makes a process, which may be importing, the standby of this host."""
        self._pid, self.mark, self._server, self.directory = process
        self._loop.on_child(self._pid, partial(self._on_ended, self._pid))
        self._loop.watch(self._server.fileno(), READ, self._on_readable)

    def add_links(self, directory: str) -> None:
        """Links the standby's socket and the program that hands a rank over in a run directory."""
        if self.directory:
            os.symlink(os.path.join(self.directory, SOCKET), os.path.join(directory, SOCKET))
            os.symlink(hand_over.__file__, os.path.join(directory, HAND_OVER))

    def _marks(self) -> str:
        return f"{self._environ.get(MARK, '')} {self.mark}".strip()

    def _on_ended(self, pid: int, _: int) -> None:
        if pid == self._pid:
            self._finish_wait(False)

    def _on_readable(self) -> None:
        """Notes that the imports are done; without a byte, that the process has ended."""
        assert self._server is not None
        self._loop.unwatch(self._server.fileno(), READ)
        self._is_ready = bool(self._server.recv(1))
        if self._on_ready is not None:
            self._finish_wait(self._is_ready)

    def when_ready(self, on_ready: Callable[[bool], None]) -> None:
        """Calls back with whether ranks can be forked: at once, or when a standby that is importing is ready."""
        self._timer.cancel()
        if self._is_ready or self._pid <= 0:
            on_ready(self._is_ready)
            return
        self._on_ready = on_ready
        self._timer = self._loop.call_later(_IMPORT_SECONDS, lambda: self._finish_wait(False))

    def _finish_wait(self, is_ready: bool) -> None:
        self._timer.cancel()
        on_ready, self._on_ready = self._on_ready, None
        if not is_ready:
            self.close()
        if on_ready is not None:
            on_ready(is_ready)

    def fork(self, variables: Mapping[str, str], outputs: tuple[int, int], directory: str) -> int:
        """Has the standby fork the script, or a process with the ranks that torchrun would start on this host.

        Args:
            variables: The environment, with SHOAL_RANKS for ranks.
            outputs: The descriptors for stdout and stderr.
            directory: The run directory, for ranks.

        Returns:
            The pid of the process, a child of this one; 0 without a standby, or if it failed, which ends the standby.
        """
        server = self._server
        if server is None:
            return 0
        env = {name: variables[name] for name in variables if name not in SHELL_VARIABLES}
        request = {
            "argv": self.plan.script[1:],
            "env": {**env, MARK: self._marks()},
            "cwd": self.plan.cwd,
            "directory": directory,
            "ranks": json.loads(variables.get(RANKS, "[]")),
        }
        payload = json.dumps(request).encode()
        try:
            return self._request(server, payload, outputs)
        except OSError:
            # It may have forked the script, although it has not answered in time.
            kill_left_behind(self._pid, self.mark, int(read_start_time(self._pid) or 0))
            self.close()
            return 0

    def _request(self, server: socket.socket, payload: bytes, outputs: tuple[int, int]) -> int:
        """Returns the pid in the answer. Meanwhile this process adopts orphans: one is the script. Raises OSError."""
        server.settimeout(_ANSWER_SECONDS)
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [_NUMBER.pack(len(payload))], outputs)
            server.sendall(payload)
            answer = server.recv(_NUMBER.size)
        finally:
            libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) < _NUMBER.size:
            raise OSError("the standby has ended")
        (pid,) = _NUMBER.unpack(answer)
        return int(pid)

    @property
    def pid(self) -> int:
        """The process; 0 or less without one."""
        return self._pid

    def cancel_wait(self) -> bool:
        """Makes `when_ready` call back no more, and returns whether it would have. The standby goes on."""
        self._timer.cancel()
        waited, self._on_ready = self._on_ready is not None, None
        return waited

    def close(self) -> None:
        """Ends the standby; processes that it has forked go on."""
        self.cancel_wait()
        self._is_ready = False
        if self._server is not None:
            self._loop.unwatch(self._server.fileno(), READ)
            self._server.close()
            self._server = None
        if self._pid > 0:
            signal_group(self._pid, signal.SIGKILL)
            self._pid = -1
        if self.directory:
            remove_run_directory(self.directory)
            self.directory = ""


def list_rank_variables(plan: LaunchPlan) -> list[dict[str, str]]:
    """Returns the variables that torchrun sets for each rank of this host. Rank 0 serves the rendezvous itself."""
    hosts = list(plan.ranks)
    host, count = hosts.index(plan.current_host), plan.ranks[plan.current_host]
    before = sum(plan.ranks[name] for name in hosts[:host])
    common = {
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": len(hosts),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": plan.world_size,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    ranks = []
    for local in range(count):
        own = {"RANK": before + local, "ROLE_RANK": before + local, "LOCAL_RANK": local}
        variables = {**common, **own, "SMDATAPARALLEL_LOCAL_RANK": local}
        variables.update({name: variables[ours] for name, ours in plan.described.items()})
        ranks.append({name: str(value) for name, value in variables.items()})
    return ranks
