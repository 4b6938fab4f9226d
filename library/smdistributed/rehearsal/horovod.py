"""`horovod.tensorflow` where it is not installed: published scripts for model parallelism import it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from smdistributed.rehearsal.settings import is_asked_for

_STAND_IN = "smdistributed.modelparallel.tensorflow.horovod"


class Finder(Loader):
    """Asked after all others, so that one that is installed is found first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ("horovod", "horovod.tensorflow") or not is_asked_for():
            return None
        return spec_from_loader(name, self, is_package=name == "horovod")

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "horovod.tensorflow":
            print(f"SHOAL REHEARSAL: horovod is not installed, {_STAND_IN} stands in for it.", file=sys.stderr)
            vars(module).update({k: v for k, v in vars(import_module(_STAND_IN)).items() if not k.startswith("__")})
