"""A blocking client used from an event loop: one thread of its own, which does one call at a time.

All but `Worker._serve` and `call_in_loop` happens in the loop's thread, so it needs no locks. A call travels

    WAITING    queued; it can be taken back, and then nothing has happened
    RUNNING    in the thread
    ENDED      the loop knows the result; the task that asked for it has not run since
    LEFT       that task has the result, or the result was undone

and the next one starts when it has LEFT, not when it has ENDED. That is what makes cancellation safe: a task can be
cancelled after its result is there and before it runs. Until the task has run, the client stands where the call left
it, so the result can be undone (records given back) before anybody, a commit above all, has seen a state in which they
count as handed out. While nothing is on its way (`idle`), the loop's thread may touch the client itself.

Polls wait, so they make room: a call that comes while one is RUNNING interrupts it, goes first, and the poll goes on
after it, unless its time is over. Polls do not interrupt each other; they are served in their order.

A rebalance listener runs in the loop, while the thread is in the middle of a poll and waits for it (`call_in_loop`). It
will want to commit, so the thread serves calls meanwhile, whoever made them; polls wait.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from zmqueue.client.aio_gate import Gate
from zmqueue.errors import ClientClosed, IllegalState, WakeupError


class Stage(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()
    LEFT = auto()


class Job:
    """A call, and the future of its result. A poll is called with the seconds it may take; others take no argument."""

    __slots__ = ("abandoned", "call", "deadline", "future", "polls", "stage", "timer", "undo")

    def __init__(
        self, future: asyncio.Future[Any], call: Callable[..., Any], deadline: float | None, undo: Callable[[Any], None]
    ) -> None:
        self.future, self.call, self.undo = future, call, undo
        self.deadline = deadline
        self.polls = deadline is not None
        self.stage = Stage.WAITING
        self.abandoned = False
        self.timer: asyncio.TimerHandle | None = None


class Listening:
    """A listener's run in the loop, for which the thread waits."""

    __slots__ = ("ended", "error", "task")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended = False  # known to the thread


def _keep(_: Any) -> None:
    """Nothing has to be undone."""


