"""The mpirun command: our default options, merged with the user's custom ones. Pure.

Why each default (the names are those of Open MPI 4.1; for 5.0 they are renamed, see data/mpirun.json):

- `btl_vader_single_copy_mechanism none`: no cross-memory attach in an unprivileged container; the log floods
  otherwise.
- `pml ob1`, `btl ^openib,ofi`: TCP and shared memory. On one host TCP is left out too: no rank opens a port. (Merely
  looking for libfabric's networks makes MPI_Init take a second longer.)
- `orte_abort_on_non_zero_status 1`: one rank's failure ends the job. 5.0 does that anyway.
- `odls_base_sigkill_timeout 0`: the other ranks of a failed job are killed at once, not after a second for each step of
  it (seconds, on two hosts). 5.0 has no such wait.
- `state_base_verbose 1`: says which rank failed first (see daemonlog.py).
- `bind-to none`, `map-by slot`: no pinning, hosts are filled one after the other.
- `mpi_yield_when_idle 1` where ranks outnumber cores: a waiting rank gives its core away.
- `plm_rsh_agent`, `plm_rsh_no_tree_spawn 1`, `--leave-session-attached`: daemons start over our agents, all from the
  first host, and stay their children, so that their end is seen.
- `plm_rsh_num_concurrent`, the number of hosts: daemons that stay children must all be started at once, and mpirun
  would not go beyond 128.
- no `-x` for SM_*: each host's daemon hands its own host's variables on, so that they are right on every host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from shoal_toolkit.job.machine import Machine
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.output import daemonlog
from shoal_toolkit.plan.mpi_options import MCA_VARIABLES, Mca, Options, parse, renamed
from shoal_toolkit.tables import read_table

TMPDIR_PARAMETERS = ("orte_tmpdir_base", "prte_tmpdir_base")  # of Open MPI 4.1, and of 5.0
AGENT_PARAMETERS = ("plm_rsh_agent", "plm_ssh_agent")
ANY = "\0"  # no argument of a process can hold it


class Mpirun(NamedTuple):
    """The command for the first host, what every other one expects its daemon to be started with, and what to say.

    `daemon`: MCA parameter → its value, or ANY.
    """

    command: tuple[str, ...]
    daemon: Mapping[str, str]
    notes: tuple[str, ...]


class Setting(NamedTuple):
    """What sets an MCA parameter: the name of a variable, or an option."""

    name: str
    value: str


class _User(NamedTuple):
    """What the user has set, and the table by which to read it."""

    key: str  # the hyperparameter
    options: Options
    variables: Mapping[str, Setting]  # MCA parameter → what sets it
    table: Mapping[str, Any]


def mpirun(
    machine: Machine,
    hosts: Mapping[str, int],
    text: str,
    key: str,
    environ: Mapping[str, str],
    program: Sequence[str],
    oversubscribe: bool = False,
) -> Mpirun:
    """Return the command. `hosts`: name → ranks there, in the order in which they are filled. `program`: of each rank.

    `text` holds the user's options, the hyperparameter `key`. Raises ContractError for one that cannot be.
    """
    table = read_table("mpirun")
    options = parse(text, key, machine.open_mpi, table)
    user = _User(key, options, _mca_variables(environ, machine.open_mpi, table), table)
    named, named_notes = _named(user, len(hosts) > 1, oversubscribe)
    mca, mca_notes = _mca(user, _defaults(machine, hosts, table), _agents(machine, hosts, table))
    words = [machine.mpirun, *_places(hosts)]
    for name, values in named.items():
        words += [f"--{name}" if len(name) > 1 else f"-{name}", *values]
    for parameter, (option, value) in mca.items():
        words += [f"--{option}", parameter, value]
    for export in options.exports.values():
        words += ["-x", export]
    return Mpirun(
        command=(*words, *program),
        daemon=_daemon(user, named, mca),
        notes=(*options.notes, *named_notes, *mca_notes, *_missing(user, machine)),
    )


def _places(hosts: Mapping[str, int]) -> list[str]:
    total = sum(hosts.values())
    places = [f"{host}:{count}" for host, count in hosts.items()] if len(hosts) > 1 else [f"localhost:{total}"]
    return ["--host", ",".join(places), "-np", str(total)]


def _named(user: _User, several: bool, oversubscribe: bool) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the options that are no MCA parameters, and what the user's replaced of ours."""
    ours: dict[str, tuple[str, ...]] = {"allow-run-as-root": ()}
    ours.update({"oversubscribe": ()} if oversubscribe and "nooversubscribe" not in user.options.named else {})
    ours.update({"leave-session-attached": ()} if several else {})
    notes = []
    for name, value in (("bind-to", "none"), ("map-by", "slot")):
        instead = _instead(user, name)
        if not instead:
            ours[name] = (value,)
        elif instead != f"--{name} {value}":
            notes.append(f"{user.key}: {instead} replaces the default --{name} {value}")
    return {**ours, **user.options.named}, notes


def _instead(user: _User, name: str) -> str:
    """Return what the user set in the place of an option of ours, empty for nothing."""
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


