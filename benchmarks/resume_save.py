"""How long a save of 100 million parameters, with Adam's state, stops the training of two ranks.

The rival is torch.distributed.checkpoint.save of the same state on the same ranks, which share the writing. Ours is
shoal_checkpoint, which copies the state and writes it in the background. The first save of each, which
allocates memory, is not counted. Nothing is written while a save is timed.

    .venv/bin/python benchmarks/resume_save.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Figure, finish, make_parser, print_machine

RANKS, LAYERS, WIDTH = 2, 25, 2000  # 25 × 2000² = 100 M parameters
CEILING = 0.2


def measure(rounds: int, directory: Path) -> list[Figure]:
    """Start the ranks, and return the figure. 6 GiB of memory and 4 GiB in the directory are needed.

    Args:
        rounds: How many saves of each are timed.
        directory: Where the checkpoints are written. They are removed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    with tempfile.TemporaryDirectory(dir=directory) as place:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--rank-in", place]
        ranks = [
            subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {[rank.returncode for rank in ranks]}")
    seconds = [json.loads(output) for output in outputs]
    # A training waits for its slowest rank.
    ours, rival = (
        statistics.median(max(times) for times in zip(*(each[who] for each in seconds), strict=True))
        for who in ("ours", "rival")
    )
    name = "torch.distributed.checkpoint.save"
    return [Figure("resume-save-100M", ours * 1000, "ms", rival=rival * 1000, rival_name=name, ceiling=CEILING)]


def run_rank(rounds: int, directory: Path) -> dict[str, list[float]]:
    """Save in turn with both, as one of the ranks; return the seconds of each save."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.nn.parallel import DistributedDataParallel

    from shoal_checkpoint.torch import Checkpoint

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    checkpoint = Checkpoint(directory / "ours", keep=1, model=model, optimizer=optimizer)

    def save_ours() -> None:
        checkpoint.step += 1
        checkpoint.save()

    def save_rival() -> None:
        state: dict[str, Any] = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=directory / "rival")  # type: ignore[attr-defined]

    seconds: dict[str, list[float]] = {"ours": [], "rival": []}
    for _ in range(rounds + 1):
        for name, save in (("rival", save_rival), ("ours", save_ours)):
            dist.barrier()
            began = time.perf_counter()
            save()
            seconds[name].append(time.perf_counter() - began)
            checkpoint._wait()
            if dist.get_rank() == 0:
                shutil.rmtree(directory / "rival", ignore_errors=True)
    dist.destroy_process_group()
    return {name: times[1:] for name, times in seconds.items()}


def main(arguments: argparse.Namespace) -> int:
    if arguments.rank_in:
        print(json.dumps(run_rank(arguments.rounds, arguments.rank_in)))
        return 0
    print_machine()
    return finish(measure(arguments.rounds, arguments.directory))


if __name__ == "__main__":
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to write (default: here)")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
