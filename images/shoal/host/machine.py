"""What this machine knows about its networks, read so that builds are served by it too.

Package mirrors, pip's configuration, credentials for both, the CA bundle and proxies enter a build as files under
`machine/` of the context, mounted for the length of a step, and as the proxy build arguments that an engine never
records.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.host import credentials, pipconfig

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
# What of pip's configuration a build step can use as it is. Where one of its words is a local path, that word is left
# out and said so; wheels in local find-links directories enter the context instead.
_PIP_KEYS = (
    *("index-url", "extra-index-url", "find-links", "no-index", "proxy", "trusted-host"),
    *("timeout", "default-timeout", "retries"),
)
_UNUSABLE_PIP_KEYS = ("client-cert", "constraint", "keyring-provider", "use-feature")
_URL_KEYS = ("index-url", "extra-index-url", "find-links")
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")
# What Debian calls a suite's own parts; backports and the suites of others are no part of a build.
_POCKETS = ("", "-updates", "-security")
# Nothing signs a bundle's index of packages: whoever makes a `Machine` with `debs` has checked its SHA-256.
_BUNDLED = "deb [trusted=yes] file:/run/machine/debs ./"
_ADDED_CA = Path("/usr/local/share/ca-certificates")


@dataclass(frozen=True)
class Machine:
    """The host's configuration, as far as builds use it.

    `find_links` are directories with wheels; `apt_sources` are all of apt's sources, in one-line form, and `release`
    is the suite of this machine itself where that is Debian; `left_out` says in words what of the configuration a
    container cannot use. `ca_origin` is the setting that names the bundle, and `ca_missing` are settings that name a
    file which is not there.
    """

    pip: tuple[tuple[str, str], ...]
    find_links: tuple[Path, ...]
    apt_sources: tuple[str, ...]
    apt_proxies: tuple[str, ...]
    ca_bundle: bytes | None
    proxies: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    release: str = ""
    debs: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """By suite, a repository of Debian packages that goes into builds as it is, with its index; of a bundle."""
    ca_origin: str = ""
    ca_missing: tuple[str, ...] = ()
    apt_auth: str = ""
    """apt's credentials for the hosts of its sources, of which a build gets those that it asks. Those for package
    indexes are in their URLs, in `pip`."""

    def sources(self, suite: str) -> tuple[str, ...]:
        """Return the sources that builds on Debian's `suite` install from; none: those of the base image itself.

        They are this machine's own of that suite. Where it has none, those of its own release with the suite's name in
        its place, for a mirror of Debian holds all suites at the same addresses: on a bookworm that builds for trixie,
        `URL bookworm-security main` becomes `URL trixie-security main`.
        """
        if suite in self.debs:
            return (_BUNDLED,)
        own = tuple(_of_suite(self.apt_sources, suite, suite))
        return own or tuple(_of_suite(self.apt_sources, self.release, suite))

    def auth(self, sources: Iterable[str]) -> str:
        """Return apt's credentials for the hosts of these sources, in the form of auth.conf."""
        return credentials.of_hosts(self.apt_auth, sources)

    def files(self, suite: str) -> dict[str, bytes]:
        """Return the files of the context's `machine/` directory for a build on Debian's `suite`, by name."""
        sources = self.sources(suite)
        auth = self.auth(sources)
        files = {"pip.conf": self._pip_conf(), "apt.conf": self._apt_conf(bool(sources), bool(auth))}
        if sources:
            files["sources.list"] = "\n".join(sources) + "\n"
        if auth:
            files["auth.conf"] = auth
        encoded = {name: text.encode() for name, text in files.items()}
        return encoded | ({"ca.crt": self.ca_bundle} if self.ca_bundle else {})

    def _pip_conf(self) -> str:
        lines = ["[global]", *(f"{key} = {value}" for key, value in self.pip)]
        if self.ca_bundle:
            lines.append("cert = /run/machine/ca.crt")
        return "\n".join(lines) + "\n"

    def _apt_conf(self, has_sources: bool, has_auth: bool) -> str:
        lines = list(self.apt_proxies)
        if has_sources:
            lines += ['Dir::Etc::SourceList "/run/machine/sources.list";', 'Dir::Etc::SourceParts "-";']
        if has_auth:
            lines.append('Dir::Etc::Netrc "/run/machine/auth.conf";')
        if self.ca_bundle:
            lines.append('Acquire::https::CAInfo "/run/machine/ca.crt";')
        return "\n".join(lines) + "\n"


