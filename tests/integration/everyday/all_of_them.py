"""Runs the scripts of this folder one after the other, each on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

REHEARSED = {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "2"}
HUGGING_FACE = {**REHEARSED, "SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_dataparallel_enabled": true}'}
SCRIPTS: tuple[tuple[list[str], dict[str, str]], ...] = (
    (["beside_mpi4py.py"], {}),
    (["lightning_fit.py"], {}),
    (["trainer.py"], HUGGING_FACE),
    (["accelerated.py", "smddp"], REHEARSED),
    (["accelerated.py", "nccl"], REHEARSED),
    (["zero.py"], REHEARSED),
)


def start(number: int, words: list[str], variables: dict[str, str]) -> None:
    """Run a script on two ranks of an mpirun of its own: a process may initialise MPI once in the life of its rank."""
    ranks = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    port = str(7777 + number)  # that of the one before may still be open
    environ = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ended = subprocess.run([*ranks, sys.executable, __file__, *words], env=environ)
    if ended.returncode:
        sys.exit(f"{' '.join(words)} ended with {ended.returncode}")


def become(words: list[str]) -> NoReturn:
    """Take the script's place in a rank, with the names that torch and transformers read."""
    names = {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "SMDATAPARALLEL_LOCAL_RANK": "LOCAL_RANK",
    }
    place = {name: os.environ[f"OMPI_COMM_WORLD_{theirs}"] for name, theirs in names.items()}
    script = str(Path(__file__).with_name(words[0]))
    os.execve(sys.executable, [sys.executable, script, *words[1:]], {**os.environ, **place})


if sys.argv[1:]:
    become(sys.argv[1:])
for number, (words, variables) in enumerate(SCRIPTS):
    start(number, words, variables)
