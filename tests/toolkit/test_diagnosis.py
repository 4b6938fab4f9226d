"""The text of the failure file: the rank that failed first, the reason, and the fix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_toolkit.result import diagnosis, newer_torch, setup_failure
from shoal_toolkit.result.result import Failure
from shoal_toolkit.system import failure_facts, memory

from .conftest import TRAIN, Run, Tree, clean_environment
from .loopback import started, two_trees

TRACEBACK = """some output
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise ValueError("boom")
ValueError: boom
and a second line
"""
# As Python 3.11 and later frame it.
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in <module>
  |     raise ExceptionGroup("two", [ValueError("boom"), TypeError("bang")])
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: boom
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 2, in f
    | TypeError: bang
    +------------------------------------
"""
SYNTAX = """  File "/opt/ml/code/train.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax
"""
CPP = """[W] a warning
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check_implementation (most recent call first):
frame #0: c10::Error::Error() + 0x57 (0x7f in /usr/lib/libc10.so)
frame #1: <unknown function> + 0x1
"""
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 3, in <module>
[rank1]: ValueError: boom
E0101 00:00:00.000 1 torch/distributed/elastic] failed (exitcode: 1) local_rank: 1 (pid: 9)
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
a.py FAILED
"""
AT_EXIT = """Traceback (most recent call last):
  File "a.py", line 3, in <module>
ValueError: boom
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "pool.py", line 268, in __del__
ResourceWarning: unclosed running multiprocessing pool
"""
SPAWNED = """Traceback (most recent call last):
  File "a.py", line 9, in <module>
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "a.py", line 5, in work
ValueError: boom
"""
LOADER = """Traceback (most recent call last):
  File "a.py", line 9, in <module>
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "fetch.py", line 5, in fetch
KeyError: 'label'

"""
IN_GRAPH = """Traceback (most recent call last):
  File "a.py", line 9, in <module>
tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:

Detected at node 'mse/sub' defined at (most recent call last):
    File "a.py", line 9, in <module>
      model.fit(x, y)
Node: 'mse/sub'
Incompatible shapes: [4,3] vs. [4,2]
\t [[{{node mse/sub}}]] [Op:__inference_train_function_9]
"""
TENSORFLOW = "tensorflow.python.framework.errors_impl."
LAUNCHED = f"""{TRACEBACK}Traceback (most recent call last):
  File "/usr/bin/accelerate", line 8, in <module>
subprocess.CalledProcessError: Command '['python', 'a.py']' returned non-zero exit status 1.
"""
FIRE = """ERROR: Could not consume arg: --lrr
Usage: train.py run <flags>

For detailed information on this command, run:
  train.py run --help
"""
HYDRA = """[W] a warning
Could not override 'lrr'.
To append to your config use +lrr=0.1
Key 'lrr' is not in struct

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""


def message(
    stderr: str, code: int = 1, command: tuple[str, ...] = ("python", "a.py"), facts: dict[str, int] | None = None
) -> str:
    return diagnosis.explain_failure(Failure(code, "rank 1 on algo-2", command, stderr, facts or {}))


def head(stderr: str, code: int = 1, **facts: int) -> str:
    return message(stderr, code, facts=facts).splitlines()[0]


