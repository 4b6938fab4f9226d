"""Plans a rehearsal: the job runs on CPU, as if this host had the GPUs of its instance type.

`shoal_rehearsal` emulates the GPUs in each rank. It reads SHOAL_REHEARSE and SHOAL_REHEARSE_GPUS.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.contract import Job, read_count
from shoal_toolkit.job.machine import Machine

SWITCH, GPUS = "SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS"
MAX_GPUS = 128
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def is_rehearsal(environ: Mapping[str, str]) -> bool:
    """Whether SHOAL_REHEARSE is true. Raises ContractError if it is neither true nor false."""
    word = environ.get(SWITCH, "").lower()
    if word not in (*_TRUE, *_FALSE):
        raise ContractError(
            f"The variable {SWITCH} is {environ[SWITCH]!r}; allowed are {', '.join(_TRUE)} for a rehearsal, "
            f"and {', '.join(filter(None, _FALSE))} for none. Fix: set one of them."
        )
    return word in _TRUE


def emulate_gpus(job: Job, machine: Machine) -> tuple[Machine, dict[str, str], str]:
    """Replaces the GPUs of a machine by emulated ones.

    Their number is SHOAL_REHEARSE_GPUS, or the number of the instance type, or one for each configured process. If none
    of these is known, there are as many as the machine has, at least one.

    Args:
        job: The job.
        machine: This host's machine.

    Returns:
        The machine with these GPUs, variables for the ranks, and a note for the log.

    Raises:
        ContractError: If SHOAL_REHEARSE_GPUS is wrong.
    """
    known = machine.instance.get("gpus")
    if given := job.environ.get(GPUS, ""):
        gpus, why = _parse_gpus(given), GPUS
    elif known:
        gpus, why = known, f"as an instance {job.instance_type} has"
    else:
        gpus = read_count(job.framework, "sagemaker_mpi_num_of_processes_per_host") or machine.gpus or 1
        why = f"one for each process; {GPUS} sets how many"
    real = f"; the {machine.gpus} real ones are not used" if machine.gpus else ""
    note = (
        f"REHEARSAL, because {SWITCH}={job.environ[SWITCH]}: GPUs are emulated on the CPU. "
        f"This host emulates {gpus} GPUs ({why}){real}"
    )
    return machine._replace(gpus=gpus), {SWITCH: "1", GPUS: str(gpus)}, note


def allow_oversubscription(open_mpi: int) -> dict[str, str]:
    """Returns the variable that lets a script's own mpirun start a rank for each emulated GPU.

    By default mpirun starts at most one rank per core. A laptop has fewer cores than an instance has GPUs.

    Args:
        open_mpi: The series of Open MPI, 4 or 5.
    """
    if open_mpi == 5:
        return {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return {"OMPI_MCA_rmaps_base_oversubscribe": "1"}


def _parse_gpus(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GPUS:
        raise ContractError(
            f"The variable {GPUS} is {text!r}; it must be a whole number from 1 to {MAX_GPUS}. Fix: set it so."
        )
    return int(text)
