"""The structure of every image of the matrix: what must not be in it, what must, and how little it needs to run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from shoal.builds import base_image
from shoal.matrix.spec import ImageSpec, System

from ..tested_images import PYTORCH_CPU, TENSORFLOW_CPU
from .conftest import StartHost, write_tree
from .image_containers import DEVEL, LOWER, MATRIX, ImageContainer, ImageContainers, as_parameter, running

SYSTEMS = MATRIX.systems()
CACHES = ("*/.cache", "/var/cache", "/var/lib/apt/lists", "/tmp", "/var/tmp", "/run", "/root")
IN_CACHES = " ".join(f"-o -path '{directory}/*'" for directory in CACHES)

# What to look for among the paths of an image: conditions of find. One run of it looks for all.
PATHS = {
    "setuid or setgid files": "-type f -perm /6000",
    "files that anybody may write": r"! -type l -perm -0002 ! \( -type d -perm -1000 \)",
    "files of nobody": "-nouser -o -nogroup",
    "keys of ssh": "-name 'ssh_host_*' -o -name 'id_*sa' -o -name authorized_keys",
    "ssh": "-path '*bin/ssh' -o -path '*bin/sshd'",
    "compilers": " -o ".join(f"-path '*bin/{name}'" for name in ("cc", "gcc", "clang", "as", "ld")) + " -o -name cc1",
    # Among them what a build mounts: /run/machine, /run/layer and pip's configuration. test_build.py plants marks in
    # what is mounted, and looks for them in the layers.
    "caches and leftovers": rf"-type f \( -name '*.whl' -o -name core -o -path /etc/pip.conf {IN_CACHES} \)",
    "logs": "-path '/var/log/*' -type f -size +0",
}
# What to look for in files: commands that print what they find, one a line.
TEXTS = {
    "accounts": "cut -d: -f1,3,7 /etc/passwd",
    "passwords": "awk -F: '$2 !~ /^[*!]/' /etc/shadow",
    "private keys": (
        "grep --recursive --files-with-matches --binary-files=without-match --exclude-dir=proc --exclude-dir=sys"
        " --regexp='^-----BEGIN [A-Z ]*PRIVATE KEY-----$' /"
    ),
}
SEARCHES = (*PATHS, *TEXTS)
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
    "cp /bin/true /usr/bin/ssh && cp /bin/true /usr/bin/cc",
    "echo '-----BEGIN RSA PRIVATE KEY-----' > /opt/key.pem && touch /opt/id_rsa /root/left && echo 1 > /var/log/l",
)
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
AWS = "com.amazonaws.ml.engines.sagemaker.dlc."
FOR_GPUS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
SUM = "from mpi4py import MPI\nimport os\nprint('sum', MPI.COMM_WORLD.allreduce(1), os.getuid())\n"
LOCKED_DOWN: dict[str, Any] = {
    "read_only": True,
    "tmpfs": "/tmp",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "network_mode": "none",
}


WITHOUT_ACCOUNT = "12345:12345"


@functools.cache
def found(container: ImageContainer) -> dict[str, frozenset[str]]:
    """Return what each search finds in an image, by one script that prints the name of the search before each line."""
    paths = " , ".join(rf"\( {conditions} \) -printf '{what}\t%p\n'" for what, conditions in PATHS.items())
    texts = (rf"{command} | sed 's/^/{what}\t/'" for what, command in text_searches(container.tag).items())
    script = "; ".join(["set -e", f"find / -xdev {paths}", *texts])
    lines = [line.partition("\t") for line in container.run("sh", "-c", script).splitlines()]
    return {what: frozenset(text for name, _, text in lines if name == what) for what in SEARCHES}


def text_searches(tag: str) -> dict[str, str]:
    """Returns the commands for an image. To read all files takes longest, so each is read in one image that has it."""
    elsewhere = {"private keys": ":" if tag in LOWER else f"{TEXTS['private keys']} --exclude-dir=venv"}
    return TEXTS | elsewhere if tag in LOWER or tag.endswith("-devel") else TEXTS


@pytest.mark.parametrize("what", [what for what in SEARCHES if what != "compilers"])
def test_nothing_is_inside_that_should_not_be(
    client: docker.DockerClient, image_containers: ImageContainers, image: ImageSpec, what: str
) -> None:
    allowed: frozenset[str] = frozenset()
    if what in AS_IN_THE_BASE:
        allowed = found(image_containers.of(reference(client, image.system)))[what]
    known = [words for kind, words in KNOWN if kind == what]
    more = found(image_containers.of(image.tag))[what] - allowed
    assert {path for path in more if not any(words in path for words in known)} == set()


def test_only_images_with_packages_of_compilers_have_some(container: ImageContainer, image: ImageSpec) -> None:
    """A child has those of its parent."""
    of_parent = parent.packages if (parent := MATRIX.parent(image)) else ()
    assert bool(found(container)["compilers"]) == bool(image.packages or of_parent)


def reference(client: docker.DockerClient, system: System) -> str:
    """Return the reference of a system's base image."""
    beneath = base_image.find_base(client, system)
    assert beneath is not None
    return beneath.reference


