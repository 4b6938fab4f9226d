"""Key-value stores, by which the ranks of a job exchange text; and a TCP store for jobs without torch.

Rank 0 serves the TCP store and the others connect. The server is a process of its own, which ends with rank 0: a thread
would not answer while C code holds the GIL. MPI_Init holds it until all ranks are in it, and they may need an answer.

A request is a JSON list, its answer one JSON value; each is the head of a message (see `frames`). A rank uses a
connection for each call that is in progress, so a thread that waits for a value does not block others. Each connection
starts with a handshake (see `handshake`): if the job has a secret, only its processes get answers, and nobody between
the hosts changes a message. Otherwise, anybody who reaches the store may read and write values. The server listens only
at the address of rank 0's host that the other hosts use. If that address is unknown, it listens at all addresses of the
host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from smdistributed.core.frames import FrameError, FrameReader, FrameWriter
from smdistributed.core.handshake import HandshakeError, answer_handshake, initiate_handshake
from smdistributed.core.launch import Address, Launch, LaunchError, master_address
from smdistributed.core.secret import derive_key, job_key
from smdistributed.core.sockets import (
    LOSS_SECONDS,
    interface_address,
    is_loopback,
    listen,
    own_address,
    prepare_connection,
    set_user_timeout,
)

CONNECT_SECONDS = 300.0  # rank 0 may do something first, such as download its data
WAIT_SECONDS = 300.0
_RETRY_SECONDS = 0.05
_POLL_SECONDS = 1.0
_ROOT = str(Path(__file__).resolve().parents[2])
_GRACE_SECONDS = 15.0  # for a busy server; a stopped one never answers
_MAX_BYTES = 64 << 20  # of a message: ranks send none that is longer
_READ_BYTES = 4 << 10  # most messages are shorter
_MAX_UNVERIFIED = 64  # connections that have not completed the handshake
_NO_SECRET = derive_key(b"", "store")  # of jobs without a secret: anybody can compute it
_LOOPBACK = "127.0.0.1"
_VALUE_TYPES: dict[str, Any] = {"set": str, "get": (int, float), "add": int}  # by the command


class StoreError(RuntimeError):
    """The store cannot be reached, or no rank set a value in time; the message says which, and where the store is."""


class Store(Protocol):
    """A key-value store that all ranks of a job see; torch.distributed's stores have these methods too."""

    def set(self, key: str, value: str, /) -> object:
        """Sets a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value, and waits until some rank has set it."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, which starts at 0, and returns the sum."""


class JobStore(Store, Protocol):
    """A store that this process opened, for any thread. `get` raises StoreError if no rank sets the value in time."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; on rank 0 this ends the store for all ranks."""

    def prefixed(self, name: str) -> PrefixedStore:
        """Returns a view of this store for one part of the job, with keys of its own."""
        return PrefixedStore(self, name)


class PrefixedStore:
    """A view of any store in which all keys start with a name."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    def set(self, key: str, value: str, /) -> None:
        self._store.set(f"{self._name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self._store.get(f"{self._name}/{key}")

    def add(self, key: str, amount: int, /) -> int:
        return self._store.add(f"{self._name}/{key}", amount)

    def prefixed(self, name: str) -> PrefixedStore:
        return PrefixedStore(self, name)


class StoreLog:
    """Append-only lists of JSON values in a store. Reading waits only for entries that a rank is writing."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def append(self, name: str, entry: Any) -> int:
        """Appends an entry to a list and returns its number, from 1."""
        number = self._store.add(f"{self._prefix}/{name}", 1)
        self._store.set(f"{self._prefix}/{name}/{number}", json.dumps(entry))
        return number

    def count(self, name: str, amount: int = 0) -> int:
        """Adds to a counter, which is not a list's, and returns the sum; amount 0 only reads it."""
        return self._store.add(f"{self._prefix}/{name}", amount)

    def read(self, name: str, after: int = 0) -> list[Any]:
        """Returns the entries of a list after the first `after`; one request to the store if there are none."""
        count = self._store.add(f"{self._prefix}/{name}", 0)
        return [
            json.loads(self._store.get(f"{self._prefix}/{name}/{number}")) for number in range(after + 1, count + 1)
        ]


