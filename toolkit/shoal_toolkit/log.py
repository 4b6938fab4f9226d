"""The lines that `train` itself says, on stderr: the script's stdout stays the script's."""

from __future__ import annotations

import os


def say(text: str) -> None:
    """Write one message, each of its lines marked. Unbuffered: nothing is written twice by a fork."""
    marked = "".join(f"train: {line}\n" for line in text.splitlines()).encode("utf-8", "backslashreplace")
    try:
        while marked:
            marked = marked[os.write(2, marked) :]
    except OSError:
        return  # stderr is closed: there is nobody left to tell
