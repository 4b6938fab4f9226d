"""Which threads of a stage compute and which wait, in a step.

Tasks run on worker threads, and on the script's own thread while it waits for events. One task computes at a time: see
`backend.schedule`. A task that waits for another stage lets others compute. A failure wakes all threads that wait.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Hashable

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.schedule import Slot, Turn, TurnKind, TurnRequest, WorkerThreads
from smdistributed.modelparallel.backend.transport import Transport, Waiter
from smdistributed.modelparallel.torch.pipeline.failures import Failures, StageObserver
from smdistributed.modelparallel.torch.pipeline.messages import StageMessage
from smdistributed.modelparallel.torch.pipeline.tasks import (
    Generators,
    StageTask,
    as_current_task,
    current_task,
    select_device,
)


class Reply(Waiter):
    """A reply that a thread waits for. `turn`: the turn that it asks for when it continues; None: it keeps its own."""

    __slots__ = ("message", "turn")

    def __init__(self, turn: Turn | None) -> None:
        super().__init__()
        self.turn = turn
        self.message: StageMessage | None = None


class _IdleScript(Waiter):
    """The script's thread: it waits for an event, or for a task to run meanwhile."""

    __slots__ = ("run",)

    def __init__(self, receives: bool) -> None:
        super().__init__(receives)
        self.run: Callable[[], None] | None = None


class RunningStep:
    """The turns of one step. `forwards`: how many must end before the first backward; 0: backwards do not wait."""

    def __init__(self, slot: Slot, in_order: bool, forwards: int) -> None:
        self.slot, self.in_order, self.forwards = slot, in_order, forwards
        self.generators = Generators()
        self.replies: dict[int, Reply] = {}
        """By the number of the call."""
        self.waiting_backwards: list[Reply] = []
        self.past_forward: set[int] = set()
        """The microbatches that have ended their forward."""


