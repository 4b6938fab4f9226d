"""Train a GPT-2 that is split over several devices with smdistributed.modelparallel.

By default the model is small, so that a laptop trains it in a minute. The text consists of sentences of a small
grammar, so nothing is downloaded. With `--text FILE`, it is the bytes of a file.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp

SUBJECTS, VERBS = ("the herring", "a shoal", "the boat", "one gull"), ("follows", "sees", "passes", "hears")
OBJECTS, ENDINGS = ("the tide", "a lantern", "the net", "an island"), ("at dawn", "in silence", "again", "by night")


class Block(nn.Module):
    """A layer of the transformer: causal attention, and a network for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:2], self.heads, -1)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.attention(self.before(hidden)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.merge(attended.transpose(1, 2).flatten(2))
        changed: torch.Tensor = self.network(self.between(hidden))
        return hidden + changed


class GPT2(nn.Module):
    """From bytes to the logits of the next byte. The embedding and the last layer share their weights."""

    def __init__(self, width: int, layers: int, heads: int, length: int, words: int = 256) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.apply(self._initialize)
        self.head.weight = self.words.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.last(hidden))
        return logits


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Run forward and backward for one microbatch, on all stages together."""
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.backward(loss)
    return loss


def read_text(file: str | None) -> torch.Tensor:
    """Return the bytes to train on, int64 (n,)."""
    if file:
        return torch.tensor(list(Path(file).read_bytes()))
    draw = random.Random(0)
    sentences = (" ".join(map(draw.choice, (SUBJECTS, VERBS, OBJECTS, ENDINGS))) + ".\n" for _ in range(1000))
    return torch.tensor(list("".join(sentences).encode()))


def batches(text: torch.Tensor, done: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches: the same on all stages of a replica, other ones per replica. Skip the first `done` steps."""
    draw = torch.Generator().manual_seed(args.seed * smp.dp_size() + smp.dp_rank())
    for number in range(done + args.steps):
        begins = torch.randint(0, len(text) - args.length, (args.batch_size,), generator=draw)
        if number >= done:
            yield torch.stack([text[begin : begin + args.length + 1] for begin in begins])


def main(args: argparse.Namespace) -> None:
    # The hyperparameter `mp_parameters` of a job overrides these.
    smp.init({"partitions": args.partitions, "microbatches": 4, "ddp": True})
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(args.seed)
    module = GPT2(args.width, args.layers, args.heads, args.length)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(module.parameters(), args.lr))
    model = smp.DistributedModel(module)
    done = 0
    has_one = bool(args.checkpoint_dir) and any(Path(args.checkpoint_dir).glob("step*_partial"))
    if all(smp.allgather(has_one, smp.WORLD)):
        done = smp.resume_from_checkpoint(args.checkpoint_dir)["steps"]

    last = done + args.steps
    for number, tokens in enumerate(batches(read_text(args.text), done, args), done + 1):
        optimizer.zero_grad()
        loss = train_step(model, tokens.to(device)).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if smp.rank() == 0 and number % args.log_every == 0:
            print(f"step {number}: loss {loss.item():.4f}", flush=True)
        if args.checkpoint_dir and (number % args.save_every == 0 or number == last):
            # One file per stage. Training can resume from them with another number of stages.
            smp.save_checkpoint(
                args.checkpoint_dir,
                f"step{number}",
                model=model,
                optimizer=optimizer,
                user_content={"steps": number},
                num_kept_partial_checkpoints=2,
            )

    # The whole model, as a state dict that plain PyTorch loads.
    if smp.dp_rank() == 0:
        whole = model.state_dict(gather_to_rank0=True)
        if smp.pp_rank() == 0:
            directory = Path(args.model_dir)
            directory.mkdir(parents=True, exist_ok=True)
            torch.save(whole, directory / "model.pt")
    smp.barrier()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="per replica; split into microbatches")
    parser.add_argument("--length", type=int, default=64, help="context in bytes")
    parser.add_argument("--width", type=int, default=96, help="768 in the published small model")
    parser.add_argument("--layers", type=int, default=4, help="12 in the published small model")
    parser.add_argument("--heads", type=int, default=4, help="12 in the published small model")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--partitions", type=int, default=2, help="stages, unless mp_parameters says otherwise")
    parser.add_argument("--text", help="file to train on; default: generated sentences")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--checkpoint-dir", default="", help="directory to resume from and to write checkpoints to")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--mp_parameters", help="read by smp.init, from SM_HP_MP_PARAMETERS")
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