def test_the_exception_then_who_then_the_traceback() -> None:
    lines = message(TRACEBACK, command=("python", "a.py", "--api_key", "hunter2")).splitlines()
    assert lines[0] == "ValueError: boom"
    assert lines[1] == "rank 1 on algo-2 exited with code 1: python a.py --api_key ******"
    assert lines[-2:] == ["ValueError: boom", "and a second line"]


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (TRACEBACK, "ValueError: boom"),
        (TRACEBACK + "\n".join(f"[W] warning {n}" for n in range(50)), "ValueError: boom"),
        (GROUP, "ExceptionGroup: two (2 sub-exceptions): ValueError: boom; TypeError: bang"),
        (SYNTAX, "SyntaxError: invalid syntax"),
        (SYNTAX + "[W] a warning afterwards\n", "SyntaxError: invalid syntax"),
        (TORCHRUN, "ValueError: boom"),
        (AT_EXIT, "ValueError: boom"),
        (SPAWNED, "ValueError: boom"),
        (LOADER, "KeyError: 'label'"),
        (IN_GRAPH, f"{TENSORFLOW}InvalidArgumentError: Graph execution error: Incompatible shapes: [4,3] vs. [4,2]"),
        (
            IN_GRAPH.replace("Incompatible", "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  Incompatible"),
            f"{TENSORFLOW}InvalidArgumentError: Graph execution error: INVALID_ARGUMENT:  Incompatible shapes: [4,3] "
            "vs. [4,2]",
        ),
        (LAUNCHED, "ValueError: boom"),
        (LAUNCHED[len(TRACEBACK) :], LAUNCHED.splitlines()[-1]),
        (FIRE, "ERROR: Could not consume arg: --lrr"),
        (HYDRA, "Could not override 'lrr'."),
        ("100%|####| 9/9\r10%\rTraceback (most recent call last):\n  File\nE: x\n", "E: x"),
        (
            "\x1b[31mTraceback (most recent call last):\x1b[0m\n  File\n\x1b[1;35mValueError\x1b[0m: boom\n",
            "ValueError: boom",
        ),
        ("Traceback (most recent call last):\n  File\nRuntimeError:\n\tMissing key\n", "RuntimeError: Missing key"),
        ("Traceback (most recent call last):\n  File\nRuntimeError: \n\nA worker\nended\n", "RuntimeError: A worker"),
        ("one\n\nerror: no such file\n\n", "error: no such file"),
        (
            "+ cp a b\ncp: cannot stat 'a': No such file or directory\n",
            "cp: cannot stat 'a': No such file or directory",
        ),
        (f"{'-' * 70}\né\n{'-' * 70}\n", "é"),
        ("", "The script exited with code 1, and wrote nothing to stderr."),
    ],
)
def test_what_names_the_failure(stderr: str, expected: str) -> None:
    assert head(stderr) == expected


@pytest.mark.parametrize(
    ("stderr", "code", "expected"),
    [
        (CPP, 134, "CUDA error: an illegal memory access was encountered"),
        (TRACEBACK + CPP, 134, "CUDA error: an illegal memory access was encountered"),
        (TRACEBACK + CPP, 1, "ValueError: boom"),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread\n  File\n",
            139,
            "Fatal Python error: Segmentation fault",
        ),
        ("[W] a warning\n", 139, "The script was killed by signal 11 (SIGSEGV)."),
        ("", 137, "The script was killed by signal 9 (SIGKILL), and wrote nothing to stderr."),
    ],
)
def test_what_names_a_failure_by_signal(stderr: str, code: int, expected: str) -> None:
    assert head(stderr, code) == expected


LINKER = "a: error while loading shared libraries: libX.so.1: cannot open shared object file: No such file"
IMPORT = "Traceback (most recent call last):\n  File\nImportError: libGL.so.1: cannot open shared object file: x"
MODULE = "Traceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'yaml'"
BUS = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."
BEGIN = "Traceback (most recent call last):\n"
NO_CHANNEL = f"{BEGIN}  File\nKeyError: 'SM_CHANNEL_TRAINING'\n"
NO_FILE = f"{BEGIN}  File\nFileNotFoundError: [Errno 2] No such file or directory: '/opt/ml/input/data/training/x.csv'"
RELATIVE = f"{BEGIN}  File\nImportError: attempted relative import with no known parent package"
HIDDEN = f"{BEGIN}  File\nImportError: cannot import name 'x' from"
CIRCULAR = "(most likely due to a circular import)"
MISSING = f"{BEGIN}  File\nFileNotFoundError: [Errno 2] No such file or directory:"
FLAG = "usage: train.py [-h] [--fp16]\ntrain.py: error: unrecognized arguments: "
NO_DEVICE = f"{BEGIN}  File\nRuntimeError: CUDA error: no CUDA-capable device is detected"
NO_DEVICES = f"""{BEGIN}  File "a.py", line 3, in <module>
    torch.cuda.set_device(rank % torch.cuda.device_count())
                          ~~~~~^~~~~~~~~~~~~~~~~~~~~~~~~~~
ZeroDivisionError: integer modulo by zero
"""
FULL = "OSError: [Errno 28] No space left on device"
LIMITED = {"oom_kills": 2, "memory_limit": 1 << 29}


