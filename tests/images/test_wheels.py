"""The wheels of `make wheels`: what they contain, and `shoal` installed from them where there is no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec
from shoal.sources import provenance

from ..conftest import PROJECT_URL
from ..tested_images import PYTORCH_CPU, PYTORCH_PY313
from .command import shoal_command
from .test_builds import FakeEngine, fake

__all__ = ["fake"]

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("wheels")]  # built once
NAMES = {"shoal", "shoal_toolkit", "shoal_checkpoint", "shoal_smdistributed", "shoal_rehearsal"}
DEFINITIONS = "shoal/definitions/"
# A machine that has nothing of this project, and a Docker that does not answer.
AWAY = {"PATH": os.defpath, "DOCKER_HOST": "unix:///nonexistent/docker.sock", "COLUMNS": "200", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Installation:
    """`shoal`, installed from wheels, on a machine without a checkout."""

    venv: Path
    home: Path

    def run(self, directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `shoal` in a directory that is made if it is missing."""
        directory.mkdir(parents=True, exist_ok=True)
        environment = {**AWAY, "HOME": str(self.home), **variables}
        command = [str(self.venv / "bin" / "shoal"), *words]
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def installed(dist: Path, project: Project, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """All wheels and their dependencies in a fresh virtual environment."""
    home = tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "venv" / "bin" / "python"), "install", "--quiet"]
    pip += ["--no-compile", f"--constraint={project.root / 'requirements' / 'dev.txt'}"]
    subprocess.run([*pip, *sorted(dist.glob("*.whl"))], cwd=home, check=True)
    return Installation(home / "venv", home)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(file.read(name))


def sdist_files(sdist: Path) -> dict[str, bytes]:
    with tarfile.open(sdist) as tar:
        return {entry.name.partition("/")[2]: file.read() for entry in tar if (file := tar.extractfile(entry))}


def tracked(project: Project, *paths: str) -> set[str]:
    """Return the files that git knows, and those that it would not ignore: a change is tested before its commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (project.root / name).is_file()}


def test_each_package_has_a_wheel_and_an_sdist_with_metadata(dist: Path, project: Project) -> None:
    wheels = {path.name.partition("-")[0]: path for path in dist.glob("*.whl")}
    sdists = {path.name.partition("-")[0]: path for path in dist.glob("*.tar.gz")}
    assert {*wheels} == {*sdists} == NAMES
    for wheel in wheels.values():
        found = metadata(wheel)
        assert found["License-Expression"] == "Apache-2.0"
        assert found.get_all("Project-URL") == [f"Source, {PROJECT_URL}"]
        assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.13"} <= {
            *found.get_all("Classifier", ())
        }
        assert str(found.get_payload()).startswith(f"# {found['Name']}: ")
        with zipfile.ZipFile(wheel) as file:
            (licence,) = (name for name in file.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
            assert file.read(licence) == (project.root / "LICENSE").read_bytes()
    assert "-manylinux_2_" in wheels["shoal_smdistributed"].name
    for sdist in sdists.values():
        assert not [name for name in sdist_files(sdist) if name.endswith((".so", ".o", ".pyc", ".stamp"))]


def test_no_text_advises_to_install_our_names_from_an_index(project: Project) -> None:
    """Nobody has published them, so somebody else could. Paths are fine, and so is --no-index."""
    name = r"(?:.*[ '\"])?(?:shoal|smdistributed)(?!.*\.whl)"
    advice = re.compile(rf"(?:pip|uv) (?:pip )?install (?!.*--no-index){name}")
    texts = {name: (project.root / name).read_bytes().decode(errors="replace") for name in tracked(project)}
    found = {name for name, text in texts.items() if not name.startswith("tests/") and advice.search(text)}
    assert found == set()
    assert advice.search("run pip install 'shoal-toolkit[s3]'")


def test_no_wheel_depends_on_another_of_ours(dist: Path) -> None:
    """An index that does not have ours could give somebody else's package of the name."""
    wheels = [*dist.glob("*.whl")]
    assert len(wheels) == 5
    for wheel in wheels:
        assert not [need for need in metadata(wheel).get_all("Requires-Dist", ()) if need.startswith("shoal")]


def test_the_sdist_has_the_definitions_of_the_checkout(dist: Path, project: Project) -> None:
    (sdist,) = dist.glob("shoal-*.tar.gz")
    files = {n.removeprefix(DEFINITIONS): text for n, text in sdist_files(sdist).items() if n.startswith(DEFINITIONS)}
    assert files.pop(provenance.REVISION, b"").decode().strip() == provenance.find_revision(project.root)
    wanted = tracked(project, "buildspec.yml", "dockerfiles", "checkpoint", "library", "rehearsal", "toolkit")
    wanted |= {".gitignore", "LICENSE", "images/README.md", "images/pyproject.toml"}
    wanted |= {"requirements/shoal.txt", "scripts/engine.sh"}
    assert files == {name: (project.root / name).read_bytes() for name in wanted}


