"""docs/reference/images.md: the images of buildspec.yml, as `shoal list` shows them."""

from __future__ import annotations

from pathlib import Path

from reference_pages.markdown import code, page, table
from shoal.builds.listing import ListedImage, list_images
from shoal.matrix import spec

ROOT = Path(__file__).resolve().parents[2]
_HEAD = """# Images

`make reference` writes this page from `buildspec.yml`. `shoal list` also shows which images are built on your machine.

In commands, a tag such as `pytorch-training:2.13.0-cpu-py311-debian12` is one image. A framework means its default:"""
_TAGS = """## Tags

A tag has these parts, in this order: version of the framework, `gpu` or `cpu`, Python, CUDA, operating system.
An image with `-devel` at the end also has compilers. One with `-lean` has no
[everyday packages](../decisions/everyday-packages.md) such as torchvision and pandas, and is not built by default.
Nor is one with `-efa`, which extends the image without it, for [AWS's network cards](../sagemaker.md#efa).
An image that extends another one builds it first."""
_USE = """## Choose an image

- **To try something on a CPU**, use a `cpu` image: it is much smaller, because it has no CUDA.
- **For a GPU that CUDA 11.7 does not support**, such as an H100, use an image with `cu130`.
- **For C++ extensions or `torch.compile`**, use the image with `-devel`.
- **For transformers, datasets and accelerate**, use a Hugging Face image.

The GPU images are built and checked on machines without a GPU. To change images or add versions, run `shoal init`:
[install](../install.md)."""


def write() -> str:
    """Returns the page."""
    matrix = spec.load(ROOT / "buildspec.yml")
    images = list(list_images(matrix, matrix.choose((), ()), None))
    defaults = table(("name", "image"), ((code(name), code(tag)) for name, tag in matrix.defaults.items()))
    return page(_HEAD, defaults, _TAGS, table(("tag", "compilers", "extends"), map(_row, images)), _USE)


def _row(image: ListedImage) -> tuple[str, str, str]:
    return code(image.tag), "yes" if image.variant == "devel" else "no", code(image.extends or "")
