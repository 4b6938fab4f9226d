"""The structure of every image of the matrix: what must not be in it, what must, and how little it needs to run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from shoal.build import base
from shoal.engine import containers
from shoal.engine.images import find
from shoal.matrix.spec import ImageSpec, load

from .conftest import ROOT, StartHost, write_tree

MATRIX = load(ROOT / "buildspec.yml")
IMAGES, SYSTEMS = MATRIX.images, MATRIX.systems()
FIND = "find / -xdev"
CACHES = ("*/.cache", "/var/cache", "/var/lib/apt/lists", "/tmp", "/var/tmp", "/run", "/root")
IN_CACHES = " ".join(f"-o -path '{directory}/*'" for directory in CACHES)

# What to look for, and how: each prints what it finds, one a line.
SEARCHES = {
    "setuid or setgid files": f"{FIND} -type f -perm /6000",
    "files that anybody may write": rf"{FIND} ! -type l -perm -0002 ! \( -type d -perm -1000 \)",
    "files of nobody": rf"{FIND} \( -nouser -o -nogroup \)",
    "accounts": "cut -d: -f1,3,7 /etc/passwd",
    "passwords": "awk -F: '$2 !~ /^[*!]/' /etc/shadow",
    "private keys": (
        "grep --recursive --files-with-matches --binary-files=without-match --exclude-dir=proc --exclude-dir=sys"
        " --regexp='^-----BEGIN [A-Z ]*PRIVATE KEY-----$' / || true"
    ),
    "keys of ssh": rf"{FIND} \( -name 'ssh_host_*' -o -name 'id_*sa' -o -name authorized_keys \)",
    "caches and leftovers": rf"{FIND} -type f \( -name '*.whl' -o -name core {IN_CACHES} \)",
    "logs": f"{FIND} -path '/var/log/*' -type f -size +0",
}
# Of those, what Debian's own base has too: an image adds nothing to it.
AS_IN_THE_BASE = {"setuid or setgid files", "accounts", "caches and leftovers", "logs"}
# Of those, what is known and harmless: words by which a path is known, and the reason.
KNOWN = {
    ("caches and leftovers", "/ensurepip/_bundled/"): "Debian's python3-venv makes virtual environments of it",
    ("caches and leftovers", "/usr/share/python-wheels/"): "as above",
}
PLANTED = (
    "cp /bin/true /opt/true && chmod 4755 /opt/true",
    "touch /opt/open && chmod 666 /opt/open && chown 4321 /opt/open",
    "echo 'a:x:7777:0::/:/bin/sh' >> /etc/passwd && echo 'a:$1$x:1::::::' >> /etc/shadow",
    "echo '-----BEGIN RSA PRIVATE KEY-----' > /opt/key.pem && touch /opt/id_rsa /root/left && echo 1 > /var/log/l",
)
COMMANDS = ("train", "smddprun", "smddpmprun", "mpirun", "python", "pip")
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_plm_rsh_agent": "ssh:rsh:/bin/false",
}
# By label, what its value has to look like; "" where it is not there, or emptied. docs/decisions/labels.md.
OCI = "org.opencontainers.image."
LABELS = {
    "title": r"[a-z]+-training",
    "version": r"[a-z0-9.-]+",
    "base.name": r"([a-z0-9.-]+\.[a-z]+/)?([a-z0-9._-]+/)*[a-z0-9_-]+:[\w.-]+",
    "base.digest": r"(sha256:[0-9a-f]{64})?",
    "revision": r"([0-9a-f]{40})?",
    "source": r"(https://\S+)?",
    "licenses": r"",
    "created": r"",
}
FOR_GPUS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
SUM = "from mpi4py import MPI\nimport os\nprint('sum', MPI.COMM_WORLD.allreduce(1), os.getuid())\n"
# Prints which of our modules have no bytecode of theirs, checked by content (PEP 552), and how many there are.
STALE = """
import importlib.util, pathlib, sysconfig
packages = [pathlib.Path(sysconfig.get_path("purelib"), name) for name in ("shoal_toolkit", "smdistributed")]
modules = [path for package in packages for path in package.rglob("*.py")]
for path in modules:
    begins = importlib.util.MAGIC_NUMBER + bytes([3, 0, 0, 0]) + importlib.util.source_hash(path.read_bytes())
    compiled = pathlib.Path(importlib.util.cache_from_source(path))
    if not (compiled.exists() and compiled.read_bytes().startswith(begins)):
        print(path)
