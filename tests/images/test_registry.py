"""What a registry can make `shoal push` do: which host gets the credentials, and which answers are errors."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from urllib3 import HTTPResponse

from shoal.builds import layers, registry, soci
from shoal.errors import PushError
from shoal.limits import GIB, MIB

BLOB = layers.make_blob(b"content", "text/plain")
MANIFEST = layers.make_blob(b"{}", soci.MANIFEST)
BASIC = "Basic YTpi"
Answer = tuple[int, dict[str, str], bytes | io.RawIOBase]


class Server(http.server.ThreadingHTTPServer):
    """A host that gives each request the answer of a function, and remembers method, path and Authorization."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, str, str], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.seen: list[tuple[str, str, str]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def _handle(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = self.command, self.path, self.headers.get("Authorization", "")
        self.server.seen.append(request)
        status, headers, body = self.server.answer(*request)
        assert isinstance(body, bytes)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET = do_PUT = do_POST = _handle  # noqa: N815  # the names are http.server's

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(answer: Callable[[str, str, str], Answer]) -> Iterator[Server]:
    with Server(answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Stores the password b of the user a for a registry, and no other one."""

    def store(address: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"auth": "YTpi"}}}))

    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return store


def accept_uploads(place: str) -> Callable[[str, str, str], Answer]:
    """A registry that wants the password, has no blobs and takes them at another place."""

    def answer(method: str, path: str, authorization: str) -> Answer:
        if authorization != BASIC:
            return 401, {"WWW-Authenticate": 'Basic realm="test"'}, b""
        if method == "POST":
            return 202, {"Location": place}, b""
        return (404 if method == "HEAD" else 201), {}, b""

    return answer


def test_another_host_does_not_get_the_password(logins: Any) -> None:
    def ask_for_password(*_: str) -> Answer:
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{other.address}/token",service="test"'}, b""

    with serve(ask_for_password) as other, serve(accept_uploads(f"http://{other.address}/upload")) as own:
        logins(own.address)
        with pytest.raises(PushError, match="PUT /upload: 401"):
            registry.Registry(f"{own.address}/team/one:1").send_blob(BLOB, lambda _: None)
        assert [(method, authorization) for method, _, authorization in other.seen] == [("PUT", "")]


def test_a_redirect_is_reported_and_not_followed(logins: Any) -> None:
    def redirect(method: str, path: str, _: str) -> Answer:
        return 307, {"Location": f"http://{other.address}/there?signature=secret"}, b""

    with serve(lambda *_: (201, {}, b"")) as other, serve(redirect) as own:
        logins(own.address)
        with pytest.raises(PushError, match=rf"307 redirects to http://{other.address}, which is not followed. Fix:"):
            registry.Registry(f"{own.address}/team/one:1").send_manifest(MANIFEST, by_tag=True)
        assert not other.seen


def test_a_registry_that_redirects_to_a_blob_has_it(logins: Any) -> None:
    with serve(lambda *_: (307, {"Location": "http://127.0.0.1:1/there"}, b"")) as own:
        assert not registry.Registry(f"{own.address}/team/one:1").send_blob(BLOB, lambda _: None)


class Network:
    """Hosts that need no sockets, so that they can have any name and HTTPS."""

    def __init__(self, answer: Callable[[str, str, str], Answer]) -> None:
        self.answer = answer
        self.sent: list[tuple[str, str, Any]] = []
        """Address, Authorization and `verify` of each request."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        authorization = str(request.headers.get("Authorization", ""))
        self.sent.append((str(request.url), authorization, options["verify"]))
        found = requests.Response()
        found.status_code, headers, content = self.answer(str(request.method), str(request.url), authorization)
        found.headers.update(headers)
        body = io.BytesIO(content) if isinstance(content, bytes) else content
        found.raw, found.url, found.request = HTTPResponse(body, preload_content=False), str(request.url), request
        return found


def connect(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, str, str], Answer]) -> Network:
    network = Network(answer)
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", lambda _, request, **rest: network.send(request, **rest))
    return network


def test_a_password_is_not_sent_to_a_realm_without_https(logins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logins("registry.example.org")
    header = 'Bearer realm="http://tokens.example.org/token",service="test"'
    network = connect(monkeypatch, lambda *_: (401, {"WWW-Authenticate": header}, b""))
    with pytest.raises(PushError, match=r"a token of http://tokens.example.org:80, without HTTPS.* Fix:"):
        registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)
    assert all(address.startswith("https://registry.example.org/") for address, *_ in network.sent)


def test_a_registry_with_https_cannot_take_uploads_without(logins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logins("registry.example.org")
    network = connect(monkeypatch, accept_uploads("http://registry.example.org/upload"))
    with pytest.raises(PushError, match=r"uploads at http://registry.example.org:80, without HTTPS.* Fix:"):
        registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)
    assert all(address.startswith("https:") for address, *_ in network.sent)


