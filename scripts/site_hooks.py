"""Hooks of mkdocs.yml: files outside docs/ to which pages link become pages too, so that the site is complete offline.

A Markdown file becomes a page under `repository/`. Any other file becomes a page with its text, and a directory becomes
its README or a list of its files. Links are rewritten.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from links import ROOT, find_links

DOCS = "docs/"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
"""Files that the navigation names; the others are found by their links."""
_LANGUAGES = {
    **dict.fromkeys((".yml", ".yaml"), "yaml"),
    **dict.fromkeys((".json", ".ipynb"), "json"),
    **dict.fromkeys((".sh", ".sbatch"), "bash"),
    ".py": "python",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file outside docs/ that a page links to. An event of MkDocs.

    Args:
        files: The files of the site; changed.
        config: The configuration of MkDocs.

    Returns:
        The files.
    """
    from mkdocs.structure.files import File

    waiting = [f"{DOCS}{file.src_uri}" for file in files.documentation_pages()] + list(PAGES)
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        uri = _page_of(path)
        if uri in done or not (ROOT / path).exists():
            continue
        done.add(uri)
        text = _read_page(path)
        if not path.startswith(DOCS):
            files.append(File.generated(config, uri, content=text))
        source = _source_of(uri)
        waiting += [_resolve(source, link[0])[0] for link in find_links(text)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of a page to the places that files have in the site. An event of MkDocs.

    Args:
        markdown: The text of the page.
        page: The page.
        config: The configuration of MkDocs.
        files: The files of the site.

    Returns:
        The text with other links.
    """
    path = _source_of(page.file.src_uri)
    parts, end = [], 0
    for link in find_links(markdown):
        target, anchor = _resolve(path, link[0])
        parts += [markdown[end : link.start()], _relative(page.file.src_uri, target, anchor, link[0])]
        end = link.end()
    return "".join([*parts, markdown[end:]])


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Shows `\\|` in a table as `|`: GitHub needs the backslash inside code, and Python-Markdown keeps it.

    Args:
        html: The content of the page.
        page: The page.
        config: The configuration of MkDocs.
        files: The files of the site.

    Returns:
        The content.
    """
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def _resolve(page: str, link: str) -> tuple[str, str]:
    """Returns the path of a link's target from the root of the repository, and its anchor with `#`."""
    name, mark, anchor = link.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
    return path, mark + anchor


def _relative(page: str, target: str, anchor: str, link: str) -> str:
    """Returns a link from a page of the site to a file of the repository."""
    if link.startswith("#"):
        return link
    return posixpath.relpath(_page_of(target), posixpath.dirname(page) or ".") + anchor


def _page_of(path: str) -> str:
    """Returns the place of a file or directory of the repository in the site's sources."""
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _source_of(uri: str) -> str:
    """Returns the path from which the links of a page start, from the root of the repository."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"{DOCS}{uri}"


def _read_page(path: str) -> str:
    """Returns the Markdown of a page: the file's own, a block of code, or a directory's README and list of files."""
    file = ROOT / path
    if file.is_dir():
        readme = file / "README.md"
        head = readme.read_text() if readme.exists() else f"# {path}\n"
        return f"{head}\n## Files\n\n{_list_files(file)}\n"
    if file.name == "README.md" and path not in PAGES:
        return _read_page(posixpath.dirname(path))
    text = file.read_text()
    if path.endswith(".md"):
        return text
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {file.name}\n\nThe file `{path}` of the repository:\n\n`````{language}\n{text.rstrip()}\n`````\n"


def _list_files(directory: Path) -> str:
    """Returns a list of links to the files of a directory that git does not ignore, without its README."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=directory, check=True, text=True, capture_output=True).stdout.split()
    return "\n".join(f"- [{name}]({name})" for name in sorted(names) if name != "README.md")
