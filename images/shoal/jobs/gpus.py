"""Which GPUs each simulated host of a job gets: `shoal run --gpus all|none|0,1`.

No two hosts share a GPU, because NCCL refuses two ranks on one. Nobody but a container knows how many GPUs an engine
has, so that one is asked, and only if several hosts divide all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import docker
import docker.errors
from docker.types import DeviceRequest

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import DockerError, UsageError

ALL, NONE = "all", "none"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""What NVIDIA's runtime reads where it is the engine's default one: images for GPUs set it to `all`."""
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_CPU_LABEL = "com.amazonaws.ml.engines.sagemaker.dlc.device.cpu"
_COUNT = ["--query-gpu=index", "--format=csv,noheader"]

Devices = tuple[str, ...]


def check(asked: str | None, hosts: int) -> None:
    """Raise `UsageError` if `--gpus` is no list of GPUs, or one that cannot be divided evenly over the hosts."""
    if asked is None or asked in (ALL, NONE):
        return
    names = asked.split(",")
    if not all(map(_NAME.fullmatch, names)) or len(set(names)) < len(names):
        raise UsageError(
            f"--gpus {asked}: expected all, none, or different GPUs separated by commas: indexes or UUIDs as"
            " nvidia-smi -L lists them. Example: --gpus 0,1"
        )
    if len(names) % hosts:
        raise UsageError(
            f"--gpus {asked}: {len(names)} GPUs cannot be divided over {hosts} hosts, which all get equally many and"
            f" share none. Fix: name {hosts} GPUs or a multiple of it, or --gpus none"
        )


def divide(
    client: docker.DockerClient, image: str, asked: str | None, hosts: Sequence[str], say: Callable[[str], object]
) -> list[Devices]:
    """Return the GPUs of each host by name; (`all`,) stands for all that the engine has.

    Args:
        asked: The checked value of `--gpus`. None: all GPUs of the engine, where it can give any to containers.
        say: Is told which GPUs are left over.

    Raises:
        UsageError: If the engine has fewer GPUs than there are hosts.
        DockerError: If it cannot give GPUs to containers, but some are asked for; or its GPUs cannot be counted.
    """
    if asked == NONE or (asked is None and not _has_use(client, image, len(hosts))):
        return [()] * len(hosts)
    if not docker_client.has_gpus(client):
        raise DockerError(
            f"--gpus {asked}: this engine cannot give GPUs to containers; it has no NVIDIA runtime. Fix: install"
            " NVIDIA's container toolkit on the engine's machine, or use --gpus none"
        )
    if asked is not None and asked != ALL:
        return _shares(asked.split(","), len(hosts))
    if len(hosts) == 1:
        return [(ALL,)]
    present = _count(client, image)
    each = len(present) // len(hosts)
    if not each:
        raise UsageError(
            f"--hosts {len(hosts)}: the engine has {len(present)} GPU{'s'[: len(present) != 1]}, and hosts share none:"
            f" NCCL refuses two ranks on one GPU. Fix: --hosts {max(1, len(present))}, or --gpus none to use the CPU"
        )
    if left := present[each * len(hosts) :]:
        say(f"GPU {', '.join(left)} left over: each of {len(hosts)} hosts gets {each}")
    return _shares(present[: each * len(hosts)], len(hosts))


def settings(devices: Devices) -> list[DeviceRequest]:
    """Return what the engine is asked for to give a container these GPUs."""
    if devices == (ALL,):
        return [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return [DeviceRequest(device_ids=list(devices), capabilities=[["gpu"]])] if devices else []


def variables(devices: Devices) -> dict[str, str]:
    """Return the variable that says the same to an engine whose default runtime is NVIDIA's."""
    return {} if devices == (ALL,) else {VISIBLE: ",".join(devices) or "void"}


def _has_use(client: docker.DockerClient, image: str, hosts: int) -> bool:
    """Return whether hosts get GPUs if `--gpus` does not say so: several hosts of an image for CPUs need none."""
    if not docker_client.has_gpus(client):
        return False
    try:
        return hosts == 1 or _CPU_LABEL not in client.images.get(image).labels
    except docker.errors.ImageNotFound:
        return False  # creating a host of it says so


def _shares(names: Sequence[str], hosts: int) -> list[Devices]:
    each = len(names) // hosts
    return [tuple(names[each * number : each * (number + 1)]) for number in range(hosts)]


def _count(client: docker.DockerClient, image: str) -> list[str]:
    """Return the indexes of the engine's GPUs, from NVIDIA's program in a container of the image."""
    label = containers.unique_name("gpus")
    request = DeviceRequest(count=-1, capabilities=[["gpu", "utility"]])
    given = {"entrypoint": ["nvidia-smi"], "device_requests": [request], "network_mode": "none"}
    with containers.remove_at_end(client, label):
        container = containers.create_container(
            client, image, _COUNT, {**given, "labels": {containers.JOB_LABEL: label}}
        )
        try:
            container.start()
            code, said = container.wait()["StatusCode"], container.logs().decode(errors="replace")
        except docker.errors.APIError as error:
            code, said = 1, str(error.explanation)
    found = said.split()
    if code or not all(map(str.isdecimal, found)):
        raise DockerError(
            f"the engine's GPUs cannot be counted: nvidia-smi in a container of {image}: {said.strip()[-400:]}"
            "\nFix: name them, such as --gpus 0,1, or use --gpus none"
        )
    return found
