"""What gradients look like on their way."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class _None:
    """As they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, dtype: Any) -> Any:
        return tensor


class _Fp16:
    """Wider floating point numbers as float16: below 6e-8 they become 0, above 65,504 infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        wide = tensor.dtype in (tf.float32, tf.float64)
        return (tf.cast(tensor, tf.float16), tensor.dtype) if wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, dtype: Any) -> Any:
        return tensor if dtype is None else tf.cast(tensor, dtype)


class Compression:
    """Pass one of these as `compression`; `compress` gives a tensor and what `decompress` needs to undo it."""

    none = _None
    fp16 = _Fp16
