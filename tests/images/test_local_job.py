"""`shoal run --engine none`, with the real `train` and `mpirun` of this environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shoal.matrix.project import Project

SHOAL = Path(sys.executable).with_name("shoal")
SCRIPT = """\
import json, os, pathlib, sys
from mpi4py import MPI
ranks = MPI.COMM_WORLD.gather(int(os.environ["RANK"]))
if ranks is not None:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("weights")
    data = pathlib.Path(os.environ["SM_CHANNEL_TRAINING"], "data.txt").read_text()
    print("ranks", ranks, data, flush=True)
MPI.COMM_WORLD.barrier()  # the first rank that exits 42 ends the others
sys.exit(int(os.environ["SM_HP_CODE"]))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("code", "manner"), [(0, []), (42, ["--json"])])
def test_two_hosts_become_one_with_all_ranks(project: Project, tmp_path: Path, code: int, manner: list[str]) -> None:
    source, channel = tmp_path / "code", tmp_path / "data"
    source.mkdir()
    channel.mkdir()
    (source / "train.py").write_text(SCRIPT)
    (channel / "data.txt").write_text("seen")
    options = ["--engine", "none", "--hosts", "2", "--procs-per-host", "2", "--hyperparameter", f"code={code}"]
    paths: list[str | Path] = [
        "--source",
        source,
        "--entry-point",
        "train.py",
        "--channel",
        f"training={channel}",
        "--output",
        tmp_path,
    ]
    env = {**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    command: list[str | Path] = [SHOAL, "run", "pytorch", *options, *manner, *paths]
    result = subprocess.run(command, cwd=project.root, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    told = result.stderr if manner else result.stdout
    assert "ranks [0, 1, 2, 3] seen" in told
    assert "2 hosts × 2 ranks run as 1 host × 4 ranks" in told
    (directory,) = tmp_path.glob("code-*")
    if manner:
        document = json.loads(result.stdout)
        assert (document["exit_code"], document["directory"]) == (code, str(directory))
        assert document["archives"]["model.tar.gz"] == str(directory / "model.tar.gz")
        assert (document["launch"]["ranks"], document["build_seconds"]) == (4, None)
        assert "42" in document["messages"]["algo-1"]
    with tarfile.open(directory / "model.tar.gz") as archive:
        assert archive.getnames() == ["model.txt"]
    tree = directory / "algo-1"
    assert json.loads((tree / "output" / "job.json").read_text())["exit_code"] == code
    assert (tree / "output" / "success").exists() == (code == 0)
