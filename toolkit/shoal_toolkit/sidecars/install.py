"""Runs pip before the launch: `python -m shoal_toolkit.sidecars.install . -r requirements.txt`.

This is `pip install` with these additions:

- The framework keeps its version: pip gets the installed versions of data/fixed_packages.json as constraints. Without
  them, `torch>=2.1` would silently replace the torch for which everything else in the image was built. A conflict is an
  error that names both versions (result/setup_failure.py).
- numpy and protobuf stay in the ranges that the image's other packages need. So do packages that the framework needs.
  Otherwise numpy==1.24 would silently break a scipy that needs 1.25. A package of requirements.txt does not count.
- Packages that install the same modules, such as tensorflow and tensorflow-cpu, count as one. Otherwise a line
  `tensorflow` would silently put another build over the image's. pip sees empty packages with their names.
- A package is built in a copy, because pip leaves files in the directory. It may be read-only, or mounted into the
  containers of all hosts.
- Lock files are installed by uv, checked by their hashes, without packages that the image keeps (sidecars/locked.py).
  `--locked NAME` names one, and a requirements.txt with hashes is one too. With `--download DIR`, their files and uv go
  there, for hosts without a network. If the same lock was installed before, such as in a layer of the image, nothing
  is done.
- The variable CA_REPOSITORY_ARN names an AWS CodeArtifact repository to install from. Its index and token are passed to
  pip in a variable, which other users of the machine can't read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal_toolkit.errors import ContractError, LaunchError, TrainError
from shoal_toolkit.files import read_table, read_text
from shoal_toolkit.sidecars import locked

if TYPE_CHECKING:
    from pip._vendor.packaging.specifiers import SpecifierSet

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ARN = re.compile(r"arn:[^:]+:codeartifact:([^:]+):([^:]+):repository/([^/]+)/(.+)")


def main(words: Sequence[str]) -> int:
    """Runs `pip install` in the current directory. It keeps the versions of the image's packages.

    `.` among the words stands for a copy of the directory. Returns pip's exit code. An error before pip is printed to
    stderr.
    """
    try:
        environ = {**os.environ, **_codeartifact_index(os.environ)}
        with tempfile.TemporaryDirectory(prefix="shoal-install-") as directory:
            rest = list(words)
            target = _take_option(rest, "--download")
            lock = _take_lock(rest)
            if lock == locked.PYPROJECT:
                rest += ["-r", _write_pyproject(directory)]
            elif lock:
                if (code := _install_lock(lock, directory, environ, target)) or not rest:
                    return code
                rest.insert(0, "--no-deps")
            return _run_pip(rest, directory, environ)
    except TrainError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code


def _run_pip(words: Sequence[str], directory: str, environ: dict[str, str]) -> int:
    fixed = os.path.join(directory, "image-constraints.txt")
    installed = read_installed()
    others = find_other_names(installed)
    with open(fixed, "w", encoding="utf-8") as file:
        needs = read_needs(installed, _read_names(words))
        file.writelines(f"{line}\n" for line in list_constraints(installed, others, needs))
    _make_empty_packages(directory, others)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (directory, environ.get("PYTHONPATH"))))
    # For pip only: builds of packages may import modules of their own directory.
    safe = ["-P"] if environ.pop("PYTHONSAFEPATH", None) and sys.version_info >= (3, 11) else []
    code = os.path.join(directory, "code")
    words = [shutil.copytree(os.curdir, code, symlinks=True) if word == "." else word for word in words]
    pip = [sys.executable, *safe, "-m", "pip"]
    return subprocess.call([*pip, "install", "--constraint", fixed, *words], env=environ)


def _take_option(words: list[str], name: str) -> str:
    """Removes an option and its value from the words, and returns the value; empty without the option."""
    if name not in words:
        return ""
    at = words.index(name)
    value = words[at + 1]
    del words[at : at + 2]
    return value


def _take_lock(words: list[str]) -> str:
    """Removes the lock file from the words, and returns its name; empty if there is none."""
    name = _take_option(words, "--locked")
    if not name and words[-2:] == ["-r", locked.REQUIREMENTS] and locked.has_hashes(read_text(locked.REQUIREMENTS)):
        del words[-2:]
        return locked.REQUIREMENTS
    return name


def _write_pyproject(directory: str) -> str:
    """Writes the requirements of pyproject.toml for pip, without those that the image's framework does not meet."""
    from pip._vendor.packaging.requirements import Requirement

    installed = read_installed()
    present = {**find_other_names(installed), **installed}
    path = os.path.join(directory, "pyproject.txt")
    with open(path, "w", encoding="utf-8") as file:
        for line in locked.read_pyproject(locked.read_groups(os.environ)):
            need = Requirement(line)
            have = present.get(_normalize(need.name), "")
            if have and _keeps_version(_normalize(need.name), read_table("fixed_packages")):
                if not need.specifier.contains(have, prereleases=True):
                    print(f"pyproject.toml asks for {line}, and this image has {have}, which stays", flush=True)
            else:
                file.write(f"{line}\n")
    return path


