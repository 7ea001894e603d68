"""What the core knows of one partition's log, kept in step with the log by the effects it orders.

Invariants: first_offset <= log_start <= durable_end <= log_end; log_start <= high_watermark <= log_end; epochs and
producers are what a reader of the whole log would compute.
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
    first_offset: int = -1  # where the first batch begins, in which log_start lies; log_start if not given

    def __post_init__(self) -> None:
        if self.first_offset < 0:
            self.first_offset = self.log_start

    def note_appended(self, batches: list[Batch]) -> None:
        for header, _ in batches:
            assert header.base_offset == self.log_end, "batches are appended in order, without a gap"
            self.epochs.note(header.leader_epoch, header.base_offset)
            self.producers.note(header)
            self.log_end = header.next_offset

    def start_at(self, log_start: int, first_offset: int) -> None:
        """Records below this are deleted. All of them were committed and durable."""
        assert self.log_start <= log_start <= min(self.high_watermark, self.durable_end), "only what is committed goes"
        self.log_start = log_start
        self.first_offset = first_offset
        self.epochs.begin_at(first_offset)

    def restate(
        self, log_start: int, log_end: int, epochs: Epochs, producers: Producers, first_offset: int = -1
    ) -> None:
        """After a truncation, a reset or a failed append: the log as it is now."""
        self.log_start = log_start
        self.first_offset = log_start if first_offset < 0 else first_offset
        self.log_end = log_end
        self.durable_end = max(log_start, min(self.durable_end, log_end))
        # Nothing below the high watermark is ever truncated from a complete replica, but a follower's watermark is
        # only a hint, and its log may end before it.
        self.high_watermark = max(log_start, min(self.high_watermark, log_end))
        self.epochs = epochs
        self.producers = producers