NEWER = "ImportError: cannot import name"
INSTALLED = "(/usr/local/lib/python3.11/site-packages/torch/x/__init__.py)"
SPEC = "Error while finding module specification for"
NO_MODULE: tuple[int, dict[str, int], str] = (1, {}, "The image has no module accelerate.")
READ_ONLY: tuple[int, dict[str, int], str] = (
    1,
    {},
    "Channels (input/data) are for reading. Fix: write results to SM_OUTPUT_DATA_DIR",
)
S3: tuple[int, dict[str, int], str] = (1, {}, "cannot read or write s3:// addresses")
NO_DRIVER = f"{BEGIN}ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
NO_GPU = (1, {"gpus": 0}, "This host has no GPU.")
TORCH_FULL = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"


@pytest.mark.parametrize(
    ("stderr", "code", "facts", "says"),
    [
        ("", 137, LIMITED, "Out of memory: the kernel killed the script at its container's limit of 512 MiB."),
        ("", 137, {"oom_kills": 0, "machine_oom_kills": 1}, "Out of memory: the machine had none left"),
        (TRACEBACK, 1, LIMITED, "the kernel killed 2 of its processes at the limit of 512 MiB"),
        ("", 135, {"shm": 1 << 26}, "/dev/shm has only 64 MiB, which is too small. Fix: docker run --shm-size"),
        (BUS, 1, {"shm": 1 << 26}, "--shm-size"),
        (LINKER, 127, {}, "The library libX.so.1 is not in this image"),
        (IMPORT, 1, {}, "The library libGL.so.1 is not in this image"),
        (MODULE, 1, {}, "The image has no module yaml. If it is yours, put it next to the script. Otherwise find the"),
        (
            MODULE.replace("yaml", "smddpcommon"),
            1,
            {},
            "AWS publishes it on no package index: install nothing of that name.",
        ),
        (MODULE.replace("yaml", "smdistributed.x"), 1, {}, "install nothing of that name."),
        (
            MODULE.replace("yaml", "sagemaker_training.modules"),
            1,
            {},
            "This image has the modules of sagemaker_training that docs/toolkit.md lists;",
        ),
        (f"{BEGIN}AssertionError: Unknown backend type smddp", 1, {}, "Fix: import smdistributed.dataparallel.torch"),
        (f"{BEGIN}torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++", 1, {}, "ends in -devel"),
        (RELATIVE, 1, {}, "Fix: name the module, such as -m package.module"),
        (
            f"{BEGIN}  File\nRuntimeError: operator torchvision::nms does not exist",
            *(1, {}, "torchvision was built for another torch than this image's"),
        ),
        (f"{FLAG}True", 2, {}, "list its name in the hyperparameter sagemaker_store_true"),
        (f"{FLAG}--lr 0.1 False", 2, {}, "sagemaker_store_true"),
        (
            "go.sh: line 3: aws: command not found",
            127,
            {},
            "The image has no AWS CLI: add awscli to a requirements.txt",
        ),
        (NO_CHANNEL, 1, {}, "The job has no channel training. Fix: shoal run --channel training=DIR"),
        (NO_CHANNEL, 1, {}, 'mount it at input/data/training, and write {"training": {}} into input/config/'),
        (MODULE.replace("yaml", "numpy._core"), 1, {}, "The package numpy is there, but has no numpy._core"),
        (MODULE.replace("yaml", "tensorflow"), 1, {}, "This image is for another framework. Fix: use an image with t"),
        (f"python3.11: {SPEC} 'accelerate.x' (ModuleNotFoundError: No module named 'accelerate')", *NO_MODULE),
        (f"{BEGIN}ImportError: {SPEC} 'accelerate.x' (ModuleNotFoundError: No module named 'accelerate')", *NO_MODULE),
        ("/usr/local/bin/python: No module named accelerate", *NO_MODULE),
        (
            "/bin/python: No module named pkg.__main__; 'pkg' is a package and cannot be directly executed",
            *(1, {}, "The package pkg has no pkg.__main__. Fix: name a module of it, such as -m pkg.train"),
        ),
        ("go.sh: 3: deepspeed: not found", 127, {}, "The image has no command of this name"),
        ("go.sh: line 2: $'\\r': command not found", 127, {}, "line ends of Windows (CRLF)"),
        ("/usr/bin/env: 'bash\\r': No such file or directory", 127, {}, "line ends of Windows (CRLF)"),
        ("./go.sh: /bin/bash^M: bad interpreter: No such file", 126, {}, "line ends of Windows (CRLF)"),
        (f"{BEGIN}OSError: [Errno 30] Read-only file system: '/opt/ml/input/data/x/a.lock'", *READ_ONLY),
        (f"{BEGIN}PermissionError: [Errno 13] Permission denied: '/opt/ml/input/data/x/cache'", *READ_ONLY),
        ("touch: cannot touch '/opt/ml/input/data/x/a': Read-only file system", *READ_ONLY),
        (f"{BEGIN}sqlite3.OperationalError: attempt to write a readonly database", *READ_ONLY),
        (f"{BEGIN}OSError: [Errno 30] Read-only file system: '/x'", 1, {}, "mounted for reading only"),
        (f"{BEGIN}{TENSORFLOW}UnimplementedError: File system scheme 's3' not implemented (file: 's3://b')", *S3),
        (f"{BEGIN}FileNotFoundError: [Errno 2] No such file or directory: 's3://bucket/model/x'", *S3),
        (f"{BEGIN}KeyError: 'TF_CONFIG'", 1, {}, "sagemaker_multi_worker_mirrored_strategy_enabled"),
        (f"{BEGIN}ValueError: Disallowed task type found in cluster spec. Allowed", 1, {}, "has no task `master`"),
        (f"{BEGIN}ValueError: Cluster spec must be non-empty in `tf.distribute", 1, {}, "This job has no TF_CONFIG"),
        (f"{BEGIN}    tf.config.set_visible_devices(gpus[0], 'GPU')\nIndexError: list index out of range", *NO_GPU),
        (f"{BEGIN}    g = list_physical_devices('GPU')[rank]\n      ~^^\nIndexError: list index out of range", *NO_GPU),
        (f"{BEGIN}RuntimeError: {TORCH_FULL}", 1, {"full_mounts": 1, "full:/ckpt": 1}, "no space is left in /ckpt."),
        (f"{BEGIN}OSError: [Errno 122] Disk quota exceeded: '/x'", 1, {}, "The quota of this user"),
        ("go.sh: line 3: SM_CHANNEL_VAL: unbound variable", 1, {}, "shoal run --channel val=DIR"),
        (NO_FILE, 1, {}, "shoal run --channel CHANNEL=DIR"),
        ("ls: cannot access '/opt/ml/input/data/x/y': No such file or directory", 2, {}, "shoal run --channel"),
        (f"{BEGIN}  File\nEOFError: EOF when reading a line", 1, {}, "A job has no terminal"),
        (f"{BEGIN}  File\nbdb.BdbQuit", 1, {}, "To debug: docker run -it IMAGE python train.py."),
        (f"{BEGIN}  File\nOSError: [Errno 24] Too many open files: 'x'", 1, {}, "docker run --ulimit nofile=65536"),
        (f"{BEGIN}  File\nRuntimeError: received 0 items of ancdata", 1, {}, "docker run --ulimit nofile=65536"),
        (f"{HIDDEN} 'random' (/opt/ml/code/random.py)", 1, {}, "the code's file random.py hides it"),
        (f"{HIDDEN} partially initialized module 'queue' {CIRCULAR} (/opt/ml/code/queue.py)", 1, {}, "queue.py hides"),
        (f"{BEGIN}  File\nAttributeError: partially initialized module 'torch' has no", 1, {}, "torch.py hides it"),
        (MODULE.replace("'yaml'", "'email.mime'; 'email' is not a package"), 1, {}, "email.py hides it"),
        (f"{MISSING} 'configs/a.yaml'", 1, {}, "configs/a.yaml is relative to the top of the code"),
        (f"{MISSING} '../data.csv'", 1, {}, "Fix: --source DIR copies a larger one"),
        (NO_DEVICE, 1, {"gpus": 0}, "shoal run --env SHOAL_REHEARSE=1, or train --rehearse"),
        (f"{BEGIN}  File\nValueError: CUDA support is needed, but CUDA not available", 1, {"gpus": 0}, "no GPU"),
        (
            f"{BEGIN}  File\nAttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
            1,
            {"gpus": 0},
            "no GPU",
        ),
        (NO_DEVICES, 1, {"gpus": 0}, "This host has no GPU. To run on CPU with emulated GPUs: shoal run --env"),
        (NO_DEVICE, 1, {"gpus": 2}, "No GPU can be used. Fix: docker run --gpus all"),
        (NO_DRIVER, 1, {"gpus": 2, "rehearsal": 1}, "A rehearsal emulates GPUs for torch's own operators."),
        (NO_DRIVER, 1, {"gpus": 0}, "belongs to NVIDIA's driver, which no image contains, and this host has no GPU."),
        (NO_DRIVER, 1, {"gpus": 2}, "this container has none. Fix: docker run --gpus all"),
        (f"{BEGIN}AssertionError: libcuda.so cannot found!", 1, {"rehearsal": 1}, "Triton's kernels and CUDA"),
        (f"{BEGIN}RuntimeError: 0 active drivers ([]). There", 1, {"rehearsal": 1}, "Triton's kernels and CUDA"),
        ("./go.sh: line 2: foo: command not found", 127, {}, "Exit code 127: a program"),
        ("./go.sh: line 2: ./foo: Permission denied", 126, {}, "Exit code 126: a program exists"),
        (FULL, 1, {}, "A file system was full while the script ran"),
        (FULL, 1, {"full_mounts": 0}, "A file system was full while the script ran"),
        (f"{FULL}: '/opt/ml/model/a.pt'", 1, {"full_mounts": 0}, "The file system of /opt/ml/model/a.pt was full."),
        (FULL, 1, {"full_mounts": 2, "full:/tmp": 1, "full:/data": 1}, "No space is left in /tmp, /data."),
    ],
)
def test_a_known_fix_is_printed(stderr: str, code: int, facts: dict[str, int], says: str) -> None:
    assert says in message(stderr, code, facts=facts).partition("\n\n")[0]