def _mca(user: _User, defaults: Mapping[str, str], agents: Mapping[str, str]) -> tuple[dict[str, Mca], list[str]]:
    """Return each MCA parameter once, as mpirun refuses a second mention, and what replaced what.

    The user's option wins over a variable, and that over our default; `agents` are not the user's to set.
    """
    left, notes = _left_to_us(user, defaults)
    # A variable works by itself, unless the installed series knows the parameter by another name.
    renamed_variables = {
        parameter: Mca("mca", found.value)
        for parameter, found in user.variables.items()
        if not found.name.endswith(f"_{parameter}")
    }
    for parameter, value in agents.items():
        if user.options.mca.get(parameter, Mca("", value)).value != value:
            notes.append(f"{user.key}: --mca {parameter} is left out: it must be {value} with this toolkit's agents")
    ours, last = ({name: Mca("mca", value) for name, value in settings.items()} for settings in (left, agents))
    return {**ours, **renamed_variables, **user.options.mca, **last}, notes


def _left_to_us(user: _User, defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return our defaults that nothing of the user's replaces, and what replaces the others."""
    left, notes = {}, []
    for parameter, value in defaults.items():
        given = _given(user, parameter)
        if given is None:
            left[parameter] = value
        elif given.value != value:
            notes.append(f"{given.name} {given.value} replaces the default --mca {parameter} {value}")
    return left, notes


def _given(user: _User, parameter: str) -> Setting | None:
    """Return how the user sets an MCA parameter. Open MPI takes either a list to include or one to exclude."""
    for name in (parameter, parameter.replace("_if_include", "_if_exclude")):
        if name in user.options.mca:
            return Setting(f"{user.key}: --mca {name}", user.options.mca[name].value)
        if name in user.variables:
            return Setting(f"the variable {user.variables[name].name}", user.variables[name].value)
    return None


def _daemon(user: _User, named: Mapping[str, Sequence[str]], mca: Mapping[str, Mca]) -> dict[str, str]:
    """Return the MCA parameters that mpirun hands on: those of options, of variables, and those that are set."""
    by_option = {parameter: ANY for name in named for parameter in user.table["options"][name].get("daemon", ())}
    by_variable = {parameter: found.value for parameter, found in user.variables.items()}
    return {**by_option, **by_variable, **{parameter: each.value for parameter, each in mca.items()}}


def _missing(user: _User, machine: Machine) -> list[str]:
    """AWS's own scripts ask for EFA wherever they run."""
    if user.options.exports.get("FI_PROVIDER") != "FI_PROVIDER=efa" or any(nic.driver == "efa" for nic in machine.nics):
        return []
    return [f"{user.key}: FI_PROVIDER=efa, and this machine has no EFA device: libfabric will find nothing"]


def _defaults(machine: Machine, hosts: Mapping[str, int], table: Mapping[str, Any]) -> dict[str, str]:
    """Return our MCA parameters, under the names of what is installed."""
    defaults = {
        "pml": "ob1",
        "btl": "^openib,ofi" if len(hosts) > 1 else "^openib,ofi,tcp",
        "btl_vader_single_copy_mechanism": "none",
        "orte_abort_on_non_zero_status": "1",
        "odls_base_sigkill_timeout": "0",
        **daemonlog.VERBOSITY,
    }
    if max(hosts.values()) > machine.cpus:
        defaults["mpi_yield_when_idle"] = "1"
    if len(hosts) > 1:
        defaults.update(btl_tcp_if_include=machine.interface, oob_tcp_if_include=machine.interface)
        if machine.open_mpi == 5:  # it would not know the first host's name for its own (an alias, as in containers)
            defaults["prte_do_not_resolve"] = "0"
    elif machine.open_mpi == 4:  # 5.0 does not take this interface, and uses it by itself where there is no other
        defaults["oob_tcp_if_include"] = "lo"
    if any("." in host for host in hosts):
        defaults["orte_keep_fqdn_hostnames"] = "1"
    return _renamed(defaults, machine, table)


def _agents(machine: Machine, hosts: Mapping[str, int], table: Mapping[str, Any]) -> dict[str, str]:
    """Return the MCA parameters that start daemons over our agents. These are not the user's."""
    # On one host too: mpirun looks for ssh even when it has no host to reach, and fails where there is none.
    parameters = {"plm_rsh_agent": launch_agent(machine.python)}
    if len(hosts) > 1:
        parameters.update(plm_rsh_no_tree_spawn="1", plm_rsh_num_concurrent=str(len(hosts)))
    return _renamed(parameters, machine, table)


def _renamed(parameters: Mapping[str, str], machine: Machine, table: Mapping[str, Any]) -> dict[str, str]:
    there = (renamed(table, parameter, value, machine.open_mpi) for parameter, value in parameters.items())
    return dict(parameter for parameter in there if parameter is not None)


def _mca_variables(environ: Mapping[str, str], series: int, table: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the MCA parameters that variables set, under the names of what is installed."""
    found = {}
    for name, value in environ.items():
        for prefix in MCA_VARIABLES:
            if name.startswith(prefix) and (new := renamed(table, name[len(prefix) :], value, series)):
                found[new[0]] = Setting(name, new[1])
    return found


def launch_agent(python: str) -> str:
    """Return what mpirun starts where it would start ssh. mpirun splits it at spaces."""
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hosts", "rsh.py")
    return f"{python} -I -S {script}"


def session_variables(directory: str) -> dict[str, str]:
    """Return the variables that put Open MPI's own files into a directory of this job's, with either series.

    In /tmp they bear a name made of the host's and a PID, as those of a job that was killed: in a container that is
    started again both repeat, and Open MPI 5.0 gives up when it finds them.
    """
    prefixes = ("OMPI_MCA_", "PRTE_MCA_")
    return {f"{prefix}{parameter}": directory for prefix, parameter in zip(prefixes, TMPDIR_PARAMETERS)}
