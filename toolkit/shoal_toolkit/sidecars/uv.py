"""Finds uv, or downloads the pinned one, and runs it with the indexes that pip is configured with.

The images have no uv: it is needed for lock files only, and then once (docs/decisions/lock-files.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.files import read_table

_ON = ("1", "yes", "true", "on")


class Uv(NamedTuple):
    """A program uv, and the environment for it."""

    program: str
    environ: Mapping[str, str]

    def run(self, *words: str, cwd: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of uv to its end, and returns its output. Its errors go to stderr as they come."""
        command = [self.program, *words]
        return subprocess.run(command, cwd=cwd, env=self.environ, stdout=subprocess.PIPE, text=True, check=False)

    def add_indexes(self, places: Iterable[str]) -> Uv:
        """Returns uv with further addresses of indexes, or absolute paths of local ones and directories of wheels."""
        links = [self.environ.get("UV_FIND_LINKS", ""), *(each for each in places if "://" not in each)]
        joined = {"UV_INDEX": " ".join([self.environ.get("UV_INDEX", ""), *places]), "UV_FIND_LINKS": ",".join(links)}
        added = {name: value.strip(" ,") for name, value in joined.items() if value.strip(" ,")}
        return self._replace(environ={**self.environ, **added})


def provide_uv(directory: str, environ: Mapping[str, str]) -> Uv:
    """Returns the uv next to Python or on PATH, or downloads the pinned one with pip, checked by its hash.

    Args:
        directory: A directory for the download, which must outlive the result.
        environ: The environment for pip, with its settings.

    Raises:
        LaunchError: If it cannot be downloaded.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", "")])
    program = shutil.which("uv", path=path) or _download(directory, environ)
    own = {"UV_NO_CACHE": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    return Uv(program, {**own, **convert_settings(_read_pip_settings(environ)), **environ})


def _read_pip_settings(environ: Mapping[str, str]) -> list[str]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def convert_settings(lines: Sequence[str]) -> dict[str, str]:
    """Returns the variables of uv for the lines of `pip config list`: indexes, certificates and the proxy.

    As a program, this module reads these lines from stdin and prints NAME=VALUE.

    Variables, because an index may have a password, and every user of a machine can read the arguments of commands.
    """
    import ast

    values: dict[str, str] = {}
    for place in ("global", "install", ":env:"):  # a later one wins
        for line in lines:
            key, _, value = line.partition("=")
            at, _, name = key.rpartition(".")
            if at == place and (text := " ".join(str(ast.literal_eval(value)).split())):
                values[name] = text
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "trusted-host": "UV_INSECURE_HOST"}
    found = {variable: values[name] for name, variable in names.items() if name in values}
    if "find-links" in values:
        found["UV_FIND_LINKS"] = values["find-links"].replace(" ", ",")
    if values.get("no-index", "").lower() in _ON:
        found["UV_NO_INDEX"] = "1"
    if "cert" in values:
        found["SSL_CERT_FILE"] = values["cert"]
    if "proxy" in values:
        found.update(dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), values["proxy"]))
    return found


def format_uv() -> str:
    """Returns the pinned uv as a line of a requirements.txt, with its hashes."""
    pinned = read_table("uv")
    return " ".join([f"uv=={pinned['version']}", *(f"--hash=sha256:{each}" for each in pinned["hashes"])])


def _download(directory: str, environ: Mapping[str, str]) -> str:
    pinned = read_table("uv")
    target = Path(directory, "uv")
    target.mkdir()
    (target / "uv.txt").write_text(f"{format_uv()}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={target}", f"-r{target / 'uv.txt'}"]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        print(f"pip: {line}", file=sys.stderr)
    wheel = next(target.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise LaunchError(
            f"uv {pinned['version']}, which installs lock files, is not in this image, and pip could not download it. "
            "Fix: give the container a network or an index (PIP_INDEX_URL), or put uv into the image: RUN pip install "
            f"uv=={pinned['version']}"
        )
    program = target / "uv"
    with zipfile.ZipFile(wheel) as packed:
        program.write_bytes(packed.read(f"uv-{pinned['version']}.data/scripts/uv"))
    program.chmod(0o755)
    return str(program)


if __name__ == "__main__":
    for name, setting in convert_settings(sys.stdin.read().splitlines()).items():
        print(f"{name}={setting}")
