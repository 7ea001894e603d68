"""The chore of keeping secondary indexes up to date, for topics with `index.secondary` (see log/secondary.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from zmqueue.errors import from_code
from zmqueue.log.index_build import IndexJob, IndexResult
from zmqueue.log.jobs import Failed, Job, Result
from zmqueue.log.partition_log import PartitionLog

_logger = logging.getLogger(__name__)

RETRY_MS = 30_000


class IndexChore:
    """Nothing to do for a log without such an index; otherwise the next step that brings it forward, if any.

    After a failure it pauses: a full disk is not emptied by trying, and what no file covers is found all the same.
    """

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._retry_ms: dict[str, int] = {}  # by folder: failed, and not to be tried before

    def plan(self, log: PartitionLog, high_watermark: int, now_ms: int) -> IndexJob | None:
        if log.secondary.field is None or now_ms < self._retry_ms.get(log.folder, 0):
            return None
        return log.secondary.plan(log, high_watermark)

    def finish(self, log: PartitionLog, job: Job, result: Result) -> None:
        assert isinstance(job, IndexJob)
        if isinstance(result, Failed):
            log.secondary.failed(job, from_code(result.code, result.reason))
            if job.generation == log.generation:
                self._retry_ms[log.folder] = self._wall_ms() + RETRY_MS
                _logger.warning("%s: not indexed: %s", log.folder, result.reason)
            return
        assert isinstance(result, IndexResult)
        self._retry_ms.pop(log.folder, None)
        log.secondary.finish(log, job, result)
