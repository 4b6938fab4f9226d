"""Custom MPI options: parsing, refusals, and the mpirun command with them."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_toolkit.errors import ContractError, LaunchError
from shoal_toolkit.files import read_table
from shoal_toolkit.hosts.daemons import build_daemon_command
from shoal_toolkit.job.machine import choose_interface
from shoal_toolkit.plan import mpi
from shoal_toolkit.plan.mpi_options import RELEASE, parse_mpi_options, translate_parameter

from .openmpi import open_mpi_5
from .test_plan import MACHINE

KEY = "sagemaker_mpi_custom_mpi_options"
TABLE = read_table("mpirun")
NOTHING: Mapping[str, str] = {}
ONE, TWO = {"algo-1": 2}, {"algo-1": 2, "algo-2": 2}
BOTH = pytest.mark.parametrize("series", [4, 5])


def made(
    options: str, series: int = 4, hosts: Mapping[str, int] = ONE, environ: Mapping[str, str] = NOTHING
) -> mpi.MpirunCommand:
    return mpi.build_mpirun_command(MACHINE._replace(open_mpi=series), hosts, options, KEY, environ, ["script"])


def command(
    options: str, series: int = 4, hosts: Mapping[str, int] = ONE, environ: Mapping[str, str] = NOTHING
) -> tuple[str, ...]:
    return made(options, series, hosts, environ).command


def mca(words: Sequence[str]) -> dict[str, str]:
    """The MCA parameters of a command; each must be there once."""
    keys = [words[index + 1] for index, word in enumerate(words) if word in ("--mca", "--pmixmca")]
    assert len(keys) == len(set(keys)), keys
    return {key: words[words.index(key) + 1] for key in keys}


def exports(words: Sequence[str]) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == "-x"]


def notes(options: str, series: int = 4, hosts: Mapping[str, int] = ONE, environ: Mapping[str, str] = NOTHING) -> str:
    return "\n".join(made(options, series, hosts, environ).notes)


# What is read


@BOTH
@pytest.mark.parametrize("option", ["-display-map", "--display-map"])
def test_options_may_have_one_dash_or_two(option: str, series: int) -> None:
    assert "--display-map" in command(option, series)


@pytest.mark.parametrize(
    "options", ["--bind-to core", "-bind-to core", "--bind-to=core", "-bind-to none -bind-to core"]
)
def test_the_users_option_takes_the_place_of_ours(options: str) -> None:
    words = command(options)
    assert words.count("--bind-to") == 1
    assert words[words.index("--bind-to") + 1] == "core"
    assert f"{KEY}: --bind-to core replaces the default --bind-to none" in notes(options)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ("--bynode", ["--map-by"]),
        ("--cpu-set 0,1", ["--map-by", "--bind-to"]),
        ("-rf ranks", ["--map-by", "--bind-to"]),
        ("--mca hwloc_base_binding_policy core", ["--bind-to"]),
    ],
)
def test_options_that_contradict_ours_take_their_place(options: str, gone: list[str]) -> None:
    words = command(options)
    assert not set(words) & set(gone)
    assert notes(options).count("replaces the default") == len(gone)


@pytest.mark.parametrize("option", ["-mca", "--mca", "-gmca", "--gmca", "--omca", "--gomca", "--prtemca"])
def test_each_mca_parameter_is_mentioned_once_and_the_users_wins(option: str) -> None:
    """Defect of the stock command: mpirun refuses a second mention."""
    options = f"{option} btl self,tcp {option} pml cm {option} pml ob1"
    found = mca(command(options, hosts=TWO))
    assert (found["btl"], found["pml"]) == ("self,tcp", "ob1")
    printed = notes(options, hosts=TWO)
    assert f"{KEY}: --mca btl self,tcp replaces the default --mca btl ^openib,ofi" in printed
    assert "--mca pml is given twice: the last counts" in printed


@pytest.mark.parametrize("prefix", ["OMPI_MCA_", "PRTE_MCA_"])
def test_the_users_mca_variable_is_not_overruled(prefix: str) -> None:
    variable = {f"{prefix}btl": "self,vader"}
    assert "btl" not in mca(command("", environ=variable))
    assert f"the variable {prefix}btl self,vader replaces the default --mca btl" in notes("", environ=variable)
    assert "--map-by" not in command("", environ={"OMPI_MCA_rmaps_base_mapping_policy": "node"})


def test_an_option_beats_a_variable() -> None:
    assert mca(command("--mca btl self,tcp", environ={"OMPI_MCA_btl": "self,vader"}))["btl"] == "self,tcp"


@BOTH
@pytest.mark.parametrize("how", ["option", "variable"])
def test_an_exclusion_takes_the_place_of_our_inclusion(series: int, how: str) -> None:
    options = "--mca btl_tcp_if_exclude lo --mca oob_tcp_if_exclude lo" if how == "option" else ""
    variables = {f"OMPI_MCA_{layer}_tcp_if_exclude": "lo" for layer in ("btl", "oob")} if how == "variable" else {}
    found = mca(command(options, series, TWO, variables))
    assert not [parameter for parameter in found if parameter.endswith("_if_include")]
    excluded = [found[parameter] for parameter in found if parameter.endswith("_if_exclude")]
    assert how == "variable" or excluded == ["lo", "lo"]


def test_an_exported_mca_parameter_is_one_like_the_others() -> None:
    words = command("-x OMPI_MCA_btl=self,tcp")
    assert (mca(words)["btl"], exports(words)) == ("self,tcp", [])


def test_a_variable_is_exported_once_and_the_last_counts() -> None:
    options = "-x A=1 -x B -x A=2 -x B"
    assert exports(command(options)) == ["A=2", "B"]
    assert f"{KEY}: A is set twice: the last counts" in notes(options)


def test_quotes_are_honoured() -> None:
    assert exports(command("""-x 'GREETING=hello world' -x "A=it's" -x B=a\\ b""")) == [
        "GREETING=hello world",
        "A=it's",
        "B=a b",
    ]


@pytest.mark.parametrize("options", ["--NCCL_DEBUG INFO", "--NCCL_DEBUG=INFO", "-x NCCL_DEBUG=WARN --NCCL_DEBUG INFO"])
def test_nccl_debug_is_an_option_of_the_contract(options: str) -> None:
    assert exports(command(options)) == ["NCCL_DEBUG=INFO"]


def test_what_awss_own_scripts_pass() -> None:
    options = (
        "-verbose -x NCCL_DEBUG=VERSION --mca btl_vader_single_copy_mechanism none "
        "-x FI_EFA_USE_DEVICE_RDMA=1 -x FI_PROVIDER=efa --tag-output --allow-run-as-root -mca plm_rsh_no_tree_spawn 1"
    )
    words = command(options, hosts=TWO)
    assert exports(words) == ["NCCL_DEBUG=VERSION", "FI_EFA_USE_DEVICE_RDMA=1", "FI_PROVIDER=efa"]
    assert "--verbose" in words
    assert words.count("--allow-run-as-root") == 1
    assert "--tag-output" not in words
    assert notes(options).splitlines() == [
        f"{KEY}: --tag-output is left out: the output of ranks does not pass through mpirun; in this log each line "
        "begins with [rank,host]",
        f"{KEY}: FI_PROVIDER=efa, and this machine has no EFA device: libfabric will find nothing",
    ]


@pytest.mark.parametrize("name", ["SM_CURRENT_HOST", "SM_*", "PYTHONPATH"])
def test_what_every_host_sets_for_itself_is_not_carried_over(name: str) -> None:
    """Defect 6: the stock toolkit's -x gives remote ranks the first host's SM_CURRENT_HOST."""
    assert exports(command(f"-x '{name}'")) == []
    assert f"-x {name} is left out: every host sets its own" in notes(f"-x '{name}'")
    assert exports(command("-x SM_HP_LR=3")) == ["SM_HP_LR=3"]


@given(st.dictionaries(st.from_regex(r"[a-z]{2,8}", fullmatch=True), st.text(min_size=1, max_size=9), max_size=4))
def test_parsing_keeps_every_setting(settings: dict[str, str]) -> None:
    settings = {key: value for key, value in settings.items() if key not in ("plm", "btl")}
    text = shlex.join(word for key, value in settings.items() for word in ("--mca", key, f"v{value}"))
    found = parse_mpi_options(text, KEY, 4, TABLE).mca
    assert {key: parameter.value for key, parameter in found.items()} == {key: f"v{v}" for key, v in settings.items()}


# What is refused


@BOTH
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("-hostfile f", "the hosts are configured in resourceconfig.json"),
        ("--hostfile=f", "the hosts are configured in resourceconfig.json"),
        ("-machinefile f", "the hosts are configured in resourceconfig.json"),
        ("-H a,b", "the hosts are configured in resourceconfig.json"),
        ("--host a", "the hosts are configured in resourceconfig.json"),
        ("-np 3", "set sagemaker_mpi_num_of_processes_per_host"),
        ("-n 3", "set sagemaker_mpi_num_of_processes_per_host"),
        ("-c 3", "set sagemaker_mpi_num_of_processes_per_host"),
        ("-N 3", "set sagemaker_mpi_num_of_processes_per_host"),
        ("--help", "mpirun would end without training"),
        ("-h", "mpirun would end without training"),
        ("-?", "mpirun would end without training"),
        ("-V", "mpirun would end without training"),
        ("--version", "mpirun would end without training"),
        ("--do-not-launch", "mpirun would end without training"),
        ("--app f", "mpirun would end without training"),
        ("--wdir /tmp", "every rank runs in the code directory"),
        ("--enable-recovery", "a rank that fails ends the job"),
        ("--xterm 1", "a training job has none"),
        ("--launch-agent x", "this toolkit's own agents"),
        ("-mca plm_rsh_agent ssh", "this toolkit's own agents"),
        ("--mca plm slurm", "this toolkit's own agents"),
        ("--mca btl=self 3", "write --mca btl self"),
        ("--mca btl", "it needs a name and a value after it, and nothing follows"),
        ("--mca", "it needs a name and a value after it, and nothing follows"),
        ("-x", "it needs a value after it, and nothing follows"),
        ("-x --mca btl self", "it needs a value after it, and '--mca' is the next option"),
        ("-x =3", "its value is NAME or NAME=value"),
        ("-x SHOAL_RUN_DIR=/", "SHOAL_ variables are internal"),
        ("--report-bindings=yes", "it takes no value"),
        ("--mca=btl self", "its values are separate words"),
        ("train.py", "mpirun would run it instead of the script"),
        ("-x A=hello world", "mpirun would run it instead of the script"),
        ("--", "mpirun would run it instead of the script"),
        ("--display-mapp", "mpirun does not know it. Did you mean '--display-map'?"),
        ("--no_such_thing", "mpirun does not know it."),
    ],
)
def test_options_that_would_break_the_job_are_refused(options: str, reason: str, series: int) -> None:
    """Defect 4: with some of them the stock toolkit ends with exit code 0 and without training."""
    with pytest.raises(ContractError) as refused:
        made(f"-verbose {options}", series)
    message = str(refused.value)
    assert message.startswith(f"hyperparameters.json, {KEY}: the option ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "secret"),
    [("-x API_KEY='hunter2", "hunter2"), ("-x WANDB_API_KEY= hunter2", "hunter2"), ("--token=hunter2", "hunter2")],
)
def test_an_error_shows_no_secret(options: str, secret: str) -> None:
    with pytest.raises(ContractError) as refused:
        made(options)
    assert secret not in str(refused.value)


@pytest.mark.parametrize("options", ["-mca plm_rsh_no_tree_spawn 1", "--mca plm rsh", "--leave-session-attached"])
def test_options_that_are_ours_anyway_may_be_repeated(options: str) -> None:
    words = command(options, hosts=TWO)
    assert mca(words)["plm_rsh_agent"].endswith("rsh.sh")
    assert words.count("--leave-session-attached") == 1


def test_every_host_is_started_at_once() -> None:
    """mpirun gives up where fewer may start at once than there are hosts, as their daemons stay its children."""
    assert mca(command("--mca plm_rsh_num_concurrent 1", hosts=TWO))["plm_rsh_num_concurrent"] == "2"
    assert "--mca plm_rsh_num_concurrent is left out: it must be 2" in notes(
        "--mca plm_rsh_num_concurrent 1", hosts=TWO
    )
    assert not notes("--mca plm_rsh_num_concurrent 2", hosts=TWO)


# The two series of Open MPI


@pytest.mark.parametrize(
    ("given", "there"),
    [
        (("btl_vader_single_copy_mechanism", "none"), ("smsc", "^cma,knem,xpmem")),
        (("btl_vader_free_list_num", "8"), ("btl_sm_free_list_num", "8")),
        (("plm_rsh_num_concurrent", "9"), ("plm_ssh_num_concurrent", "9")),
        (("orte_keep_fqdn_hostnames", "1"), ("prte_keep_fqdn_hostnames", "1")),
        (("oob_tcp_if_include", "eth0"), ("prte_if_include", "eth0")),
        (("btl", "^vader,tcp"), ("btl", "^sm,tcp")),
        (("mpi_yield_when_idle", "1"), ("mpi_yield_when_idle", "1")),
    ],
)
def test_parameters_that_open_mpi_5_has_renamed(given: tuple[str, str], there: tuple[str, str]) -> None:
    assert translate_parameter(TABLE, *given, 5) == there
    assert translate_parameter(TABLE, *there, 4) == given
    assert translate_parameter(TABLE, *given, 4) == given
    options = f"--mca {given[0]} {given[1]}"
    if given != there:
        assert f"--mca {given[0]} {given[1]} is {there[0]} {there[1]} in Open MPI 5.0, installed here" in notes(
            options, 5
        )
    assert mca(command(options, 5))[there[0]] == there[1]


def test_parameters_that_open_mpi_5_does_not_have_are_left_out_and_reported() -> None:
    options = "--mca orte_abort_on_non_zero_status 1"
    assert "orte_abort_on_non_zero_status" not in command(options, 5)
    assert "orte_abort_on_non_zero_status is left out: Open MPI 5.0 has no such parameter" in notes(options, 5)


def test_a_renamed_variable_is_put_on_the_command() -> None:
    words = command(
        "", 5, environ={"OMPI_MCA_btl_vader_single_copy_mechanism": "cma", "OMPI_MCA_mpi_yield_when_idle": "0"}
    )
    assert mca(words)["smsc"] == "cma"
    assert "mpi_yield_when_idle" not in mca(words)


def test_options_of_the_other_series() -> None:
    assert "--display-map" in command("--display-diffable-map", 5)
    assert "--novm" in command("-novm", 4)
    assert "--novm" not in command("-novm", 5)
    assert "-novm is left out: it is not needed in Open MPI 5.0" in notes("-novm", 5)
    words = command("--bind-to-socket", 5)
    assert words[words.index("--bind-to") + 1] == "package"
    with pytest.raises(
        ContractError, match=r"'--pset' is not allowed: it is one of Open MPI 5\.0, and 4\.1 is installed"
    ):
        command("--pset a", 4)
    with pytest.raises(
        ContractError, match=r"'--cf' is not allowed: it is one of Open MPI 4\.1, and 5\.0 is installed"
    ):
        command("--cf a", 5)
    assert "--pmixmca" in command("--pmixmca gds hash", 5)


def test_our_defaults_in_each_series() -> None:
    old, new = mca(command("", 4, TWO)), mca(command("", 5, TWO))
    assert old == {
        "pml": "ob1",
        "btl": "^openib,ofi",
        "btl_vader_single_copy_mechanism": "none",
        "orte_abort_on_non_zero_status": "1",
        "odls_base_sigkill_timeout": "0",
        "state_base_verbose": "1",
        "btl_tcp_if_include": "eth0",
        "oob_tcp_if_include": "eth0",
        "plm": "rsh",
        "ras": "^slurm,tm,pbs,lsf,alps,gridengine,flux",
        "plm_rsh_num_concurrent": "2",
        "plm_rsh_agent": mpi.build_launch_agent(),
        "plm_rsh_no_tree_spawn": "1",
    }
    assert new == {
        "pml": "ob1",
        "btl": "^openib,ofi",
        "smsc": "^cma,knem,xpmem",
        "state_base_verbose": "1",
        "btl_tcp_if_include": "eth0",
        "prte_if_include": "eth0",
        "plm": "ssh",
        "ras": "^slurm,tm,pbs,lsf,alps,gridengine,flux",
        "plm_ssh_num_concurrent": "2",
        "prte_do_not_resolve": "0",
        "plm_ssh_agent": mpi.build_launch_agent(),
        "plm_ssh_no_tree_spawn": "1",
    }


def test_dots_in_host_names_are_kept() -> None:
    hosts = {"a.example": 1, "b.example": 1}
    assert mca(command("", 4, hosts))["orte_keep_fqdn_hostnames"] == "1"
    assert mca(command("", 5, hosts))["prte_keep_fqdn_hostnames"] == "1"


@pytest.mark.parametrize("name", ["my_host", "codespaces_3620e8", "a+b", "é"])
def test_open_mpi_4_takes_host_names_with_other_characters(name: str) -> None:
    assert mca(command("", 4, {name: 1, "b": 1}))["regx"] == "naive"
    alone = mpi.build_mpirun_command(MACHINE._replace(name=name), ONE, "", KEY, {}, ["true"])
    assert mca(alone.command)["regx"] == "naive"
    assert alone.daemon["regx"] == "naive"
    assert "regx" not in mca(command("", 5, {name: 1, "b": 1}))
    assert "regx" not in mca(command("", 4, {"REP-X1.a": 1, "12": 1}))


# Many hosts


def test_six_hundred_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 18: the stock toolkit's gethostname breaks above 500. Ours needs none, and looks no name up."""
    for name in ("getaddrinfo", "gethostbyname", "gethostname"):
        monkeypatch.setattr(socket, name, lambda *_: pytest.fail("a name is looked up"))
    hosts = {f"algo-{n}-with-a-long-name.internal.example": 8 for n in range(600)}
    began = time.process_time()  # CPU time, to which a busy machine adds little: 0.5 ms
    words = command("-x NCCL_DEBUG=WARN", hosts=hosts)
    assert time.process_time() - began < 0.1
    assert words[words.index("--host") + 1].split(",") == [f"{host}:8" for host in hosts]
    assert words[words.index("-np") + 1] == "4800"
    assert max(len(word.encode()) for word in words) < 128 * 1024  # the kernel's limit of one argument
    assert sum(len(word.encode()) + 9 for word in words) < 512 * 1024
    assert mca(words)["plm_rsh_num_concurrent"] == "600"
    assert "LD_PRELOAD" not in " ".join(words)


