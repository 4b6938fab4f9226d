"""What a rank does in a step: it calls what other stages have, and serves what they call here.

The step's body runs on the first stage, a thread for each microbatch in flight; the other stages serve until it says
that the step has ended. Threads take turns (see `backend.slot`): one computes, the others wait for answers. A failure
anywhere ends the step on all stages, with the traceback of where it happened.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from smdistributed.core.handshake import HandshakeError
from smdistributed.core.mail import Mail, Waiter
from smdistributed.modelparallel.backend import schedule
from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.limits import TIMEOUT_FIX
from smdistributed.modelparallel.backend.schedule import Schedule, Turn
from smdistributed.modelparallel.backend.slot import Job, Slot, Workers
from smdistributed.modelparallel.torch import devices
from smdistributed.modelparallel.torch.calls import Arrived, RemoteCall
from smdistributed.modelparallel.torch.messages import Kind, Message, send
from smdistributed.modelparallel.torch.observation import Observer
from smdistributed.modelparallel.torch.packing import pack, unpack
from smdistributed.modelparallel.torch.work import Generators, Modes, Work, current, draw_seed, mix, working_on

_DONE = Message(Kind.FINISHED, -1, -1, -1, None, None, ())
_REASON_SECONDS = 1.0
_TELL_SECONDS = 5.0
Hop = tuple[int, tuple[str, ...]]
"""A stage, and the modules, by name, that it calls one after the other."""


class _Reply(Waiter):
    """What a thread waits for. Without a turn it keeps the one that it has."""

    __slots__ = ("message", "turn")

    def __init__(self, turn: Turn | None) -> None:
        super().__init__()
        self.turn = turn
        self.message: Message | None = None


class _Idle(Waiter):
    """The thread of the script, which waits for an event, or for work to do meanwhile."""

    __slots__ = ("do",)

    def __init__(self, receives: bool) -> None:
        super().__init__(receives)
        self.do: Callable[[], None] | None = None


class _Step:
    """What belongs to one step."""

    def __init__(self, number: int, slot: Slot, in_order: bool) -> None:
        self.number, self.slot, self.in_order = number, slot, in_order
        self.generators = Generators()
        self.replies: dict[int, _Reply] = {}
        self.arrived: dict[int, dict[Any, Arrived]] = defaultdict(dict)
        self.at_backward: list[_Reply] = []
        self.forwards = 0
        """How many forwards all backwards wait for."""
        self.counted: set[int] = set()
        self.had_backward = False


class Stage:
    """This rank's place in the pipeline.

    ranks: the ranks of the job that hold the stages, in order. `module` gives a module by its name. seconds: how long
    this stage waits for others of which it hears nothing.
    """

    def __init__(
        self, mail: Mail, ranks: Sequence[int], rank: int, module: Callable[[str], Any], seconds: float
    ) -> None:
        self._mail, self.ranks, self._module, self._seconds = mail, tuple(ranks), module, seconds
        self.index = self.ranks.index(rank)
        self._workers = Workers(devices.use)
        self._calls = itertools.count()
        self._lock = threading.Lock()
        self._held: list[Message] = []
        self._events: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._step: _Step | None = None
        self.steps = 0
        self._failure: BaseException | None = None
        self._told = False
        self._telling = threading.Lock()
        self._failed = threading.Event()
        self._gone: set[int] = set()
        self._idle: _Idle | None = None
        self._tellers: list[threading.Thread] = []
        self._beats: list[threading.Thread] = []
        self._observer = Observer(f"stage {self.index} (rank {rank})", seconds, self._wait_no_longer, self._beat)

    # --- the step, on the thread of the script

    def begin(self, config: Config) -> None:
        """Enter the next step."""
        self._raise_failure()
        devices.note()
        simple, microbatches = config.pipeline == "simple", config.microbatches
        window = microbatches if simple else config.active_microbatches - self.index
        slot = Slot(Schedule(window, config.deterministic_server))
        with self._lock:
            self.steps += 1
            self._step = _Step(self.steps, slot, config.deterministic_server)
            held, self._held = self._held, []
        self._step.forwards = microbatches if simple else 0
        self._observer.step_begins(self.steps)
        for message in held:
            self._handle(message)

    def run(self, body: Callable[[int], Any], microbatches: int) -> list[Any]:
        """Run the body for every microbatch; what it returned for each. On the first stage."""
        results: list[Any] = [None] * microbatches
        modes = Modes.now()

        def one(microbatch: int) -> None:
            with modes.set():
                results[microbatch] = body(microbatch)
            self._finish(microbatch)
            self._put_event(_DONE)

        works = [
            Work(i, schedule.Kind.FORWARD, self.seed_of(i)) for i in range(microbatches)
        ]  # before one sets another
        for microbatch in range(microbatches):
            self._submit(works[microbatch], functools.partial(one, microbatch))
        for _ in range(microbatches):
            self._next_event()
        return results

    def seed_of(self, microbatch: int) -> int:
        """Of the random numbers of the function's run for this microbatch, in the step that runs or ran last."""
        return mix(torch.initial_seed(), self.steps, microbatch)

    def serve(self, on_partition: Callable[[Any], None]) -> tuple[bytes, list[torch.Tensor]]:
        """Serve until the first stage ends the step; what it packed to say with that."""
        while True:
            message = self._next_event()
            if message.kind is Kind.END:
                body, self._in_step().had_backward = message.about
                return body, [tensor for tensor in message.all_here() if tensor is not None]
            on_partition(message.about)
            self._send(message.source, Kind.ANSWER, message.step, call=message.call)

    def partition(self, about: object) -> None:
        """Tell the other stages how the model is cut, and wait until all have it. On the first stage, with the slot."""
        step = self._in_step()
        calls = {rank: next(self._calls) for rank in self.ranks[1:]}
        replies = [step.replies.setdefault(call, _Reply(None)) for call in calls.values()]
        for rank, call in calls.items():
            self._send(rank, Kind.PARTITION, step.number, call=call, about=about)
        work = _working()
        self._observer.turn_ends(work)  # from now on it waits, no longer than the limit
        for reply in replies:
            self._mail.wait(reply)
        self._raise_failure()
        self._observer.turn_begins(work)

    def end(self, packed: tuple[bytes, list[torch.Tensor]]) -> None:
        """Tell the other stages that the step has ended, with its results. On the first stage."""
        for rank in self.ranks[1:]:
            about = (packed[0], self._in_step().had_backward)
            self._send(rank, Kind.END, self._in_step().number, about=about, tensors=packed[1])

    def leave(self) -> bool:
        """Leave the step: what is served later waits for the next. Whether a backward ran in it.

        After a failure, wait until the other stages have been told of it, as this process may end next; for a stage
        that takes no messages, no longer than `_TELL_SECONDS`.
        """
        with self._lock:
            step, self._step = self._step, None
        if step:
            step.generators.take_back()
        self._observer.step_ends()
        deadline = time.monotonic() + _TELL_SECONDS
        for teller in self._tellers:
            teller.join(max(0, deadline - time.monotonic()))
        return step is not None and step.had_backward

    # --- calls, on the threads of works

    def call(self, route: Sequence[Hop], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call modules that other stages have, one stage after the other; what the last gives.

        The inputs go to the first stage of the route, and from each stage to the next, without coming back between.
        """
        work, step = _working(), self._in_step()
        body, tensors = pack((args, kwargs))
        call, ranks = (self.index, next(self._calls)), [self.ranks[stage] for stage, _ in route]
        answer: list[bytes] = []
        modes = Modes.now()

        def ask(inputs: Sequence[torch.Tensor]) -> Sequence[tuple[torch.Tensor, bool]]:
            about = (0, tuple(route), modes, draw_seed(), body)
            reply = self._expect(call[1], work)
            self._observer.waits(call[1], lambda: _told(work, route, self.ranks, "forward"))
            self._send(ranks[0], Kind.FORWARD, step.number, work.microbatch, call, about, inputs)
            message = self._wait(reply)
            self._observer.waits_no_more(call[1])
            answer.append(message.about)
            return message.for_autograd()

        def send_back(gradients: Sequence[torch.Tensor | None]) -> None:
            work.is_backward = True  # on a GPU this is autograd's thread, which works on nothing itself
            replies.append(self._expect(call[1], work, is_backward=True))
            self._observer.waits(call[1], lambda: _told(work, route[::-1], self.ranks, "backward"))
            about = (len(route) - 1, tuple(route))
            self._send(ranks[-1], Kind.BACKWARD, step.number, work.microbatch, call, about, gradients)

        def ask_back() -> Sequence[torch.Tensor | None]:
            gradients = self._wait(replies.pop()).all_here()
            self._observer.waits_no_more(call[1])
            return gradients

        replies: list[_Reply] = []
        outputs = RemoteCall(ask, send_back, ask_back).run(tensors)
        return unpack(answer[0], outputs)

    def boundary(self, kind: schedule.Kind) -> None:
        """Called where a part of the model begins: let work go first that another stage waits for.

        Who was only to go on after an answer, and comes to something to compute here, asks for a turn to do so.
        """
        work, step = current(), self._step
        if work is None or step is None:
            return
        if work.kind is not kind:
            work.kind = kind
            self._exchange(step, work, Turn(kind, work.microbatch))
        elif step.slot.urgent:
            self._exchange(step, work, Turn(schedule.Kind.INTERRUPTED, work.microbatch))

    def before_backward(self) -> None:
        """Called before the first backward of a microbatch: the simple pipeline waits for all forwards."""
        step, work = self._in_step(), _working()
        work.is_backward = step.had_backward = True
        if not step.forwards or work.microbatch in step.counted:
            return
        reply = _Reply(Turn(schedule.Kind.BACKWARD, work.microbatch))
        work.kind = schedule.Kind.BACKWARD
        self._at_backward(step, work.microbatch, reply)
        self._sleep(step, work, reply)

    # --- what comes, on receiving threads

    def deliver(self, message: Message) -> None:
        """Take a message of another stage."""
        try:
            self._observer.hears()
            if message.kind is Kind.WORKING:
                return
            if message.kind is Kind.FAILED:
                self._told = True  # the others as well
                self._fail(SMPRuntimeError(f"{self._who(message.source)} failed:\n{message.about}"))
                return
            with self._lock:
                if self._step is None or message.step != self._step.number:
                    self._held.append(message)
                    return
            self._handle(message)
        except BaseException as error:  # a receiving thread has no caller
            self.fail(error)

    def lost(self, source: int) -> None:
        """A stage's connection has ended: it exits, or died."""
        self._gone.add(source)
        if source in self.ranks:
            self._fail(self._is_gone(source))

    def _is_gone(self, rank: int) -> SMPRuntimeError:
        return SMPRuntimeError(f"{self._who(rank)} is gone: its own error says why.")

    def fail(self, error: BaseException) -> None:
        """End the step on all stages because of this, and every later one. Waits for nobody.

        That a stage is gone is told too, by those in a step: others may know nothing of it, and wait for one of these.
        """
        try:
            with self._telling:  # before any thread of this process learns of it, and ends it; see `leave`
                is_told, self._told = self._told, True
                if not is_told:
                    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                    self._tellers = self._tell_all(Kind.FAILED, text)
        finally:
            self._fail(error)

    def _tell_all(self, kind: Kind, about: object = None) -> list[threading.Thread]:
        """Tell each other stage, on a thread of its own: one whose socket is full must not keep it from the others."""
        others = [rank for rank in self.ranks if rank != self.ranks[self.index] and rank not in self._gone]
        tellers = [threading.Thread(target=self._tell_one, args=(rank, kind, about), daemon=True) for rank in others]
        for teller in tellers:
            teller.start()
        return tellers

    def _tell_one(self, rank: int, kind: Kind, about: object) -> None:
        with suppress(OSError):  # gone as well
            send(self._mail, rank, kind, self.steps, about=about)

    def _beat(self) -> None:
        """Let the other stages hear of this one, which computes for long."""
        if not any(beat.is_alive() for beat in self._beats):
            self._beats = self._tell_all(Kind.WORKING)

    def _wait_no_longer(self, what: str) -> None:
        """The other stages have been silent for too long."""
        who = f"{self._who(self.ranks[self.index])} has heard of no other stage for {self._seconds:g} s"
        self.fail(SMPRuntimeError(f"{who}, in step {self.steps}: {what}. {TIMEOUT_FIX}"))

    def _handle(self, message: Message) -> None:
        step = self._in_step()
        if message.kind is Kind.FORWARD:
            work = Work(message.microbatch, schedule.Kind.FORWARD, message.about[3])
            self._submit(work, lambda: self._serve_forward(step, message))
        elif message.kind is Kind.BACKWARD:
            work = Work(message.microbatch, schedule.Kind.BACKWARD, mix(step.number, message.microbatch))
            self._submit(work, lambda: self._serve_backward(step, message))
        elif message.kind is Kind.ANSWER:
            reply = step.replies.pop(message.call)
            reply.message = message
            self._resume(step, reply)
        elif message.kind is Kind.FINISHED:
            step.arrived.pop(message.microbatch, None)
            self._dispatch(step.slot.finish(message.microbatch))
        else:
            self._put_event(message)

    def _serve_forward(self, step: _Step, message: Message) -> None:
        hop, route, modes, seed, body = message.about
        came = message.for_autograd()
        arrived = Arrived(len(came))
        with modes.set():
            args, kwargs = unpack(body, arrived.tensors(came))
            value = self._module(route[hop][1][0])(*args, **kwargs)
            for name in route[hop][1][1:]:
                value = self._module(name)(value)
        is_last = hop == len(route) - 1
        answer, arrived.outputs = pack(value if is_last else ((value,), {}))
        if any(tensor.requires_grad for tensor in arrived.outputs):
            step.arrived[message.microbatch][message.call, hop] = arrived
        origin, call = message.call
        about: Any = answer if is_last else (hop + 1, route, modes, mix(seed), answer)
        if is_last:
            self._tell(self.ranks[origin], (Kind.ANSWER, call), message, about, arrived.outputs)
        else:
            self._tell(self.ranks[route[hop + 1][0]], (Kind.FORWARD, message.call), message, about, arrived.outputs)

    def _serve_backward(self, step: _Step, message: Message) -> None:
        hop, route = message.about
        unfinished = step.arrived[message.microbatch]
        arrived = unfinished.pop((message.call, hop), None)
        given = message.all_here()
        if arrived is None:
            raise SMPRuntimeError(
                f"Backward ran twice through {', '.join(route[hop][1])}: a graph that spans stages can be used once. "
                "Add the losses, and call model.backward once for each microbatch."
            )
        gradients = arrived.backward(given)
        origin, call = message.call
        if hop:
            self._tell(
                self.ranks[route[hop - 1][0]], (Kind.BACKWARD, message.call), message, (hop - 1, route), gradients
            )
        else:
            self._tell(self.ranks[origin], (Kind.ANSWER, call), message, None, gradients)
        if not unfinished:
            self._dispatch(step.slot.finish(message.microbatch))

    def _tell(
        self,
        to: int,
        what: tuple[Kind, Any],
        message: Message,
        about: Any,
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        """Send on what a message led to."""
        self._send(to, what[0], message.step, message.microbatch, what[1], about, tensors)

    def _send(self, to: int, *args: Any, **kwargs: Any) -> None:
        """`messages.send`. Where that stage is gone, raises why: it may have said so, and that be on its way."""
        try:
            send(self._mail, to, *args, **kwargs)
        except (HandshakeError, TimeoutError) as error:
            raise SMPRuntimeError(f"{self._who(to)} cannot be reached: {error}") from error
        except OSError as error:
            self._gone.add(to)
            self._failed.wait(_REASON_SECONDS)
            self._raise_failure()
            raise self._is_gone(to) from error

    # --- turns

    def _submit(self, work: Work, job: Callable[[], None]) -> None:
        step = self._in_step()

        def do() -> None:
            try:
                with working_on(work):
                    self._raise_failure()
                    self._take_turn(step, work)
                    job()
                    self._observer.turn_ends(work)
            except BaseException as error:  # a worker has no caller
                self.fail(error)

        self._dispatch(step.slot.add(Job(Turn(work.kind, work.microbatch), do=do)))

    def _dispatch(self, job: Job | None) -> None:
        """See to a job whose turn has come: wake who goes on, or the script's thread, or a worker, for new work."""
        if job is None:
            return
        if job.waiter is not None:
            self._mail.wake(job.waiter)
            return
        assert job.do is not None
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is None:
            self._workers.run(functools.partial(self._work, job.do))
        else:
            idle.do = job.do
            self._mail.wake(idle)

    def _work(self, do: Callable[[], None] | None) -> None:
        """Do this, and then what has its turn next, on this thread, as long as that is new work."""
        step = self._step
        while do is not None and step is not None:
            do()
            job = step.slot.release()
            do = job.do if job else None
            if do is None:
                self._dispatch(job)

    def _expect(self, call: int, work: Work, is_backward: bool = False) -> _Reply:
        step = self._in_step()
        kind = schedule.Kind.BACKWARD if is_backward and step.in_order else schedule.Kind.GO_ON
        reply = step.replies[call] = _Reply(Turn(kind, work.microbatch))
        return reply

    def _wait(self, reply: _Reply) -> Message:
        """Give up the turn until the answer is there."""
        work = _working()
        self._sleep(self._in_step(), work, reply)
        work.kind = schedule.Kind.GO_ON
        assert reply.message is not None
        return reply.message

    def _resume(self, step: _Step, reply: _Reply) -> None:
        if reply.turn is None:
            self._mail.wake(reply)
        else:
            self._dispatch(step.slot.add(Job(reply.turn, waiter=reply)))

    def _exchange(self, step: _Step, work: Work, turn: Turn) -> None:
        """Give up the turn for another one."""
        waiter = Waiter()
        self._observer.turn_ends(work)
        job = step.slot.exchange(Job(turn, waiter=waiter))
        if job is None or job.waiter is not waiter:
            self._dispatch(job)
            self._mail.wait(waiter)
        self._raise_failure()
        self._take_turn(step, work)

    def _take_turn(self, step: _Step, work: Work) -> None:
        step.generators.hand_to(work)
        self._observer.turn_begins(work)

    def _sleep(self, step: _Step, work: Work, reply: _Reply) -> None:
        self._observer.turn_ends(work)
        self._dispatch(step.slot.release())
        if self._failure is None:
            self._mail.wait(reply)
        self._raise_failure()
        self._take_turn(step, work)

    def _finish(self, microbatch: int) -> None:
        """A microbatch has ended on the first stage: nobody needs anything of it any more."""
        step = self._in_step()
        for rank in self.ranks[1:]:
            self._send(rank, Kind.FINISHED, step.number, microbatch)
        if step.forwards and microbatch not in step.counted:
            self._at_backward(step, microbatch)
        self._dispatch(step.slot.finish(microbatch))

    def _at_backward(self, step: _Step, microbatch: int, *replies: _Reply) -> None:
        """One more forward has ended: with its reply it waits for the others, without it needs no backward."""
        with self._lock:
            step.forwards -= 1
            step.counted.add(microbatch)
            step.at_backward.extend(replies)
            waiting = () if step.forwards else tuple(step.at_backward)
        for reply in waiting:
            self._resume(step, reply)

    # --- failure

    def _next_event(self) -> Message:
        """What comes next for the thread of the script. Events are in order: what came before a failure counts."""
        while self._events.empty():
            self._be_idle()
        message = self._events.get()
        if message is None:
            assert self._failure is not None
            raise self._failure
        return message

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            step = self._step
        self._failed.set()
        self._put_event(None)
        if step:
            for reply in (*step.replies.values(), *step.at_backward):
                self._mail.wake(reply)
            for job in step.slot.drain():
                self._dispatch(job)

    def _put_event(self, event: Message | None) -> None:
        self._events.put(event)
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            self._mail.wake(idle)

    def _be_idle(self) -> None:
        """Wait for an event, and do what work comes before."""
        idle = _Idle(receives=self.index > 0)  # to the first stage come answers alone, for threads that wait
        with self._lock:
            if not self._events.empty():
                return
            self._idle = idle
        self._mail.wait(idle)
        self._work(idle.do)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _in_step(self) -> _Step:
        if self._step is None:
            raise SMPRuntimeError("This is part of a step, and none runs: call it inside a function under smp.step.")
        return self._step

    def _who(self, source: int) -> str:
        return f"Stage {self.ranks.index(source)} (rank {source})" if source in self.ranks else f"Rank {source}"


def _told(work: Work, route: Sequence[Hop], ranks: Sequence[int], what: str) -> str:
    """A call as a person names it."""
    stages = ", then ".join(f"{', '.join(names)} on stage {stage} (rank {ranks[stage]})" for stage, names in route)
    return f"microbatch {work.microbatch} waits for the {what} of {stages}"


def _working() -> Work:
    """What this thread works on.

    Raises SMPRuntimeError where it works on nothing: on a GPU, backward runs in a thread of autograd's, which all
    microbatches have in common. It must not wait for another stage.
    """
    work = current()
    if work is None:
        raise SMPRuntimeError(
            "A part of the model that is on another stage is called in a thread that the step did not start. On a GPU, "
            "a checkpointed module is computed again in such a thread. Fix: checkpoint modules that are on one stage "
            "each (smp.set_activation_checkpointing of the parts), and call the model in the step's own thread."
        )
    return work
