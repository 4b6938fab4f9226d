"""Whether package indexes and Debian mirrors answer, asked as a build asks them: its proxies, its CA bundle."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from tempfile import NamedTemporaryFile
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3

from shoal.host import credentials
from shoal.host.machine import Machine

SECONDS = 5.0
"""How long an address may be silent."""
DEFAULT_INDEX = "https://pypi.org/simple"
"""pip's, where its configuration names none."""
DEFAULT_MIRROR = "http://deb.debian.org/debian"
"""That of the base images, where this machine's apt has none of Debian's."""
_PROBE = "pip"
"""A package that every mirror of PyPI has."""
_WORDS: tuple[tuple[type[Exception], str], ...] = (  # the first that fits
    (requests.exceptions.ProxyError, "its proxy cannot be reached, or refuses"),
    (requests.exceptions.SSLError, "its certificate is not signed by any of the CA bundle"),
    (requests.exceptions.Timeout, f"no answer within {SECONDS:g} s"),
)


@dataclass(frozen=True)
class Answer:
    """What an address answered: its HTTP status, or in words why there was none. No password is in `url`.

    `suite` is what was asked for there, of a Debian mirror.
    """

    url: str
    status: int | None
    problem: str = ""
    suite: str = ""

    @property
    def good(self) -> bool:
        return self.status is not None and self.status < requests.codes.bad_request

    def __str__(self) -> str:
        asked = f" for {self.suite}" if self.suite else ""
        return f"{self.url}: {self.problem or f'HTTP status {self.status}{asked}'}"


def indexes(machine: Machine) -> list[Answer]:
    """Ask the indexes that builds install from for the page of a package; none where pip's `no-index` is set."""
    pip = dict(machine.pip)
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    proxies = {scheme: pip["proxy"] for scheme in ("http", "https") if "proxy" in pip}
    trusted = {word.partition(":")[0] for word in pip.get("trusted-host", "").split()}
    urls = (pip.get("index-url", DEFAULT_INDEX) + " " + pip.get("extra-index-url", "")).split()
    return [
        _ask(url, f"{url.rstrip('/')}/{_PROBE}/", machine, proxies, verified=urlsplit(url).hostname not in trusted)
        for url in dict.fromkeys(urls)
    ]


def mirrors(machine: Machine, suite: str) -> list[Answer]:
    """Ask each source that builds on Debian's `suite` and its bootstrap install from for its release file."""
    proxies = dict(_proxies(machine.apt_proxies))
    sources = machine.sources(suite)
    auth = machine.auth(sources)
    entries = [source.split()[1:3] for source in sources] or [[DEFAULT_MIRROR, suite]]
    return [
        replace(
            _ask(uri, credentials.signed(f"{uri.rstrip('/')}/dists/{name}/InRelease", auth), machine, proxies),
            suite=name,
        )
        for uri, name in entries
        if uri.startswith(("http://", "https://"))
    ]


def _proxies(lines: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield apt's proxies under the names that requests has for them: of a scheme, or of a host in it."""
    for line in lines:
        found = re.match(r'Acquire::(https?)::Proxy(?:::(\S+))? "(.*)";?$', line, re.IGNORECASE)
        if found:
            scheme, host, proxy = found.groups()
            key = f"{scheme.lower()}://{host}" if host else scheme.lower()
            yield key, "" if proxy == "DIRECT" else proxy  # requests takes an empty one for none


def _ask(shown: str, url: str, machine: Machine, proxies: Mapping[str, str], verified: bool = True) -> Answer:
    parts = urlsplit(shown)
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    try:
        with _bundle(machine.ca_bundle, verified) as verify, requests.Session() as session:
            options = {"proxies": dict(proxies), "verify": verify, "timeout": SECONDS, "stream": True}
            with session.get(url, **options) as response:  # type: ignore[arg-type]
                return Answer(plain, response.status_code)
    except requests.RequestException as error:
        return Answer(plain, None, _words(error))


@contextlib.contextmanager
def _bundle(content: bytes | None, verified: bool) -> Iterator[str | bool]:
    """Yield what requests is to check certificates with: a file, its own default, or nothing."""
    if not verified:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    if not verified or content is None:
        yield verified
        return
    with NamedTemporaryFile(suffix=".crt") as file:
        file.write(content)
        file.flush()
        yield file.name


def _words(error: requests.RequestException) -> str:
    for kind, words in _WORDS:
        if isinstance(error, kind):
            return words
    cause = error.args[0] if error.args else error
    return str(getattr(cause, "reason", cause)).rpartition(": ")[2]
