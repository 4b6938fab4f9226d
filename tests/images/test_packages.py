"""Our packages as images have them: the same on every host, made again only when they change."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

import pytest

from shoal.errors import BuildError
from shoal.matrix.project import Project
from shoal.sources import packages

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = f"{sys.version_info.major}.{sys.version_info.minor + 1}"


def names(layer: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        return set(tar.getnames())


# Prints the digest of an installed package; a process that has imported more holds more strings.
DIGEST = """
import hashlib, pathlib, sys
{imports}
from shoal.sources import packages
layer = packages.install_package(pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
print(hashlib.sha256(layer).hexdigest())
"""


@pytest.mark.parametrize("package", packages.PACKAGES)
def test_two_clones_give_the_same_bytes_in_any_process(project: Project, tmp_path: Path, package: str) -> None:
    digests = set()
    for number, imports in enumerate(("", "import docker, numpy, pytest, rich.markdown")):
        clone = tmp_path / str(number) / package
        shutil.copytree(project.root / package, clone, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        command = [sys.executable, "-c", DIGEST.format(imports=imports), str(clone), HERE, str(clone.parent / "cache")]
        digests.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    layer = packages.install_package(project.root / package, HERE, tmp_path / "cache")
    assert digests == {f"{hashlib.sha256(layer).hexdigest()}\n"}
    assert any(name.endswith(".pyc") for name in names(layer))


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hatchling writes a wheel to a temporary file first, and does not remove it if it is interrupted."""

    def build_wheel(directory: str) -> str:
        tempfile.mkstemp(suffix=".whl")
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "hatchling.interrupted", types.SimpleNamespace(build_wheel=build_wheel))
    temporary, package = tmp_path / "temporary", tmp_path / "package"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    package.mkdir()
    (package / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "hatchling.interrupted"\n')
    with pytest.raises(KeyboardInterrupt):
        packages.install_package(package, HERE, tmp_path / "cache")
    assert list(temporary.iterdir()) == []
    assert tempfile.gettempdir() == str(temporary)


def test_the_library_is_that_of_any_host(project: Project, tmp_path: Path) -> None:
    """No host's compiler takes part: what one has compiled here stays here, and another would have none."""
    layer = packages.install_package(project.root / "library", HERE, tmp_path / "cache")
    assert not [name for name in names(layer) if name.endswith(".so")]
    copy = shutil.copytree(project.root / "library", tmp_path / "library")
    (copy / "smdistributed" / "core" / "_engine.so").write_bytes(b"of another machine")
    assert packages.install_package(copy, HERE, tmp_path / "cache") == layer


@pytest.mark.parametrize(
    ("package", "module"), [("toolkit", "sagemaker_training/environment.py"), ("library", "smddpcommon.py")]
)
def test_modules_of_aws_names_that_scripts_import_are_there(
    project: Project, tmp_path: Path, package: str, module: str
) -> None:
    layer = packages.install_package(project.root / package, HERE, tmp_path / "cache")
    (path,) = (name for name in names(layer) if name.endswith(f"site-packages/{module}"))
    compiled = importlib.util.cache_from_source(path)
    assert compiled in names(layer)
    assert module in packages.read_digests(layer)


def test_a_built_wheel_leaves_the_environment_as_it_was(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    before = dict(os.environ)
    packages.build_wheel(project.root / "toolkit", tmp_path)
    assert dict(os.environ) == before


def test_a_package_is_made_again_only_when_it_changes(project: Project, tmp_path: Path) -> None:
    package, cache = shutil.copytree(project.root / "toolkit", tmp_path / "toolkit"), tmp_path / "cache"
    first = packages.install_package(package, HERE, cache)
    (kept,) = cache.rglob("*.tar")
    kept.write_bytes(b"kept")
    assert packages.install_package(package, HERE, cache) == b"kept"
    assert packages.install_package(package, OTHER, cache) != b"kept"
    with (package / "shoal_toolkit" / "cli.py").open("a") as file:
        file.write("# changed\n")
    second = packages.install_package(package, HERE, cache)
    assert second not in (first, b"kept")
    assert [path.read_bytes() for path in cache.rglob(f"*-{HERE}-*.tar")] == [second]
    assert len([*cache.rglob("*.tar")]) == 2


@pytest.mark.parametrize("python", [HERE, OTHER])
def test_bytecode_is_that_of_the_images_python_or_missing(project: Project, tmp_path: Path, python: str) -> None:
    layer = packages.install_package(project.root / "toolkit", python, tmp_path)
    compiled = {name for name in names(layer) if name.endswith(".pyc")}
    modules = {name for name in names(layer) if name.endswith(".py")}
    assert modules
    assert compiled == ({importlib.util.cache_from_source(name) for name in modules} if python == HERE else set())


def test_what_is_installed_runs_and_needs_no_compiling(project: Project, tmp_path: Path) -> None:
    """Whatever time its files have: the bytecode is checked by the content of the source."""
    layer = packages.install_package(project.root / "toolkit", HERE, tmp_path / "cache")
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        tar.extractall(tmp_path / "root")  # what this process has just written
    modules = tmp_path / "root" / packages.site_packages(HERE)
    for path in modules.rglob("*.py"):
        path.touch()
    command = [
        sys.executable,
        "-I",
        "-v",
        "-c",
        f"import sys; sys.path.insert(0, {str(modules)!r}); import shoal_toolkit",
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (line,) = [line for line in log.splitlines() if line.startswith("# code object from") and "shoal_toolkit" in line]
    assert line.endswith(".pyc'")
    train = tmp_path / "root" / packages.VENV / "bin" / "train"
    assert train.stat().st_mode & 0o777 == 0o755
    assert train.read_text().startswith(f"#!/{packages.VENV}/bin/python3\n")


def test_what_an_image_compiles_is_among_the_librarys_files(project: Project, tmp_path: Path) -> None:
    layer = packages.install_package(project.root / "library", HERE, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        (name,) = [name for name in tar.getnames() if name.endswith("/RECORD")]
        record = tar.extractfile(name)
        assert record
        files = record.read().decode().splitlines()
    assert {f"{name},," for name in packages.COMPILED["library"]} <= set(files)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("def f(:", r"toolkit/shoal_toolkit/cli\.py:1: invalid syntax\. Fix: correct it"),
        ("  indented = 1", r"toolkit/shoal_toolkit/cli\.py:1: unexpected indent\. Fix"),
        ("x = '\0'", r"toolkit/shoal_toolkit/cli\.py.*null bytes"),
    ],
)
def test_a_module_that_is_not_python_is_reported_with_its_place(
    project: Project, tmp_path: Path, line: str, error: str
) -> None:
    package = shutil.copytree(project.root / "toolkit", tmp_path / "toolkit")
    (package / "shoal_toolkit" / "cli.py").write_text(f"{line}\n")
    with pytest.raises(BuildError, match=error):
        packages.install_package(package, HERE, tmp_path / "cache")


def test_a_wheel_is_built_into_a_relative_directory(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wheels").mkdir()
    assert packages.build_wheel(project.root / "toolkit", Path("wheels")).is_file()


def test_what_is_installed_can_be_zipped(project: Project, tmp_path: Path) -> None:
    """Which knows no time before 1980."""
    layer = packages.install_package(project.root / "toolkit", HERE, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        tar.extractall(tmp_path / "root")  # what this process has just written
    assert Path(shutil.make_archive(str(tmp_path / "zipped"), "zip", tmp_path / "root" / "opt")).is_file()
