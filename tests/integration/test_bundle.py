"""`shoal bundle` where there is a network, `shoal build --bundle` where there is none."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from shoal import docker_client
from shoal.builds import bundled
from shoal.docker_client.containers import JOB_LABEL
from shoal.docker_client.images import find_image
from shoal.matrix.project import LAYERS, Project

from ..repeats import SOAK
from ..tested_images import CLONE
from ..trusting import trust_directories
from .test_build import link_cache

pytestmark = pytest.mark.xdist_group("commands")  # their images have one tag
SHOAL = Path(sys.executable).with_name("shoal")
OFFLINE = f"offline{CLONE}"
TAG = f"{OFFLINE}-training:1.0-cpu-py311-debian12"
TAGS = (TAG, f"{OFFLINE}-training:1.0-cpu-py313-debian13")
SPEC = "mpi: []\ndefaults: {}\n"
VERSIONS = """\
systems:
  debian12: {suite: bookworm, upstream: "debian:bookworm-slim", sources: sources.list, python: py311}
  debian13: {suite: trixie, upstream: "debian:trixie-slim", sources: debian.sources, python: py313}
releases:
  - {framework: NAME, version: "1.0", device: cpu, requirements: [six], disk_gib: 1}
""".replace("NAME", OFFLINE)
TEMPLATE = """\
{% import "macros.j2" as install with context %}
{% call step("system") %}
{{ begin_stage() }}
{{ install.system_packages(["python3-venv"]) }} && python3 -m venv /opt/venv
{{ install.python_environment() }}
{% endcall %}
{% call step("framework") %}
{{ install.locked_requirements("framework") }}
{% endcall %}
{% call step("network", "what a step sees of it") %}
RUN ls /sys/class/net > /networks
{% endcall %}
"""


@pytest.fixture
def offline(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose images, on two releases of Debian, have a Debian package and a wheel."""
    trust_directories(monkeypatch, tmp_path / "settings", tmp_path, project.root)
    write_project(project, tmp_path)
    yield tmp_path
    client = docker_client.connect()
    for tag in TAGS:
        if find_image(client, tag):
            client.images.remove(tag, force=True)


def write_project(project: Project, directory: Path) -> None:
    (directory / "buildspec.yml").write_text(SPEC)
    for room in (
        "images",
        "checkpoint",
        "library",
        "rehearsal",
        "toolkit",
    ):  # the first is `shoal` itself, which a bundle holds too
        (directory / room).symlink_to(project.root / room)
    templates = directory / "dockerfiles"
    templates.mkdir()
    (templates / "versions.yml").write_text(VERSIONS)
    (templates / f"{OFFLINE}.j2").write_text(TEMPLATE)
    shutil.copy(project.templates / "macros.j2", templates)
    for tag in TAGS:
        locks = templates / "requirements" / tag.replace(":", "-")
        locks.mkdir(parents=True)
        for layer in LAYERS:
            (locks / f"{layer}.txt").write_text("# Made by `shoal lock` for: six\n")
        with (locks / "framework.txt").open("a") as file:
            file.write(six(project))
    link_cache(directory, project)


def six(project: Project) -> str:
    """The line of a small wheel in some image's lock."""
    lines = (line for path in project.templates.rglob("aws.txt") for line in path.read_text().splitlines(keepends=True))
    return next(line for line in lines if line.startswith("six=="))


def containers_of_bundles(client: docker.DockerClient) -> set[str]:
    """The containers that collect Debian packages, by their job's name."""
    listed = client.api.containers(all=True, filters={"label": JOB_LABEL})  # other tests remove theirs meanwhile
    return {job for container in listed if (job := container["Labels"][JOB_LABEL]).startswith("debian-")}


def run(directory: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(SHOAL), *map(str, arguments)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.soak
def test_a_bundle_builds_with_the_network_off(offline: Path, client: docker.DockerClient) -> None:
    """On one release of Debian; on both at once in `make soak`."""
    bundle, tags = offline / "bundle", TAGS if SOAK else [TAG]
    before = containers_of_bundles(client)  # a command that was killed, in whatever clone, leaves its container
    assert run(offline, "lock", "--bases").returncode == 0
    collected = run(offline, "bundle", bundle, *tags)
    assert collected.returncode == 0, collected.stderr
    assert "Debian packages: python3-venv, and their dependencies" in collected.stdout
    assert [path.name.split("-")[0] for path in (bundle / "wheels").iterdir()] == ["six"]
    for _, suite, version in zip(tags, ("bookworm", "trixie"), ("3.11", "3.13")):
        names = [path.name for path in (bundle / suite / "debs").iterdir()]
        assert any(name.startswith(f"python3-venv_{version}.") for name in names)
        assert (bundle / suite / "base.tar").stat().st_size > 1024**2
    built = run(offline, "build", *tags, "--bundle", bundle)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "are not those of" not in built.stdout, "what is in the bundle is what is locked"
    for tag, version in zip(tags, ("3.11", "3.13")):
        program = "import six, sys; print(six.__name__, sys.version[:4])"
        output = client.containers.run(tag, ["sh", "-c", f"cat /networks; python -c '{program}'"], remove=True)
        assert output.decode().split() == ["lo", "six", version]
    assert containers_of_bundles(client) <= before
    digest = bundled.check_bundle(bundle, None)
    assert f"--bundle-digest sha256:{digest}" in collected.stdout
    # One that was changed on the way is refused; what it lacks is reported, and not asked for elsewhere.
    client.images.remove(TAG, force=True)
    lock = offline / "dockerfiles" / "debian" / "bookworm.txt"
    locked = lock.read_text()
    lock.write_text(re.sub(r"^(python3-venv_\S+ SHA256:)\w+", rf"\g<1>{'0' * 64}", locked, flags=re.MULTILINE))
    other_file = run(offline, "build", TAG, "--bundle", bundle)
    assert other_file.returncode == 6, other_file.stderr
    assert f"but the lock says SHA256:{'0' * 64}" in other_file.stderr
    lock.write_text(locked)
    for wheel in (bundle / "wheels").iterdir():
        wheel.unlink()
    changed = run(offline, "build", TAG, "--bundle", bundle)
    assert changed.returncode == 15, changed.stderr
    assert "wheels/six-" in changed.stderr
    bundled.write_sums(bundle)
    another = run(offline, "build", TAG, "--bundle", bundle, "--bundle-digest", digest)
    assert another.returncode == 15, another.stderr
    lacking = run(offline, "build", TAG, "--bundle", bundle)
    assert lacking.returncode == 6
    assert "No matching distribution found for six" in lacking.stderr
    shutil.rmtree(bundle / "trixie", ignore_errors=True)
    bundled.write_sums(bundle)
    other = run(offline, "build", "--all", "--bundle", bundle)
    assert other.returncode == 2
    assert "it is for Debian bookworm, not for trixie" in other.stderr


def test_another_directory_is_refused(offline: Path) -> None:
    refused = run(offline, "build", "--all", "--bundle", offline)
    assert refused.returncode == 2
    assert "not a bundle, or one without SHA256SUMS. Fix: on a host with a network: shoal bundle" in refused.stderr
