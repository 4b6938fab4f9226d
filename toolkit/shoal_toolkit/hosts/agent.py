"""Listens on a worker host until the first host connects, and accepts no other.

A connection must come from an address to which the first host's name resolves. It must prove the job's secret. This
host then proves it too. Before that, a connection may send one small frame within a few seconds. After the first host
has connected, the port is closed.

Strangers can't block the first host by holding connections open. Each address may have a few connections; when there
are too many, the oldest one is closed. The first host sends its proof at once, and connects again if it was closed. The
addresses of the first host have a limit of their own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.hosts.messages import Hello, ProtocolError, Prove, Refused, Welcome
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.log import write_log
from shoal_toolkit.system.loop import READ, Loop

_MAX_HANDSHAKES = 32
_MAX_WAITING = 64  # connections that wait until the first host's name is looked up
_MAX_WAITING_EACH = 4  # of one address
_MAX_LOGGED = 32  # rejected addresses in the log
_RESOLVE_AGAIN_SECONDS = 0.5


class Agent:
    """Listens until the first host has proved the secret, then calls `on_first_host(channel)`.

    Creating it opens the port on all addresses, and raises LaunchError if the port is taken.
    """

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
        self._handshakes: dict[_Handshake, None] = {}  # the oldest is first
        self._allowed: set[str] = set()
        self._resolved_at = float("-inf")
        self._logged: set[str] = set()
        self._reasons: set[str] = set()
        self.refused = ""  # why a connection from the first host's address was refused
        self.rejected = ""  # why a connection from another address was closed
        self._waiting: list[tuple[socket.socket, str]] = []  # until the first host's name is looked up
        self._resolver = Resolver(loop)
        self._listener = listen(port)
        loop.watch(self._listener.fileno(), READ, self._on_connection)

    def close(self) -> None:
        """Stops listening and looking up names, and closes all connections that have proved nothing."""
        self._resolver.close()
        for sock, _ in self._waiting:
            sock.close()
        self._waiting = []
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno(), READ)
            self._listener.close()
        for handshake in list(self._handshakes):
            handshake.end()

    def _on_connection(self) -> None:
        """Starts a handshake with the first host. Its name is looked up again at most every 0.5 s."""
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it was closed already
            return
        address = peer[0][len("::ffff:") :] if peer[0].startswith("::ffff:") else peer[0]
        if address in self._allowed:
            self._start_handshake(sock)
        elif monotonic() - self._resolved_at > _RESOLVE_AGAIN_SECONDS:
            self._resolve_first_host(sock, address)
        else:
            self._reject(sock, address)

    def _start_handshake(self, sock: socket.socket) -> None:
        """Starts a handshake. If there are too many, closes the oldest."""
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            next(iter(self._handshakes)).end()
        self._handshakes[_Handshake(self, sock)] = None

    def _resolve_first_host(self, sock: socket.socket, address: str) -> None:
        """Keeps a connection until the name is looked up again. If too many wait, closes the oldest one."""
        same = [waiting for waiting in self._waiting if waiting[1] == address]
        if len(same) >= _MAX_WAITING_EACH:
            self._drop_waiting(same[0])
        elif len(self._waiting) >= _MAX_WAITING:
            self._drop_waiting(self._waiting[0])
        self._waiting.append((sock, address))
        if len(self._waiting) == 1:
            self._resolver.look_up(self._hosts[0], 0, self._on_resolved)

    def _drop_waiting(self, waiting: tuple[socket.socket, str]) -> None:
        waiting[0].close()
        self._waiting.remove(waiting)

    def _on_resolved(self, found: list[Address] | OSError) -> None:
        if not isinstance(found, OSError):  # otherwise the earlier addresses still count
            self._allowed = {address[0] for _, address in found}
        self._resolved_at = monotonic()
        waiting, self._waiting = self._waiting, []
        for sock, address in waiting:
            if address in self._allowed:
                self._start_handshake(sock)
            else:
                self._reject(sock, address)

    def _reject(self, sock: socket.socket, address: str) -> None:
        sock.close()
        if address not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(address)
            known = ", ".join(sorted(self._allowed)) or "no address yet"
            self.rejected = f"rejected a connection from {address}: the first host {self._hosts[0]!r} has {known}"
            write_log(self.rejected)

    def make_hello(self, nonce: str) -> Hello:
        """Returns this host's first message of a handshake."""
        return Hello(messages.VERSION, self._current_host, nonce)

    def make_transcript(self, first_nonce: str, worker_nonce: str) -> dict[str, str]:
        """Returns the facts that both proofs of a handshake cover, see `wire.make_transcript`."""
        return wire.make_transcript(self._hosts, self._current_host, first_nonce, worker_nonce)

    def check_proof(self, transcript: Mapping[str, str], message: Prove) -> Welcome | Refused:
        """Checks the first host's list of hosts and its proof. `transcript`: see `wire.make_transcript`.

        Returns this host's own proof, or a refusal, which is logged.
        """
        if message.hosts != transcript["hosts"]:
            return self._refuse("it lists other hosts than this host")
        if not wire.equal_proofs(wire.make_proof(self._secret, "first", transcript), message.proof):
            return self._refuse("its SHOAL_JOB_SECRET is not this host's")
        return Welcome(wire.make_proof(self._secret, "worker", transcript))

    def _refuse(self, reason: str) -> Refused:
        self.refused = f"refused a connection from the first host's address: {reason}"
        if reason not in self._reasons:  # it connects again and again
            self._reasons.add(reason)
            write_log(self.refused)
        return Refused(reason)

    def end_handshake(self, handshake: _Handshake) -> None:
        """Forgets a handshake. Its connection stays open."""
        self._handshakes.pop(handshake, None)

    def accept(self, channel: Channel, transcript: Mapping[str, str]) -> None:
        """Accepts the first host: stops listening, closes all other connections, and calls `on_first_host`.

        From now on the frames of this channel have tags, with keys from `transcript`: see `wire.make_transcript`.
        """
        channel.start(wire.make_seals(self._secret, "worker", transcript))
        self.close()
        self._on_first_host(channel)


class _Handshake:
    """A connection that has not proved the secret yet. Creating it sends a Hello; it is closed after 10 s."""

    def __init__(self, agent: Agent, sock: socket.socket) -> None:
        self._agent = agent
        self._nonce = wire.make_nonce()
        self._channel = Channel(agent._loop, sock, self._on_message, lambda _: self.end())
        self._deadline = agent._loop.call_later(wire.HANDSHAKE_SECONDS, self.end)
        self._channel.send(agent.make_hello(self._nonce))

    def _on_message(self, message: Any) -> None:
        """Answers the first host's proof. A right one gives the channel to the agent, a wrong one closes it."""
        if not isinstance(message, Prove):
            raise ProtocolError("not a proof")
        transcript = self._agent.make_transcript(message.nonce, self._nonce)
        answer = self._agent.check_proof(transcript, message)
        self._channel.send(answer)
        if isinstance(answer, Refused):
            self.end()
            return
        self._deadline.cancel()
        self._agent.end_handshake(self)
        self._agent.accept(self._channel, transcript)

    def end(self) -> None:
        self._deadline.cancel()
        self._agent.end_handshake(self)
        self._channel.close()


def listen(port: int) -> socket.socket:
    """Listens on every address of this host, with IPv6 if it is available. Raises LaunchError if the port is taken."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=128)
    except OSError as error:
        raise LaunchError(
            f"The agent cannot listen on port {port}: {error.strerror}. Fix: set SHOAL_AGENT_PORT to a free port, on "
            "every host."
        ) from None
    listener.setblocking(False)
    return listener
