"""One assigned partition: where the application stands, what was fetched beyond that, and what has to happen next.

Invariants
- `position <= fetch_offset`; the ranges in `chunks` cover what lies between, but for what the application has taken.
- `token` changes with every seek and every change of mind; an answer to an older token is dropped.
- A slot without a position looks it up first: what the group has committed (`asks_group`), or by `reset`.
- An error that the application has to hear waits in the slot until a poll raises it.
- Records are handed out of a slot that is `live` only: the application has heard of the assignment, and the group has
  not taken it back. A slot that was stopped keeps its position, and nothing that was fetched.

Slots are shared by the IO thread and the application's, under the lock of the fetcher that has them.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

from msgspec import Struct

from zmqueue.client.records import RecordBatch
from zmqueue.errors import ZmqueueError
from zmqueue.model import TopicPartition

# Where to begin: the log start, the end, the first record at least so young (ms), or so long ago. None: an error.
Reset = int | timedelta | None


class Chunk(Struct, frozen=True, gc=False):
    data: bytes
    offset: int


class Slot:
    def __init__(self, partition: TopicPartition, reset: Reset, topic_id: bytes | None = None) -> None:
        self.partition = partition
        self.topic_id = topic_id  # as the group named it; None: whatever topic has the name
        self.position: int | None = None
        self.epoch = -1  # the leader epoch of the record before `position`, where it is known
        self.fetch_offset = 0
        self.fetch_epoch = -1
        self.reset = reset
        self.asks_group = False
        self.announced = True
        self.stopped = False
        self.origin: int | None = None  # where reading began by itself, and would again
        self.committed: int | None = None
        self.token = 0
        self.waits = False  # a request is under way for this token
        self.paused = False
        self.halted = False  # what was fetched last is suspect: nothing more until it was looked at
        self.chunks: deque[Chunk] = deque()
        self.bytes = 0
        self.high_watermark = -1
        self.error: ZmqueueError | None = None
        self.retry_at = 0.0
        self.failures = 0
        self.ahead_since: float | None = None
        # The application's thread alone: batches being handed out, and position and epoch before the last were.
        self.opened: Any = None
        self.current: RecordBatch | None = None
        self.cursor = 0
        self.before: tuple[int | None, int] = (None, -1)
        self.first_epoch = -1

    @property
    def live(self) -> bool:
        return self.announced and not self.stopped

    @property
    def untouched(self) -> bool:
        """Whether a reader that began anew would begin at the position: nothing was handed out, or all is committed."""
        return self.position is None or self.position in (self.committed, self.origin)

    def drop(self) -> None:
        """Forget what was fetched and what is under way."""
        self.token += 1
        self.waits = self.halted = False
        self.chunks.clear()
        self.bytes = 0
        self.error = None
        self.retry_at, self.failures, self.ahead_since = 0.0, 0, None

    def stop(self) -> None:
        self.stopped = True
        self.drop()

    def clear(self) -> None:
        self.drop()
        self.asks_group = False
        self.opened = self.current = None
        self.cursor = 0

    def seek(self, offset: int, epoch: int = -1) -> None:
        self.clear()
        self.position = self.fetch_offset = offset
        self.epoch = self.fetch_epoch = epoch
        self.reset = None

    def look_up(self, reset: Reset) -> None:
        self.clear()
        self.position, self.reset = None, reset

    def begin(self, offset: int, epoch: int) -> None:
        """Where the group left off."""
        self.seek(offset, epoch)
        self.committed = self.origin = offset

    def found(self, offset: int) -> None:
        """What was looked up."""
        self.position = self.fetch_offset = self.origin = offset
        self.epoch = self.fetch_epoch = -1
        self.reset = None
