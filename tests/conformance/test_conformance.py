"""The same jobs through both toolkits: a difference is in the table of divergences, or a bug."""

from __future__ import annotations

import pytest

from .conftest import Compared, in_one_worker
from .divergences import DIVERGENCES
from .trees import TREES

pytestmark = in_one_worker

_LAST_WORDS = 2000


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_nothing_differs_but_on_purpose(compared: Compared) -> None:
    unlisted = [str(difference) for difference, divergence in compared.differences if divergence is None]
    assert not unlisted, "\n".join([*unlisted, *_logs(compared)])


def _logs(compared: Compared) -> list[str]:
    return [
        f"--- {name}, {host}:\n{run.log[-_LAST_WORDS:]}"
        for name, runs in (("stock", compared.stock), ("ours", compared.ours))
        for host, run in runs.items()
    ]


def test_every_divergence_occurs(every_job: list[Compared]) -> None:
    used = {divergence for job in every_job for _, divergence in job.differences}
    stale = [f"{entry.item} {entry.kind} ({entry.trees})" for entry in DIVERGENCES if entry not in used]
    assert not stale, "intended, and no job shows it: " + ", ".join(stale)
