"""Builds the SM_* variables of the contract for the script.

Every host builds its own, so that SM_CURRENT_HOST and SM_NUM_GPUS are right on each. Values: text unchanged, None as
empty, everything else as compact JSON with sorted keys. Names are upper-cased. If a name has characters that a shell
drops (`SM_HP_BATCH-SIZE`), the variable is set with underscores too.

Linux starts no process with a variable of more than 128 KiB. A longer one is left out, so that the job runs, and the
log names the file with the same content.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.files import read_table
from shoal_toolkit.job.contract import Job
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.job.settings import DEFAULT_STOP_GRACE
from shoal_toolkit.plan.arguments import MAX_ARGUMENT_BYTES
from shoal_toolkit.plan.launcher import list_selected, select_hosts

# Cores of one AWS Neuron device, by the family of the instance type.
_NEURON_CORES = {"inf1": 4, "inf2": 2, "trn1": 2, "trn1n": 2, "trn2": 4, "trn2u": 4}
# Levels of the module logging.
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


def build_contract_variables(job: Job, machine: Machine, arguments: list[str], hosts: Sequence[str]) -> dict[str, str]:
    """Returns the SM_* variables of a job on this host, and the few of the contract without that prefix.

    For each name that a shell can't use, there is a copy with underscores.

    Args:
        job: The job.
        machine: This host's machine.
        arguments: The arguments of the script.
        hosts: The hosts of the distribution.

    Raises:
        ContractError: If the log level or an instance group is wrong.
    """
    values = _describe_job(job, machine, hosts)
    values.update(
        training_env=_training_environment(values, job, machine, hosts),
        user_args=arguments,
        hps=dict(job.hyperparameters),
    )
    values.update({f"channel_{name}": path for name, path in job.channels.items()})
    values.update({f"hp_{name}": value for name, value in job.hyperparameters.items()})
    variables = {f"SM_{name.upper()}": format_variable(value) for name, value in values.items()}
    variables.update(_unprefixed_variables(job))
    if machine.torch:
        variables["SM_DLC_TORCH_VERSION"] = machine.torch
    return add_shell_names(variables)


def build_training_environment(job: Job, machine: Machine) -> dict[str, Any]:
    """Returns the content of SM_TRAINING_ENV: the job as this host sees it, under the names of the stock toolkit."""
    hosts = select_hosts(job.cluster, job.framework)
    return _training_environment(_describe_job(job, machine, hosts), job, machine, hosts)


def drop_oversized(variables: Mapping[str, str], config: str) -> tuple[dict[str, str], list[str]]:
    """Returns the variables without those that are too long for Linux.

    Args:
        variables: Names and values.
        config: The directory input/config, for the note.

    Returns:
        The remaining variables, and a list with one note that names the others; empty if there are none.
    """
    sizes = {name: len(f"{name}={value}".encode("utf-8", "surrogatepass")) for name, value in variables.items()}
    large = sorted(name for name, size in sizes.items() if size > MAX_ARGUMENT_BYTES)
    if not large:
        return dict(variables), []
    sizes_text = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in large)
    note = (
        f"left out: {sizes_text}. Linux passes at most {MAX_ARGUMENT_BYTES:,} bytes in one variable; the "
        f"script finds the same values in hyperparameters.json and resourceconfig.json in {config}"
    )
    return {name: value for name, value in variables.items() if name not in large}, [note]


def separate_model_dir(job: Job, machine: Machine) -> dict[str, Any]:
    """Returns the hyperparameters. In a tuning job of a TensorFlow image, model_dir gets the name of the training job.

    All training jobs of a tuning job have the same model_dir, and would write into one directory. Source: AWS's
    sagemaker-tensorflow-training, which leaves a directory of this container as it is.
    """
    values, model_dir = dict(job.hyperparameters), job.hyperparameters.get("model_dir")
    name = str(job.environ.get("TRAINING_JOB_NAME") or _job_name(job))
    is_shared = isinstance(model_dir, str) and not model_dir.startswith(job.paths.base)
    if is_shared and name and "_tuning_objective_metric" in job.toolkit and not machine.torch:
        values["model_dir"] = f"{model_dir}/{name}/model"
    return values


def sort_inherited(environ: Mapping[str, str], launches: bool, alone: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Sorts the variables of another launcher, as in data/other_launchers.json.

    Args:
        environ: The environment of `train`.
        launches: Whether a launcher starts the ranks of this host.
        alone: Whether the script is the only process of the job, or outside the distribution.

    Returns:
        The variables to remove from the environment of the launcher or script. The variables that describe one rank,
        each with the variable of torch that has its value.
    """
    table = read_table("other_launchers")
    ranks = {name: ours for name, ours in table["rank"].items() if name in environ}
    names = table["always"]
    if launches:
        names += table["tasks"] + table["launcher"]
    elif alone:
        is_wrong = any(environ.get(name, value) != value for name, value in table["alone"].items())
        names += [*table["tasks"], *ranks, *(table["alone"] if is_wrong else ())]
    return _match_names(names, environ), {} if alone else ranks


