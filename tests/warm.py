"""Starts Python programs in processes that have imported a framework already, as a real start would have them.

    python warm.py serve SOCKET MODULE ...        import the modules, and fork a child for each request
    python -I -S warm.py run SOCKET ARGUMENT ...  what `python ARGUMENT ...` does, in a child of that server

`import torch` takes 1.5 s of a core for each rank, which was half of the time of the library's tests. A child has the
argv, environment, directory and standard streams of the process that asks for it, a process group of its own, and an
interpreter that ends as any other. The process that asks passes signals on, ends with the child's exit code or signal,
and takes the child along if it is killed. A rehearsal begins after the import of the framework. What else an
interpreter does at its start is not repeated (see `launching.COLD`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys

STREAMS = (0, 1, 2)
PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_LENGTH = struct.Struct("!I")
_ENDED = struct.Struct("!i")  # an exit code, or a signal's number below zero


def ask(path: str, arguments: list[str]) -> None:
    """Have the server run `python ARGUMENT ...`, and end as that ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = repr((arguments, dict(os.environ), os.getcwd())).encode()
        socket.send_fds(server, [_LENGTH.pack(len(request))], STREAMS)
        server.sendall(request)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        (code,) = _ENDED.unpack(_read(server, _ENDED.size))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code in PASSED_ON else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str) -> list[str]:
    """Fork a child for each request; returns in the child, with its arguments, and never in the server."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for the children
        print("serving", flush=True)
        while True:
            asker, _ = listener.accept()
            if os.fork() == 0:
                break
            asker.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, streams, _, _ = socket.recv_fds(asker, _LENGTH.size, len(STREAMS))
    request: tuple[list[str], dict[str, str], str] = eval(_read(asker, *_LENGTH.unpack(header)))
    arguments, environ, directory = request
    if arguments[0] == "-u":  # torchrun starts its ranks with it
        environ["PYTHONUNBUFFERED"] = arguments.pop(0)
    child = os.fork()
    if child:
        _accompany(child, asker)
    asker.close()
    os.setpgid(0, 0)
    for number, stream in zip(STREAMS, streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    if environ.get("PYTHONUNBUFFERED"):
        for file in (sys.stdout, sys.stderr):
            file.reconfigure(write_through=True)  # type: ignore[union-attr]
    return arguments


def _accompany(child: int, asker: socket.socket) -> None:
    """Pass signals on to the child, and its end to the process that asked for it; does not return."""
    os.setpgid(0, 0)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([ended, asker.fileno()], [], [])
        if ended in ready:
            _, status = os.waitpid(child, 0)
            try:
                asker.sendall(_ENDED.pack(os.waitstatus_to_exitcode(status)))
            finally:
                os._exit(0)
        numbers = asker.recv(64)
        for number in numbers or [signal.SIGKILL]:  # nothing: who asked was killed
            os.kill(child, number)
        if not numbers:
            os._exit(0)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data


def become(arguments: list[str]) -> None:
    """Run a program as `python ARGUMENT ...` does, in this process."""
    import importlib
    import runpy
    import types

    if os.environ.get("SHOAL_REHEARSE"):
        importlib.import_module("shoal_rehearsal").activate()
    option, *rest = arguments
    if option == "-m":
        sys.argv[:], sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if option == "-c":
        sys.argv[:], sys.path[0], place, source = ["-c", *rest[1:]], "", "<string>", rest[0].encode()
    else:
        sys.argv[:], sys.path[0], place = arguments, os.path.dirname(os.path.realpath(option)), option
        with open(option, "rb") as file:
            source = file.read()
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(1, entry)
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=place, __builtins__=__builtins__)
    exec(compile(source, place, "exec", dont_inherit=True), main.__dict__)


def preload(names: list[str]) -> None:
    """Import the modules; have no interpreter that is forked from here take them apart at its end.

    That took 1.4 s with torch, as it copies all pages with objects. What a program has imported or made itself ends as
    ever. So do libraries that it has loaded, and handlers that it has registered: later ones run first.
    """
    from shoal_toolkit.hooks.imports import activate as activate_imports

    own = set(sys.modules)
    atexit.register(lambda: sys.modules.update(dict.fromkeys(loaded)))  # type: ignore[arg-type]  # None, as at any end
    activate_imports()  # ranks end as in a job: plain torch can abort then, or hang
    for name in names:
        __import__(name)
    loaded = {name: module for name, module in sys.modules.items() if name not in own}
    gc.collect()
    gc.freeze()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loaded))
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def main() -> None:
    command, path, *arguments = sys.argv[1:]
    if command == "run":
        ask(path, arguments)
    sys.path[0] = os.path.dirname(path)  # not the directory of the tests, whose names are theirs
    preload(arguments)
    become(serve(path))


if __name__ == "__main__":
    main()
