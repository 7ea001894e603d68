"""Records on their way from `send` to the network, in columns per partition, within `buffer_memory`.

Callers append under one lock, and the IO thread takes closed batches out under the same lock; nothing else happens
under it (encoding, compressing and sending come after). A batch is closed when the next record would not fit into
`batch_size` (an upper bound of its encoded size is counted), when it has lingered, when somebody waits for it, for room
in the buffer or for a flush. While a partition's window is full its open batch keeps filling; and while any batch of it
is unanswered, one that nobody waits for: so the busier the brokers are, the less they get to do for the same records.

Invariants
- A record's place is decided under the lock: two sends of one thread to one partition are written in their order.
- `used` is the memory of all records that are not settled; it falls when a batch is settled, not when it is sent.
- A lane is in `busy` exactly while it has batches here or unsettled ones in its order.

An event loop must not be blocked, so `blocks` is off for its producer: that asks for room before it appends
(`await_room`), and what it appends then may exceed `memory_max` once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from zmqueue.client.futures import Delivery
from zmqueue.client.ordering import Ordered, PartitionOrder
from zmqueue.errors import BufferFull, ClientClosed, ZmqueueError
from zmqueue.wire.batch import HEADER_BYTES, BatchHeader

# Upper bounds of what CBOR adds: to a byte string, to a record's delta, to a header's name, to a batch's five columns.
BYTES_OVERHEAD = 5
RECORD_OVERHEAD = BYTES_OVERHEAD + 9
HEADER_OVERHEAD = 11
BATCH_OVERHEAD = HEADER_BYTES + 1 + 5 * 5
# What Python adds in memory: to a record, a bytes object and its places in lists; to its key, another; to its headers a
# list, and to each of them a pair, its bytes and places.
MEMORY_OVERHEAD = 50
KEY_MEMORY = 42
HEADERS_MEMORY = 72
HEADER_MEMORY = 140

Headers = list[Any]


class Batch(Ordered):
    """Columns while it is open; header and body once it is encoded."""

    __slots__ = (
        "base_timestamp",
        "body",
        "columns_bytes",
        "created",
        "delivery",
        "deltas",
        "header",
        "headers",
        "keys",
        "lane",
        "memory",
        "values",
    )

    def __init__(self, lane: Lane, base_timestamp: int, created: float, deadline: float, delivery: Delivery) -> None:
        super().__init__(0, deadline)
        self.lane = lane
        self.base_timestamp = base_timestamp
        self.created = created
        self.delivery = delivery
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.headers: list[Headers | None] | None = None
        self.deltas: list[int] = []
        self.columns_bytes = BATCH_OVERHEAD
        self.memory = 0
        self.header: BatchHeader | None = None
        self.body: bytes = b""


class Lane:
    """One partition as the producer sees it. `order` belongs to the IO thread, the rest to the buffer's lock."""

    __slots__ = ("closed", "hurried", "open", "order", "partition", "topic", "topic_id")

    def __init__(self, topic: str, topic_id: bytes, partition: int, order: PartitionOrder[Batch]) -> None:
        self.topic, self.topic_id, self.partition = topic, topic_id, partition
        self.order = order
        self.open: Batch | None = None
        self.closed: deque[Batch] = deque()
        self.hurried = False


