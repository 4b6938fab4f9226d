"""Imports the frameworks of a script once, and forks the ranks of a host from that.

`python -m shoal_toolkit.sidecars.standby FD[,FD] ARGUMENT ...` imports what `python ARGUMENT ...` would import and
data/standby.json lists. FD is a socket to `train`, to which this process then writes a byte. `train` sends a request
for each start: a length (4 bytes, with the descriptors for stdout and stderr), and a JSON object of this length. The
answer is the pid (4 bytes) of a process that runs the script. `train` becomes its parent, because the process between
the two ends at once, and `train` is a subreaper at that time. This process ends with the socket. The second FD listens
for ranks that mpirun has started (standby_ranks.py).

A rank that is forked has its own session, environment, arguments and standard streams. The random generators of
Python, numpy and torch have new states. Each rank writes the output of the imports. The frameworks are imported, but
have not computed anything: no lock is held, and no device is open. torch's DataLoader forks its workers too.

`--early FD ...` imports nothing from the script's own directories, and begins before its job (standby_early.py).

The import of a package may fail, start threads or open a device. Then this process begins again without the package,
which `SHOAL_IMPORTED_LATER` names, and the ranks import it.

`--once ARGUMENT ...` forks the ranks of SHOAL_RANKS without a request and without imports, if the standby has ended or
does not answer. The ranks get the environment of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from shoal_toolkit.files import read_table

if TYPE_CHECKING:  # only `shoal run --watch` has them
    from shoal_toolkit.sidecars.standby_early import EarlyImports

_NUMBER = struct.Struct("!I")
_SIGNAL_CODE = 128
_LATER = "SHOAL_IMPORTED_LATER"  # packages that ranks import themselves, separated by commas
_OUTPUTS = (1, 2)
# Tools that begin before Python, such as profilers, may write their findings when the process ends.
_TOOLS = ("LD_AUDIT", "OMP_TOOL_LIBRARIES", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_STOPPING_SECONDS = 0.2
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # Slurm signals everybody


class Imported(NamedTuple):
    """The traces of the imports, for the script."""

    output: Sequence[int] = ()  # files with the output on stdout and stderr
    variables: Mapping[str, tuple[str | None, str]] = {}  # that were set: their values before and after
    handlers: Mapping[signal.Signals, Any] = {}  # of signals, from before the imports


def preload(imports: Sequence[tuple[str, str]]) -> str:
    """Imports modules, and names of them. Keeps the garbage collector off their objects.

    Otherwise a collection in a rank would write to, and so copy, every page with an object.

    Returns:
        The first package that a rank has to import itself; empty if there is none.
    """
    gc.disable()
    for module, name in imports:
        package, threads = module.partition(".")[0], _count_threads()
        try:
            getattr(importlib.import_module(module), name or "__name__", None)
        except ModuleNotFoundError as error:
            if error.name not in (package, module):  # a module that does not exist changes nothing
                return package
        except BaseException:  # the script gets the same error, if it needs this module
            return package
        if (_count_threads() > threads and package not in read_table("standby")["threads"]) or _has_device():
            return package
    gc.collect()
    gc.freeze()
    gc.enable()
    return ""


def choose_imports(arguments: Sequence[str], path: Sequence[str], later: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns the modules and names to import for `python ARGUMENT ...`: of packages in data/standby.json only.

    Args:
        path: Directories with modules of the script's own; the first is the one that Python puts first on its path.
        later: Packages that are left out.
    """
    from shoal_toolkit.sidecars.script_imports import COMPILER, find_imports

    known = read_table("standby")
    plain = {*known["plain"], *getattr(sys, "stdlib_module_names", ()), "__future__"}
    found = find_imports(arguments, path)
    chosen: dict[tuple[str, str], None] = {}
    packages = set()
    for each in found:
        if each == COMPILER:
            continue
        package = each.module.partition(".")[0]
        packages.add(package)
        if package in known["packages"]:
            chosen.update(dict.fromkeys((module, "") for module in known["packages"][package]))
            if each.at_import and each.name != "*":
                chosen[each.module, each.name] = None
    if "torch" in packages and (COMPILER in found or packages - plain):
        chosen.update(dict.fromkeys((module, "") for module in known["compiler"]))
    return [each for each in chosen if each[0].partition(".")[0] not in later]


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_device() -> bool:
    """Whether this process has opened a GPU: CUDA does not work in a process that is forked after that."""
    directory = "/proc/self/fd"
    links = (os.path.join(directory, name) for name in os.listdir(directory))
    return any(os.readlink(link).startswith("/dev/nvidia") for link in links if os.path.islink(link))