print(len(modules))
"""
LOCKED_DOWN: dict[str, Any] = {
    "read_only": True,
    "tmpfs": "/tmp",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "network_mode": "none",
}


@functools.cache
def found(image: str) -> dict[str, frozenset[str]]:
    """What each search finds in an image, from one container."""
    script = "; ".join(f"echo '== {what}'; {search}" for what, search in SEARCHES.items())
    output = docker.from_env().containers.run(image, ["sh", "-c", script], remove=True, stderr=False).decode()
    parts = [part.splitlines() for part in output.split("== ")[1:]]
    return {what: frozenset(lines) for what, *lines in parts}


@pytest.fixture(params=IMAGES, ids=[image.tag for image in IMAGES])
def image(request: pytest.FixtureRequest) -> ImageSpec:
    chosen: ImageSpec = request.param
    return chosen


@pytest.mark.parametrize("what", SEARCHES)
def test_nothing_is_inside_that_should_not_be(client: docker.DockerClient, image: ImageSpec, what: str) -> None:
    allowed: frozenset[str] = frozenset()
    if what in AS_IN_THE_BASE:
        beneath = base.find(client, image.system)
        assert beneath is not None
        allowed = found(beneath.reference)[what]
    known = [words for kind, words in KNOWN if kind == what]
    more = {path for path in found(image.tag)[what] - allowed if not any(words in path for words in known)}
    assert more == set()


@pytest.fixture(params=SYSTEMS, ids=[system.suite for system in SYSTEMS])
def planted(request: pytest.FixtureRequest, client: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """The base, and an image of it with one of each put in."""
    beneath = base.find(client, request.param)
    assert beneath is not None
    tag = containers.unique("test-structure")
    container = client.containers.run(beneath.reference, ["sh", "-c", " && ".join(PLANTED)], detach=True)
    try:
        assert container.wait()["StatusCode"] == 0, container.logs()
        container.commit(tag)
        yield beneath.reference, tag
    finally:
        container.remove()
        if find(client, tag):
            client.images.remove(tag, force=True)


def test_the_searches_find_what_they_are_for(planted: tuple[str, str]) -> None:
    before, after = planted
    assert {what for what in SEARCHES if not found(after)[what] - found(before)[what]} == set()


def test_its_labels(client: docker.DockerClient, image: ImageSpec) -> None:
    labels = client.images.get(image.tag).labels
    said = {name: labels.get(f"{OCI}{name}", "") for name in LABELS}
    assert {name: value for name, value in said.items() if not re.fullmatch(LABELS[name], value)} == {}
    assert {name.removeprefix(OCI) for name in labels if name.startswith(OCI)} <= LABELS.keys()
    assert (said["title"], said["version"]) == (image.repository, image.version_tag)
    beneath = base.find(client, image.system)
    assert beneath is not None
    expected = (image.extends, "") if image.extends else (beneath.name, beneath.digest)
    assert (said["base.name"], said["base.digest"]) == expected


def test_its_commands_are_on_the_path(client: docker.DockerClient, image: ImageSpec) -> None:
    script = f"for name in {' '.join(COMMANDS)}; do command -v $name; done"
    output = client.containers.run(image.tag, ["sh", "-c", script], remove=True).decode()
    assert [Path(line).name for line in output.splitlines()] == list(COMMANDS)


def test_our_modules_are_compiled(client: docker.DockerClient, image: ImageSpec) -> None:
    """Whether this process made the bytecode or a step of the build did."""
    output = client.containers.run(image.tag, ["python", "-c", STALE], remove=True).decode()
    *stale, count = output.splitlines()
    assert stale == []
    assert int(count) > 150


def test_its_environment(client: docker.DockerClient, image: ImageSpec) -> None:
    entries = client.images.get(image.tag).attrs["Config"]["Env"]
    set_in_it = dict(entry.split("=", 1) for entry in entries)
    assert ENVIRONMENT.items() <= set_in_it.items()
    assert (FOR_GPUS.items() <= set_in_it.items()) == (image.device == "gpu")
    assert set_in_it["PATH"].startswith("/opt/venv/bin:")


@pytest.mark.parametrize("user", ["root", "12345:12345"])
def test_it_trains_without_capabilities_on_a_read_only_root(
    start_host: StartHost, image: ImageSpec, tmp_path: Path, user: str
) -> None:
    values = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    tree = write_tree(tmp_path / "ml", SUM, values)
    for path in (tree, *tree.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    ended = start_host(image.tag, tree=tree, user=user, **LOCKED_DOWN).wait()
    assert ended.code == 0, ended.output
    assert ended.output.count(f"sum 2 {0 if user == 'root' else user.split(':')[0]}") == 2
