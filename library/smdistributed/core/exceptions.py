"""The error of the engine and of data parallel training, which `smdistributed.dataparallel.exceptions` offers as well.

Launchers look for the class's name in a failed rank's output. Model parallel training on this engine raises it too.
"""

from __future__ import annotations


class SMDDPError(RuntimeError):
    """Data parallel training cannot go on; the message says why."""