@pytest.mark.parametrize(
    ("stderr", "code", "facts", "absent"),
    [
        ("", 137, {"oom_kills": 0, "machine_oom_kills": 0}, "memory"),
        ("", 135, {"shm": 1 << 30}, "/dev/shm"),
        (NO_DEVICES, 1, {"gpus": 2}, "GPU"),
        (f"{BEGIN}    x = names[0]\nIndexError: list index out of range", 1, {"gpus": 0}, "GPU"),
        (f"{BEGIN}RuntimeError: {TORCH_FULL}", 1, {"full_mounts": 0}, "space"),
        (f"{BEGIN}PermissionError: [Errno 13] Permission denied: '/opt/ml/x'", 1, {}, "Channels"),
        (f"{HIDDEN} 'markupsafe' (/opt/venv/lib/python3.11/site-packages/markupsafe/__init__.py)", 1, {}, "hides"),
        (f"{HIDDEN} 'typing' (/usr/lib/python3.11/typing.py)", 1, {}, "hides"),
        (f"{BEGIN}  File\nAttributeError: module 'torch' has no attribute 'x'", 1, {}, "hides"),
        (f"{MISSING} 'ffmpeg'", 1, {}, "--source"),
        (f"{MISSING} '/data/a.csv'", 1, {}, "--source"),
        (f"{FLAG}--epochs 3", 2, {}, "sagemaker_store_true"),
        (NO_CHANNEL.replace("SM_CHANNEL_TRAINING", "lr"), 1, {}, "channel"),
        (FULL, 1, {"full_mounts": 1, "full:/tmp": 1, "shm": 1 << 30}, "/dev/shm"),
        ("W: libcudart.so.11: cannot open shared object file\n" + TRACEBACK, 1, {}, "library"),
        ("W: libcudart.so.11: cannot open shared object file\nno data\n", 3, {}, "library"),
    ],
)
def test_advice_that_does_not_fit_is_not_printed(stderr: str, code: int, facts: dict[str, int], absent: str) -> None:
    shown = message(stderr, code, facts=facts)
    assert shown.splitlines()[0]
    assert absent not in shown


