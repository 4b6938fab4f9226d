"""Reads the SageMaker contract, files under the base directory and variables, into a frozen `Job`.

Sources: the SageMaker training documentation, and the observed behaviour of `sagemaker-training` 5.1.4. If that is
wrong (a stale failure file, a flag "false" taken as true, SAGEMAKER_SUBMIT_DIRECTORY ignored), the documentation
counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HINTS, SOURCES, HostList, list_present
from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import TYPE_CHECKING, Any, NamedTuple
from shoal_toolkit.job.code import (
    Code,
    CodeSource,
    Script,
    describe_entry,
    describe_without_fetching,
    find_script,
    inspect_code,
    locate_code,
    make_code_directory,
)
from shoal_toolkit.job.launchers import LAUNCHER_KEYS

if TYPE_CHECKING:  # few jobs define metrics
    from shoal_toolkit.job.metrics import MetricPattern

DEFAULT_BASE = "/opt/ml"
SDK_HYPERPARAMETERS = "SHOAL_SDK_HYPERPARAMETERS"  # set in place of SDK 3's MPI driver: see hooks/sdk_driver.py
HYPERPARAMETERS = "hyperparameters.json"
RESOURCE_CONFIG = "resourceconfig.json"
INPUT_DATA_CONFIG = "inputdataconfig.json"

# Hyperparameters for the toolkit itself: they are not passed to the script, nor in SM_FRAMEWORK_PARAMS.
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
        "sagemaker_store_true",  # only in this toolkit, as the next: see plan/arguments.py
        "sagemaker_json_arguments",
        "sagemaker_metric_definitions",  # only in this toolkit: see job/metrics.py
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
    """The hosts of a job, from resourceconfig.json or the variables of a platform; otherwise one alone."""

    current_host: str
    hosts: tuple[str, ...]
    interface_name: str
    instance_type: str
    group_name: str
    resource_config: Mapping[str, Any]
    found: HostList  # where the hosts come from

    @property
    def first_host(self) -> str:
        """The first host of the list. It may be outside the distribution: see `launcher.select_hosts`."""
        return self.hosts[0]

    @property
    def instance_groups(self) -> list[dict[str, Any]]:
        """The instance groups in resourceconfig.json; empty if there are none."""
        return list(self.resource_config.get("instance_groups") or [])


class Job(NamedTuple):
    """One training job as configured on one host, without facts about the machine."""

    paths: Paths
    cluster: Cluster
    hyperparameters: Mapping[str, Any]  # for the script
    framework: Mapping[str, Any]  # for the launcher: sagemaker_* other than TOOLKIT_KEYS
    toolkit: Mapping[str, Any]  # TOOLKIT_KEYS
    input_data_config: Mapping[str, Any]
    script: Script
    code: Code
    region: str  # of AWS; empty if not configured
    platform_syncs: bool  # output/intermediate existed before the job: the platform uploads it
    extra_args: tuple[str, ...]  # after `train` on the command line
    environ: Mapping[str, str]
    configured: bool  # whether hyperparameters.json exists: a bare `docker run` has none
    metrics: tuple[MetricPattern, ...] = ()
    entry_notes: tuple[str, ...] = ()  # for the log

    @property
    def code_dir(self) -> str:
        """The directory of the user's code, in which the script runs."""
        return self.code.directory

    @property
    def instance_type(self) -> str:
        """The type of this host's instance, "local" if it is not configured."""
        if self.cluster.instance_type != "local":
            return self.cluster.instance_type
        return str(self.framework.get("sagemaker_instance_type") or "local")

    @property
    def channels(self) -> dict[str, str]:
        """The directory of each channel's data, by the channel's name. In Pipe mode it is the stem of FIFOs."""
        return {name: os.path.join(self.paths.data, name) for name in self.input_data_config}

    @property
    def pipe_channels(self) -> list[str]:
        """The names of the channels in Pipe mode."""
        modes = {name: config.get("TrainingInputMode") for name, config in self.input_data_config.items() if config}
        return sorted(name for name, mode in modes.items() if mode == "Pipe")


def read_paths(environ: Mapping[str, str]) -> Paths:
    """Returns the directories of the job, under SAGEMAKER_BASE_DIR or /opt/ml."""
    return Paths(os.path.abspath(environ.get("SAGEMAKER_BASE_DIR") or DEFAULT_BASE))


