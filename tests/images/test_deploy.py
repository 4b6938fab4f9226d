"""`shoal deploy kubernetes`: objects that the published schemas accept, and errors before a cluster sees anything."""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
import os
import random
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from shoal.commands import deploy
from shoal.commands.common import app
from shoal.errors import UsageError
from shoal.jobs.hosts.kubernetes import manifest
from shoal.jobs.hosts.kubernetes.request import KubernetesRequest, SecretReference, Storage, WorkloadKind, suggest_name
from shoal.jobs.source_files import Selection

from .. import kubelet

assert deploy  # it adds the command to `app`
Object = dict[str, Any]
VERSIONS = ("1.31", "1.37")
"""The first release of Kubernetes in which all that we use is stable, and the newest one of the package."""
CRDS = Path(__file__).with_name("data") / "kubernetes_crds.json"
"""The schemas of JobSet 0.13, Kubeflow Trainer 2.3 and MPI Operator 0.8.2, without the types of Kubernetes itself."""
CORE = {
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("v1", "Secret"): "io.k8s.api.core.v1.Secret",
    ("v1", "ConfigMap"): "io.k8s.api.core.v1.ConfigMap",
    ("batch/v1", "Job"): "io.k8s.api.batch.v1.Job",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
}
IMAGE = "registry.example.org/team/pytorch-training:1"


@functools.cache
def definitions(version: str) -> Object:
    """Return the published schemas of a release; unknown fields are errors. The package itself is slow to import."""
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "kubernetes-json-schema", f"v{version}.0-local-strict")
    found: Object = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return found


def find_errors(each: Object, version: str) -> list[str]:
    """Return the errors that the schema of an object finds in it."""
    key = each["apiVersion"], each["kind"]
    known = {"$ref": f"#/$defs/{CORE[key]}"} if key in CORE else json.loads(CRDS.read_text())[" ".join(key)]
    validator = jsonschema.Draft202012Validator({**known, "$defs": definitions(version)})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(each)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "My_Digits.2"
    (directory / "lib").mkdir(parents=True)
    (directory / "train.py").write_text("print('trained')\n")
    (directory / "lib" / "go.sh").write_text("#!/bin/sh\n")
    (directory / "lib" / "go.sh").chmod(0o755)
    (directory / "__pycache__").mkdir()
    (directory / "__pycache__" / "train.pyc").write_text("")
    (directory / "env" / "lib").mkdir(parents=True)
    (directory / "env" / "pyvenv.cfg").write_text("")
    (directory / "env" / "lib" / "torch.py").write_text("")
    return directory


def make_request(source: Path | str | None, **options: Any) -> KubernetesRequest:
    entry_point = "train.py" if isinstance(source, Path) else None
    values = {"kind": WorkloadKind.job, "name": "digits", "image": IMAGE, "source": source, "entry_point": entry_point}
    return KubernetesRequest(**{**values, "hosts": 2, **options})


def build(request: KubernetesRequest) -> dict[str, Object]:
    """Return the objects by kind, as kubectl reads them from the file."""
    request.check()
    text = manifest.format_manifest(request, manifest.build_objects(request))
    return {each["kind"]: each for each in yaml.load_all(text, yaml.CSafeLoader)}


def find_pods(each: object) -> Iterator[Object]:
    """Return the specifications of all pods in an object."""
    if isinstance(each, dict):
        if "containers" in each:
            yield each
        for value in each.values():
            yield from find_pods(value)
    elif isinstance(each, list):
        for value in each:
            yield from find_pods(value)


def variables(pod: Object) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["containers"][0]["env"]}


FULL: dict[str, Any] = {
    "namespace": "team-1",
    "procs_per_host": 4,
    "gpus": 4,
    "channels": {"Train_1.x": Storage("data", "digits"), "test": Storage("", "/mnt/test")},
    "results": Storage("models", ""),
    "environment": {"A": "1"},
    "memory": "8g",
    "cpus": "4",
    "retries": 3,
    "max_restarts": 2,
    "max_seconds": 3600,
    "egress": ("10.0.0.0/8",),
    "service_account": "trainer",
}


