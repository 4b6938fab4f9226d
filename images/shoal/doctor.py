"""`shoal doctor`: what builds and jobs need of this machine, looked at without changing it, and what to do about it.

A check takes a `Site` and returns a `Result`. All run at once, each in a thread of its own; one that raises has failed,
and so has one that is not done after `LIMIT` seconds.
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
from shoal.builds import base_image as bases
from shoal.docker_client import containers
from shoal.docker_client.images import find_image
from shoal.errors import DockerError, DoctorError, ShoalError
from shoal.matrix import project, spec
from shoal.network import reachability, settings

LIMIT = 30.0
"""Seconds that all checks together may take."""
PATIENCE = 5.0
"""Seconds that checks have to end when they are interrupted."""
ENGINE_SECONDS = 10
"""How long the engine may be silent."""
MEMORY_GIB = 2
"""What installing the largest wheels and running two ranks take, with room to spare."""
MARKS = {"ok": "✓", "failed": "✗", "remark": "!"}

State = Literal["ok", "failed", "remark"]


class Result(NamedTuple):
    """What a check found, in one line; `advice` says what to do, where there is something to do."""

    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Finding:
    """A check by its name, and its `Result`."""

    name: str
    state: State
    found: str
    advice: str = ""


def _connect() -> docker.DockerClient:
    return docker_client.connect(timeout=ENGINE_SECONDS)


@dataclass(frozen=True)
class Site:
    """What the checks look at: the checkout around `start`, an engine (one client a thread), this machine's settings.

    What cannot be read raises `ShoalError`, for the checks that need it.
    """

    start: Path
    connect: Callable[[], docker.DockerClient] = _connect
    machine: Callable[[], settings.NetworkSettings] = settings.read_network_settings

    @property
    def project(self) -> project.Project:
        return project.find(self.start)

    @property
    def matrix(self) -> spec.BuildSpec:
        return spec.load(self.project.buildspec)


Check = Callable[[Site], Result]


def checkout(site: Site) -> Result:
    """Whether buildspec.yml and versions.yml can be read."""
    try:
        return Result("ok", f"{site.project.buildspec}: {len(site.matrix.images)} images")
    except ShoalError as error:
        return Result("failed", _one_line(error), "correct the file, or run this in a checkout of the project")


def engine_answers(site: Site) -> Result:
    """Whether an engine answers, speaks an API that is new enough, and makes x86_64 containers."""
    try:
        client = site.connect()
    except DockerError as error:
        found, _, advice = str(error).partition("\nFix: ")
        return Result("failed", found, advice)
    version = client.version()
    api = version["ApiVersion"]
    found = f"Docker Engine {version.get('Version', '?')}, API {api} (at least {docker_client.LEAST_API} is needed)"
    if Version(api) < Version(docker_client.LEAST_API):
        return Result("failed", found, "install a Docker Engine of 19.03 or later")
    if version.get("Arch", "amd64") != "amd64":
        return Result("remark", f"{found}; it runs on {version['Arch']}, and the images are for x86_64 (amd64)")
    return Result("ok", found)


def builder_kind(site: Site) -> Result:
    """Whether images can be built with BuildKit."""
    client = site.connect()
    try:
        docker_client.check_buildkit(client)
    except DockerError as error:
        found, _, advice = str(error).partition(" Fix: ")
        return Result("failed", found, advice)
    return Result("ok", "BuildKit")


def disk(site: Site) -> Result:
    """Whether a cold build of the largest image that is not there yet fits; of the largest of all is only remarked."""
    client, images = site.connect(), site.matrix.images
    root = docker_client.find_data_root(client)
    if root is None:
        return Result("remark", "not checked: the engine is on another machine")
    missing = [image.disk_gib for image in images if not find_image(client, image.tag)]
    largest, needed = max(image.disk_gib for image in images), max(missing, default=0)
    free = shutil.disk_usage(root).free / docker_client.GIB
    found = f"{root}: {free:.1f} GiB free; the largest image takes {largest} GiB to build"
    if free < needed:
        advice = "docker system df shows what Docker holds; docker image prune and docker builder prune free it"
        return Result("failed", f"{found}, the largest that is not there yet {needed} GiB", advice)
    return Result("ok" if free >= largest else "remark", found)


def memory(site: Site) -> Result:
    """Whether the engine's machine has enough memory. Its /dev/shm is no matter: each container has its own."""
    info = site.connect().info()
    gib = info["MemTotal"] / docker_client.GIB
    found = f"{gib:.1f} GiB, {info['NCPU']} CPUs; /dev/shm is each container's own (shoal run --shm-size)"
    if gib < MEMORY_GIB:
        return Result("failed", found, f"give the engine's machine at least {MEMORY_GIB} GiB")
    return Result("ok", found)


