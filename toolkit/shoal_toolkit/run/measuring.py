"""`train --preflight`: the hosts meet as for a job, measure the network between them, and start nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from shoal_toolkit.errors import FAILED, SUCCESS
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages
from shoal_toolkit.hosts.messages import Measure, Measured
from shoal_toolkit.log import clean_line
from shoal_toolkit.preflight.check import Preflight
from shoal_toolkit.preflight.findings import HostFinding, check_network, describe_network
from shoal_toolkit.preflight.measure import NetworkMeter
from shoal_toolkit.result.result import Result
from shoal_toolkit.run.first_of_several import FirstOfSeveral
from shoal_toolkit.run.host import HostTask
from shoal_toolkit.run.worker import Worker

PORT = "measure_port"  # the fact that tells the first host where a host can be measured


class MeasuringWorker(Worker):
    """A worker that measures the way to the hosts that the first host names."""

    def __init__(self, task: HostTask) -> None:
        super().__init__(task)
        self._meter = NetworkMeter(self.loop, task.settings.secret)

    def collect_ready_facts(self) -> dict[str, Any]:
        return {**super().collect_ready_facts(), PORT: self._meter.port}

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Measure):
            self._meter.measure(message.host, message.port, self._send)
        else:
            super()._on_message(message)

    def close(self) -> None:
        super().close()
        self._meter.close()


class MeasuringFirstHost(FirstOfSeveral):
    """The first host of a preflight. When all are ready, each pair measures both ways, in rounds."""

    def __init__(self, task: HostTask) -> None:
        super().__init__(task)
        self._meter = NetworkMeter(self.loop, task.settings.secret)
        self._rounds = plan_rounds(task.hosts)
        self._running: dict[str, str] = {}  # measuring host → measured host
        self._measured: dict[tuple[str, str], Measured] = {}
        self._ports = {self.name: self._meter.port}

    def _launch(self) -> None:
        """Starts the measurements instead of the job."""
        if self._preflight is None:
            one_kind = len(self.task.cluster.instance_groups) < 2
            self._preflight = Preflight(self.task.paths, self.plan, one_kind)
        self._preflight.collect()  # a job of one host is ready before the loop has done so
        ports = self._preflight.list_facts(PORT)
        self._ports.update({host: port for host, port in ports.items() if isinstance(port, int)})
        self._measure_next()

    def _measure_next(self) -> None:
        if self._running:
            return
        pairs = next(self._rounds, None)
        if pairs is None:
            self._report()
            return
        for one, other in pairs:
            self._measure(one, other)

    def _measure(self, one: str, other: str) -> None:
        self._running[one] = other
        if one == self.name:
            self._meter.measure(other, self._ports.get(other, 0), lambda found: self._on_measured(one, found))
        else:
            self._channels[one].send(Measure(other, self._ports.get(other, 0)))

    def _on_message(self, host: str, message: Any) -> None:
        if not isinstance(message, Measured):
            super()._on_message(host, message)
        elif self._running.get(host) != message.host:
            raise messages.ProtocolError("a measurement that was not asked for")
        else:
            self._on_measured(host, message)

    def _on_measured(self, host: str, found: Measured) -> None:
        self._measured[host, self._running.pop(host)] = found
        if self.result is None:
            self._measure_next()

    def _report(self) -> None:
        """Prints the measurements and all findings, and ends with exit code 1 if there is a finding."""
        assert self._preflight is not None
        found = [*self._preflight.find(), *check_network(self.name, self._measured)]
        head = f"preflight of {len(self.task.hosts)} hosts"
        lines = [head, *describe_network(self._measured), *self._preflight.describe()]
        # One finding is one line, and other hosts bring its text.
        print(
            "\n".join(
                [
                    *map(clean_line, [*lines, *map(_format, found)]),
                    f"{len(found) or 'no'} finding{'s' * (len(found) != 1)}",
                ]
            )
        )
        sys.stdout.flush()
        text = f"preflight: {len(found)} findings, see the log of {self.name}"
        self.set_result(Result(FAILED, text) if found else Result(SUCCESS))

    def close(self) -> None:
        super().close()
        self._meter.close()


def plan_rounds(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yields rounds of pairs: each host is once in a round, and each ordered pair is in one round (circle method).

    If the number of hosts is odd, one host rests in each round.
    """
    circle: list[str | None] = [*hosts, *[None] * (len(hosts) % 2)]
    for _ in range(len(circle) - 1):
        ends = zip(circle[: len(circle) // 2], reversed(circle))
        pairs = [(one, other) for one, other in ends if one is not None and other is not None]
        if pairs:
            yield pairs
            yield [(other, one) for one, other in pairs]
        circle.insert(1, circle.pop())


def _format(finding: HostFinding) -> str:
    return f"- {finding}"
