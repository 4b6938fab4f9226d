"""One run of a job by the command `run`: its image, its hosts until their end, its record and its report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

from rich.console import Console

from shoal.builds import builder
from shoal.commands.common import convert_error, open_project, report_builds, resolve_tag
from shoal.commands.run_options import RunOptions
from shoal.console import print_line
from shoal.jobs import summary, trackers
from shoal.jobs.hosts.docker import run_job_in_docker
from shoal.jobs.hosts.local import run_job_locally
from shoal.jobs.hosts.waiting import WaitingHosts
from shoal.jobs.job import DOCKER, LOCAL, FinishedJob, JobRequest
from shoal.jobs.store import FAILED, STOPPED, OpenJob
from shoal.jobs.view import LiveView, PlainView, View, can_show_panel
from shoal.report import job_collection


def run_to_end(
    opened: OpenJob,
    progress: Console,
    options: RunOptions,
    build_seconds: float | None,
    waiting: WaitingHosts | None = None,
) -> FinishedJob:
    """Runs a job, records how it ended, also after an error, writes its report, and returns its result.

    Args:
        waiting: Hosts that wait for its start.
    """
    run = run_job_locally if opened.record.request.engine == LOCAL else run_job_in_docker
    try:
        with _open_view(opened, progress, options) as view:
            result = run(opened, view) if waiting is None else waiting.run(opened, view)
    except BaseException as error:
        code, state = _describe_exception(error)
        is_lost = opened.resumed and opened.record.uncollected and not opened.log.lines
        if not is_lost:  # otherwise hosts of the earlier command may still run, and `shoal stop` must find them
            with contextlib.suppress(OSError):  # of a full disk: `error` tells more
                opened.finish(code, state)
        if opened.log.lines:
            page = job_collection.write_job_report(progress, opened, None)
            print_report(progress, page)
        if opened.has_checkpoints:
            summary.print_resume_command(progress, opened.record.request, opened.name)
        if state == STOPPED:  # the last line, because `train` reports a failure
            with contextlib.suppress(OSError):  # the terminal is gone
                print_line(f"{opened.name}: {summary.describe_stop(code)}", progress)
        raise
    opened.finish(result.exit_code)
    checkpoints = opened.checkpoints.path if opened.has_checkpoints else None
    not_finite = {name: str(value) for (name, _, _), value in opened.log.not_finite.items()}
    result = dataclasses.replace(
        result,
        checkpoints=checkpoints,
        build_seconds=build_seconds,
        not_finite=not_finite,
        metrics={**opened.log.last_metrics, **result.metrics},
        trackers=trackers.find_trackers(opened.outputs.values()),
    )
    return dataclasses.replace(result, report=job_collection.write_job_report(progress, opened, result))


def _describe_exception(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, STOPPED
    if isinstance(error, SystemExit):
        return int(error.code or 1), STOPPED
    failure = convert_error(error) if isinstance(error, Exception) else None
    return failure.exit_code if failure else 1, FAILED


def print_report(progress: Console, page: Path | None) -> None:
    """Prints where the report is, if it was written."""
    if page:
        print_line(f"report: {page}", progress)


def _open_view(opened: OpenJob, progress: Console, options: RunOptions) -> contextlib.AbstractContextManager[View]:
    if options.plain or options.as_json or not can_show_panel(progress, os.environ):
        return contextlib.nullcontext(PlainView(progress))
    request = opened.record.request
    merged = 1 if request.engine == LOCAL and not request.min_hosts else request.hosts
    hosts = f"{request.min_hosts}:{request.hosts}" if request.min_hosts else str(merged)
    ranks = request.hosts * (request.procs_per_host or 1)
    return LiveView(progress, opened.log, opened.name, hosts, ranks)


def prepare_image(request: JobRequest, build: bool, progress: Console) -> tuple[str, float | None]:
    """Builds the image if `build`, and prints the result. Returns its tag, and the seconds that the build took."""
    if not build or request.engine != DOCKER:
        return resolve_tag(request.image), None
    here, matrix = open_project()
    image = matrix.select(request.image)
    started = time.monotonic()
    report_builds(builder.build_images(here, matrix, [image], progress, jobs=1), progress)
    return image.tag, time.monotonic() - started