def package_index(site: Site) -> Result:
    """Whether the indexes that pip asks in builds answer; only the first must have a page of pip, as PyPI has."""
    answers = reachability.check_indexes(site.machine())
    if not answers:
        return Result("ok", "none is asked: pip's no-index is set")
    broken = [answer for answer in answers if answer.status != requests.codes.not_found and not answer.is_ok]
    if not broken and not answers[0].is_ok:
        return Result("remark", f"{answers[0]}: it answers, but has no page of pip, as an index of packages has")
    advice = "look at pip config list, PIP_INDEX_URL, the proxies (HTTPS_PROXY) and the CA bundle"
    return _reached(broken or [answer for answer in answers if answer.is_ok], advice)


def debian_mirror(site: Site) -> Result:
    """Whether the Debian mirrors that builds install from answer."""
    here = site.machine()
    answers = [answer for system in site.matrix.systems() for answer in reachability.check_mirrors(here, system.suite)]
    return _reached(answers, "look at /etc/apt/sources.list and sources.list.d, and the proxies (HTTP_PROXY, apt's)")


def _reached(answers: list[reachability.Answer], advice: str) -> Result:
    if bad := [answer for answer in answers if not answer.is_ok]:
        return Result("failed", _joined(bad), advice)
    return Result("ok", ", ".join(dict.fromkeys(answer.url for answer in answers)) or "no address to ask")


def _joined(answers: Iterable[reachability.Answer]) -> str:
    return "; ".join(dict.fromkeys(map(str, answers)))


def ca_bundle(site: Site) -> Result:
    """Whether the CA bundle that builds are given is there, can be read, and has certificates that are valid."""
    here = site.machine()
    if here.ca_missing:
        return Result("failed", f"no such file: {', '.join(here.ca_missing)}", "correct the setting, or take it back")
    if here.ca_bundle is None:
        return Result("ok", "none is named: builds use the certificates of Debian and pip")
    try:
        expired, count = _expired(here.ca_bundle)
    except (ssl.SSLError, ValueError) as error:
        advice = "name a file of certificates in PEM form (-----BEGIN CERTIFICATE-----)"
        return Result("failed", f"{here.ca_origin}: {_one_line(error)}", advice)
    found = f"{here.ca_origin}: {count} certificates"
    if not expired:
        return Result("ok", found)
    told = f"{found}, of which {len(expired)} have expired: {', '.join(expired[:3])}"
    if len(expired) < count:
        return Result("remark", told)
    return Result("failed", told, "get a newer bundle from whoever runs the network")


def _expired(bundle: bytes) -> tuple[list[str], int]:
    """Return the names of the CA certificates that have expired, and the number of all. Raises `ssl.SSLError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=bundle.decode("ascii", errors="ignore"))
    certificates = context.get_ca_certs()
    if not certificates:
        raise ValueError("no certificate of a CA is in it")
    now = time.time()
    old = [each for each in certificates if ssl.cert_time_to_seconds(str(each["notAfter"])) < now]
    return [_name(each["subject"]) for each in old], len(certificates)


def _name(subject: object) -> str:
    """Return the most telling part of a certificate's subject, which `ssl` gives as tuples of tuples of pairs."""
    assert isinstance(subject, tuple)
    parts = dict(pair for group in subject for pair in group)
    return str(parts.get("commonName") or parts.get("organizationName") or subject)


def settings(site: Site) -> Result:
    """Which settings of this machine builds cannot use."""
    here = site.machine()
    if here.left_out:
        return Result("remark", f"not used in builds: {'; '.join(here.left_out)}")
    return Result("ok", "builds use this machine's apt sources, pip configuration and proxies")


def gpus(site: Site) -> Result:
    """Whether containers get GPUs. Images of CUDA run without."""
    if docker_client.has_gpus(site.connect()):
        return Result("ok", "the engine has NVIDIA's runtime")
    return Result("remark", "the engine has no NVIDIA runtime: containers get no GPU, and images of CUDA use the CPU")


def networks(site: Site) -> Result:
    """Whether the engine can make a bridge network, as each job gets one; it is removed at once."""
    client = site.connect()
    label = containers.unique_name("shoal-doctor")
    try:
        client.networks.create(label, driver="bridge", labels={containers.JOB_LABEL: label})
    except docker.errors.APIError as error:
        advice = "docker network prune removes those that nothing uses; the engine's log says more"
        return Result("failed", f"the engine makes no bridge network: {error.explanation or error}", advice)
    finally:
        for network in client.networks.list(filters={"label": f"{containers.JOB_LABEL}={label}"}):
            network.remove()
    return Result("ok", "the engine can make a bridge network for the hosts of a job")


