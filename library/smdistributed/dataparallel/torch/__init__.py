"""Data parallel training with PyTorch: `distributed` holds the collectives, `parallel` the model wrapper."""

import smdistributed.core.torch  # noqa: F401 (says what to do where it is not installed)
from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

__all__ = ["get_local_rank", "get_rank", "get_world_size"]
