"""Reads the settings of `train` itself from SHOAL_* variables, and removes the job's secret from them.

Also derives the secret that ranks get instead, warns if a job has none, and finds misspelt variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import NamedTuple, TypeVar

T = TypeVar("T")

DEFAULT_PORT = 7411
DEFAULT_HOSTS_TIMEOUT = 600
LOG_FORMATS = ("text", "json")
DEFAULT_SETUP_TIMEOUT = 3600  # long enough to compile packages
DEFAULT_STOP_GRACE = 110  # SageMaker sends SIGKILL 120 s after SIGTERM
MOST_RESTARTS = 10000
_MOST_HOSTS = 4096
SECRET, SECRET_FILE = "SHOAL_JOB_SECRET", "SHOAL_JOB_SECRET_FILE"
LIBRARY_SECRET = "SMDDP_JOB_SECRET"
MEMBERS_ONLY = "SHOAL_MEMBERS_ONLY"  # 1: ranks accept connections from hosts of the job only
SET_DEVICE = "SHOAL_SET_DEVICE"  # 0: ranks get no GPU of their own (hooks/devices.py)
EVENTS = "SHOAL_LOG_EVENTS"  # 1: `shoal run` reads the log, as events (log.py)
REPORTED_VARIABLES = "SHOAL_REPORTED_VARIABLES"  # names of variables for job.json, separated by spaces
# Names of variables, separated by spaces. `train` sets each to the content of the file that NAME_FILE names.
SECRET_VARIABLES = "SHOAL_SECRET_VARIABLES"
START_FILE = "SHOAL_START_FILE"  # a file without which `train` waits: `shoal run --watch` (run/warm.py)
RESTART_VARIABLES = ("SHOAL_RESTART", "SHOAL_RESTART_REASON")  # for the script
VARIABLES = (
    *(SECRET, SECRET_FILE, "SHOAL_AGENT_PORT", "SHOAL_HOSTS_TIMEOUT", "SHOAL_SETUP_TIMEOUT", "SHOAL_STOP_GRACE"),
    *("SHOAL_LOG_FORMAT", "SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS", "SHOAL_HOSTS", "SHOAL_HOST_RANK"),
    *("SHOAL_MAX_RESTARTS", *RESTART_VARIABLES, "SHOAL_STANDBY", "SHOAL_MIN_HOSTS", "SHOAL_FAST_IMPORTS", "SHOAL_CPUS"),
    *(SET_DEVICE, MEMBERS_ONLY, "SHOAL_DEPENDENCY_GROUPS"),
)
# Set by `train`, `shoal run` and the library, not by users.
_INTERNAL = (
    *("SHOAL_JOB", "SHOAL_RUN_DIR", "SHOAL_CODE_DIR", "SHOAL_REHEARSE_TOLD", "SHOAL_SDK_HYPERPARAMETERS"),
    *("SHOAL_PEERS", "SHOAL_CONNECTIONS", EVENTS, REPORTED_VARIABLES, SECRET_VARIABLES, START_FILE),
)
_LEAST_SIMILARITY = 0.8


class TrainSettings(NamedTuple):
    """The settings of one run of `train`."""

    secret: str  # empty if none is set
    port: int
    hosts_timeout: int  # seconds, as the next two
    setup_timeout: int
    stop_grace: int
    log_format: str  # one of LOG_FORMATS
    max_restarts: int = 0
    restart: int = 0  # restarts of this job before this `train`, which count too
    standby: bool = True  # keep a process with imported frameworks for restarts
    min_hosts: int = 0  # with which an elastic job goes on; 0: all
    as_events: bool = False  # write the log as events for `shoal run`


def take_settings(environ: MutableMapping[str, str]) -> tuple[TrainSettings, ContractError | None]:
    """Reads the settings. Removes the secret and EVENTS from the environment: no child process may inherit them.

    Args:
        environ: The environment of `train`; the variables of the secret are removed from it. Those that
            SECRET_VARIABLES names are set, and `redact` masks their values from now on.

    Returns:
        The settings, and the first error in them or None. A wrong setting has its default value, so that `train` can
        still report the error to the other hosts. A wrong secret is replaced by a random one, which no host can prove.
    """
    problems: list[ContractError] = []

    def attempt(read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except ContractError as error:
            problems.append(error)
            return default

    def number(name: str, default: int, least: int, most: int) -> int:
        return attempt(lambda: _read_number(environ, name, default, least, most), default)

    secret = attempt(lambda: _take_secret(environ), os.urandom(16).hex())  # no other host can prove this one
    attempt(lambda: _take_secret_variables(environ), None)
    number("SHOAL_FAST_IMPORTS", 1, 0, 1)  # the ranks read it (hooks/imports.py)
    number(SET_DEVICE, 1, 0, 1)
    number("SHOAL_CPUS", 1, 1, 65536)  # read_machine uses it
    number(MEMBERS_ONLY, 0, 0, 1)  # the plan uses it
    settings = TrainSettings(
        secret=secret,
        port=number("SHOAL_AGENT_PORT", DEFAULT_PORT, 1, 65535),
        hosts_timeout=number("SHOAL_HOSTS_TIMEOUT", DEFAULT_HOSTS_TIMEOUT, 1, 7 * 24 * 3600),
        setup_timeout=number("SHOAL_SETUP_TIMEOUT", DEFAULT_SETUP_TIMEOUT, 1, 7 * 24 * 3600),
        stop_grace=number("SHOAL_STOP_GRACE", DEFAULT_STOP_GRACE, 0, 24 * 3600),
        max_restarts=number("SHOAL_MAX_RESTARTS", 0, 0, MOST_RESTARTS),
        restart=number("SHOAL_RESTART", 0, 0, MOST_RESTARTS),
        standby=bool(number("SHOAL_STANDBY", 1, 0, 1)),
        min_hosts=number("SHOAL_MIN_HOSTS", 0, 1, _MOST_HOSTS),
        log_format=attempt(lambda: _read_log_format(environ), LOG_FORMATS[0]),
        as_events=environ.pop(EVENTS, "") == "1",
    )
    return settings, next(iter(problems), None)


def _read_log_format(environ: Mapping[str, str]) -> str:
    name = environ.get("SHOAL_LOG_FORMAT") or LOG_FORMATS[0]
    if name not in LOG_FORMATS:
        raise ContractError(
            f"The variable SHOAL_LOG_FORMAT is {name!r}; allowed are {' and '.join(LOG_FORMATS)}."
            f"{did_you_mean(name, LOG_FORMATS)} Fix: set one of them, or unset it."
        )
    return name


def _take_secret(environ: MutableMapping[str, str]) -> str:
    """Removes the secret's variables. Raises ContractError if both are set, or every user can read the file."""
    secret, path = environ.pop(SECRET, ""), environ.pop(SECRET_FILE, "")
    if not path:
        return secret
    if secret:
        raise ContractError(
            f"The variables {SECRET} and {SECRET_FILE} are both set. Fix: set one of them, on every host."
        )
    from shoal_toolkit.job.secret import read_secret

    return read_secret(path)


