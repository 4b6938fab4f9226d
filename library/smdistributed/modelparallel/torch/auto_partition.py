"""Automatic partition. (First slice: by parameters, in the order of the tree.)"""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.torch.module_manager import ModuleManager


def auto_stages(
    manager: ModuleManager, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, int]:
    """The stage of every module."""
    names = list(manager.modules)
    sizes = [sum(p.numel() for p in m._parameters.values() if p is not None) for m in manager.modules.values()]
    total, before, stages = sum(sizes), 0, dict[str, int]()
    owners: dict[int, int] = {}
    for name, size in zip(names, sizes):
        stage = min(config.partitions - 1, (before + size // 2) * config.partitions // max(total, 1))
        for p in manager.modules[name]._parameters.values():
            if p is not None:
                stage = owners.setdefault(id(p), stage)
        stages[name] = stage
        before += size
    return stages