@pytest.mark.parametrize("kind", WorkloadKind)
def test_the_published_schemas_accept_each_kind(source: Path, kind: WorkloadKind) -> None:
    for options in ({"hosts": 1}, FULL):
        objects = build(make_request(source, kind=kind, **options))
        for version in VERSIONS:
            assert {name: find_errors(each, version) for name, each in objects.items()} == {
                name: [] for name in objects
            }


def test_the_schemas_refuse_misspelt_fields(source: Path) -> None:
    for kind in WorkloadKind:
        *_, workload = build(make_request(source, kind=kind)).values()
        workload["spec"]["replica"] = 1
        for pod in find_pods(workload):
            pod["containers"][0]["imag"] = "x"
        pods = kind is not WorkloadKind.trainjob  # its pods are in the runtime
        assert len(find_errors(workload, VERSIONS[-1])) >= 1 + pods


def test_yaml_1_1_reads_back_all_text() -> None:
    hard = ["yes", "No", "y", "1", "1.0", "1e3", "0x1F", "12:30", "1_000", "null", "~", "", " a ", "#x", "a: b", "- a"]
    hard += [
        "a\nb\n",
        "tab\t",
        "\x07\x85\u2028é😀",
        "'",
        '"',
        "\\",
        "!x",
        "*x",
        "&x",
        "%x",
        "@x",
        "=",
        "<<",
        "x" * 5000,
    ]
    names = ("NO", "Y", "on", "_1", "null")  # keys of a Secret
    environment = {f"V{number}": text for number, text in enumerate(hard)} | dict.fromkeys(names, "x")
    request = make_request(None, environment=environment, taken=dict.fromkeys(names))
    objects = manifest.build_objects(request)
    assert list(yaml.load_all(manifest.format_manifest(request, objects), yaml.CSafeLoader)) == objects


def test_an_indexed_job_names_its_hosts(source: Path) -> None:
    objects = build(make_request(source, hosts=12))
    pod = objects["Job"]["spec"]["template"]["spec"]
    assert variables(pod)["SHOAL_HOSTS"] == "digits-[0-11].digits"
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"] == "digits"
    assert objects["Service"]["spec"]["clusterIP"] == "None"
    assert objects["Service"]["spec"]["selector"] == objects["Job"]["spec"]["template"]["metadata"]["labels"]
    assert (objects["Job"]["spec"]["completions"], objects["Job"]["spec"]["parallelism"]) == (12, 12)


