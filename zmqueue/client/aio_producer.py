"""The producer for asyncio: `Producer`, with awaiting where that one blocks.

A producer only blocks for the metadata of a topic it has not met and for room in its buffer. Both are awaited here,
before the record is handed to a `Producer` that never blocks; handing it over is then a few microseconds in the loop's
thread, without a hop to another one. Batches end in the IO thread, which tells the loop once for all that ended since
the loop last looked (aio_gate.py).

Cancellation
- A record is taken in one step that nothing can interrupt, after all waiting. A cancelled `send` has not taken it; a
  cancelled `send_many` has taken what comes first in it, up to some place.
- What is awaited for a delivery is the waiter's own: cancelling it, or a timeout round it, leaves the delivery alone.
  It can be awaited again, and `flush` waits for it all the same.
- A cancelled `flush` or `close` stops waiting. `close` ends the producer even so; what is unsettled then fails.

Waiting tasks get room in the order in which they came. One step may go beyond `buffer_memory`, by a record or by a
slice of `send_many`, because only a record that was serialised has a size, and it is serialised once. A task that sends
on and on without ever having to wait lets the loop run every `_SENDS_PER_TURN` records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

from zmqueue.client.aio_futures import AsyncBulkFuture, AsyncRecordFuture, Endings, let_go
from zmqueue.client.aio_gate import Gate
from zmqueue.client.arrow import as_rows
from zmqueue.client.columns import Header
from zmqueue.client.futures import BulkFuture, Part
from zmqueue.client.metadata import TopicView
from zmqueue.client.producer import Producer
from zmqueue.client.routing import Router
from zmqueue.client.serializers import Serializer
from zmqueue.errors import (
    BufferFull,
    ClientClosed,
    ConfigError,
    InvalidRecord,
    NoBrokersAvailable,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from zmqueue.model import MiB, RecordMetadata, check_topic_name

# send_many goes to the buffer in slices, between which the loop runs: of about so many bytes, and within these counts.
_SLICE_BYTES = MiB // 2
_SLICE_MIN, _SLICE_MAX = 64, 4096
_RECORD_BYTES_GUESSED = 1024
_SENDS_PER_TURN = 1000

_running_loop, _current_task = asyncio.get_running_loop, asyncio.current_task


class _Inner(Producer):
    """A producer whose caller has waited already."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, max_block_ms=0)
        self._buffer.blocks = False
        self.router = self._router
        self.check = self._network.check
        self.post = self._network.post
        self.begin_flush, self.end_flush = self._buffer.begin_flush, self._buffer.end_flush
        self.await_room = self._buffer.await_room

    def _find_view(self, name: str, timeout_s: float | None = None) -> TopicView:
        """Topics were waited for before a record came here, but for those that an interceptor sends it to."""
        view = self._router.metadata.topics.get(name)
        if view is None:
            raise UnknownTopicOrPartition(f"no topic {name!r} is known here (partitions_for waits until one is)")
        return view

    def rows(self, values: Any, keys: Any, headers: Any, timestamps_ms: Any) -> Any:
        """Columns of any kind as ones that can be cut."""
        conversion = self._conversion
        text_as_bytes = conversion.text_as_bytes if conversion is not None else (True, True)
        return as_rows(values, keys, headers, timestamps_ms, text_as_bytes)

    def can_take(self, topic: str) -> bool:
        """Whether a record for this topic would be taken without any waiting."""
        buffer = self._buffer
        return topic in self._topics and buffer.used < buffer.memory_max

    def knows(self, topic: str) -> bool:
        return topic in self._topics

    @property
    def has_room(self) -> bool:
        return self._buffer.has_room

    @property
    def memory(self) -> int:
        return self._buffer.used


class _TopicWatch:
    """Topics that tasks wait for. Its listener runs in the IO thread and asks on until all of them are there."""

    def __init__(self, router: Router, gate: Gate) -> None:
        self._router, self._gate = router, gate
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        router.listeners.append(self.look)

    async def wait(self, topic: str) -> None:
        waiter = self._gate.enter().create_future()
        self._waiters.setdefault(topic, {})[waiter] = None
        try:
            self._router.watch([topic])
            self._router.network.post(self.look)
            await waiter
        finally:
            waiters = self._waiters[topic]
            del waiters[waiter]
            if not waiters:
                del self._waiters[topic]

    def look(self) -> None:
        topics = list(self._waiters)
        if any(topic in self._router.metadata.topics for topic in topics):
            self._gate.tell(self._release)
        if any(topic not in self._router.metadata.topics for topic in topics):
            self._router.refresh()

    def _release(self) -> None:
        for topic, waiters in self._waiters.items():
            if topic in self._router.metadata.topics:
                let_go(waiters)

    def let_all_go(self) -> None:
        for waiters in self._waiters.values():
            let_go(waiters)


