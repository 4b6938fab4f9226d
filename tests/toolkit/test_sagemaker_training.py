"""The module that published scripts import of AWS's toolkit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
    from sagemaker_training import environment

    monkeypatch.setenv("SM_TRAINING_ENV", '{"num_gpus": 1, "hosts": ["a"]}')
    monkeypatch.setenv("SM_HOSTS", '["a"]')
    env = environment.Environment()
    with pytest.raises(
        AttributeError, match=r"no attribute 'num_gpu'\. Did you mean 'num_gpus'\? It has: hosts, num_gpus"
    ):
        _ = env.num_gpu
    assert {"num_gpus", "to_cmd_args"} <= set(dir(env))
    assert env.to_env_vars()["SM_HOSTS"] == '["a"]'
