"""The script of a job on the command line, and its arguments after `--`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer.core

from shoal.errors import UsageError, did_you_mean

_SCRIPT_HELP = (
    "Path of the script, such as code/train.py. Its directory is copied to /opt/ml/code. Default: the script that the"
    " image names in SAGEMAKER_PROGRAM."
)
_ARGUMENTS_HELP = "Arguments for the script, unchanged, after its hyperparameters."
Script = Annotated[Path | None, typer.Argument(metavar="SCRIPT", help=_SCRIPT_HELP)]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGUMENT", help=_ARGUMENTS_HELP)]
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
        """Parse the words before `--`. Raises `UsageError` if one of them may be an argument for the script."""
        own = args[: args.index("--")] if "--" in args else args
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
    """Return the full name of a command, such as `shoal run`."""
    return f"{_name(ctx.parent)} {ctx.info_name}" if ctx.parent else "shoal"


def split_script(script: Path, source: Path | None, entry_point: str | None) -> tuple[Path, str]:
    """Return the source directory and the entry point of a script.

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
            " code/train.py"
        )
    if source is None:
        return script.parent, script.name
    place = script.parent.resolve() / script.name  # the script itself may be a link
    if not place.is_relative_to(source.resolve()):
        raise UsageError(f"{script}: not in --source {source}. Fix: leave out --source, or name a directory above it")
    return source, str(place.relative_to(source.resolve()))
