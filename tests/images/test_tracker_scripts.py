"""The scripts in docs/trackers.md, with the real trackers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.jobs.trackers import find_trackers, read_scalars

from ..cache import install

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^## (\S+)\n(?:(?!## ).*\n)*?```python\n((?:.*\n)*?)```", re.MULTILINE)
PACKAGES = ("tensorboard==2.21.0", "mlflow-skinny==3.17.2", "sqlalchemy", "alembic", "wandb==0.31.0", "trackio==0.43.0")
COMMANDS = {
    "TensorBoard": "tensorboard --logdir {}/tensorboard",
    "MLflow": "mlflow ui --backend-store-uri sqlite:///{}/data/mlflow.db",
    "W&B": "wandb sync {}/data/wandb/offline-run-*",
    "Trackio": "TRACKIO_DIR={}/data/trackio trackio show",
}


@pytest.mark.long
def test_each_tracker_leaves_runs_that_are_found(tmp_path: Path) -> None:
    scripts = dict(SECTION.findall((ROOT / "docs" / "trackers.md").read_text()))
    assert list(scripts) == list(COMMANDS)
    packages = install("trackers-1", *PACKAGES, with_dependencies=True)
    running = {}
    for number, (name, script) in enumerate(scripts.items()):
        output = tmp_path / str(number)
        (output / "data").mkdir(parents=True)
        (tmp_path / f"{number}.py").write_text(script)
        variables = {"SM_OUTPUT_DIR": output, "SM_OUTPUT_DATA_DIR": output / "data", "PYTHONPATH": packages}
        running[name] = subprocess.Popen(
            [sys.executable, f"{tmp_path}/{number}.py"],
            env={
                **os.environ,
                **{variable: str(value) for variable, value in variables.items()},
                "HOME": str(tmp_path),
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    for number, (name, process) in enumerate(running.items()):
        log, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{name}: {log}"
        output = tmp_path / str(number)
        assert find_trackers([output]) == {name: COMMANDS[name].format(output)}
    (loss,) = read_scalars(tmp_path / "0", 0.0).values()
    assert (len(loss.values), loss.xs[-1], loss.values[0]) == (20, 19, 1)
