"""The files and variables of the contract: how they are read, and the errors in wrong ones."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job import contract, machine

from .conftest import Run, Tree
from .test_plan import MACHINE, planned

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(tree: Tree, **environ: str) -> contract.Job:
    paths = contract.Paths(str(tree.base))
    return contract.read_job(paths, contract.read_cluster(paths, "box"), environ, ())


@given(JSON)
def test_what_the_sdk_encodes_is_decoded_to_the_same(value: Any) -> None:
    assert contract.decode(json.dumps(value)) == value


@given(st.text())
def test_text_that_is_no_json_stays_as_it_is(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = text
    decoded = contract.decode(text)
    assert decoded == expected or decoded != decoded  # NaN


@pytest.mark.parametrize(("text", "value"), [("1.10", 1.1), ("null", None), ("adam", "adam"), ('"a b"', "a b")])
def test_values_are_decoded_as_the_contract_says(text: str, value: object) -> None:
    assert contract.decode(text) == value


@pytest.mark.parametrize("value", ["true", "True", '"true"', True])
def test_every_spelling_of_true_is_true(value: object) -> None:
    assert contract.read_flag({"on": contract.decode(value)}, "on")


@pytest.mark.parametrize("value", ["false", "False", '"false"', False, "null", ""])
def test_every_spelling_of_false_is_false(value: object) -> None:
    assert not contract.read_flag({"on": contract.decode(value)}, "on")


def test_a_flag_that_is_neither_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"sagemaker_mpi_enabled is 'maybe'; allowed are true and false"):
        contract.read_flag({"sagemaker_mpi_enabled": "maybe"}, "sagemaker_mpi_enabled")


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5", "true", "²"])
def test_an_invalid_count_is_an_error(value: str) -> None:
    with pytest.raises(ContractError, match="whole number"):
        contract.read_count({"n": contract.decode(value)}, "n")


def test_hyperparameters_of_sagemaker_are_split_from_those_of_the_script(tree: Tree) -> None:
    tree.script("")
    tree.hyperparameters(
        lr=0.1,
        sagemaker_program="train.py",
        sagemaker_mpi_enabled=True,
        _tuning_objective_metric="acc",
        mp_parameters={},
    )
    job = read(tree)
    assert job.hyperparameters == {"lr": 0.1, "mp_parameters": {}}
    assert job.framework == {"sagemaker_mpi_enabled": True}


def test_the_variable_beats_the_hyperparameter(tree: Tree) -> None:
    tree.script("", "a.py")
    tree.script("", "b.py")
    tree.hyperparameters(sagemaker_program="a.py")
    assert read(tree).script.name == "a.py"
    assert read(tree, SAGEMAKER_PROGRAM="b.py").script.name == "b.py"


def test_the_submit_directory_is_honoured(tree: Tree, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("")
    job = read(tree, SAGEMAKER_SUBMIT_DIRECTORY=str(elsewhere), SAGEMAKER_PROGRAM="train.py")
    assert job.code_dir == str(elsewhere)


def test_hyperparameters_that_are_not_json(tree: Tree, run: Run) -> None:
    tree.script("")
    (tree.base / "input/config/hyperparameters.json").write_text('{"lr": "0.1",\n "epochs": }')
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 2
    assert "hyperparameters.json, line 2, column 12: this is not JSON" in tree.failure
    assert tree.outcome() == {"failure"}


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ('"x"', "string"), ("null", "null"), ("3", "number")])
def test_hyperparameters_that_are_no_object(tree: Tree, run: Run, text: str, kind: str) -> None:
    tree.script("")
    (tree.base / "input/config/hyperparameters.json").write_text(text)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 2
    assert f"the file holds a JSON {kind}, and must hold an object" in tree.failure


def test_without_resourceconfig_one_host_is_assumed_and_reported(tree: Tree, run: Run) -> None:
    tree.script("import os; print(os.environ['SM_HOSTS'])")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0
    assert len(json.loads(done.out)) == 1
    assert f"no resourceconfig.json in {tree.base}/input/config: a single host is assumed" in done.err


def test_the_current_host_must_be_among_the_hosts(tree: Tree, run: Run) -> None:
    tree.script("")
    tree.hosts("algo-11", "algo-1", "algo-2")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 2
    assert (
        "current_host is 'algo-11', which is not among hosts ['algo-1', 'algo-2']. Did you mean 'algo-1'?"
        in tree.failure
    )


@pytest.mark.parametrize("hosts", [None, [], "algo-1", [1], ["a", "a"]])
def test_hosts_that_are_no_list_of_names(tree: Tree, run: Run, hosts: object) -> None:
    tree.configure("resourceconfig", {"current_host": "a", "hosts": hosts})
    assert run(SAGEMAKER_PROGRAM="train.py").code == 2
    assert "resourceconfig.json: hosts" in tree.failure


def test_keys_of_resourceconfig_may_be_null(tree: Tree, run: Run) -> None:
    tree.script("import os; print(os.environ['SM_INSTANCE_GROUPS'])")
    tree.hosts("algo-1", "algo-1", instance_groups=None, network_interface_name=None, current_group_name=None)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (0, "[]\n"), done.err


def test_a_script_that_is_not_there(tree: Tree, run: Run) -> None:
    """Defect 14: the stock toolkit says 'ExitCode 2, ErrorMessage ""'."""
    tree.script("", "train.py")
    tree.script("", "model.py")
    assert run(SAGEMAKER_PROGRAM="trian.py").code == 2
    assert f"The script 'trian.py' is not in {tree.code}. Did you mean 'train.py'?" in tree.failure
    assert f"{tree.code} contains: model.py, train.py" in tree.failure


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (r"src\deep\go.py", "Did you mean 'src/deep/go.py'?"),
        (r".\train.py", "Did you mean 'train.py'?"),
        ("go.py", "Did you mean 'src/deep/go.py'?"),
        ("deep/go.py", "Did you mean 'src/deep/go.py'?"),
        ("train.py --epochs 3", "Fix: name 'train.py', and pass its arguments as hyperparameters."),
        ("train.py ", "Did you mean 'train.py'?"),
    ],
)
def test_a_missing_script_that_is_elsewhere_in_the_code(tree: Tree, run: Run, name: str, hint: str) -> None:
    tree.script("", "train.py")
    (tree.code / "src" / "deep").mkdir(parents=True)
    tree.script("", "src/deep/go.py")
    assert run(SAGEMAKER_PROGRAM=name).code == 2
    assert f"is not in {tree.code}. {hint}\n" in tree.failure


def test_no_script_is_named(tree: Tree, run: Run) -> None:
    assert run().code == 2
    assert "Fix: set the variable SAGEMAKER_PROGRAM" in tree.failure
    assert "is empty. Fix: mount or copy the code there" in tree.failure


# Variables


def variables(tree: Tree, /, **environ: str) -> dict[str, str]:
    return dict(planned(tree, MACHINE, (), **environ).env)


@pytest.mark.parametrize(
    ("value", "level"),
    [(None, 20), (10, 10), ("10", 10), ("INFO", 20), ("info", 20), ("WARN", 30), ("WARNING", 30), ("CRITICAL", 50)],
)
def test_log_levels_may_be_names(tree: Tree, value: object, level: int) -> None:
    """Defect 20: the stock toolkit crashes on a name."""
    tree.hyperparameters(sagemaker_container_log_level=value)
    assert variables(tree)["SM_LOG_LEVEL"] == str(level)


def test_the_log_level_may_be_a_variable(tree: Tree) -> None:
    assert variables(tree, SAGEMAKER_CONTAINER_LOG_LEVEL="ERROR")["SM_LOG_LEVEL"] == "40"
    tree.hyperparameters(sagemaker_container_log_level=10)
    assert variables(tree, SAGEMAKER_CONTAINER_LOG_LEVEL="ERROR")["SM_LOG_LEVEL"] == "10"


def test_an_invalid_log_level_is_an_error(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_container_log_level="INFOO")
    with pytest.raises(ContractError, match=r"sagemaker_container_log_level is 'INFOO'; .* Did you mean 'INFO'\?"):
        variables(tree)


@pytest.mark.parametrize(
    ("devices", "instance", "cores"),
    [
        (0, "ml.trn1.32xlarge", 0),
        (16, "ml.trn1.32xlarge", 32),
        (16, "ml.trn2.48xlarge", 64),
        (1, "ml.inf1.xlarge", 4),
        (3, "local", 6),
    ],
)
def test_neuron_cores_are_counted(tree: Tree, devices: int, instance: str, cores: int) -> None:
    tree.hosts("algo-1", "algo-1", current_instance_type=instance)
    assert planned(tree, MACHINE._replace(neuron_devices=devices)).env["SM_NUM_NEURONS"] == str(cores)


def test_the_version_of_torch_is_read_without_importing_it(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "torch-2.0.1+cu117.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    assert machine.find_installed_version("torch", [str(tmp_path / "absent"), str(tmp_path)]) == "2.0.1+cu117"
    assert machine.find_installed_version("tensorflow", [str(tmp_path)]) == ""
    found = machine.read_machine({}, "eth0", [])
    assert found.torch == importlib.metadata.version("torch")
    assert planned(tree, MACHINE._replace(torch=found.torch)).env["SM_DLC_TORCH_VERSION"] == found.torch


GROUPS = [
    {"instance_group_name": "cpu", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1", "algo-2"]},
    {"instance_group_name": "gpu", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-3", "algo-4"]},
]


def group_variables(tree: Tree, host: str, **hyperparameters: object) -> dict[str, Any]:
    group = GROUPS[0 if host in ("algo-1", "algo-2") else 1]
    tree.hosts(
        host,
        *("algo-1", "algo-2", "algo-3", "algo-4"),
        current_group_name=group["instance_group_name"],
        current_instance_type=group["instance_type"],
        instance_groups=GROUPS,
    )
    tree.hyperparameters(**hyperparameters)
    found = variables(tree)
    training_env = json.loads(found["SM_TRAINING_ENV"])
    assert json.loads(found["SM_INSTANCE_GROUPS"]) == training_env["instance_groups"] == ["cpu", "gpu"]
    assert json.loads(found["SM_INSTANCE_GROUPS_DICT"]) == {"cpu": GROUPS[0], "gpu": GROUPS[1]}
    assert found["SM_IS_HETERO"] == "true"
    assert found["SM_CURRENT_INSTANCE_GROUP"] == group["instance_group_name"]
    assert json.loads(found["SM_CURRENT_INSTANCE_GROUP_HOSTS"]) == group["hosts"]
    assert found["SM_CURRENT_INSTANCE_TYPE"] == group["instance_type"]
    return {
        "groups": json.loads(found["SM_DISTRIBUTION_INSTANCE_GROUPS"]),
        "hosts": training_env["distribution_hosts"],
        "master": (found["SM_MASTER_ADDR"], training_env["master_hostname"], training_env["is_master"]),
    }


@pytest.mark.parametrize("host", ["algo-1", "algo-3", "algo-4"])
def test_groups_outside_the_distribution_know_it(tree: Tree, host: str) -> None:
    named = {"sagemaker_mpi_enabled": True, "sagemaker_distribution_instance_groups": ["gpu"]}
    assert group_variables(tree, host, **named) == {
        "groups": ["gpu"],
        "hosts": ["algo-3", "algo-4"],
        "master": ("algo-3", "algo-3", host == "algo-3"),
    }


def test_without_a_choice_all_groups_take_part(tree: Tree) -> None:
    assert group_variables(tree, "algo-1", sagemaker_torch_distributed_enabled=True) == {
        "groups": ["cpu", "gpu"],
        "hosts": ["algo-1", "algo-2", "algo-3", "algo-4"],
        "master": ("algo-1", "algo-1", True),
    }


def test_without_a_distribution_no_group_takes_part(tree: Tree) -> None:
    assert group_variables(tree, "algo-3") == {"groups": [], "hosts": [], "master": ("algo-1", "algo-1", False)}


@pytest.mark.parametrize("topology", [None, [], [{"hostName": "algo-1", "capacityUnitId": "1"}]])
def test_a_known_topology_is_reported(tree: Tree, topology: object) -> None:
    tree.hosts("algo-1", "algo-1", topology=topology)
    found = variables(tree)
    assert (
        json.loads(found.get("SM_TOPOLOGY", "[]"))
        == json.loads(found["SM_TRAINING_ENV"])["topology"]
        == (topology or [])
    )
    assert ("SM_TOPOLOGY" in found) == bool(topology)


def test_names_that_no_variable_has(tree: Tree) -> None:
    tree.hyperparameters(**{"a=b": 1, "c d": 2, "": 3})
    found = variables(tree)
    assert {name: value for name, value in found.items() if name.startswith("SM_HP_")} == {
        "SM_HP_A_B": "1",
        "SM_HP_C D": "2",
        "SM_HP_C_D": "2",
        "SM_HP_": "3",
    }


@pytest.mark.parametrize(
    ("environ", "hyperparameter", "region"),
    [
        ({}, None, ""),
        ({"AWS_DEFAULT_REGION": "a"}, None, "a"),
        ({"AWS_REGION": "b", "AWS_DEFAULT_REGION": "a"}, None, "b"),
        ({"SAGEMAKER_REGION": "c", "AWS_REGION": "b"}, None, "c"),
        ({"SAGEMAKER_REGION": "c"}, "d", "d"),
    ],
)
def test_the_region_is_the_first_that_is_named(
    tree: Tree, environ: dict[str, str], hyperparameter: object, region: str
) -> None:
    tree.hyperparameters(sagemaker_region=hyperparameter)
    assert variables(tree, **environ)["SAGEMAKER_REGION"] == region


def test_sm_training_env_has_the_facts_that_smdistributed_reads(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "smddprun").write_text("")
    (tmp_path / "smddprun").chmod(0o755)
    commands = machine.read_machine({"PATH": str(tmp_path)}, "eth0", []).library_commands
    made = planned(tree, MACHINE._replace(library_commands=commands))
    training_env = json.loads(made.env["SM_TRAINING_ENV"])
    assert (training_env["is_smddprun_installed"], training_env["is_modelparallel_enabled"]) == (True, False)
    tree.hyperparameters(mp_parameters={"partitions": 2})
    assert json.loads(variables(tree)["SM_TRAINING_ENV"])["is_modelparallel_enabled"] is True
