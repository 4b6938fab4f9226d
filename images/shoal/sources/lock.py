"""Lock files: the exact wheels, with hashes, of each layer of an image. Reads them, and makes them for `shoal lock`.

The first line of a lock shows whether it is for the current requirements.

pip resolves (`--dry-run --report`) on a machine with the platform of the images. Its Python may be another version.
Why not uv: docs/decisions/written-by-hand.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from shoal.errors import ShoalError, SpecError
from shoal.limits import MOST_PIP, read_project_file
from shoal.matrix.project import CHILD_LAYERS, LAYERS, Project
from shoal.matrix.spec import EFA, BuildSpec, ImageSpec
from shoal.network.settings import pip_environment
from shoal.sources.render import GeneratedFile

# No address and no option: pip reads these lines on this machine too, and would build what an address names.
_LINE = re.compile(
    r"(?P<name>[a-z0-9]+(-[a-z0-9]+)*)==(?P<version>[\w.!+-]{1,100}) --hash=sha256:(?P<sha256>[0-9a-f]{64})", re.ASCII
)


@dataclass(frozen=True)
class Pin:
    """One locked file: canonical name, version, SHA-256 (hexadecimal)."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_image_pins(project: Project, spec: BuildSpec, image: ImageSpec) -> dict[str, tuple[Pin, ...]]:
    """Returns the image's pins by layer. Raises `SpecError` if a lock is missing or made for other requirements."""
    directory = project.lock_directory(image)
    tag = f"{image.repository}:{image.runtime_version_tag}"  # its variants have the same locks
    return {
        layer: tuple(read_lock(directory / f"{layer}.txt", make_header(project, spec, image, layer), tag))
        for layer in layers_of(image)
    }


def layers_of(image: ImageSpec) -> tuple[str, ...]:
    """Returns the names of the image's pip layers."""
    if image.variant == EFA:  # Debian packages only
        return ()
    return CHILD_LAYERS if image.extends else LAYERS if image.everyday else LAYERS[:-1]


def are_current(project: Project, spec: BuildSpec, image: ImageSpec) -> bool:
    """Returns whether the image has locks, made for its current requirements."""
    return not _find_problem(project, spec, image)


def find_stale(project: Project, spec: BuildSpec, images: Iterable[ImageSpec]) -> list[str]:
    """Returns the problems of the locks of images, each once with its fix. Needs no network."""
    problems = dict.fromkeys(map(functools.partial(_find_problem, project, spec), images))
    return [problem for problem in problems if problem]


def _find_problem(project: Project, spec: BuildSpec, image: ImageSpec) -> str:
    try:
        read_image_pins(project, spec, image)
    except SpecError as error:
        return str(error)
    return ""


def list_installed(project: Project, spec: BuildSpec, image: ImageSpec) -> Iterator[Pin]:
    """Yields the pins of all that is installed in an image, its parents' first.

    Raises `SpecError` if a lock is missing, wrong, or made for other requirements.
    """
    if parent := spec.parent(image):
        yield from list_installed(project, spec, parent)
    for pins in read_image_pins(project, spec, image).values():
        yield from pins


def make_header(project: Project, spec: BuildSpec, image: ImageSpec, layer: str) -> str:
    """Returns the first line of a lock file: its requirements, and for a child image a digest of its parent's pins.

    Raises `SpecError` if a parent's lock is missing or wrong.
    """
    if parent := spec.parent(image):
        installed = "\n".join(map(str, list_installed(project, spec, parent)))
        on = f"on {parent.tag} ({hashlib.sha256(installed.encode()).hexdigest()[:12]})"
        return f"# Made by `shoal lock` for: {' '.join(image.requirements)} {on}"
    upper = {"aws": spec.aws, "everyday": (*spec.aws, *image.everyday)}.get(layer, ())
    return f"# Made by `shoal lock` for: {' '.join([*image.requirements, *spec.mpi, *upper])}".rstrip()


def read_lock(path: Path, header: str | None = None, tag: str = "<tag>") -> list[Pin]:
    """Returns the pins of the lock file of an image.

    Raises `SpecError` with the line if it is missing, wrong or lacks `header`.
    """
    try:
        lines = read_project_file(path).splitlines()
    except FileNotFoundError:
        raise SpecError(f"{path}: missing. Fix: shoal lock {tag}") from None
    if header is not None and lines[:1] != [header]:
        raise SpecError(f"{path}:1: made for other requirements than are asked for now. Fix: shoal lock {tag}")
    pins = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match or not _is_version(match["version"]):
            raise SpecError(
                f"{path}:{number}: expected 'name==version --hash=sha256:…', found {line!r}. Fix: shoal lock"
            )
        pins.append(Pin(**match.groupdict()))
    return pins


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def find_locked_wheels(pins: Iterable[Pin], directories: Iterable[Path]) -> Iterator[tuple[Pin, Path]]:
    """Yields the wheels in `directories` that are locked, each after its pin: same name, version and SHA-256.

    The directories are pip's find-links directories, or the wheels of a bundle.
    """
    wanted = {(pin.name, Version(pin.version)): pin for pin in pins}
    for path in (path for directory in directories for path in sorted(directory.glob("*.whl"))):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        pin = wanted.get((canonicalize_name(name), version))
        if pin and path.is_file() and _sha256(path) == pin.sha256:
            yield pin, path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Up to the C library of Debian 12. Later ones are compatible.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]
