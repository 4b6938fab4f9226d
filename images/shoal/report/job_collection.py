"""Collects the data of a job's report, and writes its page into the job's directory.

`train` decides which values are secrets, and job.json has its masked plan. A value that it has masked is masked in the
log too. Values are left out if there is no plan.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal import __version__
from shoal.clean_text import clean_text, cut_line
from shoal.console import print_line
from shoal.jobs import summary, trackers
from shoal.jobs.job import LOCAL, SECRET, FinishedJob, JobRequest
from shoal.jobs.job_log import MAX_SERIES, Key, Series
from shoal.jobs.metric_definitions import HYPERPARAMETER
from shoal.jobs.store import OpenJob
from shoal.limits import MOST_REPORT, parse_json, read_file
from shoal.report.job_page import render_job_page
from shoal.report.job_report import PAGE, Curve, JobReport
from shoal.report.output_files import write_files

MASK = "******"
_MAX_TEXTS, _MAX_ROWS = 400_000, 1_000
"""The most characters of all texts of a page that are not lines of the log, and the most rows of a table."""
_PACKAGES = ("shoal-toolkit", "torch", "tensorflow", "mpi4py", "numpy", "transformers", "lightning", "accelerate")
_PLAN_ROWS = ("launcher", "hosts", "ranks", "world_size", "interface", "hosts_from", "cwd", "command", "script")
_MIN_SECRET_DIGITS = 12
_MIN_SECRET = 5  # characters; a shorter value appears by chance


def write_job_report(console: Console, opened: OpenJob, result: FinishedJob | None) -> Path | None:
    """Writes the page of a job that has ended. If that fails, prints a warning, and changes nothing else.

    Args:
        result: How it ended; None if it was interrupted.

    Returns:
        The page, or None if it was not written.
    """
    page = opened.directory / PAGE
    try:
        write_files(page, {page: render_job_page(collect_report(opened, result))}, 0o600)
    except Exception as error:  # also a defect of the report must not change the job's result
        text = f"warning: the report {page} was not written: {type(error).__name__}: {error}"
        print_line(text, console)
        return None
    return page


def collect_report(opened: OpenJob, result: FinishedJob | None) -> JobReport:
    """Returns the data of a job's report, with masked secrets."""
    request, log = opened.record.request, opened.log
    plan = result.plan if result else _find_plan(opened.directory)
    masks = _Masks(request, plan)
    return JobReport(
        name=opened.name,
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(log.began)),
        exit_code=result.exit_code if result else None,
        causes=[(hosts, masks.show(text)) for hosts, text in _list_causes(result)] if result else [],
        summary=[(name, masks.show(text)) for name, text in summary.summary_rows(request, result)] if result else [],
        plan=[(name, masks.show(_to_text(plan[name]))) for name in _PLAN_ROWS if plan.get(name)],
        reasons=[masks.show(_to_text(note)) for note in _as_list(plan.get("notes"))[:_MAX_ROWS]],
        settings=_collect_settings(opened, plan, masks),
        restarts=[masks.show(line) for line in summary.describe_restarts(result.restarts)] if result else [],
        metrics=_make_curves(log.defined or log.series),
        scalars=_read_scalars(opened),
        usage=_make_curves(log.usage),
        log=[line._replace(text=masks.hide(line.text)) for line in log.lines],
        omitted=log.omitted,
        omitted_at=log.omitted_at if log.omitted else 0,
    )


def _find_plan(directory: Path) -> Mapping[str, Any]:
    """Returns the plan in the job.json of a job that was interrupted; empty if there is none."""
    for path in sorted(directory.glob("*/output/job.json")):
        try:
            if plan := _as_mapping(_as_mapping(parse_json(read_file(path, MOST_REPORT))).get("plan")):
                return plan
        except (OSError, ValueError, RecursionError):
            continue
    return {}


class _Masks:
    """Masks the secrets of a job: the values of the user that `train` has masked, and the job's secret."""

    def __init__(self, request: JobRequest, plan: Mapping[str, Any]) -> None:
        # `train` does not pass on the definitions of metrics, so the plan lacks them. They are not secret.
        public = {name: value for name, value in request.hyperparameters.items() if name == HYPERPARAMETER}
        known = {**public, **_read_masked_hyperparameters(plan)}
        self.hyperparameters = _mask_values(request.hyperparameters, known)
        self.variables = _mask_values(request.environment, _as_mapping(plan.get("variables")))
        given = {**request.environment, **request.hyperparameters}
        shown = {**self.variables, **self.hyperparameters}
        # Without a plan nothing is known about a value, and all but short ones are masked.
        hidden = [_decode(value) for name, value in given.items() if MASK in shown[name]]
        secrets = {value for value in (*hidden, request.environment.get(SECRET, "")) if len(value) >= _MIN_SECRET}
        self._left = _MAX_TEXTS
        self._secrets = sorted((value for value in secrets if not _is_number(value)), key=len, reverse=True)

    def show(self, text: str) -> str:
        """Returns a clean text with masked secrets for the page, without its end if the page would be too large."""
        shown = cut_line(self.hide(text), max(self._left, 0))
        self._left -= len(shown)
        return shown

    def hide(self, text: str) -> str:
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, MASK)
        return clean_text(text)


