"""Our own packages: their wheels, built in this process, and what installing these puts into an image.

They are installed here, by pypa/installer, and not by a step that runs pip: to start a container takes longer than to
unpack files. docs/decisions/installing-our-packages.md.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import tomllib

from shoal.engine import archive
from shoal.sources import bytecode

VENV = "opt/venv"
"""Where images have their virtual environment, from their root."""
PACKAGES = ("rehearsal", "library", "toolkit")
"""Those that images have: directories of the checkout."""
COMPILED = {"library": ("smdistributed/core/_engine.so", "smdistributed/core/tensorflow/_operations.so")}
"""What an image's build compiles and puts beside a package's modules."""
SOURCE_DATE_EPOCH = "1672531200"
"""Every time stamp inside what is built here, in seconds since 1970 (2023-01-01): the same source, the same bytes."""


def site_packages(python: str) -> str:
    """Return where images with that Python, such as 3.11, have their packages, from their root."""
    return f"{VENV}/lib/python{python}/site-packages"


def build_wheel(package: Path, directory: Path) -> Path:
    """Build the wheel of the package at `package` with the build backend that its pyproject.toml names.

    It is the same on every host: hatchling's hooks, which compile, do not run. What an image needs compiled is compiled
    in the image's own build.
    """
    os.environ.update(SOURCE_DATE_EPOCH=SOURCE_DATE_EPOCH, HATCH_BUILD_NO_HOOKS="true")  # backends read them there
    backend, target = importlib.import_module(_backend(package)), directory.absolute()
    with contextlib.chdir(package):
        return target / str(backend.build_wheel(str(target)))


def installed(package: Path, python: str, cache: Path) -> bytes:
    """Return what installing the package puts into an image with that Python: a tar archive from the image's root.

    Bytecode is among it if this process runs that Python. What was made of the same files by the same tools is
    taken from the directory `cache`. Raises BuildError for a module that is not Python.
    """
    kept = cache / "installed" / f"{package.name}-{python}-{_identity(package)}.tar"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    content = _install(package, python)
    _keep(content, kept)
    with contextlib.suppress(OSError):
        for path in _older(kept) if kept.exists() else ():
            path.unlink(missing_ok=True)
    return content


def contents(layer: bytes) -> dict[str, str]:
    """Return a SHA-256 (hexadecimal) of each file that an archive of `installed` lists as the package's, by path.

    Paths are those within site-packages, or within the virtual environment. A module with bytecode has the digest of
    both: an image with other bytecode is another image.
    """
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        found = {entry.name: file.read() for entry in tar if (file := tar.extractfile(entry))}
    (record,) = (name for name in found if name.endswith(".dist-info/RECORD"))
    modules = Path(record).parents[1]
    rows = [row for row in csv.reader(found[record].decode().splitlines()) if row[1]]
    return {path.replace("../", ""): _digest(digest, found, str(modules / path)) for path, digest, _ in rows}


def _digest(recorded: str, files: Mapping[str, bytes], path: str) -> str:
    """Return the digest of a row of RECORD; of a module with bytecode, that of both."""
    digest = base64.urlsafe_b64decode(f"{recorded.removeprefix('sha256=')}=")
    compiled = files.get(importlib.util.cache_from_source(path)) if path.endswith(".py") else None
    return (hashlib.sha256(digest + compiled).digest() if compiled else digest).hex()


def _install(package: Path, python: str) -> bytes:
    # Not at the top: most builds find all of this in the cache.
    import installer
    from installer.destinations import SchemeDictionaryDestination
    from installer.sources import WheelFile

    modules, programs = f"/{site_packages(python)}", f"/{VENV}/bin"
    scheme = {"purelib": modules, "platlib": modules, "scripts": programs, "data": f"/{VENV}"}
    with TemporaryDirectory(prefix="shoal-wheel-") as scratch:
        root = Path(scratch, "root")
        destination = SchemeDictionaryDestination(
            scheme, interpreter=f"{programs}/python3", script_kind="posix", destdir=str(root)
        )
        with WheelFile.open(build_wheel(package, Path(scratch))) as source:
            installer.install(source, destination, {})
        _record(root / modules[1:], COMPILED.get(package.name, ()))
        if bytecode.is_of(python):
            bytecode.write(root, package.name)
        files: dict[str, archive.Content] = {str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file()}
        out = io.BytesIO()
        archive.write(files, out, lambda name: name.startswith(f"{VENV}/bin/"), int(SOURCE_DATE_EPOCH))
        return out.getvalue()


def _record(modules: Path, compiled: tuple[str, ...]) -> None:
    """Add what the image's build adds to the list of the package's files."""
    (path,) = modules.glob("*.dist-info/RECORD")
    with path.open("a") as file:
        file.writelines(f"{name},,\n" for name in compiled)


def _backend(package: Path) -> str:
    return str(tomllib.loads((package / "pyproject.toml").read_text())["build-system"]["build-backend"])


def _identity(package: Path) -> str:
    """Return a digest of what `installed` stands on: all files that may go into it, what leaves some out, the tools."""
    tools = [_version(_backend(package).partition(".")[0]), _version("installer"), sys.version]
    state = hashlib.sha256(" ".join(tools).encode())
    for module in (__file__, bytecode.__file__, archive.__file__):
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


def _older(kept: Path) -> list[Path]:
    """Return what the cache has of the same package for the same Python, made of other files or by other tools."""
    return [path for path in kept.parent.glob(f"{kept.stem.rpartition('-')[0]}-*.tar") if path != kept]


def _keep(content: bytes, path: Path) -> None:
    """Put it into the cache; one that cannot be written has none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".part-") as part:
            Path(part, path.name).write_bytes(content)
            Path(part, path.name).replace(path)
