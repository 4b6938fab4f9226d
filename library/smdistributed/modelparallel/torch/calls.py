"""A call of a module on another stage, as autograd sees it.

On the side that asks, a call is three nodes. `Enter` takes the tensors and gives a token; `Block` waits for the other
stage; `Leave` gives the tensors of the answer. In backward, `Leave` sends the gradients away and `Block` waits for
those of the inputs: whatever else is ready runs between, and skip connections, modules that are used twice and shared
activations come out as in one process. The token is on the CPU, so that no GPU's thread waits.
On the side that answers, `Arrive` makes the tensors that came and keeps their gradients: they are no leaves, so that
modules may change them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch.autograd import Function

_Tensors = Sequence[torch.Tensor]
_Gradients = Sequence[Optional[torch.Tensor]]


class RemoteCall:
    """One call of what another stage has, on the side that asks. `ask` and `ask_back` block, `send_back` does not.

    ask: sends the inputs, gives the tensors of the answer, each with whether it requires grad.
    send_back: sends the gradients of the answer's tensors. ask_back: gives those of the inputs.
    """

    def __init__(
        self,
        ask: Callable[[_Tensors], Sequence[tuple[torch.Tensor, bool]]],
        send_back: Callable[[_Gradients], None],
        ask_back: Callable[[], _Gradients],
    ) -> None:
        self.ask, self.send_back, self.ask_back = ask, send_back, ask_back
        self.inputs: _Tensors = ()
        self.answer: Sequence[tuple[torch.Tensor, bool]] = ()
        self.gradients: _Gradients = ()

    def run(self, inputs: _Tensors) -> tuple[torch.Tensor, ...]:
        """The tensors of the answer, in the graph of this thread."""
        if not torch.is_grad_enabled():
            return tuple(tensor for tensor, _ in self.ask(inputs))
        anchor = torch.zeros((), requires_grad=True)
        token = Block.apply(self, Enter.apply(self, anchor, *inputs))  # type: ignore[no-untyped-call]
        outputs: tuple[torch.Tensor, ...] = Leave.apply(self, token) if self.answer else ()  # type: ignore[no-untyped-call]
        self.answer = ()
        return outputs


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, call: RemoteCall, anchor: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        call.inputs = inputs
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, None, *ctx.call.gradients


class Block(Function):
    @staticmethod
    def forward(ctx: Any, call: RemoteCall, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        inputs, call.inputs = call.inputs, ()
        call.answer = call.ask(inputs)
        return token.new_zeros(())

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        ctx.call.gradients = ctx.call.ask_back()
        return None, token


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, call: RemoteCall, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, requires_grad in call.answer if not requires_grad))
        return tuple(tensor for tensor, _ in call.answer)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.call.send_back(gradients)
        return None, torch.zeros(())


class Arrived:
    """The gradients of the tensors that came for one call, and its own tensors that go back."""

    def __init__(self, count: int) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * count
        self.outputs: _Tensors = ()

    def tensors(self, came: Sequence[tuple[torch.Tensor, bool]]) -> tuple[torch.Tensor, ...]:
        """What came (each with whether it requires grad), in the graph of this thread."""
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        return Arrive.apply(self, anchor, came) if came else ()  # type: ignore[no-untyped-call]

    def backward(self, gradients: _Gradients) -> _Gradients:
        """Run the local graph backward; the gradients of what came."""
        pairs = [(o, g) for o, g in zip(self.outputs, gradients) if g is not None and o.requires_grad]
        self.outputs = ()
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return self.gradients


class Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, arrived: Arrived, anchor: torch.Tensor, came: Sequence[tuple[torch.Tensor, bool]]
    ) -> tuple[torch.Tensor, ...]:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, requires_grad in came if not requires_grad))
        return tuple(tensor for tensor, _ in came)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.arrived.gradients = list(gradients)
        return None, None, None
