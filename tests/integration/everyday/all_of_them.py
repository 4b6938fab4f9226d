"""Runs the scripts of this folder one after the other: each on two ranks of its own, or on the ranks of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
REHEARSED = {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "2"}
HUGGING_FACE = {**REHEARSED, "SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_dataparallel_enabled": true}'}
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable, __file__]
LAUNCH = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]
Scripts = tuple[tuple[Sequence[str], Sequence[str], dict[str, str]], ...]
"""What starts the ranks, the script with its arguments, and variables."""
ON_THIS_HOST: Scripts = (
    (MPIRUN, ["beside_mpi4py.py"], {}),
    (MPIRUN, ["lightning_fit.py"], {}),
    (MPIRUN, ["trainer.py"], HUGGING_FACE),
    (MPIRUN, ["accelerated.py", "smddp"], REHEARSED),
    (LAUNCH, ["accelerated.py"], REHEARSED),
    (MPIRUN, ["zero.py"], REHEARSED),
)
ON_ALL_RANKS: Scripts = (
    ([sys.executable], ["lightning_fit.py"], {}),
    ([sys.executable], ["trainer.py"], HUGGING_FACE),
    ([sys.executable], ["accelerated.py", "nccl"], REHEARSED),
)


def run(scripts: Scripts, first_port: int, variables: dict[str, str]) -> None:
    """Run them in processes of their own: a process may initialise MPI once in the life of its rank."""
    for number, (starter, words, more) in enumerate(scripts):
        port = str(first_port + number)  # that of the one before may still be open
        environ = {**os.environ, **variables, **more, "MASTER_PORT": port}
        ports = ["--main_process_port", port] if starter is LAUNCH else []
        script = [words[0] if starter is MPIRUN else str(HERE / words[0]), *words[1:]]
        ended = subprocess.run([*starter, *ports, *script], env=environ)
        if ended.returncode:
            sys.exit(f"{' '.join(words)} ended with {ended.returncode}")


def become(words: list[str]) -> NoReturn:
    """Take the script's place in a rank of mpirun, with the names that torch and transformers read."""
    names = {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
        "SMDATAPARALLEL_LOCAL_RANK": "LOCAL_RANK",
    }
    place = {name: os.environ[f"OMPI_COMM_WORLD_{theirs}"] for name, theirs in names.items()}
    os.execve(sys.executable, [sys.executable, str(HERE / words[0]), *words[1:]], {**os.environ, **place})


if sys.argv[1:]:
    become(sys.argv[1:])
if "TORCHELASTIC_RUN_ID" in os.environ:  # this is a rank of torchrun; its own store is at the port that it has opened
    run(ON_ALL_RANKS, int(os.environ["MASTER_PORT"]) + 1, {"TORCHELASTIC_USE_AGENT_STORE": "False"})
else:
    run(ON_THIS_HOST, 7777, {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"})  # more would wait for each other
