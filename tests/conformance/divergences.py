"""Intended differences from AWS's toolkit, each with its reason. Any other difference is a fault.

python -m tests.conformance.divergences     write the table into docs/conformance.md
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from .compare import ADDITIONAL, DIFFERENT, MISSING, Pair


class Divergence(NamedTuple):
    """A difference that is meant, with the values that it may have, as regular expressions.

    `item` is a pattern of fnmatch, `trees` several of them.
    """

    item: str
    kind: str
    reason: str
    trees: str = "*"
    stock: str = ".*"
    ours: str = ".*"

    def covers(self, tree: str, pair: Pair) -> bool:
        return (
            self.kind == pair.kind
            and fnmatchcase(pair.item, self.item)
            and any(fnmatchcase(tree, pattern) for pattern in self.trees.split())
            and re.fullmatch(self.stock, pair.stock or "", re.DOTALL) is not None
            and re.fullmatch(self.ours, pair.ours or "", re.DOTALL) is not None
        )


def each(
    kind: str, reason: str, *items: str, trees: str = "*", stock: str = ".*", ours: str = ".*"
) -> list[Divergence]:
    """Entries for several items with one reason."""
    return [Divergence(item, kind, reason, trees, stock, ours) for item in items]


_LISTS = "A list arrives as JSON, which every language reads, instead of Python syntax."
ARGUMENTS = (
    Divergence(
        "argv script",
        DIFFERENT,
        "The package is installed, and the script still runs by its file name.",
        "package-setup-script",
        stock="/opt/ml/code/train.py",
        ours="train.py",
    ),
    Divergence("argv --*", DIFFERENT, _LISTS, "*sdk* hp-lists", stock=r"\[.*\[.*", ours=r"\[.*\[.*"),
    Divergence("env SM_USER_ARGS", DIFFERENT, _LISTS, "*sdk* hp-lists", ours=r".*\[.*\[.*"),
    Divergence("mpirun program", DIFFERENT, _LISTS, "mpi-sdk", ours=r".*\[1, \"x\"\].*"),
    Divergence(
        "mpirun program",
        DIFFERENT,
        "A shell script runs with its interpreter, with any file mode, and no shell evaluates its arguments.",
        "mpi-shell",
        stock="/bin/sh -c .*",
        ours="/bin/sh ./train.sh .*",
    ),
    *each(
        ADDITIONAL,
        "No shell can read variables with such names, and dash drops them. They also exist with an underscore.",
        *("env SM_HP_BATCH_SIZE", "env SM_HP_A_B", "env SM_HP__", "env SM_CHANNEL_MY_CHANNEL"),
        trees="hp-names channels",
    ),
)

_FRAMEWORK = "AWS's toolkit needs the name of its framework toolkit. Ours needs none."
_TORCH = "torch and NCCL find these variables without a framework toolkit too."
VARIABLES = (
    *each(
        ADDITIONAL,
        "The newest SDK exports these variables.",
        *("env SM_HOST_COUNT", "env SM_CURRENT_HOST_RANK", "env SM_MASTER_ADDR", "env SM_MASTER_PORT"),
    ),
    *each(
        ADDITIONAL,
        "These are torch's names for a process, so init_process_group() works under every launcher. "
        "A script that is alone has none.",
        *("env RANK", "env WORLD_SIZE", "env LOCAL_RANK", "env LOCAL_WORLD_SIZE"),
    ),
    Divergence(
        "env SMDATAPARALLEL_LOCAL_RANK",
        ADDITIONAL,
        "AWS's library documents it for data parallel ranks, and transformers reads it.",
        "*dataparallel* pytorchddp torch-distributed-*",
    ),
    Divergence(
        "env OMP_NUM_THREADS",
        ADDITIONAL,
        "The ranks of a host share its cores. By default, each would start a thread for every core that it sees.",
        "mpi-* *dataparallel* modelparallel* everything-at-once pytorchddp torch-distributed-* library-* *-cpu-quota",
    ),
    *each(
        ADDITIONAL, _TORCH, "env MASTER_ADDR", "env MASTER_PORT", "env NCCL_SOCKET_IFNAME", "env SM_DLC_TORCH_VERSION"
    ),
    *each(ADDITIONAL, _TORCH, "env NCCL_DEBUG", "env NCCL_IB_DISABLE"),
    Divergence(
        "env SHOAL_JOB",
        ADDITIONAL,
        "`train` finds leftover processes by it and kills them. With AWS's toolkit, daemons outlive the job.",
        ours="[0-9a-f]{16}",
    ),
    *each(
        ADDITIONAL,
        "A script learns how often it was restarted, and how long it may save after SIGTERM.",
        "env SHOAL_RESTART",
        "env SHOAL_STOP_GRACE",
        ours="[0-9]+",
    ),
    Divergence("env GLOO_SOCKET_IFNAME", ADDITIONAL, "gloo uses the same interface as NCCL.", ours="eth0"),
    Divergence(
        "env MASTER_ADDR",
        DIFFERENT,
        "On one host, the loopback address works without a name and without a network.",
        stock="algo-1|instance-1",
        ours=r"127\.0\.0\.1",
    ),
    Divergence(
        "env PYTHONPATH",
        DIFFERENT,
        "It has the code directory and the user's path. The launcher's standard library would break another Python.",
        stock=r"/opt/ml/.*/usr/lib/python3\.11.*",
        ours=r"/opt/ml/(elsewhere/)?(code|sources|other)(:/opt/ml/(mine|code))?",
    ),
    Divergence("env SM_FRAMEWORK_MODULE", DIFFERENT, _FRAMEWORK, ours=""),
    Divergence("env SM_TRAINING_ENV.framework_module", DIFFERENT, _FRAMEWORK, ours="null"),
    Divergence("env SAGEMAKER_TRAINING_MODULE", MISSING, _FRAMEWORK),
    *each(
        DIFFERENT,
        "The user's value stays.",
        *("env NCCL_DEBUG", "env NCCL_IB_DISABLE"),
        trees="users-own-variables",
        ours="VERSION|0",
    ),
    Divergence(
        "env SM_TRAINING_ENV.job_name",
        DIFFERENT,
        "The SDK sends the name as a hyperparameter. AWS's toolkit reads a variable only.",
        stock="null",
        ours='"j.*"',
    ),
    Divergence(
        "env SM_TRAINING_ENV.is_modelparallel_enabled",
        DIFFERENT,
        "The value is true or false. AWS's toolkit reads a variable that it has not exported yet.",
        stock="null",
        ours="true|false",
    ),
    *each(
        DIFFERENT,
        "The variable counts if the hyperparameter is missing.",
        *("env SAGEMAKER_JOB_NAME", "env SAGEMAKER_REGION"),
        trees="job-by-variables region-by-variable",
        stock="",
        ours="job-1|eu-.*",
    ),
    *each(
        DIFFERENT,
        "SAGEMAKER_CONTAINER_LOG_LEVEL is documented. AWS's toolkit reads it and ignores it.",
        *("env SM_LOG_LEVEL", "env SM_TRAINING_ENV.log_level"),
        trees="log-level-by-variable",
        ours="30",
    ),
    *each(
        DIFFERENT,
        "The interface exists. The SDK's local mode names one of SageMaker's interfaces.",
        *("env SM_NETWORK_INTERFACE_NAME", "env SM_TRAINING_ENV.network_interface_name"),
        trees="interface-that-is-not-there",
        ours='"?eth0"?',
    ),
    Divergence("env PWD", MISSING, "AWS's toolkit starts executables with a shell, which sets it.", "executable"),
    *each(
        MISSING,
        "AWS's toolkit imports TensorFlow, which sets them.",
        *("env TF2_BEHAVIOR", "env TPU_ML_PLATFORM"),
        trees="tensorflow-*",
    ),
    *each(
        MISSING,
        "TensorFlow's S3 reader used them until 2.6, and only without AWS_REGION, which SageMaker sets.",
        *("env S3_REGION", "env S3_USE_HTTPS"),
        trees="tensorflow-*",
    ),
)

_EACH_ITS_OWN = (
    "Each host's daemon passes on its own host's variables. AWS's toolkit uses the first host's variables everywhere."
)
_NO_EFA = (
    "There is no EFA device here. A table of instance types would set it, and make a job hang on a machine without one."
)
_MPI_JOBS = "mpi-* dataparallel-* library-*"
_REMOTE = "A remote rank sees its own host. With AWS's toolkit, it sees the first one."
_SSH = "ssh sets them, and ours does not use ssh."
_SHELL = "The rank's own shell enters the code directory of its host and names the rank."
MPIRUN = (
    *each(
        MISSING,
        "`train` marks the ranks' lines itself, and --explain prints the plan.",
        "mpirun -display-map",
        "mpirun -tag-output",
    ),
    Divergence(
        "mpirun -host",
        DIFFERENT,
        "The number of ranks per host is always given, and one host needs no name.",
        ours=r"localhost:\d|(algo-\d(-ce2ec)?:\d,?)+",
    ),
    Divergence(
        "mpirun -mca btl",
        DIFFERENT,
        "One host uses shared memory only, and libfabric is used only if a user asks for it.",
        ours=r"\^openib,ofi(,tcp)?",
    ),
    *each(
        MISSING,
        "One host needs no network.",
        "mpirun -mca btl_tcp_if_include",
        "mpirun -mca plm_rsh_no_tree_spawn",
    ),
    Divergence("mpirun -mca oob_tcp_if_include", DIFFERENT, "One host needs no network.", ours="lo"),
    *each(
        ADDITIONAL,
        "Our agents start mpirun's daemons without sshd, and see their exit codes.",
        *("mpirun -mca plm_rsh_agent", "mpirun -leave-session-attached"),
    ),
    Divergence("mpirun -mca plm", ADDITIONAL, "In a Slurm job too, our agents start the daemons.", ours="rsh"),
    Divergence(
        "mpirun -mca ras", ADDITIONAL, "The plan names the hosts, also in a scheduler's job.", ours=r"\^slurm,.*"
    ),
    *each(
        ADDITIONAL,
        "A failed rank ends the job at once, and `train` knows which rank failed.",
        *("mpirun -mca odls_base_sigkill_timeout", "mpirun -mca state_base_verbose"),
    ),
    Divergence("mpirun -mca plm_rsh_num_concurrent", MISSING, "One host starts no daemon.", stock="1"),
    Divergence("mpirun -mca plm_rsh_num_concurrent", ADDITIONAL, "All daemons start at once.", ours="[23]"),
    *each(
        ADDITIONAL,
        "Ranks are not pinned, as with the MPI launcher.",
        "mpirun -bind-to",
        "mpirun -map-by",
        trees="*dataparallel* pytorchddp",
    ),
    *each(
        MISSING, _EACH_ITS_OWN, "mpirun -x SM_*", "mpirun -x PYTHONPATH", "mpirun -x PATH", "mpirun -x LD_LIBRARY_PATH"
    ),
    *each(MISSING, _EACH_ITS_OWN, "mpirun -x NCCL_SOCKET_IFNAME", "mpirun -x AWS_*", "mpirun -x SMDATAPARALLEL_*"),
    Divergence("mpirun -x SAGEMAKER_INSTANCE_TYPE", MISSING, _EACH_ITS_OWN),
    Divergence("mpirun -x NCCL_DEBUG", MISSING, _EACH_ITS_OWN, stock="INFO"),
    Divergence(
        "mpirun -x NCCL_DEBUG",
        DIFFERENT,
        "Passed once, and the user's value wins.",
        stock="INFO VERSION",
        ours="VERSION",
    ),
    *each(
        MISSING,
        "AWS's toolkit replaces gethostname() with it. Here DNS finds host names.",
        *("mpirun -x LD_PRELOAD", "env LD_PRELOAD"),
        stock=".*gethostname.*",
    ),
    Divergence("mpirun -x NCCL_MIN_NRINGS", MISSING, _EACH_ITS_OWN, stock="4"),
    *each(MISSING, _NO_EFA, "mpirun -x FI_*", "mpirun -x RDMAV_FORK_SAFE", "mpirun -x NCCL_PROTO"),
    *each(MISSING, _NO_EFA, "env FI_*", "env RDMAV_FORK_SAFE", "env NCCL_PROTO"),
    *each(MISSING, "It avoids a hang of torch 2 with AWS's closed library.", "mpirun -x NCCL_ALGO", "env NCCL_ALGO"),
    Divergence("mpirun wrapper", DIFFERENT, _SHELL, ours="sh"),
    Divergence("env OLDPWD", ADDITIONAL, _SHELL, ours="/|/opt/ml/code"),
    Divergence(
        "env LD_LIBRARY_PATH",
        ADDITIONAL,
        "mpirun is called by its path, and its own libraries come first.",
        ours="(/opt/venv/lib:?)+",
    ),
    Divergence("env SM_CURRENT_HOST", DIFFERENT, _REMOTE, _MPI_JOBS, stock="algo-1.*", ours="algo-[23].*"),
    *each(
        DIFFERENT,
        _REMOTE,
        "env SM_RESOURCE_CONFIG",
        "env SM_TRAINING_ENV.*",
        trees=_MPI_JOBS,
        stock=".*algo-1.*|true",
        ours=".*algo-[23].*|false",
    ),
    *each(
        MISSING,
        _SSH,
        "env SSH_*",
        "env LOGNAME",
        "env MOTD_SHOWN",
        "env SHELL",
        "env SHLVL",
        "env USER",
        "env _",
    ),
)

TORCHRUN = (
    *each(
        ADDITIONAL,
        "The rendezvous is the same on one host and on several.",
        *("torchrun --master_addr", "torchrun --master_port", "torchrun --node_rank"),
        ours=r"127\.0\.0\.1|7777|0",
    ),
    Divergence("env MASTER_PORT", DIFFERENT, "The rendezvous is the same on one host and on several.", ours="7777"),
    Divergence("torchrun --monitor_interval", ADDITIONAL, "A failure is noticed at once."),
    Divergence("torchrun --no_python", ADDITIONAL, _SHELL),
    Divergence("torchrun wrapper", DIFFERENT, _SHELL, ours="sh"),
    Divergence("torchrun program", DIFFERENT, _SHELL, ours="/opt/venv/bin/python3 .*"),
    Divergence("env PWD", ADDITIONAL, _SHELL, "torch-*", ours="/opt/ml/code"),
)

_OWN_PROCESS = "A training module runs in its own process, like a script. In AWS's toolkit, `train` itself runs it."
MODULE = (
    *each(ADDITIONAL, _OWN_PROCESS, "env SM_*", trees="training-module"),
    Divergence("argv script", DIFFERENT, _OWN_PROCESS, "training-module", stock=".*/train", ours="-c"),
    Divergence("cwd", DIFFERENT, _OWN_PROCESS, "training-module", stock="/", ours="/opt/ml/code"),
    Divergence("env PYTHONPATH", DIFFERENT, _OWN_PROCESS, "training-module", ours="/opt/ml/code:/opt/ml/code"),
)

_IN_PLACE = "A code directory is used in place."
_NOT_HERE = "The package is built outside the code directory, because that can be read-only or shared by the hosts."
_FOR_ALL = "A requirements.txt is installed for every kind of entry point. AWS's toolkit ignores it for shell scripts."
FILES = (
    *each(MISSING, _NOT_HERE, "file code/build/*", "file code/train*.egg-info/*"),
    Divergence("file code/vendored/*", ADDITIONAL, _FOR_ALL, "requirements-of-shell"),
    *each(
        ADDITIONAL,
        "The file has the launch and its times, for tools.",
        "file output/job.json",
        "file elsewhere/output/job.json",
    ),
    Divergence("file code/train.py", MISSING, _IN_PLACE, "code-directory"),
    Divergence("cwd", DIFFERENT, _IN_PLACE, "code-directory", ours="/opt/ml/sources"),
)

_OWN_CODE = "The script's own exit code is the exit code of the job. AWS's toolkit always exits with 1."
_SIGNAL = "The exit code for a signal is the one that a shell uses."
_CONFIGURATION = "2 means an error in the configuration."
_DEFAULTS = "Missing configuration has defaults, so `docker run` with a script is enough."
_LEVEL = "The name of a log level is accepted."
_STALE = "An earlier job's result is removed."
_ONE_RESULT = "Every host has the same result. With AWS's toolkit, the other hosts report a success."
_FALSE = 'The string "false" means false.'
_REPEATED = "A user's MCA parameter replaces the default, because mpirun refuses it twice."
_SUBMIT = "The setting has its documented meaning. AWS's toolkit ignores it if there is code in /opt/ml/code."
_SHELL_UNDER_TORCHRUN = "torchrun starts any program."
_MISSING_FILES = "hyperparameters-missing resourceconfig-missing inputdataconfig-missing"
_PYPROJECT = "A pyproject.toml makes a package too."
_PACKAGE_UNDER_TORCHRUN = "torchrun starts a package too."
ENDS = (
    Divergence("exit code", DIFFERENT, _PYPROJECT, "package-pyproject-only", stock="1", ours="0"),
    *each(ADDITIONAL, _PYPROJECT, "file output/success", "script alone", trees="package-pyproject-only"),
    Divergence("file output/failure", MISSING, _PYPROJECT, "package-pyproject-only"),
    Divergence("exit code", DIFFERENT, _PACKAGE_UNDER_TORCHRUN, "torch-distributed-package", stock="1", ours="0"),
    *each(
        ADDITIONAL, _PACKAGE_UNDER_TORCHRUN, "file output/success", "script rank 0", trees="torch-distributed-package"
    ),
    Divergence("file output/failure", MISSING, _PACKAGE_UNDER_TORCHRUN, "torch-distributed-package"),
    Divergence("exit code", DIFFERENT, _OWN_CODE, "fails-with-42", stock="1", ours="42"),
    Divergence("exit code", DIFFERENT, _OWN_CODE, "shell-fails-with-3", stock="1", ours="3"),
    Divergence("exit code", DIFFERENT, _OWN_CODE, "mpi-fails torch-distributed-fails", stock="1", ours="7"),
    Divergence("exit code", DIFFERENT, _SIGNAL, "fails-by-sigkill", stock="1", ours="137"),
    Divergence("exit code", DIFFERENT, _SIGNAL, "fails-by-sigsegv", stock="1", ours="139"),
    Divergence("exit code", DIFFERENT, _CONFIGURATION, "script-* hyperparameters-not-json", stock="1", ours="2"),
    Divergence("exit code", DIFFERENT, _DEFAULTS, _MISSING_FILES, stock="2", ours="0"),
    *each(ADDITIONAL, _DEFAULTS, "file output/success", "script alone", trees=_MISSING_FILES),
    Divergence("file output/failure", MISSING, _DEFAULTS, _MISSING_FILES),
    Divergence("exit code", DIFFERENT, _LEVEL, "log-level-by-name", stock="1", ours="0"),
    *each(ADDITIONAL, _LEVEL, "file output/success", "script alone", trees="log-level-by-name"),
    Divergence("file output/failure", MISSING, _LEVEL, "log-level-by-name"),
    Divergence("file output/failure", MISSING, _STALE, "stale-failure"),
    Divergence("file output/success", MISSING, _STALE, "stale-success"),
    Divergence("exit code", DIFFERENT, _ONE_RESULT, "two-hosts-one-fails", stock="0", ours="1"),
    Divergence("file output/success", MISSING, _ONE_RESULT, "two-hosts-one-fails"),
    Divergence("file output/failure", ADDITIONAL, _ONE_RESULT, "two-hosts-one-fails"),
    Divergence("script alone", ADDITIONAL, _FALSE, "mpi-quoted-false"),
    Divergence("script rank 0", MISSING, _FALSE, "mpi-quoted-false"),
    Divergence("exit code", DIFFERENT, _REPEATED, "modelparallel-sdk", stock="1", ours="0"),
    *each(ADDITIONAL, _REPEATED, "file output/success", "script rank *", trees="modelparallel-sdk"),
    Divergence("file output/failure", MISSING, _REPEATED, "modelparallel-sdk"),
    Divergence("exit code", DIFFERENT, _SUBMIT, "submit-directory-by-variable", stock="1", ours="0"),
    *each(ADDITIONAL, _SUBMIT, "file output/success", "script alone", trees="submit-directory-by-variable"),
    Divergence("file output/failure", MISSING, _SUBMIT, "submit-directory-by-variable"),
    Divergence("exit code", DIFFERENT, _SUBMIT, "code-outside", stock="0", ours="9"),
    *each(MISSING, _SUBMIT, "file output/success", "script alone", trees="code-outside"),
    Divergence("file output/failure", ADDITIONAL, _SUBMIT, "code-outside"),
    Divergence("exit code", DIFFERENT, _SHELL_UNDER_TORCHRUN, "torch-distributed-shell", stock="1", ours="0"),
    *each(ADDITIONAL, _SHELL_UNDER_TORCHRUN, "file output/success", "script rank 0", trees="torch-distributed-shell"),
    Divergence("file output/failure", MISSING, _SHELL_UNDER_TORCHRUN, "torch-distributed-shell"),
)

DIVERGENCES: tuple[Divergence, ...] = (*ARGUMENTS, *VARIABLES, *MPIRUN, *TORCHRUN, *MODULE, *FILES, *ENDS)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
_PLACE = re.compile(r"(?<=<!-- divergences -->\n).*(?=<!-- /divergences -->)", re.DOTALL)


def with_table(document: str) -> str:
    """Return the document with the table as it is now: a line for each reason."""
    by_reason: dict[str, list[Divergence]] = {}
    for entry in DIVERGENCES:
        by_reason.setdefault(entry.reason, []).append(entry)
    lines = ["| reason | difference | jobs |", "|---|---|---|"]
    for reason, entries in by_reason.items():
        items = ", ".join(dict.fromkeys(f"`{entry.item}` {entry.kind}" for entry in entries))
        trees = dict.fromkeys(name for entry in entries for name in entry.trees.split())
        where = "all" if "*" in trees else ", ".join(trees).replace("*", "…")
        lines.append(f"| {reason} | {items} | {where} |")
    return _PLACE.sub(lambda _: "\n" + "\n".join(lines) + "\n\n", document)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
