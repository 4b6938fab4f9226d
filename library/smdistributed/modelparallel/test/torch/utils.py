"""Names that AWS's BERT example imports but never calls. Only the names are published."""

from __future__ import annotations

from typing import Any, NoReturn

from smdistributed.modelparallel.backend.config import VERIFY_VARIABLE
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

__all__ = ["dump_model", "verify"]


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Not implemented: AWS publishes the name alone. Raises SMPUnsupportedError."""
    raise SMPUnsupportedError("dump_model is not implemented. Fix: save model.state_dict() with smp.save.")


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Not implemented: AWS publishes the name alone. Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(
        f"verify is not implemented. Fix: set {VERIFY_VARIABLE}=3 to have the first 3 steps compared with the same "
        "without stages."
    )
