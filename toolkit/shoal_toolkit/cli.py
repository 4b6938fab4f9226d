"""Runs the training job of this container or host, as /opt/ml/input/config describes it.

- train [argument ...]       run the job, with more arguments for the script
- train --explain [--json]   print the command and the environment, and start nothing
- train --preflight          check the hosts and the network between them (start it on every host)
- train --rehearse [...]     run on CPU with emulated GPUs, on every host; sets SHOAL_REHEARSE=1
- train --help, train --version

--explain, --preflight and --rehearse may be anywhere among the arguments. Arguments after `--` are passed to the
script: `train -- --help` prints the script's own help.

Example: train --explain --epochs 3
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from shoal_toolkit import __version__, redact
from shoal_toolkit.discovery.host_list import remove_launch_variables
from shoal_toolkit.errors import FAILED, LaunchError, StoppedError, TrainError
from shoal_toolkit.fast_typing import TYPE_CHECKING, NoReturn
from shoal_toolkit.job.code import PYTHON
from shoal_toolkit.job.contract import (
    Cluster,
    Job,
    Paths,
    make_cluster,
    read_cluster,
    read_framework,
    read_job,
    read_paths,
)
from shoal_toolkit.job.machine import read_machine
from shoal_toolkit.job.settings import (
    START_FILE,
    TrainSettings,
    derive_rank_secret,
    describe_restarts,
    take_settings,
    warn_without_secret,
)
from shoal_toolkit.log import clean_line, configure_log, write_log
from shoal_toolkit.plan.launcher import DEFAULT_MASTER_PORT, select_hosts
from shoal_toolkit.plan.plan import LaunchPlan, make_plan
from shoal_toolkit.result.result import Result, prepare_output, write_result
from shoal_toolkit.run.host import Host, HostTask, make_report
from shoal_toolkit.system.account import build_account_variables
from shoal_toolkit.system.loop import PASSED_SIGNALS, STOP_SIGNALS

if TYPE_CHECKING:  # only `shoal run --watch` has one
    from shoal_toolkit.run.warm import Warm

_PREFLIGHT_TIMEOUT = 60  # seconds in which the hosts of a preflight must meet


def command() -> NoReturn:
    """Runs `main`, flushes stdout and stderr, and ends the process with the exit code.

    Python's shutdown is skipped, because it takes as long as a no-op job. If the output can't be written, 0 becomes 1.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None if `train` was started with the descriptor closed
                stream.flush()
        except OSError:  # its reader has gone
            code = code or FAILED
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train`, by default with the arguments of the process. Returns its exit code.

    `--rehearse` sets SHOAL_REHEARSE in the environment of this process. If this process is PID 1, it runs the job in a
    child process, and ends without returning. Standard descriptors that are closed are opened to /dev/null.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"train (shoal-toolkit) {__version__}")
        return 0
    if words == ["--help"] or words == ["-h"]:
        print(__doc__.strip())
        return 0
    explains = as_json = preflights = False
    if words:
        from shoal_toolkit.command_line import parse_command_line

        try:
            explains, as_json, rehearses, preflights, words = parse_command_line(words)
        except TrainError as error:
            write_log(str(error))
            return error.exit_code
        if rehearses:
            os.environ["SHOAL_REHEARSE"] = "1"
    if explains:
        return explain(words, as_json)
    _open_standard_descriptors()
    if os.getpid() == 1:
        from shoal_toolkit.system import init

        # PID 1 of a container is older than its command: here the time begins with the first line of this process.
        began = time.monotonic()
        init.run_as_child(lambda: train(words, began, preflights))
    return train(words, time.monotonic() - _process_age(), preflights)


def explain(words: Sequence[str], as_json: bool) -> int:
    """Prints the plan of this host as text or JSON. Starts no process, and changes no file.

    Returns:
        0, or the exit code of the error in the configuration, which is logged.
    """
    environ = dict(os.environ)
    try:
        settings, problem = take_settings(environ)
        if problem is not None:
            raise problem
        paths = read_paths(environ)
        cluster = read_cluster(paths, os.uname().nodename, environ)
        remove_launch_variables(environ)
        plan, _ = plan_host(paths, cluster, environ, words, settings, fetch=False)
        warnings = warn_without_secret(settings, plan.hosts, cluster.found.secret)
        plan = plan._replace(notes=(*describe_restarts(settings), *warnings, *plan.notes))
    except TrainError as error:
        write_log(str(error))
        return error.exit_code
    from shoal_toolkit.plan.explain import plan_to_dict, plan_to_text

    if as_json:
        print(json.dumps(redact.mask_json(plan_to_dict(plan)), indent=1))
    else:
        print("\n".join(map(clean_line, redact.mask_text(plan_to_text(plan)).split("\n"))))
    return 0


def train(words: Sequence[str], began: float, preflight: bool = False) -> int:
    """Runs the job on this host, and writes its result, also for an error, a signal or a bug in this toolkit.

    Args:
        began: time.monotonic() when `train` started.
        preflight: True to check the hosts only: no result is written, and nothing is started.

    Returns:
        The exit code of the job, or of the preflight: 1 if there is a finding.
    """
    paths = read_paths(os.environ)
    warm: Warm | None = None
    if START_FILE in os.environ and not preflight:
        from shoal_toolkit.run.warm import wait_for_start

        warm = wait_for_start(words)
        began = time.monotonic()
    try:
        return _run_job(paths, words, began, preflight, warm)
    except StoppedError as stopped:
        result = Result.from_signal(stopped.number)
    except TrainError as error:
        result = Result.from_error(error)
    except Exception as error:
        result = Result.from_error(_explain_bug(error))
    if not preflight:
        return write_result(paths, result, {})
    write_log(result.message)
    return result.exit_code


def _explain_bug(error: Exception) -> LaunchError:
    """Returns an error with the traceback of a bug in this toolkit. It ends the job, and never with exit code 0."""
    import traceback

    summary = f"{type(error).__name__}: {error}\nThis is a bug in shoal-toolkit {__version__}, or in what it runs on."
    return LaunchError(f"{summary}\n{''.join(traceback.format_exception(type(error), error, error.__traceback__))}")


def _run_job(paths: Paths, words: Sequence[str], began: float, preflight: bool, warm: Warm | None = None) -> int:
    """Runs this host's part. Removes secrets and mpirun's variables from os.environ. Installs signal handlers."""
    early = EarlyStop()
    settings, problem = take_settings(os.environ)
    if preflight:
        settings = settings._replace(hosts_timeout=min(settings.hosts_timeout, _PREFLIGHT_TIMEOUT))
    cluster = read_cluster(paths, os.uname().nodename, os.environ)
    remove_launch_variables(os.environ)
    configure_log(cluster.current_host, settings.log_format == "json", settings.as_events)
    if cluster.found.registration is not None:
        cluster = _register(cluster, settings, problem)
    environ = _build_script_environment(settings, preflight)
    # An error in the plan is reported to the other hosts first.
    plan: LaunchPlan | TrainError
    plan_with: Callable[[Sequence[str]], LaunchPlan] | None = None
    try:
        if problem is not None:
            raise problem
        plan, plan_with = plan_host(paths, cluster, environ, words, settings, not preflight)
        for note in (*warn_without_secret(settings, plan.hosts, cluster.found.secret), *plan.notes):
            write_log(note)
    except TrainError as error:
        plan = error
    except StoppedError:
        raise
    except Exception as error:
        plan = _explain_bug(error)  # reported to the other hosts too
    hosts = plan.hosts if isinstance(plan, LaunchPlan) else _order_hosts(paths, cluster)
    task = HostTask(paths, cluster, hosts, plan, settings, environ, began, preflight, plan_with, warm)
    role = _make_role(_prepare(task))
    early.end()
    return role.run()


def _build_script_environment(settings: TrainSettings, preflight: bool) -> dict[str, str]:
    """Returns the environment of the script, without the variables that the plan adds. A preflight makes no home."""
    account = {} if preflight else build_account_variables(os.environ)
    return {**os.environ, **account, **derive_rank_secret(settings, os.environ)}


def _prepare(task: HostTask) -> HostTask:
    """Makes output directories and the first job.json. Removes an earlier result. A preflight makes no file."""
    if task.preflight:
        plan = task.plan
        return task._replace(plan=plan._replace(setup=(), sidecars=())) if isinstance(plan, LaunchPlan) else task
    try:
        prepare_output(task.paths, make_report(task))
    except TrainError as error:
        return task._replace(plan=error)
    return task


def _register(cluster: Cluster, settings: TrainSettings, problem: TrainError | None) -> Cluster:
    """Exchanges addresses with the other hosts. From then on, the log names this host by its address."""
    if problem is not None:
        raise problem
    if settings.min_hosts:
        from shoal_toolkit.plan.elastic import refuse_registration

        refuse_registration(cluster.found)
    from shoal_toolkit.hosts.registration import register_hosts

    cluster = make_cluster(register_hosts(cluster.found, settings))
    configure_log(cluster.current_host, settings.log_format == "json", settings.as_events)
    return cluster


def _order_hosts(paths: Paths, cluster: Cluster) -> tuple[str, ...]:
    """Returns the hosts in the order of the other hosts' plans; if that is unknown, in the order of the list."""
    try:
        hosts = select_hosts(cluster, read_framework(paths, os.environ))
    except TrainError:
        hosts = cluster.hosts
    return (*hosts, *(host for host in cluster.hosts if host not in hosts))


class EarlyStop:
    """Raises StoppedError when a signal stops the job before the event loop runs, for example while code is fetched.

    Creating it installs the signal handlers; ignored signals stay ignored.
    """

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup: that stays so
                signal.signal(number, self._raise)
        self._armed = True

    def end(self) -> None:
        """Blocks the signals until the loop handles them (see Host.run). Raises nothing from now on."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._armed = False

    def _raise(self, number: int, _: object) -> None:
        """A signal handler. Raises StoppedError, but once only: then the result is being written."""
        if self._armed:
            self._armed = False
            raise StoppedError(number)


def plan_host(
    paths: Paths,
    cluster: Cluster,
    environ: dict[str, str],
    words: Sequence[str],
    settings: TrainSettings,
    fetch: bool = True,
) -> tuple[LaunchPlan, Callable[[Sequence[str]], LaunchPlan]]:
    """Reads the contract and the machine, fetches the code, and plans this host's part.

    For a job of one host it also reserves the rendezvous port, until this process ends.

    Args:
        environ: The environment of the script, without the variables that the plan adds.
        settings: Whether the job is elastic.
        fetch: Whether to fetch code from elsewhere, and to make a missing code directory.

    Returns:
        The plan, and a function that plans a start with some of the hosts, for elastic jobs.

    Raises:
        ContractError: If the configuration is wrong.
        LaunchError: If the code can't be fetched, or mpirun is missing.
    """
    job = read_job(paths, cluster, environ, tuple(words), fetch)
    peers = [host for host in cluster.hosts if host != cluster.current_host]
    machine = read_machine(environ, cluster.interface_name, peers, job.instance_type)

    def plan_with(hosts: Sequence[str]) -> LaunchPlan:
        from shoal_toolkit.plan.elastic import plan_with_hosts

        return plan_with_hosts(job, machine, hosts)

    port = DEFAULT_MASTER_PORT
    if len(cluster.hosts) == 1:
        from shoal_toolkit.system.ports import find_free_port

        port = find_free_port(port)
    plan = make_plan(job, machine, port)
    return plan._replace(notes=(*plan.notes, *_describe_ranks(plan, job, settings))), plan_with


def _describe_ranks(plan: LaunchPlan, job: Job, settings: TrainSettings) -> list[str]:
    """Returns notes about ranks that cannot find each other. Raises ContractError if the job cannot be elastic."""
    notes = []
    if plan.world_size > 1 and plan.is_first and job.script.kind == PYTHON and job.code.fetched:
        from shoal_toolkit.job.lone_ranks import describe_lone_ranks

        notes += describe_lone_ranks(plan.world_size, job.code_dir, "TF_CONFIG" in {**job.environ, **plan.env})
    if settings.min_hosts:
        from shoal_toolkit.plan.elastic import check_elastic

        notes += check_elastic(settings, job, plan)
    return notes


def _open_standard_descriptors() -> None:
    """Opens /dev/null for stdin, stdout and stderr if they are closed, so that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(descriptor)


def _make_role(task: HostTask) -> Host:
    """Imports only the module of this host's role."""
    if task.is_plain:
        from shoal_toolkit.run.single import SingleHost

        return SingleHost(task)
    if task.preflight:
        from shoal_toolkit.run.measuring import MeasuringFirstHost, MeasuringWorker

        return MeasuringFirstHost(task) if task.cluster.current_host == task.hosts[0] else MeasuringWorker(task)
    if len(task.hosts) == 1:
        from shoal_toolkit.run.first import FirstHost

        return FirstHost(task)
    if task.cluster.current_host == task.hosts[0]:
        from shoal_toolkit.run.first_of_several import FirstOfSeveral

        return FirstOfSeveral(task)
    from shoal_toolkit.run.worker import Worker

    return Worker(task)


def _process_age() -> float:
    """Returns the age of this process in seconds, which includes the start of Python. The kernel counts hundredths."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
