"""Credentials for package indexes and Debian mirrors, where pip and apt of this machine find them: netrc, auth.conf.

Only those for hosts that builds ask are taken; they enter a build with the rest of the machine's configuration.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

_APT = Path("/etc/apt")


@dataclass(frozen=True)
class Netrc:
    """pip's netrc, which may be none. `problem` says in words why one that is there is not used."""

    file: netrc.netrc | None = None
    problem: str = ""

    def signed(self, url: str) -> str:
        """Return the URL with the credentials for its host; one that has some, or a host without any, as it is."""
        parts = urlsplit(url)
        found = self.file.authenticators(parts.hostname) if self.file and parts.hostname else None
        if not found or "@" in parts.netloc:
            return url
        login, account, password = found
        return _with(url, login or account or "", password or "")


def read_netrc() -> Netrc:
    """Read the file that pip would: the one that NETRC names, or the home directory's."""
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return Netrc()
    try:
        return Netrc(netrc.netrc(str(path)))
    except netrc.NetrcParseError as error:
        # Its own words quote what it stumbled over, which may be a part of a password.
        return Netrc(problem=f"{path}: line {error.lineno} is no netrc; correct it, or pip asks without credentials")
    except (OSError, UnicodeDecodeError) as error:
        return Netrc(problem=f"{path}: cannot be read: {error}; pip asks without credentials")


def of_apt(sources: Iterable[str], directory: Path = _APT) -> tuple[str, tuple[str, ...]]:
    """Return apt's entries for the hosts of one-line sources, a line each, and in words what cannot be read."""
    texts: list[str] = []
    problems: list[str] = []
    for path in (directory / "auth.conf", *sorted(directory.glob("auth.conf.d/*.conf"))):
        try:
            text = path.read_text() if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"apt's {path}: cannot be read: {error}; builds ask its hosts without credentials")
        else:
            texts.append(text)
    return of_hosts("\n".join(texts), sources), tuple(problems)


def of_hosts(text: str, sources: Iterable[str]) -> str:
    """Return the entries of auth.conf's form for the hosts of one-line sources, a line each."""
    hosts = {urlsplit(word).hostname for source in sources for word in source.split() if "://" in word}
    return "".join(f"{entry}\n" for entry in _entries(text, hosts))


def signed(url: str, auth: str) -> str:
    """Return the URL with the credentials that entries of auth.conf's form have for it, the first that fit."""
    parts = urlsplit(url)
    for words in map(str.split, auth.splitlines()):
        place = urlsplit(words[1] if "://" in words[1] else f"{parts.scheme}://{words[1]}")
        fits = (place.scheme, place.hostname, place.port or parts.port) == (parts.scheme, parts.hostname, parts.port)
        if fits and parts.path.startswith(place.path) and "@" not in parts.netloc:
            values = dict(zip(words[2::2], words[3::2]))
            return _with(url, values.get("login", ""), values.get("password", ""))
    return url


def _with(url: str, login: str, password: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{quote(login, safe='')}:{quote(password, safe='')}@{parts.netloc}"))


def _entries(text: str, hosts: Set[str | None]) -> Iterator[str]:
    """Yield the entries for those hosts; apt's may begin with a scheme, and have a path."""
    words = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    for entry in re.split(r"(?:^|\s)machine\s+", words)[1:]:
        place, *others = entry.split() or [""]
        if urlsplit(place if "://" in place else f"//{place}").hostname in hosts - {None}:
            yield " ".join(["machine", place, *others])
