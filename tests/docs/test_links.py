"""Links of the documentation lead somewhere: files exist, and headings have the anchors. MkDocs is not needed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = runpy.run_path(str(ROOT / "scripts" / "links.py"))


def test_every_link_of_the_documentation_works() -> None:
    pages = LINKS["list_pages"]()
    assert {ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"} <= set(pages)
    assert list(LINKS["find_broken_links"](pages)) == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.md", ""),
        ("other.md#exit-codes--json", ""),
        ("#here", ""),
        ("https://example.org/none.md", ""),
        ("none.md", "no such file"),
        ("other.md#none", "other.md has no heading with this anchor"),
        ("#none", "page.md has no heading with this anchor"),
        ("train.py#none", "an anchor in a file that is not Markdown"),
    ],
)
def test_a_broken_link_is_found_with_its_line(tmp_path: Path, link: str, problem: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n`[code](none.md)`\n\n```\n[code](none.md)\n# None\n```\n\nSee [it]({link}).\n")
    (tmp_path / "other.md").write_text("# Exit codes & [`JSON`](none.md)\n")
    (tmp_path / "train.py").write_text("")
    assert list(LINKS["find_broken_links"]([page])) == ([f"{page}:10: {link}: {problem}"] if problem else [])
