"""Known vulnerabilities of the packages in an image, from a report of `pip-audit --format json`. Needs no network.

An allow-list accepts vulnerabilities, each with a reason and until a date.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic
from packaging.utils import canonicalize_name
from packaging.version import Version

from shoal.errors import SpecError
from shoal.image.facts import Distribution, ImageFacts
from shoal.limits import MOST_LOCK, read_file
from shoal.matrix import yaml_file

DEBIAN = "debian"
"""The name of all Debian packages in an allow-list: no advisories about them are read."""


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
        """Returns the entries about an installed distribution."""
        name = canonicalize_name(installed.name)
        named = [entry for entry in self.dependencies if canonicalize_name(entry.name) == name]
        return [entry for entry in named if _is_same_version(installed.version, entry.version)]


class AcceptedVulnerability(yaml_file.StrictModel):
    """An entry of the allow-list."""

    id: Annotated[str, pydantic.Field(min_length=1)]
    """The identifier of the vulnerability, or one of its aliases. For packages that are not checked: the name of the
    Python package, or `debian` for all of Debian's."""
    reason: Annotated[str, pydantic.Field(min_length=1)]
    expires: datetime.date
    """The last day on which it is accepted."""


class AllowList(yaml_file.StrictModel):
    """The allow-list."""

    accepted: tuple[AcceptedVulnerability, ...]


@dataclass(frozen=True)
class Audit:
    """The known vulnerabilities of the distributions in an image."""

    tag: str
    findings: Sequence[Vulnerability]
    """Sorted by distribution."""
    unused: Sequence[AcceptedVulnerability]
    """Entries of the allow-list that match nothing. Of two for one vulnerability, the one that expires earlier."""
    unaudited: Sequence[str]
    """The distributions that the report lacks, or has in other versions only."""
    debian: int
    """The number of Debian packages, none of which are checked."""
    gaps: Sequence[str]
    """Of the packages that are not checked, those that no entry accepts today, so that the exit code is 16. All of
    Debian's are `debian`."""


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
    counts: bool
    """Whether no entry accepts it today, so that the exit code is 12."""

    def __str__(self) -> str:
        fix = f"fixed in {' or '.join(self.fixed_in)}" if self.fixed_in else "no fix yet"
        line = f"{self.name} {self.version}: {' '.join((self.id, *self.aliases))}, {fix}"
        if not self.accepted:
            return line
        state = "the exception has expired on" if self.counts else "accepted until"
        return f"{line}; {state} {self.accepted.expires}: {self.accepted.reason}"


def read_report(path: Path) -> AuditReport:
    """Reads a report of pip-audit. Raises `SpecError` if it cannot be read, or is not one."""
    try:
        return AuditReport.model_validate_json(read_file(path, MOST_LOCK, follow=True))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}. Fix: name a readable file") from error
    except ValueError as error:
        raise SpecError(f"{path}: not a report of `pip-audit --format json`: {error}. Fix: write it again") from error


def read_allow_list(path: Path | None) -> tuple[AcceptedVulnerability, ...]:
    """Reads an allow-list; None has no entries. Raises `SpecError` with file, line and key."""
    return yaml_file.read_yaml(path, AllowList)[0].accepted if path else ()


def audit(
    facts: ImageFacts, report: AuditReport, accepted: Sequence[AcceptedVulnerability], today: datetime.date
) -> Audit:
    """Returns the known vulnerabilities of the distributions in an image.

    Args:
        accepted: The entries of the allow-list. If several name a vulnerability, the one that expires last is used.
        today: The last day of entries that still count.
    """
    findings = sorted(_match_advisories(facts, report, accepted, today), key=lambda found: (found.name, found.id))
    unaudited = sorted(canonicalize_name(each.name) for each in facts.distributions if not report.find(each))
    unchecked = {name: _find_entry(accepted, name) for name in (*unaudited, *[DEBIAN][: len(facts.packages)])}
    used = [*(found.accepted for found in findings), *unchecked.values()]
    unused = [entry for entry in accepted if entry not in used]
    gaps = [name for name, entry in unchecked.items() if entry is None or entry.expires < today]
    return Audit(facts.tag, findings, unused, unaudited, len(facts.packages), gaps)


def _match_advisories(
    facts: ImageFacts, report: AuditReport, accepted: Sequence[AcceptedVulnerability], today: datetime.date
) -> Iterator[Vulnerability]:
    for installed in facts.distributions:
        for known in [known for dependency in report.find(installed) for known in dependency.vulns]:
            entry = _find_entry(accepted, known.id, *known.aliases)
            name, counts = canonicalize_name(installed.name), entry is None or entry.expires < today
            yield Vulnerability(name, installed.version, known.id, known.aliases, known.fix_versions, entry, counts)


def _find_entry(accepted: Sequence[AcceptedVulnerability], *names: str) -> AcceptedVulnerability | None:
    entries = (entry for entry in accepted if entry.id in names)
    return max(entries, key=lambda entry: entry.expires, default=None)


def list_closed(report: AuditReport, changes: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yields the vulnerabilities that new versions close: name, version before and after of each package."""
    for name, before, after in changes:
        installed = Distribution(name=name, version=before, licence="", homepage="")
        for known in [known for entry in report.find(installed) for known in entry.vulns]:
            fixed = [version for version in known.fix_versions if after and Version(version) <= Version(after)]
            if fixed or not after:
                yield f"{name} {before}: {' '.join((known.id, *known.aliases))}"


def _is_same_version(installed: str, known: str) -> bool:
    """Returns whether two versions are equal; a local part (after `+`) counts only if both have one."""
    try:
        ours, theirs = Version(installed), Version(known)
    except ValueError:  # InvalidVersion, or a number with thousands of digits
        return installed == known
    return ours == theirs or (theirs.local is None and Version(ours.public) == theirs)
