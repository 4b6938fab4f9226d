"""An open implementation of `smdistributed.modelparallel`: models that are too large for one device.

Each framework has a front, such as `import smdistributed.modelparallel.torch as smp`. `backend` needs no framework.
"""

__version__ = "1.15.0"
"""The version of AWS's interface that this package follows; scripts compare it with 1.10 and 1.11."""
