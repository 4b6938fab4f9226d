"""Starts processes, finds those that they left behind, and signals them. Importing subprocess would take too long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import NoReturn
from shoal_toolkit.files import read_text
from shoal_toolkit.log import write_log

MARK = "SHOAL_JOB"  # a variable that marks all processes of a job, with a random value for each `train` above them
_MAX_ROUNDS = 100
_START_SECONDS = 1.0
_ENVIRONMENT_END = 48  # field of /proc/PID/stat, counted from the third: 0 until exec has set up the environment
_KERNEL_THREAD = 0x00200000  # a flag of a process in the kernel


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdout: int = 1,
    stderr: int = 2,
    blocked: Sequence[int] = (),
) -> int:
    """Starts a command without stdin, in a new session: Ctrl-C at the terminal then reaches only `train`.

    Returns once the program has replaced the child process. The descriptors stay open here.

    Args:
        argv: The program and its arguments.
        env: Its whole environment.
        cwd: Its working directory.
        stdout: The descriptor for its stdout.
        stderr: The descriptor for its stderr.
        blocked: Signals that stay pending until the command handles them.

    Returns:
        Its pid.

    Raises:
        LaunchError: If it can't be started.
        OSError: If the system has no process or pipe left.
    """
    read_end, write_end = os.pipe()  # closes on exec; gets the reason if exec fails
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        _exec(argv, env, cwd, (stdout, stderr), write_end)
    os.close(write_end)
    failure = b""
    while chunk := os.read(read_end, 4096):
        failure += chunk
    os.close(read_end)
    if failure:
        os.waitpid(pid, 0)
        raise LaunchError(f"{argv[0]!r} cannot be started in {cwd}: {failure.decode('utf-8', 'replace')}.")
    return pid


def _exec(argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], report: int) -> NoReturn:
    """In the child process: becomes the command, in a new session, or writes to `report` and ends with 127."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        # Python ignores these two signals, and ignored signals stay ignored after exec.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Copies, because each may be the target of the other.
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


def read_start_time(pid: int) -> str:
    """Returns the start time of a process in clock ticks; empty if it is gone. Distinguishes reused pids."""
    return "".join(read_stat(pid)[19:20])


def find_marked(mark: str, since: int) -> list[int]:
    """Returns the running processes with a mark in their environment.

    A daemon has left its session, group and parent, but still has the variable. A process with a new or overwritten
    environment has not. Processes of other users are skipped, and so are those that hang in the kernel: reading their
    environment would hang too.

    Args:
        mark: One of the words in the variable MARK, to which each nested `train` adds its own.
        since: Clock ticks; older processes are skipped.
    """
    return [pid for pid in list_pids() if _is_running_since(since, read_stat(pid)) and _has_mark(pid, mark)]


def _is_running_since(since: int, stat: Sequence[str]) -> bool:
    """Whether a process started at `since` or later, and neither is a zombie nor hangs in the kernel."""
    return len(stat) > 19 and stat[0] not in ("Z", "X", "D") and int(stat[19]) >= since


def _await_starts(since: int, deadline: float) -> None:
    """Waits until new processes have an environment, without which their mark can't be seen."""
    # The parent goes on before the kernel has set it up, and a disk may be slow.
    while time.monotonic() < deadline and any(_is_starting(pid, since) for pid in list_pids()):
        time.sleep(_START_SECONDS / 100)


def _is_starting(pid: int, since: int) -> bool:
    """Whether a process of this user that started at `since` or later has no environment yet, or hangs."""
    stat = read_stat(pid)
    if len(stat) <= _ENVIRONMENT_END or int(stat[19]) < since or int(stat[6]) & _KERNEL_THREAD:
        return False
    if stat[0] in ("Z", "X"):
        return False
    return stat[0] == "D" or (stat[_ENVIRONMENT_END] == "0" and os.access(f"/proc/{pid}/environ", os.R_OK))


def _has_mark(pid: int, mark: str) -> bool:
    """Whether the variable MARK of a process has this mark among its words; False if its environment can't be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # it is gone, or runs as another user
        return False
    name = f"{MARK}=".encode()
    return any(mark.encode() in variable[len(name) :].split() for variable in variables if variable.startswith(name))


def kill_left_behind(leader: int, mark: str, since: int, spared: int = 0) -> list[str]:
    """Kills every process of a session that `spawn` made, and every marked one, until there are no new ones.

    For up to 1 s it waits for processes that are just starting. Processes that start others faster than they can be
    killed are left, and logged.

    Args:
        leader: The pid of the process that `spawn` started.
        mark: The mark of the job.
        since: Clock ticks at which that process started.
        spared: The pid of a process that is left.

    Returns:
        The commands of the killed processes, for the log.
    """
    killed: set[int] = set()
    commands: list[str] = []
    deadline = time.monotonic() + _START_SECONDS
    for _ in range(_MAX_ROUNDS):
        _await_starts(since, deadline)
        session = [pid for pid in list_pids() if read_stat(pid)[3:4] == [str(leader)]]
        left = {*session, *find_marked(mark, since)} - killed - {spared}
        if not left:
            break
        for pid in left:
            commands += _read_command(pid)
            signal_process(pid, signal.SIGKILL)
        killed |= left
    else:
        write_log(f"processes of the script start new ones faster than they can be killed, {len(left)} just now")
    return commands


def _read_command(pid: int) -> list[str]:
    """Returns the command of a process; none if it is gone, a zombie, or a helper of multiprocessing."""
    words = redact.mask_arguments(read_text(f"/proc/{pid}/cmdline").split("\0")[:-1])
    return [" ".join(words)] if words and not any("multiprocessing." in word for word in words) else []


def signal_process(pid: int, number: int) -> None:
    """Signals a process; ignores one that has ended, or runs as another user now."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def list_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on; none if the process is gone."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def signal_group(leader: int, number: int) -> bool:
    """Signals all processes of a group, and returns whether there is one that may be signalled.

    The kernel refuses only if all of them run as another user: a program with the setuid bit, for example.
    """
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
