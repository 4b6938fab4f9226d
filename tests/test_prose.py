"""The prose rules in styles/Shoal, how scripts/prose.py reads files, and the links between documents."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "prose.py"
PROSE = runpy.run_path(str(SCRIPT))
RULES = PROSE["read_rules"]()


def findings(path: Path) -> set[tuple[int, str]]:
    return {(each.line, each.rule.removeprefix("Shoal.")) for each in PROSE["check"](PROSE["extract"](path), RULES)}


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("Conditions", "60 where it is not set.", "The directory where it is. Where is it?"),
        ("Nouns", "It collects what builds need.", "It says what failed."),
        ("Nouns", "Those of the image, whose tag ends so.", "The tags of the image."),
        ("SentenceLength", "One " + "word " * 25 + "more.", "One " + "word " * 20 + "more. Second sentence."),
        ("Semicolons", "It stops; it waits; it ends.", "It stops; it waits."),
        ("Voice", "A file that cannot be read is told.", "You get an error."),
        ("Glossary", "The verdict of the engine.", "The result of the communication engine in Docker Engine."),
        ("Archaic", "It shall start anew.", "It must start again, and there is no other way."),
        ("Messages", "One image is wanted.", "Fix: name one image."),
    ],
)
def test_a_rule_finds_bad_sentences_and_accepts_good_ones(tmp_path: Path, rule: str, bad: str, good: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{good}\n\n{bad}\n")
    assert findings(page) == {(3, rule)}


def test_measurements_are_on_one_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A page.\n\n```\nRESULT name=x ours=1\n```\n")
    assert findings(page) == {(4, "Evidence")}
    assert PROSE["disabled_rules"](Path("docs/benchmarks.md")) == {"Shoal.Evidence"}


def test_docstrings_comments_and_messages_of_python_are_read_but_code_is_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '''"""Reads a file.

A second line with anew in it.
"""
x = 1  # shall be one
raise ValueError(f"the file {x} is not read: shall be told")
y = "anew"
z = re.compile("shall this pattern of words")
# The name `anew` and anew_file.py are code.
'''
    )
    assert findings(module) == {(3, "Archaic"), (5, "Archaic"), (6, "Archaic"), (6, "Voice")}


def test_comments_of_c_and_of_shell_scripts_are_read(tmp_path: Path) -> None:
    source, script = tmp_path / "engine.c", tmp_path / "run.sh"
    source.write_text('int x; /* It starts.\n * It starts anew. */\nchar *y = "anew";\n')
    script.write_text("#!/bin/sh\necho anew # it starts anew\n")
    assert findings(source) == {(2, "Archaic")}
    assert findings(script) == {(2, "Archaic")}


def test_the_command_prints_findings_and_fails(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "page.md").write_text("It starts anew.\n")
    done = subprocess.run([sys.executable, SCRIPT, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "page.md:1: Shoal.Archaic: Use 'again' instead of 'anew'.\n")
    assert "prose: 1 findings in 1 files" in done.stderr


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines()]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = unquote(link).partition("#")
        if re.match(r"https?:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_newcomers_path_leads_to_functions_that_exist_in_at_most_three_files() -> None:
    rows = re.findall(r"^\| [^|]+\? \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        files = re.findall(r"`([\w./]+/[\w.]+)`(?: \(([^)]+)\))?", row)
        assert len(files) <= 3
        for path, remark in files:
            names = re.findall(r"`(\w+)`", remark)
            assert [name for name in names if name not in (ROOT / path).read_text()] == []