def test_the_usual_port_is_the_same_origin(logins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logins("registry.example.org")
    network = connect(monkeypatch, accept_uploads("https://registry.example.org:443/upload"))
    assert registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)
    assert network.sent[-1][:2] == (f"https://registry.example.org:443/upload?digest={BLOB.digest}", BASIC)


def test_netrc_does_not_replace_the_token(logins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serve(accept_uploads("/upload")) as own:
        logins(own.address)
        assert registry.Registry(f"{own.address}/team/one:1").send_blob(BLOB, lambda _: None)
        assert {authorization for _, _, authorization in own.seen} == {"", BASIC}


def test_a_ca_of_docker_is_for_its_own_host(logins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = tmp_path / "registry.example.org" / "ca.crt"
    authority.parent.mkdir()
    authority.touch()
    monkeypatch.setattr(registry, "CERTIFICATES", tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "bundle"))
    logins("registry.example.org")
    network = connect(monkeypatch, accept_uploads("https://uploads.example.org/upload"))
    with pytest.raises(PushError, match="401"):
        registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)
    *own, (address, authorization, other) = network.sent
    assert {verify for *_, verify in own} == {str(authority)}
    assert (address.partition("?")[0], authorization) == ("https://uploads.example.org/upload", "")
    assert other == str(tmp_path / "bundle")


def ask_for_tokens(body: bytes | io.RawIOBase) -> Callable[[str, str, str], Answer]:
    """A registry that wants a token, and answers so if it is asked for one."""
    header = 'Bearer realm="https://registry.example.org/token",service="test"'
    return lambda method, path, _: (200, {}, body) if "/token" in path else (401, {"WWW-Authenticate": header}, b"")


@pytest.mark.parametrize(
    "body",
    [b"[]", b"[" * 100_000, b"", b"\xff", b"{}", b'{"token": 5}', b'{"token": "a\\nb"}', b'{"token": "\xc3\xa9"}'],
)
def test_an_answer_without_a_token_is_reported(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    connect(monkeypatch, ask_for_tokens(body))
    with pytest.raises(PushError, match=r"registry.example.org:443: its answer has no token.* Fix:"):
        registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)


class Endless(io.RawIOBase):
    """An answer that ends only after a gigabyte."""

    count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.count += len(buffer)
        return len(buffer) if self.count < GIB else 0


@pytest.mark.parametrize("status", [200, 500])
def test_an_endless_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    body = Endless()
    answer = ask_for_tokens(body)
    connect(monkeypatch, lambda *request: (status if "/token" in request[1] else 401, *answer(*request)[1:]))
    with pytest.raises(PushError, match=r"has no token, or more than 1,048,576 bytes|: 500 "):
        registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)
    assert body.count < 4 * MIB


@pytest.mark.parametrize(
    "place", ["http://[::1", "http://127.0.0.1:99999/", "http://", "", "http://a\u20acb.\u20ac/", "file:/a"]
)
def test_an_address_that_is_not_valid_is_reported(logins: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    logins("127.0.0.1:5000")
    connect(monkeypatch, accept_uploads(place))
    with pytest.raises(PushError):
        registry.Registry("127.0.0.1:5000/team/one:1").send_blob(BLOB, lambda _: None)


def test_a_registry_that_names_no_place_for_uploads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, lambda method, *_: (202 if method == "POST" else 404, {}, b""))
    with pytest.raises(PushError, match="202 without a valid Location"):
        registry.Registry("registry.example.org/team/one:1").send_blob(BLOB, lambda _: None)


def test_the_signature_of_an_upload_is_not_in_an_error(logins: Any) -> None:
    with serve(accept_uploads("http://127.0.0.1:1/upload?signature=secret")) as own:
        logins(own.address)
        with pytest.raises(PushError, match="/upload") as raised:
            registry.Registry(f"{own.address}/team/one:1").send_blob(BLOB, lambda _: None)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("reference", "address"),
    [
        ("team/one:1", "https://registry-1.docker.io/v2/team/one/"),
        ("docker.io/team/one:1", "https://registry-1.docker.io/v2/team/one/"),
        ("index.docker.io/one:1", "https://registry-1.docker.io/v2/library/one/"),
        ("localhost/one:1", "https://localhost/v2/one/"),
        ("host:5000/one:1", "https://host:5000/v2/one/"),
        ("registry.example.org/team/x/one:1", "https://registry.example.org/v2/team/x/one/"),
    ],
)
def test_a_name_without_a_host_is_docker_hubs(monkeypatch: pytest.MonkeyPatch, reference: str, address: str) -> None:
    network = connect(monkeypatch, lambda *_: (201, {}, b""))
    registry.Registry(reference).send_manifest(MANIFEST, by_tag=True)
    assert network.sent[-1][0] == f"{address}manifests/1"


def test_docker_hub_gets_the_password_for_it(logins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logins("https://index.docker.io/v1/")
    network = connect(monkeypatch, accept_uploads("/upload"))
    registry.Registry("team/one:1").send_manifest(MANIFEST, by_tag=True)
    assert network.sent[-1][1] == BASIC
