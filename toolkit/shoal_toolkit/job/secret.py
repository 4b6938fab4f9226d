"""Reads the secrets in files. Says what can happen in a job without a secret."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping, Sequence

from shoal_toolkit.errors import ContractError
from shoal_toolkit.redact import learn_values

_MIN_LENGTH, _MAX_LENGTH = 16, 4096  # characters, of a secret in a file


def read_secret(path: str) -> str:
    """Returns the job's secret in the file that SHOAL_JOB_SECRET_FILE names.

    Raises:
        ContractError: If every user can read the file, or its content has a wrong length.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(_MAX_LENGTH + 1).strip()
    except OSError as error:
        raise ContractError(
            f"{path}, which SHOAL_JOB_SECRET_FILE names, cannot be read: {error.strerror}. It must hold the job's "
            "secret, the same on every host. Fix: name a file that this user can read."
        ) from None
    if mode & stat.S_IRWXO:
        raise ContractError(
            f"{path}, which SHOAL_JOB_SECRET_FILE names, can be read by every user (mode {stat.S_IMODE(mode):04o}). "
            f"Fix: chmod 600 {path}; for a Kubernetes Secret, defaultMode: 0440 in the volume, and an fsGroup of the "
            "pod's user."
        )
    if not _MIN_LENGTH <= len(secret) <= _MAX_LENGTH:
        size = "too long" if len(secret) > _MAX_LENGTH else "too short" if secret else "empty"
        raise ContractError(
            f"{path}, which SHOAL_JOB_SECRET_FILE names, is {size}. It must hold the job's secret, the same on every "
            f"host, of {_MIN_LENGTH} to {_MAX_LENGTH} characters. Fix: openssl rand -hex 32 > {path}"
        )
    return secret


def set_secret_variables(names: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Sets each variable to the content of the file that NAME_FILE names, and masks its value.

    Raises:
        ContractError: If a file can't be read.
    """
    for name in names:
        path = environ.get(f"{name}_FILE", "")
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
                text = file.read()
        except OSError as error:
            raise ContractError(
                f"{path!r}, the file of the secret {name}, cannot be read: {error.strerror}. Fix: set {name}_FILE to a "
                "file that this user can read."
            ) from None
        environ[name] = text[:-1] if text.endswith("\n") else text
    learn_values(environ[name] for name in names)


def describe_risk(first_host: str, hint: str) -> str:
    """Returns the warning for a job of several hosts without a secret.

    Args:
        first_host: The host that leads the job.
        hint: How this platform gives all hosts a secret; empty if it is not known.
    """
    return (
        f"this job has no secret. Anybody who can send from the address of {first_host}, or run a process there, can "
        "run programs on the other hosts. Nobody can on a private network, such as SageMaker's. "
        "Fix: set SHOAL_JOB_SECRET to the same random text on every host (openssl rand -hex 32), or "
        f"SHOAL_JOB_SECRET_FILE to a file with it.{' ' * bool(hint)}{hint}"
    )
