"""Runs pip before the launch: `python -m shoal_toolkit.sidecars.install . -r requirements.txt`.

This is `pip install` with these additions:

- The framework keeps its version: pip gets the installed versions of data/fixed_packages.json as constraints. Without
  them, `torch>=2.1` would silently replace the torch for which everything else in the image was built. A conflict is an
  error that names both versions (result/pip_failure.py).
- Packages that install the same modules, such as tensorflow and tensorflow-cpu, count as one. Otherwise a line
  `tensorflow` would silently put another build over the image's. pip sees empty packages with their names.
- A package is built in a copy, because pip leaves files in the directory. It may be read-only, or mounted into the
  containers of all hosts.
- The variable CA_REPOSITORY_ARN names an AWS CodeArtifact repository to install from. Its index and token are passed to
  pip in a variable, which other users of the machine can't read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, LaunchError, TrainError
from shoal_toolkit.tables import read_table

_ARN = re.compile(r"arn:[^:]+:codeartifact:([^:]+):([^:]+):repository/([^/]+)/(.+)")


def main(words: Sequence[str]) -> int:
    """Runs `pip install` in the current directory. It keeps the versions of the image's packages.

    `.` among the words stands for a copy of the directory. Returns pip's exit code. An error before pip is printed to
    stderr.
    """
    import subprocess
    import tempfile

    try:
        environ = {**os.environ, **_codeartifact_index(os.environ)}
    except TrainError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="shoal-install-") as directory:
        fixed = os.path.join(directory, "image-constraints.txt")
        installed = read_installed()
        others = find_other_names(installed)
        with open(fixed, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in list_constraints(installed, others))
        _make_empty_packages(directory, others)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (directory, environ.get("PYTHONPATH"))))
        words = [_copy_code(directory) if word == "." else word for word in words]
        return subprocess.call([sys.executable, "-m", "pip", "install", "--constraint", fixed, *words], env=environ)


def read_installed() -> dict[str, str]:
    """Returns the installed packages: normalized name → version."""
    from importlib import metadata

    found: dict[str, str] = {}
    for dist in metadata.distributions():  # in the order of sys.path: Python imports the first
        found.setdefault(re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower(), dist.version)
    return found


def find_other_names(installed: Mapping[str, str]) -> dict[str, str]:
    """Returns the packages that would replace the modules of an installed package: name → the installed version."""
    others: dict[str, str] = {}
    for names in read_table("fixed_packages")["same"]:
        versions = [installed[name] for name in names if name in installed]
        others.update({name: versions[0] for name in names if versions and name not in installed})
    return others


def list_constraints(installed: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Returns the constraints for pip: a line for each package that keeps its version, such as torch==2.0.1+cu117.

    Packages that keep only their major version give a range, such as numpy>=1,<2.

    Args:
        installed: The installed packages.
        others: Other names of these, which keep their versions too.
    """
    from fnmatch import fnmatchcase

    table = read_table("fixed_packages")
    lines = [f"{name}=={version}" for name, version in others.items()]
    for name, version in sorted(installed.items()):
        if any(fnmatchcase(name, pattern) for pattern in table["version"]):
            lines.append(f"{name}=={version}")
        elif name in table["major"] and (major := version.partition(".")[0]).isdecimal():
            lines.append(f"{name}>={major},<{int(major) + 1}")
    return lines


def _make_empty_packages(directory: str, versions: Mapping[str, str]) -> None:
    """Makes packages in a directory that have only a name and a version. pip takes them for installed."""
    for name, version in versions.items():
        path = os.path.join(directory, f"{name.replace('-', '_')}-{version}.dist-info")
        os.mkdir(path)
        with open(os.path.join(path, "METADATA"), "w", encoding="utf-8") as file:
            file.write(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _copy_code(directory: str) -> str:
    """Copies the current directory to `directory`/code, and returns that path."""
    import shutil

    return str(shutil.copytree(os.curdir, os.path.join(directory, "code"), symlinks=True))


def _codeartifact_index(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns pip's variable for the index of a CodeArtifact repository, with a token from AWS; empty if none is named.

    Raises TrainError if the name is wrong, or AWS refuses.
    """
    arn = environ.get("CA_REPOSITORY_ARN")
    if not arn:
        return {}
    match = _ARN.fullmatch(arn)
    if match is None:
        raise ContractError(
            f"CA_REPOSITORY_ARN is {arn!r}; it must have the form "
            "arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY."
        )
    from shoal_toolkit.sidecars import s3

    region, owner, domain, repository = match.groups()
    asked = {"domain": domain, "domainOwner": owner}
    client = s3.make_client("codeartifact", region)
    try:
        token = client.get_authorization_token(**asked)["authorizationToken"]
        place = client.get_repository_endpoint(**asked, repository=repository, format="pypi")["repositoryEndpoint"]
    except Exception as error:  # boto3's errors have no common base
        raise LaunchError(f"CodeArtifact refuses access to {arn}: {type(error).__name__}: {error}") from None
    scheme, _, rest = str(place).partition("://")
    return {"PIP_INDEX_URL": f"{scheme}://aws:{token}@{rest.rstrip('/')}/simple/"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
