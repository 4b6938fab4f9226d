"""The error where a framework is not installed: the library depends on neither, for an image has only one of them."""

from __future__ import annotations

import platform
import sys


def lacking(error: ModuleNotFoundError, framework: str, module: str) -> ModuleNotFoundError:
    """Return what to raise in place of `error`, which importing a framework's module raised.

    That one itself, where the framework is there and a module of its own is not.
    """
    if error.name != module:
        return error
    return ModuleNotFoundError(
        f"No module named {module!r}: what a script imports of smdistributed is for {framework}, and Python "
        f"{platform.python_version()} in {sys.prefix} has none. What to do: pip install {module} there",
        name=module,
    )
