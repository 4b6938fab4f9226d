"""What tunes `train` itself, from SHOAL_* variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.light_typing import NamedTuple

DEFAULT_PORT = 7411
DEFAULT_HOSTS_TIMEOUT = 600
LOG_FORMATS = ("text", "json")
DEFAULT_SETUP_TIMEOUT = 3600  # packages that are compiled take long
DEFAULT_STOP_GRACE = 110  # SageMaker sends SIGKILL 120 s after SIGTERM
SECRET, SECRET_FILE = "SHOAL_JOB_SECRET", "SHOAL_JOB_SECRET_FILE"
LIBRARY_SECRET = "SMDDP_JOB_SECRET"
VARIABLES = (
    *(SECRET, SECRET_FILE, "SHOAL_AGENT_PORT", "SHOAL_HOSTS_TIMEOUT", "SHOAL_SETUP_TIMEOUT", "SHOAL_STOP_GRACE"),
    *("SHOAL_LOG_FORMAT", "SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS"),
)
_BETWEEN_US = (
    "SHOAL_JOB",
    "SHOAL_RUN_DIR",
    "SHOAL_CODE_DIR",
    "SHOAL_REHEARSE_TOLD",
)  # set by `train` and the library alone
_ALIKE = 0.8
_LONGEST_SECRET = 4096  # characters


class Settings(NamedTuple):
    """The knobs of one run."""

    secret: str
    port: int
    hosts_timeout: int
    setup_timeout: int
    stop_grace: int
    log_format: str  # one of LOG_FORMATS


def take(environ: MutableMapping[str, str]) -> tuple[Settings, ContractError | None]:
    """Read the settings, and take the secret out of the environment: no child inherits it.

    Beside them: what is wrong with the first bad one, whose default is taken, so that other hosts can be told.
    """
    problems: list[ContractError] = []

    def number(name: str, default: int, least: int, most: int) -> int:
        try:
            return _number(environ, name, default, least, most)
        except ContractError as error:
            problems.append(error)
            return default

    try:
        secret = _secret(environ)
    except ContractError as error:
        problems.append(error)
        secret = os.urandom(16).hex()  # one that nobody can prove
    settings = Settings(
        secret=secret,
        port=number("SHOAL_AGENT_PORT", DEFAULT_PORT, 1, 65535),
        hosts_timeout=number("SHOAL_HOSTS_TIMEOUT", DEFAULT_HOSTS_TIMEOUT, 1, 7 * 24 * 3600),
        setup_timeout=number("SHOAL_SETUP_TIMEOUT", DEFAULT_SETUP_TIMEOUT, 1, 7 * 24 * 3600),
        stop_grace=number("SHOAL_STOP_GRACE", DEFAULT_STOP_GRACE, 0, 24 * 3600),
        log_format=environ.get("SHOAL_LOG_FORMAT") or LOG_FORMATS[0],
    )
    if settings.log_format not in LOG_FORMATS:
        problems.append(_no_format(settings.log_format))
        settings = settings._replace(log_format=LOG_FORMATS[0])
    return settings, next(iter(problems), None)


def _secret(environ: MutableMapping[str, str]) -> str:
    """Take the job's secret from its variable, or from the file that another variable names."""
    secret, path = environ.pop(SECRET, ""), environ.pop(SECRET_FILE, "")
    if not path:
        return secret
    if secret:
        raise ContractError(f"The variables {SECRET} and {SECRET_FILE} are both set. Set one of them, on every host.")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            secret = file.read(_LONGEST_SECRET + 1).strip()
    except OSError as error:
        raise ContractError(
            f"{path}, which {SECRET_FILE} names, cannot be read: {error.strerror}. It must hold the job's secret, the "
            "same on every host."
        ) from None
    if not 0 < len(secret) <= _LONGEST_SECRET:
        raise ContractError(
            f"{path}, which {SECRET_FILE} names, {'is too long' if secret else 'is empty'}. It must hold the job's "
            f"secret, the same on every host, of at most {_LONGEST_SECRET} characters."
        )
    return secret


def secret_of_ranks(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which `smdistributed` authenticates the ranks of this job to each other.

    Its value is derived from the job's secret: who has it alone cannot have a host start anything. Empty without a
    secret, or if the user has set the variable.
    """
    if not settings.secret or environ.get(LIBRARY_SECRET):
        return {}
    import hmac  # takes longer than all else here, and most jobs have no secret

    secret = settings.secret.encode("utf-8", "surrogateescape")
    return {LIBRARY_SECRET: hmac.digest(secret, b"ranks", "sha256").hex()}


def without_secret(settings: Settings, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return what to say of a job of several hosts without a secret: it runs, as SageMaker gives it none."""
    if settings.secret or len(hosts) < 2:
        return ()
    return (
        f"this job has no secret: whoever can send from the address of {hosts[0]}, or run a process there, can run "
        "programs on the other hosts. On a private network, such as SageMaker's, nobody else can. Fix: set "
        f"{SECRET} to the same random text on every host (openssl rand -hex 32), or {SECRET_FILE} to a file with it.",
    )


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Return a note for each variable whose name is nearly one of `VARIABLES`, and which therefore changes nothing.

    Less what Kubernetes sets for a service called shoal, or shoal-job: nobody has written those.
    """
    ours = {*VARIABLES, *_BETWEEN_US}
    strange = sorted(
        name
        for name, value in environ.items()
        if name.startswith("SHOAL_") and name not in ours and "_SERVICE_" not in name and "://" not in value
    )
    hints = {name: did_you_mean(name, VARIABLES, _ALIKE) for name in strange}
    return [f"the variable {name} is not known to this toolkit.{hint}" for name, hint in hints.items() if hint]


def _no_format(text: str) -> ContractError:
    return ContractError(
        f"The variable SHOAL_LOG_FORMAT is {text!r}; allowed are {' and '.join(LOG_FORMATS)}."
        f"{did_you_mean(text, LOG_FORMATS)}"
    )


def _number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ContractError(f"The variable {name} is {text!r}; it must be a whole number from {least} to {most}.")
    return int(text)
