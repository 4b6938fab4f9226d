"""Jobs as `shoal run` sees them: hyperparameters in the form of the SDK, the /opt/ml tree, and results."""

from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from rich.console import Console

from shoal.commands import run_options
from shoal.docker_client import archive
from shoal.errors import UsageError
from shoal.jobs import distribution, job, results, summary
from shoal.jobs.hosts import local

MP = {"microbatches": 4, "placement_strategy": "spread", "pipeline": "interleaved", "partitions": 2, "ddp": True}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {}),
        (
            {
                "smdistributed": {
                    "dataparallel": {"enabled": True, "custom_mpi_options": "-verbose -x NCCL_DEBUG=VERSION"}
                }
            },
            {
                "sagemaker_distributed_dataparallel_enabled": "true",
                "sagemaker_instance_type": '"local"',
                "sagemaker_distributed_dataparallel_custom_mpi_options": '"-verbose -x NCCL_DEBUG=VERSION"',
            },
        ),
        (
            {"pytorchddp": {"enabled": True}},
            {
                "sagemaker_distributed_dataparallel_enabled": "true",
                "sagemaker_instance_type": '"local"',
                "sagemaker_distributed_dataparallel_custom_mpi_options": '""',
            },
        ),
        (
            {
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": MP}},
                "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "--mca x y"},
            },
            {
                "sagemaker_mpi_enabled": "true",
                "sagemaker_mpi_num_of_processes_per_host": "2",
                "sagemaker_mpi_custom_mpi_options": '"--mca x y"',
                "mp_parameters": json.dumps(MP),
                "sagemaker_distributed_dataparallel_enabled": "false",
                "sagemaker_instance_type": '"local"',
            },
        ),
        ({"mpi": {"enabled": True}}, {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_custom_mpi_options": '""'}),
        (
            {"torch_distributed": {"enabled": True}},
            {"sagemaker_torch_distributed_enabled": "true", "sagemaker_instance_type": '"local"'},
        ),
        ({"parameter_server": {"enabled": True}}, {"sagemaker_parameter_server_enabled": "true"}),
        (
            {"multi_worker_mirrored_strategy": {"enabled": True}},
            {"sagemaker_multi_worker_mirrored_strategy_enabled": "true"},
        ),
    ],
)
def test_distribution_writes_what_the_sdk_writes(given: dict[str, Any], sent: dict[str, str]) -> None:
    assert distribution.encode_values(distribution.convert_distribution(given)) == sent


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mpy": {}}, "unknown key 'mpy'. Did you mean 'mpi'?"),
        ({"mpi": {"process_per_host": 2}}, "Did you mean 'processes_per_host'?"),
        ({"mpi": True}, "distribution.mpi: expected a dictionary, found True"),
        (
            {"smdistributed": {"dataparallel": {"enabled": True}, "modelparallel": {"enabled": True}}},
            'Using "modelparallel" and "dataparallel" in one job is not supported',
        ),
        (
            {"smdistributed": {"enabled": True, "parameters": {"partitions": 2}}, "mpi": {"enabled": True}},
            'Fix: "smdistributed": {"modelparallel": {"enabled": ..., "parameters": ...}}',
        ),
    ],
)
def test_wrong_distribution_is_an_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        distribution.convert_distribution(given)
    assert words in str(caught.value)


def test_processes_per_host_from_the_command_line() -> None:
    assert distribution.set_processes_per_host({}, None) == {}
    assert distribution.set_processes_per_host({}, 2) == {"mpi": {"enabled": True, "processes_per_host": 2}}
    with pytest.raises(UsageError, match="Fix: remove one"):
        distribution.set_processes_per_host({"mpi": {"enabled": True, "processes_per_host": 4}}, 2)


TORCHRUN: dict[str, Any] = {"torch_distributed": {"enabled": True}}


def test_torchrun_starts_the_ranks_that_are_asked_for(tmp_path: Path) -> None:
    two = {"torch_distributed": {"enabled": True, "processes_per_host": 2}}
    sent = distribution.convert_distribution(two)
    assert sent["sagemaker_mpi_num_of_processes_per_host"] == 2
    assert distribution.set_processes_per_host(TORCHRUN, 2) == two
    with pytest.raises(UsageError, match=r"distribution\.torch_distributed\.processes_per_host is 2\. Fix: remove one"):
        distribution.set_processes_per_host(two, 4)
    request = job.JobRequest(entry_point="train.py", hosts=2, procs_per_host=2, distribution=TORCHRUN)
    merged = local.merge_hosts(request, Console(file=io.StringIO()))
    assert merged.distribution == {"torch_distributed": {"enabled": True, "processes_per_host": 4}}


