"""Globs on tags: what they mean, in which order, and the error when they match nothing."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.matrix.selectors import choose_tags

GPU = "pytorch-training:2.0.1-gpu-py311-cu117-debian12"
CPU = "pytorch-training:2.13.0-cpu-py311-debian12"
TENSORFLOW = "tensorflow-training:2.14.1-gpu-py311-cu118-debian12"
TAGS = (GPU, CPU, TENSORFLOW)
DEFAULTS = {"pytorch": GPU, "tensorflow": TENSORFLOW}


@pytest.mark.parametrize(
    ("wanted", "skip", "chosen"),
    [
        ([], [], [GPU, CPU, TENSORFLOW]),
        (["pytorch"], [], [GPU]),
        (["pytorch-*-gpu-*"], [], [GPU]),
        (["pytorch-training:*"], [], [GPU, CPU]),
        (["pytorch-training-2.13.0-cpu-py311-debian12"], [], [CPU]),
        (["tensorflow", "pytorch*", GPU], [], [TENSORFLOW, GPU, CPU]),
        (["*"], ["*cpu*"], [GPU, TENSORFLOW]),
        ([], ["pytorch"], [CPU, TENSORFLOW]),
        (["*:2.[01]*"], [], [GPU, CPU, TENSORFLOW]),
    ],
)
def test_selectors_match_images(wanted: list[str], skip: list[str], chosen: list[str]) -> None:
    assert choose_tags(TAGS, DEFAULTS, wanted, skip) == chosen


@pytest.mark.parametrize(("wanted", "skip"), [(["pytroch-training:2.13.0-cpu*"], []), ([], ["pytroch-*-2.13.0-cpu-*"])])
def test_a_glob_without_a_match_is_reported_with_the_nearest_tag(wanted: list[str], skip: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        choose_tags(TAGS, DEFAULTS, wanted, skip)
    assert f"No image {(wanted + skip)[0]!r}" in str(caught.value)
    assert f"Did you mean {CPU!r}" in str(caught.value)
    assert str(caught.value).endswith(TENSORFLOW)


@pytest.mark.parametrize("word", ["mine", "mine:v1"])
def test_a_custom_image_cannot_be_selected_and_the_error_names_docker(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_tags(TAGS, DEFAULTS, [word], [])
    assert "docker build, and docker tag and docker push" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_skipping_all_images_is_reported() -> None:
    with pytest.raises(UsageError, match="--skip leaves no image"):
        choose_tags(TAGS, DEFAULTS, ["pytorch"], ["*"])
