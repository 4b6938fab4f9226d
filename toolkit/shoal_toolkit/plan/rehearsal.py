"""A rehearsal: the job runs without GPUs, planned as if this host had those of its instance type. Pure.

`shoal_rehearsal` emulates the GPUs in each rank; it reads SHOAL_REHEARSE and SHOAL_REHEARSE_GPUS.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.contract import Job, whole_number
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.plan.fabric import instance, instance_type_of

SWITCH, GPUS = "SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS"
MOST_GPUS = 128
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether SHOAL_REHEARSE is true."""
    word = environ.get(SWITCH, "").lower()
    if word not in (*_TRUE, *_FALSE):
        raise ContractError(
            f"The variable {SWITCH} is {environ[SWITCH]!r}; allowed are {', '.join(_TRUE)} to rehearse, and "
            f"{', '.join(filter(None, _FALSE))} not to."
        )
    return word in _TRUE


def pretended(job: Job, machine: Machine) -> tuple[Machine, dict[str, str], str]:
    """Return the machine with the GPUs that a rehearsal pretends, the variables that tell the ranks, and a remark.

    As many as SHOAL_REHEARSE_GPUS says, else as the instance type has, else one for each process that is asked for.
    """
    instance_type = instance_type_of(job)
    known = instance(instance_type).get("gpus")
    if given := job.environ.get(GPUS, ""):
        gpus, why = _number(given), GPUS
    elif known:
        gpus, why = known, f"as an instance {instance_type} has"
    else:
        gpus = whole_number(job.framework, "sagemaker_mpi_num_of_processes_per_host") or machine.gpus or 1
        why = f"one for each process; {GPUS} sets how many"
    real = f"; the {machine.gpus} real ones are not used" if machine.gpus else ""
    note = (
        f"REHEARSAL, because {SWITCH}={job.environ[SWITCH]}: GPUs are pretended, on the CPU. "
        f"This host pretends to have {gpus} GPUs ({why}){real}"
    )
    return machine._replace(gpus=gpus), {SWITCH: "1", GPUS: str(gpus)}, note


def slots(open_mpi: int) -> dict[str, str]:
    """Return the variable by which a script's own mpirun has a place for each emulated GPU; `open_mpi`: its series.

    By itself it has one for each core, of which an instance with GPUs has more than it has GPUs, and a laptop fewer.
    """
    if open_mpi == 5:
        return {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return {"OMPI_MCA_rmaps_base_oversubscribe": "1"}


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_GPUS:
        raise ContractError(f"The variable {GPUS} is {text!r}; it must be a whole number from 1 to {MOST_GPUS}.")
    return int(text)
