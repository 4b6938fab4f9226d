"""Tensor parallelism on real ranks: equal to one process, with pipelines and replicas; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.launching import Mpirun
from tests.library.conftest import TORCH

from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.backend.exceptions import SMPConfigError

RANKS = Path(__file__).with_name("ranks") / "tensor_parallel.py"
NEEDS_FSDP2 = pytest.mark.skipif(TORCH < (2, 6), reason="torch has FSDP2 from 2.6 on")
SHARDED = {
    "sharded_data_parallel_degree": 2,
    "sdp_gradient_clipping": 0,
    "delayed_parameter_initialization": True,
}


def start(mpirun: Mpirun, ranks: int, case: str, *arguments: object, **parameters: Any) -> str:
    given = {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, **parameters}
    return mpirun(ranks, RANKS, case, *arguments, SM_HP_MP_PARAMETERS=json.dumps(given))


@pytest.mark.parametrize(
    ("ranks", "parameters"),
    [
        (2, {}),
        (2, {"prescaled_batch": True, "microbatches": 2}),
        (4, {"partitions": 2, "microbatches": 2, "placement_strategy": "spread"}),
        (4, {"prescaled_batch": True, "shard_optimizer_state": True, "placement_strategy": "TDP"}),
        pytest.param(4, SHARDED, marks=NEEDS_FSDP2),
        pytest.param(4, {**SHARDED, "prescaled_batch": True, "microbatches": 2}, marks=NEEDS_FSDP2),
    ],
)
def test_training_equals_that_of_one_process(mpirun: Mpirun, ranks: int, parameters: dict[str, Any]) -> None:
    start(mpirun, ranks, "trains_as_one_process", **parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"microbatches": 8},
        {"microbatches": 4, "prescaled_batch": True, "pipeline": "simple"},
    ],
)
def test_several_microbatches_are_in_flight(mpirun: Mpirun, parameters: dict[str, Any]) -> None:
    placed = {"partitions": 2, "auto_partition": False, "default_partition": 0, **parameters}
    start(mpirun, 4, "trains_branches", **placed)


@pytest.mark.parametrize(
    ("ranks", "parameters"),
    [
        (2, {}),
        (4, {"partitions": 2, "microbatches": 2}),
        (4, {"shard_optimizer_state": True}),
        pytest.param(4, SHARDED, marks=NEEDS_FSDP2),
    ],
)
def test_norms_of_split_parameters_are_those_of_whole_ones(
    mpirun: Mpirun, ranks: int, parameters: dict[str, Any]
) -> None:
    start(mpirun, ranks, "trains_with_norms", **parameters)


def test_checkpoints_of_shares_resume_on_other_degrees(mpirun: Mpirun, tmp_path: Path) -> None:
    start(mpirun, 2, "saves", tmp_path)
    start(mpirun, 2, "resumes", tmp_path)
    start(mpirun, 2, "resumes", tmp_path, tensor_parallel_degree=1, partitions=2)


def test_half_precision_scales_and_clips_shares(mpirun: Mpirun) -> None:
    start(mpirun, 2, "trains_in_half_precision", bf16=True)
    start(mpirun, 2, "trains_in_half_precision", fp16=True, prescaled_batch=True)


@NEEDS_FSDP2
def test_half_precision_scales_and_clips_shards_of_shares(mpirun: Mpirun) -> None:
    start(mpirun, 4, "trains_in_half_precision", fp16=True, **SHARDED)


@pytest.mark.parametrize("prescaled", [False, True])
def test_transformer_layers_equal_the_published_reference(mpirun: Mpirun, prescaled: bool) -> None:
    start(mpirun, 2, "transformer_layers", prescaled_batch=prescaled)
    start(mpirun, 2, "normalizes", prescaled_batch=prescaled)


def test_a_language_model_trains_as_on_one_rank(mpirun: Mpirun) -> None:
    start(mpirun, 2, "language_model", prescaled_batch=True)
    start(mpirun, 4, "language_model", partitions=2, microbatches=2)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", {}),
        ("gptj", {"prescaled_batch": True}),
        ("gptneo", {}),
        ("gptneox", {"delayed_parameter_initialization": True, "prescaled_batch": True}),
        ("bert", {}),
        ("t5", {"partitions": 2, "microbatches": 2}),
        ("t5-gated", {"prescaled_batch": True, "delayed_parameter_initialization": True}),
        ("mt5", {"prescaled_batch": True}),
        ("vit", {}),
        ("deit", {"prescaled_batch": True}),
        pytest.param("gpt2", {"prescaled_batch": True, **SHARDED}, marks=NEEDS_FSDP2),
    ],
)
def test_hugging_faces_models_train_as_themselves(
    mpirun: Mpirun, tmp_path: Path, name: str, parameters: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    ranks = 2 * parameters.get("partitions", 1) * parameters.get("sharded_data_parallel_degree", 1)
    start(mpirun, ranks, "trains_hugging_face", name, tmp_path, **parameters)


def test_modules_of_scripts_are_replaced_by_what_they_registered(mpirun: Mpirun) -> None:
    start(mpirun, 2, "registers", prescaled_batch=True)


def test_a_failure_of_one_rank_ends_the_step_on_all(mpirun: Mpirun) -> None:
    start(mpirun, 4, "fails_on_a_rank_that_follows", partitions=2, microbatches=4)


def test_optimize_says_where_it_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="'optimize' of mp_parameters between layers that are split has no effect"):
        check({"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "optimize": "speed"})


def test_the_degree_needs_ddp() -> None:
    with pytest.raises(SMPConfigError, match="'tensor_parallel_degree' needs 'ddp'"):
        check({"partitions": 1, "tensor_parallel_degree": 2})
