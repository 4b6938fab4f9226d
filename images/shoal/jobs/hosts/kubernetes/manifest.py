"""The file for `kubectl create`: the objects of a job as YAML, with the packed source code in one of them."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from shoal.docker_client import archive
from shoal.errors import UsageError
from shoal.jobs import job, source_files
from shoal.jobs.hosts.kubernetes.pod import ARCHIVE, SECRET_KEY, Object, has_secret, job_labels, list_taken, name_object
from shoal.jobs.hosts.kubernetes.request import KubernetesRequest, parse_network
from shoal.jobs.hosts.kubernetes.workload import build_metadata, build_workload
from shoal.jobs.source_files import Selection

MAX_CONFIG_MAP = 2**20
"""The limit of Kubernetes for the data of one ConfigMap, in bytes."""
_MAX_SOURCE = 64 * 2**20
"""The limit for files that are packed at all, in bytes: larger ones are data, and would not fit."""
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*")
_NOT_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})
# A rule of `jobs.source_files` knows this line, as no job's code has the manifest of an earlier one.
_HEAD = """\
# Job {name}, written by `shoal deploy kubernetes`. {warning}
# Use `kubectl create`: `kubectl apply` would copy the objects into an annotation, which is limited to 256 KiB.
"""
_WARNING = "It contains secrets of the job: do not commit it, and write a new one for each job."


def build_objects(request: KubernetesRequest) -> list[Object]:
    """Returns all objects of a job, in the order in which to create them: pods start last, as a policy may be refused.

    They contain a secret unless the environment names a file with it: SHOAL_JOB_SECRET there, otherwise a new one.
    Variables of the user with values that are not on the command line are in another Secret.

    Args:
        request: The job, which the caller has checked.

    Raises:
        UsageError: If the source directory cannot be read, or is too large.
    """
    objects = [_build_network_policy(request), _build_config_map(request)]
    secret = job.make_secret(request.environment)
    if secret is not None:
        objects.append(_build_object(request, "Secret", "secret", stringData={SECRET_KEY: secret}, immutable=True))
    if names := list_taken(request):
        data = {name: request.environment[name] for name in names}
        objects.append(_build_object(request, "Secret", "environment", stringData=data, immutable=True))
    return objects + build_workload(request)


def _build_object(request: KubernetesRequest, kind: str, part: str, **content: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": build_metadata(request, name_object(request, part)),
        **content,
    }


def _build_config_map(request: KubernetesRequest) -> Object:
    files = {
        "hyperparameters.json": request.encode_hyperparameters(request.name),
        "inputdataconfig.json": job.describe_channels(request.channels),
    }
    data = {name: LiteralScalarString(json.dumps(content, indent=2) + "\n") for name, content in files.items()}
    size = sum(map(len, data.values()))
    binary: dict[str, str] = {}
    if isinstance(request.source, Path):
        packed = pack_source(request.selection)
        binary = {ARCHIVE: base64.b64encode(packed).decode()}
        size += len(packed)
    _check_config_map(request.source, size, MAX_CONFIG_MAP)
    extra = {"binaryData": binary} if binary else {}
    return _build_object(request, "ConfigMap", "input", data=data, **extra, immutable=True)


def _check_config_map(source: Path | str | None, size: int, limit: int) -> None:
    if size > limit:
        raise UsageError(
            f"--source {source}: {size / 2**20:.1f} MiB do not fit into a ConfigMap, which holds 1 MiB after packing."
            " Fix: put the code into an image (docs/recipes.md) and leave out --source, or upload it and use --source"
            " s3://..."
        )


def pack_source(selection: Selection) -> bytes:
    """Returns a source as .tar.gz: the same bytes for the same files.

    Raises:
        UsageError: If a file cannot be read, or they are too large.
    """
    packed = io.BytesIO()
    size = 0
    with tarfile.open(fileobj=packed, mode="w") as out:
        for each in source_files.read_source(selection):
            if not each.is_packed:
                continue
            size += each.size
            _check_config_map(selection.directory, size, _MAX_SOURCE)
            if each.link:
                entry = tarfile.TarInfo(each.name)
                entry.type, entry.linkname = tarfile.SYMTYPE, each.link
                out.addfile(entry)
            else:
                with os.fdopen(os.dup(each.descriptor), "rb") as file:
                    archive.add_file(out, each.name, file, mode=0o755 if each.mode & stat.S_IXUSR else 0o644)
    return gzip.compress(packed.getvalue(), mtime=0)


def _build_network_policy(request: KubernetesRequest) -> Object:
    """Returns the policy by which the pods of the job reach each other, DNS and `request.egress`, and nothing else."""
    peers = {"podSelector": {"matchLabels": job_labels(request)}}
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": build_metadata(request, name_object(request, "peers")),
        "spec": {
            **peers,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [peers]}],
            # The addresses of DNS differ between clusters, for example with a cache on each node.
            "egress": [
                {"to": [peers]},
                {"ports": dns},
                *({"to": [{"ipBlock": {"cidr": parse_network(network)}}]} for network in request.egress),
            ],
        },
    }


def format_manifest(request: KubernetesRequest, objects: Sequence[Object]) -> str:
    """Returns the objects as one YAML file, with the same meaning in YAML 1.1 (kubectl) and 1.2.

    It begins with a comment: how to create the job, and a warning if the file has the secret.
    """
    yaml = YAML()
    yaml.width = 2**30  # no line is folded
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    text.write(_HEAD.format(name=request.name, warning=_WARNING if has_secret(request) or request.taken else ""))
    for each in objects:
        text.write("---\n")
        yaml.dump(_quote(each), text)
    return text.getvalue()


def _quote(value: Any) -> Any:
    """Returns a copy in which text is in quotes if YAML could read it as something else."""
    if isinstance(value, dict):
        return {_quote(key): _quote(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_quote(each) for each in value]
    is_block = isinstance(value, LiteralScalarString) or not isinstance(value, str)
    if is_block or (_PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT):
        return value
    return DoubleQuotedScalarString(value)


def write_manifest(path: Path, text: str) -> None:
    """Writes the file, which only its owner can read. An existing file is replaced."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
