"""The jobs of this user: the record in a job's directory, the job that a command has opened, and a list of all.

With the record, `--resume` continues a job.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pydantic

from shoal import trust
from shoal.errors import UsageError, did_you_mean
from shoal.jobs import checkpoints, job, processes, results, running
from shoal.jobs.job_log import LOG, JobLog
from shoal.limits import MOST_HOSTS, MOST_RECORD, read_file

RECORD = "request.json"
_EARLIER = "attempt-"
"""Directories with the files of earlier commands have this name and a number."""
RUNNING, WAITING, COMPLETED, FAILED, STOPPED = "running", "waiting", "completed", "failed", "stopped"
"""The states of a job in its record."""
_ACTIVE = (RUNNING, WAITING)
"""The states of a job that a command holds."""
OUTPUT = "shoal.log"
"""The output of the command of a detached job."""


@dataclass(frozen=True)
class JobRecord:
    """A job as a command has started it."""

    request: job.JobRequest
    exit_code: int | None = None
    """None: it has not ended, or its command was killed."""
    uncollected: bool = False
    """Whether the newest checkpoints are not in their directory yet, but in Docker's volume or in the host's tree."""
    identity: str = ""
    """The label of the job's objects in Docker, which no other job has. Empty: its name, which is unique then."""
    token: str = ""
    """Random. The list of jobs has its digest: a record that another user writes for a removed job does not count."""
    state: str = RUNNING
    started: float = 0.0
    """When the last command has started it, in seconds since 1970."""
    ended: float | None = None
    """When it ended; None if it still runs, or its command was killed."""
    pid: int = 0
    """The process of the command that runs it."""
    process_start: str = ""
    """The start of that process, as `processes.describe_start` returns it: numbers are used again."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """The users that own the files of `list_deciding`, by path, when the last command has started it."""

    def key(self, name: str) -> str:
        """Returns the key of the job in this user's list: its token, else its identity, else `name`."""
        return self.token or self.identity or name


_RECORDS = pydantic.TypeAdapter(JobRecord)


@dataclass
class StoredJob:
    """A job in its directory."""

    name: str
    directory: Path
    record: JobRecord

    @property
    def identity(self) -> str:
        """The label of its objects in Docker, which no other job has."""
        return self.record.identity or self.name