def test_shoal_works_in_an_empty_directory(installed: Installation, matrix: BuildSpec, tmp_path: Path) -> None:
    assert installed.run(tmp_path, "--version").stdout == "shoal 0.1.0\n"
    output = installed.run(tmp_path, "list").stdout
    assert [line.split()[0] for line in output.splitlines()[1:]] == [image.tag for image in matrix.images]
    refused = installed.run(tmp_path, "render")
    assert (refused.returncode, "Fix: shoal init DIRECTORY" in refused.stderr) == (2, True)
    assert not [*tmp_path.iterdir()]


def test_init_writes_definitions_that_count_when_changed(installed: Installation, tmp_path: Path) -> None:
    written = installed.run(tmp_path, "init", "mine")
    names = (".gitignore", "dockerfiles", "buildspec.yml")
    assert written.stdout == "".join(f"wrote {tmp_path}/mine/{name}\n" for name in names)
    mine = tmp_path / "mine"
    assert installed.run(mine, "render", "--check").returncode == 0
    template = mine / "dockerfiles" / "base.j2"
    template.write_text(template.read_text().replace("mkdir -m 1777 /opt/ml", "mkdir -m 1777 /opt/ml /opt/new"))
    assert "written" in installed.run(mine, "render").stdout
    assert "/opt/new" in next((mine / "dockerfiles" / "rendered").rglob("Dockerfile")).read_text()
    assert installed.run(tmp_path, "init", "mine").returncode == 2


def test_a_job_runs_without_docker(installed: Installation, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hello.py").write_text("import sys; print('hello from', sys.prefix, *sys.argv[1:])")
    words = ["run", "pytorch", "--source", "code", "--entry-point", "hello.py", "--engine", "none"]
    ended = installed.run(tmp_path, *words, "--hyperparameter", "epochs=3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"hello from {installed.venv} --epochs 3" in ended.stdout


def test_without_train_the_fix_names_its_sources(installed: Installation, tmp_path: Path) -> None:
    train = installed.venv / "bin" / "train"
    shutil.move(train, tmp_path / "train")
    try:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "hello.py").touch()
        words = ["run", "pytorch", "--source", "code", "--entry-point", "hello.py", "--engine", "none"]
        output = installed.run(tmp_path, *words).stderr
    finally:
        shutil.move(tmp_path / "train", train)
    (toolkit,) = installed.venv.glob("lib/*/site-packages/shoal/definitions/toolkit")
    assert f"-m pip install {toolkit}\n" in output


def test_a_build_has_the_context_and_layers_of_a_checkout(
    installed: Installation, project: Project, matrix: BuildSpec, fake: FakeEngine, tmp_path: Path
) -> None:
    """Byte for byte, with bytecode and without, from the package and from what `shoal init` writes."""
    tags = [matrix.select(name).tag for name in (PYTORCH_CPU, PYTORCH_PY313)]
    plain = {"DOCKER_HOST": fake.address, "PIP_CONFIG_FILE": os.devnull}

    def contexts() -> Mapping[str, bytes]:
        found = dict(fake.contexts)
        fake.contexts.clear()
        fake.images = {name: labels for name, labels in fake.images.items() if name not in tags}
        return found

    here = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | plain
    subprocess.run([*shoal_command(), "build", *tags], cwd=project.root, env=here, check=True, capture_output=True)
    wanted = contexts()
    assert {*wanted} == {*tags}
    for directory in (tmp_path / "empty", tmp_path / "mine"):
        if directory.name == "mine":
            installed.run(tmp_path, "init", "mine")
        ended = installed.run(directory, "build", *tags, **plain)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert contexts() == wanted
    assert (installed.home / ".cache" / "shoal" / "installed").is_dir()


def test_an_installed_shoal_makes_its_wheel_for_bundles(installed: Installation, dist: Path, tmp_path: Path) -> None:
    program = """if True:
        import sys, pathlib
        from shoal.matrix.project import find_shipped
        from shoal.sources import packages
        scratch = pathlib.Path(sys.argv[1])
        packages.write_source_tree(find_shipped(), "images", scratch / "tree")
        print(packages.build_wheel(scratch / "tree", scratch))
    """
    python = installed.venv / "bin" / "python"
    made = subprocess.run([python, "-c", program, tmp_path], env=AWAY, capture_output=True, text=True, check=True)
    (wheel,) = dist.glob("shoal-*.whl")
    with zipfile.ZipFile(made.stdout.strip()) as new, zipfile.ZipFile(wheel) as old:
        assert new.namelist() == old.namelist()
        names = [name for name in old.namelist() if not name.endswith(("/METADATA", "/RECORD"))]  # the URL is ours
        assert [name for name in names if new.read(name) != old.read(name)] == []