class Buffer:
    def __init__(
        self,
        *,
        batch_size: int,
        linger_s: float,
        memory_max: int,
        max_block_s: float,
        delivery_timeout_s: float,
        on_work: Callable[[], None],
        check: Callable[[], None],
        on_settled: Callable[[Batch, ZmqueueError | None], None],
    ) -> None:
        self.batch_size = batch_size
        self.linger_s = linger_s
        self.memory_max = memory_max
        self.used = 0
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.busy: dict[Lane, None] = {}
        self.pending: set[Delivery] = set()
        self.error: ZmqueueError | None = None  # set: nothing more is accepted
        self.blocks = True
        self._max_block_s = max_block_s
        self._delivery_timeout_s = delivery_timeout_s
        self._on_work = on_work
        self._check = check
        self._on_settled = on_settled
        self._signalled = False
        self._starved = 0
        self._flushing = 0
        self._on_room: list[Callable[[], None]] = []

    # -- callers' threads, with the lock held ----------------------------------------------------------------------

    def append(
        self,
        lane: Lane,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        size: int,
    ) -> Batch:
        """The batch that took the record, as its last one. The lock is held, and let go while there is no room."""
        memory = size + MEMORY_OVERHEAD
        if key is not None:
            memory += KEY_MEMORY
        if headers is not None:
            memory += HEADERS_MEMORY + HEADER_MEMORY * len(headers)
        if self.used + memory > self.memory_max or self.error is not None:
            self.make_room(memory)
        batch = lane.open
        if batch is None or batch.columns_bytes + size > self.batch_size:
            batch = self._renew(lane, timestamp_ms)
        values = batch.values
        if key is not None or batch.keys is not None:
            if batch.keys is None:
                batch.keys = [None] * len(values)
            batch.keys.append(key)
        if headers is not None or batch.headers is not None:
            if batch.headers is None:
                batch.headers = [None] * len(values)
            batch.headers.append(headers)
        values.append(value)
        batch.deltas.append(timestamp_ms - batch.base_timestamp)
        batch.columns_bytes += size
        batch.memory += memory
        self.used += memory
        return batch

    def extend(
        self,
        lane: Lane,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Headers | None] | None,
        timestamps_ms: Sequence[int] | int,
        size: int,
    ) -> tuple[Batch, int]:
        """Many records that fit into one batch together; the batch, and the index of the first of them."""
        memory = size + MEMORY_OVERHEAD * len(values)
        if keys is not None:
            memory += KEY_MEMORY * len(values)
        if headers is not None:
            memory += HEADERS_MEMORY * len(values) + HEADER_MEMORY * sum(len(pairs) for pairs in headers if pairs)
        if self.used + memory > self.memory_max or self.error is not None:
            self.make_room(memory)
        first = timestamps_ms if isinstance(timestamps_ms, int) else timestamps_ms[0]
        batch = lane.open
        if batch is None or batch.columns_bytes + size > self.batch_size:
            batch = self._renew(lane, first)
        start = len(batch.values)
        if keys is not None or batch.keys is not None:
            if batch.keys is None:
                batch.keys = [None] * start
            batch.keys.extend(keys if keys is not None else repeat(None, len(values)))
        if headers is not None or batch.headers is not None:
            if batch.headers is None:
                batch.headers = [None] * start
            batch.headers.extend(headers if headers is not None else repeat(None, len(values)))
        batch.values.extend(values)
        base = batch.base_timestamp
        if isinstance(timestamps_ms, int):
            batch.deltas.extend(repeat(timestamps_ms - base, len(values)))
        else:
            batch.deltas.extend([timestamp - base for timestamp in timestamps_ms])
        batch.columns_bytes += size
        batch.memory += memory
        self.used += memory
        return batch, start

    def close_open(self, lane: Lane) -> None:
        if lane.open is not None:
            lane.closed.append(lane.open)
            lane.open = None
            self._signal()

    def make_room(self, memory: int) -> None:
        """Wait until so much fits. Raises BufferFull after max_block_ms."""
        deadline = time.monotonic() + self._max_block_s
        self._starved += 1
        try:
            while self.error is None and self.blocks and self.used and self.used + memory > self.memory_max:
                self._check()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise BufferFull(f"{self.used} of {self.memory_max} bytes are unsent, and nothing left in time")
                self._signal()
                # The bound lets a closed client be noticed.
                self.room.wait(min(remaining, 1.0))
        finally:
            self._starved -= 1
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _renew(self, lane: Lane, timestamp_ms: int) -> Batch:
        if lane.open is not None:
            lane.closed.append(lane.open)
        now = time.monotonic()
        delivery = Delivery(lane.topic, lane.partition, timestamp_ms, partial(self.hurry, lane))
        batch = lane.open = Batch(lane, timestamp_ms, now, now + self._delivery_timeout_s, delivery)
        delivery.deltas = batch.deltas
        self.pending.add(delivery)
        self.busy[lane] = None
        self._signal()
        return batch

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._on_work()

    # -- callers' threads --------------------------------------------------------------------------------------

    def hurry(self, lane: Lane) -> None:
        """Somebody waits for what is in this lane."""
        self._check()
        with self.lock:
            if lane.open is not None:
                lane.hurried = True
                self._signal()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything that is here now is settled."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        deliveries = self.begin_flush()
        try:
            for delivery in deliveries:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not delivery.wait(remaining):
                    return False
        finally:
            self.end_flush()
        return True

    def begin_flush(self) -> list[Delivery]:
        """What is here now. Until `end_flush`, nothing lingers."""
        with self.lock:
            self._flushing += 1
            self._signal()
            return list(self.pending)

    def end_flush(self) -> None:
        with self.lock:
            self._flushing -= 1

    @property
    def has_room(self) -> bool:
        return self.used < self.memory_max or self.error is not None

    def await_room(self, on_room: Callable[[], None]) -> bool:
        """True if there is room. If not, `on_room` is called once when there may be; until then nothing lingers."""
        with self.lock:
            if self.has_room:
                return True
            self._on_room.append(on_room)
            self._starved += 1
            self._signal()
            return False

    def _waiting_for_room(self) -> list[Callable[[], None]]:
        """Those who asked to be called. The lock is held; it must not be when they are."""
        waiting, self._on_room = self._on_room, []
        self._starved -= len(waiting)
        return waiting

    # -- IO thread ---------------------------------------------------------------------------------------------

    def begin_pump(self) -> list[Lane]:
        with self.lock:
            self._signalled = False
            return list(self.busy)

    def take(self, lane: Lane, now: float, *, gather: bool = False) -> tuple[Batch | None, float]:
        """The oldest batch that may leave; or None, and when one will.

        `gather`: one that can still grow may not, unless somebody waits for it.
        """
        with self.lock:
            if lane.closed:
                return self._closed(lane.closed.popleft()), 0.0
            batch = lane.open
            if batch is None or (gather and not (lane.hurried or self._flushing or self._starved)):
                return None, float("inf")
            due = batch.created + self.linger_s
            if now >= due or lane.hurried or self._flushing or self._starved:
                lane.open = None
                lane.hurried = False
                return self._closed(batch), 0.0
            return None, due

    def expire(self, lane: Lane, now: float) -> list[Batch]:
        """Take out what has waited here too long; it was never sent."""
        expired = []
        with self.lock:
            while lane.closed and lane.closed[0].deadline <= now:
                expired.append(self._closed(lane.closed.popleft()))
            if not lane.closed and lane.open is not None and lane.open.deadline <= now:
                expired.append(self._closed(lane.open))
                lane.open = None
        return expired

    def settle(self, batch: Batch, error: ZmqueueError | None) -> None:
        with self.lock:
            self.used -= batch.memory
            self.pending.discard(batch.delivery)
            waiting: list[Callable[[], None]] = []
            if self._starved:
                waiting = self._waiting_for_room()
                self.room.notify_all()
        self._on_settled(batch, error)
        batch.delivery.finish(error)
        for on_room in waiting:
            on_room()

    def rest(self, lane: Lane) -> None:
        """Forget a lane that has nothing more to do."""
        with self.lock:
            if lane.open is None and not lane.closed and not lane.order.unsettled:
                self.busy.pop(lane, None)

    def refuse(self, error: ZmqueueError | None = None) -> list[Batch]:
        """Accept nothing more, and give out all that was not sent."""
        batches: list[Batch] = []
        with self.lock:
            self.error = self.error or error or ClientClosed()
            for lane in self.busy:
                batches += map(self._closed, lane.closed)
                lane.closed.clear()
                if lane.open is not None:
                    batches.append(self._closed(lane.open))
                    lane.open = None
            waiting = self._waiting_for_room()
            self.room.notify_all()
        for on_room in waiting:
            on_room()
        return batches

    def _closed(self, batch: Batch) -> Batch:
        batch.count = len(batch.values)
        return batch
