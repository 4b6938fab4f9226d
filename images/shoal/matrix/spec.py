"""Reads buildspec.yml and dockerfiles/versions.yml into the matrix: frozen `ImageSpec`s, one for each image.

It has the models of these files and of dropped.yml, and checks that the files fit each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from shoal.errors import SpecError, did_you_mean
from shoal.matrix import selectors, yaml_file
from shoal.matrix.yaml_file import Location, StrictModel

VERSIONS = Path("dockerfiles", "versions.yml")
_MOST_IMAGES = 2_000
"""Possible images: releases times systems times variants, and children of each. We have 30."""

Word = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9._+-]*$")]
Version = Annotated[str, pydantic.Field(pattern=r"^\d+(\.\d+)+$")]
Device = Literal["cpu", "gpu"]
Python = Annotated[str, pydantic.Field(pattern=r"^py3\d+$")]
Cuda = Annotated[str, pydantic.Field(pattern=r"^cu\d{3}$")]
Variant = Literal["runtime", "devel", "lean", "efa"]
Glob = Annotated[str, pydantic.Field(pattern=r"^[\w*][\w*./+-]*[\w*]$")]
PathGlob = Annotated[str, pydantic.Field(pattern=r"^/[\w*][\w*?./+-]*$")]
Package = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9.+-]+$")]
EFA: Variant = "efa"
"""The variant that adds the libraries of AWS's network cards to a runtime image. It extends that image."""


class Needs(StrictModel):
    """The needs of a version of a framework, or of something that extends its images."""

    framework: Word
    """Its name: the first word of the images' names, and of its template in `dockerfiles/`."""
    version: Version
    """The version, in the tag."""
    requirements: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]
    """pip requirements, resolved to exact files with hashes by `shoal lock`."""
    index: str | None = None
    """An entry of buildspec.yml's `indexes`, for files that PyPI does not have."""
    disk_gib: Annotated[int, pydantic.Field(gt=0, le=100_000)]
    """The free space that a cold build needs, in GiB."""
    hold: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Why `shoal upgrade` leaves this entry as it is."""


class Release(Needs):
    """A version of a framework for one device."""

    device: Device
    """Whether the images are for CPUs or GPUs."""
    cuda: Cuda | None = None
    """The CUDA version of a gpu release."""
    everyday: tuple[str, ...] = ()
    """pip requirements in addition to buildspec.yml's `everyday`, for this release."""
    systems: Annotated[tuple[Word, ...], pydantic.Field(min_length=1)] | None = None
    """The systems that have wheels of it. A missing list means all systems."""
    compiler: bool = False
    """Whether its runtime images have the system's small compiler."""

    @pydantic.model_validator(mode="after")
    def _cuda_belongs_to_gpu(self) -> Release:
        """Refuses a gpu release without a CUDA version, and a cpu release with one (pydantic validator)."""
        if (self.device == "gpu") != (self.cuda is not None):
            raise ValueError("a gpu image names its cuda version (cuda: cu117), a cpu image has none")
        return self


class Child(Needs):
    """A version of something that extends images, and its needs beyond those."""

    extends: str
    """A glob on tags of earlier images. One child is built on each match. Only runtime variants match."""


class Compiler(StrictModel):
    """A compiler for code that a framework writes while a script runs, such as torch.compile."""

    packages: Annotated[tuple[Package, ...], pydantic.Field(min_length=1)]
    """Its Debian packages."""
    without: tuple[PathGlob, ...] = ()
    """Globs of `dpkg --path-exclude` on paths: files of these packages that images leave out."""


