"""Sends blobs and manifests to a registry, by the distribution API of OCI.

Docker can only push what it has compressed itself. It uses the credentials of `docker login`, also from a helper.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urljoin, urlsplit

import docker.auth
import docker.errors
import requests
import urllib3.exceptions

from shoal.builds.layers import Blob
from shoal.errors import PushError
from shoal.limits import MOST_ANSWER, parse_json

_TIMEOUT = (20, 300)  # seconds to connect, and of silence
_SHOWN = 300  # characters of an answer
HUB = "docker.io"
_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
_REDIRECTS = (301, 302, 303, 307, 308)
CERTIFICATES = Path("/etc/docker/certs.d")
"""Docker's directory of CAs: ca.crt in a directory with the name of the host."""
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_TOKEN = re.compile(r"[!-~]+")
_QUERY = re.compile(r"\?[^\s'\")]+")
_REPORT = "Fix: tell the operator of the registry, or push with Docker, without --compression and --lazy"

OnSent = Callable[[int], object]


class Registry:
    """A repository in a registry. Each method raises PushError with the registry's or the network's words."""

    def __init__(self, reference: str) -> None:
        """Finds the credentials of `docker login`, and whether a registry on this machine speaks HTTPS.

        Args:
            reference: The image's name, with its registry: registry.example.org/team/name:tag. Without, it is Docker
                Hub's.
        """
        self.host, self.repository, self.tag = _split_reference(reference)
        self._session = requests.Session()
        self._session.auth = lambda request: request  # without it, requests puts the password of ~/.netrc there
        self._login = _find_login(self.host)
        self._token = ""
        self._base = self._find_base()

    def send_blob(self, blob: Blob, on_sent: OnSent) -> bool:
        """Sends a blob, unless the repository has it. Returns whether it was sent.

        `on_sent` is called with the number of bytes that were sent, or need not be.
        """
        # A refusal of HEAD has no words. The next request says why.
        found = self._ask("HEAD", f"blobs/{blob.digest}", allowed=(200, 401, 403, 404, *_REDIRECTS))
        if found.status not in (401, 403, 404):  # a redirect is to the place of the blob
            on_sent(blob.size)
            return False
        answer = self._ask("POST", "blobs/uploads/", allowed=(202,))
        place = _find_place(answer)
        if urlsplit(self._base).scheme == "https" != urlsplit(place).scheme:
            raise PushError(
                f"{self.host}: it takes uploads at {_find_origin(place)}, without HTTPS. Nothing is sent there. Fix:"
                " configure its public address with https://, or let its proxy send X-Forwarded-Proto: https"
            )
        address = f"{place}{'&' if urlsplit(place).query else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        with _open(blob) as content:
            self._ask("PUT", address, allowed=(201,), headers=headers, data=_Counted(content, blob.size, on_sent))
        return True

    def send_manifest(self, manifest: Blob, *, by_tag: bool) -> str:
        """Sends a manifest, as the tag or by its digest. Returns its digest."""
        name = self.tag if by_tag else manifest.digest
        headers = {"Content-Type": manifest.media_type}
        self._ask("PUT", f"manifests/{name}", allowed=(201,), headers=headers, data=manifest.content)
        return manifest.digest

    def _find_base(self) -> str:
        """A registry on this machine may speak HTTP, as for Docker."""
        host = "registry-1.docker.io" if self.host == HUB else self.host
        base = f"https://{host}/v2/"
        if not _LOOPBACK.fullmatch(self.host):
            return base
        try:
            self._send("GET", base, {}, None)
        except PushError as error:
            if isinstance(error.__cause__, requests.exceptions.SSLError):
                return f"http://{host}/v2/"
            raise
        return base

    def _ask(
        self,
        method: str,
        path: str,
        allowed: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        data: Any = None,
    ) -> _Answer:
        """Sends a request, with a new token if the registry asks for one. `path` may be a whole URL.

        Redirects are not followed: another host would get the request.
        """
        address = path if "://" in path else f"{self._base}{self.repository}/{path}"
        for _ in range(2):
            # Credentials stay with the registry, also if it sends uploads to another host.
            login = {"Authorization": self._token} if self._token and self._is_ours(address) else {}
            answer = self._send(method, address, {**(headers or {}), **login}, data)
            if answer.status != requests.codes.unauthorized or not self._authorize(answer):
                break
            if isinstance(data, _Counted):
                data.rewind()
        if answer.status in allowed:
            return answer
        place = f"{method} {urlsplit(address).path}: {answer.status}"
        if answer.status in _REDIRECTS:
            other = _find_origin(_find_place(answer))
            raise PushError(f"{place} redirects to {other}, which is not followed. Fix: --to the host of the registry")
        raise PushError(f"{place} {_read_words(answer)}")

    def _send(self, method: str, address: str, headers: Mapping[str, str], data: Any) -> _Answer:
        options: dict[str, Any] = {"timeout": _TIMEOUT, "allow_redirects": False, "verify": _find_authority(address)}
        headers = {"Accept-Encoding": "identity", **headers}  # a compressed answer could fill the memory
        try:
            with self._session.request(method, address, headers=headers, data=data, stream=True, **options) as found:
                body = found.raw.read(MOST_ANSWER, decode_content=False)
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise PushError(_describe(error)) from error
        return _Answer(address, found.status_code, str(found.reason or ""), found.headers, body)

    def _is_ours(self, address: str) -> bool:
        return _find_origin(address) == _find_origin(self._base)

    def _authorize(self, answer: _Answer) -> bool:
        """Gets the credentials that the registry asks for. Returns whether they are new. Other hosts get none."""
        if not self._is_ours(answer.address):
            return False
        scheme, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        before = self._token
        if scheme.lower() == "basic" and self._login:
            self._token = _make_basic(self._login)
        elif scheme.lower() == "bearer":
            self._token = f"Bearer {self._fetch_token(dict(_PARAMETER.findall(rest)))}"
        return self._token != before

    def _fetch_token(self, asked: Mapping[str, str]) -> str:
        """Returns the token of the authority that the registry names."""
        fields = {"service": asked.get("service", ""), "scope": f"repository:{self.repository}:pull,push"}
        login, address = self._login, asked.get("realm", "")
        origin = _find_origin(address)
        if not origin.startswith("https:") and not _LOOPBACK.fullmatch(self.host):
            raise PushError(
                f"{self.host}: it asks for a token of {origin}, without HTTPS. Passwords are not sent there. Fix:"
                " configure the registry with a realm that begins with https://"
            )
        if refresh := login.get("identitytoken"):
            fields |= {"grant_type": "refresh_token", "refresh_token": refresh, "client_id": "shoal"}
            answer = self._send("POST", address, {}, fields)
        else:
            address += f"{'&' if urlsplit(address).query else '?'}{urlencode(fields)}"
            answer = self._send("GET", address, {"Authorization": _make_basic(login)} if login else {}, None)
        if answer.status != requests.codes.ok:
            raise PushError(f"{origin}: {answer.status} {_read_words(answer)}")
        return _read_token(origin, answer.body)