# The daemons on the other hosts

OF_4_1 = (
    "PATH=/first/bin:$PATH ; export PATH ; LD_LIBRARY_PATH=/first/lib:$LD_LIBRARY_PATH ; export LD_LIBRARY_PATH ; "
    'OPAL_PREFIX=/first ; export OPAL_PREFIX; /first/bin/orted -mca ess "env" -mca ess_base_vpid 1 '
    '--mca plm_rsh_agent "python3 -I -S rsh.py" -mca orte_tmpdir_base "/tmp/shoal-first" --debug-daemons'
)
OF_5_0 = (
    "PRTE_PREFIX=/first;export PRTE_PREFIX;PMIX_PREFIX=/first;export PMIX_PREFIX;"
    "LD_LIBRARY_PATH=/first/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;/first/bin/prted --leave-session-attached "
    '--allow-run-as-root --prtemca ess "env" --prtemca prte_hnp_uri "prterun-a-1@0.0;tcp://10.0.0.1:5:24" '
    '--prtemca prte_tmpdir_base "/tmp/shoal-first"'
)


@pytest.mark.parametrize(
    ("asked", "name", "prefixes"),
    [
        (OF_4_1, "orted", {"OPAL_PREFIX"}),
        (OF_5_0, "prted", {"OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"}),
        (" orted -mca ess env", "orted", set()),
    ],
)
def test_a_worker_runs_its_own_daemon_with_its_own_directory(
    tmp_path: Path, asked: str, name: str, prefixes: set[str]
) -> None:
    daemon = tmp_path / "bin" / name
    daemon.parent.mkdir()
    daemon.touch(0o755)
    argv, variables = build_daemon_command(asked, {}, {"PATH": str(daemon.parent)}, "/tmp/shoal-own")
    assert argv[0] == str(daemon)
    assert "env" in argv
    assert "/tmp/shoal-first" not in argv
    assert "python3 -I -S rsh.py" not in argv, "the first host's program: this host has its own"
    own = {"OMPI_MCA_orte_tmpdir_base": "/tmp/shoal-own", "PRTE_MCA_prte_tmpdir_base": "/tmp/shoal-own"}
    assert variables == {**own, **dict.fromkeys(prefixes, str(tmp_path))}


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "rm -rf /",
        "sh -c id",
        "orted; id",
        "orted 'half",
        "orted -mca one",
        "orted -mca plm rsh ; id",
        "orted --mca plm rsh --exec id",
        "orted --hnp",
        "orted --tree-spawn",
        "prted --prtemca plm",
        "prted --prtemca plm ssh --bootstrap",
        # Parameters that load, run or write something, and others that nobody has asked for
        "orted -mca mca_base_component_path /tmp/evil",
        "orted -mca mca_base_param_files /tmp/evil",
        "orted -mca orte_launch_agent /tmp/evil",
        "orted -mca orte_output_filename /etc/passwd",
        "orted -mca orte_daemon_spin 1",
        "orted -mca impostor 1",
        "prted --prtemca mca_base_component_path /tmp/evil",
        "prted --pmixmca mca_base_component_path /tmp/evil",
        # and values that allowed parameters never have
        "orted -mca orte_hnp_uri file:/tmp/evil",
        "orted -mca orte_hnp_uri 'x;tcp://10.0.0.1:5 -mca a b'",
        "orted -mca pml /tmp/evil.so",
        "orted -mca ess_base_vpid -1",
        "orted -mca plm_rsh_num_concurrent '1\n2'",
    ],
)
def test_a_worker_runs_nothing_but_a_daemon(tmp_path: Path, asked: str) -> None:
    for name in ("orted", "prted"):
        (tmp_path / name).touch(0o755)
    with pytest.raises(LaunchError, match="The first host asked for"):
        build_daemon_command(asked, {}, {"PATH": str(tmp_path)}, "/tmp")


