"""The jobs that both toolkits run, as a table. `SDK_*` are sent by the SageMaker SDK in exactly this form."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from .layout import PYTORCH, RECORD, TENSORFLOW, Tree

ROOT = Path(__file__).parents[2]
TWO_HOSTS = ("algo-1", "algo-2")
THREE_HOSTS = ("algo-1", "algo-2", "algo-3")
SDK_HOSTS = ("algo-1-ce2ec", "algo-2-ce2ec")

SDK_BASE = {
    "sagemaker_submit_directory": '"/opt/ml/code"',
    "sagemaker_program": '"train.py"',
    "sagemaker_container_log_level": "20",
    "sagemaker_job_name": '"job-2026-01-01-00-00-00-000"',
    "sagemaker_region": '"us-west-2"',
}
SDK_VALUES = {"lr": "0.1", "name": '"a b"', "flag": "true", "n": "null", "lst": '[1, "x"]'}
SDK_DATAPARALLEL = {
    "sagemaker_distributed_dataparallel_enabled": "true",
    "sagemaker_instance_type": '"local"',
    "sagemaker_distributed_dataparallel_custom_mpi_options": '"-verbose -x NCCL_DEBUG=VERSION"',
}
SDK_MPI = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
    "sagemaker_mpi_custom_mpi_options": '"--NCCL_DEBUG INFO"',
}
SDK_MODELPARALLEL = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
    "sagemaker_mpi_custom_mpi_options": '"--mca btl_vader_single_copy_mechanism none -x FI_EFA_USE_DEVICE_RDMA=1"',
    "mp_parameters": '{"microbatches": 4, "placement_strategy": "spread", "pipeline": "interleaved", '
    '"optimize": "speed", "partitions": 2, "ddp": true}',
    "sagemaker_distributed_dataparallel_enabled": "false",
    "sagemaker_instance_type": '"local"',
}
SDK_TORCH_DISTRIBUTED = {"sagemaker_torch_distributed_enabled": "true", "sagemaker_instance_type": '"local"'}
SDK_RESOURCES = {"network_interface_name": "eth0", "current_instance_type": "local"}
TWO_RANKS = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"}
ONE_RANK = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "1"}
DATAPARALLEL = {"sagemaker_distributed_dataparallel_enabled": "true", "sagemaker_instance_type": '"local"'}
TWO_DATAPARALLEL = {**DATAPARALLEL, "sagemaker_mpi_num_of_processes_per_host": "2"}
# Packages are installed from the code directory itself, with the image's own setuptools.
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_USE_PEP517": "1", "PIP_NO_CACHE_DIR": "1"}

SHELL = '#!/bin/sh\nexec python3 /recorder/record.py "$0" "$@"\n'
SETUP = "from setuptools import setup\nsetup(name='trainer', version='1.0', packages=['trainer'])\n"
PACKAGE = {"setup.py": SETUP, "trainer/__init__.py": "", "trainer/__main__.py": RECORD}
MODULE_SETUP = "from setuptools import setup\nsetup(name='train', version='1.0', py_modules=['train'])\n"
PROJECT = '[project]\nname = "{0}"\nversion = "1.0"\n[tool.setuptools]\n{1} = ["{0}"]\n'
PYPROJECT = PROJECT.format("trainer", "packages")
VENDORED = {
    "vendored/pyproject.toml": PROJECT.format("vendored", "py-modules"),
    "vendored/vendored.py": "",
    "requirements.txt": "./vendored\n",
}
WRITES = f"""{RECORD}
for name in ("model/model.bin", "model/sub/part.bin", "output/data/metrics.csv", "checkpoints/1.bin"):
    path = Path("/opt/ml", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
"""
OTHER_FAILS = """\
while len(os.listdir('/record')) < 2:  # both have started
    time.sleep(0.05)
sys.exit(7 * (os.environ['OMPI_COMM_WORLD_RANK'] == '1'))
"""
# Our library in a container that brings the stock toolkit: all ranks leave what they have got.
ALLREDUCE = f"""{RECORD}
import torch
import smdistributed.dataparallel.torch.distributed as dist
dist.init_process_group()
sums = torch.arange(1000.0) * (dist.get_rank() + 1)
dist.all_reduce(sums)
found = f"{{dist.get_world_size()}} ranks: {{sums.sum().item()}}"
Path(f"/opt/ml/output/data/sum-{{dist.get_rank()}}").write_text(found)
"""
DIGITS = {
    path.name: path.read_text()
    for path in (
        ROOT / "examples" / "digits" / "train.py",
        ROOT / "tests" / "library" / "ranks" / "first_generation.py",
    )
}


def ends_with(code: str) -> dict[str, str]:
    """A script that does this after it has reported."""
    return {"train.py": f"{RECORD}{code}\n"}


def archive(files: Mapping[str, str]) -> bytes:
    """A tar.gz of these files, as the SDK packs sources; without the time of day, so that the job stays the same."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def groups(**members: tuple[str, ...]) -> list[dict[str, object]]:
    """The instance groups of resourceconfig.json, of one instance type each."""
    return [
        {"instance_group_name": name, "instance_type": f"ml.c5.{number}xlarge", "hosts": list(hosts)}
        for number, (name, hosts) in enumerate(members.items(), start=1)
    ]


def of_type(instance_type: str) -> dict[str, str]:
    return {"current_instance_type": instance_type}


HYPERPARAMETERS = (
    Tree("sdk-base", {**SDK_BASE, **SDK_VALUES}, resources=SDK_RESOURCES, framework=PYTORCH),
    Tree("sdk-base-without-framework", {**SDK_BASE, **SDK_VALUES}, resources=SDK_RESOURCES),
    Tree("hp-none"),
    Tree(
        "hp-numbers",
        {"version": "1.10", "tiny": "1e-3", "huge": "1e400", "big": "123456789012345678901234567890", "minus": "-5"}
        | {"nan": "NaN", "infinity": "Infinity", "zeros": "007", "plus": "+1", "float": "2.0", "hex": "0x10"},
    ),
    Tree(
        "hp-strings",
        {"quoted": '"adam"', "raw": "adam", "empty": "", "quoted_empty": '""', "spaces": '" a  b "'}
        | {"line": '"a\\nb"', "unicode": '"naïve 日本 🐟"', "shell": '"$HOME `id` \\"x\\" \'y\' ; & | * ~"'}
        | {"dashes": '"--lr"', "equals": "a=b", "number": '"0.1"', "double": '"\\"a\\""', "broken": '{"a": '}
        | {"slash": "C:\\\\dir", "true": '"true"'},
    ),
    Tree("hp-booleans", {"yes": "true", "no": "false", "nothing": "null", "python": "True", "none": "None"}),
    Tree("hp-lists", {"layers": "[64, 32]", "mixed": '[1, "x", null, true, [2]]', "empty": "[]"}),
    Tree("hp-objects", {"schedule": '{"warmup": 5, "decay": 0.1}', "nested": '{"a": {"b": 1}, "l": [1]}', "e": "{}"}),
    Tree(
        "hp-names",
        {"x": "1", "Z": "2", "batch-size": "3", "a.b": "4", "CamelCase": "5", "under_score": "6", "n1": "7", "ä": "8"},
    ),
    Tree("hp-name-twice", {"batch-size": "1", "batch_size": "2"}),
    Tree("hp-not-strings", {"lr": 0.1, "flag": True, "nothing": None, "layers": [1, 2], "text": "adam"}),
    Tree("hp-many", {f"p{number:03}": str(number) for number in range(300)}),
    Tree("hp-long", {"text": json.dumps("long " * 4000)}),
    Tree("tuning", {"_tuning_objective_metric": '"accuracy"', "lr": "0.1"}),
    Tree(
        "hp-reserved",
        {"sagemaker_enable_cloudwatch_metrics": "true", "sagemaker_region": '"eu-west-1"', "sagemaker_job_name": '"j"'}
        | {
            "default_user_module_name": '"m"',
            "sagemaker_own_key": '"kept"',
            "sagemaker_instance_type": '"ml.c5.xlarge"',
        },
    ),
    Tree("mp-parameters-alone", {"mp_parameters": SDK_MODELPARALLEL["mp_parameters"]}),
    Tree("log-level-10", {"sagemaker_container_log_level": "10"}),
    Tree("log-level-40", {"sagemaker_container_log_level": "40"}),
    Tree("hyperparameters-empty", program="", environ={"SAGEMAKER_PROGRAM": "train.py"}),
)

ENTRIES = (
    Tree("script-writes", files={"train.py": WRITES}),
    Tree("script-in-a-folder", {"lr": "0.1"}, files={"src/train.py": RECORD}, program="src/train.py"),
    Tree("script-with-odd-name", files={"train-v1.2+a.py": RECORD}, program="train-v1.2+a.py"),
    Tree("shell", {"lr": "0.1", "text": "\"a b $HOME 'q'\""}, files={"train.sh": SHELL}, program="train.sh"),
    Tree("shell-by-bash", files={"train.sh": SHELL.replace("/bin/sh", "/bin/bash")}, program="train.sh"),
    Tree("executable", {"lr": "0.1"}, files={"train": f"#!/opt/venv/bin/python3\n{RECORD}"}, program="train"),
    Tree("executable-in-a-folder", files={"bin/train": SHELL}, program="bin/train"),
    Tree("requirements", files={"train.py": RECORD + "import vendored\n", **VENDORED}, environ=PIP),
    Tree(
        "requirements-of-shell",
        files={"train.sh": SHELL + "python3 -c 'import vendored'\n", **VENDORED},
        program="train.sh",
        environ=PIP,
    ),
    Tree(
        "requirements-that-fail",
        files={"train.py": RECORD, "requirements.txt": "no-such-package-at-all==9\n"},
        environ=PIP,
    ),
    Tree("package-setup", {"lr": "0.1"}, files=PACKAGE, program="trainer", environ=PIP),
    Tree("package-setup-script", {"lr": "0.1"}, files={"setup.py": MODULE_SETUP, "train.py": RECORD}, environ=PIP),
    Tree("package-setup-requirements", files={**PACKAGE, **VENDORED}, program="trainer", environ=PIP),
    Tree(
        "package-setup-fails",
        files={**PACKAGE, "setup.py": "raise SystemExit('no setup')\n"},
        program="trainer",
        environ=PIP,
    ),
    Tree(
        "package-pyproject",
        files={**PACKAGE, "pyproject.toml": PYPROJECT, "setup.py": "from setuptools import setup\nsetup()\n"},
        program="trainer",
        environ=PIP,
    ),
    Tree(
        "package-pyproject-only",
        files={"pyproject.toml": PYPROJECT, "trainer/__init__.py": "", "trainer/__main__.py": RECORD},
        program="trainer",
        environ=PIP,
    ),
    Tree(
        "script-beside-pyproject",
        files={"train.py": RECORD, "pyproject.toml": "[tool.ruff]\nline-length = 120\n"},
        environ=PIP,
    ),
    Tree(
        "code-directory",
        {"sagemaker_submit_directory": '"/opt/ml/sources"'},
        files={},
        besides={"sources/train.py": RECORD},
    ),
    Tree(
        "code-archive",
        {"sagemaker_submit_directory": '"/opt/ml/sourcedir.tar.gz"'},
        files={},
        besides={"sourcedir.tar.gz": archive({"train.py": RECORD})},
    ),
    Tree("code-one-file", {"sagemaker_submit_directory": '"/opt/ml/train.py"'}, files={}, besides={"train.py": RECORD}),
    Tree(
        "code-outside",
        {"sagemaker_submit_directory": '"/opt/ml/sources"'},
        besides={"sources/train.py": "raise SystemExit(9)\n"},
    ),
)

FAILURES = (
    Tree("fails-by-exception", files=ends_with("raise ValueError('wrong')")),
    Tree("fails-under-framework", files=ends_with("raise ValueError('wrong')"), framework=PYTORCH),
    Tree("fails-with-42", files=ends_with("raise SystemExit(42)")),
    Tree("fails-with-a-message", files=ends_with("sys.exit('told why')")),
    Tree("fails-by-sigkill", files=ends_with("os.kill(os.getpid(), 9)")),
    Tree("fails-by-sigsegv", files=ends_with("os.kill(os.getpid(), 11)")),
    Tree("shell-fails-with-3", files={"train.sh": SHELL.replace("exec ", "") + "exit 3\n"}, program="train.sh"),
    Tree("script-missing", program="trian.py"),
    Tree("script-outside", program="../train.py"),
    Tree("script-not-named", program=""),
    Tree("hyperparameters-not-json", besides={"input/config/hyperparameters.json": "{lr: 1}"}),
    Tree(
        "hyperparameters-missing",
        besides={"input/config/hyperparameters.json": None},
        environ={"SAGEMAKER_PROGRAM": "train.py"},
    ),
    Tree("resourceconfig-missing", besides={"input/config/resourceconfig.json": None}),
    Tree("inputdataconfig-missing", besides={"input/config/inputdataconfig.json": None}),
    Tree("log-level-by-name", {"sagemaker_container_log_level": '"INFO"'}),
    Tree("stale-failure", besides={"output/failure": "of an earlier job"}),
    Tree("stale-success", files=ends_with("raise SystemExit(1)"), besides={"output/success": ""}),
)

CHANNELS_AND_VARIABLES = (
    Tree(
        "channels",
        channels={
            name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
            for name in ("training", "validation", "my-channel", "Upper", "z")
        },
    ),
    Tree("channel-config", channels={"train": {"ContentType": "application/x-recordio", "TrainingInputMode": "Pipe"}}),
    Tree("program-by-variable", {"sagemaker_program": '"other.py"'}, environ={"SAGEMAKER_PROGRAM": "train.py"}),
    Tree(
        "submit-directory-by-variable",
        files={"train.py": "raise SystemExit(9)\n"},
        besides={"other/train.py": RECORD},
        environ={"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/other"},
    ),
    Tree("log-level-by-variable", environ={"SAGEMAKER_CONTAINER_LOG_LEVEL": "30"}),
    Tree(
        "job-by-variables",
        environ={
            "TRAINING_JOB_NAME": "job-1",
            "TRAINING_JOB_ARN": "arn:aws:sagemaker:eu-west-1:1:training-job/job-1",
            "AWS_REGION": "eu-west-1",
        },
    ),
    Tree("region-by-variable", environ={"SAGEMAKER_REGION": "eu-central-1"}),
    Tree("region-twice", {"sagemaker_region": '"us-west-2"'}, environ={"AWS_REGION": "eu-west-1"}),
    Tree(
        "users-own-variables",
        environ={"NCCL_DEBUG": "VERSION", "NCCL_IB_DISABLE": "0", "PYTHONPATH": "/opt/ml/mine"}
        | {"MY_OWN": "kept", "SM_MY_OWN": "kept", "OMP_NUM_THREADS": "3"},
        framework=PYTORCH,
    ),
    Tree(
        "base-directory",
        {"lr": "0.1"},
        environ={"SAGEMAKER_BASE_DIR": "/opt/ml/elsewhere"},
        files={},
        besides={
            "elsewhere/code/train.py": RECORD,
            "elsewhere/input/config/hyperparameters.json": '{"sagemaker_program": "train.py", "lr": "2"}',
            "elsewhere/input/config/resourceconfig.json": '{"current_host": "algo-1", "hosts": ["algo-1"]}',
            "elsewhere/input/config/inputdataconfig.json": "{}",
            "elsewhere/output/data/kept": "",
        },
    ),
    Tree(
        "training-module",
        files={"mine.py": f"def main():\n    exec({RECORD!r}, {{}})\n"},
        environ={"SAGEMAKER_TRAINING_MODULE": "mine:main", "PYTHONPATH": "/opt/ml/code"},
    ),
)

RESOURCES = (
    Tree(
        "instance-type",
        resources={
            "current_instance_type": "ml.c5.xlarge",
            "current_group_name": "homogeneousCluster",
            "network_interface_name": "eth0",
            "instance_groups": groups(homogeneousCluster=("algo-1",)),
        },
    ),
    Tree("topology", resources={"topology": [{"hostName": "algo-1", "capacityUnitId": "u1"}]}),
    Tree(
        "interface-that-is-not-there",
        resources={"network_interface_name": "ethwe", "current_instance_type": "local"},
    ),
    Tree("two-hosts", {"lr": "0.1"}, hosts=SDK_HOSTS, resources=SDK_RESOURCES, framework=PYTORCH),
    Tree(
        "two-groups",
        hosts=TWO_HOSTS,
        group_of={"algo-1": "g1", "algo-2": "g2"},
        resources={"instance_groups": groups(g1=("algo-1",), g2=("algo-2",))},
    ),
    Tree(
        "two-hosts-one-fails",
        hosts=TWO_HOSTS,
        files=ends_with("sys.exit(os.environ['SM_CURRENT_HOST'] == 'algo-2')"),
    ),
)

MPI = (
    Tree("mpi-one-process", {**SDK_BASE, "sagemaker_mpi_enabled": "true"}),
    Tree("mpi-two-hosts", {"lr": "0.1", **TWO_RANKS}, hosts=TWO_HOSTS),
    Tree("mpi-two-hosts-one-rank", {"lr": "0.1", **ONE_RANK}, hosts=TWO_HOSTS),
    Tree("mpi-three-of-four", {**TWO_RANKS, "sagemaker_mpi_num_processes": "3"}, hosts=TWO_HOSTS),
    Tree("mpi-shell", {"lr": "0.1", **TWO_RANKS}, files={"train.sh": SHELL}, program="train.sh"),
    Tree("mpi-package", {"lr": "0.1", **ONE_RANK}, files=PACKAGE, program="trainer", environ=PIP),
    Tree(
        "mpi-options",
        {
            **TWO_RANKS,
            "sagemaker_mpi_custom_mpi_options": '"-x NCCL_DEBUG=VERSION -x MY_OWN=1 --mca orte_base_help_aggregate 0"',
        },
    ),
    Tree("mpi-fails", TWO_RANKS, files=ends_with(OTHER_FAILS)),
    Tree("mpi-on-p4d", ONE_RANK, resources=of_type("ml.p4d.24xlarge")),
    Tree("mpi-on-g4dn", ONE_RANK, resources=of_type("ml.g4dn.12xlarge")),
    Tree(
        "mpi-credentials",
        ONE_RANK,
        environ={"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_SESSION_TOKEN": "token"},
    ),
    Tree("mpi-off", {"sagemaker_mpi_enabled": "false", "sagemaker_mpi_num_of_processes_per_host": "2"}),
    Tree("mpi-python-true", {"sagemaker_mpi_enabled": "True"}),
    Tree("mpi-quoted-true", {"sagemaker_mpi_enabled": '"true"'}),
    Tree("mpi-quoted-false", {"sagemaker_mpi_enabled": '"false"'}),
    Tree(
        "mpi-one-group-of-two",
        {**ONE_RANK, "sagemaker_distribution_instance_groups": '["g1"]'},
        hosts=THREE_HOSTS,
        group_of={"algo-1": "g1", "algo-2": "g1", "algo-3": "g2"},
        resources={"instance_groups": groups(g1=TWO_HOSTS, g2=("algo-3",))},
    ),
)

FRAMEWORK_LAUNCHERS = (
    Tree("mpi-sdk", {**SDK_BASE, **SDK_VALUES, **SDK_MPI}, resources=SDK_RESOURCES),
    Tree("modelparallel-sdk", {**SDK_BASE, **SDK_MODELPARALLEL}, resources=SDK_RESOURCES),
    Tree("modelparallel", {**ONE_RANK, "mp_parameters": SDK_MODELPARALLEL["mp_parameters"]}),
    Tree("dataparallel-sdk", {**SDK_BASE, **SDK_DATAPARALLEL}, resources=SDK_RESOURCES),
    Tree("dataparallel-sdk-two-hosts", {**SDK_BASE, **SDK_DATAPARALLEL}, hosts=SDK_HOSTS, resources=SDK_RESOURCES),
    Tree(
        "dataparallel-on-p4d",
        {
            "sagemaker_distributed_dataparallel_enabled": "true",
            "sagemaker_instance_type": '"ml.p4d.24xlarge"',
            "sagemaker_distributed_dataparallel_custom_mpi_options": '""',
        },
    ),
    Tree(
        "dataparallel-one-group-of-two",
        {
            "sagemaker_distributed_dataparallel_enabled": "true",
            "sagemaker_instance_type": "null",
            "sagemaker_distribution_instance_groups": '["g1"]',
        },
        hosts=TWO_HOSTS,
        group_of={"algo-1": "g1", "algo-2": "g2"},
        resources={**of_type("ml.c5.xlarge"), "instance_groups": groups(g1=("algo-1",), g2=("algo-2",))},
    ),
    Tree("pytorchddp", {**SDK_BASE, "sagemaker_pytorch_ddp_enabled": "true", "sagemaker_instance_type": '"local"'}),
    Tree("torch-distributed-sdk", {**SDK_BASE, **SDK_TORCH_DISTRIBUTED, "lr": "0.1"}, resources=SDK_RESOURCES),
    # OMP_NUM_THREADS: torchrun sets 1 for several ranks, ours depends on the machine's cores; the user's own stays.
    Tree(
        "torch-distributed-two-ranks",
        {**SDK_TORCH_DISTRIBUTED, "sagemaker_mpi_num_of_processes_per_host": "2"},
        environ={"OMP_NUM_THREADS": "3"},
    ),
    Tree("torch-distributed-two-hosts", {**SDK_TORCH_DISTRIBUTED, "lr": "0.1"}, hosts=TWO_HOSTS),
    Tree("torch-distributed-fails", SDK_TORCH_DISTRIBUTED, files=ends_with("raise SystemExit(7)")),
    Tree("torch-distributed-shell", SDK_TORCH_DISTRIBUTED, files={"train.sh": SHELL}, program="train.sh"),
    Tree("torch-distributed-package", SDK_TORCH_DISTRIBUTED, files=PACKAGE, program="trainer", environ=PIP),
    Tree("torch-distributed-on-p4d", SDK_TORCH_DISTRIBUTED, resources=of_type("ml.p4d.24xlarge")),
    Tree(
        "everything-at-once",
        {**TWO_RANKS, **SDK_DATAPARALLEL, **SDK_TORCH_DISTRIBUTED, "sagemaker_pytorch_ddp_enabled": "true"},
    ),
    Tree("library-dataparallel", TWO_DATAPARALLEL, {"train.py": ALLREDUCE}),
    Tree("library-dataparallel-two-hosts", DATAPARALLEL, {"train.py": ALLREDUCE}, hosts=TWO_HOSTS),
    Tree("library-mpi", TWO_RANKS, {"train.py": ALLREDUCE}),
)

MODEL_DIR = {"model_dir": '"/opt/ml/model"'}
PARAMETER_SERVER = {"sagemaker_parameter_server_enabled": "true"}
MIRRORED = {"sagemaker_multi_worker_mirrored_strategy_enabled": "true"}
TENSORFLOW_JOBS = (
    Tree("tensorflow-sdk", {**SDK_BASE, **MODEL_DIR}, resources=SDK_RESOURCES),
    Tree("tensorflow-tuning", {**MODEL_DIR, "_tuning_objective_metric": '"loss"'}),
    Tree("tensorflow-parameter-server", {**PARAMETER_SERVER, **MODEL_DIR}, hosts=TWO_HOSTS),
    Tree("tensorflow-parameter-server-one-host", {**PARAMETER_SERVER, **MODEL_DIR}),
    Tree("tensorflow-mirrored", {**MIRRORED, **MODEL_DIR}, hosts=TWO_HOSTS),
    Tree("tensorflow-mirrored-one-host", {**MIRRORED, **MODEL_DIR}),
)

TREES = (
    *(tree._replace(framework=PYTORCH) for tree in FRAMEWORK_LAUNCHERS),
    *MPI,
    *(tree._replace(framework=TENSORFLOW) for tree in TENSORFLOW_JOBS),
    *RESOURCES,
    *FAILURES,
    *ENTRIES,
    *CHANNELS_AND_VARIABLES,
    *HYPERPARAMETERS,
)