UNREACHABLE = re.compile(r"Retry\(total=0|is not a trusted or secure host")
"""pip's words about its last attempt to connect, or about an index that it leaves out because it has no TLS."""
_CONFLICT = "The conflict is caused by:"
# The program that runs as pip here. It reads wheels only. The metadata of a package can name the address of another,
# which pip would clone, or build in spite of --only-binary. An index without an end does not fill the memory.
# pip picks files for the Python of --python-version. But it evaluates markers (`; python_version < "3.13"`) for the
# Python that it runs in, and has no option for that. So its markers are patched, and the patch is checked.
_PIP = """
import resource, sys
from pip._internal.cli.main import main
from pip._internal.exceptions import InstallationError
from pip._internal.operations.prepare import RequirementPreparer
from pip._vendor.packaging import markers
version, memory, sys.argv = sys.argv[1], int(sys.argv[2]), ["pip", *sys.argv[3:]]
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
prepare = RequirementPreparer.prepare_linked_requirement
def prepare_wheel(self, req, *args, **options):
    if req.link.is_vcs or not req.link.is_wheel:
        raise InstallationError(f"{req}: not a wheel. Its code would run on this machine")
    return prepare(self, req, *args, **options)
RequirementPreparer.prepare_linked_requirement = prepare_wheel
if version:
    environment = markers.default_environment() | {
        "python_version": version, "python_full_version": version + ".0", "implementation_version": version + ".0"
    }
    markers.default_environment = lambda: environment
    if not markers.Marker("python_version == '" + version + "'").evaluate():
        sys.exit("this pip cannot read markers for another Python")
sys.exit(main())
"""


@dataclass(frozen=True)
class LockFile:
    """A lock file that was written."""

    tag: str
    path: Path
    pins: int
    """How many distributions it pins."""


@dataclass(frozen=True)
class LockedImages:
    """The lock files and Dockerfiles of images that were locked."""

    locks: Sequence[LockFile]
    """One for each layer of an image. Variants of an image share them."""
    rendered: Sequence[GeneratedFile]
    """The Dockerfiles."""


def lock_image(project: Project, spec: BuildSpec, image: ImageSpec) -> list[Path]:
    """Resolves and writes the image's lock files, and returns their paths.

    Raises `SpecError` with pip's words, on another platform than the images', or if its parent's lock is wrong. It also
    is raised if an image for CPUs would need CUDA packages. Raises `ShoalError` if an index cannot be reached.
    """
    parent = spec.parent(image)
    if parent and image.variant == EFA:  # it has the locks of the image that it extends
        return lock_image(project, spec, parent)
    index = spec.indexes[image.index] if image.index else None
    if parent:
        installed = list(list_installed(project, spec, parent))
        layers = {"framework": _resolve_on(installed, image.requirements, image.python_version, index)}
    else:
        layers = resolve_layers(spec, image, index)
    directory = project.lock_directory(image)
    directory.mkdir(parents=True, exist_ok=True)
    return [
        _write(directory / f"{layer}.txt", make_header(project, spec, image, layer), found)
        for layer, found in layers.items()
    ]


def resolve_layers(spec: BuildSpec, image: ImageSpec, index: str | None) -> dict[str, list[Pin]]:
    """Returns the pins by layer. Runs pip, and again for each upper layer. Raises `SpecError` if pip fails."""
    pins = _resolve([*image.requirements, *spec.mpi], image.python_version, index)
    mpi = {canonicalize_name(Requirement(line).name) for line in spec.mpi}
    layers: dict[str, list[Pin]] = {layer: [] for layer in layers_of(image)}
    for pin in pins:
        layers[_layer_of(pin.name, mpi)].append(pin)
    if image.device == "cpu" and (cuda := [pin.name for pin in layers["cuda"]]):
        raise SpecError(
            f"{image.tag}: {' '.join(image.requirements)} brings {len(cuda)} CUDA packages, such as {cuda[0]}, which an"
            " image with device: cpu does not install. Allowed: builds for CPUs. Fix: in dockerfiles/versions.yml,"
            " require one, such as torch==2.13.0+cpu with index: cpu-wheels, or set device: gpu"
        )
    for layer, requirements in (("aws", spec.aws), ("everyday", image.everyday)):
        if requirements:  # do not change the layers below
            below = [pin for found in layers.values() for pin in found]
            layers[layer] = _resolve_on(below, requirements, image.python_version, index)
    return layers


