"""Each check of `shoal doctor` passes and fails, with fakes of Docker and of servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from tempfile import TemporaryDirectory
from typing import Any

import docker
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal import doctor
from shoal.builds import base_image, bundled
from shoal.doctor import CheckResult, Site
from shoal.errors import DockerError, DoctorError
from shoal.matrix import project
from shoal.matrix.project import Project
from shoal.network import reachability, settings
from shoal.network.settings import NetworkSettings

from .command import shoal_command

PLAIN = NetworkSettings((), (), (), (), None, (), ())
GIB = 1024**3
VERSION = {"ApiVersion": "1.41", "Version": "20.10.24", "Arch": "amd64", "Components": [{"Name": "Engine"}]}
INFO = {"DockerRootDir": "/nonexistent", "MemTotal": 8 * GIB, "NCPU": 4, "Runtimes": {"runc": {}, "nvidia": {}}}


class FakeEngine(ThreadingMixIn, UnixStreamServer):
    """Answers what `answers` holds for a request (method and the path's first word); `made` are its networks."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.address = f"unix://{path}"
        self.made: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "GET version": (200, VERSION),
            "GET info": (200, INFO),
            "GET images": (404, {"message": "no such image"}),
            "GET distribution": (200, {"Descriptor": {"digest": "sha256:0"}}),
            "POST networks": (201, {"Id": "n1"}),
        }

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.address, version="auto", timeout=5)


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def _reply(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        key = f"{self.command} {parts[1] if parts[0].startswith('v1.') else parts[0]}"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, document = self.server.answers.get(key, (200, {}))
        if parts[1:3] == ["images", "json"]:
            status, document = 200, []
        elif key == "POST networks" and status == 201:
            self.server.made.append("n1")
        elif key == "DELETE networks":
            self.server.made.remove(parts[2])
        elif key == "GET networks":
            network = {"Id": "n1", "Name": "shoal-doctor"}
            document = network if len(parts) > 2 else [network] * len(self.server.made)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    do_GET = do_POST = do_DELETE = _reply  # noqa: N815 (the names that http.server calls)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    with TemporaryDirectory() as directory, FakeEngine(Path(directory, "engine.sock")) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def site(fake: FakeEngine, project: Project) -> Site:
    return Site(project.root, fake.client, lambda: PLAIN)


def no_engine() -> docker.DockerClient:
    raise DockerError("No Docker Engine answers at unix:///x: refused\nFix: start one")


def with_machine(site: Site, **fields: Any) -> Site:
    return replace(site, read_settings=lambda: replace(PLAIN, release="bookworm", **fields))


# Docker


def test_docker_is_reported_with_its_api(site: Site) -> None:
    found = "Docker Engine 20.10.24, API 1.41 (needs 1.40 or later)"
    assert doctor.check_docker(site) == CheckResult("ok", found)


def test_old_docker_and_another_processor(site: Site, fake: FakeEngine) -> None:
    fake.answers["GET version"] = (200, VERSION | {"ApiVersion": "1.39"})
    assert doctor.check_docker(site).state == "failed"
    fake.answers["GET version"] = (200, VERSION | {"Arch": "arm64"})
    state, found, _ = doctor.check_docker(site)
    assert (state, found.partition("; ")[2]) == ("remark", "it runs on arm64, but images are for x86_64 (amd64)")


def test_missing_docker_fails_once_and_the_rest_is_not_checked(site: Site) -> None:
    findings = {each.name: each for each in doctor.run_checks(replace(site, connect=no_engine), OF_THE_ENGINE)}
    engine = findings.pop("docker")
    assert (engine.state, engine.fix) == ("failed", "start one")
    assert {(each.state, each.found) for each in findings.values()} == {("remark", "not checked: needs Docker")}


OF_THE_ENGINE = {name: doctor.CHECKS[name] for name in ("docker", "builder", "disk", "memory", "networks", "gpus")}


def test_the_builder(site: Site, fake: FakeEngine) -> None:
    assert doctor.check_builder(site) == CheckResult("ok", "BuildKit")
    fake.answers["GET version"] = (200, VERSION | {"Components": [{"Name": "Podman Engine"}]})
    state, found, fix = doctor.check_builder(site)
    assert (state, fix) == ("failed", "point DOCKER_HOST at one")
    assert found.startswith("Docker has no BuildKit: Podman Engine")


def test_memory_and_gpus(site: Site, fake: FakeEngine) -> None:
    assert doctor.check_memory(site).found.startswith("8.0 GiB, 4 CPUs;")
    assert doctor.check_memory(site).state == doctor.check_gpus(site).state == "ok"
    fake.answers["GET info"] = (200, INFO | {"MemTotal": GIB, "Runtimes": {"runc": {}}})
    assert doctor.check_memory(site).state == "failed"
    assert doctor.check_gpus(site).state == "remark"


@pytest.mark.parametrize(("free", "there", "state"), [(17, 404, "ok"), (3, 404, "failed"), (3, 200, "remark")])
def test_disk(
    site: Site, fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, there: int, state: str
) -> None:
    fake.answers["GET info"] = (200, INFO | {"DockerRootDir": str(tmp_path)})
    fake.answers["GET images"] = (there, {"Id": "sha256:1", "message": "no such image"})
    usage = shutil.disk_usage(tmp_path)._replace(free=free * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    result = doctor.check_disk(site)
    assert result.state == state
    assert result.found.startswith(f"{tmp_path}: {free}.0 GiB free; building the largest image takes 16 GiB")


def test_disk_of_remote_docker_is_not_checked(site: Site) -> None:
    assert doctor.check_disk(site).found == "not checked: Docker runs on another machine"


def test_network_is_created_and_removed(site: Site, fake: FakeEngine) -> None:
    assert doctor.check_networks(site).state == "ok"
    assert fake.made == []
    fake.answers["POST networks"] = (500, {"message": "could not find an available address pool"})
    state, found, fix = doctor.check_networks(site)
    assert (state, found) == (
        "failed",
        "Docker cannot create a bridge network: could not find an available address pool",
    )
    assert "docker network prune" in fix


def test_the_base_image(site: Site, fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From best to worst: in Docker, in a registry, kept from an earlier build, bootstrapped, none of these."""
    shutil.copytree(site.project.templates, tmp_path / "dockerfiles")
    shutil.copy(site.project.buildspec, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site = replace(site, start=tmp_path)
    first, second = site.matrix.systems()

    def both(words: str) -> str:
        return "; ".join(words.format(system.upstream) for system in (first, second))

    fake.answers["GET images"] = (200, {"Id": "sha256:1", "RepoDigests": []})
    assert doctor.check_base_images(site) == CheckResult("ok", both("Docker has {}"))
    fake.answers["GET images"] = (404, {"message": "no such image"})
    assert doctor.check_base_images(site) == CheckResult("ok", both("{} can be pulled"))
    fake.answers["GET distribution"] = (500, {"message": "no route to host"})
    monkeypatch.setattr(base_image, "explain_no_bootstrap", lambda _: "mmdebstrap is not here. Fix: run this as root")
    assert doctor.check_base_images(site) == CheckResult("failed", "mmdebstrap is not here", "run this as root")
    monkeypatch.setattr(base_image, "explain_no_bootstrap", lambda _: "")
    answers = {"bookworm": reachability.Answer("http://mirror.example", 200), "trixie": reachability.Answer("", 200)}
    monkeypatch.setattr(reachability, "check_mirrors", lambda _, suite: [answers[suite]])
    assert doctor.check_base_images(site).found.count("bootstraps it") == 2
    answers["bookworm"] = reachability.Answer("http://mirror.example", None, "no route to host")
    state, found, fix = doctor.check_base_images(site)
    assert (state, found.count("; ")) == ("failed", 0)
    assert "nor bootstrapped from the Debian mirror: http://mirror.example" in found
    assert "build from a bundle" in fix
    answers["bookworm"] = reachability.Answer("http://mirror.example", 200)
    kept = base_image.archive_path(Project(tmp_path).cache, second)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
    problem, of_second = doctor.check_base_images(site).found.split("; the first build")[0], str(kept)
    assert problem == f"{first.upstream} cannot be pulled"
    assert of_second in doctor.check_base_images(site).found


# The network


class Server(ThreadingHTTPServer):
    """Answers every path with `status`, those under /lean with 404, and leads to `location`; with 0, never."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.status = 200
        self.location = ""
        self.asked: list[str] = []
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Page(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if not self.server.status:
            self.server.released.wait(30)
            return
        self.send_response(404 if self.path.startswith("/lean") else self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


@pytest.fixture
def closed() -> str:
    """An address on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_the_index_and_the_mirror_answer(site: Site, server: Server) -> None:
    pip = (("index-url", f"{server.url}/simple/"), ("extra-index-url", f"{server.url}/more"))
    assert doctor.check_package_index(with_machine(site, pip=pip)).state == "ok"
    sources = (f"deb {server.url}/debian bookworm main", f"deb {server.url}/debian bookworm-updates main")
    assert doctor.check_debian_mirror(with_machine(site, apt_sources=sources)) == CheckResult(
        "ok", f"{server.url}/debian"
    )
    suites = ("bookworm", "bookworm-updates", "trixie", "trixie-updates")  # of all base images
    files = [f"/debian/dists/{suite}/InRelease" for suite in suites]
    assert server.asked == ["/simple/pip/", "/more/pip/", *files]


@pytest.mark.parametrize(("status", "state"), [(404, "remark"), (401, "failed"), (503, "failed")])
def test_index_with_another_status(site: Site, server: Server, status: int, state: str) -> None:
    server.status = status
    result = doctor.check_package_index(with_machine(site, pip=(("index-url", server.url),)))
    assert result.state == state
    assert result.found.startswith(f"{server.url}: HTTP status {status}")


@pytest.mark.parametrize("location", ["http://[x", f"http://{'a' * 100}.x/", "file:///etc/passwd"])
def test_an_index_that_leads_to_no_address_is_named(site: Site, server: Server, location: str) -> None:
    server.status, server.location = 302, location
    result = doctor.check_package_index(with_machine(site, pip=(("index-url", server.url),)))
    assert (result.state, result.found.partition(": ")[0]) == ("failed", server.url)


def test_a_mirror_that_lacks_a_suite(site: Site, server: Server) -> None:
    """All suites are requested at the addresses of this machine's own suite."""
    sources = (f"deb {server.url}/debian bookworm main", f"deb {server.url}/lean bookworm-security main")
    state, found, _ = doctor.check_debian_mirror(with_machine(site, apt_sources=sources))
    lacking = [f"{server.url}/lean: HTTP status 404 for {suite}-security" for suite in ("bookworm", "trixie")]
    assert (state, found) == ("failed", "; ".join(lacking))


def test_an_extra_index_need_not_have_everything(site: Site, server: Server, closed: str) -> None:
    first, lean = ("index-url", server.url), ("extra-index-url", f"{server.url}/lean")
    assert doctor.check_package_index(with_machine(site, pip=(first, lean))) == CheckResult("ok", server.url)
    broken = (("index-url", f"{server.url}/lean"), ("extra-index-url", closed))
    state, found, _ = doctor.check_package_index(with_machine(site, pip=broken))
    assert (state, found) == ("failed", f"{closed}: [Errno 111] Connection refused")


def test_hanging_server_times_out(site: Site, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.status = 0
    monkeypatch.setattr(reachability, "TIMEOUT_SECONDS", 0.2)
    began = time.monotonic()
    state, found, _ = doctor.check_package_index(with_machine(site, pip=(("index-url", server.url),)))
    assert (state, time.monotonic() - began < 20) == ("failed", True)  # the server hangs for 30 s
    assert "no answer within" in found


def test_a_refused_connection_and_an_unknown_name(site: Site, closed: str) -> None:
    sources = (f"deb {closed}/debian bookworm main", "deb http://mirror.invalid/debian bookworm main")
    state, found, fix = doctor.check_debian_mirror(with_machine(site, apt_sources=sources))
    assert state == "failed"
    assert found.startswith(f"{closed}/debian: [Errno 111] Connection refused; http://mirror.invalid/debian: ")
    assert "/etc/apt/sources.list" in fix


def test_proxies_of_pip_and_apt_are_used(site: Site, server: Server, closed: str) -> None:
    """A proxy gets whole addresses to ask for; apt's may be for one host only, or DIRECT."""
    pip = (("index-url", "http://index.invalid/simple"), ("proxy", server.url))
    assert doctor.check_package_index(with_machine(site, pip=pip)).state == "ok"
    sources = ("deb http://mirror.invalid/debian bookworm main",)
    lines = (f'Acquire::http::Proxy "{closed}";', f'Acquire::http::Proxy::mirror.invalid "{server.url}";')
    assert doctor.check_debian_mirror(with_machine(site, apt_sources=sources, apt_proxies=lines)).state == "ok"
    files = [f"http://mirror.invalid/debian/dists/{suite}/InRelease" for suite in ("bookworm", "trixie")]
    assert server.asked == ["http://index.invalid/simple/pip/", *files]
    refused = (f'Acquire::http::Proxy "{closed}";',)
    state, found, _ = doctor.check_debian_mirror(with_machine(site, apt_sources=sources, apt_proxies=refused))
    assert (state, found.partition(": ")[2]) == ("failed", "its proxy cannot be reached, or refuses")
    direct = (*refused, 'Acquire::http::Proxy::127.0.0.1 "DIRECT";')
    here = (f"deb {server.url}/debian bookworm main",)
    assert doctor.check_debian_mirror(with_machine(site, apt_sources=here, apt_proxies=direct)).state == "ok"


def test_password_in_an_address_is_not_shown(site: Site, server: Server) -> None:
    server.status = 401
    url = server.url.replace("//", "//user:planted@")
    assert "planted" not in str(doctor.check_package_index(with_machine(site, pip=(("index-url", url),))))


def test_no_index_is_requested_with_no_index(site: Site) -> None:
    assert doctor.check_package_index(with_machine(site, pip=(("no-index", "true"),))).state == "ok"


# Certificates, settings, ports, the checkout


def certificate(name: str, days: int, key_file: Path | None = None) -> bytes:
    """Return a CA's certificate, also of 127.0.0.1, that expires in that many days, in PEM form; write its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    end = datetime.now(UTC) + timedelta(days=days)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(end - timedelta(days=30))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    if key_file:
        form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return made.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("bundle", "state", "words"),
    [
        (None, "ok", "none is set"),
        (certificate("good", 9), "ok", "PIP_CERT: 1 certificates"),
        (
            "# Großes Zertifikat\n".encode() + certificate("good", 9) + certificate("old", -9),
            "remark",
            "PIP_CERT: 2 certificates, of which 1 have expired: old",
        ),
        (certificate("old", -9), "failed", "PIP_CERT: 1 certificates, of which 1 have expired: old"),
        (b"<html>404</html>", "failed", "PIP_CERT: "),
        (b"", "failed", "PIP_CERT: "),
    ],
    ids=["none", "good", "good and old", "old", "no certificate", "empty"],
)
def test_the_ca_bundle(site: Site, bundle: bytes | None, state: str, words: str) -> None:
    result = doctor.check_ca_bundle(with_machine(site, ca_bundle=bundle, ca_origin="PIP_CERT"))
    assert (result.state, result.found.startswith(words)) == (state, True), result


def test_a_ca_bundle_that_is_not_there_is_found(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.crt").write_bytes(certificate("good", 9))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.crt"))
    settings.read_network_settings.cache_clear()
    here = settings.read_network_settings()
    settings.read_network_settings.cache_clear()
    assert here.ca_origin == f"pip's cert {tmp_path / 'ca.crt'}"
    state, found, _ = doctor.check_ca_bundle(replace(site, read_settings=lambda: here))
    assert (state, found) == ("failed", f"no such file: SSL_CERT_FILE {tmp_path / 'gone.crt'}")


def test_a_server_is_trusted_by_the_bundle_only(site: Site, server: Server, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    own, other = certificate("own", 9, key), certificate("other", 9)
    (tmp_path / "own.pem").write_bytes(own)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    pip = (("index-url", url),)
    assert doctor.check_package_index(with_machine(site, pip=pip, ca_bundle=own)) == CheckResult("ok", url)
    state, found, _ = doctor.check_package_index(with_machine(site, pip=pip, ca_bundle=other))
    assert (state, found) == ("failed", f"{url}: its certificate is not signed by a CA of the bundle")
    trusting = (*pip, ("trusted-host", "127.0.0.1"))
    assert doctor.check_package_index(with_machine(site, pip=trusting, ca_bundle=other)).state == "ok"


def test_settings_that_builds_cannot_use_are_reported(site: Site) -> None:
    assert doctor.check_settings(site).state == "ok"
    result = doctor.check_settings(with_machine(site, left_out=("pip's constraint: not supported in builds",)))
    assert result == CheckResult("remark", "builds do not use: pip's constraint: not supported in builds")


def test_loopback(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_loopback(site).state == "ok"

    def refuse(*_: object) -> socket.socket:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    state, found, _ = doctor.check_loopback(site)
    assert (state, found.endswith("connect to it: Cannot assign requested address")) == ("failed", True)


def test_the_checkout(site: Site, tmp_path: Path) -> None:
    assert doctor.check_definitions(site).state == "ok"
    outside = doctor.check_definitions(replace(site, start=tmp_path))
    assert outside == doctor.check_definitions(site)  # of the definitions that shoal comes with
    (tmp_path / "buildspec.yml").write_text("images: []\n")
    state, found, _ = doctor.check_definitions(replace(site, start=tmp_path))
    assert (state, "buildspec.yml:1: mpi: required, but missing" in found) == ("failed", True)
    (disk,) = doctor.run_checks(replace(site, start=tmp_path), {"disk": doctor.check_disk})
    assert (disk.state, disk.found) == ("remark", "not checked: needs a readable buildspec.yml")


# All of them


def test_checks_that_raise_or_hang_fail(site: Site) -> None:
    def broken(_: Site) -> CheckResult:
        raise KeyError("MemTotal")

    def hanging(_: Site) -> CheckResult:
        time.sleep(30)
        raise AssertionError

    checks = {"hanging": hanging, "broken": broken, "good": lambda _: CheckResult("ok", "fine")}
    began = time.monotonic()
    findings = doctor.run_checks(site, checks, limit=0.5)
    assert time.monotonic() - began < 20
    assert [(each.name, each.state, each.found) for each in findings] == [
        ("hanging", "failed", "no result after 0.5 s"),
        ("broken", "failed", "KeyError: 'MemTotal'"),
        ("good", "ok", "fine"),
    ]
    with pytest.raises(DoctorError, match=r"2 checks failed: hanging, broken\. Fix: run the commands above"):
        doctor.raise_failures(findings)
    assert [line[0] for line in doctor.format_findings(findings).splitlines()] == ["✗", " ", "✗", " ", "✓"]


def test_interrupt_waits_for_checks_to_clean_up(site: Site) -> None:
    left = ["network"]

    def making(_: Site) -> CheckResult:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        left.clear()
        return CheckResult("ok", "")

    with pytest.raises(KeyboardInterrupt):
        doctor.run_checks(site, {"networks": making})
    assert left == []


def run(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    nowhere = {"PIP_NO_INDEX": "1", "http_proxy": "http://127.0.0.1:9"}  # no test waits for a real network
    env = {**os.environ, **nowhere, "COLUMNS": "80", **environment}
    command = [*shoal_command(), "doctor", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_command_exits_10_and_prints_only_json(fake: FakeEngine, project: Project) -> None:
    fake.answers["GET info"] = (200, INFO | {"MemTotal": GIB})
    result = run(["--json"], project.root, DOCKER_HOST=fake.address)
    findings = {each["name"]: each for each in json.loads(result.stdout)}
    assert list(findings) == list(doctor.CHECKS)
    assert findings["memory"]["state"] == "failed"
    assert findings["memory"]["fix"] == "give Docker's machine at least 2 GiB"
    assert result.returncode == 10
    assert "memory" in result.stderr
    assert fake.made == []


def write_engine_script(root: Path) -> Path:
    """Write a project with a script that leaves a file beside the project's, and return that file."""
    (root / "buildspec.yml").write_text("images: []\n")
    (root / "scripts").mkdir()
    script = root / "scripts" / "engine.sh"
    script.write_text(f"#!/bin/sh\ntouch {root}/ran\n")
    script.chmod(0o755)
    return root / "ran"


def test_fix_starts_docker_with_the_shipped_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = write_engine_script(tmp_path)
    monkeypatch.setattr(project, "find_shipped", lambda: Project(tmp_path))
    assert doctor.apply_fixes(doctor.Site(tmp_path), [doctor.CheckFinding("docker", "failed", "no answer")])
    assert "shoal: --fix: docker: started it with scripts/engine.sh" in capfd.readouterr().err
    assert ran.exists()


def test_fix_does_not_run_the_script_of_a_project(tmp_path: Path) -> None:
    ran = write_engine_script(tmp_path)
    result = run(["--fix"], tmp_path, DOCKER_HOST="unix:///nonexistent/docker.sock")
    assert "shoal: --fix: docker: scripts/engine.sh could not start it" in result.stderr
    assert not ran.exists()


def test_fix_leaves_the_docker_of_docker_host_alone(tmp_path: Path) -> None:
    result = run(["--fix"], tmp_path, DOCKER_HOST="unix:///nonexistent/docker.sock")
    assert result.returncode == 10
    assert "shoal: --fix: docker: scripts/engine.sh could not start it" in result.stderr


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        ("", "ok: DIR has base images, packages and wheels for Debian bookworm, trixie"),
        ("trixie/base.tar", "failed: DIR lacks trixie/base.tar"),
        ("wheels/a.whl", "failed: DIR lacks wheels/a.whl"),
        ("SHA256SUMS", "failed: --bundle DIR: not a bundle, or one without SHA256SUMS"),
    ],
)
def test_a_bundle_takes_the_place_of_the_network(site: Site, tmp_path: Path, lacks: str, expected: str) -> None:
    for name in (
        "bookworm/base.tar",
        "bookworm/debs/Packages",
        "trixie/base.tar",
        "trixie/debs/Packages",
        "wheels/a.whl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    bundled.write_sums(tmp_path)
    if lacks:
        (tmp_path / lacks).unlink()
    checks = doctor.choose_checks(tmp_path)
    assert not {"package index", "debian mirror", "base image"} & {*checks}
    (finding,) = doctor.run_checks(replace(site, bundle=tmp_path), {"bundle": checks["bundle"]})
    assert f"{finding.state}: {finding.found}".replace(str(tmp_path), "DIR").startswith(expected)
    assert bool(finding.fix) == bool(lacks)
    assert "bundle" not in doctor.choose_checks(None)


def test_a_bundle_for_some_images_is_a_remark(site: Site, tmp_path: Path) -> None:
    (tmp_path / "bookworm" / "debs").mkdir(parents=True)
    (tmp_path / "bookworm" / "base.tar").touch()
    (tmp_path / "bookworm" / "debs" / "Packages").touch()
    bundled.write_sums(tmp_path)
    state, found, _ = doctor.check_bundle(replace(site, bundle=tmp_path))
    assert (state, found.partition(", not ")[2]) == ("remark", "for the images of trixie")
