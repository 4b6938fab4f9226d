"""The efa variant: an image that extends a runtime image, with rdma-core and the plugin that the user names."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from shoal.builds import debian_lock, plan
from shoal.errors import SpecError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, load
from shoal.sources import lock, render

from ..tested_images import HUGGINGFACE_CPU, PYTORCH_CPU
from ..tested_images import PYTORCH_CU117 as GPU

PLUGIN = b"an archive"


def turn_on(project: Project, directory: Path, plugin: bytes = PLUGIN) -> Project:
    """Writes this checkout's definitions with the axis on, and a plugin, to a directory."""
    shutil.copytree(project.templates, directory / "dockerfiles", ignore=shutil.ignore_patterns("rendered"))
    text = project.buildspec.read_text().replace("variant: [runtime, devel]", "variant: [runtime, devel, efa]")
    digest = hashlib.sha256(plugin).hexdigest()
    (directory / "buildspec.yml").write_text(f"{text}\nnccl_plugin: {{file: nccl/plugin.tar.gz, sha256: {digest}}}\n")
    (directory / "nccl").mkdir()
    (directory / "nccl/plugin.tar.gz").write_bytes(plugin)
    return Project(directory)


@pytest.fixture
def with_efa(project: Project, tmp_path: Path) -> Project:
    return turn_on(project, tmp_path)


def test_an_efa_image_extends_its_runtime_image(project: Project, matrix: BuildSpec, with_efa: Project) -> None:
    """So no layer of a runtime image changes, nor its name, and one of Hugging Face has it too."""
    spec = load(with_efa.buildspec)
    assert [image for image in spec.images if image.variant != "efa"] == list(matrix.images)
    for tag in (PYTORCH_CPU, GPU, HUGGINGFACE_CPU):
        image = spec.select(f"{tag}-efa")
        assert (image.extends, lock.layers_of(image), lock.are_current(with_efa, spec, image)) == (tag, (), True)
        steps = render.read_steps(with_efa, image)
        assert steps[1].packages == (image.system.efa,)
        assert [step.name for step in steps] == [
            *("base image", "EFA"),
            *(["NCCL plugin"] if image.device == "gpu" else []),
            "settings",
        ]
        assert not list(spec.list_extensions(spec.select(tag))) or tag == HUGGINGFACE_CPU


def test_the_debian_packages_of_efa_have_a_lock_of_their_own(project: Project, with_efa: Project) -> None:
    """A package in the lock of a release would build all its images again from the first step."""
    spec = load(with_efa.buildspec)
    image = spec.select(f"{GPU}-efa")
    own = debian_lock.read_lock(project, "bookworm", "efa").packages
    assert {name.partition("_")[0] for name in own} >= {*image.system.efa}
    assert not own.keys() & debian_lock.read_lock(project, "bookworm").packages.keys()
    sources = plan.gather_sources(with_efa, spec, image, {})
    assert all(name.encode() in sources.debian["lock.txt"] for name in own)


def test_a_plugin_is_an_input_of_its_step(with_efa: Project) -> None:
    spec = load(with_efa.buildspec)
    sources = plan.gather_sources(with_efa, spec, spec.select(f"{GPU}-efa"), {})
    assert sources.files == {"plugin": {"archive": PLUGIN}}
    (step,) = (step for step in sources.make_record("base@id").steps if step.name == "NCCL plugin")
    assert step.inputs == {"plugin/archive": hashlib.sha256(PLUGIN).hexdigest()[:12]}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("sha256: ", "sha256: 0"), r"buildspec.yml:\d+: nccl_plugin.sha256: "),
        (("nccl/plugin.tar.gz, sha256", "nccl/plugin.tar.gz, sha"), r"buildspec.yml:\d+: nccl_plugin.sha"),
        (("nccl/plugin", "absent/plugin"), r"absent/plugin.tar.gz: NCCL's plugin cannot be read: .*Fix: name its path"),
        (("nccl/plugin.tar.gz", "buildspec.yml"), r"buildspec.yml: its SHA-256 is [0-9a-f]{64}, and nccl_plugin says"),
    ],
)
def test_a_wrong_or_missing_digest_is_an_error(with_efa: Project, edit: tuple[str, str], words: str) -> None:
    file = with_efa.buildspec
    head, key, entry = file.read_text().rpartition("nccl_plugin")
    file.write_text(head + key + entry.replace(*edit))
    with pytest.raises(SpecError, match=words):
        render.read_steps(with_efa, load(file).select(f"{GPU}-efa"))


def test_a_plugin_may_be_the_library_itself(with_efa: Project) -> None:
    (with_efa.root / "nccl/libnccl-net.so").write_bytes(PLUGIN)
    with_efa.buildspec.write_text(with_efa.buildspec.read_text().replace("plugin.tar.gz", "libnccl-net.so"))
    image = load(with_efa.buildspec).select(f"{GPU}-efa")
    steps = render.read_steps(with_efa, image)
    assert render.read_own_files(with_efa, image, steps) == {"plugin": {"libnccl-net.so": PLUGIN}}
    assert "cp /run/layer/libnccl-net.so ." in steps[2].text
