"""`shoal push` to Debian's docker-registry on loopback, which wants a password, by a way that fails as networks do."""

from __future__ import annotations

import base64
import crypt
import io
import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from shoal.builds import soci

from ..repeats import in_soak
from ..tested_images import CLONE

pytestmark = pytest.mark.xdist_group("commands")  # their images have one tag
PASSWORD = "of-this-test-only"
ONE = f"one{CLONE}"
TAG = f"{ONE}-training:1.0-cpu-py311-debian12"
BUILDSPEC = f"mpi: []\ndefaults: {{{ONE}: {TAG}}}\n"
VERSIONS = """\
systems: {debian12: {suite: bookworm, upstream: "debian:bookworm-slim", sources: sources.list, python: py311}}
releases:
  - {framework: NAME, version: "1.0", device: cpu, requirements: [x], disk_gib: 1}
""".replace("NAME", ONE)
CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {directory}/data}}}}
http: {{addr: "127.0.0.1:{port}"}}
auth: {{htpasswd: {{realm: test, path: {directory}/htpasswd}}}}
"""


class Way(socketserver.ThreadingTCPServer):
    """A way to a registry. `failures`: how many connections are still to be closed without a word.

    The engine makes two before it gives up: it tries TLS first.
    """

    daemon_threads = True

    def __init__(self, registry: int) -> None:
        super().__init__(("127.0.0.1", 0), Passage)
        self.registry, self.failures = registry, 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Passage(socketserver.StreamRequestHandler):
    server: Way

    def handle(self) -> None:
        if self.server.failures:
            self.server.failures -= 1
            return
        with socket.create_connection(("127.0.0.1", self.server.registry)) as there:
            back = threading.Thread(target=pump, args=(there, self.connection), daemon=True)
            back.start()
            pump(self.connection, there)
            back.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    with source.makefile("rb", buffering=0) as reading, target.makefile("wb", buffering=0) as writing:
        try:
            shutil.copyfileobj(reading, writing)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # the other end has gone
            return


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a registry."""
    directory = tmp_path_factory.mktemp("registry")
    subprocess.run(["apt-get", "download", "docker-registry"], cwd=directory, check=True, capture_output=True)
    (package,) = directory.glob("docker-registry_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, directory / "root"], check=True)
    hashed = crypt.crypt(PASSWORD, crypt.mksalt(crypt.METHOD_BLOWFISH))
    (directory / "htpasswd").write_text(f"shoal:{hashed}\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    (directory / "config.yml").write_text(CONFIG.format(directory=directory, port=port))
    command = [str(directory / "root/usr/bin/docker-registry"), "serve", str(directory / "config.yml")]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(port, process)
            yield port
        finally:
            process.kill()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


@pytest.fixture
def way(registry: int) -> Iterator[Way]:
    with Way(registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def checkout(client: docker.DockerClient, tmp_path: Path) -> Iterator[Path]:
    """A project of one image, which the engine has, with a layer that is large enough for an index."""
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles" / "versions.yml").write_text(VERSIONS)
    (tmp_path / "buildspec.yml").write_text(BUILDSPEC)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        large = tarfile.TarInfo("large")
        large.size = 11 << 20
        archive.addfile(large, io.BytesIO(os.urandom(large.size)))
    client.api.import_image_from_data(layer.getvalue(), *TAG.split(":"))
    yield tmp_path
    client.images.remove(TAG)


def push(checkout: Path, way: Way, password: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("shoal")), *arguments(checkout, way, password), *options]
    environment = {**os.environ, "DOCKER_CONFIG": str(checkout)}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def arguments(checkout: Path, way: Way, password: str) -> list[str]:
    """Store the password where `docker login` would, and return the arguments of a push."""
    login = base64.b64encode(f"shoal:{password}".encode()).decode()
    (checkout / "config.json").write_text(json.dumps({"auths": {way.address: {"auth": login}}}))
    return ["push", ONE, "--to", f"{way.address}/team"]


@pytest.mark.parametrize("failures", [in_soak(0), 4])
def test_an_image_is_in_the_registry(client: docker.DockerClient, checkout: Path, way: Way, failures: int) -> None:
    way.failures = failures
    ended = push(checkout, way, PASSWORD)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("; trying again") == failures / 2
    assert way.failures == 0
    digest, _ = fetch(way, "application/vnd.docker.distribution.manifest.v2+json")
    assert digest in ended.stdout
    assert client.images.get(TAG).tags == [TAG]


def fetch(way: Way, kind: str) -> tuple[str, dict[str, Any]]:
    """Return the digest and the content of the image's manifest."""
    repository, version = TAG.split(":")
    request = urllib.request.Request(f"http://{way.address}/v2/team/{repository}/manifests/{version}")
    request.add_header("Accept", kind)
    request.add_header("Authorization", "Basic " + base64.b64encode(f"shoal:{PASSWORD}".encode()).decode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Docker-Content-Digest"], json.load(answer)


def test_zstd_is_in_the_registry(checkout: Path, way: Way) -> None:
    way.failures = 2
    ended = push(checkout, way, PASSWORD, "--compression", "zstd")
    assert ended.returncode == 0, ended.stderr
    assert way.failures == 0
    digest, manifest = fetch(way, soci.MANIFEST)
    assert digest in ended.stdout
    assert [layer["mediaType"].rpartition("+")[2] for layer in manifest["layers"]] == ["zstd"]


def test_docker_pulls_the_same_image_from_a_lazy_one(client: docker.DockerClient, checkout: Path, way: Way) -> None:
    ended = push(checkout, way, PASSWORD, "--lazy")
    assert ended.returncode == 0, ended.stderr
    _, index = fetch(way, soci.INDEX)
    assert len(index["manifests"]) == 2
    before = client.images.get(TAG)
    before.tag(f"{TAG}-kept")  # for the fixture
    client.images.remove(TAG)
    login = {"username": "shoal", "password": PASSWORD}
    pulled = client.images.pull(f"{way.address}/team/{TAG}", auth_config=login)
    try:
        assert pulled.id == before.id
    finally:
        before.tag(TAG)
        for name in (f"{TAG}-kept", pulled.tags[0]):
            client.images.remove(name)


def test_a_wrong_password_is_reported_at_once(client: docker.DockerClient, checkout: Path, way: Way) -> None:
    ended = push(checkout, way, "wrong")
    assert ended.returncode == 11
    assert "docker login to the registry" in ended.stderr
    assert "trying again" not in ended.stdout
    assert client.images.get(TAG).tags == [TAG]


def test_a_registry_that_stays_away_is_given_up(checkout: Path, way: Way) -> None:
    way.failures = 1000
    ended = push(checkout, way, PASSWORD)
    assert ended.returncode == 11
    assert "(tried 5 times)" in ended.stderr
    assert ended.stdout.count("trying again") == 4
