"""The command `train`: reads the contract, plans, runs, and ends with the job's result.

train [argument ...]       run the job; the arguments go to the script, after those from the hyperparameters
train --explain [--json]   print what would be run, and start nothing
train --rehearse [...]     any of these without GPUs: CUDA is pretended (sets SHOAL_REHEARSE=1; on every host)
train --help, train --version

--explain and --rehearse may stand anywhere among the arguments. What comes after `--` is the script's:
`train -- --help` asks for the script's own help.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from shoal_toolkit import __version__, log, redact
from shoal_toolkit.errors import LaunchError, StoppedError, TrainError
from shoal_toolkit.job import contract
from shoal_toolkit.job.contract import Cluster, Paths
from shoal_toolkit.job.machine import read_machine
from shoal_toolkit.job.settings import secret_of_ranks, take, without_secret
from shoal_toolkit.light_typing import NoReturn
from shoal_toolkit.log import say
from shoal_toolkit.plan.launcher import members
from shoal_toolkit.plan.plan import DEFAULT_MASTER_PORT, LaunchPlan, make_plan
from shoal_toolkit.result import result
from shoal_toolkit.run.host import STOP_SIGNALS, Host, Task, first_report, metrics_of


def command() -> NoReturn:
    """The command itself: ends with the code of `main`, without taking Python down, which costs as much as a job."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # as it is where `train` was started with the descriptor closed
                stream.flush()
        except OSError:  # nobody reads any more
            code = code or 1
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of `train`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"train (shoal-toolkit) {__version__}")
        return 0
    if words == ["--help"] or words == ["-h"]:
        print(__doc__.strip())
        return 0
    explains = as_json = False
    if words:
        from shoal_toolkit import options

        try:
            explains, as_json, rehearses, words = options.read(words)
        except TrainError as error:
            say(str(error))
            return error.exit_code
        if rehearses:
            os.environ["SHOAL_REHEARSE"] = "1"
    if explains:
        return explain(words, as_json)
    _open_standard_descriptors()
    if os.getpid() == 1:
        from shoal_toolkit.system import init

        # A container's PID 1 is older than its command: here the count begins with the first line of ours.
        began = time.monotonic()
        init.run_as_child(lambda: train(words, began))
    return train(words, time.monotonic() - _age())


def explain(words: Sequence[str], as_json: bool) -> int:
    """Print the plan for this host; nothing is started, and no file is touched."""
    environ = dict(os.environ)
    try:
        settings, problem = take(environ)
        if problem is not None:
            raise problem
        paths = contract.read_paths(environ)
        cluster = contract.read_cluster(paths, os.uname().nodename)
        plan = plan_host(paths, cluster, environ, words, fetch=False)
        plan = plan._replace(notes=(*without_secret(settings, plan.hosts), *plan.notes))
        metrics_of(paths, plan)
    except TrainError as error:
        say(str(error))
        return error.exit_code
    from shoal_toolkit.plan.explain import as_dict, as_text

    if as_json:
        import json

        print(json.dumps(redact.anything(as_dict(plan)), indent=1))
    else:
        print(redact.text(as_text(plan)))
    return 0


def train(words: Sequence[str], began: float) -> int:
    """Run the job on this host. The one place where errors are caught."""
    paths = contract.read_paths(os.environ)
    try:
        return _train(paths, words, began)
    except StoppedError as stopped:
        return result.conclude(paths, result.of_stop(stopped.number), {})
    except TrainError as error:
        return result.conclude(paths, result.of_error(error), {})
    except Exception as error:
        return result.conclude(paths, result.of_error(_fault(error)), {})


def _fault(error: Exception) -> LaunchError:
    """A fault of our own: it ends the job with everything that is needed to mend it, and never with exit code 0."""
    import traceback

    summary = f"{type(error).__name__}: {error}\nThis is a fault in shoal-toolkit {__version__}, or in what it runs on."
    return LaunchError(f"{summary}\n{''.join(traceback.format_exception(type(error), error, error.__traceback__))}")