@dataclass
class OpenJob(StoredJob):
    """A job that this command runs. No other command can run it or use its checkpoints meanwhile."""

    checkpoints: checkpoints.LockedCheckpoints
    resumed: bool
    log: JobLog = field(default_factory=JobLog)
    """The log of this command."""
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Its callbacks end the job's hosts. They are called last, when its files and its report are written."""
    on_started: Callable[[], None] = lambda: None
    """Called when the hosts start: errors in the request have been found before."""

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is something to continue from."""
        return self.record.uncollected or self.checkpoints.has_files()

    @property
    def outputs(self) -> dict[str, Path]:
        """The directories `output` of its hosts, which any program may have filled."""
        found = {host: self.directory / host / "output" for host in self.record.request.host_names}
        return {host: output for host, output in found.items() if output.is_dir()}

    def begin(self) -> None:
        """Writes that this process runs the job, with the owners of the files that decide what it runs."""
        pid = os.getpid()
        owners = _read_owners(self.record.request)
        changes = {"state": RUNNING, "started": time.time(), "ended": None, "owners": owners}
        self.update(**changes, pid=pid, process_start=processes.describe_start(pid))

    def update(self, **changes: Any) -> None:
        """Changes the record, and writes it."""
        self.record = replace(self.record, **changes)
        _write_record(self.directory, self.record)

    def finish(self, exit_code: int | None, state: str | None = None) -> None:
        """Writes how the job ended. Its state follows from the exit code if none is given."""
        self.update(exit_code=exit_code, state=state or (FAILED if exit_code else COMPLETED), ended=time.time())


def read_record(output: Path, name: str) -> JobRecord:
    """Returns the record of a job. Raises `UsageError` if the output directory has no such job of this user."""
    path = output / name / RECORD
    if Path(name).name != name or not path.is_file():
        known = [found.parent.name for found in output.glob(f"*/{RECORD}")]
        problem = f"{output / name} has no {RECORD}" if (output / name).is_dir() else f"no such job in {output}"
        raise UsageError(
            f"--resume {name}: {problem}.{did_you_mean(name, known)} Fix: use the name of a directory in {output}, or"
            " --output with the directory of your jobs"
        )
    found = load_record(path, f"--resume {name}")
    running.check_own(path.parent, found.key(name), f"--resume {name}")
    return found


def list_deciding(request: job.JobRequest) -> set[Path]:
    """Returns the directory and the files that decide what a job runs: its source, and files of variables."""
    return {path for path in (request.source, *request.taken.values()) if path}


def _read_owners(request: job.JobRequest) -> dict[str, int]:
    found = {}
    for path in list_deciding(request):
        with contextlib.suppress(OSError):
            found[str(path.absolute())] = path.stat().st_uid
    return found


def note_owners(record: JobRecord) -> JobRecord:
    """Returns a record with the users that own the files of `list_deciding` now."""
    return replace(record, owners=_read_owners(record.request))


def check_owners(earlier: JobRecord, request: job.JobRequest, option: str) -> None:
    """Raises `UsageError` if another user has put files in the place of those that decided what a job runs."""
    for path, owner in _read_owners(request).items():
        if path in earlier.owners and owner not in {earlier.owners[path], *trust.own_ids()}:
            raise UsageError(
                f"{option}: {path} belongs to the user {owner} now, and to {earlier.owners[path]} when the job started."
                " It decides what the job runs. Fix: start a new job if you trust that user"
            )


def load_record(path: Path, option: str) -> JobRecord:
    """Returns the record in a file, which anybody may have put there.

    Raises `UsageError`, with an option or a job's name, if it is not a record.
    """
    try:
        found = _RECORDS.validate_json(read_file(path, MOST_RECORD))
        if found.request.hosts not in range(1, MOST_HOSTS + 1):
            raise ValueError(f"{found.request.hosts} hosts")
        if not found.request.image:
            raise ValueError("no image")
    except ValueError as error:
        words = error.errors()[0]["msg"] if isinstance(error, pydantic.ValidationError) else str(error)
        raise UsageError(
            f"{option}: {path} was not written by this version: {words}. Fix: start the job again"
        ) from error
    return found


def _write_record(directory: Path, record: JobRecord) -> None:
    """Writes the record, with absolute paths. Only its owner can read it: environments may have secrets."""
    request = record.request
    absolute = replace(
        request,
        source=request.source and request.source.absolute(),
        channels={name: path.absolute() for name, path in request.channels.items()},
        volumes=tuple(replace(volume, source=volume.source.absolute()) for volume in request.volumes),
        checkpoints=request.checkpoints and request.checkpoints.absolute(),
        # A resumed job gets a new secret, and reads again what came from the environment or a file.
        environment={
            key: value for key, value in request.environment.items() if key != job.SECRET and key not in request.taken
        },
        taken={name: place and place.absolute() for name, place in request.taken.items()},
        secrets=tuple(replace(secret, file=secret.file and secret.file.absolute()) for secret in request.secrets),
    )
    content = _RECORDS.dump_json(replace(record, request=absolute), indent=2)
    partial = directory / f"{RECORD}.new"
    partial.unlink(missing_ok=True)
    with os.fdopen(trust.open_own(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
    partial.replace(directory / RECORD)


@contextlib.contextmanager
def open_job(record: JobRecord, resumed: str | None, name: str | None = None) -> Iterator[OpenJob]:
    """Opens a new job, or with a name in `resumed`, that one again, and writes its record.

    A new job gets a directory, and if it ends before its hosts start, the directory is removed. In the directory of a
    resumed job, the files of the last command move to attempt-N. Other commands see that the job runs.

    Args:
        resumed: The name of the job to continue.
        name: The name of a new job; None: a unique one.

    Raises:
        UsageError: If the job's directory cannot be created, or another command or job uses the checkpoints. Also if
            the resumed job has succeeded or has no checkpoints. Also if others can replace a new job's files: its hosts
            read their code there.
    """
    if resumed is None:
        record, name, directory = _make_new(record, name)
        option = f"--checkpoints {record.request.checkpoints}"
    else:
        name, directory = resumed, (record.request.output / resumed).resolve()
        option = f"--resume {name}"
    has_checkpoints = False
    try:
        place, owner = find_checkpoints(record.request, directory), record.identity or name
        with (
            checkpoints.open_directory(place, owner, option) as opened,
            running.mark_running(directory, record.key(name)),
        ):
            if resumed is not None:
                record = _prepare_resume(directory, record, opened)
            result = OpenJob(name, directory, record, opened, resumed is not None, JobLog(path=directory / LOG))
            try:
                with result.at_end:
                    result.begin()
                    yield result
            finally:
                result.log.close()
                has_checkpoints = result.has_checkpoints
    finally:
        if resumed is None and not has_checkpoints:
            _remove_unused(directory)


def _make_new(record: JobRecord, name: str | None) -> tuple[JobRecord, str, Path]:
    """Makes the job's directory. Raises `UsageError` if that fails, or if others can replace files in it."""
    request = record.request
    code = request.source.resolve().name if request.source else Path(request.image).name.partition(":")[0]
    identity = job.make_job_name(name or code)
    name = name or identity
    directory = job.make_job_directory(request, name)
    if problem := trust.find_stranger(directory):
        directory.rmdir()
        raise UsageError(
            f"--output {request.output}: {problem}, and so could replace the files of the job. Fix: choose another"
            f" directory, or {trust.advise_trust(directory.parent)}"
        )
    return replace(record, identity=identity, token=secrets.token_hex(16)), name, directory