@pytest.mark.parametrize(
    ("options", "variables", "asked"),
    [
        ("--mca oob_base_verbose 5", {}, "orted -mca oob_base_verbose 5"),
        ("--mca mca_base_component_path /own", {}, "orted -mca mca_base_component_path /own"),
        ("", {"OMPI_MCA_oob_base_verbose": "5"}, "orted -mca oob_base_verbose 5"),
        ("--report-bindings", {}, "orted -mca orte_report_bindings 1 -mca hwloc_base_report_bindings 1"),
        ("--rankfile hosts.txt", {}, "orted -mca orte_rankfile /first/hosts.txt"),
    ],
)
def test_a_worker_takes_what_its_own_plan_has_and_nothing_else(
    tmp_path: Path, options: str, variables: dict[str, str], asked: str
) -> None:
    (tmp_path / "orted").touch(0o755)
    environ = {"PATH": str(tmp_path)}
    argv, _ = build_daemon_command(asked, made(options, hosts=TWO, environ=variables).daemon, environ, "/tmp")
    assert argv[1:] == asked.split()[1:]
    with pytest.raises(LaunchError, match=r"is not in this host's plan\. Fix: set it on every host"):
        build_daemon_command(asked, made("", hosts=TWO).daemon, environ, "/tmp")
    other = re.sub(r"(?<=(verbose|nt_path) ).*", "6", asked)
    if other != asked:
        with pytest.raises(LaunchError, match="is not in this host's plan"):
            build_daemon_command(other, made(options, hosts=TWO, environ=variables).daemon, environ, "/tmp")


