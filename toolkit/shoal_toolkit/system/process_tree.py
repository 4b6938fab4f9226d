"""Finds and signals the processes below another one. A script that just runs to its end needs none of this."""

from __future__ import annotations

from shoal_toolkit.files import read_text
from shoal_toolkit.system.process import find_marked, list_pids, read_stat, signal_group, signal_process


def find_descendants(ancestor: int) -> list[int]:
    """Returns the child processes of a process, their child processes and so on."""
    parents = {pid: "".join(read_stat(pid)[1:2]) for pid in list_pids()}
    found, generation = [], {str(ancestor)}
    while generation:
        children = [pid for pid, parent in parents.items() if parent in generation]
        found += children
        generation = {str(pid) for pid in children}
    return found


def signal_handlers(ancestor: int, number: int) -> int:
    """Signals a process that handles the signal; of one that would die of it, those below it in the same way.

    A process below one that handles it, such as a worker that loads data, gets none. Returns the number of processes.
    """
    status = read_text("/proc", str(ancestor), "status")
    caught = status.partition("\nSigCgt:")[2].split(None, 1)[:1]
    if caught and int(caught[0], 16) >> (number - 1) & 1:
        signal_process(ancestor, number)
        return 1
    children = [pid for pid in list_pids() if read_stat(pid)[1:2] == [str(ancestor)]]
    return sum(signal_handlers(pid, number) for pid in children)


def signal_with_group(pid: int, group: int, number: int) -> None:
    """Signals all processes of a process's group. If it has left that, the process and those below it.

    The number of an empty group may belong to strangers by now.
    """
    if read_stat(pid)[2:3] != [str(group)] or not signal_group(group, number):
        for process in (*find_descendants(pid), pid):
            signal_process(process, number)


def has_orphans(leader: int, session: str = "") -> bool:
    """Whether orphaned processes run in a process group: not its leader, not children of the leader, no zombies.

    Args:
        leader: The number of the group.
        session: Only processes in this session count: without it, strangers may have got the number of an empty group.
    """
    for pid in list_pids():
        state, parent, group, within = [*read_stat(pid), "", "", "", ""][:4]
        if group == str(leader) and pid != leader and parent != str(leader) and state not in ("Z", "X"):
            return session in ("", within)
    return False


def signal_marked(leader: int, mark: str, since: int, number: int) -> None:
    """Signals the process groups of marked processes, except the leader's: `timeout`, for example, makes one.

    Args:
        leader: The leader of the group that is not signalled.
        mark: The mark of the job.
        since: Clock ticks; older processes are skipped.
        number: The signal.
    """
    groups = {group for pid in find_marked(mark, since) for group in read_stat(pid)[2:3]}
    for group in groups - {str(leader)}:
        signal_group(int(group), number)
