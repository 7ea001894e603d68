"""Heavy work on sealed segments, away from the broker's loop: what there is to do, and doing it.

A job is plain data, so that it can go to another process; so is its result. It reads only what does not change any
more, and writes only new files beside it: whoever asked for it puts them in place, or throws them away if the log has
changed meanwhile. Each kind of job is a generator (see compaction.py and index_build.py) that is driven here or, for
logs in memory, which no other process can read, in slices by the broker itself (broker/workers.py).

Every job has `folder`, the partition it works on, and `volatile`, whether that lies in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator

import msgspec
from msgspec import Struct

from zmqueue.errors import JobFailed, ZmqueueError
from zmqueue.log.compaction import Compacted, CompactionJob, compact
from zmqueue.log.files import Files
from zmqueue.log.index_build import IndexJob, IndexResult, build

_logger = logging.getLogger(__name__)

FRAME_HEAD_BYTES = 4
# Shorter waits add up to one that is worth its system call.
PACE_S_MIN = 0.01


class Failed(Struct, frozen=True, tag="failed"):
    """The job has no result; what it has written is worth nothing. `code` is that of the error."""

    code: int
    reason: str


# Kinds are told apart by their tags.
Job = CompactionJob | IndexJob
Result = Compacted | IndexResult | Failed
Steps = Generator[int, None, Result]


job_decoder = msgspec.msgpack.Decoder(Job)
result_decoder = msgspec.msgpack.Decoder(Result)


def framed(message: Job | Result) -> bytes:
    """As it goes through a pipe: its length, 4 bytes, little-endian; then msgpack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(FRAME_HEAD_BYTES, "little") + data


class Pace:
    """Not more than so many bytes in a second, over all that was done with it."""

    def __init__(
        self,
        bytes_per_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    def spend(self, count: int) -> None:
        """So much was done: wait until it was not too much. Time in which nothing was done is not made up for."""
        self._free_at = max(self._free_at, self._clock()) + count / self._bytes_per_s
        wait_s = self._free_at - self._clock()
        if wait_s > PACE_S_MIN:
            self._sleep(wait_s)


def steps(job: Job, files: Files) -> Steps:
    """The job bit by bit: yields the bytes that were read and written since the last time. Never raises."""
    try:
        if isinstance(job, IndexJob):
            return (yield from build(job, files))
        return (yield from compact(job, files))
    except ZmqueueError as error:
        return Failed(error.code, str(error))
    except Exception as error:
        # A mistake of ours, and nothing that a broker should end for: the log is as it was.
        _logger.exception("a job on %s failed", job.folder)
        return Failed(JobFailed.code, f"{type(error).__name__}: {error}")


def run(job: Job, files: Files, pace: Pace) -> Result:
    work = steps(job, files)
    while True:
        try:
            pace.spend(next(work))
        except StopIteration as done:
            result: Result = done.value
            return result
