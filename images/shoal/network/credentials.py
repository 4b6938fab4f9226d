"""Credentials for package indexes and Debian mirrors, from the files of pip and apt on this machine: netrc, auth.conf.

Only credentials for hosts that builds contact are used.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit


@dataclass(frozen=True)
class Netrc:
    """The netrc file that pip uses, if there is one."""

    file: netrc.netrc | None = None
    problem: str = ""
    """Why a file that exists is not used, as a sentence; empty if it is used or there is none."""

    def add_credentials(self, url: str) -> str:
        """Returns the URL with the credentials for its host; unchanged if there are none or the URL has its own."""
        parts = urlsplit(url)
        found = self.file.authenticators(parts.hostname) if self.file and parts.hostname else None
        if not found or "@" in parts.netloc:
            return url
        login, account, password = found
        return _insert_login(url, login or account or "", password or "")


def read_netrc() -> Netrc:
    """Reads the netrc file that pip would read: the one that NETRC names, or the one in the home directory.

    A file that cannot be read or parsed raises nothing: it becomes `problem`.
    """
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return Netrc()
    try:
        return Netrc(netrc.netrc(str(path)))
    except netrc.NetrcParseError as error:
        # The message of the parser quotes its input, which may be part of a password.
        return Netrc(problem=f"{path}: line {error.lineno} is not valid; fix it, or pip sends no credentials")
    except (OSError, UnicodeDecodeError) as error:
        return Netrc(problem=f"{path}: cannot be read: {error}; pip sends no credentials")


def read_apt_auth(sources: Iterable[str], directory: Path = Path("/etc/apt")) -> tuple[str, tuple[str, ...]]:
    """Reads apt's credentials for the hosts of `sources`.

    Args:
        sources: apt's sources in one-line form, `deb URL SUITE COMPONENT...`.
        directory: apt's configuration directory, with auth.conf and auth.conf.d.

    Returns:
        The entries, one per line in the form of auth.conf, and a sentence for each file that cannot be read.
    """
    texts: list[str] = []
    problems: list[str] = []
    for path in (directory / "auth.conf", *sorted(directory.glob("auth.conf.d/*.conf"))):
        try:
            texts.append(path.read_text() if path.exists() else "")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"apt's {path}: cannot be read: {error}; builds send its hosts no credentials")
    return select_auth_entries("\n".join(texts), sources), tuple(problems)


def select_auth_entries(text: str, sources: Iterable[str]) -> str:
    """Returns the entries of `text`, which has the form of auth.conf, for the hosts of `sources`; one per line."""
    hosts = {urlsplit(word).hostname for source in sources for word in source.split() if "://" in word}
    return "".join(f"{entry}\n" for entry in _auth_entries(text, hosts))


def add_apt_credentials(url: str, auth: str) -> str:
    """Returns the URL with the credentials of the first entry of `auth` (in the form of auth.conf) that matches it.

    An entry matches by scheme, host, port and the begin of the path. The URL is unchanged if no entry matches, or it
    has its own credentials.
    """
    parts = urlsplit(url)
    for words in map(str.split, auth.splitlines()):
        place = urlsplit(words[1] if "://" in words[1] else f"{parts.scheme}://{words[1]}")
        matches = (place.scheme, place.hostname, place.port or parts.port) == (parts.scheme, parts.hostname, parts.port)
        if matches and parts.path.startswith(place.path) and "@" not in parts.netloc:
            values = dict(zip(words[2::2], words[3::2]))
            return _insert_login(url, values.get("login", ""), values.get("password", ""))
    return url


def _insert_login(url: str, login: str, password: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{quote(login, safe='')}:{quote(password, safe='')}@{parts.netloc}"))


def _auth_entries(text: str, hosts: Set[str | None]) -> Iterator[str]:
    """Yields the entries for those hosts; the host of an entry may have a scheme before it and a path after it."""
    words = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    for entry in re.split(r"(?:^|\s)machine\s+", words)[1:]:
        place, *others = entry.split() or [""]
        if urlsplit(place if "://" in place else f"//{place}").hostname in hosts - {None}:
            yield " ".join(["machine", place, *others])
