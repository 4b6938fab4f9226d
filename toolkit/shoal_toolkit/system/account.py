"""A home and a name for a user ID without an account, as containers of Docker, Kubernetes and Apptainer often have.

Without them, HOME is `/` or cannot be written, `getpass.getuser()` raises KeyError, and libraries find no place for a
cache in `~/.cache`.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

_NAME = "train"


def build_account_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns HOME, USER and LOGNAME for the script, if this user has no home that it can write, or no name.

    A home is made in the directory for temporary files. Without such a directory, HOME stays.
    """
    found: dict[str, str] = {}
    if not _has_account() and not (environ.get("USER") or environ.get("LOGNAME")):
        found.update(USER=_NAME, LOGNAME=_NAME)
    home = environ.get("HOME", "")
    if home in ("", "/") or not os.access(home, os.W_OK | os.X_OK):
        import tempfile  # it takes as long as all other imports of a job

        try:
            found["HOME"] = tempfile.mkdtemp(prefix="home-")
        except OSError:
            return found
    return found


def _has_account() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True
