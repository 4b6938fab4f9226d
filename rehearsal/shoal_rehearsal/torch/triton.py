"""Hides Triton: its kernels need a real GPU, and libraries that do not find it use torch's functions instead."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import TracebackType
from typing import Any

_EXPLANATION = (
    "SHOAL REHEARSAL: Triton kernels are not emulated, so that triton counts as not installed. Fix: catch ImportError "
    "around its import, choose the library's implementation without Triton, or run on a GPU."
)


def patch(_: int) -> None:
    """Makes `import triton` raise ModuleNotFoundError and `find_spec` return None, if triton is installed.

    It replaces sys.excepthook, which explains this error if it ends the script.
    """
    if "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        return
    sys.modules["triton"] = None  # type: ignore[assignment]  # Python's own way to say that there is none
    sys.excepthook = _explaining(sys.excepthook)


def _explaining(hook: Any) -> Any:
    @functools.wraps(hook)
    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error, traceback)
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "triton":
            print(_EXPLANATION, file=sys.stderr)

    return report
