"""Image size against the installed size of its wheels, and size and build times against `docker build` of a plain
Dockerfile with the same wheels: `make bench-images`.

Sizes are uncompressed bytes as Docker counts an image's layers. "Wheels" is the sum of the files that the installed
distributions record, compiled modules included; tests/integration/test_sizes.py counts in the
same way. Times are of whole commands; of rebuilds, the medians. The whole matrix takes longest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from images_builders import PLAIN, Plain, Shoal, change_first_step, change_toolkit, kept, seconds
from report import Figure, finish, make_parser, print_machine

from shoal import docker_client
from shoal.builds import base_image
from shoal.matrix import project
from shoal.matrix.spec import ImageSpec, load

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.integration.image_sizes import MIB, measure_parts

REPEATS = 5


def sizes(spec: ImageSpec) -> list[Figure]:
    """Compare the image with its base plus its wheels, and with the rival's image, which exists."""
    client, tag = docker_client.connect(), spec.tag
    parts = measure_parts(client, tag, base_image.find_base_of(client, tag, spec.system))
    print(parts)
    total, rival = parts.total / MIB, (parts.base + parts.wheels) / MIB
    plain = client.images.get(PLAIN).attrs["Size"] / MIB
    return [
        Figure("image-size", total, "MiB", rival=rival, rival_name="base+wheels", ceiling=1.05),
        Figure("image-size-plain", total, "MiB", rival=plain, rival_name="docker-build", ceiling=1.0),
    ]


def rebuilds(ours: Shoal, rival: Plain, tag: str) -> list[Figure]:
    """Time builds with nothing changed, and after changes in toolkit/; in turn, because the machine is shared."""
    ours.build(tag), rival.build()
    unchanged = [(ours.build(tag), rival.build()) for _ in range(REPEATS)]
    changed = []
    for _ in range(REPEATS):
        change_toolkit(ours.project.root)
        change_toolkit(rival.directory)
        changed.append((ours.build(tag), rival.build()))
    return [
        figure("nothing-changed", unchanged, goal=1.0),
        figure("rebuild-after-toolkit-change", changed, goal=5.0, ceiling=0.5),
    ]


def make_image(root: Path, tag: str) -> Figure:
    """Time `make image` with nothing changed: `shoal build`, make, and the checks of .venv and Docker."""
    command: list[str | Path] = ["make", "image", f"IMAGE={tag}"]
    return Figure("make-image", statistics.median(seconds(command, root) for _ in range(REPEATS)), "s", goal=1.0)


def cold(ours: Shoal, rival: Plain, tag: str) -> Figure:
    """Time builds of every step, with the wheels in the builder's cache."""
    change_first_step(ours.project)
    return figure("cold-build", [(ours.build(tag), rival.build("--no-cache"))], ceiling=1.0)


def whole_matrix(ours: Shoal) -> Figure:
    """Time builds of every step of all images, two at once against one after the other."""
    took = []
    for jobs in ("--jobs=2", "--jobs=1"):
        change_first_step(ours.project)
        took.append(ours.build("--all", jobs))
    return figure("whole-matrix", [(took[0], took[1])], ceiling=0.8, rival_name="one-by-one")


def figure(
    name: str,
    pairs: list[tuple[float, float]],
    goal: float | None = None,
    ceiling: float | None = None,
    rival_name: str = "docker-build",
) -> Figure:
    """The medians of seconds, ours and the rival's."""
    ours, rival = (statistics.median(column) for column in zip(*pairs))
    return Figure(name, ours, "s", goal=goal, rival=rival, rival_name=rival_name, ceiling=ceiling)


def main(arguments: Sequence[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--image", default="pytorch", help="as `shoal build` takes it (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="leave the whole matrix out")
    parser.add_argument("--matrix", action="store_true", help="measure the whole matrix only")
    options = parser.parse_args(arguments)
    here = project.find(Path.cwd())
    matrix = load(here.buildspec)
    image = matrix.select(options.image)
    print_machine()
    figures: list[Figure] = []
    with kept([other.tag for other in matrix.images]), TemporaryDirectory(prefix="shoal-bench-") as scratch:
        ours = Shoal(here, Path(scratch, "ours"))
        if not options.matrix:
            figures += one_image(ours, here, image, Path(scratch, "plain"))
        if not options.quick:
            figures.append(whole_matrix(ours))
    return finish(figures)


def one_image(ours: Shoal, here: project.Project, image: ImageSpec, directory: Path) -> list[Figure]:
    """Measure an image and its builds; `directory` is for the rival's."""
    rival = Plain(here, image, directory)
    times = [make_image(here.root, image.tag), *rebuilds(ours, rival, image.tag), cold(ours, rival, image.tag)]
    return [*sizes(image), *times]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
