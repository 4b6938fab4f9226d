"""The variables that the script sees: SM_* of the contract, and those that torch and TensorFlow read. Pure.

Every host computes its own, so that SM_CURRENT_HOST and SM_NUM_GPUS are right on each. Values: text as is, None as
empty, everything else as compact JSON with sorted keys. Names are upper-cased; where a name holds characters that a
shell drops (`SM_HP_BATCH-SIZE`), the form with underscores is set as well.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from shoal_toolkit.contract import LAUNCHER_KEYS, Job, flag
from shoal_toolkit.machine import Machine


def contract_variables(job: Job, machine: Machine, arguments: list[str]) -> dict[str, str]:
    """Return the SM_* variables of a job on this host, with their companions without the prefix."""
    values = _described(job, machine)
    values.update(training_env=_training_env(values, job), user_args=arguments, hps=dict(job.hyperparameters))
    values.update({f"channel_{name}": path for name, path in job.channels.items()})
    values.update({f"hp_{name}": value for name, value in job.hyperparameters.items()})
    variables = {f"SM_{name.upper()}": variable_value(value) for name, value in values.items()}
    variables.update(_plain_names(job))
    return with_aliases(variables)


def variable_value(value: Any) -> str:
    """Return a value as the text of a variable."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def with_aliases(variables: Mapping[str, str]) -> dict[str, str]:
    """Add, for each name that a shell cannot hold, the name with underscores (unless that one is taken)."""
    aliases = {re.sub(r"\W", "_", name, flags=re.ASCII): value for name, value in variables.items()}
    return {**aliases, **variables}


def network_variables(job: Job, interface: str) -> dict[str, str]:
    """Return what gloo and NCCL need to meet on several hosts; the user's own values win."""
    if len(job.cluster.hosts) == 1:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: value for name, value in wanted.items() if name not in job.environ}


def _described(job: Job, machine: Machine) -> dict[str, Any]:
    cluster, paths, name = job.cluster, job.paths, job.script.name
    groups = cluster.instance_groups
    return {
        "hosts": list(cluster.hosts),
        "current_host": cluster.current_host,
        "current_instance_type": cluster.instance_type,
        "current_instance_group": cluster.group_name,
        "current_instance_group_hosts": _group_hosts(job),
        "instance_groups": [group.get("instance_group_name") for group in groups],
        "instance_groups_dict": {str(group.get("instance_group_name")): group for group in groups},
        "distribution_instance_groups": _distribution_groups(job),
        "is_hetero": len(groups) > 1,
        "network_interface_name": machine.interface,
        "num_cpus": machine.cpus,
        "num_gpus": machine.gpus,
        "num_neurons": 0,
        "framework_params": dict(job.framework),
        "framework_module": job.environ.get("SAGEMAKER_TRAINING_MODULE"),
        "resource_config": dict(cluster.resource_config),
        "input_data_config": dict(job.input_data_config),
        "channels": sorted(job.channels),
        "user_entry_point": name,
        "module_name": name[:-3] if name.endswith(".py") else name,
        "module_dir": job.code_dir,
        "log_level": job.toolkit.get("sagemaker_container_log_level", 20),
        "input_dir": os.path.join(paths.base, "input"),
        "input_config_dir": paths.config,
        "output_dir": paths.output,
        "output_data_dir": os.path.join(paths.output, "data"),
        "output_intermediate_dir": os.path.join(paths.output, "intermediate"),
        "model_dir": paths.model,
        "host_count": len(cluster.hosts),
        "current_host_rank": cluster.hosts.index(cluster.current_host),
        "master_addr": cluster.first_host,
        **({"topology": cluster.resource_config["topology"]} if cluster.resource_config.get("topology") else {}),
    }


def _training_env(values: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """SM_TRAINING_ENV: one object of everything, under the names that the stock toolkit uses."""
    renamed = {"framework_params": "additional_framework_parameters"}
    left_out = ("host_count", "current_host_rank", "master_addr", "channels")
    described = {renamed.get(name, name): value for name, value in values.items() if name not in left_out}
    described.update(
        channel_input_dirs=job.channels,
        distribution_hosts=list(job.cluster.hosts),
        hyperparameters=dict(job.hyperparameters),
        job_name=_job_name(job),
        is_master=job.cluster.current_host == job.cluster.first_host,
        master_hostname=job.cluster.first_host,
        topology=job.cluster.resource_config.get("topology") or [],
    )
    return described


def _group_hosts(job: Job) -> list[str]:
    for group in job.cluster.instance_groups:
        if group.get("instance_group_name") == job.cluster.group_name:
            return list(group.get("hosts", []))
    return []


def _distribution_groups(job: Job) -> list[str]:
    named = job.framework.get("sagemaker_distribution_instance_groups")
    if named:
        return list(named)
    launchers = [key for key in LAUNCHER_KEYS if key.endswith("_enabled") and "native_launcher" not in key]
    return [job.cluster.group_name] if any(flag(job.framework, key) for key in launchers) else []


def _job_name(job: Job) -> str:
    return str(job.toolkit.get("sagemaker_job_name") or job.environ.get("TRAINING_JOB_NAME") or "")


def _plain_names(job: Job) -> dict[str, str]:
    environ = job.environ
    region = job.toolkit.get("sagemaker_region") or environ.get("SAGEMAKER_REGION") or environ.get("AWS_REGION") or ""
    # The code comes first; this launcher's own sys.path stays out of it: the script may run another Python.
    path = [job.code_dir, *filter(None, [environ.get("PYTHONPATH", "")])]
    return {
        "CURRENT_HOST": job.cluster.current_host,
        "SAGEMAKER_JOB_NAME": _job_name(job),
        "SAGEMAKER_REGION": str(region),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
    }
