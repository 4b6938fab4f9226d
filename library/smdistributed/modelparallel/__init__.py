"""An open implementation of `smdistributed.modelparallel`: models that are too large for one device.

A front for each framework: `import smdistributed.modelparallel.torch as smp`. What needs no framework is in `backend`.
"""

__version__ = "1.15.0"
"""The version of the published interface whose names this package has; scripts compare it with 1.10 and 1.11."""
