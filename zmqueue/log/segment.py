"""One file of a partition's log: whole batches, one behind the other, named by the offset of the first.

Invariants
- Batches lie without gaps, in bytes and in offsets: the first begins at base_offset, the last ends at next_offset.
- `size` is where the next batch goes; what the file may hold beyond it is not part of the log.
- The index is a cache (see index.py): losing it costs a walk over headers, nothing else. It grows with the segment, and
  goes into a file when the segment is sealed, which is when its successor takes the appends.

Nothing leaves a segment unproved: a batch that is served has had both checksums compared after it was read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from zmqueue.errors import CorruptBatch, CorruptIndex, CorruptLog, StorageFull
from zmqueue.log import index as indexes
from zmqueue.log.files import Files, OpenFile
from zmqueue.log.index import NO_TIMESTAMP, GrowingIndex, Index, SealedIndex, Summary
from zmqueue.model import KiB
from zmqueue.wire.batch import HEADER_BYTES, BatchHeader, check_body, decode, parse_header

SUFFIX = ".log"
# A walk over headers reads this much at once where batches are small, and single headers where they are large.
_WALK_BYTES = 64 * KiB
_SMALL_BATCH_BYTES = 16 * KiB
_READ_BYTES_MIN = 4 * KiB  # costs no more than a header alone


_logger = logging.getLogger(__name__)


def segment_name(base_offset: int) -> str:
    return f"{base_offset:020d}{SUFFIX}"


def index_name(base_offset: int) -> str:
    return f"{base_offset:020d}{indexes.SUFFIX}"


class Segment:
    __slots__ = (
        "_files",
        "_growing",
        "_interval",
        "base_offset",
        "file",
        "index",
        "index_path",
        "max_timestamp",
        "next_offset",
        "path",
        "size",
    )

    def __init__(
        self, files: Files, folder: str, base_offset: int, index_interval_bytes: int, suffix: str = ""
    ) -> None:
        """With a `suffix` to its names it is one in the making, and not part of a log yet."""
        self._files = files
        self._interval = index_interval_bytes
        self.path = f"{folder}/{segment_name(base_offset)}{suffix}"
        self.index_path = f"{folder}/{index_name(base_offset)}{suffix}"
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size = 0
        self.max_timestamp = NO_TIMESTAMP
        # None once it is sealed.
        self._growing: GrowingIndex | None = GrowingIndex(base_offset, index_interval_bytes)
        self.index: Index = self._growing
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
        # The index first: one without its segment would be taken for one that lost it.
        self.drop_index_file()
        self._files.remove(self.path)

    def pread(self, count: int, position: int) -> bytes:
        """Bytes of the log; fewer than asked for only at its end. A file that is shorter than its log is damage."""
        count = min(count, self.size - position)
        file = self.file
        data = file.pread(count, position) if file is not None else self._files.pread(self.path, count, position)
        if len(data) != count:
            raise CorruptLog(f"{self.path}: ends at {position + len(data)}, its log at {self.size}")
        return data

    # -- the index

    @property
    def is_sealed(self) -> bool:
        return self._growing is None

    def seal(self, epochs: list[tuple[int, int]], producers: bytes) -> None:
        """No more is appended: the index goes into a file. It is a cache, so a disk without room for it is no error."""
        growing = self._growing
        if growing is None or self._files.volatile:
            return
        try:
            self._files.put(self.index_path, self.index_file(epochs, producers))
        except StorageFull as error:
            _logger.warning("%s: the index stays in memory: %s", self.path, error)
            return
        self.index = SealedIndex.of(self._files, self.index_path, self.base_offset, len(growing))
        self._growing = None

    def index_file(self, epochs: list[tuple[int, int]], producers: bytes) -> bytes:
        growing = self._growing
        assert growing is not None, f"{self.path} is sealed"
        summary = Summary(
            base_offset=self.base_offset,
            next_offset=self.next_offset,
            log_bytes=self.size,
            max_timestamp=self.max_timestamp,
            interval_bytes=self._interval,
            gap_bytes_max=growing.gap_bytes_max(self.size),
            epochs=epochs,
            producers=producers,
        )
        return indexes.encode(growing, summary)

    def restore(self, index: SealedIndex, summary: Summary) -> None:
        """Take over what its index file knows of this segment, whose batches are then not read."""
        self.next_offset = summary.next_offset
        self.size = summary.log_bytes
        self.max_timestamp = summary.max_timestamp
        self.index, self._growing = index, None

    def unseal(self) -> None:
        """It is appended to, now or again."""
        self._grow_again()
        self.drop_index_file()

    def drop_index_file(self) -> None:
        if not self._files.volatile and self._files.exists(self.index_path):
            self._files.remove(self.index_path)

    def _consult(self, question: Callable[[Index], int]) -> int:
        try:
            return question(self.index)
        except CorruptIndex as error:
            _logger.error("%s; it is made anew", error)
            self._grow_again()
            return question(self.index)

    def _grow_again(self) -> GrowingIndex:
        """The index in memory once more: from its file, or from the headers if that does not prove."""
        if self._growing is not None:
            return self._growing
        try:
            assert isinstance(self.index, SealedIndex)
            growing = self.index.grown(self._interval)
        except CorruptIndex:
            growing = GrowingIndex(self.base_offset, self._interval)
            highest = NO_TIMESTAMP
            for position, header in self.walk(0):
                if position >= growing.due:
                    growing.add(header.base_offset, position, highest)
                highest = max(highest, header.max_timestamp)
        self.index = self._growing = growing
        self.drop_index_file()
        return growing

    # -- growing and shrinking

    def note(self, header: BatchHeader) -> None:
        """A batch now lies at the end of the file."""
        growing = self._growing
        assert growing is not None, f"{self.path} is sealed"
        if self.size >= growing.due:
            growing.add(header.base_offset, self.size, self.max_timestamp)
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
        self.size += HEADER_BYTES + header.body_length
        self.next_offset = header.base_offset + header.last_offset_delta + 1

    def truncate(self, position: int, next_offset: int) -> None:
        """Cut at a boundary, which is where `next_offset` lies or would lie. Not synced yet."""
        growing = self._grow_again()
        self.opened().truncate(position)
        at, self.max_timestamp = growing.truncate(position)
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
        for position, header in self.walk(self._consult(lambda index: index.position_of(offset))):
            if header.next_offset > offset:
                return position, header.base_offset
        raise CorruptLog(f"{self.path}: offset {offset} is missing")

    def position_before_time(self, timestamp: int) -> int:
        """A boundary before which no batch reaches `timestamp`."""
        return self._consult(lambda index: index.position_before_time(timestamp))

    def locate_back(self, offset: int, bytes_max: int) -> tuple[int, int, int]:
        """The batches up to the one that holds `offset`, at most so many bytes of them, but at least that one.

        Position and base offset of the first, and the offset behind the last.
        """
        last = self.locate(offset)[0]
        header = next(self.walk(last))[1]
        earliest = max(0, last + header.total_bytes - bytes_max)
        if earliest >= last:
            return last, header.base_offset, header.next_offset
        for position, first in self.walk(self._consult(lambda index: index.last_boundary(earliest))):
            if position >= earliest:
                return position, first.base_offset, header.next_offset
        raise CorruptLog(f"{self.path}: offset {offset} is missing")

    def boundary_behind(self, position: int, end_offset: int, limit: int, bytes_max: int) -> int:
        """Where a reader stops that begins at `position`: behind the batch that holds the last offset before
        `end_offset`, or before it if it reaches beyond `limit`; earlier, if that is much more than `bytes_max`."""
        stop = self.size
        if end_offset < self.next_offset:
            for stop, header in self.walk(self.locate(end_offset)[0]):
                if header.base_offset < end_offset and header.next_offset <= limit:
                    stop += header.total_bytes
                break
        if stop - position > bytes_max:
            earlier = self._consult(lambda index: index.last_boundary(position + bytes_max))
            if earlier > position:
                return earlier
        return max(stop, position)

    def read(
        self, position: int, offset: int, bytes_max: int, end_offset: int, records_max: int
    ) -> tuple[bytes, int, int]:
        """Batches from the one at `position`, which holds `offset`, and position and offset of what follows them."""
        limit = self.size
        if end_offset < self.next_offset:
            limit = self._consult(lambda index: index.position_from(end_offset, self.size))
        if limit - position > bytes_max:
            # An index entry is a boundary: a read that ends there brings no part of a batch to be cut off again.
            # Within less than an interval there is hardly one.
            end = -1
            if bytes_max >= self._interval:
                end = self._consult(lambda index: index.last_boundary(position + bytes_max))
            limit = end if end > position else min(limit, position + max(bytes_max, _READ_BYTES_MIN))
        data = self.pread(limit - position, position)
        at, records, expected = 0, 0, -1
        while at < len(data) and not (records_max and records >= records_max):
            try:
                if at and min(bytes_max, len(data)) - at < HEADER_BYTES:
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

    def first_at(self, position: int, header: BatchHeader, timestamp: int, log_start: int) -> tuple[int, int] | None:
        """Of the batch at `position`, the first record, not below `log_start`, that is not older than `timestamp`."""
        body = self.pread(header.body_length, position + HEADER_BYTES)
        try:
            check_body(header, body)
        except CorruptBatch as error:
            raise self._damaged(position, error) from error
        whole = max(header.base_offset, log_start), header.max_timestamp
        if not header.record_count:
            return None
        if header.timestamp_type:
            return whole
        try:
            columns = decode(header, body)
        except CorruptBatch:
            # Undamaged, so its producer closed it wrongly. The batch as a whole is the best answer there is.
            return whole
        for nth in range(header.record_count):
            delta = columns.timestamp_deltas[nth] if columns.timestamp_deltas else 0
            offset = header.base_offset + (columns.offset_deltas[nth] if columns.offset_deltas else nth)
            if offset >= log_start and header.base_timestamp + delta >= timestamp:
                return offset, header.base_timestamp + delta
        return None

    def _damaged(self, position: int, error: CorruptBatch) -> CorruptLog:
        return CorruptLog(f"{self.path}: damaged at {position}: {error}")