class Worker:
    def __init__(self, gate: Gate, name: str, interrupt: Callable[[], None]) -> None:
        """`interrupt` makes a poll that waits in the thread, or the next one, raise WakeupError."""
        self._gate = gate
        self._interrupt = interrupt
        self._calls: deque[Job] = deque()
        self._polls: deque[Job] = deque()
        self._last: Job | None = None
        # What the thread is in, the innermost last: nothing when it is idle, more than one only while a listener runs.
        self.stack: list[Job | Listening] = []
        self._inbox: queue.SimpleQueue[Job | Listening | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(None,), name=f"zmqueue-{name}-worker", daemon=True)
        self._refused = False

    # -- the loop's thread -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self.stack

    def call(self, call: Callable[[], Any]) -> Job:
        """Whoever gets the job awaits `result`."""
        job = Job(self._future(), call, None, _keep)
        self._calls.append(job)
        if self.stack and isinstance(top := self.stack[-1], Job) and top.polls and top.stage is Stage.RUNNING:
            self._interrupt()
        self._next()
        return job

    def poll(self, call: Callable[[float], Any], timeout_s: float, undo: Callable[[Any], None] = _keep) -> Job:
        """As `call`, with the result None when the time is over. `undo` runs in the thread, on a result not taken."""
        loop = self._gate.enter()
        if self._in_listener():
            raise IllegalState("a rebalance listener cannot poll: records come when it has returned")
        job = Job(self._future(), call, loop.time() + timeout_s, undo)
        self._polls.append(job)
        self._next()
        if job.stage is Stage.WAITING:
            self._set_timer(job)
        return job

    async def result(self, job: Job, take: Callable[[Any], Any] | None = None) -> Any:
        """Wait for it; `take` makes of it what the task gets, while the client still stands where the call left it."""
        try:
            result = await job.future
            return result if take is None else take(result)
        except asyncio.CancelledError:
            # Also of one that is there, but that the task will never see.
            job.abandoned = True
            raise
        finally:
            self._leave(job)

    def close(self, call: Callable[[], Any]) -> Job:
        """The last call, when a listener that runs has returned. What waits fails; the thread ends after it."""
        if self._in_listener():
            raise IllegalState("a rebalance listener cannot close its consumer: return from it first")
        self._refused = True
        for waiting in [*self._calls, *self._polls]:
            self._drop(waiting)
            if not waiting.future.done():
                waiting.future.set_exception(ClientClosed())

        def call_and_end() -> Any:
            try:
                return call()
            finally:
                self.stop()

        self._last = job = Job(self._gate.enter().create_future(), call_and_end, None, _keep)
        if self.stack:
            self._interrupt()
        self._next()
        return job

    def stop(self) -> None:
        """Any thread: end the thread, when it has nothing to do."""
        self._inbox.put(None)

    def _leave(self, job: Job) -> None:
        """The task that wanted the result has it, or will never have it."""
        match job.stage:
            case Stage.WAITING:
                self._drop(job)
            case Stage.RUNNING:
                self._interrupt()
            case Stage.ENDED if job.abandoned and job.undo is not _keep and job.future.exception() is None:
                self._undo(job, job.future.result())
            case Stage.ENDED:
                self._free(job)

    def _future(self) -> asyncio.Future[Any]:
        loop = self._gate.enter()
        # What a listener does about partitions that closing takes away is part of closing.
        if self._refused and not self._in_listener():
            raise ClientClosed
        return loop.create_future()

    def _in_listener(self) -> bool:
        task = asyncio.current_task()
        return any(isinstance(each, Listening) and each.task is task for each in self.stack)

    def _next(self) -> None:
        if self.stack and not isinstance(self.stack[-1], Listening):
            return
        if self._calls:
            job = self._calls.popleft()
        elif self.stack:
            return
        elif self._last is not None:
            job, self._last = self._last, None
        elif self._polls:
            job = self._polls.popleft()
        else:
            return
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        job.stage = Stage.RUNNING
        self.stack.append(job)
        if self._thread.ident is None:
            self._thread.start()
        self._inbox.put(job)

    def _drop(self, job: Job) -> None:
        job.stage = Stage.LEFT
        (self._polls if job.polls else self._calls).remove(job)
        if job.timer is not None:
            job.timer.cancel()

    def _set_timer(self, job: Job) -> None:
        assert job.deadline is not None
        if job.deadline != float("inf"):
            job.timer = self._gate.enter().call_at(job.deadline, self._expire, job)

    def _expire(self, job: Job) -> None:
        if job.stage is Stage.WAITING:
            self._drop(job)
            if not job.future.done():
                job.future.set_result(None)

    def _on_end(self, job: Job, result: Any, error: BaseException | None) -> None:
        job.stage = Stage.ENDED
        unwanted = job.abandoned or job.future.done()
        if isinstance(error, WakeupError) and not unwanted and not self._refused:
            self._again(job)
        elif unwanted and error is None and job.undo is not _keep:
            self._undo(job, result)
        elif unwanted:
            self._free(job)
        elif isinstance(error, WakeupError):
            job.future.set_exception(ClientClosed())
        elif error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _again(self, job: Job) -> None:
        """A poll that made room keeps its turn among the polls."""
        self.stack.remove(job)
        job.stage = Stage.WAITING
        self._polls.appendleft(job)
        self._next()
        if job.stage is Stage.WAITING:
            self._set_timer(job)

    def _undo(self, job: Job, result: Any) -> None:
        """In place of the job, so that nothing comes between."""
        undoing = Job(self._gate.enter().create_future(), partial(job.undo, result), None, _keep)
        undoing.stage, undoing.abandoned = Stage.RUNNING, True
        job.stage = Stage.LEFT
        self.stack[self.stack.index(job)] = undoing
        self._inbox.put(undoing)

    def _free(self, job: Job) -> None:
        job.stage = Stage.LEFT
        self.stack.remove(job)
        self._next()

    # -- listeners ---------------------------------------------------------------------------------------------------

    def call_in_loop(self, function: Callable[..., Any], *arguments: Any) -> None:
        """In the thread, within a job: run a function, plain or async, in the loop, and wait for its end."""
        listening = Listening()
        self._gate.tell(partial(self._listen, listening, function, arguments))
        self._serve(listening)
        if listening.error is not None:
            raise listening.error

    def _listen(self, listening: Listening, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        async def run() -> None:
            result = function(*arguments)
            if inspect.isawaitable(result):
                await result

        self.stack.append(listening)
        listening.task = self._gate.enter().create_task(run())
        listening.task.add_done_callback(partial(self._listened, listening))
        self._next()

    def _listened(self, listening: Listening, task: asyncio.Task[None]) -> None:
        listening.error = IllegalState("the listener was cancelled") if task.cancelled() else task.exception()
        self.stack.remove(listening)
        self._inbox.put(listening)

    # -- the worker's thread -------------------------------------------------------------------------------------------

    def _serve(self, until: Listening | None) -> None:
        while until is None or not until.ended:
            job = self._inbox.get()
            if isinstance(job, Listening):
                # Not always the innermost: what a call within one listener sets off may outlast that listener.
                job.ended = True
            elif job is not None:
                self._do(job)
            elif until is None:
                return
            else:
                # The end, while a listener was waited for: the outer one has to see it as well.
                self._inbox.put(None)
                raise ClientClosed
            # Or the last job would be kept, with all it refers to, until there is another.
            del job

    def _do(self, job: Job) -> None:
        result, error = None, None
        try:
            result = self._answer(job)
        except BaseException as raised:
            error = raised
        self._gate.tell(partial(self._on_end, job, result, error))

    def _answer(self, job: Job) -> Any:
        while True:
            try:
                if job.deadline is None:
                    return job.call()
                assert self._gate.loop is not None
                return job.call(max(0.0, job.deadline - self._gate.loop.time()))
            except WakeupError:
                # One that came too late for the poll it was meant for must not end a call.
                if job.polls or job.abandoned:
                    raise
