"""Layers of T5, MT5, ViT and DeiT of transformers, split over TP_GROUP in place: they keep classes, code and names.

The first Linear modules of a part get split output channels, and the last one split input channels. In between, the
part computes this rank's heads or channels. All else is transformers' code: masks, relative positions, cross-attention,
gates and caches. State dicts have transformers' names: nothing is translated. Nothing here imports transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.attention import ColumnLinear, RowLinear, own_random, rows_of_mask
from smdistributed.modelparallel.torch.nn.layers import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.module import require_divisible
from smdistributed.modelparallel.torch.nn.replacement import Registration, register_late
from smdistributed.modelparallel.torch.nn.tensor_group import share_rows, tensor_group


@dataclass(frozen=True)
class _Part:
    """How modules of a class are split: modules in it by name, and its attributes that count heads or channels."""

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()


def _parts_of_t5(name: str) -> dict[str, _Part]:
    return {
        f"{name}Attention": _Part(("q", "k", "v", "relative_attention_bias"), ("o",), ("n_heads", "inner_dim")),
        f"{name}DenseActDense": _Part(("wi",), ("wo",)),
        f"{name}DenseGatedActDense": _Part(("wi_0", "wi_1"), ("wo",)),
    }


def _parts_of_vit(name: str) -> dict[str, _Part]:
    old = _Part(("query", "key", "value"), counts=("num_attention_heads", "all_head_size"))
    return {
        f"{name}Attention": _Part(("q_proj", "k_proj", "v_proj"), ("o_proj",), ("num_attention_heads",)),
        f"{name}MLP": _Part(("fc1",), ("fc2",)),
        # of transformers 4
        f"{name}SelfAttention": old,
        f"{name}SdpaSelfAttention": old,
        f"{name}SelfOutput": _Part(rows=("dense",)),
        f"{name}Intermediate": _Part(("dense",)),
        f"{name}Output": _Part(rows=("dense",)),
    }


LAYERS: dict[str, dict[str, _Part]] = {
    "T5Block": _parts_of_t5("T5"),
    "MT5Block": _parts_of_t5("MT5"),
    "ViTLayer": _parts_of_vit("ViT"),
    "DeiTLayer": _parts_of_vit("DeiT"),
}
"""By transformers' classes of layers, the classes of their parts. A part may lack some of its names."""
_STATES, _MASKS = ("hidden_states", "key_value_states"), ("mask", "attention_mask")
_REFUSED = ("output_attentions", "head_mask", "layer_head_mask")


def split_layer(layer: nn.Module) -> nn.Module:
    """Splits a layer of `LAYERS` in place, and returns it. Its Parameter objects stay.

    Raises:
        SMPUnsupportedError: If the degree does not divide a size, or the layer has a Linear that is not known here.
    """
    parts = list(_parts(layer))
    known = {module._modules[name] for module, part in parts for name in (*part.columns, *part.rows)}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and (module not in known or type(module) is not nn.Linear):
            raise SMPUnsupportedError(
                f"its {name} is a {type(module).__name__} that is not known here. Fix: leave the model out of tensor "
                "parallelism."
            )
    for module, part in parts:
        for count in part.counts:
            require_divisible(f"{type(module).__name__}.{count}", getattr(module, count))
    for module, part in parts:
        _split(module, part)
    return layer


def _parts(layer: nn.Module) -> Iterator[tuple[nn.Module, _Part]]:
    """Yields modules in a layer that are split, with the names that they have."""
    for module in layer.modules():
        part = LAYERS[type(layer).__name__].get(type(module).__name__, _Part())
        columns, rows = (
            tuple(name for name in names if module._modules.get(name) is not None)
            for names in (part.columns, part.rows)
        )
        if columns or rows:
            yield module, _Part(columns, rows, tuple(name for name in part.counts if hasattr(module, name)))


def _split(module: Any, part: _Part) -> None:
    for name in part.columns:
        module._modules[name] = _split_columns(module._modules[name])
    for name in part.rows:
        module._modules[name] = RowLinear(module._modules[name])
    for name in part.counts:
        setattr(module, name, getattr(module, name) // tensor_group().size)
    if part.columns:
        cls: Any = type(module)
        module.__class__ = _sharing_class(cls)


def _split_columns(plain: Any) -> nn.Module:
    if isinstance(plain, nn.Linear):
        return ColumnLinear(plain)
    made = DistributedEmbedding.from_plain(plain)  # of relative positions, which are the same for all rows
    made._skip_allgather = made._skip_scatter = True
    return made


@functools.cache
def _sharing_class(cls: Any) -> type[nn.Module]:
    """Returns a subclass of a part's class that computes for the rows of all ranks."""
    signature = inspect.signature(cls.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        _refuse(self, {**given, **given.get("kwargs", {})})
        states = given["hidden_states"]
        for name, value in given.items():
            if name in _MASKS:
                given[name] = rows_of_mask(value, states)
            elif name in _STATES and value is not None:
                given[name] = share_rows(value)
        dropout = getattr(self, "dropout", getattr(self, "attention_dropout", 0.0))
        with own_random(self.training and getattr(dropout, "p", dropout) > 0):
            return cls.forward(*bound.args, **bound.kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _refuse(part: Any, given: dict[str, Any]) -> None:
    """Raises SMPUnsupportedError for an option that is about heads: each rank has some of them."""
    config = getattr(part, "config", None)
    wanted = {"output_attentions": getattr(config, "output_attentions", False), **given}
    for name in _REFUSED:
        if wanted.get(name) is not None and wanted[name] is not False:
            raise SMPUnsupportedError(
                f"{name} is given, and {type(part).__name__} has a part of the heads on each rank. Fix: leave it out, "
                "or leave the model out of tensor parallelism."
            )


def _find(module: nn.Module) -> Registration | None:
    """Returns the registration of a layer of transformers; None for another module."""
    cls = type(module)
    is_known = cls.__module__.startswith("transformers.") and cls.__name__ in LAYERS
    return Registration(cls, from_plain=split_layer) if is_known else None


register_late(_find)
