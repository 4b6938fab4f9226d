"""Reads from the output of mpirun and its daemons which rank failed first and why. Passes on the rest without noise.

mpirun's own summary names the failed rank too, but some aborts of Open MPI 4.1.8 lose it ("Data unpack would read past
end of buffer"). Therefore mpirun runs with `state_base_verbose 1` (plan/mpi.py). The lines that this adds are read here
and kept out of the log.

Such a line of Open MPI 4.1 and of 5.0:

- `[vm:1] [[8015,0],0] ACTIVATE PROC [[8015,1],3] STATE CALLED ABORT AT pmix_server_gen.c:198`
- `[vm:1] [prterun-vm-1@0,0] [1795198828.267768] ACTIVATE PROC [prterun-vm-1@1,3] STATE CALLED ABORT AT
  pmix_server_gen.c`
"""

from __future__ import annotations

import re

from shoal_toolkit.output.lines import Lines, Tail

_STATE = re.compile(rb"^\[.*\] ACTIVAT(?:E|ING) (?:JOB|PROC) ")
_FAILED = re.compile(
    rb"ACTIVATE PROC \[(?:\[\d+,1\]|[^]]*@1),(\d+)\] STATE (?:CALLED ABORT|EXITED WITH NON-ZERO|ABORTED BY SIGNAL)"
)
# A harmless race in mpirun, about which it warns in every other start: the child sets its process group itself.
_RACE = re.compile(rb"^(?:\[.*)?plm:[rs]sh: Warning: setpgid\(")
_RULE = re.compile(r"^-{20,}$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n")
# The notice about a rank that failed, from one rule of dashes to the next.
_SUMMARY = re.compile(
    r"^-{20,}\n(?:Primary job|(?:mpirun|prterun|prte)(?: has)? (?:noticed|detected|exited))(?:(?!-{20}).*\n)*-{20,}$",
    re.MULTILINE,
)
_VAGUE = "It looks like MPI_INIT failed for some reason"
_PROCESS_LINE = re.compile(r"\[")  # lines of a process, between notices
_UNIMPORTANT = re.compile(r"\bwarning\b|deprecated|_ERROR_LOG:", re.IGNORECASE)


class MpirunLog:
    """Reads the two streams of mpirun, or of one of its daemons."""

    def __init__(self) -> None:
        self.failed_rank: int | None = None
        self._lines: dict[int, Lines] = {}
        self._tail = Tail()

    def feed(self, stream: int, data: bytes) -> bytes:
        """Returns the complete lines to pass on. Notes the first rank that failed, and keeps the end for `text`."""
        return self._filter(self._lines.setdefault(stream, Lines(b"")).feed(data))

    def flush(self, stream: int) -> bytes:
        """Returns an incomplete last line to pass on."""
        return self._filter(self._lines[stream].flush()) if stream in self._lines else b""

    def text(self) -> str:
        """Returns the end of the lines that were passed on."""
        return self._tail.text()

    def failure_reason(self) -> str:
        """Returns why mpirun failed, in its own words."""
        return find_failure_reason(self.text())

    def rank_failure_cause(self) -> str:
        """Returns the first specific notice that MPI wrote for a rank; empty without one.

        A notice that only says that MPI_INIT failed counts if there is no other. mpirun's own summary, warnings and
        lines of processes don't count.
        """
        notices = [notice.strip("\n") for notice in _RULE.split(_SUMMARY.sub("", self.text()))]
        specific = [
            notice
            for notice in notices
            if notice and not _UNIMPORTANT.search(notice) and not _PROCESS_LINE.match(notice)
        ]
        return next((notice for notice in specific if not notice.startswith(_VAGUE)), "".join(specific[:1]))

    def _filter(self, data: bytes) -> bytes:
        kept = b"".join(line for line in data.splitlines(keepends=True) if not self._is_noise(line))
        self._tail.add(kept)
        return kept

    def _is_noise(self, line: bytes) -> bool:
        """Whether a line stays out of the log. Notes the first rank that failed."""
        if not _STATE.match(line):
            return _RACE.match(line) is not None
        failed = _FAILED.search(line)
        if failed and self.failed_rank is None:
            self.failed_rank = int(failed.group(1))
        return True


def find_failure_reason(text: str) -> str:
    """Returns the first paragraph of mpirun's output that is neither a warning nor an internal error, as one line.

    mpirun writes notices between rules of dashes, each in paragraphs. A paragraph that ends with a colon gets the next
    one too. If there are only warnings, the first counts.
    """
    notices = [[" ".join(part.split()) for part in _PARAGRAPH.split(notice)] for notice in _RULE.split(text)]
    notices = [[part for part in parts if part] for parts in notices]
    important = [parts for parts in notices if parts and not _UNIMPORTANT.search(parts[0])]
    paragraphs = [part for parts in notices for part in parts]
    if important:  # "The policy is not recognized:" is completed by the next paragraph
        first = important[0]
        return " ".join(first[:2]) if first[0].endswith(":") else first[0]
    return next((part for part in paragraphs if not _UNIMPORTANT.search(part)), "".join(paragraphs[:1]))
