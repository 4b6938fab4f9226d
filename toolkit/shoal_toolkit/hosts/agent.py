"""The agent of a worker host: waits for the first host, and lets nobody else in.

A connection counts only from an address that the first host's name resolves to, and only after it has proved the
job's secret (and heard our proof). Until then it can send one small frame in a few seconds; then the port is closed
for good.

Who holds connections open takes no place of the first host's. Each address has a few places. When they are taken, the
oldest connection makes room: the first host proves itself at once, and comes again if it was closed. The addresses that
the name resolves to have places of their own, which nobody else can take.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.hosts.messages import Hello, ProtocolError, Prove, Refused, Welcome
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.light_typing import Any
from shoal_toolkit.log import say
from shoal_toolkit.system.loop import READ, Loop

_MOST_HANDSHAKES = 32
_MOST_WAITING = 64  # connections that wait for the first host's name to be looked up
_MOST_WAITING_EACH = 4  # of one address
_MOST_TURNED_AWAY = 32  # addresses that are named in the log
_RESOLVE_AGAIN_SECONDS = 0.5


class Agent:
    """Listens until the first host has proved itself, then calls `on_first_host(channel)`."""

    def __init__(
        self,
        loop: Loop,
        port: int,
        secret: str,
        hosts: Sequence[str],
        current_host: str,
        on_first_host: Callable[[Channel], None],
    ) -> None:
        self._loop = loop
        self._secret = secret
        self._hosts = hosts
        self._current_host = current_host
        self._on_first_host = on_first_host
        self._handshakes: dict[_Handshake, None] = {}  # the oldest first
        self._allowed: set[str] = set()
        self._resolved_at = float("-inf")
        self._turned_away: set[str] = set()
        self._reasons: set[str] = set()
        self.refused = ""  # why what came from the first host's address was not let in
        self._waiting: list[tuple[socket.socket, str]] = []  # until the first host's name is looked up
        self._resolver = Resolver(loop)
        self._listener = _listen(port)
        loop.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        """Stop listening, and drop who has not proved anything."""
        self._resolver.close()
        for sock, _ in self._waiting:
            sock.close()
        self._waiting = []
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno(), READ)
            self._listener.close()
        for handshake in list(self._handshakes):
            handshake.end()

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it was gone before we came
            return
        address = peer[0][len("::ffff:") :] if peer[0].startswith("::ffff:") else peer[0]
        if address in self._allowed:
            self._greet(sock)
        elif monotonic() - self._resolved_at > _RESOLVE_AGAIN_SECONDS:
            self._look_up(sock, address)
        else:
            self._turn_away(sock, address)

    def _greet(self, sock: socket.socket) -> None:
        """Begin the handshake. The oldest one that is not over makes room."""
        if len(self._handshakes) >= _MOST_HANDSHAKES:
            next(iter(self._handshakes)).end()
        self._handshakes[_Handshake(self, sock)] = None

    def _look_up(self, sock: socket.socket, address: str) -> None:
        """The first host's name may be known only now."""
        same = [waiting for waiting in self._waiting if waiting[1] == address]
        if len(same) >= _MOST_WAITING_EACH:
            self._drop_waiting(same[0])
        elif len(self._waiting) >= _MOST_WAITING:
            self._drop_waiting(self._waiting[0])
        self._waiting.append((sock, address))
        if len(self._waiting) == 1:
            self._resolver.ask(self._hosts[0], 0, self._resolved)

    def _drop_waiting(self, waiting: tuple[socket.socket, str]) -> None:
        waiting[0].close()
        self._waiting.remove(waiting)

    def _resolved(self, found: list[Address] | OSError) -> None:
        if not isinstance(found, OSError):  # else the addresses that were known still count
            self._allowed = {address[0] for _, address in found}
        self._resolved_at = monotonic()
        waiting, self._waiting = self._waiting, []
        for sock, address in waiting:
            if address in self._allowed:
                self._greet(sock)
            else:
                self._turn_away(sock, address)

    def _turn_away(self, sock: socket.socket, address: str) -> None:
        sock.close()
        if address not in self._turned_away and len(self._turned_away) < _MOST_TURNED_AWAY:
            self._turned_away.add(address)
            known = ", ".join(sorted(self._allowed)) or "no address yet"
            say(f"turned away a connection from {address}: the first host {self._hosts[0]!r} has {known}")

    def hello(self, nonce: str) -> Hello:
        return Hello(messages.VERSION, self._current_host, nonce)

    def transcript(self, nonce: str, said: Prove) -> dict[str, str]:
        """Return what the proofs of a handshake are about. `nonce`: that of our hello."""
        return {
            "first": self._hosts[0],
            "worker": self._current_host,
            "hosts": wire.fingerprint(self._hosts),
            "first_nonce": said.nonce,
            "worker_nonce": nonce,
        }

    def answer(self, transcript: Mapping[str, str], said: Prove) -> Welcome | Refused:
        """Judge the first host's proof."""
        if said.hosts != transcript["hosts"]:
            return self._refuse("its resourceconfig.json names other hosts than this host's")
        if not wire.same(wire.proof(self._secret, "first", transcript), said.proof):
            return self._refuse("its SHOAL_JOB_SECRET is not this host's")
        return Welcome(wire.proof(self._secret, "worker", transcript))

    def _refuse(self, reason: str) -> Refused:
        self.refused = f"refused a connection from the first host's address: {reason}"
        if reason not in self._reasons:  # it comes again and again
            self._reasons.add(reason)
            say(self.refused)
        return Refused(reason)

    def forget(self, handshake: _Handshake) -> None:
        self._handshakes.pop(handshake, None)

    def welcome(self, channel: Channel, transcript: Mapping[str, str]) -> None:
        """The first host is here: nobody else is waited for."""
        channel.start(wire.seals(self._secret, "worker", transcript))
        self.close()
        self._on_first_host(channel)


class _Handshake:
    """One connection that has not proved anything yet."""

    def __init__(self, agent: Agent, sock: socket.socket) -> None:
        self._agent = agent
        self._nonce = wire.nonce()
        self._channel = Channel(agent._loop, sock, self._message, lambda _: self.end())
        self._deadline = agent._loop.call_later(wire.HANDSHAKE_SECONDS, self.end)
        self._channel.send(agent.hello(self._nonce))

    def _message(self, said: Any) -> None:
        if not isinstance(said, Prove):
            raise ProtocolError("not the proof that is due")
        transcript = self._agent.transcript(self._nonce, said)
        answer = self._agent.answer(transcript, said)
        self._channel.send(answer)
        if isinstance(answer, Refused):
            self.end()
            return
        self._deadline.cancel()
        self._agent.forget(self)
        self._agent.welcome(self._channel, transcript)

    def end(self) -> None:
        self._deadline.cancel()
        self._agent.forget(self)
        self._channel.close()


def _listen(port: int) -> socket.socket:
    """Listen on every address of this host, IPv6 ones too where there are any."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=128)
    except OSError as error:
        raise LaunchError(
            f"The agent cannot listen on port {port}: {error.strerror}. Set SHOAL_AGENT_PORT, on every host."
        ) from None
    listener.setblocking(False)
    return listener
