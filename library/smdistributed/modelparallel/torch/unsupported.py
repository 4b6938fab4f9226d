"""Names of versions 1.6 and later that are not implemented: they exist, and say so when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

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


def refuse(name: str) -> NoReturn:
    """Raises SMPUnsupportedError: this name belongs to tensor parallelism."""
    raise SMPUnsupportedError(
        f"{name} came with version 1.6 of the interface, for tensor parallelism, and is not implemented. "
        "Fix: use pipeline parallelism ('pipeline_parallel_degree') and data parallelism ('ddp'). To AWS's GPT scripts "
        "give use_distributed_transformer=0 and tensor_parallel_degree=1."
    )


def function(name: str) -> Callable[..., NoReturn]:
    """A function of that name that refuses."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(f"smp.{name}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Not implemented (AWS API 1.6). Raises SMPUnsupportedError: see {__name__}."
    return refused


def module(name: str) -> type[nn.Module]:
    """A class of modules of that name that refuses to be instantiated; `isinstance` of it is always false."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:  # noqa: N807
        refuse(f"smp.nn.{name}")

    return type(name, (nn.Module,), {"__init__": __init__, "__doc__": "Not implemented (AWS API 1.6)."})


tp_register = function("tp_register")
tp_register_with_module = function("tp_register_with_module")
prepare_optimizer = function("prepare_optimizer")
