"""Data parallel training with PyTorch: `distributed` holds the collectives, `parallel` the model wrapper."""

from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

__all__ = ["get_local_rank", "get_rank", "get_world_size"]
