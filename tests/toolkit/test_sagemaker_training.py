"""The modules that published scripts and toolkits import of AWS's toolkit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sagemaker_training import environment, files, mapping

from .conftest import Run, Tree, clean_environment

# Attributes in published scripts: pytorch_mnist, the smdataparallel MNIST, the examples of heterogeneous clusters.
READ = """
import json
import sagemaker_training.environment
env = sagemaker_training.environment.Environment()
names = '''hosts current_host model_dir channel_input_dirs num_gpus num_cpus hyperparameters module_dir user_entry_point
    additional_framework_parameters is_hetero current_instance_type current_instance_group instance_groups_dict
    current_instance_group_hosts instance_groups distribution_hosts distribution_instance_groups'''.split()
print(json.dumps({**{name: getattr(env, name) for name in names}, "args": env.to_cmd_args()}))
"""


def configured(tree: Tree) -> None:
    tree.script(READ)
    tree.hosts("algo-1", "algo-1", current_instance_type="ml.p3.2xlarge")
    tree.hyperparameters(lr=0.1, sagemaker_program="train.py", sagemaker_parameter_server_enabled=True)
    tree.configure("inputdataconfig", {"training": {}})


def test_a_script_finds_its_job(tree: Tree, run: Run) -> None:
    configured(tree)
    done = run(SHOAL_REHEARSE="1", SHOAL_REHEARSE_GPUS="3")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    expected = {
        "hosts": ["algo-1"],
        "current_host": "algo-1",
        "model_dir": f"{tree.base}/model",
        "channel_input_dirs": {"training": f"{tree.base}/input/data/training"},
        "num_gpus": 3,
        "hyperparameters": {"lr": 0.1},
        "module_dir": str(tree.code),
        "user_entry_point": "train.py",
        "additional_framework_parameters": {"sagemaker_parameter_server_enabled": True},
        "is_hetero": False,
        "current_instance_type": "ml.p3.2xlarge",
        "distribution_hosts": ["algo-1"],
        "args": ["--lr", "0.1"],
    }
    assert {name: found[name] for name in expected} == expected


def test_without_the_variable_the_files_have_the_same_facts(tree: Tree) -> None:
    """Linux passes no variable of more than 128 KiB; `train` leaves it out then."""
    configured(tree)
    environ = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SM_NUM_GPUS="3")
    done = subprocess.run([sys.executable, "-c", READ], env=environ, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["num_gpus"], found["hyperparameters"], found["hosts"]) == (3, {"lr": 0.1}, ["algo-1"])


def test_a_missing_attribute_is_an_error_that_lists_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_TRAINING_ENV", '{"num_gpus": 1, "hosts": ["a"]}')
    monkeypatch.setenv("SM_HOSTS", '["a"]')
    env = environment.Environment()
    with pytest.raises(
        AttributeError, match=r"no attribute 'num_gpu'\. Did you mean 'num_gpus'\? It has: hosts, num_gpus"
    ):
        _ = env.num_gpu
    assert {"num_gpus", "to_cmd_args"} <= set(dir(env))
    assert env.to_env_vars()["SM_HOSTS"] == '["a"]'


# Toolkits of others

TOOLKIT = """
from sagemaker_training import entry_point, environment, errors, mapping, runner
def main():
    hyperparameters = environment.read_hyperparameters()
    env = environment.Environment(hyperparameters=hyperparameters)
    kind = runner.{runner}
    try:
        entry_point.run(uri=env.module_dir, user_entry_point=env.user_entry_point, capture_error=True,
                        args=mapping.to_cmd_args(env.hyperparameters), env_vars=env.to_env_vars(), runner_type=kind)
    except errors.ExecuteUserScriptError as error:
        if "forgiven" not in str(error):
            raise
"""
SCRIPT = """
import os, sys
print(os.environ.get("RANK", "alone"), sys.argv[1:], os.environ["SM_HP_LR"], os.getcwd())
if "--fail" in sys.argv:
    raise ValueError(sys.argv[sys.argv.index("--fail") + 1])
