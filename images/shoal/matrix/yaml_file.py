"""Reads YAML files into checked pydantic models. Every error has the file, the line and the key."""

from __future__ import annotations

import os
import re
import stat
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
_MOST_BYTES, _MOST_VALUES, _MOST_LEVELS, _MOST_PARTS = 128 * 1024, 20_000, 100, 5_000
"""Limits of a file: its size, its values if aliases are replaced, open brackets, and its lines and signs.

The parser takes a second for 5,000 of them. Our largest file has 3 KB."""


class StrictModel(pydantic.BaseModel):
    """Base of the models of files: frozen, without unknown keys, with attributes documented by the text below them."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


M = TypeVar("M", bound=StrictModel)


@dataclass(frozen=True)
class Document:
    """A file as it was read, to find the line of a key."""

    path: Path
    data: Any

    def locate(self, location: Location, message: str) -> str:
        """Returns the message with file, line and key before it, and with a fix if it has none."""
        key = ".".join(str(part) for part in location) or "(whole file)"
        if "Fix: " not in message:
            message += " Fix: correct this line" if message.endswith((".", "?")) else ". Fix: correct this line"
        return f"{self.path}:{self.line_of(location)}: {key}: {message}"

    def line_of(self, location: Location) -> int:
        """Returns the line, counted from 1, of the deepest part of `location` that the file has."""
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
    """Reads and checks a file. Raises `SpecError` with file, line and key."""
    document = Document(path, _parse(path))
    if not isinstance(document.data, dict):
        raise SpecError(f"{path}:1: not a mapping. Allowed: {', '.join(model.model_fields)}. Fix: write KEY: VALUE")
    try:
        return model.model_validate(document.data), document
    except pydantic.ValidationError as error:
        raise SpecError("\n".join(_explain(document, model, problem) for problem in error.errors())) from error


def _parse(path: Path) -> Any:
    """Raises `SpecError` if it can't be read, is not YAML, or is larger than a file that people write."""
    try:
        text = _read_limited(path)
        if _measure_depth(text) > _MOST_LEVELS:  # the parser takes seconds for it
            raise RecursionError
        if len(re.findall(rb"[]\n,:?*&!'\"[{}]|- ", text)) > _MOST_PARTS:
            raise SpecError(f"{path}: more than {_MOST_PARTS} lines and signs. Fix: remove entries that are not needed")
        data = YAML(typ="rt").load(text.decode())
        if _count_values(data, {}) > _MOST_VALUES:
            raise SpecError(
                f"{path}: aliases make it larger than {_MOST_VALUES} values. Fix: use fewer aliases (*NAME)"
            )
        return data
    except RecursionError as error:
        raise SpecError(f"{path}: nested too deeply, or an alias contains itself. Fix: use fewer levels") from error
    except OSError as error:
        fix = "restore it, or write new definitions with `shoal init DIRECTORY`"
        raise SpecError(f"{path}: cannot be read: {error.strerror}. Fix: {fix}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise SpecError(f"{path}:{line}: not YAML: {error.problem}. Fix: correct this line") from error
    except (YAMLError, ValueError, TypeError) as error:  # TypeError: a mapping as a key
        raise SpecError(f"{path}: not YAML in UTF-8: {error}. Fix: save it as UTF-8") from error


def _read_limited(path: Path) -> bytes:
    """Returns the content of a file. Raises `SpecError` if it is too large or no regular file, and OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not be waited for
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise SpecError(f"{path}: not a regular file. Fix: replace it by a YAML file")
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise SpecError(f"{path}: larger than {_MOST_BYTES} bytes. Fix: remove entries that are not needed")
    return text


def _measure_depth(text: bytes) -> int:
    """Returns how many brackets of a text are open at the same time."""
    depth = deepest = 0
    for letter in re.findall(rb"[\[\]{}]", text):
        depth += 1 if letter in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _count_values(data: Any, known: dict[int, int]) -> int:
    """Counts values as if each alias was replaced. `known` has the numbers of parts by identity, and is extended."""
    if not isinstance(data, (dict, list)):
        return 1
    if id(data) not in known:
        parts = [*data.keys(), *data.values()] if isinstance(data, dict) else data
        known[id(data)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(data)]


def _explain(document: Document, model: type[StrictModel], problem: Any) -> str:
    location = tuple(problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = _model_at(model, location[:-1]).model_fields
        message = f"unknown key.{did_you_mean(str(location[-1]), known)} Allowed: {', '.join(known)}"
    elif problem["type"] == "missing":
        message = f"required, but missing. Fix: add {location[-1]}: VALUE"
    elif location:
        message = f"{message}; found {_describe(problem['input'])}"
    return document.locate(location, message)


def _describe(value: Any) -> str:
    """Returns the beginning of a value as text. Python writes no number with thousands of digits."""
    try:
        return repr(value)[:200]
    except ValueError:
        return "a number with thousands of digits"


def _model_at(model: type[StrictModel], location: Iterable[str | int]) -> type[StrictModel]:
    for part in location:
        field = model.model_fields.get(str(part))
        model = next(_models(field.annotation), model) if field else model
    return model


def _models(annotation: Any) -> Iterator[type[StrictModel]]:
    """Yields the models in a type annotation, such as the one of `tuple[Release, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)