def _train(paths: Paths, words: Sequence[str], began: float) -> int:
    early = EarlyStop()
    settings, problem = take(os.environ)
    cluster = contract.read_cluster(paths, os.uname().nodename)
    log.configure(cluster.current_host, settings.log_format == "json")
    environ = {**os.environ, **secret_of_ranks(settings, os.environ)}
    plan: LaunchPlan | TrainError
    try:
        if problem is not None:
            raise problem
        plan = plan_host(paths, cluster, environ, words)
        for note in (*without_secret(settings, plan.hosts), *plan.notes):
            say(note)
    except TrainError as error:
        plan = error
    except StoppedError:
        raise
    except Exception as error:
        plan = _fault(error)  # the other hosts are told of it too
    hosts = plan.hosts if isinstance(plan, LaunchPlan) else _hosts(paths, cluster)
    task = Task(paths, cluster, hosts, plan, settings, environ, began)
    try:
        result.begin(paths, first_report(task))
    except TrainError as error:
        task = task._replace(plan=error)
    role = _role(task)
    early.end()
    return role.run()


def _hosts(paths: Paths, cluster: Cluster) -> tuple[str, ...]:
    """Return the hosts in the order in which the others see them, although this one has no plan."""
    try:
        hosts = members(cluster, contract.read_framework(paths))
    except TrainError:
        hosts = cluster.hosts
    return (*hosts, *(host for host in cluster.hosts if host not in hosts))


class EarlyStop:
    """A signal that stops the job before the loop serves (while the code is fetched, say): it raises StoppedError."""

    def __init__(self) -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # started with nohup: that stays so
                signal.signal(number, self._raise)
        self._armed = True

    def end(self) -> None:
        """Hold signals back until the loop serves (see Host.run); after it, one changes nothing any more."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._armed = False

    def _raise(self, number: int, _: object) -> None:
        if self._armed:
            self._armed = False  # the result is being written
            raise StoppedError(number)


def plan_host(
    paths: Paths, cluster: Cluster, environ: dict[str, str], words: Sequence[str], fetch: bool = True
) -> LaunchPlan:
    """Read the contract and the machine, and plan this host's part. Without `fetch`, nothing is brought here."""
    job = contract.read_job(paths, cluster, environ, tuple(words), fetch)
    peers = [host for host in cluster.hosts if host != cluster.current_host]
    machine = read_machine(environ, cluster.interface_name, peers)
    return make_plan(job, machine, free_port() if len(cluster.hosts) == 1 else DEFAULT_MASTER_PORT)


def _open_standard_descriptors() -> None:
    """Where we were started with stdin, stdout or stderr closed, no file of ours may take its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(descriptor)


def free_port() -> str:
    """Return the default rendezvous port, or a free one where another job on this machine has it, or will."""
    import _socket  # `socket` itself is slow to import

    port = int(DEFAULT_MASTER_PORT)
    if _reserve(port) and not any(_is_taken(*where) for where in ((_socket.AF_INET, ""), (_socket.AF_INET6, "::"))):
        return DEFAULT_MASTER_PORT
    with_any = _socket.socket()
    with_any.bind(("127.0.0.1", 0))
    free = str(with_any.getsockname()[1])
    with_any.close()
    return free


def _reserve(port: int) -> bool:
    """Keep a port from other jobs for as long as this process lives: its script may listen only seconds from now.

    By an abstract socket: these names live in the network namespace, as ports do.
    """
    import _socket

    mark = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        mark.bind(f"\0shoal-master-port-{port}")
    except OSError:
        mark.close()
        return False
    mark.detach()  # open until this process ends
    return True


def _is_taken(family: int, address: str) -> bool:
    """Whether the default port cannot be bound; where there is no IPv6, nothing is in the way there.

    Asked by binding it: /proc/net/tcp takes the kernel milliseconds. With SO_REUSEADDR what a server of torch closed a
    moment ago is not in the way.
    """
    import _socket
    import errno

    try:
        probe = _socket.socket(family, _socket.SOCK_STREAM)
    except OSError:
        return False
    try:
        probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        probe.bind((address, int(DEFAULT_MASTER_PORT)))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    finally:
        probe.close()
    return False


def _role(task: Task) -> Host:
    if task.cluster.current_host == task.hosts[0]:
        from shoal_toolkit.run.first import FirstHost

        return FirstHost(task)
    from shoal_toolkit.run.worker import Worker

    return Worker(task)


def _age() -> float:
    """Return for how many seconds this process has run, to the kernel's hundredth: Python's own start counts too."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
