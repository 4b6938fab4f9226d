"""The network settings of this machine that builds use: package mirrors, pip, credentials, CA bundle, proxies.

A build gets them as files in the context's `machine/` directory, which is mounted only while a step runs. Proxies are
build arguments too; Docker does not record those.

pip's settings are read as pip's documentation defines (Configuration). Why not by `pip config list`, which prints the
same: docs/decisions/written-by-hand.md.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal import trust
from shoal.errors import SpecError
from shoal.matrix.project import Project
from shoal.network import credentials

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
# pip's settings that builds can use. Local paths in them are left out and reported; the wheels of local find-links
# directories are copied into the context instead.
_PIP_KEYS = (
    *("index-url", "extra-index-url", "find-links", "no-index", "proxy", "trusted-host"),
    *("timeout", "default-timeout", "retries"),
)
_UNUSABLE_PIP_KEYS = ("client-cert", "constraint", "keyring-provider", "use-feature")
_URL_KEYS = ("index-url", "extra-index-url", "find-links")
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")
_LOGIN = re.compile(r"(?:(?<=//)|(?<![^\s\"]))[^\s\"/]*@")
"""The user and password before the host of an address, which may have no scheme."""
# The parts of a Debian suite that builds use; not backports, and no suites of other vendors.
_POCKETS = ("", "-updates", "-security")
# The package index of a bundle has no signature. The code that sets `debs` has checked its SHA-256.
_BUNDLED = "deb [trusted=yes] file:/run/machine/debs ./"
_ADDED_CA = Path("/usr/local/share/ca-certificates")


@dataclass(frozen=True)
class NetworkSettings:
    """This machine's network settings, as far as builds use them."""

    pip: tuple[tuple[str, str], ...]
    """pip's options and values. URLs have their credentials."""
    find_links: tuple[Path, ...]
    """Local directories with wheels."""
    apt_sources: tuple[str, ...]
    """All of apt's sources, in one-line form."""
    apt_proxies: tuple[str, ...]
    ca_bundle: bytes | None
    proxies: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    """Settings that a build cannot use, each with the reason."""
    release: str = ""
    """This machine's own suite, if it runs Debian."""
    debs: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """By suite, a repository of Debian packages with its index, from a bundle. Builds use it as it is."""
    ca_origin: str = ""
    """The setting that names the CA bundle."""
    ca_missing: tuple[str, ...] = ()
    """Settings that name a CA bundle that does not exist."""
    apt_auth: str = ""
    """apt's credentials for the hosts of its sources, in the form of auth.conf."""

    def without_logins(self) -> NetworkSettings:
        """Returns the settings without users and passwords, for builds with steps that must not read them."""

        def clean(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
            return tuple((name, _LOGIN.sub("", value)) for name, value in pairs)

        return replace(
            self,
            pip=clean(self.pip),
            apt_sources=tuple(_LOGIN.sub("", line) for line in self.apt_sources),
            apt_proxies=tuple(_LOGIN.sub("", line) for line in self.apt_proxies),
            proxies=clean(self.proxies),
            apt_auth="",
        )

    def select_sources(self, suite: str) -> tuple[str, ...]:
        """Returns the apt sources for builds on a Debian suite.

        A Debian mirror holds all suites at one address. This machine may have sources of its own release only. Their
        addresses are then used for `suite`: on bookworm, `URL bookworm-security main` becomes
        `URL trixie-security main`.

        Args:
            suite: Such as `bookworm`.

        Returns:
            Sources in one-line form: the bundle's alone, if it has the suite. None: use the base image's sources.
        """
        if suite in self.debs:
            return (_BUNDLED,)
        own = tuple(_sources_of_suite(self.apt_sources, suite, suite))
        return own or tuple(_sources_of_suite(self.apt_sources, self.release, suite))

    def select_auth(self, sources: Iterable[str]) -> str:
        """Returns apt's credentials for the hosts of these sources, in the form of auth.conf."""
        return credentials.select_auth_entries(self.apt_auth, sources)

    def build_files(self, suite: str) -> dict[str, bytes]:
        """Returns the files of the context's `machine/` directory, by name, for a build on a Debian suite.

        They are pip.conf and apt.conf, and if they are needed sources.list, auth.conf and ca.crt. They hold
        credentials.
        """
        sources = self.select_sources(suite)
        auth = self.select_auth(sources)
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
def read_network_settings() -> NetworkSettings:
    """Reads the settings of pip and apt, the proxies and the CA bundle, with their credentials, once per process.

    Reads pip's files and variables, netrc, and apt's files. Runs `apt-config`, if it is installed. Do not print the
    result.

    Raises:
        SpecError: If a file of pip is not valid.
    """
    pip = read_pip_settings()
    netrc = credentials.read_netrc()
    kept, left_out = _select_pip_settings(pip)
    kept |= {key: " ".join(map(netrc.add_credentials, kept[key].split())) for key in _URL_KEYS if key in kept}
    sources = tuple(read_apt_sources())
    apt_auth, unread = credentials.read_apt_auth(sources)
    find_links = tuple(Path(word) for word in pip.get("find-links", "").split() if Path(word).is_dir())
    bundles = dict(_ca_bundles(pip))
    origin, path = next(((name, path) for name, path in bundles.items() if path.is_file()), ("", None))
    return NetworkSettings(
        pip=tuple(sorted(kept.items())),
        find_links=find_links,
        apt_sources=sources,
        release=_debian_release(),
        apt_proxies=tuple(_read_apt_proxies()),
        ca_bundle=path.read_bytes() if path else None,
        proxies=tuple(sorted(_proxy_variables())),
        left_out=(*left_out, *filter(None, [netrc.problem]), *unread),
        ca_origin=f"{origin} {path}" if path else "",
        ca_missing=tuple(f"{name} {path}" for name, path in bundles.items() if not path.is_file()),
        apt_auth=apt_auth,
    )


def read_settings_for(project: Project, say: Callable[[str], object]) -> NetworkSettings:
    """Returns the network settings of this machine, without passwords if the steps of a project must not read them.

    A step can send a password to anybody. `say` gets a sentence about it, if there are passwords.
    """
    settings = read_network_settings()
    if project.may_run_code() or (public := settings.without_logins()) == settings:
        return settings
    say(
        f"! {project.root}: its steps get no passwords of package indexes, mirrors and proxies. Fix, if you trust all"
        f" that is in it: {trust.advise_trust(project.root)}"
    )
    return public


def pip_environment() -> dict[str, str]:
    """Returns the environment for pip on this machine, with the CA bundle of builds: pip ignores SSL_CERT_FILE.

    Raises:
        SpecError: If a file of pip is not valid.
    """
    found = (path for _, path in _ca_bundles(read_pip_settings()) if path.is_file())
    path = next(found, None)
    return {**os.environ, "PIP_CERT": str(path)} if path else dict(os.environ)


def _select_pip_settings(pip: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns pip's settings that a build can use, and a sentence for each that it cannot."""
    kept = {}
    left_out = [f"pip's {key}: not supported in builds" for key in _UNUSABLE_PIP_KEYS if key in pip]
    for key in _PIP_KEYS:
        words = pip.get(key, "").split()
        local = [word for word in words if word.startswith(("file:", "/", "."))]
        # Wheels in local directories of find-links are copied.
        if key != "find-links":
            left_out += [f"pip's {key} {word}: a local directory, which a container cannot read" for word in local]
        if remote := [word for word in words if word not in local]:
            kept[key] = " ".join(remote)
    return kept, left_out


def _ca_bundles(pip: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Yields the CA bundles that pip and the environment name, then the system's if certificates were added to it."""
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


def _read_apt_proxies() -> Iterator[str]:
    """Yields the proxy lines of apt's configuration; none if `apt-config` is not installed."""
    try:
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return
    for line in dump.splitlines():
        if re.match(r"Acquire::https?::Proxy\b", line, re.IGNORECASE):
            yield line


def _debian_release() -> str:
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
        return release.get("VERSION_CODENAME", "") if release["ID"] == "debian" else ""
    return ""


def _sources_of_suite(sources: Iterable[str], suite: str, wanted: str) -> Iterator[str]:
    """Yields the sources of `suite`, its updates and security updates, with the suite's name replaced by `wanted`."""
    for source in sources:
        kind, uri, name, *components = source.split()
        if suite and name in {f"{suite}{pocket}" for pocket in _POCKETS}:
            yield " ".join([kind, uri, wanted + name.removeprefix(suite), *components])


def read_apt_sources(directory: Path = Path("/etc/apt")) -> Iterator[str]:
    """Yields apt's sources of binary packages, for all suites and vendors, in one-line form without options.

    Disabled sources and `deb-src` are left out.
    """
    for path in (directory / "sources.list", *sorted(directory.glob("sources.list.d/*"))):
        if path.suffix == ".list" and path.is_file():
            yield from _parse_one_line_sources(path.read_text())
        elif path.suffix == ".sources":
            yield from _parse_deb822_sources(path.read_text())


def _parse_one_line_sources(text: str) -> Iterator[str]:
    for words in re.findall(r"^deb[ \t]+(?:\[[^]]*\][ \t]+)?(\S+[ \t]+\S+[^#\n]*)", text, re.MULTILINE):
        yield " ".join(["deb", *words.split()])


def _parse_deb822_sources(text: str) -> Iterator[str]:
    """Yields the enabled sources of binary packages, a line for each URI and suite, without options."""
    for stanza in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE))
        if "deb" not in fields.get("Types", "").split() or fields.get("Enabled", "yes").lower() == "no":
            continue
        for uri in fields.get("URIs", "").split():
            for suite in fields.get("Suites", "").split():
                yield f"deb {uri} {suite} {' '.join(fields.get('Components', 'main').split())}"


_SECTIONS = ("global", "install")
"""The sections that apply to `pip install`, in ascending priority."""
_NOT_OPTIONS = ("version", "help")


def read_pip_settings(environment: Mapping[str, str] = os.environ, prefix: str = sys.prefix) -> dict[str, str]:
    """Returns the settings of `pip install`, by option. Line breaks become spaces; empty values are left out.

    As in pip, no file is read if PIP_CONFIG_FILE is `os.devnull`.

    Args:
        environment: The environment variables to read.
        prefix: The Python environment, which may have a pip.conf.

    Raises:
        SpecError: If a file is not a valid configuration. pip fails on it too.
    """
    settings: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    if environment.get("PIP_CONFIG_FILE") != os.devnull:
        for path in _config_files(environment, Path(prefix)):
            parser = _parse_file(path)
            for section in filter(parser.has_section, _SECTIONS):
                settings[section] |= {_option_name(key): value for key, value in parser.items(section)}
    variables = {_option_name(key[4:]): value for key, value in environment.items() if key.startswith("PIP_")}
    stages = (*settings.values(), {key: value for key, value in variables.items() if key not in _NOT_OPTIONS})
    return {key: value.replace("\n", " ").strip() for stage in stages for key, value in stage.items() if value}


def _parse_file(path: Path) -> configparser.RawConfigParser:
    """Reads one file of pip; a missing or unreadable one is empty. Raises `SpecError` if it is not valid."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a valid pip configuration: {error}. Fix: correct the file") from error
    return parser


def _config_files(environment: Mapping[str, str], prefix: Path) -> Iterator[Path]:
    """Yields the files that pip reads, in ascending priority; they may not exist."""
    home = Path(environment.get("HOME") or Path.home())
    for directory in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        yield Path(directory, "pip", "pip.conf")
    yield Path("/etc/pip.conf")
    own = environment.get("PIP_CONFIG_FILE")
    if not own or not Path(own).exists():
        yield home / ".pip" / "pip.conf"
        yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf")
    yield prefix / "pip.conf"
    if own:
        yield Path(own)


def _option_name(key: str) -> str:
    """Returns the name of an option for `--Name_of`, a key of a file or the rest of a PIP_ variable."""
    return key.lower().replace("_", "-").removeprefix("--")
