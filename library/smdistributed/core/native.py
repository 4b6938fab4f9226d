"""The C engine (library/native), called through ctypes. A call releases the GIL while it runs.

Also the names and numbers of its dtypes, reductions and collectives, which all communication engines use.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("_engine.so")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"),
)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
COLLECTIVES = ("barrier", "all_reduce", "reduce", "broadcast", "gather", "scatter", "reduce_scatter", "all_to_all")
DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
OP_NUMBERS = {name: number for number, name in enumerate(OPS)}
ITEM_BYTES = dict(zip(DTYPES, (4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1)))
FLOATS = DTYPES[:4]
ABORTED, MISMATCH, INTERRUPTED = -1, -2, 3

POLL_FN = ctypes.CFUNCTYPE(None, c_int, c_double, POINTER(c_int))


class CollectiveDesc(ctypes.Structure):
    """A rank's collective: its number, from 1, its arguments, and a digest of it and all earlier ones."""

    _fields_ = (
        ("number", c_int64),
        ("collective", c_int32),
        ("dtype", c_int32),
        ("op", c_int32),
        ("root", c_int32),
        ("bytes", c_int64),
        ("digest", ctypes.c_uint64),
        ("unused", ctypes.c_char * 24),
    )


_ENGINE, _POINTERS, _SIZES = c_void_p, POINTER(c_void_p), POINTER(c_size_t)
_FUNCTIONS = {
    "engine_bytes": (c_size_t, c_int, c_size_t),
    "engine_open": (_ENGINE, c_void_p, c_int, c_int, c_size_t, c_size_t, c_size_t, c_int, c_double, POLL_FN),
    "engine_close": (None, _ENGINE),
    "engine_last_collective": (None, _ENGINE, c_int, POINTER(CollectiveDesc)),
    "engine_mismatched_rank": (c_int, _ENGINE),
    "engine_abort": (None, _ENGINE, ctypes.c_char_p),
    "engine_abort_reason": (ctypes.c_char_p, _ENGINE),
    "engine_request_report": (c_uint32, _ENGINE, c_int),
    "engine_wait_for_request": (c_uint32, _ENGINE, c_uint32),
    "engine_report": (None, _ENGINE, c_uint32, ctypes.c_char_p),
    "engine_report_of": (ctypes.c_char_p, _ENGINE, c_int, c_uint32),
    "engine_barrier": (c_int, _ENGINE),
    "engine_all_reduce": (c_int, _ENGINE, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int),
    "engine_broadcast": (c_int, _ENGINE, c_void_p, c_size_t, c_int),
    "engine_gather": (c_int, _ENGINE, c_void_p, _POINTERS, c_size_t, c_int),
    "engine_scatter": (c_int, _ENGINE, _POINTERS, c_void_p, c_size_t, c_int),
    "engine_reduce_scatter": (c_int, _ENGINE, _POINTERS, c_void_p, c_size_t, c_int, c_int),
    "engine_all_to_all": (c_int, _ENGINE, _POINTERS, _SIZES, _POINTERS, _SIZES, c_size_t),
    "supports_reduction": (c_int, c_int, c_int),
    "reduce": (None, c_void_p, c_void_p, _POINTERS, c_int, c_size_t, c_int, c_int),
    "divide": (None, c_void_p, c_int, c_size_t, c_int),
    "compressed_bytes": (c_size_t, c_size_t),
    "compress": (None, c_void_p, c_void_p, c_void_p, c_size_t),
    "decompress": (None, c_void_p, c_void_p, c_size_t, c_int),
}


@cache
def load() -> ctypes.CDLL:
    """Returns the C engine's functions, loaded once. Raises OSError if it was not compiled, or not for this machine."""
    if not PATH.exists():
        raise OSError("the C engine is not part of this installation (images and wheels built on Linux have it)")
    library = ctypes.CDLL(str(PATH))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def engine_problem() -> str:
    """Loads the C engine, and says why this machine cannot run it; empty if it can."""
    try:
        load()
    except OSError as error:
        return str(error)
    return "" if sys.platform == "linux" else f"{sys.platform} is not supported"


def supports_reduction(dtype: str, op: str) -> bool:
    """Whether the C engine, which must be compiled, reduces `dtype` with `op`; False for unknown names."""
    if dtype not in DTYPE_NUMBERS or op not in OP_NUMBERS:
        return False
    return bool(load().supports_reduction(DTYPE_NUMBERS[dtype], OP_NUMBERS[op]))


def pointer_array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
