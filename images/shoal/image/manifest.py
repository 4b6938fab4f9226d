"""The manifest of an image: its contents for people and programs, and whether its tag is correct."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from shoal.clean_text import clean_text
from shoal.image.facts import Distribution, ImageFacts, Package
from shoal.matrix.spec import ImageSpec

MIB = 1024**2
# The distributions that have the version of the framework.
_FRAMEWORKS = {"pytorch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu"), "huggingface": ("transformers",)}
_ENTITIES = {ord(char): f"&#{ord(char)};" for char in "\\&<>[]|`*~"}
_SIGNS = re.compile(r":(?=//)|(?<=\bwww)\.|@|(?<![^\W_])_|_(?![^\W_])", re.IGNORECASE)
"""Signs that make links of addresses, and _ around words, which emphasizes them."""
_CUDA = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")


@dataclass(frozen=True)
class Manifest:
    """The contents of an image."""

    tag: str
    id: str
    bytes: int
    created: str
    wrong: tuple[str, ...] | None
    """What is wrong in the tag, a sentence each; None: not checked, as the matrix does not have the image."""
    system: Mapping[str, str]
    """Versions of the operating system and of commands."""
    python: tuple[Distribution, ...]
    debian: tuple[Package, ...]
    environment: Mapping[str, str]
    labels: Mapping[str, str]


def make_manifest(facts: ImageFacts, image: ImageSpec | None) -> Manifest:
    """Returns the manifest. `wrong` has the wrong parts of the tag; None if the matrix does not have the image.

    Labels that begin with `shoal.`, and the variables HOME, HOSTNAME and PWD, are left out.
    """
    named = {"system": facts.system.get("PRETTY_NAME", ""), "machine": facts.machine}
    environment = facts.environment.items()
    return Manifest(
        tag=facts.tag,
        id=facts.id,
        bytes=facts.bytes,
        created=facts.created,
        wrong=tuple(check_tag(facts, image)) if image else None,
        system=named | {name: line for name, line in facts.commands.items() if line},
        python=facts.distributions,
        debian=facts.packages,
        environment={name: value for name, value in environment if name not in ("HOME", "HOSTNAME", "PWD")},
        labels={name: value for name, value in sorted(facts.labels.items()) if not name.startswith("shoal.")},
    )


def check_tag(facts: ImageFacts, image: ImageSpec) -> list[str]:
    """Returns the wrong parts of the tag, a sentence each, such as `cuda is cu118, not cu117`; empty if none is."""
    cuda = _find_cuda(facts)
    actual = {
        "version": _find_framework(facts, image.framework),
        "device": "gpu" if cuda else "cpu",
        "python": "py" + "".join(facts.python.split(".")[:2]),
        "cuda": cuda,
        "os": facts.system.get("ID", "") + facts.system.get("VERSION_ID", ""),
        "variant": _find_variant(facts, image),
    }
    expected: dict[str, str | None] = {axis: getattr(image, axis) for axis in actual}
    return [
        f"{axis} is {actual[axis] or 'none'}, not {expected[axis] or 'none'}"
        for axis in actual
        if actual[axis] != expected[axis]
    ]


def _find_variant(facts: ImageFacts, image: ImageSpec) -> str:
    """Returns the variant that an image is. A lean image lacks only packages that anybody can install."""
    for variant, packages in (("devel", image.system.devel), ("efa", image.system.efa)):
        if _has_all(facts, packages):
            return variant
    return "lean" if image.variant == "lean" else "runtime"


def _has_all(facts: ImageFacts, packages: Iterable[str]) -> bool:
    """Whether the image has these Debian packages, at least one. Runtime images may have a small compiler."""
    return bool(wanted := set(packages)) and wanted <= {package.name for package in facts.packages}


def _find_framework(facts: ImageFacts, framework: str) -> str | None:
    names = _FRAMEWORKS.get(framework, (framework,))
    versions: dict[str, str] = {canonicalize_name(name): version for name, version in facts.versions.items()}
    return next((versions[name].partition("+")[0] for name in names if name in versions), None)


def _find_cuda(facts: ImageFacts) -> str | None:
    """Returns the CUDA version of NVIDIA's runtime wheel in the form of a tag, cu117 for 11.7; None without CUDA."""
    versions = (version for name, version in facts.versions.items() if _CUDA.fullmatch(name))
    return next(("cu" + "".join(version.split(".")[:2]) for version in versions), None)


def format_markdown(manifest: Manifest) -> str:
    """Returns the manifest as a page of Markdown."""
    parts = [
        f"# {escape_markdown(manifest.tag)}\n",
        f"`{manifest.id}`, {manifest.bytes / MIB:,.0f} MiB, created {manifest.created[:19]}Z.\n",
        *([] if manifest.wrong is None else [_format_tag_check(manifest.wrong)]),
        _format_table("System", ("component", "version"), manifest.system.items()),
        _format_packages("Python", manifest.python),
        _format_packages("Debian", manifest.debian),
        _format_table("Environment", ("variable", "value"), manifest.environment.items()),
        _format_table("Labels", ("label", "value"), manifest.labels.items()),
    ]
    return "\n".join(parts)


def _format_tag_check(wrong: Iterable[str]) -> str:
    return "".join(f"- **The tag is wrong**: {escape_markdown(line)}\n" for line in wrong) or "The tag is correct.\n"


def _format_packages(kind: str, found: tuple[Distribution | Package, ...]) -> str:
    rows = ((package.name, package.version, package.licence) for package in found)
    return _format_table(f"{kind} packages ({len(found)})", ("package", "version", "licence"), rows)


def _format_table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"## {title}", "", _format_row(columns), _format_row(("---",) * len(columns))]
    return "\n".join([*lines, *map(_format_row, rows), ""])


def _format_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"


def escape_markdown(text: str) -> str:
    """Returns a text of an image that Markdown shows as it is, in one line: no HTML, links, code and cells."""
    text = clean_text(text).replace("\n", " ").translate(_ENTITIES)
    return _SIGNS.sub(lambda found: f"&#{ord(found[0])};", text)
