"""Converts the `distribution` argument of an estimator to hyperparameters, as the SageMaker Python SDK 2.257 does.

It also reads that argument from the command line, and sets the number of MPI ranks in it, for `--procs-per-host`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from shoal.errors import UsageError, did_you_mean
from shoal.matrix import project

_INSTANCE_TYPE = "local"
_RANKS = "processes_per_host"
_DEFAULT = "mpi"
"""The launcher for a number of ranks if no other is enabled. The SDK sends its options even if it is disabled."""


class _Launcher(NamedTuple):
    """A launcher of `train`, under one of its names in `distribution`."""

    key: str
    """The hyperparameter that selects it."""
    options: Mapping[str, str]
    """Its options in `distribution`, and the hyperparameter for each."""
    sends_instance_type: bool
    by_mpirun: bool

    @property
    def allowed(self) -> tuple[str, ...]:
        return ("enabled", *self.options)


@cache
def read_launcher_table() -> dict[str, Any]:
    """Returns the toolkit's table of launchers and of the commands that people type for them."""
    # A table that is data: the package of the toolkit may not be imported here.
    path = project.find_shipped().root / "toolkit" / "shoal_toolkit" / "data" / "launchers.json"
    table: dict[str, Any] = json.loads(path.read_text())
    return table


@cache
def _read_launchers() -> dict[str, _Launcher]:
    table = read_launcher_table()["launchers"]
    return {
        name: _Launcher(entry["key"], options, entry.get("sends_instance_type", False), entry.get("ranks") == "mpirun")
        for entry in table.values()
        for name, options in entry.get("distribution", {}).items()
    }


def _list_keys() -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(name.partition(".")[0] for name in _read_launchers()), "instance_groups"]))


def parse_distribution(text: str) -> dict[str, Any]:
    """Returns the value of `--distribution`. Raises `UsageError`, with examples, unless it is a JSON object."""
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
        f"--distribution: {problem}. Allowed keys: {', '.join(_list_keys())}. Fix: for torchrun, --distribution"
        """ '{"torch_distributed": {"enabled": true}}'; for mpirun, '{"mpi": {"enabled": true}}'"""
    )


