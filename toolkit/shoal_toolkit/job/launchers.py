"""The table of launchers, from data/launchers.json, which describes its columns. `shoal` reads the same file."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.files import read_table

BY_MPIRUN, BY_HOST, ONCE = "mpirun", "host", "once"  # values of `Launcher.ranks`


class Launcher(NamedTuple):
    """How the ranks of a distribution start."""

    name: str
    key: str = ""
    ranks: str = ONCE
    command: str = "script"
    variables: str = ""
    can_fork: bool = False
    mpi_options: str = ""
    launch_options: str = ""
    tuned_by: tuple[str, ...] = ()
    has_servers: bool = False
    distribution: Mapping[str, Mapping[str, str]] = {}  # for `shoal` only, as the next
    sends_instance_type: bool = False

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """The hyperparameters that select and tune it."""
        return tuple(filter(None, (self.key, self.mpi_options, self.launch_options, *self.tuned_by)))

    @property
    def has_ranks(self) -> bool:
        """Whether it starts several ranks per host; otherwise each host runs the script once."""
        return self.ranks != ONCE


LAUNCHERS = {name: Launcher(name, **entry) for name, entry in read_table("launchers")["launchers"].items()}
PROCESS, MPI = LAUNCHERS["process"], LAUNCHERS["mpi"]

# Hyperparameters that choose and tune a launcher: SM_FRAMEWORK_PARAMS.
LAUNCHER_KEYS = frozenset(
    {
        "sagemaker_instance_type",
        "sagemaker_distribution_instance_groups",
        "sagemaker_pytorch_xla_multi_worker_enabled",
        "sagemaker_toolkit_native_launcher_enabled",
        *(name for launcher in LAUNCHERS.values() for name in launcher.hyperparameters),
    }
)
