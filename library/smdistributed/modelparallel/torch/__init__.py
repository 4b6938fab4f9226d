"""Model parallel training in PyTorch: `import smdistributed.modelparallel.torch as smp` (AWS API 1.x)."""

from __future__ import annotations

from smdistributed.modelparallel.torch.api import *  # noqa: F403
