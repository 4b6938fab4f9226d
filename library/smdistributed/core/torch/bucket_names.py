"""The parameters in each bucket of DistributedDataParallel, which error messages name.

They are recorded before the model's fourth step, when the buckets have their final form: while a collective waits, the
model does not answer.
"""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

_STEPS = 4
_known: WeakKeyDictionary[Any, list[tuple[int, str]]] = WeakKeyDictionary()


def record_buckets(wrapper: DistributedDataParallel, group: Any) -> None:
    """Registers a forward hook, which records the model's buckets once they have formed and removes itself.

    It records nothing if they are missing before the fourth forward, or torch's data have another format.
    """
    passes = 0

    def record(module: torch.nn.Module, _: object) -> None:
        nonlocal passes
        passes += module.training
        if passes == _STEPS:
            hook.remove()
            # torch's logging data has no stable format, and only messages need it
            with contextlib.suppress(AttributeError, KeyError, ValueError):
                _known.setdefault(group, []).extend(_buckets(wrapper))

    hook = wrapper.register_forward_pre_hook(record)


def describe_bucket(size: int, group: Any) -> str:
    """Names the buckets of `size` bytes by their first and last parameters; empty if there are none."""
    return " or ".join(text for bytes_, text in _known.get(group, ()) if bytes_ == size)


def _buckets(wrapper: DistributedDataParallel) -> list[tuple[int, str]]:
    """Returns the size in bytes and the description of each bucket; empty until torch has rebuilt them."""
    record = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if not record.get("rebuilt_per_bucket_param_indices"):  # for example with find_unused_parameters
        return []
    names = {parameter: name for name, parameter in wrapper.module.named_parameters()}
    parameters = [names[parameter] for parameter in wrapper._module_parameters]
    found = []
    for number, indices in enumerate(record["rebuilt_per_bucket_param_indices"].split(", ")):
        held = [parameters[int(index)] for index in indices.split()]
        size = int(record["rebuilt_bucket_sizes"].split(", ")[number])
        found.append((size, f"bucket {number} of the gradients ({held[0]} … {held[-1]})"))
    return found
