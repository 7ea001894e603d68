"""Seeking by time: the first record that is not older than a timestamp.

Clocks of producers may go back, so segments are not ordered by time; the highest timestamp up to the end of each is.
The first segment that may hold a time is found by bisecting these. They are kept while segments are added, and made
anew when others have come or gone. A segment that compaction made smaller leaves them too high: then a search begins
earlier than it need, and finds the same. Too low they could get by a truncation, and `generation` counts those.
"""

from __future__ import annotations

from bisect import bisect_left

from zmqueue.errors import CorruptBatch, CorruptLog
from zmqueue.log.segment import Segment
from zmqueue.wire.batch import HEADER_BYTES, BatchHeader, check_body, decode


class TimeSeek:
    def __init__(self) -> None:
        # Of each segment but the last, which is still growing: the highest timestamp up to its end.
        self._highest: list[int] = []
        self._bases: list[int] = []
        self._generation = -1

    def find(
        self, segments: list[Segment], bases: list[int], generation: int, timestamp: int, end_offset: int
    ) -> tuple[int, int] | None:
        if generation != self._generation or bases[: len(self._bases)] != self._bases:
            self._generation = generation
            self._bases.clear()
            self._highest.clear()
        highest = self._highest
        while len(highest) < len(segments) - 1:
            segment = segments[len(highest)]
            highest.append(max(highest[-1], segment.max_timestamp) if highest else segment.max_timestamp)
            self._bases.append(segment.base_offset)
        for at in range(bisect_left(highest, timestamp), len(segments)):
            segment = segments[at]
            if segment.base_offset >= end_offset:
                return None
            if segment.max_timestamp < timestamp:
                continue
            for position, header in segment.walk(segment.position_before_time(timestamp)):
                if header.base_offset >= end_offset:
                    return None
                if header.max_timestamp < timestamp:
                    continue
                body = segment.pread(header.body_length, position + HEADER_BYTES)
                found = _first_at(segment, position, header, body, timestamp)
                if found is not None:
                    return found if found[0] < end_offset else None
        return None


def _first_at(
    segment: Segment, position: int, header: BatchHeader, body: bytes, timestamp: int
) -> tuple[int, int] | None:
    """The first record of a batch that is not older than `timestamp`."""
    try:
        check_body(header, body)
    except CorruptBatch as error:
        raise CorruptLog(f"{segment.path}: damaged at {position}: {error}") from error
    if header.timestamp_type or not header.record_count:
        return header.base_offset, header.max_timestamp
    try:
        columns = decode(header, body)
    except CorruptBatch:
        # Undamaged, so its producer closed it wrongly. The batch as a whole is the best answer there is.
        return header.base_offset, header.max_timestamp
    for nth in range(header.record_count):
        delta = columns.timestamp_deltas[nth] if columns.timestamp_deltas else 0
        if header.base_timestamp + delta >= timestamp:
            at = columns.offset_deltas[nth] if columns.offset_deltas else nth
            return header.base_offset + at, header.base_timestamp + delta
    return None
