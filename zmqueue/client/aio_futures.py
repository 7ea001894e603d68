"""What an AsyncProducer's `send` and `send_many` return, and how a loop waits for the ends of deliveries.

Awaiting a delivery ends the lingering of its batch, but not before the loop has run everything that was ready: a
thousand tasks that send and wait share batches, and one alone does not wait for others that never come. Each waiter has
a future of its own, so a cancelled one takes nothing from the others, and can wait again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterable
from typing import Any

from msgspec import Struct

from zmqueue.client.aio_gate import Gate
from zmqueue.client.futures import BulkFuture, BulkMetadata, Delivery, RecordFuture
from zmqueue.errors import ClientClosed, IllegalState, ZmqueueError
from zmqueue.model import RecordMetadata


class Endings:
    def __init__(self, gate: Gate, producer: object) -> None:
        """Whoever waits keeps the producer, and with it the thread that ends deliveries."""
        self.waiting: dict[Delivery, dict[asyncio.Future[None], None]] = {}
        self._gate, self._producer = gate, producer
        self._hurried: list[Delivery] = []

    def ended(self, delivery: Delivery) -> Generator[Any, None, None]:
        """Wait for the end of a delivery, which this ends the lingering of."""
        loop = self._gate.enter()
        waiter = loop.create_future()
        waiters = self.waiting.get(delivery)
        if waiters is None:
            waiters = self.waiting[delivery] = {}
            if not self._hurried:
                loop.call_soon(self._hurry)
            self._hurried.append(delivery)
            delivery.when_done(lambda: self._gate.tell(lambda: self._release(delivery)))
        waiters[waiter] = None
        try:
            yield from waiter
        finally:
            waiters.pop(waiter, None)

    def _hurry(self) -> None:
        """Behind everything that was ready to run when the first of them was awaited."""
        hurried, self._hurried = self._hurried, []
        for delivery in hurried:
            hurry = delivery.hurry
            if hurry is not None:
                # A producer that was closed ends its deliveries itself.
                with contextlib.suppress(ClientClosed):
                    hurry()

    def _release(self, delivery: Delivery) -> None:
        let_go(self.waiting.pop(delivery, ()))

    async def wait(self, delivery: Delivery) -> None:
        await _Ended(self, delivery)


class _Ended(Struct, frozen=True, gc=False):
    endings: Endings
    delivery: Delivery

    def __await__(self) -> Generator[Any, None, None]:
        return self.endings.ended(self.delivery)


class AsyncRecordFuture(Struct, gc=False, eq=False):
    """The fate of one record, to be awaited as often as one likes, in the producer's loop."""

    endings: Endings
    record: RecordFuture

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        """Where the record was written. Raises what prevented it."""
        delivery = self.record.delivery
        if not delivery.done:
            yield from self.endings.ended(delivery)
        return self.record.get(0)

    def done(self) -> bool:
        return self.record.delivery.done

    def result(self) -> RecordMetadata:
        """Like awaiting it, for one that is done."""
        _check_done(self.done())
        return self.record.get(0)

    def exception(self) -> ZmqueueError | None:
        """What prevented the record from being written; None if it was, or if it is still under way."""
        return self.record.exception


class AsyncBulkFuture(Struct, eq=False):
    """The fate of all records of one `send_many` call."""

    endings: Endings
    bulk: BulkFuture

    def __await__(self) -> Generator[Any, None, BulkMetadata]:
        """Raises the first error there was; others of the records may have been written."""
        for part in self.bulk.parts:
            if not part.delivery.done:
                yield from self.endings.ended(part.delivery)
        return self.bulk.get(0)

    def __len__(self) -> int:
        return len(self.bulk)

    def done(self) -> bool:
        return self.bulk.done()

    def result(self) -> BulkMetadata:
        _check_done(self.done())
        return self.bulk.get(0)

    def exception(self) -> ZmqueueError | None:
        return self.bulk.exception


def let_go(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _check_done(done: bool) -> None:
    if not done:
        raise IllegalState("it is still under way: await it")
