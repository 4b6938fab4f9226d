"""The loss scale: losses are multiplied by it so that half-precision gradients do not underflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smdistributed.core.options import did_you_mean
from smdistributed.modelparallel.backend.exceptions import SMPConfigError

_DYNAMIC = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class LossScale:
    """A static scale, or a dynamic one that depends on overflows of gradients.

    Args:
        static: The scale, unless it is dynamic. With a static scale, overflows are not detected.
        dynamic: Whether the scale is divided by `scale_factor` when gradients overflow, down to `min_scale`, and
            multiplied by it after `scale_window` steps without an overflow.
        arguments: Any of `init_scale`, `scale_factor`, `scale_window`, `min_scale`, `delayed_shift` and
            `consecutive_hysteresis`. `delayed_shift`: the scale shrinks at this many overflows. They are counted since
            it last grew; with `consecutive_hysteresis`, since the last step without an overflow.

    Raises:
        SMPConfigError: If `arguments` has an unknown name, or a value that is not allowed.
    """

    def __init__(self, static: float | None, dynamic: bool, arguments: Mapping[str, Any] | None) -> None:
        self._args = {**_DYNAMIC, **_checked(arguments or {})}
        self.is_dynamic, self._good_steps = dynamic, 0
        self._hysteresis = int(self._args["delayed_shift"])
        self.value = float(self._args["init_scale"] if dynamic else 1.0 if static is None else static)

    def update(self, overflow: bool) -> None:
        """Adapts a dynamic scale to the last step. `overflow`: whether its gradients overflowed.

        It falls after several overflows (`delayed_shift`), and rises after `scale_window` good steps. A static one
        stays.
        """
        if not self.is_dynamic:
            return
        if overflow:
            self._good_steps = 0
            if self._hysteresis > 1:
                self._hysteresis -= 1
            else:
                self.value = max(self.value / self._args["scale_factor"], self._args["min_scale"])
            return
        self._good_steps += 1
        grows = self._good_steps % self._args["scale_window"] == 0
        if grows or self._args["consecutive_hysteresis"]:
            self._hysteresis = int(self._args["delayed_shift"])
        if grows:
            self.value *= self._args["scale_factor"]

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and its counters, for a checkpoint: `value`, `good_steps` and `hysteresis`."""
        return {"value": self.value, "good_steps": self._good_steps, "hysteresis": self._hysteresis}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. A static scale stays as the script set it."""
        if self.is_dynamic:
            self.value, self._good_steps = saved["value"], saved["good_steps"]
            self._hysteresis = saved.get("hysteresis", self._hysteresis)


def _checked(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments. Raises SMPConfigError for an unknown name or a value that is not allowed."""
    for name, value in arguments.items():
        if name not in _DYNAMIC:
            hint = did_you_mean(name, _DYNAMIC) or f" Allowed: {', '.join(_DYNAMIC)}."
            raise SMPConfigError(f"dynamic_loss_args has {name!r}, which is unknown.{hint}")
        least = 1 if name in ("scale_window", "delayed_shift") else 0
        if name != "consecutive_hysteresis" and not (isinstance(value, (int, float)) and value >= least):
            raise SMPConfigError(f"{name!r} of dynamic_loss_args is {value!r}: it must be a number from {least} on.")
    return arguments
