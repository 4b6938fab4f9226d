"""The graph of a step as this stage has it: its own layers, and messages in place of those of others.

Every rank traces the whole function. A call of a layer of another stage becomes the messages that bring what this stage
needs of it; the gradient of a message is a message back. What `call()` computes outside of layers is computed wherever
it is needed. The loss is computed by all from the model's outputs, and its gradient counts on the stage that has
computed these.

Messages have no order by themselves, and TensorFlow would take them as it likes: at the end the stages tell each other
what they do, and each puts its own in the order of the pipeline (backend.pipeline).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError, SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.backend.pipeline import order
from smdistributed.modelparallel.tensorflow.flow import Flow, Unit
from smdistributed.modelparallel.tensorflow.layers import Whole, observed, run, tensors_of, with_tensors
from smdistributed.modelparallel.tensorflow.messages import NEW_RUN
from smdistributed.modelparallel.tensorflow.program import Entry, Key, Transfer, in_order, missing
from smdistributed.modelparallel.tensorflow.trace import elsewhere

_LOSSES = 1 << 20  # a model has fewer transfers


class Mark(NamedTuple):
    """An operation that has a place in the order. kind: as in `backend.pipeline.Event`. transfer: None for "begin"."""

    key: Key
    kind: str
    operation: Any
    transfer: Transfer | None


class Place(NamedTuple):
    """Where this stage is. ranks: of all stages, by their numbers in the job. gather: everybody's object, of all
    stages, called by all of them. follow: what a call of the model does. names: of messages that are awaited. anchor: a
    variable that may be trained. seed: one number for all stages. order: gives an operation that runs after the former
    one that it gave, also those of other graphs that one function calls. active, simple: as in
    `backend.pipeline.order`."""

    stage: int
    ranks: Sequence[int]
    gather: Callable[[Any], list[Any]]
    follow: Callable[[Any, tuple[Any, ...], dict[str, Any]], Flow]
    names: dict[str, str]
    anchor: Any
    seed: int
    order: Callable[[], Any]
    active: int
    simple: bool


class StepGraph:
    """The graph of one step, while it is traced. number: of traced steps of this job, which all stages count alike."""

    def __init__(self, place: Place, number: int) -> None:
        self.place, self._number = place, number
        self.graph = tf.compat.v1.get_default_graph()
        self._marks: list[Mark] = []
        self._transfers: dict[Key, Transfer] = {}
        self._microbatch = self._calls = 0
        self._passes: dict[tuple[int, int], int] = {}
        self._outputs: set[Any] = set()
        self._flows: dict[int, Flow] = {}
        self._variables: list[Any] = []
        self._shared_losses = 0
        if self.graph.seed is None:  # what is drawn outside of layers is the same on all stages
            self.graph.seed = place.seed

    @property
    def anchors(self) -> list[Any]:
        """Values on which what is received hangs, so that whoever asks for their gradients asks for its: variables of
        this stage, and one that `optimizers` adds to those that a script names."""
        return [variable.read_value() for variable in (self.place.anchor, *self._variables)]

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """What is traced in this context is of that microbatch."""
        global _current
        if _current is not None:
            raise StepUsageError("A function under smp.step is called inside a step: steps cannot be nested.")
        self._microbatch, self._calls, self._shared_losses = number, 0, 0
        self._outputs.clear()
        _current = self
        try:
            yield
        finally:
            _current = None

    # --- a call of the model

    def call_model(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs, on every stage."""
        self.require_own_graph(f"The model {model.name!r}")
        call, self._calls = self._calls, self._calls + 1
        flow = self._flows.get(call) or self.place.follow(model, args, kwargs)
        self._flows[call] = flow
        if len(self.place.ranks) == 1:
            with observed(Whole()):
                return run(model, args, kwargs)
        self._variables = model.trainable_variables
        given = tensors_of((args, kwargs))
        self._refuse_own_output(given)
        if given:
            args, kwargs = with_tensors((args, kwargs), self._begun(Key(self._microbatch, call, 0, -1), given))
        part = _Part(self, flow, call)
        with observed(part):
            outputs = run(model, args, kwargs)
        part.require_end()
        tensors = self._shared(tensors_of(outputs), flow, part)
        self._outputs.update(tensor.op for tensor in tensors if tensor.dtype.is_floating)
        return with_tensors(outputs, tensors)

    def _shared(self, mine: Sequence[Any], flow: Flow, part: _Part) -> list[Any]:
        """The model's outputs, on all stages. Whoever has not computed them receives them, as constants."""
        known = tensors_of(flow.outputs)
        if len(mine) != len(known):
            raise SMPRuntimeError(f"The model gave {len(mine)} tensors, and {len(known)} when it was traced.")
        shared = []
        for tensor, like, transfers in zip(mine, known, flow.output_transfers):
            if self.place.stage == flow.output_stage:
                for transfer in transfers:
                    self.send(tensor, Key(self._microbatch, part.number, 0, transfer.number), transfer)
            else:
                transfer = next(t for t in transfers if t.target == self.place.stage)
                tensor = self.receive((), like, Key(self._microbatch, part.number, 0, transfer.number), transfer)
            shared.append(tensor)
        return self._tied(shared, part.tokens, (self._microbatch, part.number), flow.output_stage)

    def _tied(self, tensors: list[Any], tokens: list[Any], call: tuple[int, int], output_stage: int) -> list[Any]:
        """The same tensors. Their gradient begins this stage's backward pass: those of what it has sent follow."""
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def tie(*given: Any) -> Any:
            def backward(*gradients: Any) -> list[Any]:
                self._passes[call] = self._passes.get(call, 0) + 1
                passed: Sequence[Any] = [None] * len(floats)
                if self.place.stage == output_stage:
                    passed = self._begun(Key(*call, self._passes[call], 1 << 30), gradients)
                return [*passed, *(tf.ones([]) for _ in tokens)]

            return [tf.identity(tensor) for tensor in given[: len(floats)]], backward

        tied = iter(tie(*floats, *tokens) if floats else [])
        return [next(tied) if tensor.dtype.is_floating else tensor for tensor in tensors]

    def _begun(self, key: Key, tensors: Sequence[Any]) -> list[Any]:
        """The same tensors, when it is the turn of what is computed from them."""
        found: list[Any] = tf.identity_n(list(map(tf.convert_to_tensor, tensors)))
        self._mark(key, "begin", found[0].op, None)
        for tensor, given in zip(found, tensors):
            if getattr(given, "_keras_mask", None) is not None:
                tensor._keras_mask = given._keras_mask
        return found

    # --- messages

    def send(self, tensor: Any, key: Key, transfer: Transfer) -> Any:
        """Send to the stage at the other end. Gives the token."""
        token = operations.send(tensor, self.place.ranks[transfer.other(self.place.stage)], self._label(key))
        self._mark(key, "send", token.op, transfer)
        return token

    def receive(self, anchors: Sequence[Any], like: Any, key: Key, transfer: Transfer) -> Any:
        """What the stage at the other end sends: a tensor like that one."""
        source = self.place.ranks[transfer.other(self.place.stage)]
        found = operations.receive(anchors, like.dtype, source, self._label(key))
        what = f"the gradient of {transfer.what}" if key.backward else transfer.what
        self.place.names[self._label(key)] = f"{what}, microbatch {key.microbatch}"
        found.set_shape(like.shape)
        self._mark(key, "receive", found.op, transfer)
        return found

    def send_back(self, label: str, gradient: Any) -> None:
        """The gradient of what was received with that label goes to its sender."""
        key, transfer = self._returning(label)
        self.send(tf.convert_to_tensor(gradient), key, transfer)

    def receive_back(self, label: str, token: Any, like: Any) -> Any:
        """The gradient of what was sent with that label."""
        key, transfer = self._returning(label)
        return self.receive([token], like, key, transfer)

    def _returning(self, label: str) -> tuple[Key, Transfer]:
        key = _key(label)
        return key._replace(backward=self._passes[key.microbatch, key.call]), self._transfers[key]

    def _mark(self, key: Key, kind: str, operation: Any, transfer: Transfer | None) -> None:
        if operation.graph is not self.graph:
            raise SMPUnsupportedError(
                "Gradients are computed inside a loop, a branch or a tf.function of the step: compute them in the "
                "function under smp.step itself."
            )
        self._marks.append(Mark(key, kind, operation, transfer))
        if transfer is not None:
            self._transfers[key] = transfer

    def _label(self, key: Key) -> str:
        return "/".join(map(str, (self._number, *key)))

    # --- the end

    def finish(self) -> None:
        """Put what was traced in the order of the pipeline. All stages call this."""
        if len(self.place.ranks) == 1:
            return
        everybody = self._exchanged()
        for stage, entry in missing(everybody):
            everybody[stage].append(entry)
            if stage == self.place.stage:
                self._add(*entry)
        programs = list(map(in_order, everybody))
        mine = {(mark.key, mark.kind): mark.operation for mark in self._marks}
        places = order(
            [[entry.event for entry in program] for program in programs], self.place.active, self.place.simple
        )
        own = programs[self.place.stage]
        first = self.place.order()  # a step begins when the one before has ended, which has other graphs' messages
        chain = [self._new_run(first), *(mine[own[place][:2]] for place in places[self.place.stage])]
        for before, after in zip(chain, chain[1:]):
            after._add_control_input(before)
        self.place.order()._add_control_input(chain[-1])
        self._free()

    def _exchanged(self) -> list[list[Entry]]:
        """What every stage has marked."""
        mine = [Entry(mark.key, mark.kind, mark.transfer) for mark in self._marks]
        told = self.place.gather((self._number, mine))
        if len({number for number, _ in told}) > 1:
            raise SMPRuntimeError(
                f"The stages trace different steps, the {', '.join(f'{number}.' for number, _ in told)} of each: one "
                "has failed, or has batches of other shapes. All ranks of a replica must get the same batches."
            )
        return [marks for _, marks in told]

    def _new_run(self, after: Any) -> Any:
        """Messages of runs that have failed are not those of this one."""
        with tf.control_dependencies([after]):
            return operations.send(tf.zeros([]), self.place.ranks[self.place.stage], NEW_RUN).op

    def _free(self) -> None:
        """Let what has effects, and no order by a resource, have none: TensorFlow would give it that of the trace, in
        which a microbatch comes after all of the one before."""
        for operation in self.graph.get_operations():
            has_effects = operation.op_def is not None and operation.op_def.is_stateful
            if has_effects and all(given.dtype != tf.resource for given in operation.inputs):
                self.graph.experimental_acd_manager.run_independently(operation)

    def _add(self, key: Key, kind: str, transfer: Transfer | None) -> None:
        """A gradient that is nothing, as zeros, or one that nobody needs."""
        assert transfer is not None
        forward = key._replace(backward=0)
        there = next(mark.operation for mark in self._marks if mark.key == forward and mark.kind in ("send", "receive"))
        if kind == "send":
            self.send(tf.zeros_like(there.outputs[0]), key, transfer)
        else:
            self.receive((), there.inputs[0], key, transfer)

    # --- what cannot be

    def require_own_graph(self, what: str) -> None:
        """Raises SMPUnsupportedError where the default graph is another than that of the step."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise elsewhere(what)

    def _refuse_own_output(self, tensors: Sequence[Any]) -> None:
        """The gradient would have to leave the last stage through a constant of the others."""
        rest, seen = [tensor.op for tensor in tensors], set()
        while rest:
            operation = rest.pop()
            if operation in self._outputs:
                raise SMPUnsupportedError(
                    "What a model is called with comes from an earlier call, of it or another one, in the same "
                    "microbatch: make both one model's call(), or pass it through tf.stop_gradient."
                )
            if operation not in seen and operation.type != "StopGradient":
                seen.add(operation)
                rest.extend(given.op for given in operation.inputs)

    # --- losses that layers add

    def share_losses(self, mine: Sequence[Any]) -> list[Any]:
        """The losses of this stage's layers, and one of all others, a constant."""
        if len(self.place.ranks) == 1 or not self._calls:
            return list(mine)
        self.require_own_graph("losses")
        self._shared_losses += 1
        total = tf.add_n([tf.cast(loss, tf.float32) for loss in mine]) if mine else tf.zeros([])
        found = []
        count = len(self.place.ranks)
        for source in range(count):
            for target in set(range(count)) - {source}:
                number = _LOSSES + (self._shared_losses * count + source) * count + target
                transfer = Transfer(number, source, target, f"the losses of stage {source}")
                key = Key(self._microbatch, self._calls - 1, 0, number)
                if source == self.place.stage:
                    self.send(total, key, transfer)
                elif target == self.place.stage:
                    found.append(self.receive((), total, key, transfer))
        return [*mine, *found]


