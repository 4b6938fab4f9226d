"""A key-value store where the ranks of a job meet that has no torch: rank 0 serves it over TCP, the others connect.

The server is a process of its own, which ends with rank 0: a thread there would not answer while some C code holds the
interpreter, and MPI_Init holds it until all ranks are in it, who may wait for an answer.

A request is a list of words, its answer one word: JSON, after its length in four bytes. A rank takes a connection for
each call that is under way: a thread that waits for a word keeps no other from asking. Each connection begins with a
handshake (see `handshake`): if the job has a secret, nobody else is answered. Without one, whoever reaches the store
may read and write words; it listens at the one address of rank 0's host at which the job's hosts find it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smdistributed.core.board import CountingStore
from smdistributed.core.handshake import HandshakeError, answer_handshake, initiate_handshake
from smdistributed.core.launch import Address, Launch, LaunchError, meeting_place
from smdistributed.core.secret import derived, job_key
from smdistributed.core.sockets import (
    LOSS_SECONDS,
    enable_keepalive,
    interface_address,
    is_loopback,
    listen,
    own_address,
    read_exactly,
    set_user_timeout,
)

CONNECT_SECONDS = 300.0  # rank 0 may have something to do first, such as to fetch its data
WAIT_SECONDS = 300.0
_AGAIN_SECONDS = 0.05  # between two attempts to connect
_LOOK_SECONDS = 1.0
_ROOT = str(Path(__file__).resolve().parents[2])
_GRACE_SECONDS = 15.0  # of a server that is busy; one that is stopped answers never
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 20  # of a request: what is longer comes from no rank
_MOST_STRANGERS = 64  # connections that have not proved themselves yet
_NO_SECRET = derived(b"", "store")  # of jobs without a secret: anybody can compute it
_LOOPBACK = "127.0.0.1"
_VALUES: dict[str, Any] = {"set": str, "get": (int, float), "add": int}  # by the command


class StoreError(RuntimeError):
    """The store cannot be reached, or nobody has set a word in time; the message says which, and where it is."""


class Store(ABC):
    """Words by their keys, which all ranks of a job see. Any thread may call it, and each waits for itself."""

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Leave a word."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return a word; wait until somebody has left it. Raises StoreError when nobody does in time."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; on rank 0 it ends for all."""

    def prefixed(self, name: str) -> Prefixed:
        """The same store for a part of the job: its keys are those of nobody else."""
        return Prefixed(self, name)


