"""How many files another process may open."""

from __future__ import annotations

import resource


class OpenFilesLimit:
    """Lowers the soft limit of a process to `count` open files, if it is higher. Does nothing if that is refused."""

    def __init__(self, pid: int, count: int) -> None:
        self._pid = pid
        self._before: tuple[int, int] | None = None
        try:
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            if before[0] == resource.RLIM_INFINITY or before[0] > count:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
                self._before = before
        except OSError:  # it has ended, or the container forbids the system call
            return

    def restore(self) -> None:
        """Sets the limit that the process had. Does nothing for a process that has ended."""
        if self._before is None:
            return
        before, self._before = self._before, None
        try:
            resource.prlimit(self._pid, resource.RLIMIT_NOFILE, before)
        except ProcessLookupError:
            return
