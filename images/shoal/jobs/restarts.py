"""The contract of restarts with `train`: variables, exit codes and job.json. docs/restarts.md describes it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

MAX_RESTARTS, RESTART, RESTART_REASON = "SHOAL_MAX_RESTARTS", "SHOAL_RESTART", "SHOAL_RESTART_REASON"
"""How often a job may restart, the number of restarts so far, and the reason of the last one in one line.

`train` reads all three, and sets the last two for the script."""
MOST_RESTARTS = 10000
"""The largest limit that `train` takes."""
MIN_HOSTS = "SHOAL_MIN_HOSTS"
"""The number of hosts with which an elastic job goes on. Default of `train`: all."""
WRONG_CONFIGURATION, HOST_LOST, STOPPED = 2, 138, 143
"""Exit codes of `train`. docs/exit-codes.md lists them."""
_FINAL = (0, WRONG_CONFIGURATION, STOPPED)
"""Exit codes after which a new start is wrong."""


def limit_variables(most: int, least_hosts: int = 0) -> dict[str, str]:
    """Return the variables with the limit of restarts and the least number of hosts; none for 0, `train`'s default."""
    return {name: str(value) for name, value in ((MAX_RESTARTS, most), (MIN_HOSTS, least_hosts)) if value}


def is_final(exit_code: int) -> bool:
    """Return whether a host that ended with this code is never started again, also without a result."""
    return exit_code in _FINAL


def describe_exit(exit_code: int, out_of_memory: bool = False) -> str:
    """Return how a host that was lost has ended, in words."""
    if out_of_memory:
        return "killed by the out-of-memory killer"
    if exit_code == HOST_LOST:
        return "it has lost the other hosts"
    try:
        return f"killed by {signal.Signals(exit_code - 128).name}"
    except ValueError:
        return f"exit code {exit_code} without a result"


def describe_restart(number: int, reason: str, host: str) -> dict[str, Any]:
    """Return an entry of `restarts` in job.json, as `train` writes it, but without its seconds."""
    return {"number": number, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "reason": reason, "host": host}


def restart_variables(entry: Mapping[str, Any], most: int, before: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variables of hosts that are started again after a restart.

    `train` counts all restarts before it against its limit. So each one because a host came back raises the limit.

    Args:
        entry: The restart.
        most: How often the job may restart.
        before: The earlier restarts.
    """
    variables = {RESTART: str(entry["number"]), RESTART_REASON: str(entry["reason"])}
    if growths := len(before) - count_failures(before):
        variables[MAX_RESTARTS] = str(min(most + growths, MOST_RESTARTS))
    return variables


def count_failures(listed: Sequence[Mapping[str, Any]]) -> int:
    """Return how many restarts count against the limit: all but those because a host came back."""
    return sum(each.get("counted", True) is not False for each in listed)


def parse_restarts(report: bytes) -> list[dict[str, Any]]:
    """Return the restarts that the job.json of a lost host lists; none if it cannot be read."""
    try:
        restarts = json.loads(report)["restarts"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [each for each in restarts if isinstance(each, dict)] if isinstance(restarts, list) else []
