"""Known vulnerabilities of what is inside, from a file in the form of `pip-audit --format json`: no network is asked.

What is accepted stands in a file too, with a reason and a day on which that ends."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from shoal.errors import SpecError
from shoal.inspection.facts import Contents, Distribution
from shoal.matrix import yaml_file


class _Vulnerability(pydantic.BaseModel):
    id: str
    fix_versions: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    description: str = ""


class _Dependency(pydantic.BaseModel):
    name: str
    version: str = ""
    vulns: tuple[_Vulnerability, ...] = ()


class Advisories(pydantic.BaseModel):
    """The file of pip-audit, of any set of packages; what is not installed in an image is passed over."""

    dependencies: tuple[_Dependency, ...]

    def about(self, found: Distribution) -> list[_Dependency]:
        """Return the entries of an installed distribution."""
        name = canonicalize_name(found.name)
        named = [entry for entry in self.dependencies if canonicalize_name(entry.name) == name]
        return [entry for entry in named if _is_same(found.version, entry.version)]


class Accepted(yaml_file.Model):
    """An entry of the allow-list."""

    id: Annotated[str, pydantic.Field(min_length=1)]
    """Of the vulnerability, or one of its aliases."""
    reason: Annotated[str, pydantic.Field(min_length=1)]
    expires: datetime.date
    """The last day on which it counts."""


class AllowList(yaml_file.Model):
    """The allow-list."""

    accepted: tuple[Accepted, ...]


@dataclass(frozen=True)
class Finding:
    """A vulnerability of an installed distribution. `accepted`: the entry that names it, also one that has expired."""

    name: str
    version: str
    id: str
    aliases: tuple[str, ...]
    fixed_in: tuple[str, ...]
    accepted: Accepted | None

    def counts(self, today: datetime.date) -> bool:
        """Return whether nobody accepts it, or nobody any more."""
        return self.accepted is None or self.accepted.expires < today

    def __str__(self) -> str:
        fix = f"fixed in {' or '.join(self.fixed_in)}" if self.fixed_in else "no fix yet"
        line = f"{self.name} {self.version}: {' '.join((self.id, *self.aliases))}, {fix}"
        return f"{line}; accepted until {self.accepted.expires}: {self.accepted.reason}" if self.accepted else line


def read(path: Path) -> Advisories:
    """Read advisories. Raises SpecError with file and key for what is no file of pip-audit."""
    try:
        return Advisories.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, pydantic.ValidationError) as error:
        raise SpecError(f"{path}: not what `pip-audit --format json` writes: {error}") from error


def read_accepted(path: Path | None) -> tuple[Accepted, ...]:
    """Read an allow-list. Raises SpecError with file, line and key."""
    return yaml_file.read_yaml(path, AllowList)[0].accepted if path else ()


def findings(contents: Contents, advisories: Advisories, accepted: Sequence[Accepted]) -> list[Finding]:
    """Return what is known of the distributions in an image, by their names."""
    return sorted(_findings(contents, advisories, accepted), key=lambda finding: (finding.name, finding.id))


def _findings(contents: Contents, advisories: Advisories, accepted: Sequence[Accepted]) -> Iterator[Finding]:
    for found in contents.distributions:
        for known in [known for dependency in advisories.about(found) for known in dependency.vulns]:
            entries = [entry for entry in accepted if entry.id in {known.id, *known.aliases}]
            entry = max(entries, key=lambda entry: entry.expires, default=None)
            name = canonicalize_name(found.name)
            yield Finding(name, found.version, known.id, known.aliases, known.fix_versions, entry)


def unaudited(contents: Contents, advisories: Advisories) -> list[str]:
    """Return the distributions in an image of which the file says nothing, good or bad."""
    return sorted(canonicalize_name(found.name) for found in contents.distributions if not advisories.about(found))


def _is_same(installed: str, known: str) -> bool:
    """Whether two versions are one. An index knows no part after `+`: where `known` has none, any will do."""
    try:
        ours, theirs = Version(installed), Version(known)
    except InvalidVersion:
        return installed == known
    return ours == theirs or (theirs.local is None and Version(ours.public) == theirs)


def unused(found: Sequence[Finding], accepted: Sequence[Accepted]) -> list[Accepted]:
    """Return the entries of an allow-list that accept nothing that is there."""
    return [entry for entry in accepted if all(finding.accepted != entry for finding in found)]
