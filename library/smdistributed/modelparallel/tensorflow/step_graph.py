"""The graph of a step on one stage: this stage's layers, and messages in place of the layers of other stages.

Every rank traces the whole function. A layer of another stage is replaced by messages that bring the outputs that this
stage needs. The gradient of a message is a message in the other direction. Operations that `call()` runs outside of
layers run on every stage that needs them. All stages compute the loss from the model's outputs; its gradient counts
only on the stage that computed these outputs.

TensorFlow would run messages in any order. So at the end the stages exchange lists of their messages, and each orders
its own by the pipeline's schedule (`backend.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError, SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.backend.pipeline import order
from smdistributed.modelparallel.tensorflow.layer_calls import (
    CallUnchanged,
    call_layer,
    observe_calls,
    replace_tensors,
    tensors_of,
)
from smdistributed.modelparallel.tensorflow.model_trace import nested_call_error
from smdistributed.modelparallel.tensorflow.step_messages import (
    MessageKey,
    TensorMessage,
    Transfer,
    find_missing,
    sort_messages,
)
from smdistributed.modelparallel.tensorflow.tensor_exchange import NEW_RUN
from smdistributed.modelparallel.tensorflow.transfers import TransferPlan

_SAME_FIX = "Fix: make the model's call() always do the same."
_LOSSES = 1 << 20  # a model has fewer transfers
_LAST = 1 << 30  # sorts before all transfers of a backward pass


class StageContext(NamedTuple):
    """The stage on which a step is traced, and the parts of the job that the step needs."""

    stage: int
    ranks: Sequence[int]
    """The rank of every stage."""
    gather: Callable[[Any], list[Any]]
    """Exchanges an object with all stages; all of them call it."""
    plan_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], TransferPlan]
    names: dict[str, str]
    """Descriptions of messages by label, for errors; the step adds its own."""
    anchor: Any
    """A trainable variable that is never changed."""
    seed: int
    """The same number on all stages."""
    next_in_order: Callable[[], Any]
    """Returns an operation that runs after the previous one that it returned, in other graphs too."""
    active: int
    """As in `backend.pipeline.order`."""
    simple: bool
    """As in `backend.pipeline.order`."""


class _Marked(NamedTuple):
    """An operation that sends, receives, or begins a pass."""

    message: TensorMessage
    operation: Any


class StepGraph:
    """The graph of one step. Made inside the function that is traced: it takes and seeds the default graph.

    `number` counts the traced steps of the job, as on all stages.
    """

    def __init__(self, context: StageContext, number: int) -> None:
        self.context, self._number = context, number
        self.graph = tf.compat.v1.get_default_graph()
        self._marked: list[_Marked] = []
        self._transfers: dict[MessageKey, Transfer] = {}
        self._microbatch = self._calls = 0
        self._passes: dict[tuple[int, int], int] = {}
        self._outputs: set[Any] = set()
        self._plans: dict[int, TransferPlan] = {}
        self._variables: list[Any] = []
        self._shared_losses = 0
        if self.graph.seed is None:  # random numbers outside of layers are the same on all stages
            self.graph.seed = context.seed

    @property
    def anchors(self) -> list[Any]:
        """Values that received tensors depend on, so that TensorFlow asks for their gradients."""
        # The context's anchor is the one that `optimizers` adds to the sources of every gradient.
        return [variable.read_value() for variable in (self.context.anchor, *self._variables)]

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Makes this the current step, for one microbatch. Raises StepUsageError inside another step."""
        global _current
        if _current is not None:
            raise StepUsageError(
                "A function under smp.step is called inside a step: steps cannot be nested. Fix: call it as a plain "
                "function, without @smp.step."
            )
        self._microbatch, self._calls, self._shared_losses = number, 0, 0
        self._outputs.clear()
        _current = self
        try:
            yield
        finally:
            _current = None

    # --- a call of the model

    def call_model(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs this stage's part of the model, and returns the model's outputs on every stage.

        Raises SMPRuntimeError if the model does other than when it was traced. Raises SMPUnsupportedError in another
        graph than the step's, or if inputs depend on a model's outputs.
        """
        self.require_own_graph(f"The model {model.name!r}")
        call, self._calls = self._calls, self._calls + 1
        plan = self._plans.get(call) or self.context.plan_call(model, args, kwargs)
        self._plans[call] = plan
        if len(self.context.ranks) == 1:
            with observe_calls(CallUnchanged()):
                return call_layer(model, args, kwargs)
        self._variables = model.trainable_variables
        inputs = tensors_of((args, kwargs))
        self._reject_own_outputs(inputs)
        if inputs:
            begun = self._mark_begin(MessageKey(self._microbatch, call, 0, -1), inputs)
            args, kwargs = replace_tensors((args, kwargs), begun)
        stage_call = _StageCall(self, plan, call)
        with observe_calls(stage_call):
            outputs = call_layer(model, args, kwargs)
        stage_call.require_end()
        tensors = self._share_outputs(tensors_of(outputs), plan, stage_call)
        self._outputs.update(tensor.op for tensor in tensors if tensor.dtype.is_floating)
        return replace_tensors(outputs, tensors)

    def forward_key(self, call: int, number: int) -> MessageKey:
        return MessageKey(self._microbatch, call, 0, number)

    def _share_outputs(self, mine: Sequence[Any], plan: TransferPlan, stage_call: _StageCall) -> list[Any]:
        """Other stages get constants. Raises SMPRuntimeError for another number of tensors than when it was traced."""
        known = tensors_of(plan.outputs)
        if len(mine) != len(known):
            raise SMPRuntimeError(
                f"The model gave {len(mine)} tensors, and {len(known)} when it was traced. {_SAME_FIX}"
            )
        shared = []
        for tensor, like, transfers in zip(mine, known, plan.output_transfers):
            if self.context.stage == plan.output_stage:
                for transfer in transfers:
                    self.send(tensor, self.forward_key(stage_call.number, transfer.number), transfer)
            else:
                transfer = next(t for t in transfers if t.target == self.context.stage)
                tensor = self.receive((), like, self.forward_key(stage_call.number, transfer.number), transfer)
            shared.append(tensor)
        return self._begin_backward(shared, stage_call, plan.output_stage)

    def _begin_backward(self, tensors: list[Any], stage_call: _StageCall, output_stage: int) -> list[Any]:
        """Returns the same tensors. The gradient of the float ones begins this stage's backward pass.

        It reaches the tensors that this stage has sent. Only on the stage of the outputs, it also reaches the layers
        that computed them.
        """
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
        call = (self._microbatch, stage_call.number)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def tie(*given: Any) -> Any:
            def backward(*gradients: Any) -> list[Any]:
                self._passes[call] = self._passes.get(call, 0) + 1
                passed: Sequence[Any] = [None] * len(floats)
                if self.context.stage == output_stage:
                    passed = self._mark_begin(MessageKey(*call, self._passes[call], _LAST), gradients)
                return [*passed, *(tf.ones([]) for _ in stage_call.tokens)]

            return [tf.identity(tensor) for tensor in given[: len(floats)]], backward

        tied = iter(tie(*floats, *stage_call.tokens) if floats else [])
        return [next(tied) if tensor.dtype.is_floating else tensor for tensor in tensors]

    def _mark_begin(self, key: MessageKey, tensors: Sequence[Any]) -> list[Any]:
        """Returns the same tensors, with their Keras masks, once the schedule lets this pass begin."""
        found: list[Any] = tf.identity_n(list(map(tf.convert_to_tensor, tensors)))
        self._mark(TensorMessage(key, "begin", None), found[0].op)
        for tensor, given in zip(found, tensors):
            if getattr(given, "_keras_mask", None) is not None:
                tensor._keras_mask = given._keras_mask
        return found

    # --- messages

    def send(self, tensor: Any, key: MessageKey, transfer: Transfer) -> Any:
        """Sends a tensor to the other end of a transfer, and returns a scalar token. Notes that for `finish`."""
        token = operations.send(tensor, self.context.ranks[transfer.other(self.context.stage)], self._label(key))
        self._mark(TensorMessage(key, "send", transfer), token.op)
        return token

    def receive(self, anchors: Sequence[Any], like: Any, key: MessageKey, transfer: Transfer) -> Any:
        """Receives a tensor like `like` that depends on `anchors`. Notes that for `finish`, and for errors."""
        source = self.context.ranks[transfer.other(self.context.stage)]
        found = operations.receive(anchors, like.dtype, source, self._label(key))
        what = f"the gradient of {transfer.what}" if key.backward else transfer.what
        self.context.names[self._label(key)] = f"{what}, microbatch {key.microbatch}"
        found.set_shape(like.shape)
        self._mark(TensorMessage(key, "receive", transfer), found.op)
        return found

    def send_gradient(self, label: str, gradient: Any) -> None:
        key, transfer = self._gradient_message(label)
        self.send(tf.convert_to_tensor(gradient), key, transfer)

    def receive_gradient(self, label: str, token: Any, like: Any) -> Any:
        key, transfer = self._gradient_message(label)
        return self.receive([token], like, key, transfer)

    def _gradient_message(self, label: str) -> tuple[MessageKey, Transfer]:
        key = MessageKey(*map(int, label.split("/")[1:]))
        return key._replace(backward=self._passes[key.microbatch, key.call]), self._transfers[key]

    def _mark(self, message: TensorMessage, operation: Any) -> None:
        """Notes an operation for `finish`. Raises SMPUnsupportedError if it is in another graph."""
        if operation.graph is not self.graph:
            raise SMPUnsupportedError(
                "Gradients are computed inside a loop, a branch or a tf.function of the step. Fix: compute them in the "
                "function under smp.step itself."
            )
        self._marked.append(_Marked(message, operation))
        if message.transfer is not None:
            self._transfers[message.key] = message.transfer

    def _label(self, key: MessageKey) -> str:
        return "/".join(map(str, (self._number, *key)))

    # --- the end

    def finish(self) -> None:
        """Orders the messages by the pipeline's schedule, by control dependencies, after the previous step.

        All stages call this, exchange their lists of messages, and add missing ones. TensorFlow's own order of messages
        is removed. Raises SMPRuntimeError if the messages do not match.
        """
        if len(self.context.ranks) == 1:
            return
        by_stage = self._gather_messages()
        for stage, message in find_missing(by_stage):
            by_stage[stage].append(message)
            if stage == self.context.stage:
                self._add_missing(message)
        programs = list(map(sort_messages, by_stage))
        mine = {marked.message[:2]: marked.operation for marked in self._marked}
        places = order(
            [[message.event for message in program] for program in programs], self.context.active, self.context.simple
        )
        own = programs[self.context.stage]
        first = self.context.next_in_order()  # after the previous step: its messages are in another graph
        chain = [self._begin_run(first), *(mine[own[place][:2]] for place in places[self.context.stage])]
        for before, after in zip(chain, chain[1:]):
            after._add_control_input(before)
        self.context.next_in_order()._add_control_input(chain[-1])
        self._remove_implicit_order()

    def _gather_messages(self) -> list[list[TensorMessage]]:
        """All stages call it. Raises SMPRuntimeError if they trace different steps."""
        gathered = self.context.gather((self._number, [marked.message for marked in self._marked]))
        if len({number for number, _ in gathered}) > 1:
            numbers = ", ".join(f"{number}." for number, _ in gathered)
            raise SMPRuntimeError(
                f"The stages trace different steps, the {numbers} of each: one has failed, or has batches of other "
                "shapes. Fix: give all ranks of a replica the same batches."
            )
        return [messages for _, messages in gathered]

    def _begin_run(self, after: Any) -> Any:
        """Adds the message to itself that lets a rank drop messages of failed runs."""
        with tf.control_dependencies([after]):
            return operations.send(tf.zeros([]), self.context.ranks[self.context.stage], NEW_RUN).op

    def _remove_implicit_order(self) -> None:
        """In TensorFlow's order of stateful operations, a microbatch comes after the whole previous one."""
        for operation in self.graph.get_operations():
            has_effects = operation.op_def is not None and operation.op_def.is_stateful
            if has_effects and all(given.dtype != tf.resource for given in operation.inputs):
                self.graph.experimental_acd_manager.run_independently(operation)

    def _add_missing(self, message: TensorMessage) -> None:
        """Sends a gradient that is zero here, or receives one that nothing uses."""
        key, kind, transfer = message
        assert transfer is not None
        forward = key._replace(backward=0)
        there = next(o for m, o in self._marked if m.key == forward and m.kind in ("send", "receive"))
        if kind == "send":
            self.send(tf.zeros_like(there.outputs[0]), key, transfer)
        else:
            self.receive((), there.inputs[0], key, transfer)

    # --- unsupported calls

    def require_own_graph(self, what: str) -> None:
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise nested_call_error(what)

    def _reject_own_outputs(self, tensors: Sequence[Any]) -> None:
        """Raises SMPUnsupportedError: gradients would have to pass through constants of other stages."""
        rest, seen = [tensor.op for tensor in tensors], set()
        while rest:
            operation = rest.pop()
            if operation in self._outputs:
                raise SMPUnsupportedError(
                    "An input of a model comes from an earlier call, of it or another model, in the same "
                    "microbatch. Fix: make both one model's call(), or pass it through tf.stop_gradient."
                )
            if operation not in seen and operation.type != "StopGradient":
                seen.add(operation)
                rest.extend(given.op for given in operation.inputs)

    # --- losses that layers add

    def share_losses(self, mine: Sequence[Any]) -> list[Any]:
        """Other stages' losses are one constant each; none before the model's call in the microbatch."""
        if len(self.context.ranks) == 1 or not self._calls:
            return list(mine)
        self.require_own_graph("losses")
        self._shared_losses += 1
        total = tf.add_n([tf.cast(loss, tf.float32) for loss in mine]) if mine else tf.zeros([])
        found = []
        count = len(self.context.ranks)
        for source in range(count):
            for target in set(range(count)) - {source}:
                number = _LOSSES + (self._shared_losses * count + source) * count + target
                transfer = Transfer(number, source, target, f"the losses of stage {source}")
                key = self.forward_key(self._calls - 1, number)
                if source == self.context.stage:
                    self.send(total, key, transfer)
                elif target == self.context.stage:
                    found.append(self.receive((), total, key, transfer))
        return [*mine, *found]


_current: StepGraph | None = None


def current_step() -> StepGraph | None:
    """Returns the step that is being traced; None outside of steps."""
    return _current


class _StageCall:
    """Observes a call of the model: runs this stage's layers, and receives the outputs of others."""

    def __init__(self, step: StepGraph, plan: TransferPlan, number: int) -> None:
        self._step, self._plan, self.number = step, plan, number
        self._rest = iter(plan.calls)
        self._expected = next(self._rest, None)
        self.tokens: list[Any] = []

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer of this stage and sends its outputs, or receives the outputs of another stage's layer.

        A layer that is split runs, and the layers in it come here. Raises SMPRuntimeError for another layer, or number
        of tensors, than in the trace, and SMPUnsupportedError inside a loop, a branch or another tf.function.
        """
        placed = self._expected
        if placed is None or placed.call.layer is not layer:
            if id(layer) in self._plan.split_layers:
                return call_layer(layer, args, kwargs)
            before = placed.call.layer.name if placed else "none"
            raise SMPRuntimeError(
                f"The model calls layer {layer.name!r}, but called {before!r} at this point when it was traced. "
                f"{_SAME_FIX}"
            )
        self._step.require_own_graph(f"Layer {layer.name!r}")
        self._expected = next(self._rest, None)
        if placed.stage != self._step.context.stage:
            received = list(map(self._receive, placed.call.tensors, placed.transfers))
            return replace_tensors(placed.call.outputs, received, placed.call.masked)
        with observe_calls(CallUnchanged()):
            outputs = call_layer(layer, args, kwargs)
        tensors = tensors_of(outputs)
        if len(tensors) != len(placed.transfers):
            raise SMPRuntimeError(
                f"Layer {layer.name!r} gave {len(tensors)} tensors, and {len(placed.transfers)} when it was traced. "
                f"{_SAME_FIX}"
            )
        for tensor, transfers in zip(tensors, placed.transfers):
            for transfer in transfers:
                token = self._step.send(tensor, self._step.forward_key(self.number, transfer.number), transfer)
                if tensor.dtype.is_floating:
                    self.tokens.append(token)
        return outputs

    def require_end(self) -> None:
        if self._expected is not None:
            name = self._expected.call.layer.name
            raise SMPRuntimeError(
                f"The model did not call layer {name!r}, which it called when it was traced. {_SAME_FIX}"
            )

    def _receive(self, like: Any, transfers: Sequence[Transfer]) -> Any:
        """Returns a tensor of another stage; an unreadable placeholder if this stage does not need it."""
        transfer = next((t for t in transfers if t.target == self._step.context.stage), None)
        if transfer is None:
            name = f"output_of_{like.op.name.replace('/', '_')}_which_is_on_another_stage"
            return tf.compat.v1.placeholder(like.dtype, like.shape, name)
        anchors = self._step.anchors if like.dtype.is_floating else []
        return self._step.receive(anchors, like, self._step.forward_key(self.number, transfer.number), transfer)


def _step_and_label(operation: Any) -> tuple[StepGraph, str]:
    """Returns the step that is traced, and the label of a message. Raises StepUsageError outside a step."""
    step = current_step()
    if step is None:
        raise StepUsageError(
            "Gradients of a model on several stages are computed outside a step. Fix: compute them in the function "
            "under smp.step."
        )
    return step, operation.get_attr("label").decode()


@tf.RegisterGradient("SmpSend")  # type: ignore[untyped-decorator]
def _gradient_of_send(operation: Any, token: Any) -> Any:
    """Receives the gradient of a sent tensor, which its receiver sends back."""
    step, label = _step_and_label(operation)
    return step.receive_gradient(label, token, operation.inputs[0])


@tf.RegisterGradient("SmpReceive")  # type: ignore[untyped-decorator]
def _gradient_of_receive(operation: Any, gradient: Any) -> list[Any]:
    """Sends nothing without a gradient or anchors, or for a tensor that is not float. Anchors only cause this call."""
    if gradient is not None and operation.outputs[0].dtype.is_floating and operation.inputs:
        step, label = _step_and_label(operation)
        step.send_gradient(label, gradient)
    return [None] * len(operation.inputs)
