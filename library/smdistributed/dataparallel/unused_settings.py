"""Variables that AWS's library reads and this one does not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

_NAMES = ("SMDATAPARALLEL_OPTIMIZE_SDP",)
_PREFIXES = ("SMDDP_AG_",)


def warn_of_unused_settings(environ: Mapping[str, str]) -> None:
    """Warn, once for all, of variables that tune AWS's collectives for sharded data parallel training.

    Not of SMDATAPARALLEL_USE_SINGLENODE and SMDATAPARALLEL_USE_HOMOGENEOUS, which launchers set: which ranks share a
    host, and how many each has, is found out here whatever they say.
    """
    unused = sorted(name for name in environ if name in _NAMES or name.startswith(_PREFIXES))
    if unused:
        warnings.warn(
            f"{', '.join(unused)} in the environment: no effect here. They tune AWS's collectives; what tunes this "
            "library's is SMDDP_ENGINE.",
            stacklevel=3,
        )