# What scripts of 2025 and 2026 import first, and what an image with torch 2.0.1 has.
@pytest.mark.parametrize(
    ("exception", "advice"),
    [
        (f"{NEWER} 'fully_shard' from 'torch.distributed.fsdp' {INSTALLED}", "fully_shard came with torch 2.6, and"),
        (f"{NEWER} 'RMSNorm' from 'torch.nn' {INSTALLED}", "torch.nn.RMSNorm came with torch 2.4, and this"),
        (f"{NEWER} 'init_device_mesh' from 'torch.distributed.device_mesh' {INSTALLED}", "came with torch 2.2"),
        ("AttributeError: module 'torch' has no attribute 'accelerator'", "torch.accelerator came with torch 2.6"),
        ("AttributeError: module 'torch.amp' has no attribute 'GradScaler'", "GradScaler came with torch 2.3"),
        ("ModuleNotFoundError: No module named 'torch.nn.attention.flex_attention'", "torch.nn.attention came with"),
        ("ModuleNotFoundError: No module named 'torch.distributed.pipelining'", "such as pytorch-latest"),
    ],
)
def test_a_name_of_a_later_torch_is_explained(exception: str, advice: str) -> None:
    assert advice in newer_torch.find_newer_torch(exception, "2.0.1+cu117")
    assert not newer_torch.find_newer_torch(exception, "2.16.0")


