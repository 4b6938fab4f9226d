"""Contents of an image: the bill of materials, the manifest, and the check of its tag."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
from tests.fake_docker import FakeDocker

from shoal import docker_client
from shoal.commands import inspection
from shoal.docker_client import containers
from shoal.docker_client import images as engine_images
from shoal.errors import ImageError
from shoal.image import facts as inside
from shoal.image import manifest, probe, sbom
from shoal.image.facts import ImageFacts, read_facts
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec

TAG = "pytorch-training:2.0.1-gpu-py311-cu117-debian12"
FACTS: dict[str, Any] = {
    "tag": TAG,
    "id": "sha256:" + "ab" * 32,
    "created": "2026-01-02T03:04:05.678Z",
    "bytes": 3 * 1024**2,
    "labels": {"org.opencontainers.image.title": "pytorch-training", "shoal.steps": "{}"},
    "system": {"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"},
    "python": "3.11.2",
    "machine": "x86_64",
    "distributions": [
        {"name": "Torch", "version": "2.0.1", "licence": "BSD-3-Clause", "homepage": ""},
        {"name": "torch", "version": "2.0.1+cu117", "licence": "BSD|3", "homepage": ""},
        {"name": "nvidia-cuda-runtime-cu11", "version": "11.7.99", "licence": "", "homepage": ""},
    ],
    "packages": [
        {
            "name": "libc6",
            "version": "2:2.36-9+deb12u4",
            "architecture": "amd64",
            "source": "glibc",
            "licence": "LGPL-2.1+",
        }
    ],
    "commands": {"mpirun": "mpirun (Open MPI) 4.1.8", "train": ""},
    "environment": {"LANG": "C.UTF-8", "HOME": "/root"},
}


def contents(**changes: Any) -> ImageFacts:
    return ImageFacts.model_validate({**FACTS, **changes})


def test_sbom() -> None:
    document = sbom.make_sbom(contents())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert document["serialNumber"] == sbom.make_sbom(contents(bytes=1))["serialNumber"]  # of the digest alone
    assert document["serialNumber"] != sbom.make_sbom(contents(id="sha256:00"))["serialNumber"]
    named = document["metadata"]["component"]
    assert (named["name"], named["version"]) == tuple(TAG.split(":"))
    libc, _, torch, runtime = document["components"][1:]
    assert libc["purl"] == "pkg:deb/debian/libc6@2%3A2.36-9+deb12u4?arch=amd64&distro=debian-12"
    assert libc["properties"] == [{"name": "debian:source", "value": "glibc"}]
    assert torch["purl"] == "pkg:pypi/torch@2.0.1%2Bcu117"
    assert torch["licenses"] == [{"license": {"name": "BSD|3"}}]
    assert "licenses" not in runtime
    references = [component["bom-ref"] for component in document["components"]]
    assert len(set(references)) == len(references)


def test_the_manifest(matrix: BuildSpec) -> None:
    page = manifest.format_markdown(manifest.make_manifest(contents(), matrix.select(TAG)))
    assert page.startswith(f"# {TAG}\n")
    assert "The tag is correct." in page
    assert "| torch | 2.0.1+cu117 | BSD&#124;3 |" in page  # a bar of its own would be a column
    assert "| libc6 | 2:2.36-9+deb12u4 | LGPL-2.1+ |" in page
    assert "| LANG | C.UTF-8 |" in page
    assert "shoal.steps" not in page
    widths = {
        line.count("|") for line in page.split("## Python")[1].split("## ")[0].splitlines() if line.startswith("|")
    }
    assert widths == {4}
    assert "tag" not in manifest.format_markdown(manifest.make_manifest(contents(tag="other:1"), None)).split("##")[0]


def test_manifest_has_no_control_characters() -> None:
    evil = {"name": "x\x1b]0;title\x07\x1b[2J", "version": "1\r2\u202e", "licence": "", "homepage": ""}
    found = contents(distributions=[evil], environment={"A\x9b": "\x1b[31mred"})
    page = manifest.format_markdown(manifest.make_manifest(found, None))
    assert all(char.isprintable() or char == "\n" for char in page)
    assert "&#93;0;title" in page


def test_the_manifest_as_json(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docker_client, "connect", lambda: None)
    monkeypatch.setattr(engine_images, "find_image", lambda *_: True)
    monkeypatch.setattr(inside, "read_facts", lambda _, tag: contents(tag=tag, python="3.12.1"))
    monkeypatch.chdir(project.root)
    inspection.write_manifest(TAG, as_json=True)
    text = capsys.readouterr().out
    document = json.loads(text)
    assert (document["tag"], document["id"], document["bytes"]) == (TAG, FACTS["id"], FACTS["bytes"])
    assert document["wrong"] == ["python is py312, not py311"]
    assert document["system"]["mpirun"] == "mpirun (Open MPI) 4.1.8"
    assert (document["python"], document["debian"]) == (FACTS["distributions"], FACTS["packages"])
    assert document["environment"] == {"LANG": "C.UTF-8"}
    assert document["labels"] == {"org.opencontainers.image.title": "pytorch-training"}
    inspection.write_manifest("other:1", tmp_path / "other.json", as_json=True)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"wrote {tmp_path / 'other.json'}\n")
    assert json.loads((tmp_path / "other.json").read_text())["wrong"] is None


DEVEL = [
    {"name": name, "version": "1", "architecture": "amd64", "source": name, "licence": ""}
    for name in ("g++", "libpython3-dev", "make", "ninja-build", "python3-dev")
]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"python": "3.12.1"}, ["python is py312, not py311"]),
        ({"system": {"ID": "ubuntu", "VERSION_ID": "22.04"}}, ["os is ubuntu22.04, not debian12"]),
        ({"distributions": FACTS["distributions"][:2]}, ["device is cpu, not gpu", "cuda is none, not cu117"]),
        (
            {"distributions": [{**FACTS["distributions"][1], "version": "2.1.0"}, FACTS["distributions"][2]]},
            ["version is 2.1.0, not 2.0.1"],
        ),
        ({"packages": DEVEL}, ["variant is devel, not runtime"]),
        ({"packages": DEVEL[:2]}, []),  # as the small compiler of later releases
    ],
)
def test_wrong_tags_are_reported(matrix: BuildSpec, changes: dict[str, Any], words: list[str]) -> None:
    assert manifest.check_tag(contents(**changes), matrix.select(TAG)) == words


def test_the_name_of_a_framework_is_read_as_pip_does() -> None:
    """TensorFlow 2.21 spells it `tensorflow_cpu`."""
    found = {**FACTS["distributions"][1], "name": "tensorflow_cpu", "version": "2.21.0"}
    assert manifest._find_framework(contents(distributions=[found]), "tensorflow") == "2.21.0"


class Empty:
    """Docker without images."""

    def __init__(self) -> None:
        self.images = self.api = self

    def get(self, _: str) -> None:
        raise docker.errors.ImageNotFound("none")

    def __call__(self) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize("command", [inspection.write_manifest, inspection.write_sbom])
@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("pytorch", f"^{TAG}: not built yet. Fix: shoal build {TAG}$"),
        ("ubuntu:24.04", "^ubuntu:24.04: no such image in Docker or in buildspec.yml. Fix: build or pull it"),
    ],
)
def test_missing_image_has_a_fix_that_fits(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: Callable[[str], None], tag: str, words: str
) -> None:
    monkeypatch.setattr(docker_client, "connect", Empty)
    monkeypatch.chdir(project.root)
    with pytest.raises(ImageError, match=words):
        command(tag)


@pytest.mark.parametrize("name", ["probe.py"])
def test_probe_runs_with_python_39(name: str) -> None:
    """Images may have an old Python: the probe uses no later syntax, and type hints are not evaluated."""
    tree = ast.parse(files("shoal.image").joinpath(name).read_text(), feature_version=(3, 9))
    future, *_ = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    assert [alias.name for alias in future.names] == ["annotations"]
    younger = {"freedesktop_os_release"}  # of 3.10
    assert not younger & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def refuse_to_start() -> None:
    raise docker.errors.APIError("400", explanation="no such file")


def test_probe_container_has_no_privileges() -> None:
    """The image's own Python runs, which may be any program."""
    image = SimpleNamespace(attrs={"Config": {"Volumes": {"/data": {}}}})
    client: Any = FakeDocker(image, logs=lambda stderr, stream: iter([b"{}"]))
    assert inside.run_probe(client, "foreign:1", Path(probe.__file__)) == {}
    made = client.made[0].settings
    assert {name: made[name] for name in ("user", "cap_drop", "security_opt", "read_only", "network_mode")} == {
        "user": "65534:65534",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "network_mode": "none",
    }
    assert made["pids_limit"] > 0
    assert made["tmpfs"] == {"/data": "ro"}, "Docker makes a volume otherwise"
    assert made["mem_limit"] == made["memswap_limit"] == "2g"
    assert made["use_config_proxy"] is False and made["labels"].keys() == {containers.JOB_LABEL}
    assert not {"mounts", "volumes", "privileged", "cap_add", "pid_mode"} & made.keys()


