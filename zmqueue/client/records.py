"""Fetched bytes as a consumer sees them: batches of columns, or records made from them in bulk.

A broker hands out byte ranges of its log as they are; nothing in them is believed before both checksums and the shape
of the columns have been proved here, in the thread that asked for the records.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from zmqueue.client import arrow
from zmqueue.client.arrow import to_arrow, to_pandas
from zmqueue.client.serializers import Deserializing
from zmqueue.errors import CorruptBatch, DeserializationError, ZmqueueError
from zmqueue.model import LOG_APPEND_TIME, ConsumerRecord
from zmqueue.wire import batch as wire_batch

__all__ = ["RecordBatch", "deserialized", "end_of_range", "open_batches", "to_arrow", "to_pandas"]

# body_length, raw_length, record_count, last_offset_delta, base_offset: what is needed to step over a batch.
_STEP = struct.Struct("<IIIIq")
_STEP_AT = 8
_EPOCH = struct.Struct("<i")
_EPOCH_AT = 64


def end_of_range(data: bytes, offset: int) -> tuple[int, int]:
    """The offset after a range of whole batches that holds `offset`, and the leader epoch of its last batch.

    From the headers alone, so it is good for deciding what to ask for next: the checksums are proved when the batches
    are opened. Raises CorruptBatch.
    """
    at, end, last = 0, offset, 0
    while at < len(data):
        if len(data) - at < wire_batch.HEADER_BYTES:
            raise CorruptBatch("a fetched range ends within a batch header")
        body_length, _, _, last_offset_delta, base_offset = _STEP.unpack_from(data, at + _STEP_AT)
        last = at
        at += wire_batch.HEADER_BYTES + body_length
        next_offset = base_offset + last_offset_delta + 1
        if at > len(data) or next_offset <= end:
            raise CorruptBatch("a fetched range does not consist of whole batches in order")
        end = next_offset
    return end, _EPOCH.unpack_from(data, last + _EPOCH_AT)[0]


class RecordBatch:
    """Columns of one batch, one entry per record. `keys` and `headers` are None where no record has any."""

    __slots__ = (
        "headers",
        "keys",
        "keys_are_bytes",
        "leader_epoch",
        "next_offset",
        "offsets",
        "partition",
        "timestamp_type",
        "timestamps",
        "topic",
        "values",
        "values_are_bytes",
    )

    def __init__(self, topic: str, partition: int, header: wire_batch.BatchHeader, columns: wire_batch.Columns) -> None:
        self.topic, self.partition = topic, partition
        self.leader_epoch = header.leader_epoch
        self.next_offset = header.next_offset
        self.timestamp_type = header.timestamp_type
        base, count = header.base_offset, header.record_count
        self.offsets: Sequence[int] = (
            range(base, base + count)
            if columns.offset_deltas is None
            else [base + delta for delta in columns.offset_deltas]
        )
        self.timestamps: list[int]
        if header.timestamp_type == LOG_APPEND_TIME:
            self.timestamps = [header.max_timestamp] * count
        elif columns.timestamp_deltas is None:
            self.timestamps = [header.base_timestamp] * count
        else:
            first = header.base_timestamp
            self.timestamps = [first + delta for delta in columns.timestamp_deltas]
        self.keys: list[Any] | None = columns.keys
        self.values: list[Any] = columns.values
        self.headers: list[Any] | None = columns.headers
        self.keys_are_bytes = self.values_are_bytes = True

    @property
    def base_offset(self) -> int:
        return self.offsets[0] if self.offsets else self.next_offset

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"<RecordBatch {self.topic}-{self.partition} {self.base_offset}..{self.next_offset}>"

    def drop_below(self, offset: int) -> None:
        """A range begins with the batch that holds the offset asked for, not with that offset."""
        offsets = self.offsets
        skip = 0
        while skip < len(offsets) and offsets[skip] < offset:
            skip += 1
        if skip:
            self._cut(skip, len(offsets))

    def only(self, wanted: Container[int]) -> RecordBatch:
        """Itself, with the records at these offsets alone."""
        places = [place for place, offset in enumerate(self.offsets) if offset in wanted]

        def pick(column: Sequence[Any]) -> list[Any]:
            return [column[place] for place in places]

        self.offsets, self.timestamps, self.values = pick(self.offsets), pick(self.timestamps), pick(self.values)
        self.keys = pick(self.keys) if self.keys is not None else None
        self.headers = pick(self.headers) if self.headers is not None else None
        return self

    def _cut(self, at: int, end: int) -> None:
        self.offsets, self.timestamps = self.offsets[at:end], self.timestamps[at:end]
        self.values = self.values[at:end]
        self.keys = self.keys[at:end] if self.keys is not None else None
        self.headers = self.headers[at:end] if self.headers is not None else None

    def deserialize(self, key: Deserializing | None, value: Deserializing | None) -> ZmqueueError | None:
        """Make objects of keys and values, up to the first record with which that fails.

        That record and those behind it are cut off, and the error says which it is. An error that may pass, as when no
        broker is there to tell a schema, is returned as it is: it says nothing about the record.
        """
        raw_keys, raw_values = self.keys, self.values
        failures: list[tuple[int, str, Exception]] = []
        if key is not None and raw_keys is not None:
            self.keys, failure = key.many(self.topic, raw_keys, self.headers)
            self.keys_are_bytes = False
            if failure is not None:
                failures.append((len(self.keys), "key", failure))
        if value is not None:
            self.values, failure = value.many(self.topic, raw_values, self.headers)
            self.values_are_bytes = False
            if failure is not None:
                failures.append((len(self.values), "value", failure))
        if not failures:
            return None
        at, what, cause = min(failures, key=lambda failure: failure[0])
        error: ZmqueueError
        if isinstance(cause, ZmqueueError) and cause.retriable:
            error = cause
        else:
            place = f"{self.topic}-{self.partition} at offset {self.offsets[at]}"
            error = DeserializationError(f"{place}: its {what} cannot be deserialized: {cause}")
            error.record = ConsumerRecord(
                self.topic,
                self.partition,
                self.offsets[at],
                self.timestamps[at],
                self.timestamp_type,
                raw_keys[at] if raw_keys is not None else None,
                raw_values[at],
                _pairs(self.headers[at] if self.headers is not None else None),
            )
            error.topic, error.partition, error.offset = self.topic, self.partition, self.offsets[at]
            error.__cause__ = cause
        self.next_offset = self.offsets[at]
        self._cut(0, at)
        return error

    def records(self, at: int = 0, end: int | None = None) -> list[ConsumerRecord]:
        """The records, or some of them, made without a Python call for each."""
        part = slice(at, end)
        headers = repeat([]) if self.headers is None else map(_pairs, self.headers[part])
        return list(
            map(
                ConsumerRecord,
                repeat(self.topic),
                repeat(self.partition),
                self.offsets[part],
                self.timestamps[part],
                repeat(self.timestamp_type),
                self.keys[part] if self.keys is not None else repeat(None),
                self.values[part],
                headers,
            )
        )

    def to_arrow(self) -> Any:
        """As a pyarrow.RecordBatch: topic, partition, offset, timestamp, key, value, headers."""
        return arrow.batch_to_arrow(self)

    def to_pandas(self) -> Any:
        """The same as a pandas.DataFrame."""
        return to_pandas([self])


def _pairs(row: Any) -> list[tuple[str, bytes]]:
    return [] if row is None else list(map(tuple, row))


def open_batches(topic: str, partition: int, data: bytes, offset: int) -> Iterator[RecordBatch]:
    """Prove and open the batches of a range, without the records below `offset`.

    Raises CorruptBatch (or FutureFormat), naming the place, when it comes to a batch that is not sound.
    """
    batches = wire_batch.split(data)
    while True:
        try:
            closed = next(batches, None)
            if closed is None:
                return
            header = closed.header
            if header.next_offset <= offset:
                continue
            if header.attributes & wire_batch.CONTROL:
                offset = header.next_offset
                continue
            opened = RecordBatch(topic, partition, header, wire_batch.decode(header, closed.body))
        except ZmqueueError as error:
            raise type(error)(f"{topic}-{partition} at offset {offset}: {error}") from error
        opened.drop_below(offset)
        offset = header.next_offset
        yield opened


def deserialized(
    batches: Iterable[RecordBatch], key: Deserializing | None, value: Deserializing | None
) -> Iterator[RecordBatch]:
    """These batches with objects. A record of which none can be made ends them, after those before it."""
    for batch in batches:
        error = batch.deserialize(key, value)
        if error is None or len(batch):
            yield batch
        if error is not None:
            raise error
