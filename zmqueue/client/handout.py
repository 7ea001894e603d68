"""From what was fetched to what the application gets: batches proved, opened and cut, in the thread that polls.

A position moves when records are handed out, so what was only prefetched is never skipped. An error found after other
records were gathered waits for the next poll: those records are handed out first. Records that an iteration was given
and has not come to are here too (`iterated`), and are not handed out yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from zmqueue.client.fetcher import Fetcher
from zmqueue.client.records import RecordBatch, deserialized, open_batches
from zmqueue.client.serializers import Deserializing
from zmqueue.client.slots import Slot
from zmqueue.errors import LogTruncated, ZmqueueError
from zmqueue.model import ConsumerRecord, TopicPartition

Records = dict[TopicPartition, list[ConsumerRecord]]

# What `gather_batches` opens at a time: so little that it is still in the processor's cache when it is looked at.
BATCHES_RECORDS = 4_000


class HandOut:
    def __init__(
        self, fetcher: Fetcher, key: Deserializing | None, value: Deserializing | None, *, goes_on: bool
    ) -> None:
        """`goes_on`: where records were lost, reading goes on by itself once the application was told."""
        self.iterated: deque[ConsumerRecord] = deque()
        self._fetcher = fetcher
        self._deserializers = key, value
        self._goes_on = goes_on
        self._turn = 0
        self.records = 0  # handed out so far

    def has_data(self) -> bool:
        slots = self._fetcher.slots.values()
        return any(slot.live and ((slot.chunks and not slot.paused) or slot.error is not None) for slot in slots)

    def position(self, slot: Slot) -> int | None:
        """The offset of the next record that the application will get of this slot, where that is known."""
        for record in list(self.iterated):
            if (record.topic, record.partition) == slot.partition:
                return record.offset
        return slot.position

    def positions(self) -> list[tuple[Slot, int, int]]:
        """Every slot that has one: its position, and the leader epoch of the record before (-1: not known)."""
        ahead: dict[tuple[str, int], int] = {}
        for record in list(self.iterated):
            ahead.setdefault((record.topic, record.partition), record.offset)
        found = []
        for slot in self._fetcher.slots.values():
            if slot.partition in ahead:
                at = ahead[slot.partition]
                within = slot.first_epoch if slot.first_epoch == slot.epoch else -1
                found.append((slot, at, slot.before[1] if at == slot.before[0] else within))
            elif slot.position is not None:
                found.append((slot, slot.position, slot.epoch))
        return found

    def take_iterated(self, limit: int) -> Records:
        found: Records = {}
        while self.iterated and limit:
            record = self.iterated.popleft()
            found.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
            limit -= 1
        return found

    def take_back(self, slots: Collection[Slot]) -> None:
        """What an iteration was given of these and has not come to is fetched again when it is wanted."""
        if not self.iterated:
            return
        for slot, offset, epoch in self.positions():
            if slot in slots and slot.position != offset:
                with self._fetcher.changed:
                    slot.seek(offset, epoch)
        self.drop_iterated({slot.partition for slot in slots})
        self._fetcher.poke()

    def drop_iterated(self, partitions: Collection[TopicPartition]) -> None:
        self.iterated = deque(r for r in self.iterated if (r.topic, r.partition) not in partitions)

    def keep_iterated(self, partitions: Collection[TopicPartition]) -> None:
        self.iterated = deque(r for r in self.iterated if (r.topic, r.partition) in partitions)

    def _in_turn(self) -> list[Slot]:
        """The slots that may hand out, beginning with another one each time."""
        slots = [
            slot for slot in self._fetcher.slots.values() if slot.live and not (slot.paused and slot.error is None)
        ]
        self._turn += 1
        cut = self._turn % len(slots) if slots else 0
        return slots[cut:] + slots[:cut]

    def gather(self, limit: int) -> Records:
        found: Records = {}
        for slot in self._in_turn():
            records: list[ConsumerRecord] = []
            before, first_epoch = (slot.position, slot.epoch), None
            try:
                while limit > 0 and (batch := self._current(slot)) is not None:
                    end = min(len(batch), slot.cursor + limit)
                    more = batch.records(slot.cursor, end)
                    first_epoch = batch.leader_epoch if first_epoch is None else first_epoch
                    limit -= len(more)
                    self._advance(slot, batch, end)
                    records = records + more if records else more
            except ZmqueueError as error:
                if not found and not records:
                    raise
                slot.error = error
            if records and first_epoch is not None:
                found[slot.partition] = records
                self.records += len(records)
                slot.before, slot.first_epoch = before, first_epoch
            if limit <= 0 or slot.error is not None:
                break
        return found

    def gather_batches(self) -> list[RecordBatch]:
        self.take_back(self._fetcher.slots.values())
        found: list[RecordBatch] = []
        count = 0
        for slot in self._in_turn():
            try:
                while (batch := self._current(slot)) is not None:
                    if slot.cursor:
                        batch.drop_below(batch.offsets[slot.cursor])
                    self._advance(slot, batch, len(batch))
                    found.append(batch)
                    self.records += len(batch)
                    count += len(batch)
                    if count >= BATCHES_RECORDS:
                        return found
            except ZmqueueError as error:
                if not found:
                    raise
                slot.error = error
                break
        return found

    def _advance(self, slot: Slot, batch: RecordBatch, end: int) -> None:
        slot.epoch = batch.leader_epoch
        if end < len(batch):
            slot.cursor = end
            slot.position = batch.offsets[end]
        else:
            slot.current, slot.cursor = None, 0
            slot.position = batch.next_offset

    def _current(self, slot: Slot) -> RecordBatch | None:
        """The batch to hand out from, opened when it is needed. Raises what is wrong with it."""
        if slot.stopped:
            return None
        while slot.current is None:
            if slot.opened is not None:
                try:
                    slot.current = next(slot.opened, None)
                except ZmqueueError:
                    self._read_again(slot)
                    raise
                if slot.current is None:
                    slot.opened = None
                elif not len(slot.current):
                    slot.position, slot.epoch = slot.current.next_offset, slot.current.leader_epoch
                    slot.current = None
                continue
            if slot.error is not None and not slot.chunks:
                self.raise_error(slot)
            chunk = self._fetcher.take_chunk(slot)
            if chunk is None:
                return None
            assert slot.position is not None
            opened = open_batches(*slot.partition, chunk.data, max(slot.position, chunk.offset))
            slot.opened = deserialized(opened, *self._deserializers)
        return slot.current

    def raise_error(self, slot: Slot) -> None:
        error, slot.error = slot.error, None
        assert error is not None
        if isinstance(error, LogTruncated) and self._goes_on:
            with self._fetcher.changed:
                slot.seek(error.truncated_to)
        self._fetcher.poke()
        raise error.with_traceback(None)

    def _read_again(self, slot: Slot) -> None:
        """What could not be opened is fetched anew when the application polls on: a replica may have it whole."""
        with self._fetcher.changed:
            assert slot.position is not None
            slot.seek(slot.position, slot.epoch)
