"""The gradients of this stage around a step: averaged over replicas, and checked to come from `model.backward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.torch.script.reducer import Reducer

_UNAVERAGED = (
    "Gradients were computed without model.backward, so that replicas would not average them. "
    "Fix: call model.backward(loss) instead of loss.backward()."
)
_SUMMED = (
    "Gradients were computed without model.backward, so that they are sums over the microbatches instead of means. "
    "Fix: call model.backward(loss) instead of loss.backward()."
)


class StepGradients:
    """Follows the gradients of this stage's parameters through steps.

    Args:
        parameters: Lists this stage's parameters; empty before the model is placed.
        must_be_means: Whether gradients are means over several microbatches, which `model.backward` computes.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], must_be_means: Callable[[], bool]) -> None:
        self._parameters, self._must_be_means = parameters, must_be_means
        self.reducer: Reducer | None = None
        """Averages over the replicas, if there are several. Set when the model is placed."""
        self.were_scaled = False
        """Whether losses were multiplied by the loss scale since the optimizer's `zero_grad`."""
        self.was_called_outside = False
        """Whether the model was called outside a step with gradients, and `model.backward` not since."""
        self._has_called_backward = False
        self._had_gradients: set[int] = set()

    def begin(self) -> None:
        """Notes that a step begins: gradients from before belong to another one. The reducer begins to count again."""
        self.was_called_outside = False
        if not self._has_called_backward:
            self._had_gradients = {id(p) for p in self._parameters() if p.grad is not None}
        if self.reducer:
            self.reducer.begin()

    def end(self, had_backward: bool) -> None:
        """Ends a step: averages its gradients over the replicas.

        Args:
            had_backward: Whether `model.backward` was called, on any stage. An evaluation leaves gradients alone.

        Raises:
            StepUsageError: If the script computed gradients in another way.
        """
        self.were_scaled |= had_backward
        self._has_called_backward |= had_backward
        if self.reducer and had_backward:
            self.reducer.end()
        elif self.reducer and self.reducer.saw_gradients:
            raise StepUsageError(_UNAVERAGED)
        self._require_means()

    def finish_averages(self) -> None:
        """Averages what `backward_passes_per_step` has left to later steps; all replicas call it.

        Raises:
            StepUsageError: If replicas have computed gradients outside a step, and not by `model.backward`.
        """
        if self.reducer and self.was_called_outside and self.reducer.saw_gradients:
            raise StepUsageError(_UNAVERAGED)
        if self.reducer:
            self.reducer.finish()

    def _require_means(self) -> None:
        """Raises StepUsageError if a step without `backward` has left gradients of several microbatches."""
        if self._has_called_backward or not self._must_be_means():
            return
        if any(p.grad is not None and id(p) not in self._had_gradients for p in self._parameters()):
            raise StepUsageError(_SUMMED)
