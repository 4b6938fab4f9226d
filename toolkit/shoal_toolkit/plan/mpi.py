"""Builds the mpirun command: default options, merged with the user's custom options.

Why each default (names of Open MPI 4.1; data/mpirun.json has the names in 5.0):

- `btl_vader_single_copy_mechanism none`: an unprivileged container has no cross-memory attach, and the log would fill
  with warnings.
- `pml ob1`, `btl ^openib,ofi`: TCP and shared memory. On one host TCP is left out too, so that no rank opens a port.
  (Searching for libfabric's networks alone makes MPI_Init take a second longer.)
- `orte_abort_on_non_zero_status 1`: one rank's failure ends the job. 5.0 does that by default.
- `odls_base_sigkill_timeout 0`: the other ranks of a failed job are killed at once. By default, each step takes a
  second (several seconds on two hosts). 5.0 has no such wait.
- `state_base_verbose 1`: logs which rank failed first (see output/mpirun_log.py).
- `bind-to none`, `map-by slot`: no pinning; hosts are filled one after the other.
- `mpi_yield_when_idle 1` if there are more ranks than cores: a waiting rank yields its core.
- `plm rsh`, `ras ^slurm,...`: in a job of Slurm or another scheduler, mpirun would ask it for hosts, and start daemons
  with `srun`. It would count one slot for each task, and there is one `train` per host.
- `plm_rsh_agent`, `plm_rsh_no_tree_spawn 1`, `--leave-session-attached`: all daemons are started from the first host
  through our agents, and stay child processes, so that their end is noticed.
- `plm_rsh_num_concurrent`, the number of hosts: daemons that stay child processes must start all at once, but by
  default mpirun starts at most 128.
- no `-x` for SM_*: the daemon of each host passes on its own host's variables, so that they are right on every host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from shoal_toolkit.fast_typing import Any, NamedTuple
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.plan.mpi_options import MCA_VARIABLES, McaValue, MpiOptions, parse_mpi_options, translate_parameter

TMPDIR_PARAMETERS = ("orte_tmpdir_base", "prte_tmpdir_base")  # of Open MPI 4.1 and of 5.0
AGENT_PARAMETERS = ("plm_rsh_agent", "plm_ssh_agent")
_NO_SCHEDULER = "^slurm,tm,pbs,lsf,alps,gridengine,flux"  # the names of both series; Open MPI ignores unknown ones
_REGULAR_NAME = re.compile(r"[A-Za-z0-9.-]*")  # of a host; Compose and users also have underscores
ANY = "\0"  # any value: no argument of a process can contain it


class MpirunCommand(NamedTuple):
    """The command for the first host, and the parameters that other hosts accept from it."""

    command: tuple[str, ...]
    daemon: Mapping[str, str]  # MCA parameter → value or ANY, which mpirun may pass to its daemons
    notes: tuple[str, ...]  # for the log


class Setting(NamedTuple):
    """How an MCA parameter is set: by a variable or an option."""

    name: str
    value: str


class _UserOptions(NamedTuple):
    key: str  # the hyperparameter
    options: MpiOptions
    variables: Mapping[str, Setting]  # MCA parameter → what sets it
    table: Mapping[str, Any]


def build_mpirun_command(
    machine: Machine,
    hosts: Mapping[str, int],
    text: str,
    key: str,
    environ: Mapping[str, str],
    program: Sequence[str],
    oversubscribe: bool = False,
) -> MpirunCommand:
    """Returns the mpirun command of a job.

    Args:
        hosts: Host name → number of ranks, in the order in which hosts are filled.
        text: The user's custom options.
        key: The hyperparameter that holds them.
        program: The command of each rank.
        oversubscribe: Whether to allow more ranks than cores.

    Raises:
        ContractError: If a custom option is unknown, or would break the job.
    """
    table = machine.mpirun_options
    options = parse_mpi_options(text, key, machine.open_mpi, table)
    user = _UserOptions(key, options, _read_mca_variables(environ, machine.open_mpi, table), table)
    named, named_notes = _merge_named(user, len(hosts) > 1, oversubscribe)
    mca, mca_notes = _merge_mca(user, _default_parameters(machine, hosts), _agent_parameters(machine, hosts))
    words = [machine.mpirun, *_format_hosts(hosts)]
    for name, values in named.items():
        words += [f"--{name}" if len(name) > 1 else f"-{name}", *values]
    for parameter, (option, value) in mca.items():
        words += [f"--{option}", parameter, value]
    for export in options.exports.values():
        words += ["-x", export]
    return MpirunCommand(
        command=(*words, *program),
        daemon=_daemon_parameters(user, named, mca),
        notes=(*options.notes, *named_notes, *mca_notes, *_note_missing_efa(user, machine)),
    )


def _format_hosts(hosts: Mapping[str, int]) -> list[str]:
    total = sum(hosts.values())
    places = [f"{host}:{count}" for host, count in hosts.items()] if len(hosts) > 1 else [f"localhost:{total}"]
    return ["--host", ",".join(places), "-np", str(total)]


def _merge_named(
    user: _UserOptions, several: bool, oversubscribe: bool
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Returns the options other than MCA parameters, the user's before the defaults, and notes on replaced defaults."""
    ours: dict[str, tuple[str, ...]] = {"allow-run-as-root": ()}
    ours.update({"oversubscribe": ()} if oversubscribe and "nooversubscribe" not in user.options.named else {})
    ours.update({"leave-session-attached": ()} if several else {})
    notes = []
    for name, value in (("bind-to", "none"), ("map-by", "slot")):
        instead = _find_replacement(user, name)
        if not instead:
            ours[name] = (value,)
        elif instead != f"--{name} {value}":
            notes.append(f"{user.key}: {instead} replaces the default --{name} {value}")
    return {**ours, **user.options.named}, notes


