"""Which leader epoch began at which offset: a partition's history of leadership, read from its own log.

A follower and a leader compare these to find where their logs part (rule C3). It is a cache: every batch carries its
epoch, so the list is rebuilt when the log is opened and cut when the log is.

Invariant: epochs and start offsets both strictly increase, and every epoch listed has at least one batch in the log.
"""

from __future__ import annotations

from bisect import bisect_right

NO_EPOCH = -1


class EpochCache:
    __slots__ = ("entries", "latest")

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []
        self.latest = NO_EPOCH

    def note(self, epoch: int, offset: int) -> None:
        """A batch of `epoch` begins at `offset`; only the first of an epoch makes an entry."""
        if epoch != self.latest:
            assert epoch > self.latest, f"epoch {epoch} at offset {offset} follows epoch {self.latest}"
            self.entries.append((epoch, offset))
            self.latest = epoch

    def truncate(self, end: int) -> None:
        """The log now ends at `end`."""
        while self.entries and self.entries[-1][1] >= end:
            self.entries.pop()
        self.latest = self.entries[-1][0] if self.entries else NO_EPOCH

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int] | None:
        """The highest epoch of this log that is not above `epoch`, and where its batches end; None if there is none."""
        at = bisect_right(self.entries, epoch, key=lambda entry: entry[0])
        if at == 0:
            return None
        end = self.entries[at][1] if at < len(self.entries) else log_end
        return self.entries[at - 1][0], end
