"""Attacks by a script in the containers of a job: its results are collected, and it fills neither terminal nor disk."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import docker
import pytest

from .test_run import SHOAL

SECONDS = 120
SCRIPTS = {
    "thousands of files that are not collected": (
        "for number in range(3000):\n"
        "    os.symlink('/etc/passwd', f'/opt/ml/output/data/{number}')\n"
        "    os.symlink('/etc/passwd', f'/opt/ml/checkpoints/{number}')\n"
    ),
    "thousands of links with long ways": (
        "place = '/opt/ml/checkpoints/'\n"
        "os.mkdir(place + 'a')\n"
        "for number in range(40):\n"
        "    os.symlink('a/../' * 800 + f'link-{number + 1}', place + f'link-{number}')\n"
        "for number in range(2000):\n"
        "    os.symlink('a/../' * 800 + 'link-0', place + f'far-{number}')\n"
    ),
    "marks of other jobs in its checkpoints": (
        "os.mkdir('/opt/ml/checkpoints/sub')\n"
        "open('/opt/ml/checkpoints/sub/.shoal-job.json', 'w').write('{\"job\": \"other\"}')\n"
    ),
    "directories in the place of reports": (
        "for name in ('metrics.jsonl', 'data/metrics.json'):\n    os.makedirs(f'/opt/ml/output/{name}')\n"
    ),
    "a failure with forged lines": (
        "open('/opt/ml/output/failure', 'w').write('x\\nshoal: forged\\n\\x1b]52;c;aGk=\\x07\\rreport: forged')\n"
    ),
}
END = """
open('/opt/ml/model/weights', 'w').write('saved')
open('/opt/ml/checkpoints/step', 'w').write('1')
sys.exit(3)
"""


def shoal(directory: Path, *words: str) -> str:
    """Run a job that fails with exit code 3, and return its messages."""
    ended = subprocess.run(
        [SHOAL, "run", *words],
        cwd=directory,
        env={**os.environ, "TOKEN_OF_TEST": "value-of-the-secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 3, ended.stdout
    return ended.stdout


@pytest.mark.parametrize("attack", SCRIPTS)
def test_results_of_a_hostile_script_are_collected(tmp_path: Path, pytorch: str, attack: str) -> None:
    """Its own files are there, what is printed stays short, and the job can be resumed."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(f"import os, sys\n{SCRIPTS[attack]}{END}")
    printed = shoal(tmp_path, pytorch, "code/train.py", "--name", f"attack-{time.time_ns()}")
    assert len(printed.splitlines()) < 100, printed[:4000]
    assert not any(line.startswith(("shoal: forged", "report: forged")) for line in printed.splitlines())
    assert "\x1b" not in printed
    (directory,) = (tmp_path / "jobs").iterdir()
    assert (directory / "model.tar.gz").is_file()
    assert (directory / "checkpoints" / "step").read_text() == "1"
    if "marks" in attack:
        (tmp_path / "code" / "train.py").write_text("raise SystemExit(3)")
        shoal(tmp_path, "--resume", directory.name)


def test_volumes_of_an_image_keep_no_secret(tmp_path: Path, pytorch: str) -> None:
    """An image may have a volume in the place of secrets: the volume has them, and goes with the job."""
    client = docker.from_env()
    container = client.containers.create(pytorch)
    container.commit("shoal-attack", changes="VOLUME /run")
    container.remove()
    try:
        before = {volume.id for volume in client.volumes.list()}
        (tmp_path / "train.py").write_text(
            "import os, sys\nassert open(os.environ['TOKEN_OF_TEST_FILE']).read() == 'value-of-the-secret'\nsys.exit(3)"
        )
        printed = shoal(tmp_path, "shoal-attack:latest", "train.py", "--secret", "TOKEN_OF_TEST")
        assert "value-of-the-secret" not in printed
        assert {volume.id for volume in client.volumes.list()} <= before
        files = [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()]
        assert files
        assert not any(b"value-of-the-secret" in path.read_bytes() for path in files)
    finally:
        client.images.remove("shoal-attack:latest", force=True)
