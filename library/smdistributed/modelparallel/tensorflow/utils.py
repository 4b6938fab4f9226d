"""Sends checkpoint files between hosts that share no directory (published AWS scripts call these functions)."""

from __future__ import annotations

from pathlib import Path

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.tensorflow.state_mod import state

_BOX = "files"


def send_checkpoint_files(directory: str, dest_rank: int) -> None:
    """Sends this rank's checkpoint files to another rank, which calls `receive_checkpoint_files`.

    Args:
        directory: Contains this rank's `mp_rank_N`, all files of which are sent.
        dest_rank: The receiver's rank in the job.

    Raises:
        SMPRuntimeError: If there is no such directory, or the connection is lost.
    """
    name = f"mp_rank_{state.group('MP_GROUP').index(state.rank)}"
    root = Path(directory, name)
    if not root.is_dir():
        raise SMPRuntimeError(
            f"There are no checkpoint files to send: {root} is not a directory. Fix: save a checkpoint there before."
        )
    paths = sorted(path.relative_to(directory) for path in root.rglob("*") if path.is_file())
    state.objects.send([str(path) for path in paths], dest_rank, _BOX)
    for path in paths:
        state.objects.send(Path(directory, path).read_bytes(), dest_rank, _BOX)


def receive_checkpoint_files(directory: str, src_rank: int) -> None:
    """Receives checkpoint files from another rank, and writes them under a directory, which is created.

    Existing files are replaced.

    Args:
        directory: Where to write; the files keep their relative paths.
        src_rank: The sender's rank in the job.

    Raises:
        SMPRuntimeError: If a path leads outside of the directory, and nothing is written; if the connection is lost.
    """
    root = Path(directory).resolve()
    paths = [_inside(root, name, src_rank) for name in state.objects.receive(src_rank, _BOX)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(state.objects.receive(src_rank, _BOX))


def _inside(root: Path, name: str, src_rank: int) -> Path:
    """Returns the path of a file under `root`. Raises SMPRuntimeError if it leads out, also by links."""
    path = Path(root, name).resolve()
    if not path.is_relative_to(root):
        raise SMPRuntimeError(
            f"Rank {src_rank} sends a file {name!r} with a place that is not under {root}. Fix: receive into a "
            "directory without links that lead out, from ranks that you trust."
        )
    return path
