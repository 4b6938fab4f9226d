"""The file for `kubectl create`: the objects of a job as YAML, with the packed source code in one of them.

One object starts the pods of a job: an Indexed Job, a JobSet, a TrainJob or an MPIJob.

`train` ends on all hosts with the same exit code, or with 138 if another host is lost. So pods fail together, and a new
start needs all of them. The codes decide what happens next:

| code | meaning | then |
|---|---|---|
| 2 | the configuration is wrong | the job fails: another start would not help |
| 143 | SIGTERM stopped the job, as a drained node sends it to a pod | all pods start again, until `max_seconds` |
| other | the script failed, or a host was lost | the job starts again, `retries` times |

With `max_restarts`, `train` starts the script again itself, and a lost pod (137) is made again under its name. If the
first one is lost, the others end with 138, and all are made again. Without `retries`, other codes then end the job.
"""

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
from shoal.jobs import job, run, source_files
from shoal.jobs.hosts.kubernetes.pod import (
    ARCHIVE,
    SECRET_KEY,
    Object,
    build_pod_template,
    has_secret,
    job_labels,
    list_taken,
    name_object,
)
from shoal.jobs.hosts.kubernetes.request import KubernetesRequest, WorkloadKind, parse_network
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
        objects.append(_build_core_object(request, "Secret", "secret", stringData={SECRET_KEY: secret}, immutable=True))
    if names := list_taken(request):
        data = {name: request.environment[name] for name in names}
        objects.append(_build_core_object(request, "Secret", "environment", stringData=data, immutable=True))
    return objects + build_workload(request)


def _build_core_object(request: KubernetesRequest, kind: str, part: str, **content: Any) -> Object:
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
    return _build_core_object(request, "ConfigMap", "input", data=data, **extra, immutable=True)


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


_LOST = (137, run.HOST_LOST)
"""Exit codes of a pod that was killed, and of `train` in the pods that have lost it."""
_TRAINER = "trainer.kubeflow.org"
_NODE = "node"
"""Kubeflow Trainer demands this name of the replicated job, and of its container."""
_FINAL_REASONS = ("PodFailurePolicy", "DeadlineExceeded")
"""The reasons of failures of a Job by the action FailJob of its `podFailurePolicy`, and by its deadline."""


def build_workload(request: KubernetesRequest) -> list[Object]:
    """Returns the object that starts the pods, and before it the objects that it refers to by name."""
    builders = {
        WorkloadKind.job: _build_job,
        WorkloadKind.jobset: _build_job_set,
        WorkloadKind.trainjob: _build_train_job,
        WorkloadKind.mpijob: _build_mpi_job,
    }
    return builders[request.kind](request)


def build_metadata(request: KubernetesRequest, name: str) -> Object:
    """Returns the metadata of an object of the job."""
    namespace = {"namespace": request.namespace} if request.namespace else {}
    return {"name": name, **namespace, "labels": job_labels(request)}


def _build_job(request: KubernetesRequest) -> list[Object]:
    """Returns the headless service by which pods find each other, and the Job."""
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(request, request.name),
        # Pods look for each other before they are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": job_labels(request)},
    }
    spec = _build_job_spec(request, "train", request.retries)
    spec |= _build_deadline(request)
    spec["template"]["spec"]["subdomain"] = request.name
    workload: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": build_metadata(request, request.name),
        "spec": spec,
    }
    return [service, workload]


def _build_deadline(request: KubernetesRequest) -> Object:
    return {"activeDeadlineSeconds": request.max_seconds} if request.max_seconds else {}


