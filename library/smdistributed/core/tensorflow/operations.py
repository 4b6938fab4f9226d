"""Collectives and messages as operations of TensorFlow, in eager code and in graphs (library/native/tensorflow.c).

All collectives take a resource that nothing reads: TensorFlow runs operations on one resource in the order of the
program, also through branches and loops of a `tf.function`, so that every rank calls the same collectives in the same
order. Graphs of version 1, which have no such rule, get control dependencies. Messages have the order that their caller
gives them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.launch import read_launch

_PATH = Path(__file__).with_name("_operations.so")
_ORDER = "smddp_order"
_NAMED = f"{SMDDPError.__name__}: "  # launchers look for it in what a rank has said
KINDS = ("all_reduce", "broadcast", "send", "receive")
DTYPES = {
    getattr(tf, name): name
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32")
} | {tf.int64: "int64", tf.uint64: "uint64", tf.bool: "bool"}


class Work(ctypes.Structure):
    """An operation that has its inputs: what it is, where its tensors lie, and where the results go.

    rank: the root of a broadcast, or whom a message is to or from. name: the reduction, or the label of a message.
    """

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("name", ctypes.c_char * 32),
        ("shape", ctypes.c_int64 * 8),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("elements", ctypes.POINTER(ctypes.c_int64)),
    )

    @property
    def dtype_name(self) -> str:
        """As in `core.native`."""
        return DTYPES[tf.as_dtype(self.dtype)]

    def tensors(self) -> list[tuple[int, int, int]]:
        """The address of each tensor, that of its result, which may be the same, and its number of elements."""
        return [(self.inputs[i] or 0, self.data[i] or 0, self.elements[i]) for i in range(self.count)]


def all_reduce(tensors: Sequence[Any], reduction: str) -> list[Any]:
    """Combine each tensor over the ranks. All are of one dtype; reduction: a name of `core.native.OPS`."""
    return _call(load().module.smddp_all_reduce, tensors, reduction=reduction)


def broadcast(tensors: Sequence[Any], root: int) -> list[Any]:
    """Return that rank's tensors, on every rank. All are of one dtype."""
    return _call(load().module.smddp_broadcast, tensors, root=root)


def send(tensor: Any, rank: int, label: str) -> Any:
    """Send a tensor to that rank. Gives a scalar, the token of its being on the way; `label` has at most 31 bytes."""
    with tf.device("/CPU:0"):
        return load().module.smp_send(tensor=tensor, rank=rank, label=label)


def receive(anchors: Sequence[Any], dtype: Any, rank: int, label: str) -> Any:
    """The tensor that that rank sends with this label. anchors: any tensors, for what is derived from this."""
    with tf.device("/CPU:0"):
        return load().module.smp_receive(anchors=list(anchors), T=dtype, rank=rank, label=label)


def memory_for(work: Work, shape: Sequence[int]) -> int:
    """The address of memory for what was received. Raises MemoryError where there is none."""
    work.dims = len(shape)
    work.shape[: len(shape)] = list(shape)
    address: int | None = load().functions.operations_allocate(ctypes.byref(work))
    if address is None:
        raise MemoryError(f"TensorFlow has no memory for a tensor of shape {tuple(shape)}.")
    return address


def serve(do: Callable[[Work], None], messages: bool = False) -> None:
    """Do the work of this process's collectives, or of its messages, as it comes, for ever; an error of `do` is that
    of the operation."""
    functions = load().functions
    while True:
        address = functions.operations_next(messages)
        try:
            do(Work.from_address(address))
        except BaseException as error:  # the operation's caller hears of it
            name = _NAMED if isinstance(error, CollectiveError) else f"{type(error).__name__}: "
            functions.operations_finish(address, f"{name}{error}".encode(errors="replace"))
        else:
            functions.operations_finish(address, None)


def reason_of(error: tf.errors.InternalError) -> str:
    """Why an operation has failed, without the names of nodes that TensorFlow puts around it."""
    message: str = error.message
    return message.partition(_NAMED)[2].rpartition(" [Op:")[0] or message


