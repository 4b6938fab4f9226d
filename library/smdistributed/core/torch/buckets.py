"""Which parameters a bucket of DistributedDataParallel holds: told when a collective has failed.

The model is asked while it works well, before its fourth step, when its buckets have their final form: while it
waits for a collective, it answers nobody.
"""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

_STEPS = 4
_known: WeakKeyDictionary[Any, list[tuple[int, str]]] = WeakKeyDictionary()


def remember(wrapper: DistributedDataParallel, group: Any) -> None:
    """Note the model's buckets when they have formed."""
    passes = 0

    def note(module: torch.nn.Module, _: object) -> None:
        nonlocal passes
        passes += module.training
        if passes == _STEPS:
            hook.remove()
            # torch's record is its own affair, and this for a message only
            with contextlib.suppress(AttributeError, KeyError, ValueError):
                _known.setdefault(group, []).extend(_buckets(wrapper))

    hook = wrapper.register_forward_pre_hook(note)


def described(size: int, group: Any) -> str:
    """The buckets of so many bytes, by their first and last parameters; empty: there are none."""
    return " or ".join(text for bytes_, text in _known.get(group, ()) if bytes_ == size)


def _buckets(wrapper: DistributedDataParallel) -> list[tuple[int, str]]:
    """Bytes and description of each."""
    record = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if not record.get("rebuilt_per_bucket_param_indices"):  # such as with find_unused_parameters
        return []
    names = {parameter: name for name, parameter in wrapper.module.named_parameters()}
    parameters = [names[parameter] for parameter in wrapper._module_parameters]
    found = []
    for number, indices in enumerate(record["rebuilt_per_bucket_param_indices"].split(", ")):
        held = [parameters[int(index)] for index in indices.split()]
        size = int(record["rebuilt_bucket_sizes"].split(", ")[number])
        found.append((size, f"bucket {number} of the gradients ({held[0]} … {held[-1]})"))
    return found