class System(StrictModel):
    """A release of Debian that images are based on."""

    suite: Word
    """Its name in a mirror, such as bookworm. Its updates are in `<suite>-updates` and `<suite>-security`."""
    upstream: Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9._/:-]*$")]
    """The base image to pull, if a registry answers."""
    sources: Literal["sources.list", "debian.sources"]
    """The format of the sources in apt's examples. A base image that is made here gets these sources."""
    python: Python
    """The version of its package python3. It has no other Python."""
    devel: tuple[Package, ...] = ()
    """The compiler packages of devel variants. If there are none, there is no devel variant."""
    efa: tuple[Package, ...] = ()
    """The Debian packages of efa variants: rdma-core's. If there are none, there is no efa variant."""
    compiler: Compiler | None = None
    """The small compiler of runtime images, if their release says `compiler: true`."""

    def variants(self, small: Compiler | None) -> Iterator[tuple[Variant, tuple[Package, ...], tuple[PathGlob, ...]]]:
        """Yields the variants of images, the Debian packages that each adds, and the files that it leaves out.

        Args:
            small: The compiler of runtime images.
        """
        yield "runtime", small.packages if small else (), small.without if small else ()
        if self.devel:
            yield "devel", self.devel, ()


class NcclPlugin(StrictModel):
    """AWS's plugin for NCCL (aws-ofi-nccl), which you have built or downloaded."""

    file: Annotated[str, pydantic.Field(pattern=r"^[\w.][\w./+-]*$")]
    """Its path in the project: `libnccl-net.so`, or a tar archive of it and libraries that it needs."""
    sha256: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of the file. A build refuses another one."""


class ImageSpec(Release):
    """One image of the matrix."""

    python: Python
    os: Word
    system: System
    """The system that `os` names."""
    variant: Variant = "runtime"
    """`devel` also has compilers, `lean` no everyday packages, `efa` rdma-core; the tag ends with that word."""
    packages: tuple[Package, ...] = ()
    """Debian packages in addition to the ones of every image."""
    without: tuple[PathGlob, ...] = ()
    """Globs on paths: files of `packages` that it leaves out."""
    extends: str | None = None
    """The tag of the image of the matrix that it extends."""
    plugin: NcclPlugin | None = None
    """The plugin of NCCL in an efa variant for GPUs."""

    @property
    def repository(self) -> str:
        return f"{self.framework}-training"

    @property
    def recipe(self) -> str:
        """The name of its template and, if it extends another image, of its lock of Debian packages."""
        return EFA if self.variant == EFA else self.framework

    @property
    def version_tag(self) -> str:
        """The part of its tag after the colon. A variant's tag ends with its name."""
        return "-".join(part for part in (self.runtime_version_tag, self.variant) if part != "runtime")

    @property
    def runtime_version_tag(self) -> str:
        """The version tag without the variant. Variants share their locks, which are named by it."""
        parts = (self.version, self.device, self.python, self.cuda, self.os)
        return "-".join(part for part in parts if part)

    @property
    def tag(self) -> str:
        """The image's name in AWS's form, e.g. `pytorch-training:2.0.1-gpu-py311-cu117-debian12`."""
        return f"{self.repository}:{self.version_tag}"

    @property
    def directory(self) -> str:
        """The image's name as one path component."""
        return f"{self.repository}-{self.version_tag}"

    @property
    def python_version(self) -> str:
        return f"3.{self.python.removeprefix('py3')}"


class VersionsFile(StrictModel):
    """dockerfiles/versions.yml: the releases and systems to choose from."""

    systems: dict[Word, System]
    """The releases of Debian, by their name in tags."""
    releases: tuple[Release, ...]
    """The versions of frameworks."""
    children: tuple[Child, ...] = ()
    """Images that extend other images."""

    def combinations(
        self, everyday: tuple[str, ...], plugin: NcclPlugin | None = None
    ) -> list[tuple[Location, ImageSpec]]:
        """Returns every possible image, parents first, each with the place of its entry.

        Raises `SpecError` if there are more than a project needs.

        Args:
            everyday: The everyday packages of buildspec.yml.
            plugin: NCCL's plugin of efa variants.
        """
        found: list[tuple[Location, ImageSpec]] = []
        for number, release in enumerate(self.releases):
            needed = (*everyday, *release.everyday)
            for name, system in self.systems.items():
                if name not in (release.systems or (name,)):
                    continue
                small = system.compiler if release.compiler else None
                variants = [*system.variants(small), *([("lean", (), ())] if needed else ())]
                for variant, packages, without in variants:
                    place = {"os": name, "system": system, "python": system.python, "without": without}
                    place |= {"variant": variant, "packages": packages, "everyday": needed if variant != "lean" else ()}
                    found.append((("releases", number), ImageSpec.model_validate(release.model_dump() | place)))
                    _check_number(found)
        for number, child in enumerate(self.children):
            for tag, parent in _parents(image for _, image in found).items():
                if selectors.matches(child.extends, tag):
                    found.append((("children", number), _extend(parent, child)))
                    _check_number(found)
        with_efa = [(place, _add_efa(image, plugin)) for place, image in found if _can_have_efa(image)]
        _check_number([*found, *with_efa])
        return [*found, *with_efa]


