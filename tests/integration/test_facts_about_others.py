"""Sentences of our pages about other programs are true of the programs in the images.

tests/docs/facts_about_others.py has the sentences. All checks of an image run in one process, in the container that the
tests of image contents use too.
"""

from __future__ import annotations

import json
from pathlib import Path

import docker
import pytest

from shoal.matrix.spec import BuildSpec

from ..conformance import oracle
from ..conformance.conftest import SMALL_PYTORCH
from ..docs import facts_about_others
from ..docs.facts_about_others import HERE, STOCK, names_at
from .image_containers import SCRATCH, ImageContainer, ImageContainers, running

PROGRAM = Path(facts_about_others.__file__).read_text()
IMAGES = {place for fact in facts_about_others.FACTS for place in fact.places} - {HERE, STOCK}


def find_errors(container: ImageContainer, place: str) -> dict[str, str]:
    """Make all checks of a place, and return the error of each, or an empty text."""
    settings = {**SCRATCH, "SAGEMAKER_BASE_DIR": f"{SCRATCH['TMPDIR']}/ml"}
    output = container.run("python", "-c", PROGRAM, place, environment=settings)
    found: dict[str, str] = json.loads(output.splitlines()[-1])
    assert list(found) == names_at(place)
    return {name: error for name, error in found.items() if error}


@pytest.mark.parametrize("tag", [pytest.param(tag, marks=pytest.mark.xdist_group(tag)) for tag in sorted(IMAGES)])
def test_facts_are_true_in_an_image(image_containers: ImageContainers, tag: str) -> None:
    assert find_errors(image_containers.of(tag), tag) == {}


@pytest.mark.xdist_group("conformance")  # builds the same image, if it is missing
def test_facts_about_the_stock_toolkit_are_true(client: docker.DockerClient, matrix: BuildSpec) -> None:
    (tag,) = oracle.ensure(client, matrix, SMALL_PYTORCH)
    with running(client, tag) as container:
        assert find_errors(container, STOCK) == {}
