"""Our own packages: builds their wheels, installs them as an image has them, and writes their sources for publishing.

pypa/installer does that here, not a step that runs pip: to start a container takes longer than to unpack the files.
See docs/decisions/installing-our-packages.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tomllib

from shoal.docker_client import archive
from shoal.errors import BuildError
from shoal.matrix.project import INSTALLED, Project
from shoal.sources import provenance

VENV = "opt/venv"
"""The virtual environment of images, from their root."""
PACKAGES = ("rehearsal", "checkpoint", "library", "toolkit")
"""The packages that images have: directories of the checkout."""
COMPILED = {
    "library": (
        "smdistributed/core/_engine.so",
        "smdistributed/core/tensorflow/_operations.so",
        "smdistributed/core/_peer_filter.so",
    )
}
"""Files that an image's build compiles and puts beside a package's modules."""
SOURCE_DATE_EPOCH = "1672531200"
"""Every time stamp in our archives, in seconds since 1970 (2023-01-01): the same source gives the same bytes."""
# Isolated and without site-packages: the bytes that marshal writes depend on the strings that a process holds already.
# The bytecode is checked by the content of its source (PEP 552), so it stays valid if a file gets another time.
_COMPILE = [sys.executable, "-I", "-S", "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]


def site_packages(python: str) -> str:
    """Returns the directory of packages in images with that Python, such as 3.11, from their root."""
    return f"{VENV}/lib/python{python}/site-packages"


def can_compile_for(python: str) -> bool:
    """Returns whether bytecode that is made here is for that Python, such as 3.11."""
    return sys.implementation.name == "cpython" and python == f"{sys.version_info.major}.{sys.version_info.minor}"


def build_wheel(package: Path, directory: Path) -> Path:
    """Builds a package's wheel with the backend in its pyproject.toml, and returns its path.

    The wheel is the same on every host. For that, hatchling's hooks, which compile C, do not run. The build of an image
    compiles. Meanwhile, two variables of this process are set, and its working directory and its directory of temporary
    files are others: an interrupted backend leaves the part of a wheel there.
    """
    variables = {"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, "HATCH_BUILD_NO_HOOKS": "true"}  # backends read them there
    kept = {name: os.environ.pop(name) for name in variables if name in os.environ}
    backend, target = importlib.import_module(_backend(package)), directory.absolute()
    before, tempfile.tempdir = tempfile.tempdir, str(target)
    os.environ.update(variables)
    try:
        with contextlib.chdir(package):
            return target / str(backend.build_wheel(str(target)))
    finally:
        tempfile.tempdir = before
        for name in variables:
            del os.environ[name]
        os.environ.update(kept)


def install_package(package: Path, python: str, cache: Path) -> bytes:
    """Installs a package as images with that Python have it, into an archive. Nothing is installed on this machine.

    Its bytecode is included if this process runs that Python. Archives of earlier versions of the package are removed
    from the cache. Like `build_wheel`, it changes settings of this process meanwhile.

    Args:
        package: The package's directory in the checkout.
        cache: The directory with archives of earlier calls. One of the same files and tools is used again.

    Returns:
        A tar archive from the image's root.

    Raises:
        BuildError: If bytecode is included, and a module is not Python.
    """
    kept = cache / "installed" / f"{package.name}-{python}-{_identity(package)}.tar"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    content = _install(package, python)
    with contextlib.suppress(OSError):  # without a cache, each build installs again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".part-") as part:
            Path(part, kept.name).write_bytes(content)
            Path(part, kept.name).replace(kept)
        for path in {*kept.parent.glob(f"{kept.stem.rpartition('-')[0]}-*.tar")} - {kept}:
            path.unlink()
    return content


def read_digests(layer: bytes) -> dict[str, str]:
    """Returns the SHA-256 (hexadecimal) of each file in an archive of `install_package`, by path in site-packages.

    The digest of a module covers its bytecode: an image with other bytecode is another image. RECORD is left out,
    because it follows from the others.
    """
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        files = {entry.name: file.read() for entry in tar if (file := tar.extractfile(entry))}
    digests = {}
    for name, content in files.items():
        if not name.endswith((".pyc", ".dist-info/RECORD")):
            compiled = files.get(importlib.util.cache_from_source(name), b"") if name.endswith(".py") else b""
            path = name.rpartition("/site-packages/")[2].removeprefix(f"{VENV}/")
            digests[path] = hashlib.sha256(content + compiled).hexdigest()
    return digests


def _install(package: Path, python: str) -> bytes:
    """Returns the files that a package's wheel installs, as a tar archive. `build_wheel` changes this process."""
    # Not at the top: most builds find all of this in the cache.
    import installer
    from installer.destinations import SchemeDictionaryDestination
    from installer.sources import WheelFile

    modules, programs = f"/{site_packages(python)}", f"/{VENV}/bin"
    scheme = {"purelib": modules, "platlib": modules, "scripts": programs, "data": f"/{VENV}"}
    with tempfile.TemporaryDirectory(prefix="shoal-wheel-") as scratch:
        root = Path(scratch, "root")
        destination = SchemeDictionaryDestination(
            scheme, interpreter=f"{programs}/python3", script_kind="posix", destdir=str(root)
        )
        with WheelFile.open(build_wheel(package, Path(scratch))) as source:
            installer.install(source, destination, {})
        (record,) = (root / modules[1:]).glob("*.dist-info/RECORD")
        with record.open("a") as file:  # the image's build adds these
            file.writelines(f"{name},,\n" for name in COMPILED.get(package.name, ()))
        if can_compile_for(python):
            _compile(root, root / modules[1:], package.name)
        files: dict[str, archive.Content] = {str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file()}
        out = io.BytesIO()
        archive.write_tar(files, out, lambda name: name.startswith(f"{VENV}/bin/"), int(SOURCE_DATE_EPOCH))
        return out.getvalue()


