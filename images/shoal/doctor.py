"""`shoal doctor`: checks whether this machine can build images and run jobs, and advises fixes.

A check takes a `Site` and returns a `CheckResult`. All checks run at the same time, each in its own thread, and
together take at most `LIMIT` seconds. If there is no Docker or no checkout, the check of it fails, and checks that need
it become remarks. A check also fails if it raises another exception or is late. Checks leave this machine as it is;
`apply_fixes` may install and start Docker.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

import docker
import docker.errors
import requests
from packaging.version import Version

from shoal import docker_client
from shoal.builds import base_image, bundled
from shoal.clean_text import print_error
from shoal.docker_client import containers
from shoal.docker_client.images import find_image
from shoal.errors import BundleError, DockerError, DoctorError, ShoalError, UsageError
from shoal.matrix import project, spec
from shoal.network import reachability
from shoal.network.settings import NetworkSettings, read_network_settings

LIMIT = 30.0
"""How long all checks together may take, in seconds."""
INTERRUPT_SECONDS = 5.0
"""How long checks may take to clean up after an interrupt."""
DOCKER_SECONDS = 10
"""How long to wait for an answer of Docker."""
MEMORY_GIB = 2
"""Enough to install the largest wheels and run two ranks."""
MARKS = {"ok": "✓", "failed": "✗", "remark": "!"}

State = Literal["ok", "failed", "remark"]
_BUNDLE = (
    "without a network, build from a bundle: shoal bundle DIR elsewhere, and shoal build --bundle DIR here, which"
    " shoal doctor --bundle DIR checks"
)


class CheckResult(NamedTuple):
    """The result of a check: its finding in one line, and a fix if it needs one."""

    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class CheckFinding:
    """A check's name and result."""

    name: str
    state: State
    found: str
    fix: str = ""


def _connect_to_docker() -> docker.DockerClient:
    return docker_client.connect(timeout=DOCKER_SECONDS)


@dataclass(frozen=True)
class Site:
    """Access for the checks: the checkout around `start`, Docker, and this machine's network settings.

    An attribute that cannot be read raises `ShoalError`.
    """

    start: Path
    connect: Callable[[], docker.DockerClient] = _connect_to_docker
    """Returns a new client, as clients are not shared between threads."""
    read_settings: Callable[[], NetworkSettings] = read_network_settings
    bundle: Path | None = None
    """The bundle of builds that need no network."""

    @property
    def project(self) -> project.Project:
        """The project around `start`, or the definitions that `shoal` comes with. Raises `UsageError` without both."""
        return project.find(self.start)

    @property
    def matrix(self) -> spec.BuildSpec:
        """The matrix of the project, read again each time. Raises `ShoalError`."""
        return spec.load(self.project.buildspec)


Check = Callable[[Site], CheckResult]


def check_definitions(site: Site) -> CheckResult:
    """Checks that buildspec.yml and versions.yml can be read."""
    try:
        return CheckResult("ok", f"{site.project.buildspec}: {len(site.matrix.images)} images")
    except ShoalError as error:
        problem, fix = error.split_fix()
        return CheckResult("failed", problem, fix or "correct the file")


def check_docker(site: Site) -> CheckResult:
    """Checks that Docker answers and has a recent API. A remark if it runs on another processor than x86_64."""
    try:
        client = site.connect()
    except DockerError as error:
        return CheckResult("failed", *error.split_fix())
    version = client.version()
    api = version["ApiVersion"]
    found = f"Docker Engine {version.get('Version', '?')}, API {api} (needs {docker_client.LEAST_API} or later)"
    if Version(api) < Version(docker_client.LEAST_API):
        return CheckResult("failed", found, "install a Docker Engine of 19.03 or later")
    if version.get("Arch", "amd64") != "amd64":
        return CheckResult("remark", f"{found}; it runs on {version['Arch']}, but images are for x86_64 (amd64)")
    return CheckResult("ok", found)


def check_builder(site: Site) -> CheckResult:
    """Checks that Docker has BuildKit."""
    client = site.connect()
    try:
        docker_client.check_buildkit(client)
    except DockerError as error:
        return CheckResult("failed", *error.split_fix())
    return CheckResult("ok", "BuildKit")


def check_disk(site: Site) -> CheckResult:
    """Checks that the largest image that is not built yet fits on Docker's disk.

    A remark if the largest of all images does not fit, or Docker runs on another machine.
    """
    client, images = site.connect(), site.matrix.images
    root = docker_client.find_data_root(client)
    if root is None:
        return CheckResult("remark", "not checked: Docker runs on another machine")
    missing = [image.disk_gib for image in images if not find_image(client, image.tag)]
    largest, needed = max(image.disk_gib for image in images), max(missing, default=0)
    free = shutil.disk_usage(root).free / docker_client.GIB
    found = f"{root}: {free:.1f} GiB free; building the largest image takes {largest} GiB"
    if free < needed:
        fix = "docker image prune and docker builder prune free space; docker system df shows how it is used"
        return CheckResult("failed", f"{found}, the largest that is not built yet {needed} GiB", fix)
    return CheckResult("ok" if free >= largest else "remark", found)