@pytest.mark.parametrize(
    "exception",
    [
        f"{NEWER} 'fully_shard' from 'torch.distributed.fsdp' (/opt/ml/code/torch/distributed/fsdp.py)",
        f"{NEWER} 'no_such_name' from 'torch.distributed.fsdp' {INSTALLED}",
        "ModuleNotFoundError: No module named 'torchvision.transforms.v2'",
        "ValueError: module 'torch.amp' has no GradScaler",
    ],
)
def test_another_missing_name_is_not_explained_by_a_later_torch(exception: str) -> None:
    assert not newer_torch.find_newer_torch(exception, "2.0.1")


def test_every_text_of_the_table_can_be_printed() -> None:
    """With no fact known: a gap in the table must not cost the result."""
    for entry in diagnosis._read_failures()["advice"]:
        text = str(entry.get("head", "") + entry["advice"]).format_map(diagnosis._Placeholders(what="x"))
        assert not re.search(r"\{\w+\}", text)


@pytest.mark.parametrize("letter", ["x", "é", "𝔵"])
def test_the_1024_bytes_that_sagemaker_shows_have_exception_rank_and_fix(letter: str) -> None:
    """1,024 characters or bytes: nobody says which. The file has at most as many bytes."""
    exception = f"ImportError: libX.so: cannot open shared object file {letter * 5000}"
    long = f"Traceback (most recent call last):\n{'  File in f' * 500}\n{exception}"
    shown = diagnosis.explain_failure(Failure(1, f"rank 1 on {letter * 200}", ["python", letter * 900], long, {}))
    assert len(shown.encode()) <= 1024
    lines = shown.splitlines()
    assert lines[0].startswith("ImportError: libX.so: cannot open")
    assert lines[1].startswith("rank 1 on ")
    assert "The library libX.so is not in this image" in lines[2]
    assert "�" not in shown


def test_the_end_of_a_long_traceback_is_kept() -> None:
    frames = "".join(f'  File "x.py", line {n}, in f\n' for n in range(500))
    shown = message(f"Traceback (most recent call last):\n{frames}RuntimeError: deep\n")
    assert len(shown.encode()) <= 1024
    assert shown.endswith('  File "x.py", line 499, in f\nRuntimeError: deep')
    assert shown.partition("\n\n")[2].startswith('  File "x.py", line 4'), "whole lines"


def test_a_secret_that_a_clipped_line_would_cut_is_masked_first() -> None:
    shown = message(f"ValueError: {'x' * 270} MY_TOKEN={'s3cret' * 20}")
    assert "MY_TOKEN=***" in shown
    assert "s3cret" not in shown


# Real failures