def _compile(root: Path, modules: Path, package: str) -> None:
    """Writes bytecode beside each module. Raises `BuildError` with the first module that can't be compiled."""
    ended = subprocess.run([*_COMPILE, "-s", root, "-p", "/", root], capture_output=True, text=True, check=False)
    if ended.returncode:
        for path in sorted(modules.rglob("*.py")):
            try:
                compile(path.read_bytes(), path, "exec")
            except (SyntaxError, ValueError) as error:
                reason = f"{error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
                place = f"{package}/{path.relative_to(modules)}:{reason}"
                raise BuildError(f"{place}. Fix: correct it; all modules are compiled") from None
        raise BuildError(f"{package}: compileall failed:\n{ended.stdout}{ended.stderr}Fix: correct the module")


def _backend(package: Path) -> str:
    return str(tomllib.loads((package / "pyproject.toml").read_text())["build-system"]["build-backend"])


def _identity(package: Path) -> str:
    """Returns a digest of all that decides what is installed: the package's files, .gitignore, and the tools."""
    tools = [_version(_backend(package).partition(".")[0]), _version("installer"), sys.version]
    state = hashlib.sha256(" ".join(tools).encode())
    for module in (__file__, archive.__file__):
        state.update(Path(module).read_bytes())
    files = {str(path.relative_to(package)): path for path in package.rglob("*") if "__pycache__" not in path.parts}
    files["../.gitignore"] = package.resolve().parent / ".gitignore"  # which hatchling obeys
    for name, path in sorted(files.items()):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            state.update(f"{name}\0{path.stat().st_mode:o}\0{digest}\n".encode())
    return state.hexdigest()[:16]


@functools.cache
def _version(distribution: str) -> str:
    return f"{distribution} {importlib.metadata.version(distribution)}"


PUBLISHED = ("images", *PACKAGES)
"""The packages that `make wheels` builds: directories of the checkout."""
_SHOAL = ("images/pyproject.toml", "images/README.md")
_BUNDLE = ("LICENSE", "requirements/shoal.txt", *_SHOAL)
"""With these, an installed `shoal bundle` makes a wheel of `shoal`."""
_DEFINITIONS = (".gitignore", "buildspec.yml", "dockerfiles", "scripts/engine.sh", *PACKAGES)


def write_source_tree(project: Project, package: str, directory: Path, url: str = "") -> None:
    """Writes a package's files to a new directory, in which a build backend makes its sdist and wheel.

    Files that git ignores are left out, such as compiled ones. `shoal` is the code that runs now.

    Args:
        project: A checkout, or the installed definitions.
        package: One of PUBLISHED.
        directory: It is created.
        url: The address of the repository. It becomes the project URL `Source`; empty for none.
    """
    directory.mkdir(parents=True)
    if package == "images":
        for name in _SHOAL:
            shutil.copy(project.root / name, directory)
        code = INSTALLED.parent
        for path in code.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and INSTALLED not in path.parents:
                _copy(path, directory / "shoal" / path.relative_to(code))
        _write_definitions(project, directory / "shoal" / INSTALLED.name)
    else:
        for path in _list_files(project, package):
            _copy(path, directory / path.relative_to(project.root / package))
    shutil.copy(project.root / "LICENSE", directory)
    if url:
        with (directory / "pyproject.toml").open("a") as file:
            file.write(f'\n[project.urls]\nSource = "{url}"\n')


def _write_definitions(project: Project, directory: Path) -> None:
    """Writes the image definitions, all that builds read, with the commit that they are from if it is known."""
    for path in _list_files(project, *_DEFINITIONS, *_BUNDLE):
        _copy(path, directory / path.relative_to(project.root))
    if revision := provenance.find_revision(project.root):
        (directory / provenance.REVISION).write_text(f"{revision}\n")


def _list_files(project: Project, *names: str) -> Iterator[Path]:
    """Yields files and all files in directories of the project, without those that git ignores."""
    from pathspec import GitIgnoreSpec  # of hatchling

    ignored = GitIgnoreSpec.from_lines((project.root / ".gitignore").read_text().splitlines())
    for start in (project.root / name for name in names):
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.is_file() and not ignored.match_file(path.relative_to(project.root)):
                yield path


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
