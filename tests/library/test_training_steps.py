"""Steps of a torch script in the timeline: what is recorded of unusual loops, and that nothing is installed without."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from shoal.report import trace
from smdistributed import dataparallel
from smdistributed.core import timeline
from smdistributed.dataparallel.torch import training_steps

ORIGINAL = torch.autograd.backward


class Loop:
    """A model with its optimizers."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model[0], self.model[2])]

    def forward(self) -> Any:
        return self.model(torch.ones(2, 4)).sum()


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], list[str]]]:
    """Runs a function with a recording; returns the names of steps and computations, in the order of their begins."""
    monkeypatch.setattr(timeline, "_observers", [training_steps.record_steps])

    def run(function: Callable[[], object]) -> list[str]:
        file = timeline.start(tmp_path / "timeline.json", 0, 1)
        try:
            function()
        finally:
            timeline.stop()
        (rank,) = trace.read_timeline([file]).ranks
        return [span.name for span in sorted(rank.spans, key=lambda span: (span.begin, span.category != "step"))]

    yield run
    assert torch.autograd.backward is ORIGINAL
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


PASS = ["forward", "loss", "backward"]
END = ["gradients", "optimizer"]


def test_optimizers_that_follow_each_other_are_one_step(record: Callable[..., list[str]]) -> None:
    def script() -> None:
        loop = Loop()
        for _ in range(2):
            loop.forward().backward()
            for optimizer in loop.optimizers:
                optimizer.step()
        loop.forward()  # evaluation

    step = [*PASS, *END, "optimizer"]
    assert record(script) == ["step 1", *step, "step 2", *step, "forward"]


def test_an_optimizer_that_calls_the_passes_itself(record: Callable[..., list[str]]) -> None:
    def script() -> None:
        loop = Loop()

        def closure() -> Any:
            loss = loop.forward()
            loss.backward()
            return loss

        for _ in range(2):
            loop.optimizers[0].step(closure)

    assert record(script) == ["step 1", "optimizer", *PASS, "step 2", "optimizer", *PASS]


def test_optimizers_with_closures_take_turns(record: Callable[..., list[str]]) -> None:
    def script() -> None:
        loop = Loop()

        def closure() -> Any:
            loop.forward().backward()
            return 0.0

        for _ in range(2):
            for optimizer in loop.optimizers:
                optimizer.step(closure)

    step = ["optimizer", *PASS, "optimizer", *PASS]
    assert record(script) == ["step 1", *step, "step 2", *step]


def test_modules_without_parameters_are_no_forward(record: Callable[..., list[str]]) -> None:
    """Transforms of data, losses and metrics are modules too."""

    def script() -> None:
        loop, loss = Loop(), torch.nn.MSELoss()
        for _ in range(2):
            inputs = torch.nn.Flatten()(torch.ones(2, 4))
            loss(loop.model(inputs), torch.ones(2, 1)).backward()
            loop.optimizers[0].step()

    step = [*PASS, *END]
    assert record(script) == ["step 1", *step, "step 2", *step]


def test_a_step_that_failed_hides_no_later_optimizer(record: Callable[..., list[str]]) -> None:
    def script() -> None:
        loop = Loop()

        def fails() -> Any:
            raise ValueError("no memory")

        with pytest.raises(ValueError, match="no memory"):
            loop.optimizers[0].step(fails)
        loop.optimizers.clear()
        gc.collect()
        later = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        loop.forward().backward()
        later.step()

    assert record(script) == ["step 1", *PASS, *END]


def test_a_recording_by_variable_needs_no_local_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch, which joins with RANK and WORLD_SIZE alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "SMDDP_TIMELINE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    dataparallel._start_requested_profiler(0, 1)
    dataparallel.stop_profiler()
    assert [path.name for path in tmp_path.iterdir()] == ["smdataparallel_timeline.json"]


def test_errors_and_checkpoints_hide_no_later_pass(record: Callable[..., list[str]]) -> None:
    def script() -> None:
        loop = Loop()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            loop.model(torch.ones(2, 5))
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.backward(torch.ones(1))
        inputs = torch.ones(2, 4, requires_grad=True)
        outputs: Any = torch.utils.checkpoint.checkpoint(loop.model, inputs, use_reentrant=True)
        outputs.sum().backward()
        loop.forward().backward()
        loop.optimizers[0].step()

    assert record(script) == ["step 1", "backward", *PASS, *PASS, *END]


def test_a_forked_process_and_other_threads_record_nothing(record: Callable[..., list[str]]) -> None:
    def script() -> None:
        loop = Loop()
        loop.forward()
        running = timeline.recorder
        assert running is not None
        if not (child := os.fork()):
            before = len(running._events)
            loop.forward()
            os._exit(len(running._events) - before)
        assert os.waitpid(child, 0)[1] == 0
        thread = threading.Thread(target=loop.forward)
        thread.start()
        thread.join()

    assert record(script) == ["forward"]


def test_a_compiled_model_is_recorded_and_compiles_whole(record: Callable[..., list[str]]) -> None:
    if not hasattr(torch, "compiler"):
        pytest.skip("torch 2.0 cannot say whether it compiles")
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def script() -> None:
        loop = Loop()
        compiled: Any = torch.compile(loop.model, backend=backend, fullgraph=True)
        function = torch.compile(loop.forward, backend=backend, fullgraph=True)
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
            function().backward()

    names = record(script)
    assert names.count("backward") == 4
    assert names.count("forward") == 2
    assert len(graphs) == 2