def exchange_texts(store: Store, name: str, rank: int, size: int, text: str) -> list[str]:
    """Returns the texts of all ranks, in rank order; each rank calls it once with the same `name`, and waits."""
    store.set(f"{name}-{rank}", text)
    return [store.get(f"{name}-{other}").decode() for other in range(size)]


class LocalStore(JobStore):
    """A store in this process's memory: for a job of one rank, and inside rank 0's server."""

    def __init__(self, seconds: float = WAIT_SECONDS) -> None:
        self._seconds = seconds
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        value = self.wait(key, self._seconds)
        if value is None:
            raise StoreError(f"No rank has set {key!r} in the store within {self._seconds:.0f} s.")
        return value.encode()

    def wait(self, key: str, seconds: float) -> str | None:
        """Returns a value, or None if no rank sets it within that many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, "0")) + amount
            self._values[key] = str(total)
            self._changed.notify_all()
            return total

    def close(self) -> None:
        """Does nothing: there is no connection."""


class _Link:
    """A connection after its handshake: JSON values, each with a tag. Both ways have keys of their own.

    So nobody between the hosts changes, repeats or drops a value, or sends a request back as its answer.
    """

    def __init__(self, sock: socket.socket, session: bytes, sends: str, receives: str) -> None:
        self.sock = sock
        self._writer = FrameWriter(derive_key(session, sends))
        self._reader = FrameReader(derive_key(session, receives), _MAX_BYTES, _READ_BYTES)

    def send(self, value: object) -> None:
        self.sock.sendall(self._writer.frame(json.dumps(value).encode(), []))

    def receive(self) -> bytes:
        """Waits for a message. Raises EOFError, OSError, or ValueError if the other side sends more than one."""
        while not (complete := self._reader.take()):
            count = self.sock.recv_into(self._reader.buffer())
            if not count:
                raise EOFError("the connection has ended")
            self._reader.advance(count)
        ((head, _),) = complete
        return head


class Server:
    """Starts a process that serves a store, until `close` is called or this process ends.

    Port 0 is a free one, an empty address means all. Clients must have `key`. Raises LaunchError if the port is taken.
    """

    def __init__(self, port: int, address: str = _LOOPBACK, key: bytes = _NO_SECRET) -> None:
        with _listen(address, port) as listener:
            self.port: int = listener.getsockname()[1]
            number = listener.fileno()
            # Not with `-m`: sys.path would start with the script's directory, which may hold a json.py.
            code = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__name__} import serve; serve"
            command = [sys.executable, "-I", "-c", f"{code}({number}, {os.getpid()})"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(key)  # not as an argument, which any user of the host can read
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends the server process."""
        self._process.kill()
        self._process.communicate()