def _install_lock(name: str, directory: str, environ: Mapping[str, str], target: str) -> int:
    """Installs the pins of a lock file in the current directory, or downloads them and uv to `target` if that is named.

    Returns the exit code of uv or pip.
    """
    from shoal_toolkit.sidecars.uv import provide_uv

    groups = locked.read_groups(environ)
    digest = locked.compute_digest(name, groups)
    installed = read_installed()
    if not target and (notes := locked.read_installed_notes(digest, installed)) is not None:
        print("\n".join([*notes, f"{name}: its packages are installed already"]), flush=True)
        return 0
    uv = provide_uv(directory, environ)
    options: list[str] = []
    if name == locked.UV_LOCK:
        pins = locked.read_uv_lock(uv, groups)
    elif name == locked.PYLOCK:
        pins = locked.read_pylock(groups)
    else:
        pins, options = locked.parse_requirements(read_text(name))
    others = find_other_names(installed)
    replaced = {pin.name for pin in pins if not _keeps_version(pin.name, read_table("fixed_packages"))}
    choice = locked.choose_pins(name, pins, installed, others, read_needs(installed, replaced))
    for note in choice.notes:
        print(note, flush=True)
    print(f"{name}: {len(choice.pins)} packages to install", flush=True)
    if target:
        return locked.download_pins(choice.pins, options, target, environ)
    code = locked.install_pins(uv, choice.pins, options, directory)
    if not code:
        locked.write_installed(digest, choice)
    return code


def read_installed() -> dict[str, str]:
    """Returns the installed packages: normalized name → version."""
    from importlib import metadata

    found: dict[str, str] = {}
    for dist in metadata.distributions():  # in the order of sys.path: Python imports the first
        found.setdefault(_normalize(dist.metadata["Name"] or ""), dist.version)
    return found


def read_needs(installed: Mapping[str, str], asked: Collection[str]) -> dict[str, str]:
    """Returns which versions of packages the image's other packages need: name → such as "<1.28,>=1.21.6".

    Packages that the framework is compiled against, such as numpy, keep their major version, and the needs of all
    packages count. For the rest, only the needs of packages that keep their version count. A range without the
    installed version does not count.

    Args:
        asked: Packages that pip may replace. They do not count.
    """
    from importlib import metadata

    from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
    from pip._vendor.packaging.specifiers import SpecifierSet

    table = read_table("fixed_packages")
    major = {name for name, users in table["major"].items() if not installed.keys().isdisjoint(users)}
    found: dict[str, SpecifierSet] = {
        name: SpecifierSet(f">={version.partition('.')[0]},<{int(version.partition('.')[0]) + 1}")
        for name, version in installed.items()
        if name in major and version.partition(".")[0].isdecimal()
    }
    for dist in metadata.distributions():
        owner = _normalize(dist.metadata["Name"] or "")
        if owner in asked:
            continue
        for line in dist.requires or ():
            try:
                need = Requirement(line)
            except InvalidRequirement:
                continue
            name, versions = _normalize(need.name), need.specifier
            counts = name in major or _keeps_version(owner, table)
            applies = need.marker is None or need.marker.evaluate({"extra": ""})
            if counts and applies and versions and versions.contains(installed.get(name, ""), prereleases=True):
                found[name] = found.get(name, SpecifierSet()) & versions
    return {name: _shorten_range(versions) for name, versions in found.items()}


