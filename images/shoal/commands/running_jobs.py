"""Commands on jobs that another command runs or has run: ps, logs, stop, timeline, report, exec and shell."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from shoal import trust
from shoal.clean_text import print_log_line
from shoal.commands import common
from shoal.commands.common import (
    EVERY_DAY,
    RUN,
    AsJson,
    app,
    print_columns,
    print_json,
    print_written,
    progress_console,
    reports,
    resolve_tag,
)
from shoal.console import console, print_line
from shoal.errors import UsageError
from shoal.jobs import inside, stopping, store
from shoal.jobs.inside import choose_host
from shoal.jobs.job import LOCAL
from shoal.jobs.job_log import LineFilter, read_lines
from shoal.jobs.processes import STOP_SECONDS
from shoal.jobs.store import LOST, OUTPUT, RUNNING, STOPPED, KnownJob, find_job, find_running_job
from shoal.jobs.summary import describe_stop
from shoal.jobs.volumes import Volume
from shoal.report import timeline_page
from shoal.report.job_page import render_comparison_page
from shoal.report.job_report import PAGE, read_report
from shoal.report.output_files import choose_files, write_files

_MOST_ENDED = 20
_HEADER = ["name", "state", "exit code", "image", "hosts", "started", "elapsed", "directory"]
_JOB_HELP = "Name of a job, or its directory."
Job = Annotated[str, typer.Argument(metavar="JOB", help=_JOB_HELP, autocompletion=common.complete_jobs)]
Host = Annotated[str | None, typer.Option("--host", metavar="NAME", help="Host, such as algo-2. Default: the first.")]


@app.command("ps", rich_help_panel=EVERY_DAY, epilog="More: docs/background-jobs.md")
def list_jobs(
    every: Annotated[bool, typer.Option("--all", "-a", help="All ended jobs too. Default: the last 20.")] = False,
    as_json: AsJson = False,
) -> None:
    """List your jobs on this machine, running and ended ones, with state and exit code.

    A job is lost if its command was killed. `shoal stop` then stops its hosts and collects their files.

    Example: shoal ps
    """
    jobs = store.list_jobs()
    ended = [each for each in jobs if not each.is_running]
    hidden = 0 if every else max(0, len(ended) - _MOST_ENDED)
    shown = jobs[: len(jobs) - hidden]
    if as_json:
        print_json([each.describe() for each in shown])
        return
    print_columns(_HEADER, *map(_describe_row, shown))
    if hidden:
        print_line(f"{hidden} older jobs: shoal ps --all")


def _describe_row(job: KnownJob) -> list[str]:
    own = job.record
    code = "" if job.is_running or own.exit_code is None else str(own.exit_code)
    image = "without Docker" if own.request.engine == LOCAL else own.request.image
    started = f"{datetime.fromtimestamp(own.started):%Y-%m-%d %H:%M:%S}"
    elapsed = "" if job.seconds is None else str(timedelta(seconds=int(job.seconds)))
    return [job.name, job.state, code, image, str(own.request.hosts), started, elapsed, str(job.directory)]


@app.command("logs", rich_help_panel=EVERY_DAY, epilog="More: docs/background-jobs.md")
def print_logs(
    name: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for further lines until the job has ended.")
    ] = False,
    host: Annotated[str | None, typer.Option("--host", metavar="NAME", help="Only lines of this host.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only lines of this rank.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines, this many.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="Print the time before each line.")] = False,
) -> None:
    """Print the log of a job that runs or has ended. Its last line, on standard error, is the job's state.

    Example: shoal logs --follow digits

    One rank: shoal logs --rank 0 --tail 20 digits
    """
    found = find_job(name)
    if host is not None and found.record.request.engine != LOCAL:
        choose_host(found.name, host, found.record.request.host_names)
    lines = read_lines(found.directory, LineFilter(host, rank), tail=tail, follow=follow, timestamps=timestamps)
    has_lines = False
    for line in lines:
        has_lines = True
        print_log_line(line, flush=follow)
    sys.stdout.flush()
    if rank is not None and not has_lines and tail != 0:
        raise UsageError(
            f"--rank {rank}: no line has that rank. Ranks begin at 0, and lines of an image without Shoal's `train`"
            " have none. Fix: another rank, or --host"
        )
    print_line(_describe_state(store.read_job(found.directory)), progress_console(as_json=True))


def _describe_state(job: KnownJob) -> str:
    code = job.record.exit_code
    if job.state == STOPPED:
        state = describe_stop(code)
    else:
        state = job.state if job.is_running or code is None else f"{job.state}, exit code {code}"
    written = ", ".join(name for name in (PAGE, OUTPUT) if (job.directory / name).exists())
    return f"{job.name}: {state}. Files: {job.directory}" + (f" ({written})" if written else "")


@app.command("stop", rich_help_panel=EVERY_DAY, epilog="More: docs/background-jobs.md")
def stop_job(name: Job, as_json: AsJson = False) -> None:
    """Stop a job as Ctrl-C does in its terminal, and wait for its end: its files and checkpoints are collected.

    The script gets SIGTERM, and is killed if it has not ended after 30 s. Repeat the command to kill it at once.

    A job that has ended stays as it is. For root, it acts as the user that owns the job's directory.

    Example: shoal stop digits

    As root, for a user: shoal stop /home/you/jobs/digits
    """
    found = find_job(name)
    progress = progress_console(as_json)
    if owner := trust.become_owner(found.directory):
        print_line(f"{found.name}: belongs to {owner}, and so will the files that are collected", progress)
        found = store.read_job(found.directory)  # root does not take the mark of another user's command for one
    if found.state in (RUNNING, LOST):
        say = f"stopping {found.name}; the script has {STOP_SECONDS} s to end (repeat the command to stop at once)"
        print_line(say, progress)
    stopped = stopping.stop_job(found, progress)
    if as_json:
        print_json(stopped.describe())
    else:
        print_line(_describe_state(stopped))


@app.command("timeline", rich_help_panel=RUN, epilog="More: docs/timeline.md")
def report_timeline(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIRECTORY...", help="Timelines recorded by the ranks of a job.")
    ],
    page: Annotated[Path, typer.Option("-o", "--output", help="HTML page to write.")] = Path("timeline.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write one Chrome trace of all ranks to a .json file next to the page.")
    ] = False,
) -> None:
    """Write an HTML page that shows when ranks computed, communicated and waited, and which rank is slowest.

    Example: shoal timeline jobs/my-job
    """
    analysis, written = timeline_page.write_timeline_report(paths, page, as_json)
    timeline_page.print_timeline_report(console, analysis)
    print_written(written)


@reports.command("compare", epilog="More: docs/job-report.md")
def report_comparison(
    first: Annotated[Path, typer.Argument(metavar="A", help="Directory of a job, or its report.html.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Directory of another job, or its report.html.")],
    page: Annotated[Path, typer.Option("-o", "--output", help="HTML page to write.")] = Path("comparison.html"),
) -> None:
    """Write an HTML page with the curves of two jobs and the settings in which they differ.

    Example: shoal report compare jobs/one jobs/other
    """
    read = [path / PAGE if path.is_dir() else path for path in (first, second)]
    choose_files(page, as_json=False, read=read)
    write_files(page, {page: render_comparison_page(*(read_report(path) for path in read))})
    print_written([page])


@app.command("exec", rich_help_panel=RUN, epilog="More: docs/background-jobs.md")
def run_command(
    name: Job,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Program and its arguments.")],
    host: Host = None,
) -> None:
    """Run a command in a host of a running job, and exit with its exit code.

    It runs in the directory of the code. At a terminal it can be interactive. Otherwise standard input is passed on.

    Example: shoal exec digits -- python -m pip list

    Another host: shoal exec --host algo-2 digits -- ls -l /opt/ml/checkpoints
    """
    raise typer.Exit(inside.run_in_host(find_running_job(name), host, command))


@app.command("shell", rich_help_panel=EVERY_DAY, epilog="More: docs/background-jobs.md")
def open_shell(
    name: Annotated[
        str,
        typer.Argument(
            metavar="JOB|IMAGE",
            help="Running job, or else a tag or framework.",
            autocompletion=common.complete_jobs_and_images,
        ),
    ],
    host: Host = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", "-v", metavar="PATH:TARGET[:ro]", help="For an image: mount a file or directory. Repeatable."
        ),
    ] = None,
) -> None:
    """Open a shell in a host of a running job, or in a new container of an image, which is removed at its end.

    The name of a running job comes first, since its container cannot be reached in another way. So a tag, which has a
    colon, is always an image.

    Example: shoal shell digits

    New container: shoal shell pytorch --volume .:/work
    """
    volumes = [Volume.parse(text) for text in volume or ()]
    job = None if ":" in name else _find_if_running(name)
    if job:
        if volumes:
            raise UsageError("--volume: has no effect in a container that runs. Fix: leave it out")
        raise typer.Exit(inside.run_in_host(job, host, inside.SHELL))
    if host is not None:
        find_running_job(name)  # the error
    for each in volumes:
        each.check()
    raise typer.Exit(inside.open_shell(_resolve_image(name), volumes))


def _find_if_running(name: str) -> KnownJob | None:
    try:
        return find_running_job(name)
    except UsageError:
        return None


def _resolve_image(name: str) -> str:
    """Returns the tag of an image. If there is none of that name, the error names similar jobs too."""
    try:
        return resolve_tag(name)
    except UsageError as error:
        try:
            find_job(name)
        except UsageError as job_error:
            raise UsageError(f"{job_error}\nIt is not an image either: {error}") from error
        find_running_job(name)  # the error
        raise
