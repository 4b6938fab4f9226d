"""Reads commands that people type after the image, such as `torchrun --nproc_per_node=2 train.py --epochs 3`.

`commands` in the toolkit's data/launchers.json has their options, and describes the columns. An option with a meaning
here becomes an option of `shoal`. The others are refused, or a note says that they have no effect.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from shoal.errors import UsageError, did_you_mean
from shoal.jobs.distribution import read_launcher_table
from shoal.limits import read_file

_EACH_GPU = ("gpu", "auto")
"""Values of --nproc_per_node that mean a rank for each GPU, which is the default here."""
_NOTES = {
    "meeting": "no effect: Shoal gives the ranks their meeting point",
    "output": "no effect: log.jsonl and the report have the output of each rank",
}
_CONFIG_BYTES = 1 << 20
_KINDS = {
    **dict.fromkeys(("NO", "MULTI_GPU", "MULTI_CPU"), ()),
    "FSDP": ("--use_fsdp",),
    "DEEPSPEED": ("--use_deepspeed",),
    "MEGATRON_LM": ("--use_megatron_lm",),
}
"""The option for each `distributed_type` of accelerate's files."""


@dataclass(frozen=True)
class TypedCommand:
    """The script, ranks and options of a typed command."""

    name: str
    """Such as `accelerate launch`."""
    launcher: str = ""
    """Its name in `distribution`; empty: the script is not started by a launcher."""
    script: str = ""
    """The path of the script, or the name of the module."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    """For the script."""
    hosts: str = ""
    """N or MIN:MAX; empty: not given, as for the next ones."""
    ranks: str = ""
    """Per host."""
    total: str = ""
    """Ranks of all hosts."""
    restarts: str = ""
    config: str = ""
    """The path of a file of accelerate."""
    passed: tuple[str, ...] = ()
    """Options for the launcher itself."""
    variables: tuple[str, ...] = ()
    """NAME=VALUE."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Syntax:
    """An entry of `commands`."""

    name: str
    words: Sequence[str]
    launcher: str = ""
    flags: Sequence[str] = ()
    takes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    passes: bool = False

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each option."""
        return {option: meaning for meaning, options in self.takes.items() for option in options}


@cache
def _read_syntax() -> tuple[_Syntax, ...]:
    return tuple(_Syntax(name, **entry) for name, entry in read_launcher_table()["commands"].items())


def list_commands() -> list[str]:
    """Returns the names of the commands."""
    return [each.name for each in _read_syntax()]


def is_command(word: str) -> bool:
    """Returns whether a command begins with this word."""
    return any(word == words.split()[0] for each in _read_syntax() for words in each.words)


def read_command(words: Sequence[str]) -> TypedCommand:
    """Returns the script, ranks and options of a command.

    Args:
        words: The command, from its first word on.

    Raises:
        UsageError: If an option is unknown or refused, or no script follows.
    """
    syntax, count = _find_syntax(words)
    rest = list(words[count:])
    command = TypedCommand(syntax.name, syntax.launcher)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, value = _split_option(syntax, word, rest)
        command = _take_option(command, syntax, option, value, word)
    if not rest:
        raise UsageError(
            f"{syntax.name}: no script follows. Fix: such as shoal run IMAGE {syntax.name} train.py --epochs 3"
        )
    return dataclasses.replace(command, script=rest[0], arguments=tuple(rest[1:]))


def _find_syntax(words: Sequence[str]) -> tuple[_Syntax, int]:
    """Returns the longest command with which the words begin, and its number of words. Raises `UsageError`."""
    found = [
        (len(begin.split()), syntax)
        for syntax in _read_syntax()
        for begin in syntax.words
        if list(words[: len(begin.split())]) == begin.split()
    ]
    if not found:
        near = [name for name in list_commands() if name.split()[0] == words[0]]
        raise UsageError(f"{shlex.join(words[:2])}: not a command that starts a script. Fix: {near[0]} SCRIPT")
    count, syntax = max(found, key=lambda pair: pair[0])
    return syntax, count


def _split_option(syntax: _Syntax, word: str, rest: list[str]) -> tuple[str, str]:
    """Returns the name of an option and its value, which is empty for a flag. Takes it from `rest` if it is there."""
    option, equals, value = word.partition("=")
    name = option.lstrip("-").replace("-", "_")
    if equals or name in syntax.flags:
        return name, value
    if not word.startswith("--") and len(name) > 1:  # -Wignore
        return name[0], word[2:]
    known = name in syntax.meanings or name in syntax.variables or name in syntax.refused or syntax.passes
    if known and not rest:
        raise UsageError(f"{syntax.name} {word}: its value is missing. Fix: {word} VALUE")
    return name, rest.pop(0) if known else ""


def _take_option(command: TypedCommand, syntax: _Syntax, option: str, value: str, word: str) -> TypedCommand:
    """Returns the command with one more option. Raises `UsageError` if it is unknown or refused."""
    shown = word.partition("=")[0]
    if option in syntax.refused:
        raise UsageError(f"{syntax.name} {shown}: has no equivalent in Shoal. Fix: {syntax.refused[option]}")
    if option in syntax.variables:
        variable = syntax.variables[option].format(value=value)
        return dataclasses.replace(command, variables=(*command.variables, variable))
    meaning = syntax.meanings.get(option, "passed" if syntax.passes else "")
    if not meaning:
        raise _unknown_option(syntax, option, shown)
    if meaning == "passed":
        words = (word,) if "=" in word or option in syntax.flags else (word, value)
        return dataclasses.replace(command, passed=(*command.passed, *words))
    if note := _NOTES.get(meaning):
        return dataclasses.replace(command, notes=(*command.notes, f"{syntax.name} {shown} has {note}"))
    return dataclasses.replace(command, **_read_value(meaning, value, f"{syntax.name} {shown}"))


def _unknown_option(syntax: _Syntax, option: str, shown: str) -> UsageError:
    known = [*syntax.meanings, *syntax.variables]
    listed = ", ".join(("--" if len(name) > 2 else "-") + name for name in known)
    hint = did_you_mean(option, known) or f" Allowed: {listed}."
    return UsageError(
        f"{syntax.name} {shown}: no such option.{hint} Fix: an argument for the script stands after the script"
    )


def _read_value(meaning: str, value: str, shown: str) -> dict[str, Any]:
    """Returns the field of a `TypedCommand` for an option; none if there is nothing to do. Raises `UsageError`."""
    if meaning == "same" or (meaning == "ranks" and value in _EACH_GPU):
        return {}
    if meaning == "module":
        return {"is_module": True}
    if meaning == "torchrun":
        return {"launcher": "torch_distributed"}
    if meaning in ("ranks", "total", "restarts") and not re.fullmatch("[0-9]{1,6}", value):
        raise UsageError(f"{shown} {value}: expected a number. Fix: {shown} 2")
    return {meaning: value}


def read_accelerate_file(command: TypedCommand, source: Path, given: Mapping[str, Any]) -> TypedCommand:
    """Returns a command with the settings of its file of accelerate that neither it nor `given` has.

    Args:
        command: A command with `config`, relative to the current directory.
        source: The directory that reaches the hosts.
        given: As for `build_options`.

    Raises:
        UsageError: If the file is not in the source, cannot be read, or is about another platform.
    """
    place = Path(command.config)
    option = f"{command.name} --config_file {place}"
    if not place.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{option}: not in {source}, which the job gets. Fix: copy the file there")
    try:
        document = YAML(typ="safe").load(read_file(place, _CONFIG_BYTES))
    except (OSError, YAMLError, ValueError) as error:
        raise UsageError(f"{option}: cannot be read: {error}. Fix: name a file of `accelerate config`") from error
    if not isinstance(document, dict):
        raise UsageError(f"{option}: has no settings. Fix: name a file of `accelerate config`")
    kind = str(document.get("distributed_type", "NO"))
    if kind not in _KINDS or document.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UsageError(
            f"{option}: distributed_type {kind} of {document.get('compute_environment')} does not run here. Allowed:"
            f" {', '.join(_KINDS)}, of LOCAL_MACHINE. Fix: change the file"
        )
    passed = [*command.passed, "--config_file", str(place.resolve().relative_to(source.resolve()))]
    own = [word for word in _KINDS[kind] if not any(other.startswith("--use_") for other in command.passed)]
    hosts = "" if "hosts" in given else str(document.get("num_machines") or "")
    total = "" if "procs_per_host" in given else str(document.get("num_processes") or "")
    return dataclasses.replace(
        command, passed=(*passed, *own), hosts=command.hosts or hosts, total=command.total or total
    )


def build_distribution(command: TypedCommand) -> dict[str, Any]:
    """Returns the argument `distribution` for a command; empty if it has no launcher."""
    if not command.launcher:
        return {}
    options = {"launch_options": shlex.join(command.passed)} if command.passed else {}
    return {command.launcher: {"enabled": True, **options}}


def build_options(command: TypedCommand, given: Mapping[str, Any]) -> list[str]:
    """Returns the options of `shoal` with the meaning of a command's own. Options that are given too are left out.

    Args:
        given: Values of `hosts`, `procs_per_host`, `max_restarts` and `distribution`, if these options are given.

    Raises:
        UsageError: If a given option contradicts the command.
    """
    if command.launcher and given.get("distribution"):
        raise UsageError(f"--distribution and {command.name}: both select a launcher. Fix: leave out one")
    ranks = command.ranks or _share_ranks(command, str(given.get("hosts") or command.hosts or 1))
    wanted = {"hosts": command.hosts, "procs_per_host": ranks, "max_restarts": command.restarts}
    if document := build_distribution(command):
        wanted["distribution"] = json.dumps(document)
    words = [word for variable in command.variables for word in ("--env", variable)]
    for name, value in wanted.items():
        option = f"--{name.replace('_', '-')}"
        if value and name not in given:
            words += [option, value]
        elif value and str(given[name]) != value:
            raise UsageError(f"{option} {given[name]}: but {command.name} asks for {value}. Fix: leave out one of them")
    return words


def _share_ranks(command: TypedCommand, hosts: str) -> str:
    """Returns the ranks per host for a command that has the ranks of all hosts. Raises `UsageError` if they differ."""
    if not command.total:
        return ""
    count = int(hosts.rpartition(":")[2]) if hosts.rpartition(":")[2].isdecimal() else 1
    if int(command.total) % max(count, 1):
        raise UsageError(
            f"{command.name}: {command.total} ranks cannot be divided between {count} hosts. Fix: --num_processes"
            f" {count * max(1, int(command.total) // count)}"
        )
    return str(int(command.total) // max(count, 1))
