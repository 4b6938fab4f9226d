"""State dicts between Hugging Face's names and the names of tensor-parallel modules.

No module is tensor-parallel here. So a model's state dict always has Hugging Face's names, and both translations return
it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

_OF_TENSORS = "seq_layers"
"""Part of every name of a layer in a tensor-parallel transformer."""

_StateDict = TypeVar("_StateDict", bound=Mapping[str, Any])


def same_names(name: str) -> Callable[..., Any]:
    """Makes the published function of that name. It returns a state dict itself, and refuses tensor-parallel names."""

    def translate(state_dict: _StateDict, max_seq_len: int | None = None) -> _StateDict:
        if any(_OF_TENSORS in key for key in state_dict):
            raise SMPUnsupportedError(
                f"{name}: the state dict is of a tensor-parallel model (its keys have {_OF_TENSORS!r}), which is not "
                "implemented. Fix: translate it to Hugging Face's names in the job that trained it."
            )
        return state_dict

    translate.__name__ = translate.__qualname__ = name
    translate.__doc__ = f"Gives `state_dict` as it is: see {__name__}. Raises SMPUnsupportedError for other names."
    return translate
