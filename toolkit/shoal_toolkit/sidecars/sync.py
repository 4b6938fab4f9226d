"""Uploads what the script writes to output/intermediate: `python -m shoal_toolkit.sidecars.sync DIRECTORY ADDRESS`.

Wanted where the hyperparameter sagemaker_s3_output is an s3:// address (file:// is accepted, and asks for nothing) and
output/intermediate is not there before the job: where it is, the platform uploads it itself. Keys are those of the
stock toolkit: <address>/<TRAINING_JOB_NAME>/output/intermediate/<path>.

The directory is looked through once a second. A file that has not changed between two looks is uploaded, again after
each change; one that is deleted stays in S3. An object shows up in S3 when the whole of it has arrived, and an upload
during which its file changes is given up: nobody finds half a file. SIGTERM, or the launcher's end, is the sign for a
last look that waits for nothing, and the end. A failure ends neither this process nor the job: it is said, tried again
with growing pauses, and said once more at the end.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence

from shoal_toolkit.errors import ContractError, LaunchError, TrainError
from shoal_toolkit.job.source import S3
from shoal_toolkit.light_typing import TYPE_CHECKING, Any, NamedTuple
from shoal_toolkit.log import say

if TYPE_CHECKING:  # the process itself needs neither
    from shoal_toolkit.job.contract import Job
    from shoal_toolkit.job.machine import Machine

_LONGEST_PAUSE = 60.0


def command(job: Job, machine: Machine) -> tuple[str, ...]:
    """Return the command that runs beside the script; empty when no upload is wanted."""
    address = _address(job)
    if not address.startswith(S3):
        return ()
    parts = [address.rstrip("/"), job.environ.get("TRAINING_JOB_NAME", ""), "output", "intermediate"]
    place = "/".join(part for part in parts if part)
    return (machine.python, "-m", "shoal_toolkit.sidecars.sync", job.paths.intermediate, place)


def preparation(job: Job) -> tuple[tuple[str, ...], ...]:
    """Return what is run before the launch: the script finds the directory, as it does with the stock toolkit."""
    return (("mkdir", "-p", job.paths.intermediate),) if _address(job) else ()


def _address(job: Job) -> str:
    """Return where to upload to; empty where nobody asks, or the platform does it."""
    address = str(job.toolkit.get("sagemaker_s3_output") or "")
    if not address or job.platform_syncs:
        return ""
    if not address.startswith((S3, "file://")) or address == S3:
        raise ContractError(
            f"sagemaker_s3_output is {address!r}; allowed are s3://bucket/prefix, and file:// for no upload."
        )
    return address


class Signature(NamedTuple):
    """What changes when a file does."""

    inode: int
    size: int
    modified: int  # nanoseconds


class Sync:
    """The files of a directory and what of them is in S3."""

    def __init__(self, directory: str, address: str, environ: Mapping[str, str]) -> None:
        self._directory = directory
        self._address = address
        self._environ = environ
        self._client: Any = None
        self._seen: dict[str, Signature] = {}
        self._uploaded: dict[str, Signature] = {}
        self.failure = ""

    def look(self, settled: bool) -> bool:
        """Upload what is new: with `settled` only what has not changed since the last look. Returns whether all went
        well."""
        found = dict(_files(self._directory))
        due = [
            path
            for path, signature in found.items()
            if self._uploaded.get(path) != signature and (not settled or self._seen.get(path) == signature)
        ]
        self._seen = found
        well = True
        for path in due:
            error = self._upload(path, found[path])
            well = well and error is None
            if isinstance(error, LaunchError):
                break  # nobody answers: each of the others would wait as long
        return well

    def _upload(self, path: str, signature: Signature) -> TrainError | None:
        from shoal_toolkit.sidecars import s3

        target = f"{self._address}/{os.path.relpath(path, self._directory)}"
        try:
            self._client = self._client or s3.client(self._environ)
            with _Unchanged(path, signature) as file:
                s3.upload(self._client, file, target)
        except (_ChangedError, FileNotFoundError):
            return None  # the next look finds it as it is then
        except Exception as error:  # boto3's errors have no common base
            return self._failed(path, s3.explained(target, error))
        self._uploaded[path] = signature
        return None

    def _failed(self, path: str, error: TrainError) -> TrainError:
        text = f"{path} is not uploaded: {error}"
        if text != self.failure:
            say(text)
        self.failure = text
        return error


def main(argv: Sequence[str]) -> int:
    """Upload until told to end; the exit code is 0 whatever happened to the files."""
    directory, address = argv
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.makedirs(directory, exist_ok=True)
    sync, pause = Sync(directory, address, os.environ), 1.0
    while signal.sigtimedwait({signal.SIGTERM}, pause) is None and os.getppid() == parent:
        pause = 1.0 if sync.look(settled=True) else min(2 * pause, _LONGEST_PAUSE)
    if not sync.look(settled=False):
        say(f"not all of {directory} has been uploaded: {sync.failure}")
    return 0


class _ChangedError(Exception):
    """A file is not what it was when its upload began."""


class _Unchanged(io.FileIO):
    """A file that cannot be read any more once it has changed."""

    def __init__(self, path: str, signature: Signature) -> None:
        super().__init__(path)
        self._signature = signature

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        if _signature(os.fstat(self.fileno())) != self._signature:
            raise _ChangedError
        return data


def _files(directory: str) -> Iterator[tuple[str, Signature]]:
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            try:
                found = os.stat(path)
            except OSError:
                continue  # deleted meanwhile, or a link to nothing
            if stat.S_ISREG(found.st_mode):
                yield path, _signature(found)


def _signature(found: os.stat_result) -> Signature:
    return Signature(found.st_ino, found.st_size, found.st_mtime_ns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
