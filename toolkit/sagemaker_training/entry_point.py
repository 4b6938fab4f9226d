"""Runs the user's script, as toolkits of others do: `entry_point.run(env.module_dir, env.user_entry_point, args)`.

`train` has read the job, chosen its launcher by the hyperparameters, installed the packages and started the ranks. So
in a process of `train`, the script starts here, once, and is this rank. In any other process, `train` itself starts,
with the script as its program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from sagemaker_training import environment
from sagemaker_training._absent import refuse_others
from sagemaker_training.errors import ExecuteUserScriptError
from sagemaker_training.runner import ProcessRunnerType, RunnerType
from shoal_toolkit.errors import ContractError

_KEPT = 64 * 1024  # bytes of stderr that an error has


def run(
    uri: str,
    user_entry_point: str,
    args: Sequence[str],
    env_vars: Mapping[str, Any] | None = None,
    wait: bool = True,
    capture_error: bool = False,
    runner_type: object = ProcessRunnerType,
    extra_opts: Mapping[str, Any] | None = None,
) -> subprocess.Popen[bytes]:
    """Runs the user's script, and returns its process.

    Args:
        uri: A directory with the code, or `env.module_dir`. `train` fetches the code of other addresses.
        user_entry_point: The script in it: a `.py` or `.sh` file, another program, or a module of a package.
        args: Arguments of the script.
        env_vars: Variables to add to the environment.
        wait: Whether to wait for the end of the script.
        capture_error: Whether the error has the end of the script's stderr, which is shown all the same. In a process
            of `train`, it always has.
        runner_type: The launcher that the toolkit asks for. The job's hyperparameters must select it too.
        extra_opts: Must be empty: the options of a launcher are hyperparameters.

    Raises:
        ExecuteUserScriptError: If the script fails. Not without `wait`.
        shoal_toolkit.errors.ContractError: If there is no such script, or the hyperparameters select another launcher.
    """
    if extra_opts:
        raise ContractError("entry_point.run: extra_opts are not supported. Fix: pass them as hyperparameters")
    env = environment.Environment()
    _check_runner(env, runner_type)
    arguments = [str(word) for word in args]
    variables = {**os.environ, **{name: str(value) for name, value in (env_vars or {}).items()}}
    inside = "SM_CURRENT_HOST" in os.environ
    if inside:
        command, directory = _build_command(env, uri, user_entry_point, arguments)
    else:
        command, directory = _build_train(env, arguments), None
        variables.pop("SAGEMAKER_TRAINING_MODULE", None)
        variables.update(SAGEMAKER_PROGRAM=user_entry_point, SAGEMAKER_SUBMIT_DIRECTORY=uri)
    captures = wait and (inside or capture_error)
    process = subprocess.Popen(command, cwd=directory, env=variables, stderr=subprocess.PIPE if captures else None)
    if wait:
        with _passing_signals(process):
            output = _copy_stderr(process.stderr) if process.stderr else None
            code = process.wait()
        if code:
            raise ExecuteUserScriptError(command, code, output)
    return process


def _check_runner(env: environment.Environment, runner_type: object) -> None:
    """Raises ContractError if the job's hyperparameters do not select a launcher that a toolkit asks for."""
    from shoal_toolkit.plan.launcher import list_selected

    if not isinstance(runner_type, RunnerType):
        names = ", ".join(f"{each.name}RunnerType" for each in RunnerType)
        raise ContractError(f"entry_point.run: runner_type is {runner_type!r}. Allowed: {names}. Fix: pass one of them")
    selected = [launcher.name for launcher in list_selected(env.additional_framework_parameters)]
    if runner_type.value and not set(selected) & set(runner_type.value):
        raise ContractError(
            f"entry_point.run asks for {runner_type.name}, but the hyperparameters select"
            f" {', '.join(selected) or 'no launcher'}. `train` starts the ranks, before this toolkit."
            " Fix: select it in the estimator's distribution (docs/reference/hyperparameters.md)"
        )


def _build_command(
    env: environment.Environment, uri: str, user_entry_point: str, arguments: list[str]
) -> tuple[list[str], str]:
    """Returns the command of the script in a process of `train`, and its directory."""
    from shoal_toolkit.job.code import find_script, inspect_code
    from shoal_toolkit.plan.arguments import build_script_command

    directory = uri
    if uri == env.module_dir and not os.path.isdir(uri):  # an address: `train` has fetched it
        directory = os.environ["PYTHONPATH"].partition(os.pathsep)[0]
    if not os.path.isdir(directory):
        raise ContractError(
            f"entry_point.run: {uri!r} is not a directory. Fix: pass env.module_dir, or select the code by the"
            " hyperparameter sagemaker_submit_directory"
        )
    script = find_script(inspect_code(directory), {"SAGEMAKER_PROGRAM": user_entry_point}, {})
    by_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ
    return build_script_command(script, sys.executable, arguments, by_mpirun), directory


def _build_train(env: environment.Environment, arguments: list[str]) -> list[str]:
    """Returns the command of `train`, which passes the hyperparameters itself. Raises ContractError without them."""
    own = env.to_cmd_args()
    if arguments[: len(own)] != own:
        raise ContractError(
            f"entry_point.run: args are {arguments}, and outside of `train` they begin with the hyperparameters, {own}."
            " Fix: pass env.to_cmd_args(), and others after these"
        )
    return [sys.executable, "-m", "shoal_toolkit", "--", *arguments[len(own) :]]


def _copy_stderr(stream: IO[bytes]) -> bytes:
    """Shows a stream until it ends, and returns its last 64 KiB."""
    kept = b""
    while data := os.read(stream.fileno(), _KEPT):
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
        kept = (kept + data)[-_KEPT:]
    return kept


@contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes SIGTERM on to the script meanwhile. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


__getattr__ = refuse_others(
    __name__, (), {"install": "a requirements.txt beside the script, which `train` installs"}, "entry_point.run"
)
