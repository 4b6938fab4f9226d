"""Starts a process and signals it: a fork and an exec, without the cost of importing subprocess."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import LaunchError
from shoal_toolkit.light_typing import NoReturn
from shoal_toolkit.log import say

MARK = "SHOAL_JOB"  # a variable with a random value for each job that a process belongs to: `train` may run in another
_MOST_ROUNDS = 100
_START_SECONDS = 1.0
_ENVIRONMENT_END = 48  # in /proc/PID/stat, from the third field on: 0 until exec has made the environment
_KERNEL_THREAD = 0x00200000  # of the kernel's flags of a process


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdout: int = 1,
    stderr: int = 2,
    blocked: Sequence[int] = (),
) -> int:
    """Start a command in a session of its own, with no stdin. Returns its pid; raises LaunchError if it cannot start.

    A session of its own: a Ctrl-C at the terminal reaches `train` alone, which then ends the job in order. Signals that
    are `blocked` wait until the command takes them.
    """
    read_end, write_end = os.pipe()  # closes on exec: what arrives is the reason of an exec that failed
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        _become(argv, env, cwd, (stdout, stderr), write_end)
    os.close(write_end)
    failure = b""
    while chunk := os.read(read_end, 4096):
        failure += chunk
    os.close(read_end)
    if failure:
        os.waitpid(pid, 0)
        raise LaunchError(f"{argv[0]!r} cannot be started in {cwd}: {failure.decode('utf-8', 'replace')}.")
    return pid


def _become(argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], report: int) -> NoReturn:
    """In the child: become the command, or report why not."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        # Ignored signals stay ignored through exec, and Python ignores these two: the script must not inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Through copies, as one of the two may be the other's target.
        for target, copy in [(1, os.dup(outputs[0])), (2, os.dup(outputs[1]))]:
            os.dup2(copy, target)
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(report, os.strerror(error.errno or 0).encode())
    except ValueError as error:  # a NUL or half a surrogate in an argument or a variable
        os.write(report, f"an argument or variable: {error}".encode("ascii", "backslashreplace"))
    finally:
        os._exit(127)


def start_time(pid: int) -> str:
    """Return when a process was started, in the kernel's count; empty when it is gone. Tells a reused pid apart."""
    return "".join(_stat(pid)[19:20])


def descendants(ancestor: int) -> list[int]:
    """Return the processes that a process has started, and theirs, as long as their parents run."""
    parents = {pid: "".join(_stat(pid)[1:2]) for pid in _processes()}
    found, generation = [], {str(ancestor)}
    while generation:
        children = [pid for pid, parent in parents.items() if parent in generation]
        found += children
        generation = {str(pid) for pid in children}
    return found


def orphans_run(leader: int) -> bool:
    """Whether what a group's leader, or its child, has left behind in the group still runs.

    Not the leader itself, nor its own children, nor what only waits to be reaped.
    """
    for pid in _processes():
        state, parent, group = [*_stat(pid), "", "", ""][:3]
        if group == str(leader) and pid != leader and parent != str(leader) and state not in ("Z", "X"):
            return True
    return False


def marked(mark: str, since: int) -> list[int]:
    """Return the processes that run with a mark in their environment, of those started since (in the kernel's count).

    A daemon has left its session, group and parent, and still has the variable; what was given an environment of its
    own, or has overwritten it, has not. Older processes cannot be meant, and one that hangs in the kernel is not asked:
    it would not answer.
    """
    return [pid for pid in _processes() if _runs_since(since, _stat(pid)) and _carries(pid, mark)]


def _runs_since(since: int, stat: Sequence[str]) -> bool:
    return len(stat) > 19 and stat[0] not in ("Z", "X", "D") and int(stat[19]) >= since


def _await_starts(since: int, deadline: float) -> None:
    """Wait until processes that have just been started have an environment, as they could not be told before.

    Whoever starts one goes on before the kernel has given it that; and reading its program may make it wait for a disk.
    """
    while time.monotonic() < deadline and any(_is_starting(pid, since) for pid in _processes()):
        time.sleep(_START_SECONDS / 100)


def _is_starting(pid: int, since: int) -> bool:
    stat = _stat(pid)
    if len(stat) <= _ENVIRONMENT_END or int(stat[19]) < since or int(stat[6]) & _KERNEL_THREAD:
        return False
    if stat[0] in ("Z", "X"):
        return False
    return stat[0] == "D" or (stat[_ENVIRONMENT_END] == "0" and os.access(f"/proc/{pid}/environ", os.R_OK))


def _carries(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # it is gone, or another user's
        return False
    name = f"{MARK}=".encode()
    return any(mark.encode() in variable[len(name) :].split() for variable in variables if variable.startswith(name))


def kill_left_behind(leader: int, mark: str, since: int) -> list[str]:
    """Kill every process of the session that `spawn` made for a process, and every marked one; return their commands.

    Until none is new, as what has been killed starts nothing more; what starts others faster than that is let go.
    """
    killed: set[int] = set()
    commands: list[str] = []
    deadline = time.monotonic() + _START_SECONDS
    for _ in range(_MOST_ROUNDS):
        _await_starts(since, deadline)
        session = [pid for pid in _processes() if _stat(pid)[3:4] == [str(leader)]]
        left = {*session, *marked(mark, since)} - killed
        if not left:
            break
        for pid in left:
            commands += _commands(pid)
            signal_process(pid, signal.SIGKILL)
        killed |= left
    else:
        say(f"what the script left behind starts new processes faster than they can be killed, {len(left)} just now")
    return commands


def _commands(pid: int) -> list[str]:
    """The command of a process; none of one that is gone, or only waits to be reaped, or serves Python's own pools."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            words = redact.arguments(file.read().split("\0")[:-1])
    except OSError:
        return []
    return [" ".join(words)] if words and not any("multiprocessing." in word for word in words) else []


def signal_marked(leader: int, mark: str, since: int, number: int) -> None:
    """Signal the groups of marked processes that are not the leader's: `timeout`, say, makes one of its own."""
    groups = {group for pid in marked(mark, since) for group in _stat(pid)[2:3]}
    for group in groups - {str(leader)}:
        signal_group(int(group), number)


def signal_process(pid: int, number: int) -> None:
    """Signal a process, unless it has ended by itself, or has become another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def signal_group(leader: int, number: int) -> bool:
    """Signal every process of a group that may be signalled; returns whether there is one.

    The kernel refuses only where there is none but those of another user: a program with the setuid bit, say.
    """
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
