"""Names of the ways in which a toolkit asks `entry_point.run` to start ranks. `train` has started them already."""

from __future__ import annotations

import enum

from sagemaker_training._absent import refuse_others


class RunnerType(enum.Enum):
    """A way to start the script. The value has the names of `train`'s launchers that start it so."""

    Process = ()
    MPI = ("mpi",)
    SMDataParallel = ("smdataparallel", "pytorchddp")
    TorchDistributed = ("torch_distributed",)


ProcessRunnerType = RunnerType.Process
MPIRunnerType = RunnerType.MPI
SMDataParallelRunnerType = RunnerType.SMDataParallel
TorchDistributedRunnerType = RunnerType.TorchDistributed
PyTorchXLARunnerType = "xla"
"""Toolkits compare with it. `entry_point.run` refuses it."""

__getattr__ = refuse_others(__name__, (), {}, "a runner type, such as runner.ProcessRunnerType, in entry_point.run")
