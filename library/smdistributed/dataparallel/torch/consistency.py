"""Checks that all ranks have the same model: when it is wrapped, and every SMDDP_CHECK_WEIGHTS steps if that is set.

torch's DistributedDataParallel matches parameters by their order: with different models, ranks reduce the wrong
gradients, or hang.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from smdistributed.core.torch.bucket_names import record_buckets
from smdistributed.dataparallel.exceptions import SMDDPError

_MAX_LINES = 10
_Row = tuple[str, str]  # a parameter's name and description


def install_model_check(engine_of: Callable[[Any], Any]) -> None:
    """Patches torch's DistributedDataParallel, once: it compares the ranks' models if its group is this library's.

    It also installs the periodic check of weights, and records the buckets. With a `device_mesh` it does none of this.
    `engine_of` returns the process group for a torch group, or None.
    """
    original = DistributedDataParallel.__init__
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        group = given.get("process_group") or (dist.group.WORLD if dist.is_initialized() else None)
        engine = None if given.get("device_mesh") is not None else engine_of(group)
        if engine is not None:
            compare_models(given["module"], group)
        original(self, *arguments, **options)
        if engine is not None:
            _check_weights_periodically(self, group)
            record_buckets(self, engine)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def compare_models(module: torch.nn.Module, group: Any) -> None:
    """Raises SMDDPError on all ranks if order, names, shapes, dtypes or requires_grad differ from rank 0's."""
    rows = [
        (name, f"{tuple(parameter.shape)} {str(parameter.dtype).rpartition('.')[2]}{_trained(parameter)}")
        for name, parameter in _reduced_parameters(module)
    ]
    _compare(
        rows,
        group,
        lambda rank, difference: (
            f"The model of rank {rank} differs from the model of rank 0:\n{difference}\n"
            "Fix: build the same model on all ranks."
        ),
    )


def compare_weights(module: torch.nn.Module, group: Any) -> None:
    """Raises SMDDPError on all ranks if a parameter's values differ from rank 0's in any bit."""
    rows = [(name, _hash(parameter)) for name, parameter in _reduced_parameters(module)]
    _compare(
        rows,
        group,
        lambda rank, difference: (
            f"The weights of rank {rank} differ from the weights of rank 0:\n{difference}\n"
            "One rank changes them differently: its optimizer state differs, or code depends on the rank."
        ),
    )


def _reduced_parameters(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]


def _compare(rows: Sequence[_Row], group: Any, message: Callable[[int, str], str]) -> None:
    """Compares all ranks' rows, by digests first; every rank calls it. Raises SMDDPError on all ranks if they differ.

    `message` makes its text from the first rank of `group` that differs from rank 0, and from the differences.
    """
    digest = torch.frombuffer(bytearray(hashlib.sha256(repr(rows).encode()).digest()), dtype=torch.uint8)
    size = dist.get_world_size(group)
    digests = [torch.empty_like(digest) for _ in range(size)]
    dist.all_gather(digests, digest, group=group)
    if all(torch.equal(other, digests[0]) for other in digests):
        return
    all_rows = [[(name, value) for name, value in json.loads(text)] for text in _gather_texts(json.dumps(rows), group)]
    rank = next(rank for rank, theirs in enumerate(all_rows) if theirs != all_rows[0])
    raise SMDDPError(message(rank, describe_difference(all_rows[0], all_rows[rank], rank)))


def _gather_texts(text: str, group: Any) -> list[str]:
    """Gathers texts. torch's `all_gather_object` would unpickle, and so run, what anybody in the group sends."""
    data = text.encode()
    size = torch.tensor([len(data)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    counts = [int(each) for each in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(counts))), dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    return [each.numpy().tobytes()[:count].decode() for each, count in zip(received, counts)]


def describe_difference(first: Sequence[_Row], other: Sequence[_Row], rank: int) -> str:
    """Lists the differences, at most _MAX_LINES; without any, the first parameter that has another place."""
    ours, theirs = dict(first), dict(other)
    lines = [
        f"  {name}: {ours[name]} on rank 0, {theirs[name]} on rank {rank}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    lines += [f"  {name}: {ours[name]} on rank 0, missing on rank {rank}" for name in ours if name not in theirs]
    lines += [f"  {name}: {theirs[name]} on rank {rank}, missing on rank 0" for name in theirs if name not in ours]
    if not lines:
        place = next(place for place, (one, two) in enumerate(zip(first, other)) if one != two)
        lines = [f"  parameter {place} is {first[place][0]} on rank 0, {other[place][0]} on rank {rank}: another order"]
    more = len(lines) - _MAX_LINES
    return "\n".join([*lines[:_MAX_LINES], *([f"  and {more} more"] if more > 0 else [])])


def _check_weights_periodically(wrapper: DistributedDataParallel, group: Any) -> None:
    """Compares weights every SMDDP_CHECK_WEIGHTS training passes. Raises SMDDPError if that is not above 0."""
    text = os.environ.get("SMDDP_CHECK_WEIGHTS")
    if not text:
        return
    if not text.isdecimal() or not int(text):
        raise SMDDPError(
            f"SMDDP_CHECK_WEIGHTS={text!r} is invalid. Allowed: a number of steps above 0. Fix: set one, or unset it."
        )
    every, passes = int(text), 0

    def check(module: torch.nn.Module, _: object) -> None:
        nonlocal passes
        if module.training:
            passes += 1
            if passes % every == 0:
                compare_weights(wrapper.module, group)

    wrapper.register_forward_pre_hook(check)


def _trained(parameter: torch.Tensor) -> str:
    return "" if parameter.requires_grad else ", not trained"


def _hash(parameter: torch.Tensor) -> str:
    """Returns 16 hexadecimal digits that depend on all bits of a parameter."""
    flat = parameter.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
