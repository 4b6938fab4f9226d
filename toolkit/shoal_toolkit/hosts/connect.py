"""Connects the first host to all workers, repeating attempts until the time limit."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Collection, Sequence
from time import monotonic

from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.hosts.messages import Hello, ProtocolError, Prove, Refused, Welcome
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.log import write_log
from shoal_toolkit.system.loop import WRITE, Loop, Timer

_RETRY_SECONDS = 0.05
_SLOWEST_RETRY_SECONDS = 1.0
_MAX_RETRIES_PER_SECOND = 500  # for all hosts together, so that hundreds of missing hosts don't keep a core busy
_CONNECT_SECONDS = 5.0
_PROGRESS_SECONDS = 15.0
_MAX_SHOWN = 200  # characters of a text from another host


class WorkerSearch:
    """Connects to all workers, or to the `wanted` ones, at once from its creation on. Tries again after each failure.

    Calls `on_found(host, channel)` for each worker that has proved the secret. Calls `on_limit(reason)` if workers are
    missing after `seconds`; the search goes on without a limit, unless that closes it. Until the limit, the log shows
    every 15 s which hosts are missing.
    """

    def __init__(
        self,
        loop: Loop,
        hosts: Sequence[str],
        port: int,
        secret: str,
        on_found: Callable[[str, Channel], None],
        on_limit: Callable[[str], None],
        seconds: float,
        wanted: Collection[str] = (),
    ) -> None:
        self._loop = loop
        self._job = (hosts, port, secret)
        self._on_found = on_found
        self._on_limit = on_limit
        self.resolver = Resolver(loop)
        self.missing: dict[str, _Attempt] = {}
        self._timers: list[Timer] = []
        self.set_limit(seconds)
        self.add(wanted or hosts[1:])

    @property
    def is_limited(self) -> bool:
        return bool(self._timers)

    def set_limit(self, seconds: float | None) -> None:
        """Replaces the time limit by one that begins now; None: there is none."""
        for timer in self._timers:
            timer.cancel()
        self._timers = []
        if seconds is not None:
            self._seconds, self._began = seconds, monotonic()
            self._timers.append(self._loop.call_later(seconds, self._on_timeout))
            self._timers.append(self._loop.call_later(_PROGRESS_SECONDS, self._log_progress))

    def add(self, hosts: Collection[str]) -> None:
        """Searches for more workers. Those that it searches for already are left out."""
        for host in hosts:
            if host not in self.missing:
                self.missing[host] = _Attempt(self, self._loop, *self._job, host)

    def close(self) -> None:
        """Stops searching for the missing hosts, without calling `on_limit`. Connections that were found stay open."""
        self.resolver.close()
        self.set_limit(None)
        for attempt in self.missing.values():
            attempt.close()
        self.missing = {}

    def announce_limit(self, seconds: float) -> None:
        """Shows a shorter limit in the log, `seconds` from now. It sets no timer: the caller ends the search then."""
        self._seconds = min(self._seconds, monotonic() - self._began + seconds)

    def on_connected(self, host: str, channel: Channel) -> None:
        """Removes a host from the missing ones, and calls `on_found`. After the last one the search ends."""
        del self.missing[host]
        if not self.missing:
            self.close()
        self._on_found(host, channel)

    def _list_missing(self) -> str:
        """Returns the missing hosts with their last problem and refusal; after ten, only their number."""
        listed = [
            f"{host} ({'; '.join(filter(None, (attempt.refusal, attempt.problem)))})"
            for host, attempt in list(self.missing.items())[:10]
        ]
        more = f" and {len(self.missing) - 10} more" if len(self.missing) > 10 else ""
        return ", ".join(listed) + more

    def _log_progress(self) -> None:
        waited = monotonic() - self._began
        write_log(f"waiting for {self._list_missing()}, for {waited:.0f} s of at most {self._seconds:.0f} s")
        self._timers.append(self._loop.call_later(_PROGRESS_SECONDS, self._log_progress))

    def _on_timeout(self) -> None:
        self.set_limit(None)
        self._on_limit(
            f"After {self._seconds:.0f} s these hosts are missing: {self._list_missing()}. Every host of "
            "the job must run `train`; check their logs, and that their port SHOAL_AGENT_PORT is "
            "reachable. The variable SHOAL_HOSTS_TIMEOUT sets the limit."
        )


class _Attempt:
    """Connects to one worker, again and again until it has proved the secret."""

    def __init__(
        self, search: WorkerSearch, loop: Loop, hosts: Sequence[str], port: int, secret: str, host: str
    ) -> None:
        self.problem = "not tried yet"
        self._search = search
        self._loop = loop
        self._hosts = hosts
        self._host = host
        self._port = port
        self._secret = secret
        self._tries = 0
        self.refusal = ""  # why a host at this address refused this one
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None
        self._transcript: dict[str, str] = {}
        self._timer: Timer = loop.call_later(0, self._try)

    def close(self) -> None:
        self._timer.cancel()
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno(), WRITE)
            self._sock.close()
            self._sock = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._transcript = {}

    def _retry(self, problem: str) -> None:
        """Tries again after a pause that grows to 1 s. It is longer if more than 500 hosts are missing."""
        self.close()
        self.problem = problem
        pause = min(_RETRY_SECONDS * 1.2 ** min(self._tries, 30), _SLOWEST_RETRY_SECONDS)
        least = len(self._search.missing) / _MAX_RETRIES_PER_SECOND
        self._timer = self._loop.call_later(max(pause, least), self._try)

    def _try(self) -> None:
        self._tries += 1
        self.problem = "looking up its name"
        self._search.resolver.look_up(self._host, self._port, self._on_resolved)

    def _on_resolved(self, found: list[Address] | OSError) -> None:
        if isinstance(found, OSError):
            self._retry(f"its name is unknown: {found.strerror or found}")
        else:
            self._connect(*found[(self._tries - 1) % len(found)])

    def _connect(self, family: int, address: tuple[Any, ...]) -> None:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # the kernel does not support this address family
            self._retry(error.strerror or str(error))
            return
        sock.setblocking(False)
        self._sock = sock
        result = sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            self._retry(os.strerror(result))
            return
        self._timer = self._loop.call_later(_CONNECT_SECONDS, lambda: self._retry("no answer"))
        self._loop.watch(sock.fileno(), WRITE, self._on_connect)

    def _on_connect(self) -> None:
        sock = self._sock
        if sock is None:
            return
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._retry(os.strerror(problem))
            return
        self._loop.unwatch(sock.fileno(), WRITE)
        self._timer.cancel()
        self._sock = None
        self._channel = Channel(self._loop, sock, self._on_message, self._on_lost)
        self._timer = self._loop.call_later(wire.HANDSHAKE_SECONDS, lambda: self._retry("its agent does not answer"))

    def _on_lost(self, reason: str) -> None:
        self._channel = None
        self._retry(f"in the handshake {reason}")

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Hello) and not self._transcript:
            self._send_proof(message)
        elif isinstance(message, Welcome) and self._transcript:
            self._check_welcome(message)
        elif isinstance(message, Refused) and self._transcript:
            self._on_refused(message.reason)
        else:
            raise ProtocolError("a message that is wrong at this time")

    def _send_proof(self, message: Hello) -> None:
        """Proves the secret to the worker. Raises ProtocolError if it has another name or version."""
        if message.version != messages.VERSION or message.host != self._host:
            raise ProtocolError(f"it calls itself {message.host[:_MAX_SHOWN]!r}, protocol {message.version}")
        self._transcript = wire.make_transcript(self._hosts, self._host, wire.make_nonce(), message.nonce)
        proof = wire.make_proof(self._secret, "first", self._transcript)
        if self._channel is not None:
            self._channel.send(Prove(self._transcript["first_nonce"], self._transcript["hosts"], proof))

    def _check_welcome(self, message: Welcome) -> None:
        """Gives the channel to the search; its frames have tags from now on. Raises ProtocolError."""
        if not wire.equal_proofs(wire.make_proof(self._secret, "worker", self._transcript), message.proof):
            raise ProtocolError("it does not have this job's SHOAL_JOB_SECRET")
        channel, self._channel = self._channel, None
        self._timer.cancel()
        if channel is not None:
            channel.start(wire.make_seals(self._secret, "first", self._transcript))
            self._search.on_connected(self._host, channel)

    def _on_refused(self, reason: str) -> None:
        """Tries again, because the sender has proved nothing, and may belong to an earlier job."""
        refusal = f"it refused this first host: {reason[:_MAX_SHOWN]}"
        if not self.refusal:
            write_log(f"{self._host}: {refusal}. Trying again")
        self.refusal = refusal
        self._retry("trying again")
