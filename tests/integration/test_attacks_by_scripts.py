"""Attacks by a script in the containers of a job: its results are collected, and it fills neither terminal nor disk."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import docker
import pytest

from ..tested_images import CLONE
from .test_run import SHOAL

SECONDS = 120
ATTACK = f"attack-by-test-{CLONE}"
SCRIPTS = {
    "thousands of files that are not collected, directories in the place of reports, and forged lines": (
        "for number in range(3000):\n"
        "    os.symlink('/etc/passwd', f'/opt/ml/output/data/{number}')\n"
        "    os.symlink('/etc/passwd', f'/opt/ml/checkpoints/{number}')\n"
        "for name in ('metrics.jsonl', 'data/metrics.json'):\n    os.makedirs(f'/opt/ml/output/{name}')\n"
        "open('/opt/ml/output/failure', 'w').write('x\\nshoal: forged\\n\\x1b]52;c;aGk=\\x07\\rreport: forged')\n"
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
    "names of bytes, and deep, old and capable files": (
        "import socket, stat\n"
        "for top in ('model', 'output/data', 'checkpoints', 'code'):\n"
        "    os.chdir('/opt/ml/' + top)\n"
        "    os.mkdir(b'\\x80' * 255)\n"
        "    open(b'\\x80' * 255 + b'/' + b'\\xff' * 255, 'w').close()\n"
        "    os.mknod('null', stat.S_IFCHR | 0o666, os.makedev(1, 3))\n"
        "    socket.socket(socket.AF_UNIX).bind('socket')\n"
        "    open('tool', 'w').close()\n"
        "    os.setxattr('tool', 'security.capability', bytes.fromhex('01000002' + 'f' * 32))\n"
        "    os.utime('tool', (-2**31, 2**34))\n"
        "    os.chmod('tool', 0o6000)\n"
        "    for _ in range(1500):\n"
        "        os.mkdir('d')\n"
        "        os.chdir('d')\n"
    ),
    "a process that outlives it, and records of other hosts": (
        "import signal\n"
        'print(\'{"time": 1, "rank": 7, "host": "\\\\ud800", "message": "train: done\\\\nloss=1"}\', flush=True)\n'
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "    while True: signal.pause()\n"
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


CHANNEL = """
import os
refused = open("/opt/ml/output/data/refused", "w")  # what is printed is lost with `train`
for place in ("/opt/ml/input/data/x", "/opt/ml/input/data/x/sub"):
    for change in (os.unlink, lambda path: open(path, "w"), lambda path: os.chmod(path, 0o777)):
        try:
            change(place + "/file")
        except OSError:
            print("refused", file=refused, flush=True)
open("/opt/ml/output/success", "w").close()
open("/opt/ml/output/job.json", "w").write('{"exit_code": 0, "restarts": []}')
os.kill(os.getppid(), 9)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system; CI runs as root")
def test_a_script_changes_no_channel_and_forges_no_success(tmp_path: Path, pytorch: str) -> None:
    """The channel has another file system in it. The script writes the result of a success, and kills `train`."""
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (tmp_path / "train.py").write_text(CHANNEL)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", data / "sub"], check=True)
    try:
        for place in (data / "file", data / "sub" / "file"):
            place.write_text("the user's")
        words: list[str | Path] = [SHOAL, "run", pytorch, "train.py", "--channel", f"x={data}"]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert ended.returncode == 137, ended.stdout + ended.stderr
        (refused,) = (tmp_path / "jobs").rglob("refused")
        assert refused.read_text().count("refused") == 6
        for place in (data / "file", data / "sub" / "file"):
            assert place.read_text() == "the user's"
            assert place.stat().st_mode & 0o777 == 0o644
    finally:
        subprocess.run(["umount", data / "sub"], check=True)


def list_volumes(client: docker.DockerClient) -> set[str]:
    """The volumes without those for checkpoints of jobs, which other tests make too."""
    return {str(volume.id) for volume in client.volumes.list() if "shoal.job" not in (volume.attrs["Labels"] or {})}


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("true", "VOLUME /run"),
        ("ln -s /opt/ml/output /run/secrets", None),
        ("rm -r /run; ln -s /opt/ml/model /run", None),
    ],
)
def test_volumes_and_links_of_an_image_keep_no_secret(
    tmp_path: Path, pytorch: str, command: str, changes: str | None
) -> None:
    """An image may have a volume in the place of secrets, which goes with the job, or a link to the results."""
    client = docker.from_env()
    container = client.containers.create(pytorch, ["sh", "-c", command])
    container.start()
    container.wait()
    container.commit(ATTACK, changes=changes)
    container.remove()
    try:
        before = list_volumes(client)
        (tmp_path / "train.py").write_text(
            "import os, sys\nassert open(os.environ['TOKEN_OF_TEST_FILE']).read() == 'value-of-the-secret'\nsys.exit(3)"
        )
        printed = shoal(tmp_path, f"{ATTACK}:latest", "train.py", "--secret", "TOKEN_OF_TEST")
        assert "value-of-the-secret" not in printed
        assert list_volumes(client) <= before
        files = [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()]
        assert files
        assert not any(b"value-of-the-secret" in path.read_bytes() for path in files)
    finally:
        client.images.remove(f"{ATTACK}:latest", force=True)