@pytest.mark.parametrize(
    ("command", "fake", "problem"),
    [
        (
            ["python3", "-c", ""],
            {"start": refuse_to_start},
            r"^foreign:1: cannot be inspected, as it has no Python: no such file. Fix: ",
        ),
        (
            ["dpkg-query"],
            {"start": refuse_to_start},
            r"^foreign:1: cannot be inspected, as it has no dpkg-query: no such",
        ),
        (
            ["a"],
            {"wait": lambda: {"StatusCode": 1}, "logs": lambda tail: b"why\xff"},
            "^foreign:1: cannot be inspected:\nwhy\ufffd$",
        ),
        (["a"], {"logs": lambda stderr, stream: repeat(bytes(2**20))}, "^foreign:1: the output of its a has more than"),
    ],
)
def test_an_image_that_cannot_be_inspected_is_an_error(command: list[str], fake: dict[str, Any], problem: str) -> None:
    client: Any = FakeDocker(**fake)
    with pytest.raises(ImageError, match=problem):
        inside.run_command(client, "foreign:1", command)


def test_output_of_an_image_is_decoded_in_every_case() -> None:
    client: Any = FakeDocker(logs=lambda stderr, stream: iter([b"warning"] if stderr else [b"a\xc3", b"\xa4\xff"]))
    assert inside.run_command(client, "foreign:1", ["a"]) == "a\u00e4\ufffd"


