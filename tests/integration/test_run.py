"""`shoal run`: whole jobs in containers, and what is left behind (nothing but the job's directory)."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import docker
import docker.errors
import pytest

from shoal import docker_client
from shoal.docker_client import containers

from ..repeats import SEED, in_soak, times
from ..tested_images import PYTORCH_CPU, PYTORCH_CU117, TENSORFLOW_CPU
from .conftest import ROOT
from .test_build import is_interrupted

SHOAL = Path(sys.executable).with_name("shoal")


SCRIPT_OF_ARGUMENTS = """\
import os, pathlib, sys
limits = [pathlib.Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
limit = next(file.read_text().strip() for file in limits if file.exists())
print("got", *sys.argv[1:], os.environ.get("WORLD_SIZE"), "of", limit)
"""


def job_objects(client: docker.DockerClient, *stems: str) -> set[str]:
    """Every container, network and volume of a job whose name begins so; tests beside this one have others."""
    containers = client.api.containers(all=True, filters={"label": "shoal.job"})
    networks = client.api.networks(filters={"label": "shoal.job"})
    volumes = client.api.volumes(filters={"label": "shoal.job"})["Volumes"] or []
    found = [(each.get("Id") or each["Name"], each["Labels"]) for each in (*containers, *networks, *volumes)]
    return {identity for identity, labels in found if labels["shoal.job"].startswith(stems)}


def command(image: str, source: Path, output: Path, *options: str, script: str = "train.py") -> list[str | Path]:
    base: list[str | Path] = [SHOAL, "run", image, "--source", source, "--entry-point", script, "--output", output]
    return [*base, *options]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / f"code{secrets.token_hex(6)}"  # a job is named after it
    directory.mkdir()
    return directory


@pytest.mark.long
@pytest.mark.parametrize(
    ("image", "script", "model", "ranks"),
    [
        (PYTORCH_CU117, "train.py", "model.pt", 2),
        (TENSORFLOW_CPU, "train_tensorflow.py", "1/saved_model.pb", 1),
        (TENSORFLOW_CPU, "train_keras.py", "1/saved_model.pb", 1),
        (TENSORFLOW_CPU, "train_smp_tensorflow.py", "1/saved_model.pb", 2),
    ],
)
def test_the_digits_job_on_two_hosts(tmp_path: Path, image: str, script: str, model: str, ranks: int) -> None:
    channel = tmp_path / "channel"
    subprocess.run([sys.executable, ROOT / "examples" / "digits" / "prepare.py", channel], check=True)
    options = ["--hosts", "2", "--procs-per-host", str(ranks), "--channel", f"training={channel}"]
    arguments = command(image, ROOT / "examples" / "digits", tmp_path / "jobs", *options, script=script)
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (directory,) = (tmp_path / "jobs").iterdir()
    metrics = json.loads((directory / "algo-1" / "output" / "data" / "metrics.json").read_text())
    assert metrics["test_accuracy"] >= 0.96
    assert metrics["world_size"] == 2 * ranks
    with tarfile.open(directory / "model.tar.gz") as archive:
        assert model in archive.getnames()
    with tarfile.open(directory / "output.tar.gz") as archive:
        assert "metrics.json" in archive.getnames()
    texts = ("test accuracy", f"2 × {ranks}", "images/s", "launch (s)", "training (s)", str(directory / "model.tar.gz"))
    for words in texts:
        assert words in result.stdout
    assert "algo-1 | " in result.stdout
    assert result.stdout.splitlines()[-1] == f"report: {directory / 'report.html'}"
    assert "DeprecationWarning" not in result.stdout


def test_the_result_is_the_exit_code(client: docker.DockerClient, pytorch: str, source: Path, tmp_path: Path) -> None:
    (source / "train.py").write_text("import os, sys\nsys.exit(42 if os.environ['RANK'] == '1' else 0)\n")
    arguments = command(pytorch, source, tmp_path / "jobs", "--hosts", "2", "--procs-per-host", "1")
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 42, result.stdout + result.stderr
    (directory,) = (tmp_path / "jobs").iterdir()
    for host in ("algo-1", "algo-2"):
        assert (directory / host / "output" / "failure").exists()
        assert not (directory / host / "output" / "success").exists()
    assert job_objects(client, source.name) == set()


def test_distribution_and_hyperparameters_arrive(pytorch: str, source: Path, tmp_path: Path) -> None:
    (source / "train.py").write_text(SCRIPT_OF_ARGUMENTS)
    distribution = json.dumps({"mpi": {"enabled": True, "processes_per_host": 2}})
    options = ["--distribution", distribution, "--hyperparameter", "name=a b", "--hyperparameter", "lr=0.10"]
    options += ["--memory", "1g"]
    # Development mode prints what newer Pythons always print, such as errors of connections that nobody has closed.
    arguments = [sys.executable, "-X", "dev", *command(pytorch, source, tmp_path / "jobs", *options)]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert result.stdout.count(f"got --lr 0.1 --name a b 2 of {1 << 30}") == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), in_soak(signal.SIGTERM, 143)])
def test_an_interrupt_removes_hosts_and_network(
    client: docker.DockerClient, pytorch: str, source: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (source / "train.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n    pathlib.Path(os.environ['SM_MODEL_DIR'], 'saved').write_text('x')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('started', flush=True)\ntime.sleep(600)\n"
    )
    arguments = command(pytorch, source, tmp_path / "jobs", "--hosts", "2", "--procs-per-host", "1")
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started_ranks = (line for line in process.stdout if "started" in line)
    assert len(list(itertools.islice(started_ranks, 2))) == 2
    started = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert job_objects(client, source.name) == set()
    assert time.monotonic() - started < 40
    (directory,) = (tmp_path / "jobs").iterdir()
    assert (directory / "algo-1" / "model" / "saved").exists()
    assert "was stopped" in (directory / "algo-1" / "output" / "failure").read_text()


@pytest.mark.soak
def test_an_interrupt_at_any_moment_leaves_nothing(
    client: docker.DockerClient, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "train.py").write_text(
        "import os, pathlib\ncheckpoints, host = pathlib.Path('/opt/ml/checkpoints'), os.environ['SM_CURRENT_HOST']\n"
        "new = checkpoints / 'new' / host\nnew.mkdir(parents=True)\n(new / 'model').write_text('1' * 4096)\n"
        "new.rename(checkpoints / host)\nprint('trained', host)"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    image = PYTORCH_CPU
    options = ["--hosts", "2", "--procs-per-host", "1", "--checkpoints", str(tmp_path / "first")]
    arguments = command(image, source, tmp_path / "jobs", *options)
    started = time.monotonic()
    subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True)
    seconds = time.monotonic() - started
    drawn = random.Random(SEED)
    for number, share in enumerate(drawn.random() for _ in range(times(1, 20))):
        directory = tmp_path / "checkpoints" / str(number)
        directory.mkdir(parents=True)
        (directory / "old").write_text("old")
        arguments[-2:] = ["--checkpoints", directory]
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(share * seconds)
        process.send_signal(signal.SIGINT)
        output, stderr = process.communicate(timeout=60)
        # An interrupt after the job's end may come too late.
        assert is_interrupted(process.returncode, stderr) or "trained" in output, stderr
        assert job_objects(client, source.name) == set(), f"moment {share:.2f}"
        assert list(temporary.iterdir()) == [], f"moment {share:.2f}"
        assert [path for path in directory.parent.iterdir() if path.name.startswith(".")] == [], f"moment {share:.2f}"
        assert (directory / "old").read_text() == "old"
        for host in re.findall(r"trained (\S+)", output):
            assert (directory / host / "model").read_text() == "1" * 4096, f"moment {share:.2f}"


def test_a_job_that_cannot_be_set_up_leaves_nothing(
    client: docker.DockerClient, pytorch: str, source: Path, tmp_path: Path
) -> None:
    (source / "train.py").write_text("")
    (source / "dangling").symlink_to("/nowhere")
    arguments = command(pytorch, source, tmp_path / "jobs", "--hosts", "2")
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "dangling" in result.stderr
    (source / "dangling").unlink()
    arguments = command(pytorch, source, tmp_path / "jobs", "--env", "PATH=/nowhere")
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--env PATH=/nowhere" in result.stderr
    assert "Traceback" not in result.stderr
    assert job_objects(client, source.name) == set()


HOSTILE = r"""
import os, pathlib
ml = pathlib.Path("/opt/ml")
(ml / "model/weights").write_text("w")
os.link(ml / "model/weights", ml / "model/same")
os.mkfifo(ml / "model/pipe")
(ml / "model/latest").symlink_to("weights")
(ml / "model/elsewhere").symlink_to("/etc/passwd")
os.mkfifo(ml / "output/data/pipe")
with (ml / "model/hole").open("wb") as file:
    file.truncate(300 << 20)
pathlib.Path("/opt/ml/code/lost\x1b]52;c;eA==\x07\nexit code  7").touch()
(ml / "output/data/metrics.json").write_text(r'{"test_accuracy": "\ud800\u001b[2J\nexit code  8"}')
(ml / "checkpoints/sibling").symlink_to("../checkpoints/secret")
with (ml / "checkpoints/huge").open("wb") as file:
    file.truncate(1 << 43 if os.environ.get("HUGE") else 1)
print("\x1b]52;c;eA==\x07\rshoal | exit code  9")
"""


@pytest.mark.parametrize("is_huge", [False, True])
def test_a_success_stays_one_whatever_the_script_leaves(
    client: docker.DockerClient, pytorch: str, source: Path, tmp_path: Path, is_huge: bool
) -> None:
    """Checkpoints that do not fit on the disk stay in their volume, and --resume continues from them."""
    (source / "train.py").write_text(HOSTILE)
    options = ("--checkpoints", str(tmp_path / "mine"), *(["--env", "HUGE=1"] if is_huge else []))
    result = subprocess.run(
        [*command(pytorch, source, tmp_path / "jobs"), *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (directory,) = (tmp_path / "jobs").iterdir()
    with tarfile.open(directory / "model.tar.gz") as archive:
        assert archive.getnames() == ["hole", "latest", "same", "weights"]
    assert "not collected: model/elsewhere" in result.stdout
    assert (directory / "algo-1/model/hole").stat().st_blocks < 1000
    assert not re.search(r"^exit code +[789]", result.stdout, re.MULTILINE)
    left = job_objects(client, source.name)
    if is_huge:
        assert "the checkpoints were not collected: checkpoints/huge: it has 8,796,093,022,208 bytes" in result.stdout
        assert len(left) == 1
        (source / "train.py").write_text("import pathlib; pathlib.Path('/opt/ml/checkpoints/huge').unlink()")
        again: list[str | Path] = [SHOAL, "run", "--resume", directory.name, "--output", directory.parent]
        resumed = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, check=False)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert job_objects(client, source.name) == set()
    else:
        assert left == set()
        assert "not collected: checkpoints/sibling" in result.stdout
        assert [path.name for path in (tmp_path / "mine").iterdir() if path.name != ".shoal-job.json"] == ["huge"]


def test_the_secret_is_in_no_log(source: Path, tmp_path: Path) -> None:
    """A script that prints all that it was given does not print it, nor does what is collected have it."""
    (source / "train.py").write_text(
        "import os, pathlib, sys\nprint(sys.argv, dict(os.environ), flush=True)\n"
        "print('hosts', os.environ['SM_HOSTS'], len(pathlib.Path('/run/shoal-job-secret').read_text()))\n"
    )
    options = ["--hosts", "2", "--procs-per-host", "1", "--env", "SHOAL_JOB_SECRET=planted-secret-17"]
    image = PYTORCH_CPU
    result = subprocess.run(
        command(image, source, tmp_path / "jobs", *options), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        result.stdout.count('hosts ["algo-1","algo-2"] 17') + result.stdout.count('hosts ["algo-1", "algo-2"] 17') == 2
    )
    assert "no secret" not in result.stdout
    assert "planted" not in result.stdout + result.stderr
    for path in (path for path in (tmp_path / "jobs").rglob("*") if path.is_file()):
        assert b"planted" not in path.read_bytes(), path


def test_secrets_are_files_and_variables_that_docker_does_not_show(
    client: docker.DockerClient, source: Path, tmp_path: Path
) -> None:
    """A file of mode 0400, and a variable if asked. Neither inspect nor what stays has them."""
    (source / "train.py").write_text(
        "import os, pathlib, time\n"
        "for name in ('HF_TOKEN', 'KEY'):\n"
        "    file = pathlib.Path('/run/secrets', name)\n"
        "    assert os.environ[name + '_FILE'] == str(file) and file.stat().st_mode & 0o7777 == 0o400, name\n"
        "    assert file.parent.stat().st_mode & 0o022 == 0\n"
        "assert pathlib.Path('/run/secrets/KEY').read_text() == 'planted' + '-in-a-file\\n'\n"
        "assert os.environ['HF_TOKEN'] == 'planted' + '-variable' and 'KEY' not in os.environ\n"
        "print('secrets are there', os.environ['TAKEN'], flush=True)\n"
        "time.sleep(5)\n"
    )
    (tmp_path / "key").write_text("planted-in-a-file\n")
    options = ["--secret", "HF_TOKEN,type=env", "--secret", f"KEY={tmp_path / 'key'}", "-e", "TAKEN", "--hosts", "2"]
    image = PYTORCH_CPU
    words = command(image, source, tmp_path / "jobs", *options)
    env = {**os.environ, "HF_TOKEN": "planted-variable", "TAKEN": "taken"}
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "secrets are there taken" in line:
                hosts = client.containers.list(filters={"label": "shoal.job", "name": source.name})
                shown = [client.api.inspect_container(str(each.id)) for each in hosts]
                assert shown
                assert "planted" not in json.dumps(shown)
    assert process.returncode == 0, "".join(lines)
    assert sum("secrets are there taken" in line for line in lines) == 2
    for path in (path for path in (tmp_path / "jobs").rglob("*") if path.is_file()):
        assert b"planted" not in path.read_bytes(), path
        assert path.name != "request.json" or b'"taken": "taken"' not in path.read_bytes()


def test_links_stay_links_in_a_container_and_secrets_stay_here(pytorch: str, source: Path, tmp_path: Path) -> None:
    (source / "train.py").write_text(
        "import os\nprint('has', os.readlink('latest'), open('latest').read(), os.path.exists('.env'), flush=True)\n"
    )
    (source / "data.txt").write_text("data")
    (source / "latest").symlink_to("data.txt")
    (source / ".env").write_text("KEY=x")
    words = command(pytorch, source, tmp_path / "jobs")
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "has data.txt data False" in result.stdout, result.stdout + result.stderr
    assert "left out of the job, as they may hold secrets: .env. To include one: --include .env" in result.stderr
    (source / "passwords").symlink_to("/etc/shadow")
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "passwords: a link to /etc/shadow, outside the source. Fix: " in result.stderr


def test_the_user_of_an_image_trains_on_two_hosts_and_resumes(
    client: docker.DockerClient, source: Path, tmp_path: Path
) -> None:
    """It can write all directories of the job and its home, and finds its checkpoints of an earlier run."""
    (source / "train.py").write_text(
        "import getpass, os, pathlib, sys, time\n"
        "(pathlib.Path.home() / 'cache').write_text('')\n"
        "file = pathlib.Path('/opt/ml/checkpoints', os.environ['RANK'])\n"
        "for name in ('SM_MODEL_DIR', 'SM_OUTPUT_DATA_DIR'): pathlib.Path(os.environ[name], file.name).write_text('')\n"
        "run = 2 if file.exists() else 1\n"
        "print('as', getpass.getuser(), os.getgid(), 'run', run, flush=True)\n"
        "file.write_text(str(run))\n"
        "while len(list(file.parent.iterdir())) < 4: time.sleep(0.05)\n"
        "sys.exit(0 if run == 2 else 3)\n"
    )
    image = f"{source.name}:1"
    lines = [f"FROM {PYTORCH_CPU}", "RUN useradd -m trainer", "USER trainer:users"]
    client.images.build(fileobj=io.BytesIO("\n".join(lines).encode()), tag=image, rm=True)
    try:
        output = tmp_path / "jobs"
        first = command(image, source, output, "--hosts", "2", "--procs-per-host", "2", "--name", source.name)
        again: list[str | Path] = [SHOAL, "run", "--resume", source.name, "--output", output]
        for words, code, run in ((first, 3, 1), (again, 0, 2)):
            result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
            assert result.returncode == code, result.stdout + result.stderr
            assert result.stdout.count(f"as trainer 100 run {run}") == 4
        with tarfile.open(output / source.name / "model.tar.gz") as packed:
            assert len(packed.getnames()) == 4
    finally:
        client.images.remove(image)


@pytest.mark.parametrize("more", [(), in_soak(("--distribution", '{"torch_distributed": {"enabled": true}}'))])
def test_a_model_in_another_place_is_reported_and_hosts_share_the_cores(
    client: docker.DockerClient, pytorch: str, source: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    (source / "train.py").write_text(
        "import os, pathlib\npathlib.Path('out').mkdir()\npathlib.Path('out/model.pt').write_text('x')\n"
        "import helper\nprint('threads', os.environ['OMP_NUM_THREADS'])"
    )
    (source / "helper.py").write_text("")
    ended = subprocess.run(
        command(pytorch, source, tmp_path / "jobs", "--hosts", "2", *more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "(/opt/ml/model). Lost: out/model.pt. Fix: save them in the directory $SM_MODEL_DIR" in ended.stdout
    assert f"threads {max(1, client.info()['NCPU'] // 2)}" in ended.stdout


def test_a_missing_image_is_reported(client: docker.DockerClient, source: Path, tmp_path: Path) -> None:
    (source / "train.py").write_text("")
    result = subprocess.run(
        command("nowhere:1", source, tmp_path / "jobs"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 9
    assert "Docker has no image nowhere:1" in result.stderr
    assert job_objects(client, source.name) == set()


def test_a_container_of_others_on_the_jobs_network_does_not_keep_it(client: docker.DockerClient, pytorch: str) -> None:
    name = containers.unique_name("shoal-attached")
    with containers.remove_at_end(client, name):
        network = client.networks.create(name, labels={containers.JOB_LABEL: name})
        stranger = client.containers.run(pytorch, ["sleep", "60"], detach=True, network=name)
    try:
        stranger.reload()
        assert stranger.status == "running"
        with pytest.raises(docker.errors.NotFound):
            network.reload()
    finally:
        stranger.remove(force=True)


def test_an_interrupt_while_files_are_copied_does_not_wait_for_docker(pytorch: str) -> None:
    """Docker locks a container while an archive of it is read: its removal waited until the connection timed out."""

    client = docker_client.connect(timeout=20)
    name = containers.unique_name("shoal-read")
    with pytest.raises(KeyboardInterrupt), containers.remove_at_end(client, name):
        container = containers.create_container(client, pytorch, ["true"], {"labels": {containers.JOB_LABEL: name}})
        with containers.read_archive(container, "/opt/venv/lib") as file:
            assert file.read(1)
            raise KeyboardInterrupt
    assert client.containers.list(all=True, filters={"label": f"{containers.JOB_LABEL}={name}"}) == []
