"""Credentials from pip's netrc and apt's auth.conf: which ones builds get, and that apt uses them."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shoal import trust
from shoal.matrix.project import Project
from shoal.network import credentials, settings
from shoal.network.settings import NetworkSettings

PLAIN = NetworkSettings((), (), (), (), None, (), ())
NETRC = """\
machine one.example login me password p@ss:w/rd
machine two.example login you password "of two"
"""


@pytest.fixture
def netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "netrc"
    path.write_text(NETRC)
    monkeypatch.setenv("NETRC", str(path))
    return path


@pytest.mark.parametrize(
    ("url", "signed"),
    [
        ("https://one.example/simple", "https://me:p%40ss%3Aw%2Frd@one.example/simple"),
        ("https://one.example:8443/simple/", "https://me:p%40ss%3Aw%2Frd@one.example:8443/simple/"),
        ("https://two.example", "https://you:of%20two@two.example"),
        ("https://own:words@one.example/simple", "https://own:words@one.example/simple"),
        ("https://else.example/simple", "https://else.example/simple"),
        ("no-url", "no-url"),
    ],
)
def test_a_url_gets_the_credentials_for_its_host(netrc: Path, url: str, signed: str) -> None:
    assert credentials.read_netrc().add_credentials(url) == signed


def test_default_entry_is_used_as_in_pip(netrc: Path) -> None:
    netrc.write_text("default login any password x\n")
    assert credentials.read_netrc().add_credentials("https://a.example/s") == "https://any:x@a.example/s"


def test_netrc_of_the_home_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert credentials.read_netrc() == credentials.Netrc()
    (tmp_path / ".netrc").write_text(NETRC)
    assert "me:" in credentials.read_netrc().add_credentials("https://one.example/simple")


@pytest.mark.parametrize(
    ("password", "problem"), [(b"my secret", "line "), (b"\xff", "cannot be read: ")], ids=["two words", "no UTF-8"]
)
def test_invalid_netrc_is_reported(netrc: Path, password: bytes, problem: str) -> None:
    netrc.write_bytes(b"machine one.example login me password " + password + b"\n")
    found = credentials.read_netrc()
    assert found.problem.startswith(f"{netrc}: {problem}")
    assert "secret" not in found.problem
    assert found.add_credentials("https://one.example/") == "https://one.example/"


def test_only_the_indexes_entries_enter_a_build(netrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://one.example/simple\nextra-index-url = https://a.example/s\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    host = settings.read_network_settings.__wrapped__()
    assert dict(host.pip)["index-url"] == "https://me:p%40ss%3Aw%2Frd@one.example/simple"
    assert dict(host.pip)["extra-index-url"] == "https://a.example/s"
    assert b"of two" not in b"".join(host.build_files("bookworm").values())
    netrc.write_text("nonsense\n")
    assert any(str(netrc) in words for words in settings.read_network_settings.__wrapped__().left_out)


AUTH = """\
# machine not.example login a password b
machine https://one.example/debian
  login me
  password secret
