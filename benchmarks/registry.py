"""From a registry to the first step of training, at 200 Mbit/s: `make bench-registry`. As root, it takes minutes.

Debian's docker-registry and a client are in a network namespace of their own. Its only interface has that rate. The
client is Debian's containerd with AWS's soci-snapshotter, from empty directories. It unpacks a layer while it pulls the
next, as Docker does. Docker has the images here already. The first step is one of SGD on scikit-learn's digits.

- `registry-first-step-…`: from the start of the pull to the first step. The rival is the image as Docker pushes it.
- `registry-bytes-…`: the bytes that the namespace's interface sent until then.
- `registry-size-…`: compressed layers. The rival is the same.
- `registry-release-…`: layers that a registry lacks after a line of our packages has changed.

The lines `profile` say where the time goes: on the wire, in the pull, after it, and in each program. The decompression
of all layers is also measured by itself. They also have the bytes of files that the step reads, and maps.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from backports import zstd
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hosts import missing, shaped_host
from images_builders import Shoal, change_toolkit, kept
from report import Figure, finish, make_parser, print_machine

from shoal import docker_client
from shoal.builds.layers import make_blob
from shoal.builds.registry import Registry
from shoal.builds.soci import INDEX, MANIFEST
from shoal.matrix import project
from shoal.matrix.spec import load

IMAGES = ("pytorch-training:2.13.0-cpu-py311-debian12", "pytorch-training:2.0.1-gpu-py311-cu117-debian12")
PARTS = ("start", "release")
RATE, BYTES_PER_SECOND = "200mbit", 200e6 / 8
PROGRAMS = ("registry", "containerd", "snapshotter")
FORMS = {"gzip": (), "zstd": ("--compression", "zstd"), "lazy": ("--lazy",)}
CEILINGS = {"zstd": 0.5, "lazy": 0.2}
MB = 1e6
STEP = """
import torch
from sklearn.datasets import load_digits
data, labels = map(torch.as_tensor, load_digits(return_X_y=True))
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.nn.functional.cross_entropy(model(data.float()), labels).backward()
optimizer.step()
print("first step", flush=True)
read, mapped, is_file = int(open("/proc/self/io").read().split()[1]), 0, False
for line in open("/proc/self/smaps"):
    if not line[:1].isupper():
        is_file = " /" in line
    elif line.startswith("Rss:") and is_file:
        mapped += 1024 * int(line.split()[1])
print(read, mapped, flush=True)
"""
CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {data}}}}}
http: {{addr: "{address}"{tls}}}
"""
CONTAINERD = """\
version = 2
root = "{0}/root"
state = "{0}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{0}/containerd.sock"
[proxy_plugins.soci]
  type = "snapshot"
  address = "{0}/soci.sock"
"""
SNAPSHOTTER = """\
no_prometheus = true
[content_store]
  type = "soci"
"""


