"""Divides GPUs between the simulated hosts of a job: `shoal run --gpus all|none|0,1`.

No two hosts share a GPU, because NCCL refuses two ranks on one. If several hosts divide all GPUs, a container counts
them, as Docker itself does not report their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import docker
import docker.errors
from docker.types import DeviceRequest

from shoal import docker_client
from shoal.docker_client import containers
from shoal.docker_client.images import read_labels
from shoal.errors import DockerError, UsageError

ALL, NONE = "all", "none"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""The variable that NVIDIA's runtime reads if it is Docker's default; GPU images set it to `all`."""
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_CPU_LABEL = "com.amazonaws.ml.engines.sagemaker.dlc.device.cpu"
_GPU_LABEL = "com.amazonaws.ml.engines.sagemaker.dlc.device.gpu."  # and the version of CUDA
_COUNT = ["--query-gpu=index", "--format=csv,noheader"]

Devices = tuple[str, ...]
"""GPUs by index or UUID; (`all`,): every GPU that Docker has."""


def check_gpus_option(option: str | None, hosts: int) -> None:
    """Raises `UsageError` if the value of `--gpus` is not a list of GPUs, or cannot be divided evenly between hosts."""
    if option is None or option in (ALL, NONE):
        return
    names = option.split(",")
    if not all(map(_NAME.fullmatch, names)) or len(set(names)) < len(names):
        raise UsageError(
            f"--gpus {option}: expected all, none, or different GPUs separated by commas: indexes or UUIDs as listed by"
            " nvidia-smi -L. Fix: such as --gpus 0,1"
        )
    if len(names) % hosts:
        raise UsageError(
            f"--gpus {option}: {len(names)} GPUs cannot be divided evenly between {hosts} hosts, and hosts share none."
            f" Fix: name {hosts} GPUs or a multiple of that, or use --gpus none"
        )


def divide_gpus(
    client: docker.DockerClient, image: str, option: str | None, hosts: Sequence[str], say: Callable[[str], object]
) -> list[Devices]:
    """Returns the GPUs of each host.

    Args:
        client: Docker. A container of `image` may be started to count its GPUs.
        option: The checked value of `--gpus`. None: all GPUs, if Docker can give any to containers.
        say: Receives a line if GPUs are left over, or if an image for GPUs gets none without `--gpus none`.

    Raises:
        UsageError: If all GPUs are divided, and Docker has fewer than there are hosts. Named GPUs are not checked.
        DockerError: If GPUs are requested but Docker cannot give them to containers, or they cannot be counted.
    """
    if option == NONE or (option is None and not _uses_gpus(client, image, len(hosts), say)):
        return [()] * len(hosts)
    if not docker_client.has_gpus(client):
        raise DockerError(
            f"--gpus {option}: Docker cannot give GPUs to containers, because it has no NVIDIA runtime. Fix: install"
            " NVIDIA's container toolkit on Docker's machine, or use --gpus none"
        )
    if option is not None and option != ALL:
        return _split_evenly(option.split(","), len(hosts))
    if len(hosts) == 1:
        return [(ALL,)]
    present = _list_gpus(client, image)
    per_host = len(present) // len(hosts)
    if not per_host:
        raise UsageError(
            f"--hosts {len(hosts)}: Docker has {len(present)} GPU{'s'[: len(present) != 1]}, and hosts share none:"
            f" NCCL refuses two ranks on one GPU. Fix: --hosts {max(1, len(present))}, or --gpus none to use the CPU"
        )
    if left := present[per_host * len(hosts) :]:
        say(f"GPU {', '.join(left)} left over: each of {len(hosts)} hosts gets {per_host}")
    return _split_evenly(present[: per_host * len(hosts)], len(hosts))


def device_requests(devices: Devices) -> list[DeviceRequest]:
    """Returns the setting of a container that gives it these GPUs; empty for none."""
    if devices == (ALL,):
        return [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return [DeviceRequest(device_ids=list(devices), capabilities=[["gpu"]])] if devices else []


def gpu_environment(devices: Devices) -> dict[str, str]:
    """Returns the variable that selects these GPUs if NVIDIA's runtime is Docker's default: `void` for no GPUs.

    For all GPUs, return no variable.
    """
    return {} if devices == (ALL,) else {VISIBLE: ",".join(devices) or "void"}


def _uses_gpus(client: docker.DockerClient, image: str, hosts: int, say: Callable[[str], object]) -> bool:
    """Returns whether hosts get GPUs without `--gpus`. `say` receives a line if hosts of a GPU image get none."""
    try:
        labels = read_labels(client.images.get(image))
    except docker.errors.ImageNotFound:
        return False  # reported when the first host is created
    if docker_client.has_gpus(client):
        return hosts == 1 or _CPU_LABEL not in labels
    if any(name.startswith(_GPU_LABEL) for name in labels):
        say(f"{image} gets no GPU, because Docker has no NVIDIA runtime (--gpus none: without this line)")
    return False


def _split_evenly(names: Sequence[str], hosts: int) -> list[Devices]:
    per_host = len(names) // hosts
    return [tuple(names[per_host * number : per_host * (number + 1)]) for number in range(hosts)]


def _list_gpus(client: docker.DockerClient, image: str) -> list[str]:
    """Runs nvidia-smi in a container of the image, which is removed. Raises DockerError if that fails."""
    label = containers.unique_name("gpus")
    request = DeviceRequest(count=-1, capabilities=[["gpu", "utility"]])
    settings = {"entrypoint": ["nvidia-smi"], "device_requests": [request], "network_mode": "none"}
    with containers.remove_at_end(client, label):
        container = containers.create_container(
            client, image, _COUNT, {**settings, "labels": {containers.JOB_LABEL: label}}
        )
        try:
            container.start()
            code, output = container.wait()["StatusCode"], container.logs().decode(errors="replace")
        except docker.errors.APIError as error:
            code, output = 1, str(error.explanation)
    indexes = output.split()
    if code or not all(map(str.isdecimal, indexes)):
        raise DockerError(
            f"Docker's GPUs cannot be counted: nvidia-smi in a container of {image}: {output.strip()[-400:]}"
            "\nFix: name them, such as --gpus 0,1, or use --gpus none"
        )
    return indexes
