"""The object that starts the pods of a job: an Indexed Job, a JobSet, a TrainJob or an MPIJob.

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

from shoal.jobs import run
from shoal.jobs.hosts.kubernetes.pod import Object, build_pod_template, job_labels, name_object
from shoal.jobs.hosts.kubernetes.request import KubernetesRequest, WorkloadKind

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
