"""How a model is constructed: contexts of the published interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from smdistributed.modelparallel.torch.later import refuse


@contextmanager
def tensor_parallelism(enabled: bool = True, **_: Any) -> Iterator[None]:
    """Refuses to be enabled: see `later`. Disabled, it does nothing."""
    if enabled:
        refuse("smp.tensor_parallelism")
    yield


@contextmanager
def model_creation(tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **_: Any) -> Iterator[None]:
    """Construct a model inside `with`, with parameters of this dtype (AWS API 1.10)."""
    if tensor_parallelism:
        refuse("smp.model_creation(tensor_parallelism=True)")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Accepted: parameters are initialised at once, so far."""
    yield
