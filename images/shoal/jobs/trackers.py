"""Finds what experiment trackers have left in the output of a job, and the commands that show it."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from shoal.jobs.event_files import is_event_file
from shoal.jobs.results import list_files

_MOST_FILES = 100_000


def find_trackers(outputs: Iterable[Path]) -> dict[str, str]:
    """Return the command that shows the runs of each tracker, by its name. The first host with runs counts.

    Args:
        outputs: The directory `output` of each host, in the hosts' order.
    """
    found: dict[str, str] = {}
    for output in outputs:
        for name, command in _find_in(output).items():
            found.setdefault(name, command)
    return found


def _find_in(output: Path) -> dict[str, str]:
    """Return the command of each tracker for one directory."""
    places: dict[str, str] = {}
    for path in itertools.islice(list_files(output, []), _MOST_FILES):
        folders = path.relative_to(output).parts[:-1]
        if is_event_file(path):
            earlier = places.get("TensorBoard", str(path.parent))
            places["TensorBoard"] = os.path.commonpath([earlier, path.parent])
        elif path.name == "mlflow.db":
            places["MLflow"] = f"sqlite:///{path}"
        elif path.name == "meta.yaml" and "mlruns" in folders:
            places["MLflow"] = str(output.joinpath(*folders[: folders.index("mlruns") + 1]))
        elif path.suffix == ".wandb" and path.parent.name.startswith("offline-run-"):
            places["W&B"] = str(path.parent.parent)
        elif path.suffix == ".db" and "trackio" in folders:
            places["Trackio"] = str(path.parent)
    commands = {
        "TensorBoard": "tensorboard --logdir {}",
        "MLflow": "mlflow ui --backend-store-uri {}",
        "W&B": "wandb sync {}/offline-run-*",
        "Trackio": "TRACKIO_DIR={} trackio show",
    }
    return {name: form.format(shlex.quote(places[name])) for name, form in commands.items() if name in places}
