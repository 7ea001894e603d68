"""What is done to logs beside serving them: segments that are old enough end, old records go, and chores are planned.

Driven by the broker's loop, by time. A turn looks at a bounded number of partitions, in a circle, and touches a bounded
number of files, since the loop waits for each. What takes longer is a job: a chore plans it from what it knows, a
worker does it elsewhere, and the chore finishes it here with a few renames. One job is under way at a time.

A way to get rid of old records (`cleanup.policy`) is a chore that looks at the settings of the log: `DeleteOld`, which
is done on the spot, and those that are given to `Maintenance`.

A full disk ends nothing here: what could not be done is tried again when its partition's turn comes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from zmqueue.broker.logs import Logs
from zmqueue.config import LogConfig
from zmqueue.core.effects import Effect
from zmqueue.core.node import Node
from zmqueue.errors import CorruptLog, StorageFull
from zmqueue.log.jobs import Failed, Job, Result
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.retention import start_after
from zmqueue.model import MiB, PartitionKey

_logger = logging.getLogger(__name__)

# Removing a file of 64 MiB takes a disk about 25 ms, and nothing is served meanwhile.
REMOVED_BYTES_MAX = 64 * MiB


class Chore(Protocol):
    """Both on the loop, and cheap. `high_watermark`: below it all is committed, and durable here."""

    def plan(self, log: PartitionLog, high_watermark: int, now_ms: int) -> Job | None:
        """What is to be done about this log, if anything. `now_ms` is the time of day."""

    def finish(self, log: PartitionLog, job: Job, result: Result) -> None:
        """The job is done, or `Failed`. The log may have changed meanwhile. Raises StorageFull, CorruptLog."""


class Worker(Protocol):
    def submit(self, job: Job, done: Callable[[Result], None]) -> None:
        """Do it, then call back on the loop."""


class Counters(Struct):
    segments_rolled: int = 0
    segments_removed: int = 0
    bytes_removed: int = 0
    jobs: int = 0
    jobs_failed: int = 0


class DeleteOld:
    """cleanup.policy=delete: done at once, by moving the log's start; the files go later, a few at a time."""

    def plan(self, log: PartitionLog, high_watermark: int, now_ms: int) -> Job | None:
        if log.segment_count > 1:
            start = start_after(log.rows(), log.size_bytes, log.settings, high_watermark, now_ms)
            # At its present start too: a segment that has ended since may hold nothing but what is deleted.
            log.delete_before(max(start, log.log_start))
        return None

    def finish(self, log: PartitionLog, job: Job, result: Result) -> None:
        raise AssertionError("it plans no jobs")


class _UnderWay(NamedTuple):
    key: PartitionKey
    log: PartitionLog
    chore: Chore
    job: Job


class Maintenance:
    def __init__(
        self,
        node: Node,
        logs: Logs,
        config: LogConfig,
        run: Callable[[list[Effect]], None],
        wall_ms: Callable[[], int],
        chores: Sequence[Chore] = (),
        worker: Worker | None = None,
    ) -> None:
        self.counters = Counters()
        self._node = node
        self._logs = logs
        self._config = config
        self._run = run
        self._wall_ms = wall_ms
        self._delete_old = DeleteOld()
        self._chores = chores
        self._worker = worker
        self._under_way: _UnderWay | None = None
        self._circle: deque[PartitionKey] = deque()
        self._due_ms = 0
        self._removing: dict[PartitionKey, None] = {}  # whose deleted segments are on the disk still
        self._files_left = 0  # that this turn may still touch
        self._failing: dict[PartitionKey, PartitionLog] = {}  # whose trouble was told already

    def on_tick(self, now_ms: int) -> None:
        """Every turn of the loop, by its monotonic clock."""
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self._config.maintenance_ms
        self._files_left = self._config.maintenance_files_max
        wall_ms = self._wall_ms()
        if not self._circle:
            self._circle.extend(self._logs)
        for _ in range(min(len(self._circle), self._config.maintenance_partitions_max)):
            self._look_at(self._circle.popleft(), wall_ms)
            if self._files_left <= 0:
                break
        self._remove()

    def _look_at(self, key: PartitionKey, wall_ms: int) -> None:
        log, replica = self._logs.get(key), self._node.replicas.get(key)
        if log is None or replica is None:
            self._failing.pop(key, None)
            return
        committed = min(replica.log.high_watermark, replica.log.durable_end)
        log_start = log.log_start
        try:
            if log.roll_if_old(wall_ms):
                self.counters.segments_rolled += 1
                self._files_left -= 1
            self._delete_old.plan(log, committed, wall_ms)
            if log.log_start != log_start:
                self._files_left -= 1
                _logger.info("partition %s: begins at %d, by retention", key, log.log_start)
                self._run(self._node.on_log_start(key, log.log_start, log.first_offset))
            if self._under_way is None:
                self._plan(key, log, committed, wall_ms)
        except StorageFull as error:
            self._tell(key, log, error)
        except CorruptLog as error:
            if self._tell(key, log, error):
                self._node.on_lost(key)
        else:
            self._failing.pop(key, None)
        if log.deleted_segments:
            self._removing[key] = None

    def _remove(self) -> None:
        """Those of one partition after the other: whoever fills its log fastest need not wait for the whole circle."""
        files_left, bytes_left = self._config.maintenance_files_max, REMOVED_BYTES_MAX
        while self._removing and files_left > 0 and bytes_left > 0:
            key = next(iter(self._removing))
            del self._removing[key]
            log = self._logs.get(key)
            if log is None:
                continue
            segments, size = log.remove_deleted(1)
            files_left -= segments
            bytes_left -= size
            self.counters.segments_removed += segments
            self.counters.bytes_removed += size
            if log.deleted_segments:
                self._removing[key] = None

    def _tell(self, key: PartitionKey, log: PartitionLog, error: Exception) -> bool:
        """Once, until it is over."""
        if self._failing.get(key) is log:
            return False
        self._failing[key] = log
        _logger.warning("partition %s: maintenance has to wait: %s", key, error)
        return True

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _plan(self, key: PartitionKey, log: PartitionLog, committed: int, wall_ms: int) -> None:
        for chore in self._chores:
            job = chore.plan(log, committed, wall_ms)
            if job is not None:
                assert self._worker is not None, "chores that plan jobs need a worker"
                self._under_way = _UnderWay(key, log, chore, job)
                self.counters.jobs += 1
                self._worker.submit(job, self._on_done)
                return

    def _on_done(self, result: Result) -> None:
        done, self._under_way = self._under_way, None
        assert done is not None, "a job ends once"
        if isinstance(result, Failed):
            self.counters.jobs_failed += 1
        if self._logs.get(done.key) is not done.log:
            return
        try:
            done.chore.finish(done.log, done.job, result)
        except StorageFull as error:
            self.counters.jobs_failed += 1
            self._tell(done.key, done.log, error)
        except CorruptLog as error:
            if self._tell(done.key, done.log, error):
                self._node.on_lost(done.key)
