"""What is inside the built images: the CUDA 11 ones themselves, run on the CPU."""

from __future__ import annotations

import json
from typing import Any

import docker
import pytest

from shoal.inside import contents, sbom, truth
from shoal.matrix.spec import BuildSpec, load

from .conftest import ROOT

LOAD_NVIDIA = """
import ctypes, glob, json, sysconfig
paths = sorted(glob.glob(sysconfig.get_path("platlib") + "/nvidia/*/lib/lib*.so*"))
failed = {}
for path in paths:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        failed[path] = str(error)
print(json.dumps({"count": len(paths), "failed": failed}))
"""


def run(client: docker.DockerClient, image: str, *command: str) -> str:
    """Return what a command prints in a container of `image`; a failing command raises."""
    return client.containers.run(image, list(command), remove=True, stderr=False).decode()


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
CPU_TENSORFLOW = "tensorflow-training:2.14.1-cpu-py311-debian12"


# Packages may each be there and still not fit together, at run time only: torch, numpy and pyarrow did not.
TRAIN_A_TRANSFORMER = """
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [0, 1] * 4})
sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
arguments = TrainingArguments("/tmp/out", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
print(Trainer(BertForSequenceClassification(BertConfig(**sizes)), arguments, train_dataset=rows).train().global_step)
"""
HUGGINGFACE = ["huggingface", "huggingface-*-cu130-*", "huggingface-*-cpu-*"]


@pytest.fixture(params=[image.tag for image in load(ROOT / "buildspec.yml").images])
def image(request: pytest.FixtureRequest) -> str:
    tag: str = request.param
    return tag


def test_pytorch_is_built_for_cuda_11(client: docker.DockerClient, pytorch: str) -> None:
    program = "import torch; print(torch.__version__, torch.version.cuda, torch.distributed.is_nccl_available())"
    assert run(client, pytorch, "python", "-c", program).split() == ["2.0.1+cu117", "11.7", "True"]


@pytest.mark.parametrize("name", ["pytorch-*-cu130-debian12", "pytorch-*-cu130-debian13"])
def test_a_current_pytorch_is_built_for_cuda_13(client: docker.DockerClient, matrix: BuildSpec, name: str) -> None:
    program = "import torch; print(torch.__version__, torch.version.cuda, torch.distributed.is_nccl_available())"
    assert run(client, matrix.select(name).tag, "python", "-c", program).split() == ["2.13.0+cu130", "13.0", "True"]


def test_what_programs_link_into_kernels_is_found(client: docker.DockerClient, matrix: BuildSpec) -> None:
    """As Numba looks for it. `dropped.yml` took it away once, as a static library."""
    program = "from cuda import pathfinder; print(pathfinder.find_static_lib('cudadevrt'))"
    image = matrix.select("pytorch-*-cu130-debian12").tag
    assert run(client, image, "python", "-c", program).endswith("/nvidia/cu13/lib/libcudadevrt.a\n")


def test_tensorflow_is_built_for_cuda_11(client: docker.DockerClient, matrix: BuildSpec) -> None:
    program = "import tensorflow as tf; print(tf.__version__, tf.sysconfig.get_build_info()['cuda_version'])"
    output = run(client, matrix.select("tensorflow").tag, "python", "-c", program)
    assert output.split() == ["2.14.1", "11.8"]


def test_the_cpu_image_has_no_cuda(client: docker.DockerClient, matrix: BuildSpec) -> None:
    image = matrix.select("pytorch-training:2.13.0-cpu-py311-debian12").tag
    program = "import torch; print(torch.__version__, torch.version.cuda)"
    assert run(client, image, "python", "-c", program).split() == ["2.13.0+cpu", "None"]
    assert json.loads(run(client, image, "python", "-c", LOAD_NVIDIA))["count"] == 0


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_huggingface_stands_on_pytorch(client: docker.DockerClient, matrix: BuildSpec, name: str) -> None:
    image = matrix.select(name)
    program = "import accelerate, datasets, transformers as t; print(t.__version__, t.utils.is_torch_available())"
    output = run(client, image.tag, "python", "-c", program)
    assert output.split()[-2:] == [image.version, "True"]
    assert "train --explain" in run(client, image.tag, "train", "--help")


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_a_transformer_trains_without_a_network(client: docker.DockerClient, matrix: BuildSpec, name: str) -> None:
    """With the environment of a rank, in which accelerate takes other ways."""
    options: dict[str, Any] = {"remove": True, "network_mode": "none", "stderr": False}
    options["environment"] = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    output = client.containers.run(matrix.select(name).tag, ["python", "-c", TRAIN_A_TRANSFORMER], **options)
    assert output.split()[-1] == b"2"


def test_the_cpu_image_of_tensorflow_has_no_cuda(client: docker.DockerClient, matrix: BuildSpec) -> None:
    image = matrix.select(CPU_TENSORFLOW).tag
    program = "import tensorflow as tf; print(tf.__version__, tf.test.is_built_with_cuda())"
    assert run(client, image, "python", "-c", program).split() == ["2.14.1", "False"]
    assert json.loads(run(client, image, "python", "-c", LOAD_NVIDIA))["count"] == 0