machine one.example:8080 login x password y
machine two.example login you password other
"""


def test_apt_entries_for_its_sources_are_selected(tmp_path: Path) -> None:
    (tmp_path / "auth.conf.d").mkdir()
    (tmp_path / "auth.conf").write_text(AUTH)
    (tmp_path / "auth.conf.d" / "more.conf").write_text("machine one.example login more password m\n")
    (tmp_path / "auth.conf.d" / "more.bak").write_text("machine one.example login old password m\n")
    sources = ["deb https://one.example/debian bookworm main", "deb http://not.example/debian bookworm main"]
    entries, problems = credentials.read_apt_auth(sources, tmp_path)
    assert problems == ()
    assert entries.splitlines() == [
        "machine https://one.example/debian login me password secret",
        "machine one.example:8080 login x password y",
        "machine one.example login more password m",
    ]
    assert credentials.read_apt_auth([], tmp_path) == ("", ())


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("https://one.example/debian/dists/x", "me:secret"),
        ("https://one.example/other", ""),
        ("http://one.example:8080/other", "x:y"),
        ("http://one.example/other", ""),
        ("https://me:p@one.example/debian/x", "me:p"),
        ("https://none.example/debian", ""),
    ],
)
def test_first_matching_entry_is_used_for_a_mirror(url: str, login: str) -> None:
    auth = "machine https://one.example/debian login me password secret\nmachine one.example:8080 login x password y\n"
    assert urlsplit(credentials.add_apt_credentials(url, auth)).netloc.rpartition("@")[0] == login


def test_unreadable_apt_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "auth.conf").mkdir()
    entries, (problem,) = credentials.read_apt_auth(["deb https://one.example/debian bookworm main"], tmp_path)
    assert entries == ""
    assert problem.startswith(f"apt's {tmp_path / 'auth.conf'}: cannot be read")


def test_builds_get_credentials_as_a_file() -> None:
    """Only for the hosts of its suite."""
    sources = ("deb https://one.example/debian bookworm main", "deb https://two.example/tools stable main")
    auth = "machine one.example login me password secret\nmachine two.example login you password other\n"
    files = replace(PLAIN, apt_sources=sources, apt_auth=auth).build_files("bookworm")
    assert files["auth.conf"] == b"machine one.example login me password secret\n"
    assert b'Dir::Etc::Netrc "/run/machine/auth.conf";' in files["apt.conf"]
    assert "auth.conf" not in PLAIN.build_files("bookworm")
    assert b"Netrc" not in PLAIN.build_files("bookworm")["apt.conf"]


class Mirror(BaseHTTPRequestHandler):
    """An empty mirror that records requests."""

    asked: set[str | None]

    def do_GET(self) -> None:
        self.asked.add(self.headers["Authorization"])
        self.send_error(404 if self.headers["Authorization"] else 401)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[str]:
    Mirror.asked = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.skipif(not shutil.which("apt-get"), reason="apt itself is asked")
def test_apt_uses_the_credentials(tmp_path: Path, mirror: str) -> None:
    """As in a build step, but with directories in `tmp_path`."""
    source = f"deb {mirror}/debian bookworm main"
    host = replace(PLAIN, apt_sources=(source,), apt_auth=f"machine {mirror} login me password secret\n")
    for name, content in host.build_files("bookworm").items():
        (tmp_path / name).write_bytes(content.replace(b"/run/machine", str(tmp_path).encode()))
    own = f'Dir::State::lists "{tmp_path}";\nDir::Cache "{tmp_path}";\nAPT::Sandbox::User "root";\n'
    direct = 'Acquire::http::Proxy::127.0.0.1 "DIRECT";\n'
    with (tmp_path / "apt.conf").open("a") as file:
        file.write(own + direct)
    environment = {**os.environ, "APT_CONFIG": str(tmp_path / "apt.conf")}
    subprocess.run(["apt-get", "update"], env=environment, capture_output=True, timeout=60, check=False)
    assert "Basic " + base64.b64encode(b"me:secret").decode() in Mirror.asked


SECRET = replace(
    PLAIN,
    pip=(("index-url", "https://me:pass@one.example/simple http://two.example"), ("proxy", "me:pass@proxy:3128")),
    apt_sources=("deb http://me:p@ss@mirror.example/debian bookworm main",),
    apt_proxies=('Acquire::http::Proxy "http://me:pass@proxy:3128";',),
    proxies=(("HTTPS_PROXY", "http://me:pass@proxy:3128"), ("NO_PROXY", "localhost,.example")),
    apt_auth="machine mirror.example login me password pass\n",
    release="bookworm",
)


def test_steps_of_a_project_get_no_passwords_unless_it_is_trusted(
    tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could send them to anybody."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(settings, "read_network_settings", lambda: SECRET)
    foreign = Project(tmp_path / "project")
    foreign.root.mkdir()
    notes: list[str] = []
    found = settings.read_settings_for(foreign, notes.append)
    texts = [*map(bytes.decode, found.build_files("bookworm").values()), *map(str, found.proxies)]
    assert not [text for text in texts if "me" in text.split("//")[-1][:2] or "ss@" in text or "pass" in text]
    assert "https://one.example/simple http://two.example" in texts[0]
    assert ("HTTPS_PROXY", "http://proxy:3128") in found.proxies and ("proxy", "proxy:3128") in found.pip
    assert "deb http://mirror.example/debian bookworm main" in found.select_sources("bookworm")
    assert len(notes) == 1 and f"shoal trust {foreign.root}" in notes[0]
    assert settings.read_settings_for(project, notes.append) == SECRET
    trust.add_trusted(foreign.root)
    assert settings.read_settings_for(foreign, notes.append) == SECRET
    assert len(notes) == 1
