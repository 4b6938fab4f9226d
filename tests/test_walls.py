"""The import rules: which package may import which, layers, no cycles, and where frameworks may be imported."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "tensorflow"}
DIRECTORIES = ("images", "toolkit", "checkpoint", "library", "rehearsal")
LAYERS: dict[str, tuple[str, ...]] = {
    "shoal": (
        "clean_text errors trust",
        "console formats limits",
        "protobuf",
        "matrix",
        "network docker_client",
        "sources",
        "builds image jobs scaffold",
        "report",
        "doctor",
        "commands",
        "cli",
    ),
    "shoal_toolkit": (
        "errors fast_typing hooks",
        "command_line files",
        "redact",
        "log",
        "system",
        "discovery",
        "job",
        "output plan result sidecars",
        "hosts",
        "preflight",
        "run",
        "cli",
        "__main__",
    ),
    "shoal_checkpoint": ("directories", "position", "torch tensorflow"),
    "smdistributed": ("core", "dataparallel modelparallel", "horovod"),
    "smdistributed.modelparallel": ("backend", "torch tensorflow", "__main__ test"),
    "smdistributed.modelparallel.torch": (
        "exceptions",
        "pipeline",
        "plan",
        "nn",
        "script",
        "amp optimizers patches state_mod utils",
    ),
    "shoal_rehearsal": ("settings", "import_hooks", "torch tensorflow"),
}
"""What each package consists of, lowest layer first. A part imports only parts of lower layers."""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by absolute name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(directory: str) -> list[Path]:
    return sorted((ROOT / directory).rglob("*.py"))


def forbidden_imports(directory: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(directory)
        for name in imports(path)
        if any(f"{name}.".startswith(f"{package}.") for package in forbidden)
    ]


@pytest.mark.parametrize(
    ("directory", "forbidden"),
    [
        ("images", ("shoal_toolkit", "shoal_checkpoint", "smdistributed", "shoal_rehearsal", "torch", "tensorflow")),
        ("toolkit", ("shoal", "shoal_checkpoint", "smdistributed", "shoal_rehearsal", "torch", "tensorflow")),
        ("checkpoint", ("shoal", "shoal_toolkit", "smdistributed", "shoal_rehearsal")),
        ("library", ("shoal", "shoal_toolkit", "shoal_checkpoint", "shoal_rehearsal")),
        ("rehearsal", ("shoal", "shoal_toolkit", "shoal_checkpoint", "smdistributed")),
    ],
)
def test_packages_do_not_import_each_other(directory: str, forbidden: tuple[str, ...]) -> None:
    assert modules(directory)
    assert forbidden_imports(directory, forbidden) == []


def test_frameworks_are_imported_only_under_the_folder_of_that_name() -> None:
    for path in (*modules("library"), *modules("rehearsal"), *modules("checkpoint")):
        parts = path.relative_to(ROOT).parts
        for name in imports(path):
            top = name.removeprefix("smdistributed.core.").split(".")[0]  # core has such folders too
            assert top not in FRAMEWORKS or top in parts, f"{path.relative_to(ROOT)} imports {name}"


def test_the_toolkit_needs_the_standard_library_only() -> None:
    """Except boto3 and pip, which modules for programs of their own import when they are called."""
    extras = {"s3.py": ("boto3", "botocore"), "install.py": ("pip",), "locked.py": ("pip",)}
    allowed = sys.stdlib_module_names | {"shoal_toolkit"}
    for path in modules("toolkit"):
        own = ("sagemaker_training",) if path.parent.name == "sagemaker_training" else ()
        for name in imports(path):
            extra = name.split(".")[0] in (*own, *extras.get(path.name, ()))
            assert extra or name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def module_edges(directory: str) -> set[tuple[str, str]]:
    """Return which module imports which, within a directory; imports under TYPE_CHECKING and in functions count.

    An import of `a.b.c` is one of the packages `a` and `a.b` too, unless the importing module is inside them.
    """
    names = {module_name(path): path for path in modules(directory)}
    edges = set()
    for module, path in names.items():
        for name in imports(path):
            parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
            found = [each for each in (*parents, name) if each in names]
            edges |= {(module, each) for each in found[-1:]}
            edges |= {(module, each) for each in found[:-1] if not f"{module}.".startswith(f"{each}.")}
    return {(module, imported) for module, imported in edges if module != imported}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")


def sibling_edges(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return which part of a package imports which other part of it, packages taken as a whole."""
    found = set()
    for one, other in edges:
        pairs = zip(one.split("."), other.split("."))
        common = [left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        parts = [".".join(name.split(".")[: len(common) + 1]) for name in (one, other)]
        if ".".join(common) not in parts:
            found.add((parts[0], parts[1]))
    return found


def cycles(edges: Iterable[tuple[str, str]]) -> set[frozenset[str]]:
    components = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return {frozenset(component) for component in components if len(component) > 1}


def test_there_are_no_import_cycles() -> None:
    """Neither of modules nor, seen as wholes, of the packages and modules of one package."""
    edges = [module_edges(directory) for directory in DIRECTORIES]
    found = set().union(*(cycles(each) | cycles(sibling_edges(each)) for each in edges))
    assert found == set()


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_downwards_only(package: str) -> None:
    layer = {f"{package}.{part}": number for number, parts in enumerate(LAYERS[package]) for part in parts.split()}
    (directory,) = (name for name in DIRECTORIES if (ROOT / name / package.replace(".", "/")).is_dir())
    depth = package.count(".") + 2
    names = {".".join(module_name(path).split(".")[:depth]) for path in modules(directory)}
    assert {name for name in names if name.startswith(f"{package}.")} == set(layer), "not as in LAYERS"
    edges = sibling_edges(module_edges(directory))
    assert {edge for edge in edges if edge[0] in layer and layer[edge[0]] <= layer.get(edge[1], -1)} == set()
