"""The values of `compression`: how tensors travel between the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class _None:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, dtype: Any) -> Any:
        return tensor if dtype is None else tf.cast(tensor, dtype)


class _Fp16(_None):
    """Sends float32 and float64 as float16: numbers below 6e-8 become 0, those above 65,504 infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _cast(tensor, tf.float16)


class _Bf16(_None):
    """Sends float32 and float64 as bfloat16: the range of float32, with 8 significant bits."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _cast(tensor, tf.bfloat16)


class _Int8(_None):
    """Sends float dtypes as float32 inside a host, and as int8 between hosts, 0.254 times the bytes.

    A block of 256 elements has a scale. The next step adds the rounding errors. The first 16 steps are measured with
    and without it; if it does not pay, it is off from then on, and rank 0 warns.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float32), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)


class _Int8Always(_Int8):
    """As int8, but it is not measured and stays on."""


def _cast(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    wide = tensor.dtype in (tf.float32, tf.float64)
    return (tf.cast(tensor, dtype), tensor.dtype) if wide else (tensor, None)


class Compression:
    """Values of `compression`. `compress` returns a tensor, and the context that `decompress` needs.

    fp16 and bf16 halve the bytes. Both stay on, as in AWS's library and Horovod: the casts are part of the graph.

    int8 is for the gradients of a tape or an optimizer. It measures itself, and needs several hosts. int8_always stays
    on.
    """

    none = _None
    fp16 = _Fp16
    bf16 = _Bf16
    int8 = _Int8
    int8_always = _Int8Always


def is_int8(compression: Any) -> bool:
    return compression in (Compression.int8, Compression.int8_always)