def check_memory(site: Site) -> CheckResult:
    """Checks the memory of Docker's machine. The size of its /dev/shm does not matter: each container has its own."""
    info = site.connect().info()
    gib = info["MemTotal"] / docker_client.GIB
    found = f"{gib:.1f} GiB, {info['NCPU']} CPUs; each container has its own /dev/shm (shoal run --shm-size)"
    if gib < MEMORY_GIB:
        return CheckResult("failed", found, f"give Docker's machine at least {MEMORY_GIB} GiB")
    return CheckResult("ok", found)


def check_package_index(site: Site) -> CheckResult:
    """Checks that the package indexes of builds answer.

    A remark if the first of them does not have the package pip, as PyPI has. It is fine if pip's no-index is set.
    """
    answers = reachability.check_indexes(site.read_settings())
    if not answers:
        return CheckResult("ok", "no index is used, as pip's no-index is set")
    broken = [answer for answer in answers if answer.status != requests.codes.not_found and not answer.is_ok]
    if not broken and not answers[0].is_ok:
        return CheckResult(
            "remark", f"{answers[0]}: it answers, but does not have the package pip; it may not be a package index"
        )
    fix = f"check pip config list, PIP_INDEX_URL, the proxies (HTTPS_PROXY) and the CA bundle, or {_BUNDLE}"
    return _judge_answers(broken or [answer for answer in answers if answer.is_ok], fix)


def check_debian_mirror(site: Site) -> CheckResult:
    """Checks that the Debian mirrors of builds answer."""
    here = site.read_settings()
    answers = [answer for system in site.matrix.systems() for answer in reachability.check_mirrors(here, system.suite)]
    return _judge_answers(
        answers, f"check /etc/apt/sources.list, sources.list.d and the proxies (HTTP_PROXY, apt's own), or {_BUNDLE}"
    )


def _judge_answers(answers: list[reachability.Answer], fix: str) -> CheckResult:
    if bad := [answer for answer in answers if not answer.is_ok]:
        return CheckResult("failed", _join_answers(bad), fix)
    return CheckResult("ok", ", ".join(dict.fromkeys(answer.url for answer in answers)) or "no address to check")


def _join_answers(answers: Iterable[reachability.Answer]) -> str:
    return "; ".join(dict.fromkeys(map(str, answers)))


def check_ca_bundle(site: Site) -> CheckResult:
    """Checks that the CA bundle of builds exists and can be read, and that not all its certificates have expired.

    It is fine if none is set. A remark, not a failure, if only some have expired.
    """
    here = site.read_settings()
    if here.ca_missing:
        return CheckResult("failed", f"no such file: {', '.join(here.ca_missing)}", "correct the setting, or remove it")
    if here.ca_bundle is None:
        return CheckResult("ok", "none is set: builds use the certificates of Debian and pip")
    try:
        expired, count = _list_expired(here.ca_bundle)
    except (ssl.SSLError, ValueError) as error:
        fix = "use a file with PEM certificates (-----BEGIN CERTIFICATE-----)"
        return CheckResult("failed", f"{here.ca_origin}: {_one_line(error)}", fix)
    found = f"{here.ca_origin}: {count} certificates"
    if not expired:
        return CheckResult("ok", found)
    found = f"{found}, of which {len(expired)} have expired: {', '.join(expired[:3])}"
    if len(expired) < count:
        return CheckResult("remark", found)
    return CheckResult("failed", found, "ask your network's administrator for a current bundle")


def _list_expired(bundle: bytes) -> tuple[list[str], int]:
    """Returns the names of expired CA certificates, and the number of all. Raises SSLError or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=bundle.decode("ascii", errors="ignore"))
    certificates = context.get_ca_certs()
    if not certificates:
        raise ValueError("it has no CA certificate")
    now = time.time()
    old = [each for each in certificates if ssl.cert_time_to_seconds(str(each["notAfter"])) < now]
    return [_subject_name(each["subject"]) for each in old], len(certificates)


def _subject_name(subject: object) -> str:
    """Returns the common name or organization of a certificate's subject, which is tuples of tuples of pairs."""
    assert isinstance(subject, tuple)
    parts = dict(pair for group in subject for pair in group)
    return str(parts.get("commonName") or parts.get("organizationName") or subject)


