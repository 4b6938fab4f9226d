"""Attacks by a project that this user has copied, and by images, on the real Docker."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from shoal.builds import builder
from shoal.docker_client import archive, images
from shoal.errors import ImageError
from shoal.image import differences, facts
from shoal.matrix.project import Project

from .test_build import TAG, build, probe, template

__all__ = ["probe"]
pytestmark = pytest.mark.xdist_group("build")  # its image has the tag of test_build.py
PLANTED = "planted-password"


def log_of(cache: Path) -> str:
    return (cache / "shoal" / "logs" / f"{TAG.replace(':', '-')}.log").read_text()


def test_steps_of_a_project_that_is_not_trusted_get_no_passwords_and_no_caches(
    probe: Path, project: Project, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The templates are somebody's who reads pip's passwords, and puts packages into the caches of other builds."""
    home = tmp_path_factory.mktemp("home")
    (home / "pip.conf").write_text(f"[global]\nindex-url = https://user:{PLANTED}@index.invalid/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(home / "pip.conf"))
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{PLANTED}@proxy.invalid:3128")
    shutil.copy(project.templates / "macros.j2", probe / "dockerfiles")
    cache = f"/cache-of-a-test-{uuid.uuid4()}"
    text = '{% import "macros.j2" as install with context %}{{ install.run([install.machine]) }}'
    template(
        probe,
        f"{text}env && cat /run/machine/pip.conf && : {cache}\n"
        + "".join(
            f"RUN --mount=type=cache,id={before}{cache},target={cache} echo bad > {cache}/wheel\n"
            for before in ("", "/", "../", "//")
        ),
    )
    stranger = home / "project"
    shutil.copytree(
        probe, stranger, ignore=shutil.ignore_patterns(".cache", "checkpoint", "library", "rehearsal", "toolkit")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "settings"))
    ended = build(stranger)
    assert ended.returncode == 0, ended.stderr
    assert PLANTED not in log_of(home) + ended.stdout + ended.stderr
    assert "index.invalid" in log_of(home), "the step has read the file"
    assert "its steps get no passwords of package indexes, mirrors and proxies. Fix, if you trust" in ended.stdout
    template(probe, f"RUN --mount=type=cache,target={cache} test ! -e {cache}/wheel && echo clean-{uuid.uuid4()}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(probe / "settings"))
    ended = build(probe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert builder._caches(Project(probe)) == {} != builder._caches(Project(home)) != builder._caches(Project(stranger))


def load_image(client: docker.DockerClient, tag: str, config: dict[str, object], layer: bytes = b"") -> None:
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    document = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest]}, **config}
    manifest = [{"Config": "c.json", "RepoTags": [tag], "Layers": ["l.tar"]}]
    out = io.BytesIO()
    files = {"c.json": json.dumps(document).encode(), "manifest.json": json.dumps(manifest).encode(), "l.tar": layer}
    archive.write_tar(files, out)
    client.images.load(out.getvalue())


@pytest.fixture
def tag(client: docker.DockerClient) -> Iterator[str]:
    name = f"test-hostile:{uuid.uuid4().hex}"
    yield name
    client.images.remove(name, force=True)


@pytest.mark.parametrize("config", [{}, {"config": None, "created": None}, {"config": {"Labels": None, "Env": None}}])
def test_an_image_without_a_configuration_ends_no_command_with_a_traceback(
    client: docker.DockerClient, tag: str, config: dict[str, object]
) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as out:
        archive.add_file(out, "file", io.BytesIO(b"x"))
    load_image(client, tag, config, layer.getvalue())
    image = client.images.get(tag)
    assert (images.read_labels(image), images.has_script(image)) == ({}, False)
    assert "/file" in differences.read_image(client, tag).files
    with pytest.raises(ImageError, match="it has no Python"):
        facts.read_facts(client, tag)


def test_an_image_that_is_inspected_fills_no_volume_and_no_memory(
    client: docker.DockerClient, pytorch: str, tag: str
) -> None:
    """Docker makes a volume for each that an image names, which can be written even if the root is read-only."""
    container = client.containers.create(pytorch, ["sh", "-c", "mkdir -m 777 /data && echo kept > /data/file"])
    try:
        container.start()
        container.wait()
        container.commit(*tag.split(":"), changes="VOLUME /data")
    finally:
        container.remove(v=True)
    assert "Read-only file system" in facts.run_command(client, tag, ["sh", "-c", "touch /data/x 2>&1; true"])
    with pytest.raises(ImageError, match="cannot be inspected"):
        facts.run_command(client, tag, ["python3", "-c", "bytearray(3 << 30)"])
