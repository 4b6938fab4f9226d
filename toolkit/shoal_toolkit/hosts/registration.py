"""Exchanges the hosts' addresses before the job, if they know the first host's address only, as on AWS Batch.

Every other host connects to the first one (`SHOAL_AGENT_PORT`), proves the job's secret and sends its index. When all
have registered, the first host sends every one the list of addresses. Handshake and frames are as in `wire`. Here
the first host is the one that listens.
"""

from __future__ import annotations

import socket

from shoal_toolkit.discovery.host_list import HostList
from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.hosts.agent import listen
from shoal_toolkit.hosts.connect import WorkerSearch
from shoal_toolkit.hosts.messages import Addresses, Hello, ProtocolError, Prove, Refused, Register, Welcome
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.job.settings import TrainSettings
from shoal_toolkit.system.loop import READ, Loop

_MIN_UNPROVED = 32  # the limit of connections that have not proved the secret, for a job of few hosts
_FAREWELL_SECONDS = 5.0


def register_hosts(found: HostList, settings: TrainSettings) -> HostList:
    """Returns the list with addresses in place of its names, the same on all hosts. Waits until all have registered.

    Args:
        found: A list with a registration. The first host is the one that the others know.
        settings: The secret, the port and the time limit.

    Raises:
        LaunchError: If a host is missing after the time limit, the port is taken, or the first host refuses this one
            or is lost.
    """
    assert found.registration is not None
    loop = Loop()
    try:
        side = _Visitor(loop, found, settings) if found.rank else _Desk(loop, found, settings)
        late: list[bool] = []
        timer = loop.call_later(settings.hosts_timeout, lambda: late.append(True))
        loop.run_until(lambda: bool(side.addresses or side.problem or late))
        timer.cancel()
        if not side.addresses:
            raise LaunchError(side.problem or side.describe_missing())
        side.close()
    finally:
        loop.close()
    return found._replace(hosts=side.addresses, registration=None, warnings=())


class _Visitor:
    """Any other host: connects to the first one, and waits for the addresses."""

    def __init__(self, loop: Loop, found: HostList, settings: TrainSettings) -> None:
        assert found.registration is not None
        self.addresses: tuple[str, ...] = ()
        self.problem = ""
        self._count, self._rank = len(found.hosts), found.rank
        self._channel: Channel | None = None
        main = found.registration.main_address
        hosts, seconds = (found.registration.job, main), settings.hosts_timeout
        self._search = WorkerSearch(loop, hosts, settings.port, settings.secret, self._on_found, self._fail, seconds)
        self._main = main

    def _on_found(self, host: str, channel: Channel) -> None:
        self._channel = channel
        channel.on_message = self._on_message
        channel.on_lost = lambda reason: self._fail(f"The first host {self._main} was lost: {reason}. See its log.")
        channel.send(Register(self._rank))

    def _on_message(self, message: Any) -> None:
        if not isinstance(message, Addresses) or len(message.hosts) != self._count:
            raise ProtocolError("not the addresses of all hosts")
        self.addresses = tuple(message.hosts)

    def _fail(self, reason: str) -> None:
        self._search.close()
        self.problem = reason

    def describe_missing(self) -> str:
        return f"The first host {self._main} has not sent the addresses of all hosts in time: see its log."

    def close(self) -> None:
        """Closes the connection, which confirms that the addresses have arrived."""
        self._search.close()
        if self._channel is not None:
            self._channel.close()


