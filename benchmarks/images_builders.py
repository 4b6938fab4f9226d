"""The two builders that benchmarks/images.py compares: `shoal build` of a copy of this project, and `docker build` of a
plain Dockerfile with the same content. Neither touches the images that are there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import docker

from shoal import docker_client
from shoal.builds import base_image
from shoal.docker_client.images import find_image
from shoal.matrix.project import Project
from shoal.matrix.spec import ImageSpec, load
from shoal.network.settings import read_network_settings
from shoal.sources.lock import read_image_pins

PLAIN = "shoal-bench:plain"
_KEPT = "shoal-bench:kept-{}"


def copy(project: Project, target: Path) -> Project:
    """Copy what builds read, with the cache: a link out of a project is not followed."""
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("checkpoint", "library", "rehearsal", "toolkit", "dockerfiles"):
        shutil.copytree(project.root / name, target / name, ignore=ignored)
    shutil.copy(project.buildspec, target)
    shutil.copytree(project.root / ".cache" / "shoal", target / ".cache" / "shoal")
    return Project(target)


def change_toolkit(directory: Path) -> None:
    """Add a line to the toolkit under a directory."""
    with (directory / "toolkit" / "shoal_toolkit" / "__init__.py").open("a") as file:
        file.write(f"# {time.time_ns()}\n")


def change_first_step(project: Project) -> None:
    """Make every step of base images run again. The downloads of pip stay in the builder's cache."""
    path = project.templates / "macros.j2"
    mark = "export APT_CONFIG=/run/machine/apt.conf"
    before, after = path.read_text().split(mark)
    path.write_text(f"{before}{mark} STARTED={time.time_ns()}{after}")


class Shoal:
    """`shoal build` of a copy of the project."""

    def __init__(self, project: Project, directory: Path) -> None:
        self.project = copy(project, directory)
        _trust(directory)

    def build(self, *arguments: str) -> float:
        """Return the seconds that the whole command took."""
        return seconds([Path(sys.executable).with_name("shoal"), "build", *arguments], self.project.root)


def _trust(directory: Path) -> None:
    """Let this process and its commands trust a copy of the project: for its packages, code of it runs here."""
    usual = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    own = directory.with_name("config")
    own.mkdir()
    for entry in usual.iterdir() if usual.is_dir() else ():
        if entry.name != "shoal":
            (own / entry.name).symlink_to(entry)
    os.environ["XDG_CONFIG_HOME"] = str(own)
    subprocess.run([Path(sys.executable).with_name("shoal"), "trust", directory], check=True)


class Plain:
    """`docker build` of plain.Dockerfile, of BuildKit, from a directory with the sources of an image."""

    def __init__(self, project: Project, image: ImageSpec, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in ("checkpoint", "library", "rehearsal", "toolkit"):
            shutil.copytree(project.root / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        pins = read_image_pins(project, load(project.buildspec), image).values()
        (directory / "requirements.txt").write_text("".join(f"{pin}\n" for layer in pins for pin in layer))
        (directory / "machine").mkdir()
        for name, content in read_network_settings().build_files(image.system.suite).items():
            (directory / "machine" / name).write_bytes(content)
        found = base_image.find_base(docker_client.connect(), image.system)
        assert found is not None
        file = Path(__file__).with_name("plain.Dockerfile")
        self._command = [_client(), "build", "--quiet", f"--tag={PLAIN}", f"--file={file}"]
        self._command.append(f"--build-arg=BASE={found.reference}")

    def build(self, *options: str) -> float:
        """Return the seconds that the whole command took."""
        return seconds([*self._command, *options, str(self.directory)], self.directory)


def _client() -> str:
    """Return a `docker` on the PATH that builds with BuildKit: from before 23 by itself, later ones with buildx."""
    for directory in os.get_exec_path():
        path = Path(directory, "docker")
        if path.is_file() and (
            _printed(path, "--version") < "Docker version 23" or _printed(path, "buildx", "version")
        ):
            return str(path)
    raise SystemExit("no docker on the PATH builds with BuildKit. Install its plugin buildx, or Debian's docker.io")


def _printed(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if ended.returncode else ended.stdout


def seconds(command: list[str | Path], directory: Path) -> float:
    """Return how long a whole command takes; one that fails ends the benchmark with its output."""
    started = time.monotonic()
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    ended = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{ended.stdout[-3000:]}")
    return time.monotonic() - started


@contextlib.contextmanager
def kept(tags: list[str]) -> Iterator[None]:
    """Give the tags back to the images that have them now, and remove the images that were built meanwhile."""
    client = docker_client.connect()
    before = {tag: image for tag in tags if (image := find_image(client, tag))}
    for number, image in enumerate(before.values()):
        image.tag(_KEPT.format(number))
    try:
        yield
    finally:
        for tag in reversed(tags):
            _give_back(client, tag, before.get(tag))
        for number in range(len(before)):
            client.images.remove(_KEPT.format(number))
        if find_image(client, PLAIN):
            client.images.remove(PLAIN)


def _give_back(client: docker.DockerClient, tag: str, image: docker.models.images.Image | None) -> None:
    built = find_image(client, tag)
    if built is None or (image is not None and built.id == image.id):
        return
    if image is None:
        client.images.remove(tag)
        return
    image.tag(tag)
    with contextlib.suppress(docker.errors.ImageNotFound):
        client.images.remove(str(built.id))
