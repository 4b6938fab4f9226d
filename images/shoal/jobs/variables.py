"""Variables and secrets for the hosts of a job: the options -e, --env-file and --secret.

A value on a command line is visible to every user of the machine (`ps`). So there are other ways, and a warning.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import trust
from shoal.errors import UsageError

SECRETS = "/run/secrets"
"""The directory in a container with a file for each secret, as in Docker and Podman."""
SECRET_VARIABLES = "SHOAL_SECRET_VARIABLES"
"""The variable with the names of the secrets that `train` also sets as variables for the script."""
_AS_VARIABLE = ",type=env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,252}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,252}")
_RESERVED = ("SHOAL_", "SM_", "SAGEMAKER_")
_MAX_SECRET = 500 * 1000
"""The limit of Docker for a secret, in bytes."""
_MAX_ENV_FILE = 16 * 1024**2
"""Bytes. Linux takes 128 KiB for one variable."""

# The same words as in shoal_toolkit's redact.py, which may not be imported here.
_SECRET_WORDS = re.compile(
    r"secret|passw|passphrase|credential|authorization|api_?key|access_?key|private_?key|(^|_)(pwd|pass|token|auth)$"
)
_NO_SECRET_WORDS = re.compile(
    r"(^|_)(file|path|dir|directory|name|limit|count|length|size|type|mode|user|username|host|port|url|uri|id|ttl"
    r"|(pad|eos|bos|unk|cls|sep|mask|max|min|num|per|special|start|end|stop|image|text|audio)_token)$"
)
_SECRET_FORMS = re.compile(
    r"\bA[KS]IA[0-9A-Z]{16}\b|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bhf_[A-Za-z0-9]{30,}"
    r"|\bsk-[\w-]{20,}|\bxox[a-z]-[\w-]{10,}|\bpypi-[\w-]{40,}|\bnpm_\w{36}|\bAIza[\w-]{35}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.|://[^\s/@:]+:[^\s/@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_NO_VALUES = ("", "true", "false", "yes", "no", "on", "off", "null", "none", "0", "1")


@dataclass(frozen=True)
class Secret:
    """A secret of this machine. Hosts have it as a file, `/run/secrets/NAME`."""

    name: str
    file: Path | None = None
    """The file with it; None: it is in the variable of its name."""
    is_variable: bool = False
    """Whether the script also finds it in the variable of its name."""

    @classmethod
    def parse(cls, text: str) -> Secret:
        """Returns the secret that `NAME[=FILE][,type=env]` describes. Raises `UsageError`."""
        name, place, is_variable = split_secret(text)
        return cls(name, Path(place) if place else None, is_variable)

    def read(self) -> bytes:
        """Returns the secret. Raises `UsageError` if it is missing, too large, or its variable could not have it."""
        content = self._read_file(self.file) if self.file else self._read_variable()
        if self.is_variable:
            try:
                content.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                raise UsageError(f"--secret {self.name}: not UTF-8. Fix: leave out {_AS_VARIABLE}") from error
            if b"\0" in content:
                raise UsageError(f"--secret {self.name}: has a NUL character. Fix: leave out {_AS_VARIABLE}")
        return content

    def _read_variable(self) -> bytes:
        if self.name not in os.environ:
            raise UsageError(
                f"--secret {self.name}: the environment has no variable {self.name}. Fix: export it, or --secret"
                f" {self.name}=FILE"
            )
        return os.fsencode(os.environ[self.name])

    def _read_file(self, path: Path) -> bytes:
        check_place(f"--secret {self.name}", path)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                content = file.read(_MAX_SECRET + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
        except OSError as error:
            raise UsageError(
                f"--secret {self.name}={path}: cannot be read: {error.strerror}. Fix: name a file"
            ) from error
        if content is None:
            raise UsageError(f"--secret {self.name}={path}: not a file. Fix: name a file")
        if len(content) > _MAX_SECRET:
            raise UsageError(f"--secret {self.name}={path}: more than {_MAX_SECRET} bytes. Fix: a smaller file")
        return content


def split_secret(text: str) -> tuple[str, str, bool]:
    """Returns name, place and whether there is a variable, of `NAME[=PLACE][,type=env]`. Raises `UsageError`."""
    is_variable = text.endswith(_AS_VARIABLE)
    name, equals, place = text.removesuffix(_AS_VARIABLE).partition("=")
    if equals and not place:
        raise UsageError(f"--secret {text}: nothing after '='. Fix: --secret {name}, or --secret {name}=FILE")
    _check_name("--secret", name, _VARIABLE)
    if name.startswith(_RESERVED):
        raise UsageError(f"--secret {name}: a variable of the platform. Fix: another name, such as MY_{name}")
    return name, place, is_variable


def parse_secrets(words: Sequence[str] | None) -> tuple[Secret, ...]:
    """Returns the secrets of a repeatable option. Raises `UsageError`, also for a name that is given twice."""
    secrets = [Secret.parse(word) for word in words or ()]
    check_unique("--secret", [secret.name for secret in secrets])
    return tuple(secrets)


def check_place(option: str, path: Path) -> None:
    """Raises `UsageError` if a link takes a path out of the current project: it may be somebody else's link."""
    if target := trust.find_target_outside(path):
        raise UsageError(
            f"{option}: {path} leads through a link to {target}, outside of this directory. Fix: name {target} itself,"
            f" or to allow links to it: {trust.advise_trust(target)}"
        )