@pytest.mark.parametrize("system", SYSTEMS, ids=[system.suite for system in SYSTEMS])
def test_the_searches_find_what_they_are_for(
    client: docker.DockerClient, image_containers: ImageContainers, system: System
) -> None:
    """In a container of the base, with one of each put in."""
    tag = reference(client, system)
    before = found(image_containers.of(tag))
    with running(client, tag, read_only=False) as container:
        container.run("sh", "-c", " && ".join(PLANTED))
        after = found(container)
    assert {what for what in SEARCHES if not after[what] - before[what]} == set()


def test_its_labels(client: docker.DockerClient, image: ImageSpec) -> None:
    labels = client.images.get(image.tag).labels
    values = {name: labels.get(f"{OCI}{name}", "") for name in LABELS}
    assert {name: value for name, value in values.items() if not re.fullmatch(LABELS[name], value)} == {}
    assert {name.removeprefix(OCI) for name in labels if name.startswith(OCI)} <= LABELS.keys()
    assert (values["title"], values["version"]) == (image.repository, image.version_tag)
    beneath = base_image.find_base(client, image.system)
    assert beneath is not None
    expected = (image.extends, "") if image.extends else (beneath.name, beneath.digest)
    assert (values["base.name"], values["base.digest"]) == expected


def test_its_labels_of_aws(client: docker.DockerClient, image: ImageSpec) -> None:
    labels = client.images.get(image.tag).labels
    expected = {
        f"framework.{image.framework}.{image.version.replace('.', '-')}",
        "device." + ".".join(part for part in (image.device, image.cuda) if part),
        f"os.{image.os}",
        f"python.{image.python}",
        "arch.x86",
        "job.training",
    }
    assert {name: labels.get(f"{AWS}{name}") for name in expected} == dict.fromkeys(expected, "true")


def test_its_command_and_environment(client: docker.DockerClient, image: ImageSpec) -> None:
    config = client.images.get(image.tag).attrs["Config"]
    assert config["Cmd"] == ["train"]
    assert not config["Entrypoint"]
    set_in_it = dict(entry.split("=", 1) for entry in config["Env"])
    assert ENVIRONMENT.items() <= set_in_it.items()
    assert (FOR_GPUS.items() <= set_in_it.items()) == (image.device == "gpu")
    assert set_in_it["PATH"].startswith("/opt/venv/bin:")


def trained() -> Iterator[Any]:
    """Yield images and users as parameters.

    The user without an account may do least, and trains in each image but those whose layers are in another one. Root
    trains in one of each framework.
    """
    for image in MATRIX.choose(skip=[*DEVEL, *LOWER]):
        yield as_parameter(image, WITHOUT_ACCOUNT)
    for image in MATRIX.choose([PYTORCH_CPU, TENSORFLOW_CPU]):
        yield as_parameter(image, "root")


@pytest.mark.parametrize(("image", "user"), list(trained()))
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
