"""Finds the imports of a script in its source and in its own modules, without running it."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # new in Python 3.10
    from typing import TypeGuard

_MOST_FILES = 1000
_MOST_BYTES = 1 << 20  # of a source file


class Imported(NamedTuple):
    """An import of a script."""

    module: str
    name: str  # of `from module import name`; empty otherwise
    at_import: bool  # whether it is executed when its file is imported, and not only in a function


COMPILER = Imported("torch._dynamo", "", True)
_COMPILING = ("compile", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "optim")


def find_imports(arguments: Sequence[str], path: Sequence[str]) -> list[Imported]:
    """Returns the imports of modules that are not the script's own, in the order in which they are found.

    COMPILER is among them if a file uses what imports it later.

    Files that are missing or no Python are left out: the script gets the error itself. There are none if a file, before
    it imports something, changes the environment or sys.path, or starts a program, such as pip: imports depend on that.

    Args:
        arguments: The arguments of Python: a file, or `-m` and a module.
        path: Directories with modules of the script's own; the first is the one that Python puts first on its path.
    """
    waiting, package = _find_start(arguments, path)
    seen, found = set(waiting), dict[Imported, None]()
    while waiting and len(seen) <= _MOST_FILES:
        file = waiting.pop(0)
        imports = _read_imports(file)
        if imports is None:
            return []
        for each in imports:
            own = _find_files(each, file, path, package)
            waiting += [other for other in own if other not in seen]
            seen.update(own)
            if not own and not each.module.startswith("."):
                found[each] = None
    return list(found)


def _find_start(arguments: Sequence[str], path: Sequence[str]) -> tuple[list[str], str]:
    """Returns the files of the script, and the directory of an installed package that it is a part of."""
    if arguments[0] != "-m":
        return [arguments[0]], ""
    top = arguments[1].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    package = os.path.dirname(spec.origin) if spec and spec.submodule_search_locations and spec.origin else ""
    roots = [*path, os.path.dirname(package)] if package else path
    return [file for name in (arguments[1], f"{arguments[1]}.__main__") for file in _find_module(name, roots)], package


def _read_imports(file: str) -> list[Imported] | None:
    """Returns the imports in a file; None if it changes, before one of them, what imports depend on."""
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read(_MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    outside, later = (
        {id(each) for node in ast.walk(tree) if isinstance(node, kinds) for each in ast.walk(node)}
        for kinds in (_LATER, _FUNCTIONS)
    )
    found: list[Imported] = [COMPILER] if _uses_compiler(tree) else []
    last, preparing = 0, []  # lines
    for node in ast.walk(tree):
        at_import = id(node) not in outside
        if isinstance(node, ast.Import):
            found += [Imported(alias.name, "", at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [Imported(module, alias.name, at_import) for alias in node.names]
        elif id(node) not in later and _prepares(node):
            preparing.append(node.lineno)
        if at_import and isinstance(node, (ast.Import, ast.ImportFrom)):
            last = max(last, node.lineno)
    return None if preparing and min(preparing) < last else found


def _uses_compiler(tree: ast.AST) -> bool:
    """Whether a file makes an optimizer or a parallel model, or compiles one: torch then imports its compiler."""
    names = set(_COMPILING)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.name in _COMPILING and alias.asname}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any("optim" in module.split(".") for module in modules):
                return True
    used = (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(tree))
    return any(name in names for name in used)


def _prepares(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    """Whether a statement may change what later imports do."""
    if isinstance(node, ast.Call):
        words = ast.unparse(node.func)
        if words.startswith(("os.environ.", "environ.")) and not words.endswith(_CHANGES):
            return False
        return words.startswith(_PREPARING) and not _is_late(node.args[0] if node.args else None)
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        return False
    targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
    return any(
        ast.unparse(target).startswith(("os.environ[", "environ[", "sys.path"))
        and not _is_late(target.slice if isinstance(target, ast.Subscript) else None)
        for target in targets
    )


def _is_late(name: ast.expr | None) -> bool:
    """Whether no import reads the variable of this name."""
    return isinstance(name, ast.Constant) and str(name.value).startswith(_LATE_VARIABLES)


_LATE_VARIABLES = ("WANDB_", "NCCL_", "MASTER_", "TOKENIZERS_", "CUDA_VISIBLE_DEVICES")
_CHANGES = (".setdefault", ".update", ".pop", ".clear")
_PREPARING = (
    *("os.environ.", "environ.", "os.putenv", "os.unsetenv", "os.system", "os.popen", "os.exec", "os.spawn"),
    *("subprocess.", "sys.path.", "site.", "multiprocessing.set_"),
)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LATER = (*_FUNCTIONS, ast.If)  # an `if` may be TYPE_CHECKING, or of an option


def _find_files(each: Imported, file: str, path: Sequence[str], package: str) -> list[str]:
    """Returns the files of the script's own that an import executes."""
    module = each.module.lstrip(".")
    level = len(each.module) - len(module)
    roots = list(path)
    if level:
        roots = [os.path.normpath(os.path.join(os.path.dirname(file), *[os.pardir] * (level - 1)))]
    elif package and module.partition(".")[0] == os.path.basename(package):
        roots.append(os.path.dirname(package))
    names = [".".join(filter(None, (module, each.name))), module] if each.name else [module]
    return [found for name in names if name for found in _find_module(name, roots)]


def _find_module(name: str, roots: Sequence[str]) -> list[str]:
    """Returns the files of a module and of the packages that contain it, of the first directory that has it."""
    parts = name.split(".")
    for root in roots:
        packages = [os.path.join(root, *parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
        found = [file for file in (*packages, os.path.join(root, *parts) + ".py") if os.path.isfile(file)]
        if found:
            return found
    return []
