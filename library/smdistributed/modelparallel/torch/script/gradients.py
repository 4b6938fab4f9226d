"""The gradients of this stage: norms, averages over its replicas (`ddp`), and the checks around a step.

torch's DistributedDataParallel needs a forward of the whole model on each rank, which no rank has. Here a gradient
counts as complete when it was accumulated as often as in earlier steps. Complete ones are averaged in buckets, while
later gradients are computed. Parameters that tensor parallelism splits are averaged over the ranks that have the same
share, in buckets of their own. At the end of a step the replicas agree on which buckets were sent too early, and send
those again. For a norm, each GPU is waited for once, not once per tensor.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.torch.nn.module import split_of
from smdistributed.modelparallel.torch.script.buckets import (
    Bucket,
    HookedBucket,
    Replicas,
    by_replicas,
    split_into_buckets,
)
from smdistributed.modelparallel.torch.script.optimizer_shards import OptimizerShards


def clip_gradients(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    gather: Callable[[float], Sequence[Any]],
    only_shares: bool = False,
) -> float:
    """Scales gradients down, in place, to a norm over all stages of at most `max_norm`. Returns the norm before.

    `gather` exchanges this rank's part of the norm, and returns the parts of all. With `only_shares`, the part has no
    gradients that another rank of TP_GROUP also counts. If the norm is NaN, gradients stay.
    """
    given = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local_part(parameter.grad) for parameter in given if parameter.grad is not None]
    counted = [g for p, g in zip(given, gradients) if split_of(p) or not only_shares]
    infinite = norm_type == float("inf")
    if infinite:
        part = largest_element(counted)
    else:
        part = sum(float((norms**norm_type).sum()) for norms in _norms(counted, norm_type))
    parts = gather(part)
    total = _maximum(parts) if infinite else sum(parts) ** (1 / norm_type)
    if total > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (total + 1e-6))
    return float(total)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, in the same memory; the tensor itself if it is not a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def largest_element(gradients: Sequence[torch.Tensor]) -> float:
    """The largest absolute value of all gradients; 0 without any. It is inf or NaN if an element is."""
    parts = [local_part(gradient) for gradient in gradients]
    return _maximum(float(norms.max()) for norms in _norms(parts, float("inf")))


def _maximum(values: Iterable[float]) -> float:
    """Returns NaN if a value is, wherever it stands, as in torch; 0 without values."""
    found = list(values)
    return next((value for value in found if math.isnan(value)), max(found, default=0.0))


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> Iterator[torch.Tensor]:
    """Yields one float64 tensor for each device: reading it waits once. Gradients without elements are left out."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            wide = torch.promote_types(gradient.dtype, torch.float32)  # a norm in float16 overflows
            found.setdefault(gradient.device, []).append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide))
    for norms in found.values():
        yield torch.stack([norm.double() for norm in norms])


class Averages(Protocol):
    """Averages the gradients of steps over other ranks."""

    @property
    def saw_gradients(self) -> bool:
        """Whether there were gradients since the step began."""

    def begin(self) -> None:
        """Begins a step."""

    def before_backward(self) -> None:
        """Called before each backward of a step."""

    def end(self) -> None:
        """Ends a step that had a backward."""

    def finish(self) -> None:
        """Averages what steps have left."""


