"""Finds the jobs that this user has started on this machine, running and ended ones, with their states."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from shoal import trust
from shoal.errors import UsageError, did_you_mean
from shoal.jobs import running, store
from shoal.jobs.job import JobRequest
from shoal.jobs.store import RECORD, JobRecord

LOST = "lost"
"""The state of a job that has not ended, but no command runs it: the command was killed."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class JobDescription:
    """A job that runs or has ended."""

    name: str
    state: str
    """`running`, `completed`, `failed`, `stopped` or `lost`."""
    exit_code: int | None
    image: str
    engine: str
    """`docker`, or `none` without Docker."""
    hosts: int
    started: float
    """Seconds since 1970."""
    ended: float | None
    """Seconds since 1970; None if it runs or is lost."""
    seconds: float | None
    """How long it has run; None if it is lost."""
    directory: Path
    pid: int
    """The process of the command that runs it."""


@dataclass(frozen=True)
class KnownJob:
    """A job in its directory."""

    directory: Path
    record: JobRecord
    state: str
    """running, completed, failed, stopped or lost."""

    @property
    def name(self) -> str:
        """The job's name, which is its directory's."""
        return self.directory.name

    @property
    def identity(self) -> str:
        """The label of its objects in Docker."""
        return self.record.identity or self.name

    @property
    def key(self) -> str:
        """Its key in this user's list of jobs."""
        return self.record.key(self.name)

    @property
    def is_running(self) -> bool:
        """Whether a command runs it."""
        return self.state == store.RUNNING

    @property
    def seconds(self) -> float | None:
        """How long it has run; None for a lost job."""
        end = time.time() if self.is_running else self.record.ended
        return None if end is None else end - self.record.started

    def describe(self) -> JobDescription:
        """Return the document that `shoal ps --json` prints about it."""
        own = self.record
        return JobDescription(
            name=self.name,
            state=self.state,
            exit_code=None if self.is_running else own.exit_code,
            image=own.image,
            engine=own.engine,
            hosts=own.request.hosts,
            started=own.started,
            ended=None if self.is_running else own.ended,
            seconds=self.seconds,
            directory=self.directory,
            pid=own.pid,
        )


def read_job(directory: Path) -> KnownJob:
    """Return the job in a directory. Raises `UsageError` if it has none."""
    is_running = running.is_running(directory)
    found = _load(directory)
    if not is_running and found.state == store.RUNNING:
        is_running = running.is_running(directory)  # it may have been resumed between the two steps
        found = _load(directory)
    if is_running:
        return KnownJob(directory, found, store.RUNNING)
    return KnownJob(directory, found, LOST if found.state == store.RUNNING else found.state)


def _load(directory: Path) -> JobRecord:
    return store.load_record(directory / RECORD, directory.name)


def list_jobs() -> list[KnownJob]:
    """Return the jobs of this user on this machine: running ones, then the others, each newest first."""
    found = []
    for directory in running.list_directories():
        with contextlib.suppress(UsageError, OSError):  # another version's, another user's, or removed meanwhile
            job = read_job(directory)
            running.check_own(directory, job.key, job.name)
            found.append(job)
    return sorted(found, key=lambda each: (not each.is_running, -each.record.started))


def find_job(name: str) -> KnownJob:
    """Return the job with a name, or in a directory. Of several: a running one, that in ./jobs, the newest.

    One in ./jobs or another directory may be somebody else's, and is only to be read: `running.check_own`.

    Raises `UsageError` with similar names if there is none.
    """
    jobs = list_jobs()
    named = [each for each in jobs if each.name == name]
    if named and named[0].is_running:
        return named[0]
    for place in (Path(name), JobRequest.output / name):
        if name and (place / RECORD).is_file():
            return read_job(place.resolve())
    if named:
        return named[0]
    hint = did_you_mean(name, dict.fromkeys(each.name for each in jobs), limit=3)
    raise UsageError(
        f"{name}: no such job of yours on this machine.{hint} Fix: use a name that `shoal ps --all` lists, or the path"
        " of a job's directory"
    )


def find_running_job(name: str) -> KnownJob:
    """Return the running job of this user with a name, or in a directory. Raises `UsageError` if there is none."""
    found = find_job(name)
    running.check_own(found.directory, found.key, name)
    if found.is_running:
        return found
    fix = f"shoal stop {name} ends its hosts" if found.state == LOST else "`shoal ps` lists running jobs"
    raise UsageError(f"{name}: the job does not run, its state is {found.state}. Fix: {fix}")


def check_name(name: str, output: Path) -> None:
    """Raise `UsageError` unless a new job can have a name: SageMaker takes it, and no other job uses it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name}: expected 1 to 63 letters, digits and hyphens, with a letter or digit at both"
            " ends, as in SageMaker. Example: --name digits-1"
        )
    for each in list_jobs():
        if each.name == name and each.state in (store.RUNNING, LOST):  # hosts of a lost one may still run
            raise UsageError(
                f"--name {name}: in use by a job that is {each.state} ({each.directory}). Fix: choose another name, or"
                f" shoal stop {each.directory}"
            )
    if os.path.lexists(output / name):
        if (output / name).lstat().st_uid not in trust.own_ids():
            raise UsageError(
                f"--name {name}: in use by another user, in {output / name}. Fix: choose another name or --output"
            )
        raise UsageError(
            f"--name {name}: in use, {output / name} exists. Fix: choose another name, remove that directory, or if"
            f" that job has not succeeded, continue it: shoal run --resume {name}"
        )
