"""Converts the `distribution` argument of an estimator to hyperparameters, as the SageMaker Python SDK 2.257 does.

It also reads that argument from the command line, and sets the number of MPI ranks in it, for `--procs-per-host`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import UsageError, did_you_mean

_INSTANCE_TYPE = "local"
_SWITCHES = {
    "parameter_server": "sagemaker_parameter_server_enabled",
    "multi_worker_mirrored_strategy": "sagemaker_multi_worker_mirrored_strategy_enabled",
    "torch_distributed": "sagemaker_torch_distributed_enabled",
}
_TORCH = "torch_distributed"
_RANK_OPTIONS = {
    "mpi": ("enabled", "processes_per_host", "custom_mpi_options"),
    _TORCH: ("enabled", "processes_per_host"),
}
"""The launchers that start as many ranks as `processes_per_host`, with their options."""
_KEYS = ("mpi", "smdistributed", "pytorchddp", "instance_groups", *_SWITCHES)


def parse_distribution(text: str) -> dict[str, Any]:
    """Return the value of `--distribution`. Raises `UsageError`, with examples, unless it is a JSON object."""
    problem = f"expected a JSON object, found {text}"
    try:
        document = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("{"):  # otherwise the parser's words would not help
            problem = f"{text} is not JSON: {error}"
    else:
        if isinstance(document, dict):
            return document
    raise UsageError(
        f"--distribution: {problem}. Allowed keys: {', '.join(_KEYS)}. Fix: for torchrun, --distribution"
        """ '{"torch_distributed": {"enabled": true}}'; for mpirun, '{"mpi": {"enabled": true}}'"""
    )


def convert_distribution(distribution: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reserved hyperparameters for a `distribution`; values are not yet encoded as JSON.

    Args:
        distribution: May have the keys mpi, smdistributed, pytorchddp, torch_distributed, parameter_server,
            multi_worker_mirrored_strategy and instance_groups.

    Raises:
        UsageError: If the SDK does not know a key, or a value is of another type. Also if model and data parallelism
            are both enabled, or model parallelism without MPI.
    """
    _check_options(distribution, _KEYS, "distribution")
    values: dict[str, Any] = {}
    if "instance_groups" in distribution:
        values["sagemaker_distribution_instance_groups"] = distribution["instance_groups"]
    if "mpi" in distribution:
        values |= _convert_mpi(distribution["mpi"])
    if "pytorchddp" in distribution:  # since SDK 2.221, another name of the data-parallel library
        values |= _convert_smdistributed({"dataparallel": distribution["pytorchddp"]})
    if "smdistributed" in distribution:
        values |= _convert_smdistributed(
            distribution["smdistributed"], distribution.get("mpi", {}).get("enabled", False)
        )
    return values | _convert_switches(distribution)


