"""How builds ended, told; the first failure is the command's."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console

from shoal.builds import builder
from shoal.commands.common import say


def judge(endings: Iterable[builder.BuildResult], progress: Console) -> None:
    """Tell how each image ended, and raise the first failure after telling the others."""
    for ending in endings:
        say(str(ending), progress)
    raise_first([ending.error for ending in endings if ending.state == "failed"])


def raise_first(errors: Iterable[Exception | None]) -> None:
    failures = [error for error in errors if error]
    for error in failures[1:]:
        print(f"shoal: {error}", file=sys.stderr)
    if failures:
        raise failures[0]
