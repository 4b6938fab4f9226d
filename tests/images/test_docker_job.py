"""`shoal run`: the settings of a job's containers, with a fake of Docker."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
from rich.console import Console

from shoal.jobs import docker_job, local_job
from shoal.jobs.job import SECRET, SECRET_FILE, JobRequest


class FakeEngine:
    """Remembers the settings of containers and networks, and the files that containers are given; has no network."""

    def __init__(self) -> None:
        self.api = SimpleNamespace(create_endpoint_config=lambda aliases: {"Aliases": aliases})
        self.networks = SimpleNamespace(get=self._no_network, create=self._network)
        self.containers = SimpleNamespace(create=self._create)
        self.made: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.options: list[dict[str, str]] = []

    def info(self) -> dict[str, Any]:
        return {"Runtimes": {"runc": {}}}

    def _no_network(self, name: str) -> None:
        raise docker.errors.NotFound(f"network {name} not found")

    def _network(self, name: str, options: dict[str, str], **_: object) -> SimpleNamespace:
        self.options.append(options)
        return SimpleNamespace(name=name)

    def _create(self, image: str, command: list[str], **settings: Any) -> SimpleNamespace:
        files = self.files[settings["name"]] = {}
        self.made[settings["name"]] = settings

        def put_archive(_: str, content: Any) -> None:
            stream = io.BytesIO(content if isinstance(content, bytes) else content.read())
            with tarfile.open(fileobj=stream) as packed:
                files.update({entry.name: file.read() for entry in packed if (file := packed.extractfile(entry))})

        return SimpleNamespace(put_archive=put_archive)


@pytest.fixture
def request_(tmp_path: Path) -> JobRequest:
    (tmp_path / "train.py").touch()
    return JobRequest(source=tmp_path, entry_point="train.py", hosts=2, output=tmp_path / "jobs")


def create(request: JobRequest) -> FakeEngine:
    client = FakeEngine()
    docker_job._create_hosts(client, "image:1", request, "job", Console(file=io.StringIO()))  # type: ignore[arg-type]
    return client


def test_docker_without_a_default_network_runs_jobs(request_: JobRequest) -> None:
    assert create(request_).options == [{}]


def test_hosts_share_a_secret_that_settings_do_not_show(request_: JobRequest) -> None:
    first, second = create(request_), create(request_)
    secrets = [files[docker_job.SECRET_PATH] for client in (first, second) for files in client.files.values()]
    assert len(secrets) == 4
    assert (len(set(secrets[:2])), len(set(secrets))) == (1, 2), "one for each job"
    assert len(bytes.fromhex(secrets[0].decode())) == 32
    shown = json.dumps(list(first.made.values()), default=str)
    assert secrets[0].decode() not in shown
    assert f'"{SECRET_FILE}": "/{docker_job.SECRET_PATH}"' in shown


def test_secret_of_the_user_is_used(request_: JobRequest) -> None:
    client = create(JobRequest(**{**vars(request_), "environment": {SECRET: "given", "A": "b"}}))
    assert {files[docker_job.SECRET_PATH] for files in client.files.values()} == {b"given"}
    assert all(SECRET not in settings["environment"] for settings in client.made.values())
    assert all(settings["environment"]["A"] == "b" for settings in client.made.values())


def test_secret_file_of_the_user_is_used(request_: JobRequest) -> None:
    client = create(JobRequest(**{**vars(request_), "environment": {SECRET_FILE: "/mounted"}}))
    assert all(docker_job.SECRET_PATH not in files for files in client.files.values())
    assert {settings["environment"][SECRET_FILE] for settings in client.made.values()} == {"/mounted"}


def test_local_job_has_a_secret(request_: JobRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def train(_: str, environment: dict[str, str], __: Console) -> int:
        given.append(environment)
        return 0

    monkeypatch.setattr(local_job, "_run_train", train)
    for name in (SECRET, SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        local_job.run_job_locally(request_, Console(file=io.StringIO()))
    assert len({environment[SECRET] for environment in given}) == 2
    monkeypatch.setenv(SECRET_FILE, "/mounted")
    local_job.run_job_locally(request_, Console(file=io.StringIO()))
    assert (given[-1].get(SECRET), given[-1][SECRET_FILE]) == (None, "/mounted"), "`train` refuses both"
