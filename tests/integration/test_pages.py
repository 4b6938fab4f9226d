"""The blocks of tutorials and how-to pages that are marked `<!-- run with Docker -->` run with the images.

The other levels are in tests/docs/test_blocks.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from ..docs.blocks import PAGES, Block, find_blocks
from ..docs.shell_blocks import copy_repository, directory_of, run_blocks
from ..tested_images import CLONE, PYTORCH_CPU
from ..trusting import trust_directories
from .conftest import ROOT

IMAGE, OWN_IMAGE = "my-training", f"pages-by-test-{CLONE}"
"""The image that pages build, and its name here, so that nobody's own image is replaced."""
BLOCKS = [block for page in PAGES for block in find_blocks(page) if block.with_docker]
Record = Callable[[str, object], None]
pytestmark = [pytest.mark.xdist_group("pages"), pytest.mark.long]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The repository, of which `make` takes the virtual environment as it is, and the digits."""
    subprocess.run(["make", "setup"], cwd=ROOT, check=True)
    root = tmp_path_factory.mktemp("pages") / "shoal"
    copy_repository(root)
    subprocess.run([".venv/bin/python", "examples/digits/prepare.py", ".cache/digits"], cwd=root, check=True)
    with pytest.MonkeyPatch.context() as patch:  # `shoal` is not installed from the copy
        trust_directories(patch, root.parent / "settings", root)
        yield root


@pytest.fixture
def own_image(client: docker.DockerClient) -> Iterator[None]:
    yield
    for tag in (tag for image in client.api.images(OWN_IMAGE) for tag in image["RepoTags"]):
        client.images.remove(tag, force=True)


@pytest.mark.usefixtures("own_image")
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_commands_run(page: str, copy: Path, record_property: Record) -> None:
    blocks = [rename(block) for block in BLOCKS if block.page == page]
    environ = {"IMAGE": PYTORCH_CPU}
    record_property("blocks", {"run with Docker": run_blocks(blocks, directory_of(blocks[0], copy), environ)})


def rename(block: Block) -> Block:
    return block._replace(source=block.source.replace(IMAGE, OWN_IMAGE))
