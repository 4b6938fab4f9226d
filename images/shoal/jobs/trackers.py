"""Finds what experiment trackers have left in the output of a job, and the commands that show it.

Reads the scalars in TensorBoard's event files without TensorBoard. A file has records: a length, its checksum, the
content and its checksum. The content is an `Event`, a message of protobuf. A file can end anywhere, and any program can
have written it. The reader stops at the first damage, and keeps the scalars before it.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from shoal.clean_text import clean_text
from shoal.jobs.job_log import MAX_SERIES, Key, Series
from shoal.jobs.printed_metrics import X
from shoal.jobs.results import list_files
from shoal.limits import MIB, open_regular
from shoal.protobuf import split_fields

_MARK = "tfevents"
_MOST_EVENT_FILES = 1_000
_MOST_BYTES = 256 * MIB
"""Bytes of all files that are read. A scalar takes 50."""
_MOST_SCALARS = 300_000
"""Scalars that are read, in a few seconds."""
_MOST_RECORD = MIB
"""Bytes of a record that is read. Longer ones are pictures and histograms."""
_MAX_NAME = 200  # characters
_FORMATS = {1: "<f", 2: "<d"}
"""The types of tensors that are read, as TensorFlow numbers them: float and double."""


class _Scalar(NamedTuple):
    seconds: float
    step: int
    tag: str
    value: float


def is_event_file(path: Path) -> bool:
    """Returns whether a file has the name of an event file."""
    return _MARK in path.name


def find_event_files(output: Path) -> list[Path]:
    """Returns the event files below the directory `output` of a host, oldest first."""
    found = itertools.islice((path for path in list_files(output, []) if is_event_file(path)), _MOST_EVENT_FILES)
    return sorted(found, key=lambda path: path.name)


def read_scalars(output: Path, began: float) -> dict[Key, Series]:
    """Returns the scalars in all event files of a host, by name and directory.

    Args:
        output: The host's directory `output`.
        began: When the job began, in seconds since 1970.
    """
    series: dict[Key, Series] = {}
    left, scalars = _MOST_BYTES, _MOST_SCALARS
    files = find_event_files(output)
    top = os.path.commonpath([path.parent for path in files]) if files else output
    for path in files:
        run = _shorten(path.parent.relative_to(top).as_posix())
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                for scalar in itertools.islice(_read_events(file, min(size, left)), scalars):
                    scalars -= 1
                    key = (_shorten(scalar.tag), run, None)
                    if key in series or len(series) < MAX_SERIES:
                        place = X("step", scalar.step)
                        series.setdefault(key, Series()).add(round(scalar.seconds - began, 2), scalar.value, place)
        except (OSError, ValueError, struct.error):
            continue
        left -= size
        if left <= 0:
            break
    return series


def _shorten(text: str) -> str:
    return clean_text(text).replace("\n", " ")[:_MAX_NAME]


def _read_events(file: IO[bytes], left: int) -> Iterator[_Scalar]:
    """Yields the scalars of a file. Raises ValueError at a record that is none."""
    while left >= 12 and len(header := file.read(12)) == 12:
        length = int.from_bytes(header[:8], "little")
        left -= length + 16
        if left < 0 or not length:
            return  # the writer was killed, or the file has something else
        if length > _MOST_RECORD:
            file.seek(length + 4, os.SEEK_CUR)
            continue
        yield from _parse_event(file.read(length + 4)[:length])


def _parse_event(data: bytes) -> Iterator[_Scalar]:
    """Yields the scalars of an `Event`: its fields are 1 wall_time, 2 step, 5 summary."""
    fields = dict(split_fields(data))
    step, summary = fields.get(2, 0), fields.get(5)
    (seconds,) = struct.unpack("<d", _as_bytes(fields.get(1, bytes(8))))
    if isinstance(step, bytes) or summary is None or not math.isfinite(seconds):
        return
    step = step - (1 << 64) if step >> 63 else step
    for number, value in split_fields(_as_bytes(summary)):
        if number == 1 and (found := _parse_value(_as_bytes(value))):
            yield _Scalar(seconds, step, *found)


def _parse_value(data: bytes) -> tuple[str, float] | None:
    """Returns tag and number of a summary's value: its fields are 1 tag, 2 simple_value, 8 tensor. None: no scalar."""
    fields = dict(split_fields(data))
    tag = _as_bytes(fields.get(1, b"")).decode(errors="replace")
    if 2 in fields:
        return tag, struct.unpack("<f", _as_bytes(fields[2]))[0]
    tensor = dict(split_fields(_as_bytes(fields.get(8, b""))))
    kind = tensor.get(1)
    form = _FORMATS.get(kind) if isinstance(kind, int) else None
    content = tensor.get(4) or tensor.get(5) or tensor.get(6)  # tensor_content, float_val, double_val
    if form is None or not isinstance(content, bytes) or len(content) != struct.calcsize(form):
        return None
    return tag, struct.unpack(form, content)[0]


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number instead of a message")
    return value


_MOST_FILES = 100_000


def find_trackers(outputs: Iterable[Path]) -> dict[str, str]:
    """Returns the command that shows the runs of each tracker, by its name. The first host with runs counts.

    Args:
        outputs: The directory `output` of each host, in the hosts' order.
    """
    found: dict[str, str] = {}
    for output in outputs:
        for name, command in _find_in(output).items():
            found.setdefault(name, command)
    return found


def _find_in(output: Path) -> dict[str, str]:
    """Returns the command of each tracker for one directory."""
    places: dict[str, str] = {}
    for path in itertools.islice(list_files(output, []), _MOST_FILES):
        folders = path.relative_to(output).parts[:-1]
        if is_event_file(path):
            earlier = places.get("TensorBoard", str(path.parent))
            places["TensorBoard"] = os.path.commonpath([earlier, path.parent])
        elif path.name == "mlflow.db":
            places["MLflow"] = f"sqlite:///{path}"
        elif path.name == "meta.yaml" and "mlruns" in folders:
            places["MLflow"] = str(output.joinpath(*folders[: folders.index("mlruns") + 1]))
        elif path.suffix == ".wandb" and path.parent.name.startswith("offline-run-"):
            places["W&B"] = str(path.parent.parent)
        elif path.suffix == ".db" and "trackio" in folders:
            places["Trackio"] = str(path.parent)
    commands = {
        "TensorBoard": "tensorboard --logdir {}",
        "MLflow": "mlflow ui --backend-store-uri {}",
        "W&B": "wandb sync {}/offline-run-*",
        "Trackio": "TRACKIO_DIR={} trackio show",
    }
    return {name: form.format(shlex.quote(places[name])) for name, form in commands.items() if name in places}