def _check_number(images: Sized) -> None:
    if len(images) > _MOST_IMAGES:
        raise SpecError(f"{VERSIONS}: makes more than {_MOST_IMAGES} images. Fix: remove releases, systems or children")


def _parents(images: Iterable[ImageSpec]) -> dict[str, ImageSpec]:
    """Returns the images that a child can extend, by tag."""
    return {image.tag: image for image in images if image.variant == "runtime"}


def _extend(parent: ImageSpec, child: Child) -> ImageSpec:
    place = parent.model_dump(include={"device", "cuda", "python", "os", "system"})
    return ImageSpec.model_validate(child.model_dump() | place | {"extends": parent.tag})


def _can_have_efa(image: ImageSpec) -> bool:
    return image.variant == "runtime" and bool(image.system.efa)


def _add_efa(image: ImageSpec, plugin: NcclPlugin | None) -> ImageSpec:
    """Returns the efa variant, which extends a runtime image. NCCL needs GPUs, and so does its plugin."""
    more = {"variant": EFA, "packages": image.system.efa, "without": (), "extends": image.tag}
    return image.model_copy(update=more | {"plugin": plugin if image.device == "gpu" else None})


class Axes(StrictModel):
    """The values of each axis that images are built for. A missing axis has all values of versions.yml."""

    framework: tuple[Word, ...] | None = None
    """Frameworks, such as `pytorch`."""
    version: tuple[Version, ...] | None = None
    """Versions of frameworks."""
    device: tuple[Device, ...] | None = None
    """Devices."""
    python: tuple[Python, ...] | None = None
    """Pythons, such as `py311`."""
    cuda: tuple[Cuda, ...] | None = None
    """For gpu images."""
    os: tuple[Word, ...] | None = None
    """Systems of versions.yml, such as `debian12`."""
    variant: tuple[Variant, ...] | None = None
    """`devel` images also have compilers, `lean` images no everyday packages, and `efa` images rdma-core."""

    def values(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields the axes that are set, with their values."""
        for axis in type(self).model_fields:
            if (values := getattr(self, axis)) is not None:
                yield axis, values

    def allow(self, image: ImageSpec) -> bool:
        """Returns whether an image has a value of each axis that is set. An image without CUDA fits every `cuda`."""
        return all(getattr(image, axis) in (None, *values) for axis, values in self.values())


class Exclusion(StrictModel):
    """Images that are not built: those that match all globs of the entry."""

    framework: str = "*"
    """A glob on the framework."""
    version: str = "*"
    """A glob on its version."""
    device: str = "*"
    """A glob on the device."""
    python: str = "*"
    """A glob on the Python."""
    cuda: str = "*"
    """A glob on the CUDA version. A cpu image matches ''."""
    os: str = "*"
    """A glob on the system."""
    variant: str = "*"
    """A glob on the variant."""

    def matches(self, image: ImageSpec) -> bool:
        """Returns whether an image matches all globs."""
        return all(fnmatchcase(getattr(image, axis) or "", glob) for axis, glob in self)


class BuildFile(StrictModel):
    """buildspec.yml: the images to build, and their common settings."""

    indexes: Mapping[str, str] = pydantic.Field(default_factory=dict)
    """Package indexes by name."""
    mpi: tuple[str, ...]
    """pip requirements of the MPI in every image."""
    aws: tuple[str, ...] = ()
    """pip requirements of every image that must not change its other packages."""
    everyday: tuple[str, ...] = ()
    """pip requirements of every image but the lean ones, in addition to its release's own. Scripts take these packages
    for granted. They do not change other packages."""
    nccl_plugin: NcclPlugin | None = None
    """AWS's plugin with which NCCL uses EFA, for efa images with GPUs. Without it, NCCL uses TCP."""
    defaults: Mapping[Word, str]
    """The tag of the image that a framework's name means."""
    axes: Axes = Axes()
    """The values to build images for."""
    exclude: tuple[Exclusion, ...] = ()
    """Combinations that are not built."""


class Dropped(StrictModel):
    """Files of wheels that images leave out."""

    what: str
    """The files, in words."""
    reason: str
    """Why nothing needs them."""
    files: Annotated[tuple[Glob, ...], pydantic.Field(min_length=1)]
    """Globs of `find` on paths in site-packages; `*` also matches `/`. A directory is removed with its content."""


class DroppedFile(StrictModel):
    """dockerfiles/dropped.yml: the files of wheels that images leave out."""

    dropped: tuple[Dropped, ...]
    """The entries."""


@dataclass(frozen=True)
class BuildSpec:
    """The images and their common settings, named as in `BuildFile`."""

    indexes: Mapping[str, str]
    mpi: tuple[str, ...]
    aws: tuple[str, ...]
    defaults: Mapping[str, str]
    images: tuple[ImageSpec, ...]
    excluded: tuple[str, ...] = ()
    """The tags of images that versions.yml defines, and the axes or exclusions leave out."""

    def choose(self, wanted: Iterable[str] = (), skip: Iterable[str] = ()) -> list[ImageSpec]:
        """Returns the images that match `wanted` (if empty: all images) and not `skip`.

        Raises `UsageError` if a word matches no image, or no image is left.
        """
        by_tag = {image.tag: image for image in self.images}
        return [by_tag[tag] for tag in selectors.choose_tags(by_tag, self.defaults, wanted, skip, self.excluded)]

    def systems(self) -> list[System]:
        """Returns the systems of the images, each once."""
        return list(dict.fromkeys(image.system for image in self.images))

    def parent(self, image: ImageSpec) -> ImageSpec | None:
        """Returns the image that `image` extends; None if it extends a base image."""
        return next((parent for parent in self.images if parent.tag == image.extends), None)

    def list_extensions(self, image: ImageSpec) -> list[str]:
        """Returns the recipes of a child and of the children that it extends; none for an image without parent."""
        parent = self.parent(image)
        return [image.recipe, *self.list_extensions(parent)] if parent else []

    def with_parents(self, images: Iterable[ImageSpec]) -> list[ImageSpec]:
        """Returns the images and all that they extend, parents first."""
        wanted = {image.tag for image in images}
        for image in reversed(self.images):
            if image.tag in wanted and image.extends:
                wanted.add(image.extends)
        return [image for image in self.images if image.tag in wanted]

    def select(self, word: str) -> ImageSpec:
        """Returns the image that `word` matches. Raises `UsageError` if it matches none or several."""
        tags = [image.tag for image in self.images]
        return self.choose([selectors.match_one(word, tags, self.defaults, self.excluded)])[0]


def load(path: Path) -> BuildSpec:
    """Reads and checks a buildspec and its versions.yml. Raises `SpecError` with file, line and key of each mistake."""
    file, document = yaml_file.read_yaml(path, BuildFile)
    versions, versions_document = yaml_file.read_yaml(path.parent / VERSIONS, VersionsFile)
    combinations = versions.combinations(file.everyday, file.nccl_plugin)
    problems = (*_problems_of_versions(versions, combinations, file), *_problems_of_places(versions))
    mistakes = [versions_document.locate(*problem) for problem in problems]
    candidates = [image for _, image in combinations]
    allowed = [image for image in candidates if file.axes.allow(image)]
    images = tuple(_drop_excluded(allowed, file.exclude))
    mistakes += [document.locate(*problem) for problem in _problems_of_axes(file, candidates)]
    mistakes += [document.locate(*problem) for problem in _problems_of_systems(file.axes, versions.systems)]
    mistakes += [document.locate(*problem) for problem in _problems_of_choice(file, allowed, images)]
    if mistakes:
        raise SpecError("\n".join(mistakes))
    built = {image.tag for image in images}
    excluded = tuple(image.tag for image in candidates if image.tag not in built)
    return BuildSpec(file.indexes, file.mpi, file.aws, file.defaults, images, excluded)


def _drop_excluded(allowed: Iterable[ImageSpec], exclude: Iterable[Exclusion]) -> Iterator[ImageSpec]:
    """Yields the images that are not excluded. If a parent is not built, its children are not built either."""
    built: set[str | None] = {None}
    for image in allowed:
        if image.extends in built and not any(exclusion.matches(image) for exclusion in exclude):
            built.add(image.tag)
            yield image


def _problems_of_versions(
    versions: VersionsFile, combinations: Iterable[tuple[Location, ImageSpec]], file: BuildFile
) -> Iterator[tuple[Location, str]]:
    """Yields place and message of each contradiction in versions.yml: equal tags, lost children, unknown indexes."""
    seen: dict[str, Location] = {}
    for location, image in combinations:
        if image.tag in seen:
            yield location, f"makes the same tag as {'.'.join(map(str, seen[image.tag]))}: {image.tag}"
        seen[image.tag] = location
    for number, child in enumerate(versions.children):
        if ("children", number) not in seen.values():
            hint = did_you_mean(child.extends, _parents(image for _, image in combinations), cutoff=0.3)
            yield (
                ("children", number, "extends"),
                f"{child.extends!r} matches no earlier image; children extend runtime variants.{hint}",
            )
    for key, entries in (("releases", versions.releases), ("children", versions.children)):
        for number, entry in enumerate(entries):
            if entry.index is not None and entry.index not in file.indexes:
                hint = did_you_mean(entry.index, file.indexes)
                yield (key, number, "index"), f"{entry.index!r} is not among buildspec.yml's indexes.{hint}"


def _problems_of_places(versions: VersionsFile) -> Iterator[tuple[Location, str]]:
    """Yields place and message of each unknown system that a release names."""
    for number, release in enumerate(versions.releases):
        for position, name in enumerate(release.systems or ()):
            if name not in versions.systems:
                hint = f"{did_you_mean(name, versions.systems)} There are: {', '.join(versions.systems)}"
                yield ("releases", number, "systems", position), f"{name!r} is not among systems.{hint}"


def _problems_of_axes(file: BuildFile, candidates: list[ImageSpec]) -> Iterator[tuple[Location, str]]:
    for axis, values in file.axes.values():
        known = sorted({getattr(image, axis) or "" for image in candidates} - {""})
        for number, value in enumerate(values):
            if value not in known:
                hint = f"{did_you_mean(value, known)} There are: {', '.join(known)}"
                yield ("axes", axis, number), f"{VERSIONS} does not define {value!r}.{hint}"


def _problems_of_systems(axes: Axes, systems: Mapping[str, System]) -> Iterator[tuple[Location, str]]:
    pythons = axes.python or [system.python for system in systems.values()]
    chosen = {name: system.python for name, system in systems.items() if name in (axes.os or systems)}
    there_is = ", ".join(f"{name} has {system.python}" for name, system in systems.items())
    for number, name in enumerate(axes.os or ()):
        if name in systems and systems[name].python not in pythons:
            message = f"{name!r} has no Python of axes.python, which lists {', '.join(pythons)}"
            yield ("axes", "os", number), f"{message}. There are: {there_is}"
    for number, python in enumerate(axes.python or ()):
        if python not in chosen.values() and python in {system.python for system in systems.values()}:
            message = f"{python!r} is no Python of axes.os, which lists {', '.join(axes.os or ())}"
            yield ("axes", "python", number), f"{message}. There are: {there_is}"


def _problems_of_choice(
    file: BuildFile, allowed: list[ImageSpec], images: tuple[ImageSpec, ...]
) -> Iterator[tuple[Location, str]]:
    for number, exclusion in enumerate(file.exclude):
        if not any(exclusion.matches(image) for image in allowed):
            yield ("exclude", number), "excludes no image of the axes. Fix: correct it, or take it out"
    tags = [image.tag for image in images]
    for framework, tag in file.defaults.items():
        if tag not in tags:
            yield ("defaults", framework), f"{tag!r} is not in the matrix.{did_you_mean(tag, tags)}"
    if not images:
        yield (), "the axes and exclusions leave no image"
