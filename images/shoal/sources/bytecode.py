"""Bytecode beside modules, for images whose Python is this command's, as `python -m compileall` in them would make it.

It is checked by the content of the source (PEP 552), so it is valid whatever time a file is given on its way.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from shoal.errors import BuildError

# Isolated and without site-packages. What marshal writes depends on which strings the process holds already: the same
# source gives other bytes in a process that has imported something. A fresh interpreter holds the same ones each time.
_COMPILE = [sys.executable, "-I", "-S", "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]


def is_of(python: str) -> bool:
    """Return whether what is made here is for that Python, such as 3.11."""
    return sys.implementation.name == "cpython" and python == f"{sys.version_info.major}.{sys.version_info.minor}"


def write(root: Path, package: str) -> None:
    """Put bytecode beside each module under `root`, which is the root of an image; the same bytes in each process.

    Starts a Python interpreter. Raises BuildError for a module that is not Python; its text names `package` as the
    directory that the module comes from.
    """
    ended = subprocess.run([*_COMPILE, "-s", root, "-p", "/", root], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        what = _describe(ended.stdout + ended.stderr)
        raise BuildError(f"{package}/{what}. Fix: correct it; all modules are compiled")


def _describe(output: str) -> str:
    """Return the place and the error of the first module that compileall could not compile."""
    named = re.search(r"/site-packages/([^'\"]+)['\"]", output)
    line = re.search(r", line (\d+)", output)
    place = (named[1] if named else "") + (f":{line[1]}" if line else "")
    reason = output.strip().splitlines()[-1].rpartition("Error: ")[2]
    return f"{place}: {re.sub(r' [(].*, line [0-9]+[)]$', '', reason)}"
