"""The first-generation collectives, on real ranks against numpy, under the launchers that users have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.library.conftest import Alone, Mpirun

Ranks = list[dict[str, Any]]
COLLECTIVES = Path(__file__).parent / "ranks" / "collectives.py"
REDUCTIONS: dict[str, Callable[..., Any]] = {"AVERAGE": np.mean, "SUM": np.sum, "MIN": np.min, "MAX": np.max}


def load(directory: Path, world_size: int) -> Ranks:
    return [
        {f.stem.split("-", 1)[1]: np.load(f) for f in directory.glob(f"{rank}-*.npy")} for rank in range(world_size)
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.once)])
def test_collectives_equal_numpy(mpirun: Mpirun, tmp_path: Path, world_size: int) -> None:
    mpirun(world_size, COLLECTIVES, tmp_path)
    check(load(tmp_path, world_size))


def test_collectives_under_torchrun(alone: Alone, tmp_path: Path, free_port: int) -> None:
    alone("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port}", COLLECTIVES, tmp_path)
    check(load(tmp_path, 2))


@pytest.mark.mpi
def test_ranks_meet_at_the_master_address(mpirun: Mpirun, tmp_path: Path, free_port: int) -> None:
    mpirun(2, COLLECTIVES, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    check(load(tmp_path, 2))


def check(ranks: Ranks) -> None:
    given = np.stack([rank["given"] for rank in ranks])
    assert not np.array_equal(given[0], given[1])
    for name, reduction in REDUCTIONS.items():
        expected = reduction(given, axis=0)
        for kind, tolerance in (("torch.float32", 1e-5), ("torch.float64", 1e-13), ("async", 1e-13)):
            first = ranks[0][f"{name}-{kind}"]
            np.testing.assert_allclose(first, expected, rtol=tolerance, atol=tolerance)
            assert all(np.array_equal(first, rank[f"{name}-{kind}"]) for rank in ranks), "not bitwise equal"
    for number, rank in enumerate(ranks):
        assert rank["SUM-integer"].tolist() == [sum(range(1, len(ranks) + 1))] * 3
        assert np.array_equal(rank["broadcast"], given[1])
        assert rank["place"].tolist() == [number, number, len(ranks)]
    for root, name in ((1, "reduce"), (0, "reduce-to-0")):
        np.testing.assert_allclose(ranks[root][name], given.sum(axis=0), rtol=1e-13, atol=1e-13)
        assert np.array_equal(ranks[1 - root][name], given[1 - root]), "other ranks keep theirs"


ONE_RANK = """
import smdistributed.dataparallel.torch.distributed as dist
import torch
assert not dist.is_available()
dist.init_process_group()
tensor = torch.tensor([3.0])
for op in dist.ReduceOp:
    dist.all_reduce(tensor, op=op)
dist.broadcast(tensor)  # from rank 0
dist.barrier()
print(tensor.item(), dist.get_rank(), dist.get_local_rank(), dist.get_world_size())
"""


def test_not_launched_is_one_rank_and_needs_no_address(alone: Alone) -> None:
    assert alone("-c", ONE_RANK).split() == ["3.0", "0", "0", "1"]


MISUSE = """
import torch
import smdistributed.dataparallel.torch as sdp
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.exceptions import SMDDPError, SMDDPNCCLError
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel

def refused(call, error, words):
    try:
        call()
    except error as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(f"not refused: {words}")

model = torch.nn.Linear(2, 2)
tensor, counts = torch.ones(2), torch.ones(2, dtype=torch.int64)
for call in (sdp.get_rank, sdp.get_world_size, sdp.get_local_rank, dist.barrier, lambda: dist.all_reduce(tensor),
             lambda: dist.broadcast(tensor), lambda: dist.reduce(tensor), lambda: DistributedDataParallel(model)):
    refused(call, SMDDPError, "init_process_group")
dist.init_process_group()
refused(lambda: dist.all_reduce(counts, op=dist.ReduceOp.AVERAGE), TypeError, "torch.int64")
assert counts.tolist() == [1, 1]
refused(lambda: dist.all_reduce(tensor, op="sum"), TypeError, "ReduceOp.SUM")
refused(lambda: DistributedDataParallel(model, bucket_cap=9), TypeError, "'bucket_cap'. Did you mean 'bucket_cap_mb'?")
refused(lambda: DistributedDataParallel(model, zzz=9), TypeError, "It has: module, device_ids")
DistributedDataParallel(model, None, None, True, dist.group.WORLD, 25, find_unused_parameters=True)
"""


def test_misuse_is_refused(alone: Alone) -> None:
    alone("-c", MISUSE)


def test_ranks_that_cannot_meet_are_refused_at_init(alone: Alone) -> None:
    code = "import smdistributed.dataparallel.torch.distributed as dist; dist.init_process_group()"
    with pytest.raises(AssertionError, match=r"LaunchError: .* the address where the ranks meet is missing"):
        alone("-c", code, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")


FRAMEWORK_FREE = """
import sys
from importlib.util import find_spec
assert find_spec("smdistributed")
import smdistributed.core.launch, smdistributed.dataparallel.exceptions, smdistributed.dataparallel.reduce_op
import smdistributed.core.mpi, smdistributed.core.engine_selection, smdistributed.core.store
assert "torch" not in sys.modules
"""


def test_without_its_framework_folder_the_library_imports_no_framework(alone: Alone) -> None:
    alone("-c", FRAMEWORK_FREE, COLD="1")


UNUSED = """
import warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import smdistributed.dataparallel.torch.torch_smddp
print(*(str(each.message) for each in warned if "no effect" in str(each.message)), sep=";")
"""


def test_variables_that_only_aws_s_library_reads_are_reported(alone: Alone) -> None:
    tuning = {"SMDATAPARALLEL_OPTIMIZE_SDP": "1", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "1"}
    detecting = {"SMDATAPARALLEL_USE_SINGLENODE": "1", "SMDATAPARALLEL_USE_HOMOGENEOUS": "1"}
    output = alone("-c", UNUSED, **tuning, **detecting)
    assert output.startswith(
        "SMDATAPARALLEL_OPTIMIZE_SDP, SMDDP_AG_SORT_BUFFER_SIZE_BYTES in the environment: no effect"
    )
    assert output.count("no effect") == 1 and "SINGLENODE" not in output
    assert alone("-c", UNUSED, **detecting) == "\n"
