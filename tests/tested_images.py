"""The images of tests that need one image of a kind, and a suffix for the names of images that tests make.

A further release in versions.yml changes none of these tests.

Tests of what all images contain select them by globs instead (`each` in tests/integration/image_containers.py).
"""

from __future__ import annotations

import hashlib

CLONE = hashlib.sha256(__file__.encode()).hexdigest()[:8]
"""In the names of images that tests make and remove, so that tests of two clones can run on one Docker."""
PYTORCH_CPU = "pytorch-training:2.13.0-cpu-py311-debian12"
"""README's image."""
PYTORCH_CPU_DEVEL = f"{PYTORCH_CPU}-devel"
PYTORCH_CU117 = "pytorch-training:2.0.1-gpu-py311-cu117-debian12"
"""The oldest torch, and the default of `FRAMEWORK=pytorch`."""
PYTORCH_CU117_DEVEL = f"{PYTORCH_CU117}-devel"
PYTORCH_CU130 = "pytorch-training:2.13.0-gpu-py311-cu130-debian12"
PYTORCH_PY313 = "pytorch-training:2.13.0-gpu-py313-cu130-debian13"
TENSORFLOW_CPU = "tensorflow-training:2.14.1-cpu-py311-debian12"
TENSORFLOW_DEVEL = "tensorflow-training:2.14.1-gpu-py311-cu118-debian12-devel"
HUGGINGFACE_CPU = "huggingface-training:5.23.0-cpu-py311-debian12"