@pytest.mark.parametrize(
    ("name", "script", "code", "says"),
    [
        ("go.sh", "set -e\ncat /no/such/file\necho never\n", 1, "cat: /no/such/file: No such file or directory\n"),
        ("go.sh", "no-such-program\n", 127, "Exit code 127"),
        ("train.py", "def f(:\n", 1, "SyntaxError: "),
        ("train.py", "import no_such_module\n", 1, "The image has no module no_such_module. If it"),
        (
            "train.py",
            "import ctypes; ctypes.CDLL('libnone.so.3')\n",
            1,
            "The library libnone.so.3 is not in this image",
        ),
        ("train.py", "import os; os.abort()\n", 134, "was killed by signal 6 (SIGABRT)"),
        ("train.py", "import sys; sys.exit(255)\n", 255, "exited with code 255"),
        ("train.py", "import sys; sys.exit('no data')\n", 1, "no data\nrank 0 on"),
        ("train.py", "raise SystemExit(257)\n", 1, "exited with code 1"),
    ],
)
def test_real_failures_are_named(tree: Tree, run: Run, name: str, script: str, code: int, says: str) -> None:
    tree.script(script, name)
    assert run(SAGEMAKER_PROGRAM=name).code == code
    assert says in tree.failure


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.mpi)])
def test_what_the_script_itself_wrote_into_the_failure_file_comes_first(tree: Tree, run: Run, ranks: int) -> None:
    """AWS's contract asks scripts to do so; here they would else be replaced by "wrote nothing to stderr"."""
    message = "no labels in KeyError: 'SM_CHANNEL_VAL'\nTraceback: here"
    # One rank writes the file: a second could be ended between opening it and writing to it.
    tree.script(
        "import os, sys, time\nif os.environ.get('LOCAL_RANK', '0') != '0': time.sleep(600)\n"
        f"open(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w').write({message!r})\nsys.exit(3)"
    )
    if ranks:
        tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=ranks)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 3
    head, who, advice, *rest = tree.failure.splitlines()
    assert head == "no labels in KeyError: 'SM_CHANNEL_VAL'"
    assert "exited with code 3" in who
    assert "shoal run --channel val=DIR" in advice
    assert rest[-1] == "Traceback: here"


