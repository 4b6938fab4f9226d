"""The other direction: the stock toolkit launches ranks that train with our library, through `smddprun` on PATH."""

from __future__ import annotations

import json

import pytest

from .commands import launch_command
from .conftest import Compared, in_one_worker
from .layout import PYTORCH, Tree
from .trees import DIGITS, TREES, TWO_DATAPARALLEL

pytestmark = in_one_worker

SUM_OF_ONE = sum(range(1000))  # rank 0 gives it once, rank 1 twice
THREADS = {"OMP_NUM_THREADS": "1"}  # more would wait for each other, at the cost of a core
TRAINING = Tree(
    "library-digits",
    {**TWO_DATAPARALLEL, "epochs": "4"},
    DIGITS,
    "first_generation.py",
    environ=THREADS,
    framework=PYTORCH,
)
REDUCING = [tree for tree in TREES if tree.name.startswith("library-")]
MODELPARALLEL = next(tree for tree in TREES if tree.name == "modelparallel")


@pytest.mark.parametrize("tree", REDUCING, ids=lambda tree: tree.name)
def test_ranks_reduce(compared: Compared) -> None:
    found = {name: host.text(name) for host in compared.stock.values() for name in host.files if "sum-" in name}
    assert found == {f"output/data/sum-{rank}": f"2 ranks: {float(3 * SUM_OF_ONE)}" for rank in range(2)}
    assert [host.code for host in compared.stock.values()] == [0] * len(compared.tree.hosts)


@pytest.mark.parametrize("tree", [TRAINING], ids=lambda tree: tree.name)
def test_a_network_trains(compared: Compared) -> None:
    (stock,) = compared.stock.values()
    assert stock.code == 0
    metrics = json.loads(stock.text("output/data/metrics.json"))
    assert metrics["world_size"] == 2
    assert metrics["test_accuracy"] > 0.9
    assert "model/model.pt" in stock.files


@pytest.mark.parametrize(
    ("tree", "command"),
    [(REDUCING[0], "smddprun"), (REDUCING[1], "smddprun"), (MODELPARALLEL, "smddpmprun -i local --allow-bypass")],
    ids=lambda value: value.name if isinstance(value, Tree) else "",
)
def test_the_stock_toolkit_has_found_our_commands(compared: Compared, command: str) -> None:
    rank = compared.stock["algo-1"].scripts[0]
    assert launch_command(rank.parents)["mpirun wrapper"] == command
