"""Results of the stock toolkit's jobs, kept from one run of the tests to the next.

The stock toolkit does not change. A job has the same result while its image, the job, the laboratory and the machine
are the same. Without these, they were a tenth of the work of all tests. `make conformance` runs all jobs again.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import shutil
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from .. import cache
from .lab import Run
from .layout import Tree

DIRECTORY = cache.DIRECTORY / "conformance"
_A_MONTH = 30 * 24 * 3600  # seconds
_AGAIN = "SHOAL_CONFORMANCE_AGAIN" in os.environ
_LABORATORY = [Path(__file__).with_name(name).read_bytes() for name in ("lab.py", "layout.py")]


class Recordings:
    """Recordings of earlier jobs, and of the jobs that run now."""

    def __init__(self) -> None:
        self._new: dict[Path, Future[Run]] = {}

    def find(self, image: str, tree: Tree) -> Future[Run] | None:
        """Return the run of a job that is recorded."""
        path = _path(image, tree)
        if _AGAIN:
            return None
        try:
            recorded = path.read_bytes()
            path.touch()
        except FileNotFoundError:
            return None
        found: Future[Run] = Future()
        found.set_result(pickle.loads(recorded))
        return found

    def will_be(self, image: str, tree: Tree, run: Future[Run]) -> None:
        """Keep a run, if all goes well."""
        self._new[_path(image, tree)] = run

    def keep(self) -> None:
        """Writes the recordings of ended jobs; removes recordings that no run has used for a month."""
        for path, future in self._new.items():
            if future.done() and not future.cancelled() and not future.exception():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_bytes(pickle.dumps(future.result()))
                partial.rename(path)
        for path in DIRECTORY.glob("*.pickle"):
            with suppress(FileNotFoundError):  # another checkout's tests have removed it
                if path.stat().st_mtime < time.time() - _A_MONTH:
                    path.unlink()

    @staticmethod
    def forget() -> None:
        """Keep nothing: a test has failed, and the reason may be among them."""
        shutil.rmtree(DIRECTORY, ignore_errors=True)


def _path(image: str, tree: Tree) -> Path:
    """The image's tag has a hash of its inputs; the facts about the machine that a job sees count too."""
    machine = (os.cpu_count(), platform.release())
    digest = hashlib.sha256(repr((image, tree, machine)).encode() + b"".join(_LABORATORY))
    return DIRECTORY / f"{digest.hexdigest()}.pickle"
