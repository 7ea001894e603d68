"""Keeping secondary indexes up to date: what the maintenance loop plans for topics with `index.secondary`."""

from __future__ import annotations

from zmqueue.log.index_build import IndexJob, IndexResult
from zmqueue.log.partition_log import PartitionLog


class IndexChore:
    """Nothing to do for a log without such an index; otherwise the next step that brings it forward, if any."""

    def plan(self, log: PartitionLog, high_watermark: int, now_ms: int) -> IndexJob | None:
        return log.secondary.plan(log, high_watermark)

    def finish(self, log: PartitionLog, job: IndexJob, result: IndexResult) -> None:
        log.secondary.finish(log, job, result)