def test_the_failure_file_of_a_script_that_succeeds_is_removed(tree: Tree, run: Run) -> None:
    tree.script("import os; open(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w').write('x')")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 0
    assert tree.outcome() == {"success"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_the_mount_that_is_full_is_named(tree: Tree) -> None:
    full = tree.base / "full hère"
    full.mkdir()
    tree.script(f"file = open({str(full / 'x')!r}, 'wb', buffering=0)\nwhile True: file.write(bytes(1 << 16))")
    mounted = f"mount -t tmpfs -o size=64k none '{full}' && exec {' '.join(TRAIN)}"
    environ = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    subprocess.run(["unshare", "--mount", "sh", "-c", mounted], env=environ, capture_output=True, timeout=60)
    assert f"No space is left in {full}" in tree.failure.replace(", ", "\n"), tree.failure


@pytest.mark.mpi
@pytest.mark.parametrize(("call", "code"), [("Abort(3)", 3), ("Abort(255)", 255), ("Abort(256)", 1)])
def test_an_abort_never_becomes_a_success(tree: Tree, run: Run, call: str, code: int) -> None:
    """The kernel keeps one byte of an exit code: mpirun ends with 0 after MPI_Abort(256)."""
    tree.script(f"from mpi4py import MPI\nworld = MPI.COMM_WORLD\nworld.{call} if world.rank else world.Barrier()")
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    assert run(SAGEMAKER_PROGRAM="train.py").code == code
    assert tree.outcome() == {"failure"}
    assert f"rank 1 on {os.uname().nodename} exited with code {code}" in tree.failure


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_real_exception_group(tree: Tree, run: Run) -> None:
    tree.script("raise ExceptionGroup('two', [ValueError('boom'), TypeError('bang')])")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 1
    assert tree.failure.splitlines()[0] == ("ExceptionGroup: two (2 sub-exceptions): ValueError: boom; TypeError: bang")


# Memory


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


OWN = {"v1": "4:memory:/docker/abc\n3:cpu:/docker/abc\n", "v2": "0::/\n", "v2-nested": "0::/job\n"}
GROUP_FILES = {
    "v1": ("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\noom_kill {}\n"),
    "v2": ("sys/fs/cgroup/memory.events", "low 0\noom 7\noom_kill {}\noom_group_kill 9\n"),
    "v2-nested": ("sys/fs/cgroup/job/memory.events", "oom 7\noom_kill {}\n"),
}
LIMITS = {
    "v1": ("sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n"),
    "v2": ("sys/fs/cgroup/memory.max", "536870912\n"),
    "v2-nested": ("sys/fs/cgroup/job/memory.max", "536870912\n"),
}


@pytest.mark.parametrize("kind", OWN)
def test_kills_since_the_start_are_counted(tmp_path: Path, kind: str) -> None:
    counter, form = GROUP_FILES[kind]
    write(tmp_path, {"proc/self/cgroup": OWN[kind], counter: form.format(3), "proc/vmstat": "pgpgin 1\noom_kill 5\n"})
    before = memory.count_oom_kills(str(tmp_path))
    assert before == (3, 5)
    write(tmp_path, {counter: form.format(4), "proc/vmstat": "oom_kill 7\n", **dict([LIMITS[kind]])})
    assert failure_facts.collect_memory_facts(before, str(tmp_path)) == {
        "oom_kills": 1,
        "machine_oom_kills": 2,
        "memory_limit": 1 << 29,
        "shm": 0,
    }


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", ""])
def test_a_group_without_a_memory_limit_has_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": text})
    facts = failure_facts.collect_memory_facts(memory.count_oom_kills(str(tmp_path)), str(tmp_path))
    assert (facts["memory_limit"], facts["oom_kills"]) == (0, 0)


GROUPS = Path("/sys/fs/cgroup/memory")
KILLED = "Out of memory: the kernel killed the script at its container's limit of 96 MiB.\n"
CAN_LIMIT = os.geteuid() == 0 and os.access(GROUPS / "memory.limit_in_bytes", os.W_OK)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory group that holds 96 MiB."""
    group = GROUPS / f"shoal-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(96 << 20))
    yield group
    remove(group, time.monotonic() + 20)


def remove(group: Path, deadline: float) -> None:
    """Remove a memory group; the kernel is busy with it until the last process that it has killed is gone."""
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


@pytest.mark.skipif(not CAN_LIMIT, reason="needs root, and version 1 of memory control groups")
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.mpi)])
def test_a_script_that_the_kernel_kills_for_lack_of_memory(tree: Tree, limited: Path, ranks: int) -> None:
    """Defect 13: the stock toolkit's hint never comes."""
    tree.script("import os, time\nif os.environ.get('RANK', '0') == '0': kept = bytearray(256 << 20)\ntime.sleep(60)")
    if ranks:
        tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=ranks)
    tree.hosts("algo-1", "algo-1")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    enter = ["/bin/sh", "-c", f'echo $$ >{limited}/cgroup.procs; exec "$@"', "sh", *TRAIN]
    assert shutil.which("mpirun", path=str(Path(sys.executable).parent)) or not ranks
    done = subprocess.run(enter, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 137, done.stderr
    assert tree.failure.startswith(KILLED)
    assert "rank 0 on algo-1 was killed by signal 9 (SIGKILL)" in tree.failure


@pytest.mark.skipif(not CAN_LIMIT, reason="needs root, and version 1 of memory control groups")
def test_a_worker_reports_its_lack_of_memory_to_the_first_host(tmp_path: Path, limited: Path) -> None:
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script("import os, time\nif os.environ['RANK'] == '1': kept = bytearray(256 << 20)\ntime.sleep(600)")
    with started(trees, (":", f"echo $$ >{limited}/cgroup.procs")) as trains:
        # With a busy disk the kernel reads the group's programs again and again before it kills.
        assert [train.wait(240) for train in trains] == [137, 137]
    assert all(tree.failure.startswith(f"{KILLED}rank 1 on 127.0.0.2 was killed") for tree in trees)


@pytest.mark.parametrize("begin", ["Traceback (most recent call last):\nValueError: in user code:\n", "RuntimeError: "])
@pytest.mark.parametrize(
    "part", ["secret 'a=", '\\"a":token@', "CUDA out of memory ", "    ValueError: a", "[[{{node a", "a b\n "]
)
def test_any_end_of_a_script_is_explained_at_once(begin: str, part: str) -> None:
    """A script chooses its last lines. No expression takes the square of their length."""
    text = (begin + part * 16_384)[:16_384]
    began = time.monotonic()
    assert diagnosis.explain_failure(Failure(1, "rank 0", ["python3"], text))
    setup_failure.explain_pip_failure(text)
    assert time.monotonic() - began < 2
