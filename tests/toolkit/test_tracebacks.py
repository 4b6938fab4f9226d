"""The line of the failure file, for common errors of PyTorch, TensorFlow, Keras, Lightning and transformers.

`tracebacks/` has what small scripts wrote to stderr: the name of the error, the expected line, and the text. Paths are
shortened, and frames are left out of long texts. Versions: torch 2.13, TensorFlow 2.14.1, Keras 3.15 with torch,
Lightning 2.6, transformers 5.23.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_toolkit.result import diagnosis
from shoal_toolkit.result.result import Failure

TRACEBACKS = Path(__file__).parent / "tracebacks"


def read() -> dict[str, tuple[str, str]]:
    found = {}
    for path in sorted(TRACEBACKS.glob("*.txt")):
        for entry in path.read_text().split("=== ")[1:]:
            name, line, text = entry.split("\n", 2)
            found[f"{path.stem}-{name}"] = (line, text.removeprefix("---\n"))
    return found


ERRORS = read()
PLACE = ("in user code", "Graph execution error", "(most recent call last)", "Exception encountered")


@pytest.mark.parametrize("name", ERRORS)
def test_the_failure_file_begins_with_the_line_that_says_what_is_wrong(name: str) -> None:
    line, text = ERRORS[name]
    shown = diagnosis.explain_failure(Failure(1, "rank 0 on algo-1", ["python", "train.py"], text))
    assert shown.partition("\n")[0] == line
    assert not line.endswith((":", *PLACE)), "only the place"


def test_there_are_common_errors_of_each_framework() -> None:
    counts = {path.stem: sum(name.startswith(f"{path.stem}-") for name in ERRORS) for path in TRACEBACKS.iterdir()}
    assert set(counts) == {"torch", "tensorflow", "keras", "lightning", "transformers"}
    assert min(counts.values()) >= 15
