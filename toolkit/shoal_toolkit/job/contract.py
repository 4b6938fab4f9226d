"""Reads the SageMaker contract (files under the base directory, and variables) into a frozen `Job`.

Sources: the SageMaker training documentation, and the observed behaviour of `sagemaker-training` 5.1.4. Where that
one is wrong (a stale failure file, a flag "false" taken as true, SAGEMAKER_SUBMIT_DIRECTORY ignored) this one does
what is documented.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.job import source
from shoal_toolkit.job.entry import Script, read_script
from shoal_toolkit.job.source import Code
from shoal_toolkit.light_typing import Any, NamedTuple

DEFAULT_BASE = "/opt/ml"
HYPERPARAMETERS = "hyperparameters.json"
RESOURCE_CONFIG = "resourceconfig.json"
INPUT_DATA_CONFIG = "inputdataconfig.json"

# Hyperparameters for the toolkit itself: neither the script nor SM_FRAMEWORK_PARAMS sees them.
TOOLKIT_KEYS = frozenset(
    {
        "sagemaker_program",
        "sagemaker_submit_directory",
        "sagemaker_enable_cloudwatch_metrics",
        "sagemaker_region",
        "sagemaker_container_log_level",
        "sagemaker_job_name",
        "default_user_module_name",
        "_tuning_objective_metric",
        "sagemaker_s3_output",
        "sagemaker_store_true",  # ours: see arguments.py
        "sagemaker_metric_definitions",  # ours: see metrics.py
    }
)
# Hyperparameters that choose and tune a launcher; they are SM_FRAMEWORK_PARAMS.
LAUNCHER_KEYS = frozenset(
    {
        "sagemaker_mpi_enabled",
        "sagemaker_mpi_num_of_processes_per_host",
        "sagemaker_mpi_num_processes",
        "sagemaker_mpi_custom_mpi_options",
        "sagemaker_distributed_dataparallel_enabled",
        "sagemaker_distributed_dataparallel_custom_mpi_options",
        "sagemaker_instance_type",
        "sagemaker_distribution_instance_groups",
        "sagemaker_pytorch_ddp_enabled",
        "sagemaker_pytorch_xla_multi_worker_enabled",
        "sagemaker_torch_distributed_enabled",
        "sagemaker_parameter_server_enabled",
        "sagemaker_multi_worker_mirrored_strategy_enabled",
        "sagemaker_toolkit_native_launcher_enabled",
    }
)


class Paths(NamedTuple):
    """The directories of a job, all under one base."""

    base: str

    @property
    def config(self) -> str:
        return os.path.join(self.base, "input", "config")

    @property
    def data(self) -> str:
        return os.path.join(self.base, "input", "data")

    @property
    def code(self) -> str:
        return os.path.join(self.base, "code")

    @property
    def model(self) -> str:
        return os.path.join(self.base, "model")

    @property
    def output(self) -> str:
        return os.path.join(self.base, "output")

    @property
    def intermediate(self) -> str:
        return os.path.join(self.output, "intermediate")


class Cluster(NamedTuple):
    """Who takes part, from resourceconfig.json; `assumed` when there is no such file and one host is supposed."""

    current_host: str
    hosts: tuple[str, ...]
    interface_name: str
    instance_type: str
    group_name: str
    resource_config: Mapping[str, Any]
    assumed: bool

    @property
    def first_host(self) -> str:
        return self.hosts[0]

    @property
    def instance_groups(self) -> list[dict[str, Any]]:
        return list(self.resource_config.get("instance_groups") or [])


class Job(NamedTuple):
    """One training job as one host sees it: everything that was configured, nothing of the machine."""

    paths: Paths
    cluster: Cluster
    hyperparameters: Mapping[str, Any]  # those of the script
    framework: Mapping[str, Any]  # sagemaker_*, less those of the toolkit itself
    toolkit: Mapping[str, Any]
    input_data_config: Mapping[str, Any]
    script: Script
    code: Code
    region: str  # of AWS; empty where nobody says
    platform_syncs: bool  # output/intermediate was there before the job: the platform uploads it
    extra_args: tuple[str, ...]  # after `train` on the command line
    environ: Mapping[str, str]
    configured: bool  # whether hyperparameters.json exists: without it, `train` is a bare `docker run`

    @property
    def code_dir(self) -> str:
        """The directory of the user's code, in which it runs."""
        return self.code.directory

    @property
    def channels(self) -> dict[str, str]:
        """Channel name → directory of its data."""
        return {name: os.path.join(self.paths.data, name) for name in self.input_data_config}


def read_paths(environ: Mapping[str, str]) -> Paths:
    """Return the directories below SAGEMAKER_BASE_DIR, or below /opt/ml."""
    return Paths(os.path.abspath(environ.get("SAGEMAKER_BASE_DIR") or DEFAULT_BASE))


