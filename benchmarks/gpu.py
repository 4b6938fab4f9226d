"""Tensors on CUDA devices through `smddp`: `make bench-gpu`. Without a GPU it exits with 2.

The figures are medians of the rounds, after a warm-up, with the device synchronised. In each round the slowest rank
counts. One GPU is enough. With several, figures named `…-1rank` are also measured with a rank on each.

- `gpu-suites`: how many of the library's test scripts fail on CUDA tensors, through NCCL and staged. This
  comes first, because figures of wrong results mean nothing. The output of a script that fails is printed;
- `gpu-nccl-all-reduce-…`, `gpu-nccl-short-all-reduce-…` (1 KiB): the backend smddp with SMDDP_ENGINE=nccl, against
  torch's own NCCL group;
- `gpu-nccl-ddp-…`, `gpu-nccl-compiled-ddp-…`, `gpu-nccl-fsdp2-…`: a step on these two, each in one process;
- `gpu-timeline-…`: a step while a timeline is recorded, with NCCL's collectives, against one that is not;
- `gpu-staging-all-reduce-2ranks`: two ranks that share one GPU. Tensors are copied to the host, reduced there and
  copied back. The rival is the two copies alone, through pinned memory, by both ranks together. Rates are printed;
- `gpu-amp-step`: a step under autocast on these two ranks, with gradients in fp16 against fp32;
- `gpu-amp-bytes`: the bytes of the collectives of such a step, by our timeline;
- `gpu-ddp-exposed`: the share of the communication of such a step that the computation does not hide, by our timeline;
- `gpu-pipeline-2stages`: two stages of a pipeline on one GPU, against one process; their losses must agree.

`--device cpu` runs the same code without a GPU, as the tests do. Its figures, named `cpu-…`, mean nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import Figure, finish, make_parser, print_machine

from shoal.report import trace
from shoal.report.timeline_analysis import Analysis, analyse

RANKS = Path(__file__).with_name("gpu_ranks.py")
SUITES = Path(__file__).parents[1] / "tests/library/ranks"
AFTER_A_FAILURE_S = 5
NO_GPU = 2
"""The exit code without a GPU."""
_Times = dict[str, dict[str, float]]


def main(words: list[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__, 20)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of tensors, and of models (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the code without a GPU")
    parser.add_argument("--limit", type=float, default=120, help="seconds, for each start of ranks (%(default)s)")
    parser.add_argument("--no-suites", dest="suites", action="store_false", help="measure only, and test nothing")
    options = parser.parse_args(words)
    missing = what_is_missing() if options.device == "cuda" else ""
    if missing:
        print(f"bench-gpu needs one NVIDIA GPU and a torch with CUDA and NCCL: {missing}.", file=sys.stderr)
        return NO_GPU
    print_machine()
    print(device_name(options.device))
    devices = visible_devices(options.device)
    prefix = {"cuda": "gpu", "cpu": "cpu"}[options.device]
    missed, failures = 0, list[str]()
    with tempfile.TemporaryDirectory() as directory:
        for case in cases(prefix, devices, Path(directory), options):
            try:
                missed |= finish(case())  # printed at once: a machine with a GPU may be lent for minutes
            except RanksError as error:  # the others can still be measured
                failures.append(str(error))
                print(error, file=sys.stderr)
    return 1 if failures else missed


class RanksError(Exception):
    """Ranks have ended with an error, or at the limit."""


def cases(prefix: str, devices: list[str], found: Path, options: Any) -> Iterator[Callable[[], Iterable[Figure]]]:
    """Yield what is measured, one after the other."""
    if options.suites:
        yield lambda: of_suites(prefix, devices, options)
    for ranks in sorted({1, len(devices)}):
        yield lambda ranks=ranks: of_nccl(prefix, ranks, measure("own", devices[:ranks], found, options))  # type: ignore[misc]

    def of_shared() -> list[Figure]:
        shared = measure("shared", devices[:1] * 2, found, options)
        recorded = {name: analyse(trace.read_timeline(trace.find_files([found / name]))) for name in ("fp16", "fp32")}
        return [*of_staging(prefix, shared, options.bytes), *of_steps(prefix, shared, recorded)]

    yield of_shared
    yield lambda: of_stages(prefix, measure("stages", devices[:1] * 2, found, options))


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
        return "device: none; the code runs on the CPU, and its figures mean nothing"
    return f"device: {torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, torch {torch.__version__}"


def visible_devices(device: str) -> list[str]:
    """The devices, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    if device == "cpu":
        return ["0"]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def measure(case: str, devices: Sequence[str], directory: Path, options: Any) -> _Times:
    """Run a rank on each of the devices, which may be listed twice. Returns seconds by case and variant."""
    words = [RANKS, case, directory, options.rounds, options.bytes, options.device]
    codes = [code for code, _ in run(words, devices, options, quiet=False)]
    if any(codes):
        raise RanksError(f"{RANKS.name} {case}: {len(devices)} ranks have ended with {codes}")
    measured: _Times = json.loads((directory / f"{case}-{len(devices)}.json").read_text())
    return measured


