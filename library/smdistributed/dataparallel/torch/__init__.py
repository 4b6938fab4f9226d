"""Data parallel training with PyTorch: collectives in `distributed`, the model wrapper in `parallel`."""

import smdistributed.core.torch  # noqa: F401 (raises a helpful error if it is not installed)
from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

__all__ = ["get_local_rank", "get_rank", "get_world_size"]