def _resolve_on(
    installed: Collection[Pin], requirements: Iterable[str], python_version: str, index: str | None
) -> list[Pin]:
    """Returns the files that pip adds to `installed`. It sees empty wheels of these, and downloads none of them."""
    with TemporaryDirectory(prefix="shoal-lock-") as scratch:
        lines = [f"{pin.name} @ {_empty_wheel(pin, Path(scratch)).as_uri()}\n" for pin in installed]
        constraints = Path(scratch, "constraints.txt")
        constraints.write_text("".join(lines))
        pins = _resolve(requirements, python_version, index, f"--constraint={constraints}")
    names = {pin.name for pin in installed}
    return [pin for pin in pins if pin.name not in names]


def _empty_wheel(pin: Pin, directory: Path) -> Path:
    """Writes a wheel without modules that has a pin's name and version, in place of the real one; returns its path."""
    name = f"{pin.name.replace('-', '_')}-{pin.version}"
    path = directory / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {pin.name}\nVersion: {pin.version}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    return path


def _resolve(requirements: Iterable[str], python_version: str, index: str | None, *options: str) -> list[Pin]:
    """Returns the files that pip chooses, sorted by name. If it fails, it is tried again with `index`."""
    here = (platform.system(), platform.machine())
    if here != ("Linux", "x86_64"):  # pip evaluates markers for the machine that it runs on
        raise SpecError(f"Locks need Linux and x86_64; this is {' '.join(here)}. Fix: lock on such a machine")
    requirements = [_check_requirement(line) for line in requirements]
    with TemporaryDirectory(prefix="shoal-lock-") as scratch:
        report = Path(scratch, "report.json")
        command = [*pip_command(python_version), "install", "--dry-run", "--ignore-installed", "--report", str(report)]
        command += [*target_options(python_version), "--target=unused", *options]
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=False, env=pip_environment())
        result = run([*command, *requirements])
        if result.returncode and index:  # only if pip's own configuration does not have the file
            command += ["--extra-index-url", index]
            result = run([*command, *requirements])
        if result.returncode:
            raise _explain_failure(" ".join(requirements), result.stdout, result.stderr.strip())
        return sorted(map(_make_pin, json.loads(report.read_text())["install"]), key=lambda pin: pin.name)


def _explain_failure(requirements: str, out: str, words: str) -> ShoalError:
    if UNREACHABLE.search(words):  # pip goes on without the index, and then reports a conflict or a missing version
        return ShoalError(
            f"A package index cannot be reached, to resolve {requirements}:\n{words}\n"
            "Fix: check the network and the indexes: shoal doctor, pip config list"
        )
    if _CONFLICT in out:
        cause = out.partition(_CONFLICT)[2].partition("\n\n")[0]
        return SpecError(
            f"Requirements contradict each other: {requirements}:\n{words}\n{_CONFLICT}{cause}\n"
            "Fix: change their versions in dockerfiles/versions.yml or buildspec.yml, or pip's constraints"
            " (pip config list)"
        )
    return SpecError(
        f"pip cannot resolve {requirements}:\n{words}\n"
        "Fix: require what an index has, or name another index (pip config list)"
    )


def _check_requirement(text: str) -> str:
    """Returns a requirement. Raises `SpecError` for an option or the address of a package: pip would build it here."""
    try:
        if Requirement(text).url is None:
            return text
    except InvalidRequirement:
        pass
    raise SpecError(f"{text}: expected a package's name and versions. Fix: for example torch==2.13.0")


def pip_command(python_version: str = "", first: str = "") -> list[str]:
    """Returns the command of a pip that builds nothing, and resolves for that Python; empty: for its own.

    `first` is code that runs before pip. `-P`: it imports no module of the working directory.
    """
    is_own = python_version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    return [sys.executable, "-P", "-c", first + _PIP, "" if is_own else python_version, str(MOST_PIP)]


def target_options(python_version: str) -> list[str]:
    """Returns pip's options that select files for the platform and Python of images, not of this machine."""
    platforms = [f"--platform={name}" for name in _PLATFORMS]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python_version}", *platforms]


def _make_pin(entry: dict[str, Any]) -> Pin:
    """Returns the pin of one file in pip's installation report (`--report`). Raises `SpecError` without its SHA-256."""
    metadata, file = entry["metadata"], entry["download_info"]
    digest = file.get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest is None:
        raise SpecError(f"{file['url']}: its index names no SHA-256. Fix: another index (pip config list)")
    return Pin(canonicalize_name(metadata["name"]), metadata["version"], digest)


def _layer_of(name: str, mpi: Collection[str]) -> str:
    if name in mpi:
        return "mpi"
    return "cuda" if name.startswith(("nvidia-", "cuda-")) else "framework"


def _write(path: Path, header: str, pins: Iterable[Pin]) -> Path:
    if path.exists() and not path.is_file():
        raise SpecError(f"{path}: not a file. Fix: remove it")
    path.write_text("\n".join([header, *map(str, pins)]) + "\n")
    return path
