"""buildspec.yml → frozen `ImageSpec`s. Every error names the file, the line and the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shoal.errors import SpecError, UsageError, did_you_mean


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


Word = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9._+-]*$")]


class ImageSpec(_Model):
    """One image of the matrix.

    `requirements` are pip requirements, resolved to hashes by `shoal lock`; `disk_gib` is the free space (GiB) that a
    cold build needs; `index` names an entry of the buildspec's `indexes`.
    """

    framework: Word
    version: Annotated[str, pydantic.Field(pattern=r"^\d+(\.\d+)+$")]
    device: Literal["cpu", "gpu"]
    python: Annotated[str, pydantic.Field(pattern=r"^py3\d+$")]
    os: Literal["debian12"]
    requirements: tuple[str, ...]
    disk_gib: Annotated[int, pydantic.Field(gt=0)]
    cuda: Annotated[str, pydantic.Field(pattern=r"^cu\d{3}$")] | None = None
    index: str | None = None

    @pydantic.model_validator(mode="after")
    def _cuda_belongs_to_gpu(self) -> ImageSpec:
        if (self.device == "gpu") != (self.cuda is not None):
            raise ValueError("a gpu image names its cuda version (cuda: cu117), a cpu image has none")
        return self

    @property
    def repository(self) -> str:
        return f"{self.framework}-training"

    @property
    def version_tag(self) -> str:
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


class BuildSpec(_Model):
    """The whole of buildspec.yml."""

    indexes: dict[str, str] = {}
    mpi: tuple[str, ...]
    aws: tuple[str, ...] = ()
    defaults: dict[str, str]
    images: tuple[ImageSpec, ...]

    def problems(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield (key path, message) of what does not fit together."""
        tags = [image.tag for image in self.images]
        for number, image in enumerate(self.images):
            if image.tag in tags[:number]:
                yield ("images", number), f"makes the same tag as an entry before it: {image.tag}"
            if image.index is not None and image.index not in self.indexes:
                hint = did_you_mean(image.index, self.indexes)
                yield ("images", number, "index"), f"{image.index!r} is not among indexes.{hint}"
        for framework, tag in self.defaults.items():
            if tag not in tags:
                yield ("defaults", framework), f"{tag!r} is what no entry makes.{did_you_mean(tag, tags)}"

    def select(self, name: str) -> ImageSpec:
        """Return the image that `name` means: a full tag, or a framework's default. Raises `UsageError`."""
        tag = self.defaults.get(name, name)
        for image in self.images:
            if image.tag == tag:
                return image
        known = [*self.defaults, *(image.tag for image in self.images)]
        choices = "\n".join(f"  {choice}" for choice in known)
        raise UsageError(f"no image {name!r} in buildspec.yml.{did_you_mean(name, known)} Choices:\n{choices}")


def load(path: Path) -> BuildSpec:
    """Read and check a buildspec. Raises `SpecError` with file, line and key."""
    try:
        data = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}. Run from a checkout of the project.") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise SpecError(f"{path}:{line}: not YAML: {error.problem}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not YAML in UTF-8: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}:1: expected a mapping with the keys {', '.join(BuildSpec.model_fields)}")
    try:
        spec = BuildSpec.model_validate(data)
    except pydantic.ValidationError as error:
        lines = (_explain(path, data, problem) for problem in error.errors())
        raise SpecError("\n".join(lines)) from error
    if problems := list(spec.problems()):
        raise SpecError("\n".join(_told(path, data, location, message) for location, message in problems))
    return spec


def _told(path: Path, data: Any, location: tuple[Any, ...], message: str) -> str:
    key = ".".join(str(part) for part in location) or "(whole file)"
    return f"{path}:{_line_of(data, location)}: {key}: {message}"


def _explain(path: Path, data: Any, problem: Any) -> str:
    location = tuple(problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = ImageSpec.model_fields if location[0] == "images" else BuildSpec.model_fields
        message = f"unknown key.{did_you_mean(str(location[-1]), known)} Allowed: {', '.join(known)}"
    elif problem["type"] == "missing":
        message = "required, but missing"
    elif location:
        message = f"{message}; found {problem['input']!r}"
    return _told(path, data, location, message)


def _line_of(data: Any, location: tuple[Any, ...]) -> int:
    """Return the 1-based line of the deepest part of `location` that stands in the file."""
    line = 1
    for part in location:
        positions = getattr(getattr(data, "lc", None), "data", None) or {}
        if part not in positions:
            break
        line = positions[part][0] + 1
        data = data[part]
    return line
