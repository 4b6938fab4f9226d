"""The table and lines that `shoal run` prints when a job has ended."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from shoal.clean_text import clean_text, cut_line
from shoal.console import print_line
from shoal.jobs.job import FinishedJob, JobRequest

_SHOWN_FILES, _SHOWN_METRICS, _SHOWN_RESTARTS = 3, 5, 20
_MOST_METRIC = 200  # characters
_STOPPED_BY = {
    128 + signal.SIGINT: "Ctrl-C (SIGINT)",
    128 + signal.SIGTERM: "SIGTERM (`shoal stop` or kill)",
    128 + signal.SIGHUP: "SIGHUP (its terminal was closed)",
}
"""Who stops a job, by the exit code of its command."""


def summary_rows(request: JobRequest, result: FinishedJob) -> list[tuple[str, str]]:
    """Returns names and values: test accuracy and images/s, hosts and ranks, restarts, seconds, files and exit code.

    Metrics and seconds that are unknown are left out. Other metrics are not shown. The directory is listed only after a
    failure.
    """
    launch, metrics = result.launch, result.metrics
    known = {"test_accuracy": "test accuracy", "images_per_second": "images/s"}
    found = {label: format_number(metrics[key]) for key, label in known.items() if key in metrics}
    rows = [(label, cut_line(value, _MOST_METRIC)) for label, value in found.items()]
    hosts = len(launch.get("hosts", request.host_names))
    ranks = int(launch.get("ranks") or hosts)  # null if `train` refused the job
    rows.append(("hosts × ranks", f"{hosts} × {ranks // hosts}"))
    for name, value in [*result.not_finite.items()][:_SHOWN_METRICS]:
        rows.append((cut_line(name, _MOST_METRIC), f"{value} at the end: the training may have diverged"))
    if result.restarts:
        rows.append(("restarts", str(len(result.restarts))))
    seconds = (
        ("build", result.build_seconds),
        ("launch", launch.get("launch_seconds")),
        ("training", launch.get("training_seconds")),
    )
    rows += [(f"{name} (s)", f"{value:.1f}") for name, value in seconds if value is not None]
    rows += [(name, str(path)) for name, path in result.archives.items()]
    if "model.tar.gz" not in result.archives and not result.exit_code:
        rows.append(("model.tar.gz", describe_missing_model(result.lost_files)))
    if result.checkpoints:
        rows.append(("checkpoints", str(result.checkpoints)))
    rows += result.trackers.items()
    if result.exit_code:
        rows.append(("files", str(result.directory)))
    return [*rows, ("exit code", str(result.exit_code))]


def describe_missing_model(lost: Sequence[str]) -> str:
    """Returns that there is no model, with the first of the files that are lost."""
    text = "none: the script has written nothing to SM_MODEL_DIR (/opt/ml/model)"
    if not lost:
        return text
    more = f" and {len(lost) - _SHOWN_FILES} more" if len(lost) > _SHOWN_FILES else ""
    return f"{text}. Lost: {', '.join(lost[:_SHOWN_FILES])}{more}. Fix: save them in the directory $SM_MODEL_DIR"


def print_summary(console: Console, request: JobRequest, result: FinishedJob) -> None:
    """Prints each message of hosts once, after the names of its hosts, each restart, and the table of `summary_rows`.

    After a failure, print the command that continues the job, if it has checkpoints.
    """
    hosts_of: dict[str, list[str]] = {}
    for host, message in result.messages.items():
        hosts_of.setdefault(message, []).append(host)
    for message, hosts in hosts_of.items():
        console.print()
        print_line(f"{', '.join(hosts)}: {message}", console)
    for line in describe_restarts(result.restarts):
        print_line(line, console)
    rows = summary_rows(request, result)
    width = max(len(name) for name, _ in rows)
    console.rule(escape(result.name), align="left")
    for name, value in rows:  # not a rich table, which would break paths on a narrow terminal
        print_line(f"{name:<{width}}  {value}", console)
    if result.exit_code and result.checkpoints:
        print_resume_command(console, request, result.name)


def describe_stop(exit_code: int | None) -> str:
    """Returns that a job was stopped, with the signal and its usual sender if the exit code tells them."""
    sender = _STOPPED_BY.get(exit_code or 0)
    return f"stopped by {sender}, exit code {exit_code}" if sender else f"stopped, exit code {exit_code}"


def describe_restart(restart: Mapping[str, Any]) -> str:
    """Returns a restart in one line. Its values may be anything that a program has written into job.json."""
    at, reason, seconds = (restart.get(key) for key in ("at", "reason", "seconds"))
    after = f" ({seconds} s)" if seconds is not None else ""
    return clean_text(f"restart {restart.get('number')} at {at}: {reason}{after}").replace("\n", " ")


def describe_restarts(restarts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the last restarts, each in one line, after the number of earlier ones."""
    if len(restarts) > _SHOWN_RESTARTS:
        yield f"{len(restarts) - _SHOWN_RESTARTS:,} earlier restarts are in job.json"
    yield from map(describe_restart, restarts[-_SHOWN_RESTARTS:])


def print_resume_command(console: Console, request: JobRequest, name: str) -> None:
    """Prints the command that continues a job."""
    output = "" if request.output == JobRequest.output else f" --output {shlex.quote(str(request.output))}"
    print_line(f"to continue: shoal run --resume {name}{output}", console)


def format_number(value: object) -> str:
    """Returns a value as text: a float with four digits, or without decimals from 1000 on; any other as `str` does."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
