"""Options of commands on jobs: the script and its arguments after `--`, and the place in which they run."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from shoal.clean_text import print_error
from shoal.commands.common import parse_pairs, print_columns, print_json
from shoal.commands.typed_command import find_command, replace_command
from shoal.console import print_line
from shoal.errors import UsageError, did_you_mean
from shoal.jobs import launch_commands
from shoal.jobs.distribution import parse_distribution
from shoal.jobs.job import DOCKER, LOCAL, JobSpec
from shoal.jobs.source_files import Selection, describe_source, list_rows, list_source
from shoal.jobs.variables import describe_visible_secrets

_SCRIPT_HELP = (
    "Path of the script, such as code/train.py, or a command such as torchrun with all that follows it. The script's"
    " directory is copied to /opt/ml/code, and for a command the current directory. Default: the script that the image"
    " names in SAGEMAKER_PROGRAM."
)
_MODULE_HELP = (
    "Module instead of SCRIPT, as in python -m: of the current directory, which is copied, or installed in the image."
)
_FOLLOW_HELP = (
    "Copy the targets of links that leave the source. Default: such links are an error, and others stay links."
)
_INCLUDE_HELP = (
    "Also copy files that may hold secrets, such as .env, or that are left out for another reason. With * and ?; a"
    " directory ends with a slash. Repeatable."
)
_ENV_HELP = (
    "Environment variable for every host. NAME alone takes its value from this environment, and then no record has it."
    " Repeatable."
)
_ENV_FILE_HELP = "File of variables for every host, one NAME=VALUE or NAME a line, as in docker run. Repeatable."
_HYPERPARAMETER_HELP = (
    "Hyperparameter. VALUE is JSON if it is valid JSON (1.10 is a number, '\"1.10\"' a string), otherwise a string."
    " Repeatable."
)
_LIST_HELP = "Print the files that would be copied, with size, and those that are left out. Starts nothing."
_ARGUMENTS_HELP = "Arguments for the script, unchanged, after its hyperparameters."
Script = Annotated[Path | None, typer.Argument(metavar="SCRIPT", help=_SCRIPT_HELP)]
Module = Annotated[str | None, typer.Option("--module", "-m", metavar="MODULE", help=_MODULE_HELP)]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGUMENT", help=_ARGUMENTS_HELP)]
FollowLinks = Annotated[bool, typer.Option("--follow-links", help=_FOLLOW_HELP)]
Include = Annotated[list[str] | None, typer.Option("--include", metavar="PATTERN", help=_INCLUDE_HELP)]
Hyperparameters = Annotated[
    list[str] | None, typer.Option("--hyperparameter", metavar="KEY=VALUE", help=_HYPERPARAMETER_HELP)
]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME[=VALUE]", help=_ENV_HELP)]
EnvFile = Annotated[list[Path] | None, typer.Option("--env-file", metavar="FILE", help=_ENV_FILE_HELP)]
ListFiles = Annotated[bool, typer.Option("--list-files", help=_LIST_HELP)]


class RunEngine(StrEnum):
    """The place in which a job runs: Docker, or this machine without Docker."""

    docker = DOCKER
    none = LOCAL


Local = Annotated[bool, typer.Option("--local", help="Run on this machine, without Docker: --engine none.")]


def choose_engine(engine: RunEngine | None, local: bool) -> RunEngine | None:
    """Returns the value of `--engine` or `--local`; None if neither is given. Raises `UsageError` for both."""
    if local and engine is RunEngine.docker:
        raise UsageError("--local and --engine docker: contradict each other. Fix: leave out one")
    return RunEngine.none if local else engine


_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "arguments": tuple,
    "include": tuple,
    "hyperparameters": functools.partial(parse_pairs, "--hyperparameter"),
    "distribution": lambda text: parse_distribution(text or "{}"),
}
_OF_ESTIMATORS = {
    "--instance-count": "--hosts",
    "--environment": "--env",
    "--inputs": "--channel",
    "--metric-definitions": "--metric",
    "--checkpoint-s3-uri": "--checkpoints",
}
"""Arguments of estimators, and the options for them, which have other names."""


class ScriptCommand(typer.core.TyperCommand):
    """A command with a parameter `arguments`: all words after the first `--`, in order and unchanged."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words before `--`. Raises `UsageError` if one of them may be an argument for the script.

        A command in place of the script, such as `torchrun`, is replaced by options, the script and its arguments.
        """
        own = args[: args.index("--")] if "--" in args else args
        if not ctx.resilient_parsing and (place := find_command(own, self.params)) is not None:
            own, arguments = replace_command(args[:place], args[place:], self.params)
            args = [*own, "--", *arguments]
        try:
            rest = super().parse_args(ctx, list(own))
        except Exception as error:  # Typer has its own copy of Click, with no public name for the error below
            if not hasattr(error, "possibilities"):
                raise
            option = getattr(error, "option_name", "")
            known = _OF_ESTIMATORS.get(option.replace("_", "-"))
            if known in {name for parameter in self.params for name in parameter.opts}:
                raise UsageError(
                    f"{option}: no such option. Fix: {known}, or for an option of the script, put it after `--`"
                ) from error
            # Stricter than Click: a script's option may be similar to an option of Shoal by chance.
            hint = did_you_mean(option, error.possibilities or (), cutoff=0.75).replace("'", "")
            raise UsageError(
                f"{option}: no such option.{hint} Fix: if it is for the script, put it after `--`: {_name(ctx)} IMAGE"
                f" SCRIPT -- {option}"
            ) from error
        if (early := ctx.params["arguments"]) and not ctx.resilient_parsing:
            raise UsageError(
                f"{early[0]}: an argument for the script, but not after `--`. Fix: {_name(ctx)} IMAGE SCRIPT --"
                f" {shlex.join(early)}"
            )
        ctx.params["arguments"] = args[len(own) + 1 :]
        return rest


def _name(ctx: Any) -> str:
    return f"{_name(ctx.parent)} {ctx.info_name}" if ctx.parent else "shoal"


def read_options(options: object, kind: type[JobSpec], readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Returns the fields of a job that options of the same names give. Those that are not given are left out.

    Args:
        options: A dataclass with the values of options, and the arguments of the command.
        kind: The class of the job.
        readers: Functions that parse the option of a field. They raise `UsageError`.
    """
    readers = {**_READERS, **readers}
    names = {each.name for each in dataclasses.fields(kind)} & vars(options).keys()
    given = {name: value for name in names if (value := getattr(options, name)) is not None and value is not False}
    found = {name: readers[name](value) if name in readers else value for name, value in given.items()}
    return {name: value for name, value in found.items() if value not in ({}, ())}


