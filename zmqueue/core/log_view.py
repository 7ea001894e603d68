"""What the core knows of one partition's log, kept in step with the log by the effects it orders.

Invariants: log_start <= durable_end <= log_end; high_watermark <= log_end; epochs and producers are what a reader of
the whole log would compute.
"""

from __future__ import annotations

from msgspec import Struct

from zmqueue.core.epochs import Epochs
from zmqueue.core.producers import Producers
from zmqueue.wire.batch import Batch


class LogView(Struct):
    log_start: int
    log_end: int
    durable_end: int
    epochs: Epochs
    producers: Producers
    high_watermark: int = 0

    def note_appended(self, batches: list[Batch]) -> None:
        for header, _ in batches:
            assert header.base_offset == self.log_end, "batches are appended in order, without a gap"
            self.epochs.note(header.leader_epoch, header.base_offset)
            self.producers.note(header)
            self.log_end = header.next_offset

    def restate(self, log_start: int, log_end: int, epochs: Epochs, producers: Producers) -> None:
        """After a truncation, a reset or a failed append: the log as it is now."""
        self.log_start = log_start
        self.log_end = log_end
        self.durable_end = max(log_start, min(self.durable_end, log_end))
        # Nothing below the high watermark is ever truncated from a complete replica, but a follower's watermark is
        # only a hint, and its log may end before it.
        self.high_watermark = min(self.high_watermark, log_end)
        self.epochs = epochs
        self.producers = producers
