"""Starts the pods of a rendered manifest as containers, as Kubernetes and the controllers would.

All that the manifest says is read from it: variables, volumes, users, limits. This module adds only what controllers
add, from their documentation: the pods' names, JOB_COMPLETION_INDEX, the PET_* variables of Kubeflow Trainer, and the
variables and the hostfile of the MPI Operator.
"""

from __future__ import annotations

import base64
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from docker.types import Mount
from testcontainers.core.network import Network

from .containers import Host, StartHost

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod as its controller makes it."""

    hostname: str
    subdomain: str
    spec: Object
    index: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the controller adds to the container."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """The ConfigMaps that the controller mounts, by path."""


def list_pods(objects: Sequence[Object]) -> list[Pod]:
    """Return the pods that the controller of the last object makes."""
    workload = objects[-1]
    name, spec = workload["metadata"]["name"], workload["spec"]
    if workload["kind"] == "Job":
        return _list_indexed(name, spec, spec["template"]["spec"]["subdomain"], spec["completions"])
    if workload["kind"] == "JobSet":
        return _list_job_set(name, spec, spec["replicatedJobs"][0]["template"]["spec"]["completions"])
    if workload["kind"] == "MPIJob":
        return _list_mpi(name, spec["mpiReplicaSpecs"])
    (runtime,) = (each for each in objects if each["metadata"]["name"] == spec["runtimeRef"]["name"])
    count = spec["trainer"]["numNodes"]
    pods = _list_job_set(name, runtime["spec"]["template"]["spec"], count)
    cpus = math.ceil(count_cpus(pods[0].spec["containers"][0]))
    pet = {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": str(cpus), "PET_MASTER_PORT": "29500"}
    pet["PET_MASTER_ADDR"] = f"{name}-node-0-0.{name}"
    return [replace(pod, variables={**pod.variables, **pet, "PET_NODE_RANK": str(pod.index)}) for pod in pods]


def count_cpus(container: Object) -> float:
    """Return the limit of CPUs, such as 1.5 for 1500m; 1 without a limit, as Kubeflow Trainer assumes it."""
    text = str(container["resources"]["limits"].get("cpu", "1"))
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def _list_indexed(prefix: str, job: Object, subdomain: str, count: int) -> list[Pod]:
    """Return the pods of an Indexed Job."""
    pod = job["template"]["spec"]
    return [
        Pod(f"{prefix}-{index}", subdomain, pod, index, {"JOB_COMPLETION_INDEX": str(index)}) for index in range(count)
    ]


def _list_job_set(name: str, job_set: Object, count: int) -> list[Pod]:
    (replicated,) = job_set["replicatedJobs"]
    return _list_indexed(f"{name}-{replicated['name']}-0", replicated["template"]["spec"], name, count)


def _list_mpi(name: str, replicas: Object) -> list[Pod]:
    """Return the launcher and the workers of an MPIJob with runLauncherAsWorker and OpenMPI."""
    variables = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "1",
    }
    role = "K_MPI_JOB_ROLE"
    pods = {part: content["template"]["spec"] for part, content in replicas.items()}
    hostfile = {"/etc/mpi": f"{name}-config"}
    launcher = Pod(f"{name}-launcher", name, pods["Launcher"], 0, {role: "launcher", **variables}, hostfile)
    workers = range(replicas["Worker"]["replicas"])
    return [launcher, *(Pod(f"{name}-worker-{i}", name, pods["Worker"], i + 1, {role: "worker"}) for i in workers)]


def make_hostfile(pods: Sequence[Pod], namespace: str) -> str:
    """Return the MPI Operator's hostfile."""
    return "".join(f"{pod.hostname}.{pod.subdomain}.{namespace}.svc slots=1\n" for pod in pods)


def make_sub_path(volume: Path, path: str) -> Path:
    """Return a directory of a volume. If it is missing, root makes it with the volume's mode, as the kubelet does.

    The group is the volume's if its mode has the setgid bit, otherwise root's.
    """
    place = volume
    for part in Path(path).parts:
        place /= part
        if not place.exists():
            place.mkdir()
            place.chmod(stat.S_IMODE(volume.stat().st_mode))
    return place


