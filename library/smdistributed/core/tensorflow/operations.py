"""Collectives and messages as operations of TensorFlow, in eager code and in graphs (library/native/tensorflow.c).

All collectives take one resource, which nothing reads. TensorFlow runs operations on one resource in program order,
also in branches and loops of a `tf.function`. So every rank calls the same collectives in the same order. Graphs of
version 1 have no such rule, and get control dependencies. Messages have the order that their caller gives them.
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
_NAMED = f"{SMDDPError.__name__}: "  # launchers look for it in a rank's output
KINDS = ("all_reduce", "broadcast", "send", "receive")
DTYPES = {
    getattr(tf, name): name
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32")
} | {tf.int64: "int64", tf.uint64: "uint64", tf.bool: "bool"}


class PendingOperation(ctypes.Structure):
    """An operation that TensorFlow runs: its inputs are there, and it waits for its results.

    `rank` is the root of a broadcast, or the other end of a message. `name` is the reduction, or a message's label.
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
        return DTYPES[tf.as_dtype(self.dtype)]

    def tensors(self) -> list[tuple[int, int, int]]:
        """Returns for each tensor its address, the address of its result (maybe the same), and its elements."""
        return [(self.inputs[i] or 0, self.data[i] or 0, self.elements[i]) for i in range(self.count)]


def all_reduce(tensors: Sequence[Any], reduction: str) -> list[Any]:
    """Reduces tensors of one dtype of `DTYPES` over the ranks, by a reduction of `core.native.OPS`. Keeps their shapes.

    Raises SMDDPError in a function that XLA compiles.
    """
    return _run_collective(load().module.smddp_all_reduce, tensors, reduction=reduction)


def broadcast(tensors: Sequence[Any], root: int) -> list[Any]:
    """Returns the tensors of rank `root`, of one dtype of `DTYPES`. Raises SMDDPError if XLA compiles the function."""
    return _run_collective(load().module.smddp_broadcast, tensors, root=root)


def send(tensor: Any, rank: int, label: str) -> Any:
    """Sends a tensor of at most 8 dimensions, with a dtype of `DTYPES`. The label has at most 31 bytes.

    Returns a token, a float32 scalar: the tensor has been sent when it is there.
    """
    with tf.device("/CPU:0"):
        return load().module.smp_send(tensor=tensor, rank=rank, label=label)


def receive(anchors: Sequence[Any], dtype: Any, rank: int, label: str) -> Any:
    """Receives the tensor that a rank sends with this label. In a graph, its shape is unknown.

    The result depends on `anchors`, any tensors; their gradient is None.
    """
    with tf.device("/CPU:0"):
        return load().module.smp_receive(anchors=list(anchors), T=dtype, rank=rank, label=label)


def allocate_result(operation: PendingOperation, shape: Sequence[int]) -> int:
    """Returns the address of memory for a received tensor. Raises MemoryError if TensorFlow has none."""
    operation.dims = len(shape)
    operation.shape[: len(shape)] = list(shape)
    address: int | None = load().functions.operations_allocate(ctypes.byref(operation))
    if address is None:
        raise MemoryError(f"TensorFlow has no memory for a tensor of shape {tuple(shape)}.")
    return address


def serve_forever(handle: Callable[[PendingOperation], None], messages: bool = False) -> None:
    """Runs operations in the order in which TensorFlow starts them: collectives, or messages. Never returns.

    An error of `handle` becomes the error of the operation.
    """
    functions = load().functions
    while True:
        address = functions.operations_next(messages)
        try:
            handle(PendingOperation.from_address(address))
        except BaseException as error:  # TensorFlow raises it where the operation is called
            name = _NAMED if isinstance(error, CollectiveError) else f"{type(error).__name__}: "
            functions.operations_finish(address, f"{name}{error}".encode(errors="replace"))
        else:
            functions.operations_finish(address, None)


def failure_reason(error: tf.errors.InternalError) -> str:
    """Returns why an operation failed, without the node names that TensorFlow adds. Other errors keep their message."""
    message: str = error.message
    return message.partition(_NAMED)[2].rpartition(" [Op:")[0] or message


