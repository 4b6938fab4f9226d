"""What pip installs before the launch: the code itself where it is a package, and its requirements.txt.

The requirements are installed for every kind of entry point; the package for a module that is named, and where there is
a setup.py, except for shell scripts. (So does the stock toolkit, which forgets the requirements of shell scripts.)
Nothing is run where there is nothing to install.

`python -m shoal_toolkit.sidecars.install . -r requirements.txt` is `pip install` with three things added:

- The framework stays as it is: pip is given constraints, the installed versions of data/fixed_packages.json. Without
  them `torch>=2.1` silently replaces the torch for which everything else in the image was built. What cannot be is an
  error that names both versions (outcome/pip_failure.py).
- A package is built in a copy: pip leaves files in the directory that it builds in, which may be read-only, or mounted
  in all hosts' containers at once.
- The variable CA_REPOSITORY_ARN names a repository of AWS CodeArtifact to install from: its index, and a token for it,
  are passed in a variable, where other users of the machine cannot read it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, LaunchError, TrainError
from shoal_toolkit.light_typing import TYPE_CHECKING
from shoal_toolkit.tables import read_table

if TYPE_CHECKING:  # what main() runs alone needs neither
    from shoal_toolkit.job.contract import Job
    from shoal_toolkit.job.machine import Machine

_ARN = re.compile(r"arn:[^:]+:codeartifact:([^:]+):([^:]+):repository/([^/]+)/(.+)")


def commands(job: Job, machine: Machine) -> tuple[tuple[str, ...], ...]:
    """Return the commands to run in the code directory of each host before the launch."""
    package = job.code.setup_py and not job.script.name.endswith(".sh")
    package = package or (job.code.package and job.script.needs_no_code)
    words = [*(["."] if package else []), *(["-r", "requirements.txt"] if job.code.requirements else [])]
    if not words:
        return ()
    return ((machine.python, "-m", "shoal_toolkit.sidecars.install", *words),)


def main(words: Sequence[str]) -> int:
    """Run pip in the current directory; returns its exit code."""
    import subprocess
    import tempfile

    try:
        environ = {**os.environ, **_index(os.environ)}
    except TrainError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="shoal-install-") as directory:
        fixed = os.path.join(directory, "image-constraints.txt")
        with open(fixed, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in constraints())
        words = [_copy(directory) if word == "." else word for word in words]
        return subprocess.call([sys.executable, "-m", "pip", "install", "--constraint", fixed, *words], env=environ)


def constraints() -> list[str]:
    """Return what pip is held to: a line for each installed package that stays, such as torch==2.0.1+cu117."""
    from fnmatch import fnmatchcase
    from importlib import metadata

    table = read_table("fixed_packages")
    found: dict[str, str] = {}
    for dist in metadata.distributions():  # in the order of sys.path: the first is the one that is imported
        found.setdefault(re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower(), dist.version)
    lines = []
    for name, version in sorted(found.items()):
        if any(fnmatchcase(name, pattern) for pattern in table["version"]):
            lines.append(f"{name}=={version}")
        elif name in table["major"] and (major := version.partition(".")[0]).isdecimal():
            lines.append(f"{name}>={major},<{int(major) + 1}")
    return lines


def _copy(directory: str) -> str:
    import shutil

    return str(shutil.copytree(os.curdir, os.path.join(directory, "code"), symlinks=True))


def _index(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's variable for the index of a CodeArtifact repository; none where none is named."""
    arn = environ.get("CA_REPOSITORY_ARN")
    if not arn:
        return {}
    match = _ARN.fullmatch(arn)
    if match is None:
        raise ContractError(
            f"CA_REPOSITORY_ARN is {arn!r}; it must be of the form "
            "arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY."
        )
    from shoal_toolkit.sidecars import s3

    region, owner, domain, repository = match.groups()
    asked = {"domain": domain, "domainOwner": owner}
    client = s3.boto("codeartifact", region)
    try:
        token = client.get_authorization_token(**asked)["authorizationToken"]
        place = client.get_repository_endpoint(**asked, repository=repository, format="pypi")["repositoryEndpoint"]
    except Exception as error:  # boto3's errors have no common base
        raise LaunchError(f"CodeArtifact gives no access to {arn}: {type(error).__name__}: {error}") from None
    scheme, _, rest = str(place).partition("://")
    return {"PIP_INDEX_URL": f"{scheme}://aws:{token}@{rest.rstrip('/')}/simple/"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