def test_a_worker_without_the_first_hosts_open_mpi_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"prted, which the first host's mpirun needs here, is not on PATH"):
        build_daemon_command(OF_5_0, {}, {"PATH": str(tmp_path)}, "/tmp")


# The table against the real mpirun


@pytest.mark.mpi
@BOTH
def test_the_real_mpirun_knows_every_option_of_the_table(series: int, tmp_path: Path) -> None:
    """All in one command: --version is seen only after every word has been understood."""
    mpirun = str(Path(sys.executable).parent / "mpirun") if series == 4 else open_mpi_5("mpirun")
    words, values = [mpirun], {"tune": ["/dev/null"]}  # 5.0 reads that file at once
    for name, option in TABLE["options"].items():
        width = option["values"][series - 4]
        if width is None or name in ("NCCL_DEBUG", "version", "help", "app"):
            continue
        for spelled in (name, *option.get("also", ())) if series == 4 else (name,):
            words += [f"--{spelled}" if len(spelled) > 1 else f"-{spelled}", *values.get(name, ["1"] * width)]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(rf"mpirun \(Open MPI\) {re.escape(RELEASE[series])}\.", done.stdout), done.stdout + done.stderr


# Values of the options in a command that starts daemons. A file is made for options that name one.
VALUES = {
    "bind-to": "core",
    "map-by": "node",
    "rank-by": "slot",
    "x": "A=1",
    "timeout": "60",
    "stdin": "0",
    "am": "FILE",
    "cpu-set": "0",
    "cpu-list": "0",
    "cpus-per-proc": "1",
    "tune": "FILE",
    "cartofile": "FILE",
    "pset": "a",
    "rankfile": "RANKS",
    "report-uri": "uri",
    "report-pid": "pid",
    "spawn-timeout": "30",
    "gpu-support": "1",
    "display": "map",
    "initial-errhandler": "mpi_abort",
    "memory-alloc-kinds": "system",
    "unset-env": "A",
}
# They need a server that is not there, or mpirun ends before it starts a daemon.
NO_DAEMON = ("ompi-server", "report-events", "display-topo", "forward-signals", "append-env", "prepend-env")


