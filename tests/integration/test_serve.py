"""examples/serve in its image: the same answers as the model in this process."""

from __future__ import annotations

import json
import runpy
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
import torch

from ..tested_images import CLONE, PYTORCH_CPU
from .conftest import ROOT

EXAMPLE = ROOT / "examples" / "serve"
NAME = f"serve-by-test-{CLONE}:latest"


@pytest.fixture
def image(client: docker.DockerClient) -> Iterator[str]:
    client.images.build(path=str(EXAMPLE), tag=NAME, rm=True, forcerm=True, buildargs={"IMAGE": PYTORCH_CPU})
    yield NAME
    client.images.remove(NAME, force=True)


def ask(port: int, body: bytes) -> list[int]:
    """Ask until the server answers, for a minute."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", body, {"Content-Type": "application/json"})
    for _ in range(600):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found: list[int] = json.loads(answer.read())
                return found
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise TimeoutError


def test_the_image_serves_the_digits(client: docker.DockerClient, image: str, tmp_path: Path) -> None:
    names = runpy.run_path(str(EXAMPLE / "inference.py"))
    torch.manual_seed(0)
    network = names["Net"]()
    torch.save(network.state_dict(), tmp_path / "model.pt")
    images = torch.rand(5, 8, 8)
    volumes = {str(tmp_path): {"bind": "/opt/ml/model", "mode": "ro"}}
    container = client.containers.run(
        image, "serve", detach=True, volumes=volumes, ports={"8080/tcp": ("127.0.0.1", 0)}
    )
    try:
        container.reload()
        port = int((container.ports["8080/tcp"] or [])[0]["HostPort"])
        assert ask(port, json.dumps(images.tolist()).encode()) == names["predict_fn"](images.numpy(), network.eval())
        container.stop(timeout=20)
        assert container.wait()["StatusCode"] in (0, 143)
    finally:
        container.remove(force=True)
