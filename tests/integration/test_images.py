"""What is inside the built images: the CUDA 11 ones themselves, run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker
import pytest
import tomllib

from shoal.image import facts, manifest, sbom
from shoal.image.facts import ImageFacts, run_command
from shoal.matrix.project import Project
from shoal.matrix.spec import ImageSpec

from ..tested_images import PYTORCH_CPU
from .image_containers import DEVEL, LOWER, MATRIX, SCRATCH, ImageContainer, each
from .image_probe import COMMANDS

# What TensorFlow 2.14 opens, by these names, once it has found a GPU or profiles one (dso_loader.cc in its
# tsl/platform/default), and what others open: cuRAND, NCCL. Not libnvinfer: TensorRT 8 has left PyPI, and TensorFlow
# goes on without.
OPENED_BY_TENSORFLOW = (
    *("libcudart.so.11.0", "libcublas.so.11", "libcublasLt.so.11", "libcufft.so.10", "libcurand.so.10"),
    *("libcusolver.so.11", "libcusparse.so.11", "libcudnn.so.8", "libcupti.so.11.8", "libnccl.so.2"),
)

# TensorFlow looks for both in this directory beside its package, among others; it says so in its own library.
XLA_TOOLS = """
import pathlib, subprocess, sysconfig
site = pathlib.Path(sysconfig.get_path("platlib"))
assert b"/../nvidia/cuda_nvcc" in (site / "tensorflow/libtensorflow_framework.so.2").read_bytes()
tools = site / "nvidia/cuda_nvcc"
assert (tools / "nvvm/libdevice/libdevice.10.bc").stat().st_size
print(subprocess.run([tools / "bin/ptxas", "--version"], check=True, capture_output=True, text=True).stdout)
"""
# What GPUDirect Storage opens where there are adapters of InfiniBand: it needs libraries that come with their drivers.
WITH_ADAPTERS = ("libcufile_rdma.so.1",)
USERS = ("root", "1000")
TENSORFLOW = "tensorflow-*-gpu-*"
HUGGINGFACE = "huggingface-*"


def framework_facts(container: ImageContainer, image: ImageSpec, user: str = "1000") -> dict[str, Any]:
    """Return the facts of an image's framework. transformers imports torch, so that its probe reports both."""
    if image.framework == "huggingface":
        found: dict[str, Any] = container.facts("transformers", user)["torch"]
        return found
    return container.facts("tensorflow" if image.framework == "tensorflow" else "torch", user)


def cuda_version(image: ImageSpec) -> str | None:
    """Return 11.7 for cu117."""
    return f"{image.cuda[2:-1]}.{image.cuda[-1]}" if image.cuda else None


@pytest.mark.parametrize("image", each("pytorch-*", HUGGINGFACE, skip=[*DEVEL, *LOWER]))
def test_pytorch_is_built_for_the_cuda_of_the_tag(container: ImageContainer, image: ImageSpec) -> None:
    release = MATRIX.parent(image) or image
    found = framework_facts(container, image)
    assert found["version"] == f"{release.version}+{image.cuda or 'cpu'}"
    assert found["cuda"] == cuda_version(image)
    assert found["nccl"] == (image.device == "gpu")


@pytest.mark.parametrize("image", each("tensorflow-*", skip=DEVEL))
def test_tensorflow_is_built_for_the_cuda_of_the_tag(container: ImageContainer, image: ImageSpec) -> None:
    found = container.facts("tensorflow", "1000")
    assert found["version"] == image.version
    assert found["cuda"] == cuda_version(image)
    assert found["built_with_cuda"] == (image.device == "gpu")


@pytest.mark.parametrize("image", each(skip=[*DEVEL, *LOWER]))
def test_the_framework_works_for_any_user_and_writes_nothing(container: ImageContainer, image: ImageSpec) -> None:
    """A user without an account or a home directory, on a read-only root. Jobs train as root in test_run.py."""
    assert framework_facts(container, image)["shape"] == [2, 2]


@pytest.mark.parametrize("image", each("pytorch-*-gpu-*", TENSORFLOW, skip=DEVEL))
def test_every_nvidia_library_loads(container: ImageContainer) -> None:
    found = container.facts("nvidia")
    assert {path: why for path, why in found["failed"].items() if Path(path).name not in WITH_ADAPTERS} == {}
    assert found["count"] >= 20


@pytest.mark.parametrize("image", each("*-cpu-*", skip=DEVEL))
def test_an_image_for_cpus_has_no_nvidia_libraries(container: ImageContainer) -> None:
    assert container.facts("nvidia")["count"] == 0


@pytest.mark.parametrize("image", each("pytorch-*-cu13?-*", skip=DEVEL))
def test_what_programs_link_into_kernels_is_found(container: ImageContainer) -> None:
    """As Numba looks for it. `dropped.yml` took it away once, as a static library."""
    program = "from cuda import pathfinder; print(pathfinder.find_static_lib('cudadevrt'))"
    assert container.python(program).endswith("/nvidia/cu13/lib/libcudadevrt.a\n")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("image", each(TENSORFLOW, skip=DEVEL))
def test_tensorflows_libraries_are_found_by_name(container: ImageContainer, user: str) -> None:
    """By the dynamic loader alone: the environment is empty and Python knows no path of theirs."""
    program = f"import ctypes\nfor name in {OPENED_BY_TENSORFLOW}:\n    ctypes.CDLL(name)"
    container.run("env", "-i", "/opt/venv/bin/python", "-c", program, user=user)


@pytest.mark.parametrize("image", each(TENSORFLOW, skip=DEVEL))
def test_xla_has_ptxas_and_libdevice(container: ImageContainer) -> None:
    assert "release 11.8" in container.python(XLA_TOOLS)