def read_cluster(paths: Paths, hostname: str, environ: Mapping[str, str] = {}) -> Cluster:
    """Returns the hosts of the job, from resourceconfig.json, otherwise from the variables of a platform.

    Without an interface in resourceconfig.json, it is eth0; without an instance type, it is "local".

    Args:
        paths: The directories of the job.
        hostname: The name of this host, used if there is neither: then this host is alone.
        environ: The environment of `train`.

    Raises:
        ContractError: If the file is not as SageMaker writes it, or the variables are incomplete or disagree.
    """
    path = os.path.join(paths.config, RESOURCE_CONFIG)
    config = _read_object(path)
    if config is None:
        return make_cluster(_find_hosts(environ, hostname) or _assume_one_host(paths, hostname))
    hosts = _read_hosts(config, path)
    current = config.get("current_host")
    if current not in hosts:
        raise ContractError(
            f"{path}: current_host is {current!r}, which is not among hosts {list(hosts)}."
            f"{did_you_mean(str(current), hosts)} Fix: set current_host to this host's name in the list."
        )
    return Cluster(
        current_host=current,
        hosts=hosts,
        interface_name=config.get("network_interface_name") or "eth0",
        instance_type=config.get("current_instance_type") or "local",
        group_name=config.get("current_group_name") or "homogeneousCluster",
        resource_config=config,
        found=HostList(
            RESOURCE_CONFIG,
            hosts,
            hosts.index(current),
            path,
            warnings=_warn_about_other_hosts(hosts, hosts.index(current), environ, hostname),
        ),
    )


def _find_hosts(environ: Mapping[str, str], hostname: str) -> HostList | None:
    if not list_present({**SOURCES, **HINTS}, environ):
        return None
    from shoal_toolkit.discovery.sources import find_hosts  # only variables of a platform need it

    return find_hosts(environ, hostname)


def _warn_about_other_hosts(
    hosts: tuple[str, ...], rank: int, environ: Mapping[str, str], hostname: str
) -> tuple[str, ...]:
    if not list_present(SOURCES, environ):
        return ()
    from shoal_toolkit.discovery.sources import warn_about_other_hosts

    return warn_about_other_hosts(hosts, rank, environ, hostname)


def make_cluster(found: HostList) -> Cluster:
    """Returns the hosts of a job without resourceconfig.json.

    The name of its network interface is empty: `choose_interface` then takes the one of the route to the hosts.
    """
    config = {"current_host": found.current_host, "hosts": list(found.hosts)}
    return Cluster(found.current_host, found.hosts, "", "local", "homogeneousCluster", config, found)


def _assume_one_host(paths: Paths, hostname: str) -> HostList:
    note = f"no {RESOURCE_CONFIG} in {paths.config}: a single host is assumed"
    evidence = f"no {RESOURCE_CONFIG}, and no variables of a platform: a single host is assumed"
    return HostList("none", (hostname,), 0, evidence, warnings=(note,))


