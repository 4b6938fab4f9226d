"""smdistributed.dataparallel.tensorflow against MultiWorkerMirroredStrategy, in the image: `make bench-tensorflow`.

Two ranks run in one container. Both libraries take turns in the same processes. The figures are medians of the rounds.
In each round, after a barrier, the slowest rank counts. Each rank computes with one thread. The rival's collectives are
its ring over gRPC.

- `tf-all-reduce-64MB`: float32, inside a tf.function; `…-torch` against `all_reduce` of torch.distributed on `smddp`,
  on this machine's own environment, in the same run;
- `tf-copy-64MB`: a copy in the host's memory, by both ranks at once. A tensor on a GPU takes two copies, over PCIe;
- `tf-mlp`: a step of an MLP of 50 million parameters with the tape;
- `tf-cnn`: gradients of a CNN, 64 images of 32 × 32 a rank, against the same ranks without reduction;
- `tf-start`: from the start of the process to the end of the first all_reduce, the import of TensorFlow included;
- `tf-smp-loss-P-M`: the largest difference of 20 losses between a Keras model on P stages, with M microbatches, and in
  one piece;
- `tf-smp-step-2-8`: a step on two stages with 8 microbatches, against one stage with 8.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from dataparallel import measure as measure_torch
from report import Figure, finish, make_parser, print_machine

from shoal.matrix import project
from shoal.matrix.spec import load

ROUNDS, STARTS = 20, 3
HERE = Path(__file__).parent
STAGES = ((2, 1), (2, 4), (4, 1), (4, 4))


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__, ROUNDS)
    parser.add_argument("--image", default="tensorflow", help="as `shoal build` takes it (%(default)s)")
    options = parser.parse_args(arguments)
    image, rounds = load(project.find(Path.cwd()).buildspec).select(options.image).tag, options.rounds
    print_machine()
    print(f"image: {image}, rounds: {rounds} (medians)", flush=True)
    times = cases(image, rounds)
    torchs = measure_torch(2, rounds, [64 << 20])[f"all-reduce-{64 << 20}"]["smddp"]
    reduce, mlp, cnn = (times[name] for name in ("all-reduce-64MB", "mlp", "cnn"))
    begun = starts(image)
    return finish(
        [
            Figure(
                "tf-all-reduce-64MB",
                *in_ms(reduce["smddp"]),
                rival=1e3 * reduce["mwms"],
                rival_name="mwms",
                ceiling=0.5,
            ),
            Figure(
                "tf-all-reduce-64MB-torch",
                *in_ms(reduce["smddp"]),
                rival=1e3 * torchs,
                rival_name="torch",
                ceiling=1.25,
            ),
            Figure("tf-copy-64MB", *in_ms(times["copy-64MB"]["host"])),
            Figure("tf-mlp", *in_ms(mlp["smddp"]), rival=1e3 * mlp["mwms"], rival_name="mwms", ceiling=1 / 1.5),
            Figure("tf-cnn", *in_ms(cnn["smddp"]), rival=1e3 * cnn["alone"], rival_name="alone", ceiling=1 / 0.95),
            Figure("tf-start", begun["smddp"], "s", rival=begun["mwms"], rival_name="mwms", ceiling=1.0),
            *stages(image),
        ]
    )


def in_ms(seconds: float) -> tuple[float, str]:
    return 1e3 * seconds, "ms"


def cases(image: str, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds by case and way."""
    with tempfile.TemporaryDirectory() as directory:
        contained(image, "cases", "/out/times.json", rounds, options=["-v", f"{directory}:/out"])
        found: dict[str, dict[str, float]] = json.loads(Path(directory, "times.json").read_text())
    for case, times in found.items():
        listed = ", ".join(f"{way} {1000 * seconds:.1f}" for way, seconds in times.items())
        print(f"{case}: {listed} ms", flush=True)
    return found


def starts(image: str) -> dict[str, float]:
    """Seconds until the slower rank has reduced, each way, in turns."""
    found: dict[str, list[float]] = {"smddp": [], "mwms": []}
    for _ in range(STARTS):
        for way, seconds in found.items():
            said = contained(image, "start", way)
            ranks = [json.loads(line)["seconds"] for line in said.splitlines() if line.startswith('{"seconds"')]
            seconds.append(max(ranks))
    return {way: median(seconds) for way, seconds in found.items()}


def stages(image: str) -> list[Figure]:
    """A model on stages against the same in one piece."""

    def measured(count: int, microbatches: int, what: str) -> dict[str, float]:
        parameters = json.dumps({"partitions": count, "microbatches": microbatches})
        said = contained(image, parameters, what, script="tensorflow_stages.py", ranks=count)
        found: dict[str, float] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        return found

    figures = []
    for count, microbatches in STAGES:
        difference = measured(count, microbatches, "loss")["difference"]
        figures.append(Figure(f"tf-smp-loss-{count}-{microbatches}", difference, "loss", goal=1e-6))
    two, one = (measured(count, 8, "step")["seconds"] for count in (2, 1))
    return [*figures, Figure("tf-smp-step-2-8", *in_ms(two), rival=1e3 * one, rival_name="one-stage")]


def contained(
    image: str,
    *words: object,
    options: list[str] | None = None,
    script: str = "tensorflow_ranks.py",
    ranks: int = 2,
) -> str:
    """Run ranks in a new container, and return their output."""
    mounts = ["-v", f"{HERE}:/benchmarks:ro", *(options or [])]
    quiet = ["-e", "TF_CPP_MIN_LOG_LEVEL=3", "-e", "OMP_NUM_THREADS=1"]
    command = ["docker", "run", "--rm", "--network", "none", "--shm-size", "1g", *quiet, *mounts, image]
    launch = f"mpirun --oversubscribe --bind-to none -np {ranks} python /benchmarks/{script}".split()
    ended = subprocess.run([*command, *launch, *map(str, words)], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"tensorflow_image.py: {words} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
