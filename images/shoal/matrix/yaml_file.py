"""Reads YAML files into checked pydantic models. Every error has the file, the line and the key."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shoal.errors import SpecError, did_you_mean

Location = tuple[str | int, ...]


class Model(pydantic.BaseModel):
    """Base of the models of files: frozen, without unknown keys, with attributes documented by the text below them."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Document:
    """A file as it was read, to find the line of a key."""

    path: Path
    data: Any

    def locate(self, location: Location, message: str) -> str:
        """Return the message with file, line and key before it."""
        key = ".".join(str(part) for part in location) or "(whole file)"
        return f"{self.path}:{self._line_of(location)}: {key}: {message}"

    def _line_of(self, location: Location) -> int:
        """Return the line, counted from 1, of the deepest part of `location` that the file has."""
        line = 1
        data = self.data
        for part in location:
            positions = getattr(getattr(data, "lc", None), "data", None) or {}
            if part not in positions:
                break
            line = positions[part][0] + 1
            data = data[part]
        return line


def read_yaml(path: Path, model: type[M]) -> tuple[M, Document]:
    """Read and check a file. Raises `SpecError` with file, line and key."""
    document = Document(path, _parse(path))
    if not isinstance(document.data, dict):
        raise SpecError(f"{path}:1: expected a mapping with the keys {', '.join(model.model_fields)}")
    try:
        return model.model_validate(document.data), document
    except pydantic.ValidationError as error:
        raise SpecError("\n".join(_explain(document, model, problem) for problem in error.errors())) from error


def _parse(path: Path) -> Any:
    """Return the content of a YAML file, with line numbers. Raises `SpecError` if it can't be read or is not YAML."""
    try:
        return YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = "restore it, or write new definitions with `shoal init DIRECTORY`"
        raise SpecError(f"{path}: cannot be read: {error.strerror}. Fix: {fix}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise SpecError(f"{path}:{line}: not YAML: {error.problem}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not YAML in UTF-8: {error}") from error


def _explain(document: Document, model: type[Model], problem: Any) -> str:
    """Return the message for a mistake that pydantic found, with file, line and key."""
    location = tuple(problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = _model_at(model, location[:-1]).model_fields
        message = f"unknown key.{did_you_mean(str(location[-1]), known)} Allowed: {', '.join(known)}"
    elif problem["type"] == "missing":
        message = "required, but missing"
    elif location:
        message = f"{message}; found {problem['input']!r}"
    return document.locate(location, message)


def _model_at(model: type[Model], location: Iterable[str | int]) -> type[Model]:
    """Return the model of the mapping at `location`."""
    for part in location:
        field = model.model_fields.get(str(part))
        model = next(_models(field.annotation), model) if field else model
    return model


def _models(annotation: Any) -> Iterator[type[Model]]:
    """Yield the models in a type annotation, such as the one of `tuple[Release, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)
