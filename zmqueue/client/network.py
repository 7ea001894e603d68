"""One IO thread per client object, and the requests that travel through it.

The thread owns the `Transport` and everything that hangs on it: connections, requests in flight, timers. Other threads
reach it through `post` alone. Whatever is marked "IO thread" below may be called there only, and that is where every
callback runs: code above this module needs no lock for what it keeps on that side.

Invariants
- A request ends exactly once: with an answer, with an error, or silently by `cancel`. Its callback never runs inside
  `request`, so a caller has always seen the handle first.
- A request is put on the wire at most once. While a connection is not there, requests wait for it, until
  `connect_timeout_ms`; when a connection is lost, those on the wire fail at once (they may have taken effect).
- An answer that nobody waits for is dropped and counted. One that cannot be read fails its request as a `NetworkError`;
  where not even its request can be told, the connection is made anew, because some request would wait for ever.
- The poll wakes for sockets, timers and posts only. A post writes to the eventfd only if the loop may be asleep.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from zmqueue.errors import ClientClosed, ForkedClient, MessageTooLarge, NetworkError, RequestTimedOut, ZmqueueError
from zmqueue.errors import from_code as error_from_code
from zmqueue.model import MiB
from zmqueue.transport import Socket, Transport, Waker
from zmqueue.wire import frames, messages

log = logging.getLogger("zmqueue.client")

REQUEST_BYTES_MAX = 8 * MiB
CONNECT_TIMEOUT_MS = 1_000
JOIN_TIMEOUT_S = 5.0
# A full send queue is left alone for so long; libzmq has no callback for room.
RESEND_S = 0.002
_CANCELLED_MIN = 64


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Answer(NamedTuple):
    message: Any
    raw: list[bytes]


Callback = Callable[[Answer | ZmqueueError], None]


class Timer:
    """A call at a later time, which can be called off."""

    __slots__ = ("action", "network", "when")

    def __init__(self, network: Network, when: float, action: Callable[[], None]) -> None:
        self.network, self.when = network, when
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        if self.action is not None:
            self.action = None
            self.network._timer_cancelled()


class Request:
    """A request under way. `on_wire` says whether it may have taken effect."""

    __slots__ = ("answered", "callback", "connection", "correlation", "frames", "on_wire", "operation", "timer")

    def __init__(self, connection: Connection, operation: frames.Operation, callback: Callback, answered: bool) -> None:
        self.connection, self.operation, self.answered = connection, operation, answered
        self.callback: Callback | None = callback
        self.correlation = 0
        self.frames: list[bytes] = []
        self.on_wire = False
        self.timer: Timer | None = None


class Connection:
    """One DEALER socket to one address, with what waits for it and what is on its wire."""

    __slots__ = ("address", "in_flight", "linked", "network", "socket", "waiting")

    def __init__(self, network: Network, address: Address) -> None:
        self.network, self.address = network, address
        self.linked = False
        self.in_flight: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.socket: Socket | None = None


class Network:
    def __init__(
        self,
        name: str = "client",
        *,
        request_bytes_max: int = REQUEST_BYTES_MAX,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
    ) -> None:
        self.request_bytes_max = request_bytes_max
        self.connect_timeout_s = connect_timeout_ms / 1000
        self.answers_malformed = 0
        self.answers_unclaimed = 0
        self.on_link: Callable[[Address, bool], None] | None = None
        # Why this object can no longer be used here; looked at once per record, so no more than an attribute.
        self.unusable: type[ZmqueueError] | None = None
        self._forked = False
        self._transport = Transport()
        self._waker = Waker()
        self._transport.watch(self._waker.fileno(), self._waker.clear)
        self._connections: dict[Address, Connection] = {}
        self._correlations = itertools.count(1)
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_order = itertools.count()
        self._timers_cancelled = 0
        self._sleeping = False
        self._stopping = False
        self._closed = False
        # Guards the eventfd: its number may belong to another file as soon as it is closed.
        self._waker_lock = threading.Lock()
        # A daemon, so that an interpreter that exits without close never waits for it.
        self._thread = threading.Thread(target=self._run, name=f"zmqueue-{name}", daemon=True)
        self._thread.start()
        _networks.add(self)

    # -- any thread --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless the client can still be used here."""
        if self.unusable is not None:
            raise self.unusable

    def post(self, action: Callable[[], None]) -> None:
        """Run in the IO thread, soon. Dropped when the client is closed."""
        self._posted.append(action)
        # The loop announces its sleep before it looks at the queue, so one of the two sides sees the other.
        if self._sleeping:
            self._sleeping = False
            self._wake()

    def stop(self) -> None:
        """Let the thread end by itself."""
        if not self._forked:
            self._stopping = True
            self.unusable = ClientClosed
            self._wake()

    def on_forked(self) -> None:
        """In the child: its thread and its sockets are the parent's."""
        self._forked = True
        self.unusable = ForkedClient

    def close(self) -> None:
        """End the thread and close its sockets. In a forked child there is nothing to end."""
        if self._forked:
            return
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    @property
    def in_io_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # -- IO thread ---------------------------------------------------------------------------------------------

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        timer = Timer(self, time.monotonic() + delay_s, action)
        heapq.heappush(self._timers, (timer.when, next(self._timer_order), timer))
        return timer

    def connect(self, address: Address) -> None:
        """Have a connection there before it is needed."""
        self._connection(address)

    def linked(self, address: Address) -> bool:
        connection = self._connections.get(address)
        return connection is not None and connection.linked

    def request(
        self,
        address: Address,
        operation: frames.Operation,
        message: Struct,
        raw: list[bytes] | None,
        timeout_s: float,
        callback: Callback,
        *,
        answered: bool = True,
    ) -> Request:
        """Send when the connection is there. Without `answered`, being on the wire is all the success there is."""
        connection = self._connection(address)
        request = Request(connection, operation, callback, answered)
        request.correlation = next(self._correlations)
        request.frames = frames.request(operation, request.correlation, message, raw)
        size = sum(map(len, request.frames))
        if size > self.request_bytes_max:
            # libzmq would drop the connection without a word.
            error = MessageTooLarge(f"a request of {size} bytes exceeds {self.request_bytes_max}")
            self._posted.append(partial(self._finish, request, error))
            return request
        connection.waiting.append(request)
        if connection.linked or timeout_s <= self.connect_timeout_s:
            request.timer = self.call_later(timeout_s, partial(self._expire, request))
            self._flush(connection)
        else:
            action = partial(self._connect_expire, request, time.monotonic() + timeout_s)
            request.timer = self.call_later(self.connect_timeout_s, action)
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request: its answer will be dropped, its callback never called."""
        self._detach(request)
        request.callback = None

    def forget(self, address: Address) -> None:
        """Close the connection to an address that is no longer a broker's."""
        connection = self._connections.pop(address, None)
        if connection is None:
            return
        self._lose(connection, NetworkError(f"{address} is no longer a broker"), also_waiting=True)
        if connection.socket is not None:
            self._transport.close_socket(connection.socket)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._shut()

    def _turn(self) -> None:
        self._sleeping = True
        timeout_ms = 0 if self._posted or self._stopping else self._sleep_ms()
        try:
            self._transport.poll(timeout_ms)
        except Exception:
            log.exception("a handler of the client's IO thread failed")
        self._sleeping = False
        # What these add is for the next turn: a callback that posts itself must not starve the sockets.
        for _ in range(len(self._posted)):
            self._call(self._posted.popleft())
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.action is None:
                self._timers_cancelled -= 1
            else:
                action, timer.action = timer.action, None
                self._call(action)

    def _sleep_ms(self) -> int:
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
            self._timers_cancelled -= 1
        if not self._timers:
            return 60_000
        return min(60_000, max(0, math.ceil((self._timers[0][0] - time.monotonic()) * 1000)))

    def _call(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("a callback of the client's IO thread failed")

    def _timer_cancelled(self) -> None:
        """Answered requests leave their deadlines behind; the heap is rebuilt before they are the most of it."""
        self._timers_cancelled += 1
        if self._timers_cancelled > _CANCELLED_MIN and self._timers_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].action is not None]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _wake(self) -> None:
        with self._waker_lock:
            if not self._closed:
                self._waker.wake()

    def _shut(self) -> None:
        for connection in list(self._connections.values()):
            self._lose(connection, ClientClosed(), also_waiting=True)
        while self._posted:
            self._call(self._posted.popleft())
        with self._waker_lock:
            self._closed = True
            self._transport.unwatch(self._waker.fileno())
            self._waker.close()
        self._connections.clear()
        self._timers.clear()
        self._transport.close()

    # -- connections -------------------------------------------------------------------------------------------

    def _connection(self, address: Address) -> Connection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(self, address)
            self._open(connection)
        return connection

    def _open(self, connection: Connection) -> None:
        connection.socket = self._transport.dealer(
            connection.address.host,
            connection.address.port,
            partial(self._on_ready, connection),
            on_link=partial(self._on_link, connection),
        )

    def _on_link(self, connection: Connection, up: bool) -> None:
        if self._connections.get(connection.address) is not connection:
            return
        if not up:
            # Answers that arrived before the loss are answers.
            self._on_ready(connection)
            self._lose(connection, NetworkError(f"the connection to {connection.address} was lost"))
        connection.linked = up
        if self.on_link is not None:
            self._call(partial(self.on_link, connection.address, up))
        if up:
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        assert connection.socket is not None
        while connection.waiting and connection.linked:
            request = connection.waiting[0]
            try:
                sent = connection.socket.send(request.frames)
            except NetworkError as error:
                connection.waiting.popleft()
                self._posted.append(partial(self._finish, request, error))
                continue
            if not sent:
                self.call_later(RESEND_S, partial(self._flush, connection))
                return
            connection.waiting.popleft()
            request.on_wire = True
            request.frames = []
            if request.answered:
                connection.in_flight[request.correlation] = request
            else:
                self._posted.append(partial(self._finish, request, Answer(None, [])))

    def _lose(self, connection: Connection, error: ZmqueueError, *, also_waiting: bool = False) -> None:
        doomed = list(connection.in_flight.values())
        if also_waiting:
            doomed += connection.waiting
            connection.waiting.clear()
        connection.in_flight.clear()
        for request in doomed:
            self._finish(request, error)

    def _reset(self, connection: Connection) -> None:
        """Make the connection anew: its peer has sent something that is no message."""
        self._lose(connection, NetworkError(f"{connection.address} sent something that is not an answer"))
        was_linked, connection.linked = connection.linked, False
        if connection.socket is not None:
            self._transport.close_socket(connection.socket)
        if self.on_link is not None and was_linked:
            self._call(partial(self.on_link, connection.address, False))
        self._open(connection)

    # -- answers -----------------------------------------------------------------------------------------------

    def _on_ready(self, connection: Connection) -> None:
        socket = connection.socket
        while socket is not None and socket is connection.socket:
            received = socket.receive()
            if received is None:
                return
            self._on_frames(connection, received)

    def _on_frames(self, connection: Connection, received: list[bytes]) -> None:
        try:
            head = frames.parse_head(received)
        except ZmqueueError as error:
            self.answers_malformed += 1
            log.warning("%s sent something that is not an answer: %s", connection.address, error)
            self._reset(connection)
            return
        request = connection.in_flight.get(head.correlation)
        if request is None:
            self.answers_unclaimed += 1
            return
        self._finish(request, self._read(request, head, received))

    def _read(self, request: Request, head: frames.Head, received: list[bytes]) -> Answer | ZmqueueError:
        try:
            if head.operation != request.operation:
                raise NetworkError(f"an answer to {head.operation.name} for {request.operation.name}")
            message = frames.parse_response(head, received)
        except ZmqueueError as error:
            self.answers_malformed += 1
            log.warning("%s sent a malformed answer: %s", request.connection.address, error)
            return NetworkError(f"{request.connection.address} sent a malformed answer: {error}")
        if isinstance(message, messages.Failure):
            return error_from_code(message.code, message.message)
        return Answer(message, received[2:])

    def _expire(self, request: Request) -> None:
        what = f"{request.operation.name} to {request.connection.address}"
        if request.on_wire:
            self._finish(request, RequestTimedOut(f"{what} was not answered in time"))
        else:
            self._finish(request, NetworkError(f"{what}: no connection"))

    def _connect_expire(self, request: Request, deadline: float) -> None:
        if not request.on_wire:
            self._expire(request)
        else:
            request.timer = self.call_later(deadline - time.monotonic(), partial(self._expire, request))

    def _finish(self, request: Request, result: Answer | ZmqueueError) -> None:
        self._detach(request)
        callback, request.callback = request.callback, None
        if callback is not None:
            self._call(partial(callback, result))

    def _detach(self, request: Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        request.connection.in_flight.pop(request.correlation, None)
        if not request.on_wire and request in request.connection.waiting:
            request.connection.waiting.remove(request)


_networks: weakref.WeakSet[Network] = weakref.WeakSet()


def _stop_all() -> None:
    """At interpreter exit: a daemon thread killed inside libzmq could abort the process."""
    for network in list(_networks):
        network.close()


def _on_forked() -> None:
    for network in list(_networks):
        network.on_forked()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_on_forked)
