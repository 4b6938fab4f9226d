"""A published name that is not implemented. It can be imported, and raises an error when used."""

from __future__ import annotations

from typing import Any, NoReturn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError


def prepare_optimizer(*_: Any, **__: Any) -> NoReturn:
    """Not implemented (AWS API 1.6). Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(
        "smp.prepare_optimizer is not implemented: AWS has not published its effect. Fix: use smp.DistributedOptimizer."
    )
