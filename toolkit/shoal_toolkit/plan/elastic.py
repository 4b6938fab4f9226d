"""Plans a start with some hosts of a job: elastic jobs (SHOAL_MIN_HOSTS) go on with fewer hosts after a loss."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_toolkit.discovery.host_list import HostList
from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.contract import Cluster, Job
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.job.settings import TrainSettings
from shoal_toolkit.plan.plan import LaunchPlan, make_plan

_FIX = "Fix: unset SHOAL_MIN_HOSTS"


def plan_with_hosts(job: Job, machine: Machine, hosts: Sequence[str]) -> LaunchPlan:
    """Returns the plan of this host for a start with some hosts of the job. Raises TrainError as `make_plan` does.

    Args:
        job: The job with all hosts.
        machine: This host's machine.
        hosts: The hosts that take part, in the order of the job's hosts. This host is one of them.
    """
    plan = make_plan(job._replace(cluster=_keep_hosts(job.cluster, tuple(hosts))), machine)
    if plan.launcher.has_ranks:
        return plan
    of_one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return plan._replace(env={**of_one, **plan.env})  # also if one host is left of several


def _keep_hosts(cluster: Cluster, hosts: tuple[str, ...]) -> Cluster:
    config = {**cluster.resource_config, "hosts": list(hosts)}
    if cluster.instance_groups:
        config["instance_groups"] = [
            {**group, "hosts": [host for host in group.get("hosts", []) if host in hosts]}
            for group in cluster.instance_groups
        ]
    found = cluster.found._replace(hosts=hosts, rank=hosts.index(cluster.current_host), warnings=())
    return cluster._replace(hosts=hosts, resource_config=config, found=found)


def refuse_registration(found: HostList) -> None:
    """Raises ContractError if hosts have to register with the first host: one that comes back can't."""
    if found.registration is not None:
        raise ContractError(
            f"SHOAL_MIN_HOSTS is set, and the hosts of {found.source} get one another's addresses only once, when all "
            f"have started. {_FIX}."
        )


def check_elastic(settings: TrainSettings, job: Job, plan: LaunchPlan) -> tuple[str, ...]:
    """Returns notes on an elastic job; none if SHOAL_MIN_HOSTS is not set.

    Raises:
        ContractError: If there are fewer hosts, or the job can't go on with fewer hosts.
    """
    least, count = settings.min_hosts, len(job.cluster.hosts)
    if not least:
        return ()
    if least > count:
        evidence = f"{job.cluster.found.source}: {', '.join(job.cluster.hosts)}"
        raise ContractError(
            f"The variable SHOAL_MIN_HOSTS is {least}, and the job has {count} hosts ({evidence}). "
            f"Fix: set it to a number from 1 to {count}."
        )
    if least == count:
        return ()
    refuse_registration(job.cluster.found)
    if job.hyperparameters.get("mp_parameters"):
        raise ContractError(
            "SHOAL_MIN_HOSTS is set, and the job uses modelparallel (mp_parameters): its model is divided among all "
            f"hosts, so that it cannot go on with fewer. {_FIX}."
        )
    if job.framework.get("sagemaker_mpi_num_processes"):
        raise ContractError(
            "SHOAL_MIN_HOSTS is set, and sagemaker_mpi_num_processes asks for a fixed number of ranks. "
            f"{_FIX}, or set sagemaker_mpi_num_of_processes_per_host instead."
        )
    if plan.outside:
        raise ContractError(
            "SHOAL_MIN_HOSTS is set, and hosts are outside the distribution (sagemaker_distribution_instance_groups): "
            f"{', '.join(plan.outside)}. A job with such hosts needs all hosts. {_FIX}."
        )
    note = f"this job is elastic: it needs at least {least} of its {count} hosts (SHOAL_MIN_HOSTS)"
    if settings.max_restarts:
        return (note,)
    return (
        note,
        "SHOAL_MAX_RESTARTS is not set: a lost host ends this job all the same. Fix: set it to the number of failures "
        "that the job may survive.",
    )
