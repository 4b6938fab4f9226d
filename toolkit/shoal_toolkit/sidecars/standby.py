"""Imports frameworks ahead of a restart, and forks the ranks: `python -m shoal_toolkit.sidecars.standby FD MODULE ...`.

FD is a socket to `train`. After the imports this process writes a byte to it. `train` then sends a request for each
start: a length (4 bytes, with the descriptors for stdout and stderr), and a JSON object of this length. The answer is
the pid (4 bytes) of a process that runs the script. `train` becomes its parent, because the process between the two
ends at once, and `train` is a subreaper at that time. This process ends with the socket.

A rank that is forked has its own session, environment, arguments and standard streams, and new states of the random
generators of Python and numpy. The frameworks are imported, but have not computed anything: no lock is held, and no
device is open. torch's DataLoader forks its workers too.

`--once DIRECTORY RANKS ARGUMENT ...` forks ranks without a request and without imports, for a restart at which the
standby has ended or does not answer. The ranks get the environment of this process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

_NUMBER = struct.Struct("!I")
_SIGNAL_CODE = 128


def preload(modules: Sequence[str]) -> None:
    """Imports modules; one that can't be imported is left out. Keeps the garbage collector off their objects.

    Otherwise a collection in a rank would write to, and so copy, every page with an object.
    """
    for module in modules:
        try:
            __import__(module)
        except Exception:  # the script gets the same error, if it needs this module
            continue
    gc.collect()
    gc.freeze()


def serve(server: socket.socket) -> dict[str, Any]:
    """Answers requests. Returns the request in the process that is forked for it, and never in this one."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(server, _NUMBER.size, 2)
        if not header:
            os._exit(0)  # `train` has ended
        request: dict[str, Any] = json.loads(_receive(server, *_NUMBER.unpack(header)))
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                server.close()
                for target, descriptor in zip((1, 2), descriptors):
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


def _receive(server: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = server.recv(size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def run_request(request: dict[str, Any]) -> None:
    """Becomes the script of a request; or forks a rank for each of its `ranks`, and ends when all have ended."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    ranks: dict[int, int] = {}
    for local, variables in enumerate(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            _begin_rank(request["directory"], local, variables)
            break
        ranks[pid] = int(variables["RANK"])
    else:
        if ranks:
            _await_ranks(request["directory"], ranks)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    become(request["argv"])


def _begin_rank(directory: str, local: int, variables: dict[str, str]) -> None:
    """Gives this process the variables and the FIFOs of a rank, and reports its start, as rank_shell.py does."""
    os.setpgid(0, 0)
    os.environ.update(variables)
    _report(directory, f"start {variables['RANK']} {local} {os.getpid()}")
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
    os._exit(first)


def _report(directory: str, line: str) -> None:
    """Writes a line to the FIFO of events; opening it for both directions never blocks."""
    descriptor = os.open(os.path.join(directory, "events"), os.O_RDWR)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def become(arguments: Sequence[str]) -> None:
    """Runs `python ARGUMENT ...` in this process: a file, or `-m` and a module."""
    importlib.invalidate_caches()
    sys.path[:] = [entry for index, entry in enumerate(sys.path) if index == 0 or entry]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        import runpy

        sys.argv[:], sys.path[0] = arguments[1:], os.getcwd()
        _run(lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True))
        return
    sys.argv[:], sys.path[0] = arguments, os.path.dirname(os.path.realpath(arguments[0]))

    def execute() -> None:
        with open(arguments[0], "rb") as file:
            source = file.read()
        main.__dict__.update(__file__=arguments[0], __builtins__=__builtins__)
        exec(compile(source, arguments[0], "exec", dont_inherit=True), main.__dict__)

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


def main() -> None:
    """Imports the modules, reports that, and serves `train`; or runs the only request."""
    if sys.argv[1] == "--once":
        directory, ranks, *argv = sys.argv[2:]
        run_request(
            {"argv": argv, "env": dict(os.environ), "cwd": ".", "directory": directory, "ranks": json.loads(ranks)}
        )
        return
    server = socket.socket(fileno=int(sys.argv[1]))
    server.set_inheritable(False)
    preload(sys.argv[2:])
    server.sendall(b"r")
    run_request(serve(server))


if __name__ == "__main__":
    main()
