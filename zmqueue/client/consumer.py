"""The consumer: partitions assigned, positions kept, records handed out.

Fetching happens in the IO thread (fetcher.py); bytes are proved, opened and made into records here, in the thread that
polls. Like kafka-python's, a consumer belongs to one thread; `close` may be called from another.

A position is the offset of the next record that the application will get. It moves when records are handed out, so what
was only prefetched is never skipped, and is forgotten by a seek. An error found after other records were gathered waits
for the next poll: those records are handed out first.

Topics given without a group mean all of their partitions, also those that appear later; these are read from their
beginning, because their records are all younger than the consumer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from zmqueue.client.fetcher import RESETS, Fetcher, FetchSettings, Slot
from zmqueue.client.lookup import RecordLookup
from zmqueue.client.network import Answer, Network
from zmqueue.client.offsets import OffsetLookup
from zmqueue.client.records import Deserializer, RecordBatch, open_batches
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.errors import ConfigError, IllegalState, RequestTimedOut, ZmqueueError
from zmqueue.model import (
    EARLIEST,
    LATEST,
    ConsumerRecord,
    MiB,
    OffsetAndTimestamp,
    TopicPartition,
    check_topic_name,
)
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

ASK_PAUSE_S = 0.05
NOT_FOUND_S = 0.5
# How often a waiting poll looks for new partitions, and for topics that do not exist yet.
STEP_S = 1.0
STEP_UNKNOWN_S = 0.1
NO_GROUPS = "consumer groups are not available yet: leave group_id unset, and assign partitions or name topics"

Records = dict[TopicPartition, list[ConsumerRecord]]


class Consumer:
    def __init__(
        self,
        *topics: str,
        bootstrap_servers: str | Iterable[str] = "127.0.0.1:9092",
        client_id: str = "zmqueue-consumer",
        group_id: str | None = None,
        auto_offset_reset: str = "latest",
        enable_auto_commit: bool = True,
        auto_commit_interval_ms: int = 5_000,
        isolation_level: str = "read_uncommitted",
        partition_assignment_strategy: str = "sticky",
        session_timeout_ms: int = 10_000,
        heartbeat_interval_ms: int = 3_000,
        max_poll_records: int = 500,
        fetch_min_bytes: int = 1,
        fetch_max_wait_ms: int = 500,
        fetch_max_bytes: int = 8 * MiB,
        max_partition_fetch_bytes: int = 1 * MiB,
        check_crcs: bool = True,
        request_timeout_ms: int = 30_000,
        metadata_max_age_ms: int = 300_000,
        consumer_timeout_ms: float = float("inf"),
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
    ) -> None:
        if group_id is not None:
            raise IllegalState(NO_GROUPS)
        if isolation_level != "read_uncommitted":
            raise IllegalState("transactions are not available yet: isolation_level is read_uncommitted")
        if auto_offset_reset not in RESETS:
            raise ConfigError(f"auto_offset_reset: {auto_offset_reset!r} is not one of {', '.join(RESETS)}")
        for name, value in (
            ("max_poll_records", max_poll_records),
            ("fetch_max_bytes", fetch_max_bytes),
            ("max_partition_fetch_bytes", max_partition_fetch_bytes),
            ("request_timeout_ms", request_timeout_ms),
            ("fetch_min_bytes", fetch_min_bytes + 1),
            ("fetch_max_wait_ms", fetch_max_wait_ms + 1),
        ):
            if not value >= 1:
                raise ConfigError(f"{name} is too small")
        bootstrap = parse_bootstrap(bootstrap_servers)
        self._reset = RESETS[auto_offset_reset]
        self._max_poll_records = max_poll_records
        self._timeout_s = request_timeout_ms / 1000
        self._iteration_timeout_s = consumer_timeout_ms / 1000
        self._key_deserializer, self._value_deserializer = key_deserializer, value_deserializer
        self._topics: dict[str, int] = {}  # subscribed, and how many partitions of each are assigned
        self._iterated: deque[ConsumerRecord] = deque()
        self._turn = 0
        self._closing = threading.Event()
        self._network = Network(client_id)
        self._router = Router(self._network, bootstrap, metadata_max_age_ms=metadata_max_age_ms)
        self._fetcher = Fetcher(
            self._router,
            FetchSettings(
                wait_ms=fetch_max_wait_ms,
                bytes_min=fetch_min_bytes,
                bytes_max=fetch_max_bytes,
                partition_bytes=max_partition_fetch_bytes,
                request_timeout_s=self._timeout_s,
                reset=self._reset,
            ),
        )
        self._offsets = OffsetLookup(self._router, self._timeout_s, self._closing)
        self._lookup = RecordLookup(
            self._router,
            self._timeout_s,
            self._closing,
            max_partition_fetch_bytes,
            key_deserializer,
            value_deserializer,
        )
        weakref.finalize(self, self._network.stop).atexit = False
        if topics:
            self.subscribe(list(topics))

    # -- what is read --------------------------------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str] = (), pattern: str | None = None, listener: Any = None) -> None:
        """Read all partitions of these topics. Without a group there is nobody to share them with."""
        self._network.check()
        if pattern is not None or listener is not None:
            raise IllegalState(NO_GROUPS)
        names = [topics] if isinstance(topics, str) else list(topics)
        for name in names:
            check_topic_name(name, internal=True)
        self._topics = dict.fromkeys(names, 0)
        self._set_slots([])
        self._router.watch(names)
        self._follow_topics()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. Those assigned before keep their positions."""
        self._network.check()
        self._topics = {}
        self._set_slots([TopicPartition(*partition) for partition in partitions])

    def unsubscribe(self) -> None:
        self.assign([])

    def assignment(self) -> set[TopicPartition]:
        self._await_topics()
        return set(self._fetcher.slots)

    def subscription(self) -> set[str] | None:
        return set(self._topics) or None

    def _set_slots(self, partitions: list[TopicPartition]) -> None:
        self._fetcher.assign(partitions, self._reset)
        kept = set(partitions)
        self._iterated = deque(r for r in self._iterated if TopicPartition(r.topic, r.partition) in kept)

    def _follow_topics(self) -> None:
        """Assign partitions of subscribed topics that have appeared."""
        metadata = self._router.metadata
        for topic, assigned in self._topics.items():
            partitions = metadata.topic_partitions(topic)
            if not partitions:
                self._network.post(self._router.refresh)
            elif len(partitions) != assigned:
                self._topics[topic] = len(partitions)
                reset = EARLIEST if assigned else self._reset
                self._fetcher.assign([*self._fetcher.slots, *partitions], reset)

    def _await_topics(self) -> None:
        """Give the cluster a moment to say which partitions the subscribed topics have."""
        self._network.check()
        if 0 in self._topics.values():
            metadata = self._router.metadata
            self._router.wait_for(lambda: metadata.known or None, self._timeout_s)
            self._router.wait_for(lambda: all(name in metadata.topics for name in self._topics) or None, NOT_FOUND_S)
        self._follow_topics()

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these, and stop fetching them."""
        for partition in partitions:
            self._slot(partition).paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            self._slot(partition).paused = False
        self._fetcher.poke()

    def paused(self) -> set[TopicPartition]:
        return {partition for partition, slot in self._fetcher.slots.items() if slot.paused}

    # -- positions -------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if offset < 0:
            raise IllegalState(f"offset {offset} is negative")
        self._move([partition], partial(Slot.seek, offset=offset))

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self._move(partitions or self.assignment(), partial(Slot.look_up, reset=EARLIEST))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """To the end as it will be when the partition is next read or asked for its position."""
        self._move(partitions or self.assignment(), partial(Slot.look_up, reset=LATEST))

    def _move(self, partitions: Iterable[TopicPartition], how: Any) -> None:
        self._network.check()
        slots = [self._slot(partition) for partition in partitions]
        with self._fetcher.changed:
            for slot in slots:
                how(slot)
        moved = {slot.partition for slot in slots}
        self._iterated = deque(r for r in self._iterated if TopicPartition(r.topic, r.partition) not in moved)
        self._fetcher.poke()

    def position(self, partition: TopicPartition, timeout_ms: int | None = None) -> int:
        """The offset of the next record of this partition. Waits where it has yet to be looked up."""
        slot = self._slot(partition)
        for record in self._iterated:
            if (record.topic, record.partition) == partition:
                return record.offset
        timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1000
        self._fetcher.poke()
        if not self._wait(lambda: slot.position is not None or slot.error is not None, timeout_s):
            raise RequestTimedOut(f"no position of {partition.topic}-{partition.partition} within {timeout_s} s")
        if slot.position is None:
            self._raise(slot)
        assert slot.position is not None
        return slot.position

    def _slot(self, partition: TopicPartition) -> Slot:
        slot = self._fetcher.slots.get(partition)
        if slot is None:
            self._await_topics()
            slot = self._fetcher.slots.get(partition)
        if slot is None:
            raise IllegalState(f"{partition.topic}-{partition.partition} is not assigned")
        return slot

    def committed(self, partition: TopicPartition) -> int | None:
        raise IllegalState(NO_GROUPS)

    def commit(self, offsets: Any = None) -> None:
        raise IllegalState(NO_GROUPS)

    # -- records -------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> Records:
        """Records by partition, at most `max_records` (default max_poll_records); empty when the time is over."""
        limit = self._max_poll_records if max_records is None else max_records
        if limit < 1:
            raise IllegalState(f"max_records: {limit} is below 1")
        if self._iterated:
            return self._take_iterated(limit)
        deadline = time.monotonic() + timeout_ms / 1000
        while not (found := self._gather(limit)) and self._await_data(deadline):
            pass
        return found

    def poll_batches(self, timeout_ms: float = 0) -> list[RecordBatch]:
        """Everything that was fetched, as columns."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not (found := self._gather_batches()) and self._await_data(deadline):
            pass
        return found

    def __iter__(self) -> Iterator[ConsumerRecord]:
        return self

    def __next__(self) -> ConsumerRecord:
        """The next record, waited for; ends after consumer_timeout_ms without one."""
        deadline = time.monotonic() + self._iteration_timeout_s
        while not self._iterated:
            remaining_ms = (deadline - time.monotonic()) * 1000
            for records in self.poll(min(max(0.0, remaining_ms), 1000.0)).values():
                self._iterated.extend(records)
            if not self._iterated and remaining_ms <= 0:
                raise StopIteration
        return self._iterated.popleft()

    def _take_iterated(self, limit: int) -> Records:
        found: Records = {}
        while self._iterated and limit:
            record = self._iterated.popleft()
            found.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
            limit -= 1
        return found

    def _await_data(self, deadline: float) -> bool:
        """False when the time is over."""
        self._network.check()
        self._follow_topics()
        self._fetcher.poke()
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        self._wait(self._has_data, remaining)
        return True

    def _has_data(self) -> bool:
        slots = self._fetcher.slots.values()
        return any((slot.chunks and not slot.paused) or slot.error is not None for slot in slots)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """In steps, so that topics that have appeared are noticed. Raises ClientClosed when that has happened."""
        deadline = time.monotonic() + timeout_s
        while True:
            step_s = STEP_UNKNOWN_S if 0 in self._topics.values() else STEP_S
            remaining = max(0.0, deadline - time.monotonic())
            found = self._fetcher.wait(lambda: self._closing.is_set() or ready(), min(remaining, step_s))
            self._network.check()
            if found or time.monotonic() >= deadline:
                return found
            self._follow_topics()

    def _in_turn(self) -> list[Slot]:
        """The slots that may hand out, beginning with another one each time."""
        slots = [slot for slot in list(self._fetcher.slots.values()) if not slot.paused or slot.error is not None]
        self._turn += 1
        cut = self._turn % len(slots) if slots else 0
        return slots[cut:] + slots[:cut]

    def _gather(self, limit: int) -> Records:
        found: Records = {}
        for slot in self._in_turn():
            records: list[ConsumerRecord] = []
            try:
                while limit > 0 and (batch := self._current(slot)) is not None:
                    end = min(len(batch), slot.cursor + limit)
                    more = batch.records(slot.cursor, end)
                    limit -= len(more)
                    self._advance(slot, batch, end)
                    records = records + more if records else more
            except ZmqueueError as error:
                if not found and not records:
                    raise
                slot.error = error
            if records:
                found[slot.partition] = records
            if limit <= 0 or slot.error is not None:
                break
        return found

    def _gather_batches(self) -> list[RecordBatch]:
        found: list[RecordBatch] = []
        for slot in self._in_turn():
            try:
                while (batch := self._current(slot)) is not None:
                    if slot.cursor:
                        batch.drop_below(batch.offsets[slot.cursor])
                    self._advance(slot, batch, len(batch))
                    found.append(batch)
            except ZmqueueError as error:
                if not found:
                    raise
                slot.error = error
                break
        return found

    def _advance(self, slot: Slot, batch: RecordBatch, end: int) -> None:
        if end < len(batch):
            slot.cursor = end
            slot.position = batch.offsets[end]
        else:
            slot.current, slot.cursor = None, 0
            slot.position = batch.next_offset

    def _current(self, slot: Slot) -> RecordBatch | None:
        """The batch to hand out from, opened when it is needed. Raises what is wrong with it."""
        while slot.current is None:
            if slot.opened is not None:
                try:
                    slot.current = next(slot.opened, None)
                    if slot.current is not None:
                        slot.current.deserialize(self._key_deserializer, self._value_deserializer)
                except ZmqueueError:
                    self._read_again(slot)
                    raise
                if slot.current is None:
                    slot.opened = None
                elif not len(slot.current):
                    slot.position = slot.current.next_offset
                    slot.current = None
                continue
            if slot.error is not None and not slot.chunks:
                self._raise(slot)
            chunk = self._fetcher.take_chunk(slot)
            if chunk is None:
                return None
            assert slot.position is not None
            slot.opened = open_batches(*slot.partition, chunk.data, max(slot.position, chunk.offset))
        return slot.current

    def _raise(self, slot: Slot) -> None:
        error, slot.error = slot.error, None
        assert error is not None
        self._fetcher.poke()
        raise error.with_traceback(None)

    def _read_again(self, slot: Slot) -> None:
        """What could not be opened is fetched anew when the application polls on: a replica may have it whole."""
        with self._fetcher.changed:
            assert slot.position is not None
            slot.seek(slot.position)

    # -- without a position --------------------------------------------------------------------------------------

    def find(
        self, topic: str, value: Any, partitions: Iterable[int] | None = None, limit: int = 100, offsets: Any = None
    ) -> list[ConsumerRecord]:
        """The first records with this value (text, bytes, a number, a bool or None) where the topic is indexed by it.

        By partition and in their order; from `offsets` (by partition) on, where given. Raises NoSuchIndex.
        """
        numbers = self.partitions_for_topic(topic) if partitions is None else partitions
        wanted = [TopicPartition(topic, number) for number in sorted(numbers or ())]
        return self._lookup.find({each: (offsets or {}).get(each, 0) for each in wanted}, value, limit)

    def read_backward(
        self, partition: TopicPartition, before: int | None = None, count: int = 1
    ) -> list[ConsumerRecord]:
        """The last `count` records before an offset (None: before the end), the newest first."""
        return self._lookup.backward(_partition(partition), before, count)

    # -- what is there -----------------------------------------------------------------------------------------------

    def topics(self) -> set[str]:
        """The names of all topics, without those of zmqueue itself."""
        request = messages.MetadataRequest(None)
        answer = self._ask_any(Operation.METADATA, request)
        return {topic.name for topic in answer.topics if not topic.name.startswith("__")}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """The numbers of a topic's partitions; None if there is no such topic."""
        check_topic_name(topic, internal=True)
        self._network.check()
        self._router.watch([topic])
        metadata = self._router.metadata
        self._router.wait_for(lambda: metadata.known or None, self._timeout_s)
        view = self._router.wait_for(lambda: metadata.topics.get(topic), min(NOT_FOUND_S, self._timeout_s))
        return set(view.partitions) if view is not None else None

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        rows = self._offsets.find(dict.fromkeys(map(_partition, partitions), EARLIEST))
        return {partition: row.offset for partition, row in rows.items()}

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record that consumers may read, of each partition."""
        rows = self._offsets.find(dict.fromkeys(map(_partition, partitions), LATEST))
        return {partition: row.offset for partition, row in rows.items()}

    def offsets_for_times(
        self, timestamps: dict[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition that is at least so young (ms), or None."""
        if any(timestamp < 0 for timestamp in timestamps.values()):
            raise IllegalState("a timestamp is negative")
        rows = self._offsets.find({_partition(partition): at for partition, at in timestamps.items()})
        return {
            partition: OffsetAndTimestamp(row.offset, row.timestamp, row.leader_epoch) if row.offset >= 0 else None
            for partition, row in rows.items()
        }

    def _ask_any(self, operation: Operation, request: Any) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._router.wait_for(lambda: self._router.metadata.known or None, deadline - time.monotonic())
            answer = self._router.call(None, operation, request, min(5.0, max(0.001, deadline - time.monotonic())))
            if isinstance(answer, Answer):
                return answer.message
            if not answer.retriable or time.monotonic() >= deadline:
                raise answer
            self._closing.wait(ASK_PAUSE_S)

    def close(self) -> None:
        self._closing.set()
        self._network.close()
        with self._fetcher.changed:
            self._fetcher.changed.notify_all()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _partition(partition: tuple[str, int]) -> TopicPartition:
    return TopicPartition(*partition)
