"""Which leader epoch wrote which part of a log. A pure function of the batches in it.

Invariant: epochs increase strictly, and so do start offsets, but that the first entry may be of no records: where old
records are gone, it tells the epoch of the last of them, so that a follower who is just there is recognised. Two logs
that agree on the epoch of their last common record agree on everything before it; so comparing epochs finds where a
follower left its leader's history.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

NO_EPOCH = -1


class Epochs:
    def __init__(self, entries: list[tuple[int, int]] | None = None) -> None:
        self.entries: list[tuple[int, int]] = list(entries or ())

    @property
    def last(self) -> int:
        """The epoch of the last record, NO_EPOCH in an empty log."""
        return self.entries[-1][0] if self.entries else NO_EPOCH

    def note(self, epoch: int, start: int) -> None:
        """A batch of this epoch was appended at this offset."""
        entries = self.entries
        if not entries or epoch != entries[-1][0]:
            assert epoch > self.last, "epochs never go back within a log"
            entries.append((epoch, start))

    def end_of(self, epoch: int, log_start: int, log_end: int) -> tuple[int, int]:
        """The highest epoch at or below this one that the log knows, and the offset where it ends."""
        at = bisect_right(self.entries, (epoch, 1 << 62))
        if at == 0:
            return NO_EPOCH, log_start
        return self.entries[at - 1][0], self.entries[at][1] if at < len(self.entries) else log_end

    def parting(self, epoch: int, offset: int, log_start: int, log_end: int) -> int | None:
        """At or before which offset the log leaves the history of a reader, whose record before `offset` was of this
        epoch; None if it does not, or has forgotten: of what lay before its start it knows the last epoch at most."""
        known, end = self.end_of(epoch, log_start, log_end)
        if (known == epoch and end >= offset) or (known == NO_EPOCH and offset <= log_start):
            return None
        return min(end, offset)

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """The epochs of the records in [start, end), each with its first offset there."""
        at = max(0, bisect_right(self.entries, start, key=lambda entry: entry[1]) - 1)
        return [(epoch, max(first, start)) for epoch, first in self.entries[at:] if first < end and start < end]

    def before(self, offset: int) -> int:
        """The epoch of the record just before this offset, NO_EPOCH if the log does not know."""
        at = bisect_left(self.entries, offset, key=lambda entry: entry[1])
        return self.entries[at - 1][0] if at else NO_EPOCH

    def begin_at(self, offset: int, epoch: int = NO_EPOCH) -> None:
        """What lies before is gone. Its last epoch stays known; one that the log never knew can be given."""
        at = bisect_left(self.entries, offset, key=lambda entry: entry[1]) - 1
        if at >= 0:
            del self.entries[:at]
            self.entries[0] = self.entries[0][0], offset
        elif epoch != NO_EPOCH and (not self.entries or self.entries[0][0] > epoch):
            self.entries.insert(0, (epoch, offset))

    def truncate(self, end: int) -> None:
        while self.entries and self.entries[-1][1] >= end:
            self.entries.pop()
