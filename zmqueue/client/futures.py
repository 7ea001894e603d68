"""What `send` and `send_many` return, cheap enough for millions a second.

A batch ends as a whole, so its end is one object, a `Delivery`; the future of a record is a pair of a delivery and an
index into it, and metadata is made when somebody looks. Locks and events exist only for deliveries that somebody waits
for. Waiting for a delivery ends its lingering: nothing is gained by letting a waiting caller wait longer.

Callbacks run in the producer's IO thread, or at once in the caller's when the delivery has ended already.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from msgspec import Struct

from zmqueue.client.network import log
from zmqueue.errors import RequestTimedOut, ZmqueueError
from zmqueue.model import RecordMetadata

# One lock for all: it is held for a few instructions, once per batch and once per waiting thread.
_lock = threading.Lock()


class Delivery:
    """The end of one batch. `hurry` makes its producer send it without further linger."""

    __slots__ = (
        "_callbacks",
        "_event",
        "base_offset",
        "base_timestamp",
        "deltas",
        "done",
        "error",
        "hurry",
        "leader_epoch",
        "partition",
        "replicas",
        "topic",
    )

    def __init__(self, topic: str, partition: int, base_timestamp: int, hurry: Callable[[], None] | None) -> None:
        self.topic, self.partition = topic, partition
        self.base_timestamp = base_timestamp
        self.deltas: list[int] | None = None
        self.hurry = hurry
        self.done = False
        self.error: ZmqueueError | None = None
        self.base_offset = -1
        self.leader_epoch = -1
        self.replicas = 0
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def finish(self, error: ZmqueueError | None) -> None:
        """Called once, after the results were filled in."""
        with _lock:
            self.error, self.done, self.hurry = error, True, None
            event, callbacks = self._event, self._callbacks
            self._callbacks = None
        if event is not None:
            event.set()
        for callback in callbacks or ():
            _run(callback)

    def wait(self, timeout_s: float | None) -> bool:
        if self.done:
            return True
        hurry = self.hurry
        if hurry is not None:
            hurry()
        event = self._ending()
        return event is None or event.wait(timeout_s)

    def _ending(self) -> threading.Event | None:
        """What is set at the end; None if that has come."""
        with _lock:
            if self.done:
                return None
            if self._event is None:
                self._event = threading.Event()
            return self._event

    def when_done(self, callback: Callable[[], None]) -> None:
        with _lock:
            if not self.done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        _run(callback)

    def metadata(self, index: int) -> RecordMetadata:
        offset = self.base_offset + index if self.base_offset >= 0 else -1
        timestamp = self.base_timestamp + (self.deltas[index] if self.deltas is not None else 0)
        return RecordMetadata(self.topic, self.partition, offset, timestamp, self.leader_epoch, self.replicas)


def _run(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        log.exception("a callback of a delivery failed")


class RecordFuture(Struct, gc=False, eq=False):
    """The fate of one record. Collected by reference count alone: a delivery never refers to its futures."""

    delivery: Delivery
    index: int

    def get(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record was written. Raises what prevented it, or RequestTimedOut after `timeout` seconds."""
        delivery = self.delivery
        if not delivery.done and not delivery.wait(timeout):
            raise RequestTimedOut(f"no acknowledgement within {timeout} s; the record is still under way")
        if delivery.error is not None:
            raise delivery.error.with_traceback(None)
        return delivery.metadata(self.index)

    def done(self) -> bool:
        return self.delivery.done

    @property
    def is_done(self) -> bool:
        return self.delivery.done

    def succeeded(self) -> bool:
        return self.delivery.done and self.delivery.error is None

    def failed(self) -> bool:
        return self.delivery.error is not None

    @property
    def exception(self) -> ZmqueueError | None:
        return self.delivery.error

    @property
    def value(self) -> RecordMetadata | None:
        """Where the record was written, once that is so."""
        return self.delivery.metadata(self.index) if self.succeeded() else None

    def retriable(self) -> bool:
        return self.delivery.error is not None and self.delivery.error.retriable

    def add_callback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RecordFuture:
        """Call `function(*args, metadata, **kwargs)` when the record is acknowledged."""
        delivery, index = self.delivery, self.index

        def call() -> None:
            if delivery.error is None:
                function(*args, delivery.metadata(index), **kwargs)

        delivery.when_done(call)
        return self

    def add_errback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RecordFuture:
        """Call `function(*args, error, **kwargs)` when the record has failed."""
        delivery = self.delivery

        def call() -> None:
            if delivery.error is not None:
                function(*args, delivery.error, **kwargs)

        delivery.when_done(call)
        return self

    def add_both(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RecordFuture:
        return self.add_callback(function, *args, **kwargs).add_errback(function, *args, **kwargs)


class Part(Struct, frozen=True, gc=False):
    """A run of records of one `send_many` call within one batch."""

    delivery: Delivery
    start: int  # its first record's index in the batch
    count: int
    positions: Sequence[int]  # where its records stood in the call


class Written(Struct, frozen=True, gc=False):
    """A run of records as it was written: offsets base_offset to base_offset + count, exclusive."""

    topic: str
    partition: int
    base_offset: int
    count: int


class BulkMetadata(Sequence[RecordMetadata]):
    """Like a list of RecordMetadata in the order of the call; `runs` has the same without an object per record."""

    def __init__(self, parts: list[Part], count: int) -> None:
        self._parts = parts
        self._count = count
        self._ends: list[int] | None = None
        self._places: list[tuple[Part, int]] | None = None

    @property
    def runs(self) -> list[Written]:
        written = []
        for part in self._parts:
            delivery = part.delivery
            base = delivery.base_offset + part.start if delivery.base_offset >= 0 else -1
            written.append(Written(delivery.topic, delivery.partition, base, part.count))
        return written

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> RecordMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[RecordMetadata]: ...
    def __getitem__(self, index: int | slice) -> RecordMetadata | list[RecordMetadata]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._count))]
        at = index + self._count if index < 0 else index
        if not 0 <= at < self._count:
            raise IndexError(index)
        part, inside = self._place(at)
        return part.delivery.metadata(part.start + inside)

    def _place(self, at: int) -> tuple[Part, int]:
        if all(isinstance(part.positions, range) for part in self._parts):
            if self._ends is None:
                self._ends = [part.positions[-1] + 1 for part in self._parts]
            part = self._parts[bisect_right(self._ends, at)]
            return part, at - part.positions[0]
        if self._places is None:
            places: list[Any] = [None] * self._count
            for part in self._parts:
                for inside, position in enumerate(part.positions):
                    places[position] = (part, inside)
            self._places = places
        return self._places[at]

    def __iter__(self) -> Iterator[RecordMetadata]:
        return (self[at] for at in range(self._count))


