"""Bytecode beside modules, for images whose Python is this process's, as `python -m compileall` in them would make it.

It is checked by the content of the source (PEP 552), so it holds whatever time a file is given on its way, and tells
itself whether it is still that of a source.
"""

from __future__ import annotations

import importlib.util
import py_compile
import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import BuildError

_CHECKED = importlib.util.MAGIC_NUMBER + (0b11).to_bytes(4, "little")
"""How bytecode begins that is checked by content; the hash of its source follows."""


def is_of(python: str) -> bool:
    """Return whether what is made here is for that Python, such as 3.11."""
    return sys.implementation.name == "cpython" and python == f"{sys.version_info.major}.{sys.version_info.minor}"


def write(root: Path, known: Mapping[str, bytes], package: str) -> None:
    """Put bytecode beside each module under `root`, which stands for the root of an image.

    `known` is bytecode by path from the root; what of it is still that of its source is taken. `package` is where the
    modules come from, for the words of the BuildError that one that is no Python raises.
    """
    for path in root.rglob("*.py"):
        target = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
        begins = _CHECKED + importlib.util.source_hash(path.read_bytes())
        content = known.get(str(target.relative_to(root)), b"")
        if content.startswith(begins):
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(content)
            continue
        try:
            _compile(path, target, f"/{path.relative_to(root)}")
        except py_compile.PyCompileError as error:
            where = f"{package}/{str(path).rpartition('/site-packages/')[2]}"
            raise BuildError(f"{where}{_told(error)}. What to do: mend it; all modules are compiled") from None


def _compile(path: Path, target: Path, place: str) -> None:
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    py_compile.compile(str(path), str(target), place, doraise=True, optimize=0, invalidation_mode=mode)


def _told(error: py_compile.PyCompileError) -> str:
    reason = error.exc_value
    return f":{reason.lineno}: {reason.msg}" if isinstance(reason, SyntaxError) else f": {reason}"
