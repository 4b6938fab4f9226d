"""A training job on Kubernetes as `shoal deploy kubernetes` sees it, checked."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath

from shoal.errors import UsageError
from shoal.jobs import job
from shoal.jobs.variables import check_unique, split_secret

MAX_USER = 2**31 - 1
MAX_LABEL = 63
"""The limit of DNS for one label, and so for the name of a pod's host."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL.pattern}(\.{_LABEL.pattern})*")
"""A claim, or a service account: a subdomain of RFC 1123."""
_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
_CPUS = re.compile(r"\d+(\.\d{1,3})?|\d+m")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REQUIREMENTS = "requirements.txt"
_RESERVED = {
    "TRAINING_JOB_NAME": "it is the name of the job. Fix: --name",
    job.MAX_RESTARTS: "lost pods would not be made again. Fix: --max-restarts",
    "SHOAL_HOSTS": "the file, or its controller, lists the hosts. Fix: --hosts",
    **dict.fromkeys(
        (
            *("SHOAL_HOST_RANK", "JOB_COMPLETION_INDEX", "HOST_INDEX"),
            *("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "K_MPI_JOB_ROLE"),
        ),
        "it tells the hosts of a job apart, and --env is the same on all of them. Fix: leave it out",
    ),
}
"""Variables that `--env` cannot set, with the reason."""


class WorkloadKind(StrEnum):
    """The object that starts the pods of a job, and the controller that it needs."""

    job = "job"
    """An Indexed Job with a headless service: part of Kubernetes."""
    jobset = "jobset"
    """A JobSet: needs the JobSet controller."""
    trainjob = "trainjob"
    """A TrainJob with a runtime of its own: needs Kubeflow Trainer."""
    mpijob = "mpijob"
    """An MPIJob: needs the MPI Operator."""


@dataclass(frozen=True)
class Storage:
    """A directory that pods mount: of a PersistentVolumeClaim, or of their node."""

    claim: str
    """The name of the claim; empty: `path` is a directory of the node."""
    path: str
    """Absolute on a node; inside a claim relative, and empty for the whole claim."""

    @classmethod
    def parse(cls, option: str, text: str) -> Storage:
        """Returns the storage that an option names: CLAIM, CLAIM/DIRECTORY or /DIRECTORY. Raises `UsageError`."""
        _check_text(option, text)
        if ".." in PurePosixPath(text).parts:
            raise UsageError(f"{option}: {text} must not contain '..'. Fix: write the path without it")
        if text.startswith("/"):
            return cls("", str(PurePosixPath(text)))
        claim, _, path = text.partition("/")
        if not _SUBDOMAIN.fullmatch(claim):
            raise UsageError(
                f"{option}: {text!r} is neither the name of a PersistentVolumeClaim, as `kubectl get pvc` lists them,"
                " nor an absolute path on the nodes. Fix: such as training-data, or training-data/digits, or /mnt/data"
            )
        return cls(claim, path.strip("/"))


@dataclass(frozen=True)
class SecretReference:
    """A key of a Secret in the cluster, which pods have as the file /run/secrets/NAME, or as a variable."""

    name: str
    secret: str
    """The name of the Secret."""
    key: str
    is_variable: bool

    @classmethod
    def parse(cls, text: str) -> SecretReference:
        """Returns the reference that `NAME=SECRET[/KEY][,type=env]` describes. Raises `UsageError`."""
        _check_text("--secret", text)
        name, place, is_variable = split_secret(text)
        secret, _, key = place.partition("/")
        if not (_SUBDOMAIN.fullmatch(secret) and _KEY.fullmatch(key or name)):
            raise UsageError(
                f"--secret {text}: expected NAME=SECRET or NAME=SECRET/KEY, with a Secret that `kubectl get secrets`"
                " lists. Fix: such as --secret HF_TOKEN=tokens/hugging-face"
            )
        return cls(name, secret, key or name, is_variable)


@dataclass(frozen=True)
class KubernetesRequest(job.JobSpec):
    """A job to describe for Kubernetes. Its source may be an s3:// address."""

    kind: WorkloadKind = WorkloadKind.job
    name: str = ""
    namespace: str | None = None
    gpus: int = 0
    """GPUs per host."""
    channels: Mapping[str, Storage] = field(default_factory=dict)
    results: Storage | None = None
    """Storage that keeps models, output and checkpoints after the pods have ended; None: they are lost."""
    secrets: tuple[SecretReference, ...] = ()
    shm_size: str = job.SHM_SIZE
    cpus: str | None = None
    retries: int = 0
    """How often a failed job starts again from its checkpoint, with new pods."""
    max_seconds: int | None = None
    """When Kubernetes stops the job; None: never. For a JobSet it counts from each start that `retries` allows."""
    user: int = 1000
    """The user and group that the pods run as."""
    egress: tuple[str, ...] = ()
    """Networks that pods can reach in addition to each other and DNS."""
    service_account: str | None = None

    def check(self) -> None:
        """Raises `UsageError` if Kubernetes would refuse the job, or it could not run."""
        self._check_names()
        _check_text("the image", self.image)
        if "://" in self.image or re.search(r"\s", self.image):
            raise UsageError(
                f"{self.image}: not the name of an image. Fix: such as registry.example.org/team/image:tag"
            )
        self._check_source()
        for name in self.channels:
            job.check_channel_name(name)
        self._check_limits()
        self._check_environment()
        for network in self.egress:
            parse_network(network)
        self.encode_hyperparameters(self.name)

    def _check_limits(self) -> None:
        memory, shm = job.check_size("--memory", self.memory), job.check_size("--shm-size", self.shm_size)
        if memory and shm >= memory:
            raise UsageError(
                f"--shm-size {self.shm_size}: does not fit into --memory {self.memory}, as /dev/shm counts as memory."
                " Fix: a smaller --shm-size, or more --memory"
            )
        if self.cpus is not None and not (_CPUS.fullmatch(self.cpus) and re.search("[1-9]", self.cpus)):
            raise UsageError(
                f"--cpus {self.cpus}: expected a number of cores, or thousandths with m. Fix: such as --cpus 4,"
                " 0.5 or 500m"
            )
        if self.user > MAX_USER:
            raise UsageError(
                f"--user {self.user}: the largest user of Kubernetes is {MAX_USER}. Fix: such as --user 1000"
            )

    def _check_environment(self) -> None:
        for variable, value in self.environment.items():
            if not _VARIABLE.fullmatch(variable):
                raise UsageError(
                    f"--env {variable}: a name may have only letters, digits and '_', and no digit at its start."
                    " Fix: such as --env MY_NAME=VALUE"
                )
            if variable in _RESERVED:
                raise UsageError(f"--env {variable}: {_RESERVED[variable]}")
            _check_text(f"--env {variable}", value)
        job.check_secret(self.environment)
        check_unique("--secret", [secret.name for secret in self.secrets])
        for secret in self.secrets:
            if secret.is_variable and secret.name in self.environment:
                raise UsageError(f"--secret {secret.name} and --env {secret.name}: both set it. Fix: leave out one")

    def _check_names(self) -> None:
        if not (_NAME.fullmatch(self.name) and len(self.name) <= MAX_LABEL):
            raise UsageError(
                f"--name {self.name}: a name may have only lower-case letters, digits and '-' (RFC 1123). It begins"
                f" with a letter, as it also names a service, and ends with a letter or digit. It has at most"
                f" {MAX_LABEL} characters. Fix: --name {_suggest_label(self.name)}"
            )
        space = self.namespace
        if space is not None and not (_LABEL.fullmatch(space) and len(space) <= MAX_LABEL):
            raise UsageError(
                f"--namespace {space}: a namespace may have only lower-case letters, digits and '-' (RFC 1123), and at"
                f" most {MAX_LABEL} characters. Fix: use one that `kubectl get namespaces` lists"
            )
        account = self.service_account
        if account is not None and not _SUBDOMAIN.fullmatch(account):
            raise UsageError(
                f"--service-account {account!r}: not the name of one. Fix: use one that `kubectl get"
                " serviceaccounts` lists"
            )
        if (excess := len(self.longest_pod_name) - MAX_LABEL) > 0:
            raise UsageError(
                f"--name {self.name}: too long: with --hosts {self.hosts} and --kind {self.kind} a pod would be called"
                f" {self.longest_pod_name}, and DNS allows {MAX_LABEL} characters. Fix: at most"
                f" {len(self.name) - excess} characters, such as --name {_suggest_label(self.name[:-excess])}"
            )

    def _check_source(self) -> None:
        _check_text("--entry-point", self.entry_point or "")
        for argument in self.arguments:
            _check_text("an argument for the script", argument)
        if self.source is not None and not self.entry_point:
            raise UsageError(f"--source {self.source}: the script is missing. Fix: --entry-point train.py")
        if isinstance(self.source, str):
            _check_text("--source", self.source)
            if not self.egress:
                raise UsageError(
                    f"--source {self.source}: the network policy keeps pods from S3. Fix: --egress CIDR with the"
                    " addresses of S3, such as --egress 0.0.0.0/0"
                )
        elif self.source is not None and self.entry_point:
            job.check_source(self.selection)
            if (self.source / _REQUIREMENTS).exists() and (self.user or not self.egress):
                raise UsageError(
                    f"--source {self.source}: `train` cannot install its {_REQUIREMENTS}: pods neither write to the"
                    " image's packages nor reach a package index. Fix: install them in an image (docs/recipes.md), or"
                    " --user 0 --egress CIDR of the index"
                )

    @property
    def pod_prefix(self) -> str:
        """The names of the pods' hosts before the hyphen and index; the launcher of an MPIJob has another one."""
        suffixes = {
            WorkloadKind.job: "",
            WorkloadKind.jobset: "-host-0",
            WorkloadKind.trainjob: "-node-0",
            WorkloadKind.mpijob: "-worker",
        }
        return self.name + suffixes[self.kind]

    @property
    def longest_pod_name(self) -> str:
        """The longest name of a pod that the controller makes from the job's name."""
        if self.kind is WorkloadKind.mpijob:
            return max(f"{self.name}-launcher", f"{self.pod_prefix}-{max(0, self.hosts - 2)}", key=len)
        random_part = "" if self.kind is WorkloadKind.job else "-xxxxx"
        return f"{self.pod_prefix}-{self.hosts - 1}{random_part}"

    def list_notes(self) -> list[str]:
        """Returns warnings: the job is valid, but may do something else than expected."""
        notes = []
        if "/" not in self.image:
            notes.append(
                f"{self.image} has no registry: nodes must have this image already. Fix: `shoal push`, then --registry"
            )
        if self.results is None:
            notes.append("without --results, the model is lost when the pods end")
            if self.max_restarts:
                notes.append("without --results, the pods share no checkpoints, and a lost pod loses its own")
        if self.gpus and "-cpu-" in self.image:
            notes.append(f"--gpus {self.gpus}: {self.image} is a CPU image by its name, and will not use them")
        if self.results and not self.results.claim and self.user:
            path = shlex.quote(self.results.path)
            notes.append(
                f"--results {path}: Kubernetes makes directories there as root, with the mode of {path}, and pods run"
                f" as user {self.user}. Fix, on each node: chgrp {self.user} {path} && chmod 2775 {path}"
            )
        if self.hosts > 1 and any(not storage.claim for storage in self._storages):
            notes.append("directories of nodes must exist, with the same content, on each node that runs a pod")
        return notes

    @property
    def _storages(self) -> list[Storage]:
        return [*self.channels.values(), *([self.results] if self.results else [])]


def _check_text(option: str, text: str) -> None:
    """Raises `UsageError` if a text has bytes that are not UTF-8: Python reads them as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{option}: {text!r} is not UTF-8, which a YAML file needs. Fix: write it in UTF-8") from error


def parse_network(text: str) -> str:
    """Returns a network as Kubernetes accepts it: with its prefix, also for one address. Raises `UsageError`."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise UsageError(f"--egress {text}: {error}. Fix: such as 0.0.0.0/0 for all addresses") from error
    first = network.network_address
    if isinstance(first, ipaddress.IPv6Address) and (first.scope_id or first.ipv4_mapped):
        raise UsageError(
            f"--egress {text}: Kubernetes takes no interface and no IPv4 address in an IPv6 network. Fix: write"
            " the IPv4 network"
        )
    return str(network)


def suggest_name(source: Path | str | None, image: str) -> str:
    """Returns a name for a job: the name of its source directory, otherwise of its image."""
    if isinstance(source, Path):
        return _suggest_label(source.resolve().name)
    return _suggest_label(image.partition("@")[0].rpartition("/")[2].partition(":")[0])


def _suggest_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MAX_LABEL].strip("-") or "train"
