"""PyTorch: the process group that reduces gradients, for data parallel and model parallel training."""

from smdistributed.core.exceptions import missing_framework_error

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework_error(error, "PyTorch", "torch") from None
