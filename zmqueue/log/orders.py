"""Reading a log in another order than it was written, and in parts that are read elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from zmqueue.errors import OffsetOutOfRange

if TYPE_CHECKING:
    from zmqueue.log.partition_log import PartitionLog


class Span(NamedTuple):
    """Bytes of the log that lie between two boundaries, by segment: base offset, from, to."""

    segments: list[tuple[int, int, int]]
    in_last: bool  # all of it lies in the segment that is appended to

    @property
    def size(self) -> int:
        return sum(stop - start for _, start, stop in self.segments)


def read_backward(log: PartitionLog, before: int, bytes_max: int, end_offset: int) -> bytes:
    """Whole, proved batches of one segment, in their order; the last holds the offset before `before`.

    None reaches beyond `end_offset`. At least one batch if there is any, even when it is larger than `bytes_max`.
    The first may begin below the log start, and reaches above it. Raises OffsetOutOfRange, CorruptLog.
    """
    if not log.log_start <= before <= log.log_end:
        raise OffsetOutOfRange(f"offset {before} is not in {log.log_start}..{log.log_end}")
    while before > log.log_start:
        segment = log.segments[_nth(log, before - 1)]
        position, offset, following = segment.locate_back(before - 1, bytes_max)
        if following <= end_offset:
            if offset < log.log_start:
                position, offset = segment.locate(log.log_start)
            return segment.read(position, offset, segment.size, following, 0)[0]
        before = segment.locate(before - 1)[1]
    return b""


def span(log: PartitionLog, from_offset: int, end_offset: int, limit: int, bytes_max: int) -> Span:
    """The batches that hold offsets of this range: those from `limit` on never, nor much more than `bytes_max`."""
    parts: list[tuple[int, int, int]] = []
    total = 0
    for segment in log.segments[_nth(log, from_offset) :]:
        if segment.base_offset >= end_offset or total >= bytes_max:
            break
        start = segment.locate(from_offset)[0] if from_offset > segment.base_offset else 0
        stop = segment.boundary_behind(start, end_offset, limit, bytes_max - total)
        if stop > start:
            parts.append((segment.base_offset, start, stop))
        total += stop - start
        if stop < segment.size:
            break
    return Span(parts, from_offset >= log.segments[-1].base_offset)


def _nth(log: PartitionLog, offset: int) -> int:
    """Which segment holds an offset; the first for one that lies before it."""
    return max(0, bisect_right(log.segments, offset, key=lambda segment: segment.base_offset) - 1)
