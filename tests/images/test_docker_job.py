"""`shoal run`: the settings of a job's containers, with a fake of Docker."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import docker.errors
import pytest
from rich.console import Console
from tests.fake_docker import checked

from shoal.docker_client import archive, images
from shoal.errors import ImageError, UsageError
from shoal.jobs.hosts import docker as docker_hosts
from shoal.jobs.hosts import local
from shoal.jobs.hosts.docker import DockerHosts
from shoal.jobs.hosts.docker_objects import SECRET_PATH
from shoal.jobs.hosts.local import LocalHosts
from shoal.jobs.hosts.waiting import WaitingHosts, start_waiting
from shoal.jobs.job import LOCAL, SECRET, SECRET_FILE, FinishedJob, JobRequest
from shoal.jobs.run import HostExit
from shoal.jobs.store import JobRecord, open_job
from shoal.jobs.variables import Secret
from shoal.jobs.view import PlainView
from shoal.jobs.volumes import Volume

IMAGE_FILES = {
    "/etc/passwd": "root:x:0:0::/root:/bin/sh\nodd line\ntrainer:x:1000:1001::/home/trainer:/bin/sh\n",
    "/etc/group": "root:x:0:\ntrainer:x:1001:\nusers:x:100:trainer\n",
}


class FakeEngine:
    """Remembers the settings of containers and networks, and the files that containers are given; has no network."""

    volumes = SimpleNamespace(create=lambda name, labels: None)

    def __init__(self, user: str = "") -> None:
        self.images = SimpleNamespace(
            get=lambda _: SimpleNamespace(id="1", labels={}, attrs={"Config": {"User": user}})
        )
        self.modes: dict[str, tuple[int, int, int]] = {}
        self.api = SimpleNamespace(
            create_endpoint_config=lambda aliases: {"Aliases": aliases},
            get=self._read,
            base_url="http://docker",
            api_version="1",
            timeout=1,
        )
        self.networks = SimpleNamespace(get=self._no_network, create=checked("networks.create", self._network))
        self.containers = SimpleNamespace(create=checked("containers.create", self._create))
        self.made: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.options: list[dict[str, str]] = []
        self.removed: list[str] = []
        self.started: list[str] = []
        self.archives: dict[str, bytes] = {}

    def info(self) -> dict[str, Any]:
        return {"Runtimes": {"runc": {}}, "NCPU": 4}

    def _no_network(self, name: str) -> None:
        raise docker.errors.NotFound(f"network {name} not found")

    def _network(self, name: str, driver: str, options: dict[str, str], labels: dict[str, str]) -> SimpleNamespace:
        self.options.append(options)
        return SimpleNamespace(name=name)

    def _read(self, _: str, params: dict[str, str], **_options: Any) -> SimpleNamespace:
        """Answers with an archive of a file of the image."""
        packed = io.BytesIO(
            self.archives.get(params["path"]) or archive.pack_file("file", IMAGE_FILES[params["path"]].encode())
        )
        return SimpleNamespace(raw=packed, raise_for_status=lambda: None, close=lambda: None)

    def _create(self, image: str, command: list[str], **settings: Any) -> SimpleNamespace:
        if "name" not in settings:  # nothing is copied to it, and it does not start
            remove = checked("container.remove", lambda **_: self.removed.append("reader"))
            return SimpleNamespace(id="1", remove=remove, client=self)
        assert settings["name"] not in {*self.made} - {*self.removed}, "Conflict"
        files = self.files[settings["name"]] = {}
        self.made[settings["name"]] = {"command": command, **settings}

        def put_archive(_: str, content: Any) -> None:
            stream = io.BytesIO(content if isinstance(content, bytes) else content.read())
            with tarfile.open(fileobj=stream) as packed:
                for entry in packed:
                    self.modes[entry.name] = (entry.mode, entry.uid, entry.gid)
                    if file := packed.extractfile(entry) if entry.isfile() else None:
                        files[entry.name] = file.read()

        return SimpleNamespace(
            put_archive=put_archive,
            start=lambda: self.started.append(settings["name"]),
            reload=lambda: None,
            status="running",
            remove=checked("container.remove", lambda **_: self.removed.append(settings["name"])),
            id=settings["name"],
            client=self,
            attrs={"Created": "2026-01-31T10:15:00.123456789Z"},
        )


@pytest.fixture
def request_(tmp_path: Path) -> JobRequest:
    (tmp_path / "train.py").touch()
    return JobRequest(tmp_path, "train.py", image="image:1", hosts=2, output=tmp_path / "jobs")


def create(request: JobRequest, user: str = "") -> FakeEngine:
    client = FakeEngine(user)
    with create_hosts(client, request):
        return client


def create_hosts(client: FakeEngine, request: JobRequest) -> contextlib.AbstractContextManager[DockerHosts]:
    view = PlainView(Console(file=io.StringIO()))
    return docker_hosts.create_hosts(client, request, "job", view)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "command"), [((), ["train"]), (("--explain", "", "a b"), ["train", "--", "--explain", "", "a b"])]
)
def test_every_host_passes_the_arguments_on(
    request_: JobRequest, arguments: tuple[str, ...], command: list[str]
) -> None:
    made = create(JobRequest(**{**vars(request_), "arguments": arguments})).made
    assert [made[f"job-algo-{number}"]["command"] for number in (1, 2)] == [command] * 2


def test_every_host_has_the_volumes_and_limits(request_: JobRequest, tmp_path: Path) -> None:
    volumes = (Volume(tmp_path, "/data", read_only=True), Volume(tmp_path / "train.py", "/more.py"))
    made = create(JobRequest(**{**vars(request_), "volumes": volumes, "cpus": 0.5})).made
    for number in (1, 2):
        settings = made[f"job-algo-{number}"]
        mounts = {mount["Target"]: (mount["Source"], mount["ReadOnly"]) for mount in settings["mounts"]}
        assert mounts["/data"] == (str(tmp_path.resolve()), True)
        assert mounts["/more.py"] == (str((tmp_path / "train.py").resolve()), False)
        assert settings["nano_cpus"] == 500_000_000
    assert create(request_).made["job-algo-1"]["nano_cpus"] is None


def test_docker_without_a_default_network_runs_jobs(request_: JobRequest) -> None:
    assert create(request_).options == [{}]


def test_hosts_share_a_secret_that_settings_do_not_show(request_: JobRequest) -> None:
    first, second = create(request_), create(request_)
    secrets = [files[SECRET_PATH] for client in (first, second) for files in client.files.values()]
    assert len(secrets) == 4
    assert (len(set(secrets[:2])), len(set(secrets))) == (1, 2), "one for each job"
    assert len(bytes.fromhex(secrets[0].decode())) == 32
    shown = json.dumps(list(first.made.values()), default=str)
    assert secrets[0].decode() not in shown
    assert f'"{SECRET_FILE}": "/{SECRET_PATH}"' in shown


def test_secrets_are_files_of_the_containers_user_only(
    request_: JobRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    (tmp_path / "key").write_bytes(b"\0from a file\n")
    given = (Secret("HF_TOKEN", is_variable=True), Secret("KEY", tmp_path / "key"))
    engine = create(replace(request_, secrets=given), user="1000:100")
    for files in engine.files.values():
        assert files["run/secrets/HF_TOKEN"] == b"from-the-environment"
        assert files["run/secrets/KEY"] == b"\0from a file\n"
    assert {engine.modes[f"run/secrets/{name}"] for name in ("HF_TOKEN", "KEY")} == {(0o400, 1000, 100)}
    assert engine.modes[SECRET_PATH] == (0o400, 1000, 100), "the job's own secret too"
    environment = engine.made["job-algo-1"]["environment"]
    assert environment["KEY_FILE"] == "/run/secrets/KEY"
    assert environment["SHOAL_SECRET_VARIABLES"] == "HF_TOKEN"
    assert "from" not in str({name: str(settings) for name, settings in engine.made.items()}), "docker inspect shows it"


def test_files_belong_to_the_user_of_the_image(request_: JobRequest) -> None:
    """Its directories too: otherwise `train` could write no result."""
    engine = create(request_, user="trainer")
    owners = {name: owner for name, (_, *owner) in engine.modes.items()}
    assert owners.pop("run") == [0, 0], "as in the image"
    assert owners == {name: [1000, 1001] for name in owners}
    assert {"opt/ml/model", "opt/ml/output/data", "opt/ml/code/train.py", "opt/ml/input/config"} <= set(owners)
    assert engine.removed == ["reader"]
    assert {tuple(owner) for _, *owner in create(request_).modes.values()} == {(0, 0)}


@pytest.mark.parametrize(
    ("user", "owner"),
    [
        ("trainer", (1000, 1001)),
        ("1000", (1000, 1001)),
        ("12345", (12345, 0)),
        ("trainer:users", (1000, 100)),
        ("12345:users", (12345, 100)),
        ("1000:7", (1000, 7)),
        ("root:users", (0, 100)),
        ("nobody-here", (0, 0)),
        ("trainer:no-group", (0, 0)),
        ("nobody:\x1b", (0, 0)),
        ("99999999999", (0, 0)),
        ("²", (0, 0)),
        (":users", (0, 100)),
    ],
)
def test_the_user_of_an_image_is_found_as_docker_finds_it(user: str, owner: tuple[int, int]) -> None:
    lines = {path: text.split("\n") for path, text in IMAGE_FILES.items()}
    assert images.resolve_user(user, lines["/etc/passwd"], lines["/etc/group"]) == owner


TORCHRUN = {"torch_distributed": {"enabled": True}}


@pytest.mark.parametrize(
    ("options", "written", "exit_code", "code"),
    [
        ({}, "", 0, 0),
        ({"hosts": 2}, "", 0, 0),
        ({"procs_per_host": 2}, "", 0, 1),
        ({"distribution": TORCHRUN}, "", 0, 1),
        ({"distribution": {"multi_worker_mirrored_strategy": {"enabled": True}}}, "", 0, 1),
        ({"distribution": {"mpi": {"enabled": False}}}, "", 0, 0),
        ({"procs_per_host": 2}, "success", 0, None),
        ({"procs_per_host": 2}, "failure", 0, None),
        ({"procs_per_host": 2}, "job.json", 0, None),
        ({"procs_per_host": 2}, "", 3, None),
        ({"procs_per_host": 2}, "not collected", 0, None),
    ],
)
def test_a_job_in_which_train_never_ran(
    request_: JobRequest, tmp_path: Path, options: dict[str, Any], written: str, exit_code: int, code: int | None
) -> None:
    """It is an error if ranks were asked for, otherwise a note; none if `train` has written a file or may have."""
    client = FakeEngine()
    client.images.get = lambda _: SimpleNamespace(attrs={"Config": {"Entrypoint": ["python", "train.py"]}})
    trees = {name: tmp_path / name for name in ("algo-1", "algo-2")}
    for tree in trees.values():
        (tree / "output").mkdir(parents=True)
    if written == "not collected":
        (trees["algo-2"] / "output").rmdir()
    elif written:
        (trees["algo-2"] / "output" / written).touch()
    result = FinishedJob("j", exit_code, tmp_path, {}, {}, {}, {"algo-1": "metrics.json: odd"})
    request = replace(request_, **options)
    checked = docker_hosts.check_train(client, request, trees, result)  # type: ignore[arg-type]
    if code is None:
        assert checked == result
        return
    assert checked.exit_code == code
    assert checked.messages["algo-1"].startswith(
        "metrics.json: odd\nShoal's `train` never ran in image:1, which started its ENTRYPOINT"
        ' ["python", "train.py"]. '
    )
    assert ("ranks that you asked for did not start" in checked.messages["algo-1"]) == bool(code)


RUNC = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "


@pytest.mark.parametrize(
    ("explanation", "expected"),
    [
        ('exec: "train": executable file not found in $PATH: unknown', "image:1: no program `train` on its PATH"),
        ('exec: "train": permission denied: unknown', "image:1: no program `train` on its PATH"),
        (
            'exec: "/run.sh": permission denied: unknown',
            "image:1: its ENTRYPOINT /run.sh cannot be started: permission",
        ),
        (
            'exec: "/x": stat /x: no such file or directory',
            "its ENTRYPOINT /x cannot be started: stat /x: no such file",
        ),
        ('error mounting "/x" to rootfs at "/y": not a directory: unknown', ""),
    ],
)
def test_an_image_without_the_program_is_an_error_of_the_image(
    request_: JobRequest, explanation: str, expected: str
) -> None:
    refusal = docker.errors.APIError("400", explanation=RUNC + explanation)
    found = images.explain_start("image:1", refusal, {})
    if expected:
        assert isinstance(found, ImageError)
        assert expected in str(found)
    else:
        assert found is refusal


def test_a_path_of_the_user_without_the_program_is_an_error_of_the_option() -> None:
    refusal = docker.errors.APIError("400", explanation=RUNC + 'exec: "train": executable file not found in $PATH')
    found = images.explain_start("image:1", refusal, {"PATH": "/nowhere"})
    assert isinstance(found, UsageError)
    assert str(found).startswith("--env PATH=/nowhere: no program `train` there in image:1. Fix: leave it out")


def test_secret_of_the_user_is_used(request_: JobRequest) -> None:
    client = create(JobRequest(**{**vars(request_), "environment": {SECRET: "given", "A": "b"}}))
    assert {files[SECRET_PATH] for files in client.files.values()} == {b"given"}
    assert all(SECRET not in settings["environment"] for settings in client.made.values())
    assert all(settings["environment"]["A"] == "b" for settings in client.made.values())


def test_secret_file_of_the_user_is_used(request_: JobRequest) -> None:
    client = create(JobRequest(**{**vars(request_), "environment": {SECRET_FILE: "/mounted"}}))
    assert all(SECRET_PATH not in files for files in client.files.values())
    assert {settings["environment"][SECRET_FILE] for settings in client.made.values()} == {"/mounted"}


def test_host_that_is_made_again_is_the_same(request_: JobRequest) -> None:
    client = FakeEngine()
    with create_hosts(client, JobRequest(**{**vars(request_), "max_restarts": 2})) as hosts:
        before, files = dict(client.made), dict(client.files["job-algo-2"])
        hosts.create("algo-2", {"SHOAL_RESTART": "1"})
    assert client.removed == ["job-algo-2"]
    assert client.files["job-algo-2"] == files
    assert "opt/ml/code/train.py" in files
    again = client.made["job-algo-2"]
    assert again["environment"] == {**before["job-algo-2"]["environment"], "SHOAL_RESTART": "1"}
    assert again["environment"]["SHOAL_MAX_RESTARTS"] == "2"
    assert {key: value for key, value in again.items() if key != "environment"} == {
        key: value for key, value in before["job-algo-2"].items() if key != "environment"
    }
    (mount,) = again["mounts"]
    assert (mount["Source"], mount["Target"], mount["Type"]) == ("shoal-job", "/opt/ml/checkpoints", "volume")


START = "run/shoal-start"


@pytest.fixture
def waiting(request_: JobRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeEngine, WaitingHosts]]:
    """Hosts that `shoal run --watch` has made ready."""
    monkeypatch.setattr(docker_hosts, "start_log_reader", lambda *_: threading.Thread())
    monkeypatch.setattr(docker_hosts, "report_exit", lambda *_: None)
    client, view = FakeEngine(), PlainView(Console(file=io.StringIO()))
    with docker_hosts.create_hosts(
        cast(Any, client), request_, "job", view, environment={"SHOAL_START_FILE": f"/{START}"}
    ) as hosts:
        yield client, start_waiting(hosts)


def test_hosts_that_wait_start_with_the_source_of_that_time(
    waiting: tuple[FakeEngine, WaitingHosts], request_: JobRequest
) -> None:
    client, hosts = waiting
    assert sorted(client.started) == ["job-algo-1", "job-algo-2"]
    (request_.selection.directory / "train.py").write_text("print('later')")
    (request_.selection.directory / "new.py").write_text("")
    assert hosts.take_source()
    assert all(START not in files for files in client.files.values()), "nothing starts before the source is complete"
    hosts.release()
    for files in client.files.values():
        assert (files["opt/ml/code/train.py"], START in files) == (b"print('later')", True)
        assert "opt/ml/code/new.py" in files
    assert len(client.started) == 2
    hosts.hosts.create("algo-2")  # a lost host
    assert "SHOAL_START_FILE" not in client.made["job-algo-2"]["environment"]


def test_hosts_in_which_something_would_stay_run_no_other_source(
    waiting: tuple[FakeEngine, WaitingHosts], request_: JobRequest
) -> None:
    _, hosts = waiting
    script = request_.selection.directory / "train.py"
    script.rename(script.with_name("other.py"))
    script.mkdir()
    assert not hosts.take_source(), "a directory in the place of a file"
    script.rmdir()
    script.with_name("other.py").rename(script)
    for container in hosts.hosts.by_name.values():
        container.status = "exited"  # type: ignore[misc]
    assert not hosts.take_source(), "a container that has ended"


def test_code_of_the_image_is_not_lost(request_: JobRequest) -> None:
    """Only files that the script has written go with the container."""
    client, packed = FakeEngine(), io.BytesIO()
    created = 1769854500
    times = {"train.py": created - 9, "image.py": created - 9, "model.pt": created, "later.pt": created + 60.5}
    with tarfile.open(fileobj=packed, mode="w") as out:
        for name, seconds in times.items():
            archive.add_file(out, f"code/{name}", io.BytesIO(b"x"), time=int(seconds))
    client.archives["/opt/ml/code"] = packed.getvalue()
    with create_hosts(client, request_) as hosts:
        assert hosts.list_lost_files() == ["later.pt", "model.pt"]


def test_a_restart_writes_through_no_link_of_a_script(tmp_path: Path) -> None:
    tree, other = tmp_path / "algo-1", tmp_path / "other"
    for directory in (tree, other):
        directory.mkdir()
    (other / "file").write_text("kept")
    hosts = LocalHosts(JobRequest(), cast(Any, None), Path("train"), {}, {"algo-1": tree}, -1)
    hosts.create("algo-1")
    for part in ("model", "output"):
        (tree / part).symlink_to(other)
    hosts.create("algo-1")
    assert [path.name for path in other.iterdir()] == ["file"]
    assert (tree / "model").is_dir() and not (tree / "model").is_symlink()


def test_local_job_has_a_secret(request_: JobRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def start(hosts: LocalHosts, host: str) -> None:
        given.append(dict(hosts.environment))
        hosts.arrivals.put((host, hosts.ids[host], HostExit(0)))

    monkeypatch.setattr(LocalHosts, "start", start)
    for name in (SECRET, SECRET_FILE):
        monkeypatch.delenv(name, raising=False)

    def run() -> None:
        with open_job(JobRecord(replace(request_, image="image:1", engine=LOCAL)), None) as opened:
            local.run_job_locally(opened, PlainView(Console(file=io.StringIO())))

    for _ in range(2):
        run()
    assert len({environment[SECRET] for environment in given}) == 2
    monkeypatch.setenv(SECRET_FILE, "/mounted")
    run()
    assert (given[-1].get(SECRET), given[-1][SECRET_FILE]) == (None, "/mounted"), "`train` refuses both"


def test_a_third_interrupt_waits_until_the_files_are_collected(tmp_path: Path) -> None:
    done: list[str] = []

    def kill() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("killed")

    hosts: Any = SimpleNamespace(
        kill=kill,
        collect=lambda _: done.append("collected"),
        console=Console(file=io.StringIO()),
    )
    opened: Any = SimpleNamespace(directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        DockerHosts.end_interrupted(hosts, opened)
    assert done == ["killed", "collected"]
