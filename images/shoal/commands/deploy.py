"""Commands that write files for other platforms: deploy kubernetes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.clean_text import print_document, print_error
from shoal.commands.common import (
    RUN,
    Image,
    app,
    parse_pairs,
    print_written,
    resolve_tag,
    takes_fields_of,
)
from shoal.commands.script import (
    Arguments,
    Env,
    EnvFile,
    FollowLinks,
    Hyperparameters,
    Include,
    ListFiles,
    Module,
    Script,
    ScriptCommand,
    choose_code,
    print_source,
    print_source_notes,
    read_options,
    warn_of_visible_secrets,
)
from shoal.console import print_line
from shoal.errors import UsageError
from shoal.jobs.hosts.kubernetes import manifest
from shoal.jobs.hosts.kubernetes.request import KubernetesRequest, SecretReference, Storage, WorkloadKind, suggest_name
from shoal.jobs.job import SHM_SIZE
from shoal.jobs.variables import read_environment

deploy = typer.Typer(help="Write files that run a job on a cluster.", no_args_is_help=True)
app.add_typer(deploy, name="deploy", rich_help_panel=RUN)
_STANDARD_OUTPUT = Path("-")

_KIND_HELP = (
    "job: part of Kubernetes. Others need a controller: jobset JobSet, trainjob Kubeflow Trainer, mpijob MPI Operator."
)
_SOURCE_HELP = "Code of at most 1 MiB. Default: the directory of SCRIPT; without SCRIPT, the code is in the image."
_SECRET_HELP = (
    "Key of a Secret in the cluster (default: NAME), as the file /run/secrets/NAME. With ,type=env at the end it is"
    " also the variable NAME. Repeatable."
)
_VISIBLE_FIX = "--secret {name}=SECRET, or --env {name} with a variable of your environment, or --env-file FILE"
_STORAGE = "CLAIM[/DIR]|/DIR"
_RESULTS_HELP = "Storage that keeps models, output and checkpoints: a PersistentVolumeClaim, or a directory of nodes."


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "channels": lambda words: {
        name: Storage.parse(f"--channel {name}", value) for name, value in parse_pairs("--channel", words).items()
    },
    "results": functools.partial(Storage.parse, "--results"),
    "secrets": lambda words: tuple(map(SecretReference.parse, words)),
    "egress": tuple,
}


@dataclass(frozen=True)
class KubernetesOptions:
    """The options of `shoal deploy kubernetes`."""

    image: Image
    script: Script = None
    arguments: Arguments = None
    module: Module = None
    kind: Annotated[WorkloadKind, typer.Option(help=_KIND_HELP)] = WorkloadKind.job
    name: Annotated[str | None, typer.Option(help="Name of the job. Default: from --source or the image.")] = None
    namespace: Annotated[str | None, typer.Option(help="Namespace. Default: kubectl's current namespace.")] = None
    registry: Annotated[
        str | None,
        typer.Option(metavar="REGISTRY[/PATH]", help="Registry to which `shoal push --to` pushed the image."),
    ] = None
    source: Annotated[str | None, typer.Option(metavar="DIR|s3://...", help=_SOURCE_HELP)] = None
    entry_point: Annotated[str | None, typer.Option(help="Script, relative to --source, instead of SCRIPT.")] = None
    hosts: Annotated[int, typer.Option(min=1, help="Number of hosts (one pod each).")] = 1
    procs_per_host: Annotated[int | None, typer.Option(min=1, help="MPI ranks per host.")] = None
    gpus: Annotated[int, typer.Option(min=0, help="GPUs per host.")] = 0
    channels: Annotated[
        list[str] | None,
        typer.Option("--channel", metavar=f"NAME={_STORAGE}", help="Storage with input data. Repeatable."),
    ] = None
    results: Annotated[str | None, typer.Option(metavar=_STORAGE, help=_RESULTS_HELP)] = None
    hyperparameters: Hyperparameters = None
    distribution: Annotated[
        str, typer.Option(metavar="JSON", help="The distribution argument of a SageMaker estimator.")
    ] = "{}"
    env: Env = None
    env_file: EnvFile = None
    secrets: Annotated[
        list[str] | None, typer.Option("--secret", metavar="NAME=SECRET[/KEY][,type=env]", help=_SECRET_HELP)
    ] = None
    include: Include = None
    follow_links: FollowLinks = False
    list_files: ListFiles = False
    shm_size: Annotated[str, typer.Option(help="Size of /dev/shm per host, such as 512m or 2g.")] = SHM_SIZE
    memory: Annotated[str | None, typer.Option(help="Memory per host, such as 8g. Default: no limit.")] = None
    cpus: Annotated[str | None, typer.Option(help="Cores per host, such as 4 or 500m. Default: no limit.")] = None
    retries: Annotated[int, typer.Option(min=0, help="How often a failed job starts again.")] = 0
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often to start again after a lost rank or pod. Other pods stay."),
    ] = 0
    max_seconds: Annotated[
        int | None, typer.Option(min=1, help="Seconds after which Kubernetes stops the job. Default: no limit.")
    ] = None
    user: Annotated[int, typer.Option(min=0, help="User and group of the pods; 0: root.")] = 1000
    egress: Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR", help="Network that pods reach in addition to each other. Repeatable."),
    ] = None
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods, such as for S3.")] = None
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; '-': standard output. Default: NAME.yaml.")
    ] = None

    def to_request(self) -> KubernetesRequest:
        """Returns the job. Raises `UsageError` if an option is wrong, or no image of the matrix matches."""
        tag = resolve_tag(self.image) if "/" not in self.image else self.image
        image = f"{self.registry.rstrip('/')}/{tag}" if self.registry else tag
        source, entry_point = self._read_script()
        environment, taken = read_environment(self.env, self.env_file)
        own = {
            "image": image,
            "name": suggest_name(source, image) if self.name is None else self.name,
            "source": source,
            "entry_point": entry_point,
            "environment": environment,
            "taken": taken,
        }
        request = KubernetesRequest(**{**read_options(self, KubernetesRequest, _READERS), **own})
        request.check()
        return request

    def _read_script(self) -> tuple[Path | str | None, str | None]:
        """Returns the source, which is a directory or an address, and the script in it. Raises `UsageError`."""
        is_address = self.source is not None and self.source.startswith("s3://")
        if is_address and self.module:
            return self.source, f"-m {self.module}"
        if self.script is None and self.module is None:
            return self.source if self.source is None or is_address else Path(self.source), self.entry_point
        if is_address:
            raise UsageError(
                f"{self.script}: a file of this machine, but --source {self.source} has the code. Fix: --entry-point,"
                " relative to that address"
            )
        source = Path(self.source) if self.source is not None else None
        code = choose_code(self.script, self.module, source, self.entry_point)
        return code["source"], code["entry_point"]


@deploy.command("kubernetes", epilog="More: docs/kubernetes.md", cls=ScriptCommand)
@takes_fields_of(KubernetesOptions)
def deploy_kubernetes(options: KubernetesOptions) -> None:
    """Write a YAML file with which `kubectl create` runs a job. The file has the secret for the job.

    Example: shoal deploy kubernetes pytorch examples/digits/train.py --hosts 2 --results models -- --epochs 3
    """
    request = options.to_request()
    if options.list_files:
        print_source(request.selection)
        return
    warn_of_visible_secrets(options.env, request.hyperparameters, options.arguments, _VISIBLE_FIX)
    if isinstance(request.source, Path):
        print_source_notes(request.selection)
    text = manifest.format_manifest(request, manifest.build_objects(request))
    for note in request.list_notes():
        print_error(note)
    if options.output == _STANDARD_OUTPUT:
        print_document(text, end="")
        return
    path = options.output or Path(f"{request.name}.yaml")
    manifest.write_manifest(path, text)
    print_written([path])
    namespace = f" -n {request.namespace}" if request.namespace else ""
    print_line(f"check: kubectl create{namespace} --dry-run=server -f {path}")
    print_line(f"start: kubectl create{namespace} -f {path}")
    follow = f"-f --prefix --tail=-1 --max-log-requests={request.hosts} -l app.kubernetes.io/instance={request.name}"
    print_line(f"logs:  kubectl logs{namespace} {follow}")