def _build_job_spec(request: KubernetesRequest, container: str, retries: int) -> Object:
    """`retries`: how often all its pods may fail, in addition to `max_restarts`."""

    def on_codes(operator: str, *codes: int) -> Object:
        return {"onExitCodes": {"containerName": container, "operator": operator, "values": list(codes)}}

    stopped = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", **on_codes("In", run.STOPPED)},
    ]
    # With `max_restarts` alone, only lost pods are made again: `train` decided not to start the script again.
    only_lost = request.max_restarts and not request.retries
    final = on_codes("NotIn", *_LOST) if only_lost else on_codes("In", run.WRONG_CONFIGURATION)
    return {
        "completionMode": "Indexed",
        "completions": request.hosts,
        "parallelism": request.hosts,
        "backoffLimit": request.hosts * (retries + request.max_restarts),
        "podFailurePolicy": {"rules": [*stopped, {"action": "FailJob", **final}]},
        "template": build_pod_template(request, container),
    }


def _build_job_set_spec(request: KubernetesRequest, name: str, container: str, labels: Object) -> Object:
    """Returns the specification of a JobSet with one Job. A Job that fails is made again, with all its pods."""
    return {
        "failurePolicy": {
            "maxRestarts": request.retries,
            "rules": [
                {"name": "final", "action": "FailJobSet", "onJobFailureReasons": list(_FINAL_REASONS)},
            ],
        },
        "replicatedJobs": [
            {
                "name": name,
                "replicas": 1,
                "template": {**labels, "spec": _build_job_spec(request, container, retries=0)},
            }
        ],
    }


def _build_job_set(request: KubernetesRequest) -> list[Object]:
    """Returns the JobSet. Its controller makes the headless service. A JobSet has no deadline, but its Job has."""
    spec = _build_job_set_spec(request, "host", "train", {})
    spec["replicatedJobs"][0]["template"]["spec"] |= _build_deadline(request)
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": build_metadata(request, request.name),
            "spec": spec,
        }
    ]


def _build_train_job(request: KubernetesRequest) -> list[Object]:
    """With `torch` as policy, Kubeflow Trainer sets the variables PET_*, in which `train` finds the hosts."""
    step = {"metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}}
    runtime: Object = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": build_metadata(request, name_object(request, "runtime")),
        "spec": {
            "mlPolicy": {"numNodes": request.hosts, "torch": {}},
            "template": {"spec": _build_job_set_spec(request, _NODE, _NODE, step)},
        },
    }
    reference = {"apiGroup": _TRAINER, "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    workload: Object = {
        "apiVersion": runtime["apiVersion"],
        "kind": "TrainJob",
        "metadata": build_metadata(request, request.name),
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": request.hosts}, **_build_deadline(request)},
    }
    return [runtime, workload]


def _build_mpi_job(request: KubernetesRequest) -> list[Object]:
    """Returns the MPIJob. The launcher and all workers run `train`, and no sshd: `train` starts the ranks itself."""
    launcher, worker = build_pod_template(request), build_pod_template(request)
    for template in (launcher, worker):
        del template["spec"]["restartPolicy"]  # the operator sets it, and warns about one in the template
    # The operator mounts its hostfile, in which `train` finds the hosts, in the launcher only. Workers get it here.
    hostfile = {"name": "hostfile", "configMap": {"name": name_object(request, "config")}}
    worker["spec"]["volumes"].append(hostfile)
    worker["spec"]["containers"][0]["volumeMounts"].append({"name": "hostfile", "mountPath": "/etc/mpi"})
    # Only failed launchers count as retries. Workers, which fail with them, start again in their place.
    starts = request.retries + request.max_restarts
    policy = {"restartPolicy": "OnFailure" if starts else "Never"}
    replicas: Object = {"Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher}}
    if request.hosts > 1:
        replicas["Worker"] = {"replicas": request.hosts - 1, **policy, "template": worker}
    spec: Object = {
        "slotsPerWorker": request.procs_per_host or request.gpus or 1,
        "runLauncherAsWorker": True,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": starts, **_build_deadline(request)},
        "mpiReplicaSpecs": replicas,
    }
    return [
        {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": build_metadata(request, request.name),
            "spec": spec,
        }
    ]
