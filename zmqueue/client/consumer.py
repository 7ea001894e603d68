"""The consumer: what users hold, tied together from its parts.

What is read is decided by `subscription`; fetching happens in the IO thread (`fetcher`); records are made in the thread
that polls (`handout`). Like kafka-python's, a consumer belongs to one thread; `close` may be called from another.

A position is the offset of the next record that the application will get.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from zmqueue.client.fetcher import RESETS, Fetcher, FetchSettings
from zmqueue.client.handout import HandOut, Records
from zmqueue.client.interceptors import ConsumerInterceptors
from zmqueue.client.keywords import refuse_unknown
from zmqueue.client.lookup import RecordLookup
from zmqueue.client.network import Network
from zmqueue.client.offsets import OffsetLookup
from zmqueue.client.questions import Questions
from zmqueue.client.records import RecordBatch
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.client.serializers import deserializers
from zmqueue.client.slots import Slot
from zmqueue.client.subscription import Subscription
from zmqueue.errors import ConfigError, IllegalState, RequestTimedOut
from zmqueue.model import EARLIEST, LATEST, ConsumerRecord, MiB, TopicPartition

# How often a waiting poll looks for new partitions, and for topics that do not exist yet.
STEP_S = 1.0
STEP_UNKNOWN_S = 0.1
NO_GROUPS = "consumer groups are not available yet: leave group_id unset, and assign partitions or name topics"


class Consumer(Questions):
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
        key_deserializer: Any = None,
        value_deserializer: Any = None,
        interceptors: Sequence[Any] = (),
        **unknown: Any,
    ) -> None:
        refuse_unknown(Consumer, unknown)
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
        self._deserializers = deserializers(",".join(map(str, bootstrap)), key_deserializer, value_deserializer)
        self._interceptors = ConsumerInterceptors(interceptors) if interceptors else None
        self._reset = RESETS[auto_offset_reset]
        self._max_poll_records = max_poll_records
        self._timeout_s = request_timeout_ms / 1000
        self._iteration_timeout_s = consumer_timeout_ms / 1000
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
        self._subscription = Subscription(self._router, self._fetcher, self._reset, self._timeout_s)
        self._handout = HandOut(self._fetcher, *self._deserializers)
        self._offsets = OffsetLookup(self._router, self._timeout_s, self._closing)
        self._lookup = RecordLookup(
            self._router,
            self._timeout_s,
            self._closing,
            max_partition_fetch_bytes,
            *self._deserializers,
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
        self._subscription.subscribe([topics] if isinstance(topics, str) else topics)
        self._handout.keep_iterated(self._fetcher.slots)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. Those assigned before keep their positions."""
        self._network.check()
        self._subscription.assign([TopicPartition(*partition) for partition in partitions])
        self._handout.keep_iterated(self._fetcher.slots)

    def unsubscribe(self) -> None:
        self.assign([])

    def assignment(self) -> set[TopicPartition]:
        self._await_topics()
        return set(self._fetcher.slots)

    def subscription(self) -> set[str] | None:
        return set(self._subscription.topics) or None

    def _await_topics(self) -> None:
        self._network.check()
        self._subscription.wait()

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these, and stop fetching them."""
        for partition in partitions:
            slot = self._slot(partition)
            slot.paused = True
            self._handout.take_back(slot)

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
        self._handout.drop_iterated({slot.partition for slot in slots})
        self._fetcher.poke()

    def position(self, partition: TopicPartition, timeout_ms: int | None = None) -> int:
        """The offset of the next record of this partition. Waits where it has yet to be looked up."""
        slot = self._slot(partition)
        timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1000
        self._fetcher.poke()
        if not self._wait(lambda: slot.position is not None or slot.error is not None, timeout_s):
            raise RequestTimedOut(f"no position of {partition.topic}-{partition.partition} within {timeout_s} s")
        if slot.position is None:
            self._handout.raise_error(slot)
        position = self._handout.position(slot)
        assert position is not None
        return position

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
        if self._handout.iterated:
            return self._handout.take_iterated(limit)
        deadline = time.monotonic() + timeout_ms / 1000
        while not (found := self._handout.gather(limit)) and self._await_data(deadline):
            pass
        return found if self._interceptors is None or not found else self._interceptors.on_consume(found)

    def poll_batches(self, timeout_ms: float = 0) -> list[RecordBatch]:
        """Batches of columns as they were fetched, a few thousand records at a time; nothing when the time is over."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not (found := self._handout.gather_batches()) and self._await_data(deadline):
            pass
        return found

    def __iter__(self) -> Iterator[ConsumerRecord]:
        return self

    def __next__(self) -> ConsumerRecord:
        """The next record, waited for; ends after consumer_timeout_ms without one."""
        deadline = time.monotonic() + self._iteration_timeout_s
        while not self._handout.iterated:
            remaining_ms = (deadline - time.monotonic()) * 1000
            for records in self.poll(min(max(0.0, remaining_ms), 1000.0)).values():
                self._handout.iterated.extend(records)
            if not self._handout.iterated and remaining_ms <= 0:
                raise StopIteration
        return self._handout.iterated.popleft()

    def _await_data(self, deadline: float) -> bool:
        """False when the time is over."""
        self._network.check()
        self._subscription.follow()
        self._fetcher.poke()
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        self._wait(self._handout.has_data, remaining)
        return True

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """In steps, so that topics that have appeared are noticed. Raises ClientClosed when that has happened."""
        deadline = time.monotonic() + timeout_s
        while True:
            step_s = STEP_S if self._subscription.complete else STEP_UNKNOWN_S
            remaining = max(0.0, deadline - time.monotonic())
            found = self._fetcher.wait(lambda: self._closing.is_set() or ready(), min(remaining, step_s))
            self._network.check()
            if found or time.monotonic() >= deadline:
                return found
            self._subscription.follow()

    def close(self) -> None:
        self._closing.set()
        self._network.close()
        with self._fetcher.changed:
            self._fetcher.changed.notify_all()
        for each in self._deserializers:
            if each is not None:
                each.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
