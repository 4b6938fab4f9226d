"""Hyperparameters as the script's command-line arguments. Pure.

Sorted by name; a one-letter name gives `-x value`, a longer one `--name value`. Values: text as is, None as an empty
string, true and false as `True` and `False`, an object as `k=v,k=v`, a list as JSON (`[1, "x"]`; the stock toolkit
writes Python's repr there, which no JSON or shell tool reads), everything else as Python prints it.

For a script whose parser has flags (argparse's `store_true`), the hyperparameter `sagemaker_store_true` names those
that are flags, as a list, or is true for all that are true or false: such a one is given as a bare `--name` when it is
true, and left out when it is false.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.light_typing import Any

STORE_TRUE = "sagemaker_store_true"
LONGEST = 32 * os.sysconf("SC_PAGE_SIZE") - 1  # bytes of one argument or variable on Linux (MAX_ARG_STRLEN)


def script_arguments(hyperparameters: Mapping[str, Any], store_true: object = None) -> list[str]:
    """Return the arguments for the script. `store_true` is what sagemaker_store_true says: names, or true for all.

    Raises ContractError for a flag that is none, and for a value that Linux passes to no process.
    """
    flags = _flags(hyperparameters, store_true)
    words: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        if name not in flags:
            words += [_option(name), _fitting(name, argument_value(value))]
        elif value:
            words.append(_option(name))
    return words


def argument_value(value: Any) -> str:
    """Return one value as the script receives it."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))
    if isinstance(value, list):
        return json.dumps(value)
    return str(value)


def for_mpirun(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that mpirun is given, and variables that every host's ranks need for it.

    Open MPI joins a rank's arguments into one variable, OMPI_ARGV. A command that is too long for that goes through
    variables of ours, in pieces: a small shell puts them together, and removes them.
    """
    import shlex

    if sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in command) <= LONGEST // 2:
        return list(command), {}
    text, size = shlex.join(command), LONGEST // 4  # a character has 4 bytes at most
    # By this name, no log shows them.
    pieces = {
        f"SHOAL_PRIVATE_COMMAND_{index}": text[start : start + size]
        for index, start in enumerate(range(0, len(text), size))
    }
    whole = "".join(f"${{{name}}}" for name in pieces)
    return ["/bin/sh", "-c", f'command="exec {whole}"; unset {" ".join(pieces)}; eval "$command"'], pieces


def _option(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _flags(hyperparameters: Mapping[str, Any], store_true: object) -> set[str]:
    """Return the names of the hyperparameters that are given as flags."""
    possible = {name for name, value in hyperparameters.items() if isinstance(value, bool)}
    if store_true is None or isinstance(store_true, bool):
        return possible if store_true else set()
    if not isinstance(store_true, list):
        allowed = 'allowed are true, and a list of names such as ["fp16"]'
        raise ContractError(f"hyperparameters.json: {STORE_TRUE} is {store_true!r}; {allowed}.")
    for name in store_true:
        if name not in hyperparameters:
            hint = did_you_mean(str(name), hyperparameters)
            raise ContractError(f"hyperparameters.json: {STORE_TRUE} names {name!r}, which is no hyperparameter.{hint}")
        if name not in possible:
            raise ContractError(
                f"hyperparameters.json: {STORE_TRUE} names {name!r}, which is {hyperparameters[name]!r}; a flag is "
                "true or false."
            )
    return set(store_true)


def _fitting(name: str, value: str) -> str:
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > LONGEST:
        raise ContractError(
            f"hyperparameters.json: {name} is {size:,} bytes as an argument of the script, and Linux passes at most "
            f"{LONGEST:,} in one. Put the value into a file of a channel, and give the script its name."
        )
    return value
