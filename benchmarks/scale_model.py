"""How long all_reduce and a training step take, by the alpha-beta model: a message of S bytes takes alpha + beta S."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any


@dataclass(frozen=True)
class Line:
    """Seconds as a function of bytes."""

    alpha: float
    beta: float

    def __call__(self, size: float) -> float:
        return self.alpha + self.beta * size


def fit(seconds: Mapping[int, float]) -> Line:
    """Return the line with the least squares of the relative errors; it is nowhere below 0."""
    ones = [(1 / time, size / time) for size, time in seconds.items()]  # alpha x + beta y should be 1
    xx, xy, yy = (sum(one[i] * one[j] for one in ones) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(one[i] for one in ones) for i in (0, 1))
    determinant = xx * yy - xy * xy
    alpha, beta = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if alpha < 0:
        return Line(0, y / yy)
    return Line(alpha, beta) if beta > 0 else Line(x / xx, 0)


def errors(line: Line, seconds: Mapping[int, float]) -> list[float]:
    """The relative error of the line, for each size."""
    return [abs(line(size) - time) / time for size, time in seconds.items()]


def extrapolate(two: Line, four: Line, ranks: int) -> Line:
    """The line of more ranks, where alpha and beta grow by as much with each rank as from two to four."""
    steps = (ranks - 2) / 2
    alpha, beta = (low + steps * (high - low) for low, high in ((two.alpha, four.alpha), (two.beta, four.beta)))
    return Line(alpha, beta)


Network = Mapping[str, Any]  # a section of data/scale.json
AllReduce = Callable[[float, int, Network, Network], float]  # bytes, hosts, the host's and the network's section


def ring(size: float, hosts: int, host: Network, network: Network) -> float:
    """One ring of all ranks: twice around, and each host's link carries all that goes around."""
    ranks = hosts * host["ranks"]
    slowest = network if hosts > 1 else host
    crossings = 2 * (hosts if hosts > 1 else 0)
    steps = 2 * (ranks - 1)
    alpha = crossings * network["latency_seconds"] + (steps - crossings) * host["latency_seconds"]
    return float(alpha + steps / ranks * size / slowest["bytes_per_second"])


def inside(size: float, host: Network) -> float:
    """reduce_scatter and all_gather inside a host."""
    steps = 2 * (host["ranks"] - 1)
    return float(steps * host["latency_seconds"] + steps / host["ranks"] * size / host["bytes_per_second"])


def direct(size: float, hosts: int, host: Network, network: Network) -> float:
    """This library's: inside the host, and each rank's shard straight to the same local rank of all other hosts."""
    if hosts == 1:
        return inside(size, host)
    alpha = 2 * (network["latency_seconds"] + (hosts - 2) * network["message_seconds"])
    return float(inside(size, host) + alpha + 2 * (hosts - 1) / hosts * size / network["bytes_per_second"])


def tree(size: float, hosts: int, host: Network, network: Network) -> float:
    """As NCCL between many hosts: up and down two trees that carry half each."""
    if hosts == 1:
        return inside(size, host)
    alpha = 2 * log2(hosts) * network["latency_seconds"]
    return float(inside(size, host) + alpha + 2 * size / network["bytes_per_second"])


ALL_REDUCES: dict[str, AllReduce] = {
    "two levels, direct between hosts (this library's way)": direct,
    "two levels, tree between hosts": tree,
    "one ring of all ranks": ring,
}


def efficiency(all_reduce: AllReduce, hosts: int, constants: Mapping[str, Network]) -> float:
    """A step's computation, in the time of the step: 1 is perfect scaling.

    Communication hides behind a share of the computation, but for the last bucket, which is there when that has ended.
    """
    training = constants["training"]
    buckets = training["gradient_bytes"] / training["bucket_bytes"]
    bucket = all_reduce(training["bucket_bytes"], hosts, constants["host"], constants["network"])
    hidden = training["overlap"] * training["compute_seconds"]
    exposed = max(bucket, buckets * bucket - hidden)
    return float(training["compute_seconds"] / (training["compute_seconds"] + exposed))
