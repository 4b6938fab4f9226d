"""The size of every image of the matrix against what it is made of; a miss says which part is too large.

The claim is 1.05 × (base + installed wheels). It is held as it stands where the wheels are most of an image: those for
GPUs. Debian's Python, its bytecode and dpkg's files are the same 57 MiB in every image, which is 5.3 % of the smallest
one for CPUs and would measure nothing but how small its framework is; and a devel image is there for its compilers.
Those are therefore given Debian's packages too, by dpkg's Installed-Size. That would let packages grow unseen, and 5 %
of an image for GPUs are 250 MiB: so what Debian adds, and what belongs to nobody, has a ceiling of its own everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import docker
import pytest

from shoal.builds import base_image
from shoal.matrix.spec import ImageSpec

from ..tested_images import CLONE, PYTORCH_CPU
from .image_containers import MATRIX, each
from .image_sizes import MIB, ImageParts, measure_parts

MOST = 1.05
REST = 24 * MIB  # 18.6 as this is written, two thirds of it bytecode of Debian's Python
DEBIAN = {"runtime": 48 * MIB, "devel": 384 * MIB}  # 38.6, and 323.9 with the documentation that is not installed
SMALL, LEFT_OUT = 120 * MIB, 165 * MIB  # the small compiler: 113, and files of it that dpkg counts and images leave out
LEFT = 32 * MIB


def too_large(parts: ImageParts, image: ImageSpec) -> list[str]:
    """What is larger than it may be, a sentence each."""
    strict = image.device == "gpu" and image.variant == "runtime"
    small = any(one and one.without for one in (image, MATRIX.parent(image)))
    left_out = LEFT_OUT if small else 0
    debian = parts.debian - left_out
    made_of = parts.base + parts.wheels + (0 if strict else debian)
    rows = (
        ("the image", parts.total, int(MOST * made_of)),
        ("rest", parts.rest + left_out, REST),
        ("debian", debian, DEBIAN[image.variant] + (SMALL if small else 0)),
    )
    return [f"{what}: {found / MIB:,.1f} MiB, allowed {most / MIB:,.1f}" for what, found, most in rows if found > most]


@pytest.mark.usefixtures("ask_running_containers")
def test_an_image_is_little_more_than_its_wheels(client: docker.DockerClient, image: ImageSpec) -> None:
    parts = measure_parts(client, image.tag, base_image.find_base_of(client, image.tag, image.system))
    assert not (found := too_large(parts, image)), "\n".join([*found, str(parts)])


@pytest.fixture
def fat(client: docker.DockerClient, image: ImageSpec) -> Iterator[str]:
    """The tag of an image with a file in a lower layer that a later one deletes, and another that stays."""
    tag, made = image.tag, []
    try:
        for number, script in enumerate((f"head -c {LEFT} /dev/zero | tee /opt/a > /opt/b", "rm /opt/a")):
            container = client.containers.run(tag, ["sh", "-c", script], detach=True, network_mode="none")
            try:
                assert container.wait()["StatusCode"] == 0, container.logs()
                tag = f"sizes-by-test-{CLONE}:{number}"
                container.commit(*tag.split(":"))
                made.append(tag)
            finally:
                container.remove()
        yield tag
    finally:
        for tag in reversed(made):
            client.images.remove(tag, force=True)


@pytest.mark.parametrize("image", each(PYTORCH_CPU))
def test_a_miss_says_what_is_too_large(
    client: docker.DockerClient, request: pytest.FixtureRequest, image: ImageSpec, fat: str
) -> None:
    """The image's own size is asked of its running container, as above: both ways agree to the byte."""
    parts = measure_parts(client, fat, base_image.find_base_of(client, fat, image.system))
    request.getfixturevalue("ask_running_containers")
    thin = measure_parts(client, image.tag, base_image.find_base_of(client, image.tag, image.system))
    assert parts.rest - thin.rest == 2 * LEFT
    hidden = (parts.total - parts.visible) - (thin.total - thin.visible)
    assert (hidden, parts.unowned["/opt/b"]) == (LEFT, LEFT)
    assert [line.partition(":")[0] for line in too_large(parts, image)] == ["the image", "rest"]
    assert "in /opt/b, of no package" in str(parts)
