"""Imports the frameworks of a script before its job: `shoal run --watch` makes the hosts of the next run ready early.

Such a host has the source of the last run. `train` starts a standby for that, and waits for SHOAL_START_FILE, which
`shoal run` writes after the new source. The ranks are forked from the standby if a new one would import at least the
same, with the same variables. Otherwise it ends, and the job starts as any other.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence

from shoal_toolkit.discovery.host_list import remove_launch_variables
from shoal_toolkit.errors import TrainError
from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.job.contract import read_cluster, read_job, read_paths
from shoal_toolkit.job.machine import read_machine
from shoal_toolkit.job.peer_filter import build_connection_variables
from shoal_toolkit.job.settings import START_FILE, derive_rank_secret, take_settings
from shoal_toolkit.plan.plan import LaunchPlan, make_plan
from shoal_toolkit.run.standby import StandbyProcess, build_environment, start_process
from shoal_toolkit.sidecars.standby import choose_imports
from shoal_toolkit.sidecars.standby_early import list_modules
from shoal_toolkit.sidecars.standby_ranks import find_early_differences
from shoal_toolkit.system.account import build_account_variables

_POLL_SECONDS, _LATER_POLL_SECONDS, _FIRST_SECONDS = 0.01, 0.05, 60.0
_LOADED = ("SHOAL_PEERS", "SHOAL_CONNECTIONS")  # variables that a library reads when a process loads it

Imports = frozenset[tuple[str, str]]


class Warm(NamedTuple):
    """A standby that was started before its job."""

    process: StandbyProcess
    environ: Mapping[str, str]
    imports: Imports
    plan: LaunchPlan

    def fits(self, plan: LaunchPlan, environ: Mapping[str, str]) -> bool:
        """Returns whether the ranks of a plan can be forked from it.

        Args:
            environ: The environment of the script.
        """
        ours = build_environment(plan, environ, self.process.mark)
        # The standby has the command of mpirun's ranks from its start; other ranks get theirs later.
        end = None if plan.by_mpirun else 1
        if (self.plan.by_mpirun, self.plan.script[:end]) != (plan.by_mpirun, plan.script[:end]):
            return False
        if find_early_differences(ours, self.environ) or any(ours.get(n) != self.environ.get(n) for n in _LOADED):
            return False
        found = _find_imports(plan)
        return found is not None and self.imports <= found


def wait_for_start(words: Sequence[str]) -> Warm | None:
    """Waits for the file in SHOAL_START_FILE, and meanwhile imports. Removes the variable.

    Args:
        words: The arguments of `train` for the script.

    Returns:
        The standby; None if there is nothing to import, or the ranks cannot be forked.
    """
    path = os.environ.pop(START_FILE)
    os.environ.update(build_account_variables(os.environ))  # the standby and the script have the same home
    began = time.monotonic()
    try:
        warm = _start(words)
    except (TrainError, OSError):  # the job reports it, if it is still wrong then
        warm = None
    while not os.path.exists(path):
        is_late = time.monotonic() - began > _FIRST_SECONDS
        time.sleep(_LATER_POLL_SECONDS if is_late else _POLL_SECONDS)
    return warm


def _start(words: Sequence[str]) -> Warm | None:
    environ = dict(os.environ)
    settings, problem = take_settings(environ)
    if problem is not None:
        return None
    paths = read_paths(environ)
    cluster = read_cluster(paths, os.uname().nodename, environ)
    remove_launch_variables(environ)
    environ.update(derive_rank_secret(settings, environ))
    job = read_job(paths, cluster, environ, tuple(words), fetch=False)
    peers = [host for host in cluster.hosts if host != cluster.current_host]
    plan = make_plan(job, read_machine(environ, cluster.interface_name, peers, job.instance_type))
    imports = _find_imports(plan)
    if not imports:
        return None
    kept = {name: environ[name] for name in environ if name not in plan.removed}
    environ = {**kept, **build_connection_variables(plan.env), **plan.env}
    process = start_process(plan, environ, os.urandom(8).hex(), early=True)
    return Warm(process, build_environment(plan, environ, process.mark), imports, plan)


def _find_imports(plan: LaunchPlan) -> Imports | None:
    """Returns the imports of a standby for the script; None if there can be none before the job.

    Packages that are installed before the script starts must be imported after that. A module of the script's own may
    have the name of an installed one, or be in a PYTHONPATH. Frameworks would import it, and it would stay as it was.
    """
    if os.environ.get("PYTHONPATH") or not plan.can_fork or plan.setup or (plan.has_ranks and not plan.forks_ranks):
        return None
    words = plan.script[3:] if plan.script[1:3] == ("-m", "mpi4py") else plan.script[1:]
    arguments = [words[0] if words[0] == "-m" else os.path.join(plan.cwd, words[0]), *words[1:]]
    first = plan.cwd if arguments[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))
    others = plan.env.get("PYTHONPATH", "").split(os.pathsep)
    if any(_hides_installed(directory) for directory in {first, plan.cwd, *filter(None, others)}):
        return None
    return frozenset(choose_imports(arguments, [first, plan.cwd]))


def _hides_installed(directory: str) -> bool:
    """Whether a module in a directory has the name of one that this Python finds elsewhere."""
    return any(_is_installed(name) for name in list_modules(directory))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True
