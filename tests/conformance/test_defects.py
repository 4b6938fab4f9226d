"""The stock toolkit's known defects, each with ours doing the right thing, and the stock one still doing the wrong one.

An assertion on `stock` that fails says that a new release has mended it: the test then tells the truth about ours only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Compared, in_one_worker
from .lab import HostRun
from .layout import PYTORCH, RECORD, Tree
from .trees import (
    ONE_RANK,
    SDK_TORCH_DISTRIBUTED,
    TREES,
    TWO_HOSTS,
    ends_with,
    groups,
)

pytestmark = in_one_worker

SECRET = "hunter2hunter2hunter2"
FAILS_ON_THE_SECOND = "time.sleep(3 * (os.environ['OMPI_COMM_WORLD_RANK'] == '1')); sys.exit(7)"
MANY_LINES = 100_000
LONG_LOG = f"print('ValueError: the first'); [print(f'line {{n}} of a long log') for n in range({MANY_LINES})]"
LONG_LINE, LONG_LINES = "é" * 1000, 200
ODD_OUTPUT = f"print('    indented', flush=True); os.write(1, ('é' * 1000 + '\\n').encode() * {LONG_LINES})"
IN_PARTS = "print('first', flush=True); time.sleep(2); print('second', flush=True)"
STOPPED = """
import signal
def save(*_):
    open('/opt/ml/output/data/checkpoint', 'w').close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.kill(1, signal.SIGTERM)  # what `docker stop` sends to the container
time.sleep(8)
"""
COPIES_ENVIRONMENT = "import shutil; shutil.copy('/etc/environment', '/opt/ml/output/data')"


def job(tree: Tree) -> Callable[..., Any]:
    """The job of a test, which the laboratory runs ahead of it."""
    return pytest.mark.parametrize("tree", [tree], ids=[tree.name])


def listed(name: str) -> Tree:
    return next(tree for tree in TREES if tree.name == name)


def only(run: Any) -> HostRun:
    (host,) = run.values()
    return host  # type: ignore[no-any-return]


def result_files(host: HostRun) -> list[str]:
    return [name for name in ("success", "failure") if f"output/{name}" in host.files]


REMOVED = "import shutil; shutil.rmtree('/opt/ml/output'); raise ValueError('wrong')"


@job(Tree("defect-output-missing", files=ends_with(REMOVED)))
def test_defect_01_a_failure_that_cannot_be_written_down_is_a_failure_all_the_same(compared: Compared) -> None:
    assert only(compared.ours).code == 1
    assert only(compared.stock).code == 0


ERRORLESS = {"mine.py": "def main():\n    raise OSError('without a number')\n"}


@job(
    Tree(
        "defect-oserror",
        files=ERRORLESS,
        environ={"SAGEMAKER_TRAINING_MODULE": "mine:main", "PYTHONPATH": "/opt/ml/code"},
    )
)
def test_defect_02_an_oserror_without_a_number_is_a_failure(compared: Compared) -> None:
    assert only(compared.ours).code == 1
    assert "OSError: without a number" in only(compared.ours).text("output/failure")
    assert only(compared.stock).code == 0


NATIVE = {**SDK_TORCH_DISTRIBUTED, "sagemaker_toolkit_native_launcher_enabled": "true"}


@job(Tree("defect-torchrun-native", NATIVE, ends_with("sys.exit(7)"), framework=PYTORCH))
def test_defect_03_torchrun_that_fails_is_a_failure_whatever_is_captured(compared: Compared) -> None:
    assert (only(compared.ours).code, result_files(only(compared.ours))) == (7, ["failure"])
    assert (only(compared.stock).code, result_files(only(compared.stock))) == (0, ["success"])


@pytest.mark.parametrize(
    "tree",
    [
        Tree(f"defect-option {option}", {**ONE_RANK, "sagemaker_mpi_custom_mpi_options": json.dumps(option)})
        for option in ("--help", "-hostfile hosts", "--version")
    ],
    ids=lambda tree: tree.name,
)
def test_defect_04_an_option_that_would_end_mpirun_without_training_is_refused(compared: Compared) -> None:
    ours, stock = only(compared.ours), only(compared.stock)
    assert (ours.code, ours.scripts, result_files(ours)) == (2, [], ["failure"])
    assert "sagemaker_mpi_custom_mpi_options" in ours.text("output/failure")
    assert (stock.code, stock.scripts) == (0, [])


@job(Tree("defect-rank-fails", ONE_RANK, ends_with(FAILS_ON_THE_SECOND), hosts=TWO_HOSTS, limit_s=30))
def test_defect_05_a_failed_rank_ends_every_host_with_a_failure(compared: Compared) -> None:
    assert [(host.code, result_files(host)) for host in compared.ours.values()] == [(7, ["failure"])] * 2
    assert compared.stock["algo-1"].code == 1
    assert compared.stock["algo-2"].code is None, "the other host no longer lingers"


@job(listed("mpi-two-hosts"))
def test_defect_06_a_remote_rank_sees_its_own_host(compared: Compared) -> None:
    def hosts(run: dict[str, HostRun]) -> list[str]:
        return [script.environ["SM_CURRENT_HOST"] for script in run["algo-2"].scripts]

    assert hosts(dict(compared.ours)) == ["algo-2"] * 2
    assert hosts(dict(compared.stock)) == ["algo-1"] * 2


@job(Tree("defect-short-job", ONE_RANK, hosts=TWO_HOSTS, environ={"RECORD_SECONDS": "0"}, limit_s=45))
def test_defect_07_a_short_job_is_not_missed(compared: Compared) -> None:
    """The stock toolkit's worker looks once a second, and misses about every second such job: only ours is certain."""
    assert [(host.code, result_files(host)) for host in compared.ours.values()] == [(0, ["success"])] * 2


