"""Makes the backend `smddp` known to a script that only names it, such as `init_process_group("smddp")`.

torch 2.5 and later call `announce` at the end of `import torch`, through the entry point `torch.backends`. Earlier ones
do not: there the script imports `smdistributed.dataparallel.torch.torch_smddp` itself. As for all plugins of torch,
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

_MODULE = "smdistributed.dataparallel.torch.torch_smddp"
_MAKE = "_new_process_group_helper"


def announce() -> None:
    """Wraps torch's helper that creates groups. Nothing else of this library is imported before a group needs it."""
    from torch.distributed import distributed_c10d, is_available

    if is_available():
        make = getattr(distributed_c10d, _MAKE)
        setattr(distributed_c10d, _MAKE, _import_before(make, distributed_c10d))


def _import_before(make: Any, module: Any) -> Any:
    """Returns the helper, which imports this library if the requested backend is `smddp`, alone or for a device."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_after_import(*args: Any, **kwargs: Any) -> Any:
        requested = str(signature.bind(*args, **kwargs).arguments.get("backend"))
        if "smddp" not in requested.lower() or getattr(module, _MAKE) is not make_after_import:
            return make(*args, **kwargs)
        importlib.import_module(_MODULE)  # its wrapper is outside this one from now on
        return getattr(module, _MAKE)(*args, **kwargs)

    return make_after_import
