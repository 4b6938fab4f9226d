"""Counts the modules that published training scripts import, and the commands that they run.

It reads commits of git repositories, not their work trees. It runs nothing from them, and keeps names and counts only.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

RULES = Path(__file__).with_name("data") / "everyday.yml"
_WORD = re.compile(r"[a-zA-Z][\w.-]*")
_SPLIT = re.compile(r"&&|\|\||[;|()`]|\$\(")
_PREFIXES = frozenset(
    ["if", "then", "do", "else", "elif", "while", "until", "!", "time", "exec", "sudo", "nohup", "{", "env"]
)
_NO_COMMANDS = frozenset(["fi", "done", "esac", "for", "case", "in", "function", "select", "}", "]", "]]", "[", "[["])
_CALLS = frozenset(["run", "call", "check_call", "check_output", "Popen", "system", "popen"])


@dataclass
class Needs:
    """The modules and commands that the scripts of a framework take for granted, and how often."""

    scripts: int = 0
    imports: Counter[str] = field(default_factory=Counter)
    """Import statements by the module that they name, with dots."""
    commands: Counter[str] = field(default_factory=Counter)
    """Commands of shell scripts, and those that Python scripts start."""

    def add(self, other: Needs) -> None:
        self.scripts += other.scripts
        self.imports.update(other.imports)
        self.commands.update(other.commands)


@dataclass(frozen=True)
class Script:
    """A script of a repository. `modules`: its import statements."""

    path: PurePosixPath
    text: str
    modules: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


def read_rules() -> dict[str, Any]:
    """Return data/everyday.yml."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    return rules


def read_scripts(repository: Path, commit: str, directory: str) -> dict[PurePosixPath, str]:
    """Return the text of each `.py` and `.sh` file of a directory at a commit."""
    listed = _git(repository, "ls-tree", "-rz", "--full-tree", commit, "--", directory).split(b"\0")
    rows = [line.decode(errors="replace").partition("\t") for line in listed if line.endswith((b".py", b".sh"))]
    asked = "".join(f"{about.split()[2]}\n" for about, _, _ in rows)
    found, answer = {}, _git(repository, "cat-file", "--batch", given=asked.encode())
    for _, _, path in rows:
        head, _, answer = answer.partition(b"\n")
        size = int(head.split()[2])
        found[PurePosixPath(path)] = answer[:size].decode(errors="replace")
        answer = answer[size + 1 :]
    return found


def resolve_commit(repository: Path, name: str) -> str:
    """Return the digest of a commit, given its name in the repository."""
    return _git(repository, "rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()


def _git(repository: Path, *words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", "-C", repository, *words], input=given, capture_output=True, check=True).stdout


def measure(files: Mapping[PurePosixPath, str], rules: Mapping[str, Any]) -> dict[str, Needs]:
    """Return the needs of training scripts by framework. Modules of the repository itself are left out."""
    globs = [glob for entry in rules["skipped"] for glob in entry["files"]]
    kept = [path for path in files if not any(fnmatchcase(f"/{path}", glob) for glob in globs)]
    python = [script for path in kept if path.suffix == ".py" and (script := _parse(path, files[path]))]
    training = {script.path: name for script in python if (name := _framework_of(script, rules))}
    needs = {name: Needs() for name in rules["frameworks"]}
    for script in python:
        if name := training.get(script.path):
            needs[name].scripts += 1
            needs[name].imports.update(module for module in script.modules if not _is_local(module, script.path, files))
            needs[name].commands.update(script.commands)
    for path in kept:
        if path.suffix == ".sh" and (commands := _shell_of_training(files[path], rules["shell"])):
            beside = [name for other, name in training.items() if path.parent in (other.parent, *other.parents)]
            name = Counter(beside).most_common(1)[0][0] if beside and path.parent != PurePosixPath() else "pytorch"
            needs[name].scripts += 1
            needs[name].commands.update(commands)
    return needs


def _parse(path: PurePosixPath, text: str) -> Script | None:
    """Return a Python script; None if it is not written for Python 3."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return None
    return Script(path, text, tuple(_list_modules(nodes)), tuple(_list_started(nodes)))


def _list_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _list_started(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the commands that calls such as subprocess.run and os.system name literally."""
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _CALLS
            and node.args
        ):
            owner, first = node.func.value, node.args[0]
            if not isinstance(owner, ast.Name) or owner.id not in ("subprocess", "os", "sp"):
                continue
            if isinstance(first, ast.List) and first.elts:
                first = first.elts[0]
                texts = [first.value] if isinstance(first, ast.Constant) else []
            else:
                texts = [part.value for part in ast.walk(first) if isinstance(part, ast.Constant)][:1]
            for text in texts:
                if isinstance(text, str):
                    yield from list_commands(text)


def _framework_of(script: Script, rules: Mapping[str, Any]) -> str | None:
    tops = {module.partition(".")[0] for module in script.modules}
    return next((name for name, modules in rules["frameworks"].items() if tops & set(modules)), None)


def _is_local(module: str, path: PurePosixPath, files: Iterable[PurePosixPath]) -> bool:
    """Return whether a module is in the script's example: beside the script, or in a directory next to one above it."""
    top = module.partition(".")[0]
    above = [parent for parent in path.parents if parent != PurePosixPath()]
    example = above[-3] if len(above) > 3 else above[-1] if above else PurePosixPath()
    return any(
        top in (other.stem, *other.parts[len(example.parts) :]) for other in files if other.is_relative_to(example)
    )


def _shell_of_training(text: str, rules: Mapping[str, Any]) -> list[str]:
    """Return the commands of a shell script; none if it starts no training or runs outside of containers."""
    commands = list_commands(text)
    if not {*commands} & {*rules["starts"]} or {*commands} & {*rules["outside"]}:
        return []
    functions = set(re.findall(r"^\s*(?:function\s+)?(\w+)\s*\(\)", text, re.MULTILINE))
    return [command for command in commands if command not in functions]


def list_commands(text: str) -> list[str]:
    """Return the commands of a shell script: the first words outside of quoted texts and comments."""
    found = []
    text = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"'[^']*'", "''", text.replace("\\\n", " "))
    text = re.sub(r'"(?:\\.|[^"\\$`]|\$(?!\())*"', '""', text)
    for line in text.splitlines():
        for part in _SPLIT.split(re.sub(r"(^|\s)#.*", "", line)):
            words = part.split()
            while words and (words[0] in _PREFIXES or re.match(r"\w+=", words[0])):
                words = words[1:]
            if words and _WORD.fullmatch(words[0]) and words[0] not in _NO_COMMANDS:
                found.append(words[0])
    return found
