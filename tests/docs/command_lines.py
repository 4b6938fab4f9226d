"""Checks shell commands without running them: with the parser of each command, as far as it is at hand.

`check_shell` splits a text into simple commands. It finds the check of each one by its name in `_CHECKS`:

- `shoal`, `train`, `make`, `docker`, `pip`, `aws`, `pre-commit`, `torchrun` and `mpirun`: the command's own parser, or
  the data that it parses with, accepts the options. Images, targets and variables of make exist.
- `python` and scripts of this repository: the file exists and has the options.
- Commands in `_FOREIGN`, such as kubectl: only the syntax and the files.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import typer

from shoal.errors import ShoalError
from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal_toolkit.command_line import parse_command_line
from shoal_toolkit.errors import ContractError

from .blocks import ROOT

PARSED, SYNTAX = "parsed", "syntax"
_FOREIGN = (
    *("kubectl", "srun", "sbatch", "sinfo", "squeue", "scancel", "sky", "docker-compose", "horovodrun", "pip-audit"),
    "kubernetes-validate",
    *("cat", "cd", "chgrp", "chmod", "echo", "export", "git", "ls", "mkdir", "openssl", "rm", "sha256sum", "umask"),
    *(
        ".",
        "source",
        "set",
        "cp",
        "curl",
        "tar",
        "jq",
        "sleep",
        "nvidia-smi",
        "smddprun",
        "smddpmprun",
        "smddpsinglenode",
    ),
)
_OPERATORS = frozenset(";&|()\n")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=.*", re.DOTALL)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_/]*|.*[<>…].*|.*\.\.\..*")
_OUR_IMAGES = re.compile(r"(pytorch|tensorflow|huggingface)(-training:.*|-?\*.*)?|\*.*")


@dataclass
class Place:
    """Where commands are checked: a copy of the repository, and the directory in it."""

    root: Path
    directory: Path
    levels: list[str] = field(default_factory=list)
    """How far each command was checked, `PARSED` or `SYNTAX`."""


def check_shell(text: str, place: Place) -> None:
    """Checks the commands of a text for bash, and adds the level of each to `place.levels`.

    Raises:
        ValueError: If a command is invalid, or it is not in the tables of this module.
    """
    bash = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    if bash.returncode:
        raise ValueError(bash.stderr.strip())
    for words in split_commands(text):
        _check_command(words, place)


def split_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each simple command, without comments, redirections and operators."""
    text = re.sub(r"(?m)(^|[ \t])#( [^\n]*)?$", "", text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if set(token) <= _OPERATORS:
            if words:
                yield words
            words = []
        elif set(token) <= {"<", ">", "&"}:
            next(tokens, None)
        else:
            words.append(token)
    if words:
        yield words


def _check_command(words: list[str], place: Place) -> None:
    while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
        _check_variable(assigned["name"])
        words = words[1:]
    if not words:
        return
    if words[0] == "exec":
        words = words[1:]
    for word in words:
        _check_path(word, place)
    name = words[0].removeprefix(".venv/bin/")
    if name in _CHECKS:
        place.levels.append(_CHECKS[name](words[1:], place))
    elif name in _FOREIGN:
        place.levels.append(_check_foreign(name, words[1:], place))
    elif (ROOT / name).is_file():
        _check_options_in_text(place.root / name, words[1:])
        place.levels.append(PARSED)
    else:
        raise ValueError(f"the command {name!r} has no check. Fix: run the block, or extend {Path(__file__).name}")


def _check_path(word: str, place: Place) -> None:
    """Raises ValueError if a word is a path in a directory of the repository, but there is no such file."""
    for part in word.removeprefix("file://").split(":"):
        path = part.removeprefix("$PWD/")
        if re.match(r"(examples|benchmarks|scripts|docs|dockerfiles|tests|images|toolkit|library)/[\w./-]+$", path):
            _require_file(path, place)


def _require_file(path: str, place: Place) -> Path:
    for directory in (place.directory, place.root):
        if (directory / path).exists():
            return directory / path
    raise ValueError(f"{path}: no such file")


def _check_variable(name: str) -> None:
    """Raises ValueError if nothing documents a variable with a prefix of ours."""
    if re.match(r"(SHOAL|SMDDP|SAGEMAKER|SM)_", name) and not _documented(name):
        raise ValueError(f"{name}: no page of the reference has this variable")


@cache
def _documented(name: str) -> bool:
    text = "".join((ROOT / "docs" / path).read_text() for path in ("reference/variables.toml", "api/variables.toml"))
    prefixes = re.findall(r'^"?((?:SM|SMDDP|SAGEMAKER)_\w+_)\*"? =', text, re.MULTILINE)
    return re.search(rf"\b{name}\b", text) is not None or any(name.startswith(prefix) for prefix in prefixes)


def _check_foreign(name: str, words: Sequence[str], place: Place) -> str:
    if name == "cd" and words[0] != "-" and not _PLACEHOLDER.fullmatch(words[0]):
        place.directory = _require_file(words[0], place)
    for word in words:
        if re.fullmatch(r"[\w./-]+\.(sbatch|py)", word):
            _require_file(word, place)
    if name == "srun" and "bash" not in words and "train" in words:
        _check_train(words[words.index("train") + 1 :], place)
    if name.startswith("smddp") and "python" in words:
        _check_python(words[words.index("python") + 1 :], place)
    return SYNTAX


@cache
def _shoal() -> Any:
    """The application, with all commands."""
    from shoal import cli

    for module in cli.MODULES:
        importlib.import_module(f"shoal.commands.{module}")
    from shoal.commands.common import app

    return typer.main.get_command(app)


def _check_shoal(words: Sequence[str], place: Place) -> str:
    """Parses options and arguments with the command's own parser. Images are in buildspec.yml, and scripts exist."""
    with contextlib.chdir(place.directory):
        try:
            values = _parse_shoal(_shoal(), list(words), None)
        except (SystemExit, typer.Exit):
            return PARSED  # --version, --help
        except Exception as error:  # Typer has its own copy of Click, with no public name for its errors
            problem = error.format_message() if hasattr(error, "format_message") else str(error)
            raise ValueError(f"shoal {shlex.join(words)}: {problem}") from error
    for name in ("image", "images", "other"):
        _check_images(values.get(name) or ())
    for name in ("script", "source"):
        if values.get(name) and not _PLACEHOLDER.fullmatch(str(values[name])):
            _require_file(str(values[name]), place)
    return PARSED


def _parse_shoal(command: Any, words: list[str], parent: Any) -> dict[str, Any]:
    """Returns the parameters of a command, or of the command in a group that the words name."""
    context = command.make_context(command.name or "shoal", words, parent=parent)
    if not hasattr(command, "commands"):
        return dict(context.params)
    _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    return _parse_shoal(inner, rest, context)


def _check_images(images: str | Sequence[str]) -> None:
    """Raises ValueError if a name looks as an image of buildspec.yml, and is none."""
    for image in [images] if isinstance(images, str) else images:
        if _OUR_IMAGES.fullmatch(image):
            try:
                load(Project(ROOT).buildspec).choose((image,), ())
            except ShoalError as error:
                raise ValueError(str(error)) from error


def _check_train(words: Sequence[str], place: Place) -> str:
    try:
        parse_command_line(words)
    except ContractError as error:
        raise ValueError(str(error)) from error
    return PARSED


def _check_make(words: Sequence[str], place: Place) -> str:
    """Lets make list the commands of the target. Its shell runs nothing, also in lines that call make again."""
    makefile = (place.root / "Makefile").read_text()
    for word in words:
        variable = _ASSIGNMENT.fullmatch(word)
        if variable and not re.search(rf"\$\((if )?{variable['name']}\b|ifdef {variable['name']}\b", makefile):
            raise ValueError(f"make: the Makefile does not read {variable['name']}")
        if variable and variable["name"] == "IMAGE":
            _check_images(word.partition("=")[2])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "-C", str(place.root), "SHELL=/bin/true", *words]
    _call(command, environ)
    return PARSED