def import_for(
    arguments: Sequence[str],
    sockets: Sequence[socket.socket],
    begun_with: Mapping[str, str],
    early: EarlyImports | None,
) -> tuple[int, int]:
    """Imports for `python ARGUMENT ...`, and returns files with its output on stdout and stderr.

    If a package has to be imported by ranks, this process starts again without it.
    """
    later = list(filter(None, os.environ.get(_LATER, "").split(",")))
    kept = tuple(os.dup(descriptor) for descriptor in _OUTPUTS)
    files = (os.memfd_create("stdout"), os.memfd_create("stderr"))
    for file, descriptor in zip(files, _OUTPUTS):
        os.dup2(file, descriptor)
    path = [sys.path[0], os.getcwd()]
    with early.leave_out_source() if early else contextlib.nullcontext():
        spoiled_by = preload(choose_imports(arguments, path, later))
    sys.stdout.flush()
    sys.stderr.flush()
    for old, descriptor in zip(kept, _OUTPUTS):
        os.dup2(old, descriptor)
        os.close(old)
    if spoiled_by:
        for each in sockets:
            each.set_inheritable(True)
        for number in _NOT_FOR_US:
            signal.signal(number, signal.SIG_DFL)  # ignored signals would stay ignored
        env = {**begun_with, _LATER: ",".join([*later, spoiled_by])}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
    return files