def asked_of_daemons(series: int, directory: Path, options: str) -> str:
    """Returns the requests of the real mpirun to a launch agent, with the command of a plan for two hosts.

    These addresses are documentation's: nobody has them, and nobody looks them up.
    """
    mpirun = str(Path(sys.executable).parent / "mpirun") if series == 4 else open_mpi_5("mpirun")
    agent, asked = directory / "agent", directory / "asked"
    agent.write_text(f'#!/bin/sh\nshift\nprintf "%s\\n" "$*" >>{asked}\nexit 1\n')
    agent.chmod(0o755)
    asked.unlink(missing_ok=True)
    machine = MACHINE._replace(open_mpi=series, mpirun=mpirun, interface=choose_interface("", ())[0])
    words = list(
        mpi.build_mpirun_command(machine, {"198.51.100.1": 1, "198.51.100.2": 1}, options, KEY, {}, ["true"]).command
    )
    words[words.index(mpi.AGENT_PARAMETERS[series - 4]) + 1] = str(agent)
    done = subprocess.run(words, capture_output=True, text=True, cwd=directory, timeout=60)
    assert asked.exists(), f"{options}: {done.stdout}{done.stderr}"
    return asked.read_text().splitlines()[0]


@pytest.mark.parametrize("name", ["orted", "prted"])
def test_a_users_login_shell_may_be_sh(name: str, tmp_path: Path) -> None:
    """Before its daemon, mpirun then reads .profile, in parentheses; charliecloud gives every user /bin/sh."""
    (tmp_path / name).touch(0o755)
    asked = f'( test ! -r ./.profile || . ./.profile;  PATH=/x:$PATH ; export PATH ; /x/{name} -mca ess "env" )'
    command, _ = build_daemon_command(asked, {}, {"PATH": str(tmp_path)}, "/tmp")
    assert command == [str(tmp_path / name), "-mca", "ess", "env"]


