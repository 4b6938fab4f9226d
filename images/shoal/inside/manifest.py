"""What is inside an image, for people: Markdown, computed from what a container of it says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.inside import truth
from shoal.inside.contents import Contents
from shoal.spec import ImageSpec

MIB = 1024**2
Section = Callable[[Contents], str]


def markdown(contents: Contents, image: ImageSpec | None) -> str:
    """Return the page. image: of the matrix, where it is; its tag is then checked."""
    heading = f"# {contents.tag}\n\n`{contents.id}`, {contents.bytes / MIB:,.0f} MiB, made {contents.created[:19]}Z.\n"
    parts = [heading, _tag(contents, image), *(section(contents) for section in SECTIONS)]
    return "\n".join(part for part in parts if part)


def _tag(contents: Contents, image: ImageSpec | None) -> str:
    if image is None:
        return ""
    wrong = truth.differences(contents, image)
    return "".join(f"- **The tag is wrong**: {line}\n" for line in wrong) or "The tag says what is inside.\n"


def _system(contents: Contents) -> str:
    return _table("System", ("what", "version"), _system_rows(contents))


def _system_rows(contents: Contents) -> Iterator[tuple[str, ...]]:
    yield "system", contents.system.get("PRETTY_NAME", "")
    yield "machine", contents.machine
    yield from contents.commands.items()


def _python(contents: Contents) -> str:
    rows = ((found.name, found.version, found.licence) for found in contents.distributions)
    return _table(f"Python packages ({len(contents.distributions)})", ("package", "version", "licence"), rows)


def _debian(contents: Contents) -> str:
    rows = ((found.name, found.version, found.licence) for found in contents.packages)
    return _table(f"Debian packages ({len(contents.packages)})", ("package", "version", "licence"), rows)


def _environment(contents: Contents) -> str:
    own = ((name, value) for name, value in contents.environment.items() if name not in ("HOME", "HOSTNAME", "PWD"))
    return _table("Environment", ("variable", "value"), own)


def _labels(contents: Contents) -> str:
    shown = ((name, value) for name, value in sorted(contents.labels.items()) if not name.startswith("shoal."))
    return _table("Labels", ("label", "value"), shown)


SECTIONS: tuple[Section, ...] = (_system, _python, _debian, _environment, _labels)


def _table(title: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"## {title}", "", _row(columns), _row(("---",) * len(columns))]
    return "\n".join([*lines, *map(_row, rows), ""])


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"