@dataclass(frozen=True)
class _Answer:
    """An answer of a host. `body` has its first MOST_ANSWER bytes."""

    address: str
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class _Counted:
    """A readable file that reports what was read of it, and cannot be read with a length that changes."""

    def __init__(self, file: IO[bytes], size: int, on_sent: OnSent) -> None:
        self._file, self._size, self._on_sent = file, size, on_sent

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_sent(len(data))
        return data

    def rewind(self) -> None:
        """Starts again from the first byte."""
        self._on_sent(-self._file.tell())
        self._file.seek(0)

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(1 << 20), b"")


def _split_reference(reference: str) -> tuple[str, str, str]:
    """Returns host, repository and tag by Docker's rules. A first part that cannot be a host is Docker Hub's."""
    name, _, tag = reference.rpartition(":")
    host, _, repository = name.partition("/")
    if not re.search("[.:]", host) and host != "localhost":
        host, repository = HUB, name
    if host not in (HUB, f"index.{HUB}"):
        return host, repository, tag
    return HUB, repository if "/" in repository else f"library/{repository}", tag


@contextmanager
def _open(blob: Blob) -> Iterator[IO[bytes]]:
    with blob.content.open("rb") if isinstance(blob.content, Path) else io.BytesIO(blob.content) as file:
        yield file


def _find_login(host: str) -> dict[str, str]:
    """Returns the credentials that `docker login` has stored for a registry; empty if there are none."""
    try:
        name = docker.auth.INDEX_NAME if host == HUB else host
        found = docker.auth.load_config().resolve_authconfig(name)
    except docker.errors.DockerException as error:
        raise PushError(f"Docker's credentials cannot be read: {error}. Fix: docker login {host}") from error
    login = {str(key).lower(): str(value) for key, value in (found or {}).items() if value}
    return login if "username" in login or "identitytoken" in login else {}


def _make_basic(login: Mapping[str, str]) -> str:
    pair = f"{login.get('username', '')}:{login.get('password', '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _find_authority(address: str) -> str | bool:
    """Returns the file of the CA that Docker has for a host, or True: the CAs of REQUESTS_CA_BUNDLE or of certifi."""
    authority = CERTIFICATES / urlsplit(address).netloc / "ca.crt"
    return str(authority) if authority.is_file() else True


def _find_origin(address: str) -> str:
    """Returns scheme, host and port of an address. Credentials and certificates are for these three."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise PushError(f"The registry names an address that is not valid: {_describe(error)}. {_REPORT}") from error
    return f"{parts.scheme}://{parts.hostname}:{port}"


def _find_place(answer: _Answer) -> str:
    """Returns the address that an answer names for the next request."""
    place = answer.headers.get("Location")
    with suppress(ValueError):
        if place:
            return urljoin(answer.address, place)
    path = urlsplit(answer.address).path
    raise PushError(f"{path}: {answer.status} without a valid Location. {_REPORT}")


def _read_token(origin: str, body: bytes) -> str:
    try:
        found = parse_json(body)
    except ValueError:
        found = None
    token = (found.get("token") or found.get("access_token")) if isinstance(found, dict) else None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise PushError(f"{origin}: its answer has no token, or more than {MOST_ANSWER:,} bytes. {_REPORT}")
    return token


def _read_words(answer: _Answer) -> str:
    """Returns the registry's own words about an error."""
    try:
        errors = [str(error.get("message") or error.get("code")) for error in parse_json(answer.body)["errors"]]
    except (ValueError, LookupError, TypeError, AttributeError):
        return answer.body[:_SHOWN].decode(errors="replace") or answer.reason
    return "; ".join(errors)[:_SHOWN] or answer.reason


def _describe(error: Exception) -> str:
    """Returns an error's words. A query in them can be a signature that lets others send, so it is left out."""
    return _QUERY.sub("?…", str(error))[:_SHOWN] or type(error).__name__