def check_settings(site: Site) -> CheckResult:
    """Checks whether builds can use all network settings of this machine."""
    here = site.read_settings()
    if here.left_out:
        return CheckResult("remark", f"builds do not use: {'; '.join(here.left_out)}")
    return CheckResult("ok", "builds use this machine's apt sources, pip configuration and proxies")


def check_gpus(site: Site) -> CheckResult:
    """Checks whether containers can use GPUs. GPU images also run without."""
    if docker_client.has_gpus(site.connect()):
        return CheckResult("ok", "Docker has NVIDIA's runtime")
    return CheckResult("remark", "Docker has no NVIDIA runtime: containers get no GPU, and GPU images use the CPU")


def check_networks(site: Site) -> CheckResult:
    """Checks that Docker can create a bridge network, as for a job. Creates one, which is removed at once."""
    client = site.connect()
    label = containers.unique_name("shoal-doctor")
    try:
        client.networks.create(label, driver="bridge", labels={containers.JOB_LABEL: label})
    except docker.errors.APIError as error:
        fix = "docker network prune removes unused networks; Docker's log may have details"
        return CheckResult("failed", f"Docker cannot create a bridge network: {error.explanation or error}", fix)
    finally:
        for network in client.networks.list(filters={"label": f"{containers.JOB_LABEL}={label}"}):
            network.remove()
    return CheckResult("ok", "Docker can create a bridge network for the hosts of a job")


