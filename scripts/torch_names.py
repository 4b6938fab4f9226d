"""Writes the table of the public names that later releases of PyTorch brought, in toolkit/shoal_toolkit/data.

Run it when a release has come. From each wheel on PyPI it reads only the Python files, some megabytes, and does not
import them. A name counts from the first release on that has it; one that later releases have lost does not count.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

INDEX = "https://pypi.org/simple/torch/"
TABLE = Path(__file__).resolve().parents[1] / "toolkit/shoal_toolkit/data/torch_names.json"
WHEEL = re.compile(r"torch-(\d+\.\d+)\.(\d+)-cp\d+-cp\d+-manylinux\w+_x86_64\.whl$")
OLDEST = (2, 0)
"""Names of this release are in every image."""
BLOCK = 1 << 20
# Scripts that train do not use them, and they would make the table five times as large.
LEFT_OUT = ("torch.ao", "torch.fx", "torch.jit", "torch.onnx", "torch.package", "torch.testing")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Names = dict[str, set[str]]
"""The public names of each public module."""


class RemoteFile(io.RawIOBase):
    """A file of a web server that answers with ranges, read in blocks."""

    def __init__(self, url: str) -> None:
        self._url, self._place, self._blocks = url, 0, dict[int, bytes]()
        self._size = int(self._ask("0-0").headers["Content-Range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._place + size, self._size)
        first = self._place // BLOCK
        data = b"".join(self._read_block(number) for number in range(first, -(-end // BLOCK)))
        found = data[self._place - first * BLOCK : end - first * BLOCK]
        self._place += len(found)
        return found

    def _read_block(self, number: int) -> bytes:
        if number not in self._blocks:
            self._blocks[number] = self._ask(f"{number * BLOCK}-{(number + 1) * BLOCK - 1}").read()
        return self._blocks[number]

    def _ask(self, part: str):  # type: ignore[no-untyped-def]  # an open answer of urllib
        return urllib.request.urlopen(urllib.request.Request(self._url, headers={"Range": f"bytes={part}"}))


def main() -> int:
    """Reads all releases, and writes the table."""
    table: dict[str, dict[str, str]] = {}
    before: Names = {}
    for release, url in sorted(list_wheels().items()):
        names = read_names(url)
        for module, found in names.items():
            for name in found - before.get(module, set()):
                if release > OLDEST:
                    table.setdefault(module, {}).setdefault(name, ".".join(map(str, release)))
        before = {module: before.get(module, set()) | names.get(module, set()) for module in {*before, *names}}
        print(f"torch {release[0]}.{release[1]}: {sum(map(len, names.values()))} names", file=sys.stderr)
    TABLE.write_text(format_table(table, names))
    return 0


def list_wheels() -> dict[tuple[int, int], str]:
    """Returns the address of one wheel of the last patch of each minor release from `OLDEST` on."""
    request = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for file in files:
        if match := WHEEL.match(file["filename"]):
            major, minor = map(int, match[1].split("."))
            found[major, minor] = max(found.get((major, minor), (-1, "")), (int(match[2]), file["url"]))
    return {release: url for release, (_, url) in found.items() if release >= OLDEST}


def read_names(url: str) -> Names:
    """Returns the names that the Python files of a wheel define or import."""
    with zipfile.ZipFile(RemoteFile(url)) as wheel:
        trees = {name_module(path): ast.parse(wheel.read(path)) for path in list_public(wheel.namelist())}
    names = {module: set(list_names(tree)) for module, tree in trees.items()}
    for module, tree in trees.items():
        names[module] |= {name for source in list_stars(module, tree) for name in names.get(source, ())}
    for module in trees:
        parent, _, name = module.rpartition(".")
        names.setdefault(parent, set()).add(name)
    return names


def list_public(paths: Iterable[str]) -> Iterator[str]:
    """Yields the files of modules without an underscore at their beginning."""
    for path in paths:
        module = name_module(path)
        is_public = not re.search(r"(?:^|\.)_", module) and not module.startswith(LEFT_OUT)
        if path.startswith("torch/") and path.endswith(".py") and is_public:
            yield path


def name_module(path: str) -> str:
    """Returns the name of a module from its file in a wheel."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def list_names(tree: ast.Module) -> Iterator[str]:
    """Yields the public names of a module, also those in `if` and `try`."""
    for node in walk_statements(tree.body):
        found: list[str] = []
        if isinstance(node, DEFINITIONS):
            found = [node.name]
        elif isinstance(node, ast.ImportFrom):
            is_own = node.level > 0 or (node.module or "").startswith("torch")
            found = [alias.asname or alias.name for alias in node.names] if is_own else []
        elif isinstance(node, ast.Assign):
            found = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (name for name in found if not name.startswith("_") and name != "*")


def walk_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module that run when it is imported, without those for type checkers."""
    for node in body:
        if isinstance(node, ast.If) and {"TYPE_CHECKING", "__name__"} & {*re.findall(r"\w+", ast.unparse(node.test))}:
            continue
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, DEFINITIONS):
                yield from walk_statements(getattr(node, part, ()))


def list_stars(module: str, tree: ast.Module) -> Iterator[str]:
    """Yields the modules from which a module takes all names."""
    for node in walk_statements(tree.body):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            base = module.split(".")[: -(node.level - 1) or None] if node.level else []
            yield ".".join([*base, *filter(None, [node.module])])


def format_table(table: dict[str, dict[str, str]], newest: Names) -> str:
    """Returns the table as JSON, a line for each module. Names that the newest release lacks are left out."""
    lines = []
    for module in sorted(table):
        kept = {name: release for name, release in table[module].items() if name in newest.get(module, ())}
        by_release = {release: sorted(name for name in kept if kept[name] == release) for release in {*kept.values()}}
        ordered = dict(sorted(by_release.items(), key=lambda item: [int(part) for part in item[0].split(".")]))
        if ordered:
            joined = {release: " ".join(names) for release, names in ordered.items()}
            lines.append(f"  {json.dumps(module)}: {json.dumps(joined)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