class Prefixed:
    """A view of any store, torch's as well, in which all keys begin with a name."""

    def __init__(self, store: CountingStore, name: str) -> None:
        self._store, self._name = store, name

    def set(self, key: str, value: str, /) -> None:
        self._store.set(f"{self._name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self._store.get(f"{self._name}/{key}")

    def add(self, key: str, amount: int, /) -> int:
        return self._store.add(f"{self._name}/{key}", amount)

    def prefixed(self, name: str) -> Prefixed:
        """A part of this part."""
        return Prefixed(self, name)


class LocalStore(Store):
    """In the memory of this process: for a job of one rank, and what rank 0 serves."""

    def __init__(self, seconds: float = WAIT_SECONDS) -> None:
        self._seconds = seconds
        self._words: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._words[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        word = self.wait(key, self._seconds)
        if word is None:
            raise StoreError(f"Nobody has set {key!r} in the store within {self._seconds:.0f} s.")
        return word.encode()

    def wait(self, key: str, seconds: float) -> str | None:
        """Return a word, or None when nobody leaves it within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._words, seconds)
            return self._words.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._words.get(key, "0")) + amount
            self._words[key] = str(total)
            self._changed.notify_all()
            return total

    def close(self) -> None:
        """Nothing to let go of."""


class Server:
    """A process that serves a store at an address of this host, until it is closed or this process ends.

    port: 0: a free one. address: at which it listens; empty: at all. key: what callers must have.

    Raises LaunchError when the port is taken.
    """

    def __init__(self, port: int, address: str = _LOOPBACK, key: bytes = _NO_SECRET) -> None:
        with _listen(address, port) as listener:
            self.port: int = listener.getsockname()[1]
            number = listener.fileno()
            # Not by `-m`: the script's directory, which comes first then, may hold a json.py.
            code = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__name__} import serve; serve"
            command = [sys.executable, "-I", "-c", f"{code}({number}, {os.getpid()})"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(key)  # not as an argument, which any user of the host can read
        self._process.stdin.flush()

    def close(self) -> None:
        """Answer nobody any more."""
        self._process.kill()
        self._process.communicate()


class _Service:
    """What the process does: each connection in a thread."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._words, self._listener, self._key = LocalStore(), listener, key
        self._strangers: deque[socket.socket] = deque()
        threading.Thread(target=self._accept_forever, daemon=True).start()

    def _accept_forever(self) -> None:
        """Let connections in, as strangers; of too many, the oldest is ended."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # a rank that has gone again, or there are too many files open
                time.sleep(_AGAIN_SECONDS)
                continue
            self._strangers.append(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # the system gives no more threads: until strangers have ended
                self._strangers.remove(connection)
                connection.close()
                self._end_a_stranger()
                time.sleep(_AGAIN_SECONDS)
            if len(self._strangers) > _MOST_STRANGERS:
                self._end_a_stranger()

    def _end_a_stranger(self) -> None:
        with contextlib.suppress(OSError, IndexError):  # has ended, or proved itself, meanwhile
            self._strangers.popleft().shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        """Until the rank ends; what proves nothing, or sends something else than requests, is left alone."""
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            _prepare(connection)
            try:
                answer_handshake(connection, self._key, 0, time.monotonic() + _GRACE_SECONDS)
            finally:
                with contextlib.suppress(ValueError):  # it is one of too many
                    self._strangers.remove(connection)
            connection.settimeout(None)
            while True:
                _send(connection, self._answer(*parse_request(_receive(connection))))

    def _answer(self, command: str, key: str, value: Any) -> Any:
        if command == "set":
            return self._words.set(key, value)
        return self._words.wait(key, value) if command == "get" else self._words.add(key, value)


def parse_request(message: bytes) -> tuple[str, str, Any]:
    """The command, its key and its value. Raises ValueError for what is no request."""
    try:
        command, key, value = json.loads(message)
    except (RecursionError, TypeError):  # a number, or a list in a list in a list …
        raise ValueError("no request") from None
    kinds = _VALUES.get(command) if isinstance(command, str) else None
    if kinds is None or not isinstance(key, str) or not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError("no request")
    if command == "get" and not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError("no number of seconds")
    return command, key, value


class TcpStore(Store):
    """The store that another rank, or this one, serves at an address; ranks may come before it does.

    seconds: how long `get` waits. server: what this rank serves, which ends with this. key: what the server has.

    Raises StoreError when nobody listens there within CONNECT_SECONDS, or whoever does has another key.
    """

    def __init__(
        self, address: Address, seconds: float = WAIT_SECONDS, server: Server | None = None, key: bytes = _NO_SECRET
    ) -> None:
        self._address, self._seconds, self._server, self._key = address, seconds, server, key
        self._idle: list[socket.socket] = []  # list.append and list.pop need no lock
        with self._connection(CONNECT_SECONDS):  # whoever cannot reach it hears of it now
            pass

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        word = self._ask("get", key, self._seconds)
        if word is None:
            raise StoreError(
                f"Nobody has set {key!r} in the store at {self._where} within {self._seconds:.0f} s: "
                "a rank has not come this far. Its own output says why, if it has ended."
            )
        return str(word).encode()

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._server is not None:
            self._server.close()

    @property
    def _where(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    def _ask(self, *request: object) -> Any:
        try:
            with self._connection() as connection:
                _send(connection, request)
                return json.loads(_receive(connection))
        except (OSError, EOFError) as error:
            raise StoreError(f"The store at {self._where} is gone, with rank 0, which serves it ({error}).") from None

    @contextlib.contextmanager
    def _connection(self, patience: float = 0.0) -> Iterator[socket.socket]:
        """One that nobody else uses meanwhile. After an error, or an interrupt, an answer may be under way in it."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect(patience)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def _connect(self, patience: float) -> socket.socket:
        deadline = time.monotonic() + patience
        while True:
            try:
                connection = _dial(self._address, self._key)
            except HandshakeError as error:
                raise StoreError(
                    f"What serves at {self._where} is not this job's store, or has another secret ({error}). Fix: give "
                    "all ranks the same SMDDP_JOB_SECRET, or none; if another job has the port, choose MASTER_PORT."
                ) from None
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"Nobody serves the store at {self._where} ({error}): rank 0 has not started or has ended, or "
                        "a firewall is between. It must be the address of rank 0's host, MASTER_ADDR and MASTER_PORT."
                    ) from None
                time.sleep(_AGAIN_SECONDS)
                continue
            connection.settimeout(self._seconds + _GRACE_SECONDS)
            return connection


def open_store(launch: Launch, seconds: float = WAIT_SECONDS) -> Store:
    """The job's store, which rank 0 serves; in memory for one rank. To be called once by each process.

    seconds: how long `get` waits for a word.

    Raises LaunchError when nothing says where several ranks meet, rank 0 finds the port taken, or the job's secret is
    too short; StoreError when rank 0 does not come, or has another secret.
    """
    if launch.world_size == 1:
        return LocalStore(seconds)
    place = meeting_place(launch)
    key = job_key("store") or _NO_SECRET
    if launch.is_on_one_host:
        place = Address(_LOOPBACK, place.port)
    if launch.rank:
        return TcpStore(place, seconds, key=key)
    address = place.host if launch.is_on_one_host else _job_address(place.host)
    server = Server(place.port, address, key)
    return TcpStore(Address(address or _LOOPBACK, place.port), seconds, server, key)


def _job_address(master: str) -> str:
    """The address of this host, rank 0's, at which the other ranks find it as `master`; empty if it cannot be told.

    A host may know its own name as an address of the loopback, while others know it by another: then the job's
    interface counts, if it is named.
    """
    with contextlib.suppress(ValueError):  # a name
        if is_loopback(master):
            return master
    with contextlib.suppress(OSError):
        address = own_address(master)
        if not is_loopback(address) or master == "localhost":
            return address
    with contextlib.suppress(OSError):
        return interface_address(os.environ.get("SM_NETWORK_INTERFACE_NAME", ""))
    return ""


def _dial(address: Address, key: bytes) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), _GRACE_SECONDS)
    try:
        if connection.getsockname() == connection.getpeername():  # by chance from the very port: TCP meets itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        _prepare(connection)
        initiate_handshake(connection, key, 0, 0, time.monotonic() + _GRACE_SECONDS)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: socket.socket) -> None:
    """Send at once, and notice when the other host is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    enable_keepalive(connection)
    set_user_timeout(connection, LOSS_SECONDS)


def _listen(address: str, port: int) -> socket.socket:
    try:
        if address:
            return listen(address, port)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise LaunchError(
            f"Rank 0 cannot serve the ranks' store at port {port}: another process of this host has it. "
            "Set MASTER_PORT to a port that is free there."
        ) from None


def _send(connection: socket.socket, words: object) -> None:
    message = json.dumps(words).encode()
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return read_exactly(connection, length)


def serve(number: int, rank_process: int) -> None:
    """The process: it serves at the socket of that number until the rank that has started it ends.

    Its standard input begins with the store's key, and ends with that rank; not where the rank has forked: that process
    holds the other end as well.
    """
    key = b""
    while len(key) < len(_NO_SECRET):
        part = os.read(0, len(_NO_SECRET) - len(key))  # not through sys.stdin, which would read on
        if not part:
            return
        key += part
    _Service(socket.socket(fileno=number), key)
    while os.getppid() == rank_process and not select.select([0], [], [], _LOOK_SECONDS)[0]:
        pass
