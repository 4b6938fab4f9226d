"""Builds on the real engine, with small images of their own so that a build takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from shoal import docker_client
from shoal.docker_client.images import find_image
from shoal.matrix.project import LAYERS, Project
from shoal.sources import packages

from ..repeats import SEED, SOAK, times
from ..tested_images import CLONE, PYTORCH_CPU
from ..trusting import trust_directories

pytestmark = pytest.mark.xdist_group("build")  # its images have one tag
SHOAL = Path(sys.executable).with_name("shoal")
PROBE = f"probe{CLONE}"
TAG = f"{PROBE}-training:1.0-cpu-py311-debian12"
SPEC = f'mpi: []\ndefaults: {{{PROBE}: "{TAG}"}}\n'
VERSIONS = """\
systems: {debian12: {suite: bookworm, upstream: "debian:bookworm-slim", sources: sources.list, python: py311}}
releases:
  - {framework: NAME, version: "1.0", device: cpu, requirements: [x], disk_gib: 1}
""".replace("NAME", PROBE)


@pytest.fixture
def probe(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose only image is built from the template that the test writes."""
    trust_directories(monkeypatch, tmp_path / "settings", tmp_path, project.root / ".cache")
    (tmp_path / "buildspec.yml").write_text(SPEC)
    for room in ("checkpoint", "library", "rehearsal", "toolkit"):
        shutil.copytree(project.root / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    locks = tmp_path / "dockerfiles" / "requirements" / TAG.replace(":", "-")
    locks.mkdir(parents=True)
    for layer in LAYERS:
        (locks / f"{layer}.txt").write_text("# Made by `shoal lock` for: x\n")
    (tmp_path / "dockerfiles" / "versions.yml").write_text(VERSIONS)
    link_cache(tmp_path, project)
    yield tmp_path
    client = docker_client.connect()
    if find_image(client, TAG):
        client.images.remove(TAG, force=True)
    for image_id in untagged(client, tmp_path):
        with contextlib.suppress(docker.errors.ImageNotFound):  # its child's removal took it along
            client.images.remove(image_id, force=True)


def link_cache(probe: Path, project: Project) -> None:
    """A base made before is found again; one that has to be made is made in the project's own cache.

    A fresh clone on a machine whose engine has all images already has no cache yet.
    """
    cache = project.root / ".cache"
    cache.mkdir(exist_ok=True)
    (probe / ".cache").symlink_to(cache)


def template(probe: Path, text: str) -> None:
    """Write the template of an image of which each step has a label, for `leftovers`."""
    (probe / "dockerfiles" / f"{PROBE}.j2").write_text(
        f"{{% call step('probe') %}}\n{{{{ begin_stage() }}}}\nLABEL test={probe}\n{text}\n{{% endcall %}}\n"
    )


def build(probe: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHOAL, "build", "--all"], cwd=probe, capture_output=True, text=True, check=False)


def untagged(client: docker.DockerClient, probe: Path) -> set[str]:
    return {image["Id"] for image in client.api.images(filters={"dangling": True, "label": f"test={probe}"})}


def leftovers(client: docker.DockerClient, probe: Path) -> set[str]:
    """Containers and untagged images of this project alone: other tests and clones may use the same engine."""
    found = client.api.containers(all=True, filters={"label": f"test={probe}"})
    return untagged(client, probe) | {container["Id"] for container in found}


def test_a_build_then_nothing_to_do_then_a_change(probe: Path, client: docker.DockerClient) -> None:
    template(probe, 'RUN echo made > /made\nCMD ["cat", "/made"]')
    first = build(probe)
    assert first.returncode == 0, first.stderr
    assert f"✓ {TAG} built" in first.stdout
    assert client.containers.run(TAG, remove=True) == b"made\n"
    assert "up to date" in build(probe).stdout
    old = str(client.images.get(TAG).id)
    template(probe, 'RUN echo new > /made\nCMD ["cat", "/made"]')
    assert f"✓ {TAG} built" in build(probe).stdout
    assert client.containers.run(TAG, remove=True) == b"new\n"
    assert old not in {image["Id"] for image in client.api.images(all=True)}


def test_a_failing_step_is_shown_with_its_last_lines(probe: Path, client: docker.DockerClient) -> None:
    template(probe, "RUN echo first\nRUN for i in $(seq 30); do echo line $i; done; exit 7")
    result = build(probe)
    assert result.returncode == 6
    assert re.search(r"step \d/\d failed: RUN for i", result.stderr)
    assert "exit 7" in result.stderr
    assert "line 30" in result.stderr
    assert "line 3\n" not in result.stderr
    assert "The whole log:" in result.stderr
    assert leftovers(client, probe) == set()


