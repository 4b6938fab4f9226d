"""Finds the entry point of a job:

- `train.py`: runs as `python train.py`.
- `go.sh`, and any other file that is executable or has a #! line: runs by the interpreter of its #! line (default for
  .sh: /bin/sh). Its mode doesn't matter, because mounts and archives lose it.
- `-m package.module`: runs as `python -m package.module`.
- A name without a file, if the code is a package (setup.py, pyproject.toml): the package is installed, and
  `python -m name` runs it.
- SAGEMAKER_TRAINING_MODULE="module:function": calls that function in a process of its own, and ignores
  SAGEMAKER_PROGRAM. The values of the stock PyTorch and TensorFlow toolkits are ignored: `train` replaces them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.job.source import Code

PYTHON, COMMAND, MODULE, FUNCTION = "script", "command", "module", "function"
STOCK_TOOLKITS = frozenset(
    {"sagemaker_pytorch_container.training:main", "sagemaker_tensorflow_container.training:main"}
)
_DOTTED = r"[A-Za-z_]\w*(?:\.\w+)*"
_MAX_LISTED = 20
_MAX_DEPTH = 3  # of directories in which a script is searched


class Script(NamedTuple):
    """The entry point of a job."""

    kind: str  # PYTHON, COMMAND, MODULE or FUNCTION
    name: str  # as the user wrote it; empty for a function
    target: str  # the file, the module, or module:function
    interpreter: tuple[str, ...] = ()  # of a command

    @property
    def module_name(self) -> str:
        """SM_MODULE_NAME, as in the stock toolkit: the name without `.py`; for `-m module` the module."""
        return self.target if self.kind == MODULE else self.name.removesuffix(".py")

    @property
    def needs_no_code(self) -> bool:
        """Whether it may be an installed module."""
        return self.kind in (MODULE, FUNCTION)


def find_script(code: Code, environ: Mapping[str, str], toolkit: Mapping[str, Any]) -> Script:
    """Returns the entry point of a job. For code that has not been fetched (`--explain`), the suffix alone decides.

    Args:
        code: The user's code on this host.
        environ: The environment of `train`.
        toolkit: The hyperparameters for the toolkit itself.

    Raises:
        ContractError: If no script is named, its name is wrong, or it does not exist; lists 20 names in the directory.
    """
    function = environ.get("SAGEMAKER_TRAINING_MODULE")
    if function and function not in STOCK_TOOLKITS:
        if not re.fullmatch(rf"{_DOTTED}:[A-Za-z_]\w*", function):
            raise ContractError(f'SAGEMAKER_TRAINING_MODULE is {function!r}; it must be "package.module:function".')
        return Script(FUNCTION, "", function)
    name = str(environ.get("SAGEMAKER_PROGRAM") or toolkit.get("sagemaker_program") or "")
    if not name:
        raise ContractError(
            "No script is named. Fix: set the variable SAGEMAKER_PROGRAM, or the hyperparameter sagemaker_program, "
            f"to a file in {code.directory}.\n{_list_code(code)}"
        )
    if name.startswith("-"):
        return _parse_module(name, code)
    if not code.fetched:
        return _script_by_suffix(name)
    path = os.path.join(code.directory, name)
    if os.path.isfile(path):
        return Script(PYTHON, name, name) if name.endswith(".py") else _inspect_command(name, path)
    module = name.removesuffix(".py")
    if code.package and re.fullmatch(_DOTTED, module):
        return Script(MODULE, name, module)
    raise _missing_script(name, path, code)


def describe_entry(code: Code, script: Script, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns notes for the log: where the code is from, and settings of the entry point that have no effect."""
    notes = [code.note] if code.note else []
    if environ.get("SAGEMAKER_TRAINING_MODULE") in STOCK_TOOLKITS:
        notes.append("SAGEMAKER_TRAINING_MODULE names a stock framework toolkit; this toolkit runs the script instead")
    folder = os.path.dirname(script.name)
    if folder and os.path.isfile(os.path.join(code.directory, folder, "requirements.txt")):
        notes.append(f"{folder}/requirements.txt is not installed. Fix: move it to {code.directory}")
    return tuple(notes)


