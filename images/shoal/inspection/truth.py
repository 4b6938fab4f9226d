"""Whether an image's tag says what is inside. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.inspection.facts import Contents
from shoal.matrix.spec import ImageSpec

# The distribution whose version is that of the framework.
_FRAMEWORKS = {"pytorch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu"), "huggingface": ("transformers",)}
_CUDA = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")


def differences(contents: Contents, image: ImageSpec) -> list[str]:
    """Return what the tag says and the container does not, a sentence each."""
    told = {
        "version": image.version,
        "device": image.device,
        "python": image.python,
        "cuda": image.cuda,
        "os": image.os,
        "variant": image.variant,
    }
    found = {
        "version": _framework(contents, image.framework),
        "device": "gpu" if _cuda(contents) else "cpu",
        "python": "py" + "".join(contents.python.split(".")[:2]),
        "cuda": _cuda(contents),
        "os": contents.system.get("ID", "") + contents.system.get("VERSION_ID", ""),
        "variant": "devel" if contents.commands.get("c++") else "runtime",
    }
    return list(_unequal(told, found))


def _unequal(told: dict[str, str | None], found: dict[str, str | None]) -> Iterator[str]:
    for axis, word in told.items():
        if found[axis] != word:
            yield f"{axis} is {found[axis] or 'none'}, not {word or 'none'}"


def _framework(contents: Contents, framework: str) -> str | None:
    names = _FRAMEWORKS.get(framework, (framework,))
    return next((contents.versions[name].partition("+")[0] for name in names if name in contents.versions), None)


def _cuda(contents: Contents) -> str | None:
    """As the tag has it, cu117 for 11.7: of NVIDIA's runtime among the wheels."""
    versions = (version for name, version in contents.versions.items() if _CUDA.fullmatch(name))
    return next(("cu" + "".join(version.split(".")[:2]) for version in versions), None)
