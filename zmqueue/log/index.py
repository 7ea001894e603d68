"""Where the batches of a segment lie: a few of their boundaries, by offset, by position and by time.

The log is truth and an index is a cache of it: what it says is a true boundary or is not said at all, and losing it
costs a walk over headers and nothing else. A segment has one of two kinds.

Growing (the segment that is appended to): three arrays in memory, 16 bytes per entry, never on disk.
Sealed (all others): an immutable file beside the segment, written whole when the segment is full, then only mapped.

It has the shape that pages.py tells: pages of 255 offsets u32, 255 positions u32 and 255 timestamps i64, fences of the
same columns, and a summary of what the segment holds, so that opening the log need not read it.

Offsets are relative to the segment. With each boundary goes the highest timestamp of the segment *before* it, which
never decreases: the first batch that may hold a time lies behind the last entry whose timestamp is below it, whatever
order the producers' clocks gave. A lookup bisects the fences and then one page, proved by its CRC when first touched.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from zmqueue.errors import CorruptIndex
from zmqueue.log import pages as paged
from zmqueue.log.files import Files
from zmqueue.log.pages import PAGE_BYTES

SUFFIX = ".index"
NO_TIMESTAMP = -(1 << 63)
# Offsets and positions are kept as 32 bits, relative to the segment.
SPAN_MAX = (1 << 32) - 1

PAGE_ENTRIES = 255
_KIND = paged.Kind(b"ZQIX", 1, PAGE_ENTRIES, 16)


class Summary(Struct, frozen=True):
    """What a sealed segment holds. `producers` is the state behind its last batch (see core.producers)."""

    base_offset: int
    next_offset: int
    log_bytes: int
    max_timestamp: int
    interval_bytes: int
    gap_bytes_max: int  # the longest walk that a lookup can need
    epochs: list[tuple[int, int]]
    producers: bytes


class Index(Protocol):
    """What a reader asks. Answers are boundaries of batches, 0 among them."""

    def __len__(self) -> int: ...

    def position_of(self, offset: int) -> int:
        """A boundary at or before the batch that holds `offset`, as near as the index knows."""

    def position_from(self, offset: int, otherwise: int) -> int:
        """A boundary at or behind the beginning of `offset`; `otherwise` if the index has none."""

    def position_before_time(self, timestamp: int) -> int:
        """A boundary before which no batch reaches `timestamp`."""

    def last_boundary(self, position: int) -> int:
        """The last boundary at or before `position`."""


class GrowingIndex:
    """One entry in about every `interval_bytes`; with 0, one for every batch but the first."""

    __slots__ = ("_base", "_interval", "due", "offsets", "positions", "timestamps")

    def __init__(self, base_offset: int, interval_bytes: int) -> None:
        self._base = base_offset
        self._interval = interval_bytes
        self.offsets = array("I")
        self.positions = array("I")
        self.timestamps = array("q")
        self.due = max(1, interval_bytes)  # the first position that deserves an entry

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, offset: int, position: int, timestamp_before: int) -> None:
        self.offsets.append(offset - self._base)
        self.positions.append(position)
        self.timestamps.append(timestamp_before)
        self.due = position + self._interval

    def position_of(self, offset: int) -> int:
        at = bisect_right(self.offsets, offset - self._base)
        return self.positions[at - 1] if at else 0

    def position_from(self, offset: int, otherwise: int) -> int:
        at = bisect_left(self.offsets, offset - self._base)
        return self.positions[at] if at < len(self.positions) else otherwise

    def position_before_time(self, timestamp: int) -> int:
        at = bisect_left(self.timestamps, timestamp)
        return self.positions[at - 1] if at else 0

    def last_boundary(self, position: int) -> int:
        at = bisect_right(self.positions, position)
        return self.positions[at - 1] if at else 0

    def truncate(self, position: int) -> tuple[int, int]:
        """Forget what lies at or behind `position`. The last entry left: its boundary and the timestamp before it."""
        at = bisect_left(self.positions, position)
        del self.offsets[at:], self.positions[at:], self.timestamps[at:]
        last = self.positions[-1] if at else 0
        self.due = max(1, last + self._interval)
        return (last, self.timestamps[-1]) if at else (0, NO_TIMESTAMP)

    def gap_bytes_max(self, log_bytes: int) -> int:
        longest = before = 0
        for position in self.positions:
            longest = max(longest, position - before)
            before = position
        return max(longest, log_bytes - before)


class SealedIndex:
    """An index file, mapped while it is in use. Raises CorruptIndex when a page does not prove."""

    __slots__ = ("_base", "_entries", "_files", "_pages", "_path", "_proved")

    def __init__(self, files: Files, path: str, base_offset: int, pages: int, entries: int) -> None:
        self._files = files
        self._path = path
        self._base = base_offset
        self._pages = pages
        self._entries = entries
        self._proved = bytearray(pages)

    @classmethod
    def of(cls, files: Files, path: str, base_offset: int, entries: int) -> SealedIndex:
        return cls(files, path, base_offset, -(-entries // PAGE_ENTRIES), entries)

    def __len__(self) -> int:
        return self._entries

    def position_of(self, offset: int) -> int:
        wanted = offset - self._base
        page = bisect_right(self._fences("I", 0), wanted) - 1
        if page < 0:
            return 0
        offsets, positions, _ = self._page(page)
        return positions[bisect_right(offsets, wanted) - 1]

    def position_from(self, offset: int, otherwise: int) -> int:
        wanted = offset - self._base
        page = bisect_left(self._fences("I", 0), wanted) - 1
        if page >= 0:
            offsets, positions, _ = self._page(page)
            at = bisect_left(offsets, wanted)
            if at < len(positions):
                return positions[at]
        # The first entry of the next page: the fences know it.
        return self._fences("I", 1)[page + 1] if page + 1 < self._pages else otherwise

    def position_before_time(self, timestamp: int) -> int:
        page = bisect_left(self._fences("q", 2), timestamp) - 1
        if page < 0:
            return 0
        _, positions, timestamps = self._page(page)
        return positions[bisect_left(timestamps, timestamp) - 1]

    def last_boundary(self, position: int) -> int:
        page = bisect_right(self._fences("I", 1), position) - 1
        if page < 0:
            return 0
        positions = self._page(page)[1]
        return positions[bisect_right(positions, position) - 1]

    def grown(self, interval_bytes: int) -> GrowingIndex:
        """The same entries in memory, for a segment that is appended to again."""
        index = GrowingIndex(self._base, interval_bytes)
        whole = self._files.map(self._path)
        for page in range(self._pages):
            for offset, position, timestamp in zip(*self._page(page, whole), strict=True):
                index.add(self._base + offset, position, timestamp)
        return index

    def verify(self) -> None:
        """Every page, again. Raises CorruptIndex."""
        for page in range(self._pages):
            self._proved[page] = 0
            self._page(page)

    def _fences(self, kind: Literal["I", "q"], column: int) -> memoryview:
        start = self._pages * (PAGE_BYTES + column * 4)
        width = 8 if kind == "q" else 4
        return self._files.map(self._path)[start : start + self._pages * width].cast(kind)

    def _page(self, page: int, whole: memoryview | None = None) -> tuple[memoryview, memoryview, memoryview]:
        whole = self._files.map(self._path) if whole is None else whole
        view = whole[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        if self._proved[page]:
            entries = paged.entries_of(view)
        else:
            entries = paged.prove(self._path, _KIND, self._base, page, view)
            self._proved[page] = 1
        return (
            view[: entries * 4].cast("I"),
            view[PAGE_ENTRIES * 4 : PAGE_ENTRIES * 4 + entries * 4].cast("I"),
            view[PAGE_ENTRIES * 8 : PAGE_ENTRIES * 8 + entries * 8].cast("q"),
        )


def encode(index: GrowingIndex, summary: Summary) -> bytes:
    """The file of a sealed segment."""
    base, entries = summary.base_offset, len(index)
    columns = (index.offsets, index.positions, index.timestamps)
    starts = range(0, entries, PAGE_ENTRIES)
    parts: list[bytes] = []
    for number, start in enumerate(starts):
        content = b"".join(_padded(column[start : start + PAGE_ENTRIES]) for column in columns)
        parts.append(paged.seal(base, number, min(PAGE_ENTRIES, entries - start), content))
    fences = b"".join(column[::PAGE_ENTRIES].tobytes() for column in columns)
    parts.append(paged.tail(_KIND, base, len(starts), entries, fences, msgspec.msgpack.encode(summary)))
    return b"".join(parts)


def _padded(column: array[int]) -> bytes:
    return column.tobytes().ljust(PAGE_ENTRIES * column.itemsize, b"\0")


def load(files: Files, path: str, base_offset: int) -> tuple[SealedIndex, Summary]:
    """The index file of the segment at `base_offset`. Raises CorruptIndex, and FutureFormat for a newer build's."""
    tail = paged.load_tail(files, path, _KIND, base_offset)
    try:
        summary = msgspec.msgpack.decode(tail.told, type=Summary)
    except msgspec.MsgspecError as error:
        raise CorruptIndex(f"{path}: {error}") from error
    if summary.base_offset != base_offset:
        raise CorruptIndex(f"{path}: not of segment {base_offset}")
    return SealedIndex(files, path, base_offset, tail.pages, tail.entries), summary
