"""Checks whether package indexes and Debian mirrors answer, with the proxies and certificates that builds use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from tempfile import NamedTemporaryFile
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3

from shoal.network import credentials
from shoal.network.settings import NetworkSettings

TIMEOUT_SECONDS = 5.0
"""How long to wait for an address to connect, or to send more data."""
DEFAULT_INDEX = "https://pypi.org/simple"
"""The index that pip uses by default."""
DEFAULT_MIRROR = "http://deb.debian.org/debian"
"""The mirror of the base images, used if this machine has no Debian sources."""
_PACKAGE = "pip"
"""A package that every mirror of PyPI has."""
_PROBLEMS: tuple[tuple[type[Exception], str], ...] = (  # the first that matches is reported
    (requests.exceptions.ProxyError, "its proxy cannot be reached, or refuses"),
    (requests.exceptions.SSLError, "its certificate is not signed by a CA of the bundle"),
    (requests.exceptions.Timeout, f"no answer within {TIMEOUT_SECONDS:g} s"),
)


@dataclass(frozen=True)
class Answer:
    """The answer of an index or a mirror."""

    url: str
    """Without credentials."""
    status: int | None
    """The HTTP status; None if there was no answer."""
    problem: str = ""
    """Why there was no answer."""
    suite: str = ""
    """The Debian suite that was requested, if the address is a mirror."""

    @property
    def is_ok(self) -> bool:
        """Whether an HTTP status below 400 came."""
        return self.status is not None and self.status < requests.codes.bad_request

    def __str__(self) -> str:
        requested = f" for {self.suite}" if self.suite else ""
        return f"{self.url}: {self.problem or f'HTTP status {self.status}{requested}'}"


def check_indexes(settings: NetworkSettings) -> list[Answer]:
    """Requests the page of one package from each index that builds use; from none if pip's `no-index` is set.

    An index that does not answer within 5 s is an answer with a problem.
    """
    pip = dict(settings.pip)
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    proxies = {scheme: pip["proxy"] for scheme in ("http", "https") if "proxy" in pip}
    trusted = {word.partition(":")[0] for word in pip.get("trusted-host", "").split()}
    urls = (pip.get("index-url", DEFAULT_INDEX) + " " + pip.get("extra-index-url", "")).split()
    return [
        _request(url, f"{url.rstrip('/')}/{_PACKAGE}/", settings, proxies, verify=urlsplit(url).hostname not in trusted)
        for url in dict.fromkeys(urls)
    ]


def check_mirrors(settings: NetworkSettings, suite: str) -> list[Answer]:
    """Requests the release file of each source that builds on Debian's `suite` install from.

    If this machine has none, it is Debian's own mirror. Sources without HTTP are left out. A mirror that does not
    answer within 5 s is an answer with a problem.
    """
    proxies = dict(_convert_proxies(settings.apt_proxies))
    sources = settings.select_sources(suite)
    auth = settings.select_auth(sources)
    entries = [source.split()[1:3] for source in sources] or [[DEFAULT_MIRROR, suite]]
    answers = []
    for uri, name in entries:
        if uri.startswith(("http://", "https://")):
            release = credentials.add_apt_credentials(f"{uri.rstrip('/')}/dists/{name}/InRelease", auth)
            answers.append(replace(_request(uri, release, settings, proxies), suite=name))
    return answers


def _convert_proxies(lines: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields apt's proxies in the form of requests: for a scheme, or for one host with a scheme."""
    for line in lines:
        found = re.match(r'Acquire::(https?)::Proxy(?:::(\S+))? "(.*)";?$', line, re.IGNORECASE)
        if found:
            scheme, host, proxy = found.groups()
            key = f"{scheme.lower()}://{host}" if host else scheme.lower()
            yield key, "" if proxy == "DIRECT" else proxy  # an empty string means no proxy to requests


def _request(
    shown: str, url: str, settings: NetworkSettings, proxies: Mapping[str, str], verify: bool = True
) -> Answer:
    """Requests `url`, and reports the answer under `shown`, less its credentials. A failure is an answer too."""
    parts = urlsplit(shown)
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    try:
        with _ca_file(settings.ca_bundle, verify) as bundle, requests.Session() as session:
            options = {"proxies": dict(proxies), "verify": bundle, "timeout": TIMEOUT_SECONDS, "stream": True}
            with session.get(url, **options) as response:  # type: ignore[arg-type]
                return Answer(plain, response.status_code)
    except (requests.RequestException, ValueError) as error:  # ValueError: it leads to an address that is none
        return Answer(plain, None, _describe_failure(error))


@contextlib.contextmanager
def _ca_file(content: bytes | None, verify: bool) -> Iterator[str | bool]:
    """Yields requests' `verify`. Without a check, urllib3's warnings are switched off in this process."""
    if not verify:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    if not verify or content is None:
        yield verify
        return
    with NamedTemporaryFile(suffix=".crt") as file:
        file.write(content)
        file.flush()
        yield file.name


def _describe_failure(error: Exception) -> str:
    for kind, problem in _PROBLEMS:
        if isinstance(error, kind):
            return problem
    cause = error.args[0] if error.args else error
    return str(getattr(cause, "reason", cause)).rpartition(": ")[2]
