"""`shoal audit`: known and accepted vulnerabilities."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from tests.images.test_inspection import contents

from shoal.commands import inspection
from shoal.errors import CoverageError, SpecError, VulnerabilityError
from shoal.image import advisories
from shoal.image import facts as inside
from shoal.image.advisories import AcceptedVulnerability

KNOWN = {
    "dependencies": [
        {
            "name": "Torch",
            "version": "2.0.1+cu117",
            "vulns": [
                {"id": "PYSEC-1", "fix_versions": ["2.2.0"], "aliases": ["CVE-1"], "description": "long"},
                {"id": "PYSEC-2", "fix_versions": [], "aliases": []},
            ],
        },
        {"name": "torch", "version": "1.0", "vulns": [{"id": "PYSEC-3"}]},
        {"name": "absent", "version": "1", "vulns": [{"id": "PYSEC-4"}]},
        {"name": "skipped", "skip_reason": "not on PyPI"},
    ],
    "fixes": [],
}
TODAY = datetime.date(2026, 6, 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "known.json").write_text(json.dumps(KNOWN))
    return tmp_path / "known.json"


def test_vulnerabilities_of_installed_versions_are_found(file: Path) -> None:
    first, second = advisories.audit(contents(), advisories.read_report(file), (), TODAY).findings
    assert str(first) == "torch 2.0.1+cu117: PYSEC-1 CVE-1, fixed in 2.2.0"
    assert str(second) == "torch 2.0.1+cu117: PYSEC-2, no fix yet"
    assert first.counts and second.counts


@pytest.mark.parametrize(
    ("installed", "known", "is_found"),
    [("2.13.0+cpu", "2.13.0", True), ("2.13", "2.13.0", True), ("2.13.0+cpu", "2.13.0+cu130", False), ("?", "?", True)],
)
def test_a_version_is_known_without_its_local_part(installed: str, known: str, is_found: bool) -> None:
    """PyPI has no 2.13.0+cpu, so pip-audit reports 2.13.0."""
    entry = {"name": "torch", "version": known, "vulns": [{"id": "PYSEC-1"}]}
    report = advisories.AuditReport.model_validate({"dependencies": [entry]})
    distribution = {"name": "torch", "version": installed, "licence": "", "homepage": ""}
    inside = contents(distributions=[distribution])
    found = advisories.audit(inside, report, (), TODAY)
    assert [finding.id for finding in found.findings] == ["PYSEC-1"] * is_found
    assert found.unaudited == ["torch"] * (not is_found)


def test_latest_expiry_of_several_entries_counts(file: Path) -> None:
    entries = [
        AcceptedVulnerability(id="CVE-1", reason="x", expires=TODAY + datetime.timedelta(days=day))
        for day in (-9, 9, -5)
    ]
    first, _ = advisories.audit(contents(), advisories.read_report(file), entries, TODAY).findings
    assert not first.counts


@pytest.mark.parametrize(("name", "day", "counts"), [("CVE-1", 1, False), ("PYSEC-1", 2, False), ("CVE-1", -1, True)])
def test_accepted_vulnerabilities_expire(file: Path, name: str, day: int, counts: bool) -> None:
    entry = AcceptedVulnerability(id=name, reason="not reached", expires=TODAY + datetime.timedelta(days=day - 1))
    other = AcceptedVulnerability(id="CVE-9", reason="gone", expires=TODAY)
    found = advisories.audit(contents(), advisories.read_report(file), (entry, other), TODAY)
    first, second = found.findings
    assert first.counts is counts
    state = "the exception has expired on" if counts else "accepted until"
    assert str(first).endswith(f"; {state} {entry.expires}: not reached")
    assert second.counts
    assert found.unused == [other]


def test_an_allow_list_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "allow.yml"
    path.write_text(inspection._ALLOW_EXAMPLE)
    (entry,) = advisories.read_allow_list(path)
    assert entry.expires == datetime.date(2026, 12, 31)
    path.write_text("accepted:\n  - {id: CVE-1, expires: 2026-07-01}\n")
    with pytest.raises(SpecError, match=r"allow.yml:2: accepted.0.reason: required, but missing"):
        advisories.read_allow_list(path)


def test_audit_as_json(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspection, "_connect_with_images", lambda _: None)
    monkeypatch.setattr(inside, "read_facts", lambda _, tag: contents(tag=tag))
    allow = tmp_path / "allow.yml"
    entries = [{"id": name, "reason": "not reached", "expires": "9999-01-01"} for name in ("CVE-1", "CVE-9")]
    allow.write_text(json.dumps({"accepted": entries}).replace('"9999-01-01"', "9999-01-01"))
    with pytest.raises(VulnerabilityError, match="a:1: 1 known vulnerabilities"):
        inspection.audit_image("a:1", file, allow, as_json=True)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    first, second = document["findings"]
    assert (first["id"], first["counts"], first["accepted"]) == ("PYSEC-1", False, entries[0])
    assert (first["name"], first["aliases"], first["fixed_in"]) == ("torch", ["CVE-1"], ["2.2.0"])
    assert (second["id"], second["counts"], second["accepted"]) == ("PYSEC-2", True, None)
    assert (document["tag"], document["unused"]) == ("a:1", entries[1:])
    assert (document["debian"], document["gaps"]) == (1, [*document["unaudited"], "debian"])
    assert document["unaudited"] == ["nvidia-cuda-runtime-cu11", "torch"], "the one of another version"
    assert "✗ torch 2.0.1+cu117: PYSEC-2, no fix yet" in printed.err


@pytest.mark.parametrize(
    ("accepted", "expires", "gap"),
    [
        ([], "", "nvidia-cuda-runtime-cu11 torch debian"),
        (["torch", "debian"], "9999-01-01", "nvidia-cuda-runtime-cu11"),
        (["nvidia-cuda-runtime-cu11", "torch"], "9999-01-01", "debian"),
        (["nvidia-cuda-runtime-cu11", "torch", "debian"], "2020-01-31", "nvidia-cuda-runtime-cu11 torch debian"),
        (["nvidia-cuda-runtime-cu11", "torch", "debian"], "9999-01-01", ""),
    ],
)
def test_an_audit_that_checks_nothing_is_no_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    accepted: list[str],
    expires: str,
    gap: str,
) -> None:
    monkeypatch.setattr(inspection, "_connect_with_images", lambda _: None)
    monkeypatch.setattr(inside, "read_facts", lambda _, tag: contents(tag=tag))
    (tmp_path / "known.json").write_text('{"dependencies": []}')
    entries = "".join(f"\n  - {{id: {name}, reason: x, expires: {expires}}}" for name in accepted)
    (tmp_path / "allow.yml").write_text(f"accepted:{entries or ' []'}\n")
    if gap:
        with pytest.raises(CoverageError, match=rf"in 0 Python packages, but not checked: {gap}\. Fix: "):
            inspection.audit_image("a:1", tmp_path / "known.json", tmp_path / "allow.yml")
    else:
        inspection.audit_image("a:1", tmp_path / "known.json", tmp_path / "allow.yml")
    out = " ".join(capsys.readouterr().out.split())
    assert "known.json does not cover 3 packages" in out
    assert "! Debian's packages: not checked (1)" in out
    assert ("✓" in out) == (not gap)


@pytest.mark.parametrize("text", ["[]", "{", '{"dependencies": [{"version": "1"}]}'])
def test_other_files_are_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "known.json").write_text(text)
    with pytest.raises(SpecError, match="not a report of `pip-audit --format json`"):
        advisories.read_report(tmp_path / "known.json")