def _take_secret_variables(environ: MutableMapping[str, str]) -> None:
    if names := environ.pop(SECRET_VARIABLES, "").split():
        from shoal_toolkit.job.secret import set_secret_variables

        set_secret_variables(names, environ)


def derive_rank_secret(settings: TrainSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable with which `smdistributed` authenticates the ranks of this job to each other.

    Its value is derived from the job's secret, but does not allow anybody to start programs on a host.

    Args:
        settings: The settings, with the job's secret.
        environ: The environment of `train`.

    Returns:
        The variable; empty if there is no secret, or the user has set the variable.
    """
    if not settings.secret or environ.get(LIBRARY_SECRET):
        return {}
    import hmac  # slow to import, and most jobs have no secret

    secret = settings.secret.encode("utf-8", "surrogateescape")
    return {LIBRARY_SECRET: hmac.digest(secret, b"ranks", "sha256").hex()}


def warn_without_secret(settings: TrainSettings, hosts: Sequence[str], hint: str = "") -> tuple[str, ...]:
    """Returns a warning for a job of several hosts without a secret; none for another job.

    A job without a secret runs all the same: on SageMaker no job has one.

    Args:
        settings: The settings.
        hosts: The hosts of the job, the first host first.
        hint: How this platform gives all hosts a secret; empty if it is not known.
    """
    if settings.secret or len(hosts) < 2:
        return ()
    from shoal_toolkit.job.secret import describe_risk

    return (describe_risk(hosts[0], hint),)


def describe_restarts(settings: TrainSettings) -> tuple[str, ...]:
    """Returns a note that says how often a failure restarts the job; none if it never does."""
    if not settings.max_restarts:
        return ()
    before = f", and was restarted {settings.restart} times before" if settings.restart else ""
    return (f"after a failure this job is restarted, at most {settings.max_restarts} times in all{before}",)


def is_members_only(environ: Mapping[str, str]) -> bool:
    """Returns whether the ranks accept connections from hosts of the job only."""
    return environ.get(MEMBERS_ONLY) == "1"


def find_misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns a note for each SHOAL_ variable with nearly the name of one in `VARIABLES`; it has no effect.

    Variables that Kubernetes sets for a service called shoal, or shoal-job, are left out.
    """
    ours = {*VARIABLES, *_INTERNAL}
    unknown = sorted(
        name
        for name, value in environ.items()
        if name.startswith("SHOAL_") and name not in ours and "_SERVICE_" not in name and "://" not in value
    )
    hints = {name: did_you_mean(name, VARIABLES, _LEAST_SIMILARITY) for name in unknown}
    return [f"the variable {name} is not known to this toolkit.{hint}" for name, hint in hints.items() if hint]


def _read_number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ContractError(
            f"The variable {name} is {text!r}; it must be a whole number from {least} to {most}. Fix: set it so."
        )
    return int(text)
