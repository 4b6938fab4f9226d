"""Writes and reads the state of a training with tf.train.Checkpoint, as one process.

Beside TensorFlow's files is `training.json`: the position, the random states, and the layout of the variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import tensorflow as tf

from shoal_checkpoint.directories import CheckpointError, open_regular
from shoal_checkpoint.position import check_place
from shoal_checkpoint.tensorflow.keras_release import keras_release, tensorflow_variable

_TRAINING, _PREFIX = "training.json", "state"
_MOST_DIFFERENCES = 3
FORMAT = 1


def layout(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the names and shapes of the model's variables, and the class of each other object."""
    shapes = [
        [getattr(each, "path", each.name), tf.as_dtype(each.dtype).name, list(each.shape)]
        for each in objects["model"].variables
    ]
    return {"model": shapes, **{name: _kind(each) for name, each in objects.items() if name != "model"}}


def _kind(value: Any) -> str:
    if keras_release() == 3:  # it numbers the names
        return type(value).__name__
    return str(value.get_config().get("name", "")) if hasattr(value, "get_config") else type(value).__name__


def variables(objects: Mapping[str, Any]) -> Iterator[list[Any]]:
    for each in objects.values():
        if isinstance(each, tf.Variable):
            yield [each]
        elif found := _variables_of(each):
            yield found


def _variables_of(value: Any) -> list[Any]:
    found = getattr(value, "variables", [])
    return [tensorflow_variable(each) for each in (found() if callable(found) else found)]


def read_metrics(model: Any) -> list[Any]:
    """Returns the values of the metrics' variables, which are sums over this epoch."""
    return [each.numpy().tolist() for metric in model.metrics for each in metric.variables]


def set_metrics(model: Any, values: list[Any]) -> None:
    for each, value in zip([each for metric in model.metrics for each in metric.variables], values):
        each.assign(tf.constant(value, dtype=each.dtype))


def write(objects: Mapping[str, Any], training: dict[str, Any], path: Path) -> None:
    """Writes everything into a new directory, and waits until it is on the disk."""
    build(objects)
    path.mkdir()
    prefix = tf.train.Checkpoint(**_trackables(objects)).write(str(path / _PREFIX))
    sizes = {file.name: file.stat().st_size for file in path.glob(f"{Path(prefix).name}.*")}
    (path / _TRAINING).write_text(json.dumps({"format": FORMAT, "keras": keras_release(), "sizes": sizes, **training}))
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _trackables(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects for tf.train.Checkpoint: for Keras 3 lists of variables, because their names are numbered."""
    if keras_release() == 2:
        return dict(objects)
    kinds = tf.keras.layers.Layer, tf.keras.optimizers.Optimizer
    return {name: _variables_of(each) if isinstance(each, kinds) else each for name, each in objects.items()}


def read(objects: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Sets the objects to the state of a checkpoint, if it fits, and returns `position`, `random` states and `metrics`.

    Raises CheckpointError, without a fix, if a file is missing, truncated or unreadable, or is of something else.
    """
    try:
        with os.fdopen(open_regular(path / _TRAINING), encoding="utf-8") as file:
            training: dict[str, Any] = json.load(file)
        _check_format(training)
        for name, size in training["sizes"].items():
            if (found := (path / name).stat().st_size) < size:
                raise CheckpointError(f"{name} is truncated: it has {found} bytes, and {size} were written.")
            if not (path / name).is_file():
                raise CheckpointError(f"{name} is not a file.")
        check_place(training["position"])
        _compare(layout(objects), training["layout"])
    except OSError as error:
        raise CheckpointError(
            f"{Path(str(error.filename)).name} is missing or unreadable: {error.strerror}."
        ) from error
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{_TRAINING} cannot be read: {error}.") from error
    build(objects)
    try:
        status = tf.train.Checkpoint(**_trackables(objects)).read(str(path / _PREFIX))
        status.assert_existing_objects_matched()
    except (tf.errors.OpError, AssertionError, ValueError) as error:
        raise CheckpointError(f"TensorFlow cannot read it: {str(error).strip().splitlines()[0]}.") from error
    return training


def _check_format(training: Mapping[str, Any]) -> None:
    if training["format"] != FORMAT:
        raise CheckpointError(f"its format is {training['format']}; this version reads {FORMAT}.")
    if (release := training.get("keras", 2)) != keras_release():
        raise CheckpointError(f"it is of Keras {release}, and this process has Keras {keras_release()}.")


def build(objects: Mapping[str, Any]) -> None:
    """Makes the variables of optimizers, which they have only after their first step."""
    for each in objects.values():
        is_keras = isinstance(each, tf.keras.optimizers.Optimizer)
        if is_keras and hasattr(each, "build") and not getattr(each, "built", False):
            each.build(objects["model"].trainable_variables)


def _compare(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if set(own) != set(saved):
        raise CheckpointError(f"it has {', '.join(sorted(saved))}, and this script saves {', '.join(sorted(own))}.")
    for name in own:
        if name != "model" and own[name] != saved[name]:
            raise CheckpointError(f"its {name} is {saved[name]} instead of {own[name]}.")
    if found := list(islice(_differences(own["model"], saved["model"]), _MOST_DIFFERENCES)):
        raise CheckpointError(f"its model is another one: {', '.join(found)}.")


def _differences(own: list[Any], saved: list[Any]) -> Iterator[str]:
    """Yields in words where the variables of two models differ. Their names are not compared: Keras numbers them."""
    if len(own) != len(saved):
        yield f"it has {len(saved)} variables instead of {len(own)}"
    for (name, *kind), (_, *saved_kind) in zip(own, saved):
        if kind != saved_kind:
            yield f"{name} is {saved_kind[0]} {saved_kind[1]} instead of {kind[0]} {kind[1]}"