class Reducer:
    """Averages the gradients of parameters over replicas. Hooks on their gradients count and send them.

    `overlap`: whether a bucket is sent as soon as it is complete, or at the end of the step. `every`: how many steps
    are accumulated before they are averaged. `replicas`: see `by_replicas`. `hook`: computes the averages of a bucket
    instead: see `DistributedModel.register_comm_hook`. `shards`: with `shard_optimizer_state`, only the owner of a
    parameter keeps its average, and the other replicas' gradients become None.
    """

    hook: Callable[[HookedBucket], Any] | None = None

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        replicas: tuple[Replicas, Replicas],
        overlap: bool,
        bucket_bytes: int,
        every: int,
        shards: OptimizerShards | None = None,
    ) -> None:
        self._shards = shards
        self._averaged: set[nn.Parameter] = set()
        """Parameters with a gradient that is an average from which new gradients are set apart."""
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        """Averages of earlier steps, to which the next ones are added: a script has not reset the gradients."""
        self._replicas, self.overlap, self._every = replicas, overlap, every
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._expected: Counter[nn.Parameter] = Counter()
        self._seen: Counter[nn.Parameter] = Counter()
        self._next = self._steps = 0
        self._lock = threading.RLock()
        self._kept: list[Any] = []
        self._frozen = [parameter for _, parameter in reversed(parameters)]
        self._take_trained()

    def _take_trained(self) -> None:
        """Puts parameters that are trained by now into new buckets, with hooks: scripts may unfreeze layers."""
        trained = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not trained:
            return
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        new = [
            Bucket(part, replicas, owner)
            for replicas, its in by_replicas(trained, self._replicas)
            for owner, owned in self._by_owner(its)
            for part in split_into_buckets(owned, self._bucket_bytes)
        ]
        self._buckets += new
        self._bucket_of.update((parameter, bucket) for bucket in new for parameter in bucket.parameters)
        self._kept += [self._hook_gradient(parameter) for parameter in trained]

    def _by_owner(self, parameters: list[nn.Parameter]) -> list[tuple[int | None, list[nn.Parameter]]]:
        if self._shards is None:
            return [(None, parameters)]
        owners = {parameter: self._shards.owner_of(parameter) for parameter in parameters}
        return [(owner, [p for p in parameters if owners[p] == owner]) for owner in sorted(set(owners.values()))]

    def begin(self) -> None:
        """Begins a step: forgets the gradients that were counted, and takes parameters that are trained by now."""
        self._take_trained()
        self._seen.clear()
        self._next = 0

    def before_backward(self) -> None:
        """Does nothing: hooks on gradients do all."""

    @property
    def saw_gradients(self) -> bool:
        return bool(self._seen)

    def end(self) -> None:
        """Ends a step that had a backward. If it is the last of `every` steps, replaces gradients by their averages."""
        self._steps += 1
        if self._steps == self._every:
            self._average()

    def finish(self) -> None:
        """Averages now, even after fewer than `every` steps: an epoch may end earlier."""
        if self._steps:
            self._average()

    def forget_gradients(self) -> None:
        """Removes gradients that are averages already: the next step must not send them again."""
        if not self._steps:
            for parameter in self._bucket_of:
                parameter.grad = None

    def _average(self) -> None:
        """Sends the buckets that are left, and again those that were sent too early. All replicas call it."""
        self._steps = 0
        if not self._buckets:
            return
        self._send_next(lambda _: True)
        early, trained = self._agree_on_flags()
        for bucket in self._buckets:
            bucket.wait()
            if bucket in early:
                bucket.flat, bucket.work = None, None
                self._send(bucket)
        for bucket in self._buckets:
            bucket.wait()
            self._put_back(bucket, trained)
        self._expected |= self._seen

    def _is_last_step(self) -> bool:
        return self._steps + 1 == self._every

    def _agree_on_flags(self) -> tuple[set[Bucket], set[nn.Parameter]]:
        """Returns buckets that any replica sent too early, and parameters with a gradient on any. A collective."""
        parameters = list(self._bucket_of)
        own = [bucket.is_early for bucket in self._buckets] + [p.grad is not None for p in parameters]
        group = self._replicas[0].group  # includes the replicas of shares, which have as many buckets
        flags = torch.tensor([float(flag) for flag in own], device=device_of(group))
        dist.all_reduce(flags, group=group)
        found = flags.tolist()  # waits for the device, if they are on one
        return (
            {bucket for bucket, flag in zip(self._buckets, found) if flag},
            {parameter for parameter, flag in zip(parameters, found[len(self._buckets) :]) if flag},
        )

    def _hook_gradient(self, parameter: nn.Parameter) -> Any:
        """Calls `_accumulated` after each accumulation of a gradient. Keep the result: the hook ends with it."""
        with torch.inference_mode(False), torch.enable_grad():  # the first step may be an evaluation
            grad_fn: Any = parameter.expand_as(parameter).grad_fn
        accumulator = grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_: self._accumulated(parameter))
        if self._bucket_of[parameter].sets_averages_apart:
            parameter.register_hook(lambda _: self._set_average_apart(parameter))  # type: ignore[no-untyped-call]
        return accumulator

    def _set_average_apart(self, parameter: nn.Parameter) -> None:
        """Called before a gradient is added or sent: see `Bucket.sets_averages_apart`."""
        with self._lock:
            if parameter in self._averaged:
                self._averaged.discard(parameter)
                if parameter.grad is not None:
                    self._earlier[parameter], parameter.grad = parameter.grad, None

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Called on autograd's threads. If its bucket was sent already, notes that this was too early."""
        with self._lock:
            self._seen[parameter] += 1
            bucket = self._bucket_of[parameter]
            if bucket.work is not None:
                bucket.is_early = True
            if self.overlap and self._is_last_step():
                self._send_next(self._is_complete)

    def _is_complete(self, bucket: Bucket) -> bool:
        """Whether each gradient was accumulated as often as in earlier steps; False before the first average."""
        return all(0 < self._expected[p] <= self._seen[p] for p in bucket.parameters)

    def _send_next(self, may_send: Callable[[Bucket], bool]) -> None:
        """Sends buckets in the order of all replicas, until one for which `may_send` returns False."""
        while self._next < len(self._buckets) and may_send(self._buckets[self._next]):
            for sent in self._buckets[: self._next]:
                if not self._keeps(sent) and self.hook is None and sent.work.is_completed():
                    sent.flat = None
            self._send(self._buckets[self._next])
            self._next += 1

    def _keeps(self, bucket: Bucket) -> bool:
        return bucket.owner is None or self._shards is None or bucket.owner == self._shards.mine

    def _send(self, bucket: Bucket) -> None:
        """Starts to average a copy of a bucket's gradients; missing ones count as 0. Does not wait.

        Gradients of parameters that no other rank has stay here, and are not copied.
        """
        for parameter in bucket.parameters:
            self._set_average_apart(parameter)
        if self.hook is None and len(bucket.replicas.ranks) == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.parameters]
        bucket.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if self.hook is not None:
            bucket.work = self.hook(HookedBucket(bucket, self._buckets.index(bucket), len(self._buckets)))
            return
        bucket.flat /= bucket.replicas.divisor
        if self._shards and bucket.owner is not None and self._shards.is_reduced_to_owner(bucket.replicas.ranks):
            bucket.work = self._shards.reduce(bucket.flat, bucket.owner)
            return
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.replicas.group, async_op=True)

    def _put_back(self, bucket: Bucket, trained: set[nn.Parameter]) -> None:
        """Writes averages into gradients, in place. Gradients of other owners become None."""
        flat, offset = bucket.flat, 0
        bucket.flat, bucket.work, bucket.is_early = None, None, False
        for parameter in bucket.parameters:
            first, offset = offset, offset + parameter.numel()
            if not self._keeps(bucket):
                parameter.grad = None
            elif parameter in trained:  # as in one process: optimizers skip parameters without a gradient
                average = None if flat is None else flat[first:offset].view_as(parameter)
                self._set_average(parameter, average, bucket.replicas.divisor)
            elif parameter in self._earlier:
                parameter.grad = self._earlier.pop(parameter)
            if bucket.sets_averages_apart and parameter.grad is not None:
                self._averaged.add(parameter)

    def _set_average(self, parameter: nn.Parameter, average: torch.Tensor | None, divisor: float) -> None:
        """Sets a gradient. `average` is None if no other rank has the parameter: its gradient is divided."""
        earlier = self._earlier.pop(parameter, None)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter) if average is None else average.clone()
        elif average is None:
            parameter.grad /= divisor
        else:
            parameter.grad.copy_(average)
        if earlier is not None:
            parameter.grad += earlier


