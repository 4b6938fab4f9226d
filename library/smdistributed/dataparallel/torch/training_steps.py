"""Records the steps of a torch script in the timeline: its forward and backward passes and its optimizer.

The script needs no change, with DistributedDataParallel, FSDP or neither. During a recording, torch's global hooks of
modules and optimizers report when these begin and end. There is no hook for a whole backward pass, and a hook on a
module's backward changes the graph. So `torch.autograd.backward`, which `Tensor.backward` calls, is replaced for that
time. Without a recording nothing is installed.

A step ends with `optimizer.step()`, and the next one begins then; the first begins with the first pass or optimizer.
Different optimizers that follow each other without a pass between them belong to one step.

The `compute` spans of a step, in a script's usual order:

| name        | from                        | to
|-------------|-----------------------------|------------------------------------
| "forward"   | the call of a model         | its return
| "loss"      | the last forward's end      | the backward pass
| "backward"  | the call of `backward`      | its return; with the wait for the last bucket
| "gradients" | the backward pass's end     | the optimizer, for example clipping
| "optimizer" | the call of `step`          | its return

If the process uses CUDA, there are steps only: kernels run later than the calls that start them.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smdistributed.core import timeline
from smdistributed.core.torch.untraced import without_dynamo

_is_compiling: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class StepRecorder:
    """Records the steps of the thread that creates it, by hooks, until `close`.

    It silences torch's warning that a compiled module calls global hooks twice: the outermost call counts.
    """

    def __init__(self, running: timeline.Recorder) -> None:
        self._recorder = running
        self._thread = threading.get_ident()
        self._module = self._optimizer = 0  # the id of the outermost one that runs
        self._ran: set[int] = set()  # the ids of those that have run in this step
        self._outer: Callable[[], object] = lambda: None  # the one that runs, as a weak reference
        self._module_began = self._optimizer_began = 0  # by the timeline's clock, as all times here
        self._in_backward = False
        self._gap = ("", 0)  # how the script's code after a pass counts, and since when
        self._steps = self._step_began = self._optimizer_ended = 0
        self._backward = torch.autograd.backward
        self._replacement = self._make_backward()
        torch.autograd.backward = self._replacement
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        self._hooks = (
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends),
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        )

    def close(self) -> None:
        """Records the last step, and removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        if torch.autograd.backward is self._replacement:  # otherwise somebody has wrapped it, and it only passes on
            torch.autograd.backward = self._backward
        self._end_step()

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        """Hook: called before each module's forward, also by Dynamo while it compiles, which then leaves it out."""
        if (
            _is_compiling()
            or (self._module and self._module != id(module))
            or self._in_backward
            or self._is_elsewhere()
        ):
            return
        if next(module.parameters(), None) is None:  # a loss, a metric, a transform of data
            return
        self._module, self._module_began = id(module), self._begin_pass()

    def _forward_ends(self, module: torch.nn.Module, *_: Any) -> None:
        if _is_compiling() or self._module != id(module) or self._in_backward or self._is_elsewhere():
            return
        self._module = 0
        self._gap = "loss", self._record("forward", self._module_began)

    def _make_backward(self) -> Callable[..., None]:
        original = self._backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._in_backward or self._is_elsewhere():
                return original(*args, **kwargs)
            self._end_gap("loss")
            began = self._begin_pass()
            self._module, self._in_backward = 0, True  # a forward that still runs here has raised an error
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                self._gap = "gradients", self._record("backward", began)

        return without_dynamo(backward)

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook: called before each optimizer's step. An optimizer that runs in another or in backward is part of it."""
        if _is_compiling() or self._in_backward or self._is_elsewhere():
            return
        if self._optimizer and self._outer() is None:  # its step raised an error, and it is gone
            self._optimizer = 0
        if self._optimizer and self._optimizer != id(optimizer):
            return
        self._end_gap("gradients")
        if id(optimizer) in self._ran:
            self._end_step()
        self._outer = weakref.ref(optimizer)
        self._optimizer, self._optimizer_began = id(optimizer), timeline.now()
        self._step_began = self._step_began or self._optimizer_began

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _is_compiling() or self._optimizer != id(optimizer) or self._in_backward or self._is_elsewhere():
            return
        self._optimizer, self._gap = 0, ("", 0)
        self._ran.add(id(optimizer))
        self._optimizer_ended = self._record("optimizer", self._optimizer_began)

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread, or a forked process, or the recording has ended."""
        return threading.get_ident() != self._thread or timeline.recorder is not self._recorder

    def _begin_pass(self) -> int:
        """Ends the step if its optimizer has run, or begins the first. Returns the time."""
        now = timeline.now()
        self._gap = "", 0
        self._end_step()
        self._step_began = self._step_began or now
        return now

    def _end_gap(self, name: str) -> None:
        what, began = self._gap
        if what == name:
            self._record(name, began)
        self._gap = "", 0

    def _end_step(self) -> None:
        """Records the step if its optimizer has run. The next one begins at the optimizer's end."""
        if not self._optimizer_ended or self._optimizer:  # an optimizer may call passes itself
            return
        self._steps += 1
        self._recorder.complete("step", f"step {self._steps}", self._step_began, self._optimizer_ended)
        self._step_began, self._optimizer_ended, self._ran = self._optimizer_ended, 0, set()

    def _record(self, name: str, began: int) -> int:
        """Records a computation that ends now, unless it is on a CUDA device. Returns the time."""
        now = timeline.now()
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._recorder.complete("compute", name, began, now)
        return now


def record_steps(running: timeline.Recorder) -> Callable[[], None]:
    """Records the steps of this thread from now on. Returns the function that ends it."""
    return StepRecorder(running).close
