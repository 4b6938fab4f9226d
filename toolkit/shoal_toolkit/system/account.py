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
    if (home in ("", "/") or not os.access(home, os.W_OK | os.X_OK)) and (made := _make_home(environ)):
        found["HOME"] = made
    return found


def _make_home(environ: Mapping[str, str]) -> str:
    """Makes a directory that only this user can enter; empty if it can't. Importing tempfile would take 10 ms."""
    for parent in filter(None, (environ.get("TMPDIR"), "/tmp", "/var/tmp", "/usr/tmp")):
        path = os.path.join(parent, f"home-{os.urandom(8).hex()}")
        try:
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    return ""


def _has_account() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True
