"""DTensor (torch 2.5 and later): its operations run on CPU tensors, with random numbers of the CPU's generator."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from shoal_rehearsal.import_hooks import call_after_import
from shoal_rehearsal.torch.devices import CPU
from shoal_rehearsal.torch.distributed import without_mode

_PACKAGE = "torch.distributed.tensor"
_GENERATORS = (
    "SHOAL REHEARSAL: random numbers of DTensors come from each rank's CPU generator. CUDA's offsets by rank, which "
    "make replicas equal and shards different, are not emulated. Fix: set the same seed on all ranks, or initialize "
    "the weights before the model is sharded."
)


def patch(_: int) -> None:
    """Patches DTensor when it is imported: its dispatcher sees the real tensors, and its random numbers are the CPU's.

    Scaled dot-product attention of DTensors gets the strategies for the CPU's kernel that torch has for CUDA's.
    """
    if _PACKAGE in sys.modules:
        _patch_imported()
    else:
        call_after_import(_PACKAGE, _patch_imported)


def _patch_imported() -> None:
    if f"{_PACKAGE}._random" not in sys.modules:  # in torch 2.0, the package has other modules only
        return
    random, dispatch, schema = (sys.modules[f"{_PACKAGE}.{name}"] for name in ("_random", "_dispatch", "_op_schema"))
    tracker: Any = vars(random)["OffsetBasedRNGTracker"]
    tracker.__init__ = _initialize_tracker
    tracker._distribute_region = _draw_from_cpu
    dispatcher: Any = vars(dispatch)["OpDispatcher"]
    name = "_dispatch_get_local_results_slow_path"  # called from C++, in a backward pass with the mode
    if hasattr(dispatcher, name):
        setattr(dispatcher, name, without_mode(getattr(dispatcher, name)))
    if "_rebuild_tensor_from_dtensor_meta" in vars(schema):
        setattr(schema, "_rebuild_tensor_from_dtensor_meta", _rebuild_on_cpu)  # noqa: B010
    _register_attention()


def _rebuild_on_cpu(spec: Any) -> torch.Tensor:
    """Returns the fake tensor with which DTensor computes shapes. On the mesh's device, some shapes need a real GPU."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=CPU)


def _initialize_tracker(self: Any, *_: Any, **__: Any) -> None:
    self._use_distribute_region = True
    _warn_of_generators()


@functools.cache
def _warn_of_generators() -> None:
    if not torch.distributed.get_rank():
        print(_GENERATORS, file=sys.stderr)


@contextlib.contextmanager
def _draw_from_cpu(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """Replaces the tracker's context: random numbers come from a generator, by default the CPU's, and advance it."""
    if generator is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _register_attention() -> None:
    """Lets attention of DTensors be split by batch and by head, as torch does for CUDA's kernels."""
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # torch 2.5
        return
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = (getattr(torch.ops.aten, packet).default for packet in (name, f"{name}_backward"))
    register_sharding(forward)(functools.partial(_shard_attention, outputs=2, inputs=3))
    register_sharding(backward)(functools.partial(_shard_attention, outputs=3, inputs=6))


def _shard_attention(*args: Any, outputs: int, inputs: int, **_: Any) -> list[Any]:
    """Returns the allowed placements of outputs and arguments: replicas, or shards by batch or by head."""
    from torch.distributed.tensor import Replicate, Shard

    return [
        ([placement] * outputs, [placement] * inputs + [None] * (len(args) - inputs))
        for placement in (Replicate(), Shard(0), Shard(1))
    ]
