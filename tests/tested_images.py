"""The images that `make test` builds, one of each kind, and a suffix for the names of images that tests make.

A further release in versions.yml changes none of these tests: where buildspec.yml has a name for an image, they use it.
`python -m tests.tested_images` prints the tags. `make soak` builds and tests all images.

Tests of the contents of images select them by globs instead (`each` in tests/integration/image_containers.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from shoal.matrix.spec import load

_NAMES = load(Path(__file__).resolve().parents[1] / "buildspec.yml").defaults
CLONE = hashlib.sha256(__file__.encode()).hexdigest()[:8]
"""In the names of images that tests make and remove, so that tests of two clones can run on one Docker."""
PYTORCH_CPU = _NAMES["pytorch-cpu"]
"""README's image."""
PYTORCH_CPU_DEVEL = f"{PYTORCH_CPU}-devel"
PYTORCH_CU117 = _NAMES["pytorch"]
"""The oldest torch, and the default of `FRAMEWORK=pytorch`."""
PYTORCH_CU117_DEVEL = f"{PYTORCH_CU117}-devel"
PYTORCH_CU130 = "pytorch-training:2.13.0-gpu-py311-cu130-debian12"
"""The torch whose classes of NCCL are recorded in tests/library/data."""
PYTORCH_PY313 = "pytorch-training:2.13.0-gpu-py313-cu130-debian13"
"""Not built: tests of rendered files and of contexts use it."""
TENSORFLOW_CPU = "tensorflow-training:2.14.1-cpu-py311-debian12"
TENSORFLOW_DEVEL = f"{_NAMES['tensorflow']}-devel"
HUGGINGFACE_CPU = _NAMES["huggingface-cpu"]
PYTORCH_LATEST = _NAMES["pytorch-latest"]
"""The newest torch and CUDA, on the newest Debian and Python."""
BUILT = (
    *(PYTORCH_CU117, PYTORCH_CU117_DEVEL, PYTORCH_CPU, PYTORCH_CPU_DEVEL, PYTORCH_CU130, PYTORCH_LATEST),
    *(_NAMES["tensorflow"], TENSORFLOW_DEVEL, TENSORFLOW_CPU, _NAMES["tensorflow-cpu"]),
    *(_NAMES["huggingface"], HUGGINGFACE_CPU),
)
"""One image of each kind: framework, device, system, and the oldest and the newest CUDA."""

if __name__ == "__main__":
    print(*BUILT)
