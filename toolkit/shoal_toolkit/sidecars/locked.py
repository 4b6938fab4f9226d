"""Reads lock files: uv.lock, pylock.toml, a requirements.txt with hashes, and the dependencies in pyproject.toml.

Each becomes a list of pins. Without the framework and its CUDA packages, and without versions that the image's other
packages do not accept, these are installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from shoal_toolkit.errors import ContractError, LaunchError, did_you_mean
from shoal_toolkit.files import read_table, read_text
from shoal_toolkit.sidecars.uv import Uv, format_uv

GROUPS = "SHOAL_DEPENDENCY_GROUPS"  # names of dependency groups and extras, separated by commas
UV_LOCK, PYLOCK, PYPROJECT, REQUIREMENTS = "uv.lock", "pylock.toml", "pyproject.toml", "requirements.txt"
_PIN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^]]*\])?\s*(?:===?\s*(?P<version>[^\s;]+)|@\s*(?P<url>\S+))")
_MEMBER = re.compile(r"""(['"])(\S+?)\1 (not )?in (?:dependency_groups|extras)""")
_PYPI = "https://pypi.org/simple"


class Locked(NamedTuple):
    """A package that a lock file names."""

    name: str  # normalized
    version: str  # empty for an address
    line: str  # as in requirements.txt, with its hashes
    place: str = ""  # the address of its index, or a directory


class Choice(NamedTuple):
    """The pins to install, and sentences about the others."""

    pins: list[Locked]
    notes: list[str]


def normalize(name: str) -> str:
    """Returns the normal form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_groups(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of groups and extras that the user wants."""
    return [name for name in re.split(r"[\s,]+", environ.get(GROUPS, "")) if name]


def compute_digest(name: str, groups: Iterable[str]) -> str:
    """Returns the SHA-256 of all that decides what a lock file in the current directory installs."""
    digest = hashlib.sha256(f"{name} {' '.join(groups)}".encode())
    for path in (name, PYPROJECT) if name == UV_LOCK else (name,):
        digest.update(hashlib.sha256(read_text(path).encode("utf-8", "replace")).digest())
    return digest.hexdigest()


# Reading


def has_hashes(text: str) -> bool:
    """Returns whether the text of a requirements.txt pins by hash, and names no other files."""
    lines = join_lines(text)
    return any("--hash=" in line for line in lines) and not any(re.match(r"(?:-r|-c|--req|--cons)", x) for x in lines)


def join_lines(text: str) -> list[str]:
    """Returns the lines of a requirements.txt without comments. Those that end with a backslash are joined."""
    lines = re.sub(r"\\\r?\n", " ", re.sub(r"(?m)(?:^|\s)#.*$", "", text)).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def parse_requirements(text: str) -> tuple[list[Locked], list[str]]:
    """Returns the pins in a requirements.txt that apply here, and the lines with options, such as --index-url."""
    pins, options = [], []
    for line in join_lines(text):
        if line.startswith("-"):
            options.append(line)
            continue
        found = _PIN.match(line)
        if found is None:
            raise ContractError(f"{REQUIREMENTS}: {line.partition(' --hash')[0]!r} is not pinned. Fix: lock it again.")
        marker = line.partition(" --hash")[0].partition(" ;" if found["url"] else ";")[2]
        if _applies(marker):
            pins.append(Locked(normalize(found["name"]), found["version"] or "", line))
    return pins, options


def read_uv_lock(uv: Uv, groups: Sequence[str]) -> list[Locked]:
    """Returns the pins of uv.lock in the current directory, without the development group and local packages.

    Raises:
        ContractError: If pyproject.toml is missing, a group is unknown, or the lock is for another Python.
        LaunchError: If uv cannot read it; its words are in stderr.
    """
    lock = read_toml(UV_LOCK)
    if not os.path.isfile(PYPROJECT):
        raise ContractError(f"{UV_LOCK} has no {PYPROJECT} beside it, which uv needs. Fix: copy it there too.")
    check_python(UV_LOCK, str(lock.get("requires-python", "")))
    words = ["export", "--frozen", "--no-dev", "--no-emit-local", "--no-annotate", "--no-header", "--quiet"]
    words += ["--format=requirements-txt", f"--python={sys.executable}", *_name_groups(read_toml(PYPROJECT), groups)]
    done = uv.run(*words, cwd=os.getcwd())
    if done.returncode:
        raise LaunchError(f"uv cannot read {UV_LOCK}: its words are above. Fix: lock it again with `uv lock`.")
    registries = {
        (normalize(str(each.get("name"))), str(each.get("version"))): str(each.get("source", {}).get("registry", ""))
        for each in lock.get("package", ())
    }
    pins, _ = parse_requirements(done.stdout)
    return [pin._replace(place=registries.get((pin.name, pin.version), "")) for pin in pins]


def read_pylock(groups: Sequence[str]) -> list[Locked]:
    """Returns the pins of pylock.toml (PEP 751) in the current directory. Raises ContractError."""
    lock = read_toml(PYLOCK)
    if str(lock.get("lock-version", "")).partition(".")[0] != "1":
        raise ContractError(
            f"{PYLOCK}: lock-version {lock.get('lock-version')!r}, and 1.0 is allowed. Fix: lock again."
        )
    check_python(PYLOCK, str(lock.get("requires-python", "")))
    known = [*lock.get("dependency-groups", ()), *lock.get("extras", ())]
    for name in groups:
        _check_group(name, known, PYLOCK)
    chosen = {*groups, *lock.get("default-groups", ())}
    return [
        _convert_package(each)
        for each in lock.get("packages", ())
        if "directory" not in each
        and _applies(_fill_in_groups(str(each.get("marker", "")), chosen))
        and _fits(str(each.get("requires-python", "")))
    ]


def _convert_package(package: Mapping[str, Any]) -> Locked:
    name, version, index = normalize(str(package["name"])), str(package.get("version", "")), package.get("index", "")
    if vcs := package.get("vcs"):
        address = f"{vcs['type']}+{vcs['url']}@{vcs['commit-id']}"
        return Locked(
            name, "", f"{name} @ {address}" + (f"#subdirectory={s}" if (s := vcs.get("subdirectory")) else "")
        )
    if archive := package.get("archive"):
        return Locked(name, "", f"{name} @ {archive['url']} {_format_hashes([archive])}")
    files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
    if not index and files and "path" in files[0]:
        index = os.path.dirname(files[0]["path"]) or os.curdir
    return Locked(name, version, f"{name}=={version} {_format_hashes(files)}", str(index))


def _format_hashes(files: Iterable[Mapping[str, Any]]) -> str:
    return " ".join(f"--hash={kind}:{value}" for each in files for kind, value in each.get("hashes", {}).items())


def read_pyproject(groups: Sequence[str]) -> list[str]:
    """Returns the requirements in pyproject.toml: of the project, and of these groups and extras. Raises ContractError.

    Source of the groups' form: PEP 735.
    """
    document = read_toml(PYPROJECT)
    project = document.get("project", {})
    check_python(PYPROJECT, str(project.get("requires-python", "")))
    lines = [*project.get("dependencies", ())]
    _name_groups(document, groups)
    for name in groups:
        extras = {normalize(key): value for key, value in project.get("optional-dependencies", {}).items()}
        lines += extras[normalize(name)] if normalize(name) in extras else _expand_group(document, name, ())
    own = normalize(str(project.get("name", "")))
    return [line for line in lines if normalize(re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0]) != own]


def _expand_group(document: Mapping[str, Any], name: str, above: tuple[str, ...]) -> list[str]:
    groups = {normalize(key): value for key, value in document.get("dependency-groups", {}).items()}
    if normalize(name) in above or normalize(name) not in groups:
        raise ContractError(
            f"{PYPROJECT}: the dependency group {name!r} is missing or includes itself. Fix: correct it."
        )
    lines: list[str] = []
    for entry in groups[normalize(name)]:
        inside = entry.get("include-group") if isinstance(entry, dict) else None
        lines += _expand_group(document, inside, (*above, normalize(name))) if inside else [entry]
    return lines


def _name_groups(document: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns uv's options for groups and extras. Raises ContractError for an unknown name."""
    extras = {normalize(name) for name in document.get("project", {}).get("optional-dependencies", {})}
    groups = {normalize(name) for name in document.get("dependency-groups", {})}
    for name in names:
        _check_group(name, extras | groups, PYPROJECT)
    return [f"--extra={name}" if normalize(name) in extras else f"--group={name}" for name in names]


def _check_group(name: str, known: Iterable[str], path: str) -> None:
    names = sorted(known)
    if normalize(name) not in {normalize(each) for each in names}:
        raise ContractError(
            f"{GROUPS} names {name!r}, which {path} does not have.{did_you_mean(name, names)} Allowed: "
            f"{', '.join(names) or 'none'}. Fix: correct the variable, or add the group."
        )


def read_toml(path: str) -> dict[str, Any]:
    """Returns the content of a TOML file. Raises ContractError if it is not valid."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.9 and 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ContractError(f"{path} cannot be read: {error}. Fix: correct it, or lock it again.") from None


def check_python(path: str, wanted: str) -> None:
    """Raises ContractError if a lock file is for another Python than this one."""
    if not _fits(wanted):
        here = ".".join(map(str, sys.version_info[:3]))
        raise ContractError(
            f"{path} is for Python {wanted}, and this image has Python {here}. Fix: use an image with such a Python "
            f"(shoal list), or allow this one in requires-python and lock it again."
        )


def _fits(wanted: str) -> bool:
    from pip._vendor.packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(".".join(map(str, sys.version_info[:3])))


def _applies(marker: str) -> bool:
    from pip._vendor.packaging.markers import Marker

    return not marker.strip() or Marker(marker.strip()).evaluate({"extra": ""})


def _fill_in_groups(marker: str, groups: Iterable[str]) -> str:
    """Returns a marker without the names that only lock files have: older packages of pip do not know them."""
    chosen = {normalize(name) for name in groups}

    def decide(found: re.Match[str]) -> str:
        is_true = (normalize(found[2]) in chosen) != bool(found[3])
        return f"python_version {'>=' if is_true else '<'} '3'"

    return _MEMBER.sub(decide, marker)


# Choosing


def choose_pins(
    path: str,
    pins: Iterable[Locked],
    installed: Mapping[str, str],
    others: Mapping[str, str],
    needs: Mapping[str, str],
) -> Choice:
    """Returns the pins to install beside the image's framework, and sentences about the versions that the image keeps.

    Args:
        path: The lock file, for the sentences.
        installed: The image's packages: name → version.
        others: Other names of these, with the same modules.
        needs: The versions of packages that the image's other packages need.
    """
    pins = list(pins)
    image = _ImagePackages(read_table("fixed_packages"), {**others, **installed}, frozenset(others), needs)
    locked = {pin.name: pin.version for pin in pins}
    chosen: list[Locked] = []
    notes: list[str] = []
    of_framework = 0
    for pin in pins:
        if reason := image.find_reason(pin, locked):
            notes.append(f"{path} has {_describe(pin)}, {reason}")
        elif image.belongs_to_framework(pin):
            of_framework += 1
        elif not image.has(pin):
            chosen.append(pin)
    if of_framework:
        notes.append(f"{of_framework} packages in {path} belong to its framework and CUDA, and are left out")
    return Choice(chosen, notes)


class _ImagePackages(NamedTuple):
    """The image's packages, and which of them stay."""

    table: Mapping[str, Any]
    present: Mapping[str, str]
    others: frozenset[str]
    needs: Mapping[str, str]

    def has(self, pin: Locked) -> bool:
        """Returns whether the image has the package, or keeps its own version of it."""
        have = self.present.get(pin.name)
        return have is not None and (pin.name in self.others or have == pin.version or self._keeps(pin.name))

    def belongs_to_framework(self, pin: Locked) -> bool:
        """Returns whether a framework of a lock needs the package, and the image has a framework without it."""
        is_known = any(fnmatchcase(pin.name, pattern) for pattern in self.table["with_framework"])
        return is_known and pin.name not in self.present and not {"torch", "tensorflow"}.isdisjoint(self.present)

    def find_reason(self, pin: Locked, locked: Mapping[str, str]) -> str:
        """Returns why the image's version stays, or the package is left out; empty if neither, or both are equal."""
        from pip._vendor.packaging.specifiers import SpecifierSet

        have, need = self.present.get(pin.name, ""), self.needs.get(pin.name)
        if have and (self._keeps(pin.name) or pin.name in self.others):
            return "" if _same(pin.version, have) else f"and this image {have}, which stays"
        if have and need and pin.version and not SpecifierSet(need).contains(pin.version, prereleases=True):
            return f"and packages of this image need {need}: {have} stays"
        framework = self.table["compiled"].get(pin.name, "")
        other = self.present.get(framework, "")
        if other and not _same(locked.get(framework, ""), other):
            return f"which is left out: this image has another {framework}"
        return ""

    def _keeps(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.table["version"])


def _describe(pin: Locked) -> str:
    return f"{pin.name} {pin.version}" if pin.version else f"{pin.name} from an address"


def _same(version: str, have: str) -> bool:
    """Returns whether two versions differ at most in the local part, such as +cpu."""
    return version.partition("+")[0] == have.partition("+")[0]


def list_indexes(pins: Iterable[Locked]) -> list[str]:
    """Returns the addresses of indexes other than PyPI, and the absolute paths of directories, that the pins need."""
    found = dict.fromkeys(pin.place for pin in pins if pin.place and pin.place.rstrip("/") != _PYPI)
    return [each if "://" in each else os.path.abspath(each) for each in found]


# Installing


def install_pins(uv: Uv, pins: Sequence[Locked], options: Iterable[str], directory: str) -> int:
    """Installs pins, each file checked by its hash, and returns the exit code of uv.

    Pins without a hash are of Git, where the commit is checked, or of a local directory. Bytecode is compiled: all
    ranks would do so.

    Args:
        uv: The program.
        pins: The pins, with all that they need: nothing else is resolved.
        options: Lines such as --index-url, from a requirements.txt.
        directory: A directory for temporary files.
    """
    uv = uv.add_indexes(list_indexes(pins))
    common = ["pip", "install", "--no-deps", "--compile-bytecode", f"--python={sys.executable}"]
    common += ["--index-strategy=unsafe-best-match", "--no-config"]  # hashes decide, not the index
    for name, wanted in {"hashed": True, "others": False}.items():
        lines = [pin.line for pin in pins if ("--hash=" in pin.line) == wanted]
        path = os.path.join(directory, f"{name}.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in [*options, *lines])
        checked = ["--require-hashes"] if wanted else []
        if lines and (code := uv.run(*common, *checked, f"--requirements={path}", cwd=directory).returncode):
            return code
    return 0


def download_pins(pins: Sequence[Locked], options: Iterable[str], target: str, environ: Mapping[str, str]) -> int:
    """Downloads the files of pins, and uv, into a directory, each checked by its hash. Returns the exit code of pip.

    Raises:
        ContractError: If a pin has no hash, such as one of Git.
    """
    if bare := [pin.name for pin in pins if "--hash=" not in pin.line]:
        raise ContractError(
            f"{', '.join(bare)}: without a hash, as from Git. Fix: lock an archive or a release instead."
        )
    os.makedirs(target, exist_ok=True)
    path = os.path.join(target, "requirements.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in [*options, *(pin.line for pin in pins), format_uv()])
    indexes = [word for place in list_indexes(pins) if "://" in place for word in ("--extra-index-url", place)]
    words = ["download", "--no-deps", "--require-hashes", "--quiet", f"--dest={target}", f"-r{path}", *indexes]
    code = subprocess.call([sys.executable, "-m", "pip", *words], env=dict(environ))
    os.remove(path)
    return code


def _installed_file() -> str:
    return os.path.join(sys.prefix, "share", "shoal", "lock.json")


def read_installed_notes(digest: str, installed: Mapping[str, str]) -> list[str] | None:
    """Returns the sentences about a lock file that this Python has; None if it has not all that the lock pins.

    Args:
        digest: Of the lock file: see `compute_digest`.
        installed: The packages of this Python: name → version.
    """
    try:
        written = json.loads(read_text(_installed_file()))
        if written["digest"] == digest and all(
            version in ("", installed[name]) for name, version in written["packages"].items()
        ):
            return [str(note) for note in written["notes"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def write_installed(digest: str, choice: Choice) -> None:
    """Writes which lock file this Python has, for later starts and images that are made from this container."""
    path = _installed_file()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    packages = {pin.name: pin.version for pin in choice.pins}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"digest": digest, "packages": packages, "notes": choice.notes}, file)
