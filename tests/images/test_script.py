"""The script of `shoal run`: its source directory and entry point, aliases of options, and arguments after `--`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal import docker_client
from shoal.commands import (
    job_run,
    jobs,  # noqa: F401  # adds the command `run`
    run_options,
)
from shoal.commands.common import app
from shoal.commands.script import split_script
from shoal.errors import UsageError
from shoal.jobs.hosts import docker as docker_hosts
from shoal.jobs.job import FinishedJob, JobRequest
from shoal.jobs.store import JobRecord, OpenJob
from shoal.jobs.view import PlainView
from shoal.jobs.volumes import Volume

from .test_docker_job import FakeEngine


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code" / "deep").mkdir(parents=True)
    (tmp_path / "code" / "train.py").touch()
    (tmp_path / "code" / "deep" / "run.sh").touch()
    (tmp_path / "code" / "link.py").symlink_to("/etc/hostname")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*words: str) -> JobRecord:
    """Return the job that a command line describes."""
    found: list[JobRecord] = []

    def stop(options: run_options.RunOptions) -> JobRecord:
        found.append(original(options))
        raise InterruptedError

    original = run_options.RunOptions.to_record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_options.RunOptions, "to_record", stop)
        result = CliRunner().invoke(app, ["run", *words])
    if not found:
        raise result.exception or AssertionError(result.output)
    return found[0]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["code/train.py"], {"source": Path("code"), "entry_point": "train.py"}),
        (["code/deep/run.sh"], {"source": Path("code/deep"), "entry_point": "run.sh"}),
        (["code/deep/run.sh", "--source", "code"], {"source": Path("code"), "entry_point": "deep/run.sh"}),
        (["code/link.py", "--source", "code"], {"source": Path("code"), "entry_point": "link.py"}),
        (
            ["--source", "code", "--entry-point", "train.py", "--", "-v", "--"],
            {"source": Path("code"), "entry_point": "train.py", "arguments": ("-v", "--")},
        ),
        (["code/train.py", "--", "--hosts", "3", "x"], {"hosts": 1, "arguments": ("--hosts", "3", "x")}),
        (["code/train.py", "--nnodes", "2", "--nproc-per-node", "4"], {"hosts": 2, "procs_per_host": 4}),
        (["code/train.py", "--nnodes", "2:4", "--max-restarts", "1"], {"hosts": 4, "min_hosts": 2}),
        (["code/train.py", "-e", "A=b=c"], {"environment": {"A": "b=c"}}),
        (
            ["code/train.py", "-v", "code:/code:ro", "--volume", "code/train.py:/x.py", "--cpus", "1.5"],
            {
                "volumes": (Volume(Path("code"), "/code", True), Volume(Path("code/train.py"), "/x.py")),
                "cpus": 1.5,
            },
        ),
    ],
)
def test_command_line_describes_the_job(here: Path, words: list[str], fields: dict[str, Any]) -> None:
    record = read("any:1", *words)
    assert (record.request.image, record.request.engine) == ("any:1", "docker")
    assert {name: getattr(record.request, name) for name in fields} == fields


def test_local_means_no_docker(here: Path) -> None:
    assert read("any:1", "code/train.py", "--local").request.engine == "none"


def test_arguments_given_again_replace_the_earlier_ones(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = JobRecord(JobRequest(Path("code"), "train.py", ("--epochs", "3"), image="any:1"))
    monkeypatch.setattr(run_options, "read_record", lambda *_: earlier)
    assert read("--resume", "job").request == earlier.request
    assert read("--resume", "job", "--", "-v").request.arguments == ("-v",)


@pytest.mark.parametrize(
    ("config", "options", "has_script"),
    [
        ({"Env": ["PATH=/bin", "SAGEMAKER_PROGRAM=train.py"]}, [], True),
        ({"Env": None, "Entrypoint": ["python", "/train.py"]}, [], True),
        ({"Env": ["PATH=/bin"], "Cmd": ["train"]}, ["-e", "SAGEMAKER_PROGRAM=train.py"], True),
        ({"Env": ["PATH=/bin"], "Cmd": ["train"]}, [], False),
    ],
)
def test_image_may_name_the_script(
    here: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], options: list[str], has_script: bool
) -> None:
    """It then keeps its code, and its variables."""
    engine = SimpleNamespace(images=SimpleNamespace(get=lambda _: SimpleNamespace(attrs={"Config": config})))
    monkeypatch.setattr(docker_client, "connect", lambda: engine)
    found: list[OpenJob] = []

    def run(opened: OpenJob, *_: object) -> FinishedJob:
        found.append(opened)
        return FinishedJob(opened.name, 0, opened.directory, {}, {}, {}, {})

    monkeypatch.setattr(job_run, "run_job_in_docker", run)
    result = CliRunner().invoke(app, ["run", "me/mine:1", *options, "--", "-v"])
    if not has_script:
        assert "SCRIPT: missing, and the image me/mine:1 names none. Fix: shoal run" in str(result.exception)
        assert "or in the image's Dockerfile, ENV SAGEMAKER_PROGRAM=train.py" in str(result.exception)
        return
    assert result.exit_code == 0, result.output
    (opened,) = found
    assert opened.name.startswith("mine-20")
    assert opened.record.request.train_command == ["train", "--", "-v"]
    client = FakeEngine()
    with docker_hosts.create_hosts(client, opened.record.request, "job", PlainView(Console())):  # type: ignore[arg-type]
        variables = client.made["job-algo-1"]["environment"]
    assert not any(name.startswith("opt/ml/code") for name in client.files["job-algo-1"])
    assert "SAGEMAKER_SUBMIT_DIRECTORY" not in variables
    assert variables.get("SAGEMAKER_PROGRAM") == ("train.py" if options else None)
    sent = json.loads(client.files["job-algo-1"]["opt/ml/input/config/hyperparameters.json"])
    assert not {"sagemaker_program", "sagemaker_submit_directory"} & sent.keys()


@pytest.mark.parametrize(
    ("script", "source", "entry_point", "words"),
    [
        ("code/train.py", None, "other.py", "code/train.py and --entry-point other.py: both name a script"),
        ("code/train.py", "code/deep", None, "code/train.py: not in --source code/deep. Fix: leave out --source"),
        ("code", None, None, "code: a directory. Fix: use the path of a script, such as code/train.py"),
        ("code/trian.py", None, None, "Did you mean 'train.py'"),
        ("none/train.py", None, None, "none/train.py: no such script. Fix: "),
    ],
)
def test_wrong_script_is_refused(
    here: Path, script: str, source: str | None, entry_point: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        split_script(Path(script), source and Path(source), entry_point)  # type: ignore[arg-type]
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("code", "expected PATH:TARGET"),
        ("code:data", "expected PATH:TARGET"),
        ("code:/data:rx", "expected PATH:TARGET"),
        ("none:/data", "no such file or directory: none"),
        ("code:/opt/ml/code", "the job has its own /opt/ml/code. Fix: mount it elsewhere, or use --channel NAME=code"),
        ("code:/opt/ml/output/data", "the job has its own /opt/ml/output"),
        ("code:/opt/ml", "the job has its own /opt/ml"),
        ("code:/opt", "the job has its own /opt/ml"),
        ("code:/a/../opt/ml", "the job has its own /opt/ml"),
    ],
)
def test_wrong_volume_is_refused(here: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        Volume.parse(text).check()
    assert str(refused.value).startswith(f"--volume {text}: ")
    assert words in str(refused.value)


def test_a_volume_beside_the_directories_of_the_job(here: Path) -> None:
    """Many published scripts have their data in `../data`."""
    Volume.parse("code:/opt/ml/data").check()
