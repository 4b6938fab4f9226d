"""Finds the user's code and the entry point of a job.

SAGEMAKER_SUBMIT_DIRECTORY beats the hyperparameter sagemaker_submit_directory, which beats <base>/code. A
directory is used in place. Everything else is fetched (job/fetching.py).

Entry points:

- `train.py`: runs as `python train.py`.
- `go.sh`, and any other file that is executable or has a #! line: runs by the interpreter of its #! line (default for
  .sh: /bin/sh). Its mode doesn't matter, because mounts and archives lose it.
- `-m package.module`: runs as `python -m package.module`.
- A name without a file, if the code is a package (setup.py, pyproject.toml): the package is installed, and
  `python -m name` runs it.
- SAGEMAKER_TRAINING_MODULE="module:function": calls that function in a process of its own. SAGEMAKER_PROGRAM is only
  named to it (SM_USER_ENTRY_POINT), for toolkits that run it themselves: sagemaker_training/entry_point.py. The values
  of the stock PyTorch and TensorFlow toolkits are ignored: `train` replaces them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import Any, NamedTuple
from shoal_toolkit.files import read_text

S3 = "s3://"
_ALLOWED = "Fix: name a directory, a .tar.gz archive or one file in this container, or s3://bucket/key."
_MOUNT = "Fix: mount or copy the code there."
_READABLE = "Fix: let this user read it (chmod a+r)."
PYTHON, COMMAND, MODULE, FUNCTION = "script", "command", "module", "function"
STOCK_TOOLKITS = frozenset(
    {"sagemaker_pytorch_container.training:main", "sagemaker_tensorflow_container.training:main"}
)
_DOTTED = r"[A-Za-z_]\w*(?:\.\w+)*"
LOCKS = ("uv.lock", "pylock.toml", "pyproject.toml")
"""The files beside a script that name its packages, the first one first. A requirements.txt comes before them."""
_LOCAL = re.compile(r'source = \{ (?:editable|directory|virtual) = "(?![/.]{2}|/)([^"]+)" \}')
_MAX_LISTED = 20
_MAX_DEPTH = 3  # of directories in which a script is searched


class CodeSource(NamedTuple):
    """Where the code is, and which variable or hyperparameter says so; empty for <base>/code."""

    address: str
    named_by: str

    @property
    def in_place(self) -> bool:
        """Whether the code is a directory that is used in place."""
        return not self.named_by or (not self.address.startswith(S3) and os.path.isdir(self.address))


class Code(NamedTuple):
    """The user's code on this host."""

    directory: str
    requirements: bool = False  # it has a requirements.txt that is not empty
    setup_py: bool = False
    package: bool = False  # pip can install it
    fetched: bool = True  # False in `train --explain` if it would have to be fetched
    origin: str = ""  # the address it was fetched from; empty for a directory that is used in place
    note: str = ""  # for the log
    lock: str = ""  # the file that names the packages, if there is no requirements.txt: one of LOCKS
    paths: tuple[str, ...] = ()  # directories with local packages of a project that is not installed


def locate_code(environ: Mapping[str, str], toolkit: Mapping[str, Any], code_dir: str) -> CodeSource:
    """Returns where the code is: SAGEMAKER_SUBMIT_DIRECTORY, else sagemaker_submit_directory, else `code_dir`.

    Args:
        environ: The environment of `train`.
        toolkit: The hyperparameters for the toolkit itself.
        code_dir: The directory <base>/code.

    Raises:
        ContractError: If the address is of an unsupported kind, or nothing exists there.
    """
    variable = environ.get("SAGEMAKER_SUBMIT_DIRECTORY")
    value = variable or toolkit.get("sagemaker_submit_directory")
    if not value:
        return CodeSource(code_dir, "")
    name = "SAGEMAKER_SUBMIT_DIRECTORY" if variable else "sagemaker_submit_directory"
    address = str(value).removeprefix("file://")
    if address.startswith(S3):
        if not re.fullmatch(r"s3://[^/]+/(.*[^/])", address):
            raise ContractError(f"{name} is {value!r}, which does not name an object. {_ALLOWED}")
        return CodeSource(address, name)
    if "://" in address:
        raise ContractError(f"{name} is {value!r}, which is not a supported code location. {_ALLOWED}")
    if os.path.abspath(address) == code_dir:  # the SDK's local mode always sets this
        return CodeSource(code_dir, "")
    if not os.path.isdir(address) and not os.path.isfile(address):
        raise ContractError(f"{name} is {value!r}, which does not exist in this container. {_ALLOWED}")
    return CodeSource(os.path.abspath(address), name)


