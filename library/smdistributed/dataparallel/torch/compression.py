"""Gradient compression for DistributedDataParallel: fewer bytes between hosts, if that is faster.

    model = DistributedDataParallel(model)
    compress_gradients(model, "int8")

| method     | bytes                | how |
|------------|----------------------|-----|
| "fp16"     | 0.5                  | torch's hook |
| "bf16"     | 0.5                  | torch's hook |
| "int8"     | 0.254                | a scale for 256 elements, between hosts only (core/network_engines.py) |
| "low_rank" | by `rank`            | torch's PowerSGD |
| "top_k"    | 2 × `density` × ranks | the largest elements of each rank |

The next step adds the errors that "int8", "low_rank" and "top_k" make in one (error feedback). The first steps are
measured with and without compression. If it does not pay, it is switched off, and rank 0 warns with the times.
Deep Gradient Compression (Lin et al., 2018) and PowerSGD (Vogels et al., 2019) describe the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from smdistributed.core.compression import CompressionTrial, reason_without_network, warn_that_it_is_off
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.torch.devices import device_of
from smdistributed.core.torch.per_device import engine_of

__all__ = ["compress_gradients"]

METHODS: tuple[str, ...] = ("fp16", "bf16", "int8", "low_rank", "top_k")
_Future = torch.futures.Future
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_Hook = Callable[[Any], "_Future[torch.Tensor]"]


def compress_gradients(
    model: DistributedDataParallel,
    method: str,
    rank: int | None = None,
    density: float | None = None,
    measure: bool = True,
) -> None:
    """Compresses a model's gradients from the next step on. Call it on all ranks, once, before the first step.

    Args:
        model: Its process group is one of the backend smddp for "int8", any for the others.
        method: One of METHODS.
        rank: Of the matrices into which "low_rank" factors a gradient; 4 if it is None.
        density: Share of a bucket's elements that "top_k" sends, above 0 and up to 1; 0.01 if it is None.
        measure: Whether the first 16 steps are compared. If False, compression stays on.

    Raises:
        SMDDPError: Unknown method, a value out of range or for another method, or a group that lacks the method.
    """
    hook = _hook_of(method, model.process_group, rank, density)
    engine = engine_of(model.process_group) if method == "int8" else None
    without = reason_without_network(engine.engine) if engine else ""
    if without:
        warn_that_it_is_off(f"{method} is off: {without}", dist.get_rank(model.process_group))
        return
    compression = _Compression(hook, model.process_group, CompressionTrial(method, measure))
    model.register_comm_hook(None, lambda _, bucket: compression.reduce(bucket))


class _Compression:
    """Reduces buckets with or without compression, as its trial says."""

    def __init__(self, hook: _Hook, group: Any, trial: CompressionTrial) -> None:
        self._hook, self._group, self._trial = hook, group, trial

    def reduce(self, bucket: GradBucket) -> _Future[torch.Tensor]:
        """Returns a future of the bucket's average over all ranks."""
        if bucket.index() == 0 and self._trial.is_measuring:
            self._begin_step()
        return self._hook(bucket) if self._trial.compresses() else default_hooks.allreduce_hook(self._group, bucket)

    def _begin_step(self) -> None:
        """Ends the trial after its last step; the slowest rank counts, so all ranks decide the same."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        medians = self._trial.begin_step()
        if medians:
            slowest = torch.tensor(medians, dtype=torch.float64, device=device_of(self._group))
            dist.all_reduce(slowest, dist.ReduceOp.MAX, self._group)
            without, compressed = slowest.tolist()
            self._trial.decide(without, compressed, dist.get_rank(self._group))


def _hook_of(method: str, group: Any, rank: int | None, density: float | None) -> _Hook:
    if method not in METHODS:
        raise SMDDPError(f"Gradient compression {method!r} does not exist. Fix: use one of {', '.join(METHODS)}.")
    for name, value, owner in (("rank", rank, "low_rank"), ("density", density, "top_k")):
        if value is not None and method != owner:
            raise SMDDPError(f"Gradient compression {method} has no {name}. Fix: leave it out, or use {owner}.")
    if method == "int8":
        return _Int8(group).reduce
    if method == "top_k":
        return _TopK(group, 0.01 if density is None else density).reduce
    if method == "low_rank":
        rank = 4 if rank is None else rank
        if rank < 1:
            raise SMDDPError(f"Gradient compression low_rank: rank is {rank}. Fix: 1 or more.")
        state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return lambda bucket: powerSGD_hook(state, bucket)
    half = default_hooks.fp16_compress_hook if method == "fp16" else default_hooks.bf16_compress_hook
    return lambda bucket: half(group, bucket)


class _Losses:
    """The errors of earlier steps, by bucket. They start again at zero if torch changes its buckets."""

    def __init__(self) -> None:
        self._by_bucket: dict[int, torch.Tensor] = {}

    def of(self, bucket: GradBucket, device: torch.device) -> torch.Tensor:
        size = bucket.buffer().numel()
        kept = self._by_bucket.get(bucket.index())
        if kept is None or kept.numel() != size:
            kept = self._by_bucket[bucket.index()] = torch.zeros(size, device=device)
        return kept


class _Int8:
    """The communication engine's own int8. Gradients on a GPU are copied to the host and back."""

    def __init__(self, group: Any) -> None:
        engine = engine_of(group)
        if engine is None:
            raise SMDDPError(
                f"Gradient compression int8 needs the backend smddp, and the group has {dist.get_backend(group)}. Fix: "
                'init_process_group("smddp").'
            )
        self._engine, self._losses = engine, _Losses()

    def reduce(self, bucket: GradBucket) -> _Future[torch.Tensor]:
        gradients = bucket.buffer()
        on_host = gradients.to("cpu", torch.float32)  # itself, if it is there already
        done = self._engine.average_in_int8(on_host, self._losses.of(bucket, on_host.device)).get_future()
        if on_host is gradients:
            averaged: _Future[torch.Tensor] = done.then(lambda _: gradients)
            return averaged
        done.wait()
        result: _Future[torch.Tensor] = _Future(devices=[gradients.device] if gradients.is_cuda else None)
        result.set_result(gradients.copy_(on_host))
        return result


class _TopK:
    """Every rank gets the largest elements of all ranks, with their places."""

    def __init__(self, group: Any, density: float) -> None:
        if not 0 < density <= 1:
            raise SMDDPError(f"Gradient compression top_k: density is {density}. Fix: above 0, and at most 1.")
        self._group, self._density, self._losses = group, density, _Losses()

    def reduce(self, bucket: GradBucket) -> _Future[torch.Tensor]:
        gradients = bucket.buffer()
        lost = self._losses.of(bucket, gradients.device).add_(gradients)
        count = max(1, int(self._density * lost.numel()))
        places = lost.abs().topk(count, sorted=False).indices
        message = torch.cat([lost[places].view(torch.int32), places.to(torch.int32)])
        lost[places] = 0
        ranks = dist.get_world_size(self._group)
        gathered = message.new_empty(ranks * message.numel())
        done = _all_gather(gathered, message, self._group, async_op=True).get_future()

        def add_up(_: object) -> torch.Tensor:
            gradients.zero_()
            for part in gathered.chunk(ranks):
                values, where = part.chunk(2)
                gradients.index_add_(0, where, values.view(torch.float32).to(gradients.dtype))
            return gradients.div_(ranks)

        averaged: _Future[torch.Tensor] = done.then(add_up)
        return averaged
