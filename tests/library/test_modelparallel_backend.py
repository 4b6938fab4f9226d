"""What model parallelism decides without a framework: configuration, ranks, schedule, cuts."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdistributed.modelparallel.backend.config import PLACEMENTS, check, read_config
from smdistributed.modelparallel.backend.context import GROUPS, Grid
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPUnsupportedError
from smdistributed.modelparallel.backend.partition import SLACK, cut, largest_of
from smdistributed.modelparallel.backend.schedule import (
    FollowingSchedule,
    LeadingSchedule,
    Schedule,
    Slot,
    Turn,
    TurnKind,
    TurnRequest,
)


def test_the_launch_wins_over_the_script() -> None:
    config = read_config({"partitions": 4}, {"SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2, "microbatches": 8})})
    assert (config.partitions, config.microbatches) == (2, 8)


def test_the_launch_replaces_the_scripts_values_key_by_key() -> None:
    script = {"pipeline_parallel_degree": 4, "ddp": True, "optimize": "speed"}
    config = read_config(script, {"SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2, "microbatches": 8})})
    assert (config.partitions, config.microbatches, config.ddp, config.optimize) == (2, 8, True, "speed")
    assert read_config(script, {"SM_HP_MP_PARAMETERS": "{}"}).partitions == 4


def test_defaults_follow_from_other_values() -> None:
    config = check({"partitions": 4})
    assert (config.pipeline, config.active_microbatches, config.memory_weight) == ("interleaved", 6, 0.8)
    assert check({"pipeline_parallel_degree": 2, "optimize": "speed"}).memory_weight == 0.2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'partitions' is a required parameter."),
        ({"partitions": 2, "auto_partition": False}, "default_partition must be supplied if auto_partition is set to"),
        ({"partitions": 2, "default_partition": 2}, "default_partition must be less than the number of partitions!"),
        ({"partitions": 2, "memory_weight": 1.5}, "memory_weight must be between 0.0 and 1.0!"),
        ({"partitions": 2, "ddp_port": 1234}, "`ddp_port` needs `ddp` to be set as well"),
        ({"partitions": 2, "ddp": True, "horovod": True}, "'ddp' and 'horovod' cannot be simultaneously enabled."),
        ({"partitions": 0}, "'pipeline_parallel_degree' is 0. Allowed: 1 or more."),
        ({"partitions": "2"}, "'pipeline_parallel_degree' is '2'. Allowed: an integer."),
        ({"partitions": 2, "pipeline": "gpipe"}, "'pipeline' is 'gpipe'. Allowed: 'interleaved', 'simple'."),
        ({"partitions": 2, "placement_strategy": "DPX"}, "'placement_strategy' is 'DPX'. Allowed: 'cluster'"),
        ({"partitions": 2, "ddp": 1}, "'ddp' is 1. Allowed: true or false."),
        ({"partitions": 2, "pipeline_parallel_degree": 3}, "they mean the same"),
        ({"partitions": 1, "sdp_gradient_clipping": -1}, "'sdp_gradient_clipping' is -1. Allowed: 0, for none, or"),
        ({"partitions": 1, "sdp_reduce_bucket_size": 0.5}, "'sdp_reduce_bucket_size' is 0.5. Allowed: an integer."),
    ],
)
def test_values_that_are_not_allowed_name_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SMPConfigError, match=re.escape(message)):
        check(values)


@pytest.mark.parametrize(("key", "value"), [("partitions", 2), ("shard_optimizer_state", True)])
def test_what_excludes_sharded_data_parallelism_is_an_error(key: str, value: object) -> None:
    with pytest.raises(SMPUnsupportedError, match=f"is {value}, and 'sharded_data_parallel_degree' is above 1.*Fix: "):
        check({"partitions": 1, "sharded_data_parallel_degree": 2, key: value})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("microbatch", "Did you mean 'microbatches'?"),
        ("sdp_gradient_cliping", "Did you mean 'sdp_gradient_clipping'?"),
        ("processes", "Known: _fp32_grad_accumulation, "),
    ],
)
def test_unknown_keys_are_errors_with_a_guess(key: str, hint: str) -> None:
    with pytest.raises(SMPConfigError, match=re.escape(f"mp_parameters has an unknown key, '{key}'. {hint}")):
        check({"partitions": 2, key: 4})


@pytest.mark.parametrize(
    ("key", "default", "other", "why"),
    [
        ("prescaled_batch", False, True, "it is for 'tensor_parallel_degree', which is not set"),
        ("fp16_params", False, True, "'fp16' trains in half precision"),
        ("activation_loading_horizon", 4, 2, "'offload_activations'"),
        ("contiguous", True, False, "modules that follow each other"),
        ("xla", False, True, "TensorFlow"),
        ("static_mode", False, True, "AWS has not published"),
        ("fork", False, True, "AWS has not published"),
        ("checkpoint_attentions", False, True, "smp.set_activation_checkpointing"),
        ("sdp_hierarchical_allgather", True, False, "the backend of the process group decides"),
        ("sdp_param_persistence_threshold", 1_000_000, 1, "splits parameters of any size"),
        ("sdp_reduce_bucket_size", 5e8, 1, "it is for 'sharded_data_parallel_degree'"),
        ("sdp_gradient_clipping", 1, 0.5, "it is for 'sharded_data_parallel_degree'"),
    ],
)
def test_published_keys_without_effect_warn_once_and_not_with_their_default(
    key: str, default: object, other: object, why: str
) -> None:
    with pytest.warns(UserWarning, match=f"'{key}' of mp_parameters has no effect: .*{why}") as warned:
        check({"partitions": 2, key: other})
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check({"partitions": 2, key: default})


@pytest.mark.parametrize("name", ["SMP_NCCL_THROTTLE_LIMIT", "SMP_DISABLE_D2D", "SMP_ENABLE_CROSS_NODE_D2D"])
def test_published_variables_without_effect_warn(name: str) -> None:
    with pytest.warns(UserWarning, match=f"The variable {name} has no effect: "):
        read_config({"partitions": 2}, {name: "8"})


@pytest.mark.parametrize(
    ("name", "known"),
    [("SMP_TIMEOUT_SECOND", "The most similar one is SMP_TIMEOUT_SECONDS."), ("SMP_FOO", "Known: SMP_D2D_GPU_BUFFER_")],
)
def test_unknown_variables_warn(name: str, known: str) -> None:
    with pytest.warns(UserWarning, match=f"The variable {name} has no effect: it is unknown. {known}") as warned:
        read_config({"partitions": 2}, {name: "8", "SMP_TIMEOUT_SECONDS": "8", "SMP_VERSION": "1.15.0"})
    assert len(warned) == 1


@pytest.mark.parametrize("strategy", sorted(PLACEMENTS))
@pytest.mark.parametrize(("replicas", "stages", "tensors"), [(1, 4, 1), (2, 4, 1), (3, 2, 2)])
def test_every_rank_is_in_one_group_of_each_kind(strategy: str, replicas: int, stages: int, tensors: int) -> None:
    grid = Grid(replicas * stages * tensors, stages, tensors, PLACEMENTS[strategy])
    sizes = {"WORLD": grid.size, "MP_GROUP": stages * tensors, "PP_GROUP": stages, "TP_GROUP": tensors}
    sizes |= {"DP_GROUP": replicas * tensors, "RDP_GROUP": replicas}
    for name in GROUPS:
        groups = grid.groups(name)
        assert sorted(itertools.chain(*groups)) == list(range(grid.size))
        assert {len(group) for group in groups} == {sizes[name]}, name


def test_cluster_keeps_a_replica_together_and_spread_deals_it_out() -> None:
    assert Grid(8, 4, 1, PLACEMENTS["cluster"]).groups("PP_GROUP") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Grid(8, 4, 1, PLACEMENTS["spread"]).groups("PP_GROUP") == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        (
            {"partitions": 2},
            1,
            "but the job has 1 ranks. Fix: start a multiple of 2. In an estimator, `distribution` also",
        ),
        ({"partitions": 4}, 6, "'partitions' is 4, but the job has 6 ranks. Fix: start a multiple of 4"),
        (
            {"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 4},
            6,
            "'sharded_data_parallel_degree' is 4, but the job has 6 replicas. Fix: start a multiple of 4",
        ),
        ({"partitions": 2}, 4, "The job has 4 ranks for 2 partitions. Fix: set 'ddp' to true to train 2 replicas"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(values: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(SMPConfigError, match=message):
        Grid.of(check(values), size)


def turns(schedule: Schedule, waiting: list[Turn]) -> list[Turn]:
    """The order in which what waits is done."""
    done = []
    while (index := schedule.choose(waiting)) is not None:
        done.append(waiting.pop(index))
    return done


def test_forwards_and_backwards_alternate() -> None:
    waiting = [
        Turn(TurnKind.FORWARD, 2),
        Turn(TurnKind.BACKWARD, 0),
        Turn(TurnKind.FORWARD, 3),
        Turn(TurnKind.BACKWARD, 1),
    ]
    done = turns(Schedule(9), waiting)
    assert [(turn.kind.value[0], turn.microbatch) for turn in done] == [("f", 2), ("b", 0), ("f", 3), ("b", 1)]


def test_what_another_stage_waits_for_comes_first() -> None:
    waiting = [Turn(TurnKind.FORWARD, 0), Turn(TurnKind.INTERRUPTED, 2), Turn(TurnKind.RESUME, 3)]
    assert [turn.microbatch for turn in turns(Schedule(9), waiting)] == [3, 2, 0]


def test_no_more_than_the_window_are_in_flight_but_the_oldest_may_always_begin() -> None:
    schedule = Schedule(2)
    waiting = [Turn(TurnKind.FORWARD, microbatch) for microbatch in (3, 2, 1)]
    assert [turn.microbatch for turn in turns(schedule, waiting)] == [1, 2]
    assert turns(schedule, [Turn(TurnKind.FORWARD, 0)]) == [Turn(TurnKind.FORWARD, 0)]
    schedule.finish(1)
    assert turns(schedule, waiting) == []
    schedule.finish(0)
    assert [turn.microbatch for turn in turns(schedule, waiting)] == [3]


def test_a_rank_follows_the_order_of_another() -> None:
    given = [Turn(TurnKind.FORWARD, 0, "a"), Turn(TurnKind.FORWARD, 1, "b"), Turn(TurnKind.BACKWARD, 0, "c")]
    order: list[Hashable] = []
    leading, following = LeadingSchedule(9, False, order.append), Slot(FollowingSchedule())
    turns(leading, list(given))
    assert sorted(map(str, order)) == ["a", "b", "c"]
    granted = [following.request(TurnRequest(turn)) for turn in reversed(given)]
    assert granted == [None, None, None]
    for key in order:
        request = following.follow(key)
        assert request is not None and request.turn.key == key
        assert following.release() is None


def test_a_follower_waits_for_the_turn_that_is_next() -> None:
    following = Slot(FollowingSchedule())
    assert following.follow("second") is None
    assert following.request(TurnRequest(Turn(TurnKind.FORWARD, 0, "first"))) is None
    assert following.request(TurnRequest(Turn(TurnKind.FORWARD, 1, "second"))) is not None


def test_backwards_in_order_wait_for_earlier_microbatches() -> None:
    schedule = Schedule(9, in_order=True)
    waiting = [Turn(TurnKind.FORWARD, 0), Turn(TurnKind.FORWARD, 1), Turn(TurnKind.BACKWARD, 1)]
    assert [turn.kind for turn in turns(schedule, waiting)] == [TurnKind.FORWARD, TurnKind.FORWARD]
    schedule.finish(0)
    assert turns(schedule, waiting) == [Turn(TurnKind.BACKWARD, 1)]


def best_of_all(costs: list[float], stages: int) -> float:
    places = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(largest_of(costs, [0, *begins]) for begins in places)


@given(st.lists(st.floats(0.0, 10.0), min_size=4, max_size=9), st.integers(1, 4))
def test_a_cut_is_within_the_slack_of_the_best(costs: list[float], stages: int) -> None:
    found = cut(costs, [str(i) for i in range(len(costs))], [], stages)
    assert found.optimum == pytest.approx(best_of_all(costs, stages))
    assert found.largest <= found.optimum * SLACK + 1e-9
    assert list(found.stages) == sorted(found.stages)
    assert set(found.stages) == set(range(stages))


def test_containers_stay_whole_where_that_costs_little() -> None:
    names = [f"h.{block}.{part}" for block in range(4) for part in ("a", "b", "c")]
    found = cut([1.0, 1.0, 1.01] * 4, names, [], 2)
    assert found.stages == (0,) * 6 + (1,) * 6


def test_of_cuts_through_as_few_containers_the_most_even_is_taken() -> None:
    costs = [1.0] * 99 + [2.0] + [1.0] * 99
    assert cut(costs, [str(i) for i in range(len(costs))], [], 2).largest == 101.0


def test_what_shares_a_parameter_is_on_one_stage_where_that_balances_better() -> None:
    found = cut([4.0, 1.0, 1.0, 1.0, 0.0], ["embed", "a", "b", "c", "head"], [[0, 4]], 2)
    assert found.stages[0] == found.stages[4]
    assert found.largest == 4.0


def test_the_published_algorithm_deals_devices_down_the_tree() -> None:
    """Of benchmarks/tree_partition.py. The head gets no device of four: the one before it computes it."""
    tree = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/tree_partition.py"))
    names = ["embed", *(f"h.{block}.{part}" for block in range(4) for part in "ab"), "head"]
    assert tree["tree_partition"](names, [1.0, *[3.0] * 8, 1.0], [], 4) == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert tree["tree_partition"](names, [1.0, *[3.0] * 8, 1.0], [[0, 9]], 4)[9] == 0
    assert tree["dhondt"]([100, 80, 30, 20], 8) == [4, 3, 1, 0]
    assert tree["segments"]([3.0, 1.0, 1.0, 3.0], 2) == [(0, 2), (2, 4)]


def test_more_stages_than_modules_are_refused() -> None:
    with pytest.raises(SMPConfigError, match="'partitions' is 3, but the model has 2 modules"):
        cut([1.0, 1.0], ["a", "b"], [], 3)


@pytest.mark.parametrize("simple", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 16), (3, 2)])
def test_a_chain_idles_no_longer_than_it_must(stages: int, microbatches: int, simple: bool) -> None:
    """As the model of benchmarks/pipeline_model.py runs the schedule; forward and backward take times of their own."""
    model = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/pipeline_model.py"))
    idle = model["bubble"](model["Model"](stages, microbatches, simple=simple))
    assert idle == pytest.approx((stages - 1) / (microbatches + stages - 1))


_HOLES = """
import ctypes, sys
from pathlib import Path
from smdistributed.modelparallel.backend.allocator import map_large_blocks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def fill(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

done = CALL
libc.free(fill(24 << 20))  # from now on glibc would map larger blocks only
before = rss()
for block in [(fill(12 << 20), fill(1 << 16))[0] for _ in range(5)]:
    libc.free(block)
print(done, (rss() - before) >> 20)
"""


@pytest.mark.parametrize(
    ("call", "tuned", "done", "holes"),
    [
        ("map_large_blocks(8 << 20)", {}, "True", 0),
        ("None", {}, "None", 60),
        ("map_large_blocks(8 << 20)", {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, "False", 60),
        ("map_large_blocks(8 << 20)", {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"}, "False", 60),
    ],
)
def test_freed_layers_leave_no_holes_in_the_heap_unless_you_tune_it(
    call: str, tuned: dict[str, str], done: str, holes: int
) -> None:
    command = [sys.executable, "-c", _HOLES.replace("CALL", call)]
    output = subprocess.run(command, env={**os.environ, **tuned}, capture_output=True, text=True, check=True).stdout
    returned, mebibytes = output.split()
    assert returned == done
    assert abs(int(mebibytes) - holes) < 10