_current: StepGraph | None = None


def current() -> StepGraph | None:
    """The step whose function is being traced."""
    return _current


class _Part:
    """This stage's part of a call of the model."""

    def __init__(self, step: StepGraph, flow: Flow, number: int) -> None:
        self._step, self._flow, self.number = step, flow, number
        self._units = iter(flow.units)
        self._next = next(self._units, None)
        self.tokens: list[Any] = []

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._next
        if unit is None or unit.call.layer is not layer:
            if id(layer) in self._flow.cut:
                return run(layer, args, kwargs)
            raise SMPRuntimeError(
                f"The model calls layer {layer.name!r} where it called "
                f"{unit.call.layer.name if unit else 'none'!r} when it was traced: its call() must always do the same."
            )
        self._step.require_own_graph(f"Layer {layer.name!r}")
        self._next = next(self._units, None)
        if unit.stage != self._step.place.stage:
            return with_tensors(
                unit.call.outputs, [self._brought(like, ts) for like, ts in _each(unit)], unit.call.masked
            )
        with observed(Whole()):
            outputs = run(layer, args, kwargs)
        tensors = tensors_of(outputs)
        if len(tensors) != len(unit.transfers):
            raise SMPRuntimeError(
                f"Layer {layer.name!r} gave {len(tensors)} tensors, and {len(unit.transfers)} when it was traced."
            )
        for tensor, transfers in zip(tensors, unit.transfers):
            for transfer in transfers:
                token = self._step.send(tensor, self._key(transfer), transfer)
                if tensor.dtype.is_floating:
                    self.tokens.append(token)
        return outputs

    def require_end(self) -> None:
        if self._next is not None:
            name = self._next.call.layer.name
            raise SMPRuntimeError(f"The model did not call layer {name!r}, which it called when it was traced.")

    def _brought(self, like: Any, transfers: Sequence[Transfer]) -> Any:
        """A tensor of another stage: received, or where this stage does not need it, one that nobody can read."""
        transfer = next((t for t in transfers if t.target == self._step.place.stage), None)
        if transfer is None:
            name = f"output_of_{like.op.name.replace('/', '_')}_which_is_on_another_stage"
            return tf.compat.v1.placeholder(like.dtype, like.shape, name)
        anchors = self._step.anchors if like.dtype.is_floating else []
        return self._step.receive(anchors, like, self._key(transfer), transfer)

    def _key(self, transfer: Transfer) -> Key:
        return Key(self._step._microbatch, self.number, 0, transfer.number)


def _each(unit: Unit) -> Iterator[tuple[Any, Sequence[Transfer]]]:
    return zip(unit.call.tensors, unit.transfers)


def _key(label: str) -> Key:
    return Key(*map(int, label.split("/")[1:]))


def _of_step(operation: Any) -> tuple[StepGraph, str]:
    step = current()
    if step is None:
        raise StepUsageError("Gradients of a model on several stages are computed in the function under smp.step.")
    return step, operation.get_attr("label").decode()


@tf.RegisterGradient("SmpSend")  # type: ignore[untyped-decorator]
def _gradient_of_send(operation: Any, token: Any) -> Any:
    """What the receiver sends back."""
    step, label = _of_step(operation)
    return step.receive_back(label, token, operation.inputs[0])


@tf.RegisterGradient("SmpReceive")  # type: ignore[untyped-decorator]
def _gradient_of_receive(operation: Any, gradient: Any) -> list[Any]:
    """Goes back to the sender; anchors have none, they are there for this to be asked."""
    if gradient is not None and operation.outputs[0].dtype.is_floating and operation.inputs:
        step, label = _of_step(operation)
        step.send_back(label, gradient)
    return [None] * len(operation.inputs)
