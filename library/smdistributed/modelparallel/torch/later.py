"""Names of versions 1.6 and later that are not implemented yet: they exist, and say so when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

MODULES = (
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
)


def refuse(name: str) -> NoReturn:
    """Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(
        f"{name} came with version 1.6 of the interface, for tensor parallelism, and is not implemented yet: "
        "use pipeline parallelism ('partitions') and data parallelism ('ddp')."
    )


def function(name: str) -> Any:
    """A function of that name that refuses."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(f"smp.{name}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Not implemented yet (AWS API 1.6). Raises SMPUnsupportedError: see {__name__}."
    return refused


def module(name: str) -> type:
    """A class of that name that refuses to be instantiated."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:  # noqa: N807
        refuse(f"smp.nn.{name}")

    return type(name, (), {"__init__": __init__, "__doc__": "Not implemented yet (AWS API 1.6)."})


set_tensor_parallelism = function("set_tensor_parallelism")
tp_register = function("tp_register")
tp_register_with_module = function("tp_register_with_module")
prepare_optimizer = function("prepare_optimizer")
