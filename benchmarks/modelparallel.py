"""Model parallelism against torch's own, in one run: `make bench-modelparallel`.

All ranks run on this machine, with a thread each. The figures are medians of the rounds, in which the libraries take
turns.

- `partition-MODEL-P`: the largest of P stages by the automatic partition, as a multiple of an equal share. The rival is
  the published algorithm. The goal is 1.03 times the best contiguous cut;
- `bubble-P-M`: the idle share of a step with P stages and M microbatches. The rivals are GPipe and 1F1B of torch.
  Modules are virtual accelerators, which sleep 30 ms forward and 60 ms backward. The goal is 1.1 times the minimum,
  (P-1)/(M+P-1);
- `bubble-2-8-tensor`: the same of two stages that two ranks share, with a layer that sends tensors between these. The
  rival has one microbatch in flight;
- `held-4-16`: the most microbatches with activations on the first stage, against the simple pipeline;
- `call-forward`, `call-backward`: a call of a module on another stage, with 64 KiB each way. The rival is torch's send
  and recv of the same bytes;
- `throughput-2-16`: a step of a small GPT on 2 stages of a thread each, against one process with two threads. The ideal
  is the rival's time multiplied by (M+P-1)/M;
- `memory-P`: the peak of the largest rank, of 302 million parameters with Adam, against the share of one process;
- `sharded-memory-N`, `sharded-step-N`: the same model, split over N ranks by `sharded_data_parallel_degree`. The peak
  of the largest rank, and a step. The rival is FSDP2 on gloo;
- `shares-memory-2`: the peak of the larger of 2 replicas that have 151 million bfloat16 parameters, float32 copies and
  Adam, with `shard_optimizer_state`. The rival is the same without it;
- `checkpoint-2`: seconds to save the same model with Adam's state, and to resume, on 2 ranks. The files are read while
  the host still has them in memory. The rival is torch.distributed.checkpoint. `-save` and `-resume`: its two parts;
- `sharded-step-N-least`: a step of N ranks without any communication. Each has the whole model, and updates its share;
- `offload-12`, `offload-12-whole`: the most bytes of activations on an emulated GPU. The 12 layers are checkpointed and
  offloaded, one is loaded ahead. The rivals are checkpoints alone, and neither of both;
- `tensor-2-WIDTH`: a step of a transformer layer of that many channels, split over 2 ranks. The rival is
  `parallelize_module` of torch's DTensor on gloo;
- `tensor-2-WIDTH-least`: a step of one rank's share without any communication, which both ranks compute meanwhile. No
  library can be faster with these operations;
- `tensor-2-WIDTH-processor`, `-least`: the same in seconds of the first rank's processor, which other work on the
  machine changes less;
- `tensor-2-WIDTH-loss`, `-parameters`: the largest differences from a run without shares, after 20 steps of SGD.

`--sharded BLOCKS WIDTH` measures the sharded model alone, with another size. `--only FUNCTION` measures one kind.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelparallel_partitions import partitions
from report import Figure, finish, make_parser, mpirun, print_machine

RANKS = Path(__file__).with_name("modelparallel_ranks.py")
OFFLOADED = Path(__file__).parents[1] / "tests/library/ranks/modelparallel_offloaded.py"
TENSOR_RANKS = RANKS.with_name("tensor_parallel_ranks.py")
PIPELINES = ((2, 8), (4, 8), (4, 16), (8, 16))
BLOCKS, WIDTH = 24, 1024
BUBBLE_S = 0.090
LIMIT_S = 560


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__, 5)
    parser.add_argument("--sharded", type=int, nargs=2, metavar=("BLOCKS", "WIDTH"), help="only the sharded model")
    parser.add_argument("--only", metavar="FUNCTION", help="only the figures of this function, such as checkpoint")
    given = parser.parse_args(arguments)
    print_machine()
    figures: list[Figure] = []
    size = given.sharded or (BLOCKS, WIDTH)
    measures: dict[str, Callable[[int], list[Figure]]] = {
        each.__name__: functools.partial(each, *size) for each in (sharded_memory, sharded_step)
    }
    if not given.sharded:
        on_stages = (partitions, bubbles, tensor_bubble, held, calls, throughput, memory)
        others = (*on_stages, offload, tensor, checkpoint, shares_memory)
        measures = {**{each.__name__: each for each in others}, **measures}
    if given.only:
        measures = {given.only: measures[given.only]}
    for measure in measures.values():
        found = measure(given.rounds)
        figures += found
        for figure in found:
            print(f"measured: {figure.name}", flush=True)
    return finish(figures)


def job(ranks: int, *case: object) -> dict[str, Any]:
    """Run a case on a number of ranks. Returns its measurements."""
    return job_of(RANKS, ranks, *case)


def job_of(script: Path, ranks: int, *case: object) -> dict[str, Any]:
    """Run a script of ranks with arguments. Returns its measurements."""
    command = mpirun(ranks, script, *case, options=f"--timeout {LIMIT_S}")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"modelparallel.py: {command} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    measured: dict[str, Any] = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))
    return measured


def bubbles(rounds: int) -> list[Figure]:
    figures = []
    for stages, microbatches in PIPELINES:
        measured = job(stages, "bubble", microbatches, rounds)
        found = {way: idle(microbatches, seconds) for way, seconds in measured.items()}
        least, name = (stages - 1) / (microbatches + stages - 1), f"bubble-{stages}-{microbatches}"
        for suffix, way, rival, rival_name in (
            ("", "interleaved", "1f1b", "torch-1F1B"),
            ("-simple", "simple", "gpipe", "torch-GPipe"),
        ):
            figures.append(Figure(name + suffix, found[way], "share", 1.1 * least, found[rival], rival_name, 1.0))
    return figures


def tensor_bubble(rounds: int) -> list[Figure]:
    found = {way: idle(8, seconds) for way, seconds in job(4, "tensor_bubble", 8, rounds).items()}
    least = (2 - 1) / (8 + 2 - 1)
    return [Figure("bubble-2-8-tensor", found["several"], "share", 1.1 * least, found["one"], "one-in-flight")]


def idle(microbatches: int, seconds: float) -> float:
    return 1 - microbatches * BUBBLE_S / seconds


def held(_: int) -> list[Figure]:
    found = job(4, "held", 16)
    return [Figure("held-4-16", found["interleaved"], "microbatches", found["active"], found["simple"], "simple")]


def calls(rounds: int) -> list[Figure]:
    found = {name: seconds * 1e6 for name, seconds in job(2, "call", rounds).items()}
    return [
        Figure(f"call-{way}", found[way], "us", rival=found["bare"], rival_name="gloo-send-recv", ceiling=1.5)
        for way in ("forward", "backward")
    ]


def throughput(rounds: int) -> list[Figure]:
    found = job(2, "throughput", 16, rounds)
    return [Figure("throughput-2-16", found["split"], "s", rival=found["unsplit"], rival_name="unsplit", ceiling=1.1)]


def memory(_: int) -> list[Figure]:
    whole = job(1, "memory", BLOCKS, WIDTH)["most"] / 1e6
    found = {stages: job(stages, "memory", BLOCKS, WIDTH)["most"] / 1e6 for stages in (2, 4)}
    return [
        Figure(f"memory-{stages}", most, "MB", rival=whole / stages, rival_name="share-of-unsplit", ceiling=1.1)
        for stages, most in found.items()
    ]


def offload(_: int) -> list[Figure]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_REHEARSE": "1"}
    ended = subprocess.run(mpirun(1, OFFLOADED), env=environ, capture_output=True, text=True, check=True)
    numbers = map(int, re.findall(r"horizon 1: (\d+) of (\d+) with checkpoints, (\d+) without", ended.stdout)[0])
    ours, kept, whole = (number / 1e6 for number in numbers)
    return [
        Figure("offload-12", ours, "MB", None, kept, "checkpoints-alone", 0.35),
        Figure("offload-12-whole", ours, "MB", None, whole, "without-both", 0.35),
    ]


def sharded_memory(blocks: int, width: int, _: int) -> list[Figure]:
    figures = []
    for ranks in (2, 4):
        most = {way: job(ranks, "sharded_memory", way, blocks, width)["most"] / 1e6 for way in ("smp", "fsdp2")}
        figures.append(Figure(f"sharded-memory-{ranks}", most["smp"], "MB", None, most["fsdp2"], "fsdp2-gloo", 1.0))
    return figures


def sharded_step(blocks: int, width: int, rounds: int) -> list[Figure]:
    figures = []
    for ranks in (2, 4):
        found = job(ranks, "sharded_step", blocks, width, rounds)
        figures.append(Figure(f"sharded-step-{ranks}", found["smp"], "s", None, found["fsdp2"], "fsdp2-gloo", 0.7))
        least = job(ranks, "sharded_least", blocks, width, rounds)["least"]
        figures.append(Figure(f"sharded-step-{ranks}-least", least, "s", None, found["fsdp2"], "fsdp2-gloo"))
    return figures


def shares_memory(_: int) -> list[Figure]:
    found = {way: job(2, "shares_memory", way, BLOCKS // 2, WIDTH)["most"] / 1e6 for way in ("", "1")}
    return [Figure("shares-memory-2", found["1"], "MB", None, found[""], "without-shares", 0.75)]


def checkpoint(rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        found = job(2, "checkpoint", BLOCKS, WIDTH, directory, rounds)
    total = {way: found[f"{way}_save"] + found[f"{way}_resume"] for way in ("smp", "fsdp2")}
    figures = [Figure("checkpoint-2", total["smp"], "s", None, total["fsdp2"], "torch.distributed.checkpoint", 1.0)]
    for what in ("save", "resume"):
        ours, rival = found[f"smp_{what}"], found[f"fsdp2_{what}"]
        figures.append(Figure(f"checkpoint-2-{what}", ours, "s", None, rival, "torch.distributed.checkpoint"))
    return figures


def tensor(rounds: int) -> list[Figure]:
    figures = []
    for width in (256, 512):
        found, name = job_of(TENSOR_RANKS, 2, width, rounds), f"tensor-2-{width}"
        for suffix, kind, ceiling in (("", "", 0.7), ("-processor", "_processor", None)):
            ours, rival, least = (found[f"{way}{kind}"] * 1e3 for way in ("ours", "dtensor", "share"))
            figures += [
                Figure(f"{name}{suffix}", ours, "ms", None, rival, "DTensor-gloo", ceiling),
                Figure(f"{name}{suffix}-least", least, "ms", None, rival, "DTensor-gloo"),
            ]
        figures += [
            Figure(f"{name}-loss", found["losses"], "absolute", 1e-5),
            Figure(f"{name}-parameters", found["parameters"], "absolute", 1e-5),
        ]
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
