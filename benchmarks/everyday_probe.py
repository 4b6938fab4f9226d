"""Prints, as JSON, which modules an image cannot import, and which commands it lacks. Runs in containers.

It also prints the bytes and the modules of the given distributions. The benchmark adds the call of `main`.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import warnings

_PATH = [*sys.path]


def main(modules: list[str], commands: list[str], distributions: list[str]) -> None:
    for name, value in (("TMPDIR", "/dev/shm"), ("HOME", "/dev/shm"), ("TF_CPP_MIN_LOG_LEVEL", "3")):
        os.environ[name] = value
    warnings.simplefilter("ignore")
    lacking_modules = [name for name in modules if not can_import(name)]
    builtins = subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=True).stdout.split()
    lacking_commands = [name for name in commands if name not in builtins and not shutil.which(name)]
    found = {
        "modules": lacking_modules,
        "commands": lacking_commands,
        "distributions": describe_distributions(distributions),
    }
    sys.stdout.write(json.dumps(found) + "\n")


def describe_distributions(names: list[str]) -> dict[str, dict[str, object]]:
    """Return the bytes and the top-level modules of installed distributions, by name."""
    found: dict[str, dict[str, object]] = {}
    for name in names:
        paths = [file.locate() for file in importlib.metadata.files(name) or ()]
        tops = {str(file).partition("/")[0].removesuffix(".py") for file in importlib.metadata.files(name) or ()}
        found[name] = {
            "bytes": sum(os.lstat(path).st_size for path in paths if os.path.lexists(path)),
            "modules": [*tops],
        }
    return found


def can_import(name: str) -> bool:
    """Import a module. Any error counts: a script would end with it too."""
    sys.path[:] = _PATH  # setuptools adds a directory with packages of its own
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            importlib.import_module(name)
        except BaseException:
            return False
    return True
