"""The lines that `train` itself says, on stderr: the script's stdout stays the script's. Secrets are masked."""

from __future__ import annotations

import os
from collections.abc import Callable

from shoal_toolkit import redact

STDERR = 2

_host = ""
_as_json = False
_write: Callable[[bytes], None] | None = None


def configure(host: str, as_json: bool) -> None:
    """Say from now on who speaks, and in which form."""
    global _host, _as_json
    _host, _as_json = host, as_json


def speak_through(write: Callable[[bytes], None] | None) -> None:
    """Hand what is said to somebody who keeps its order with other output; None: write it to stderr at once."""
    global _write
    _write = write


def say(text: str) -> None:
    """Write one message, each of its lines marked. Unbuffered: nothing is written twice by a fork."""
    lines = redact.text(text).splitlines()
    if _as_json:
        from shoal_toolkit.output import jsonlines

        data = jsonlines.encode(jsonlines.head(_host, None, STDERR), [f"train: {line}" for line in lines])
    else:
        data = "".join(f"train: {line}\n" for line in lines).encode("utf-8", "backslashreplace")
    (_write or _write_now)(data)


def _write_now(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(STDERR, data) :]
    except OSError:
        return  # stderr is closed: there is nobody left to tell
