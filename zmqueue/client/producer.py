"""The producer: records in, batches out, one future per record or per call.

Callers' threads choose a partition and append to its columns (buffer.py); the IO thread encodes and sends (sender.py),
in the order that ordering.py decides. With `acks="all"` and idempotence, the default, each record is written once and
in the order of the sends of a thread to a partition, through any number of retries, until `delivery_timeout_ms`.

Records without key and partition stick to one partition for `batch_size` bytes, and then take the next of those that
have a leader: full batches, evenly spread. Where records trickle, so that each is sent alone, it makes the brokers'
work less as well: what one leader gets while it is busy it writes, syncs and acknowledges together.
"""

from __future__ import annotations

import contextlib
import random
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from zmqueue.client.arrow import as_rows
from zmqueue.client.buffer import (
    BATCH_OVERHEAD,
    BYTES_OVERHEAD,
    RECORD_OVERHEAD,
    Buffer,
    Lane,
)
from zmqueue.client.columns import Columns, Header, as_bytes, as_headers, bytes_column, largest, sizes_of
from zmqueue.client.conversion import conversion
from zmqueue.client.futures import BulkFuture, Part, RecordFuture
from zmqueue.client.keywords import refuse_unknown
from zmqueue.client.metadata import TopicView
from zmqueue.client.metrics import ProducerMetrics
from zmqueue.client.network import Network
from zmqueue.client.ordering import WINDOW_MAX, PartitionOrder
from zmqueue.client.partitioners import Partitioner, find_partitioner
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.client.sender import Sender, SenderSettings
from zmqueue.errors import (
    ClientClosed,
    ConfigError,
    IllegalState,
    InvalidRecord,
    MessageTooLarge,
    NoBrokersAvailable,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from zmqueue.model import ACKS_ALL, ACKS_LEADER, ACKS_NONE, NO_BROKER, KiB, MiB, check_topic_name
from zmqueue.wire.batch import CODECS
from zmqueue.wire.murmur2 import partition_for_key

_ACKS = {0: ACKS_NONE, 1: ACKS_LEADER, -1: ACKS_ALL, "0": ACKS_NONE, "1": ACKS_LEADER, "-1": ACKS_ALL, "all": ACKS_ALL}
_KEYS_CACHED_MAX = 10_000
RECORD_BYTES_MAX = 1 * MiB
CONNECTED_S = 1.0


class _Topic:
    """The lanes of a topic, and the one that keyless records stick to."""

    __slots__ = ("available", "cursor", "keys", "lanes", "name", "sticky", "stuck_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.lanes: dict[int, Lane] = {}
        self.available: list[int] | None = None  # None: to be looked up anew
        self.sticky: Lane | None = None
        self.stuck_bytes = 0
        self.cursor = random.randrange(1 << 16)
        self.keys: dict[bytes, int] = {}


class Producer:
    def __init__(
        self,
        *,
        bootstrap_servers: str | Iterable[str] = "127.0.0.1:9092",
        client_id: str = "zmqueue-producer",
        acks: int | str = "all",
        enable_idempotence: bool | None = None,
        transactional_id: str | None = None,
        linger_ms: float = 5,
        batch_size: int = 64 * KiB,
        compression_type: str | None = None,
        buffer_memory: int = 32 * MiB,
        max_block_ms: int = 60_000,
        max_request_size: int = RECORD_BYTES_MAX,
        max_in_flight_requests_per_connection: int = 5,
        request_timeout_ms: int = 30_000,
        delivery_timeout_ms: int = 120_000,
        retries: int | None = None,
        retry_backoff_ms: int = 50,
        retry_backoff_max_ms: int = 1_000,
        metadata_max_age_ms: int = 300_000,
        partitioner: Partitioner | type[Partitioner] | str | None = None,
        key_serializer: Any = None,
        value_serializer: Any = None,
        interceptors: Sequence[Any] = (),
        **unknown: Any,
    ) -> None:
        refuse_unknown(Producer, unknown)
        if transactional_id is not None:
            raise IllegalState("transactions are not available yet: leave transactional_id unset")
        if acks not in _ACKS:
            raise ConfigError(f"acks: {acks!r} is not 0, 1 or all")
        if retries is not None and retries < 0:
            raise ConfigError(f"retries: {retries} is negative")
        codec = CODECS.get(compression_type or "none")
        if codec is None:
            raise ConfigError(f"compression_type: {compression_type!r} is not one of {', '.join(CODECS)}")
        _check_at_least(
            1,
            batch_size=batch_size,
            buffer_memory=buffer_memory,
            max_request_size=max_request_size,
            max_in_flight_requests_per_connection=max_in_flight_requests_per_connection,
            request_timeout_ms=request_timeout_ms,
            delivery_timeout_ms=delivery_timeout_ms,
        )
        _check_at_least(0, linger_ms=linger_ms, max_block_ms=max_block_ms, retry_backoff_ms=retry_backoff_ms)
        if max_request_size > RECORD_BYTES_MAX:
            raise ConfigError(f"max_request_size: {max_request_size} exceeds {RECORD_BYTES_MAX}")
        self._idempotent = _idempotence(enable_idempotence, _ACKS[acks], max_in_flight_requests_per_connection)
        bootstrap = parse_bootstrap(bootstrap_servers)
        self._window = max_in_flight_requests_per_connection
        self._max_block_s = max_block_ms / 1000
        self._batch_size = min(batch_size, max_request_size)
        self._record_bytes_max = max_request_size - BATCH_OVERHEAD
        self._partitioner = find_partitioner(partitioner)
        self._conversion = conversion(",".join(map(str, bootstrap)), key_serializer, value_serializer, interceptors)
        self._topics: dict[str, _Topic] = {}
        self._closed = False
        self._network = Network(client_id)
        self._router = Router(self._network, bootstrap, metadata_max_age_ms=metadata_max_age_ms)
        metrics = self._metrics = ProducerMetrics()
        self._buffer = Buffer(
            batch_size=self._batch_size,
            linger_s=linger_ms / 1000,
            memory_max=buffer_memory,
            max_block_s=self._max_block_s,
            delivery_timeout_s=delivery_timeout_ms / 1000,
            on_work=lambda: network.post(sender.pump),
            check=self._network.check,
            on_settled=metrics.settled,
        )
        network = self._network
        sender = self._sender = Sender(
            self._router,
            self._buffer,
            SenderSettings(
                acks=_ACKS[acks],
                codec=codec,
                max_in_flight=max_in_flight_requests_per_connection,
                batch_bytes_max=max_request_size,
                request_timeout_s=request_timeout_ms / 1000,
                delivery_timeout_s=delivery_timeout_ms / 1000,
                retry_backoff_s=retry_backoff_ms / 1000,
                retry_backoff_s_max=max(retry_backoff_ms, retry_backoff_max_ms) / 1000,
                retries_max=retries,
            ),
            metrics,
        )
        topics = self._topics
        self._router.listeners.append(lambda: _forget_available(topics))
        # Nothing in the IO thread refers to this object, so that dropping it ends the thread.
        weakref.finalize(self, self._network.stop).atexit = False

    # -- sending -------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordFuture:
        """Append a record to its partition's batch. Blocks only for metadata and for room, up to max_block_ms each."""
        conversion = self._conversion
        if conversion is not None:
            topic, value, key, headers, partition, timestamp_ms = conversion.one(
                topic, value, key, headers, partition, timestamp_ms
            )
        size = RECORD_OVERHEAD
        if value is not None:
            if type(value) is not bytes:
                value = as_bytes("value", value)
            size += len(value)
        if key is not None:
            if type(key) is not bytes:
                key = as_bytes("key", key)
            size += len(key) + BYTES_OVERHEAD
        pairs = None
        if headers:
            pairs, more = as_headers(headers)
            size += more
        if size > self._record_bytes_max:
            raise MessageTooLarge(f"a record of {size} bytes exceeds max_request_size")
        if timestamp_ms is None:
            timestamp_ms = int(time.time() * 1000)
        elif timestamp_ms < 0:
            raise InvalidRecord(f"timestamp_ms: {timestamp_ms} is negative")
        lanes = self._topics.get(topic) or self._find_topic(topic)
        if self._network.unusable is not None:
            self._network.check()
        buffer = self._buffer
        with buffer.lock:
            if partition is not None:
                lane = lanes.lanes.get(partition) or self._find_lane(lanes, partition)
            elif key is None and self._partitioner is None:
                lane = self._stick(lanes, size)
            else:
                lane = lanes.lanes[self._number(lanes, key)]
            batch = buffer.append(lane, value, key, pairs, timestamp_ms, size)
            future = RecordFuture(batch.delivery, len(batch.values) - 1)
        if conversion is not None:
            conversion.watch(future)
        return future

    def send_many(
        self,
        topic: str,
        values: Sequence[Any],
        keys: Sequence[Any] | None = None,
        headers: Sequence[Sequence[Header] | None] | None = None,
        timestamps_ms: Sequence[int] | int | None = None,
        partition: int | None = None,
    ) -> BulkFuture:
        """All of these records, in their order within each partition, with one future and no object per record.

        Each column is a sequence, an Arrow array or a pandas Series.
        """
        conversion = self._conversion
        text_as_bytes = conversion.text_as_bytes if conversion is not None else (True, True)
        values, keys, headers, timestamps_ms = as_rows(values, keys, headers, timestamps_ms, text_as_bytes)
        count = len(values)
        for column in (keys, headers, timestamps_ms):
            if column is not None and not isinstance(column, int) and len(column) != count:
                raise InvalidRecord(f"send_many: columns of {count} and {len(column)} entries")
        if conversion is not None:
            values, keys, headers, timestamps_ms = conversion.many(
                topic, values, keys, headers, timestamps_ms, partition
            )
        values = bytes_column("value", values)
        if keys is not None:
            keys = bytes_column("key", keys)
        sizes = sizes_of(values, keys)
        pairs: list[Any] | None = None
        if headers is not None:
            both = [as_headers(row) if row else (None, 0) for row in headers]
            pairs = [row for row, _ in both]
            sizes = [size + more for size, (_, more) in zip(sizes, both, strict=True)]
        if timestamps_ms is None:
            timestamps_ms = int(time.time() * 1000)
        if largest(sizes) > self._record_bytes_max:
            raise MessageTooLarge(f"a record of {largest(sizes)} bytes exceeds max_request_size")
        lanes = self._topics.get(topic) or self._find_topic(topic)
        self._network.check()
        parts: list[Part] = []
        columns = Columns(values, keys, pairs, timestamps_ms, sizes)
        if partition is not None:
            with self._buffer.lock:
                lane = lanes.lanes.get(partition) or self._find_lane(lanes, partition)
            self._fill(lanes, lane, columns, range(count), parts)
        elif keys is None and self._partitioner is None:
            self._fill(lanes, None, columns, range(count), parts)
        else:
            for lane_or_none, positions in self._grouped(lanes, keys or [None] * count):
                self._fill(lanes, lane_or_none, columns.picked(positions), positions, parts)
        future = BulkFuture(parts, count)
        if conversion is not None:
            conversion.watch_many(future)
        return future

    def _fill(
        self, lanes: _Topic, fixed: Lane | None, columns: Columns, positions: Sequence[int], parts: list[Part]
    ) -> None:
        """Cut the columns into batches: of one lane, or round the sticky one."""
        ends = columns.ends()
        at, count = 0, len(columns.values)
        buffer = self._buffer
        # One slice never waits for more than half of the buffer.
        slice_max = max(1, min(self._batch_size, buffer.memory_max // 2) - BATCH_OVERHEAD)
        while at < count:
            with buffer.lock:
                lane = fixed if fixed is not None else self._stick(lanes, columns.sizes[at])
                room = slice_max
                if lane.open is not None:
                    room = min(room, self._batch_size - lane.open.columns_bytes)
                    if columns.sizes[at] > room:
                        buffer.close_open(lane)
                        room = slice_max
                end = max(at + 1, bisect_right(ends, ends[at] + room) - 1)
                batch, start = buffer.extend(lane, *columns.cut(at, end), ends[end] - ends[at])
                if fixed is None:
                    lanes.stuck_bytes += ends[end] - ends[at + 1]
                if end < count:
                    buffer.close_open(lane)
                delivery = batch.delivery
            parts.append(Part(delivery, start, end - at, positions[at:end]))
            at = end

    def _grouped(self, lanes: _Topic, keys: Sequence[bytes | None]) -> Iterable[tuple[Lane | None, Sequence[int]]]:
        """Positions by lane, in their order; None stands for the sticky lane.

        Records without a key among such with one stay on one lane: in the order of the call with those beside them.
        """
        if self._partitioner is None and all(key is None for key in keys):
            return [(None, range(len(keys)))]
        groups: dict[Lane, list[int]] = {}
        keyless: Lane | None = None
        with self._buffer.lock:
            for position, key in enumerate(keys):
                if key is None and self._partitioner is None:
                    lane = keyless = keyless or self._stick(lanes, self._batch_size)
                else:
                    lane = lanes.lanes[self._number(lanes, key)]
                groups.setdefault(lane, []).append(position)
        return list(groups.items())

    # -- partitions, with the buffer's lock held -----------------------------------------------------------------

    def _number(self, lanes: _Topic, key: bytes | None) -> int:
        if self._partitioner is not None:
            if lanes.available is None:
                self._look_up(lanes)
            number = self._partitioner(key, list(lanes.lanes), lanes.available or list(lanes.lanes))
            if number not in lanes.lanes:
                raise UnknownTopicOrPartition(f"the partitioner chose partition {number!r} of {lanes.name}")
            return number
        assert key is not None
        if lanes.available is None:
            self._look_up(lanes)
        found = lanes.keys.get(key)
        if found is None:
            found = partition_for_key(key, len(lanes.lanes))
            if len(lanes.keys) >= _KEYS_CACHED_MAX:
                lanes.keys.clear()
            lanes.keys[key] = found
        return found

    def _stick(self, lanes: _Topic, size: int) -> Lane:
        lane = lanes.sticky
        if lane is not None and lanes.available is not None and lanes.stuck_bytes + size <= self._batch_size:
            lanes.stuck_bytes += size
            return lane
        if lanes.available is None:
            self._look_up(lanes)
            if lane is not None and lane.partition in (lanes.available or lanes.lanes):
                return self._stick(lanes, size)
        if lane is not None and lane.open is not None:
            self._buffer.close_open(lane)
        choices = lanes.available or list(lanes.lanes)
        lanes.cursor += 1
        lanes.sticky = lane = lanes.lanes[choices[lanes.cursor % len(choices)]]
        # As the batch counts, so that they are full together.
        lanes.stuck_bytes = BATCH_OVERHEAD + size
        return lane

    def _look_up(self, lanes: _Topic) -> None:
        """Take over what the metadata says by now: new partitions, and which have a leader."""
        view = self._router.metadata.topics.get(lanes.name)
        if view is None:
            lanes.available = list(lanes.lanes)
            return
        if len(view.partitions) != len(lanes.lanes):
            lanes.keys.clear()
        for number in view.partitions:
            if number not in lanes.lanes:
                order: PartitionOrder[Any] = PartitionOrder(self._window, idempotent=self._idempotent)
                lanes.lanes[number] = Lane(lanes.name, view.topic_id, number, order)
        lanes.available = [number for number, seen in view.partitions.items() if seen.leader != NO_BROKER]

    def _find_lane(self, lanes: _Topic, partition: int) -> Lane:
        self._look_up(lanes)
        lane = lanes.lanes.get(partition)
        if lane is None:
            raise UnknownTopicOrPartition(f"topic {lanes.name} has no partition {partition!r}")
        return lane

    # -- the rest ------------------------------------------------------------------------------------------------

    def _find_topic(self, name: str) -> _Topic:
        """Wait until the cluster knows the topic."""
        if self._closed:
            raise ClientClosed
        self._find_view(name)
        with self._buffer.lock:
            lanes = self._topics.get(name)
            if lanes is None:
                lanes = _Topic(name)
                self._look_up(lanes)
                if not lanes.lanes:
                    raise UnknownTopicOrPartition(f"topic {name} was deleted")
                self._topics[name] = lanes
        return lanes

    def _find_view(self, name: str, timeout_s: float | None = None) -> TopicView:
        check_topic_name(name, internal=True)
        self._router.watch([name])
        limit_s = self._max_block_s if timeout_s is None else timeout_s
        view = self._router.wait_for(lambda: self._router.metadata.topics.get(name), limit_s)
        if view is None:
            raise UnknownTopicOrPartition(f"no topic {name!r} (looked for {limit_s:g} s)")
        return view

    def partitions_for(self, topic: str, timeout: float | None = None) -> set[int]:
        """The numbers of a topic's partitions. Waits for an unknown topic to appear: `timeout` s, or max_block_ms."""
        self._network.check()
        return set(self._find_view(topic, timeout).partitions)

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until it is settled, well or not (the futures tell)."""
        self._network.check()
        if not self._buffer.flush(timeout):
            raise RequestTimedOut(f"not everything was acknowledged within {timeout} s; it is still under way")

    def metrics(self) -> dict[str, dict[str, float]]:
        """Numbers by group and name, as kafka-python has them; docs/producing.md says what each is."""
        conversion = self._conversion
        interceptors = conversion.interceptors if conversion is not None else None
        return self._metrics.snapshot(
            buffer_used=self._buffer.used,
            buffer_total=self._buffer.memory_max,
            requests_in_flight=self._sender.in_flight,
            interceptor_errors=interceptors.errors if interceptors is not None else 0,
        )

    def bootstrap_connected(self) -> bool:
        """Whether there is a connection to a broker. One that was just made has a second to get there."""
        self._network.check()
        with contextlib.suppress(NoBrokersAvailable):
            self._router.wait_for(lambda: self._router.connected() or None, CONNECTED_S)
        return self._router.connected()

    def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds, and end. What is unsettled then fails with ClientClosed."""
        if self._closed:
            return
        self._closed = True
        try:
            self._network.check()
        except ClientClosed:
            return
        with self._buffer.lock:
            self._buffer.error = self._buffer.error or ClientClosed()
        self._buffer.flush(timeout)
        self._network.post(lambda: self._sender.shut(ClientClosed()))
        self._network.close()
        if self._conversion is not None:
            self._conversion.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _forget_available(topics: dict[str, _Topic]) -> None:
    for lanes in list(topics.values()):
        lanes.available = None


def _idempotence(asked: bool | None, acks: int, in_flight: int) -> bool:
    if asked is None:
        return acks == ACKS_ALL and in_flight <= WINDOW_MAX
    if asked and acks != ACKS_ALL:
        raise ConfigError("enable_idempotence needs acks=all: without it a retry may find the record gone")
    if asked and in_flight > WINDOW_MAX:
        raise ConfigError(
            f"max_in_flight_requests_per_connection: {in_flight} exceeds {WINDOW_MAX}, all that brokers remember"
        )
    return asked


def _check_at_least(least: int, **settings: float) -> None:
    for name, value in settings.items():
        if not value >= least:
            raise ConfigError(f"{name}: {value!r} is below {least}")