@job(
    Tree(
        "defect-first-host-absent",
        ONE_RANK,
        hosts=TWO_HOSTS,
        absent=("algo-1",),
        environ={"SHOAL_HOSTS_TIMEOUT": "3"},
        limit_s=20,
        framework=PYTORCH,
    )
)
def test_defect_08_a_worker_waits_for_the_first_host_within_a_limit(compared: Compared) -> None:
    ours = only(compared.ours)
    assert (ours.code, result_files(ours)) == (1, ["failure"])
    assert "algo-1" in ours.text("output/failure")
    assert only(compared.stock).code is None


@job(Tree("defect-sigterm", files=ends_with(STOPPED)))
def test_defect_09_sigterm_to_pid_1_reaches_the_script_and_the_failure_file(compared: Compared) -> None:
    ours, stock = only(compared.ours), only(compared.stock)
    assert (ours.code, result_files(ours)) == (143, ["failure"])
    assert "output/data/checkpoint" in ours.files
    assert "SIGTERM" in ours.text("output/failure")
    assert (stock.code, result_files(stock)) == (0, ["success"])
    assert "output/data/checkpoint" not in stock.files


@job(Tree("defect-many-lines", files=ends_with(LONG_LOG), framework=PYTORCH, limit_s=15))
def test_defect_10_many_lines_cost_no_more_each_than_few(compared: Compared) -> None:
    assert only(compared.ours).code == 0
    assert only(compared.ours).log.count("of a long log") == MANY_LINES
    assert only(compared.stock).code is None


@job(Tree("defect-odd-output", files=ends_with(f"{ODD_OUTPUT}; {IN_PARTS}"), framework=PYTORCH))
def test_defect_11_output_arrives_as_it_is_and_when_it_is_written(compared: Compared) -> None:
    assert only(compared.ours).printed_at("second") - only(compared.ours).printed_at("first") > 1
    assert "\n    indented\n" in only(compared.ours).log
    assert only(compared.ours).log.splitlines().count(LONG_LINE) == LONG_LINES
    assert "\n    indented\n" not in only(compared.stock).log
    assert "\N{REPLACEMENT CHARACTER}" in only(compared.stock).log


@job(listed("fails-by-exception"))
def test_defect_12_the_failure_file_begins_with_the_exception(compared: Compared) -> None:
    assert only(compared.ours).text("output/failure").startswith("ValueError: wrong\n")
    assert "ValueError" not in only(compared.stock).text("output/failure")


@job(Tree("defect-memory", files=ends_with("b'x' * 2**30"), memory_mib=256))
def test_defect_13_a_lack_of_memory_is_named(compared: Compared) -> None:
    assert only(compared.ours).code == 137
    assert "memory" in only(compared.ours).text("output/failure")
    assert "ExitCode -9" in only(compared.stock).text("output/failure")
    assert "OutOfMemory" not in only(compared.stock).text("output/failure")


@job(listed("script-missing"))
def test_defect_14_a_missing_script_is_named_with_what_is_there(compared: Compared) -> None:
    assert {"trian.py", "train.py"} <= set(only(compared.ours).text("output/failure").replace("'", " ").split())
    assert 'ErrorMessage ""' in only(compared.stock).text("output/failure")


@job(listed("fails-with-42"))
def test_defect_14_the_scripts_own_exit_code_is_the_jobs(compared: Compared) -> None:
    assert (only(compared.ours).code, only(compared.stock).code) == (42, 1)


@job(listed("shell"))
def test_defect_15_the_launchers_library_is_not_in_the_scripts_path(compared: Compared) -> None:
    def path(run: dict[str, HostRun]) -> list[str]:
        return only(run).scripts[0].environ["PYTHONPATH"].split(":")

    assert path(dict(compared.ours)) == ["/opt/ml/code"]
    assert "/usr/lib/python3.11" in path(dict(compared.stock))


@job(
    Tree(
        "defect-etc-environment",
        ONE_RANK,
        ends_with(COPIES_ENVIRONMENT),
        hosts=TWO_HOSTS,
        environ={"AWS_SECRET_ACCESS_KEY": SECRET},
        framework=PYTORCH,
    )
)
def test_defect_16_no_secret_is_written_to_etc_environment(compared: Compared) -> None:
    assert SECRET not in compared.ours["algo-2"].text("output/data/environment")
    assert SECRET in compared.stock["algo-2"].text("output/data/environment")