def _find_replacement(user: _UserOptions, name: str) -> str:
    known = user.table["options"]
    for given, values in user.options.named.items():
        if given == name or name in known[given].get("replaces", ()):
            return " ".join([f"--{given}", *values])
    for parameter in known[name]["mca"]:
        if parameter in user.options.mca:
            return f"--mca {parameter} {user.options.mca[parameter].value}"
        if parameter in user.variables:
            return f"{user.variables[parameter].name}={user.variables[parameter].value}"
    return ""


def _merge_mca(
    user: _UserOptions, defaults: Mapping[str, str], agents: Mapping[str, str]
) -> tuple[dict[str, McaValue], list[str]]:
    """Returns each MCA parameter once, because mpirun refuses a second mention, and notes on replaced ones."""
    kept, notes = _keep_defaults(user, defaults)
    # A variable takes effect by itself, unless the installed series has another name for the parameter.
    renamed_variables = {
        parameter: McaValue("mca", found.value)
        for parameter, found in user.variables.items()
        if not found.name.endswith(f"_{parameter}")
    }
    for parameter, value in agents.items():
        if user.options.mca.get(parameter, McaValue("", value)).value != value:
            notes.append(f"{user.key}: --mca {parameter} is left out: it must be {value} with this toolkit's agents")
    ours, last = ({name: McaValue("mca", value) for name, value in settings.items()} for settings in (kept, agents))
    # The user's option beats a variable, and that beats a default. Users can't change `agents`.
    return {**ours, **renamed_variables, **user.options.mca, **last}, notes


