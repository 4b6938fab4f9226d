"""NCCL, on a machine without a GPU: what we call of it exists, and torch itself has CUDA tensors go there.

The classes are those that nccl_record.py has found in the images with CUDA; a stand-in is generated from that.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.library.conftest import Mpirun
from tests.library.nccl_record import recorded
from tests.library.nccl_stand_in import VERSIONS, carrier, record, stand_in, takes
from torch._C._distributed_c10d import HashStore

import smdistributed.core.torch
from smdistributed.core import timeline
from smdistributed.core.torch import devices, per_device, process_group, recording

RANKS = Path(__file__).parent / "ranks"
LIBRARY = Path(smdistributed.core.torch.__file__).parents[2]
dispatches = pytest.mark.skipif(not per_device.is_supported(), reason="needs torch 2.9: see per_device.is_supported")


def trees() -> Iterator[ast.Module]:
    """All modules of the library that use torch."""
    for file in LIBRARY.rglob("torch/**/*.py"):
        yield ast.parse(file.read_text())


def calls_on(names: set[str]) -> set[tuple[str, int]]:
    """The methods that are called on objects of these names, as written, and with how many arguments by position.

    `*pair` counts as two.
    """
    files = (Path(inspect.getfile(module)) for module in (process_group, devices))
    return {
        (node.func.attr, len(node.args) + sum(isinstance(argument, ast.Starred) for argument in node.args))
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in names
    }


@dispatches
@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.distributed.ProcessGroup, "unbox"), (torch.distributed.Work, "boxed"), (torch.library, "get_kernel")],
)
def test_a_torch_that_lacks_a_part_has_no_kernels_in_python(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert per_device.is_supported()
    monkeypatch.delattr(owner, name)
    assert not per_device.is_supported()


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_called_of_nccl_exists(version: str) -> None:
    """By `ProcessGroup`, through `NativeBackend`, which has the methods for several tensors itself."""
    names, own = record(version)[carrier(version)], {"allgather_into_tensor_coalesced"}
    own.add("reduce_scatter_tensor_coalesced")
    called = calls_on({"carrier", "self.backend", "self._carrier(tensors) or self._torchs['gloo']"})
    assert {"allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "send"} <= {
        name for name, _ in called
    }
    for name, count in sorted(called):
        if name not in own:
            assert any(takes(signature, count) for signature in names[name]), (name, count, names[name])


@pytest.mark.parametrize("version", VERSIONS)
def test_nccl_is_made_as_its_class_has_it(version: str) -> None:
    classes = record(version)
    assert any(takes(signature, 4) for signature in classes[carrier(version)]["__init__"])
    assert any(takes(signature, 0) for signature in classes["ProcessGroupNCCL.Options"]["__init__"])
    assert "_timeout" in classes["ProcessGroupNCCL.Options"]


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_torch_reports_collectives_in_the_expected_format(version: str) -> None:
    classes = record(version)
    hooks = classes["ProcessGroup"]
    assert any(takes(signature, 0) for signature in hooks["_enable_collectives_timing"])
    assert any(takes(signature, 0) for signature in hooks["_wait_for_pending_works"])
    assert any(takes(signature, 1) for signature in hooks["_register_on_completion_hook"])
    for name in ("time_finished", "active_duration"):
        assert classes["WorkInfo"][name][0].endswith("-> datetime.timedelta")
    assert classes["WorkInfo"]["op_type"][0].endswith("OpType")
    assert set(recording._NCCL_NAMES) <= set(classes["OpType"])


def test_the_records_differ_where_the_method_is_missing_that_broke_fsdp() -> None:
    """Once `allgather_into_tensor_coalesced` was called, which NCCL's class has in no version."""
    for version in VERSIONS:
        assert "allgather_into_tensor_coalesced" not in record(version)[carrier(version)]
        with pytest.raises(AttributeError):
            stand_in(version).allgather_into_tensor_coalesced  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_has_what_the_class_has(version: str) -> None:
    made = stand_in(version)
    options: Any = made.Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=9)
    with pytest.raises(AttributeError, match="no attribute 'timeout'"):
        options.timeout = timedelta(seconds=9)
    found = made(HashStore(), 0, 1, options)
    there = {name for name in dir(found) if is_there(found, name)}
    assert set(record(version)[carrier(version)]) <= there
    surplus = {name for name in there if not name.startswith("_")}
    assert surplus <= set(record(version)[carrier(version)]) | {"create_default_device", "create_device"}


