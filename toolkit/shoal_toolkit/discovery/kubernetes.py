"""The common part of the sources on Kubernetes: how a secret reaches the pods, and the names of numbered pods."""

from __future__ import annotations

from shoal_toolkit.errors import ContractError

SECRET = (
    "On Kubernetes, mount a Secret as a volume with `defaultMode: 0440` and an fsGroup of the pod's user, and set "
    "SHOAL_JOB_SECRET_FILE to its file: "
    "`shoal deploy kubernetes` writes that."
)


def number_names(first: str, count: int, source: str) -> tuple[str, ...]:
    """Returns the names of pods that differ in their number: train-node-0-0.train → …-0-0.train, …-0-1.train, …

    Args:
        first: The DNS name of the first one.
        count: How many there are.
        source: The name of the source, for the error.

    Raises:
        ContractError: If the first label of the name does not end in -0.
    """
    label, dot, domain = first.partition(".")
    if not label.endswith("-0"):
        raise ContractError(
            f"{source}: the name of the first host is {first!r}, which does not end in -0. So the names of the other "
            f"{count - 1} hosts are unknown. Fix: set SHOAL_HOSTS and SHOAL_HOST_RANK on every host."
        )
    return tuple(f"{label[:-1]}{number}{dot}{domain}" for number in range(count))