def test_mpi_has_its_own_number_beside_torchrun() -> None:
    both = {**TORCHRUN, "mpi": {"enabled": True, "processes_per_host": 3}}
    assert distribution.convert_distribution(both)["sagemaker_mpi_num_of_processes_per_host"] == 3
    assert (
        distribution.set_processes_per_host({**TORCHRUN, "mpi": {"enabled": True}}, 2)["mpi"]["processes_per_host"] == 2
    )


@pytest.mark.parametrize("key", ["parameter_server", "multi_worker_mirrored_strategy"])
def test_a_launcher_of_one_rank_takes_no_number(key: str) -> None:
    with pytest.raises(UsageError, match=r"unknown key .processes_per_host.*Allowed: enabled"):
        distribution.convert_distribution({key: {"enabled": True, "processes_per_host": 2}})


@pytest.fixture
def request_(tmp_path: Path) -> job.JobRequest:
    source = tmp_path / "digits"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    (source / "__pycache__").mkdir()
    (source / "env").mkdir()
    (source / "env/pyvenv.cfg").write_text("home = /usr/bin")
    channel = tmp_path / "data"
    channel.mkdir()
    return job.JobRequest(
        source=source,
        entry_point="train.py",
        hosts=2,
        procs_per_host=2,
        channels={"training": channel},
        hyperparameters={"lr": "0.10", "name": "a b", "flag": "true"},
        output=tmp_path / "jobs",
    )


def test_tree_is_like_sagemakers(request_: job.JobRequest, tmp_path: Path) -> None:
    root = tmp_path / "ml"
    job.write_tree(root, request_, "digits-1")
    config = root / "input" / "config"
    assert json.loads(job.encode_resource_config(request_.host_names, "algo-2")) == {
        "current_host": "algo-2",
        "hosts": ["algo-1", "algo-2"],
        "network_interface_name": "eth0",
        "current_instance_type": "local",
    }
    sent = json.loads((config / "hyperparameters.json").read_text())
    assert {key: sent[key] for key in ("lr", "name", "flag")} == {"lr": "0.10", "name": '"a b"', "flag": "true"}
    assert sent["sagemaker_program"] == '"train.py"'
    assert sent["sagemaker_mpi_num_of_processes_per_host"] == "2"
    assert all(isinstance(value, str) for value in sent.values())
    assert list(json.loads((config / "inputdataconfig.json").read_text())) == ["training"]
    assert sorted(path.name for path in (root / "code").iterdir()) == ["train.py"]
    assert (root / "model").is_dir()
    assert (root / "output" / "data").is_dir()


def test_a_channel_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("moved")
    with pytest.raises(UsageError, match=r"/data: a link to moved, which does not exist. Fix: ") as refused:
        job.check_channel_directory("training", tmp_path / "data")
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": Path("/nowhere")}, "--source /nowhere: no such directory"),
        ({"entry_point": "trian.py"}, "Did you mean 'train.py'? It contains: "),
        ({"channels": {"training": Path("/nowhere")}}, "--channel training=/nowhere: no such directory"),
        (
            {"channels": {"train": Path("s3://bucket/data")}},
            "--channel train: s3:// is not supported, only a directory",
        ),
        ({"channels": {"train": Path(__file__).parent.with_name("imgaes")}}, "Did you mean 'images'?"),
        ({"output": Path("s3://bucket/jobs")}, "--output: s3:// is not supported, only a directory"),
        ({"checkpoints": Path("s3://bucket/saved")}, "--checkpoints: s3:// is not supported, only a directory"),
        ({"source": Path("s3://bucket/code")}, "--source: s3:// is not supported, only a directory"),
        ({"channels": {"train": Path("file:///data")}}, "Fix: leave out file://"),
        ({"channels": {"train": Path(__file__)}}, "test_job.py: a file. Fix: give its directory, "),
        ({"distribution": {"mpy": {}}}, "Did you mean 'mpi'?"),
        ({"distribution": {"mpi": True}}, "distribution.mpi: expected a dictionary, found True"),
        ({"distribution": {"mpi": {"enabled": True, "processes_per_host": 3}}}, "Fix: remove one"),
        ({"distribution": {"mpi": {"enabled": False}}}, "--procs-per-host 2 starts MPI"),
        (
            {"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}},
            "--env SHOAL_REHEARSE=1 --env SHOAL_REHEARSE_GPUS=2",
        ),
        (
            {"procs_per_host": None, "distribution": {"smdistributed": {"modelparallel": {"enabled": True}}}},
            "needs MPI",
        ),
        (
            {"distribution": {"mpi": {"enabled": "yes"}}},
            "distribution.mpi.enabled: expected true or false, found 'yes'",
        ),
        ({"shm_size": "lots"}, "--shm-size lots"),
        ({"gpus": "0,0"}, "--gpus 0,0: expected all, none, or different GPUs"),
        ({"gpus": "0;1"}, "Fix: such as --gpus 0,1"),
        ({"gpus": ""}, "--gpus : expected"),
        ({"gpus": "0"}, "--gpus 0: 1 GPUs cannot be divided evenly between 2 hosts"),
        ({"gpus": "0,1,2"}, "Fix: name 2 GPUs or a multiple of that, or use --gpus none"),
        ({"memory": "much"}, "--memory much: expected a size such as 512m or 2g"),
        ({"channels": {"tr aining": Path("/tmp")}}, "--channel 'tr aining'"),
        ({"environment": {"SHOAL_JOB_SECRET": "short"}}, "--env SHOAL_JOB_SECRET: `train` takes 16 to 4096 characters"),
    ],
)
def test_wrong_requests_are_errors_before_anything_starts(
    request_: job.JobRequest, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        job.JobRequest(**{**vars(request_), **change}).check()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stem"), [("my code", "my-code"), (".hidden", "hidden"), ("größe", "gr-e"), ("…", "job")]
)
def test_job_names_are_valid_for_docker(name: str, stem: str) -> None:
    assert job.make_job_name(name).startswith(f"{stem}-20")


