"""Known vulnerabilities of the packages in an image, from a report of `pip-audit --format json`. Needs no network.

An allow-list accepts vulnerabilities, each with a reason and until a date.
"""

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
from shoal.inspection.facts import Distribution, ImageFacts
from shoal.matrix import yaml_file


class _Advisory(pydantic.BaseModel):
    id: str
    fix_versions: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    description: str = ""


class _Dependency(pydantic.BaseModel):
    name: str
    version: str = ""
    vulns: tuple[_Advisory, ...] = ()


class AuditReport(pydantic.BaseModel):
    """A report of pip-audit. It may cover packages that the image does not have."""

    dependencies: tuple[_Dependency, ...]

    def find(self, installed: Distribution) -> list[_Dependency]:
        """Return the entries about an installed distribution."""
        name = canonicalize_name(installed.name)
        named = [entry for entry in self.dependencies if canonicalize_name(entry.name) == name]
        return [entry for entry in named if _is_same_version(installed.version, entry.version)]


class AcceptedVulnerability(yaml_file.Model):
    """An entry of the allow-list."""

    id: Annotated[str, pydantic.Field(min_length=1)]
    """The identifier of the vulnerability, or one of its aliases."""
    reason: Annotated[str, pydantic.Field(min_length=1)]
    expires: datetime.date
    """The last day on which it is accepted."""


class AllowList(yaml_file.Model):
    """The allow-list."""

    accepted: tuple[AcceptedVulnerability, ...]


@dataclass(frozen=True)
class Vulnerability:
    """A known vulnerability of an installed distribution."""

    name: str
    version: str
    id: str
    aliases: tuple[str, ...]
    fixed_in: tuple[str, ...]
    accepted: AcceptedVulnerability | None
    """The entry of the allow-list, even if it has expired."""

    def is_unaccepted(self, today: datetime.date) -> bool:
        """Return whether no entry of the allow-list accepts it today."""
        return self.accepted is None or self.accepted.expires < today

    def __str__(self) -> str:
        fix = f"fixed in {' or '.join(self.fixed_in)}" if self.fixed_in else "no fix yet"
        line = f"{self.name} {self.version}: {' '.join((self.id, *self.aliases))}, {fix}"
        return f"{line}; accepted until {self.accepted.expires}: {self.accepted.reason}" if self.accepted else line


def read_report(path: Path) -> AuditReport:
    """Read a report of pip-audit. Raises `SpecError` if it cannot be read, or is not one."""
    try:
        return AuditReport.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, pydantic.ValidationError) as error:
        raise SpecError(f"{path}: not a report of `pip-audit --format json`: {error}") from error


def read_allow_list(path: Path | None) -> tuple[AcceptedVulnerability, ...]:
    """Read an allow-list; None has no entries. Raises `SpecError` with file, line and key."""
    return yaml_file.read_yaml(path, AllowList)[0].accepted if path else ()


def find_vulnerabilities(
    facts: ImageFacts, report: AuditReport, accepted: Sequence[AcceptedVulnerability]
) -> list[Vulnerability]:
    """Return the known vulnerabilities of the distributions in an image, sorted by distribution.

    Args:
        facts: What is installed in the image.
        report: What is known about packages.
        accepted: The entries of the allow-list. If several name a vulnerability, the one that expires last is used.
    """
    return sorted(_match_advisories(facts, report, accepted), key=lambda found: (found.name, found.id))


def _match_advisories(
    facts: ImageFacts, report: AuditReport, accepted: Sequence[AcceptedVulnerability]
) -> Iterator[Vulnerability]:
    """Yield each advisory about an installed distribution, with the entry that accepts it or None.

    Of several entries, the one that expires last counts.
    """
    for installed in facts.distributions:
        for known in [known for dependency in report.find(installed) for known in dependency.vulns]:
            entries = [entry for entry in accepted if entry.id in {known.id, *known.aliases}]
            entry = max(entries, key=lambda entry: entry.expires, default=None)
            name = canonicalize_name(installed.name)
            yield Vulnerability(name, installed.version, known.id, known.aliases, known.fix_versions, entry)


def list_unaudited(facts: ImageFacts, report: AuditReport) -> list[str]:
    """Return the names of distributions in an image that the report lacks, or has in other versions only."""
    return sorted(canonicalize_name(found.name) for found in facts.distributions if not report.find(found))


def list_unused(
    found: Sequence[Vulnerability], accepted: Sequence[AcceptedVulnerability]
) -> list[AcceptedVulnerability]:
    """Return the entries of an allow-list that no vulnerability uses.

    If two entries name the same vulnerability, the one that expires earlier is unused.
    """
    return [entry for entry in accepted if all(one.accepted != entry for one in found)]


def _is_same_version(installed: str, known: str) -> bool:
    """Return whether two versions are equal; a local part (after `+`) counts only if both have one."""
    try:
        ours, theirs = Version(installed), Version(known)
    except InvalidVersion:
        return installed == known
    return ours == theirs or (theirs.local is None and Version(ours.public) == theirs)