def test_an_image_that_docker_lacks_is_not_inspected() -> None:
    def get(tag: str) -> None:
        raise docker.errors.ImageNotFound(tag)

    client: Any = FakeDocker()
    client.images.get = get
    with pytest.raises(ImageError, match=r"^foreign:1: Docker does not have this image\. Fix: build it or pull it"):
        inside.run_command(client, "foreign:1", ["a"])
    assert client.made == []


def ask_image(monkeypatch: pytest.MonkeyPatch, says: str) -> ImageFacts:
    monkeypatch.setattr(inside, "run_command", lambda *_: says)
    image = SimpleNamespace(id="sha256:own", attrs={"Created": "2026-01-01", "Size": 5}, labels={"own": "1"})
    client: Any = SimpleNamespace(images=SimpleNamespace(get=lambda _: image))
    return read_facts(client, "foreign:1")


def test_facts_of_docker_override_claims_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    lies = {"tag": "prod:1", "id": "sha256:another", "created": "1999", "bytes": 1, "labels": {"not": "own"}}
    found = ask_image(monkeypatch, json.dumps({**FACTS, **lies}))
    assert (found.tag, found.id, found.created, found.bytes) == ("foreign:1", "sha256:own", "2026-01-01", 5)
    assert found.labels == {"own": "1"}


@pytest.mark.parametrize("says", ["[" * 100_000, "[1]", "null", "{}", '{"system": {"a": 1}}', "9" * 9999, "x"])
def test_malformed_probe_output_is_an_error(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    with pytest.raises(ImageError, match=r"^foreign:1: the output of its Python is (not|malformed)"):
        ask_image(monkeypatch, says)


def test_a_system_without_dpkg_has_an_empty_list_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.list_packages() == []
    assert probe.read_first_line(["pip", "--version"]) == ""


def test_distributions_without_a_name_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("~orch-1", ""), ("b-1", "Name: b\nVersion: 1\n"), ("A-2", "Name: A\n")):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [(of["name"], of["version"]) for of in probe.list_distributions()] == [("A", ""), ("b", "1")]


def test_first_os_release_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "second").write_text('# a comment\nID=debian\nPRETTY_NAME="Debian \\"GNU\\" 12"\nEMPTY=\n')
    found = probe.read_os_release(str(tmp_path / "first"), str(tmp_path / "second"))
    assert found == {"ID": "debian", "PRETTY_NAME": 'Debian "GNU" 12', "EMPTY": ""}
    assert probe.read_os_release(str(tmp_path / "first")) == {}


def test_probe_on_this_machine() -> None:
    """Runs as in an image. Needs a Debian system with dpkg-query."""
    text = files("shoal.image").joinpath("probe.py").read_text()
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    found = ImageFacts.model_validate({**FACTS, **json.loads(ended.stdout)})
    assert found.versions["pytest"] == version("pytest")
    assert next(one.licence for one in found.distributions if one.name == "pytest").startswith("MIT")
    assert "libc6" in {package.name for package in found.packages}
    assert found.python == ".".join(map(str, sys.version_info[:3]))
