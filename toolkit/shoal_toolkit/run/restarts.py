"""Decides which failures restart a job, and keeps the list of restarts. Only jobs with SHOAL_MAX_RESTARTS need it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from time import gmtime, monotonic, strftime

from shoal_toolkit import redact
from shoal_toolkit.errors import WRONG_CONFIGURATION
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.files import read_table
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.job.settings import RESTART_VARIABLES, TrainSettings
from shoal_toolkit.log import write_log
from shoal_toolkit.result.result import Result, write_progress

_MAX_REASON = 300  # characters of a line in a variable
# A shell's codes for a wrong use, a program that can't be run, and one that is missing. Python and argparse use 2 too.
_USAGE_CODES = (WRONG_CONFIGURATION, 126, 127)


class Restarts:
    """The restarts of a job, on the first host. Each is added to `report`, which becomes job.json."""

    def __init__(self, settings: TrainSettings, paths: Paths, report: dict[str, Any]) -> None:
        self.number = settings.restart
        self._growths = 0  # restarts without a failure, which don't count
        self._most = settings.max_restarts
        self._paths = paths
        self._report = report
        self._failed_at = 0.0  # time.monotonic(), until the restart has ended
        self._last: tuple[str, Mapping[str, int]] | None = None  # the last failure, and the checkpoints at that time

    def explain_refusal(self, failure: Result) -> str:
        """Returns why a failure does not restart the job; empty if it does."""
        if self._failures >= self._most:
            return f"It was restarted {self._failures} times (SHOAL_MAX_RESTARTS)."
        if failure.exit_code in _USAGE_CODES:
            return f"It was not restarted: exit code {failure.exit_code} means an error that would occur again."
        head = failure.message.partition("\n")[0]
        if any(re.search(form, head) for form in read_table("failures")["final"]):
            return "It was not restarted: this error would occur again."
        if failure.exit_code < 128 and self._last == (failure.message, self._list_checkpoints()):
            return "It was not restarted: it failed in the same way as before, without a new checkpoint in between."
        return ""

    def begin(self, failure: Result, where: Mapping[str, Any]) -> dict[str, str]:
        """Adds a restart to the report, and logs its reason.

        Args:
            failure: The result of the last start.
            where: The rank or the host that failed, for the report.

        Returns:
            The variables of the contract for the script.
        """
        self._failed_at = monotonic()
        self._last = (failure.message, self._list_checkpoints())
        rank = f"rank {where['rank']}: " if "rank" in where else ""
        reason = f"{rank}{summarize(failure.message)}"
        variables = self._add({"reason": reason, **where})
        write_log(f"restart {self.number} ({self._most - self._failures} left of SHOAL_MAX_RESTARTS): {reason}")
        return variables

    def begin_growth(self, reason: str, since: float) -> dict[str, str]:
        """Adds a restart with more hosts to the report. It does not count against SHOAL_MAX_RESTARTS.

        Args:
            reason: A line that names the hosts.
            since: time.monotonic() when the ranks got SIGTERM.

        Returns:
            The variables of the contract for the script.
        """
        self._growths += 1
        self._failed_at = since
        return self._add({"reason": reason, "counted": False})

    def _add(self, entry: Mapping[str, Any]) -> dict[str, str]:
        self.number += 1
        entry = {"number": self.number, "at": strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()), **entry, "seconds": None}
        self._report["restarts"] = [*self._report["restarts"], entry]
        write_progress(self._paths, self._report)
        return make_variables(self.number, str(entry["reason"]))

    @property
    def _failures(self) -> int:
        return self.number - self._growths

    def finish(self) -> None:
        """Notes that all ranks have started again, and how long that took. Only the first call of a restart counts."""
        if not self._failed_at:
            return
        seconds = round(monotonic() - self._failed_at, 3)
        self._failed_at = 0.0
        self._report["restarts"][-1]["seconds"] = seconds
        write_progress(self._paths, self._report)
        write_log(f"restart {self.number}: all ranks run again, after {seconds:.1f} s")

    def _list_checkpoints(self) -> dict[str, int]:
        try:
            with os.scandir(os.path.join(self._paths.base, "checkpoints")) as entries:
                return {entry.name: entry.stat().st_mtime_ns for entry in entries}
        except OSError:  # it does not exist, or a checkpoint was just removed
            return {}


def make_variables(number: int, reason: str) -> dict[str, str]:
    """Returns the variables with which a script learns that it was restarted, and why."""
    return dict(zip(RESTART_VARIABLES, (str(number), reason)))


def summarize(message: str) -> str:
    """Returns the first line of a failure's text, printable and without secrets."""
    line = redact.mask_text(message.partition("\n")[0])[:_MAX_REASON]
    return "".join(character if character.isprintable() else "?" for character in line)
