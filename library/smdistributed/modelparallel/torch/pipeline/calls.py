"""A call of a module on another stage, as autograd sees it.

On the calling stage, a call is three nodes. `Enter` takes the input tensors and returns a token. `Block` waits for the
other stage. `Leave` returns the tensors of the answer. In backward, `Leave` sends the gradients and `Block` waits for
the gradients of the inputs. Other nodes that are ready run between the two. So skip connections, modules that are
used twice and shared activations have the same gradients as in one process. The token is on the CPU, so that no thread
of a GPU waits.
On the called stage, `Receive` returns the tensors that have arrived and keeps their gradients. They are not leaves, so
that modules may change them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch.autograd import Function

_Tensors = Sequence[torch.Tensor]
_Gradients = Sequence[Optional[torch.Tensor]]


class RemoteCall:
    """One call of modules on another stage, on the calling side.

    `send_forward` waits for the answer's tensors, each with whether it requires grad. `send_backward` sends the
    gradients of these tensors and does not wait. `receive_backward` waits for the gradients of the inputs.
    """

    def __init__(
        self,
        send_forward: Callable[[_Tensors], Sequence[tuple[torch.Tensor, bool]]],
        send_backward: Callable[[_Gradients], None],
        receive_backward: Callable[[], _Gradients],
    ) -> None:
        self.send_forward, self.send_backward, self.receive_backward = send_forward, send_backward, receive_backward
        self.inputs: _Tensors = ()
        self.answer: Sequence[tuple[torch.Tensor, bool]] = ()
        self.gradients: _Gradients = ()

    def run(self, inputs: _Tensors) -> tuple[torch.Tensor, ...]:
        """Returns the answer's tensors in the autograd graph of this thread; without grad mode in no graph."""
        if not torch.is_grad_enabled():
            return tuple(tensor for tensor, _ in self.send_forward(inputs))
        anchor = torch.zeros((), requires_grad=True)
        token = Block.apply(self, Enter.apply(self, anchor, *inputs))  # type: ignore[no-untyped-call]
        outputs: tuple[torch.Tensor, ...] = Leave.apply(self, token) if self.answer else ()  # type: ignore[no-untyped-call]
        self.answer = ()
        return outputs


class Enter(Function):
    """Takes the inputs of a call into the graph; in backward, returns their gradients."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, anchor: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Keeps the inputs in `call`, and returns a token (0) that orders the graph. Sends nothing."""
        ctx.call = call
        call.inputs = inputs
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, None, *ctx.call.gradients


class Block(Function):
    """Waits for the answer of a call; in backward, for the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, token: torch.Tensor) -> torch.Tensor:
        """Sends the inputs to the other stage and waits for its answer, which `call` keeps. Returns a token (0)."""
        ctx.call = call
        inputs, call.inputs = call.inputs, ()
        call.answer = call.send_forward(inputs)
        return token.new_zeros(())

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        ctx.call.gradients = ctx.call.receive_backward()
        return None, token


class Leave(Function):
    """Returns the tensors of an answer; in backward, sends their gradients."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the answer; those that required no grad on the other stage require none here."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, requires_grad in call.answer if not requires_grad))
        return tuple(tensor for tensor, _ in call.answer)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.call.send_backward(gradients)
        return None, torch.zeros(())


class ReceivedInputs:
    """The inputs of one call on the called stage: keeps their gradients, and the outputs that were sent back."""

    def __init__(self, count: int) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * count
        self.outputs: _Tensors = ()

    def tensors(self, came: Sequence[tuple[torch.Tensor, bool]]) -> tuple[torch.Tensor, ...]:
        """Returns the tensors in the autograd graph of this thread. `came` has each with whether it requires grad."""
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        return Receive.apply(self, anchor, came) if came else ()  # type: ignore[no-untyped-call]

    def backward(self, gradients: _Gradients) -> _Gradients:
        """Returns the gradients of the inputs; None for an input without one. Releases the outputs: it works once."""
        pairs = [(o, g) for o, g in zip(self.outputs, gradients) if g is not None and o.requires_grad]
        self.outputs = ()
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return self.gradients


class Receive(Function):
    """Takes received tensors into the graph; in backward, keeps their gradients."""

    @staticmethod
    def forward(
        ctx: Any, inputs: ReceivedInputs, anchor: torch.Tensor, came: Sequence[tuple[torch.Tensor, bool]]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that came. Those that required no grad on the calling stage require none here."""
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, requires_grad in came if not requires_grad))
        return tuple(tensor for tensor, _ in came)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.inputs.gradients = list(gradients)
        return None, None, None
