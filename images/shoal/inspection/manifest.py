"""What is inside an image, for people and programs, computed from what a container of it says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.docker_client.containers import strip_controls
from shoal.inspection import truth
from shoal.inspection.facts import Contents, Distribution, Package
from shoal.matrix.spec import ImageSpec

MIB = 1024**2


@dataclass(frozen=True)
class Manifest:
    """An image. system: versions of what it stands on. wrong: what its tag says and is not so; None: not compared."""

    tag: str
    id: str
    bytes: int
    created: str
    wrong: tuple[str, ...] | None
    system: Mapping[str, str]
    python: tuple[Distribution, ...]
    debian: tuple[Package, ...]
    environment: Mapping[str, str]
    labels: Mapping[str, str]


def of(contents: Contents, image: ImageSpec | None) -> Manifest:
    """Return the manifest. image: of the matrix, where it is; its tag is then checked."""
    named = {"system": contents.system.get("PRETTY_NAME", ""), "machine": contents.machine}
    environment = contents.environment.items()
    return Manifest(
        tag=contents.tag,
        id=contents.id,
        bytes=contents.bytes,
        created=contents.created,
        wrong=tuple(truth.differences(contents, image)) if image else None,
        system=named | {name: said for name, said in contents.commands.items() if said},
        python=contents.distributions,
        debian=contents.packages,
        environment={name: value for name, value in environment if name not in ("HOME", "HOSTNAME", "PWD")},
        labels={name: value for name, value in sorted(contents.labels.items()) if not name.startswith("shoal.")},
    )


def markdown(manifest: Manifest) -> str:
    """Return the manifest as a page."""
    parts = [
        f"# {manifest.tag}\n\n`{manifest.id}`, {manifest.bytes / MIB:,.0f} MiB, made {manifest.created[:19]}Z.\n",
        *([] if manifest.wrong is None else [_truth(manifest.wrong)]),
        _table("System", ("what", "version"), manifest.system.items()),
        _packages("Python", manifest.python),
        _packages("Debian", manifest.debian),
        _table("Environment", ("variable", "value"), manifest.environment.items()),
        _table("Labels", ("label", "value"), manifest.labels.items()),
    ]
    return "\n".join(parts)


def _truth(wrong: Iterable[str]) -> str:
    return "".join(f"- **The tag is wrong**: {line}\n" for line in wrong) or "The tag says what is inside.\n"


def _packages(kind: str, found: tuple[Distribution | Package, ...]) -> str:
    rows = ((package.name, package.version, package.licence) for package in found)
    return _table(f"{kind} packages ({len(found)})", ("package", "version", "licence"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"## {title}", "", _row(columns), _row(("---",) * len(columns))]
    return "\n".join([*lines, *map(_row, rows), ""])


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(strip_controls(cell).replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"
