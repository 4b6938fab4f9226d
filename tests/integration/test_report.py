"""`shoal size` on a real image, against what the engine, pip and dpkg say of it."""

from __future__ import annotations

import io
import json

import docker
import pytest
from packaging.utils import canonicalize_name
from rich.console import Console

from shoal.commands.common import format_json
from shoal.image import deflate, size, size_document
from shoal.image.inventory import Inventory
from shoal.image.owners import FileOwner
from shoal.matrix.spec import BuildSpec

from ..tested_images import PYTORCH_CPU

pytestmark = pytest.mark.xdist_group("report")

PACKAGES = r"${Package} ${Version} ${Architecture} ${db:Status-Status}\n"
MOST_AROUND_A_FILE = 2560  # bytes: a header, the padding to a block, and two blocks and a header more for a long name


@pytest.fixture(scope="module")
def tag() -> str:
    """The CPU image of PyTorch: the smallest with a framework."""
    return PYTORCH_CPU


@pytest.fixture(scope="module")
def found(tag: str, matrix: BuildSpec) -> Inventory:
    """What the command finds; without compressing, which takes long, and whose tests are elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deflate, "LEVEL", 0)
        return size.read_inventories([tag], matrix, Console(file=io.StringIO()))[0]


def run(client: docker.DockerClient, image: str, *command: str) -> str:
    return client.containers.run(image, list(command), remove=True, stderr=False, network_mode="none").decode()


def test_the_sizes_are_the_engines_and_what_tar_puts_around_files(
    client: docker.DockerClient, tag: str, found: Inventory
) -> None:
    """The engine adds up the contents of files; the layers' tars have headers, padding and directories as well."""
    image = client.images.get(tag)
    around = found.sum.bytes - int(image.attrs["Size"])
    directories = sum(of.bytes for owner, of in found.owners.items() if owner.kind == "tar")
    assert directories < around <= directories + found.sum.files * MOST_AROUND_A_FILE
    assert [layer.digest for layer in found.layers] == image.attrs["RootFS"]["Layers"]
    assert found.sum.bytes < found.sum.compressed < 1.01 * found.sum.bytes  # stored, all of it


def test_torch_is_the_largest_and_little_is_nobodys(found: Inventory) -> None:
    owners = found.owners
    assert next(iter(owners)) == FileOwner("python", "torch")
    assert sum(of.bytes for owner, of in owners.items() if owner.kind == "other") < 0.05 * found.sum.bytes


def test_the_packages_are_those_of_pip_and_dpkg(client: docker.DockerClient, tag: str, found: Inventory) -> None:
    listed = json.loads(run(client, tag, "pip", "list", "--format", "json"))
    ours = {(of.name, of.version) for of in found.python if of.path.startswith("opt/venv/")}
    assert ours == {(canonicalize_name(of["name"]), of["version"]) for of in listed}
    lines = run(client, tag, "dpkg-query", "--show", f"--showformat={PACKAGES}").splitlines()
    assert {f"{of.name} {of.version} {of.architecture} installed" for of in found.debian} == {
        line for line in lines if line.endswith(" installed")
    }


def test_the_document_has_every_distribution_and_the_sums(found: Inventory) -> None:
    (image,) = json.loads(format_json(size_document.make_document([found])))["images"]
    assert {of["name"] for of in image["python_distributions"]} == {of.name for of in found.python}
    assert (image["bytes"], image["compressed"]) == (found.sum.bytes, found.sum.compressed)
