"""One rank of a job that runs the scripts of this folder one after the other, each in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REHEARSED = {"SHOAL_REHEARSE": "1"}
HUGGING_FACE = {**REHEARSED, "SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_dataparallel_enabled": true}'}
SCRIPTS: tuple[tuple[list[str], dict[str, str]], ...] = (
    (["beside_mpi4py.py"], {}),
    (["lightning_fit.py"], {}),
    (["trainer.py"], HUGGING_FACE),
    (["accelerated.py", "smddp"], REHEARSED),
    (["accelerated.py", "nccl"], REHEARSED),
    (["zero.py"], REHEARSED),
)
place = {name: os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("LOCAL_RANK", "RANK")}
place |= {"WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"], "SMDATAPARALLEL_LOCAL_RANK": place["LOCAL_RANK"]}
place["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
for number, (words, variables) in enumerate(SCRIPTS):
    port = int(os.environ.get("MASTER_PORT", "7777")) + number  # that of the one before may still be open
    environ = {**os.environ, **place, "MASTER_PORT": str(port), **variables}
    ended = subprocess.run([sys.executable, Path(__file__).with_name(words[0]), *words[1:]], env=environ)
    if ended.returncode:
        sys.exit(f"{' '.join(words)} ended with {ended.returncode}")
