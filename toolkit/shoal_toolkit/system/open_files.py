"""How many files another process may open."""

from __future__ import annotations

import contextlib
import resource

from shoal_toolkit.system.process_tree import find_descendants


class OpenFilesLimit:
    """Lowers the soft limit of a process to `count` open files, if it is higher. Does nothing if that is refused."""

    def __init__(self, pid: int, count: int) -> None:
        self._pid, self._count = pid, count
        self._before: tuple[int, int] | None = None
        try:
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            if before[0] == resource.RLIM_INFINITY or before[0] > count:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
                self._before = before
        except OSError:  # it has ended, or the container forbids the system call
            return

    def restore(self) -> None:
        """Sets the limit that the process had: of it, and of its descendants, since it may be a script that started it.

        Leaves out a process that has ended, or has another user.
        """
        if self._before is None:
            return
        before, self._before = self._before, None
        for pid in (self._pid, *find_descendants(self._pid)):
            with contextlib.suppress(OSError):
                if resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == self._count:
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
