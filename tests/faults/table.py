"""Checks the end of every fault, and adds one row for each to the table of measurements.

benchmarks/faults.py prints the table.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..containers import ROOT
from .job import End, Job

DOCUMENT = ROOT / "docs" / "reliability.md"
SLACK = float(os.environ.get("SHOAL_FAULTS_SLACK", "4"))
"""By how much the suite may exceed the bars: it runs beside other tests, on any machine. The benchmark says 1."""
NOTICED = 5.0  # seconds until all hosts have ended, from the moment at which the fault can be noticed
LOST = 15.0  # the same where a host just falls silent


class Table:
    """Checks how a job ended, and notes it as a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def failed(
        self,
        fault: str,
        job: Job,
        since: float,
        *,
        says: str | Sequence[str],
        codes: int | Mapping[str, int],
        bar: float = NOTICED,
        silent: Sequence[str] = (),
    ) -> None:
        """These containers (all, where `codes` is one code) have failed in time, and say why: one of `says`.

        `silent` ones cannot: they were killed, or cannot write.
        """
        expected = codes if isinstance(codes, Mapping) else dict.fromkeys(job.hosts, codes)
        ends = job.ends(list(expected))
        speaking = [end for name, end in ends.items() if name not in silent]
        self._ended(fault, job, ends, since, bar, speaking[0].failure.partition("\n")[0])
        assert {name: end.code for name, end in ends.items()} == expected, job.logs()
        assert 0 not in expected.values()
        assert not any(end.success for end in ends.values())
        for end in speaking:
            reasons = [says] if isinstance(says, str) else says
            assert any(reason in end.failure for reason in reasons), f"{end.failure}\n{job.logs()}"
        self.check()

    def survived(self, fault: str, job: Job, since: float, bar: float = LOST) -> None:
        """The job has ended well on every host, in time after the moment from which nothing holds it up."""
        ends = job.ends()
        self._ended(fault, job, ends, since, bar, "")
        assert {end.code for end in ends.values()} == {0}, job.logs()
        assert all(end.success and not end.failure for end in ends.values())
        self.check()

    def _ended(self, fault: str, job: Job, ends: Mapping[str, End], since: float, bar: float, says: str) -> None:
        codes = {name: end.code for name, end in ends.items()}
        self.note(fault, job.launcher.name, codes, _seconds(ends, since), bar, says)

    def note(self, fault: str, launcher: str, codes: Mapping[str, int], seconds: float, bar: float, says: str) -> None:
        """Adds a row, even if the checks fail later."""
        self._rows.append(
            {"fault": fault, "launcher": launcher, "codes": codes, "seconds": seconds, "bar": bar, "says": says}
        )

    def check(self) -> None:
        """The last row's seconds are within its bar."""
        row = self._rows[-1]
        assert row["seconds"] <= row["bar"] * SLACK, row

    def remark(self, text: str) -> None:
        """Say something of the last row."""
        self._rows[-1]["remark"] = text

    def write(self, met: bool) -> None:
        """Write the rows, and check that the page has them. `met`: every check has passed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([{**row, "met": met} for row in self._rows]))
        if met and "SHOAL_FAULTS_SLACK" not in os.environ:  # the benchmark itself writes the page
            stale = [row["fault"] for row in self._rows if not is_documented(row["fault"], row["codes"].values())]
            assert not stale, f"not in {DOCUMENT.name}, or with other codes: run benchmarks/faults.py --write"


def is_documented(fault: str, codes: Iterable[int]) -> bool:
    """Whether the page has this fault with these exit codes. Seconds and remarks differ between runs."""
    found = re.search(rf"^\| {re.escape(fault)}(?:; [^|]*)? \| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    return found is not None and ", ".join(map(str, codes)) in found[1].split(" or ")


def _seconds(ends: Mapping[str, End], since: float) -> float:
    return max(end.at for end in ends.values()) - since