def _remove_unused(directory: Path) -> None:
    """Removes the directory of a new job without checkpoints, unless it has files of hosts: they never started then."""
    if {path.name for path in directory.iterdir()} <= {RECORD, OUTPUT, running.MARK, checkpoints.CONTENT}:
        shutil.rmtree(directory)


def _prepare_resume(directory: Path, record: JobRecord, opened: checkpoints.LockedCheckpoints) -> JobRecord:
    """Moves files of the last command to attempt-N. Checkpoints of a killed job without Docker are collected first."""
    option = f"--resume {directory.name}"
    last = read_record(directory.parent, directory.name)  # it may have ended since the first look
    if last.exit_code == 0 and not last.uncollected:
        raise UsageError(f"{option}: the job has succeeded, so nothing is left to do. Fix: start a new job")
    is_uncollected = last.uncollected
    if is_uncollected and last.request.engine == job.LOCAL:
        for tree in find_trees(directory):
            checkpoints.collect_tree(tree, opened)
        _write_record(directory, replace(last, uncollected=False))
        is_uncollected = False
    elif is_uncollected and record.request.engine != job.DOCKER:
        raise UsageError(f"{option}: the newest checkpoints are in a Docker volume. Fix: leave out --engine")
    if not (is_uncollected or opened.has_files()):
        raise UsageError(f"{option}: the job has no checkpoints in {opened.path}. Fix: start it again without --resume")
    _move_results(directory)
    return replace(record, exit_code=None, uncollected=is_uncollected)


def find_checkpoints(request: job.JobRequest, directory: Path) -> Path:
    """Returns the directory of a job's checkpoints. Raises `UsageError` if the one in its own directory is a link."""
    own = directory / checkpoints.CONTENT
    if request.checkpoints is None and own.is_symlink():
        raise UsageError(
            f"{own}: is a link, and the job replaces its checkpoints as a whole. Fix: remove it, and name the directory"
            " with --checkpoints"
        )
    return request.checkpoints or own


def list_host_trees(directory: Path) -> list[Path]:
    """Returns the trees of the hosts of a job without Docker. Links are left out: they may lead anywhere."""
    return [tree for tree in _list_trees(directory) if (tree / job.RESOURCE_CONFIG).is_file()]


def find_trees(directory: Path) -> list[Path]:
    """Returns the tree with the checkpoints of a job without Docker that was killed; none for another job."""
    places = [tree / checkpoints.CONTENT for tree in _list_trees(directory)]
    return [place.parent for place in places if place.is_dir() and not place.is_symlink()]


def _list_trees(directory: Path) -> list[Path]:
    found = (path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in found if not path.name.startswith((".", _EARLIER, checkpoints.CONTENT)))


