"""What tunes `train` itself, from SHOAL_* variables."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.light_typing import NamedTuple

DEFAULT_PORT = 7411
DEFAULT_HOSTS_TIMEOUT = 600
LOG_FORMATS = ("text", "json")
DEFAULT_STOP_GRACE = 110  # SageMaker sends SIGKILL 120 s after SIGTERM
VARIABLES = (
    *("SHOAL_JOB_SECRET", "SHOAL_AGENT_PORT", "SHOAL_HOSTS_TIMEOUT", "SHOAL_STOP_GRACE", "SHOAL_LOG_FORMAT"),
    *("SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS"),
)
_BETWEEN_US = (
    "SHOAL_JOB",
    "SHOAL_RUN_DIR",
    "SHOAL_CODE_DIR",
    "SHOAL_REHEARSE_TOLD",
)  # set by `train` and the library alone
_ALIKE = 0.8


class Settings(NamedTuple):
    """The knobs of one run."""

    secret: str
    port: int
    hosts_timeout: int
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

    settings = Settings(
        secret=environ.pop("SHOAL_JOB_SECRET", ""),
        port=number("SHOAL_AGENT_PORT", DEFAULT_PORT, 1, 65535),
        hosts_timeout=number("SHOAL_HOSTS_TIMEOUT", DEFAULT_HOSTS_TIMEOUT, 1, 7 * 24 * 3600),
        stop_grace=number("SHOAL_STOP_GRACE", DEFAULT_STOP_GRACE, 0, 24 * 3600),
        log_format=environ.get("SHOAL_LOG_FORMAT") or LOG_FORMATS[0],
    )
    if settings.log_format not in LOG_FORMATS:
        problems.append(_no_format(settings.log_format))
        settings = settings._replace(log_format=LOG_FORMATS[0])
    return settings, next(iter(problems), None)


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