def _shorten_range(versions: SpecifierSet) -> str:
    """Returns a range without the limits that others of its limits include: <3,<2.7,>=1,>=2 → <2.7,>=2."""
    from pip._vendor.packaging.version import Version

    rest = [str(limit) for limit in versions if limit.operator not in ("<", ">=")]
    for operator, strictest in (("<", min), (">=", max)):
        limits = [limit.version for limit in versions if limit.operator == operator]
        rest += [operator + strictest(limits, key=Version)] if limits else []
    return ",".join(rest)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _keeps_version(name: str, table: Mapping[str, Any]) -> bool:
    from fnmatch import fnmatchcase

    return any(fnmatchcase(name, pattern) for pattern in table["version"])


def _read_names(words: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for option, path in zip(words, words[1:]):
        if option == "-r":
            with open(path, encoding="utf-8", errors="replace") as file:
                names.update(_normalize(found[0]) for found in map(_NAME.match, file) if found)
    return names


def find_other_names(installed: Mapping[str, str]) -> dict[str, str]:
    """Returns the packages that would replace the modules of an installed package: name → the installed version."""
    others: dict[str, str] = {}
    for names in read_table("fixed_packages")["same"]:
        versions = [installed[name] for name in names if name in installed]
        others.update({name: versions[0] for name in names if versions and name not in installed})
    return others


def list_constraints(installed: Mapping[str, str], others: Mapping[str, str], needs: Mapping[str, str]) -> list[str]:
    """Returns the constraints for pip: a line for each package that keeps its version, such as torch==2.0.1+cu117.

    Packages that others need give a range, such as numpy<2,>=1.21.

    Args:
        others: Other names of these, which keep their versions too.
        needs: The versions that other packages need.
    """
    table = read_table("fixed_packages")
    lines = [f"{name}=={version}" for name, version in others.items()]
    for name, version in sorted(installed.items()):
        if _keeps_version(name, table):
            lines.append(f"{name}=={version}")
        elif name in needs:
            lines.append(f"{name}{needs[name]}")
    return lines


def _make_empty_packages(directory: str, versions: Mapping[str, str]) -> None:
    """Makes packages in a directory that have only a name and a version. pip takes them for installed."""
    for name, version in versions.items():
        path = os.path.join(directory, f"{name.replace('-', '_')}-{version}.dist-info")
        os.mkdir(path)
        with open(os.path.join(path, "METADATA"), "w", encoding="utf-8") as file:
            file.write(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _codeartifact_index(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns pip's variable for a CodeArtifact repository, with a token from AWS; empty if none is named."""
    arn = environ.get("CA_REPOSITORY_ARN")
    if not arn:
        return {}
    match = _ARN.fullmatch(arn)
    if match is None:
        raise ContractError(
            f"The variable CA_REPOSITORY_ARN is {arn!r}. Fix: set it to "
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
        raise LaunchError(
            f"CodeArtifact refuses access to {arn}: {type(error).__name__}: {error}. Fix: check that the job's role, "
            "or the credentials in its variables, allow codeartifact:GetAuthorizationToken and ReadFromRepository."
        ) from None
    scheme, _, rest = str(place).partition("://")
    return {"PIP_INDEX_URL": f"{scheme}://aws:{token}@{rest.rstrip('/')}/simple/"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
