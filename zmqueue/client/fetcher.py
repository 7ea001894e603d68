"""The consumer's half that lives in the IO thread: who is asked for what, and what has arrived.

Every assigned partition is a `Slot`. At most one request is under way for a slot; slots with the same leader that want
something share a request, so a consumer that keeps up has one fetch waiting at each leader. The next range is fetched
while the application works on the last one, as long as the slot holds less than `partition_bytes` and all slots
together less than `bytes_max`; so memory is bounded by twice `bytes_max` and one answer per leader.

Slots are shared with the application's thread, under `changed`; what holds of them is in slots.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from msgspec import Struct

from zmqueue.client.network import Answer, Request, Timer
from zmqueue.client.records import end_of_range
from zmqueue.client.routing import BACKOFF_S, BACKOFF_S_MAX, STUCK_S, Router, jittered
from zmqueue.client.slots import Chunk, Reset, Slot
from zmqueue.errors import (
    ClientClosed,
    CorruptBatch,
    FencedEpoch,
    LogTruncated,
    NetworkError,
    NotLeader,
    OffsetOutOfRange,
    ZmqueueError,
    from_code,
)
from zmqueue.model import LATEST, NO_BROKER, TopicPartition
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

ENTRIES_MAX = 4096
RECORDS_MAX = 2**31 - 1
# Slots that find room while others of their leader wait in a long poll may ask beside it, up to so many requests.
REQUESTS_PER_LEADER_MAX = 4
AHEAD_PAUSE_S = 0.1


class FetchSettings(Struct, frozen=True):
    wait_ms: int
    bytes_min: int
    bytes_max: int
    partition_bytes: int
    request_timeout_s: float
    reset: Reset


class Asked:
    """A request under way, for slots as they were when it left."""

    __slots__ = ("leader", "probe", "request", "slots")

    def __init__(self, leader: int, slots: list[tuple[Slot, int]]) -> None:
        self.leader, self.slots = leader, slots
        self.request: Request | None = None
        self.probe: Timer | None = None


class Fetcher:
    def __init__(self, router: Router, settings: FetchSettings) -> None:
        self.changed = threading.Condition()
        self.slots: dict[TopicPartition, Slot] = {}  # replaced as a whole, so that it can be looked through anywhere
        self._router = router
        self._network = router.network
        self._settings = settings
        self._asked: dict[int, set[Asked]] = {}
        self._stuck: set[Asked] = set()
        self._timer: Timer | None = None
        self._posted = False
        self.fetches = self.bytes = 0  # answered, and what they brought
        router.listeners.append(self._on_world)

    # -- any thread ----------------------------------------------------------------------------------------------

    def assign(self, partitions: Iterable[TopicPartition], reset: Reset, *, asks_group: bool = False) -> None:
        """Have slots for these, and keep those that were there."""
        wanted = dict.fromkeys(partitions)
        with self.changed:
            for gone in self.slots.keys() - wanted.keys():
                self.slots[gone].clear()
            slots = {}
            for partition in wanted:
                slot = self.slots.get(partition)
                if slot is None:
                    slot = Slot(partition, reset)
                    slot.asks_group = asks_group
                slots[partition] = slot
            self.slots = slots
        self._router.watch({partition.topic for partition in wanted})
        self.poke()

    def add(self, slots: Collection[Slot]) -> None:
        with self.changed:
            self.slots = self.slots | {slot.partition: slot for slot in slots}
        self._router.watch({slot.partition.topic for slot in slots})
        self.poke()

    def remove(self, slots: Collection[Slot]) -> None:
        """These, and not others that have come for the same partitions."""
        gone = set(map(id, slots))
        with self.changed:
            self.slots = {partition: slot for partition, slot in self.slots.items() if id(slot) not in gone}

    def poke(self) -> None:
        """Something may be worth asking for."""
        if not self._posted:
            self._posted = True
            self._network.post(self._pump_posted)

    def take_chunk(self, slot: Slot) -> Chunk | None:
        with self.changed:
            if not slot.chunks:
                return None
            chunk = slot.chunks.popleft()
            slot.bytes -= len(chunk.data)
        self.poke()
        return chunk

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(ready, timeout_s)

    # -- asking --------------------------------------------------------------------------------------------------

    def _pump_posted(self) -> None:
        self._posted = False
        self.pump()

    def pump(self) -> None:
        now = time.monotonic()
        due = float("inf")
        fetches: dict[int, list[Slot]] = {}
        lookups: dict[int, list[Slot]] = {}
        with self.changed:
            room = sum(slot.bytes for slot in self.slots.values()) < self._settings.bytes_max
            for slot in self.slots.values():
                if slot.waits or slot.halted or slot.stopped or slot.asks_group or slot.error is not None:
                    continue
                if slot.retry_at > now:
                    due = min(due, slot.retry_at)
                elif slot.position is None:
                    self._place(slot, lookups)
                elif room and not slot.paused and slot.bytes < self._settings.partition_bytes:
                    self._place(slot, fetches)
            for leader, slots in lookups.items():
                self._look_up(leader, slots[:ENTRIES_MAX])
            for leader, slots in fetches.items():
                if len(self._asked.get(leader, ())) < REQUESTS_PER_LEADER_MAX:
                    self._fetch(leader, slots[:ENTRIES_MAX])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due != float("inf"):
            self._timer = self._network.call_later(due - now, self.pump)

    def _place(self, slot: Slot, groups: dict[int, list[Slot]]) -> None:
        if slot.position is None and slot.reset is None:
            slot.error = OffsetOutOfRange(f"{_name(slot)} has no position, and auto_offset_reset is none: seek first")
            self.changed.notify_all()
            return
        leader, _ = self._router.metadata.leader(*slot.partition)
        if leader == NO_BROKER or not self._router.ready(leader):
            self._router.refresh(avoid=leader)
        else:
            groups.setdefault(leader, []).append(slot)

    def _fetch(self, leader: int, slots: list[Slot]) -> None:
        settings = self._settings
        entries = [
            messages.FetchEntry(
                self._topic_id(slot),
                slot.partition.partition,
                slot.fetch_offset,
                settings.partition_bytes,
                slot.fetch_epoch,
            )
            for slot in slots
        ]
        message = messages.FetchRequest(settings.wait_ms, settings.bytes_min, settings.bytes_max, RECORDS_MAX, entries)
        wait_s = settings.wait_ms / 1000
        self._ask(leader, slots, Operation.FETCH, message, wait_s, self._on_fetched)

    def _look_up(self, leader: int, slots: list[Slot]) -> None:
        entries = [
            messages.OffsetEntry(self._topic_id(slot), slot.partition.partition, _timestamp(slot.reset))
            for slot in slots
        ]
        message = messages.ListOffsetsRequest(entries)
        self._ask(leader, slots, Operation.LIST_OFFSETS, message, 0.0, self._on_looked_up)

    def _ask(
        self,
        leader: int,
        slots: list[Slot],
        operation: Operation,
        message: Struct,
        wait_s: float,
        take: Callable[[Slot, Any, bytes], None],
    ) -> None:
        for slot in slots:
            slot.waits = True
        asked = Asked(leader, [(slot, slot.token) for slot in slots])
        self._asked.setdefault(leader, set()).add(asked)
        timeout_s = wait_s + self._settings.request_timeout_s
        asked.request = self._router.send(
            leader, operation, message, None, timeout_s, partial(self._on_answer, asked, take)
        )
        asked.probe = self._network.call_later(wait_s + STUCK_S, partial(self._on_stuck, asked))

    def _topic_id(self, slot: Slot) -> bytes:
        return slot.topic_id or self._router.metadata.topics[slot.partition.topic].topic_id

    # -- answers -------------------------------------------------------------------------------------------------

    def _on_answer(self, asked: Asked, take: Callable[[Slot, Any, bytes], None], result: Answer | ZmqueueError) -> None:
        self._forget(asked)
        if isinstance(result, ClientClosed):
            return
        error: ZmqueueError | None = result if isinstance(result, ZmqueueError) else None
        rows: list[Any] = []
        raw: list[bytes] = []
        if isinstance(result, Answer):
            rows, raw = result.message.results, result.raw
            if len(rows) != len(asked.slots) or (raw and len(raw) != len(rows)):
                error = NetworkError("an answer with a wrong number of results")
        self.fetches += 1
        with self.changed:
            for index, (slot, token) in enumerate(asked.slots):
                if slot.token != token:
                    continue
                slot.waits = False
                if error is not None:
                    self._on_error(slot, asked.leader, error)
                elif rows[index].error:
                    self._on_refused(slot, asked.leader, rows[index])
                else:
                    slot.failures = 0
                    take(slot, rows[index], raw[index] if raw else b"")
            self.changed.notify_all()
        self.pump()

    def _on_fetched(self, slot: Slot, row: messages.FetchResult, data: bytes) -> None:
        slot.ahead_since = None
        slot.high_watermark = max(slot.high_watermark, row.high_watermark)
        if not data:
            return
        self.bytes += len(data)
        chunk = Chunk(data, slot.fetch_offset)
        try:
            slot.fetch_offset, slot.fetch_epoch = end_of_range(data, slot.fetch_offset)
        except CorruptBatch:
            # Whatever is sound in it is still handed out; the rest is named when the application comes to it.
            slot.halted = True
        slot.chunks.append(chunk)
        slot.bytes += len(data)

    def _on_looked_up(self, slot: Slot, row: messages.OffsetResult, _: bytes) -> None:
        if row.offset < 0 and slot.reset != LATEST:
            # No record is so young: the next one will be.
            slot.reset = LATEST
        else:
            slot.found(max(0, row.offset))

    def _on_refused(self, slot: Slot, leader: int, row: Any) -> None:
        error = from_code(row.error)
        if isinstance(error, OffsetOutOfRange) and slot.position is not None:
            self._on_out_of_range(slot, row)
        elif isinstance(error, LogTruncated) and slot.position is not None:
            self._on_truncated(slot, row)
        elif isinstance(error, NotLeader | FencedEpoch) and self._hinted(slot, row):
            slot.retry_at = 0.0
        else:
            self._on_error(slot, leader, error)

    def _hinted(self, slot: Slot, row: Any) -> bool:
        view = self._router.metadata.topics.get(slot.partition.topic)
        if view is None or not isinstance(row, messages.FetchResult):
            return False
        return self._router.metadata.hint(view.topic_id, slot.partition.partition, row.leader, row.leader_epoch)

    def _on_out_of_range(self, slot: Slot, row: messages.FetchResult) -> None:
        now = time.monotonic()
        if slot.position != slot.fetch_offset:
            # The application has yet to reach that place; it is not lost what was fetched before.
            slot.retry_at = now + AHEAD_PAUSE_S
            return
        if slot.fetch_offset <= slot.high_watermark and slot.fetch_offset > row.high_watermark:
            # What we have read was committed, so a new leader has it: only its high watermark has yet to catch up.
            slot.ahead_since = slot.ahead_since or now
            if now - slot.ahead_since < self._settings.request_timeout_s:
                slot.retry_at = now + AHEAD_PAUSE_S
                return
        if self._settings.reset is not None:
            slot.look_up(self._settings.reset)
        else:
            limits = f"{row.log_start} to {row.high_watermark}"
            slot.error = OffsetOutOfRange(f"{_name(slot)}: offset {slot.fetch_offset} is not in {limits}")

    def _on_truncated(self, slot: Slot, row: messages.FetchResult) -> None:
        """What was fetched before is handed out first: it was there, and only then are its successors missed."""
        if slot.position != slot.fetch_offset:
            slot.retry_at = time.monotonic() + AHEAD_PAUSE_S
            return
        where = slot.fetch_offset
        lost = f"{_name(slot)}: records from offset {row.truncated_to} on were lost, and it was read up to {where}"
        slot.error = LogTruncated(lost, partition=slot.partition, position=where, truncated_to=row.truncated_to)

    def _on_error(self, slot: Slot, leader: int, error: ZmqueueError) -> None:
        if not error.retriable:
            slot.error = type(error)(f"{_name(slot)} at offset {slot.fetch_offset}: {error}")
            return
        slot.retry_at = time.monotonic() + jittered(BACKOFF_S, slot.failures, BACKOFF_S_MAX)
        slot.failures += 1
        if error.refresh_metadata:
            self._router.refresh(avoid=leader)

    def _forget(self, asked: Asked) -> None:
        self._asked[asked.leader].discard(asked)
        self._stuck.discard(asked)
        if asked.probe is not None:
            asked.probe.cancel()

    # -- the world -----------------------------------------------------------------------------------------------

    def _on_world(self) -> None:
        for asked in list(self._stuck):
            self._redirect(asked)
        self.pump()
        with self.changed:
            self.changed.notify_all()

    def _on_stuck(self, asked: Asked) -> None:
        self._stuck.add(asked)
        asked.probe = self._network.call_later(STUCK_S, partial(self._on_stuck, asked))
        self._router.refresh(avoid=asked.leader)

    def _redirect(self, asked: Asked) -> None:
        """Take back the slots whose leader has moved from a broker that does not answer."""
        waits = False
        with self.changed:
            for slot, token in asked.slots:
                if slot.token != token:
                    continue
                leader, _ = self._router.metadata.leader(*slot.partition)
                if leader in (NO_BROKER, asked.leader):
                    waits = True
                else:
                    slot.token += 1
                    slot.waits = False
        if not waits:
            self._forget(asked)
            if asked.request is not None:
                self._network.cancel(asked.request)


def _timestamp(reset: Reset) -> int:
    if isinstance(reset, timedelta):
        return max(0, int((time.time() - reset.total_seconds()) * 1000))
    return LATEST if reset is None else reset


def _name(slot: Slot) -> str:
    return f"{slot.partition.topic}-{slot.partition.partition}"
