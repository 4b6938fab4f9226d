"""The variables that the script sees: SM_* of the contract, and those that torch and TensorFlow read.

Pure, but for a look at the names of this Python's packages and of the programs on PATH.

Every host computes its own, so that SM_CURRENT_HOST and SM_NUM_GPUS are right on each. Values: text as is, None as
empty, everything else as compact JSON with sorted keys. Names are upper-cased; where a name holds characters that a
shell drops (`SM_HP_BATCH-SIZE`), the form with underscores is set as well.

Linux passes at most 128 KiB in one variable, and refuses the whole process otherwise: a longer one is left out, so that
the job runs, and it is said which file has the same.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.job.contract import Job, flag
from shoal_toolkit.job.machine import Machine, find_program
from shoal_toolkit.light_typing import Any
from shoal_toolkit.plan.arguments import LONGEST
from shoal_toolkit.plan.launcher import ASKED_BY, members

# Of one device, by the family of the instance type.
_NEURON_CORES = {"inf1": 4, "inf2": 2, "trn1": 2, "trn1n": 2, "trn2": 4, "trn2u": 4}
# Those of the module logging.
_LOG_LEVELS = {
    "NOTSET": 0,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "WARNING": 30,
    "ERROR": 40,
    "FATAL": 50,
    "CRITICAL": 50,
}


def contract_variables(job: Job, machine: Machine, arguments: list[str]) -> dict[str, str]:
    """Return the SM_* variables of a job on this host, with their companions without the prefix."""
    values = _described(job, machine)
    values.update(training_env=_training_env(values, job), user_args=arguments, hps=dict(job.hyperparameters))
    values.update({f"channel_{name}": path for name, path in job.channels.items()})
    values.update({f"hp_{name}": value for name, value in job.hyperparameters.items()})
    variables = {f"SM_{name.upper()}": variable_value(value) for name, value in values.items()}
    variables.update(_plain_names(job))
    if torch := installed_version("torch", sys.path):
        variables["SM_DLC_TORCH_VERSION"] = torch
    return with_aliases(variables)


def training_environment(job: Job, machine: Machine) -> dict[str, Any]:
    """Return what SM_TRAINING_ENV holds: everything, under the names that the stock toolkit uses."""
    return _training_env(_described(job, machine), job)


def within_limits(variables: Mapping[str, str], config: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a process can be given, and a remark on those that are left out."""
    sizes = {name: len(f"{name}={value}".encode("utf-8", "surrogatepass")) for name, value in variables.items()}
    large = sorted(name for name, size in sizes.items() if size > LONGEST)
    if not large:
        return dict(variables), []
    told = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in large)
    note = (
        f"left out: {told}. Linux passes at most {LONGEST:,} bytes in one variable; the script finds the same in "
        f"hyperparameters.json and resourceconfig.json in {config}"
    )
    return {name: value for name, value in variables.items() if name not in large}, [note]


def installed_version(package: str, path: Sequence[str]) -> str:
    """Return the version of an installed package, from the name of its directory: importing it takes seconds."""
    for directory in path:
        try:
            names = os.listdir(directory or os.curdir)
        except OSError:
            continue
        for name in names:
            if name.startswith(f"{package}-") and name.endswith(".dist-info"):
                return name[len(package) + 1 : -len(".dist-info")]
    return ""


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
    # With a = in its name it would be another variable.
    return {**aliases, **{name: value for name, value in variables.items() if "=" not in name}}


