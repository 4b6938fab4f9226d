"""Builds of several images against an engine of a few lines: order, several at once, failures, interrupts, words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from shoal.matrix.project import Project

from ..trusting import trust_directories
from .buildkit_stream import field, log, stamp, trace, vertex
from .command import shoal_command

BUILDSPEC = "mpi: []\ndefaults: {}\n"
TEMPLATE = """\
{% call step("base") %}{{ begin_stage() }}{% endcall %}
{% call step("making") %}RUN make{% endcall %}
"""
VERSIONS = """\
systems:
  debian12: {suite: bookworm, upstream: "debian:bookworm-slim", sources: sources.list, python: py311}
releases:
  - {framework: one, version: "1.0", device: cpu, requirements: [x], disk_gib: 1}
  - {framework: two, version: "1.0", device: cpu, requirements: [x], disk_gib: 1}
children:
  - {framework: child, version: "1.0", extends: "one-*", requirements: [x], disk_gib: 1}
  - {framework: grandchild, version: "1.0", extends: "child-*", requirements: [x], disk_gib: 1}
"""
TAG = "{}-training:1.0-cpu-py311-debian12"
ONE, TWO, CHILD, GRANDCHILD = map(TAG.format, ("one", "two", "child", "grandchild"))


class FakeEngine(ThreadingMixIn, UnixStreamServer):
    """Answers what builds ask. Images whose tag begins with a word of `failing` fail; with one of `hanging`, hang."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.address = f"unix://{path}"
        self.images: dict[str, dict[str, str]] = {"debian:bookworm-slim": {}, "debian:trixie-slim": {}}
        self.bases: dict[str, str] = {}
        self.failing: tuple[str, ...] = ()
        self.hanging: tuple[str, ...] = ()
        self.under_way: set[str] = set()
        self.asked: list[str] = []
        self.contexts: dict[str, bytes] = {}
        self.most = 0
        self.expected = 1  # so many builds wait for each other
        self.component = "Engine"
        self.prints = b""
        self.met = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if path.endswith("/version"):
            self._answer({"ApiVersion": "1.41", "Components": [{"Name": self.server.component}]})
        elif path.endswith("/info"):
            self._answer({"DockerRootDir": "/nonexistent"})
        elif path.endswith("/images/json"):
            self._answer([])
        else:
            tag = path.partition("/images/")[2].removesuffix("/json")
            labels = self.server.images.get(tag)
            image = {"Id": f"sha256:{abs(hash(str((tag, labels)))):064x}", "Config": {"Labels": labels}}
            self._answer({"message": "no such image"} if labels is None else image, 404 if labels is None else 200)

    def do_POST(self) -> None:
        options = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        tag = options["t"]
        self.server.contexts[tag] = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.under_way.add(tag)
        self.server.most = max(self.server.most, len(self.server.under_way))
        if self.server.most >= self.server.expected:
            self.server.met.set()
        self.send_response(200)
        self.end_headers()
        step = "[1/1] RUN make"
        self._write(trace(vertex(step, field(5, stamp(1)))))
        self._write(trace(log(self.server.prints)))
        if tag.startswith(self.server.hanging or ("-",)):
            with contextlib.suppress(ConnectionResetError):  # a client that ends before it has read all resets it
                self.connection.recv(1)  # until it is closed
        elif tag.startswith(self.server.failing or ("-",)):
            self._write(trace(vertex(step, field(5, stamp(1)), field(6, stamp(2)), field(7, b"exit code: 1"))))
            command = 'process "/bin/sh -c make" did not complete successfully: exit code: 1'
            self._write({"error": f"failed to solve: {command}"})
        else:
            self.server.met.wait(30)
            time.sleep(0.2)  # one that should not run beside it would be seen
            self.server.bases[tag] = json.loads(options["buildargs"])["BASE"]
            self.server.images[tag] = json.loads(options["labels"])
        self.server.under_way.discard(tag)

    def _write(self, document: dict[str, Any] | list[Any]) -> None:
        self.wfile.write(json.dumps(document).encode() + b"\n")

    def _answer(self, document: dict[str, Any] | list[Any], status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self._write(document)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    with TemporaryDirectory() as directory, FakeEngine(Path(directory, "engine.sock")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def checkout(tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of two images, one of them with a child and that with another. It is trusted, as it has packages."""
    trust_directories(monkeypatch, tmp_path / "settings", tmp_path)
    (tmp_path / "buildspec.yml").write_text(BUILDSPEC)
    for room in ("checkpoint", "library", "rehearsal", "toolkit"):
        shutil.copytree(project.root / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles" / "versions.yml").write_text(VERSIONS)
    for name in ("one", "two", "child", "grandchild"):
        (tmp_path / "dockerfiles" / f"{name}.j2").write_text(TEMPLATE)
        locks = tmp_path / "dockerfiles" / "requirements" / TAG.format(name).replace(":", "-")
        locks.mkdir(parents=True)
        for layer in ("cuda", "framework", "mpi", "aws"):
            (locks / f"{layer}.txt").write_text("# Made by `shoal lock` for: x\n")
    none = "e3b0c44298fc"  # the digest of no pins
    for name, on in (("child", ONE), ("grandchild", CHILD)):
        path = tmp_path / "dockerfiles" / "requirements" / TAG.format(name).replace(":", "-") / "framework.txt"
        path.write_text(f"# Made by `shoal lock` for: x on {on} ({none})\n")
    return tmp_path


def start(fake: FakeEngine, checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DOCKER_HOST": fake.address, "COLUMNS": "200"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*shoal_command(), *arguments], cwd=checkout, env=env, text=True, **pipes)


def shoal(fake: FakeEngine, checkout: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(fake, checkout, *arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def endings(out: str) -> list[str]:
    return [" ".join(line.split()[:3]) for line in out.splitlines() if line.startswith(("✓", "✗", "-"))]


def test_parents_are_built_first_and_what_is_there_is_left(fake: FakeEngine, checkout: Path) -> None:
    code, out, err = shoal(fake, checkout, "build", "grandchild*")
    assert (code, err) == (0, "")
    assert endings(out) == [f"✓ {tag} built" for tag in (ONE, CHILD, GRANDCHILD)]
    assert fake.bases == {ONE: "debian:bookworm-slim", CHILD: ONE, GRANDCHILD: CHILD}
    _, out, _ = shoal(fake, checkout, "build", "--all")
    assert endings(out) == [f"✓ {ONE} up", f"✓ {TWO} built", f"✓ {CHILD} up", f"✓ {GRANDCHILD} up"]
    _, out, _ = shoal(fake, checkout, "build", "--all", "--dry-run")
    assert out.splitlines() == [f"{tag}: up to date" for tag in (ONE, TWO, CHILD, GRANDCHILD)]


def test_a_build_with_nothing_to_do_connects_once(fake: FakeEngine, checkout: Path) -> None:
    shoal(fake, checkout, "build", "child-*")
    before = len(fake.asked)
    _, out, _ = shoal(fake, checkout, "build", "child-*", "--json")
    assert [(image["state"], image["seconds"]) for image in json.loads(out)] == [("up to date", None)] * 2
    # The SDK asks for the version when it connects, and the check of BuildKit once more.
    assert sum(path.endswith("/version") for path in fake.asked[before:]) == 2


def test_a_child_is_kept_if_its_parent_is_built_again_and_is_the_same(fake: FakeEngine, checkout: Path) -> None:
    shoal(fake, checkout, "build", "child-*")
    del fake.images[ONE]
    _, out, _ = shoal(fake, checkout, "build", "child-*", "--dry-run")
    assert out.splitlines()[0].startswith(f"{ONE}: new")
    assert f"{CHILD}: rebuilt" in out
    code, out, err = shoal(fake, checkout, "build", "child-*")
    assert (code, err) == (0, "")
    assert endings(out) == [f"✓ {ONE} built", f"✓ {CHILD} up"]


def test_each_system_has_a_base_image_for_its_images(fake: FakeEngine, checkout: Path) -> None:
    versions = checkout / "dockerfiles" / "versions.yml"
    system = '  debian13: {suite: trixie, upstream: "debian:trixie-slim", sources: debian.sources, python: py313}\n'
    versions.write_text(VERSIONS.replace("releases:\n", f"{system}releases:\n"))
    newer = ONE.replace("py311-debian12", "py313-debian13")
    locks = checkout / "dockerfiles" / "requirements"
    shutil.copytree(locks / ONE.replace(":", "-"), locks / newer.replace(":", "-"))
    code, _, err = shoal(fake, checkout, "build", "one-*")
    assert (code, err) == (0, "")
    assert fake.bases == {ONE: "debian:bookworm-slim", newer: "debian:trixie-slim"}
    del fake.images["debian:trixie-slim"]
    plans = {
        plan["tag"]: plan for plan in json.loads(shoal(fake, checkout, "build", "--dry-run", "one-*", "--json")[1])
    }
    assert plans[ONE]["state"] == "up to date"
    assert plans[newer]["reasons"] == ["base debian:trixie-slim → debian:trixie-slim (Docker does not have it yet)"]


def test_a_plan_follows_a_change_from_parent_to_child(fake: FakeEngine, checkout: Path) -> None:
    shoal(fake, checkout, "build", "--all")
    (checkout / "dockerfiles" / "one.j2").write_text(TEMPLATE.replace("RUN make", "RUN other"))
    _, out, _ = shoal(fake, checkout, "build", "--dry-run", "--all", "--json")
    one, two, child, grandchild = json.loads(out)
    assert one["rebuilt"] == ["making"]
    assert one["reasons"] == ["making: other instructions (one.j2)"]
    assert two["state"] == "up to date"
    assert child["rebuilt"] == ["base", "making"]
    assert child["reasons"] == [f"base {ONE} → {ONE} (rebuilt)"]
    assert grandchild["reasons"] == [f"base {CHILD} → {CHILD} (rebuilt)"]


@pytest.mark.long
def test_a_commit_that_changes_nothing_inside_leaves_images_as_they_are(fake: FakeEngine, checkout: Path) -> None:
    """Built again, an image has the same labels; one of sources that nobody has committed names no commit."""

    def commit(*paths: str) -> None:
        git = [
            "git",
            "-C",
            str(checkout),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@example.org",
            "-c",
            "commit.gpgsign=false",
        ]
        for command in (["init", "-q"], ["add", *paths], ["commit", "-qm", "more"]):
            subprocess.run([*git, *command], check=True)

    commit("buildspec.yml", "dockerfiles", "checkpoint", "library", "rehearsal", "toolkit")
    shoal(fake, checkout, "build", "child*")
    first = dict(fake.images)
    assert len(first[ONE]["org.opencontainers.image.revision"]) == 40
    assert first[ONE]["org.opencontainers.image.base.name"] == "docker.io/library/debian:bookworm-slim"
    assert first[CHILD]["org.opencontainers.image.base.name"] == ONE
    (checkout / "README").touch()
    commit("README")
    assert endings(shoal(fake, checkout, "build", "one*")[1]) == [f"✓ {ONE} up"]
    del fake.images[ONE]
    shoal(fake, checkout, "build", "child*")
    assert fake.images == first
    (checkout / "dockerfiles" / "three.j2").touch()
    del fake.images[CHILD]
    shoal(fake, checkout, "build", "child*")
    assert fake.images[CHILD]["org.opencontainers.image.revision"] == ""
    shoal(fake, checkout, "build", "two*")
    assert "org.opencontainers.image.revision" not in fake.images[TWO]


def test_debian_packages_that_are_not_locked_are_reported(fake: FakeEngine, checkout: Path) -> None:
    fake.prints = b"".join(b"shoal: not locked: p%d_1_amd64.deb\n" % number for number in range(6))
    code, out, _ = shoal(fake, checkout, "build", "one-*")
    assert code == 0
    assert f"! {ONE}: 6 of Debian's packages are not those of dockerfiles/debian/bookworm.txt: p0_1_amd64.deb, " in out
    assert "p4_1_amd64.deb and 1 more. Fix: shoal lock --bases, then build again" in out
    assert "! Debian bookworm: no package versions in dockerfiles/debian/bookworm.txt" in out


@pytest.mark.parametrize("command", [["build", "--all"], ["build", "--all", "--dry-run"]])
@pytest.mark.parametrize(
    ("setting", "component", "words"),
    [
        ("0", "Engine", "DOCKER_BUILDKIT=0 asks for Docker's classic builder, .* Fix: unset DOCKER_BUILDKIT"),
        ("1", "Podman Engine", "Docker has no BuildKit: Podman Engine, API 1.41. .* Fix: point DOCKER_HOST"),
    ],
)
def test_only_buildkit_builds(
    fake: FakeEngine,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    setting: str,
    component: str,
    words: str,
) -> None:
    """Docker's classic builder keeps a step's files, passwords among them, in untagged images."""
    fake.component = component
    monkeypatch.setenv("DOCKER_BUILDKIT", setting)
    code, _, err = shoal(fake, checkout, *command)
    assert (code, bool(re.match(f"shoal: {words}", err))) == (4, True), err
    assert fake.bases == {}


@pytest.mark.parametrize(("jobs", "most"), [("1", 1), ("2", 2)])
def test_independent_images_are_built_at_once(fake: FakeEngine, checkout: Path, jobs: str, most: int) -> None:
    fake.expected = most
    assert shoal(fake, checkout, "build", "--all", "--jobs", jobs)[0] == 0
    assert fake.most == most


def test_the_largest_come_first_and_variants_of_them_last(fake: FakeEngine, checkout: Path) -> None:
    """The report keeps the order of the matrix."""
    text = VERSIONS.replace("python: py311", "python: py311, devel: [gcc]")
    text = text.replace(
        'two, version: "1.0", device: cpu, requirements: [x], disk_gib: 1',
        'two, version: "1.0", device: cpu, requirements: [x], disk_gib: 2',
    )
    (checkout / "dockerfiles" / "versions.yml").write_text(text)
    code, out, err = shoal(fake, checkout, "build", "--all", "--jobs=1", "--json")
    assert code == 0, err
    assert list(fake.bases) == [TWO, ONE, CHILD, GRANDCHILD, f"{TWO}-devel", f"{ONE}-devel"]
    assert [ending["tag"] for ending in json.loads(out)] == [
        ONE,
        f"{ONE}-devel",
        TWO,
        f"{TWO}-devel",
        CHILD,
        GRANDCHILD,
    ]


def test_a_failure_stops_only_images_that_extend_it(fake: FakeEngine, checkout: Path) -> None:
    fake.failing = ("one",)
    code, out, err = shoal(fake, checkout, "build", "--all")
    assert code == 6
    assert out.splitlines()[-4:] == [
        f"✗ {ONE} failed: step 1/1",
        *[line for line in out.splitlines() if line.startswith(f"✓ {TWO} built")],
        f"- {CHILD} not built: it extends {ONE}, which was not built",
        f"- {GRANDCHILD} not built: it extends {CHILD}, which was not built",
    ]
    assert err.startswith(f"shoal: {ONE}: step 1/1 failed: RUN make\n")
    assert "\n  it did not complete successfully: exit code: 1\n" in err
    assert (out + err).count("make") == out.count("RUN make") + 1, "plain lines of progress name it too"


def test_json_says_how_each_image_ended(fake: FakeEngine, checkout: Path) -> None:
    fake.failing = ("child",)
    shoal(fake, checkout, "build", "two-*")
    code, out, err = shoal(fake, checkout, "build", "--all", "--json")
    assert code == 6, err
    one, two, child, grandchild = json.loads(out)
    assert code == 6
    assert f"✗ {CHILD} failed" in err
    assert (one["tag"], one["state"], one["error"]) == (ONE, "built", None)
    assert one["seconds"] > 0
    assert one["image_id"].startswith("sha256:")
    assert two["state"] == "up to date"
    assert (child["state"], child["image_id"]) == ("failed", None)
    assert child["seconds"] > 0
    assert child["error"].startswith(f"{CHILD}: step 1/1 failed: RUN make\n")
    assert (grandchild["state"], grandchild["error"]) == ("not tried", f"it extends {CHILD}, which was not built")
    assert grandchild["seconds"] is None


def test_several_failures_are_all_reported(fake: FakeEngine, checkout: Path) -> None:
    fake.failing = ("one", "two")
    code, _, err = shoal(fake, checkout, "build", "--all")
    assert code == 6
    assert {line for line in err.splitlines() if line.startswith("shoal: ")} == {
        f"shoal: {tag}: step 1/1 failed: RUN make" for tag in (ONE, TWO)
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_closes_the_builds(fake: FakeEngine, checkout: Path, number: signal.Signals, code: int) -> None:
    fake.hanging = ("one", "two")
    process = start(fake, checkout, "build", "--all")
    deadline = time.monotonic() + 30
    while len(fake.under_way) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert fake.under_way == {ONE, TWO}
    process.send_signal(number)
    _, err = process.communicate(timeout=30)  # the builds themselves never end
    assert process.returncode == code, err
    assert "Traceback" not in err
    while fake.under_way and time.monotonic() < deadline:
        time.sleep(0.02)
    assert fake.under_way == set()
