"""Finds a script that cannot know of the other ranks, so that each of them would train on its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

# A way to find the other ranks, or a library that does. A word that is there by chance only hides the note.
_WAYS = re.compile(
    rb"(?i)distribut|horovod|\bhvd\b|\bmpi|rank|world_size|parallel|strategy|tf_config|accelerate|transformers|lightning"
    rb"|deepspeed|fabric|composer|\bray\b|\bsmp\b|sm_hosts|sm_current_host|resourceconfig|hostname|subprocess|\bexec"
)
_SUFFIXES = (".py", ".sh")
_MOST_FILES = 500  # reading more would delay the launch


def describe_lone_ranks(count: int, code: str) -> list[str]:
    """Returns a note if no source file names a way to find the other ranks.

    Args:
        count: The number of ranks of the job, more than one.
        code: The directory of the code.
    """
    for number, path in enumerate(_list_sources(code)):
        if number == _MOST_FILES or _WAYS.search(_read(path)):
            return []
    return [
        f"{count} ranks start, and no file of the code names the others (such as torch.distributed, MPI, RANK or"
        " SM_HOSTS): each rank trains on its own. Fix: train together, as examples/ddp/train.py does, or start one rank"
    ]


def _list_sources(directory: str) -> Iterator[str]:
    for parent, _, names in os.walk(directory):
        yield from (os.path.join(parent, name) for name in names if name.endswith(_SUFFIXES))


def _read(path: str) -> bytes:
    """Returns the content of a file; if it cannot be read, a word that hides the note."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b"distributed"
