"""The consumer for asyncio: `Consumer`, with every call that may wait awaited.

It is the blocking consumer, in a thread of its own (aio_worker.py), and not a second one written for the loop. Groups,
listeners, commits, seeks and all that happens between them are thus the same in both by construction, and so is
what they cost the cluster; records are proved, opened and deserialised beside the loop, which goes on meanwhile. The
price is a hop to the thread and back per poll, not per record: records are handed to `async for` from what the last
poll brought, without leaving the loop.

Cancellation
- A record is handed out in one step that nothing can interrupt, after all waiting. What a cancelled `poll`, `getone` or
  `async for` would have got is what the next one gets.
- A position, and so a commit, covers exactly what was handed out, at every moment at which it can be seen.
- A cancelled `commit` (or any other call) may have been done or not. What is asked next begins when the thread has come
  back from it, which for a cluster that does not answer takes up to `request_timeout_ms`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any

from zmqueue.client.aio_gate import Gate
from zmqueue.client.aio_worker import Worker
from zmqueue.client.consumer import Consumer, Offsets
from zmqueue.client.group import CommitCallback, ConsumerRebalanceListener
from zmqueue.client.handout import Records
from zmqueue.client.records import RecordBatch
from zmqueue.errors import ZmqueueError
from zmqueue.model import ConsumerRecord, GroupMetadata, OffsetAndMetadata, OffsetAndTimestamp, TopicPartition

_running_loop = asyncio.get_running_loop


class _Inner(Consumer):
    """A consumer that takes back what nobody got."""

    @property
    def iteration_timeout_s(self) -> float:
        return self._iteration_timeout_s

    def take_next(self) -> ConsumerRecord | None:
        """A record of those that were polled, unless a poll has to settle something first."""
        iterated = self._handout.iterated
        if iterated and (self._group is None or self._group.at_rest()):
            return iterated.popleft()
        return None

    def next(self) -> ConsumerRecord:
        return self._handout.iterated.popleft()

    def fill(self, timeout_s: float) -> bool:
        """Have a next record. False when the time is over."""
        self._poll(timeout_s, self._refill)
        return bool(self._handout.iterated)

    def take_back(self, records: Records) -> None:
        """But for what belongs to others by now."""
        with self._fetcher.changed:
            for partition, part in reversed(records.items()):
                slot = self._fetcher.slots.get(partition)
                if slot is not None and slot.announced:
                    self._handout.iterated.extendleft(reversed(part))

    def take_back_batches(self, batches: list[RecordBatch]) -> None:
        """They are fetched again: rare, and cheaper than a place to keep them."""
        for batch in reversed(batches):
            partition = TopicPartition(batch.topic, batch.partition)
            if partition in self._fetcher.slots:
                self.seek(partition, batch.base_offset)


class AsyncConsumer:
    """Takes the topics and the options of `Consumer`. To be made anywhere, and used in one event loop."""

    def __init__(self, *topics: str, **settings: Any) -> None:
        self._gate = Gate("AsyncConsumer")
        self._inner = _Inner(*topics, **settings)
        self._worker = Worker(self._gate, settings.get("client_id", "zmqueue-consumer"), self._inner.wakeup)
        self._closed: asyncio.Future[None] | None = None
        # The thread knows the consumer by its calls alone, so that dropping this object ends both.
        weakref.finalize(self, self._worker.stop).atexit = False

    async def start(self) -> AsyncConsumer:
        """Make this the consumer's loop. Whatever is called first does the same."""
        self._gate.enter()
        return self

    async def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return await self._worker.result(self._worker.call(partial(function, self._inner, *arguments, **options)))

    # -- records -------------------------------------------------------------------------------------------------

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> Records:
        """Records by partition, at most `max_records` (default max_poll_records); empty when the time is over."""
        inner = self._inner
        job = self._worker.poll(
            lambda timeout_s: inner.poll(timeout_s * 1000, max_records), timeout_ms / 1000, inner.take_back
        )
        return await self._worker.result(job) or {}

    async def getmany(self, *, timeout_ms: float = 0, max_records: int | None = None) -> Records:
        """The same as `poll`, by the name that aiokafka gives it."""
        return await self.poll(timeout_ms, max_records)

    async def poll_batches(self, timeout_ms: float = 0) -> list[RecordBatch]:
        """Everything that was fetched, as columns."""
        inner = self._inner
        job = self._worker.poll(
            lambda timeout_s: inner.poll_batches(timeout_s * 1000), timeout_ms / 1000, inner.take_back_batches
        )
        return await self._worker.result(job) or []

    async def getone(self) -> ConsumerRecord:
        """The next record, waited for."""
        record = self._take_next()
        if record is None:
            record = await self._filled(float("inf"))
            assert record is not None
        return record

    def _take_next(self) -> ConsumerRecord | None:
        if asyncio.get_running_loop() is self._gate.loop and self._worker.idle:
            return self._inner.take_next()
        return None

    async def _filled(self, timeout_s: float) -> ConsumerRecord | None:
        inner = self._inner
        job = self._worker.poll(inner.fill, timeout_s)
        record: ConsumerRecord | None = await self._worker.result(job, lambda found: inner.next() if found else None)
        return record

    def __aiter__(self) -> AsyncConsumer:
        return self

    async def __anext__(self) -> ConsumerRecord:
        """The next record, waited for; ends after consumer_timeout_ms without one."""
        # As _take_next, written out: this is what a record costs.
        if _running_loop() is self._gate.loop and not self._worker.stack:
            record = self._inner.take_next()
            if record is not None:
                return record
        record = await self._filled(self._inner.iteration_timeout_s)
        if record is None:
            raise StopAsyncIteration
        return record

    # -- what is read --------------------------------------------------------------------------------------------

    async def subscribe(
        self, topics: str | Iterable[str] = (), pattern: str | None = None, listener: Any = None
    ) -> None:
        """As the consumer's. The listener's methods run in the loop, and may be async functions."""
        wrapped = None if listener is None else _Listener(listener, self._worker)
        await self._call(Consumer.subscribe, topics, pattern, wrapped)

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. Those assigned before keep their positions."""
        await self._call(Consumer.assign, partitions)

    async def unsubscribe(self) -> None:
        await self._call(Consumer.unsubscribe)

    async def assignment(self) -> set[TopicPartition]:
        return await self._call(Consumer.assignment)

    async def subscription(self) -> set[str] | None:
        return await self._call(Consumer.subscription)

    async def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these, and stop fetching them."""
        await self._call(Consumer.pause, *partitions)

    async def resume(self, *partitions: TopicPartition) -> None:
        await self._call(Consumer.resume, *partitions)

    async def paused(self) -> set[TopicPartition]:
        return await self._call(Consumer.paused)

    # -- positions -------------------------------------------------------------------------------------------------

    async def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        await self._call(Consumer.seek, partition, offset)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        await self._call(Consumer.seek_to_beginning, *partitions)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """To the end as it will be when the partition is next read or asked for its position."""
        await self._call(Consumer.seek_to_end, *partitions)

    async def position(self, partition: TopicPartition, timeout_ms: float | None = None) -> int:
        """The offset of the next record of this partition that will be handed out."""
        return await self._call(Consumer.position, partition, timeout_ms)

    async def highwater(self, partition: TopicPartition) -> int | None:
        """The offset after the last record that may be read, as the last fetch saw it; None before the first."""
        return await self._call(Consumer.highwater, partition)

    # -- the group ---------------------------------------------------------------------------------------------------

    async def commit(self, offsets: Offsets | None = None, timeout_ms: float | None = None) -> None:
        """Commit these offsets, or the positions: everything that was handed out counts as done.

        Raises CommitFailed where the group has given a partition to another member since.
        """
        await self._call(Consumer.commit, offsets, timeout_ms)

    async def commit_async(self, offsets: Offsets | None = None, callback: CommitCallback | None = None) -> None:
        """As `commit`, without waiting for its end: `callback(offsets, error or None)` runs in the loop."""
        told = None
        if callback is not None:
            told = partial(_tell, self._gate, callback)
        await self._call(Consumer.commit_async, offsets, told)

    async def committed(
        self, partition: TopicPartition, metadata: bool = False, timeout_ms: float | None = None
    ) -> int | OffsetAndMetadata | None:
        """What the group has committed for this partition; None if nothing."""
        return await self._call(Consumer.committed, partition, metadata, timeout_ms)

    async def group_metadata(self) -> GroupMetadata:
        return await self._call(Consumer.group_metadata)

    # -- without a position --------------------------------------------------------------------------------------

    async def find(
        self, topic: str, value: Any, partitions: Iterable[int] | None = None, limit: int = 100, offsets: Any = None
    ) -> list[ConsumerRecord]:
        """The first records with this value where the topic is indexed by it. Raises NoSuchIndex."""
        return await self._call(Consumer.find, topic, value, partitions, limit, offsets)

    async def read_backward(
        self, partition: TopicPartition, before: int | None = None, count: int = 1
    ) -> list[ConsumerRecord]:
        """The last `count` records before an offset (None: before the end), the newest first."""
        return await self._call(Consumer.read_backward, partition, before, count)

    async def topics(self) -> set[str]:
        """The names of all topics, without those of zmqueue itself."""
        return await self._call(Consumer.topics)

    async def partitions_for_topic(self, topic: str) -> set[int] | None:
        """The numbers of a topic's partitions; None if there is no such topic."""
        return await self._call(Consumer.partitions_for_topic, topic)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._call(Consumer.beginning_offsets, partitions)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record that consumers may read, of each partition."""
        return await self._call(Consumer.end_offsets, partitions)

    async def offsets_for_times(
        self, timestamps: dict[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition that is at least so young (ms), or None."""
        return await self._call(Consumer.offsets_for_times, timestamps)

    # -- the end ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, dict[str, Any]]:
        """As the consumer's. It does not wait, so it is not awaited."""
        return self._inner.metrics()

    async def close(self, autocommit: bool = True, timeout_ms: float | None = None) -> None:
        """Commit what was handed out (with auto commit), leave the group, and end; in at most so long (5 s).

        Whoever waits in another task hears ClientClosed.
        """
        self._gate.enter()
        if self._closed is None:
            call = partial(Consumer.close, self._inner, autocommit, timeout_ms)
            self._closed = self._worker.close(call).future
        # It needs nobody to go on, so a cancelled close still closes.
        await asyncio.shield(self._closed)

    async def __aenter__(self) -> AsyncConsumer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class _Listener:
    """A rebalance listener as the blocking consumer calls it; the application's runs in the loop."""

    def __init__(self, listener: Any, worker: Worker) -> None:
        self._listener, self._worker = listener, worker

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_partitions_"):
            raise AttributeError(name)
        if getattr(type(self._listener), name, None) is ConsumerRebalanceListener.on_partitions_lost:
            # As that says, but that it would not wait for an async function.
            name = "on_partitions_revoked"
        return partial(self._worker.call_in_loop, getattr(self._listener, name))


def _tell(gate: Gate, callback: CommitCallback, offsets: Any, error: ZmqueueError | None) -> None:
    gate.tell(partial(callback, offsets, error))
