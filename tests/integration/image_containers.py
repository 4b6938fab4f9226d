"""One running container for each image that is built, in which the tests of image contents run their commands.

A container starts when the first test needs it, and is removed at the end of the session. It only sleeps: without a
network, and on a read-only root, so that no check can change what another one sees. The image's own /tmp stays visible;
programs that need a temporary directory get `SCRATCH`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container

from shoal.docker_client import containers
from shoal.image import facts
from shoal.matrix.spec import ImageSpec, load

from ..containers import ROOT
from ..repeats import SOAK
from ..tested_images import BUILT

_ALL = load(ROOT / "buildspec.yml")
MATRIX = _ALL if SOAK else dataclasses.replace(_ALL, images=tuple(each for each in _ALL.images if each.tag in BUILT))
"""The images that are built: in the soak all of them."""
DEVEL = ["*-devel"]
"""Their wheels are those of the runtime variants, in the same layers (test_devel.py). So tests of wheels skip them."""
LOWER = [parent.tag for image in MATRIX.images if (parent := MATRIX.parent(image))]
"""Images that others extend, and which so have all that these have: tests of what both have ask the others."""
PROBE = Path(__file__).with_name("image_probe.py").read_text()
SCRATCH = {"TMPDIR": "/dev/shm"}
# Some of those of `shoal.image.facts`; commands are run as several users.
_SETTINGS: dict[str, Any] = {
    "user": "0:0",
    "working_dir": "/",
    "network_mode": "none",
    "use_config_proxy": False,
    "entrypoint": ["sleep"],
}
_END = "(end)"  # after the output of a command
_TRIES = 3
_LONGEST = ["6h"]  # so that none stays if this process is killed


class ImageContainer:
    """A running container of an image, and what its probes have printed so far."""

    def __init__(self, tag: str, container: Container) -> None:
        self.tag, self._container = tag, container
        self._facts: dict[tuple[str, str], dict[str, Any]] = {}

    def run(self, *command: str, user: str = "root", environment: Mapping[str, str] | None = None) -> str:
        """Return what a command prints on stdout. A command that fails fails the test, with its stderr.

        Docker 20.10 can lose the output of a command on a busy machine, and reports a success. The command then runs
        again.
        """
        marked = ["sh", "-c", f'unset PWD; "$@" && printf "{_END}"', "sh", *command]  # sh adds PWD
        for _ in range(_TRIES):
            ended = self._container.exec_run(marked, user=user, environment=dict(environment or {}), demux=True)
            streams: Any = ended.output  # a pair, because of demux
            out, err = ((text or b"").decode(errors="replace") for text in streams)
            assert ended.exit_code == 0, f"{self.tag}: {command[0]} exited with {ended.exit_code}:\n{out}{err}"
            if out.endswith(_END):
                return out.removesuffix(_END)
        raise AssertionError(f"{self.tag}: Docker lost the output of {command[0]} {_TRIES} times")

    def python(self, program: str, user: str = "root") -> str:
        """Return what a program in Python prints. It has a temporary directory."""
        return self.run("python", "-c", program, user=user, environment=SCRATCH)

    def facts(self, name: str, user: str = "root") -> dict[str, Any]:
        """Return what a function of image_probe.py found. Each runs once for each user, in a process of its own."""
        if (name, user) not in self._facts:
            output = self.python(f"{PROBE}\nmain({name!r})", user)
            self._facts[name, user] = json.loads(output.splitlines()[-1])
        return self._facts[name, user]


class ImageContainers:
    """The containers of a session by tag, started when they are first asked for."""

    def __init__(self, client: docker.DockerClient, stack: contextlib.ExitStack) -> None:
        self._client, self._stack = client, stack
        self._running: dict[str, ImageContainer] = {}

    def of(self, tag: str) -> ImageContainer:
        """Return the container of an image. Starts it if it does not run yet."""
        if tag not in self._running:
            self._running[tag] = self._stack.enter_context(running(self._client, tag))
        return self._running[tag]


@contextlib.contextmanager
def running(client: docker.DockerClient, tag: str, *, read_only: bool = True) -> Iterator[ImageContainer]:
    """Start a container that sleeps, and remove it at the end."""
    name = containers.unique_name("test-image")
    settings = _SETTINGS | {"read_only": read_only, "labels": {containers.JOB_LABEL: name}}
    with containers.remove_at_end(client, name):
        container = containers.create_container(client, tag, _LONGEST, settings)
        container.start()
        yield ImageContainer(tag, container)


def each(*words: str, skip: Iterable[str] = ()) -> list[Any]:
    """Return the built images that the words mean as parameters, or all without words, but for those to skip.

    The tests of an image are a group of pytest-xdist, so that one worker has all of them and starts its container once.
    """
    return [as_parameter(image) for image in MATRIX.choose(words, skip)]


def as_parameter(image: ImageSpec, *others: str) -> Any:
    """Return an image, and other values, as one parameter in the group of the image."""
    name = "-".join((image.tag, *others))
    return pytest.param(image, *others, id=name, marks=pytest.mark.xdist_group(image.tag))


@pytest.fixture(scope="session")
def image_containers(client: docker.DockerClient) -> Iterator[ImageContainers]:
    with contextlib.ExitStack() as stack:
        yield ImageContainers(client, stack)


@pytest.fixture(params=each())
def image(request: pytest.FixtureRequest) -> ImageSpec:
    """Each image that is built."""
    chosen: ImageSpec = request.param
    return chosen


@pytest.fixture
def container(image_containers: ImageContainers, image: ImageSpec) -> ImageContainer:
    """The running container of the test's image."""
    return image_containers.of(image.tag)


@pytest.fixture
def ask_running_containers(monkeypatch: pytest.MonkeyPatch, image_containers: ImageContainers) -> None:
    """Let the probes of `shoal.image` run in the containers that are there, as its user, instead of one for each.

    `test_a_container_of_its_own_says_the_same` shows that this makes no difference.
    """
    monkeypatch.setattr(
        facts, "run_command", lambda _, tag, command: image_containers.of(tag).run(*command, user=facts.NOBODY)
    )