class _Service:
    """The server process's work: serves each connection in a thread of its own."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._values, self._listener, self._key = LocalStore(), listener, key
        self._unverified: deque[socket.socket] = deque()
        threading.Thread(target=self._accept_forever, daemon=True).start()

    def _accept_forever(self) -> None:
        """Thread: serves each connection in a thread, goes on after errors, and closes the oldest of too many."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the client has left again, or too many files are open
                time.sleep(_RETRY_SECONDS)
                continue
            self._unverified.append(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # the system allows no more threads for now
                self._unverified.remove(connection)
                connection.close()
                self._close_oldest_unverified()
                time.sleep(_RETRY_SECONDS)
            if len(self._unverified) > _MAX_UNVERIFIED:
                self._close_oldest_unverified()

    def _close_oldest_unverified(self) -> None:
        """Shuts down the oldest connection without a handshake, if there is one; its thread then ends."""
        with contextlib.suppress(OSError, IndexError):  # it ended, or completed the handshake, meanwhile
            self._unverified.popleft().shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        """Thread: answers one client until it disconnects, sends an invalid request or fails the handshake."""
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            _prepare(connection)
            try:
                session = answer_handshake(connection, self._key, 0, time.monotonic() + _GRACE_SECONDS)
            finally:
                with contextlib.suppress(ValueError):  # it was closed as one of too many
                    self._unverified.remove(connection)
            connection.settimeout(None)
            link = _Link(connection, session, sends="answers", receives="requests")
            while True:
                link.send(self._answer(*parse_request(link.receive())))

    def _answer(self, command: str, key: str, value: Any) -> Any:
        if command == "set":
            return self._values.set(key, value)
        return self._values.wait(key, value) if command == "get" else self._values.add(key, value)


def parse_request(message: bytes) -> tuple[str, str, Any]:
    """Returns the command, its key and its value. Raises ValueError if the message is not a request."""
    try:
        command, key, value = json.loads(message)
    except (RecursionError, TypeError):  # a number, or a list in a list in a list …
        raise ValueError("no request") from None
    types = _VALUE_TYPES.get(command) if isinstance(command, str) else None
    if types is None or not isinstance(key, str) or not isinstance(value, types) or isinstance(value, bool):
        raise ValueError("no request")
    if command == "get" and not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError("not a number of seconds")
    return command, key, value


class TcpStore(JobStore):
    """A connection to the store that rank 0 serves; ranks may connect before the server starts.

    `close` ends `server`. Raises StoreError if no server listens within CONNECT_SECONDS, or it has another key.
    """

    def __init__(
        self, address: Address, seconds: float = WAIT_SECONDS, server: Server | None = None, key: bytes = _NO_SECRET
    ) -> None:
        self._address, self._seconds, self._server, self._key = address, seconds, server, key
        self._idle: list[_Link] = []  # list.append and list.pop need no lock
        with self._link(CONNECT_SECONDS):  # fails now if the server cannot be reached
            pass

    def set(self, key: str, value: str) -> None:
        self._request("set", key, value)

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises StoreError if no rank sets it in time, or the server is lost."""
        value = self._request("get", key, self._seconds)
        if value is None:
            raise StoreError(
                f"No rank has set {key!r} in the store at {self._where} within {self._seconds:.0f} s: "
                "a rank is late or has ended. Fix: read the output of that rank."
            )
        return str(value).encode()

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", key, amount))

    def close(self) -> None:
        """Closes idle connections and, if this rank serves the store, the server."""
        while self._idle:
            self._idle.pop().sock.close()
        if self._server is not None:
            self._server.close()

    @property
    def _where(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    def _request(self, *request: object) -> Any:
        """Sends a request once and returns its answer. Raises StoreError if the connection fails."""
        try:
            with self._link() as link:
                link.send(request)
                return json.loads(link.receive())
        except FrameError as error:
            raise StoreError(
                f"An answer of the store at {self._where} is not what rank 0 sent: {error}. "
                "Fix: isolate the job's network."
            ) from None
        except (OSError, EOFError) as error:
            raise StoreError(
                f"The store at {self._where} is unreachable: rank 0, which serves it, has ended ({error})."
            ) from None

    @contextlib.contextmanager
    def _link(self, timeout: float = 0.0) -> Iterator[_Link]:
        """Lends an idle or new connection to one caller. After an error it is closed: an answer may still arrive."""
        try:
            link = self._idle.pop()
        except IndexError:
            link = self._connect(timeout)
        try:
            yield link
        except BaseException:
            link.sock.close()
            raise
        self._idle.append(link)

    def _connect(self, timeout: float) -> _Link:
        """Connects and authenticates. Raises StoreError when `timeout` has passed, or at once for another key."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                link = _dial(self._address, self._key)
            except HandshakeError as error:
                raise StoreError(
                    f"The server at {self._where} is not this job's store, or has another secret ({error}). Fix: give "
                    "all ranks the same SMDDP_JOB_SECRET, or none. If another job uses the port, set MASTER_PORT."
                ) from None
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"No store listens at {self._where} ({error}): rank 0 has not started or has ended, or a "
                        "firewall blocks the port. Fix: set MASTER_ADDR and MASTER_PORT to an address of rank 0's host."
                    ) from None
                time.sleep(_RETRY_SECONDS)
                continue
            link.sock.settimeout(self._seconds + _GRACE_SECONDS)
            return link