def _match_names(patterns: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    prefixes = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return tuple(name for name in environ if name in patterns or name.startswith(prefixes))


def format_variable(value: Any) -> str:
    """Returns a value as the text of a variable: None as empty, text unchanged, anything else as compact JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def add_shell_names(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables, and for each name that a shell can't use a copy with underscores in its name.

    A variable with = in its name is left out, but its copy stays. An existing variable of that name wins over a copy.
    """
    aliases = {re.sub(r"\W", "_", name, flags=re.ASCII): value for name, value in variables.items()}
    # A name with = would become another variable.
    return {**aliases, **{name: value for name, value in variables.items() if "=" not in name}}


def _describe_job(job: Job, machine: Machine, hosts: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the SM_* variables, under their names in lower case and without SM_."""
    cluster, paths = job.cluster, job.paths
    groups = cluster.instance_groups
    return {
        "hosts": list(cluster.hosts),
        "current_host": cluster.current_host,
        "current_instance_type": cluster.instance_type,
        "current_instance_group": cluster.group_name,
        "current_instance_group_hosts": _instance_group_hosts(job),
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
        "module_dir": job.code.origin or job.code_dir,  # such as an s3:// address: scripts read their bucket from it
        "log_level": read_log_level(job),
        "input_dir": os.path.join(paths.base, "input"),
        "input_config_dir": paths.config,
        "output_dir": paths.output,
        "output_data_dir": os.path.join(paths.output, "data"),
        "output_intermediate_dir": paths.intermediate,
        "model_dir": paths.model,
        "host_count": len(cluster.hosts),
        "current_host_rank": cluster.hosts.index(cluster.current_host),
        "master_addr": hosts[0],
        **({"topology": cluster.resource_config["topology"]} if cluster.resource_config.get("topology") else {}),
    }


def _training_environment(
    values: Mapping[str, Any], job: Job, machine: Machine, hosts: Sequence[str]
) -> dict[str, Any]:
    """Returns SM_TRAINING_ENV: the values of `_describe_job`, some renamed or left out, and more about the job."""
    renamed = {"framework_params": "additional_framework_parameters"}
    omitted = ("host_count", "current_host_rank", "master_addr", "channels")
    described = {renamed.get(name, name): value for name, value in values.items() if name not in omitted}
    distributed = values["distribution_instance_groups"] or not values["instance_groups"]
    described.update(
        channel_input_dirs=job.channels,
        distribution_hosts=list(hosts) if distributed else [],
        hyperparameters=dict(job.hyperparameters),
        job_name=_job_name(job) or None,
        is_master=job.cluster.current_host == values["master_addr"],
        is_modelparallel_enabled=bool(job.hyperparameters.get("mp_parameters")),
        is_smddprun_installed="smddprun" in machine.library_commands,
        is_smddpmprun_installed="smddpmprun" in machine.library_commands,
        master_hostname=values["master_addr"],
        topology=job.cluster.resource_config.get("topology") or [],
    )
    return described


def read_log_level(job: Job) -> int:
    """Returns sagemaker_container_log_level as a number of the module logging; 20 by default.

    The hyperparameter counts, otherwise the variable SAGEMAKER_CONTAINER_LOG_LEVEL.

    Raises:
        ContractError: If it is not a level.
    """
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
        raise ContractError(
            f"{name} is {value!r}; allowed are a number and {', '.join(_LOG_LEVELS)}.{hint} Fix: set one of them."
        )
    return _LOG_LEVELS[word]


def _neuron_cores(instance_type: str) -> int:
    """Returns the cores of one AWS Neuron device: ml.trn1.32xlarge → 2. For an unknown type, the smallest number."""
    family = instance_type.removeprefix("ml.").partition(".")[0]
    return _NEURON_CORES.get(family, min(_NEURON_CORES.values()))


def _instance_group_hosts(job: Job) -> list[str]:
    for group in job.cluster.instance_groups:
        if group.get("instance_group_name") == job.cluster.group_name:
            return list(group.get("hosts", []))
    return []


def _distribution_groups(job: Job) -> list[str]:
    named = job.framework.get("sagemaker_distribution_instance_groups")
    if named:
        return list(named)
    if not list_selected(job.framework):
        return []
    # If no group is named, the job is distributed over all of them.
    groups = [str(group.get("instance_group_name")) for group in job.cluster.instance_groups]
    return groups or [job.cluster.group_name]


def _job_name(job: Job) -> str:
    return str(job.toolkit.get("sagemaker_job_name") or job.environ.get("TRAINING_JOB_NAME") or "")


def _unprefixed_variables(job: Job) -> dict[str, str]:
    """Returns the variables without SM_. SHOAL_RESTART and SHOAL_STOP_GRACE are for scripts with checkpoints."""
    environ = job.environ
    # The code comes first. The launcher's own sys.path is left out: the script may run with another Python.
    path = [job.code_dir, *job.code.paths, *filter(None, [environ.get("PYTHONPATH", "")])]
    return {
        "CURRENT_HOST": job.cluster.current_host,
        "SAGEMAKER_JOB_NAME": _job_name(job),
        "SAGEMAKER_REGION": job.region,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
        "SHOAL_RESTART": environ.get("SHOAL_RESTART") or "0",
        "SHOAL_STOP_GRACE": environ.get("SHOAL_STOP_GRACE") or str(DEFAULT_STOP_GRACE),
    }