"""


def with_toolkit(tree: Tree, runner: str = "ProcessRunnerType", **hyperparameters: object) -> dict[str, str]:
    """Writes a toolkit and a script, and returns the variables with which `train` runs the toolkit."""
    tree.script(TOOLKIT.format(runner=runner), "own_toolkit.py")
    tree.script(SCRIPT)
    tree.hyperparameters(lr=0.1, sagemaker_program="train.py", **hyperparameters)
    return {"SAGEMAKER_TRAINING_MODULE": "own_toolkit:main"}


def test_a_toolkit_runs_the_script(tree: Tree, run: Run) -> None:
    done = run(**with_toolkit(tree))
    assert (done.code, done.out) == (0, f"alone ['--lr', '0.1'] 0.1 {tree.code}\n"), done.err
    assert tree.outcome() == {"success"}


@pytest.mark.parametrize(("message", "code"), [("planted", 1), ("forgiven", 0)])
def test_a_toolkit_gets_the_error_of_the_script(tree: Tree, run: Run, message: str, code: int) -> None:
    """The failure file begins with the script's own error, and not with the toolkit's."""
    done = run(**with_toolkit(tree, fail=message))
    assert done.code == code, done.err
    assert done.err.count(f"\nValueError: {message}\n") >= 1
    assert (tree.failure.splitlines()[0] if code else "") == ("ValueError: planted" if code else "")


@pytest.mark.mpi
def test_a_toolkits_launcher_is_the_one_that_the_hyperparameters_select(tree: Tree, run: Run) -> None:
    """`train` starts the ranks, and the toolkit runs the script once in each."""
    chosen = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    done = run(**with_toolkit(tree, "MPIRunnerType", **chosen))
    lines = sorted(line.partition("] ")[2] for line in done.out.splitlines())
    assert lines == [f"{rank} ['--lr', '0.1'] 0.1 {tree.code}" for rank in (0, 1)], done.err


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ("MPIRunnerType", "asks for MPI, but the hyperparameters select no launcher. `train` starts the ranks"),
        ("PyTorchXLARunnerType", "runner_type is 'xla'. Allowed: ProcessRunnerType, MPIRunnerType"),
        (
            "get",
            "sagemaker_training.runner.get belongs to AWS's toolkit, which `train` replaces, and is not here.",
        ),
    ],
)
def test_a_launcher_that_the_job_lacks_is_an_error(tree: Tree, run: Run, runner: str, words: str) -> None:
    assert run(**with_toolkit(tree, runner)).code == 1
    assert words in tree.failure


def test_outside_of_train_the_entry_point_starts_train(tree: Tree) -> None:
    with_toolkit(tree)
    environ = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    command = [sys.executable, "-c", "from own_toolkit import main; main()"]
    done = subprocess.run(command, cwd=tree.code, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"alone ['--lr', '0.1'] 0.1 {tree.code}\n"
    assert tree.outcome() == {"success"}


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("from sagemaker_training import modules", "sagemaker_training.modules belongs to AWS's toolkit"),
        ("from sagemaker_training.files import write_success_file", "Fix: nothing: `train` writes the file"),
        ("from sagemaker_training.entry_point import install", "Fix: a requirements.txt beside the script"),
        ("from sagemaker_training.mapping import MappingMixin", "Fix: mapping.to_cmd_args, mapping.to_env_vars, or a"),
        ("from sagemaker_training.environment import ENABLE", "Fix: an attribute of environment.Environment()"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_use(statement: str, words: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(statement)
    assert words in str(raised.value)


def test_values_become_arguments_and_variables() -> None:
    values = {"hosts": ["a"], "lr": 0.1, "name": "x", "none": None, "flag": True}
    assert mapping.to_env_vars(values) == {
        "SM_HOSTS": '["a"]',
        "SM_LR": "0.1",
        "SM_NAME": "x",
        "SM_NONE": "",
        "SM_FLAG": "true",
    }
    assert mapping.to_cmd_args({"b": 1, "lr": 0.1}) == ["-b", "1", "--lr", "0.1"]


def test_files_are_read_and_written(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tree.base))
    with files.tmpdir() as directory:
        files.write_file(f"{directory}/a.json", '{"a": 1}')
        assert (files.read_json(f"{directory}/a.json"), files.read_file(f"{directory}/a.json")[:2]) == ({"a": 1}, '{"')
    assert not Path(directory).exists()
    (tree.base / "output").mkdir(exist_ok=True)
    files.write_failure_file("first")
    files.write_failure_file("second")
    assert files.read_file(f"{tree.base}/output/failure") == "first"
    assert environment.model_dir == f"{tree.base}/model"