def _convert_switches(distribution: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters for the launchers that are only enabled. Raises `UsageError` for unknown keys."""
    values: dict[str, Any] = {}
    for key, name in _SWITCHES.items():
        if key in distribution:
            _check_options(distribution[key], _RANK_OPTIONS.get(key, ("enabled",)), f"distribution.{key}")
            values[name] = bool(distribution[key].get("enabled", False))
    if _TORCH in distribution:
        values["sagemaker_instance_type"] = _INSTANCE_TYPE
        ranks = distribution[_TORCH].get("processes_per_host")
        if ranks and find_rank_launcher(distribution) == _TORCH:
            values["sagemaker_mpi_num_of_processes_per_host"] = ranks
    return values


def encode_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Encode each value as JSON, as the SDK does before it sends hyperparameters."""
    return {key: json.dumps(value) for key, value in values.items()}


def set_processes_per_host(distribution: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """Return `distribution` with `count` ranks per host, started by torchrun if it selects that, otherwise by MPI.

    None changes nothing.

    Raises:
        UsageError: If the launcher has another number, is disabled or has an unknown key. Also if another launcher is
            enabled, and there is no `mpi`.
    """
    if count is None:
        return dict(distribution)
    key = find_rank_launcher(distribution)
    others = {other for other in ("smdistributed", *_SWITCHES) if _is_enabled(distribution.get(other, {}))} - {key}
    options = distribution.get(key, {"enabled": not others})
    _check_options(options, _RANK_OPTIONS[key], f"distribution.{key}")
    if not options.get("enabled"):
        raise UsageError(
            f"--procs-per-host {count} starts MPI, but distribution selects another launcher or none. A launcher for "
            "data parallelism starts one rank per GPU. Fix: leave out --procs-per-host; on a machine without GPUs, "
            f"emulate them: --env SHOAL_REHEARSE=1 --env SHOAL_REHEARSE_GPUS={count}."
        )
    options = dict(options)
    own = options.setdefault("processes_per_host", count)
    if own != count:
        raise UsageError(
            f"--procs-per-host is {count}, but distribution.{key}.processes_per_host is {own}. Fix: remove one"
        )
    return {**distribution, key: options}


def find_rank_launcher(distribution: Mapping[str, Any]) -> str:
    """Return the key of the launcher for a number of ranks per host: `torch_distributed` if only that is enabled."""
    enabled = [key for key in _RANK_OPTIONS if _is_enabled(distribution.get(key, {}))]
    return _TORCH if enabled == [_TORCH] else "mpi"


def has_stages(distribution: Mapping[str, Any]) -> bool:
    """Return whether model parallelism divides the model into stages, or into a number that is not known yet."""
    options = distribution.get("smdistributed", {}).get("modelparallel", {})
    parameters = options.get("parameters", {})
    stages = parameters.get("pipeline_parallel_degree", parameters.get("partitions", 1))
    return bool(options.get("enabled")) and stages != 1


def _is_enabled(options: Mapping[str, Any]) -> bool:
    """Return whether these options select a launcher. Model parallelism is none: it runs under MPI."""
    if not isinstance(options, Mapping):
        return False
    return bool(options.get("enabled") or options.get("dataparallel", {}).get("enabled"))


def _convert_mpi(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters for the key `mpi`. Raises `UsageError` for an unknown key in it."""
    _check_options(options, ("enabled", "processes_per_host", "custom_mpi_options"), "distribution.mpi")
    values: dict[str, Any] = {"sagemaker_mpi_enabled": options.get("enabled", False)}
    if options.get("processes_per_host"):
        values["sagemaker_mpi_num_of_processes_per_host"] = options["processes_per_host"]
    return values | {"sagemaker_mpi_custom_mpi_options": options.get("custom_mpi_options", "")}


def _convert_smdistributed(options: Mapping[str, Any], mpi: bool = False) -> dict[str, Any]:
    """Return the hyperparameters that the SageMaker SDK sends for the key `smdistributed`.

    Raises `UsageError` for unknown keys, for both libraries at once, and for modelparallel without MPI (`mpi`).
    """
    if isinstance(options, Mapping) and {"enabled", "parameters"} & set(options):  # a mistake in AWS's guide
        library = "modelparallel" if "parameters" in options else "dataparallel"
        options_json = ", ".join(f'"{key}": ...' for key in options)
        raise UsageError(
            f"distribution.smdistributed: {', '.join(map(repr, options))} must be nested under the name of a library. "
            f'Fix: "smdistributed": {{"{library}": {{{options_json}}}}}'
        )
    _check_options(options, ("dataparallel", "modelparallel"), "distribution.smdistributed")
    data, model = options.get("dataparallel", {}), options.get("modelparallel", {})
    _check_options(data, ("enabled", "custom_mpi_options"), "distribution.smdistributed.dataparallel")
    _check_options(model, ("enabled", "parameters"), "distribution.smdistributed.modelparallel")
    enabled = data.get("enabled", False)
    if enabled and model.get("enabled"):
        raise UsageError(
            'Using "modelparallel" and "dataparallel" in one job is not supported. Fix: disable one of them.'
        )
    if model.get("enabled") and not mpi:
        raise UsageError(
            'smdistributed.modelparallel needs MPI. Fix: add "mpi": {"enabled": true, "processes_per_host": N}.'
        )
    values: dict[str, Any] = {}
    if model.get("enabled") and model.get("parameters"):
        values["mp_parameters"] = model["parameters"]
    values |= {"sagemaker_distributed_dataparallel_enabled": enabled, "sagemaker_instance_type": _INSTANCE_TYPE}
    if enabled:
        values["sagemaker_distributed_dataparallel_custom_mpi_options"] = data.get("custom_mpi_options", "")
    return values


def _check_options(options: object, allowed: tuple[str, ...], where: str) -> None:
    """Raise `UsageError` unless `options` is a dictionary with no keys but these, and its `enabled` a boolean."""
    if not isinstance(options, Mapping):
        raise UsageError(f"{where}: expected a dictionary, found {options!r}")
    for key in options:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise UsageError(f"{where}: unknown key {key!r}.{hint} Allowed: {', '.join(allowed)}")
    if not isinstance(enabled := options.get("enabled", False), bool):
        raise UsageError(f"{where}.enabled: expected true or false, found {enabled!r}")