@pytest.mark.parametrize("end", ["", " && false"], ids=["succeeds", "fails"])
def test_the_machines_configuration_serves_the_build_and_does_not_stay(
    probe: Path,
    project: Project,
    client: docker.DockerClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: str,
) -> None:
    """A step sees what is planted in pip's configuration, netrc, the CA bundle and a proxy. No image has it later."""
    shutil.copy(project.templates / "macros.j2", probe / "dockerfiles")
    (tmp_path / "ca.crt").write_text("planted-certificate\n")
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://user:planted-password@index.invalid/simple\n"
        "extra-index-url = https://private.invalid/simple\n"
    )
    (tmp_path / "netrc").write_text("machine private.invalid login me password planted-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("HTTPS_PROXY", "http://planted-proxy.invalid:3128")
    check = "cd /run/machine && grep -q 'plant[e]d-password' pip.conf && grep -q 'plant[e]d-netrc' pip.conf"
    check += " && grep -q 'plant[e]d-cert' ca.crt"
    check += " && echo $HTTPS_PROXY | grep -q 'plant[e]d-proxy' && echo seen > /made"
    check += f" && : {uuid.uuid4()}"  # else BuildKit may remember the step of an earlier run of this test
    template(
        probe,
        f'{{% import "macros.j2" as install with context %}}{{{{ install.run([install.machine]) }}}}{check}\n'
        f"RUN cat /made{end}",
    )
    result = build(probe)
    assert result.returncode == (6 if end else 0), result.stdout + result.stderr
    (log,) = (probe / ".cache" / "shoal" / "logs").glob(f"{TAG.replace(':', '-')}.log")
    assert "    seen\n" in log.read_text(), "the step has seen all of it"
    assert "planted-" not in log.read_text() + result.stdout + result.stderr
    left = client.images.list(all=True, filters={"label": f"test={probe}"})
    assert [image.tags for image in left] == ([] if end else [[TAG]])
    for image in left:
        assert "planted-" not in json.dumps([image.history(), image.attrs])
        saved = b"".join(image.save())
        assert b"seen\n" in saved
        assert b"planted-" not in saved


def test_an_interrupt_stops_the_build_and_leaves_nothing(probe: Path, client: docker.DockerClient) -> None:
    marker = f"sleep 987.{os.getpid()}"
    template(probe, f"RUN echo waiting; {marker}")
    process = subprocess.Popen(
        [SHOAL, "build", "--all"], cwd=probe, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert wait_until(lambda: marker in processes() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert wait_until(lambda: marker not in processes()), "the step still runs"
    assert wait_until(lambda: not leftovers(client, probe))
    assert find_image(client, TAG) is None


@pytest.mark.soak
def test_an_interrupt_at_any_moment_leaves_nothing(
    probe: Path, client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    started = time.monotonic()
    drawn = random.Random(SEED)
    for number, share in enumerate([1.0, *(drawn.random() for _ in range(times(1, 20)))]):
        template(probe, f"RUN sleep 0.3; echo {number} > /one\nRUN sleep 0.3; echo {number} > /two")
        process = subprocess.Popen(
            [SHOAL, "build", "--all"], cwd=probe, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if number == 0:  # to its end: how long a build takes
            assert process.wait(timeout=60) == 0, process.communicate()
            seconds = time.monotonic() - started
            client.images.remove(TAG, force=True)
            continue
        time.sleep(share * seconds)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        built = find_image(client, TAG)
        # An interrupt after the last step may come too late.
        assert is_interrupted(process.returncode, stderr) or (process.returncode == 0 and built), stderr
        if built:
            client.images.remove(TAG, force=True)
        assert wait_until(lambda: not leftovers(client, probe)), f"moment {share:.2f}"
        assert list(temporary.iterdir()) == [], f"moment {share:.2f}"


def processes() -> str:
    """Return the command lines of all processes (not by `ps`: minimal systems have none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def is_interrupted(code: int, stderr: str) -> bool:
    """Whether a command of ours was ended by SIGINT.

    Before Python hears signals it dies of it. While Python starts it exits with 1, by many ways, and no line is ours.
    """
    is_starting = code == 1 and "KeyboardInterrupt" in stderr and "images/shoal" not in stderr
    return is_starting or code in (130, -signal.SIGINT)


def wait_until(condition: object, seconds: float = 60) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def copied(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what images are built from, as another clone would have it, in which pytorch is named again.

    So an image has the steps of the real one and a tag of its own: tests beside this one go on with theirs.
    """
    trust_directories(monkeypatch, tmp_path / "settings", tmp_path, project.root / ".cache")
    for name in ("checkpoint", "library", "rehearsal", "toolkit", "dockerfiles"):
        shutil.copytree(project.root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project.buildspec, tmp_path)
    link_cache(tmp_path, project)
    templates = tmp_path / "dockerfiles"
    (templates / "pytorch.j2").rename(templates / "again.j2")
    for locks in (templates / "requirements").glob("pytorch-*"):
        locks.rename(locks.with_name(again(locks.name)))
    for file in (tmp_path / "buildspec.yml", templates / "versions.yml"):
        file.write_text(again(file.read_text()))
    return tmp_path


def again(text: str) -> str:
    return re.sub(r"\bpytorch\b(?!\.org)", "again", text)


def layers(client: docker.DockerClient, tag: str) -> list[str]:
    found: list[str] = client.images.get(tag).attrs["RootFS"]["Layers"]
    return found


@contextlib.contextmanager
def built_again(client: docker.DockerClient, copied: Path, tag: str) -> Iterator[str]:
    """Build an image from the copy, in a process of its own; its tag. It is removed at the end."""
    try:
        result = subprocess.run([SHOAL, "build", again(tag)], cwd=copied, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        yield again(tag)
    finally:
        if find_image(client, again(tag)):
            client.images.remove(again(tag))


def test_two_clones_of_one_commit_give_the_same_layers(
    client: docker.DockerClient, pytorch: str, copied: Path, tmp_path: Path
) -> None:
    """The other clone has no cache of our packages: it makes them anew."""
    (tmp_path / ".cache").unlink()
    with built_again(client, copied, pytorch) as tag:
        assert layers(client, tag) == layers(client, pytorch)


def test_a_change_in_the_toolkit_rebuilds_only_its_layer(
    client: docker.DockerClient, pytorch: str, copied: Path
) -> None:
    """The real CUDA 11 image, from a copy of the project with one changed line in the toolkit."""
    with (copied / "toolkit" / "shoal_toolkit" / "__init__.py").open("a") as file:
        file.write("# changed\n")
    with built_again(client, copied, pytorch) as tag:
        before, after = layers(client, pytorch), layers(client, tag)
        last = -1 if packages.can_compile_for("3.11") else -2
        assert after[:last] == before[:last]
        assert after[last] != before[last]


LARGEST = {
    "framework": ("torch", "numpy", "scipy", "scikit-learn", "sympy", "networkx", "narwhals", "mpmath"),
    "everyday": ("pandas", "matplotlib", "tensorboard", "grpcio", "h5py", "pillow", "fonttools", "protobuf"),
}


def leave_out_the_largest(locks: Path) -> None:
    for layer, names in LARGEST.items():
        lock, starts = locks / f"{layer}.txt", tuple(f"{name}==" for name in names)
        lines = lock.read_text().splitlines(keepends=True)
        assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
        lock.write_text("".join(line for line in lines if not line.startswith(starts)))


def test_a_framework_that_cannot_be_imported_fails_the_build(copied: Path) -> None:
    leave_out_the_largest(copied / "dockerfiles" / "requirements" / again(PYTORCH_CPU).replace(":", "-"))
    result = subprocess.run(
        [SHOAL, "build", again(PYTORCH_CPU)], cwd=copied, capture_output=True, text=True, check=False
    )
    assert result.returncode == 6
    assert "ModuleNotFoundError: No module named 'torch'" in result.stderr


def test_two_builds_of_one_commit_differ_only_where_the_report_says(client: docker.DockerClient, copied: Path) -> None:
    """Every step runs again, because a variable was added that changes nothing else.

    The image is the real one in `make soak`. In the suite its largest packages are left out, which take two minutes.
    """
    original = PYTORCH_CPU
    if not SOAK:
        leave_out_the_largest(copied / "dockerfiles" / "requirements" / again(original).replace(":", "-"))
        template = copied / "dockerfiles" / "again.j2"
        template.write_text(template.read_text().replace('install.imported("torch")', '""'))
    macros = copied / "dockerfiles" / "macros.j2"
    mark = "export APT_CONFIG=/run/machine/apt.conf"
    assert macros.read_text().count(mark) == 1
    with built_again(client, copied, original) as tag:
        first = f"{tag}-first"
        client.images.get(tag).tag(first)
        try:
            macros.write_text(macros.read_text().replace(mark, f"{mark} AGAIN=yes"))
            subprocess.run([SHOAL, "build", tag], cwd=copied, capture_output=True, check=True)
            assert len({*layers(client, first)} & {*layers(client, tag)}) == 1, "the base's layer alone"
            command = [str(SHOAL), "diff", first, tag, "--json"]
            document = json.loads(subprocess.run(command, cwd=copied, capture_output=True, check=True).stdout)
        finally:
            client.images.remove(first)
    assert set(document["unexpected"]) <= {"(configuration) Labels"}, "the variable"
    assert set(document["found"].values()) == {"time", "bytecode's time", "content"}
    assert len(document["found"]) > (10_000 if SOAK else 2_000)