class _Desk:
    """The first host: listens from its creation, and sends all addresses when every rank has registered."""

    def __init__(self, loop: Loop, found: HostList, settings: TrainSettings) -> None:
        assert found.registration is not None
        self.addresses: tuple[str, ...] = ()
        self.problem = ""
        self.job, self.secret = found.registration.job, settings.secret
        self._names = found.hosts
        self._seconds = settings.hosts_timeout
        self._loop = loop
        self._unproved: dict[_Visit, None] = {}  # the oldest is first
        self._max_unproved = max(_MIN_UNPROVED, 2 * len(found.hosts))  # all hosts may connect at the same time
        self._registered: dict[int, _Visit] = {}
        self._listener = listen(settings.port)
        loop.watch(self._listener.fileno(), READ, self._on_connection)

    def _on_connection(self) -> None:
        """Accepts a connection. If too many have not proved the secret, closes the oldest of them."""
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it was closed already
            return
        if len(self._unproved) >= self._max_unproved:
            next(iter(self._unproved)).end()
        self._unproved[_Visit(self, self._loop, sock, _strip(peer[0]))] = None

    def prove(self, visit: _Visit) -> None:
        self._unproved.pop(visit, None)

    def forget(self, visit: _Visit) -> None:
        """Forgets a connection that was lost. Its host can register again."""
        self._unproved.pop(visit, None)
        self._registered = {rank: each for rank, each in self._registered.items() if each is not visit}

    def register(self, visit: _Visit, rank: int) -> None:
        """Notes the address of a rank. After the last one, sends all addresses to every host."""
        if not 0 < rank < len(self._names) or rank in self._registered or visit in self._registered.values():
            raise ProtocolError(f"the rank {rank}, which is not expected")
        self._registered[rank] = visit
        if len(self._registered) == len(self._names) - 1:
            ranks = [self._registered[number] for number in range(1, len(self._names))]
            self.addresses = (visit.own, *(each.address for each in ranks))
            for each in ranks:
                each.channel.send(Addresses(list(self.addresses)))

    def describe_missing(self) -> str:
        missing = [name for rank, name in enumerate(self._names) if rank and rank not in self._registered]
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        return (
            f"After {self._seconds} s these hosts have not registered: {', '.join(missing[:10])}{more}. Each must run "
            "`train` and reach SHOAL_AGENT_PORT of this host; check their logs. SHOAL_HOSTS_TIMEOUT sets the limit."
        )

    def close(self) -> None:
        """Closes the port, and waits at most 5 s until all hosts have confirmed the addresses."""
        self._loop.unwatch(self._listener.fileno(), READ)
        self._listener.close()
        late: list[bool] = []
        timer = self._loop.call_later(_FAREWELL_SECONDS, lambda: late.append(True))
        self._loop.run_until(lambda: not self._registered or bool(late))
        timer.cancel()
        for visit in [*self._unproved, *self._registered.values()]:
            visit.end()


class _Visit:
    """A connection to the first host. Creating it sends a Hello. It is closed if it has not registered after 10 s."""

    def __init__(self, desk: _Desk, loop: Loop, sock: socket.socket, address: str) -> None:
        self.address = address
        self.own = _strip(sock.getsockname()[0])  # the first host's address, as the visitor knows it
        self._desk = desk
        self._proved = False
        self._nonce = wire.make_nonce()
        self.channel = Channel(loop, sock, self._on_message, lambda _: desk.forget(self))
        self._deadline = loop.call_later(wire.HANDSHAKE_SECONDS, self.end)
        self.channel.send(Hello(messages.VERSION, self.own, self._nonce))

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Prove) and not self._proved:
            self._answer(message)
        elif isinstance(message, Register) and self._proved:
            self._desk.register(self, message.rank)
            self._deadline.cancel()
        else:
            raise ProtocolError("a message that is wrong at this time")

    def _answer(self, message: Prove) -> None:
        """Proves the secret too, if the visitor's job and proof are right. From then on the channel is sealed."""
        secret = self._desk.secret
        transcript = wire.make_transcript((self._desk.job, self.own), self.own, message.nonce, self._nonce)
        if message.hosts != transcript["hosts"]:
            self._refuse("it is a node of another job")
        elif not wire.equal_proofs(wire.make_proof(secret, "first", transcript), message.proof):
            self._refuse("its SHOAL_JOB_SECRET is not this host's")
        else:
            self._proved = True
            self._desk.prove(self)
            self.channel.send(Welcome(wire.make_proof(secret, "worker", transcript)))
            self.channel.start(wire.make_seals(secret, "worker", transcript))

    def _refuse(self, reason: str) -> None:
        self.channel.send(Refused(reason))
        self.end()

    def end(self) -> None:
        self._deadline.cancel()
        self.channel.close()
        self._desk.forget(self)


def _strip(address: str) -> str:
    """Returns an IPv4 address without the prefix that it has on a socket for both families."""
    return address[len("::ffff:") :] if address.startswith("::ffff:") else address
