"""How fast a compaction job is, without its rate limit: `python tools/bench_compaction.py [MIB [VALUE_BYTES [KEYS]]]`.

Writes a log of random records into a temporary folder, compacts it in this process as the worker would, and puts the
result in place. CPU time is what to compare: the wall time of a busy machine says little.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time

from zmqueue.config import LogConfig
from zmqueue.log.compaction import Compacted, CompactionJob, SegmentRef
from zmqueue.log.files import DiskFiles
from zmqueue.log.jobs import Pace, run
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import MiB
from zmqueue.wire.batch import encode

RECORDS_PER_BATCH = 500
UNLIMITED = 1 << 60


def filled(folder: str, mib: int, value_bytes: int, keys: int) -> PartitionLog:
    log = PartitionLog.open(DiskFiles(), folder, LogConfig())
    chance = random.Random(1)
    pool = chance.randbytes(1 * MiB)
    while log.size_bytes < mib * MiB:
        starts = [chance.randrange(len(pool) - value_bytes) for _ in range(RECORDS_PER_BATCH)]
        batch = encode(
            [pool[at : at + value_bytes] for at in starts],
            keys=[b"user-%010d-key" % chance.randrange(keys) for _ in starts],
            timestamp_deltas=list(range(RECORDS_PER_BATCH)),
        )
        batch.header.base_offset, batch.header.leader_epoch = log.log_end, 0
        log.append([batch])
    log.close()
    return PartitionLog.open(DiskFiles(), folder, LogConfig())


def main(mib: int = 256, value_bytes: int = 100, keys: int = 10_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = filled(f"{folder}/p", mib, value_bytes, keys)
        job = CompactionJob(
            folder=log.folder,
            volatile=False,
            generation=log.generation,
            segments=[SegmentRef(row.base, row.next, row.bytes) for row in log.rows()],
            dirty_from=0,
            horizon_ends=[],
            tombstones_end=0,
            segment_bytes_max=log.settings.segment_bytes,
            index_interval_bytes=log.settings.index_interval_bytes,
            map_bytes=256 * MiB,
        )
        before, wall_s, cpu_s = sum(ref.log_bytes for ref in job.segments), time.perf_counter(), time.process_time()
        result = run(job, DiskFiles(), Pace(UNLIMITED))
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        assert isinstance(result, Compacted), result
        swap_s = time.perf_counter()
        assert log.swap(job.generation, result.outputs)
        swap_s = time.perf_counter() - swap_s
        after = sum(output.log_bytes for output in result.outputs)
        print(
            f"{len(job.segments)} segments, {before / MiB:.0f} MiB to {after / MiB:.0f}, {result.clean_end:,} records"
        )
        print(f"{before / MiB / cpu_s:.0f} MiB and {result.clean_end / cpu_s:,.0f} records per second of CPU")
        print(f"{before / MiB / wall_s:.0f} MiB per second of wall time; put in place in {swap_s * 1000:.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
