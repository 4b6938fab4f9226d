"""What is run: the kind of entry point that a job names, and the command that runs it.

- `train.py`: `python train.py`.
- `go.sh`, and any other file that is executable or has a #! line: the file itself, by the interpreter of its #! line
  (else /bin/sh for .sh) rather than by its mode, which mounts and archives lose.
- `-m package.module`: `python -m package.module`.
- A name that is no file, where the code is a package (setup.py, pyproject.toml): the package is installed, and
  `python -m name` runs it.
- SAGEMAKER_TRAINING_MODULE="module:function": that function, called in a process of its own; SAGEMAKER_PROGRAM is not
  looked at. The two of the stock PyTorch and TensorFlow toolkits are passed over: `train` stands in their place.

Under MPI Python runs `-m mpi4py` in front: it turns an uncaught exception into MPI_Abort, so that the other ranks do
not wait for ever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.job.source import Code
from shoal_toolkit.light_typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # they name the types below
    from shoal_toolkit.job.contract import Job
    from shoal_toolkit.job.machine import Machine

PYTHON, COMMAND, MODULE, FUNCTION = "script", "command", "module", "function"
STOCK_TOOLKITS = frozenset(
    {"sagemaker_pytorch_container.training:main", "sagemaker_tensorflow_container.training:main"}
)
_DOTTED = r"[A-Za-z_]\w*(?:\.\w+)*"


class Script(NamedTuple):
    """The entry point."""

    kind: str
    name: str  # as the user wrote it; empty for a function
    target: str  # the file, the module, or module:function
    interpreter: tuple[str, ...] = ()  # of a command

    @property
    def module_name(self) -> str:
        """SM_MODULE_NAME: as the stock toolkit has it, the name less `.py`; of `-m module`, the module."""
        return self.target if self.kind == MODULE else self.name.removesuffix(".py")

    @property
    def needs_no_code(self) -> bool:
        """Whether it may be something installed."""
        return self.kind in (MODULE, FUNCTION)


def read_script(code: Code, environ: Mapping[str, str], toolkit: Mapping[str, Any]) -> Script:
    """Return the entry point of a job. Raises ContractError that says what is there instead."""
    function = environ.get("SAGEMAKER_TRAINING_MODULE")
    if function and function not in STOCK_TOOLKITS:
        return _function(function)
    name = str(environ.get("SAGEMAKER_PROGRAM") or toolkit.get("sagemaker_program") or "")
    if not name:
        raise ContractError(
            "No script is named. Set the variable SAGEMAKER_PROGRAM, or the hyperparameter sagemaker_program, "
            f"to a file in {code.directory}.\n{_listing(code)}"
        )
    if name.startswith("-"):
        return _module(name, code)
    if not code.fetched:
        return _by_suffix(name)
    path = os.path.join(code.directory, name)
    if os.path.isfile(path):
        return Script(PYTHON, name, name) if name.endswith(".py") else _command(name, path)
    module = name.removesuffix(".py")
    if code.package and re.fullmatch(_DOTTED, module):
        return Script(MODULE, name, module)
    raise _missing(name, path, code)


def command(job: Job, machine: Machine, arguments: Sequence[str], mpi4py: bool) -> list[str]:
    """Return the command that runs the entry point in the code directory."""
    kind, _, target, interpreter = job.script
    if kind == COMMAND:
        # Without the ./ a program would be looked for on PATH.
        return [*interpreter, target if os.path.isabs(target) else os.path.join(os.curdir, target), *arguments]
    python = [machine.python, "-m", "mpi4py"] if mpi4py else [machine.python]
    if kind == MODULE:
        return [*python, "-m", target, *arguments]
    if kind == FUNCTION:
        return [*python, "-c", _call(target), *arguments]
    return [*python, target, *arguments]


def notes(job: Job) -> list[str]:
    """Return what is to be said of the code and its entry point."""
    said = [job.code.note] if job.code.note else []
    if job.environ.get("SAGEMAKER_TRAINING_MODULE") in STOCK_TOOLKITS:
        said.append(
            "SAGEMAKER_TRAINING_MODULE names a stock framework toolkit, in whose place this one runs the script"
        )
    folder = os.path.dirname(job.script.name)
    if folder and os.path.isfile(os.path.join(job.code.directory, folder, "requirements.txt")):
        said.append(f"{folder}/requirements.txt is not installed. Fix: move it to {job.code.directory}")
    return said


def _call(target: str) -> str:
    """The program that calls a function. A whole number that it returns is the exit code; any other result is none."""
    module, _, function = target.partition(":")
    return (
        f"import sys; from {module} import {function}; code = {function}(); sys.exit(code if type(code) is int else 0)"
    )


def _function(value: str) -> Script:
    if not re.fullmatch(rf"{_DOTTED}:[A-Za-z_]\w*", value):
        raise ContractError(f'SAGEMAKER_TRAINING_MODULE is {value!r}; it must be "package.module:function".')
    return Script(FUNCTION, "", value)


def _module(name: str, code: Code) -> Script:
    words = name.split()
    if len(words) != 2 or words[0] != "-m" or not re.fullmatch(_DOTTED, words[1]):
        raise ContractError(
            f"The script's name {name!r} reads as an option. Name a file in {code.directory}, or a module "
            'as "-m package.module".'
        )
    return Script(MODULE, name, words[1])


def _command(name: str, path: str) -> Script:
    try:
        with open(path, "rb") as file:
            line = file.readline(256).decode("utf-8", "replace").strip()
    except OSError as error:
        raise ContractError(f"The script {path} cannot be read: {error.strerror}.") from None
    if line.startswith("#!"):
        return Script(COMMAND, name, name, tuple(line[2:].split(None, 1)))
    if name.endswith(".sh") or os.access(path, os.X_OK):
        return _by_suffix(name)
    raise ContractError(
        f"The script {path} is neither .py nor .sh nor executable. Make it executable (chmod +x), or start it with a "
        "#! line."
    )


def _by_suffix(name: str) -> Script:
    if name.endswith(".py"):
        return Script(PYTHON, name, name)
    return Script(COMMAND, name, name, ("/bin/sh",) if name.endswith(".sh") else ())


def _missing(name: str, path: str, code: Code) -> ContractError:
    if os.path.isdir(path):
        module = name.strip("/").replace("/", ".")
        return ContractError(
            f'The script {name!r} is a directory of {code.directory}. To run it as a package, write "-m {module}"; to '
            f"have it installed first, give {code.directory} a setup.py or pyproject.toml."
        )
    return ContractError(
        f"The script {name!r} is not in {code.directory}.{did_you_mean(name, _names(code))}\n{_listing(code)}"
    )


def _names(code: Code) -> list[str]:
    try:
        return sorted(os.listdir(code.directory))
    except OSError:
        return []


def _listing(code: Code, limit: int = 20) -> str:
    directory, names = code.directory, _names(code)
    if not code.fetched:
        return code.note
    if not os.path.isdir(directory):
        return f"{directory} does not exist: mount or copy the code there."
    if not names:
        return f"{directory} is empty: mount or copy the code there."
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"In {directory} there is: {', '.join(names[:limit])}{more}"
