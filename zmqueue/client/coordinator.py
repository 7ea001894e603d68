"""Where a group's coordinator is, and what is asked of it. In the IO thread, but for `call`.

Any broker is asked for it (FIND_COORDINATOR), another one each time. The answer is believed until the coordinator says
otherwise, is silent for too long, or its connection is lost; then it is asked for again, after a pause that grows. As
with the router, whoever cannot go on is told when to look again: `listeners` are called when a coordinator is in reach.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from zmqueue.client.network import Answer, Callback, Request
from zmqueue.client.routing import BACKOFF_S, BACKOFF_S_MAX, Router, jittered
from zmqueue.errors import ClientClosed, CoordinatorNotAvailable, ZmqueueError
from zmqueue.model import NO_BROKER
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import FindCoordinatorRequest

FIND_TIMEOUT_S = 2.0
# A coordinator that no connection can be made to for so long is asked for again.
CONNECT_S = 1.0
ATTEMPT_S = 5.0
STEP_S = 0.5


class Coordinator:
    def __init__(self, router: Router, group: str) -> None:
        self.broker: int | None = None
        self.listeners: list[Callable[[], None]] = []
        self.moves = 0
        self._router = router
        self._network = router.network
        self._group = group
        self._wanted = False
        self._searching = False
        self._failures = 0
        self._connecting_since: float | None = None
        router.listeners.append(self._on_world)

    # -- IO thread ---------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request would leave at once. If not, listeners hear when it would."""
        if self.broker is not None and self._router.ready(self.broker):
            self._wanted, self._connecting_since = False, None
            return True
        self._wanted = True
        if self.broker is None:
            self._search()
        elif self._connecting_since is None:
            self._connecting_since = time.monotonic()
            if self.broker not in self._router.metadata.brokers:
                self._router.refresh()
            self._network.call_later(CONNECT_S, partial(self._give_up, self.broker, self._connecting_since))
        return False

    def send(self, operation: Operation, message: Struct, timeout_s: float, callback: Callback) -> Request:
        """To a coordinator that is `ready`. Its callback finds a coordinator that failed forgotten already."""
        assert self.broker is not None
        return self._router.send(
            self.broker, operation, message, None, timeout_s, partial(self._on_answer, self.broker, callback)
        )

    def _on_answer(self, broker: int, callback: Callback, result: Answer | ZmqueueError) -> None:
        if isinstance(result, Answer):
            # It is one: when it moves, the first search for another need not wait.
            self._failures = 0
        elif result.refresh_metadata and broker == self.broker:
            self._forget()
        callback(result)

    def _forget(self) -> None:
        self.broker, self._connecting_since = None, None
        self.moves += 1
        self._notify()

    def _give_up(self, broker: int, since: float) -> None:
        if self.broker == broker and self._connecting_since == since:
            self._forget()

    def _search(self) -> None:
        if self._searching:
            return
        self._searching = True
        pause = jittered(BACKOFF_S, self._failures - 1, BACKOFF_S_MAX) if self._failures else 0.0
        self._network.call_later(pause, self._ask)

    def _ask(self) -> None:
        self._network.request(
            self._router.any_address(),
            Operation.FIND_COORDINATOR,
            FindCoordinatorRequest(self._group),
            None,
            FIND_TIMEOUT_S,
            self._on_found,
        )

    def _on_found(self, result: Answer | ZmqueueError) -> None:
        self._searching = False
        if isinstance(result, ClientClosed):
            return
        self._failures += 1
        if isinstance(result, Answer) and result.message.broker != NO_BROKER:
            self.broker = result.message.broker
        if self._wanted and self.ready():
            self._notify()

    def _on_world(self) -> None:
        if self._wanted and self.ready():
            self._notify()

    def _notify(self) -> None:
        for listener in list(self.listeners):
            listener()

    # -- any other thread --------------------------------------------------------------------------------------

    def call(self, operation: Operation, message: Struct, timeout_s: float) -> Answer:
        """A question that may be asked twice: repeated until it is answered, or the time is over."""
        self._network.check()
        ask = Ask(self, self._network.call_later, operation, message, time.monotonic() + timeout_s)
        self._network.post(ask.start)
        # It ends by itself in time; the steps let a client that was closed meanwhile be noticed.
        while not ask.done.wait(STEP_S) and time.monotonic() < ask.deadline + STEP_S:
            self._network.check()
        if not isinstance(ask.result, Answer):
            raise ask.result
        return ask.result


class Ask:
    """One question, until its deadline. Ends with `then`, if given, and with `done`."""

    def __init__(
        self,
        coordinator: Coordinator,
        call_later: Callable[[float, Callable[[], None]], object],
        operation: Operation,
        message: Struct,
        deadline: float,
        then: Callable[[Answer | ZmqueueError], None] | None = None,
    ) -> None:
        self.done = threading.Event()
        self.result: Answer | ZmqueueError = CoordinatorNotAvailable("the group's coordinator was not found in time")
        self._coordinator, self._call_later = coordinator, call_later
        self._operation, self._message, self._then = operation, message, then
        self.deadline = deadline
        self._failures = 0
        self._under_way = False

    def start(self) -> None:
        self._coordinator.listeners.append(self._pump)
        self._call_later(max(0.0, self.deadline - time.monotonic()), self._expire)
        self._pump()

    def _pump(self) -> None:
        if not self._under_way and not self.done.is_set() and self._coordinator.ready():
            self._under_way = True
            timeout_s = min(ATTEMPT_S, max(0.05, self.deadline - time.monotonic()))
            self._coordinator.send(self._operation, self._message, timeout_s, self._on_answer)

    def _on_answer(self, result: Answer | ZmqueueError) -> None:
        if self.done.is_set():
            return
        self.result = result
        if isinstance(result, Answer) or not result.retriable:
            self._end()
        else:
            # While it waits it counts as under way: that the world has changed is no reason to hurry.
            self._call_later(jittered(BACKOFF_S, self._failures, BACKOFF_S_MAX), self._again)
            self._failures += 1

    def _again(self) -> None:
        self._under_way = False
        self._pump()

    def _expire(self) -> None:
        if not self.done.is_set():
            self._end()

    def _end(self) -> None:
        self._coordinator.listeners.remove(self._pump)
        self.done.set()
        if self._then is not None:
            self._then(self.result)