def check_unique(option: str, names: Iterable[str]) -> None:
    """Raises `UsageError` if a name is given twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{option} {name}: given twice. Fix: leave out one")
        seen.add(name)


def read_secrets(secrets: Iterable[Secret]) -> dict[str, bytes]:
    """Returns the content of each secret by name. Raises `UsageError`."""
    return {secret.name: secret.read() for secret in secrets}


def read_environment(
    words: Sequence[str] | None, files: Sequence[Path] | None
) -> tuple[dict[str, str], dict[str, Path | None]]:
    """Returns the variables of -e and --env-file, and where those come from that are not on the command line.

    As in Docker, -e wins over --env-file, and a later file over an earlier one.

    Args:
        words: `NAME=VALUE`, or `NAME` for the value of the variable in the environment.
        files: In Docker's format.

    Raises:
        UsageError: If a word, a line or a name is wrong, a variable is not set, or a file cannot be read.
    """
    values: dict[str, str] = {}
    taken: dict[str, Path | None] = {}
    for file in files or ():
        found = read_env_file(file)
        values.update(found)
        taken.update(dict.fromkeys(found, file))
    pairs = [word.partition("=") for word in words or ()]
    check_unique("--env", [name for name, _, _ in pairs])
    for name, equals, value in pairs:
        _check_name("--env", name)
        values[name] = value if equals else take_variable(f"--env {name}", name)
        taken.pop(name, None)
        if not equals:
            taken[name] = None
    return values, taken


def take_variable(option: str, name: str) -> str:
    """Returns a variable of the environment. Raises `UsageError`, which names an option or a line, if it is not set."""
    if name not in os.environ:
        raise UsageError(f"{option}: the environment has no variable {name}. Fix: export {name}, or give {name}=VALUE")
    return os.environ[name]


def read_env_file(path: Path) -> dict[str, str]:
    """Returns the variables of a file in Docker's format: NAME=VALUE, or NAME for the variable of the environment.

    Quotes are part of a value. Empty lines and lines that begin with # are left out. Raises `UsageError`, with the
    number of a line.
    """
    check_place("--env-file", path)
    try:
        with path.open("rb") as file:  # it may be a pipe, as of the shell's <(command)
            content = file.read(_MAX_ENV_FILE + 1)
        if len(content) > _MAX_ENV_FILE:
            raise UsageError(f"--env-file {path}: more than {_MAX_ENV_FILE:,} bytes. Fix: a smaller file")
        text = content.removeprefix(b"\xef\xbb\xbf").decode()
    except OSError as error:
        raise UsageError(f"--env-file {path}: cannot be read: {error.strerror}. Fix: name a file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--env-file {path}: byte {error.start + 1} is not UTF-8. Fix: save it as UTF-8") from error
    values = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r").lstrip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        place = f"--env-file {path}, line {number}"
        if "\0" in line or not _NAME.fullmatch(name):
            # The line is not printed: it may have a secret.
            raise UsageError(
                f"{place}: expected NAME=VALUE, or NAME. Fix: a name of letters, digits and '_', and no space"
            )
        values[name] = value if equals else take_variable(place, name)
    return values


def restore_environment(taken: Mapping[str, Path | None], option: str) -> dict[str, str]:
    """Returns the values of variables that the record of a job left out, from where they came.

    Raises `UsageError`, with the option that continues the job, if one is missing now.
    """
    files = {path: read_env_file(path) for path in set(taken.values()) if path}
    values = {}
    for name, path in taken.items():
        if path is None:
            values[name] = take_variable(f"{option}: the job took {name} from the environment", name)
        elif name in files[path]:
            values[name] = files[path][name]
        else:
            raise UsageError(f"{option}: {path} has no variable {name} now. Fix: add it, or give -e {name}")
    return values


def check_secret_variables(secrets: Iterable[Secret], environment: Mapping[str, str]) -> None:
    """Raises `UsageError` if a secret cannot be read, or its variable is given in another way too."""
    for secret in secrets:
        secret.read()
        if secret.is_variable and secret.name in environment:
            raise UsageError(f"--secret {secret.name} and --env {secret.name}: both set it. Fix: leave out one")


def _check_name(option: str, name: str, allowed: re.Pattern[str] = _NAME) -> None:
    if not allowed.fullmatch(name):
        raise UsageError(
            f"{option} {name!r}: a name has only letters, digits and '_', and begins with no digit. Fix: such as"
            f" {option} MY_NAME"
        )


def describe_visible_secrets(option: str, pairs: Mapping[str, str], alternatives: str) -> Iterator[str]:
    """Yields a warning for each value of a command line that looks like a secret.

    Args:
        option: The option that has the values.
        pairs: Its names and values.
        alternatives: Other ways to pass a value, with {name} for the name of a variable.
    """
    for name, value in pairs.items():
        if looks_secret(name, value):
            variable = re.sub(r"\W", "_", name.lstrip("-")).upper() if option != "--env" else name
            yield (
                f"warning: {option} {name}: looks like a secret. Every user of this machine can see it in the list of"
                f" processes, and it stays in your shell's history. Fix: {alternatives.format(name=variable)}"
            )


def looks_secret(name: str, value: str) -> bool:
    """Returns whether a value of a command line is probably a secret: by its name, or by its form."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", name).lower()
    named = _SECRET_WORDS.search(words) and not _NO_SECRET_WORDS.search(words)
    is_value = value.strip("\"' ").lower() not in _NO_VALUES and not re.fullmatch(r"[\d.]{1,3}", value)
    return bool(named and is_value) or bool(_SECRET_FORMS.search(value))


def locate_secrets(secrets: Iterable[Secret], directory: str = SECRETS) -> dict[str, str]:
    """Returns the variables that tell the script where its secrets are, NAME_FILE as in Docker's own images.

    Another one tells `train` which of these files it also sets as variables.
    """
    secrets = list(secrets)
    found = {f"{secret.name}_FILE": f"{directory}/{secret.name}" for secret in secrets}
    names = [secret.name for secret in secrets if secret.is_variable]
    return {**found, SECRET_VARIABLES: " ".join(names)} if names else found
