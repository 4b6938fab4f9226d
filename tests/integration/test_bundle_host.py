"""What `shoal bundle` has of `shoal` itself: it is installed from that where there is no network, as docs say."""

from __future__ import annotations

import sys
from pathlib import Path

import docker

from shoal.builds import bundle
from shoal.matrix.spec import BuildSpec

from ..tested_images import PYTORCH_CPU
from .conftest import ROOT


def test_shoal_is_installed_without_a_network(client: docker.DockerClient, matrix: BuildSpec, tmp_path: Path) -> None:
    """In a container, for it has no network and Debian's Python, of the version that runs this."""
    bundle.add_shoal(tmp_path, tmp_path / "wheels")
    image = matrix.select(PYTORCH_CPU)
    assert image.python_version == f"{sys.version_info.major}.{sys.version_info.minor}"
    script = f"{bundle.INSTALL.format(directory='/bundle/wheels')} && /tmp/.venv/bin/shoal list"
    output = client.containers.run(
        image.tag,
        ["sh", "-c", script],
        remove=True,
        network_mode="none",
        working_dir="/tmp",
        volumes=[f"{tmp_path}:/bundle:ro"],
        environment={"PATH": "/usr/bin:/bin"},
    ).decode()
    assert "Successfully installed" in output
    assert image.tag in output
    assert bundle.INSTALL.format(directory="DIRECTORY/host") in (ROOT / "docs" / "offline.md").read_text()
