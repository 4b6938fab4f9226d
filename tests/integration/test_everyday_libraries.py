"""Libraries that people train with, on two ranks of the library here: they end as plain torch does in one process.

One container runs all of them; see everyday/all_of_them.py. What the image lacks, the job's requirements.txt brings.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.host import machine
from shoal.matrix.spec import BuildSpec

from .conftest import StartHost, write_tree

EVERYDAY = Path(__file__).with_name("everyday")
IMAGE = "huggingface-*-cpu-*"
LIBRARIES = (
    *("mpi4py", "lightning", "transformers", "accelerate on smddp", "accelerate on nccl"),
    *("deepspeed stage 1", "deepspeed stage 2"),
)


@pytest.mark.long
def test_everyday_libraries_train_as_plain_torch_does(start_host: StartHost, matrix: BuildSpec, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "ml", (EVERYDAY / "all_of_them.py").read_text())
    for file in EVERYDAY.iterdir():
        if file.is_file():
            shutil.copy(file, tree / "code")
    configuration = tmp_path / "machine"  # how this machine reaches packages
    configuration.mkdir()
    for name, content in machine.read().files("bookworm").items():
        (configuration / name).write_bytes(content)
    host = start_host(
        matrix.choose([IMAGE])[0].tag,
        tree=tree,
        volumes={configuration: "/run/machine"},
        env={"PIP_CONFIG_FILE": "/run/machine/pip.conf", **dict(machine.read().proxies)},
    )
    ended = host.wait(timeout=580)
    assert ended.code == 0, ended.output
    for library in LIBRARIES:
        assert f"equal: {library}" in ended.output, library