def refuse_xla(what: str) -> None:
    """Raise SMDDPError where a function is being traced for XLA, which knows none of the operations."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise SMDDPError(
            f"{what} is called in a function that XLA compiles, which cannot communicate: leave jit_compile=True out "
            "of the tf.function, or of the Model.compile, that has it. tf.config.optimizer.set_jit(True) compiles the "
            "rest."
        )


def _call(operation: Callable[..., list[Any]], tensors: Sequence[Any], **attributes: object) -> list[Any]:
    if not tensors:
        return []
    refuse_xla("A collective")
    chain = f"smddp_last_{next(iter(attributes))}"  # variables are broadcast without what is reduced later
    with tf.device("/CPU:0"), _after_the_last(chain):
        results: list[Any] = operation(order=_order(), tensors=list(tensors), **attributes)
    if not tf.executing_eagerly():
        setattr(tf.compat.v1.get_default_graph(), chain, results[0].op)
    return results


def _after_the_last(chain: str) -> AbstractContextManager[Any]:
    """In graphs of version 1: after the collective of its kind that was added last."""
    if tf.executing_eagerly() or tf.inside_function():
        return nullcontext()
    last = getattr(tf.compat.v1.get_default_graph(), chain, None)
    return nullcontext() if last is None else tf.control_dependencies([last])


def _order() -> Any:
    """The resource: one for eager code and all functions, one for each graph of version 1, which captures none."""
    with tf.init_scope(), tf.device("/CPU:0"):
        if tf.executing_eagerly():
            return _eager_resource()
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, _ORDER):
            setattr(graph, _ORDER, _new_resource())
        return getattr(graph, _ORDER)


@cache
def _eager_resource() -> Any:
    return _new_resource()


def _new_resource() -> Any:
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=_ORDER)


class Library(NamedTuple):
    """The compiled operations: what TensorFlow has made of them, and what works for them calls."""

    module: Any
    functions: ctypes.CDLL


@cache
def load() -> Library:
    """Have TensorFlow load the operations. Raises SMDDPError where they were not compiled, or do not fit it."""
    if not _PATH.exists():
        raise SMDDPError(
            "The operations for TensorFlow are not part of this installation: images and wheels built on Linux have "
            "them."
        )
    module = tf.load_op_library(str(_PATH))  # before ctypes does: TensorFlow sees what is registered meanwhile
    functions = ctypes.CDLL(str(_PATH))
    functions.operations_next.restype, functions.operations_next.argtypes = ctypes.c_void_p, (ctypes.c_int,)
    functions.operations_allocate.restype, functions.operations_allocate.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    functions.operations_finish.restype = None
    functions.operations_finish.argtypes = ctypes.c_void_p, ctypes.c_char_p
    problem = functions.operations_registered()
    if problem:
        what = "has no libtensorflow_framework.so.2" if problem == 1 else "refuses the operations"
        raise SMDDPError(f"TensorFlow {tf.__version__} {what}: 2.14 is known to work.")
    return Library(module, functions)


@tf.RegisterGradient("SmddpAllReduce")  # type: ignore[untyped-decorator]
def _gradient_of_all_reduce(operation: Any, *gradients: Any) -> list[Any]:
    """Every rank's loss depends on every rank's input: the gradients are combined in the same way."""
    reduction = operation.get_attr("reduction").decode()
    if reduction not in ("sum", "avg"):
        raise LookupError(f"An all_reduce with {reduction} has no gradient: use SUM or AVERAGE.")
    return [None, *all_reduce(gradients, reduction)]


@tf.RegisterGradient("SmddpBroadcast")  # type: ignore[untyped-decorator]
def _gradient_of_broadcast(operation: Any, *gradients: Any) -> list[Any]:
    """Only the root's input counts, for every rank's loss."""
    mine = read_launch().rank == operation.get_attr("root")
    summed = all_reduce(gradients, "sum")
    return [None, *(gradient if mine else tf.zeros_like(gradient) for gradient in summed)]
