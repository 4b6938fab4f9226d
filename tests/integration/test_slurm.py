"""A Slurm job in the image: examples/slurm with charliecloud, as a user without rights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..cluster.slurm import NODES, ROOT, start_cluster
from ..tested_images import PYTORCH_CPU

IMAGE = PYTORCH_CPU
NOBODY = 65534
EXAMPLES = ("examples/digits", "examples/slurm")


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Path]:
    """The image as a directory, made as docs/slurm.md says."""
    with tempfile.TemporaryDirectory(prefix="shoal-slurm-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)  # jobs of any user run it
        image = Path(directory, "image")
        subprocess.run([ROOT / "examples" / "slurm" / "unpack.sh", IMAGE, image], check=True)
        yield image


@pytest.mark.long
def test_the_example_trains_in_the_image_without_rights(unpacked: Path) -> None:
    with start_cluster() as cluster:
        work = cluster.directory / "work"
        for name in EXAMPLES:
            shutil.copytree(ROOT / name, work / name)  # the user can read it wherever this checkout is
        values = work / "examples" / "slurm" / "hyperparameters.json"
        values.write_text(json.dumps({**json.loads(values.read_text()), "epochs": "1"}))
        channel = work / "channel"
        subprocess.run([sys.executable, "examples/digits/prepare.py", channel], check=True, cwd=ROOT)
        shutil.chown(work, NOBODY, NOBODY)
        variables = {"IMAGE": str(unpacked), "CHANNEL": str(channel), "USER": "nobody"}
        number = cluster.submit("examples/slurm/train.sbatch", cwd=work, user=NOBODY, variables=variables)
        job = cluster.wait(number, 240)
        assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.log
        assert "with world size 4" in job.log
        first, second = (work / "jobs" / f"digits-{number}" / node for node in NODES)
        assert (first / "model" / "model.pt").stat().st_uid == NOBODY
        assert (first / "output" / "success").exists()
        assert (second / "output" / "success").exists()
