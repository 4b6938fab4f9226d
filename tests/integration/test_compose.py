"""examples/compose with a real docker-compose: two services are the hosts of a job that trains the digits."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from pathlib import Path

import docker

from ..containers import ROOT
from ..tested_images import PYTORCH_CPU

EXAMPLE = ROOT / "examples" / "compose" / "compose.yml"


def test_two_services_train_the_digits(compose: str, client: docker.DockerClient, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(uuid.uuid4().hex)
    secret.chmod(0o600)
    environment = {
        **os.environ,
        "IMAGE": PYTORCH_CPU,
        "EPOCHS": "1",
        "MODEL": str(tmp_path / "model"),
        "SECRET": str(secret),
    }
    project = [compose, "--file", str(EXAMPLE), "--project-name", f"shoal-{uuid.uuid4().hex[:12]}"]
    up = [*project, "up", "--no-color", "--exit-code-from", "host-0"]
    try:
        done = subprocess.run(up, env=environment, capture_output=True, text=True, timeout=240)
        listed = [*project, "ps", "--all", "--quiet"]
        containers = subprocess.run(listed, env=environment, capture_output=True, text=True, check=True, timeout=60)
        codes = [client.containers.get(name).wait(timeout=60)["StatusCode"] for name in containers.stdout.split()]
    finally:
        down = [*project, "down", "--volumes", "--timeout", "0"]
        subprocess.run(down, env=environment, capture_output=True, check=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert codes == [0, 0], done.stdout
    assert "has no secret" not in done.stdout
    assert re.search(r"\[0,host-0\] test accuracy .* with world size 4", done.stdout), done.stdout
    assert (tmp_path / "model" / "model.pt").stat().st_size > 0
