"""The files and variables of the contract: what is read from them, and what is said of those that are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_toolkit import contract
from shoal_toolkit.errors import ContractError

from .conftest import Run, Tree

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
    assert contract.flag({"on": contract.decode(value)}, "on")


@pytest.mark.parametrize("value", ["false", "False", '"false"', False, "null", ""])
def test_every_spelling_of_false_is_false(value: object) -> None:
    assert not contract.flag({"on": contract.decode(value)}, "on")


def test_a_flag_that_is_neither_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"sagemaker_mpi_enabled is 'maybe'; allowed are true and false"):
        contract.flag({"sagemaker_mpi_enabled": "maybe"}, "sagemaker_mpi_enabled")


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5", "true", "²"])
def test_a_count_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(ContractError, match="whole number"):
        contract.whole_number({"n": contract.decode(value)}, "n")


def test_hyperparameters_are_split_by_whom_they_are_for(tree: Tree) -> None:
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


def test_the_submit_directory_is_honoured(tree: Tree, tmp_path: Any) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("")
    job = read(tree, SAGEMAKER_SUBMIT_DIRECTORY=str(elsewhere), SAGEMAKER_PROGRAM="train.py")
    assert job.code_dir == str(elsewhere)


@pytest.mark.parametrize("address", ["s3://bucket/code.tar.gz", "/opt/code.tar.gz", "/no/such/directory"])
def test_code_that_cannot_be_fetched_yet_is_named(tree: Tree, address: str) -> None:
    with pytest.raises(ContractError, match=address):
        read(tree, SAGEMAKER_SUBMIT_DIRECTORY=address, SAGEMAKER_PROGRAM="train.py")


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


def test_without_resourceconfig_one_host_is_assumed_and_said(tree: Tree, run: Run) -> None:
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
    assert f"In {tree.code} there is: model.py, train.py" in tree.failure


def test_no_script_is_named(tree: Tree, run: Run) -> None:
    assert run().code == 2
    assert "Set the variable SAGEMAKER_PROGRAM" in tree.failure
    assert "is empty: mount or copy the code there" in tree.failure


def test_a_package_is_not_there_yet(tree: Tree, run: Run) -> None:
    tree.script("", "setup.py")
    assert run(SAGEMAKER_PROGRAM="mypackage").code == 2
    assert "Packages (setup.py, pyproject.toml) are not supported yet; supported are .py, .sh and exec" in tree.failure
