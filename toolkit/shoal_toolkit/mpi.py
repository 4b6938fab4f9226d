"""The mpirun command: our default options, merged with the user's custom ones. Pure.

Why each default:

- `btl_vader_single_copy_mechanism none`: no cross-memory attach in an unprivileged container; the log floods
  otherwise.
- `pml ob1`, `btl ^openib`: TCP and shared memory. On one host TCP is left out too: no rank opens a port.
- `orte_abort_on_non_zero_status 1`: one rank's failure ends the job.
- `odls_base_sigkill_timeout 0`: the other ranks of a failed job are killed at once, not after a second for each step of
  it (seconds, on two hosts).
- `state_base_verbose 1`: says which rank failed first (see daemonlog.py).
- `bind-to none`, `map-by slot`: no pinning, hosts are filled one after the other.
- `mpi_yield_when_idle 1` where ranks outnumber cores: a waiting rank gives its core away.
- `plm_rsh_agent`, `plm_rsh_no_tree_spawn 1`, `--leave-session-attached`: daemons start over our agents, all from the
  first host, and stay their children, so that their end is seen.
- no `-x` for SM_*: each host's daemon hands its own host's variables on, so that they are right on every host.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal_toolkit import daemonlog
from shoal_toolkit.errors import ContractError
from shoal_toolkit.machine import Machine
from shoal_toolkit.rank_shell import under_mpirun

_MCA = ("mca", "gmca")
# Given once each; the user's replaces ours. mpirun takes the name with one dash or two.
_KEYED = ("bind-to", "map-by")
# Options that would break the job, or end mpirun with exit code 0 and no training.
_REFUSED = {
    **dict.fromkeys(("hostfile", "machinefile", "default-hostfile", "host", "H"), "the hosts are configured already"),
    **dict.fromkeys(("np", "n", "c"), "set sagemaker_mpi_num_of_processes_per_host, or sagemaker_mpi_num_processes"),
    **dict.fromkeys(("help", "h", "?", "version", "V"), "mpirun would print that and end without training"),
    **dict.fromkeys(("do-not-launch", "app"), "mpirun would not run the script"),
}
_REFUSED_MCA = {
    **dict.fromkeys(("plm", "plm_rsh_agent", "orte_rsh_agent"), "hosts are started by this toolkit's own agents"),
    **dict.fromkeys(("plm_rsh_no_tree_spawn", "orte_leave_session_attached"), "this toolkit's agents rely on it"),
}
_OURS_ANYWAY = (("plm", "rsh"), ("plm_rsh_no_tree_spawn", "1"), ("orte_leave_session_attached", "1"))


class CustomOptions(NamedTuple):
    """The user's mpirun options, sorted by kind."""

    mca: Mapping[str, str]
    keyed: Mapping[str, str]
    exports: Mapping[str, str]  # NAME → "NAME" or "NAME=value"
    other: tuple[str, ...]