def run(words: Sequence[object], devices: Sequence[str], options: Any, quiet: bool) -> list[tuple[int, str]]:
    """Run a script on a rank for each device, and let it see that device only. Returns exit codes and outputs.

    PYTHON_EXEC, which torchrun reads too, replaces this Python.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    common["PYTHONFAULTHANDLER"] = "1"
    common.update(WORLD_SIZE=str(len(devices)), LOCAL_WORLD_SIZE=str(len(devices)), OMP_NUM_THREADS="1")
    if options.device == "cuda":
        common["SMDDP_ENGINE"] = "nccl" if len(set(devices)) == len(devices) else "auto"
        common["SMDDP_TEST_DEVICE"] = "cuda"
    started: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        outputs: list[Any] = [files.enter_context(tempfile.TemporaryFile()) if quiet else None for _ in devices]
        for rank, (own, output) in enumerate(zip(devices, outputs)):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if options.device == "cuda":
                mine["CUDA_VISIBLE_DEVICES"] = own
            command = [os.environ.get("PYTHON_EXEC", sys.executable), *map(str, words)]
            streams = {"stdout": output, "stderr": subprocess.STDOUT if quiet else None}
            started.append(subprocess.Popen(command, env={**common, **mine}, **streams))
        end_those_that_hang(started, options.limit)
        return [(process.wait(), read_whole(output)) for process, output in zip(started, outputs)]


def read_whole(output: Any) -> str:
    """Return the output of a rank from its file; empty: it has none."""
    return "" if output is None else os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")


def end_those_that_hang(ranks: Sequence[subprocess.Popen[bytes]], limit: float) -> None:
    """Wait for the ranks. At the limit, or a while after another has failed, they print where they are, and end."""
    until = time.monotonic() + limit
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            until = min(until, time.monotonic() + AFTER_A_FAILURE_S)
        if time.monotonic() > until:
            for rank in ranks:
                rank.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER
            return
        time.sleep(0.02)


def of_suites(prefix: str, devices: list[str], options: Any) -> Iterator[Figure]:
    """Yield how many scripts of the library's tests fail on the device."""
    scripts: list[tuple[str, ...]] = [("on_device.py", options.device)]
    jobs = [devices[:1] * 2]
    if options.device == "cuda":  # the tests have the others on the CPU
        scripts.append(("wrappers.py", "replicas", "shards"))
        jobs += [devices[:1], *([devices] if len(devices) > 1 else [])]
    failed = []
    for ranks in jobs:
        for script in scripts:
            began = time.monotonic()
            ended = run([SUITES / script[0], *script[1:]], ranks, options, quiet=True)
            print(f"{' '.join(script)} on {len(ranks)} ranks: {time.monotonic() - began:.0f} s", flush=True)
            if any(code for code, _ in ended):
                failed.append(f"{' '.join(script)} on {len(ranks)} ranks, {len(set(ranks))} devices")
                print(f"FAILED: {failed[-1]}", *(text for code, text in ended if code), sep="\n")
    yield Figure(f"{prefix}-suites", len(failed), "failures", goal=0)


def of_nccl(prefix: str, ranks: int, measured: _Times) -> Iterator[Figure]:
    """Yield the times of the backend against its group of torch, and of a timeline against none."""
    ceiling, name = (1.1 if prefix == "gpu" else None), f"{ranks}rank{'s' if ranks > 1 else ''}"
    for what in ("all-reduce", "short-all-reduce", "ddp", "compiled-ddp", "fsdp2"):
        if what not in measured:
            print(f"left out: {what}, which this torch does not have")
            continue
        ours, rival = (1000 * measured[what][group] for group in ("smddp", "torch"))
        yield Figure(f"{prefix}-nccl-{what}-{name}", ours, "ms", rival=rival, rival_name="torch", ceiling=ceiling)
    on, off = (1000 * measured["timeline"][state] for state in ("on", "off"))
    yield Figure(f"{prefix}-timeline-{name}", on, "ms", rival=off, rival_name="off", ceiling=ceiling)


def of_staging(prefix: str, measured: _Times, size: int) -> list[Figure]:
    """Two ranks on one device."""
    ours, copies = measured["staging"]["smddp"], measured["staging"]["copies"]
    print(f"staging: {size / ours / 1e9:.3g} GB/s a rank, where copies alone reach {size / copies / 1e9:.3g} GB/s")
    name = f"{prefix}-staging-all-reduce-2ranks"
    return [Figure(name, 1000 * ours, "ms", rival=1000 * copies, rival_name="pinned-copies")]


def of_steps(prefix: str, measured: _Times, recorded: dict[str, Analysis]) -> list[Figure]:
    """Steps of training, by the clock and by the timeline."""
    times = {name: 1000 * seconds for name, seconds in measured["amp"].items()}
    sent = {name: sum(rank.bytes for rank in analysis.ranks) / 1e6 for name, analysis in recorded.items()}
    hidden = [rank.overlap for rank in recorded["fp32"].ranks if rank.overlap is not None]
    return [
        Figure(f"{prefix}-amp-step", times["fp16"], "ms", rival=times["fp32"], rival_name="fp32"),
        Figure(f"{prefix}-amp-bytes", sent["fp16"], "MB", rival=sent["fp32"], rival_name="fp32", ceiling=0.5),
        Figure(f"{prefix}-ddp-exposed", 1 - sum(hidden) / len(hidden), "share"),
    ]


def of_stages(prefix: str, measured: _Times) -> list[Figure]:
    """Two stages on one device."""
    ours, rival = (1000 * measured["pipeline"][name] for name in ("stages", "one-process"))
    return [Figure(f"{prefix}-pipeline-2stages", ours, "ms", rival=rival, rival_name="one-process")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
