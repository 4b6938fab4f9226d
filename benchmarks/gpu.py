"""Tensors on a CUDA device through `smddp`: `make bench-gpu`. Exits 2, saying what is missing, where there is no GPU.

    gpu.py [--rounds 20] [--bytes 67108864] [--device cuda]

Medians, after a warm-up; a round's time is that of its slowest rank, with the device synchronised. One GPU is enough.

- `gpu-nccl-all-reduce-1rank`: the backend smddp with SMDDP_ENGINE=nccl, against torch's own NCCL group;
- `gpu-staging-all-reduce-2ranks`: two ranks that share one GPU, whose tensors are copied to the host, reduced there and
  copied back, against nothing but the two copies, through pinned memory, by both ranks at once; the rates are printed;
- `gpu-amp-step`, `gpu-amp-bytes`: a step under autocast on those two ranks, its gradients compressed to fp16, against
  fp32 ones; and the bytes that its collectives were given, by our timeline;
- `gpu-ddp-exposed`: the share of the communication of a step that the computation does not hide, by our timeline. Of
  staged tensors: collectives of NCCL are not in it.

`--device cpu` runs the same code without a GPU, which is what the tests do: its figures, named `cpu-…`, tell nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Figure, finish, print_machine

from shoal.report import trace
from shoal.report.analysis import Analysis, analyse

RANKS = Path(__file__).with_name("gpu_ranks.py")
NO_GPU = 2
"""The exit code where there is nothing to measure on."""


def main(words: list[str]) -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser("gpu.py", description="Tensors on a CUDA device through smddp.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(words)
    missing = what_is_missing() if options.device == "cuda" else ""
    if missing:
        print(f"bench-gpu needs one NVIDIA GPU and a torch with CUDA and NCCL: {missing}.", file=sys.stderr)
        return NO_GPU
    print_machine()
    print(device_name(options.device))
    prefix = {"cuda": "gpu", "cpu": "cpu"}[options.device]
    with tempfile.TemporaryDirectory() as directory:
        alone = measure(1, Path(directory), options)
        shared = measure(2, Path(directory), options)
        recorded = {name: analyse(trace.read(trace.find([Path(directory, name)]))) for name in ("fp16", "fp32")}
    return finish(
        [*of_nccl(prefix, alone), *of_staging(prefix, shared, options.bytes), *of_steps(prefix, shared, recorded)]
    )


def what_is_missing() -> str:
    """Why nothing can be measured on a CUDA device; empty: it can."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs"
    if not torch.cuda.device_count():
        return "torch sees no device"
    return "" if dist.is_nccl_available() else "torch has no NCCL"


def device_name(device: str) -> str:
    """Name the device that the figures are of."""
    import torch

    if device == "cpu":
        return "device: none; the code runs on the CPU, and its figures tell nothing"
    return f"device: {torch.cuda.get_device_name(0)}, torch {torch.__version__}"


def measure(ranks: int, directory: Path, options: Any) -> dict[str, dict[str, float]]:
    """Run so many ranks on the first GPU; returns seconds by case and what was run."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    common.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    if options.device == "cuda":
        common["CUDA_VISIBLE_DEVICES"] = common.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        common["SMDDP_ENGINE"] = "nccl" if ranks == 1 else "auto"
    command = [sys.executable, RANKS, directory, options.rounds, options.bytes, options.device]
    started = [
        subprocess.Popen([*map(str, command)], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{RANKS.name}: {ranks} ranks have ended with {codes}")
    measured: dict[str, dict[str, float]] = json.loads((directory / f"times-{ranks}.json").read_text())
    return measured


def of_nccl(prefix: str, measured: dict[str, dict[str, float]]) -> list[Figure]:
    """One rank: what the backend adds to the group that it hands tensors to."""
    ours, rival = (1000 * measured["all-reduce"][name] for name in ("smddp", "torch"))
    ceiling = 1.1 if prefix == "gpu" else None
    return [Figure(f"{prefix}-nccl-all-reduce-1rank", ours, "ms", rival=rival, rival_name="torch", ceiling=ceiling)]


def of_staging(prefix: str, measured: dict[str, dict[str, float]], size: int) -> list[Figure]:
    """Two ranks on one device."""
    ours, copies = measured["staging"]["smddp"], measured["staging"]["copies"]
    print(f"staging: {size / ours / 1e9:.3g} GB/s a rank, where copies alone reach {size / copies / 1e9:.3g} GB/s")
    name = f"{prefix}-staging-all-reduce-2ranks"
    return [Figure(name, 1000 * ours, "ms", rival=1000 * copies, rival_name="pinned-copies")]


def of_steps(prefix: str, measured: dict[str, dict[str, float]], recorded: dict[str, Analysis]) -> list[Figure]:
    """Steps of training, by the clock and by the timeline."""
    times = {name: 1000 * seconds for name, seconds in measured["amp"].items()}
    sent = {name: sum(rank.bytes for rank in analysis.ranks) / 1e6 for name, analysis in recorded.items()}
    hidden = [rank.overlap for rank in recorded["fp32"].ranks if rank.overlap is not None]
    return [
        Figure(f"{prefix}-amp-step", times["fp16"], "ms", rival=times["fp32"], rival_name="fp32"),
        Figure(f"{prefix}-amp-bytes", sent["fp16"], "MB", rival=sent["fp32"], rival_name="fp32", ceiling=0.5),
        Figure(f"{prefix}-ddp-exposed", 1 - sum(hidden) / len(hidden), "share"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
