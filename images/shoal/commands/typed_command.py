"""Replaces a command in place of SCRIPT, such as `torchrun --nproc_per_node 2 train.py`, by options of `shoal`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.clean_text import print_error
from shoal.jobs.launch_commands import build_options, is_command, read_accelerate_file, read_command

_OWN = ("--hosts", "--procs-per-host", "--local", "--max-restarts", "--channel", "--detach")
"""Options of `shoal` that hardly any script has."""


def find_command(words: Sequence[str], parameters: Sequence[Any]) -> int | None:
    """Returns the place of a command in place of SCRIPT; None if SCRIPT is a path or missing.

    Args:
        words: The words after `shoal run`.
        parameters: The parameters of the command line, as of Click.
    """
    positions = [place for place, name, _ in _scan(words, parameters) if not name]
    if len(positions) < 2 or not is_command(words[positions[1]]):
        return None
    return positions[1]


def replace_command(
    before: Sequence[str], command: Sequence[str], parameters: Sequence[Any]
) -> tuple[list[str], list[str]]:
    """Returns the words for a command line without the command, and the arguments for the script. Prints notes.

    Args:
        before: The words before the command.
        command: The command, and all words after it.
        parameters: As for `find_command`.

    Raises:
        UsageError: If the command is wrong, or contradicts the options before it.
    """
    typed = read_command(command)
    given = {name: value for _, name, value in _scan(before, parameters) if name}
    words: list[str] = []
    source = Path(given["source"]) if "source" in given else _choose_source(typed.script, typed.is_module)
    if "source" not in given and source is not None:
        words += ["--source", str(source)]
    if typed.config:
        typed = read_accelerate_file(typed, source or Path(typed.script).parent, given)
    for note in typed.notes:
        print_error(note)
    for option in _OWN:
        if option in typed.arguments:
            print_error(f"{option} goes to {typed.script}. Fix: an option of shoal stands before {typed.name}")
    words += build_options(typed, given)
    words += ["-m", typed.script] if typed.is_module else [typed.script]
    return [*before, *words], list(typed.arguments)


def _choose_source(script: str, is_module: bool) -> Path | None:
    """Returns the current directory, in which the command would run; None for a script elsewhere, and for a module."""
    here = Path.cwd()
    return Path() if not is_module and Path(script).parent.resolve().is_relative_to(here) else None


def _scan(words: Sequence[str], parameters: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Yields place, name and value of each option, and the place of each other word with an empty name."""
    options = {word: each for each in parameters for word in (*each.opts, *each.secondary_opts) if word[:1] == "-"}
    place = 0
    while place < len(words):
        start, word = place, words[place]
        place += 1
        if not word.startswith("-") or word == "-":
            yield start, "", word
            continue
        option, _, value = word.partition("=")
        if not word.startswith("--"):
            option, value = word[:2], word[2:]
        known = options.get(option)
        if known is None:
            continue
        if not known.is_flag and option == word:
            value = words[place] if place < len(words) else ""
            place += 1
        yield start, known.name, value