def reject_xla(what: str) -> None:
    """Raises SMDDPError in a function that is traced for XLA, which does not have these operations."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise SMDDPError(
            f"{what} is called in a function that XLA compiles, which cannot communicate. Fix: leave jit_compile=True "
            "out of the tf.function, or of the Model.compile, that has it; Keras 3 uses XLA on GPUs unless you pass "
            "Model.compile(jit_compile=False). tf.config.optimizer.set_jit(True) compiles the rest."
        )


def _run_collective(operation: Callable[..., list[Any]], tensors: Sequence[Any], **attributes: object) -> list[Any]:
    """Runs one operation for all tensors on the CPU, or adds it to the graph after the previous one of its kind.

    The name of the first attribute is the kind. Raises SMDDPError under XLA.
    """
    if not tensors:
        return []
    reject_xla("A collective")
    chain = f"smddp_last_{next(iter(attributes))}"  # a broadcast of variables must not wait for reductions
    with tf.device("/CPU:0"), _after_previous(chain):
        results: list[Any] = operation(order=_order_resource(), tensors=list(tensors), **attributes)
    if not tf.executing_eagerly():
        setattr(tf.compat.v1.get_default_graph(), chain, results[0].op)
    return results


def _after_previous(chain: str) -> AbstractContextManager[Any]:
    """Returns a context in which a graph of version 1 runs operations after the previous collective of the kind."""
    if tf.executing_eagerly() or tf.inside_function():
        return nullcontext()
    last = getattr(tf.compat.v1.get_default_graph(), chain, None)
    return nullcontext() if last is None else tf.control_dependencies([last])


def _order_resource() -> Any:
    """Returns the resource, made at the first call: one for each graph of version 1, one for all other code."""
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


class _Library(NamedTuple):
    module: Any
    functions: ctypes.CDLL


@cache
def load() -> _Library:
    """Loads the operations into TensorFlow, once. Raises SMDDPError if they are not compiled, or do not fit it."""
    if not _PATH.exists():
        raise SMDDPError(
            "The operations for TensorFlow are not part of this installation: Fix: install a wheel "
            "of shoal-smdistributed that was built on Linux."
        )
    module = tf.load_op_library(str(_PATH))  # before ctypes: it finds operations registered meanwhile
    functions = ctypes.CDLL(str(_PATH))
    functions.operations_next.restype, functions.operations_next.argtypes = ctypes.c_void_p, (ctypes.c_int,)
    functions.operations_allocate.restype, functions.operations_allocate.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    functions.operations_finish.restype = None
    functions.operations_finish.argtypes = ctypes.c_void_p, ctypes.c_char_p
    problem = functions.operations_registered()
    if problem:
        what = "has no libtensorflow_framework.so.2" if problem == 1 else "refuses the operations"
        raise SMDDPError(
            f"TensorFlow {tf.__version__} {what}. Fix: install TensorFlow 2.14 or 2.21, which are known to work."
        )
    return _Library(module, functions)


@tf.RegisterGradient("SmddpAllReduce")  # type: ignore[untyped-decorator]
def _gradient_of_all_reduce(operation: Any, *gradients: Any) -> list[Any]:
    """Reduces the gradients in the same way. Raises LookupError if that is neither a sum nor an average."""
    reduction = operation.get_attr("reduction").decode()
    if reduction not in ("sum", "avg"):
        raise LookupError(f"An all_reduce with {reduction} has no gradient. Fix: use SUM or AVERAGE.")
    return [None, *all_reduce(gradients, reduction)]


@tf.RegisterGradient("SmddpBroadcast")  # type: ignore[untyped-decorator]
def _gradient_of_broadcast(operation: Any, *gradients: Any) -> list[Any]:
    """Sums gradients, which all ranks must call, on the root; zeros elsewhere: only its input counts."""
    mine = read_launch().rank == operation.get_attr("root")
    summed = all_reduce(gradients, "sum")
    return [None, *(gradient if mine else tf.zeros_like(gradient) for gradient in summed)]