def describe_without_fetching(source: CodeSource, code_dir: str) -> Code:
    """Returns the known facts about code before it is fetched, for `train --explain`. Code used in place is inspected.

    Args:
        source: Where the code is.
        code_dir: The directory into which it would be fetched.
    """
    if source.in_place:
        return inspect_code(source.address)
    note = f"the code will be fetched from {source.address} ({source.named_by}); --explain does not fetch it"
    return Code(code_dir, fetched=False, origin=source.address, note=note)


def inspect_code(directory: str) -> Code:
    """Returns facts about the code in a directory: requirements, a setup.py, or a package that pip can install.

    Raises ContractError if a file there can't be read.
    """
    setup_py = os.path.isfile(os.path.join(directory, "setup.py"))
    # A pyproject.toml that only configures tools makes no package.
    package = setup_py or _has_line(directory, "pyproject.toml", r"\[(project|build-system)\]")
    requirements = _has_line(directory, "requirements.txt", r"[^\s#]")
    lock = "" if requirements else _find_lock(directory)
    paths = _find_local_packages(directory, lock)
    return Code(directory, requirements, setup_py, package, lock=lock, paths=paths)


def _find_lock(directory: str) -> str:
    found = next((name for name in LOCKS if os.path.isfile(os.path.join(directory, name))), "")
    if found == "pyproject.toml":  # one that only configures tools names no packages
        has_packages = _has_line(directory, found, r"(?:optional-)?dependencies\b.*=|\[dependency-groups\]")
        return found if has_packages and _has_line(directory, found, r"\[(project|dependency-groups)\]") else ""
    return found


def _find_local_packages(directory: str, lock: str) -> tuple[str, ...]:
    """Returns the directories with modules of the project and its workspace, which a lock file does not install."""
    if not lock:
        return ()
    roots = dict.fromkeys([".", *_LOCAL.findall(read_text(directory, lock))]) if lock == "uv.lock" else ["."]
    places = [os.path.join(directory, root) for root in roots]
    sources = [os.path.join(place, "src") for place in places]
    found = [src if os.path.isdir(src) else place for src, place in zip(sources, places)]
    return tuple(os.path.normpath(each) for each in found if os.path.normpath(each) != os.path.normpath(directory))


def make_code_directory(code: Code) -> None:
    """Makes the code directory for a job without code, such as one that runs an installed module.

    Raises:
        ContractError: If it can't be made.
    """
    try:
        os.makedirs(code.directory, exist_ok=True)
    except OSError as error:
        raise ContractError(f"The code directory {code.directory} cannot be made: {error.strerror}. {_MOUNT}") from None


def _has_line(directory: str, name: str, pattern: str) -> bool:
    """Whether a file of that name exists and has a line that matches at its beginning."""
    path = os.path.join(directory, name)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return any(re.match(pattern, line.strip()) for line in file)
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}. {_READABLE}") from None


class Script(NamedTuple):
    """The entry point of a job."""

    kind: str  # PYTHON, COMMAND, MODULE or FUNCTION
    name: str  # as the user wrote it; for a function, the program that is named beside it
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
    name = str(environ.get("SAGEMAKER_PROGRAM") or toolkit.get("sagemaker_program") or "")
    function = environ.get("SAGEMAKER_TRAINING_MODULE")
    if function and function not in STOCK_TOOLKITS:
        if not re.fullmatch(rf"{_DOTTED}:[A-Za-z_]\w*", function):
            raise ContractError(
                f'SAGEMAKER_TRAINING_MODULE is {function!r}; it must be "package.module:function". '
                "Fix: set it so, or unset it to run a script."
            )
        return Script(FUNCTION, name, function)
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
    others = [name for name in LOCKS if os.path.isfile(os.path.join(code.directory, name))]
    taken = "requirements.txt" if code.requirements else code.lock
    if unused := [name for name in others if taken and name not in (taken, "pyproject.toml")]:
        notes.append(f"{taken} names the packages of this job, and {unused[0]} is not read. Fix: remove one of them")
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
        raise ContractError(f"The script {path} cannot be read: {error.strerror}. {_READABLE}") from None
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
    hint = hint or " Fix: name a file in it."
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
        return f"{directory} does not exist. {_MOUNT}"
    if not names:
        return f"{directory} is empty. {_MOUNT}"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{directory} contains: {', '.join(names[:_MAX_LISTED])}{more}"