def check_loopback(site: Site) -> CheckResult:
    """Checks that a process can connect to a port of 127.0.0.1, as ranks do in a job without Docker."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=DOCKER_SECONDS).close()
    except OSError as error:
        fix = "bring the interface lo up, and check the firewall (make train ENGINE=none needs it)"
        return CheckResult("failed", f"cannot listen on a port of 127.0.0.1 and connect to it: {error}", fix)
    return CheckResult("ok", "can listen on a port of 127.0.0.1 and connect to it")


def check_base_images(site: Site) -> CheckResult:
    """Checks that Docker has the base images, or that they can be pulled or bootstrapped."""
    results = [_check_base_image(site, system) for system in site.matrix.systems()]
    state: State = "failed" if any(result.state == "failed" for result in results) else "ok"
    worst = [result for result in results if result.state == state]
    found, fix = ("; ".join(dict.fromkeys(filter(None, words))) for words in zip(*(each[1:] for each in worst)))
    return CheckResult(state, found, fix)


def _check_base_image(site: Site, system: spec.System) -> CheckResult:
    """Checks one base image: in Docker, in its registry, in the cache, or made by mmdebstrap. Pulls nothing."""
    client, upstream = site.connect(), system.upstream
    if found := base_image.find_base(client, system):
        return CheckResult("ok", f"Docker has {found.reference}")
    kept = base_image.archive_path(site.project.cache, system)
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
        client.images.get_registry_data(upstream)
        return CheckResult("ok", f"{upstream} can be pulled")
    if kept.is_file():
        return CheckResult("ok", f"{upstream} cannot be pulled; an earlier bootstrapped one is in {kept}")
    if obstacle := base_image.explain_no_bootstrap(system):
        problem, fix = ShoalError(obstacle).split_fix()
        return CheckResult("failed", problem, fix or f"load {upstream} into Docker (docker load)")
    if bad := [answer for answer in reachability.check_mirrors(site.read_settings(), system.suite) if not answer.is_ok]:
        problem = f"{upstream} cannot be pulled, nor bootstrapped from the Debian mirror: {_join_answers(bad)}"
        return CheckResult("failed", problem, f"load it into Docker (docker load), or {_BUNDLE}")
    return CheckResult("ok", f"{upstream} cannot be pulled; the first build bootstraps it from the Debian mirror")


def check_bundle(site: Site) -> CheckResult:
    """Check that the bundle has its files. Builds check their content.

    A remark if it is not for the Debian releases of all images.
    """
    systems = {system.suite for system in site.matrix.systems()}
    assert site.bundle is not None
    try:
        suites = bundled.read_settings(site.bundle).debs.keys()
        missing = bundled.read_sums(site.bundle).keys() - {name for name, _ in bundled.list_files(site.bundle)}
    except (BundleError, UsageError, OSError) as error:
        return CheckResult("failed", *ShoalError(str(error)).split_fix())
    if missing:
        return CheckResult(
            "failed", f"{site.bundle} lacks {', '.join(sorted(missing)[:3])}", f"copy it again, or {_BUNDLE}"
        )
    found = f"{site.bundle} has base images, packages and wheels for Debian {', '.join(sorted(suites))}"
    if others := systems - suites:
        return CheckResult("remark", f"{found}, not for the images of {', '.join(sorted(others))}")
    return CheckResult("ok", found)


CHECKS: Mapping[str, Check] = {
    "definitions": check_definitions,
    "docker": check_docker,
    "builder": check_builder,
    "disk": check_disk,
    "memory": check_memory,
    "package index": check_package_index,
    "debian mirror": check_debian_mirror,
    "ca bundle": check_ca_bundle,
    "settings": check_settings,
    "base image": check_base_images,
    "networks": check_networks,
    "loopback": check_loopback,
    "gpus": check_gpus,
}
_OF_NETWORK = ("package index", "debian mirror", "ca bundle", "settings", "base image")


def choose_checks(bundle: Path | None) -> Mapping[str, Check]:
    """Returns the checks. With a bundle, it takes the place of the network of builds."""
    if bundle is None:
        return CHECKS
    return {name: check for name, check in CHECKS.items() if name not in _OF_NETWORK} | {"bundle": check_bundle}


def run_checks(site: Site, checks: Mapping[str, Check] = CHECKS, limit: float = LIMIT) -> list[CheckFinding]:
    """Runs checks, all at the same time, each in its own thread.

    An interrupt is raised after the checks had `INTERRUPT_SECONDS` to clean up.

    Args:
        limit: How long they may take together, in seconds.

    Returns:
        A finding for each check, in their order. Checks that took too long have failed.
    """
    ended: SimpleQueue[CheckFinding] = SimpleQueue()
    threads = [
        threading.Thread(target=lambda name=name, check=check: ended.put(_run_check(name, check, site)), daemon=True)
        for name, check in checks.items()
    ]
    found: dict[str, CheckFinding] = {}
    deadline = time.monotonic() + limit
    try:
        for thread in threads:
            thread.start()
        while len(found) < len(checks):
            finding = ended.get(timeout=max(0.0, deadline - time.monotonic()))
            found[finding.name] = finding
    except Empty:
        pass
    except BaseException:  # interrupted: checks still clean up
        _wait(threads)
        raise
    late = f"no result after {limit:g} s"
    return [
        found.get(name)
        or CheckFinding(name, "failed", late, "try again; if it hangs again, check the part that it names")
        for name in checks
    ]


def _wait(threads: Iterable[threading.Thread]) -> None:
    end = time.monotonic() + INTERRUPT_SECONDS
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, end - time.monotonic()))


def _run_check(name: str, check: Check, site: Site) -> CheckFinding:
    """Body of a thread: every error becomes a finding. An expected error is a remark, any other is a failure."""
    try:
        return CheckFinding(name, *check(site))
    except DockerError:  # the check of Docker reports it
        return CheckFinding(name, "remark", "not checked: needs Docker")
    except ShoalError:
        return CheckFinding(name, "remark", "not checked: needs a readable buildspec.yml")
    except Exception as error:
        fix = "check Docker's log; if Docker did not refuse a request, please report this error"
        return CheckFinding(name, "failed", f"{type(error).__name__}: {_one_line(error)}", fix)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _start_docker(_site: Site) -> str:
    """Runs scripts/engine.sh, which may install Docker. It prints to standard error, and may take any time."""
    script = project.find_shipped().root / "scripts" / "engine.sh"  # a project's own file may be anything
    result = subprocess.run(
        [script], stdout=sys.stderr, check=False
    )  # without a timeout: apt-get must not be interrupted
    return "started it with scripts/engine.sh" if result.returncode == 0 else "scripts/engine.sh could not start it"


FIXES: Mapping[str, Callable[[Site], str]] = {"docker": _start_docker}
"""The fixes of `--fix`, by check. They remove nothing."""


def apply_fixes(site: Site, findings: Iterable[CheckFinding]) -> bool:
    """Applys the `FIXES` of failed checks, and prints the results to standard error. Return whether any was tried.

    Starting Docker may install it with apt-get. A fix that fails is printed too, and raises nothing.
    """
    failed = [finding.name for finding in findings if finding.state == "failed" and finding.name in FIXES]
    for name in failed:
        try:
            done = FIXES[name](site)
        except (ShoalError, OSError) as error:
            done = f"nothing done: {_one_line(error)}"
        print_error(f"--fix: {name}: {done}")
    return bool(failed)


def format_findings(findings: Iterable[CheckFinding]) -> str:
    """Returns a line for each finding, and a second one with its fix if it has one."""
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]} {finding.name:<{max(map(len, CHECKS))}}  {finding.found}")
        lines += [f"    Fix: {finding.fix}"] * bool(finding.fix)
    return "\n".join(lines)


def raise_failures(findings: Iterable[CheckFinding]) -> None:
    """Raises `DoctorError` if a check failed."""
    if failed := [finding.name for finding in findings if finding.state == "failed"]:
        raise DoctorError(f"{len(failed)} checks failed: {', '.join(failed)}. Fix: run the commands above")
