"""The distributed training libraries, by the names that scripts import.

`core` is what they share; `dataparallel` trains data parallel; `rehearsal` runs a CUDA script where there is no GPU.

Importing this package, or `core`, imports no framework.
"""

import os

__version__ = "0.1.0"

if os.environ.get("SHOAL_REHEARSE"):
    from smdistributed.rehearsal import activate

    activate()