@pytest.mark.mpi
@BOTH
def test_a_worker_takes_what_the_real_mpirun_asks_for(series: int, tmp_path: Path) -> None:
    """With each option of the table: the plan of a worker allows what the command of the first host's plan asks for.

    Options that replace defaults contradict each other: each has a command of its own.
    """
    (tmp_path / "FILE").touch()
    (tmp_path / "RANKS").write_text("rank 0=198.51.100.1 slot=0\nrank 1=198.51.100.2 slot=0\n")
    for name in ("orted", "prted"):
        (tmp_path / name).touch(0o755)
    together, alone = "", [""]
    for name, option in TABLE["options"].items():
        width = option["values"][series - 4]
        if width is None or name in ("NCCL_DEBUG", *NO_DAEMON) or "refused" in option or "left_out" in option:
            continue
        values = ["", VALUES.get(name, ""), "oob_base_verbose 0"][width]
        written = f"{'-' if len(name) == 1 else '--'}{name} {values} "
        if "replaces" in option or name in ("rank-by", "oversubscribe", "nooversubscribe"):
            alone.append(written)
        elif name not in ("bind-to", "map-by", "gmca", "omca", "gomca", "prtemca", "pmixmca"):
            together += written
    for options in (*alone, together):
        asked = asked_of_daemons(series, tmp_path, options)
        build_daemon_command(asked, made(options, series, TWO).daemon, {"PATH": str(tmp_path)}, "/tmp")
