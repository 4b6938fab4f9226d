"""The state of this process after `smp.init`, by the name that scripts import. See `script.state`."""

from smdistributed.modelparallel.torch.script.state import state

__all__ = ["state"]
