"""Checks that each relative link and anchor in README, CONTRIBUTING, CHANGELOG, docs and examples leads somewhere.

Prints one line per broken link, and exits 1 if there is one. It needs no network, and ignores web addresses.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=(?:\s+\"[^\"]*\")?\))")
_ADDRESS = re.compile(r"[a-z][a-z+.-]*:")
_CODE = re.compile(
    r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$|<!--.*?-->|(`+)(?!`).*?(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE
)
_HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.MULTILINE)
_FENCE = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)


def find_links(markdown: str) -> Iterator[re.Match[str]]:
    """Yields a match for the target of each link to a file or an anchor, outside of code.

    Args:
        markdown: The text of a page.

    Yields:
        A match of the target alone, such as `install.md#from-wheels`, at its place in the page.
    """
    without_code = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), markdown)
    return (link for link in LINK.finditer(without_code) if not _ADDRESS.match(link[0]))


@functools.cache
def read_anchors(path: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings, as GitHub and the site make them.

    Args:
        path: The page.

    Returns:
        The anchors, without `#`. A repeated heading counts once, because GitHub and the site number it differently.
    """
    headings = _HEADING.findall(_FENCE.sub("", path.read_text()))
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts)


def find_broken_links(pages: Iterable[Path]) -> Iterator[str]:
    """Yields a line for each broken link: its page, line, target and the problem.

    Args:
        pages: Markdown files.

    Yields:
        One line per broken link.
    """
    for page in pages:
        markdown = page.read_text()
        for link in find_links(markdown):
            problem = _find_problem(page, link[0])
            if problem:
                line = markdown.count("\n", 0, link.start()) + 1
                yield f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}:{line}: {link[0]}: {problem}"


def _find_problem(page: Path, target: str) -> str:
    """Says what is wrong with a link; empty if it works."""
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return "no such file"
    if not anchor:
        return ""
    if path.suffix != ".md":
        return "an anchor in a file that is not Markdown"
    return "" if anchor in read_anchors(path) else f"{path.name} has no heading with this anchor"


def list_pages() -> list[Path]:
    """Returns the pages that readers see, sorted.

    Returns:
        Paths of Markdown files.
    """
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def main() -> None:
    problems = list(find_broken_links(list_pages()))
    print("\n".join(problems), end="\n" * bool(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
