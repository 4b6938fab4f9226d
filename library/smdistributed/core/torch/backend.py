"""The backend `smddp` of torch.distributed, under the name that AWS gives it."""

from __future__ import annotations

import inspect

import torch.distributed

from smdistributed.core.torch.process_group import create

BACKEND = "smddp"


def register() -> None:
    """Let torch.distributed know the backend. Doing so twice is no error."""
    if BACKEND in torch.distributed.Backend.backend_list:
        return
    register_backend = torch.distributed.Backend.register_backend
    if "devices" in inspect.signature(register_backend).parameters:  # torch 2.1 and later
        register_backend(BACKEND, create, devices=["cpu", "cuda"])
    else:
        register_backend(BACKEND, create)
