"""Names of tensor parallelism (AWS API 1.6), which is not implemented.

They can be imported, and raise an error when used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from smdistributed.core.options import refuse_unknown, warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

MODULES = (
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
)
_TENSOR_PARALLEL_OPTIONS = (
    "attention_in_fp32",
    "distribute_embedding",
    "flash_attention",
    "fp32_residual_addition",
    "fused_bias_gelu",
    "fused_dropout",
    "fused_softmax",
    "query_key_layer_scaling",
    "use_alibi",
    "zero_init",
)
"""Options of tensor-parallel modules that published pages and scripts use."""


def raise_unsupported(name: str) -> NoReturn:
    """Raises SMPUnsupportedError for a name that belongs to tensor parallelism."""
    raise SMPUnsupportedError(
        f"{name} came with version 1.6 of the interface, for tensor parallelism, and is not implemented. "
        "Fix: use pipeline parallelism ('pipeline_parallel_degree') and data parallelism ('ddp'). To AWS's GPT scripts "
        "give use_distributed_transformer=0 and tensor_parallel_degree=1."
    )


def unsupported_function(name: str) -> Callable[..., NoReturn]:
    """Makes a function of that name that raises SMPUnsupportedError."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise_unsupported(f"smp.{name}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Not implemented (AWS API 1.6). Raises SMPUnsupportedError: see {__name__}."
    return refused


def unsupported_module(name: str) -> type[nn.Module]:
    """Makes a module class of that name. Instantiating it raises SMPUnsupportedError."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:  # noqa: N807
        raise_unsupported(f"smp.nn.{name}")

    return type(name, (nn.Module,), {"__init__": __init__, "__doc__": "Not implemented (AWS API 1.6)."})


@contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Does nothing if it is disabled: tensor parallelism is not implemented (AWS API 1.6).

    Args:
        enabled: Must be False.
        **options: Options of tensor-parallel modules. They have no effect, and warn.

    Raises:
        SMPUnsupportedError: If `enabled` is true.
        TypeError: If an option is unknown.
    """
    refuse_tensor_parallelism("smp.tensor_parallelism", enabled, options)
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Does nothing if it is disabled. Arguments and errors are as in `smp.tensor_parallelism` (AWS API 1.6)."""
    refuse_tensor_parallelism("smp.set_tensor_parallelism", enabled, options)


def refuse_tensor_parallelism(function: str, enabled: bool, options: Mapping[str, Any]) -> None:
    """Raises SMPUnsupportedError if it is enabled, TypeError for an unknown option. Warns of others: no effect."""
    refuse_unknown(function, options, ("tensor_parallelism", "dtype", *_TENSOR_PARALLEL_OPTIONS))
    given = [name for name, value in options.items() if value]
    if given:
        warn_without_effect(f"{', '.join(given)} of {function}", "only tensor-parallel modules have that")
    if enabled:
        raise_unsupported(function)


tp_register = unsupported_function("tp_register")
tp_register_with_module = unsupported_function("tp_register_with_module")
prepare_optimizer = unsupported_function("prepare_optimizer")