def _parse_module(name: str, code: Code) -> Script:
    """Returns the entry point for `-m package.module`; no file is searched. Raises ContractError for other options."""
    words = name.split()
    if len(words) != 2 or words[0] != "-m" or not re.fullmatch(_DOTTED, words[1]):
        raise ContractError(
            f"The script's name {name!r} looks like an option. Fix: name a file in {code.directory}, or a module "
            'as "-m package.module".'
        )
    return Script(MODULE, name, words[1])


def _inspect_command(name: str, path: str) -> Script:
    """Returns the entry point of a file other than .py, with the interpreter of its #! line."""
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError as error:
        raise ContractError(f"The script {path} cannot be read: {error.strerror}.") from None
    line = first.decode("utf-8", "replace").strip()
    is_shell = name.endswith(".sh") or re.match(r"#!.*\b(?:ba|da|z|k)?sh\b", line)
    if is_shell and first.endswith(b"\r\n"):
        raise ContractError(
            f"The shell script {path} has the line ends of Windows (CRLF), so that its commands end with a wrong "
            f"character. Fix: sed -i 's/\\r$//' {name}. To keep git from adding them, write `*.sh text eol=lf` into "
            ".gitattributes."
        )
    if line.startswith("#!"):
        return Script(COMMAND, name, name, tuple(line[2:].split(None, 1)))
    if name.endswith(".sh") or os.access(path, os.X_OK):
        return _script_by_suffix(name)
    raise ContractError(
        f"The script {path} is neither .py nor .sh nor executable. Fix: make it executable (chmod +x), or start it "
        "with a #! line."
    )


def _script_by_suffix(name: str) -> Script:
    if name.endswith(".py"):
        return Script(PYTHON, name, name)
    return Script(COMMAND, name, name, ("/bin/sh",) if name.endswith(".sh") else ())


def _missing_script(name: str, path: str, code: Code) -> ContractError:
    if os.path.isdir(path):
        module = name.strip("/").replace("/", ".")
        return ContractError(
            f"The script {name!r} is a directory of {code.directory}. Fix: to run it as a package, "
            f'write "-m {module}"; to have it installed first, give {code.directory} a setup.py or pyproject.toml.'
        )
    hint = _find_elsewhere(name, code) or did_you_mean(name, _code_files(code))
    return ContractError(f"The script {name!r} is not in {code.directory}.{hint}\n{_list_code(code)}")


def _find_elsewhere(name: str, code: Code) -> str:
    """Returns a hint if the name has arguments or backslashes, or a file of that name is deeper in the code."""
    words = name.split()
    if len(words) > 1 and os.path.isfile(os.path.join(code.directory, words[0])):
        return f" Fix: name {words[0]!r}, and pass its arguments as hyperparameters."
    wanted = os.path.normpath(name.strip().replace("\\", "/"))
    for folder, folders, files in os.walk(code.directory):
        depth = os.path.relpath(folder, code.directory).count(os.sep)
        folders[:] = sorted(folders)[:_MAX_LISTED] if depth < _MAX_DEPTH else []
        for path in (os.path.relpath(os.path.join(folder, file), code.directory) for file in files):
            if path == wanted or path.endswith(f"/{wanted}"):
                return f" Did you mean {path!r}?"
    return ""


def _code_files(code: Code) -> list[str]:
    try:
        return sorted(os.listdir(code.directory))
    except OSError:
        return []


def _list_code(code: Code) -> str:
    directory, names = code.directory, _code_files(code)
    if not code.fetched:
        return code.note
    if not os.path.isdir(directory):
        return f"{directory} does not exist: mount or copy the code there."
    if not names:
        return f"{directory} is empty: mount or copy the code there."
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{directory} contains: {', '.join(names[:_MAX_LISTED])}{more}"
