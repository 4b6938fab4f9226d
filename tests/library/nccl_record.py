"""What torch's own classes for NCCL have: `python nccl_record.py` prints it as JSON, in an image with CUDA.

tests/library/data/nccl-*.json is its output for the torch of each kind of image, made anew by

    docker run --rm -v "$PWD/tests/library:/t:ro" IMAGE python /t/nccl_record.py > tests/library/data/nccl-VERSION.json

torch for CPUs has no such class. The stand-in for it (`nccl_stand_in`) is generated from this: it has what the class
has, and nothing else. tests/integration/test_library.py holds the files to the images.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

CLASSES = (
    *("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCL.Options"),  # the second one from torch 2.15 on
    *("ProcessGroup", "Work", "WorkInfo", "OpType"),
)
_ADDRESS = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>")
_SIGNATURE = re.compile(r"^(?:\d+\. )?(\w*\(.*\) -> .*)$", re.MULTILINE)


def recorded() -> dict[str, Any]:
    """Return the public and single-underscored names of each class; of methods, their signatures as pybind11 has them.

    A class that this torch lacks is null.
    """
    return {"torch": torch.__version__, **{name: _members(name) for name in CLASSES}}


def _members(name: str) -> dict[str, list[str]] | None:
    found: Any = c10d
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return None
    names = [member for member in dir(found) if not member.startswith("__") or member == "__init__"]
    return {member: _signatures(getattr(found, member)) for member in names}


def _signatures(member: Any) -> list[str]:
    """Those in pybind11's docstring of a method, or of a property's getter, without the addresses of defaults."""
    doc = getattr(member, "fget", member).__doc__
    found = _SIGNATURE.findall(_ADDRESS.sub("...", doc)) if isinstance(doc, str) else []
    return [signature for signature in found if "(*args, **kwargs)" not in signature]


if __name__ == "__main__":
    print(json.dumps(recorded(), indent=1, sort_keys=True))
