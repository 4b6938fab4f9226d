"""The pod of a job on Kubernetes: one host of the job, with its /opt/ml.

It has no probes. A script may compute for hours without an answer to anybody, so a liveness probe would end good jobs.
A readiness probe would keep the hosts from finding each other, and no traffic is routed to them. `train` itself ends
a job that does not start, and notices lost hosts.
"""

from __future__ import annotations

from typing import Any

from shoal.jobs import gpus, job, run
from shoal.jobs.hosts.kubernetes.request import KubernetesRequest, Storage, WorkloadKind
from shoal.jobs.variables import SECRETS

CONFIG = "/opt/ml/input/config"
ARCHIVE = "sourcedir.tar.gz"
SECRET_DIRECTORY, SECRET_KEY = "/run/shoal", "job-secret"
STOP_SECONDS = 120
"""More than the 110 s that `train` gives a script after SIGTERM."""
START_SECONDS = 1800
"""How long the hosts wait for each other: nodes pull images of several GiB, at different times."""
GPU = "nvidia.com/gpu"
_INDEX = {WorkloadKind.mpijob: "HOST_INDEX"}
"""The variable with the index of a host. Jobs, and so JobSets, set JOB_COMPLETION_INDEX."""
_REPLICA_INDEX = "metadata.labels['training.kubeflow.org/replica-index']"
_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
"""How often the JobSet controller has made the pods again. Jobs and MPIJobs tell their pods no such number."""

Object = dict[str, Any]
"""An object of Kubernetes, or a part of one."""


def name_object(request: KubernetesRequest, part: str) -> str:
    """Returns the name of an object that belongs to the job. The MPI Operator makes NAME-config and NAME-ssh."""
    return f"{request.name}-{part}"


def job_labels(request: KubernetesRequest) -> dict[str, str]:
    """Returns the labels by which the pods of the job know each other."""
    return {"app.kubernetes.io/name": "shoal-job", "app.kubernetes.io/instance": request.name}


def has_secret(request: KubernetesRequest) -> bool:
    """Returns whether the job gets a secret. Not if the image has a file with it, which the environment names."""
    return job.SECRET_FILE not in request.environment


def build_pod_template(request: KubernetesRequest, container: str = "train") -> Object:
    """Returns the template of the pods; `container`: the name of the container."""
    mounts = _list_mounts(request)
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "enableServiceLinks": False,  # a variable for each service of the namespace could have the name of a setting
        "automountServiceAccountToken": False,
        "securityContext": _build_pod_security(request),
        "containers": [
            {
                "name": container,
                "image": request.image,
                "args": [_escape(word) for word in request.train_command],
                "env": _build_environment(request),
                **_build_resources(request),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [mount for _, mount in mounts],
            }
        ],
        "volumes": list({volume["name"]: volume for volume, _ in mounts}.values()),
    }
    if request.gpus:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if request.service_account:
        spec["serviceAccountName"] = request.service_account
    return {"metadata": {"labels": job_labels(request)}, "spec": spec}