def _described(job: Job, machine: Machine) -> dict[str, Any]:
    cluster, paths = job.cluster, job.paths
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
        "num_neurons": machine.neuron_devices * _neuron_cores(cluster.instance_type),
        "framework_params": dict(job.framework),
        "framework_module": job.environ.get("SAGEMAKER_TRAINING_MODULE"),
        "resource_config": dict(cluster.resource_config),
        "input_data_config": dict(job.input_data_config),
        "channels": sorted(job.channels),
        "user_entry_point": job.script.name,
        "module_name": job.script.module_name,
        "module_dir": job.code.origin or job.code_dir,  # an s3:// address, say: scripts find their bucket by it
        "log_level": log_level(job),
        "input_dir": os.path.join(paths.base, "input"),
        "input_config_dir": paths.config,
        "output_dir": paths.output,
        "output_data_dir": os.path.join(paths.output, "data"),
        "output_intermediate_dir": paths.intermediate,
        "model_dir": paths.model,
        "host_count": len(cluster.hosts),
        "current_host_rank": cluster.hosts.index(cluster.current_host),
        "master_addr": members(cluster, job.framework)[0],
        **({"topology": cluster.resource_config["topology"]} if cluster.resource_config.get("topology") else {}),
    }


def _training_env(values: Mapping[str, Any], job: Job) -> dict[str, Any]:
    renamed = {"framework_params": "additional_framework_parameters"}
    left_out = ("host_count", "current_host_rank", "master_addr", "channels")
    described = {renamed.get(name, name): value for name, value in values.items() if name not in left_out}
    distributed = values["distribution_instance_groups"] or not values["instance_groups"]
    described.update(
        channel_input_dirs=job.channels,
        distribution_hosts=list(members(job.cluster, job.framework)) if distributed else [],
        hyperparameters=dict(job.hyperparameters),
        job_name=_job_name(job) or None,
        is_master=job.cluster.current_host == values["master_addr"],
        is_modelparallel_enabled=bool(job.hyperparameters.get("mp_parameters")),
        is_smddprun_installed=bool(find_program("smddprun", job.environ)),
        is_smddpmprun_installed=bool(find_program("smddpmprun", job.environ)),
        master_hostname=values["master_addr"],
        topology=job.cluster.resource_config.get("topology") or [],
    )
    return described


def log_level(job: Job) -> int:
    """Return the level of sagemaker_container_log_level as a number of the module logging; 20 where none is set."""
    value = job.toolkit.get("sagemaker_container_log_level")
    name = "sagemaker_container_log_level"
    if value is None:
        name = name.upper()
        value = job.environ.get(name) or 20
    word = str(value).strip().upper()
    if word.isdecimal():
        return int(word)
    if word not in _LOG_LEVELS:
        hint = did_you_mean(word, _LOG_LEVELS)
        raise ContractError(f"{name} is {value!r}; allowed are a number and {', '.join(_LOG_LEVELS)}.{hint}")
    return _LOG_LEVELS[word]


def _neuron_cores(instance_type: str) -> int:
    """Cores of one AWS Neuron device: ml.trn1.32xlarge → 2. Where the type is not known, the least of all."""
    family = instance_type.removeprefix("ml.").partition(".")[0]
    return _NEURON_CORES.get(family, min(_NEURON_CORES.values()))


def _group_hosts(job: Job) -> list[str]:
    for group in job.cluster.instance_groups:
        if group.get("instance_group_name") == job.cluster.group_name:
            return list(group.get("hosts", []))
    return []


def _distribution_groups(job: Job) -> list[str]:
    named = job.framework.get("sagemaker_distribution_instance_groups")
    if named:
        return list(named)
    if not any(flag(job.framework, key) for key in ASKED_BY):
        return []
    # Without a choice among the groups, the job is distributed over all of them.
    groups = [str(group.get("instance_group_name")) for group in job.cluster.instance_groups]
    return groups or [job.cluster.group_name]


def _job_name(job: Job) -> str:
    return str(job.toolkit.get("sagemaker_job_name") or job.environ.get("TRAINING_JOB_NAME") or "")


def _plain_names(job: Job) -> dict[str, str]:
    environ = job.environ
    # The code comes first; this launcher's own sys.path stays out of it: the script may run another Python.
    path = [job.code_dir, *filter(None, [environ.get("PYTHONPATH", "")])]
    return {
        "CURRENT_HOST": job.cluster.current_host,
        "SAGEMAKER_JOB_NAME": _job_name(job),
        "SAGEMAKER_REGION": job.region,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
    }
