"""The agent of a worker host: waits for the first host, and lets nobody else in.

A connection counts only from an address that the first host's name resolves to, and only after it has proved the
job's secret (and heard our proof). Until then it can send a few small frames in a few seconds; then the port is
closed for good.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from time import monotonic

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.hosts import wire
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.hosts.wire import Channel, ProtocolError
from shoal_toolkit.logs.log import say
from shoal_toolkit.run.loop import READ, Loop

_MOST_PENDING = 32
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
        self._pending: set[Channel] = set()
        self._allowed: set[str] = set()
        self._resolved_at = float("-inf")
        self._turned_away: set[str] = set()
        self.refused = ""  # why what came from the first host's address was not let in
        self._unknown: list[tuple[socket.socket, str]] = []  # until the first host's name is looked up
        self._resolver = Resolver(loop)
        self._listener = _listen(port)
        loop.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        """Stop listening, and drop who has not proved anything."""
        self._resolver.close()
        for sock, _ in self._unknown:
            sock.close()
        self._unknown = []
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno(), READ)
            self._listener.close()
        for channel in self._pending:
            channel.close()
        self._pending.clear()

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it was gone before we came
            return
        address = peer[0][len("::ffff:") :] if peer[0].startswith("::ffff:") else peer[0]
        if len(self._pending) + len(self._unknown) >= _MOST_PENDING:
            sock.close()
        elif address in self._allowed:
            _Handshake(self, sock)
        elif monotonic() - self._resolved_at > _RESOLVE_AGAIN_SECONDS:
            self._look_up(sock, address)
        else:
            self._turn_away(sock, address)

    def _look_up(self, sock: socket.socket, address: str) -> None:
        """The first host's name may be known only now."""
        self._unknown.append((sock, address))
        if len(self._unknown) == 1:
            self._resolver.ask(self._hosts[0], 0, self._resolved)

    def _resolved(self, found: list[Address] | OSError) -> None:
        self._allowed = set() if isinstance(found, OSError) else {address[0] for _, address in found}
        self._resolved_at = monotonic()
        unknown, self._unknown = self._unknown, []
        for sock, address in unknown:
            if address in self._allowed:
                _Handshake(self, sock)
            else:
                self._turn_away(sock, address)

    def _turn_away(self, sock: socket.socket, address: str) -> None:
        sock.close()
        if address not in self._turned_away and len(self._turned_away) < _MOST_PENDING:
            self._turned_away.add(address)
            known = ", ".join(sorted(self._allowed)) or "no address yet"
            say(f"turned away a connection from {address}: the first host {self._hosts[0]!r} has {known}")

    def _prove(self, transcript: dict[str, str], role: str) -> str:
        return wire.proof(self._secret, role, transcript)


class _Handshake:
    """One connection that has not proved anything yet."""

    def __init__(self, agent: Agent, sock: socket.socket) -> None:
        self._agent = agent
        self._nonce = wire.nonce()
        self._channel = Channel(agent._loop, sock, self._frame, lambda _: self._end())
        self._deadline = agent._loop.call_later(wire.HANDSHAKE_SECONDS, self._end)
        agent._pending.add(self._channel)
        self._channel.send_json(wire.HELLO, version=wire.VERSION, host=agent._current_host, nonce=self._nonce)

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if kind != wire.PROVE:
            raise ProtocolError("not the proof that is due")
        agent, said = self._agent, wire.fields(payload)
        transcript = {
            "first": agent._hosts[0],
            "worker": agent._current_host,
            "hosts": wire.fingerprint(agent._hosts),
            "first_nonce": str(said["nonce"]),
            "worker_nonce": self._nonce,
        }
        if said.get("hosts") != transcript["hosts"]:
            self._refuse("its resourceconfig.json names other hosts than this host's")
        elif not wire.same(agent._prove(transcript, "first"), said.get("proof")):
            self._refuse("its SHOAL_JOB_SECRET is not this host's")
        else:
            self._succeed(transcript)

    def _refuse(self, reason: str) -> None:
        self._agent.refused = f"refused a connection from the first host's address: {reason}"
        say(self._agent.refused)
        self._channel.send_json(wire.REFUSED, reason=reason)
        self._end()

    def _succeed(self, transcript: dict[str, str]) -> None:
        agent, channel = self._agent, self._channel
        self._deadline.cancel()
        channel.send_json(wire.WELCOME, proof=agent._prove(transcript, "worker"))
        agent._pending.discard(channel)
        agent.close()
        channel.start_heartbeats()
        agent._on_first_host(channel)

    def _end(self) -> None:
        self._deadline.cancel()
        self._agent._pending.discard(self._channel)
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