def _move_results(directory: Path) -> None:
    """Moves the files of the last command in the directory of a job to attempt-N."""
    numbers = [path.name.removeprefix(_EARLIER) for path in directory.glob(f"{_EARLIER}*")]
    number = 1 + max((int(each) for each in numbers if re.fullmatch("[0-9]{1,9}", each)), default=0)
    target = directory / f"{_EARLIER}{number}"
    target.mkdir()
    for tree in find_trees(directory):
        results.remove_tree(tree / checkpoints.CONTENT)
    for path in list(directory.iterdir()):
        if not path.name.startswith((_EARLIER, ".")) and path.name not in (RECORD, checkpoints.CONTENT):
            path.rename(target / path.name)


LOST = "lost"
"""The state of a job that has not ended, but no command runs it: the command was killed."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class JobDescription:
    """A job that runs or has ended."""

    name: str
    state: str
    """`running`, `waiting` (for a change: `shoal run --watch`), `completed`, `failed`, `stopped` or `lost`."""
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


@dataclass
class KnownJob(StoredJob):
    """A job that this user has started on this machine, with the name of its directory."""

    state: str
    """running, waiting, completed, failed, stopped or lost."""

    @property
    def key(self) -> str:
        """Its key in this user's list of jobs."""
        return self.record.key(self.name)

    @property
    def is_running(self) -> bool:
        """Whether a command runs it, or has made it ready to run."""
        return self.state in _ACTIVE

    @property
    def seconds(self) -> float | None:
        """How long it has run; None for a lost job."""
        end = time.time() if self.is_running else self.record.ended
        return None if end is None else end - self.record.started

    def describe(self) -> JobDescription:
        """Returns the document that `shoal ps --json` prints about it."""
        own = self.record
        return JobDescription(
            name=self.name,
            state=self.state,
            exit_code=None if self.is_running else own.exit_code,
            image=own.request.image,
            engine=own.request.engine,
            hosts=own.request.hosts,
            started=own.started,
            ended=None if self.is_running else own.ended,
            seconds=self.seconds,
            directory=self.directory,
            pid=own.pid,
        )


def read_job(directory: Path) -> KnownJob:
    """Returns the job in a directory. Raises `UsageError` if it has none."""
    is_running = running.is_running(directory)
    found = load_record(directory / RECORD, directory.name)
    if not is_running and found.state in _ACTIVE:
        is_running = running.is_running(directory)  # it may have been resumed between the two steps
        found = load_record(directory / RECORD, directory.name)
    active = WAITING if found.state == WAITING else RUNNING
    ended = LOST if found.state in _ACTIVE else found.state
    return KnownJob(directory.name, directory, found, active if is_running else ended)


def list_jobs() -> list[KnownJob]:
    """Returns the jobs of this user on this machine: running ones, then the others, each newest first."""
    found = []
    for directory in running.list_directories():
        with contextlib.suppress(UsageError, OSError):  # another version's, another user's, or removed meanwhile
            job = read_job(directory)
            running.check_own(directory, job.key, job.name)
            found.append(job)
    return sorted(found, key=lambda each: (not each.is_running, -each.record.started))


def find_job(name: str) -> KnownJob:
    """Returns the job with a name, or in a directory. Of several: a running one, that in ./jobs, the newest.

    One in ./jobs or another directory may be somebody else's, and is only to be read: `running.check_own`.

    Raises `UsageError` with similar names if there is none.
    """
    jobs = list_jobs()
    named = [each for each in jobs if each.name == name]
    if named and named[0].is_running:
        return named[0]
    for place in (Path(name), job.JobRequest.output / name):
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
    """Returns the running job of this user with a name, or in a directory. Raises `UsageError` if there is none."""
    found = find_job(name)
    running.check_own(found.directory, found.key, name)
    if found.is_running:
        return found
    fix = f"shoal stop {name} ends its hosts" if found.state == LOST else "`shoal ps` lists running jobs"
    raise UsageError(f"{name}: the job does not run, its state is {found.state}. Fix: {fix}")


def check_name(name: str, output: Path) -> None:
    """Raises `UsageError` unless a new job can have a name: SageMaker takes it, and no other job uses it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name}: expected 1 to 63 letters, digits and hyphens, with a letter or digit at both"
            " ends, as in SageMaker. Fix: such as --name digits-1"
        )
    for each in list_jobs():
        if each.name == name and each.state in (*_ACTIVE, LOST):  # hosts of a lost one may still run
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