class Kubelet:
    """Starts pods as containers. Claims and other volumes are directories under `directory`.

    As in Kubernetes, the group of a pod (fsGroup) can write to claims, and not to directories of the node.
    """

    def __init__(
        self, start_host: StartHost, network: Network, objects: Sequence[Object], directory: Path, domain: str = ""
    ) -> None:
        self._start_host, self._network, self._domain = start_host, network, domain
        self._directory = directory
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}

    def claim(self, name: str) -> Path:
        """Return the directory of a claim."""
        return self._directory / "claims" / name

    def node_directory(self, path: str) -> Path:
        """Return a directory of the node, on which all pods run. It must exist before a pod mounts it."""
        return self._directory / "node" / path.lstrip("/")

    def start(self, pod: Pod) -> Host:
        """Start a pod, with its host name, user, limits, variables and volumes."""
        (container,) = pod.spec["containers"]
        security = pod.spec["securityContext"]
        own = {each["name"]: self._find_value(each, pod) for each in container["env"]}
        variables = {**own, **pod.variables}
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        options: dict[str, Any] = {}
        mounts = [Mount(path, str(self._write_config_map(name)), "bind") for path, name in pod.mounts.items()]
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                assert (mount["mountPath"], volume["emptyDir"]["medium"]) == ("/dev/shm", "Memory")
                options["shm_size"] = volume["emptyDir"]["sizeLimit"].removesuffix("i")
                continue
            volume_root = self._make_volume(volume, security["fsGroup"])
            place = make_sub_path(volume_root, self._find_sub_path(mount, variables))
            mounts.append(Mount(mount["mountPath"], str(place), "bind", read_only=mount.get("readOnly", False)))
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        return self._start_host(
            container["image"],
            [word.replace("$$", "$") for word in container["args"]],
            env={name: value.replace("$$", "$") for name, value in variables.items()},
            network=self._network,
            alias=f"{pod.hostname}.{pod.subdomain}{self._domain}",
            hostname=pod.hostname,
            user=f"{security['runAsUser']}:{security['runAsGroup']}",
            group_add=[security["fsGroup"]],
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            nano_cpus=round(count_cpus(container) * 10**9),
            mem_limit=container["resources"]["limits"]["memory"].removesuffix("i"),
            mounts=mounts,
            **options,
        )

    def _find_value(self, variable: Object, pod: Pod) -> str:
        """Return the value of a variable. Manifests refer to the index of a replica, and to a JobSet's attempt."""
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        values = {"training.kubeflow.org/replica-index": pod.index, "jobset.sigs.k8s.io/restart-attempt": 0}
        return str({f"metadata.labels['{label}']": value for label, value in values.items()}[path])

    def _find_sub_path(self, mount: Object, variables: Mapping[str, str]) -> str:
        """Return the directory of a volume that is mounted, with the variables that it names."""
        path = str(mount.get("subPathExpr") or mount.get("subPath", ""))
        return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], path)

    def _make_volume(self, volume: Object, group: int) -> Path:
        """Return the directory of a volume, with its files."""
        if "configMap" in volume:
            return self._write_config_map(volume["configMap"]["name"])
        if "secret" in volume:
            content = self._objects["Secret", volume["secret"]["secretName"]]["stringData"]
            files = {name: text.encode() for name, text in content.items()}
            # Kubernetes lets the group of the pod read a Secret.
            return self._write(volume["secret"]["secretName"], files, volume["secret"]["defaultMode"] | 0o040, group)
        if "hostPath" in volume:
            assert volume["hostPath"]["type"] == "Directory"
            place = self.node_directory(volume["hostPath"]["path"])
            assert place.is_dir()
            return place
        claim = self.claim(volume["persistentVolumeClaim"]["claimName"])
        claim.mkdir(parents=True, exist_ok=True)
        os.chown(claim, 0, group)
        claim.chmod(0o2775)
        return claim

    def _write_config_map(self, name: str) -> Path:
        content = self._objects["ConfigMap", name]
        files = {key: text.encode() for key, text in content["data"].items()}
        files |= {key: base64.b64decode(text) for key, text in content.get("binaryData", {}).items()}
        return self._write(name, files, 0o644, 0)

    def _write(self, name: str, files: Mapping[str, bytes], mode: int, group: int) -> Path:
        """Return the directory of a volume with these files, which root owns; it is written once."""
        directory = self._directory / "volumes" / name
        if not directory.exists():
            directory.mkdir(parents=True)
            for file, content in files.items():
                (directory / file).write_bytes(content)
                (directory / file).chmod(mode)
                os.chown(directory / file, 0, group)
        return directory