def convert_distribution(distribution: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the reserved hyperparameters for a `distribution`; values are not yet encoded as JSON.

    Args:
        distribution: May have the keys mpi, smdistributed, pytorchddp, torch_distributed, parameter_server,
            multi_worker_mirrored_strategy and instance_groups.

    Raises:
        UsageError: If the SDK does not know a key, or a value is of another type. Also if model and data parallelism
            are both enabled, or model parallelism without MPI.
    """
    _check_options(distribution, _list_keys(), "distribution")
    values: dict[str, Any] = {}
    if "instance_groups" in distribution:
        values["sagemaker_distribution_instance_groups"] = distribution["instance_groups"]
    if "smdistributed" in distribution:
        values |= _check_smdistributed(distribution["smdistributed"], distribution.get("mpi", {}).get("enabled", False))
    selected = find_rank_launcher(distribution)
    for name, launcher in _read_launchers().items():
        options = _find_options(distribution, name)
        if options is None:
            continue
        _check_options(options, launcher.allowed, f"distribution.{name}")
        values |= _convert_launcher(launcher, options, is_default=name == _DEFAULT, counts=name in (_DEFAULT, selected))
    return values


def _convert_launcher(
    launcher: _Launcher, options: Mapping[str, Any], *, is_default: bool, counts: bool
) -> dict[str, Any]:
    """Returns the hyperparameters for a launcher. The number of ranks is one only if `counts`."""
    enabled = options.get("enabled", False)
    values = {launcher.key: enabled}
    if launcher.sends_instance_type:
        values["sagemaker_instance_type"] = _INSTANCE_TYPE
    for option, hyperparameter in launcher.options.items():
        if option == _RANKS:
            if options.get(option) and counts:
                values[hyperparameter] = options[option]
        elif enabled or is_default:
            values[hyperparameter] = options.get(option, "")
    return values


def _find_options(distribution: Mapping[str, Any], name: str) -> Any:
    """Returns the options of a launcher, None without any. The key smdistributed has the libraries below it."""
    key, _, library = name.partition(".")
    options = distribution.get(key)
    if library and key in distribution:
        return options.get(library, {}) if isinstance(options, Mapping) else {}
    return options


def encode_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Encodes each value as JSON, as the SDK does before it sends hyperparameters."""
    return {key: json.dumps(value) for key, value in values.items()}


def set_processes_per_host(distribution: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """Returns `distribution` with `count` ranks per host, started by torchrun if it selects that, otherwise by MPI.

    None changes nothing.

    Raises:
        UsageError: If the launcher has another number, is disabled or has an unknown key. Also if another launcher is
            enabled, and there is no `mpi`.
    """
    if count is None:
        return dict(distribution)
    key = find_rank_launcher(distribution)
    others = [name for name in _read_launchers() if name != key and _is_enabled(distribution, name)]
    options = distribution.get(key, {"enabled": not others})
    _check_options(options, _read_launchers()[key].allowed, f"distribution.{key}")
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
    """Returns the key of the launcher for a number of ranks per host: the first that is enabled, otherwise `mpi`."""
    counting = (name for name, launcher in _read_launchers().items() if _RANKS in launcher.options)
    return next((name for name in counting if _is_enabled(distribution, name)), _DEFAULT)


def uses_mpirun(distribution: Mapping[str, Any]) -> bool:
    """Returns whether mpirun starts the ranks of this distribution."""
    return any(launcher.by_mpirun and _is_enabled(distribution, name) for name, launcher in _read_launchers().items())


def has_stages(distribution: Mapping[str, Any]) -> bool:
    """Returns whether model parallelism divides the model into stages, or into a number that is not known yet."""
    options = distribution.get("smdistributed", {}).get("modelparallel", {})
    parameters = options.get("parameters", {})
    stages = parameters.get("pipeline_parallel_degree", parameters.get("partitions", 1))
    return bool(options.get("enabled")) and stages != 1


def _is_enabled(distribution: Mapping[str, Any], name: str) -> bool:
    """Returns whether the options of the launcher `name` have a true `enabled`."""
    options = _find_options(distribution, name)
    return isinstance(options, Mapping) and bool(options.get("enabled"))


def _check_smdistributed(options: Mapping[str, Any], mpi: bool) -> dict[str, Any]:
    """Returns the hyperparameter for model parallelism, if enabled. `mpi`: whether MPI is."""
    if isinstance(options, Mapping) and {"enabled", "parameters"} & set(options):  # a mistake in AWS's guide
        library = "modelparallel" if "parameters" in options else "dataparallel"
        options_json = ", ".join(f'"{key}": ...' for key in options)
        raise UsageError(
            f"distribution.smdistributed: {', '.join(map(repr, options))} must be nested under the name of a library. "
            f'Fix: "smdistributed": {{"{library}": {{{options_json}}}}}'
        )
    _check_options(options, ("dataparallel", "modelparallel"), "distribution.smdistributed")
    data, model = options.get("dataparallel", {}), options.get("modelparallel", {})
    _check_options(
        data, _read_launchers()["smdistributed.dataparallel"].allowed, "distribution.smdistributed.dataparallel"
    )
    _check_options(model, ("enabled", "parameters"), "distribution.smdistributed.modelparallel")
    if data.get("enabled") and model.get("enabled"):
        raise UsageError(
            'Using "modelparallel" and "dataparallel" in one job is not supported. Fix: disable one of them.'
        )
    if model.get("enabled") and not mpi:
        raise UsageError(
            'smdistributed.modelparallel needs MPI. Fix: add "mpi": {"enabled": true, "processes_per_host": N}.'
        )
    return {"mp_parameters": model["parameters"]} if model.get("enabled") and model.get("parameters") else {}


def _check_options(options: object, allowed: tuple[str, ...], where: str) -> None:
    if not isinstance(options, Mapping):
        raise UsageError(f'{where}: expected a dictionary, found {options!r}. Fix: such as {{"enabled": true}}')
    for key in options:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise UsageError(f"{where}: unknown key {key!r}.{hint} Allowed: {', '.join(allowed)}. Fix: correct it")
    if not isinstance(enabled := options.get("enabled", False), bool):
        raise UsageError(f"{where}.enabled: expected true or false, found {enabled!r}. Fix: write it without quotes")
