"""Uploads what the script writes to output/intermediate: `python -m shoal_toolkit.sidecars.sync DIRECTORY ADDRESS`.

It runs if the hyperparameter sagemaker_s3_output is an s3:// address (file:// means no upload), and output/intermediate
did not exist before the job: otherwise the platform uploads it. Keys are the same as with the stock toolkit:
<address>/<TRAINING_JOB_NAME>/output/intermediate/<path>.

The directory is scanned once a second. A file that did not change between two scans is uploaded, and again after each
change. A deleted file stays in S3. An upload ends without an object if its file changes meanwhile, so that S3 never has
half a file. SIGTERM, or the end of `train`, leads to a last scan that uploads everything at once, and to the end. A
failed upload ends neither this process nor the job: it is logged, tried again after longer and longer pauses, and
logged again at the end.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal_toolkit.errors import LaunchError, TrainError
from shoal_toolkit.log import write_log

_MAX_PAUSE_SECONDS = 60.0


class Signature(NamedTuple):
    """The facts about a file that change when it is written."""

    inode: int
    size: int
    modified: int  # nanoseconds


class Uploader:
    """Uploads the files of a directory to S3, and remembers which versions are there."""

    def __init__(self, directory: str, address: str, environ: Mapping[str, str]) -> None:
        self._directory = directory
        self._address = address
        self._environ = environ
        self._client: Any = None
        self._seen: dict[str, Signature] = {}
        self._uploaded: dict[str, Signature] = {}
        self.failure = ""

    def upload_changes(self, settled: bool) -> bool:
        """Scans the directory, and uploads new and changed files, until S3 does not answer.

        Args:
            settled: Whether to skip files that changed since the last scan: they may still be written.

        Returns:
            Whether all uploads succeeded.
        """
        found = dict(_scan_files(self._directory))
        due = [
            path
            for path, signature in found.items()
            if self._uploaded.get(path) != signature and (not settled or self._seen.get(path) == signature)
        ]
        self._seen = found
        succeeded = True
        for path in due:
            error = self._upload(path, found[path])
            succeeded = succeeded and error is None
            if isinstance(error, LaunchError):
                break  # S3 does not answer: each other upload would wait as long
        return succeeded

    def _upload(self, path: str, signature: Signature) -> TrainError | None:
        """Returns the error, which is logged; None for a success, or for a file that has changed or is gone."""
        from shoal_toolkit.sidecars import s3

        target = f"{self._address}/{os.path.relpath(path, self._directory)}"
        try:
            self._client = self._client or s3.make_s3_client(self._environ)
            with _UnchangedFile(path, signature) as file:
                s3.upload(self._client, file, target)
        except (_ChangedError, FileNotFoundError):
            return None  # the next scan finds it
        except Exception as error:  # boto3's errors have no common base
            return self._log_failure(path, s3.explain_error(target, error))
        self._uploaded[path] = signature
        return None

    def _log_failure(self, path: str, error: TrainError) -> TrainError:
        text = f"{path} is not uploaded: {error}"
        if text != self.failure:
            write_log(text)
        self.failure = text
        return error


def main(argv: Sequence[str]) -> int:
    """Makes the directory, and uploads its files until SIGTERM or the end of the parent process.

    Returns 0, even if files could not be uploaded.
    """
    directory, address = argv
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.makedirs(directory, exist_ok=True)
    uploader, pause = Uploader(directory, address, os.environ), 1.0
    while signal.sigtimedwait({signal.SIGTERM}, pause) is None and os.getppid() == parent:
        pause = 1.0 if uploader.upload_changes(settled=True) else min(2 * pause, _MAX_PAUSE_SECONDS)
    if not uploader.upload_changes(settled=False):
        write_log(f"not all of {directory} has been uploaded: {uploader.failure}")
    return 0


class _ChangedError(Exception):
    """A file changed during its upload."""


class _UnchangedFile(io.FileIO):
    """A file that raises _ChangedError when it is read after a change."""

    def __init__(self, path: str, signature: Signature) -> None:
        super().__init__(path)
        self._signature = signature

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        if _read_signature(os.fstat(self.fileno())) != self._signature:
            raise _ChangedError
        return data


def _scan_files(directory: str) -> Iterator[tuple[str, Signature]]:
    """Yields the regular files below a directory, also those behind links to files."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            try:
                found = os.stat(path)
            except OSError:
                continue  # deleted meanwhile, or a broken link
            if stat.S_ISREG(found.st_mode):
                yield path, _read_signature(found)


def _read_signature(found: os.stat_result) -> Signature:
    return Signature(found.st_ino, found.st_size, found.st_mtime_ns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