def _check_docker(words: Sequence[str], place: Place) -> str:
    """Lets docker parse the options: it prints its help if they are right. Checks the command in an image of ours."""
    if shutil.which("docker") is None:
        return SYNTAX
    verb, *rest = words
    _call(["docker", verb, "--help", *rest], {**os.environ, "DOCKER_HOST": "unix:///nonexistent"})
    for index, word in enumerate(rest):
        if word.partition(":")[0].endswith("-training") and "=" not in word:
            _check_images(word)
        if word == "train":
            _check_train(rest[index + 1 :], place)
            break
    return PARSED


def _check_help(name: str) -> Callable[[Sequence[str], Place], str]:
    """Returns a check that the command of the virtual environment has this subcommand with these options."""

    def check(words: Sequence[str], place: Place) -> str:
        _call([str(Path(sys.executable).with_name(name)), *words, "--help"], os.environ)
        return PARSED

    return check


def _call(command: Sequence[str], environ: Mapping[str, str]) -> None:
    ended = subprocess.run(command, env=environ, text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode:
        raise ValueError(f"{shlex.join(command)}: {(ended.stderr or ended.stdout).strip()[-500:]}")


def _check_pip(words: Sequence[str], place: Place) -> str:
    commands: Any = importlib.import_module("pip._internal.commands")
    verb, *rest = words
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            commands.create_command(verb).parser.parse_args(rest)
        except SystemExit:
            raise ValueError(f"pip {shlex.join(words)}: {errors.getvalue().strip()}") from None
    return PARSED


def _check_python(words: Sequence[str], place: Place) -> str:
    if words[:2] == ["-m", "pip"]:
        return _check_pip(words[2:], place)
    if words[:2] == ["-m", "venv"]:
        return SYNTAX
    path = _require_file(words[0], place)
    _check_options_in_text(path, words[1:])
    return PARSED


def _check_options_in_text(path: Path, words: Sequence[str]) -> None:
    """Raises ValueError if a script of the repository does not contain an option that it gets."""
    text = path.read_text()
    for word in words:
        if word.startswith("--") and not re.search(rf"{word.partition('=')[0]}(?![\w-])", text):
            raise ValueError(f"{path.name} has no option {word}")


def _check_mpirun(words: Sequence[str], place: Place) -> str:
    """Checks the options of mpirun with the toolkit's table, and then the command of a rank."""
    table = json.loads((ROOT / "toolkit" / "shoal_toolkit" / "data" / "mpirun.json").read_text())["options"]
    index = 0
    while words[index].startswith("-"):
        name = words[index].lstrip("-")
        found = [each for main, each in table.items() if name == main or name in each.get("also", ())]
        if not found:
            raise ValueError(f"mpirun has no option {words[index]}")
        index += 1 + found[0]["values"][0]
    _check_command(list(words[index:]), place)
    place.levels.pop()  # counted once
    return PARSED


def _check_torchrun(words: Sequence[str], place: Place) -> str:
    """Checks options with the text of torchrun's parser: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    _check_options_in_text(Path(spec.origin).parent / "distributed" / "run.py", words[:script])
    return _check_python(words[script:], place)


def _check_aws(words: Sequence[str], place: Place) -> str:
    """Checks the operation and the names of its parameters with the data of botocore."""
    session: Any = importlib.import_module("botocore.session")
    xform_name: Any = importlib.import_module("botocore").xform_name
    service, operation, *rest = words
    if operation in ("get-login-password", "cp"):  # of the command line only
        return PARSED
    model = session.get_session().get_service_model(service)
    operations = {xform_name(name, "-"): name for name in model.operation_names}
    if operation not in operations:
        raise ValueError(f"aws {service} has no operation {operation}")
    members = model.operation_model(operations[operation]).input_shape.members
    known = {xform_name(name, "-") for name in members} | {"cli-input-json", "region", "query", "output"}
    for word in rest:
        if word.startswith("--") and word[2:] not in known:
            raise ValueError(f"aws {service} {operation} has no option {word}")
        if word.startswith("file://"):
            _require_file(word.removeprefix("file://"), place)
    return PARSED


def check_imported_names(source: str) -> None:
    """Checks Python that cannot run here: its syntax, and the names of `smdistributed` that it uses.

    Raises:
        ValueError: If a package of `smdistributed` does not have a name.
    """
    names: Any = importlib.import_module("reference_pages.names")
    tree = ast.parse(source)
    packages = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("smdistributed")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            package = packages[node.value.id]
            if node.attr not in names.list_names(package):
                raise ValueError(f"{package} has no name {node.attr}")


_CHECKS: dict[str, Callable[[Sequence[str], Place], str]] = {
    "shoal": _check_shoal,
    "train": _check_train,
    "make": _check_make,
    "docker": _check_docker,
    "pip": _check_pip,
    "python": _check_python,
    "python3": _check_python,
    "mpirun": _check_mpirun,
    "torchrun": _check_torchrun,
    "aws": _check_aws,
    "pre-commit": _check_help("pre-commit"),
}
