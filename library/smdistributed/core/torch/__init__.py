"""The engine for PyTorch: the process group that averages gradients, for data and for model parallel training."""

from smdistributed.core.lacking import lacking

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise lacking(error, "PyTorch", "torch") from None