@pytest.mark.parametrize("user", ["root", "1000"])
def test_tensorflows_libraries_are_found_by_name(client: docker.DockerClient, matrix: BuildSpec, user: str) -> None:
    """By the dynamic loader alone: the environment is empty and Python knows no path of theirs."""
    program = f"import ctypes\nfor name in {OPENED_BY_TENSORFLOW}:\n    ctypes.CDLL(name)"
    command = ["env", "-i", "/opt/venv/bin/python", "-c", program]
    client.containers.run(matrix.select("tensorflow").tag, command, remove=True, user=user, read_only=True)


def test_xla_has_ptxas_and_libdevice(client: docker.DockerClient, matrix: BuildSpec) -> None:
    assert "release 11.8" in run(client, matrix.select("tensorflow").tag, "python", "-c", XLA_TOOLS)


@pytest.mark.parametrize("user", ["root", "1000"])
def test_the_framework_works_for_any_user_and_writes_nothing(
    client: docker.DockerClient, image: str, user: str
) -> None:
    module = "tensorflow" if image.startswith("tensorflow") else "torch"
    program = f"import {module} as framework; print(framework.ones([2, 2]).shape)"
    command = ["python", "-c", program]
    options: dict[str, Any] = {"user": user, "read_only": True, "tmpfs": {"/tmp": ""}, "stderr": False}
    assert b"2, 2" in client.containers.run(image, command, remove=True, **options)


@pytest.mark.parametrize(("framework", "least"), [("pytorch", 20), ("tensorflow", 20)])
def test_every_nvidia_library_loads(client: docker.DockerClient, matrix: BuildSpec, framework: str, least: int) -> None:
    found: dict[str, Any] = json.loads(run(client, matrix.select(framework).tag, "python", "-c", LOAD_NVIDIA))
    assert found["failed"] == {}
    assert found["count"] >= least


def test_pip_check_passes(client: docker.DockerClient, image: str) -> None:
    assert "No broken requirements found." in run(client, image, "pip", "check")


def test_mpirun_works_by_hand(client: docker.DockerClient, image: str) -> None:
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), flush=True)"
    output = run(client, image, "mpirun", "--oversubscribe", "-np", "2", "python", "-m", "mpi4py", "-c", program)
    assert output.replace("\n", "") == "22"


def test_our_packages_carry_metadata(client: docker.DockerClient, image: str) -> None:
    program = "from importlib.metadata import version as v; print(v('shoal-toolkit'), v('shoal-smdistributed'))"
    assert len(run(client, image, "python", "-c", program).split()) == 2


def test_the_engine_was_compiled_for_it_and_the_compiler_is_gone(client: docker.DockerClient, image: str) -> None:
    program = "from smdistributed.core import native; print(native.load().engine_bytes(2, 4096))"
    assert int(run(client, image, "python", "-c", program)) > 0
    script = "for name in cc gcc clang as ld; do command -v $name; done; find / -xdev -name cc1"
    assert bool(run(client, image, "sh", "-c", f"{script} || true").split()) == image.endswith("-devel")
    assert "smdistributed/core/_engine.so" in run(client, image, "pip", "show", "-f", "shoal-smdistributed")


def test_no_key_and_no_ssh_is_inside(client: docker.DockerClient, image: str) -> None:
    script = (
        "find / -xdev -name 'ssh_host_*' -o -xdev -name 'id_*sa' -o -xdev -name authorized_keys; command -v sshd ssh"
    )
    assert run(client, image, "sh", "-c", f"{script} || true").split() == []


def test_no_file_of_the_builds_mounts_stays_inside(client: docker.DockerClient, image: str) -> None:
    """What they held, test_build.py looks for in the layers, by planted marks."""
    listing = run(client, image, "sh", "-c", "find /run/machine /run/layer /root/.cache /etc/pip.conf -type f || true")
    assert listing.split() == []


def test_the_tag_says_what_is_inside(client: docker.DockerClient, matrix: BuildSpec, image: str) -> None:
    found = contents.read(client, image)
    assert truth.differences(found, matrix.select(image)) == []
    document = sbom.cyclonedx(found)
    purls = [component.get("purl", "") for component in document["components"]]
    listed = run(client, image, "pip", "list", "--format=json")
    assert len([purl for purl in purls if purl.startswith("pkg:pypi/")]) == len(json.loads(listed))
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)


def test_labels_and_command(client: docker.DockerClient, image: str) -> None:
    found = client.images.get(image)
    tag = image.split(":")[1]
    assert found.labels["org.opencontainers.image.version"] == tag
    assert any(label.startswith("com.amazonaws.ml.engines.sagemaker.dlc.framework.") for label in found.labels)
    assert found.attrs["Config"]["Cmd"] == ["train"]
    assert not found.attrs["Config"]["Entrypoint"]