def _build_pod_security(request: KubernetesRequest) -> Object:
    """Returns the settings of the Pod Security Standard "restricted"; as root, as far as possible."""
    ids = {"runAsUser": request.user, "runAsGroup": request.user, "fsGroup": request.user}
    return {
        **({"runAsNonRoot": True} if request.user else {}),
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",  # otherwise a start changes the group of each file of a large volume
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _build_environment(request: KubernetesRequest) -> list[Object]:
    """Returns the variables of the container. `--env` overrides them; a secret in it is left out."""
    values: dict[str, str] = {"TRAINING_JOB_NAME": request.name, "SHOAL_HOSTS_TIMEOUT": str(START_SECONDS)}
    values |= job.limit_variables(request.max_restarts)
    if request.entry_point:
        values["SAGEMAKER_PROGRAM"] = request.entry_point
    if request.source is not None:
        is_address = isinstance(request.source, str)
        values["SAGEMAKER_SUBMIT_DIRECTORY"] = str(request.source) if is_address else f"{CONFIG}/{ARCHIVE}"
    if not request.gpus:  # a node's runtime may give all GPUs to a container that names none
        values |= gpus.gpu_environment(())
    if request.kind in (WorkloadKind.job, WorkloadKind.jobset):
        values["SHOAL_HOSTS"] = list_hosts(request)
    if has_secret(request):
        values[job.SECRET_FILE] = f"{SECRET_DIRECTORY}/{SECRET_KEY}"
    values |= {f"{each.name}_FILE": f"{SECRETS}/{each.name}" for each in request.secrets}
    values |= {key: value for key, value in request.environment.items() if key not in {job.SECRET, *request.taken}}
    variables: list[Object] = [{"name": key, "value": _escape(value)} for key, value in values.items()]
    variables += [_refer(key, name_object(request, "environment"), key) for key in list_taken(request)]
    variables += [_refer(each.name, each.secret, each.key) for each in request.secrets if each.is_variable]
    fields = _find_fields(request).items()
    return variables + [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields]


def list_taken(request: KubernetesRequest) -> list[str]:
    """Returns the variables of the user with values that are in a Secret of the file."""
    return sorted(request.taken.keys() - {job.SECRET})


def _refer(variable: str, secret: str, key: str) -> Object:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _escape(text: str) -> str:
    """Returns the form of a text in which it stays as it is: Kubernetes replaces $(NAME), and $$ stands for $."""
    return text.replace("$", "$$")


def _find_fields(request: KubernetesRequest) -> dict[str, str]:
    """Returns the variables with the value of a field of the pod, which only its controller knows."""
    fields = {}
    if request.results and (index := _INDEX.get(request.kind)):
        fields[index] = _REPLICA_INDEX
    if request.kind in (WorkloadKind.jobset, WorkloadKind.trainjob) and run.RESTART not in request.environment:
        fields[run.RESTART] = _ATTEMPT
    return fields


def list_hosts(request: KubernetesRequest) -> str:
    """Returns the hosts of an Indexed Job or JobSet, as `train` reads them: train-[0-3].train."""
    numbers = f"[0-{request.hosts - 1}]" if request.hosts > 1 else "0"
    return f"{request.pod_prefix}-{numbers}.{request.name}"


def _build_resources(request: KubernetesRequest) -> Object:
    """Returns the limits of the container, to which Kubernetes also sets its requests; none if none are set."""
    limits: dict[str, str] = {}
    if request.cpus:
        limits["cpu"] = request.cpus
    if request.memory:
        limits["memory"] = format_quantity(job.check_size("--memory", request.memory))
    if request.gpus:
        limits[GPU] = str(request.gpus)
    return {"resources": {"limits": limits}} if limits else {}


def format_quantity(size: int) -> str:
    """Returns a size in bytes for Kubernetes: 2Gi or 512Mi if it is a multiple of these units, otherwise 1000."""
    return next(
        (f"{size // unit}{name}" for name, unit in (("Gi", 2**30), ("Mi", 2**20)) if size % unit == 0), str(size)
    )


def _list_mounts(request: KubernetesRequest) -> list[tuple[Object, Object]]:
    shm = {"medium": "Memory", "sizeLimit": format_quantity(job.check_size("--shm-size", request.shm_size))}
    mounts: list[tuple[Object, Object]] = [
        _mount({"name": "shm", "emptyDir": shm}, "/dev/shm"),
        _mount({"name": "config", "configMap": {"name": name_object(request, "input")}}, CONFIG, readOnly=True),
    ]
    if has_secret(request):
        secret = {"secretName": name_object(request, "secret"), "defaultMode": 0o400}
        mounts.append(_mount({"name": "secret", "secret": secret}, SECRET_DIRECTORY, readOnly=True))
    for number, each in enumerate(request.secrets):
        items = [{"key": each.key, "path": each.name}]
        secret = {"secretName": each.secret, "defaultMode": 0o400, "items": items}
        # Only the file: the platform may mount others in this directory.
        mount = _mount({"name": f"secret-{number}", "secret": secret}, f"{SECRETS}/{each.name}", subPath=each.name)
        mount[1]["readOnly"] = True
        mounts.append(mount)
    for number, (channel, storage) in enumerate(request.channels.items()):
        volume, inside = _build_volume(f"channel-{number}", storage)
        path = {"subPath": inside} if inside else {}
        mounts.append(_mount(volume, f"/opt/ml/input/data/{channel}", readOnly=True, **path))
    if request.results:
        mounts += _mount_results(request, request.results)
    return mounts


def _mount_results(request: KubernetesRequest, storage: Storage) -> list[tuple[Object, Object]]:
    """All hosts share the checkpoints, as on SageMaker. Each has its own model and output."""
    volume, inside = _build_volume("results", storage)
    top = "/".join(filter(None, (inside.replace("$", "$$"), request.name)))
    host = f"{top}/host-$({_INDEX.get(request.kind, 'JOB_COMPLETION_INDEX')})"
    places = {"model": f"{host}/model", "output": f"{host}/output", "checkpoints": f"{top}/checkpoints"}
    return [_mount(volume, f"/opt/ml/{part}", subPathExpr=path) for part, path in places.items()]


def _build_volume(name: str, storage: Storage) -> tuple[Object, str]:
    if storage.claim:
        return {"name": name, "persistentVolumeClaim": {"claimName": storage.claim}}, storage.path
    return {"name": name, "hostPath": {"path": storage.path, "type": "Directory"}}, ""


def _mount(volume: Object, path: str, **options: object) -> tuple[Object, Object]:
    return volume, {"name": volume["name"], "mountPath": path, **options}
