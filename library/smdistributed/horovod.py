"""Which modules of this library replace Horovod's for TensorFlow in a rehearsal, if Horovod is not installed.

`shoal_rehearsal` finds this by the entry point in pyproject.toml.
"""

from __future__ import annotations

import sys

_DATA_PARALLEL = "smdistributed.dataparallel.tensorflow"
_MODEL_PARALLEL = "smdistributed.modelparallel.tensorflow"
_REPLACEMENTS = {
    "horovod.keras": f"{_DATA_PARALLEL}.horovod.keras",
    "horovod.tensorflow": f"{_DATA_PARALLEL}.horovod",
    "horovod.tensorflow.keras": f"{_DATA_PARALLEL}.horovod.keras",
    "horovod.tensorflow.keras.callbacks": f"{_DATA_PARALLEL}.keras.callbacks",
}


def find_replacement(module: str) -> str | None:
    """Returns the name of the module that replaces one of Horovod's, or None if there is none.

    Args:
        module: The name that the script imports, such as `horovod.tensorflow`.
    """
    if module == "horovod.tensorflow" and _MODEL_PARALLEL in sys.modules:
        return f"{_MODEL_PARALLEL}.horovod"
    return _REPLACEMENTS.get(module)