def read_cluster(paths: Paths, hostname: str) -> Cluster:
    """Read resourceconfig.json; without one, this host (named `hostname`) is alone."""
    path = os.path.join(paths.config, RESOURCE_CONFIG)
    config = _read_object(path)
    if config is None:
        return Cluster(hostname, (hostname,), "eth0", "local", "homogeneousCluster", _alone(hostname), assumed=True)
    hosts = _hosts(config, path)
    current = config.get("current_host")
    if current not in hosts:
        raise ContractError(
            f"{path}: current_host is {current!r}, which is not among hosts {list(hosts)}."
            f"{did_you_mean(str(current), hosts)} Set current_host to this host's name in the list."
        )
    return Cluster(
        current_host=current,
        hosts=hosts,
        interface_name=config.get("network_interface_name") or "eth0",
        instance_type=config.get("current_instance_type") or "local",
        group_name=config.get("current_group_name") or "homogeneousCluster",
        resource_config=config,
        assumed=False,
    )


def read_framework(paths: Paths) -> dict[str, Any]:
    """Return the hyperparameters for the launcher alone."""
    raw = _read_object(os.path.join(paths.config, HYPERPARAMETERS)) or {}
    return {key: decode(value) for key, value in raw.items() if key in LAUNCHER_KEYS}


def read_job(
    paths: Paths, cluster: Cluster, environ: Mapping[str, str], extra_args: tuple[str, ...], fetch: bool = True
) -> Job:
    """Read the rest of the contract, and bring the code here; without `fetch`, leave everything as it is.

    Raises ContractError for what cannot be understood or is missing, LaunchError for code that cannot be fetched.
    """
    raw = _read_object(os.path.join(paths.config, HYPERPARAMETERS))
    decoded = {key: decode(value) for key, value in (raw or {}).items()}
    reserved = {key for key in decoded if key in TOOLKIT_KEYS or key.startswith("sagemaker_")}
    toolkit = {key: decoded[key] for key in reserved if key in TOOLKIT_KEYS}
    region = _region(environ, toolkit)
    place = source.locate(environ, toolkit, paths.code)
    if fetch:
        code = source.fetch(place, paths.code, {**environ, "SAGEMAKER_REGION": region})
    else:
        code = source.foresee(place, paths.code)
    script = read_script(code, environ, toolkit)
    if fetch and script.needs_no_code:
        source.make_directory(code)
    return Job(
        paths=paths,
        cluster=cluster,
        hyperparameters={key: value for key, value in decoded.items() if key not in reserved},
        framework={key: decoded[key] for key in reserved if key not in TOOLKIT_KEYS},
        toolkit=toolkit,
        input_data_config=_read_object(os.path.join(paths.config, INPUT_DATA_CONFIG)) or {},
        script=script,
        code=code,
        region=region,
        platform_syncs=os.path.isdir(paths.intermediate),
        extra_args=extra_args,
        environ=environ,
        configured=raw is not None,
    )


def decode(value: Any) -> Any:
    """Return the JSON value that a hyperparameter's string holds; the string itself where it is no JSON.

    >>> decode("1.10"), decode("null"), decode("adam"), decode('"a b"')
    (1.1, None, 'adam', 'a b')
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def flag(settings: Mapping[str, Any], key: str) -> bool:
    """Return a true/false hyperparameter: true, "true", "True" (SDK 1.x) and "\\"true\\"" are true, absent is false."""
    value = settings.get(key)
    if value is None or value is True or value is False:
        return bool(value)
    word = str(value).strip().strip('"').lower()
    if word in ("true", "1"):
        return True
    if word in ("false", "0", "", "none", "null"):
        return False
    raise ContractError(f"{HYPERPARAMETERS}: {key} is {value!r}; allowed are true and false.")


def whole_number(settings: Mapping[str, Any], key: str) -> int | None:
    """Return a hyperparameter that counts something (at least 1), or None where it is absent or null."""
    value = settings.get(key)
    if value is None or value == "":
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise ContractError(f"{HYPERPARAMETERS}: {key} is {value!r}; it must be a whole number of at least 1.")
    return int(text)


def _read_object(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, None where there is no file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            value = json.load(file)
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ContractError(
            f"{path}, line {error.lineno}, column {error.colno}: this is not JSON ({error.msg}). "
            'Write one JSON object, such as {"key": "value"}.'
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"{path} cannot be read: {error}. It must be a JSON object, in UTF-8.") from None
    if not isinstance(value, dict):
        raise ContractError(
            f"{path}, line 1: the file holds a JSON {_json_type(value)}, and must hold an object, "
            'such as {"key": "value"}.'
        )
    return value


def _json_type(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]


def _hosts(config: Mapping[str, Any], path: str) -> tuple[str, ...]:
    hosts = config.get("hosts")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ContractError(f'{path}: hosts is {hosts!r}, and must be a list of host names, such as ["algo-1"].')
    if len(set(hosts)) != len(hosts):
        raise ContractError(f"{path}: hosts names a host twice: {hosts}. Each host takes part once.")
    return tuple(hosts)


def _region(environ: Mapping[str, str], toolkit: Mapping[str, Any]) -> str:
    named = (environ.get(name) for name in ("SAGEMAKER_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"))
    return str(toolkit.get("sagemaker_region") or next(filter(None, named), ""))


def _alone(hostname: str) -> dict[str, Any]:
    return {"current_host": hostname, "hosts": [hostname]}