class AsyncProducer:
    """Takes the options of `Producer`. To be made anywhere, and used in one event loop."""

    def __init__(self, *, max_block_ms: int = 60_000, **settings: Any) -> None:
        if max_block_ms < 0:
            raise ConfigError(f"max_block_ms: {max_block_ms!r} is below 0")
        self._max_block_s = max_block_ms / 1000
        self._gate = Gate("AsyncProducer")
        self._inner = _Inner(**settings)
        self._topics = _TopicWatch(self._inner.router, self._gate)
        self._endings = Endings(self._gate, self._inner)
        serializers = (settings.get("key_serializer"), settings.get("value_serializer"))
        self._unprepared = [
            each.store for each in serializers if isinstance(each, Serializer) and hasattr(each, "store")
        ]
        self._preparing: asyncio.Future[Any] | None = None
        self._room_turn = asyncio.Lock()
        self._room_waiter: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[Any] | None = None  # who sent last, and how often without letting others run
        self._sends = 0
        self._closed = False
        self._closing: asyncio.Future[None]

    async def start(self) -> AsyncProducer:
        """Make this the producer's loop. Whatever is called first does the same."""
        self._gate.enter()
        return self

    # -- sending -------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> AsyncRecordFuture:
        """Take the record; what is returned can be awaited for its delivery.

        Waits only for a topic not met yet and for room, up to max_block_ms. Cancelled while waiting, it takes nothing.
        """
        if not self._can_go(topic):
            await self._until_it_can_go(topic)
        return AsyncRecordFuture(self._endings, self._inner.send(topic, value, key, headers, partition, timestamp_ms))

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Send, and wait for the delivery. Cancelled while it waits for that, the record stays under way."""
        if not self._can_go(topic):
            await self._until_it_can_go(topic)
        return await AsyncRecordFuture(
            self._endings, self._inner.send(topic, value, key, headers, partition, timestamp_ms)
        )

    async def send_many(
        self,
        topic: str,
        values: Sequence[Any],
        keys: Sequence[Any] | None = None,
        headers: Sequence[Sequence[Header] | None] | None = None,
        timestamps_ms: Sequence[int] | int | None = None,
        partition: int | None = None,
    ) -> AsyncBulkFuture:
        """All of these records, in their order within each partition, with one future and no object per record.

        The loop runs between slices. An error, or a cancellation, leaves the slices before it on their way.
        """
        values, keys, headers, timestamps_ms = self._inner.rows(values, keys, headers, timestamps_ms)
        count = len(values)
        for column in (keys, headers, timestamps_ms):
            if column is not None and not isinstance(column, int) and len(column) != count:
                raise InvalidRecord(f"send_many: columns of {count} and {len(column)} entries")
        parts: list[Part] = []
        at, size = 0, _first_slice(values)
        while True:
            if not self._can_go(topic):
                await self._until_it_can_go(topic)
            end = min(count, at + size)
            before = self._inner.memory
            bulk = self._inner.send_many(
                topic,
                _cut(values, at, end),
                _cut(keys, at, end),
                _cut(headers, at, end),
                timestamps_ms if isinstance(timestamps_ms, int) else _cut(timestamps_ms, at, end),
                partition,
            )
            parts += (_moved(part, at) for part in bulk.parts) if at else bulk.parts
            record_bytes = max(1, self._inner.memory - before) // max(1, end - at) + 1
            size = max(_SLICE_MIN, min(_SLICE_MAX, _SLICE_BYTES // record_bytes))
            at = end
            if at >= count:
                return AsyncBulkFuture(self._endings, BulkFuture(parts, count))
            await asyncio.sleep(0)

    # -- what is waited for before a record is taken ----------------------------------------------------------------

    def _can_go(self, topic: str) -> bool:
        # Written out where it can be: this is what a record costs.
        loop = _running_loop()
        if loop is not self._gate.loop:
            self._gate.enter()
        if self._closed:
            raise ClientClosed
        task = _current_task(loop)
        if task is not self._sender:
            self._sender, self._sends = task, 0
        self._sends += 1
        if self._sends > _SENDS_PER_TURN or self._unprepared or self._room_turn.locked():
            return False
        return self._inner.can_take(topic)

    async def _until_it_can_go(self, topic: str) -> None:
        if self._unprepared:
            await self._prepare()
        if self._sends > _SENDS_PER_TURN:
            self._sends = 0
            await asyncio.sleep(0)
        if not self._inner.knows(topic):
            await self._until_known(topic, self._max_block_s)
        try:
            async with asyncio.timeout(self._max_block_s):
                await self._until_room()
        except TimeoutError:
            raise BufferFull(f"{self._inner.memory} bytes are unsent, and nothing left in time") from None
        if self._closed:
            raise ClientClosed

    async def _prepare(self) -> None:
        """Serializers that would wait for the cluster at their first record do it in a thread."""
        if self._preparing is None or self._preparing.done():
            self._preparing = self._gate.in_thread(lambda: [store() for store in self._unprepared])
        # Shared by all who wait, so nobody's cancellation ends it.
        await asyncio.shield(self._preparing)
        self._unprepared = []

    async def _until_known(self, topic: str, limit_s: float) -> None:
        check_topic_name(topic, internal=True)
        self._inner.check()
        router = self._inner.router
        if topic in router.metadata.topics:
            return
        answers = router.answers
        try:
            async with asyncio.timeout(limit_s):
                await self._topics.wait(topic)
        except TimeoutError:
            if router.answers == answers:
                raise NoBrokersAvailable(f"no broker answered within {limit_s:.1f} s") from None
            raise UnknownTopicOrPartition(f"no topic {topic!r} (looked for {limit_s:g} s)") from None
        if self._closed:
            raise ClientClosed

    async def _until_room(self) -> None:
        """One task waits for room, the others for their turn to, in the order of coming."""
        async with self._room_turn:
            while not self._inner.has_room and not self._closed:
                waiter = self._room_waiter = self._gate.enter().create_future()
                if not self._inner.await_room(partial(self._gate.tell, self._on_room)):
                    await waiter

    def _on_room(self) -> None:
        if self._room_waiter is not None and not self._room_waiter.done():
            self._room_waiter.set_result(None)

    # -- what is waited for afterwards ---------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until it is settled, well or not (the futures tell)."""
        self._gate.enter()
        self._inner.check()
        try:
            async with asyncio.timeout(timeout):
                await self._flushed()
        except TimeoutError:
            raise RequestTimedOut(
                f"not everything was acknowledged within {timeout} s; it is still under way"
            ) from None

    async def _flushed(self) -> None:
        deliveries = self._inner.begin_flush()
        try:
            for delivery in deliveries:
                if not delivery.done:
                    await self._endings.wait(delivery)
        finally:
            self._inner.end_flush()

    async def partitions_for(self, topic: str, timeout: float | None = None) -> set[int]:
        """The numbers of a topic's partitions. Waits for an unknown topic to appear: `timeout` s, or max_block_ms."""
        self._gate.enter()
        await self._until_known(topic, self._max_block_s if timeout is None else timeout)
        return self._inner.partitions_for(topic, 0)

    async def bootstrap_connected(self) -> bool:
        """Whether there is a connection to a broker. One that was just made has a second to get there."""
        return await self._gate.in_thread(self._inner.bootstrap_connected)

    def metrics(self) -> dict[str, dict[str, float]]:
        """As the producer's. It does not wait, so it is not awaited."""
        return self._inner.metrics()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds, and end. What is unsettled then fails with ClientClosed."""
        loop = self._gate.enter()
        if not self._closed:
            self._closed = True
            self._closing = loop.create_future()
            self._topics.let_all_go()
            self._on_room()
            try:
                with contextlib.suppress(RequestTimedOut, ClientClosed):
                    await self.flush(timeout)
            finally:
                # Begun even if this task is cancelled; it needs nobody to go on.
                ended = self._gate.in_thread(partial(self._inner.close, 0))
                ended.add_done_callback(lambda _: let_go([self._closing]))
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> AsyncProducer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


def _first_slice(values: Sequence[Any]) -> int:
    """Nothing was serialised yet, so what is known of sizes is the first value's, if it is bytes."""
    first = values[0] if len(values) else None
    record_bytes = len(first) + 1 if isinstance(first, bytes) else _RECORD_BYTES_GUESSED
    return max(_SLICE_MIN, min(_SLICE_MAX, _SLICE_BYTES // record_bytes))


def _cut(column: Any, at: int, end: int) -> Any:
    if column is None or (at == 0 and end == len(column)):
        return column
    return column[at:end]


def _moved(part: Part, by: int) -> Part:
    positions = part.positions
    moved: Sequence[int]
    if isinstance(positions, range):
        moved = range(positions.start + by, positions.stop + by)
    else:
        moved = [position + by for position in positions]
    return Part(part.delivery, part.start, part.count, moved)
