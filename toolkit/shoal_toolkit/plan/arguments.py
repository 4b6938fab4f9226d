"""Builds the command of the script: its entry point, and hyperparameters as arguments.

Arguments are sorted by name. A one-letter name gives `-x value`, a longer one `--name value`. Text is
unchanged. None is an empty string, true and false are `True` and `False`, an object is `k=v,k=v`, a list is JSON. (The
stock toolkit writes a list as Python's repr, which JSON and shell tools can't read.)

For parsers with flags (argparse's `store_true`), the hyperparameter `sagemaker_store_true` lists the hyperparameters
that are flags, or is true if all booleans are. A flag becomes a bare `--name` if it is true, and is left out if it is
false.

Under MPI, Python runs with `-m mpi4py`. It turns an uncaught exception into MPI_Abort, so that the other ranks don't
wait for ever.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.job.code import COMMAND, FUNCTION, MODULE, Script

STORE_TRUE = "sagemaker_store_true"
JSON_ARGUMENTS = "sagemaker_json_arguments"
MAX_ARGUMENT_BYTES = 32 * os.sysconf("SC_PAGE_SIZE") - 1  # of one argument or variable on Linux (MAX_ARG_STRLEN)


def build_script_command(script: Script, python: str, arguments: Sequence[str], mpi4py: bool) -> list[str]:
    """Returns the command that runs the entry point in the code directory. A command never runs under mpi4py.

    Args:
        script: The entry point.
        python: The path of the interpreter.
        arguments: Arguments for the script.
        mpi4py: Whether Python runs under mpi4py.
    """
    kind, _, target, interpreter = script
    if kind == COMMAND:
        # Without ./ the program would be searched on PATH.
        return [*interpreter, target if os.path.isabs(target) else os.path.join(os.curdir, target), *arguments]
    command = [python, "-m", "mpi4py"] if mpi4py else [python]
    if kind == MODULE:
        return [*command, "-m", target, *arguments]
    if kind == FUNCTION:
        return [*command, "-c", _call_function(target), *arguments]
    return [*command, target, *arguments]


def _call_function(target: str) -> str:
    """Returns a program that calls module:function. An int that the function returns is the exit code."""
    module, _, function = target.partition(":")
    return (
        f"import sys; from {module} import {function}; code = {function}(); sys.exit(code if type(code) is int else 0)"
    )


def format_arguments(hyperparameters: Mapping[str, Any], store_true: object = None, as_json: bool = False) -> list[str]:
    """Returns the hyperparameters as arguments for the script, sorted by name.

    A flag is a bare option if it is true, and is left out if it is false.

    Args:
        hyperparameters: Names and decoded values.
        store_true: The value of sagemaker_store_true: a list of names, true for all booleans, or None.
        as_json: Whether a value other than text is passed as JSON, and each name with two dashes, as by the drivers of
            SageMaker SDK 3.

    Raises:
        ContractError: If sagemaker_store_true is wrong, or a value is too long for Linux.
    """
    flags = _find_flags(hyperparameters, store_true)
    words: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        if as_json and name not in flags:
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{name}", _check_length(name, text)]
        elif name not in flags:
            words += [_format_option(name), _check_length(name, _format_value(value))]
        elif value:
            words.append(_format_option(name))
    return words


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))
    if isinstance(value, list):
        return json.dumps(value)
    return str(value)


def shorten_for_mpirun(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Shortens the command of a rank, so that mpirun can start it. A short one is returned as it is, without variables.

    Open MPI joins a rank's arguments into one variable, OMPI_ARGV. A command that is too long for it is passed in
    several variables instead. A small shell joins them, unsets them and runs the command.

    Args:
        command: The program and its arguments.

    Returns:
        The command for mpirun, and variables that the ranks of every host need for it.
    """
    if sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in command) <= MAX_ARGUMENT_BYTES // 2:
        return list(command), {}
    text, size = shlex.join(command), MAX_ARGUMENT_BYTES // 4  # a character has 4 bytes at most
    # "PRIVATE" in the name masks them in logs.
    pieces = {
        f"SHOAL_PRIVATE_COMMAND_{index}": text[start : start + size]
        for index, start in enumerate(range(0, len(text), size))
    }
    whole = "".join(f"${{{name}}}" for name in pieces)
    return ["/bin/sh", "-c", f'command="exec {whole}"; unset {" ".join(pieces)}; eval "$command"'], pieces


def _format_option(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _find_flags(hyperparameters: Mapping[str, Any], store_true: object) -> set[str]:
    """Returns the names of the hyperparameters that are flags: none, all booleans, or the listed ones."""
    possible = {name for name, value in hyperparameters.items() if isinstance(value, bool)}
    if store_true is None or isinstance(store_true, bool):
        return possible if store_true else set()
    if not isinstance(store_true, list):
        allowed = 'allowed are true, and a list of names such as ["fp16"]'
        raise ContractError(f"hyperparameters.json: {STORE_TRUE} is {store_true!r}; {allowed}. Fix: set one of them.")
    for name in store_true:
        if name not in hyperparameters:
            hint = did_you_mean(str(name), hyperparameters)
            raise ContractError(
                f"hyperparameters.json: {STORE_TRUE} names {name!r}, which is not a hyperparameter.{hint} "
                "Fix: leave the name out, or correct it."
            )
        if name not in possible:
            raise ContractError(
                f"hyperparameters.json: {STORE_TRUE} names {name!r}, which is {hyperparameters[name]!r}; a flag is "
                "true or false. Fix: leave the name out, or set it to one of these."
            )
    return set(store_true)


def _check_length(name: str, value: str) -> str:
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > MAX_ARGUMENT_BYTES:
        raise ContractError(
            f"hyperparameters.json: {name} is {size:,} bytes as an argument of the script, and Linux passes at most "
            f"{MAX_ARGUMENT_BYTES:,} in one. Fix: put the value into a file of a channel, and pass its "
            "name to the script."
        )
    return value
