"""The estimator's `distribution` dictionary → hyperparameters, as the SageMaker Python SDK 2.257 writes them."""

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
_KEYS = ("mpi", "smdistributed", "pytorchddp", "instance_groups", *_SWITCHES)


def hyperparameters(distribution: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reserved hyperparameters of a distribution, values not yet JSON-encoded.

    Raises `UsageError` for keys that the SDK does not know and for model and data parallelism in one job.
    """
    _check(distribution, _KEYS, "distribution")
    values: dict[str, Any] = {}
    if "instance_groups" in distribution:
        values["sagemaker_distribution_instance_groups"] = distribution["instance_groups"]
    if "mpi" in distribution:
        values |= _mpi(distribution["mpi"])
    if "pytorchddp" in distribution:  # the PyTorch estimator's other name for the data-parallel library, since 2.221
        values |= _smdistributed({"dataparallel": distribution["pytorchddp"]})
    if "smdistributed" in distribution:
        values |= _smdistributed(distribution["smdistributed"], distribution.get("mpi", {}).get("enabled", False))
    for key, name in _SWITCHES.items():
        if key in distribution:
            _check(distribution[key], ("enabled", "processes_per_host"), f"distribution.{key}")
            values[name] = bool(distribution[key].get("enabled", False))
            if key == "torch_distributed":
                values["sagemaker_instance_type"] = _INSTANCE_TYPE
    return values


def encode(values: Mapping[str, Any]) -> dict[str, str]:
    """JSON-encode every value once, as the SDK does before it sends hyperparameters."""
    return {key: json.dumps(value) for key, value in values.items()}


def with_processes_per_host(distribution: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """Return `distribution` with MPI started `count` times a host; None leaves it as it is.

    Raises `UsageError` when the dictionary itself says another number.
    """
    if count is None:
        return dict(distribution)
    others = {key for key in ("smdistributed", *_SWITCHES) if _is_enabled(distribution.get(key, {}))}
    mpi = distribution.get("mpi", {"enabled": not others})
    _check(mpi, ("enabled", "processes_per_host", "custom_mpi_options"), "distribution.mpi")
    if not mpi.get("enabled"):
        raise UsageError(
            f"--procs-per-host {count} starts MPI, but distribution asks for another launcher or none. A launcher for "
            "data parallelism has a rank for each GPU. Fix: leave --procs-per-host out; on a machine without GPUs, "
            f"emulate them: --env SHOAL_REHEARSE=1 --env SHOAL_REHEARSE_GPUS={count}."
        )
    mpi = dict(mpi)
    said = mpi.setdefault("processes_per_host", count)
    if said != count:
        raise UsageError(
            f"--procs-per-host {count}, but distribution.mpi.processes_per_host is {said}. Give one of them."
        )
    return {**distribution, "mpi": mpi}


def _is_enabled(options: Mapping[str, Any]) -> bool:
    """Whether a launcher is asked for; model parallelism is not one: it runs under MPI."""
    return bool(options.get("enabled") or options.get("dataparallel", {}).get("enabled"))


def _mpi(options: Mapping[str, Any]) -> dict[str, Any]:
    _check(options, ("enabled", "processes_per_host", "custom_mpi_options"), "distribution.mpi")
    values: dict[str, Any] = {"sagemaker_mpi_enabled": options.get("enabled", False)}
    if options.get("processes_per_host"):
        values["sagemaker_mpi_num_of_processes_per_host"] = options["processes_per_host"]
    return values | {"sagemaker_mpi_custom_mpi_options": options.get("custom_mpi_options", "")}


def _smdistributed(options: Mapping[str, Any], mpi: bool = False) -> dict[str, Any]:
    if isinstance(options, Mapping) and {"enabled", "parameters"} & set(options):  # as AWS's guide has it once
        library = "modelparallel" if "parameters" in options else "dataparallel"
        given = ", ".join(f'"{key}": ...' for key in options)
        raise UsageError(
            f"distribution.smdistributed: {', '.join(map(repr, options))} must be inside the key of a library. "
            f'Fix: "smdistributed": {{"{library}": {{{given}}}}}'
        )
    _check(options, ("dataparallel", "modelparallel"), "distribution.smdistributed")
    data, model = options.get("dataparallel", {}), options.get("modelparallel", {})
    _check(data, ("enabled", "custom_mpi_options"), "distribution.smdistributed.dataparallel")
    _check(model, ("enabled", "parameters"), "distribution.smdistributed.modelparallel")
    enabled = data.get("enabled", False)
    if enabled and model.get("enabled"):
        raise UsageError('Using "modelparallel" and "dataparallel" in one job is not supported: enable one of them.')
    if model.get("enabled") and not mpi:
        raise UsageError(
            'smdistributed.modelparallel needs MPI: add "mpi": {"enabled": true, "processes_per_host": N}.'
        )
    values: dict[str, Any] = {}
    if model.get("enabled") and model.get("parameters"):
        values["mp_parameters"] = model["parameters"]
    values |= {"sagemaker_distributed_dataparallel_enabled": enabled, "sagemaker_instance_type": _INSTANCE_TYPE}
    if enabled:
        values["sagemaker_distributed_dataparallel_custom_mpi_options"] = data.get("custom_mpi_options", "")
    return values


def _check(options: object, allowed: tuple[str, ...], where: str) -> None:
    if not isinstance(options, Mapping):
        raise UsageError(f"{where}: expected a dictionary, found {options!r}")
    for key in options:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise UsageError(f"{where}: unknown key {key!r}.{hint} Allowed: {', '.join(allowed)}")
    if not isinstance(enabled := options.get("enabled", False), bool):
        raise UsageError(f"{where}.enabled: expected true or false, found {enabled!r}")
