"""The protocol between the stages of a pipeline: how a rank calls modules on other stages, and serves calls to its own.

The body of a step runs on the first stage, on one thread for each microbatch in flight. The other stages serve calls
until the first stage ends the step. See `scheduler` for threads and turns, and `failures` for errors.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.backend.config import TIMEOUT_FIX, Config
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.schedule import (
    FollowingSchedule,
    LeadingSchedule,
    Schedule,
    Slot,
    TurnKind,
    TurnOrder,
)
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.calls import ReceivedInputs, RemoteCall
from smdistributed.modelparallel.torch.pipeline.failures import Failures, Peers, StageObserver
from smdistributed.modelparallel.torch.pipeline.messages import MessageKind, StageMessage
from smdistributed.modelparallel.torch.pipeline.packing import pack, unpack
from smdistributed.modelparallel.torch.pipeline.scheduler import Reply, RunningStep, Scheduler, require_task
from smdistributed.modelparallel.torch.pipeline.tasks import (
    StageTask,
    ThreadModes,
    derive_seed,
    draw_seed,
    remember_device,
)

_MICROBATCH_DONE = StageMessage(MessageKind.FINISHED, -1, -1, -1, None, None, [])
Hop = tuple[int, tuple[str, ...]]
"""A stage, and the modules, by name, that a call runs there one after the other."""


class Stage:
    """This rank's stage of the pipeline. `ranks` hold the stages, in order. It waits `seconds` for other stages.

    `partners`: the ranks, with this one, that share the tensors of this stage. They compute in the first one's order.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        rank: int,
        module: Callable[[str], Any],
        seconds: float,
        partners: Sequence[int] = (),
    ) -> None:
        partners = partners if len(partners) > 1 and len(ranks) > 1 else ()
        self._peers, self._module, self._seconds = Peers(transport, ranks, rank, partners), module, seconds
        self.ranks, self.index = self._peers.ranks, self._peers.index
        self.failures = Failures(self._peers, lambda: self._scheduler.wake_all())
        self._observer = StageObserver(
            f"stage {self.index} (rank {rank})", seconds, self._fail_by_timeout, self._report_working
        )
        self._scheduler = Scheduler(transport, self.failures, self._observer, receives_events=self.index > 0)
        self._calls = itertools.count()
        self._lock = threading.Lock()
        self.steps = 0
        """How many steps this rank has entered."""
        self.common_seed: int | None = None
        """The seed of all ranks that compute the same rows; None: torch's own."""
        self._steps_before = 0
        self._is_in_step = self._had_backward = False
        self._early: list[StageMessage] = []
        self._received: dict[int, dict[Any, ReceivedInputs]] = defaultdict(dict)
        self._working_reports: list[threading.Thread] = []

    # --- the step, on the script's thread

    def begin(self, config: Config) -> None:
        """Enters the next step, and handles messages of it that came early. Raises the pipeline's failure."""
        self.failures.raise_if_failed()
        remember_device()
        simple, microbatches = config.pipeline == "simple", config.microbatches
        window = microbatches if simple else config.active_microbatches - self.index
        slot = Slot(self._make_order(window, config.deterministic_server))
        step = RunningStep(slot, config.deterministic_server, forwards=microbatches if simple else 0)
        with self._lock:
            self.steps += 1
            self._had_backward = False
            self._received = defaultdict(dict)
            self._scheduler.begin_step(step)
            self._observer.step_begins(self.steps)
            self._is_in_step = True
            early = [message for message in self._early if message.step == self.steps]
            self._early = [message for message in self._early if message.step > self.steps]
            for message in early:  # with the lock: orders of turns must not be overtaken
                self._handle(message)

    def _make_order(self, window: int, in_order: bool) -> TurnOrder:
        """The first partner decides the order of turns, and the others follow. Without partners this rank decides."""
        rank, partners, step = self.ranks[self.index], self._peers.partners, self.steps + 1
        if not partners:
            return Schedule(window, in_order)
        if rank != partners[0]:
            return FollowingSchedule()

        def announce(key: Hashable) -> None:
            for partner in partners[1:]:
                self._send(partner, MessageKind.ORDER, step, about=key)

        return LeadingSchedule(window, in_order, announce)

    def run(self, body: Callable[[int], Any], microbatches: int) -> list[Any]:
        """Calls `body` with each microbatch's number, on threads. On the first stage. Raises the pipeline's failure."""
        results: list[Any] = [None] * microbatches
        modes = ThreadModes.current()

        def run_microbatch(microbatch: int) -> None:
            with modes.apply():
                results[microbatch] = body(microbatch)
            self._finish(microbatch)
            self._scheduler.add_event(_MICROBATCH_DONE)

        # Before one sets a seed.
        tasks = [StageTask(i, TurnKind.FORWARD, self.seed_of(i), ("body", i)) for i in range(microbatches)]
        for task in tasks:
            self._scheduler.submit(task, functools.partial(run_microbatch, task.microbatch))
        for _ in range(microbatches):
            self._scheduler.next_event()
        return results

    def seed_of(self, microbatch: int) -> int:
        """The seed of a microbatch's random numbers in the step that runs, or that ran last."""
        seed = torch.initial_seed() if self.common_seed is None else self.common_seed
        return derive_seed(seed, self.all_steps, microbatch)

    @property
    def all_steps(self) -> int:
        """How many steps this rank has entered, with the ones before the checkpoint from which it resumed."""
        return self.steps + self._steps_before

    def resume(self, steps: int) -> None:
        """Continues the random numbers of a job that had entered this many steps. Between steps only."""
        self._steps_before = steps - self.steps

    def serve(self, on_partition: Callable[[Any], None]) -> tuple[bytes, list[torch.Tensor]]:
        """Serves calls until the first stage ends the step. Returns the argument of that stage's `end`.

        `on_partition` is called with the stage of every module, by name. Raises the pipeline's failure.
        """
        while True:
            message = self._scheduler.next_event()
            if message.kind is MessageKind.END:
                body, self._had_backward = message.about
                return body, [tensor for tensor in message.all_here() if tensor is not None]
            on_partition(message.about)
            self._send(message.source, MessageKind.ANSWER, message.step, call=message.call)

    def partition(self, about: object) -> None:
        """Sends each module's stage, by name, and waits until all have applied it. On the first stage, in a task."""
        calls = {rank: next(self._calls) for rank in self.ranks[1:]}
        replies = [self._scheduler.step.replies.setdefault(call, Reply(None)) for call in calls.values()]
        for rank, call in calls.items():
            self._send(rank, MessageKind.PARTITION, self.steps, call=call, about=about)
        self._scheduler.wait_in_turn(replies)

    def end(self, packed: tuple[bytes, list[torch.Tensor]]) -> None:
        """Ends the step on the other stages, and sends them its packed results. On the first stage."""
        for rank in self.ranks[1:]:
            self._send(rank, MessageKind.END, self.steps, about=(packed[0], self._had_backward), tensors=packed[1])

    def leave(self) -> bool:
        """Ends the step on this stage, and drops graphs without a backward. Returns whether a backward ran in it.

        After a failure it waits some seconds until that is sent: this process may end next.
        """
        with self._lock:
            was_in_step, self._is_in_step = self._is_in_step, False
            self._received = defaultdict(dict)  # graphs of calls without a backward
        self._scheduler.end_step()
        self._observer.step_ends()
        self.failures.wait_until_reported()
        return was_in_step and self._had_backward

    # --- calls, on the threads of tasks

    def call(self, route: Sequence[Hop], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls modules on other stages; each stage sends its output directly to the next.

        Every module but the first gets the output of the module before it. Gives up its turn and waits for the output
        of the last, which is in this thread's autograd graph. Raises the pipeline's failure.
        """
        task = require_task()
        body, tensors = pack((args, kwargs))
        call, ranks = (self.index, next(self._calls)), [self.ranks[stage] for stage, _ in route]
        answers: list[bytes] = []
        replies: list[Reply] = []
        modes = ThreadModes.current()

        def send_forward(inputs: Sequence[torch.Tensor]) -> Sequence[tuple[torch.Tensor, bool]]:
            about = (0, tuple(route), modes, draw_seed(), body)
            reply = self._scheduler.expect_reply(call[1], task)
            self._observer.call_begins(call[1], lambda: self._describe_call(task, route, "forward"))
            self._send(ranks[0], MessageKind.FORWARD, self.steps, task.microbatch, call, about, inputs)
            message = self._scheduler.wait_for(reply)
            self._observer.call_ends(call[1])
            answers.append(message.about)
            return message.for_autograd()

        def send_backward(gradients: Sequence[torch.Tensor | None]) -> None:
            task.is_backward = True  # on a GPU this is autograd's thread, which has no task itself
            replies.append(self._scheduler.expect_reply(call[1], task, is_backward=True))
            self._observer.call_begins(call[1], lambda: self._describe_call(task, route[::-1], "backward"))
            about = (len(route) - 1, tuple(route))
            self._send(ranks[-1], MessageKind.BACKWARD, self.steps, task.microbatch, call, about, gradients)

        def receive_backward() -> Sequence[torch.Tensor | None]:
            gradients = self._scheduler.wait_for(replies.pop()).all_here()
            self._observer.call_ends(call[1])
            return gradients

        outputs = RemoteCall(send_forward, send_backward, receive_backward).run(tensors)
        return unpack(answers[0], outputs)

    def _describe_call(self, task: StageTask, route: Sequence[Hop], direction: str) -> str:
        hops = (f"{', '.join(names)} on stage {stage} (rank {self.ranks[stage]})" for stage, names in route)
        return f"microbatch {task.microbatch} waits for the {direction} of {', then '.join(hops)}"

    def make_way(self, kind: TurnKind) -> None:
        """Called where a part of the model begins: lets tasks go first that another stage waits for."""
        self._scheduler.make_way(kind)

    def before_backward(self) -> None:
        """Notes that the step trains. In the simple pipeline it waits for all forwards."""
        task = require_task()
        task.is_backward = self._had_backward = True
        self._scheduler.wait_for_all_forwards(task)

    def _finish(self, microbatch: int) -> None:
        """Ends a microbatch on all stages. On the first stage. It also counts as a forward that has ended."""
        for rank in self.ranks[1:]:
            self._send(rank, MessageKind.FINISHED, self.steps, microbatch)
        self._scheduler.count_forward(microbatch)
        self._scheduler.finish_microbatch(self._scheduler.step, microbatch)

    # --- messages, on receiving threads

    def deliver(self, message: StageMessage) -> None:
        """Called on a receiving thread: an error is not raised, but fails this stage. Later steps' messages wait."""
        try:
            self._observer.message_received()
            if message.kind is MessageKind.WORKING:
                return
            if message.kind is MessageKind.FAILED:
                self.failures.fail_by_report(message.source, message.about)
                return
            with self._lock:
                if not self._is_in_step or message.step != self.steps:
                    self._early.append(message)
                    return
            self._handle(message)
        except BaseException as error:  # a receiving thread has no caller
            self.failures.fail(error)

    def _handle(self, message: StageMessage) -> None:
        """The end of a microbatch drops its inputs and frees its place in the window, so a waiting turn may begin."""
        if message.kind is MessageKind.FORWARD:
            task = StageTask(message.microbatch, TurnKind.FORWARD, message.about[3], _name_task(message))
            self._scheduler.submit(task, functools.partial(self._serve_forward, self._received, message))
        elif message.kind is MessageKind.BACKWARD:
            seed = derive_seed(self.all_steps, message.microbatch)
            task = StageTask(message.microbatch, TurnKind.BACKWARD, seed, _name_task(message))
            self._scheduler.submit(
                task, functools.partial(self._serve_backward, self._received, self._scheduler.step, message)
            )
        elif message.kind is MessageKind.ANSWER:
            self._scheduler.receive_reply(message.call, message)
        elif message.kind is MessageKind.ORDER:
            self._scheduler.follow(message.about)
        elif message.kind is MessageKind.FINISHED:
            self._received.pop(message.microbatch, None)
            self._scheduler.finish_microbatch(self._scheduler.step, message.microbatch)
        else:
            self._scheduler.add_event(message)

    def _serve_forward(self, received: dict[int, dict[Any, ReceivedInputs]], message: StageMessage) -> None:
        """Sends the output to the next hop, or to the caller. Keeps it for backward if an output requires grad."""
        hop, route, modes, seed, body = message.about
        came = message.for_autograd()
        inputs = ReceivedInputs(len(came))
        with modes.apply():
            args, kwargs = unpack(body, inputs.tensors(came))
            value = self._module(route[hop][1][0])(*args, **kwargs)
            for name in route[hop][1][1:]:
                value = self._module(name)(value)
        is_last = hop == len(route) - 1
        answer, inputs.outputs = pack(value if is_last else ((value,), {}))
        if any(tensor.requires_grad for tensor in inputs.outputs):
            received[message.microbatch][message.call, hop] = inputs
        if is_last:
            self._answer(message, answer, inputs.outputs)
        else:
            about = (hop + 1, route, modes, derive_seed(seed), answer)
            self._pass_on(route[hop + 1][0], message, about, inputs.outputs)

    def _serve_backward(
        self, received: dict[int, dict[Any, ReceivedInputs]], step: RunningStep, message: StageMessage
    ) -> None:
        """Sends the gradients to the hop before, or to the caller. Raises SMPRuntimeError if it ran before."""
        hop, route = message.about
        unfinished = received[message.microbatch]
        inputs = unfinished.pop((message.call, hop), None)
        given = message.all_here()
        if inputs is None:
            raise SMPRuntimeError(
                f"Backward ran twice through {', '.join(route[hop][1])}: a graph that spans stages can be used once. "
                "Fix: add the losses, and call model.backward once for each microbatch."
            )
        gradients = inputs.backward(given)
        if hop:
            self._pass_on(route[hop - 1][0], message, (hop - 1, route), gradients)
        else:
            self._answer(message, None, gradients)
        if not unfinished:  # the answer may have ended the step, or begun the next one
            self._scheduler.finish_microbatch(step, message.microbatch)

    def _answer(self, message: StageMessage, about: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        origin, call = message.call
        self._send(self.ranks[origin], MessageKind.ANSWER, message.step, message.microbatch, call, about, tensors)

    def _pass_on(self, stage: int, message: StageMessage, about: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        step, microbatch = message.step, message.microbatch
        self._send(self.ranks[stage], message.kind, step, microbatch, message.call, about, tensors)

    def _send(self, to: int, *args: Any, **kwargs: Any) -> None:
        """Sends a message to a stage. If that fails, raises the reason, which the other stage may have reported."""
        try:
            self._peers.send(to, *args, **kwargs)
        except OSError as error:
            reason = self.failures.explain_send_error(to, error)
            self.failures.raise_if_failed()
            raise reason from error

    # --- called by the observer's thread

    def _report_working(self) -> None:
        """Lets the other stages know that this one computes. Does nothing while an earlier message is being sent."""
        if not any(report.is_alive() for report in self._working_reports):
            self._working_reports = self._peers.notify_all(MessageKind.WORKING)

    def _fail_by_timeout(self, waits_for: str) -> None:
        stage = self._peers.describe(self.ranks[self.index])
        silence = f"{stage} has received nothing from the other stages for {self._seconds:g} s"
        self.failures.fail(SMPRuntimeError(f"{silence}, in step {self.steps}: {waits_for}. {TIMEOUT_FIX}"))


def _name_task(message: StageMessage) -> Hashable:
    """Names the task of a call: by its kind, the stage and the number of the call, and the place on its route."""
    return int(message.kind), message.call, message.about[0]
