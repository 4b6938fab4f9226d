"""The first host's search for the others: connects to each worker's agent, for as long as the time limit allows."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from time import monotonic

from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.hosts.messages import Hello, ProtocolError, Prove, Refused, Welcome
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.light_typing import Any
from shoal_toolkit.log import say
from shoal_toolkit.system.loop import WRITE, Loop, Timer

_RETRY_SECONDS = 0.05
_SLOWEST_RETRY_SECONDS = 1.0
_MOST_RETRIES_PER_SECOND = 500  # of all hosts together: hundreds that are missing shall not keep a core busy
_CONNECT_SECONDS = 5.0
_SAY_EVERY_SECONDS = 15.0
_LONGEST = 200  # what is shown of another's words


class Search:
    """Connects to all workers. Calls `on_found(host, channel)` for each, and `on_failed(reason)` at most once."""

    def __init__(
        self,
        loop: Loop,
        hosts: Sequence[str],
        port: int,
        secret: str,
        on_found: Callable[[str, Channel], None],
        on_failed: Callable[[str], None],
        seconds: float,
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_found = on_found
        self._on_failed = on_failed
        self._began = monotonic()
        self.resolver = Resolver(loop)
        self._timers = [loop.call_later(seconds, self._too_late), loop.call_later(_SAY_EVERY_SECONDS, self._progress)]
        self.missing = {host: _Attempt(self, loop, hosts, host, port, secret) for host in hosts[1:]}

    def close(self) -> None:
        """Give up on those who are missing."""
        self.resolver.close()
        for timer in self._timers:
            timer.cancel()
        for attempt in self.missing.values():
            attempt.close()
        self.missing = {}

    def limit(self, seconds: float) -> None:
        """Say from now on that the search lasts so many seconds more, if it would last longer: its caller ends it."""
        self._seconds = min(self._seconds, monotonic() - self._began + seconds)

    def found(self, host: str, channel: Channel) -> None:
        del self.missing[host]
        if not self.missing:
            self.close()
        self._on_found(host, channel)

    def failed(self, reason: str) -> None:
        self.close()
        self._on_failed(reason)

    def _who(self) -> str:
        listed = [
            f"{host} ({'; '.join(filter(None, (attempt.refusal, attempt.problem)))})"
            for host, attempt in list(self.missing.items())[:10]
        ]
        more = f" and {len(self.missing) - 10} more" if len(self.missing) > 10 else ""
        return ", ".join(listed) + more

    def _progress(self) -> None:
        say(f"waiting for {self._who()} since {monotonic() - self._began:.0f} s, at most {self._seconds:.0f} s")
        self._timers.append(self._loop.call_later(_SAY_EVERY_SECONDS, self._progress))

    def _too_late(self) -> None:
        self.failed(
            f"After {self._seconds:.0f} s these hosts are missing: {self._who()}. Every host of resourceconfig.json "
            "must run `train`; check their logs, and that their port SHOAL_AGENT_PORT can be reached. The variable "
            "SHOAL_HOSTS_TIMEOUT sets the limit."
        )


class _Attempt:
    """Tries one worker again and again."""

    def __init__(self, search: Search, loop: Loop, hosts: Sequence[str], host: str, port: int, secret: str) -> None:
        self.problem = "not tried yet"
        self._search = search
        self._loop = loop
        self._hosts = hosts
        self._host = host
        self._port = port
        self._secret = secret
        self._tries = 0
        self.refusal = ""  # what another, or an earlier one, has answered there
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

    def _again(self, problem: str) -> None:
        self.close()
        self.problem = problem
        pause = min(_RETRY_SECONDS * 1.2 ** min(self._tries, 30), _SLOWEST_RETRY_SECONDS)
        least = len(self._search.missing) / _MOST_RETRIES_PER_SECOND
        self._timer = self._loop.call_later(max(pause, least), self._try)

    def _try(self) -> None:
        self._tries += 1
        self.problem = "its name is being looked up"
        self._search.resolver.ask(self._host, self._port, self._resolved)

    def _resolved(self, found: list[Address] | OSError) -> None:
        if isinstance(found, OSError):
            self._again(f"its name is not known: {found.strerror or found}")
        else:
            self._connect(*found[(self._tries - 1) % len(found)])

    def _connect(self, family: int, address: tuple[Any, ...]) -> None:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # an address of a family that the kernel does not have
            self._again(error.strerror or str(error))
            return
        sock.setblocking(False)
        self._sock = sock
        result = sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            self._again(os.strerror(result))
            return
        self._timer = self._loop.call_later(_CONNECT_SECONDS, lambda: self._again("no answer"))
        self._loop.watch(sock.fileno(), WRITE, self._connected)

    def _connected(self) -> None:
        sock = self._sock
        if sock is None:
            return
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._again(os.strerror(problem))
            return
        self._loop.unwatch(sock.fileno(), WRITE)
        self._timer.cancel()
        self._sock = None
        self._channel = Channel(self._loop, sock, self._message, self._lost)
        self._timer = self._loop.call_later(wire.HANDSHAKE_SECONDS, lambda: self._again("its agent does not answer"))

    def _lost(self, reason: str) -> None:
        self._channel = None
        self._again(f"in the handshake {reason}")

    def _message(self, said: Any) -> None:
        if isinstance(said, Hello) and not self._transcript:
            self._hello(said)
        elif isinstance(said, Welcome) and self._transcript:
            self._welcome(said)
        elif isinstance(said, Refused) and self._transcript:
            self._refused(said.reason)
        else:
            raise ProtocolError("not the frame that is due")

    def _hello(self, said: Hello) -> None:
        """Answer the worker's nonce with our proof, and give it ours."""
        if said.version != messages.VERSION or said.host != self._host:
            raise ProtocolError(f"it says that it is {said.host[:_LONGEST]!r}, protocol {said.version}")
        self._transcript = {
            "first": self._hosts[0],
            "worker": self._host,
            "hosts": wire.fingerprint(self._hosts),
            "first_nonce": wire.nonce(),
            "worker_nonce": said.nonce,
        }
        proof = wire.proof(self._secret, "first", self._transcript)
        if self._channel is not None:
            self._channel.send(Prove(self._transcript["first_nonce"], self._transcript["hosts"], proof))

    def _welcome(self, said: Welcome) -> None:
        if not wire.same(wire.proof(self._secret, "worker", self._transcript), said.proof):
            raise ProtocolError("it does not have this job's SHOAL_JOB_SECRET")
        channel, self._channel = self._channel, None
        self._timer.cancel()
        if channel is not None:
            channel.start(wire.seals(self._secret, "first", self._transcript))
            self._search.found(self._host, channel)

    def _refused(self, reason: str) -> None:
        """Whoever says so has proved nothing, and may be left from an earlier job: the right worker may still come."""
        refusal = f"it refused this first host: {reason[:_LONGEST]}"
        if not self.refusal:
            say(f"{self._host}: {refusal}. Trying again, as another may answer there")
        self.refusal = refusal
        self._again("trying again")