class BulkFuture:
    """The fate of all records of one `send_many` call."""

    __slots__ = ("_count", "parts")

    def __init__(self, parts: list[Part], count: int) -> None:
        self.parts, self._count = parts, count

    def get(self, timeout: float | None = None) -> BulkMetadata:
        """Raises the first error there was; others of the records may have been written."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self.parts:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not part.delivery.wait(remaining):
                raise RequestTimedOut(f"not everything was acknowledged within {timeout} s; it is still under way")
        error = self.exception
        if error is not None:
            raise error.with_traceback(None)
        return BulkMetadata(self.parts, self._count)

    def __len__(self) -> int:
        return self._count

    def done(self) -> bool:
        return all(part.delivery.done for part in self.parts)

    @property
    def is_done(self) -> bool:
        return self.done()

    def succeeded(self) -> bool:
        return self.done() and self.exception is None

    def failed(self) -> bool:
        return self.exception is not None

    @property
    def exception(self) -> ZmqueueError | None:
        return next((part.delivery.error for part in self.parts if part.delivery.error is not None), None)

    @property
    def value(self) -> BulkMetadata | None:
        return BulkMetadata(self.parts, self._count) if self.succeeded() else None

    def retriable(self) -> bool:
        error = self.exception
        return error is not None and error.retriable

    def add_callback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> BulkFuture:
        """Call `function(*args, metadata, **kwargs)` when all of the records are acknowledged."""
        return self.add_done_callback(
            lambda ended: function(*args, ended.value, **kwargs) if ended.succeeded() else None
        )

    def add_errback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> BulkFuture:
        """Call `function(*args, error, **kwargs)`, with the first error, when all have ended and some have failed."""
        return self.add_done_callback(
            lambda ended: function(*args, ended.exception, **kwargs) if ended.failed() else None
        )

    def add_both(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> BulkFuture:
        return self.add_callback(function, *args, **kwargs).add_errback(function, *args, **kwargs)

    def add_done_callback(self, function: Callable[[BulkFuture], Any]) -> BulkFuture:
        """Call `function(self)` when everything has ended, well or not."""
        left = [len(self.parts)]
        guard = threading.Lock()

        def one_less() -> None:
            with guard:
                left[0] -= 1
                last = left[0] == 0
            if last:
                function(self)

        if not self.parts:
            function(self)
        for part in self.parts:
            part.delivery.when_done(one_less)
        return self
