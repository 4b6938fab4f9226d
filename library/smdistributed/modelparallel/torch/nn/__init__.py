"""Tensor-parallel modules (AWS API 1.6): names only, so far."""

from __future__ import annotations

from smdistributed.modelparallel.torch.later import MODULES, module

globals().update({name: module(name) for name in MODULES})
__all__ = list(MODULES)