def split_script(script: Path, source: Path | None, entry_point: str | None) -> tuple[Path, str]:
    """Returns the source directory and the entry point of a script.

    Args:
        script: The path of a file.
        source: The directory of --source, which contains the script; None: the script's own directory.
        entry_point: The value of --entry-point, which is refused.

    Raises:
        UsageError: If there is no such file, it is not in the source directory, or --entry-point is given too.
    """
    if entry_point is not None:
        raise UsageError(f"{script} and --entry-point {entry_point}: both name a script. Fix: leave out one")
    if not script.is_file():
        if script.is_dir():
            raise UsageError(f"{script}: a directory. Fix: use the path of a script, such as {script / 'train.py'}")
        names = [path.name for path in script.parent.iterdir()] if script.parent.is_dir() else []
        raise UsageError(
            f"{script}: no such script.{did_you_mean(script.name, names)} Fix: use the path of a script, such as"
            f" code/train.py, or one of the commands {', '.join(launch_commands.list_commands())}"
        )
    if source is None:
        return script.parent, script.name
    place = script.parent.resolve() / script.name  # the script itself may be a link
    if not place.is_relative_to(source.resolve()):
        raise UsageError(f"{script}: not in --source {source}. Fix: leave out --source, or name a directory above it")
    return source, str(place.relative_to(source.resolve()))


def choose_code(
    script: Path | None, module: str | None, source: Path | None, entry_point: str | None
) -> dict[str, Any]:
    """Returns the fields `source` and `entry_point` of a job for SCRIPT or --module; empty without both.

    Raises:
        UsageError: As `split_script`, or if a module's name is wrong, or a script is named too.
    """
    if module is None:
        if script is None:
            return {}
        source, entry_point = split_script(script, source, entry_point)
        return {"source": source, "entry_point": entry_point}
    if script is not None or entry_point is not None:
        raise UsageError(f"-m {module} and {script or entry_point}: both name a script. Fix: leave out one")
    if not _MODULE.fullmatch(module):
        raise UsageError(f"-m {module}: not the name of a module. Fix: such as -m package.train, without .py")
    first = module.partition(".")[0]
    places = (Path(first), Path(f"{first}.py"), Path("src", first), Path("src", f"{first}.py"))
    if source is None and any(place.exists() for place in places):
        source = Path()
    return {"source": source, "entry_point": f"-m {module}"}


def print_source(selection: Selection, as_json: bool = False) -> None:
    """Prints the files of a source that reach the hosts, and those that are left out. Raises `UsageError`."""
    files = list_source(selection)
    if as_json:
        print_json(
            [{"path": each.name, "bytes": each.size, "link": each.link, "left_out": each.left_out} for each in files]
        )
        return
    packed = [each for each in files if each.is_packed]
    print_columns(("path", "bytes", ""), *list_rows(files))
    print_line(f"{len(packed)} files, {sum(each.size for each in packed)} bytes")


def print_source_notes(selection: Selection) -> None:
    """Prints notes about a source: what is left out, and whether it is large. Raises `UsageError`."""
    for note in describe_source(selection, list_source(selection)):
        print_error(note)


def warn_of_visible_secrets(
    env: list[str] | None, hyperparameters: Mapping[str, str], arguments: list[str] | None, fix: str
) -> None:
    """Prints a warning for each value on the command line that looks like a secret."""
    words = arguments or []
    pairs = [word.partition("=") for word in words]
    options = {name: value if equals else after for (name, equals, value), after in zip(pairs, [*words[1:], ""])}
    variables = {name: value for name, equals, value in (word.partition("=") for word in env or ()) if equals}
    other = "let the script read a variable: " + fix
    for warning in (
        *describe_visible_secrets("--env", variables, fix),
        *describe_visible_secrets("--hyperparameter", hyperparameters, other),
        *describe_visible_secrets("argument", {k: v for k, v in options.items() if k.startswith("-")}, other),
    ):
        print_error(warning)
