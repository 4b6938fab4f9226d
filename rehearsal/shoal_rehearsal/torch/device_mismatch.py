"""Finds the most common error in CUDA scripts: an operation on tensors of different devices.

It checks layers, losses and arithmetic, and only if all devices are known: a rehearsal must not fail where a real run
would succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional

from shoal_rehearsal.torch.placement import placement_of

_LAYERS = (
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("embedding", "embedding_bag", "batch_norm", "layer_norm", "group_norm", "instance_norm", "lstm", "gru"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
)
_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
_OPERATIONS = (
    *("add", "sub", "mul", "div", "true_divide", "matmul", "mm", "bmm", "addmm", "baddbmm", "cat", "stack"),
    *("eq", "ne", "add_", "sub_", "mul_", "div_", "__matmul__", "__eq__", "__ne__"),
)
_NEED_ONE_DEVICE = {
    getattr(owner, name)
    for owner in (torch.nn.functional, torch, torch.Tensor)
    for name in (*_LAYERS, *_LOSSES, *_OPERATIONS)
    if hasattr(owner, name)
}


def require_same_device(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError, with CUDA's text, if a layer, loss or arithmetic has tensors on different devices.

    Unknown placements don't count. Scalar tensors may be on the CPU, as with CUDA.
    """
    if len(tensors) < 2 or func not in _NEED_ONE_DEVICE:
        return
    found = {placement for tensor in tensors if tensor.dim() and (placement := placement_of(tensor)) is not None}
    if len(found) > 1:
        named = " and ".join(sorted(map(str, found), reverse=True)[:2])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {named}! "
            f"(in {getattr(func, '__name__', func)}; found by the rehearsal)"
        )
