"""The consumer: what users hold, tied together from its parts.

What is read is decided by `subscription` or, with a group, by what its coordinator assigns (`group`, `membership`);
fetching happens in the IO thread (`fetcher`); records are made in the thread that polls (`handout`).

A position is the offset of the next record that the application will get.

Like kafka-python's, a consumer is used by one thread at a time: another that polls, seeks or assigns meanwhile gets
IllegalState. `close` and `wakeup` are for any thread, and so is whatever only asks or commits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any

from zmqueue.client.fetcher import Fetcher, FetchSettings
from zmqueue.client.figures import figures
from zmqueue.client.group import CommitCallback, Group
from zmqueue.client.handout import HandOut, Records
from zmqueue.client.interceptors import ConsumerInterceptors
from zmqueue.client.keywords import refuse_unknown
from zmqueue.client.lookup import RecordLookup
from zmqueue.client.member import MemberSettings
from zmqueue.client.network import Network
from zmqueue.client.offsets import OffsetLookup
from zmqueue.client.options import assignor_of, check_at_least, check_group, names_of, reset_of
from zmqueue.client.questions import Questions
from zmqueue.client.records import RecordBatch
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.client.serializers import deserializers
from zmqueue.client.slots import Slot
from zmqueue.client.subscription import Subscription
from zmqueue.errors import ClientClosed, ForkedClient, IllegalState, RequestTimedOut, WakeupError
from zmqueue.model import (
    EARLIEST,
    LATEST,
    ConsumerRecord,
    GroupMetadata,
    MiB,
    OffsetAndMetadata,
    TopicPartition,
)

# How often a waiting poll looks for new partitions, and for topics that do not exist yet.
STEP_S = 1.0
STEP_UNKNOWN_S = 0.1
CLOSE_S = 5.0
NO_GROUP = "this needs a group_id"

Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]


class Consumer(Questions):
    def __init__(
        self,
        *topics: str,
        bootstrap_servers: str | Iterable[str] = "127.0.0.1:9092",
        client_id: str = "zmqueue-consumer",
        group_id: str | None = None,
        group_instance_id: str | None = None,
        auto_offset_reset: str | int | datetime | timedelta = "latest",
        enable_auto_commit: bool = True,
        auto_commit_interval_ms: int = 5_000,
        isolation_level: str = "read_uncommitted",
        partition_assignment_strategy: Any = "sticky",
        session_timeout_ms: int = 10_000,
        heartbeat_interval_ms: int = 3_000,
        max_poll_interval_ms: int = 300_000,
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
        if isolation_level != "read_uncommitted":
            raise IllegalState("transactions are not available yet: isolation_level is read_uncommitted")
        check_at_least(
            1,
            max_poll_records=max_poll_records,
            fetch_max_bytes=fetch_max_bytes,
            max_partition_fetch_bytes=max_partition_fetch_bytes,
            request_timeout_ms=request_timeout_ms,
            auto_commit_interval_ms=auto_commit_interval_ms,
            heartbeat_interval_ms=heartbeat_interval_ms,
            max_poll_interval_ms=max_poll_interval_ms,
        )
        check_at_least(0, fetch_min_bytes=fetch_min_bytes, fetch_max_wait_ms=fetch_max_wait_ms)
        reset, assignor = reset_of(auto_offset_reset), assignor_of(partition_assignment_strategy)
        bootstrap = parse_bootstrap(bootstrap_servers)
        if group_id is not None:
            check_group(group_id, group_instance_id, session_timeout_ms, heartbeat_interval_ms)
        self._deserializers = deserializers(",".join(map(str, bootstrap)), key_deserializer, value_deserializer)
        self._interceptors = ConsumerInterceptors(interceptors) if interceptors else None
        self._max_poll_records = max_poll_records
        self._timeout_s = request_timeout_ms / 1000
        self._iteration_timeout_s = consumer_timeout_ms / 1000
        self._client_id = client_id
        self._closing = threading.Event()
        self._closer: int | None = None  # the thread that tells the listener of the end, which may commit
        self._woken = False
        self._turn = threading.RLock()
        self._polling = False
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
                reset=reset,
            ),
        )
        self._handout = HandOut(self._fetcher, *self._deserializers, goes_on=reset is not None)
        self._subscription = Subscription(
            self._router, self._fetcher, reset, self._timeout_s, asks_group=group_id is not None
        )
        self._group: Group | None = None
        if group_id is not None:
            self._group = Group(
                self._router,
                self._fetcher,
                self._handout,
                MemberSettings(
                    group=group_id,
                    session_s=session_timeout_ms / 1000,
                    wait_s=heartbeat_interval_ms / 1000,
                    rebalance_s=max_poll_interval_ms / 1000,
                    instance_id=group_instance_id,
                    client_id=client_id[:249],
                    assignor=assignor,
                ),
                reset=reset,
                auto_commit_s=auto_commit_interval_ms / 1000 if enable_auto_commit else None,
                timeout_s=self._timeout_s,
                on_commit=self._interceptors.on_commit if self._interceptors is not None else None,
            )
        self._offsets = OffsetLookup(self._router, self._timeout_s, self._closing)
        self._lookup = RecordLookup(
            self._router,
            self._timeout_s,
            self._closing,
            max_partition_fetch_bytes,
            *self._deserializers,
        )
        # Nothing in the IO thread refers to this object, so that dropping it ends the thread.
        weakref.finalize(self, self._network.stop).atexit = False
        if topics:
            self.subscribe(topics)

    # -- what is read --------------------------------------------------------------------------------------------

    def subscribe(self, topics: str | Iterable[str] = (), pattern: str | None = None, listener: Any = None) -> None:
        """Read these topics, or those whose names match a regular expression from their start, as they come and go.

        With a group, its members share the partitions; `listener` (a ConsumerRebalanceListener) hears of it, and
        membership begins with the first poll. Without one, all partitions are read.
        """
        names = names_of(topics)
        if bool(names) == (pattern is not None):
            raise IllegalState("subscribe to topics or to a pattern: one of the two")
        with self._alone():
            if self._group is None:
                if listener is not None:
                    raise IllegalState(f"listener: {NO_GROUP}, for without one nothing is ever revoked")
                self._subscription.subscribe(names, pattern)
            else:
                if self._subscription.assigned:
                    self._subscription.assign([])
                self._group.subscribe(self._subscription.checked(names) if pattern is None else None, pattern, listener)
            self._handout.keep_iterated(self._fetcher.slots)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, whatever others in the group do. Those assigned before keep their positions.

        With a group, reading begins at what it has committed.
        """
        with self._alone():
            if self._group is not None and self._group.subscribed:
                raise IllegalState("this consumer has subscribed to topics: unsubscribe first")
            self._subscription.assign([TopicPartition(*partition) for partition in partitions])
            if self._group is not None:
                self._network.post(self._group.starts.pump)
            self._handout.keep_iterated(self._fetcher.slots)

    def unsubscribe(self) -> None:
        """Read nothing. A member of a group leaves it, as with `close`."""
        with self._alone():
            if self._group is not None and self._group.subscribed:
                self._group.leave(autocommit=True, timeout_s=CLOSE_S)
            self._subscription.assign([])
            self._handout.keep_iterated({})

    def assignment(self) -> set[TopicPartition]:
        """What is read. With a group, what the application was told by its last poll."""
        self._await_topics()
        return {partition for partition, slot in self._fetcher.slots.items() if slot.announced}

    def subscription(self) -> set[str] | None:
        """The topics that were subscribed to, or match the pattern."""
        if self._group is not None:
            return self._group.subscription()
        return set(self._subscription.topics) or None

    def _await_topics(self) -> None:
        self._check()
        if self._group is None:
            self._subscription.wait()

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these, and stop fetching them."""
        for partition in partitions:
            slot = self._slot(partition)
            slot.paused = True
            self._handout.take_back([slot])

    def resume(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            self._slot(partition).paused = False
        self._fetcher.poke()

    def paused(self) -> set[TopicPartition]:
        return {partition for partition, slot in self._fetcher.slots.items() if slot.paused}

    # -- positions -------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Go on from this offset. With one that was committed, its leader epoch guards against records lost since."""
        at, epoch = (offset.offset, offset.leader_epoch) if isinstance(offset, OffsetAndMetadata) else (offset, -1)
        if at < 0:
            raise IllegalState(f"offset {at} is negative")
        self._move([partition], partial(Slot.seek, offset=at, epoch=epoch))

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self._move(partitions or self.assignment(), partial(Slot.look_up, reset=EARLIEST))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """To the end as it will be when the partition is next read or asked for its position."""
        self._move(partitions or self.assignment(), partial(Slot.look_up, reset=LATEST))

    def _move(self, partitions: Iterable[TopicPartition], how: Callable[[Slot], None]) -> None:
        with self._alone():
            slots = [self._slot(partition) for partition in partitions]
            with self._fetcher.changed:
                for slot in slots:
                    how(slot)
            self._handout.drop_iterated({slot.partition for slot in slots})
            self._fetcher.poke()

    def position(self, partition: TopicPartition, timeout_ms: float | None = None) -> int:
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

    def highwater(self, partition: TopicPartition) -> int | None:
        """The offset after the last record that may be read, as the last fetch saw it; None before the first."""
        end = self._slot(partition).high_watermark
        return end if end >= 0 else None

    def _slot(self, partition: TopicPartition) -> Slot:
        slot = self._fetcher.slots.get(partition)
        if slot is None:
            self._await_topics()
            slot = self._fetcher.slots.get(partition)
        if slot is None or not slot.announced:
            raise IllegalState(f"{partition[0]}-{partition[1]} is not assigned")
        return slot

    # -- the group ---------------------------------------------------------------------------------------------------

    def commit(self, offsets: Offsets | None = None, timeout_ms: float | None = None) -> None:
        """Commit positions, or these offsets, and wait until that is safe.

        Raises CommitFailed where the group has given a partition to another member since.
        """
        self._check()
        self._member().commit(offsets, None if timeout_ms is None else timeout_ms / 1000)

    def commit_async(self, offsets: Offsets | None = None, callback: CommitCallback | None = None) -> None:
        """As `commit`, in the background: `callback(offsets, error or None)` runs in the IO thread, and must be quick.

        Commits take effect in the order of the calls; those that wait for one under way leave together.
        """
        self._check()
        self._member().commit_async(offsets, callback)

    def committed(
        self, partition: TopicPartition, metadata: bool = False, timeout_ms: float | None = None
    ) -> int | OffsetAndMetadata | None:
        """What the group has committed for this partition; None if nothing."""
        self._check()
        found = self._member().committed(partition, None if timeout_ms is None else timeout_ms / 1000)
        return found if found is None or metadata else found.offset

    def group_metadata(self) -> GroupMetadata:
        return self._member().metadata()

    def _member(self) -> Group:
        if self._group is None:
            raise IllegalState(NO_GROUP)
        return self._group

    # -- records -------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> Records:
        """Records by partition, at most `max_records` (default max_poll_records); empty when the time is over.

        This is also when a member of a group hears of partitions that come and go, and when auto commit commits what
        earlier polls returned.
        """
        limit = self._max_poll_records if max_records is None else max_records
        if limit < 1:
            raise IllegalState(f"max_records: {limit} is below 1")
        return self._poll(timeout_ms / 1000, lambda: self._handout.take_iterated(limit) or self._gather(limit))

    def poll_batches(self, timeout_ms: float = 0) -> list[RecordBatch]:
        """Batches of columns as they were fetched, a few thousand records at a time; nothing when the time is over."""
        return self._poll(timeout_ms / 1000, self._handout.gather_batches)

    def _poll(self, timeout_s: float, gather: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + timeout_s
        with self._alone():
            if self._polling or self._closer is not None:
                raise IllegalState("a rebalance listener cannot poll: records come when it has returned")
            self._polling = True
            try:
                if self._group is not None:
                    self._group.enter()
                self._hear_wakeup()
                while True:
                    if self._group is not None:
                        self._group.settle()
                    if found := gather():
                        return found
                    if not self._await_data(deadline):
                        return found
            finally:
                self._polling = False
                if self._group is not None:
                    self._group.exit()

    def __iter__(self) -> Iterator[ConsumerRecord]:
        return self

    def __next__(self) -> ConsumerRecord:
        """The next record, waited for; ends after consumer_timeout_ms without one."""
        if self._handout.iterated and (self._group is None or self._group.at_rest()):
            return self._handout.iterated.popleft()
        deadline = time.monotonic() + self._iteration_timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            self._poll(min(max(0.0, remaining_s), STEP_S), self._refill)
            if self._handout.iterated:
                return self._handout.iterated.popleft()
            if remaining_s <= 0:
                raise StopIteration

    def _refill(self) -> bool:
        if not self._handout.iterated:
            for records in self._gather(self._max_poll_records).values():
                self._handout.iterated.extend(records)
        return bool(self._handout.iterated)

    def _gather(self, limit: int) -> Records:
        found = self._handout.gather(limit)
        return found if self._interceptors is None or not found else self._interceptors.on_consume(found)

    def _await_data(self, deadline: float) -> bool:
        """False when the time is over."""
        self._check()
        self._subscription.follow()
        self._fetcher.poke()
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        group = self._group
        has_data = self._handout.has_data
        self._wait(has_data if group is None else lambda: has_data() or group.has_news, min(remaining, STEP_S))
        return True

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """In steps, so that topics that have appeared are noticed. Raises ClientClosed or WakeupError if told so."""
        deadline = time.monotonic() + timeout_s
        while True:
            step_s = STEP_S if self._subscription.complete else STEP_UNKNOWN_S
            remaining = max(0.0, deadline - time.monotonic())
            found = self._fetcher.wait(lambda: self._closing.is_set() or self._woken or ready(), min(remaining, step_s))
            self._check()
            self._hear_wakeup()
            if found or time.monotonic() >= deadline:
                return found
            self._subscription.follow()

    def wakeup(self) -> None:
        """From any thread: end a poll that waits, or the next one, with WakeupError. No record is lost by it."""
        self._woken = True
        with self._fetcher.changed:
            self._fetcher.changed.notify_all()

    def _hear_wakeup(self) -> None:
        if self._woken:
            self._woken = False
            raise WakeupError

    def _check(self) -> None:
        self._network.check()
        if self._closing.is_set() and self._closer != threading.get_ident():
            raise ClientClosed

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._check()
        if not self._turn.acquire(blocking=False):
            raise IllegalState("another thread is using this consumer: one at a time, but for close and wakeup")
        try:
            yield
        finally:
            self._turn.release()

    # -- the rest ----------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Figures by group and name, as kafka-python has them."""
        return figures(self._client_id, self._fetcher, self._handout, self._group)

    def close(self, autocommit: bool = True, timeout_ms: float | None = None) -> None:
        """Commit what was handed out (with auto commit), leave the group, and end; in at most so long (5 s).

        A static member (group_instance_id) stays away silently, so that it can come back to its partitions. While
        another thread is in a poll, what that one was given is not committed.
        """
        try:
            self._check()
        except (ClientClosed, ForkedClient):
            self._closing.set()
            return
        self._closing.set()
        with self._fetcher.changed:
            self._fetcher.changed.notify_all()
        timeout_s = CLOSE_S if timeout_ms is None else timeout_ms / 1000
        mine = self._turn.acquire(blocking=False)
        self._closer = threading.get_ident() if mine else None
        try:
            if self._group is not None:
                self._group.leave(autocommit=autocommit and mine, timeout_s=timeout_s, tell=mine)
        finally:
            self._closer = None
            if mine:
                self._turn.release()
            self._network.close()
            for each in self._deserializers:
                if each is not None:
                    each.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
