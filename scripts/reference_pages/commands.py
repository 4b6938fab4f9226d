"""docs/reference/shoal.md: every command of `shoal` with its arguments and options, from the application itself."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import typer

import shoal.commands
from reference_pages.markdown import code, page, table, wrap
from shoal.commands.common import app

_HEAD = """# Commands of `shoal`

`make reference` writes this page from the commands. `shoal COMMAND --help` prints the same. An IMAGE is a tag, or
a framework of `buildspec.yml`: [images](images.md). [Exit codes](../exit-codes.md) are on their own page.
[`train`](../toolkit.md) is the command inside an image."""

_KINDS = {"str": "text", "int": "number", "int range": "number"}


def write() -> str:
    """Returns the page."""
    commands = list_commands()
    index = table(
        ("command", "task"),
        ((f"[`{name}`](#{name.replace(' ', '-')})", _first_sentence(command)) for name, command in commands),
    )
    return page(_HEAD, index, *(part for name, command in commands for part in _describe(name, command)))


def list_commands() -> list[tuple[str, Any]]:
    """Imports all modules with commands, and returns the commands that the help shows, with their full names."""
    for module in pkgutil.iter_modules(shoal.commands.__path__):
        importlib.import_module(f"shoal.commands.{module.name}")
    return list(_list_commands(typer.main.get_command(app), "shoal"))


def _list_commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the full name and the command for each command, also in groups of commands, sorted."""
    for word, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _list_commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _first_sentence(command: Any) -> str:
    return str((command.help or "").strip().split("\n\n")[0])


def _describe(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}"
    yield from map(_paragraph, (command.help or "").strip().split("\n\n"))
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option" and each.name != "help"]
    if arguments:
        yield table(("argument", "meaning"), ((code(_name(each)), each.help or "") for each in arguments))
    if options:
        context = typer.Context(command, info_name=name)
        yield table(("option", "value", "default", "meaning"), (_row(each, context) for each in options))


def _paragraph(text: str) -> str:
    """A paragraph of a help text; an example becomes a block of code."""
    text = " ".join(text.split())
    found = re.fullmatch(r"(.*?): ((?:shoal|docker|pip-audit) .*)", text)
    return f"{found[1]}:\n\n```console\n$ {found[2]}\n```" if found else wrap(text)


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _row(option: Any, context: typer.Context) -> tuple[str, str, str, str]:
    """The cells of an option. A default that the help text gives moves from there into its own column."""
    text, default = option.help or "", _default(option)
    found = re.search(r" ?\bDefault: (.+?)\.(?= |$)", text)
    if found and not default:
        text = (text[: found.start()] + text[found.end() :]).strip()
        default = found[1] if " " in found[1] else code(found[1])
    names = ", ".join(code(each) for each in (*option.opts, *option.secondary_opts))
    return (
        names,
        "" if option.is_flag else code(_kind(option, context)),
        "required" if option.required else default,
        text,
    )


def _kind(option: Any, context: typer.Context) -> str:
    """The kind of an option's value, as `--help` shows it, in words."""
    kind = str(option.metavar or option.display_type(context).strip("<>"))
    return _KINDS.get(kind, kind)


def _default(option: Any) -> str:
    value = option.default
    if option.is_flag or value is None or callable(value) or value in ((), []):
        return ""
    return code(getattr(value, "value", value))
