"""The secret of a job, which all its ranks have and nobody else: from the environment, where the launch gives one.

Keys are derived from it, one for each purpose; the secret itself goes nowhere.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from smdistributed.core.launch import LaunchError

VARIABLES = ("SMDDP_JOB_SECRET", "SHOAL_JOB_SECRET")
_LEAST_CHARACTERS = 16
_TAG_BYTES = 32


def job_key(purpose: str, environ: Mapping[str, str] | None = None) -> bytes | None:
    """A key of 32 bytes for that purpose, the same on all ranks; None: the launch gives no secret.

    Raises LaunchError if the secret is so short that it can be guessed.
    """
    env = os.environ if environ is None else environ
    name = next((name for name in VARIABLES if env.get(name)), None)
    if name is None:
        return None
    if len(env[name]) < _LEAST_CHARACTERS:
        raise LaunchError(
            f"{name} has {len(env[name])} characters: it must have {_LEAST_CHARACTERS} or more, drawn at random. "
            f'Fix: export {name}=$(python -c "import secrets; print(secrets.token_hex(16))") where the job is launched.'
        )
    return derived(env[name].encode(), purpose)


def derived(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes that says nothing of the secret, or of keys for other purposes."""
    return hmac.digest(secret, f"smdistributed {purpose}".encode(), "sha256")


def tagged(data: bytes, purpose: str) -> bytes:
    """The data with a tag that only ranks can make; without one if the job has no secret."""
    key = job_key(purpose)
    return data if key is None else hmac.digest(key, data, "sha256") + data


def untagged(data: bytes, purpose: str) -> bytes:
    """What `tagged` was given on another rank. Raises ValueError if it was changed on the way."""
    key = job_key(purpose)
    if key is None:
        return data
    tag, rest = data[:_TAG_BYTES], data[_TAG_BYTES:]
    if not hmac.compare_digest(tag, hmac.digest(key, rest, "sha256")):
        raise ValueError(f"was changed on its way, or comes from a rank with another {VARIABLES[0]}")
    return rest