@functools.cache
def read() -> Machine:
    """Read this machine's configuration, once a process; apt-config is asked where there is one."""
    pip = pipconfig.read()
    secrets = credentials.read_netrc()
    kept, left_out = _usable_pip(pip)
    kept |= {key: " ".join(map(secrets.signed, kept[key].split())) for key in _URL_KEYS if key in kept}
    sources = tuple(read_sources())
    apt_auth, unread = credentials.of_apt(sources)
    find_links = tuple(Path(word) for word in pip.get("find-links", "").split() if Path(word).is_dir())
    bundles = dict(_ca_files(pip))
    origin, path = next(((name, path) for name, path in bundles.items() if path.is_file()), ("", None))
    return Machine(
        pip=tuple(sorted(kept.items())),
        find_links=find_links,
        apt_sources=sources,
        release=_own_release(),
        apt_proxies=tuple(_apt_proxies()),
        ca_bundle=path.read_bytes() if path else None,
        proxies=tuple(sorted(_proxy_variables())),
        left_out=(*left_out, *filter(None, [secrets.problem]), *unread),
        ca_origin=f"{origin} {path}" if path else "",
        ca_missing=tuple(f"{name} {path}" for name, path in bundles.items() if not path.is_file()),
        apt_auth=apt_auth,
    )


def _usable_pip(pip: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    kept = {}
    left_out = [f"pip's {key}: not supported in builds" for key in _UNUSABLE_PIP_KEYS if key in pip]
    for key in _PIP_KEYS:
        words = pip.get(key, "").split()
        local = [word for word in words if word.startswith(("file:", "/", "."))]
        if key != "find-links":
            left_out += [
                f"pip's {key} {word}: a directory of this machine, which a container cannot read" for word in local
            ]
        if remote := [word for word in words if word not in local]:
            kept[key] = " ".join(remote)
    return kept, left_out


def _ca_files(pip: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the bundles that pip and the environment name, then the system's where certificates were added to it."""
    named = {"pip's cert": pip.get("cert"), **{name: os.environ.get(name) for name in _CA_VARIABLES}}
    for setting, name in named.items():
        if name:
            yield setting, Path(name)
    if _ADDED_CA.is_dir() and any(_ADDED_CA.rglob("*.crt")) and _SYSTEM_CA.is_file():
        yield "the system's", _SYSTEM_CA


def _proxy_variables() -> Iterator[tuple[str, str]]:
    for name in _PROXIES:
        for spelling in (name, name.lower()):
            if value := os.environ.get(spelling):
                yield spelling, value


def _apt_proxies() -> Iterator[str]:
    try:
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return
    for line in dump.splitlines():
        if re.match(r"Acquire::https?::Proxy\b", line, re.IGNORECASE):
            yield line


def _own_release() -> str:
    """Return the suite of this machine; empty where it is no Debian, whose mirrors have other suites."""
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
        return release.get("VERSION_CODENAME", "") if release["ID"] == "debian" else ""
    return ""


def _of_suite(sources: Iterable[str], suite: str, wanted: str) -> Iterator[str]:
    """Yield the sources of `suite`, as those of the suite that is `wanted`."""
    for source in sources:
        kind, uri, name, *components = source.split()
        if suite and name in {f"{suite}{pocket}" for pocket in _POCKETS}:
            yield " ".join([kind, uri, wanted + name.removeprefix(suite), *components])


def read_sources(directory: Path = Path("/etc/apt")) -> Iterator[str]:
    """Yield apt's sources of binary packages, of all suites and vendors, as one-line entries without options."""
    for path in (directory / "sources.list", *sorted(directory.glob("sources.list.d/*"))):
        if path.suffix == ".list" and path.is_file():
            yield from _one_line_sources(path.read_text())
        elif path.suffix == ".sources":
            yield from _deb822_sources(path.read_text())


def _one_line_sources(text: str) -> Iterator[str]:
    for words in re.findall(r"^deb[ \t]+(?:\[[^]]*\][ \t]+)?(\S+[ \t]+\S+[^#\n]*)", text, re.MULTILINE):
        yield " ".join(["deb", *words.split()])


def _deb822_sources(text: str) -> Iterator[str]:
    for stanza in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE))
        if "deb" not in fields.get("Types", "").split() or fields.get("Enabled", "yes").lower() == "no":
            continue
        for uri in fields.get("URIs", "").split():
            for suite in fields.get("Suites", "").split():
                yield f"deb {uri} {suite} {' '.join(fields.get('Components', 'main').split())}"
