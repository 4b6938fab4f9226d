"""Jobs as SageMaker runs them for the requests of the real SDKs (recordings), and the SDKs' own local mode.

The tests of local mode install the SDKs (1.5 GB), which takes minutes. `make sagemaker` runs these tests too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from testcontainers.core.network import Network

from ..tested_images import PYTORCH_CPU
from . import sagemaker_requests
from .conftest import ROOT, Ended, Host, StartHost
from .sagemaker_platform import build_command, build_environment, write_configuration
from .sagemaker_requests import DRIVER_SETTINGS, EXAMPLES, RECORDINGS, ROLE, SDKS, make_environment, sdk_variables

RECORDED: dict[str, dict[str, Any]] = json.loads(RECORDINGS.read_text())
SMALL = PYTORCH_CPU
DIGITS = ROOT / "examples" / "digits"
HOSTS = ("algo-1", "algo-2")
REHEARSAL = {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "2"}
CODE_OF_SDK_3 = "/opt/ml/input/data/code"
REPORT = (
    "import os, sys\n"
    "words = ['rank', os.environ.get('RANK', '0'), 'of', os.environ.get('WORLD_SIZE', '1'), *sys.argv[1:]]\n"
    "os.write(1, (' '.join(words) + '\\n').encode())\n"  # at once: ranks that torchrun starts share a pipe
)
with_sdks = pytest.mark.skipif(
    "SHOAL_SAGEMAKER_SDK" not in os.environ,
    reason="installs 1.5 GB of SDKs, in minutes. Run: make sagemaker",
)


def wait_all(hosts: dict[str, Host]) -> dict[str, Ended]:
    ended = {name: host.wait() for name, host in hosts.items()}
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(hosts, 0), ended
    return ended


# SDK 3: its drivers


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SDK's package, which has the scripts that it uploads to the channel sm_drivers."""
    wheels = sagemaker_requests.ENVIRONMENTS / "wheels"
    if not list(wheels.glob("*.whl")):
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            wheels,
            *SDKS["3"],
        ]
        subprocess.run(command, check=True)
    directory = tmp_path_factory.mktemp("sagemaker-train")
    (wheel,) = wheels.glob("sagemaker_train-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.startswith("sagemaker/train/")])
    return directory / "sagemaker" / "train"


def write_channels(package: Path, data: Path, kind: str, script: str) -> None:
    """Writes the channels `code` and `sm_drivers` as ModelTrainer does, from its package and a recording.

    Unlike the recorded job, this one has two ranks on a host.
    """
    target = data / "sm_drivers"
    shutil.copytree(package / "container_drivers", target)
    templates = runpy.run_path(str(package / "templates.py"))
    name = {"mpi": "MPI", "torchrun": "Torchrun"}[kind]
    driver = templates["EXEUCTE_DISTRIBUTED_DRIVER"].format(driver_name=name, driver_script=f"{kind}_driver.py")
    (target / "sm_train.sh").write_text(
        templates["TRAIN_SCRIPT_TEMPLATE"].format(
            working_dir=f"cd {CODE_OF_SDK_3} \n", install_requirements="", execute_driver=driver
        )
    )
    recording = RECORDED[f"modeltrainer-{kind}"]
    for address, recorded in recording["uploads"].items():
        _, _, path = address.partition("/sm_drivers/")
        if path.endswith(DRIVER_SETTINGS):
            (target / path).write_text(recorded.replace('_per_node": null', '_per_node": 2'))
        elif path and path != "scripts/install_requirements.py":  # of another package, for jobs with requirements
            assert hashlib.sha256((target / path).read_bytes()).hexdigest() == recorded, f"{path}: make sagemaker"
    (data / "code").mkdir()
    (data / "code" / "train.py").write_text(script)


@pytest.mark.parametrize(("kind", "names"), [("mpi", HOSTS), ("torchrun", HOSTS[:1])])
def test_the_drivers_of_sdk_3_train_on_all_hosts(
    start_host: StartHost, network: Network, drivers: Path, tmp_path: Path, kind: str, names: tuple[str, ...]
) -> None:
    """The MPI driver itself needs paramiko and sshd, and its mpirun starts ranks on the first host only.

    torchrun imports torch twice per host, so it has one host here. In local mode it has two.
    """
    request = dict(RECORDED[f"modeltrainer-{kind}"]["request"])
    request["HyperParameters"] = {**request["HyperParameters"], "flag": "true"}
    by_train = kind == "mpi"
    script = f"{REPORT}assert os.environ.get('NCCL_DEBUG') == {'VERSION' if by_train else None!r}\n"
    hosts = {}
    for name in names:
        tree = tmp_path / name
        write_configuration(tree, request, names, name)
        write_channels(drivers, tree / "input" / "data", kind, script)
        env = build_environment(request)
        hosts[name] = start_host(SMALL, tree=tree, network=network, alias=name, env=env, **build_command(request))
    output = "".join(end.output for end in wait_all(hosts).values())
    world_size = 2 * len(names)
    for rank in range(world_size):
        assert f"rank {rank} of {world_size} --epochs 3 --flag true" in output
    assert {host.path("output/success").exists() for host in hosts.values()} == {by_train}
    assert not any(host.path("output/failure").exists() for host in hosts.values())


# SDK 2: code in S3, and a file system as a channel


@pytest.fixture
def s3(client: docker.DockerClient, network: Network) -> Iterator[str]:
    """An S3 server that the containers of the network reach."""
    from moto.server import ThreadedMotoServer

    gateway = client.networks.get(network.name).attrs["IPAM"]["Config"][0]["Gateway"]
    server = ThreadedMotoServer(gateway, 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def upload_code(endpoint: str, address: str) -> None:
    """Uploads examples/digits as an archive, as the SDK does, to an s3:// address."""
    import boto3  # type: ignore[import-untyped]

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in sorted(DIGITS.glob("*.py")):
            archive.add(file, file.name)
    bucket, _, key = address.removeprefix("s3://").partition("/")
    s3 = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key=key, Body=packed.getvalue())


def test_a_data_parallel_request_with_code_in_s3_and_data_on_a_file_system(
    start_host: StartHost, network: Network, s3: str, tmp_path: Path
) -> None:
    """FSx and EFS are mounted as the channel's directory, here read-only, as with file_system_access_mode="ro"."""
    request = dict(RECORDED["pytorch_dataparallel"]["request"])
    channels = RECORDED["channels_and_spot-bucket-of-data"]["request"]["InputDataConfig"]
    request["InputDataConfig"] = [channel for channel in channels if "FileSystemDataSource" in channel["DataSource"]]
    upload_code(s3, json.loads(request["HyperParameters"]["sagemaker_submit_directory"]))
    file_system = tmp_path / "fsx"
    subprocess.run([sys.executable, DIGITS / "prepare.py", file_system], check=True)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL_S3": s3}
    hosts = {}
    for name in HOSTS:
        write_configuration(tmp_path / name, request, HOSTS, name)
        hosts[name] = start_host(
            SMALL,
            tree=tmp_path / name,
            network=network,
            alias=name,
            volumes={file_system: "/opt/ml/input/data/training:ro"},
            env={**build_environment(request), **REHEARSAL, **keys},
            **build_command(request),
        )
    wait_all(hosts)
    metrics = json.loads(hosts["algo-1"].path("output/data/metrics.json").read_text())
    assert (metrics["world_size"], metrics["epochs"]) == (4, 3)
    assert hosts["algo-1"].path("model/model.pt").exists()


# ContainerEntrypoint and ContainerArguments


@pytest.mark.parametrize(
    "algorithm",
    [
        {"ContainerArguments": ["train", "--epochs", "7"]},
        {"ContainerEntrypoint": ["train"], "ContainerArguments": ["--epochs", "7"]},
    ],
)
def test_entry_point_and_arguments_of_a_request(
    start_host: StartHost, tmp_path: Path, algorithm: dict[str, list[str]]
) -> None:
    recorded = RECORDED["pytorch_dataparallel"]["request"]
    request = {**recorded, "AlgorithmSpecification": {**recorded["AlgorithmSpecification"], **algorithm}}
    request["ResourceConfig"] = {**recorded["ResourceConfig"], "InstanceCount": 1}
    request["HyperParameters"] = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "/opt/ml/input/data/digits",
    }
    write_configuration(tmp_path / "ml", request, ["algo-1"], "algo-1")
    code = tmp_path / "ml" / "input" / "data" / "digits"
    code.mkdir()
    (code / "train.py").write_text(REPORT)
    host = start_host(SMALL, tree=tmp_path / "ml", env=build_environment(request), **build_command(request))
    assert "rank 0 of 1 --epochs 7" in wait_all({"algo-1": host})["algo-1"].output