def test_other_kinds_find_their_hosts(source: Path) -> None:
    job_set = build(make_request(source, kind=WorkloadKind.jobset))["JobSet"]
    assert variables(next(find_pods(job_set)))["SHOAL_HOSTS"] == "digits-host-0-[0-1].digits"
    objects = build(make_request(source, kind=WorkloadKind.trainjob))
    assert objects["TrainJob"]["spec"]["runtimeRef"]["name"] == objects["TrainingRuntime"]["metadata"]["name"]
    assert objects["TrainingRuntime"]["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    replicas = build(make_request(source, kind=WorkloadKind.mpijob, hosts=3))["MPIJob"]["spec"]["mpiReplicaSpecs"]
    assert replicas["Worker"]["replicas"] == 2
    mounts = {name: part["template"]["spec"]["containers"][0]["volumeMounts"] for name, part in replicas.items()}
    assert {"name": "hostfile", "mountPath": "/etc/mpi"} in mounts["Worker"]
    assert "/etc/mpi" not in [mount["mountPath"] for mount in mounts["Launcher"]]  # the operator mounts it


@pytest.mark.parametrize("kind", WorkloadKind)
def test_the_secret_is_new_and_only_in_its_object(source: Path, kind: WorkloadKind) -> None:
    request = make_request(source, kind=kind)
    one, other = build(request), build(request)
    secret = one["Secret"]["stringData"]["job-secret"]
    assert len(secret) == 64
    assert secret != other["Secret"]["stringData"]["job-secret"]
    assert manifest.format_manifest(request, list(one.values())).count(secret) == 1
    for pod in find_pods(list(one.values())):
        assert variables(pod)["SHOAL_JOB_SECRET_FILE"] == "/run/shoal/job-secret"
        assert {"name": "secret", "mountPath": "/run/shoal", "readOnly": True} in pod["containers"][0]["volumeMounts"]
        assert {"secretName": "digits-secret", "defaultMode": 0o400} in [each.get("secret") for each in pod["volumes"]]


def test_the_secret_of_the_user_counts(source: Path) -> None:
    objects = build(make_request(source, environment={"SHOAL_JOB_SECRET": "hunter2-hunter2-hunter2"}))
    assert objects["Secret"]["stringData"] == {"job-secret": "hunter2-hunter2-hunter2"}
    assert "hunter2" not in json.dumps(objects["Job"])
    objects = build(make_request(source, environment={"SHOAL_JOB_SECRET_FILE": "/mine"}))
    assert "Secret" not in objects
    assert variables(next(find_pods(objects)))["SHOAL_JOB_SECRET_FILE"] == "/mine"


def test_only_peers_and_dns_are_reached(source: Path) -> None:
    policy = build(make_request(source, egress=("10.1.0.0/16",)))["NetworkPolicy"]["spec"]
    labels = {"app.kubernetes.io/name": "shoal-job", "app.kubernetes.io/instance": "digits"}
    peers = {"podSelector": {"matchLabels": labels}}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"from": [peers]}]
    dns = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    assert policy["egress"] == [{"to": [peers]}, dns, {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]


def test_networks_have_their_prefix(source: Path) -> None:
    """The API server refuses a policy with an address alone, and `kubectl create` then creates the other objects."""
    egress = ("10.0.0.1", "10.0.0.0/255.0.0.0", "2001:DB8::1")
    policy = build(make_request(source, egress=egress))["NetworkPolicy"]["spec"]
    networks = [rule["to"][0]["ipBlock"]["cidr"] for rule in policy["egress"][2:]]
    assert networks == ["10.0.0.1/32", "10.0.0.0/8", "2001:db8::1/128"]


@pytest.mark.parametrize("kind", WorkloadKind)
def test_pods_are_created_last(source: Path, kind: WorkloadKind) -> None:
    kinds = list(build(make_request(source, kind=kind)))
    assert kinds[:3] == ["NetworkPolicy", "ConfigMap", "Secret"]
    assert kinds[-1].lower() == kind


@pytest.mark.parametrize("kind", WorkloadKind)
def test_pods_meet_the_restricted_standard(source: Path, kind: WorkloadKind) -> None:
    """The rules of Kubernetes' Pod Security Standard "restricted"."""
    pods = list(find_pods(list(build(make_request(source, kind=kind, results=Storage("models", ""))).values())))
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        kinds = {name for volume in pod["volumes"] for name in volume if name != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        assert pod["terminationGracePeriodSeconds"] == 120


def test_exit_codes_decide_what_happens_next(source: Path) -> None:
    spec = build(make_request(source, hosts=4, retries=2))["Job"]["spec"]
    assert spec["backoffLimit"] == 8  # all pods of a job fail together
    rules = spec["podFailurePolicy"]["rules"]
    codes = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert codes == {143: "Ignore", 2: "FailJob"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    job_set = build(make_request(source, kind=WorkloadKind.jobset, retries=2))["JobSet"]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 2
    assert job_set["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize("kind", WorkloadKind)
def test_secrets_of_the_cluster_are_references(source: Path, kind: WorkloadKind) -> None:
    secrets = tuple(map(SecretReference.parse, ("HF_TOKEN=tokens/hugging-face,type=env", "KEY=keys")))
    request = make_request(source, kind=kind, secrets=secrets, environment={"A": "1", "B": "t@ken"}, taken={"B": None})
    objects = manifest.build_objects(request)
    assert {each["kind"]: find_errors(each, VERSIONS[-1]) for each in objects if find_errors(each, VERSIONS[-1])} == {}
    environment = next(each for each in objects if each["metadata"]["name"] == "digits-environment")
    assert (environment["kind"], environment["stringData"]) == ("Secret", {"B": "t@ken"})
    text = manifest.format_manifest(request, objects)
    assert text.count("t@ken") == 1, "not in a pod, which more users can read"
    assert "It contains secrets" in text
    for pod in find_pods(objects):
        found = variables(pod)
        assert found["A"] == "1"
        assert found["B"] == {"secretKeyRef": {"name": "digits-environment", "key": "B"}}
        assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "tokens", "key": "hugging-face"}}
        assert (found["KEY_FILE"], found.get("KEY")) == ("/run/secrets/KEY", None)
        mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
        assert mounts["/run/secrets/KEY"] == {
            "name": "secret-1",
            "mountPath": "/run/secrets/KEY",
            "subPath": "KEY",
            "readOnly": True,
        }
        volume = next(each for each in pod["volumes"] if each["name"] == "secret-0")
        items = [{"key": "hugging-face", "path": "HF_TOKEN"}]
        assert volume["secret"] == {"secretName": "tokens", "defaultMode": 0o400, "items": items}


@pytest.mark.parametrize("text", ["HF_TOKEN", "HF_TOKEN=", "HF_TOKEN=UPPER/x", "HF_TOKEN=a/b/c", "A.B=c", "SM_A=b"])
def test_wrong_references_are_errors(text: str) -> None:
    with pytest.raises(UsageError, match=r"--secret .* Fix: |--secret .* Example: "):
        SecretReference.parse(text)


@pytest.mark.parametrize("kind", WorkloadKind)
def test_pods_get_the_number_of_restarts_from_the_label_of_the_controller(kind: WorkloadKind) -> None:
    """JobSets have a label with that number, and a TrainJob makes a JobSet."""
    found = variables(next(find_pods(build(make_request(None, kind=kind, hosts=2)))))
    field = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
    assert found.get("SHOAL_RESTART") == (field if kind in (WorkloadKind.jobset, WorkloadKind.trainjob) else None)
    request = make_request(None, kind=kind, hosts=2, environment={"SHOAL_RESTART": "4"})
    assert variables(next(find_pods(build(request))))["SHOAL_RESTART"] == "4"


@pytest.mark.parametrize(("retries", "final"), [(0, ("NotIn", [137, 138])), (2, ("In", [2]))])
def test_lost_pods_are_made_again(retries: int, final: tuple[str, list[int]]) -> None:
    """Without retries, nothing else is: `train` has restarted the script as often as it may."""
    options = {"hosts": 4, "retries": retries, "max_restarts": 3}
    for kind, expected in ((WorkloadKind.job, 4 * (retries + 3)), (WorkloadKind.jobset, 4 * 3)):
        objects = build(make_request(None, kind=kind, **options))
        assert variables(next(find_pods(objects)))["SHOAL_MAX_RESTARTS"] == "3"
        spec = list(objects.values())[-1]["spec"]
        job = spec if kind is WorkloadKind.job else spec["replicatedJobs"][0]["template"]["spec"]
        assert job["backoffLimit"] == expected
        *_, rule = job["podFailurePolicy"]["rules"]
        assert (rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == final
    spec = build(make_request(None, kind=WorkloadKind.mpijob, **options))["MPIJob"]["spec"]
    assert spec["mpiReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"
    assert spec["runPolicy"]["backoffLimit"] == retries + 3


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (WorkloadKind.job, ()),
        (WorkloadKind.jobset, ("replicatedJobs", 0, "template", "spec")),
        (WorkloadKind.trainjob, ()),
        (WorkloadKind.mpijob, ("runPolicy",)),
    ],
)
def test_a_job_can_have_a_deadline(kind: WorkloadKind, place: tuple[str | int, ...]) -> None:
    for seconds in (None, 60):
        *_, workload = build(make_request(None, kind=kind, max_seconds=seconds)).values()
        limited: Any = workload["spec"]
        for key in place:
            limited = limited[key]
        assert limited.get("activeDeadlineSeconds") == seconds


def test_a_job_set_does_not_start_again_after_its_deadline() -> None:
    spec = build(make_request(None, kind=WorkloadKind.jobset, max_seconds=60, retries=3))["JobSet"]["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert "DeadlineExceeded" in rule["onJobFailureReasons"]


def test_sizes_channels_and_gpus(source: Path) -> None:
    pod = next(find_pods(build(make_request(source, **FULL))))
    assert pod["containers"][0]["resources"] == {"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "4"}}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    assert volumes["channel-0"] == {"persistentVolumeClaim": {"claimName": "data"}}
    assert volumes["channel-1"] == {"hostPath": {"path": "/mnt/test", "type": "Directory"}}
    mounts = {mount.pop("mountPath"): mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/opt/ml/input/data/Train_1.x"] == {"name": "channel-0", "readOnly": True, "subPath": "digits"}
    assert mounts["/opt/ml/model"]["subPathExpr"] == "digits/host-$(JOB_COMPLETION_INDEX)/model"
    assert mounts["/opt/ml/checkpoints"]["subPathExpr"] == "digits/checkpoints"
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(pod)
    assert variables(next(find_pods(build(make_request(source)))))["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_values_keep_their_dollars(source: Path) -> None:
    pod = next(find_pods(build(make_request(source, environment={"A": "$(HOME) $x $$"}))))
    assert variables(pod)["A"] == "$$(HOME) $$x $$$$"  # Kubernetes reads $$ as $


def test_the_source_is_packed_alike_each_time(source: Path) -> None:
    packed = build(make_request(source))["ConfigMap"]["binaryData"]["sourcedir.tar.gz"]
    assert packed == build(make_request(source))["ConfigMap"]["binaryData"]["sourcedir.tar.gz"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        assert {entry.name: entry.mode for entry in archive} == {"train.py": 0o644, "lib/go.sh": 0o755}


def test_manifests_of_earlier_jobs_are_not_packed(source: Path) -> None:
    """They have secrets. Other YAML files are code."""
    packed = manifest.pack_source(Selection(source))
    for name in ("other.yaml", "lib/no-suffix"):
        words = ["deploy", "kubernetes", IMAGE, str(source / "train.py"), "-o", str(source / name)]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
        assert "job-secret" in (source / name).read_text()
    assert manifest.pack_source(Selection(source)) == packed
    (source / "my-digits-2.yaml").write_text("# Job, written by me\n")
    assert manifest.pack_source(Selection(source)) != packed


def test_the_configuration_is_the_contract(source: Path) -> None:
    request = make_request(source, hyperparameters={"lr": "0.1"}, procs_per_host=2, channels={"a": Storage("b", "")})
    data = build(request)["ConfigMap"]["data"]
    assert json.loads(data["hyperparameters.json"]) == {
        "lr": "0.1",
        "sagemaker_program": '"train.py"',
        "sagemaker_job_name": '"digits"',
        "sagemaker_mpi_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
        "sagemaker_mpi_custom_mpi_options": '""',
    }
    assert list(json.loads(data["inputdataconfig.json"])) == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "My_Job"}, "Fix: --name my-job"),
        ({"name": "1st"}, "begins with a letter"),
        ({"name": "ends-"}, "Fix: --name ends"),
        ({"name": "a" * 64}, "at most 63 characters"),
        ({"name": "a" * 61, "hosts": 10}, None),
        ({"name": "a" * 61, "hosts": 11}, "at most 60 characters"),
        ({"name": "a" * 49, "kind": WorkloadKind.jobset, "hosts": 10}, "at most 48 characters"),
        ({"name": "a" * 48, "kind": WorkloadKind.jobset, "hosts": 10}, None),
        ({"name": "a" * 55, "kind": WorkloadKind.mpijob}, "digits-launcher".replace("digits", "a" * 55)),
        ({"namespace": "Team"}, "--namespace Team"),
        ({"image": "https://registry/x"}, "not the name of an image"),
        ({"channels": {"a b": Storage("c", "")}}, "--channel 'a b'"),
        ({"memory": "1g"}, "--shm-size 1g: does not fit into --memory 1g"),
        ({"memory": "lots"}, "--memory lots: expected a size"),
        ({"cpus": "four"}, "--cpus four"),
        ({"cpus": "0"}, "--cpus 0"),
        ({"cpus": "0.00"}, "--cpus 0.00"),
        ({"cpus": "0m"}, "--cpus 0m"),
        ({"cpus": "10m"}, None),
        ({"memory": "0"}, "--memory 0: expected a size"),
        ({"memory": "-1g"}, "--memory -1g: expected a size"),
        ({"memory": "infg"}, "--memory infg: expected a size"),
        ({"shm_size": "0g"}, "--shm-size 0g: expected a size"),
        ({"user": 2**31}, "--user 2147483648"),
        ({"user": 2**31 - 1}, None),
        ({"service_account": "My_Account"}, "--service-account 'My_Account'"),
        ({"service_account": ""}, "--service-account ''"),
        ({"service_account": "a..b"}, "--service-account 'a..b'"),
        ({"service_account": "a" * 254}, "kubectl get serviceaccounts"),
        ({"service_account": "team.trainer-1"}, None),
        ({"channels": {".": Storage("c", "")}}, "--channel '.'"),
        ({"channels": {"..": Storage("c", "")}}, "--channel '..'"),
        ({"channels": {"a/b": Storage("c", "")}}, "--channel 'a/b'"),
        ({"environment": {"A-B": "1"}}, "--env A-B"),
        ({"environment": {"A": "\udcff"}}, "--env A: '\\udcff' is not UTF-8"),
        ({"environment": {"SHOAL_JOB_SECRET": "short"}}, "16 to 4096 characters"),
        ({"environment": {"SHOAL_JOB_SECRET": "  short" + " " * 20}}, "16 to 4096 characters"),
        ({"environment": {"SHOAL_JOB_SECRET": "x" * 16, "SHOAL_JOB_SECRET_FILE": "/x"}}, "`train` refuses both"),
        ({"environment": {"SHOAL_HOST_RANK": "0"}}, "--env SHOAL_HOST_RANK: it tells the hosts of a job apart"),
        ({"environment": {"JOB_COMPLETION_INDEX": "0"}}, "--env JOB_COMPLETION_INDEX"),
        ({"environment": {"HOST_INDEX": "0"}}, "--env HOST_INDEX"),
        ({"environment": {"PET_NODE_RANK": "0"}}, "--env PET_NODE_RANK"),
        ({"environment": {"SHOAL_HOSTS": "a,b"}}, "Fix: --hosts"),
        ({"environment": {"SHOAL_MAX_RESTARTS": "3"}}, "Fix: --max-restarts"),
        ({"environment": {"TRAINING_JOB_NAME": "a"}}, "Fix: --name"),
        ({"egress": ("10.0.0.1/8",)}, "--egress 10.0.0.1/8"),
        ({"egress": ("fe80::1%eth0",)}, "--egress fe80::1%eth0"),
        ({"egress": ("::ffff:10.0.0.1",)}, "--egress ::ffff:10.0.0.1"),
        ({"entry_point": "trian.py"}, "Did you mean 'train.py'?"),
        ({"entry_point": None}, "Fix: --entry-point"),
        ({"distribution": {"mpi": {"enabeld": True}}}, "unknown key 'enabeld'"),
    ],
)
def test_errors_name_the_option_and_a_fix(source: Path, options: Object, message: str | None) -> None:
    request = make_request(source, **options)
    if message is None:
        request.check()
        return
    with pytest.raises(UsageError) as raised:
        request.check()
    assert message in str(raised.value)


def test_code_that_pods_could_not_get_is_an_error(source: Path) -> None:
    with pytest.raises(UsageError, match="Fix: --egress"):
        make_request("s3://bucket/sourcedir.tar.gz", entry_point="train.py").check()
    make_request("s3://bucket/sourcedir.tar.gz", entry_point="train.py", egress=("0.0.0.0/0",)).check()
    with pytest.raises(UsageError, match=r"Fix: --entry-point train\.py"):
        make_request("s3://bucket/sourcedir.tar.gz", egress=("0.0.0.0/0",)).check()
    (source / "requirements.txt").write_text("x\n")
    with pytest.raises(UsageError, match="requirements"):
        make_request(source, egress=("0.0.0.0/0",)).check()
    make_request(source, egress=("0.0.0.0/0",), user=0).check()


def test_a_source_that_is_too_large_is_an_error(source: Path) -> None:
    (source / "weights.bin").write_bytes(random.Random(1).randbytes(2**20))
    with pytest.raises(UsageError, match="do not fit into a ConfigMap, which holds 1 MiB"):
        manifest.build_objects(make_request(source))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data", Storage("data", "")),
        ("data/a/b/", Storage("data", "a/b")),
        ("/mnt/data", Storage("", "/mnt/data")),
        ("Data", None),
        ("data/../x", None),
        ("a..b", None),
        ("data/\udcff", None),
        ("", None),
    ],
)
def test_storage_is_a_claim_or_a_directory(text: str, expected: Storage | None) -> None:
    if expected is not None:
        assert Storage.parse("--channel a", text) == expected
        return
    with pytest.raises(UsageError, match="--channel a"):
        Storage.parse("--channel a", text)


def test_a_note_says_how_pods_can_write_to_a_directory_of_a_node() -> None:
    fix = "chgrp 1000 /mnt/models && chmod 2775 /mnt/models"
    options: list[Object] = [{}, {"user": 0}, {"results": Storage("models", "")}]
    notes = [
        " ".join(make_request(None, **{"results": Storage("", "/mnt/models"), **each}).list_notes()) for each in options
    ]
    assert [fix in each for each in notes] == [True, False, False]


def test_the_simulated_kubelet_makes_directories_with_the_mode_of_their_volume(tmp_path: Path) -> None:
    for mode in (0o755, 0o2775):
        volume = tmp_path / oct(mode)
        volume.mkdir()
        volume.chmod(mode)
        place = kubelet.make_sub_path(volume, "digits/host-0")
        assert place == volume / "digits" / "host-0"
        assert [path.stat().st_mode & 0o7777 for path in (place.parent, place)] == [mode, mode]


def test_names_are_suggested(source: Path) -> None:
    assert suggest_name(source, IMAGE) == "my-digits-2"
    assert suggest_name(None, IMAGE) == "pytorch-training"
    assert suggest_name("s3://b/k", "host:5000/a/b@sha256:0") == "b"


@pytest.mark.parametrize("there", ["file", "pipe", "link"])
def test_the_file_is_only_for_its_owner(tmp_path: Path, there: str) -> None:
    """A project that was copied from elsewhere may have a pipe or a link there."""
    path, other = tmp_path / "job.yaml", tmp_path / "other"
    other.write_text("old")
    other.chmod(0o644)
    if there == "pipe":
        os.mkfifo(path)
    elif there == "link":
        path.symlink_to(other)
    else:
        shutil.copy(other, path)
    manifest.write_manifest(path, "new\n")
    assert path.read_text() == "new\n"
    assert path.lstat().st_mode == stat.S_IFREG | 0o600
    assert other.read_text() == "old"


def test_the_command_writes_a_file_and_prints_the_next_steps(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    words = ["deploy", "kubernetes", "pytorch-training:1-cpu-py311", str(source / "train.py")]
    words += ["--hosts", "3", "--gpus", "1", "--registry", "registry.example.org/team/", "--namespace", "ml"]
    result = CliRunner().invoke(app, [*words, "-o", str(path), "--", "--lr", "$x"], catch_exceptions=False)
    assert result.exit_code == 0
    job = next(each for each in yaml.load_all(path.read_text(), yaml.CSafeLoader) if each["kind"] == "Job")
    assert job["metadata"]["name"] == "my-digits-2"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.org/team/pytorch-training:1-cpu-py311"
    assert container["args"] == ["train", "--", "--lr", "$$x"]  # Kubernetes makes one dollar of two
    assert {"name": "SAGEMAKER_PROGRAM", "value": "train.py"} in container["env"]
    assert result.stdout.splitlines() == [
        f"wrote {path}",
        f"check: kubectl create -n ml --dry-run=server -f {path}",
        f"start: kubectl create -n ml -f {path}",
        "logs:  kubectl logs -n ml -f --prefix --tail=-1 --max-log-requests=3 -l app.kubernetes.io/instance="
        "my-digits-2",
    ]
    assert "without --results, the model is lost" in result.stderr
    assert "is a CPU image by its name" in result.stderr


def test_the_command_prints_the_file(source: Path) -> None:
    words = ["deploy", "kubernetes", IMAGE, "--kind", "mpijob", "--results", "models", "-o", "-"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    kinds = [each["kind"] for each in yaml.load_all(result.stdout, yaml.CSafeLoader)]
    assert kinds == ["NetworkPolicy", "ConfigMap", "Secret", "MPIJob"]
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.py", "--source", "s3://a/b"], "train.py: a file of this machine, but --source s3://a/b has the code"),
        (["{}/train.py", "--entry-point", "x.py"], "both name a script"),
        (["{}/train.py", "3"], "not after `--`. Fix: shoal deploy kubernetes IMAGE SCRIPT -- 3"),
        (["{}/train.py", "--epochs", "3"], "put it after `--`: shoal deploy kubernetes IMAGE SCRIPT -- --epochs"),
    ],
)
def test_a_script_that_is_not_clear_is_an_error(source: Path, words: list[str], problem: str) -> None:
    words = [word.format(source) for word in words]
    result = CliRunner().invoke(app, ["deploy", "kubernetes", "any:1", *words])
    assert isinstance(result.exception, UsageError) and problem in str(result.exception)


VALUES: dict[str, Any] = {
    "script": Path("train.py"),
    "arguments": ["--lr", "1"],
    "module": "package.train",
    "kind": WorkloadKind.jobset,
    "name": "other",
    "namespace": "ml",
    "registry": "registry.example.org",
    "source": ".",
    "entry_point": "other.py",
    "hosts": 2,
    "procs_per_host": 2,
    "gpus": 1,
    "channels": ["training=claim"],
    "results": "claim",
    "hyperparameters": ["epochs=1"],
    "distribution": '{"mpi": {"enabled": true}}',
    "env": ["A=1"],
    "env_file": [Path("variables")],
    "secrets": ["TOKEN=secret"],
    "include": ["*.py"],
    "follow_links": True,
    "shm_size": "3g",
    "memory": "8g",
    "cpus": "4",
    "retries": 1,
    "max_restarts": 1,
    "max_seconds": 60,
    "user": 2000,
    "egress": ["10.0.0.0/8"],
    "service_account": "s3",
}


@pytest.mark.parametrize(
    "option", sorted({each.name for each in fields(deploy.KubernetesOptions)} - {"image", "output", "list_files"})
)
def test_every_option_changes_the_job(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("train.py", ""), ("other.py", ""), ("variables", "B=1\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    value = VALUES[option]
    usual: dict[str, Any] = {"entry_point": "train.py"} if option == "source" else {}
    before, after = (deploy.KubernetesOptions(IMAGE, **usual, **given).to_request() for given in ({}, {option: value}))
    assert before != after


@pytest.mark.parametrize(("field", "value"), [("results", "A claim"), ("channels", ["a=A claim"]), ("memory", "lots")])
def test_an_error_names_the_option(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^--{field.removesuffix('s') if field == 'channels' else field}[ :]"):
        deploy.KubernetesOptions(image=IMAGE, **{field: value}).to_request()