def is_there(found: object, name: str) -> bool:
    """Whether there is such an attribute; one that gloo refuses is there."""
    try:
        getattr(found, name)
    except RuntimeError:
        return True
    except AttributeError:
        return False
    return True


def test_a_record_counts_arguments() -> None:
    signature = (
        "f(self: a.B, xs: list[list[torch.Tensor]], to: int, options: a.C = ..., more: dict[str, int] = {}) -> a.W"
    )
    assert [takes(signature, count) for count in range(6)] == [False, False, True, True, True, False]


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "ProcessGroupNCCL"), reason="this torch is for CPUs")
def test_the_record_is_that_of_this_torch() -> None:
    """In the images with CUDA, where tests/integration/test_library.py runs this."""
    assert record(torch.__version__) == json.loads(json.dumps(recorded()))


def test_every_name_of_torch_cuda_exists() -> None:
    """In the torch that runs this; tests/integration/test_library.py runs it in images with CUDA as well."""
    used = {
        ast.unparse(node)
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"torch\.cuda(\.\w+)+", ast.unparse(node))
    }
    assert "torch.cuda.set_device" in used
    for name in sorted(used):
        found: Any = torch
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


@dispatches
@pytest.mark.mpi
def test_torch_dispatches_by_device(mpirun: Mpirun) -> None:
    output = mpirun(2, RANKS / "by_device.py")
    assert output.count("cuda_tensors_meet_no_code_of_ours") == 2
    assert output.count("from_other_threads") == 2


@dispatches
@pytest.mark.once
@pytest.mark.mpi
def test_every_collective_of_cpu_tensors_beside_nccl(mpirun: Mpirun) -> None:
    assert mpirun(2, RANKS / "on_nccl.py", "smddp.py").count("shm: 2 ranks on one host") == 2


@dispatches
@pytest.mark.once
@pytest.mark.mpi
@pytest.mark.parametrize("checks", ["replicas", "shards"])
def test_what_torch_builds_on_a_group_works_beside_nccl(mpirun: Mpirun, checks: str) -> None:
    mpirun(2, RANKS / "on_nccl.py", "wrappers.py", checks)


@pytest.mark.mpi
def test_collectives_of_a_device_as_bench_gpu_runs_them(mpirun: Mpirun) -> None:
    assert "groups" in mpirun(2, RANKS / "on_device.py", "cpu")


class Group:
    """A process group that tells of collectives, as torch's does: one that began untimed must have ended before."""

    group_name = "7"

    def __init__(self) -> None:
        self.hooks: list[Callable[[Any], None]] = []
        self.is_timed, self.is_pending = False, True

    def _wait_for_pending_works(self) -> None:
        self.is_pending = not self.is_timed  # a new one may begin until they are timed

    def _enable_collectives_timing(self) -> None:
        self.is_timed = True

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        assert self.is_timed, "torch wants it so"
        assert not self.is_pending
        self.hooks.append(hook)


def ended(name: str, finished: int, took: int) -> Any:
    """What torch tells: times in nanoseconds, of the clock of `timeline.now`."""
    of_type = SimpleNamespace(name=name)
    times = {"time_finished": finished, "active_duration": took}
    return SimpleNamespace(op_type=of_type, **{key: timedelta(microseconds=ns / 1000) for key, ns in times.items()})


@pytest.mark.parametrize("begins_first", [True, False])
def test_nccls_collectives_are_in_the_timeline(tmp_path: Path, begins_first: bool) -> None:
    group = Group()
    if not begins_first:
        recording.record_nccl(group)
        assert group.hooks == [], "without a timeline, torch is asked for nothing"
    timeline.start(tmp_path / "a.json", 0, 1)
    recording.record_nccl(group)
    recording.record_nccl(group)  # as where torch gives a group of the same tag again
    (hook,) = group.hooks
    hook(ended("_ALLGATHER_BASE", timeline.now(), 3_000_000))
    hook(SimpleNamespace(op_type=SimpleNamespace(name="ALLREDUCE")))  # of another version: it must not raise
    timeline.stop()
    hook(ended("ALLREDUCE", timeline.now(), 1))
    timeline.start(tmp_path / "b.json", 0, 1)
    assert len(group.hooks) == 1, "torch takes one hook"
    timeline.stop()
    spans = [event for event in json.loads((tmp_path / "a.json").read_text()) if event["ph"] == "X"]
    assert [(span["name"], span["dur"]) for span in spans] == [("all_gather_into_tensor", 3000)]
    assert spans[0]["args"] == {"operation": "all_gather_into_tensor", "engine": "nccl", "group": "7"}
