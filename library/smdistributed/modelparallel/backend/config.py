"""The configuration: `mp_parameters` of the launch over the argument of `smp.init`, and variables.

The keys are AWS's, except `uneven_microbatches`. Some of AWS's have no effect and warn, or are refused.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from smdistributed.core.diagnostics import read_seconds
from smdistributed.core.options import did_you_mean, warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPUnsupportedError

LAUNCH_VARIABLE = "SM_HP_MP_PARAMETERS"
VERIFY_VARIABLE = "SMP_VERIFY_STEPS"
_WITHOUT_EFFECT_VARIABLES = {
    "SMP_NCCL_THROTTLE_LIMIT": "NCCL's operations are not limited",
    "SMP_DISABLE_D2D": "tensors pass between stages through the host's memory",
    "SMP_D2D_GPU_BUFFER_SIZE_BYTES": "tensors pass between stages through the host's memory",
    "SMP_ENABLE_CROSS_NODE_D2D": "tensors pass between stages through the host's memory",
}
"""Published variables that have no effect here, and the reason."""
PIPELINES = ("interleaved", "simple")
OPTIMIZE = ("memory", "speed")
PLACEMENTS = {"cluster": "DPT", "spread": "TPD", **{"".join(p): "".join(p) for p in itertools.permutations("DPT")}}
BACKENDS = ("auto", "nccl", "gloo", "smddp")
TIMEOUT_VARIABLE = "SMP_TIMEOUT_SECONDS"
_VARIABLES = (
    TIMEOUT_VARIABLE,
    VERIFY_VARIABLE,
    "SMP_TIMELINE",
    "SMP_TRUST_CHECKPOINTS",
    "SMP_VERSION",  # of AWS's images and notebooks
    *_WITHOUT_EFFECT_VARIABLES,
)
TIMEOUT_FIX = f"Fix: find out why it is slow; if it may take longer, set {TIMEOUT_VARIABLE} higher on all ranks."
"""The last sentence of every message about an exceeded limit."""
CONNECTION_LOST = (
    "connection lost (the process exited or its host is unreachable). Fix: look for the error that it reported itself."
)
_DEFAULT_SECONDS = 1800.0  # as in torch.distributed
_MEMORY_WEIGHTS = {"memory": 0.8, "speed": 0.2}
_ALIASES = {"partitions": "pipeline_parallel_degree"}


@dataclass(frozen=True)
class Config:
    """`mp_parameters`, checked. The attributes have the names that AWS documents."""

    pipeline_parallel_degree: int = 1
    microbatches: int = 1
    pipeline: str = "interleaved"
    optimize: str = "memory"
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int = 0
    memory_weight: float = 0.8
    active_microbatches: int = 3
    deterministic_server: bool = False
    ddp: bool = False
    ddp_port: int | None = None
    ddp_dist_backend: str = "auto"
    horovod: bool = False
    contiguous: bool = True
    xla: bool = False
    tensor_parallel_degree: int = 1
    prescaled_batch: bool = False
    tensor_parallel_seed: int = 0
    shard_optimizer_state: bool = False
    offload_activations: bool = False
    activation_loading_horizon: int = 4
    fp16: bool = False
    fp16_params: bool = False
    bf16: bool = False
    delayed_parameter_initialization: bool = False
    sharded_data_parallel_degree: int = 1
    sdp_reduce_bucket_size: int = 500_000_000
    sdp_max_live_parameters: int = 1_000_000_000
    sdp_gradient_clipping: float = 1.0
    skip_tracing: bool = False
    uneven_microbatches: bool = False
    """Ours: whether the sizes of microbatches may differ by one."""

    @property
    def partitions(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline_parallel_degree


_KEYS = {field.name: field for field in fields(Config)} | {"partitions": None}
_UNDOCUMENTED = "AWS has not published what it does"
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "fp16_params": (False, "'fp16' trains in half precision"),
    "contiguous": (True, "every stage has modules that follow each other"),
    "xla": (False, "it concerns TensorFlow"),
    "checkpoint_attentions": (False, "smp.set_activation_checkpointing works for any module"),
    "load_partition": (False, "the model is cut by a trace, and a checkpoint keeps the cut"),
    "partition_file": ("", "the model is cut by a trace, and a checkpoint keeps the cut"),
    "static_mode": (False, _UNDOCUMENTED),
    "fast_mode": (False, _UNDOCUMENTED),
    "fork": (False, _UNDOCUMENTED),
    "_match_weights": (False, _UNDOCUMENTED),
    "_prescaled_batch": (False, _UNDOCUMENTED),
    "_fp32_grad_accumulation": (False, f"{_UNDOCUMENTED}. Gradients have the dtype of their parameters"),
    "sdp_param_persistence_threshold": (1e6, "torch's FSDP2 splits parameters of any size"),
    "sdp_hierarchical_allgather": (True, "the backend of the process group decides how parts are gathered"),
}
"""Published keys that have no effect here: their default, which does not warn, and the reason."""
_MINIMUM = {
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "active_microbatches": 1,
    "tensor_parallel_degree": 1,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 1,
    "sdp_max_live_parameters": 2,
    "activation_loading_horizon": 1,
}
_NEEDS = {
    "sdp_reduce_bucket_size": "sharded_data_parallel_degree",
    "sdp_max_live_parameters": "sharded_data_parallel_degree",
    "sdp_gradient_clipping": "sharded_data_parallel_degree",
    "activation_loading_horizon": "offload_activations",
    "prescaled_batch": "tensor_parallel_degree",
    "tensor_parallel_seed": "tensor_parallel_degree",
}
"""Keys that have an effect beside another key only."""
_VALUE_FIX = "Fix: set one of these, or leave the key out."
_CHOICES = {
    "pipeline": PIPELINES,
    "optimize": OPTIMIZE,
    "placement_strategy": tuple(PLACEMENTS),
    "ddp_dist_backend": BACKENDS,
}


def read_config(argument: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Config:
    """Returns the configuration, with defaults. SM_HP_MP_PARAMETERS wins.

    Warns of keys and variables that have no effect here, and of unknown variables that begin with `SMP_`.
    Raises SMPConfigError if `partitions` is missing, a key is unknown, or values are wrong or contradict each other.
    Raises SMPUnsupportedError for keys that are not implemented.
    """
    _warn_of_variables(environ)
    launched: Any = {}
    text = environ.get(LAUNCH_VARIABLE)
    if text is not None:
        try:
            launched = json.loads(text)
        except ValueError as error:
            raise SMPConfigError(
                f'{LAUNCH_VARIABLE}={text!r} is not JSON: {error}. Fix: write an object, {{"partitions": 2}}.'
            ) from None
    return check({**_resolve_aliases(argument or {}), **_resolve_aliases(launched)})


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    for name in environ:
        if name in _WITHOUT_EFFECT_VARIABLES:
            warn_without_effect(f"The variable {name}", _WITHOUT_EFFECT_VARIABLES[name])
        elif name.startswith("SMP_") and name not in _VARIABLES:
            near = difflib.get_close_matches(name, _VARIABLES, 1)
            known = f"The most similar one is {near[0]}" if near else f"Known: {', '.join(sorted(_VARIABLES))}"
            warn_without_effect(f"The variable {name}", f"it is unknown. {known}")


def _resolve_aliases(given: Any) -> dict[str, Any]:
    """Uses one name for keys that have two. Raises SMPConfigError if their values differ, or it is not a mapping."""
    if not isinstance(given, Mapping):
        raise SMPConfigError(f"mp_parameters must be a mapping of names to values, not {given!r}. Fix: pass a dict.")
    known = dict(given)
    for alias, name in _ALIASES.items():
        if alias in known:
            value = known.pop(alias)
            if known.setdefault(name, value) != value:
                raise SMPConfigError(
                    f"{alias!r} is {value!r} and {name!r} is {known[name]!r}: they mean the same. Fix: give one of "
                    "them."
                )
    return known


def read_verify_steps(environ: Mapping[str, str]) -> int:
    """Returns how many steps to run again without stages; default: 0. Raises SMPConfigError if it is not a number."""
    text = environ.get(VERIFY_VARIABLE) or "0"
    if not text.isdecimal():
        raise SMPConfigError(
            f"{VERIFY_VARIABLE} is {text!r}. Allowed: 0 or more, the number of steps to verify. Fix: set one, or "
            "unset it."
        )
    return int(text)


def check(given: dict[str, Any]) -> Config:
    """Checks `mp_parameters` and fills in defaults. Warns and raises as `read_config` does."""
    given = _resolve_aliases(given)
    _check_names(given)
    known = {name: value for name, value in given.items() if name in _KEYS}
    if "pipeline_parallel_degree" not in known:
        raise SMPConfigError(
            "'partitions' is a required parameter. Fix: set it to the number of stages; 1 cuts nothing."
        )
    values = {name: _typed(name, value) for name, value in known.items()}
    stages = values["pipeline_parallel_degree"]
    values.setdefault("memory_weight", _MEMORY_WEIGHTS[values.get("optimize", "memory")])
    values.setdefault("active_microbatches", stages + 2)
    _check_together(values)
    if values.get("sharded_data_parallel_degree", 1) > 1:
        _check_sharded(values)
        values["active_microbatches"] = 1  # torch's FSDP2 follows one forward and backward at a time
    if values.get("tensor_parallel_degree", 1) > 1:
        _check_tensor_parallelism(values, given)
    for name, needed in _NEEDS.items():
        if _is_default(needed, values) and not _is_default(name, values):
            warn_without_effect(f"{name!r} of mp_parameters", f"it is for {needed!r}, which is not set")
    for name, (neutral, why) in _WITHOUT_EFFECT.items():
        if name in given and {**given, **values}[name] != neutral:
            warn_without_effect(f"{name!r} of mp_parameters", why)
    return Config(**values)


def _is_default(name: str, values: Mapping[str, Any]) -> bool:
    default = _KEYS[name].default  # type: ignore[union-attr]
    return bool(values.get(name, default) == default)


def _check_names(given: Mapping[str, Any]) -> None:
    known = {*_KEYS, *_WITHOUT_EFFECT}
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f" Known: {', '.join(sorted(known))}."
            raise SMPConfigError(f"mp_parameters has an unknown key, {name!r}.{hint} Fix: correct it, or leave it out.")


def _typed(name: str, value: Any) -> Any:
    """Raises SMPConfigError for another type, range or choice. Texts count for booleans only: true and false."""
    default = _KEYS[name].default  # type: ignore[union-attr]
    kind = int if default is None else type(default)
    if kind is bool:
        return _boolean(name, value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _fraction(name, value)
    if name in _NEEDS and isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e8
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if value < _MINIMUM.get(name, 0):
            raise SMPConfigError(f"{name!r} is {value}. Allowed: {_MINIMUM.get(name, 0)} or more. {_VALUE_FIX}")
        return value
    if kind is str and isinstance(value, str):
        allowed = _CHOICES[name]
        if value not in allowed:
            raise SMPConfigError(f"{name!r} is {value!r}. Allowed: {', '.join(map(repr, allowed))}. {_VALUE_FIX}")
        return value
    names = {int: "an integer", float: "a number", str: "a string"}
    raise SMPConfigError(f"{name!r} is {value!r}. Allowed: {names[kind]}. {_VALUE_FIX}")


def _fraction(name: str, value: float) -> float:
    """Raises SMPConfigError for another range."""
    if name == "memory_weight" and not 0.0 <= value <= 1.0:
        raise SMPConfigError(f"memory_weight must be between 0.0 and 1.0! It is {value!r}. {_VALUE_FIX}")
    if not value >= 0.0:
        raise SMPConfigError(f"{name!r} is {value!r}. Allowed: 0, for none, or more. {_VALUE_FIX}")
    return float(value)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise SMPConfigError(f"{name!r} is {value!r}. Allowed: true or false. {_VALUE_FIX}")


def _check_together(values: Mapping[str, Any]) -> None:
    """Raises SMPConfigError if values contradict each other, and SMPUnsupportedError for refused keys."""
    stages = values["pipeline_parallel_degree"]
    if not values.get("auto_partition", True) and "default_partition" not in values:
        raise SMPConfigError(
            "default_partition must be supplied if auto_partition is set to False! Fix: set it to a stage, from 0."
        )
    if values.get("default_partition", 0) >= stages:
        raise SMPConfigError(
            "default_partition must be less than the number of partitions! "
            f"It is {values['default_partition']}, of {stages}. Fix: set it to {stages - 1} or less."
        )
    if "ddp_port" in values and not values.get("ddp"):
        raise SMPConfigError(
            "`ddp_port` needs `ddp` to be set as well. Fix: set 'ddp' to true, or leave 'ddp_port' out."
        )
    if values.get("ddp") and values.get("horovod"):
        raise SMPConfigError("'ddp' and 'horovod' cannot be simultaneously enabled. Fix: leave one out.")
    if values.get("fp16") and values.get("bf16"):
        raise SMPConfigError("'fp16' and 'bf16' cannot be simultaneously enabled. Fix: leave one out.")


def _check_sharded(values: Mapping[str, Any]) -> None:
    """Raises SMPUnsupportedError for keys beside `sharded_data_parallel_degree`, as AWS's library."""
    for name, neutral in (
        ("pipeline_parallel_degree", 1),
        ("shard_optimizer_state", False),
    ):
        if values.get(name, neutral) != neutral:
            raise SMPUnsupportedError(
                f"{name!r} is {values[name]!r}, and 'sharded_data_parallel_degree' is above 1: they are exclusive. "
                f"Fix: set {name!r} to {neutral!r}, or 'sharded_data_parallel_degree' to 1."
            )


def _check_tensor_parallelism(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises SMPConfigError without `ddp`. Warns of a key that has less effect than in AWS's library."""
    if not values.get("ddp"):
        raise SMPConfigError(
            "'tensor_parallel_degree' needs 'ddp' to be set as well: the ranks that share tensors are replicas for "
            "other modules. Fix: set 'ddp' to true."
        )
    if "optimize" in given:
        why = "each rank has whole states of its rows there"
        warn_without_effect("'optimize' of mp_parameters between layers that are split", why)


def timeout_seconds() -> float:
    """Returns SMP_TIMEOUT_SECONDS, the limit of each wait; default: 1800. Raises CollectiveError if not above 0."""
    return read_seconds(TIMEOUT_VARIABLE, _DEFAULT_SECONDS)
