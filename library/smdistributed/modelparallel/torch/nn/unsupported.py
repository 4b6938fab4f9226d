"""Published names that are not implemented. They can be imported, and raise an error when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

MODULES = (
    "DistributedAttentionLayer",
    "DistributedLayerNorm",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
)


def raise_unsupported(name: str) -> NoReturn:
    """Raises SMPUnsupportedError for a published name."""
    raise SMPUnsupportedError(
        f"{name} came with version 1.6 of the interface and is not implemented. Fix: to AWS's GPT scripts give "
        "use_distributed_transformer=0; smp.nn.DistributedLinear and DistributedEmbedding work."
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


prepare_optimizer = unsupported_function("prepare_optimizer")