class Scheduler:
    """Runs the tasks of one stage.

    `failures` are raised in every thread that waits or begins here. `receives_events`: whether the script's thread
    receives messages while it waits. Not on the first stage: only answers arrive there, for threads that wait
    themselves.
    """

    def __init__(
        self, transport: Transport, failures: Failures, observer: StageObserver, receives_events: bool
    ) -> None:
        self._transport, self._failures, self._observer, self._receives = transport, failures, observer, receives_events
        self._workers = WorkerThreads(select_device)
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[StageMessage | None] = queue.SimpleQueue()
        self._idle: _IdleScript | None = None
        self._step: RunningStep | None = None

    @property
    def step(self) -> RunningStep:
        """The step that runs. Raises SMPRuntimeError if there is none."""
        if self._step is None:
            raise SMPRuntimeError(
                "This is part of a step, and none runs. Fix: call it inside a function under smp.step."
            )
        return self._step

    def begin_step(self, step: RunningStep) -> None:
        self._step = step

    def end_step(self) -> None:
        """Leaves the step, and restores the script's random numbers."""
        step, self._step = self._step, None
        if step:
            step.generators.take_back()

    # --- tasks

    def submit(self, task: StageTask, run: Callable[[], None]) -> None:
        """Runs a task once it is granted a turn, and does not wait for it. Its errors end the step on all stages."""
        step = self.step

        def run_in_turn() -> None:
            try:
                with as_current_task(task):
                    self._failures.raise_if_failed()
                    self._begin_turn(step, task)
                    run()
                    self._observer.turn_ends(task)
            except BaseException as error:  # a worker has no caller
                self._failures.fail(error)

        self._start(step.slot.request(TurnRequest(Turn(task.kind, task.microbatch, task.name), run=run_in_turn)))

    def finish_microbatch(self, step: RunningStep, microbatch: int) -> None:
        self._start(step.slot.finish(microbatch))

    def follow(self, key: Hashable) -> None:
        """Grants a turn, when it is its time, that another rank has granted. Raises SMPRuntimeError: see `Slot`."""
        self._start(self.step.slot.follow(key))

    def _start(self, request: TurnRequest | None) -> None:
        """Starts a granted request: wakes its thread; new work goes to the script's thread, if idle, or a worker."""
        if request is None:
            return
        if request.waiter is not None:
            self._transport.wake(request.waiter)
            return
        assert request.run is not None
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is None:
            self._workers.run(functools.partial(self._run_tasks, request.run))
        else:
            idle.run = request.run
            self._transport.wake(idle)

    def _run_tasks(self, run: Callable[[], None] | None) -> None:
        """Runs this task, and on the same thread the tasks that are granted next, as long as they are new work."""
        step = self._step
        while run is not None and step is not None:
            run()
            granted = step.slot.release()
            run = granted.run if granted else None
            if run is None:
                self._start(granted)

    def _begin_turn(self, step: RunningStep, task: StageTask) -> None:
        step.generators.hand_to(task)
        self._observer.turn_begins(task)

    # --- waiting, on the threads of tasks

    def expect_reply(self, call: int, task: StageTask, is_backward: bool = False) -> Reply:
        """Registers a reply before its request is sent. `call` is unique on this stage."""
        step = self.step
        kind = TurnKind.BACKWARD if is_backward and step.in_order else TurnKind.RESUME
        reply = step.replies[call] = Reply(Turn(kind, task.microbatch, (call, is_backward)))
        return reply

    def wait_for(self, reply: Reply) -> StageMessage:
        """Gives up the turn until the reply has arrived and a new turn is granted. Raises the pipeline's failure."""
        task = require_task()
        self._sleep(self.step, task, reply)
        task.kind = TurnKind.RESUME
        assert reply.message is not None
        return reply.message

    def wait_in_turn(self, replies: list[Reply]) -> None:
        """Waits for replies and keeps the turn. Raises the pipeline's failure."""
        task = require_task()
        self._observer.turn_ends(task)  # from now on the time limit counts
        for reply in replies:
            if self._failures.error is None:
                self._transport.wait(reply)
        self._failures.raise_if_failed()
        self._observer.turn_begins(task)

    def receive_reply(self, call: int, message: StageMessage) -> None:
        """Hands an answer to the thread that waits for it, which continues at once or when it is granted a turn."""
        step = self.step
        reply = step.replies.pop(call)
        reply.message = message
        self._resume(step, reply)

    def _resume(self, step: RunningStep, reply: Reply) -> None:
        if reply.turn is None:
            self._transport.wake(reply)
        else:
            self._start(step.slot.request(TurnRequest(reply.turn, waiter=reply)))

    def _sleep(self, step: RunningStep, task: StageTask, reply: Reply) -> None:
        """Gives up the turn; returns with a new one. Raises the pipeline's failure."""
        self._observer.turn_ends(task)
        self._start(step.slot.release())
        if self._failures.error is None:
            self._transport.wait(reply)
        self._failures.raise_if_failed()
        self._begin_turn(step, task)

    def make_way(self, kind: TurnKind) -> None:
        """Lets more urgent turns go first where a part of the model begins. Does nothing outside a step."""
        task, step = current_task(), self._step
        if task is None or step is None:
            return
        if task.kind is not kind:
            task.kind = kind
            self._exchange_turn(step, task, Turn(kind, task.microbatch, (task.name, "exchange")))
        elif step.slot.has_resumable:
            self._exchange_turn(step, task, Turn(TurnKind.INTERRUPTED, task.microbatch))

    def _exchange_turn(self, step: RunningStep, task: StageTask, turn: Turn) -> None:
        """Gives up the turn for another one, and returns when that is granted. Raises the pipeline's failure."""
        waiter = Waiter()
        self._observer.turn_ends(task)
        granted = step.slot.exchange(TurnRequest(turn, waiter=waiter))
        if granted is None or granted.waiter is not waiter:
            self._start(granted)
            self._transport.wait(waiter)
        self._failures.raise_if_failed()
        self._begin_turn(step, task)

    # --- the simple pipeline: all forwards before the first backward

    def wait_for_all_forwards(self, task: StageTask) -> None:
        """Waits if backwards must wait for all forwards, and makes `task` a backward. Raises the pipeline's failure."""
        step = self.step
        if not step.forwards or task.microbatch in step.past_forward:
            return
        reply = Reply(Turn(TurnKind.BACKWARD, task.microbatch, (task.name, "exchange")))
        task.kind = TurnKind.BACKWARD
        self._count_forward(step, task.microbatch, reply)
        self._sleep(step, task, reply)

    def count_forward(self, microbatch: int) -> None:
        """Notes that a microbatch has ended, perhaps without a backward: the others do not wait for it."""
        step = self.step
        if step.forwards and microbatch not in step.past_forward:
            self._count_forward(step, microbatch)

    def _count_forward(self, step: RunningStep, microbatch: int, *replies: Reply) -> None:
        """Counts the end of a forward. After the last one, the backwards that wait continue."""
        with self._lock:
            step.forwards -= 1
            step.past_forward.add(microbatch)
            step.waiting_backwards.extend(replies)
            ready = () if step.forwards else tuple(step.waiting_backwards)
        for reply in ready:
            self._resume(step, reply)

    # --- the script's thread

    def add_event(self, event: StageMessage | None) -> None:
        """Hands an event to the script's thread, and wakes it if it is idle. None: the pipeline has failed."""
        self._events.put(event)
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            self._transport.wake(idle)

    def next_event(self) -> StageMessage:
        """Runs tasks meanwhile. Returns events that came before the pipeline's failure, then raises that."""
        while self._events.empty():
            self._run_while_idle()
        message = self._events.get()
        if message is None:
            assert self._failures.error is not None
            raise self._failures.error
        return message

    def _run_while_idle(self) -> None:
        """Returns at once if there is an event. After a task, it also runs new tasks that are granted next."""
        idle = _IdleScript(self._receives)
        with self._lock:
            if not self._events.empty():
                return
            self._idle = idle
        self._transport.wait(idle)
        self._run_tasks(idle.run)

    def wake_all(self) -> None:
        """Wakes every thread that waits here, to see that the pipeline has failed."""
        self.add_event(None)
        step = self._step
        if step:
            for reply in (*step.replies.values(), *step.waiting_backwards):
                self._transport.wake(reply)
            for request in step.slot.drain():
                self._start(request)


def require_task() -> StageTask:
    """Raises SMPRuntimeError in a thread without one: on a GPU, backward's thread, which must not wait for a stage."""
    task = current_task()
    if task is None:
        raise SMPRuntimeError(
            "A part of the model that is on another stage is called in a thread that the step did not start. On a GPU, "
            "a checkpointed module is computed again in such a thread. Fix: checkpoint modules that are on one stage "
            "each (smp.set_activation_checkpointing of the parts), and call the model in the step's own thread."
        )
    return task