def test_results_inside_the_source_are_not_copied_along(request_: job.JobRequest, tmp_path: Path) -> None:
    request = replace(request_, output=tmp_path / "digits" / "jobs")
    directory = job.make_job_directory(request, "j")
    (directory / "old.tar.gz").write_text("large")
    job.write_tree(tmp_path / "ml", request, "j")
    assert sorted(path.name for path in (tmp_path / "ml" / "code").iterdir()) == ["train.py"]


def test_output_directory_is_created_before_training(request_: job.JobRequest) -> None:
    with pytest.raises(UsageError, match=r"--output /proc/nope: .* cannot be created"):
        job.make_job_directory(replace(request_, output=Path("/proc/nope")), "j")


def test_odd_archive_entries_do_not_affect_other_files(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights").write_text("w")
    (source / "latest").symlink_to("weights")
    (source / "absolute").symlink_to("/opt/ml/model/weights")
    (source / "self").symlink_to("self")
    os.mkfifo(source / "pipe")
    with TemporaryFile() as buffer:
        archive.pack_tree(source, "model", buffer)
        skipped = list(archive.unpack_safely(buffer, tmp_path / "out"))
    found = {path.name: path.read_text() for path in (tmp_path / "out" / "model").iterdir()}
    assert found == {"weights": "w", "latest": "w"}
    assert [line.split(":")[0] for line in skipped] == ["model/pipe", "model/absolute", "model/self"]


def test_symlinks_stay_inside_the_directory(tmp_path: Path) -> None:
    """A link that leads out through another link is removed too. Times are kept: scripts choose the newest."""
    source, target = tmp_path / "source", tmp_path / "out"
    (source / "a" / "b").mkdir(parents=True)
    (source / "step").write_text("1")
    links = {"last": "step", "all": "a", "absolute": "/etc/passwd", "up": "../secret", "a/b/top": "../../x"}
    links |= {"through": "a/b/top/../../secret", "loop": "loop"}
    for name, to in links.items():
        (source / name).symlink_to(to)
    (source / "x").mkdir()
    for name in ("step", "a"):
        os.utime(source / name, (1000, 1000))
    with TemporaryFile() as buffer:
        archive.pack_tree(source, "ck", buffer, left_out="left")
        skipped = list(archive.unpack_safely(buffer, target, "/opt/ml"))
    made = {str(path.relative_to(target / "ck")) for path in (target / "ck").rglob("*") if path.is_symlink()}
    assert made == {"last", "all", "a/b/top", "loop"}
    assert sorted(line.split(":")[0] for line in skipped) == ["ck/absolute", "ck/through", "ck/up"]
    assert (target / "ck" / "last").read_text() == "1"
    assert [(target / "ck" / name).stat().st_mtime for name in ("step", "a")] == [1000, 1000]


def test_files_keep_permissions_but_not_setuid(tmp_path: Path) -> None:
    """An executable stays executable, but a setuid bit is dropped."""
    modes = {"plain": 0o640, "program": 0o750, "acts-as-owner": 0o4755, "closed": 0o000}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        for name, mode in modes.items():
            entry = tarfile.TarInfo(name)
            entry.mode = mode
            packed.addfile(entry)
        link = tarfile.TarInfo("link")
        link.type, link.linkname, link.mode = tarfile.LNKTYPE, "program", 0o750
        packed.addfile(link)
    out.seek(0)
    assert list(archive.unpack_safely(out, tmp_path)) == []
    found = {path.name: path.stat().st_mode & 0o7777 for path in tmp_path.iterdir()}
    assert found == {"plain": 0o640, "program": 0o750, "acts-as-owner": 0o755, "closed": 0o600, "link": 0o750}


def test_a_secret_has_its_directories_before_it() -> None:
    """Docker puts them in the place of links of an image, such as from /run/secrets to the results."""
    with tarfile.open(fileobj=io.BytesIO(archive.pack_file("run/secrets/K", b"x", replaces_links=True))) as found:
        assert [(each.name, each.isdir()) for each in found] == [
            ("run", True),
            ("run/secrets", True),
            ("run/secrets/K", False),
        ]


@pytest.mark.parametrize("name", ["../escaped", "inside/../../escaped", "/{}/escaped"])
def test_an_archive_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    name = name.format(str(tmp_path)[1:])
    buffer = io.BytesIO(archive.pack_file(name, b"x"))
    assert list(archive.unpack_safely(buffer, tmp_path / "out")) == [f"{name}: outside the directory"]
    assert not (tmp_path / "escaped").exists()


def write(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_results_of_all_hosts_are_packed_and_the_first_host_wins(tmp_path: Path) -> None:
    trees = {"algo-1": tmp_path / "algo-1", "algo-2": tmp_path / "algo-2"}
    write(trees["algo-1"], "model/a", "first")
    write(trees["algo-2"], "model/a", "second")
    write(trees["algo-2"], "model/sub/b", "second")
    write(trees["algo-2"], "output/data/metrics.json", "[1]")
    result = results.read_result("j", {"algo-1": 0, "algo-2": 42}, tmp_path, trees)
    with tarfile.open(result.archives["model.tar.gz"]) as archive:
        assert archive.getnames() == ["a", "sub/b"]
        member = archive.extractfile("a")
        assert member is not None
        assert member.read() == b"first"
    with tarfile.open(result.archives["output.tar.gz"]) as archive:
        assert archive.getnames() == ["metrics.json"]
    assert result.exit_code == 42


def test_a_job_without_files_makes_no_archives(tmp_path: Path) -> None:
    (tmp_path / "algo-1").mkdir()
    assert results.read_result("j", {"algo-1": 0}, tmp_path, {"algo-1": tmp_path / "algo-1"}).archives == {}


def test_metrics_that_are_not_json_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "algo-1", "output/data/metrics.json", "{broken")
    result = results.read_result("j", {"algo-1": 0}, tmp_path, {"algo-1": tmp_path / "algo-1"})
    assert result.metrics == {}
    assert "output/data/metrics.json: Expecting property name" in result.messages["algo-1"]


@pytest.mark.parametrize("part", ["job.json", "data/metrics.json"])
def test_deeply_nested_reports_are_reported(tmp_path: Path, part: str) -> None:
    write(tmp_path / "algo-1", f"output/{part}", '{"a": ' + "[" * 100_000)
    result = results.read_result("j", {"algo-1": 0}, tmp_path, {"algo-1": tmp_path / "algo-1"})
    assert (result.launch, result.metrics) == ({}, {})
    assert f"output/{part}: nested too deeply" in result.messages["algo-1"]


@pytest.mark.parametrize(
    "report", ['{"hosts": 5}', '{"hosts": []}', '{"ranks": "x"}', '{"training_seconds": "\\u001b[2J"}']
)
def test_malformed_launch_report_is_reported(tmp_path: Path, request_: job.JobRequest, report: str) -> None:
    """Any image may write anything there. The summary is printed anyway."""
    write(tmp_path / "algo-1", "output/job.json", report)
    result = results.read_result("j", {"algo-1": 0}, tmp_path, {"algo-1": tmp_path / "algo-1"})
    assert "output/job.json: not written by `train`" in result.messages["algo-1"]
    assert ("exit code", "0") in summary.summary_rows(request_, result)


def test_nan_metrics_become_strings(tmp_path: Path) -> None:
    write(tmp_path / "algo-1", "output/data/metrics.json", '{"loss": NaN, "accuracy": 0.5}')
    result = results.read_result("j", {"algo-1": 0}, tmp_path, {"algo-1": tmp_path / "algo-1"})
    assert result.metrics == {"loss": "NaN", "accuracy": 0.5}


@pytest.mark.parametrize(("text", "least", "most"), [("4", 0, 4), ("2:4", 2, 4), ("3:3", 3, 3)])
def test_hosts_are_a_number_or_a_range(text: str, least: int, most: int) -> None:
    assert run_options._parse_hosts(text) == {"min_hosts": least, "hosts": most}


@pytest.mark.parametrize("text", ["0", "0:4", "2:", ":4", "2:4:6", "-1", "two", "1.5", ""])
def test_other_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number from 1 on, or MIN:MAX"):
        run_options._parse_hosts(text)


PIPELINE = {"mpi": {"enabled": True}, "smdistributed": {"modelparallel": {"enabled": True, "parameters": MP}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": 2, "min_hosts": 4}, "Fix: --hosts 2:4"),
        ({"max_restarts": 0}, "--hosts 2:4: a lost host would end the job. Fix: add --max-restarts N"),
        ({"distribution": PIPELINE}, "the job is a pipeline, which needs all of its stages. Fix: --hosts 4"),
        ({"environment": {"SHOAL_MIN_HOSTS": "2"}}, "--env SHOAL_MIN_HOSTS: shoal would not know it"),
    ],
)
def test_elastic_jobs_that_are_refused(request_: job.JobRequest, changes: dict[str, Any], words: str) -> None:
    elastic = replace(request_, hosts=4, min_hosts=2, max_restarts=3)
    elastic.check()
    with pytest.raises(UsageError, match=words):
        replace(elastic, **changes).check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"procs_per_host": 2}, "MPI takes several hosts on one machine for one"),
        ({"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}}, "MPI takes several hosts"),
        ({"gpus": "all"}, "the hosts would share the GPUs. Fix: leave out --gpus all"),
        ({"hosts": 300}, "at most 254 hosts"),
    ],
)
def test_hosts_of_one_machine_have_no_mpi(request_: job.JobRequest, changes: dict[str, Any], words: str) -> None:
    elastic = replace(request_, hosts=2, min_hosts=1, procs_per_host=None, distribution={})
    assert local.list_loopback_names(elastic) == ["127.0.0.1", "127.0.0.2"]
    with pytest.raises(UsageError, match=words):
        local.list_loopback_names(replace(elastic, **changes))


