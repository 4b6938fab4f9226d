"""Describes the job in which a script runs: `Environment()`, as published scripts use it.

from sagemaker_training import environment

env = environment.Environment()
train(env.channel_input_dirs["training"], env.hyperparameters["lr"], env.num_gpus)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sagemaker_training._absent import refuse_others
from shoal_toolkit.errors import did_you_mean


class Environment:
    """The job on this host. Its attributes are the keys of SM_TRAINING_ENV.

    - the script: hyperparameters (decoded), user_entry_point, module_name, module_dir, framework_module,
      additional_framework_parameters (the hyperparameters of launchers), job_name, log_level
    - directories: model_dir, input_dir, input_config_dir, output_dir, output_data_dir, output_intermediate_dir,
      channel_input_dirs (channel → directory)
    - the host: current_host, num_cpus, num_gpus, num_neurons, network_interface_name, current_instance_type,
      current_instance_group, current_instance_group_hosts, is_master
    - the job: hosts, master_hostname, instance_groups, instance_groups_dict, is_hetero, distribution_hosts,
      distribution_instance_groups, resource_config, input_data_config, topology, is_modelparallel_enabled
    - commands on PATH: is_smddprun_installed, is_smddpmprun_installed

    If the variable is not set (too long for Linux, or not started by `train`), the files under /opt/ml are read.

    Args:
        hyperparameters: Decoded hyperparameters, in place of the job's, as `read_hyperparameters` returns them.

    Raises:
        shoal_toolkit.errors.ContractError: If these files are wrong or incomplete.
    """

    def __init__(self, *, hyperparameters: Mapping[str, Any] | None = None) -> None:
        self._values = _read_values()
        if hyperparameters is not None:
            from shoal_toolkit.job.contract import TOOLKIT_KEYS

            own = {name: value for name, value in hyperparameters.items() if not name.startswith("sagemaker_")}
            self._values["hyperparameters"] = {name: own[name] for name in own.keys() - TOOLKIT_KEYS}

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a key. Raises AttributeError, with all keys in its message, if there is no such key."""
        values: dict[str, Any] = {} if name.startswith("__") else self.__dict__["_values"]
        if name in values:
            return values[name]
        hint = did_you_mean(name, values)
        raise AttributeError(f"Environment has no attribute {name!r}.{hint} It has: {', '.join(sorted(values))}")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self._values])

    def to_cmd_args(self) -> list[str]:
        """Returns the arguments of the script, from SM_USER_ARGS; if it is not set, from the hyperparameters."""
        from sagemaker_training import mapping

        text = os.environ.get("SM_USER_ARGS")
        return list(json.loads(text)) if text else mapping.to_cmd_args(self.hyperparameters)

    def to_env_vars(self) -> dict[str, str]:
        """Returns the SM_* variables of this process."""
        return {name: value for name, value in os.environ.items() if name.startswith("SM_")}


def read_hyperparameters() -> dict[str, Any]:
    """Returns all hyperparameters of the job, decoded, also those for `train`. Raises ContractError."""
    from shoal_toolkit.job import contract

    environ = dict(os.environ)
    return contract.read_all_hyperparameters(contract.read_paths(environ), environ)


def _read_values() -> dict[str, Any]:
    """Returns the decoded SM_TRAINING_ENV. If it is not set, builds the same from the files under /opt/ml."""
    text = os.environ.get("SM_TRAINING_ENV")
    values: dict[str, Any] = json.loads(text) if text else _read_contract()
    return values


def _read_contract() -> dict[str, Any]:
    """Reads the contract and the machine as `train` does, without fetching code."""
    from shoal_toolkit.job import contract
    from shoal_toolkit.job.machine import read_machine
    from shoal_toolkit.plan.environment import build_training_environment

    environ = dict(os.environ)
    paths = contract.read_paths(environ)
    cluster = contract.read_cluster(paths, os.uname().nodename, environ)
    job = contract.read_job(paths, cluster, environ, (), fetch=False)
    machine = read_machine(environ, cluster.interface_name, [], job.instance_type)
    if gpus := environ.get("SM_NUM_GPUS"):  # also emulated ones, in a rehearsal
        machine = machine._replace(gpus=int(gpus))
    return build_training_environment(job, machine)


_DIRECTORIES = {
    "base_dir": "base",
    "code_dir": "code",
    "model_dir": "model",
    "output_dir": "output",
    "input_data_dir": "data",
    "input_config_dir": "config",
    "output_intermediate_dir": "intermediate",
}


def __getattr__(name: str) -> Any:
    """Returns a directory of the job, such as `environment.model_dir`. Raises ImportError for other names."""
    if name in _DIRECTORIES:
        from shoal_toolkit.job.contract import read_paths

        return getattr(read_paths(dict(os.environ)), _DIRECTORIES[name])
    return _refuse(name)


_refuse = refuse_others(__name__, (), {}, "an attribute of environment.Environment()")
