"""Where a group's coordinator is, and what is asked of it. In the IO thread, but for `call`.

Any broker is asked for it (FIND_COORDINATOR), another one each time. The answer is believed until the coordinator says
otherwise or its connection is lost; then it is asked for again, after a pause that grows. When an answer is overdue
another broker is asked who coordinates by now, and if it names another, what waits at the former one fails at once. As
with the router, whoever cannot go on is told when to look again: `listeners` are called when a coordinator is in reach.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from zmqueue.client.network import Answer, Callback, Request, Timer
from zmqueue.client.routing import BACKOFF_S, BACKOFF_S_MAX, STUCK_S, Router, jittered
from zmqueue.errors import ClientClosed, CoordinatorNotAvailable, NotCoordinator, ZmqueueError
from zmqueue.model import NO_BROKER
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import FindCoordinatorRequest

FIND_TIMEOUT_S = 2.0
# A coordinator that no connection can be made to for so long is asked for again.
CONNECT_S = 1.0
ATTEMPT_S = 5.0
STEP_S = 0.5


class _Sent(Struct):
    broker: int
    request: Request
    callback: Callback
    probe: Timer


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
        self._sent: dict[int, _Sent] = {}
        self._numbers = itertools.count()
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

    def send(
        self, operation: Operation, message: Struct, timeout_s: float, callback: Callback, *, wait_s: float = 0.0
    ) -> Callable[[], object]:
        """To a coordinator that is `ready`. What is returned calls it off. `wait_s`: for how long it may think.

        When the callback runs, a coordinator that failed is forgotten already.
        """
        assert self.broker is not None
        number = next(self._numbers)
        request = self._router.send(self.broker, operation, message, None, timeout_s, partial(self._on_answer, number))
        probe = self._network.call_later(wait_s + STUCK_S, partial(self._on_stuck, number))
        self._sent[number] = _Sent(self.broker, request, callback, probe)
        return partial(self._call_off, number)

    def _call_off(self, number: int) -> _Sent | None:
        sent = self._sent.pop(number, None)
        if sent is not None:
            sent.probe.cancel()
            self._network.cancel(sent.request)
        return sent

    def _on_answer(self, number: int, result: Answer | ZmqueueError) -> None:
        sent = self._sent.pop(number)
        sent.probe.cancel()
        if isinstance(result, Answer):
            # It is one: when it moves, the first search for another need not wait.
            self._failures = 0
        elif result.refresh_metadata and sent.broker == self.broker:
            self._forget()
        sent.callback(result)

    def _on_stuck(self, number: int) -> None:
        sent = self._sent[number]
        sent.probe = self._network.call_later(STUCK_S, partial(self._on_stuck, number))
        if sent.broker == self.broker:
            self._search(avoid=sent.broker)

    def _forget(self) -> None:
        self.broker, self._connecting_since = None, None
        self.moves += 1
        self._notify()

    def _give_up(self, broker: int, since: float) -> None:
        if self.broker == broker and self._connecting_since == since:
            self._forget()

    def _search(self, avoid: int = NO_BROKER) -> None:
        if self._searching:
            return
        self._searching = True
        pause = jittered(BACKOFF_S, self._failures - 1, BACKOFF_S_MAX) if self._failures else 0.0
        self._network.call_later(pause, partial(self._ask, avoid))

    def _ask(self, avoid: int) -> None:
        message = FindCoordinatorRequest(self._group)
        address = self._router.any_address(avoid)
        self._network.request(address, Operation.FIND_COORDINATOR, message, None, FIND_TIMEOUT_S, self._on_found)

    def _on_found(self, result: Answer | ZmqueueError) -> None:
        self._searching = False
        if isinstance(result, ClientClosed):
            return
        self._failures += 1
        if isinstance(result, Answer) and result.message.broker not in (NO_BROKER, self.broker):
            self._move(result.message.broker)
        if self._wanted and self.ready():
            self._notify()

    def _move(self, broker: int) -> None:
        if self.broker is not None:
            self.moves += 1
        self.broker, self._connecting_since, self._wanted = broker, None, True
        for number in [number for number, sent in self._sent.items() if sent.broker != broker]:
            sent = self._call_off(number)
            if sent is not None:
                sent.callback(NotCoordinator("another broker coordinates the group by now"))

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
