"""Names that AWS's BERT example imports from AWS's own tests, but never calls. Only the names are published.

Their module is `smdistributed.modelparallel.test.torch.utils`: importing this one makes it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from smdistributed.modelparallel.backend.config import VERIFY_VARIABLE
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

__path__: list[str] = []
"""Makes this a package, of modules that no file holds."""


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Not implemented: AWS publishes the name alone. Raises SMPUnsupportedError."""
    raise SMPUnsupportedError("dump_model is not implemented. Fix: save model.state_dict() with smp.save.")


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Not implemented: AWS publishes the name alone. Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(
        f"verify is not implemented. Fix: set {VERIFY_VARIABLE}=3 to have the first 3 steps compared with the same "
        "without stages."
    )


torch, utils = (ModuleType(f"{__name__}.{name}", __doc__) for name in ("torch", "torch.utils"))
vars(utils).update(dump_model=dump_model, verify=verify, __all__=["dump_model", "verify"])
vars(torch).update(utils=utils, __path__=[])
sys.modules.update({module.__name__: module for module in (torch, utils)})