def read_framework(paths: Paths, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the hyperparameters in LAUNCHER_KEYS, decoded; none without a file.

    Raises ContractError if it can't be read.
    """
    raw = _read_hyperparameters(paths, environ) or {}
    return {key: decode(value) for key, value in raw.items() if key in LAUNCHER_KEYS}


def read_job(
    paths: Paths, cluster: Cluster, environ: Mapping[str, str], extra_args: tuple[str, ...], fetch: bool = True
) -> Job:
    """Reads the rest of the contract, fetches the code, and returns the job.

    For an installed module it makes the code directory if that is missing.

    Args:
        paths: The directories of the job.
        cluster: Its hosts.
        environ: The environment of `train`.
        extra_args: Arguments for the script from the command line of `train`.
        fetch: False to change no file: code that is elsewhere is not fetched.

    Raises:
        ContractError: If the configuration is wrong or incomplete.
        LaunchError: If the code can't be fetched.
    """
    raw = _read_hyperparameters(paths, environ)
    decoded = _decode_all(raw)
    reserved = {key for key in decoded if key in TOOLKIT_KEYS or key.startswith("sagemaker_")}
    toolkit = {key: decoded[key] for key in reserved if key in TOOLKIT_KEYS}
    region = _find_region(environ, toolkit)
    source = locate_code(environ, toolkit, paths.code)
    code = _get_code(source, paths, environ, region) if fetch else describe_without_fetching(source, paths.code)
    script = find_script(code, environ, toolkit)
    if fetch and script.needs_no_code:
        make_code_directory(code)
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
        metrics=_read_metrics(paths, code, toolkit),
        entry_notes=describe_entry(code, script, environ),
    )


def _get_code(source: CodeSource, paths: Paths, environ: Mapping[str, str], region: str) -> Code:
    if source.in_place:
        return inspect_code(source.address)
    from shoal_toolkit.job.fetching import fetch_code  # the SDK's jobs fetch their code, others bring it

    return fetch_code(source, paths.code, {**environ, "SAGEMAKER_REGION": region})


def decode(value: Any) -> Any:
    """Returns the JSON value in a hyperparameter's string; the string itself if it is not JSON.

    Other values are returned as they are.

    >>> decode("1.10"), decode("null"), decode("adam"), decode('"a b"')
    (1.1, None, 'adam', 'a b')
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_flag(settings: Mapping[str, Any], key: str) -> bool:
    """Returns a true/false hyperparameter. true, "true", "True" (SDK 1.x), "\\"true\\"" and 1 are true.

    false, "false", 0, null, "none", an empty text and an absent one are false.

    Args:
        settings: The hyperparameters.
        key: The name of one.

    Raises:
        ContractError: If it has any other value.
    """
    value = settings.get(key)
    if value is None or value is True or value is False:
        return bool(value)
    word = str(value).strip().strip('"').lower()
    if word in ("true", "1"):
        return True
    if word in ("false", "0", "", "none", "null"):
        return False
    raise ContractError(f"{HYPERPARAMETERS}: {key} is {value!r}; allowed are true and false. Fix: set one of them.")


def read_count(settings: Mapping[str, Any], key: str) -> int | None:
    """Returns a hyperparameter that is a whole number of at least 1; None if it is absent, null or empty.

    Args:
        settings: The hyperparameters.
        key: The name of one.

    Raises:
        ContractError: If it has any other value.
    """
    value = settings.get(key)
    if value is None or value == "":
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise ContractError(
            f"{HYPERPARAMETERS}: {key} is {value!r}; it must be a whole number of at least 1. Fix: set it so."
        )
    return int(text)


def read_all_hyperparameters(paths: Paths, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the hyperparameters of the job, decoded, also the reserved ones. Raises ContractError."""
    return _decode_all(_read_hyperparameters(paths, environ))


def _decode_all(raw: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: decode(value) for key, value in (raw or {}).items()}


def _read_hyperparameters(paths: Paths, environ: Mapping[str, str]) -> dict[str, Any] | None:
    raw = _read_object(os.path.join(paths.config, HYPERPARAMETERS))
    settings = environ.get(SDK_HYPERPARAMETERS)
    return {**(raw or {}), **json.loads(settings)} if settings else raw


def _read_metrics(paths: Paths, code: Code, toolkit: Mapping[str, Any]) -> tuple[MetricPattern, ...]:
    listed = toolkit.get("sagemaker_metric_definitions")
    files = (os.path.join(directory, "metrics.json") for directory in (paths.config, code.directory))
    if listed is None and not any(map(os.path.isfile, files)):
        return ()
    # Most jobs have none, and start faster without this module.
    from shoal_toolkit.job.metrics import read_metric_definitions

    return read_metric_definitions(paths.config, code.directory, listed)


def _read_object(path: str) -> dict[str, Any] | None:
    """Returns the JSON object in a file, None if there is no file. Raises ContractError if it holds anything else."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            value = json.load(file)
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ContractError(
            f"{path}, line {error.lineno}, column {error.colno}: this is not JSON ({error.msg}). "
            'Fix: write one JSON object, such as {"key": "value"}.'
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}. Fix: write a JSON object, in UTF-8, that this user can read."
        ) from None
    if not isinstance(value, dict):
        raise ContractError(
            f"{path}, line 1: the file holds a JSON {_name_json_type(value)}, and must hold an object. "
            'Fix: write one, such as {"key": "value"}.'
        )
    return value


def _name_json_type(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]


def _read_hosts(config: Mapping[str, Any], path: str) -> tuple[str, ...]:
    hosts = config.get("hosts")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ContractError(f'{path}: hosts is {hosts!r}. Fix: write a list of host names, such as ["algo-1"].')
    if len(set(hosts)) != len(hosts):
        raise ContractError(f"{path}: hosts names a host twice: {hosts}. Fix: name each host once.")
    return tuple(hosts)


def _find_region(environ: Mapping[str, str], toolkit: Mapping[str, Any]) -> str:
    named = (environ.get(name) for name in ("SAGEMAKER_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"))
    return str(toolkit.get("sagemaker_region") or next(filter(None, named), ""))
