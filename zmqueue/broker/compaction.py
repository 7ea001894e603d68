"""The chore of compacting logs by key: when it is worth it, and what becomes of the result (see log/compaction.py).

A log is compacted up to the high watermark and never in the segment that is appended to, once the part that was not
compacted yet is large enough (min.cleanable.dirty.ratio), or when tombstones have stood for long enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import takewhile

from zmqueue.config import LogConfig
from zmqueue.errors import CorruptIndex, CorruptLog
from zmqueue.log.compaction import Compacted, CompactionJob, SegmentRef
from zmqueue.log.jobs import Failed, Job, Result
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.retention import Row

_logger = logging.getLogger(__name__)

SEGMENTS_MAX = 20_000
RETRY_MS = 60_000


class CompactionChore:
    def __init__(self, config: LogConfig, wall_ms: Callable[[], int]) -> None:
        self._map_bytes = config.compaction_map_bytes
        self._wall_ms = wall_ms
        self._retry_ms: dict[str, int] = {}  # by folder: failed, and not to be tried before

    def plan(self, log: PartitionLog, high_watermark: int, now_ms: int) -> CompactionJob | None:
        settings, point = log.settings, log.clean_point
        if not settings.compacts or now_ms < self._retry_ms.get(log.folder, 0):
            return None
        young_ms = now_ms - settings.compaction_lag_ms_min

        def may(row: Row) -> bool:
            return row.next <= high_watermark and (not settings.compaction_lag_ms_min or row.max_timestamp <= young_ms)

        rows = list(takewhile(may, log.rows()))[:SEGMENTS_MAX]
        if not rows or rows[-1].next < point.end:
            return None  # after a start it takes a moment until we hear how much is committed
        total_bytes = sum(row.bytes for row in rows)
        dirty_bytes = sum(row.bytes for row in rows if row.next > point.end)
        tombstones_end = point.tombstones_end(now_ms, settings.delete_retention_ms)
        if not tombstones_end and (not dirty_bytes or dirty_bytes < settings.dirty_ratio_min * total_bytes):
            return None
        return CompactionJob(
            folder=log.folder,
            volatile=log.volatile,
            generation=log.generation,
            segments=[SegmentRef(row.base, row.next, row.bytes) for row in rows],
            dirty_from=point.end,
            horizon_ends=[horizon.end for horizon in point.horizons],
            tombstones_end=tombstones_end,
            segment_bytes_max=settings.segment_bytes,
            index_interval_bytes=settings.index_interval_bytes,
            map_bytes=self._map_bytes,
        )

    def finish(self, log: PartitionLog, job: Job, result: Result) -> None:
        """Raises CorruptLog if the job has found damage, StorageFull if there was no room to note what is done."""
        assert isinstance(job, CompactionJob)
        if isinstance(result, Failed):
            self._failed(log, job, result)
            return
        assert isinstance(result, Compacted)
        try:
            if not log.swap(job.generation, result.outputs):
                return  # the log has changed meanwhile; the next plan knows how
        except CorruptIndex as error:
            self._failed(log, job, Failed(error.code, str(error)))
            return
        # From now on those tombstones stand alone: it counts when what they delete is gone, not when that was planned.
        log.compacted(log.clean_point.advanced(result.clean_end, self._wall_ms(), result.tombstones))
        self._retry_ms.pop(log.folder, None)
        before = sum(output.replaced_bytes for output in result.outputs)
        after = sum(output.log_bytes for output in result.outputs)
        _logger.info("%s: compacted up to %d, %d bytes to %d", log.folder, result.clean_end, before, after)

    def _failed(self, log: PartitionLog, job: CompactionJob, failed: Failed) -> None:
        changed = not log.swap(job.generation, [])  # which also removes what the job has left behind
        known = {(row.base, row.next, row.bytes) for row in log.rows()}
        if changed or any((ref.base_offset, ref.next_offset, ref.log_bytes) not in known for ref in job.segments):
            return  # it worked on what is no longer there
        self._retry_ms[log.folder] = self._wall_ms() + RETRY_MS
        _logger.warning("%s: not compacted: %s", log.folder, failed.reason)
        if failed.code == CorruptLog.code:
            raise CorruptLog(failed.reason)
