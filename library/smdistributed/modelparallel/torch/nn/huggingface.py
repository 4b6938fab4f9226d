"""Hugging Face's models and tensor parallelism, which is not implemented: names in state dicts (AWS API 1.7).

No module is tensor-parallel here. So a model's state dict always has Hugging Face's names, and both translations return
it unchanged. `TRANSLATIONS` lists AWS's modules, which can be imported, and their functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

TRANSLATIONS = {
    "bert": "hf_state_dict_to_smdistributed hf_state_dict_to_smdistributed_bert state_dict_to_hf_bert",
    "gpt2": "hf_state_dict_to_smdistributed hf_state_dict_to_smdistributed_gpt2 state_dict_to_hf_gpt2",
    "gptj": (
        "hf_gptj_state_dict_to_smdistributed hf_gptj_state_dict_to_smdistributed_gptj "
        "hf_state_dict_to_smdistributed_gptj state_dict_to_hf_gptj"
    ),
    "gptneo": "hf_state_dict_to_smdistributed_gptneo state_dict_to_hf_gptneo",
    "roberta": (
        "hf_state_dict_to_smdistributed hf_state_dict_to_smdistributed_roberta "
        "state_dict_to_hf_roberta state_dict_to_smdistributed"
    ),
}
"""The functions of each module, without `translate_` before the name."""
__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
_OF_TENSORS = "seq_layers"
"""Part of every name of a layer in a tensor-parallel transformer."""

_StateDict = TypeVar("_StateDict", bound=Mapping[str, Any])


def _make_translation(name: str) -> Callable[..., Any]:
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


def _make_module(name: str, functions: str) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}", f"State dicts of a model: see {__name__}.")
    for function in functions.split():
        setattr(module, f"translate_{function}", _make_translation(f"translate_{function}"))
    sys.modules[module.__name__] = module
    return module


bert, gpt2, gptj, gptneo, roberta = (_make_module(name, functions) for name, functions in TRANSLATIONS.items())