def _is_number(value: str) -> bool:
    """Returns whether a value is a number that appears by chance: a step, a size or a rate."""
    return len(value) < _MIN_SECRET_DIGITS and value.replace(".", "", 1).lstrip("+-").isdecimal()


def _mask_values(given: Mapping[str, str], shown: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names that the user has given with the values that `train` shows; a mask if it shows none."""
    return {name: _to_text(shown[name]) if name in shown else MASK for name in given}


def _read_masked_hyperparameters(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the hyperparameters in the environment of a plan, for the script and `train`; empty if there are none."""
    found: dict[str, Any] = {}
    for name in ("SM_FRAMEWORK_PARAMS", "SM_HPS"):
        try:
            found.update(_as_mapping(json.loads(_as_mapping(plan.get("environment"))[name])))
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
    return found


def _list_causes(result: FinishedJob) -> list[tuple[str, str]]:
    hosts: dict[str, list[str]] = {}
    for host, message in result.messages.items():
        hosts.setdefault(message, []).append(host)
    return [(", ".join(names), message) for message, names in hosts.items()]


def _collect_settings(opened: OpenJob, plan: Mapping[str, Any], masks: _Masks) -> dict[str, dict[str, str]]:
    record = opened.record
    request = record.request
    job = {
        "image": request.image if request.engine != LOCAL else "",
        "engine": request.engine,
        "source": str(request.source or ""),
        "entry point": request.entry_point or "",
        "hosts": f"{request.min_hosts}:{request.hosts}" if request.min_hosts else str(request.hosts),
        "processes per host": _to_text(request.procs_per_host),
        "distribution": json.dumps(request.distribution) if request.distribution else "",
        "restarts allowed": str(request.max_restarts),
        "shared memory": request.shm_size or "",
        "memory": request.memory or "",
        "GPUs": request.gpus or "",
        **{f"channel {name}": str(path) for name, path in request.channels.items()},
    }
    environment = {str(name): _to_text(value) for name, value in _as_mapping(plan.get("environment")).items()}
    sections = {
        "job": {name: value for name, value in job.items() if value},
        "hyperparameters": masks.hyperparameters,
        "variables": masks.variables,
        "versions": _list_versions(request.engine),
        "environment of the script": environment,
    }
    return {
        section: {masks.show(name): masks.show(value) for name, value in [*values.items()][:_MAX_ROWS]}
        for section, values in sections.items()
    }


def _list_versions(engine: str) -> dict[str, str]:
    """Returns the version of shoal, and without Docker of Python packages. The image's tag names others."""
    versions = {"shoal": __version__}
    if engine == LOCAL:
        versions["Python"] = platform.python_version()
        for name in _PACKAGES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def _read_scalars(opened: OpenJob) -> list[Curve]:
    series: dict[Key, Series] = {}
    for host, output in opened.outputs.items():
        for (name, run, _), points in trackers.read_scalars(output, opened.log.began).items():
            place = run if len(opened.outputs) == 1 else f"{host} {run}"
            series[name, place, None] = points
    return _make_curves(dict(itertools.islice(series.items(), MAX_SERIES)))


def _make_curves(series: Mapping[Key, Series]) -> list[Curve]:
    ordered = sorted(
        series.items(), key=lambda item: (item[0][0], -1 if item[0][2] is None else item[0][2], item[0][1])
    )
    return [_make_curve(key, each) for key, each in ordered]


def _make_curve(key: Key, series: Series) -> Curve:
    """Returns a curve over steps, or over the time if its steps do not tell values apart, as a constant does not."""
    has_steps = len(set(series.xs)) * 2 > len(series.xs)
    curve = Curve(*key, list(series.times), list(series.values), marks=list(series.marks))
    return dataclasses.replace(curve, xs=list(series.xs), x_name=series.x_name) if has_steps else curve


def _decode(value: str) -> str:
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, str) else value


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return value if isinstance(value, str) else json.dumps(value)