def loopback(site: Site) -> Result:
    """Whether ranks can meet on this machine without an engine: a port of 127.0.0.1 can be listened on and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=ENGINE_SECONDS).close()
    except OSError as error:
        advice = "bring the interface lo up, and look at the firewall (make train ENGINE=none needs it)"
        return Result("failed", f"no port of 127.0.0.1 can be listened on and reached: {error}", advice)
    return Result("ok", "a port of 127.0.0.1 can be listened on and reached")


def base_image(site: Site) -> Result:
    """Whether the bases of all images are on the engine, can be pulled, or can be bootstrapped here."""
    results = [_base_of(site, system) for system in site.matrix.systems()]
    state: State = "failed" if any(result.state == "failed" for result in results) else "ok"
    told = [result for result in results if result.state == state]
    found, advice = ("; ".join(dict.fromkeys(filter(None, words))) for words in zip(*(each[1:] for each in told)))
    return Result(state, found, advice)


def _base_of(site: Site, system: spec.System) -> Result:
    client, upstream = site.connect(), system.upstream
    if found := bases.find_base(client, system):
        return Result("ok", f"{found.reference} is on the engine")
    kept = bases.archive_path(site.project.cache, system)
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
        client.images.get_registry_data(upstream)
        return Result("ok", f"{upstream} can be pulled")
    if kept.is_file():
        return Result("ok", f"{upstream} cannot be pulled; one that was bootstrapped before is kept in {kept}")
    found_not, _, advice = bases.explain_no_bootstrap(system).partition(". Fix: ")
    if found_not:
        return Result("failed", found_not, advice or f"give the engine a {upstream} (docker load)")
    return Result("ok", f"{upstream} cannot be pulled; the first build bootstraps one from the Debian mirror")


CHECKS: Mapping[str, Check] = {
    "checkout": checkout,
    "engine": engine_answers,
    "builder": builder_kind,
    "disk": disk,
    "memory": memory,
    "package index": package_index,
    "debian mirror": debian_mirror,
    "ca bundle": ca_bundle,
    "settings": settings,
    "base image": base_image,
    "networks": networks,
    "loopback": loopback,
    "gpus": gpus,
}


def examine(site: Site, checks: Mapping[str, Check] = CHECKS, limit: float = LIMIT) -> list[Finding]:
    """Run the checks, all at once and for at most `limit` seconds; return what they found, in their order."""
    ended: SimpleQueue[Finding] = SimpleQueue()
    threads = [
        threading.Thread(target=lambda name=name, check=check: ended.put(_ask(name, check, site)), daemon=True)
        for name, check in checks.items()
    ]
    found: dict[str, Finding] = {}
    deadline = time.monotonic() + limit
    try:
        for thread in threads:
            thread.start()
        while len(found) < len(checks):
            finding = ended.get(timeout=max(0.0, deadline - time.monotonic()))
            found[finding.name] = finding
    except Empty:
        pass
    except BaseException:  # interrupted: what a check has made, it still removes
        _wait(threads)
        raise
    late = f"not done after {limit:g} s"
    return [
        found.get(name) or Finding(name, "failed", late, "try again; if it stays so, restart it") for name in checks
    ]


def _wait(threads: Iterable[threading.Thread]) -> None:
    end = time.monotonic() + PATIENCE
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, end - time.monotonic()))


def _ask(name: str, check: Check, site: Site) -> Finding:
    try:
        return Finding(name, *check(site))
    except DockerError:  # the check of the engine tells more, and that of the checkout
        return Finding(name, "remark", "not checked: it needs an engine")
    except ShoalError:
        return Finding(name, "remark", "not checked: it needs a checkout")
    except Exception as error:
        advice = "if the engine refused, look at its log; else this is a defect of the check"
        return Finding(name, "failed", f"{type(error).__name__}: {_one_line(error)}", advice)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _start_engine(site: Site) -> str:
    script = site.project.root / "scripts" / "engine.sh"
    result = subprocess.run([script], stdout=sys.stderr, check=False)  # not bounded: apt-get must not be cut off
    return "started one by scripts/engine.sh" if result.returncode == 0 else "scripts/engine.sh could not start one"


FIXES: Mapping[str, Callable[[Site], str]] = {"engine": _start_engine}
"""What can be done about a failed check without asking: nothing that takes anything away."""


def mend(site: Site, findings: Iterable[Finding]) -> bool:
    """Do what can be done about the checks that failed, say on standard error what was done; return whether it was."""
    failed = [finding.name for finding in findings if finding.state == "failed" and finding.name in FIXES]
    for name in failed:
        try:
            done = FIXES[name](site)
        except (ShoalError, OSError) as error:
            done = f"nothing done: {_one_line(error)}"
        print(f"shoal: --fix: {name}: {done}", file=sys.stderr)
    return bool(failed)


def told(findings: Iterable[Finding]) -> str:
    """Return a line for each finding, and where it has advice a second one."""
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]} {finding.name:<{max(map(len, CHECKS))}}  {finding.found}")
        lines += [f"    what to do: {finding.advice}"] * bool(finding.advice)
    return "\n".join(lines)


def judge(findings: Iterable[Finding]) -> None:
    """Raise `DoctorError` when a check has failed."""
    if failed := [finding.name for finding in findings if finding.state == "failed"]:
        raise DoctorError(f"{len(failed)} of the checks failed: {', '.join(failed)}")