@pytest.mark.parametrize("image", each(HUGGINGFACE))
def test_huggingface_extends_pytorch(container: ImageContainer, image: ImageSpec) -> None:
    found = container.facts("transformers", "1000")
    assert (found["version"], found["is_torch_available"]) == (image.version, True)
    assert "train --explain" in container.run("train", "--help")


@pytest.mark.parametrize("image", each(HUGGINGFACE))
def test_a_transformer_trains_without_a_network(container: ImageContainer) -> None:
    """With the environment of a rank, on a read-only root, as a user without an account."""
    assert container.facts("transformers", "1000")["steps"] == 2


@pytest.mark.parametrize("image", each(skip=[*DEVEL, *LOWER]))
def test_pip_check_passes(container: ImageContainer) -> None:
    assert "No broken requirements found." in container.run("pip", "check")


@pytest.mark.parametrize("image", each(skip=[*DEVEL, HUGGINGFACE]))
def test_scripts_find_the_everyday_packages(container: ImageContainer, image: ImageSpec) -> None:
    """torchvision works on a CPU too, without its operators: PyPI's file is linked with CUDA's libraries."""
    found = container.facts("everyday", "1000")
    assert found["lacking"] == {}
    assert ("logits" in found) == (image.framework == "pytorch")
    if image.framework == "pytorch":
        assert found["logits"] == [1, 1000]
        assert found["events"] == 1
        assert found["kept"] == [0] if image.device == "gpu" else "Couldn't load custom C++ ops" in found["kept"]


@pytest.mark.parametrize("image", each(skip=[*DEVEL, *LOWER]))
def test_mpirun_works_by_hand(container: ImageContainer) -> None:
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), flush=True)"
    command = ("mpirun", "--oversubscribe", "-np", "2", "python", "-m", "mpi4py", "-c", program)
    assert container.run(*command, environment=SCRATCH).replace("\n", "") == "22"


@pytest.mark.parametrize("image", each(skip=[*DEVEL, *LOWER]))
def test_a_program_that_mpirun_did_not_start_is_one_rank(container: ImageContainer) -> None:
    """Open MPI is not where it was built. Lightning and others import mpi4py to ask."""
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    assert container.run("python", "-c", program, environment=SCRATCH).strip() == "1"


def test_our_packages_have_the_versions_of_this_checkout(container: ImageContainer, project: Project) -> None:
    files = [project.root / name / "pyproject.toml" for name in ("toolkit", "checkpoint", "library", "rehearsal")]
    about = [tomllib.loads(path.read_text())["project"] for path in files]
    assert container.facts("ours")["versions"] == {entry["name"]: entry["version"] for entry in about}


def test_ranks_import_frameworks_fast(container: ImageContainer) -> None:
    assert "shoal_toolkit.hooks.imports" in container.facts("ours")["finders"]


def test_the_engine_was_compiled_for_it(container: ImageContainer) -> None:
    found = container.facts("ours")
    assert found["engine_bytes"] > 0
    assert "smdistributed/core/_engine.so" in found["files"]


def test_our_modules_are_compiled(container: ImageContainer) -> None:
    """Whether this process made the bytecode or a step of the build did."""
    found = container.facts("ours")
    assert found["stale"] == []
    assert found["modules"] > 150


def test_its_commands_are_on_the_path(container: ImageContainer) -> None:
    assert container.facts("ours")["commands"] == [*COMMANDS]


@pytest.mark.usefixtures("ask_running_containers")
def test_the_tag_says_what_is_inside(client: docker.DockerClient, container: ImageContainer, image: ImageSpec) -> None:
    found = facts.read_facts(client, image.tag)
    assert manifest.check_tag(found, image) == []
    document = sbom.make_sbom(found)
    purls = [component.get("purl", "") for component in document["components"]]
    listed = json.loads(container.run("pip", "list", "--format=json"))
    assert len([purl for purl in purls if purl.startswith("pkg:pypi/")]) == len(listed)
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)


@pytest.mark.parametrize("image", each(PYTORCH_CPU))
def test_a_container_of_its_own_says_the_same(
    client: docker.DockerClient, request: pytest.FixtureRequest, image: ImageSpec
) -> None:
    """So the test above may ask a running container, for which `shoal inspect` starts one."""

    def read() -> ImageFacts:
        found = facts.read_facts(client, image.tag)
        return found.model_copy(update={"environment": found.environment | {"HOSTNAME": ""}})

    alone = read()
    request.getfixturevalue("ask_running_containers")
    assert read() == alone


@pytest.mark.parametrize("image", each(PYTORCH_CPU))
def test_a_probe_has_no_rights(client: docker.DockerClient, image: ImageSpec) -> None:
    """What an image answers with is its own program: it may not even try."""
    script = (
        "grep -E 'Uid|Cap|NoNewPrivs' /proc/self/status; ls /sys/class/net;"
        " touch /tmp/x 2>&1; cat /etc/shadow 2>&1; mount -t tmpfs none /mnt 2>&1; su -c id 2>&1; true"
    )
    said = run_command(client, image.tag, ["sh", "-c", script])
    words = [line.split() for line in said.splitlines()]
    facts = {line[0].rstrip(":"): line[1:] for line in words if line[0].endswith(":")}
    assert set(facts["Uid"]) == {"65534"}
    assert {int(mask, 16) for name, (mask, *_) in facts.items() if name.startswith("Cap")} == {0}
    assert facts["NoNewPrivs"] == ["1"]
    assert ["lo"] in words
    assert "Read-only file system" in said
    assert "/etc/shadow: Permission denied" in said
    assert "uid=0" not in said