@job(Tree("defect-large-hyperparameters", {f"text{number}": json.dumps("x" * 48 * 1024) for number in range(3)}))
def test_defect_17_144_kb_of_hyperparameters_reach_the_script(compared: Compared) -> None:
    (script,) = only(compared.ours).scripts
    assert [len(word) for word in script.argv[2::2]] == [48 * 1024] * 3
    assert only(compared.stock).scripts == []
    assert "Argument list too long" in only(compared.stock).text("output/failure")


@job(listed("mpi-two-hosts"))
def test_defect_18_ranks_run_without_a_shim_for_their_hosts_name(compared: Compared) -> None:
    assert not any("LD_PRELOAD" in script.environ for host in compared.ours.values() for script in host.scripts)
    assert all("LD_PRELOAD" in script.environ for host in compared.stock.values() for script in host.scripts)


@job(Tree("defect-secrets", {"api_key": json.dumps(SECRET)}, environ={"AWS_SECRET_ACCESS_KEY": SECRET}))
def test_defect_19_no_secret_is_in_the_log(compared: Compared) -> None:
    assert only(compared.ours).scripts[0].argv == ["train.py", "--api_key", SECRET]
    assert SECRET not in only(compared.ours).log
    assert SECRET in only(compared.stock).log


@job(listed("mpi-quoted-false"))
def test_defect_20_the_string_false_enables_nothing(compared: Compared) -> None:
    assert "OMPI_COMM_WORLD_RANK" not in only(compared.ours).scripts[0].environ
    assert "OMPI_COMM_WORLD_RANK" in only(compared.stock).scripts[0].environ


@job(listed("log-level-by-name"))
def test_defect_20_a_log_level_may_be_a_name(compared: Compared) -> None:
    assert only(compared.ours).scripts[0].environ["SM_LOG_LEVEL"] == "20"
    assert only(compared.stock).scripts == []


@job(listed("hp-lists"))
def test_defect_21_a_list_is_json(compared: Compared) -> None:
    def mixed(run: dict[str, HostRun]) -> str:
        argv = only(run).scripts[0].argv
        return argv[argv.index("--mixed") + 1]

    assert json.loads(mixed(dict(compared.ours))) == [1, "x", None, True, [2]]
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(mixed(dict(compared.stock)))


@job(Tree("defect-store-true", {"verbose": "true", "quiet": "false", "sagemaker_store_true": "true", "lr": "0.1"}))
def test_defect_21_a_flag_is_a_bare_option(compared: Compared) -> None:
    assert only(compared.ours).scripts[0].argv == ["train.py", "--lr", "0.1", "--verbose"]
    assert only(compared.stock).scripts[0].argv == ["train.py", "--lr", "0.1", "--quiet", "False", "--verbose", "True"]


@job(Tree("defect-module", {"lr": "0.1"}, {"trainer/__init__.py": "", "trainer/main.py": RECORD}, "-m trainer.main"))
def test_defect_21_a_module_is_an_entry_point(compared: Compared) -> None:
    assert only(compared.ours).scripts[0].argv == ["/opt/ml/code/trainer/main.py", "--lr", "0.1"]
    assert only(compared.stock).scripts == []


@job(
    Tree(
        "defect-outside-the-group",
        {**ONE_RANK, "sagemaker_distribution_instance_groups": '["g1"]'},
        ends_with("sys.exit(7 * ('OMPI_COMM_WORLD_RANK' in os.environ))"),
        hosts=TWO_HOSTS,
        group_of={"algo-1": "g1", "algo-2": "g2"},
        resources={"instance_groups": groups(g1=("algo-1",), g2=("algo-2",))},
        framework=PYTORCH,
    )
)
def test_defect_21_a_host_outside_the_group_shares_the_result(compared: Compared) -> None:
    assert [(host.code, result_files(host)) for host in compared.ours.values()] == [(7, ["failure"])] * 2
    assert (compared.stock["algo-2"].code, result_files(compared.stock["algo-2"])) == (0, ["success"])


@job(Tree("defect-cpu-quota", cpus=0.5))
def test_defect_22_cpus_are_those_of_the_quota(compared: Compared) -> None:
    assert only(compared.ours).scripts[0].environ["SM_NUM_CPUS"] == "1"
    assert int(only(compared.stock).scripts[0].environ["SM_NUM_CPUS"]) > 1


def with_gpus(visible: str) -> Tree:
    return Tree(f"defect-gpus-{visible}", devices=("nvidia0", "nvidia1"), environ={"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("tree", "count"),
    [(with_gpus("0,1"), 2), (with_gpus("1"), 1), (with_gpus(""), 0), (with_gpus("0,7,1"), 1)],
    ids=lambda value: value.name if isinstance(value, Tree) else "",
)
def test_defect_22_gpus_are_those_that_are_visible(compared: Compared, count: int) -> None:
    """The stock toolkit counts the lines of `nvidia-smi --list-gpus`, even of hidden GPUs; there are none here."""
    assert only(compared.ours).scripts[0].environ["SM_NUM_GPUS"] == str(count)
