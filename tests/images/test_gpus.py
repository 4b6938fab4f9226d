"""`shoal run --gpus`: GPUs are divided between hosts, with a fake of Docker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
from tests.fake_docker import FakeDocker

from shoal.docker_client import containers
from shoal.errors import DockerError, UsageError
from shoal.jobs import gpus
from shoal.jobs.hosts import local

HOSTS = ("algo-1", "algo-2")
CPU = {"com.amazonaws.ml.engines.sagemaker.dlc.device.cpu": "true"}


class FakeEngine(FakeDocker):
    """Docker with `count` GPUs, which nvidia-smi lists in a container (None: without NVIDIA's runtime)."""

    def __init__(self, count: int | None, labels: Mapping[str, str] | None = None, refuses: str = "") -> None:
        self._runtimes: dict[str, Any] = {"runc": {}} if count is None else {"runc": {}, "nvidia": {}}
        listed = "".join(f"{number}\n" for number in range(count or 0)).encode()

        def start() -> None:
            if refuses:
                raise docker.errors.APIError("500", explanation=refuses)

        super().__init__(SimpleNamespace(labels=labels or {}), start=start, logs=lambda: listed)

    def info(self) -> dict[str, Any]:
        return {"Runtimes": self._runtimes}


def divide(client: FakeEngine, asked: str | None, hosts: tuple[str, ...] = HOSTS) -> tuple[list[Any], list[str]]:
    notes: list[str] = []
    return gpus.divide_gpus(client, "image:1", asked, hosts, notes.append), notes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "asked", "each", "words"),
    [
        (4, None, [("0", "1"), ("2", "3")], []),
        (2, "all", [("0",), ("1",)], []),
        (3, "all", [("0",), ("1",)], ["GPU 2 left over: each of 2 hosts gets 1"]),
        (4, "3,1", [("3",), ("1",)], []),
        (4, "none", [(), ()], []),
        (None, None, [(), ()], []),
        (None, "none", [(), ()], []),
    ],
)
def test_hosts_share_no_gpu(
    count: int | None, asked: str | None, each: list[tuple[str, ...]], words: list[str]
) -> None:
    assert divide(FakeEngine(count), asked) == (each, words)


def test_one_host_gets_all_gpus_without_counting() -> None:
    client = FakeEngine(2)
    assert divide(client, None, ("algo-1",))[0] == divide(client, "all", ("algo-1",))[0] == [("all",)]
    assert client.made == []


def test_gpus_are_counted_in_a_container() -> None:
    client = FakeEngine(2)
    divide(client, "all")
    (made,) = client.made
    asked = made.settings
    assert (asked["entrypoint"], asked["network_mode"]) == (["nvidia-smi"], "none")
    assert asked["device_requests"][0]["Capabilities"] == [["gpu", "utility"]]
    assert containers.JOB_LABEL in asked["labels"]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_gpus_for_the_hosts_is_an_error(count: int) -> None:
    words = rf"--hosts 2: Docker has {count} GPUs?, and hosts share none: .* Fix: --hosts 1, or --gpus none"
    with pytest.raises(UsageError, match=words):
        divide(FakeEngine(count), None)


def test_hosts_of_cpu_images_get_gpus_only_on_request() -> None:
    assert divide(FakeEngine(1, CPU), None)[0] == [(), ()]
    with pytest.raises(UsageError, match="--hosts 2: Docker has 1 GPU,"):
        divide(FakeEngine(1, CPU), "all")


def test_a_gpu_image_without_gpus_is_reported_unless_none_are_requested() -> None:
    engine = FakeEngine(None, {"com.amazonaws.ml.engines.sagemaker.dlc.device.gpu.cu117": "true"})
    assert divide(engine, None) == (
        [(), ()],
        ["image:1 gets no GPU, because Docker has no NVIDIA runtime (--gpus none: without this line)"],
    )
    assert divide(engine, "none") == ([(), ()], [])
    assert divide(FakeEngine(None, CPU), None) == ([(), ()], [])


@pytest.mark.parametrize("asked", ["all", "0,1"])
def test_gpus_without_nvidia_runtime_are_an_error(asked: str) -> None:
    with pytest.raises(DockerError, match=f"--gpus {asked}: Docker cannot give GPUs to containers"):
        divide(FakeEngine(None), asked)


def test_gpus_that_cannot_be_counted_are_an_error() -> None:
    with pytest.raises(
        DockerError, match=r"Docker.s GPUs cannot be counted: .*no such file.*\nFix: name them, such as --gpus 0,1"
    ):
        divide(FakeEngine(2, refuses="exec: nvidia-smi: no such file"), "all")


def test_settings_of_a_container() -> None:
    (some,) = gpus.device_requests(("0", "1"))
    assert (some["DeviceIDs"], some["Count"], some["Capabilities"]) == (["0", "1"], 0, [["gpu"]])
    assert gpus.device_requests(("all",))[0]["Count"] == -1
    assert gpus.device_requests(()) == []
    assert gpus.gpu_environment(()) == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert gpus.gpu_environment(("0", "1")) == {"NVIDIA_VISIBLE_DEVICES": "0,1"}
    assert gpus.gpu_environment(("all",)) == {}


def test_local_job_sees_the_requested_gpus(tmp_path: Path) -> None:
    with pytest.raises(DockerError, match=r"--gpus 0,1: this machine has no NVIDIA GPU\. Fix: leave out --gpus"):
        local._gpu_environment("0,1", tmp_path)
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(DockerError, match="--gpus all"):
        local._gpu_environment("all", tmp_path)
    (tmp_path / "nvidia0").touch()
    assert local._gpu_environment("0,1", tmp_path) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert local._gpu_environment("all", tmp_path) == local._gpu_environment(None, tmp_path) == {}
    assert local._gpu_environment("none", tmp_path) == {"CUDA_VISIBLE_DEVICES": ""}
