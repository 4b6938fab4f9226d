"""smdistributed.dataparallel.tensorflow, on real ranks."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from tests.launching import Alone, Mpirun, TwoRanks, find_port
from tests.repeats import in_soak

RANKS = Path(__file__).parent / "ranks"
EXAMPLES = Path(__file__).parents[2] / "examples"


def as_hosts(ranks_per_host: int, script: str) -> tuple[object, ...]:
    """Arguments of a Python that gives itself the name of a host before it becomes the script."""
    code = (
        "import os, sys\n"
        f"os.environ['SMDDP_HOST'] = str(int(os.environ['OMPI_COMM_WORLD_RANK']) // {ranks_per_host})\n"
        "python = os.environ['PYTHON'].split()\n"
        "os.execv(python[0], [*python, *sys.argv[1:]])\n"
    )
    return "-c", code, RANKS / script


@pytest.mark.mpi
def test_every_function(mpirun: Mpirun) -> None:
    assert mpirun(2, RANKS / "collectives.py").count("equal [shm: 2 ranks on one host]") == 2


@pytest.mark.mpi
def test_functions_of_a_rank_alone(mpirun: Mpirun) -> None:
    cases = ("structures", "horovod_names", "tape", "version_1")
    assert mpirun(1, RANKS / "collectives.py", *cases).count("equal [shm: 1 rank on one host]") == 1


@pytest.mark.mpi
def test_functions_between_hosts(mpirun: Mpirun, free_port: int) -> None:
    cases = ("structures", "in_order", "tape", "version_1")  # of dtypes and reductions, tests/library/test_engines.py
    output = mpirun(2, *as_hosts(1, "collectives.py"), *cases, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    assert output.count("equal [mpi: one rank on each host]") == 2


@pytest.mark.mpi
def test_training_is_that_of_one_process(mpirun: Mpirun) -> None:
    assert mpirun(2, RANKS / "training.py", "on_a_host").count("equal") == 2


@pytest.mark.mpi
def test_training_on_several_hosts_is_that_of_one_process(mpirun: Mpirun, free_port: int) -> None:
    output = mpirun(
        4, *as_hosts(2, "training.py"), "between_hosts", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port)
    )
    assert output.count("equal [shm+mpi: 2 hosts × 2 ranks]") == 4


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_compressed_gradients_train(mpirun: Mpirun, free_port: int, ranks: int) -> None:
    """Between two hosts, with one rank on each, or two."""
    checks = "average", "other_dtypes", "errors", *(["bytes", "decisions", "training"] if ranks == 2 else [])
    host = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    assert mpirun(ranks, *as_hosts(ranks // 2, "compressed.py"), *checks, **host).count("equal") == ranks


@pytest.mark.mpi
def test_int8_on_one_host_says_that_it_is_off(mpirun: Mpirun) -> None:
    assert mpirun(2, RANKS / "compressed.py", "one_host").count("equal [shm: 2 ranks on one host]") == 2


@pytest.mark.mpi
def test_fit_trains_on_all_ranks(mpirun: Mpirun, tmp_path: Path) -> None:
    assert mpirun(2, RANKS / "fit.py", tmp_path).count("equal") == 2


@pytest.mark.mpi
def test_the_keras_examples_model_predicts_in_plain_keras(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    log = mpirun(2, EXAMPLES / "keras" / "train.py", "--epochs", "10", CUDA_VISIBLE_DEVICES="")
    assert log.count("Epoch ") == 10, "rank 0 alone prints"
    assert "world size 2" in log
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "model" / "1", "1")
    log = alone(EXAMPLES / "inference" / "predict_keras.py", "model.tar.gz", CUDA_VISIBLE_DEVICES="")
    assert int(log.splitlines()[-1].split()[0]) >= 32, log


@pytest.mark.mpi
def test_a_script_for_gpus_is_rehearsed(mpirun: Mpirun) -> None:
    """Where it is asked for in the environment, by nobody's import: TensorFlow's comes first."""
    assert mpirun(2, RANKS / "rehearsed.py", SHOAL_REHEARSE="1", COLD="1").count("equal") == 2


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "words", "timeout", "way"),
    [
        ("different", "rank 0 calls all_reduce of float32 with avg, 16 bytes", 60, "eager"),
        ("different", "rank 0 calls all_reduce of float32 with avg, 16 bytes", 60, "graph"),
        ("killed", "ended while rank 0 waited in all_reduce", 60, "graph"),
        ("late", "within 6 s, the group's timeout", 6, "eager"),  # by 60 s
        in_soak("killed", "ended while rank 0 waited in all_reduce", 60, "eager"),
        in_soak("late", "within 6 s, the group's timeout", 6, "graph"),
    ],
)
def test_a_fellow_that_does_something_else(
    two_ranks: TwoRanks, free_port: int, what: str, words: str, timeout: int, way: str
) -> None:
    waits = {"SMDDP_STALL_SECONDS": "3", "SMDDP_TIMEOUT_SECONDS": str(timeout)}
    with two_ranks(free_port, RANKS / "guards.py", what, way, **waits) as ranks:
        output = ranks[0].communicate(timeout=120)[0]
    error = output[output.index(" after ") :]
    assert words in error, output
    assert float(error.split()[1]) < 30, output
    assert "SMDDPError" in output
    if what == "late":
        assert "time.sleep(60)" in output  # where the late one is


def test_a_strategy_with_nccl_differs_from_ring_by_one_name(
    two_ranks: TwoRanks, free_port: int, tmp_path: Path
) -> None:
    """docs/tensorflow.md: the way of TensorFlow on GPUs, as far as CPUs can show it."""
    with two_ranks(free_port, RANKS / "strategy.py", tmp_path, find_port(), find_port()) as ranks:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert all(output.endswith("equal\n") for output in outputs), outputs


# Four GPUs in TensorFlow's own list of devices. Prints what TensorFlow then passes to its runtime, for three ranks.
FOUR_GPUS = """
import os, tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
real = pywrap_tfe.TF_ListPhysicalDevices
pywrap_tfe.TF_ListPhysicalDevices = lambda: [*real(), *(f"/physical_device:GPU:{i}".encode() for i in range(4))]
assert context.context()._physical_devices is None, "the import has listed the devices"
choose = lambda: tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[3], "GPU")
for size, script in (4, int), (4, choose), (1, int):
    if os.fork() == 0:
        os.environ.update(LOCAL_RANK=str(size // 2), LOCAL_WORLD_SIZE=str(size))
        script()
        print(context.context().config.gpu_options.visible_device_list, len(tf.config.list_physical_devices("GPU")))
        assert float(tf.reduce_sum(tf.ones(3))) == 3
        raise SystemExit
    assert os.wait()[1] == 0
"""


def test_tensorflow_opens_the_gpu_of_the_local_rank(alone: Alone) -> None:
    """`train` sees to it, if the script does not choose and the host has several ranks."""
    visible = alone("-c", FOUR_GPUS, COLD="1", SM_CURRENT_HOST="algo-1").splitlines()
    assert visible == ["2 4", "3 4", "0,1,2,3 4"]


@pytest.mark.mpi
def test_ranks_of_a_rehearsal_see_one_emulated_gpu_each(mpirun: Mpirun) -> None:
    program = "import tensorflow as tf; print(*tf.config.get_visible_devices('GPU'), flush=True)"
    printed = mpirun(2, "-c", program, COLD="1", SM_CURRENT_HOST="algo-1", SHOAL_REHEARSE="1")
    assert sorted(line[line.index("GPU:") :][:5] for line in printed.splitlines()) == ["GPU:0", "GPU:1"]
