"""Seeking by time: the first record that is not older than a timestamp.

Clocks of producers may go back, so segments are not ordered by time; the highest timestamp up to the end of each is.
The first segment that may hold a time is found by bisecting these. They are kept while segments are added, and made
anew when others have come or gone. A segment that compaction made smaller leaves them too high: then a search begins
earlier than it need, and finds the same. Too low they could get by a truncation, and `generation` counts those.
"""

from __future__ import annotations

from bisect import bisect_left

from zmqueue.log.segment import Segment


class TimeSeek:
    def __init__(self) -> None:
        # Of each segment but the last, which is still growing: the highest timestamp up to its end.
        self._highest: list[int] = []
        self._ends = (0, 0)  # where the first and the last of these begin
        self._generation = -1

    def find(
        self,
        segments: list[Segment],
        bases: list[int],
        generation: int,
        timestamp: int,
        log_start: int,
        end_offset: int,
    ) -> tuple[int, int] | None:
        """Offset and timestamp of the first record from `log_start` to `end_offset` that is not older."""
        for at in range(self._first(segments, bases, generation, timestamp), len(segments)):
            segment = segments[at]
            if segment.base_offset >= end_offset:
                return None
            if segment.max_timestamp < timestamp:
                continue
            for position, header in segment.walk(segment.position_before_time(timestamp)):
                if header.base_offset >= end_offset:
                    return None
                if header.max_timestamp < timestamp or header.next_offset <= log_start:
                    continue
                found = segment.first_at(position, header, timestamp, log_start)
                if found is not None:
                    return found if found[0] < end_offset else None
        return None

    def _first(self, segments: list[Segment], bases: list[int], generation: int, timestamp: int) -> int:
        highest = self._highest
        known = len(highest)
        # Segments go from the beginning, and some become one; none is ever divided. So if the first and the last that
        # are known stand where they stood, all between them do.
        if generation != self._generation or (
            known and (known > len(bases) or (bases[0], bases[known - 1]) != self._ends)
        ):
            self._generation = generation
            highest.clear()
        if len(highest) < len(segments) - 1:
            for segment in segments[len(highest) : -1]:
                highest.append(max(highest[-1], segment.max_timestamp) if highest else segment.max_timestamp)
            self._ends = bases[0], bases[len(highest) - 1]
        return bisect_left(highest, timestamp)
