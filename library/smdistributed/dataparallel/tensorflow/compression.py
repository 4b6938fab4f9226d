"""Compresses gradients while they are sent: to float16, or not at all."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class _None:
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, dtype: Any) -> Any:
        return tensor


class _Fp16:
    """Sends float32 and float64 as float16: numbers below 6e-8 become 0, those above 65,504 infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        wide = tensor.dtype in (tf.float32, tf.float64)
        return (tf.cast(tensor, tf.float16), tensor.dtype) if wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, dtype: Any) -> Any:
        return tensor if dtype is None else tf.cast(tensor, dtype)


class Compression:
    """Values of `compression`. `compress` returns a tensor, and the context that `decompress` needs."""

    none = _None
    fp16 = _Fp16
