"""What mpirun and its daemons say: which rank failed first is read from it, the rest is passed on without their noise.

mpirun's own summary names that rank too, but is lost in some aborts (Open MPI 4.1.8: "Data unpack would read past end
of buffer in show_help.c"). So their state log is switched on, read, and kept out of the job's.

A line of it, from Open MPI 4.1 and from 5.0:

[vm:1] [[8015,0],0] ACTIVATE PROC [[8015,1],3] STATE CALLED ABORT AT pmix_server_gen.c:198
[vm:1] [prterun-vm-1@0,0] [1795198828.267768] ACTIVATE PROC [prterun-vm-1@1,3] STATE CALLED ABORT AT pmix_server_gen.c:1
"""

from __future__ import annotations

import re

from shoal_toolkit.output.streams import Lines, Tail

VERBOSITY = {"state_base_verbose": "1"}
_STATE = re.compile(rb"^\[.*\] ACTIVAT(?:E|ING) (?:JOB|PROC) ")
_FAILED = re.compile(
    rb"ACTIVATE PROC \[(?:\[\d+,1\]|[^]]*@1),(\d+)\] STATE (?:CALLED ABORT|EXITED WITH NON-ZERO|ABORTED BY SIGNAL)"
)
# A race inside mpirun that it loses harmlessly (the child sets its group itself), and warns of in every other start.
_RACE = re.compile(rb"^(?:\[.*)?plm:[rs]sh: Warning: setpgid\(")
_RULE = re.compile(r"^-{20,}$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n")
# What mpirun says of every rank that fails, from one rule to the next.
_SUMMARY = re.compile(
    r"^-{20,}\n(?:Primary job|(?:mpirun|prterun|prte)(?: has)? (?:noticed|detected|exited))(?:(?!-{20}).*\n?)*-{20,}$",
    re.MULTILINE,
)
_VAGUE = "It looks like MPI_INIT failed for some reason"
_INNER = re.compile(r"\[")  # lines of a process, between notices
_ASIDE = re.compile(r"\bwarning\b|deprecated|_ERROR_LOG:", re.IGNORECASE)


class DaemonLog:
    """Reads the two streams of mpirun, or of one of its daemons."""

    def __init__(self) -> None:
        self.failed_rank: int | None = None
        self._lines: dict[int, Lines] = {}
        self._tail = Tail()

    def feed(self, stream: int, data: bytes) -> bytes:
        """Return the lines to pass on."""
        return self._read(self._lines.setdefault(stream, Lines(b"")).feed(data))

    def flush(self, stream: int) -> bytes:
        """Return what is left of the last line."""
        return self._read(self._lines[stream].flush()) if stream in self._lines else b""

    def text(self) -> str:
        """Return the end of what was passed on."""
        return self._tail.text()

    def reason(self) -> str:
        """Return why mpirun gave up, in its own words."""
        return reason(self.text())

    def cause(self) -> str:
        """Return the notice of MPI in a rank's place that tells most, if any: more than that the rank has failed."""
        notices = [notice.strip("\n") for notice in _RULE.split(_SUMMARY.sub("", self.text()))]
        telling = [notice for notice in notices if notice and not _ASIDE.search(notice) and not _INNER.match(notice)]
        return next((notice for notice in telling if not notice.startswith(_VAGUE)), "".join(telling[:1]))

    def _read(self, data: bytes) -> bytes:
        kept = b"".join(line for line in data.splitlines(keepends=True) if not self._noted(line))
        self._tail.add(kept)
        return kept

    def _noted(self, line: bytes) -> bool:
        """Whether a line is ours alone."""
        if not _STATE.match(line):
            return _RACE.match(line) is not None
        failed = _FAILED.search(line)
        if failed and self.failed_rank is None:
            self.failed_rank = int(failed.group(1))
        return True


def reason(said: str) -> str:
    """Return the first paragraph of what mpirun said that is neither a warning nor an inner error, as one line.

    It says each thing between two rules of dashes, in paragraphs.
    """
    notices = [[" ".join(part.split()) for part in _PARAGRAPH.split(notice)] for notice in _RULE.split(said)]
    told = [[part for part in parts if part] for parts in notices]
    first = [parts for parts in told if parts and not _ASIDE.search(parts[0])]
    others = [part for parts in told for part in parts]
    if first:  # "The policy is not recognized:" wants what comes next
        return " ".join(first[0][:2]) if first[0][0].endswith(":") else first[0][0]
    return next((part for part in others if not _ASIDE.search(part)), "".join(others[:1]))
