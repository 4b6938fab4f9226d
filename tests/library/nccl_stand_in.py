"""A class that stands in for torch's NCCL where there is no GPU, generated from what the real one has.

Up to torch 2.14 that is ProcessGroupNCCL, and ProcessGroupNCCL2 from 2.15 on.


It is torch's gloo, in C++, under the names of NCCL's class as `nccl_record` has recorded them. What NCCL's class lacks
is missing, and what gloo lacks raises NotImplementedError. Its options take the recorded names alone. It never gets a
CUDA tensor, for want of a device. The tests see that torch has it where NCCL belongs, and that CPU tensors stay away.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_made: list[Any] = []  # kept: to C++ alone they would be gloo's, as pybind11 has it
DATA = Path(__file__).parent / "data"
VERSIONS = OLDEST, NCCL, NEWEST = "2.0.1+cu117", "2.13.0+cu130", "2.15.0+cu132"


def record(version: str = NEWEST) -> dict[str, Any]:
    """Return what is recorded of the classes of a version of torch."""
    found: dict[str, Any] = json.loads((DATA / f"nccl-{version}.json").read_text())
    return found


def carrier(version: str) -> str:
    """Return the name of the class that the backend "nccl" makes in that version of torch."""
    return "ProcessGroupNCCL2" if record(version)["ProcessGroupNCCL2"] else "ProcessGroupNCCL"


def stand_in(version: str) -> type:
    """Return a class with the names of the class for NCCL of that version, and with no others."""
    names, base = record(version)[carrier(version)], distributed_c10d.ProcessGroupGloo

    def init(self: Any, store: Any, rank: int, size: int, options: Any, device: Any = None) -> None:
        base.__init__(self, store, rank, size, timeout=options._timeout)
        self._given, self._device = options, device
        _made.append(self)

    own: dict[str, Any] = {"__init__": init, "Options": _options(record(version)["ProcessGroupNCCL.Options"])}
    own["options"] = property(lambda self: self._given)
    for name in names:
        if name not in own and not hasattr(base, name):
            own[name] = _missing(name)
    for name in dir(base):
        if name not in names and not name.startswith("__") and name != "_pybind11_conduit_v1_":
            own[name] = _hidden(name)
    return type(carrier(version), (base,), own)


def _options(names: dict[str, list[str]]) -> type:
    """A class of options, which refuses what the real one would not know."""

    def set_known(self: object, name: str, value: object) -> None:
        if name not in names:
            raise AttributeError(f"ProcessGroupNCCL.Options has no attribute {name!r}")
        object.__setattr__(self, name, value)

    return type("Options", (), {"__setattr__": set_known})


def _missing(name: str) -> Any:
    def not_here(*_: object, **__: object) -> None:
        raise NotImplementedError(f"The stand-in for NCCL, which is gloo, has no {name}.")

    return not_here


def _hidden(name: str) -> Any:
    def raise_missing(_: object) -> None:
        raise AttributeError(f"ProcessGroupNCCL has no attribute {name!r}")

    return property(raise_missing)


def forget() -> None:
    """Let go of what was made: gloo's threads must not outlive the interpreter."""
    _made.clear()


def takes(signature: str, positional: int) -> bool:
    """Whether a recorded signature takes so many arguments after `self`, by position."""
    listed = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", signature[signature.index("(") + 1 :]))
    arguments = [one for one in listed.rpartition(") ->")[0].split(", ") if ":" in one][1:]
    needed = sum("=" not in one for one in arguments)
    return needed <= positional <= len(arguments)


def install(shared: bool = False) -> Any:
    """Have torch and the backend smddp find NCCL here, with a device of its own for each rank, or one for all.

    Returns its class.
    """
    from smdistributed.core.torch import backend, devices

    ours: Any = backend
    version = NEWEST if hasattr(distributed_c10d, "_create_nccl2_process_group") else NCCL
    nccl: Any = stand_in(version)
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = nccl  # type: ignore[attr-defined]
        setattr(module, carrier(version), nccl)
    distributed_c10d._NCCL_AVAILABLE = True

    def device() -> tuple[str, str, str]:
        name = "gpu" if shared else f"gpu-of-process-{os.getpid()}"
        return name, f"cuda:0 ({name})", ""

    devices._device = device
    ours.local_nccl_problem = lambda: ""
    ours.select_device = lambda: None
    ours.current_device = lambda: None  # a group with a device has its barriers there
    distributed_c10d._nccl2_device = lambda options: None  # type: ignore[attr-defined]
    return nccl