# Local mode


@with_sdks
@pytest.mark.usefixtures("compose", "left_by_compose")
@pytest.mark.xdist_group("sagemaker-local")  # the SDKs' network has one name
@pytest.mark.parametrize(
    ("sdk", "script", "arguments", "instance_type"),
    [
        ("2", "pytorch_dataparallel.py", [], "local"),
        ("3", "modeltrainer.py", ["mpi"], "local_cpu"),
        ("3", "modeltrainer.py", ["torchrun"], "local_cpu"),
        ("3", "modeltrainer.py", ["train"], "local_cpu"),
    ],
)
def test_local_mode(tmp_path: Path, sdk: str, script: str, arguments: list[str], instance_type: str) -> None:
    """The script of the examples, unmodified, with the real SDK: two containers on this machine."""
    (tmp_path / ".sagemaker").mkdir()
    settings = f"local:\n  local_code: true\n  container_root: {tmp_path}\n"
    (tmp_path / ".sagemaker" / "config.yaml").write_text(settings)
    variables = sdk_variables(HOME=str(tmp_path), INSTANCE_TYPE=instance_type, RANKS="2")
    command: list[str | Path] = [make_environment(sdk), EXAMPLES / script, SMALL, ROLE, *arguments]
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert "epoch 3/3" in output
