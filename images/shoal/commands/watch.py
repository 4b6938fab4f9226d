"""`shoal run --watch`: runs a job, and again after each change of its source."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import typer
from rich.console import Console

from shoal.commands.common import convert_error, print_failure
from shoal.commands.job_run import prepare_image, print_report, run_to_end
from shoal.commands.run_options import RunOptions
from shoal.console import print_line
from shoal.jobs import summary
from shoal.jobs.changes import Changes, may_be_edits
from shoal.jobs.hosts.docker import NOT_COLLECTED
from shoal.jobs.hosts.waiting import WaitingHosts, open_waiting_hosts
from shoal.jobs.job import LOCAL, JobRequest
from shoal.jobs.source_files import Selection
from shoal.jobs.store import WAITING, JobRecord, OpenJob, check_owners, note_owners, open_job
from shoal.jobs.view import PlainView

_SHOWN_CHANGES = 5
_PACKAGE_FILES = frozenset({"requirements.txt", "uv.lock", "pylock.toml", "pyproject.toml"})
"""Files of a source that decide which packages a job has."""


def watch_source(options: RunOptions, progress: Console) -> NoReturn:
    """Runs a job, and again after each change of its source, until an interrupt comes while none runs.

    Raises `typer.Exit` with the exit code of an interrupt.
    """
    earlier = note_owners(options.to_record())  # of the files that decide what runs: they must not change
    first = earlier.request
    files = [*(options.env_file or ()), *(secret.file for secret in first.secrets if secret.file)]
    changes = Changes(_leave_out_written(first), tuple(files))
    with _announce_changes(changes, first, progress):
        was_interrupted = _run_watched(options, progress, None, earlier)
    while True:
        changed = changes.find()
        with _open_stack() as stack:
            try:
                print_line("watching for changes; Ctrl-C ends", progress)
                ready = _make_ready(options, progress, stack, earlier)
                changed = _skip_own_changes(changed, was_interrupted, first, progress) or changes.wait()
            except KeyboardInterrupt:
                raise typer.Exit(128 + signal.SIGINT) from None
            print_line(f"changed: {_join_changes(changed)}; running {first.entry_point} again", progress)
            if ready is None or not ready.fits(options, changed, earlier):
                _close(stack)
                ready = None
            with _announce_changes(changes, first, progress):
                was_interrupted = _run_watched(options, progress, ready, earlier)


@contextlib.contextmanager
def _announce_changes(changes: Changes, request: JobRequest, progress: Console) -> Iterator[None]:
    """Starts a thread that prints the first change during a run, which goes on. It ends with the run."""
    ended = threading.Event()
    own = dataclasses.replace(changes)  # its state is of this thread

    def print_change() -> None:
        """Body of the thread."""
        with contextlib.suppress(OSError):  # the terminal is gone
            while changed := own.wait(ended):
                if may_be_edits(changed) or not _can_write(request):
                    print_line(f"changed: {_join_changes(changed)}; this run goes on, and Ctrl-C ends it", progress)
                    return

    thread = threading.Thread(target=print_change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _open_stack() -> Iterator[contextlib.ExitStack]:
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        _close(stack)


def _close(stack: contextlib.ExitStack) -> None:
    """Removes the hosts in a stack. An error is printed: Docker may have been restarted, and the next run goes on."""
    try:
        stack.close()
    except Exception as error:
        failure = convert_error(error)
        if failure is None:
            raise
        print_failure(failure)


def _leave_out_written(request: JobRequest) -> Selection:
    """Returns the source without the directories that are mounted in the hosts, and that the job can write."""
    written = [volume.source.absolute() for volume in request.volumes if not volume.read_only]
    script = request.selection.directory.absolute() / request.selection.script
    others = (place for place in written if not script.is_relative_to(place))  # its source is watched all the same
    return dataclasses.replace(request.selection, elsewhere=(*request.selection.elsewhere, *others))


def _skip_own_changes(changed: list[str], was_interrupted: bool, request: JobRequest, progress: Console) -> list[str]:
    """Returns the changes during a run that start the next one, and prints those that start none.

    A job that writes beside its code would run for ever. After an interrupt, no change of such a job starts a run, so
    that the next interrupt ends the command.
    """
    if not (changed and _can_write(request)):
        return changed
    if was_interrupted:
        print_line(f"changed during the interrupted run: {_join_changes(changed)}; the next change runs it", progress)
        return []
    if not may_be_edits(changed):
        print_line(f"the job itself has changed {_join_changes(changed)}; this starts no run", progress)
        return []
    return changed


def _can_write(request: JobRequest) -> bool:
    """Returns whether the job may write into its source."""
    return request.engine == LOCAL or any(not volume.read_only for volume in request.volumes)


def _join_changes(changed: Sequence[str]) -> str:
    more = f" and {len(changed) - _SHOWN_CHANGES} more" if len(changed) > _SHOWN_CHANGES else ""
    return ", ".join(changed[:_SHOWN_CHANGES]) + more


@dataclass(frozen=True)
class ReadyJob:
    """A job with hosts that wait for its start."""

    opened: OpenJob
    waiting: WaitingHosts

    def fits(self, options: RunOptions, changed: Sequence[str], earlier: JobRecord) -> bool:
        """Returns whether its hosts can run the job as it is now, and gives them the present source."""
        names = {name.split(" ")[0] for name in changed}
        if _PACKAGE_FILES & names or any(name.startswith("/") for name in names):  # other packages or secrets
            return False
        try:
            request = options.to_record().request
            check_owners(earlier, request, "--watch")
            tag, _ = prepare_image(request, False, self.waiting.console)
            now = dataclasses.replace(self.opened.record.request, image=tag)
            if dataclasses.replace(request, image=tag) != now or not self.waiting.has_image(tag):
                return False
            return self.waiting.take_source()
        except NOT_COLLECTED:  # the run without it reports the error, if it is still there
            return False


def _make_ready(
    options: RunOptions, progress: Console, stack: contextlib.ExitStack, earlier: JobRecord
) -> ReadyJob | None:
    """Creates and starts the hosts of the next run; without Docker, or after an error, there are none."""
    try:
        record = options.to_record()
        if record.request.engine == LOCAL:
            return None
        check_owners(earlier, record.request, "--watch")
        tag, _ = prepare_image(record.request, False, progress)
        record = dataclasses.replace(record, request=dataclasses.replace(record.request, image=tag))
        opened = stack.enter_context(open_job(record, None))
        opened.update(state=WAITING)
        return ReadyJob(opened, stack.enter_context(open_waiting_hosts(opened, PlainView(progress))))
    except Exception as error:
        if convert_error(error) is None:
            raise
        _close(stack)  # the run reports the error, if it is still there
        return None


def _run_watched(options: RunOptions, progress: Console, ready: ReadyJob | None, earlier: JobRecord) -> bool:
    """Runs a job, and prints how it ended. An error, or an interrupt of the run, is printed, and ends only the run.

    Args:
        earlier: A record with the owners of the files that decide what runs.

    Returns:
        Whether it was interrupted.
    """
    with _open_stack() as stack:
        try:
            build_seconds = None
            record = options.to_record()
            check_owners(earlier, record.request, "--watch")
            if ready is None:
                tag, build_seconds = prepare_image(record.request, options.build, progress)
                record = dataclasses.replace(record, request=dataclasses.replace(record.request, image=tag))
                opened = stack.enter_context(open_job(record, None))
            else:
                opened = ready.opened
                opened.begin()
                opened.log.began = time.time()
            result = run_to_end(opened, progress, options, build_seconds, ready.waiting if ready else None)
            stack.close()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt.__context__, KeyboardInterrupt):  # the second one did not wait for the script
                raise typer.Exit(128 + signal.SIGINT) from None
            return True
        except Exception as error:
            failure = convert_error(error)
            if failure is None:
                raise
            print_failure(failure)
            return False
    summary.print_summary(progress, opened.record.request, result)
    print_report(progress, result.report)
    return False
