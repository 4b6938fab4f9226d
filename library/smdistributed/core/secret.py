"""The job's secret, which only its ranks know: from the environment, if the launcher sets one.

A key is derived for each purpose; the secret itself is never sent. Also signs data for other ranks, and checks
signatures.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from smdistributed.core.launch import LaunchError

VARIABLES = ("SMDDP_JOB_SECRET", "SHOAL_JOB_SECRET")
_MIN_CHARACTERS = 16
_SIGNATURE_BYTES = 32


def job_key(purpose: str, environ: Mapping[str, str] | None = None) -> bytes | None:
    """Returns a key of 32 bytes for a purpose, the same on all ranks; None: the job has no secret.

    The secret is SMDDP_JOB_SECRET, or else SHOAL_JOB_SECRET. Raises LaunchError if it is too short.
    """
    env = os.environ if environ is None else environ
    name = next((name for name in VARIABLES if env.get(name)), None)
    if name is None:
        return None
    if len(env[name]) < _MIN_CHARACTERS:
        raise LaunchError(
            f"{name} has {len(env[name])} characters: it must have {_MIN_CHARACTERS} random ones or more. Fix: export "
            f'{name}=$(python -c "import secrets; print(secrets.token_hex(16))") on the host that launches the job.'
        )
    return derive_key(env[name].encode(), purpose)


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Derives a key of 32 bytes, which reveals neither the secret nor keys for other purposes."""
    return hmac.digest(secret, f"smdistributed {purpose}".encode(), "sha256")


def sign(data: bytes, purpose: str) -> bytes:
    """Returns the data after a signature that only ranks can make, or unsigned if the job has no secret."""
    key = job_key(purpose)
    return data if key is None else hmac.digest(key, data, "sha256") + data


def verify(data: bytes, purpose: str) -> bytes:
    """Returns signed data without the signature. Raises ValueError if it changed. Without a secret, changes nothing."""
    key = job_key(purpose)
    if key is None:
        return data
    signature, rest = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(key, rest, "sha256")):
        raise ValueError(f"was changed in transit, or comes from a rank with another {VARIABLES[0]}")
    return rest
