"""A small GPT for benchmarks/gpu_ranks.py, and the ways in which people train one data parallel: each is a step.

A step returns its loss. With the same seed, a step of the backend and one of torch's group see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], torch.Tensor]
HEAD = 64  # features of a head


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its batches."""

    width: int
    layers: int = 8
    words: int = 1024
    length: int = 256
    sentences: int = 16

    @classmethod
    def of_bytes(cls, size: int) -> Size:
        """The model with gradients of about `size` bytes in float32: 12 width² numbers for each layer."""
        if size < 1 << 20:  # to try the code
            return cls(HEAD, 2, 32, 16, 4)
        return cls(max(1, round((size / 4 / 12 / cls.layers) ** 0.5 / HEAD)) * HEAD)


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sentences, length, width) → the same."""
        heads = self.mixed(self.before(x)).unflatten(-1, (3, -1, HEAD)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        widened: torch.Tensor = self.narrow(functional.gelu(self.wide(self.between(x))))
        return x + widened


class GPT(nn.Module):
    """Returns the loss of predicting each next word."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([Block(size.width) for _ in range(size.layers)])
        self.last, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        """(sentences, length + 1) of words → a number."""
        given, wanted = sentences[:, :-1], sentences[:, 1:]
        x = self.words(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.last(x))
        return functional.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten())


def batch_of(size: Size, rank: int, device: torch.device) -> torch.Tensor:
    """A rank's sentences. Each word follows from the one before it, so that there is something to learn."""
    draw = torch.Generator().manual_seed(rank)
    words = [torch.randint(0, size.words, (size.sentences,), generator=draw)]
    for _ in range(size.length):
        words.append((words[-1] * 5 + 7) % size.words)
    return torch.stack(words, 1).to(device)


def new_model(size: Size, device: torch.device) -> GPT:
    """The same weights each time."""
    torch.manual_seed(0)
    return GPT(size).to(device)


def step_of(model: nn.Module, parameters: Any, batch: torch.Tensor, autocast: bool = True) -> Step:
    """Forward, under autocast in bfloat16 unless the weights have it already, backward and AdamW."""
    optimizer = torch.optim.AdamW(parameters, 3e-4)

    def run() -> torch.Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def ddp(size: Size, batch: torch.Tensor, group: Any) -> Step:
    """DistributedDataParallel with buckets of a layer."""
    model = DistributedDataParallel(new_model(size, batch.device), process_group=group, bucket_cap_mb=bucket_mb(size))
    return step_of(model, model.parameters(), batch)


def bucket_mb(size: Size) -> float:
    """The MiB of the gradients of a layer."""
    return 12 * size.width**2 * 4 / (1 << 20)


def compiled(size: Size, batch: torch.Tensor, group: Any) -> Step | None:
    """The same compiled: by Inductor on a GPU, without code of its own on a CPU. None: torch has none."""
    if not hasattr(dist, "_coalescing_manager"):  # torch 2.0 does not compile on Python 3.11
        return None
    model = DistributedDataParallel(new_model(size, batch.device), process_group=group)
    by = "inductor" if torch.version.cuda and batch.device.type == "cuda" else "eager"
    return step_of(torch.compile(model, backend=by), model.parameters(), batch)  # type: ignore[arg-type]


def fsdp2(size: Size, batch: torch.Tensor, group: Any) -> Step | None:
    """Sharded layer by layer, computed in bfloat16. None: this torch has no second version of FSDP."""
    try:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        return None
    model, mesh = new_model(size, batch.device), DeviceMesh.from_group(group, batch.device.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return step_of(model, model.parameters(), batch, autocast=False)


WAYS: dict[str, Callable[[Size, torch.Tensor, Any], Step | None]] = {
    "ddp": ddp,
    "compiled-ddp": compiled,
    "fsdp2": fsdp2,
}