def parse_custom(text: str, source: str) -> CustomOptions:
    """Split and check custom MPI options; quotes are honoured. Raises ContractError naming `source` and the option."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ContractError(f"{source}: {text!r} cannot be split into words ({error}). Check its quotes.") from None
    parsed = CustomOptions({}, {}, {}, ())
    while words:
        parsed, words = _take(parsed, words, source)
    return parsed


def _take(parsed: CustomOptions, words: list[str], source: str) -> tuple[CustomOptions, list[str]]:
    """Move one option with its values from the words into what is parsed."""
    word, rest = words[0], words[1:]
    name = word.lstrip("-") if word.startswith("-") else ""
    bare, equals, value = name.partition("=")
    if bare in _REFUSED:
        raise ContractError(f"{source}: the option {word!r} is not allowed: {_REFUSED[bare]}.")
    if name in _MCA:
        key, setting = _values(word, rest, 2, source)
        if key in _REFUSED_MCA and (key, setting) not in _OURS_ANYWAY:
            raise ContractError(f"{source}: '{word} {key}' is not allowed: {_REFUSED_MCA[key]}.")
        return parsed._replace(mca={**parsed.mca, key: setting}), rest[2:]
    if name in _KEYED:
        return parsed._replace(keyed={**parsed.keyed, name: _values(word, rest, 1, source)[0]}), rest[1:]
    if name == "x":
        export = _values(word, rest, 1, source)[0]
        return parsed._replace(exports={**parsed.exports, export.partition("=")[0]: export}), rest[1:]
    if bare == "NCCL_DEBUG":  # no option of mpirun, but one of the stock toolkit
        level = value if equals else _values(word, rest, 1, source)[0]
        exports = {**parsed.exports, "NCCL_DEBUG": f"NCCL_DEBUG={level}"}
        return parsed._replace(exports=exports), rest if equals else rest[1:]
    return parsed._replace(other=(*parsed.other, word)), rest


def _values(option: str, words: Sequence[str], count: int, source: str) -> Sequence[str]:
    if len(words) < count:
        kind = "a name and a value" if count == 2 else "a value"
        raise ContractError(f"{source}: the option {option!r} at the end needs {kind} after it.")
    return words[:count]


def mpirun_command(
    machine: Machine,
    hosts: Mapping[str, int],
    custom: CustomOptions,
    environ: Mapping[str, str],
    script: Sequence[str],
    oversubscribe: bool = False,
) -> list[str]:
    """Return the command for the first host. `hosts`: name → ranks there, in the order in which they are filled."""
    several = len(hosts) > 1
    places = [f"{host}:{count}" for host, count in hosts.items()] if several else [f"localhost:{sum(hosts.values())}"]
    command = [machine.mpirun, "--host", ",".join(places), "-np", str(sum(hosts.values())), "--allow-run-as-root"]
    command += ["--oversubscribe"] if oversubscribe else []
    command += ["--leave-session-attached"] if several else []
    for name, value in {"bind-to": "none", "map-by": "slot", **custom.keyed}.items():
        command += [f"-{name}", value]
    for key, value in _mca(machine, hosts, custom, environ).items():
        command += ["-mca", key, value]
    for export in custom.exports.values():
        command += ["-x", export]
    return [*command, *custom.other, *under_mpirun(script)]


def _mca(
    machine: Machine, hosts: Mapping[str, int], custom: CustomOptions, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return each MCA parameter once: mpirun refuses a second mention. The user's option or OMPI_MCA_<key> wins."""
    defaults = {
        "pml": "ob1",
        "btl": "^openib" if len(hosts) > 1 else "^openib,tcp",
        "btl_vader_single_copy_mechanism": "none",
        "orte_abort_on_non_zero_status": "1",
        "odls_base_sigkill_timeout": "0",
        **daemonlog.VERBOSITY,
    }
    if max(hosts.values()) > machine.cpus:
        defaults["mpi_yield_when_idle"] = "1"
    if len(hosts) > 1:
        defaults.update(btl_tcp_if_include=machine.interface, oob_tcp_if_include=machine.interface)
    else:
        defaults["oob_tcp_if_include"] = "lo"
    if any("." in host for host in hosts):
        defaults["orte_keep_fqdn_hostnames"] = "1"
    # Open MPI takes either a list to include or one to exclude: the user's exclusion replaces our inclusion.
    for layer in ("btl_tcp", "oob_tcp"):
        if f"{layer}_if_exclude" in custom.mca or f"OMPI_MCA_{layer}_if_exclude" in environ:
            defaults.pop(f"{layer}_if_include", None)
    merged = {key: value for key, value in defaults.items() if f"OMPI_MCA_{key}" not in environ}
    merged.update(custom.mca)
    # On one host too: mpirun looks for ssh even when it has no host to reach, and fails where there is none.
    merged["plm_rsh_agent"] = launch_agent(machine.python)
    if len(hosts) > 1:
        merged["plm_rsh_no_tree_spawn"] = "1"
    return merged


def launch_agent(python: str) -> str:
    """Return what mpirun starts where it would start ssh. mpirun splits it at spaces."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rsh.py")
    return f"{python} -I -S {script}"


def mca_options(custom: CustomOptions) -> list[str]:
    """Return the user's MCA parameters, for the log."""
    return [f"-mca {key} {value}" for key, value in custom.mca.items()]