def serve(
    server: socket.socket,
    listener: socket.socket | None,
    arguments: Sequence[str],
    begun_with: Mapping[str, str],
    early: EarlyImports | None,
) -> dict[str, Any]:
    """Answers requests. Returns the request in the process that is forked for it, and never in this one.

    Args:
        server: The socket to `train`.
        listener: Listens for ranks that mpirun has started.
        arguments: The arguments of the script, for such a rank.
        begun_with: The environment of this process before the imports.
        early: Imports from before the job.
    """
    poll = select.poll()
    for each in filter(None, (server, listener)):
        poll.register(each, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        _reap()
        request = None
        if server.fileno() in ready:
            request = _fork_for_train(server, early)
        elif listener is not None:
            with contextlib.suppress(OSError):  # too many processes or files: this rank runs its command itself
                request = _fork_for_mpirun(server, listener, arguments, begun_with, early)
        if request is not None:
            return request


def _reap() -> None:
    """Waits for child processes that have ended: one for each rank of mpirun."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _fork_for_train(server: socket.socket, early: EarlyImports | None) -> dict[str, Any] | None:
    """Returns the request in the process that is forked for it; None in this one."""
    header, descriptors, _, _ = socket.recv_fds(server, _NUMBER.size, 2)
    if not header:
        os._exit(0)  # `train` has ended
    request: dict[str, Any] = json.loads(_receive(server, *_NUMBER.unpack(header)))
    if early and early.misses(request["argv"], request["cwd"], request["env"]):
        os._exit(0)  # a new process imports that module too
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            server.close()
            for target, descriptor in zip(_OUTPUTS, descriptors):
                os.dup2(descriptor, target)
            for descriptor in (read_end, write_end, *descriptors):
                os.close(descriptor)
            return request
        os.write(write_end, _NUMBER.pack(pid))
        os._exit(0)
    os.waitpid(middle, 0)
    server.sendall(os.read(read_end, _NUMBER.size))
    for descriptor in (read_end, write_end, *descriptors):
        os.close(descriptor)
    return None


def _fork_for_mpirun(
    server: socket.socket,
    listener: socket.socket,
    arguments: Sequence[str],
    begun_with: Mapping[str, str],
    early: EarlyImports | None,
) -> dict[str, Any] | None:
    """Returns a request in the process of a rank that mpirun has started; None in this one."""
    from shoal_toolkit.sidecars.standby_ranks import fork_for

    connection, _ = listener.accept()
    try:
        pid = os.fork()
    except OSError:
        connection.close()
        raise
    if pid:
        connection.close()
        return None
    server.close()
    listener.close()
    rank = fork_for(connection, begun_with, lambda rank: bool(early and early.misses(arguments, rank.cwd, rank.env)))
    number, local = (rank.env[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "LOCAL_RANK"))
    _report(rank.directory, f"forked {number} {local} {os.getpid()} {rank.group}")
    return {"argv": arguments, "env": rank.env, "cwd": rank.cwd, "ranks": None}


def _receive(server: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = server.recv(size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def run_request(request: dict[str, Any], imported: Imported) -> None:
    """Becomes the script of a request; or forks a rank for each of its `ranks`, and ends when all have ended.

    A rank of mpirun, for which `ranks` is None, has a session already.
    """
    if request["ranks"] is not None and os.getpgid(0) != os.getpid():  # `--once` leads a group already
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for name, (before, after) in imported.variables.items():
        if os.environ.get(name) == before:
            os.environ[name] = after
    if request["ranks"]:
        _fork_ranks(request)
    _begin_script(imported)
    become(request["argv"])


def _fork_ranks(request: dict[str, Any]) -> None:
    """Returns in each rank. The calling process ends when all have ended."""
    from shoal_toolkit.sidecars.standby_ranks import fork_in_group

    ranks: dict[int, int] = {}
    for local, variables in enumerate(request["ranks"]):
        pid, group = fork_in_group()
        if pid == 0:
            _begin_rank(request["directory"], local, group, variables)
            return
        ranks[pid] = int(variables["RANK"])
    _await_ranks(request["directory"], ranks)


def _begin_script(imported: Imported) -> None:
    """Gives the script random states and signal handlers of its own, and writes the output of the imports."""
    for number, handler in imported.handlers.items():
        signal.signal(number, handler)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    for file, descriptor in zip(imported.output, _OUTPUTS):
        with open(file, "rb") as source, open(descriptor, "wb", closefd=False) as target:
            target.write(os.pread(source.fileno(), os.fstat(file).st_size, 0))


def _begin_rank(directory: str, local: int, group: int, variables: dict[str, str]) -> None:
    """Gives this process the variables and the FIFOs of a rank, and reports its start, as rank_shell.py does."""
    os.environ.update(variables)
    _report(directory, f"start {variables['RANK']} {local} {os.getpid()} {group}")
    for target, name in ((1, "out"), (2, "err")):
        descriptor = os.open(os.path.join(directory, f"{name}.{local}"), os.O_WRONLY)
        os.dup2(descriptor, target)
        os.close(descriptor)


def _await_ranks(directory: str, ranks: dict[int, int]) -> NoReturn:
    """Reports the end of each rank. Then ends this process, with the first exit code that is not 0."""
    first = 0
    for _ in range(len(ranks)):
        pid, status = os.wait()
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else _SIGNAL_CODE + os.WTERMSIG(status)
        first = first or code
        _report(directory, f"end {ranks[pid]} {code}")
    while os.path.exists(os.path.join(directory, "stopping")):  # as rank_shell.py: child processes may save
        time.sleep(_STOPPING_SECONDS)
    os._exit(first)


def _report(directory: str, line: str) -> None:
    """Writes a line to the FIFO of events, if that exists. Opening it for both directions never blocks."""
    with contextlib.suppress(OSError):
        descriptor = os.open(os.path.join(directory, "events"), os.O_RDWR)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


def set_path(arguments: Sequence[str]) -> None:
    """Sets the first entry of sys.path as `python ARGUMENT ...` does."""
    first = os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))
    sys.path[:] = [first, *filter(None, sys.path[1:])]


def become(arguments: Sequence[str]) -> None:
    """Runs `python ARGUMENT ...` in this process: a file, or `-m` and a module."""
    importlib.invalidate_caches()
    set_path(arguments)
    sys.orig_argv[:] = [sys.executable, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        import runpy

        sys.argv[:] = arguments[1:]
        run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls
        _run(lambda: run(arguments[1]))
        return
    sys.argv[:] = arguments

    path = os.path.abspath(arguments[0])

    def execute() -> None:
        with open(arguments[0], "rb") as file:
            source = file.read()
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(
            __file__=path, __loader__=loader, __cached__=None, __builtins__=__builtins__, __annotations__={}
        )
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    _run(execute)


def _run(execute: Any) -> None:
    """Calls a function. An exception is printed without the frames of this file, and ends the process as usual."""
    try:
        execute()
    except SystemExit:
        raise
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


def _close_others(kept: Set[int]) -> None:
    """Closes what `train` has left open for its children, as torchrun and mpirun do before they start a rank."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _OUTPUTS[-1] and int(name) not in kept:
            with contextlib.suppress(OSError):  # the directory itself
                os.close(int(name))


def prepare_end() -> Callable[[], None]:
    """Returns a function that ends a rank without touching, and so copying, the pages that all ranks share.

    Python's end would clear every imported module, and libtorch's exit handlers take its tables of operators apart.
    Modules that have got names since are cleared. Exit handlers are skipped only if no library was loaded since: its
    destructors would be skipped too.
    """
    imported = {
        name: (module, len(vars(module)))
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in sys.stdlib_module_names and isinstance(module, types.ModuleType)
    }
    libraries = _list_libraries()

    def end() -> None:
        same = [
            name
            for name, (module, size) in imported.items()
            if sys.modules.get(name) is module and len(vars(module)) == size
        ]
        kept = [sys.modules.pop(name) for name in same]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # for ever
        libc = ctypes.CDLL(None)
        if _list_libraries() == libraries and hasattr(libc, "on_exit"):  # glibc
            # Handlers are called in reverse order: fflush(NULL), then _exit(code).
            libc.on_exit(libc._exit, None)
            libc.__cxa_atexit(libc.fflush, None, None)

    return end


def _list_libraries() -> set[str]:
    """Returns the paths of the libraries of this process, without Python's own."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1] for line in maps if ".so" in line}
    return {path for path in paths if "/lib-dynload/" not in path}


def _begin_early() -> EarlyImports:
    from shoal_toolkit.sidecars.standby_early import EarlyImports

    return EarlyImports()


def main() -> None:
    """Imports, reports that, and serves `train`; or runs the only request."""
    is_early = sys.argv[1] == "--early"
    first, *arguments = sys.argv[1 + is_early :]
    script = arguments[2:] if arguments[:2] == ["-m", "mpi4py"] else arguments
    set_path(script)
    if first == "--once":
        ranks, directory = json.loads(os.environ.pop("SHOAL_RANKS")), os.environ.pop("SHOAL_RUN_DIR")
        os.environ.pop("SHOAL_CODE_DIR", None)
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_US}
        request = {"argv": arguments, "env": dict(os.environ), "cwd": ".", "directory": directory, "ranks": ranks}
        run_request(request, Imported(handlers=handlers))
        return
    server, *listeners = (socket.socket(fileno=int(number)) for number in first.split(","))
    for each in (server, *listeners):
        each.set_inheritable(False)
    _close_others({each.fileno() for each in (server, *listeners)})
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_US}
    begun_with = dict(os.environ)
    # The first to be registered is the last to be called. Functions of sitecustomize may need the modules.
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")["SHOAL_PEERS" in os.environ :]  # job/peer_filter.py
    ends_quickly = not (atexit._ncallbacks() or any(preloaded) or any(os.environ.get(name) for name in _TOOLS))
    ends: list[Callable[[], None]] = []
    atexit.register(lambda: [end() for end in ends])
    early = _begin_early() if is_early else None
    output = import_for(script, (server, *listeners), begun_with, early)
    if early and early.find_foreign():
        os._exit(0)  # without a byte to `train`, which starts the script as usual
    if ends_quickly and "tensorflow" not in sys.modules:  # its modules hold writers of summaries
        ends.append(prepare_end())
    now = os.environ.items()
    changed = {name: (begun_with.get(name), value) for name, value in now if begun_with.get(name) != value}
    server.sendall(b"r")
    request = serve(server, listeners[0] if listeners else None, arguments, begun_with, early)
    run_request(request, Imported(output, changed, handlers))


if __name__ == "__main__":
    main()
