"""Activation checkpointing by hand: compute a part of a model again in backward instead of keeping its activations.

torch's own functions work inside a step; these have the published names and arguments, and `offload_activations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.pipeline.offloading import checkpoint as _checkpoint


def checkpoint(fn: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Calls a function, and computes its activations again in backward (AWS API).

    Args:
        fn: The function.
        *args: Its positional arguments.
        preserve_rng_state: Whether the second computation draws the same random numbers.
        **kwargs: Its named arguments.

    Returns:
        The result of the function.
    """
    return _checkpoint(fn, *args, preserve_rng_state=preserve_rng_state, **kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,  # noqa: A002 (the published name)
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls a sequence that is checkpointed as by `smp.set_activation_checkpointing` (AWS API).

    The sequence stays checkpointed in later calls.

    Args:
        sequential_module: The sequence.
        input: Its input.
        strategy: See `smp.set_activation_checkpointing`, which raises ValueError for an unknown one.
        preserve_rng_state: Whether the second computation draws the same random numbers.
        pack_args_as_tuple: Whether `input` is a tuple of positional arguments.

    Returns:
        The output of the sequence.
    """
    from smdistributed.modelparallel.torch.pipeline.activations import set_activation_checkpointing

    set_activation_checkpointing(sequential_module, preserve_rng_state, strategy=strategy)
    return sequential_module(*input) if pack_args_as_tuple else sequential_module(input)