def _keep_defaults(user: _UserOptions, defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    kept, notes = {}, []
    for parameter, value in defaults.items():
        given = _find_setting(user, parameter)
        if given is None:
            kept[parameter] = value
        elif given.value != value:
            notes.append(f"{given.name} {given.value} replaces the default --mca {parameter} {value}")
    return kept, notes


def _find_setting(user: _UserOptions, parameter: str) -> Setting | None:
    """Returns how the user sets an MCA parameter. A list to exclude also replaces a default list to include."""
    for name in (parameter, parameter.replace("_if_include", "_if_exclude")):
        if name in user.options.mca:
            return Setting(f"{user.key}: --mca {name}", user.options.mca[name].value)
        if name in user.variables:
            return Setting(f"the variable {user.variables[name].name}", user.variables[name].value)
    return None


def _daemon_parameters(
    user: _UserOptions, named: Mapping[str, Sequence[str]], mca: Mapping[str, McaValue]
) -> dict[str, str]:
    """Returns the parameters that mpirun passes to its daemons. Those that it derives from options are ANY."""
    by_option = {parameter: ANY for name in named for parameter in user.table["options"][name].get("daemon", ())}
    by_variable = {parameter: found.value for parameter, found in user.variables.items()}
    return {**by_option, **by_variable, **{parameter: each.value for parameter, each in mca.items()}}


def _note_missing_efa(user: _UserOptions, machine: Machine) -> list[str]:
    """AWS's own scripts set FI_PROVIDER=efa everywhere."""
    if user.options.exports.get("FI_PROVIDER") != "FI_PROVIDER=efa" or any(nic.driver == "efa" for nic in machine.nics):
        return []
    return [f"{user.key}: FI_PROVIDER=efa, and this machine has no EFA device: libfabric will find nothing"]


def _default_parameters(machine: Machine, hosts: Mapping[str, int]) -> dict[str, str]:
    defaults = {
        "pml": "ob1",
        "btl": "^openib,ofi" if len(hosts) > 1 else "^openib,ofi,tcp",
        "btl_vader_single_copy_mechanism": "none",
        "orte_abort_on_non_zero_status": "1",
        "odls_base_sigkill_timeout": "0",
        "state_base_verbose": "1",
    }
    if max(hosts.values()) > machine.cpus:
        defaults["mpi_yield_when_idle"] = "1"
    if len(hosts) > 1:
        defaults.update(btl_tcp_if_include=machine.interface, oob_tcp_if_include=machine.interface)
        if machine.open_mpi == 5:  # it would not recognise an alias of the first host, as in containers
            defaults["prte_do_not_resolve"] = "0"
    elif machine.open_mpi == 4:  # 5.0 refuses this interface, and uses it by itself if there is no other
        defaults["oob_tcp_if_include"] = "lo"
    if any("." in host for host in hosts):
        defaults["orte_keep_fqdn_hostnames"] = "1"
    if machine.open_mpi == 4 and not all(map(_REGULAR_NAME.fullmatch, (*hosts, machine.name))):
        defaults["regx"] = "naive"  # the default component refuses such names, also of a single host
    return _translate(defaults, machine)


def _agent_parameters(machine: Machine, hosts: Mapping[str, int]) -> dict[str, str]:
    # On one host too: mpirun searches ssh even if it connects to no host, and fails without it.
    parameters = {"plm": "rsh", "ras": _NO_SCHEDULER, "plm_rsh_agent": build_launch_agent()}
    if len(hosts) > 1:
        parameters.update(plm_rsh_no_tree_spawn="1", plm_rsh_num_concurrent=str(len(hosts)))
    return _translate(parameters, machine)


def _translate(parameters: Mapping[str, str], machine: Machine) -> dict[str, str]:
    table, series = machine.mpirun_options, machine.open_mpi
    translated = (translate_parameter(table, parameter, value, series) for parameter, value in parameters.items())
    return dict(parameter for parameter in translated if parameter is not None)


def _read_mca_variables(environ: Mapping[str, str], series: int, table: Mapping[str, Any]) -> dict[str, Setting]:
    found = {}
    for name, value in environ.items():
        for prefix in MCA_VARIABLES:
            if name.startswith(prefix) and (new := translate_parameter(table, name[len(prefix) :], value, series)):
                found[new[0]] = Setting(name, new[1])
    return found


def build_launch_agent() -> str:
    """Returns the command that mpirun runs instead of ssh. mpirun splits it at spaces."""
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hosts", "rsh.sh")
    return f"/bin/sh {script}"


def set_session_directory(directory: str) -> dict[str, str]:
    """Returns the variables that make either series of Open MPI keep its files in a directory of this job.

    By default they are in /tmp, and their names contain the host name and a PID. In a restarted container both repeat,
    and Open MPI 5.0 fails if it finds the files of a killed job.
    """
    prefixes = ("OMPI_MCA_", "PRTE_MCA_")
    return {f"{prefix}{parameter}": directory for prefix, parameter in zip(prefixes, TMPDIR_PARAMETERS)}