_UNAVERAGED = (
    "Gradients were computed without model.backward, so that replicas would not average them. "
    "Fix: call model.backward(loss) instead of loss.backward()."
)
_SUMMED = (
    "Gradients were computed without model.backward, so that they are sums over the microbatches instead of means. "
    "Fix: call model.backward(loss) instead of loss.backward()."
)


class StepGradients:
    """Follows the gradients of this stage's parameters, none before the model is placed, through steps.

    `must_be_means`: whether they are means over several microbatches, which `model.backward` computes.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], must_be_means: Callable[[], bool]) -> None:
        self._parameters, self._must_be_means = parameters, must_be_means
        self.reducer: Averages | None = None
        """Averages over the replicas, if there are several, and FSDP2 does not do all. Set when the model is placed."""
        self.were_scaled = False
        """Whether losses were multiplied by the loss scale since the optimizer's `zero_grad`."""
        self.was_called_outside = False
        """Whether the model was called outside a step with gradients, and `model.backward` not since."""
        self._has_called_backward = False
        self._had_gradients: set[int] = set()

    def begin(self) -> None:
        """Notes that a step begins: gradients from before belong to another one. The reducer begins to count again."""
        self.was_called_outside = False
        if not self._has_called_backward:
            self._had_gradients = {id(p) for p in self._parameters() if p.grad is not None}
        if self.reducer:
            self.reducer.begin()

    def before_backward(self) -> None:
        """Called before each backward of a step."""
        if self.reducer:
            self.reducer.before_backward()

    def end(self, had_backward: bool) -> None:
        """Averages gradients over the replicas. Without a backward on any stage, as in an evaluation, they stay.

        Raises StepUsageError if the script computed gradients in another way than `model.backward`.
        """
        self.were_scaled |= had_backward
        self._has_called_backward |= had_backward
        if self.reducer and had_backward:
            self.reducer.end()
        elif self.reducer and self.reducer.saw_gradients:
            raise StepUsageError(_UNAVERAGED)
        self._require_means()

    def finish_averages(self) -> None:
        """Averages what `backward_passes_per_step` has left to later steps; all replicas call it.

        Raises StepUsageError if replicas have computed gradients outside a step, and not by `model.backward`.
        """
        if self.reducer and self.was_called_outside and self.reducer.saw_gradients:
            raise StepUsageError(_UNAVERAGED)
        if self.reducer:
            self.reducer.finish()

    def _require_means(self) -> None:
        """Raises StepUsageError if a step without `backward` has left gradients of several microbatches."""
        if self._has_called_backward or not self._must_be_means():
            return
        if any(p.grad is not None and id(p) not in self._had_gradients for p in self._parameters()):
            raise StepUsageError(_SUMMED)