def main(arguments: Sequence[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__, 3)
    parser.add_argument("--image", action="append", help=f"repeatable (default: {', '.join(IMAGES)})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS], help="only these (default: all)")
    parser.add_argument(
        "--soci", type=Path, help="a directory with soci and soci-snapshotter-grpc, as Debian 13's package has them"
    )
    parser.add_argument("--inside", type=json.loads, help="for this program itself, in the namespace")
    options = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(measure_start(**options.inside)))
        return 0
    os.environ["PATH"] += f"{os.pathsep}{options.soci or ''}"
    if problem := missing("tc", "nsenter", "docker-registry", "containerd", "ctr", "soci", "soci-snapshotter-grpc"):
        sys.exit(f"registry.py needs {problem}. soci is in Debian 13: --soci. Nothing was measured.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was made is removed then, too
    print_machine()
    figures = []
    with tempfile.TemporaryDirectory(prefix="shoal-registry-", dir="/var/tmp") as scratch:
        for image in (options.image or IMAGES) if "start" in options.parts else ():
            figures += measure_image(image, options.forms, Path(scratch), options.rounds)
        if "release" in options.parts:
            figures += measure_release((options.image or IMAGES)[0], Path(scratch))
    return finish(figures)


def measure_image(image: str, forms: Sequence[str], scratch: Path, rounds: int) -> list[Figure]:
    """Push an image in some forms, pull it in the namespace, and return the figures: none without gzip, the rival."""
    sizes: dict[str, int] = {}
    found: dict[str, list[dict[str, float]]] = {}
    for form in forms:
        with pushed(image, scratch, FORMS[form]) as (layers, task):
            sizes[form] = sum(layer["size"] for layer in layers)
            shown = ", ".join(f"{layer['size'] / MB:.1f}" for layer in layers)
            print(f"{image}, {form}: {shown} MB, by layer", flush=True)
            found[form] = [start_in_namespace(task, scratch) for _ in range(rounds)]
            print_profile(form, found[form], [decompress(layer, Path(task["data"])) for layer in layers])
    name = "-".join(image.partition(":")[2].split("-")[:2])
    figures = []
    for form, ceiling in CEILINGS.items():
        if not {form, "gzip"} <= found.keys():
            continue
        ours, rival = ([each["seconds"] for each in found[which]] for which in (form, "gzip"))
        times = (median(ours), "s", None, median(rival), "gzip", ceiling, ours, rival)
        sent, all_sent = (median(each["bytes"] for each in found[which]) / MB for which in (form, "gzip"))
        most = 0.85 if form == "zstd" else 1.02
        figures += [
            Figure(f"registry-first-step-{form}-{name}", *times),
            Figure(f"registry-bytes-{form}-{name}", sent, "MB", None, all_sent, "gzip"),
            Figure(f"registry-size-{form}-{name}", sizes[form] / MB, "MB", None, sizes["gzip"] / MB, "gzip", most),
        ]
    return figures


def print_profile(form: str, rounds: Sequence[dict[str, float]], decompressing: Sequence[float]) -> None:
    """Print where the time goes until the first step. `decompressing`: seconds of the processor for each layer."""
    found = {key: median(each[key] for each in rounds) for key in rounds[0]}
    times = {
        f"s on the wire, {found['bytes'] / MB:.0f} MB": found["bytes"] / BYTES_PER_SECOND,
        "s of the pull": found["pull"],
        "s after it": found["seconds"] - found["pull"],
        "processor s to decompress all layers": sum(decompressing),
        "of it for the largest": max(decompressing),
        **{f"processor s of the {name}": found[name] for name in PROGRAMS},
        "MB of files that the step reads": found["read"] / MB,
        "MB that it maps": found["mapped"] / MB,
    }
    print(f"profile {form}: {', '.join(f'{value:.1f} {name}' for name, value in times.items())}", flush=True)


def decompress(layer: dict[str, Any], data: Path) -> float:
    """Decompress a layer of a registry's directory. Returns the seconds of the processor that this took."""
    algorithm, _, digest = layer["digest"].partition(":")
    blob = data / "docker/registry/v2/blobs" / algorithm / digest[:2] / digest / "data"
    began = time.process_time()
    with (zstd if layer["mediaType"].endswith("zstd") else gzip).open(blob) as file:
        while file.read(1 << 20):
            pass
    return time.process_time() - began


def measure_release(image: str, scratch: Path) -> list[Figure]:
    """Return the bytes of layers that are new after a change of the toolkit, and of the lowest of our packages."""
    here = project.find(Path.cwd())
    tags = [other.tag for other in load(here.buildspec).images]
    figures = []
    changes = {"toolkit": change_toolkit, "all-packages": change_rehearsal}
    with kept(tags), tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        ours = Shoal(here, Path(directory, "ours"))
        ours.build(image)
        with serving(scratch / "released", "127.0.0.1:0") as (port, _):
            known = {layer["digest"] for layer in push(image, port, ())}
            for name, change in changes.items():
                change(ours.project.root)
                ours.build(image)
                new = {
                    layer["digest"]: layer["size"] for layer in push(image, port, ()) if layer["digest"] not in known
                }
                known |= set(new)
                print(f"new layers after a change of {name}: {', '.join(map(str, new.values()))} bytes")
                figures.append(Figure(f"registry-release-{name}", sum(new.values()) / MB, "MB", 2))
    return figures


def change_rehearsal(directory: Path) -> None:
    """Add a line to our package that an image installs first."""
    with (directory / "rehearsal" / "shoal_rehearsal" / "__init__.py").open("a") as file:
        file.write(f"# {time.time_ns()}\n")


@contextlib.contextmanager
def pushed(image: str, scratch: Path, options: Sequence[str]) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
    """Push an image into an empty registry. Yields its layers, and the arguments of `measure_start`."""
    try:
        with serving(scratch / "data", "127.0.0.1:0") as (port, _):
            layers = push(image, port, options)
            soci = push_first_version(image, port) if "--lazy" in options else ""
        task = {"image": image, "snapshot": compute_chain(image), "data": str(scratch / "data"), "soci": soci}
        yield layers, task
    finally:
        shutil.rmtree(scratch / "data")


def push(image: str, port: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """Run `shoal push`. Returns the image's layers."""
    shoal = Path(sys.executable).with_name("shoal")
    subprocess.run((shoal, "push", image, "--to", f"127.0.0.1:{port}", *options), check=True, stdout=sys.stderr)
    manifest = fetch(image, port)
    if "manifests" in manifest:
        manifest = fetch(image, port, manifest["manifests"][0]["digest"])
    return list(manifest["layers"])


def compute_chain(image: str) -> str:
    """Return the name that containerd gives to the snapshot of all layers of an image."""
    first, *others = docker_client.connect().images.get(image).attrs["RootFS"]["Layers"]
    chain = str(first)
    for digest in others:
        chain = f"sha256:{hashlib.sha256(f'{chain} {digest}'.encode()).hexdigest()}"
    return chain


def push_first_version(image: str, port: int) -> str:
    """Push the SOCI index again, as version 1: Debian's snapshotter knows no other. Returns its digest."""
    second = fetch(image, port, fetch(image, port)["manifests"][1]["digest"])
    text = json.dumps(second, separators=(",", ":")).replace("soci.index.v2", "soci.index.v1")
    registry = Registry(f"127.0.0.1:{port}/{image}")
    return registry.send_manifest(make_blob(text.encode(), MANIFEST), by_tag=False)


def fetch(image: str, port: int, reference: str = "") -> dict[str, Any]:
    """Return a manifest from the registry."""
    repository, _, tag = image.partition(":")
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/{repository}/manifests/{reference or tag}")
    docker = "application/vnd.docker.distribution.manifest.v2+json"
    request.add_header("Accept", ", ".join((INDEX, MANIFEST, docker)))
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.load(answer))


@contextlib.contextmanager
def serving(
    data: Path, address: str, tls: tuple[Path, Path] | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Serve a registry's directory. Yields the port and the process."""
    host, _, port = address.rpartition(":")
    if port == "0":
        with socket.create_server((host, 0)) as listener:
            port = str(listener.getsockname()[1])
    words = f", tls: {{certificate: {tls[0]}, key: {tls[1]}}}" if tls else ""
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write(CONFIG.format(data=data, address=f"{host}:{port}", tls=words))
        file.flush()
        with running("docker-registry", "serve", file.name) as process:
            wait_until(lambda: socket.create_connection((host, int(port)), 1).close())
            yield int(port), process


def start_in_namespace(task: dict[str, str], scratch: Path) -> dict[str, float]:
    """Pull and start an image in a shaped namespace, from empty directories. Returns seconds and bytes."""
    with shaped_host(RATE) as host, tempfile.TemporaryDirectory(prefix="client-", dir=scratch) as directory:
        task = task | {"address": host.address, "directory": directory}
        # Not `ip netns exec`: its /sys has no cgroups, which containers need.
        enter = ("nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--mount")
        command = (*enter, sys.executable, __file__, "--inside", json.dumps(task))
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured: dict[str, float] = json.loads(ended.stdout)
        print(f"  {measured}", flush=True)
    return measured


def measure_start(image: str, snapshot: str, address: str, data: str, directory: str, soci: str) -> dict[str, float]:
    """Start a registry and a client, pull and run. This process has mounts and an interface of its own."""
    place = Path(directory)
    certificate = write_certificate(place, address)
    os.environ |= {"SSL_CERT_FILE": str(certificate[0]), "CONTAINERD_ADDRESS": str(place / "containerd.sock")}
    (place / "containerd.toml").write_text(CONTAINERD.format(directory))
    (place / "soci.toml").write_text(SNAPSHOTTER)
    with ExitStack() as undo:
        _, registry = undo.enter_context(serving(Path(data), f"{address}:443", certificate))
        roots = ("--root", place / "soci", "--address", place / "soci.sock", "--config", place / "soci.toml")
        snapshotter = undo.enter_context(running("soci-snapshotter-grpc", *roots, "--log-level", "error"))
        client = ("containerd", "--config", place / "containerd.toml", "--log-level", "error")
        programs = dict(zip(PROGRAMS, (registry, undo.enter_context(running(*client)), snapshotter)))
        wait_until(lambda: do("ctr", "snapshots", "--snapshotter", "soci", "ls"))
        undo.callback(unmount_all, place)
        trust = ("--tlscacert", certificate[0], "--snapshotter", "soci" if soci else "overlayfs")
        index = ("--soci-index-digest", soci) if soci else ()
        began, sent = time.monotonic(), count_bytes()
        do("soci", "--address", place / "containerd.sock", "image", "rpull", *trust, *index, f"{address}/{image}")
        pulled = time.monotonic()
        ended, files = run_first_step(place / "rootfs", trust[-1], snapshot)
        received = count_bytes()
        spent = {name: read_processor_seconds(process.pid) for name, process in programs.items()}
        if soci and not any("fuse" in mount and directory in mount for mount in read_mounts()):
            raise SystemExit("the snapshotter mounted no layer, so that nothing was lazy")
    return {"seconds": ended - began, "pull": pulled - began, "bytes": received - sent, **files, **spent}


def read_processor_seconds(pid: int) -> float:
    """Return the processor time of a program and of its child processes that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_first_step(root: Path, snapshotter: object, snapshot: str) -> tuple[float, dict[str, int]]:
    """Run the step in a container of the image, until it prints its line.

    Returns the time, and the bytes of files that the process has read, and mapped.

    `ctr run IMAGE` would make labels of the image's, and containerd has a limit of 4,096 bytes for those.
    """
    root.mkdir()
    do("ctr", "snapshots", "--snapshotter", snapshotter, "prepare", "first-step", snapshot)
    mount = do("ctr", "snapshots", "--snapshotter", snapshotter, "mounts", root, "first-step")
    subprocess.run(mount, shell=True, check=True)
    run = ("ctr", "run", "--rm", "--env", "PATH=/opt/venv/bin:/usr/bin:/bin", "--rootfs", str(root), "first-step")
    with subprocess.Popen((*run, "python", "-c", STEP), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout
        assert "first step" in job.stdout.readline(), "the container did not come to its first step"
        ended, files = time.monotonic(), job.stdout.readline().split()
    return ended, dict(zip(("read", "mapped"), map(int, files)))


def write_certificate(place: Path, address: str) -> tuple[Path, Path]:
    """Write a certificate for the registry and its key. The snapshotter speaks only HTTPS with other hosts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    encoding = serialization.Encoding.PEM
    format_, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (place / "key.pem").write_bytes(key.private_bytes(encoding, format_, none))
    (place / "certificate.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(encoding))
    return place / "certificate.pem", place / "key.pem"


def count_bytes() -> int:
    """Return the bytes that this namespace's interface has sent."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def unmount_all(place: Path) -> None:
    """Unmount what containerd and the snapshotter left, so that their directory can be removed."""
    mounts = [mount.split()[1] for mount in read_mounts()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{place}/")]):
        subprocess.run(("umount", "-l", mount), check=False)


def read_mounts() -> list[str]:
    """Return the lines of /proc/mounts."""
    return Path("/proc/mounts").read_text().splitlines()


def do(*command: object) -> str:
    """Run a command and return its output."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a service meanwhile, and yield it. Its output goes to standard error."""
    with subprocess.Popen([str(word) for word in command], stdout=sys.stderr) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait_until(check: Any) -> None:
    """Wait until a check raises nothing, for at most 20 seconds."""
    deadline = time.monotonic() + 20
    while True:
        try:
            check()
        except (OSError, subprocess.CalledProcessError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
