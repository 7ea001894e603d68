"""One assigned partition: where the application stands, what was fetched beyond that, and what has to happen next.

Invariants
- `position <= fetch_offset`; the ranges in `chunks` cover what lies between, but for what the application has taken.
- `token` changes with every seek and every change of mind; an answer to an older token is dropped.
- A slot without a position looks it up first (`reset` says what: earliest, or latest).
- An error that the application has to hear waits in the slot until a poll raises it.

Slots are shared by the IO thread and the application's, under the lock of the fetcher that has them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec import Struct

from zmqueue.client.records import RecordBatch
from zmqueue.errors import ZmqueueError
from zmqueue.model import TopicPartition


class Chunk(Struct, frozen=True, gc=False):
    data: bytes
    offset: int


class Slot:
    """One assigned partition."""

    def __init__(self, partition: TopicPartition, reset: int | None) -> None:
        self.partition = partition
        self.position: int | None = None
        self.fetch_offset = 0
        self.reset = reset
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
        # The application's thread alone: batches being handed out.
        self.opened: Any = None
        self.current: RecordBatch | None = None
        self.cursor = 0

    def clear(self) -> None:
        self.token += 1
        self.waits = self.halted = False
        self.chunks.clear()
        self.bytes = 0
        self.error = None
        self.retry_at, self.failures, self.ahead_since = 0.0, 0, None
        self.opened = self.current = None
        self.cursor = 0

    def seek(self, offset: int) -> None:
        self.clear()
        self.position = self.fetch_offset = offset
        self.reset = None

    def look_up(self, reset: int) -> None:
        self.clear()
        self.position, self.reset = None, reset