def test_local_job_merges_hosts_and_prints_that(request_: job.JobRequest) -> None:
    screen = io.StringIO()
    folded = local.merge_hosts(request_, Console(file=screen, width=200))
    assert folded.hosts == 1
    assert "2 hosts × 2 ranks run as 1 host × 4 ranks" in screen.getvalue()
    sent = folded.encode_hyperparameters("j")
    assert sent["sagemaker_mpi_num_of_processes_per_host"] == "4"


def test_refused_job_has_a_table_and_one_message(request_: job.JobRequest, tmp_path: Path) -> None:
    result = job.FinishedJob(
        name="j",
        exit_code=2,
        directory=tmp_path,
        archives={},
        launch={"hosts": ["algo-1", "algo-2"], "ranks": None, "launch_seconds": None, "training_seconds": None},
        metrics={},
        messages={"algo-1": "not supported yet", "algo-2": "not supported yet"},
    )
    screen = io.StringIO()
    summary.print_summary(Console(file=screen, width=80), request_, result)
    assert screen.getvalue().count("not supported yet") == 1
    assert "algo-1, algo-2: not supported yet" in screen.getvalue()
    assert "exit code      2" in screen.getvalue()


def test_summary_table(request_: job.JobRequest, tmp_path: Path) -> None:
    result = job.FinishedJob(
        name="j",
        exit_code=0,
        directory=tmp_path,
        archives={"model.tar.gz": tmp_path / "model.tar.gz"},
        launch={"hosts": ["algo-1", "algo-2"], "ranks": 4, "launch_seconds": 0.61, "training_seconds": 12.3},
        metrics={"test_accuracy": 0.98611, "images_per_second": 4321.0},
        messages={},
        build_seconds=1.0,
    )
    assert summary.summary_rows(request_, result) == [
        ("test accuracy", "0.9861"),
        ("images/s", "4,321"),
        ("hosts × ranks", "2 × 2"),
        ("build (s)", "1.0"),
        ("launch (s)", "0.6"),
        ("training (s)", "12.3"),
        ("model.tar.gz", str(tmp_path / "model.tar.gz")),
        ("exit code", "0"),
    ]