def open_store(launch: Launch, seconds: float = WAIT_SECONDS) -> JobStore:
    """Opens the job's store; call it once in each process. Rank 0 serves it; with one rank it is in memory.

    Raises:
        LaunchError: If several ranks have no address to meet at, the port is taken, or the job's secret is too short.
        StoreError: If rank 0 does not start its server in time, or has another secret.
    """
    if launch.world_size == 1:
        return LocalStore(seconds)
    place = master_address(launch)
    key = job_key("store") or _NO_SECRET
    if launch.is_on_one_host:
        place = Address(_LOOPBACK, place.port)
    if launch.rank:
        return TcpStore(place, seconds, key=key)
    address = place.host if launch.is_on_one_host else _job_address(place.host)
    server = Server(place.port, address, key)
    return TcpStore(Address(address or _LOOPBACK, place.port), seconds, server, key)


def _job_address(master: str) -> str:
    """Returns the address of rank 0's host that other ranks reach as `master`; empty if it is unknown."""
    with contextlib.suppress(ValueError):  # a name
        if is_loopback(master):
            return master
    with contextlib.suppress(OSError):
        address = own_address(master)
        if not is_loopback(address) or master == "localhost":
            return address
    # A host may resolve its own name to a loopback address, and other hosts to a real one.
    with contextlib.suppress(OSError):
        return interface_address(os.environ.get("SM_NETWORK_INTERFACE_NAME", ""))
    return ""


def _dial(address: Address, key: bytes) -> _Link:
    """Connects and authenticates, once. Raises OSError, EOFError or HandshakeError; then the socket is closed."""
    connection = socket.create_connection((address.host, address.port), _GRACE_SECONDS)
    try:
        if (
            connection.getsockname() == connection.getpeername()
        ):  # the port was chosen as its own peer: TCP connects to itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        _prepare(connection)
        session = initiate_handshake(connection, key, 0, 0, time.monotonic() + _GRACE_SECONDS)
    except BaseException:
        connection.close()
        raise
    return _Link(connection, session, sends="requests", receives="answers")


def _prepare(connection: socket.socket) -> None:
    prepare_connection(connection)
    set_user_timeout(connection, LOSS_SECONDS)


def _listen(address: str, port: int) -> socket.socket:
    """Opens a listening socket; address empty: all. Raises LaunchError if the port is taken, else OSError."""
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
            f"Rank 0 cannot serve the job's store: another process of this host uses port {port}. "
            "Fix: set MASTER_PORT to a port that is free on rank 0's host."
        ) from None


def serve(number: int, rank_process: int) -> None:
    """Main function of the server process: serves a listening descriptor until the rank that started it ends.

    Standard input starts with the store's key and is closed when that rank ends. It stays open if the rank has forked,
    because the fork holds the other end too; therefore the parent's process number is checked as well.
    """
    key = b""
    while len(key) < len(_NO_SECRET):
        part = os.read(0, len(_NO_SECRET) - len(key))  # not through sys.stdin, which would read on
        if not part:
            return
        key += part
    _Service(socket.socket(fileno=number), key)
    while os.getppid() == rank_process and not select.select([0], [], [], _POLL_SECONDS)[0]:
        pass
