"""The engines without a framework, on real ranks; and their reductions against torch's."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from smdistributed.core import mpi, native
from smdistributed.core.diagnostics import CollectiveError, UnexplainedError
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat, allocate, divide, reduce
from smdistributed.core.network_engines import NetworkEngine
from smdistributed.core.torch.tensors import flat_of, tensor_at

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

WITHOUT_TORCH = Path(__file__).parent / "ranks" / "without_torch.py"


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "name"),
    [
        (1, 1, "shm: 1 rank on one host"),
        (2, 2, "shm: 2 ranks on one host"),
        (2, 1, "mpi: one rank on each host"),
        (4, 2, "shm+mpi: 2 hosts × 2 ranks"),
    ],
)
def test_without_torch(mpirun: Mpirun, world_size: int, ranks_per_host: int, name: str) -> None:
    assert mpirun(world_size, WITHOUT_TORCH, ranks_per_host, COLD="1").count(name) == world_size


@pytest.mark.long
@pytest.mark.mpi
def test_who_is_late_is_found_without_torch(mpirun: Mpirun) -> None:
    output = mpirun(2, WITHOUT_TORCH, 1, "late", COLD="1")
    assert "on host-1) did not reach all_reduce of float32 with sum, 40 bytes (collective 1 of the group)" in output
    assert "within 2 s, the group's timeout" in output
    assert "in late" in output


def test_mpi_without_mpirun_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI would end the process, and say that it lacks files of its help."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    for name in mpi._OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SMDDPError, match=r"world size is 1, and 2 ranks must connect\. Fix: start .*--procs-per-host"):
        mpi.open_mpi(cast("Any", None), [0, 1])


class Closed:
    """A transport whose connections the other rank has closed: gloo fails as a message is started."""

    def send(self, *message: object) -> Any:
        raise RuntimeError("Connection closed by peer")

    recv = barrier = send


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "barrier"])
def test_a_message_that_can_not_be_started_is_explained_as_one_that_is_lost(collective: str) -> None:
    engine = NetworkEngine(cast("Any", Closed()), 0, 2, lambda size: 0)
    arguments = {"all_reduce": (allocate(4, "float32"), "sum"), "broadcast": (allocate(4, "float32"), 0)}
    with pytest.raises(UnexplainedError, match="failed: Connection closed by peer"):
        getattr(engine, collective)(*arguments.get(collective, ()))


REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def divided(total: torch.Tensor, by: int) -> torch.Tensor:
    return total / by if total.is_floating_point() else total.clone().div_(by, rounding_mode="trunc")


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """With torch, in rank order; float16 and bfloat16 in float32."""
    wide = [part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts]
    total = functools.reduce(REDUCTIONS[op], wide)
    return (divided(total, len(parts)) if op == "avg" else total).to(parts[0].dtype)


def torch_reduces(dtype: str, op: str) -> bool:
    """torch does not compute with all unsigned integers."""
    try:
        reduced([torch.ones(1, dtype=getattr(torch, dtype))] * 2, op)
    except (AttributeError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("op", native.OPS)
def test_reductions_equal_torchs(dtype: str, op: str) -> None:
    if not torch_reduces(dtype, op):
        assert dtype.startswith("uint") or not native.supports_reduction(dtype, op)
        return
    assert native.supports_reduction(dtype, op)
    generator = torch.Generator().manual_seed(1)
    parts = [(torch.randn(3001, generator=generator) * 50).abs().to(getattr(torch, dtype)) for _ in range(3)]
    if dtype.startswith(("int", "float", "bfloat")):
        parts = [-part if index else part for index, part in enumerate(parts)]
    expected, found = reduced(parts, op), parts[1]
    reduce([flat_of(part) for part in parts], flat_of(found), op)  # into one of the parts
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [dtype for dtype in native.DTYPES if torch_reduces(dtype, "avg")])
def test_divide(dtype: str) -> None:
    numbers = (
        torch.tensor([-7.0, 7.0, 0.0, 1.0, 100.0] * 500).abs_() if dtype.startswith("u") else torch.arange(-99.0, 99)
    )
    tensor = numbers.to(getattr(torch, dtype))
    expected = divided(tensor.float() if dtype in ("float16", "bfloat16") else tensor, 3).to(tensor.dtype)
    divide(flat_of(tensor), 3)
    assert torch.equal(tensor, expected)


def test_parts_of_a_flat() -> None:
    array = (ctypes.c_int16 * 10)(*range(10))
    flat = Flat(ctypes.addressof(array), 10, "int16", array)
    assert (flat.bytes, flat.as_bytes().count, flat.as_bytes().dtype) == (20, 20, "uint8")
    assert [tensor_at(part).tolist() for part in flat.split(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [tensor_at(part).tolist() for part in flat.chunk(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert flat.cut(0, 0).split(4) == []
    assert tensor_at(flat.cut(5, 5)).tolist() == []
    with pytest.raises(CollectiveError, match="sends itself 4 bytes, but expects 20"):
        flat.copy_from(flat.cut(0, 2))


def test_what_holds_memory_lives_as_long_as_what_looks_at_it() -> None:
    tensor = tensor_at(allocate(1000, "float32").cut(0, 900))
    tensor.fill_(3)
    others = [allocate(1000, "float32") for _ in range(50)]
    for other in others:
        tensor_at(other).zero_()
    assert tensor.sum().item() == 2700
