"""Train the GPT-2 of transformers in pipeline stages, with smdistributed.modelparallel.

`mpirun -np 2 python train_gpt2.py` starts two stages. By default the model is tiny and random, and its tokens are the
bytes of a text file. With `--model`, it is a GPT-2 of the Hugging Face hub or in a directory, with its tokenizer.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Run forward and backward for one microbatch, on all stages together."""
    loss = model(tokens, labels=tokens, use_cache=False).loss
    model.backward(loss)
    return loss


def load_tokens(args: argparse.Namespace) -> torch.Tensor:
    """Return the token numbers of the text, int64 (n,)."""
    if args.model:
        return torch.tensor(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"])
    return torch.tensor(list(args.text.read_bytes()))


def make_config(args: argparse.Namespace) -> GPT2Config:
    if args.model:
        return GPT2Config.from_pretrained(args.model)
    return GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)


def main(args: argparse.Namespace) -> None:
    # The hyperparameter `mp_parameters` of a job overrides these.
    smp.init({"partitions": 2, "microbatches": 4, "ddp": True})
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(args.seed)  # all stages begin with the same weights
    disable_progress_bar()
    config = make_config(args)
    module = GPT2LMHeadModel.from_pretrained(args.model) if args.model else GPT2LMHeadModel(config)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(module.parameters(), args.lr))
    model = smp.DistributedModel(module)

    tokens = load_tokens(args)
    draw = torch.Generator().manual_seed(args.seed + smp.dp_rank())  # the same batches on all stages of a replica
    for step in range(1, args.steps + 1):
        starts = torch.randint(0, len(tokens) - args.length, (args.batch_size,), generator=draw)
        batch = torch.stack([tokens[start : start + args.length] for start in starts])
        optimizer.zero_grad()
        loss = train_step(model, batch.to(device)).reduce_mean()
        optimizer.step()
        if smp.rank() == 0 and step % args.log_every == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    # Collect the weights of all stages, and save them as transformers does.
    if smp.dp_rank() == 0:
        weights = model.state_dict(gather_to_rank0=True)
        if smp.pp_rank() == 0:
            whole = GPT2LMHeadModel(config)
            whole.load_state_dict(weights)
            whole.save_pretrained(args.model_dir)
    smp.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="name or directory of a GPT-2; default: a tiny one with random weights")
    parser.add_argument("--text", type=Path, default=__file__, help="file to train on; by default this script")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="per replica; split into microbatches")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--mp_parameters", help="read by smp.init, from SM_HP_MP_PARAMETERS")
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    main(parser.parse_args())
