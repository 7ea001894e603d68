"""One file of a partition's log: whole batches, one behind the other, named by the offset of the first.

Invariants
- Batches lie without gaps, in bytes and in offsets: the first begins at base_offset, the last ends at next_offset.
- `size` is where the next batch goes; what the file may hold beyond it is not part of the log.
- The index is a cache: an entry is a true batch boundary, and losing it costs a longer walk over headers, nothing else.

Nothing leaves a segment unproved: a batch that is served has had both checksums compared after it was read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from zmqueue.errors import CorruptBatch, CorruptLog
from zmqueue.log.files import Files, OpenFile
from zmqueue.model import KiB
from zmqueue.wire.batch import HEADER_BYTES, BatchHeader, check_body, parse_header

SUFFIX = ".log"
NO_TIMESTAMP = -(1 << 63)
# Offsets and positions in the index are kept as 32 bits, relative to the segment.
SPAN_MAX = (1 << 32) - 1
# A walk over headers reads this much at once where batches are small, and single headers where they are large.
_WALK_BYTES = 64 * KiB
_SMALL_BATCH_BYTES = 4 * KiB


def segment_name(base_offset: int) -> str:
    return f"{base_offset:020d}{SUFFIX}"


class SparseIndex:
    """Where batches lie, one in about every `interval_bytes`: 16 bytes of memory per entry.

    With each boundary goes the highest timestamp of the segment *before* it. That never decreases, so the first batch
    that may hold a time lies behind the last entry whose timestamp is below it, whatever order the producers' clocks
    gave.
    """

    __slots__ = ("_base", "_interval", "_offsets", "_positions", "_timestamps", "due")

    def __init__(self, base_offset: int, interval_bytes: int) -> None:
        self._base = base_offset
        self._interval = interval_bytes
        self._offsets = array("I")
        self._positions = array("I")
        self._timestamps = array("q")
        self.due = interval_bytes  # the first position that deserves an entry

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, offset: int, position: int, timestamp_before: int) -> None:
        self._offsets.append(offset - self._base)
        self._positions.append(position)
        self._timestamps.append(timestamp_before)
        self.due = position + self._interval

    def position_of(self, offset: int) -> int:
        """A boundary at or before the batch that holds `offset`, as near as the index knows."""
        at = bisect_right(self._offsets, offset - self._base)
        return self._positions[at - 1] if at else 0

    def position_from(self, offset: int, otherwise: int) -> int:
        """A boundary at or behind the beginning of `offset`; `otherwise` if the index has none."""
        at = bisect_left(self._offsets, offset - self._base)
        return self._positions[at] if at < len(self._positions) else otherwise

    def position_before_time(self, timestamp: int) -> int:
        """A boundary before which no batch reaches `timestamp`."""
        at = bisect_left(self._timestamps, timestamp)
        return self._positions[at - 1] if at else 0

    def last_boundary(self, position: int) -> int:
        """The last boundary at or before `position`."""
        at = bisect_right(self._positions, position)
        return self._positions[at - 1] if at else 0

    def truncate(self, position: int) -> tuple[int, int]:
        """Forget what lies at or behind `position`. The last entry left: its boundary and the timestamp before it."""
        at = bisect_left(self._positions, position)
        del self._offsets[at:], self._positions[at:], self._timestamps[at:]
        last = self._positions[-1] if at else 0
        self.due = last + self._interval
        return (last, self._timestamps[-1]) if at else (0, NO_TIMESTAMP)


class Segment:
    __slots__ = ("_files", "base_offset", "file", "index", "max_timestamp", "next_offset", "path", "size")

    def __init__(self, files: Files, folder: str, base_offset: int, index_interval_bytes: int) -> None:
        self._files = files
        self.path = f"{folder}/{segment_name(base_offset)}"
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size = 0
        self.max_timestamp = NO_TIMESTAMP
        self.index = SparseIndex(base_offset, index_interval_bytes)
        # Open only while it is appended to or has bytes that are not synced yet.
        self.file: OpenFile | None = None

    # -- the file

    def create(self) -> None:
        self.file = self._files.create(self.path)

    def opened(self) -> OpenFile:
        if self.file is None:
            self.file = self._files.open_append(self.path)
        return self.file

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def remove(self) -> None:
        self.close()
        self._files.remove(self.path)

    def pread(self, count: int, position: int) -> bytes:
        """Bytes of the log; fewer than asked for only at its end. A file that is shorter than its log is damage."""
        count = min(count, self.size - position)
        file = self.file
        data = file.pread(count, position) if file is not None else self._files.pread(self.path, count, position)
        if len(data) != count:
            raise CorruptLog(f"{self.path}: ends at {position + len(data)}, its log at {self.size}")
        return data

    # -- growing and shrinking

    def note(self, header: BatchHeader) -> None:
        """A batch now lies at the end of the file."""
        if self.size >= self.index.due:
            self.index.add(header.base_offset, self.size, self.max_timestamp)
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
        self.size += HEADER_BYTES + header.body_length
        self.next_offset = header.base_offset + header.last_offset_delta + 1

    def truncate(self, position: int, next_offset: int) -> None:
        """Cut at a boundary, which is where `next_offset` lies or would lie. Not synced yet."""
        self.opened().truncate(position)
        at, self.max_timestamp = self.index.truncate(position)
        self.size = position
        self.next_offset = next_offset
        for _, header in self.walk(at):
            self.max_timestamp = max(self.max_timestamp, header.max_timestamp)

    # -- finding and reading

    def walk(self, position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Positions and headers from a boundary on. Bodies are passed over unread."""
        data, start, length = b"", 0, _SMALL_BATCH_BYTES
        while position < self.size:
            at = position - start
            if at + HEADER_BYTES > len(data):
                data = self.pread(_WALK_BYTES if length < _SMALL_BATCH_BYTES else HEADER_BYTES, position)
                start, at = position, 0
            try:
                header = parse_header(data, at)
            except CorruptBatch as error:
                raise self._damaged(position, error) from error
            yield position, header
            length = HEADER_BYTES + header.body_length
            position += length

    def locate(self, offset: int) -> tuple[int, int]:
        """Position and base offset of the batch that holds `offset`; the end if the segment ends before it."""
        if offset >= self.next_offset:
            return self.size, self.next_offset
        for position, header in self.walk(self.index.position_of(offset)):
            if header.next_offset > offset:
                return position, header.base_offset
        raise CorruptLog(f"{self.path}: offset {offset} is missing")

    def read(
        self, position: int, offset: int, bytes_max: int, end_offset: int, records_max: int
    ) -> tuple[bytes, int, int]:
        """Batches from the one at `position`, which holds `offset`, and position and offset of what follows them."""
        limit = self.index.position_from(end_offset, self.size) if end_offset < self.next_offset else self.size
        if limit - position > bytes_max:
            # An index entry is a boundary: a read that ends there brings no part of a batch to be cut off again.
            limit = max(self.index.last_boundary(position + bytes_max), 0)
            if limit <= position:
                limit = position + max(bytes_max, HEADER_BYTES)
        data = self.pread(limit - position, position)
        at, records, expected = 0, 0, -1
        while at < len(data) and not (records_max and records >= records_max):
            try:
                if at and len(data) - at < HEADER_BYTES:
                    break
                header = parse_header(data, at)
                stop = at + HEADER_BYTES + header.body_length
                following = header.base_offset + header.last_offset_delta + 1
                if following > end_offset or (at and stop > min(bytes_max, len(data))):
                    break
                if stop > len(data):
                    data += self.pread(stop - len(data), position + len(data))
                check_body(header, data[at + HEADER_BYTES : stop])
            except CorruptBatch as error:
                raise self._damaged(position + at, error) from error
            if header.base_offset != expected and not (at == 0 and header.base_offset <= offset < following):
                raise CorruptLog(f"{self.path}: at {position + at} lies offset {header.base_offset}, not {expected}")
            at, expected = stop, following
            records += header.record_count
        return data if at == len(data) else data[:at], position + at, expected

    def _damaged(self, position: int, error: CorruptBatch) -> CorruptLog:
        return CorruptLog(f"{self.path}: damaged at {position}: {error}")
