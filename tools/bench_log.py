"""What the log costs: against bare system calls of the same sizes in the same run, and against fixed limits.

    append    PartitionLog.append and a flush for each batch, against writev and fdatasync
    read      from a cold page cache to the end, against pread of the same files
    seek      a record by its offset and by its time, in a partition of many segments
    reopen    a large partition after SIGKILL of its writer
    memory    of a real broker that holds many partitions with much data

The last two run on sparse logs (sparse_log.py): true batches whose zeros take no room. Both sizes are reported.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import sparse_log

from zmqueue.broker.__main__ import keep_memory
from zmqueue.config import LogConfig
from zmqueue.errors import ZmqueueError
from zmqueue.log.files import DiskFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import KiB, MiB
from zmqueue.wire.batch import Batch, encode, split

APPEND_BYTES = (4 * KiB, 64 * KiB, 256 * KiB)
READ_BYTES = 1 * MiB
SEEK_BATCH_BYTES = 4 * KiB
SEEK_SEGMENT_BYTES = 1 * MiB
READY_S_MAX = 300.0
GiB = 1024 * MiB

Note = Callable[[str], None]


def made_batch(batch_bytes: int) -> Batch:
    """One record of noise, of exactly this size."""
    value = sparse_log.value_bytes(batch_bytes)
    made = encode([os.urandom(value)])
    assert made.header.total_bytes == batch_bytes
    made.header.leader_epoch = 0
    return made


def at(made: Batch, offset: int, time_ms: int = 0) -> Batch:
    made.header.base_offset = offset
    made.header.base_timestamp = made.header.max_timestamp = time_ms
    return made


def flush(log: PartitionLog) -> None:
    ticket = log.begin_flush()
    ticket.sync()
    log.flushed(ticket)


def in_turns(rounds: int, ours: Callable[[], float], bare: Callable[[], float]) -> dict[str, Any]:
    """Rates of both; the ratio is the median of each round's own, as whatever disturbs a round meets both."""
    # Who goes first changes: the first may pay for what was before.
    pairs = [(ours(), bare()) if number % 2 else (bare(), ours())[::-1] for number in range(rounds)]
    return {
        "mb_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "bare_mb_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        # What neither was disturbed in: on a machine with other work to do, this says more.
        "ratio_of_best": round(max(a for a, _ in pairs) / max(b for _, b in pairs), 3),
        "ratio_min": round(min(a / b for a, b in pairs), 3),
        "ratio_max": round(max(a / b for a, b in pairs), 3),
    }


# -- append ------------------------------------------------------------------------------------------------------


def append(folder: Path, batch_bytes: int, rounds: int, per_round: int) -> dict[str, Any]:
    log = PartitionLog.open(DiskFiles(), folder / f"append-{batch_bytes}", LogConfig())
    bare_fd = os.open(folder / f"bare-{batch_bytes}", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    one = made_batch(batch_bytes)
    header, body = one.header.pack(), one.body

    def ours() -> float:
        begun = time.perf_counter()
        for _ in range(per_round):
            log.append([at(one, log.log_end)])
            flush(log)
        return per_round * batch_bytes / (time.perf_counter() - begun) / 1e6

    def bare() -> float:
        begun = time.perf_counter()
        for _ in range(per_round):
            os.writev(bare_fd, [header, body])
            os.fdatasync(bare_fd)
        return per_round * batch_bytes / (time.perf_counter() - begun) / 1e6

    try:
        return {"batch_bytes": batch_bytes, "batches": rounds * per_round, **in_turns(rounds, ours, bare)}
    finally:
        log.close()
        os.close(bare_fd)


# -- cold read ---------------------------------------------------------------------------------------------------


def cold(folder: Path) -> list[Path]:
    """The segments of a log, in order, with nothing of them in memory."""
    paths = sorted(folder.glob("*.log"))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return paths


def read(folder: Path, total_bytes: int, batch_bytes: int, rounds: int) -> dict[str, Any]:
    place = folder / f"read-{batch_bytes}"
    writer = PartitionLog.open(DiskFiles(), place, LogConfig(fsync="os"))
    one = made_batch(batch_bytes)
    while writer.size_bytes < total_bytes:
        writer.append([at(one, writer.log_end)])
    writer.close()
    size = writer.size_bytes
    log = PartitionLog.open(DiskFiles(), place, LogConfig())

    def ours() -> float:
        cold(place)
        begun, offset, seen = time.perf_counter(), 0, 0
        while data := log.read(offset, READ_BYTES, log.log_end):
            seen += len(data)
            offset += len(data) // batch_bytes  # one record each, and all of one size
        assert (seen, offset) == (size, log.log_end)
        return size / (time.perf_counter() - begun) / 1e6

    def bare() -> float:
        paths = cold(place)
        begun, seen = time.perf_counter(), 0
        for path in paths:
            fd, position = os.open(path, os.O_RDONLY), 0
            while data := os.pread(fd, READ_BYTES, position):
                position += len(data)
            seen += position
            os.close(fd)
        assert seen == size
        return size / (time.perf_counter() - begun) / 1e6

    try:
        # Once unmeasured: below this machine's own memory there may be other caches, which then serve both alike.
        bare(), ours()
        return {"batch_bytes": batch_bytes, "bytes": size, **in_turns(rounds, ours, bare)}
    finally:
        log.close()


# -- seek --------------------------------------------------------------------------------------------------------


def seek(folder: Path, segments: int, seeks: int) -> dict[str, Any]:
    """The batch with the wanted record is read and proved; that is what a consumer who seeks waits for."""
    config = LogConfig(
        fsync="os", segment_bytes_max=SEEK_SEGMENT_BYTES, batch_bytes_max=SEEK_BATCH_BYTES, retention_ms=-1
    )
    log = PartitionLog.open(DiskFiles(), folder / "seek", config)
    one = made_batch(SEEK_BATCH_BYTES)
    while log.segment_count <= segments:
        log.append([at(one, log.log_end, 1_000_000 + 10 * log.log_end)])
    log.close()
    log = PartitionLog.open(DiskFiles(), folder / "seek", config)
    chance, end = random.Random(1), log.log_end
    result: dict[str, Any] = {"segments": log.segment_count, "batch_bytes": SEEK_BATCH_BYTES, "records": end}
    for kind in ("offset", "time"):
        took = []
        for wanted in (chance.randrange(end) for _ in range(seeks)):
            begun = time.perf_counter()
            if kind == "offset":
                data = log.read(wanted, 1, end)
                found = next(split(data)).header.base_offset
            else:
                answer = log.offset_for_time(1_000_000 + 10 * wanted - 5, end)
                found = answer[0] if answer is not None else -1
            took.append((time.perf_counter() - begun) * 1e6)
            assert found == wanted
        quantiles = statistics.quantiles(took, n=100)
        result[f"{kind}_us_p50"] = round(quantiles[49], 1)
        result[f"{kind}_us_p99"] = round(quantiles[98], 1)
    log.close()
    return result


# -- reopen ------------------------------------------------------------------------------------------------------

_WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from bench_log import at, flush, made_batch
from zmqueue.config import LogConfig
from zmqueue.log.files import DiskFiles
from zmqueue.log.partition_log import PartitionLog
log = PartitionLog.open(DiskFiles(), {folder!r}, LogConfig())
one = made_batch(65536)
while True:
    log.append([at(one, log.log_end)])
    flush(log)
    print(log.durable_end, flush=True)
"""

_OPENER = """
import sys, time
sys.path[:0] = {paths!r}
from zmqueue.config import LogConfig
from zmqueue.log.files import DiskFiles
from zmqueue.log.partition_log import PartitionLog
begun = time.perf_counter()
log = PartitionLog.open(DiskFiles(), {folder!r}, LogConfig())
print(time.perf_counter() - begun, log.log_end, log.segment_count)
"""


def reopen(folder: Path, total_bytes: int, rounds: int, note: Note) -> dict[str, Any]:
    place = folder / "reopen"
    size = sparse_log.make(place, total_bytes)
    os.sync()
    note(f"{size.apparent / GiB:.1f} GiB that take {size.real / MiB:.0f} MiB")
    names = {"paths": sys.path[:2], "folder": str(place)}
    took, segments = [], 0
    for _ in range(rounds):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER.format(**names)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        promised = 0
        for line in writer.stdout:
            promised = int(line)
            if promised % 200 == 0:
                break
        writer.send_signal(signal.SIGKILL)
        promised = max([promised, *map(int, writer.stdout.read().split()[:-1])])
        writer.wait()
        for path in place.iterdir():  # what a machine with other work would no longer have in memory
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        opener = [sys.executable, "-c", _OPENER.format(**names)]
        answer = subprocess.run(opener, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        assert int(answer[1]) >= promised, "durable records are gone"
        took.append(float(answer[0]))
        segments = int(answer[2])
    return {
        "apparent_bytes": size.apparent,
        "real_bytes": size.real,
        "segments": segments,
        "seconds": round(statistics.median(took), 3),
        "seconds_max": round(max(took), 3),
    }


# -- memory ------------------------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """What the caller knows about starting one."""

    zmqueue: Callable[..., None]
    free_offset: Callable[[], int]


def memory(folder: Path, cluster: Cluster, partitions: int, total_bytes: int, note: Note) -> dict[str, Any]:
    """One broker that leads all partitions of a topic, which get their data while it is down."""
    data, offset = folder / "data", cluster.free_offset()
    cluster.zmqueue("up", "--detach", "--brokers", "1", "--data-dir", str(data), "--port-offset", str(offset))
    bootstrap = f"127.0.0.1:{9092 + offset}"
    try:
        _wait_until(lambda: _create(bootstrap, partitions), "the topic")
        cluster.zmqueue("down", "--data-dir", str(data))
        size = _fill(data / "broker-0" / "partitions", partitions, total_bytes)
        os.sync()
        note(f"{size.apparent / GiB:.1f} GiB in {partitions} partitions that take {size.real / MiB:.0f} MiB")
        begun = time.monotonic()
        cluster.zmqueue("up", "--detach", "--data-dir", str(data), "--timeout", str(READY_S_MAX))
        ready_s = time.monotonic() - begun
        pid = int((data / "broker-0" / "pid").read_text().split()[0])
        idle = rss_anon(pid)
        records = _consume_some(bootstrap, partitions)
        return {
            "partitions": partitions,
            "segments": size.segments,
            "apparent_bytes": size.apparent,
            "real_bytes": size.real,
            "ready_s": round(ready_s, 1),
            "rss_anon_mib": round(idle / MiB, 1),
            "records_read": records,
            "rss_anon_after_reading_mib": round(rss_anon(pid) / MiB, 1),
        }
    finally:
        cluster.zmqueue("down", "--data-dir", str(data))


def _create(bootstrap: str, partitions: int) -> bool:
    from zmqueue import Admin

    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic("large", num_partitions=partitions, replication_factor=1)
        return True


def _fill(folder: Path, partitions: int, total_bytes: int) -> sparse_log.Size:
    _wait_until(lambda: len(list(folder.iterdir())) == partitions, "the folders of all partitions")
    now_ms = time.time_ns() // 1_000_000
    size = sparse_log.Size(0, 0, 0, 0)
    for place in folder.iterdir():
        for file in place.iterdir():
            file.unlink()
        size += sparse_log.make(place, total_bytes // partitions, base_time_ms=now_ms)
    return size


def _consume_some(bootstrap: str, partitions: int) -> int:
    """A record of 1 MiB from the beginning of each of up to 50 partitions."""
    from zmqueue import Consumer, TopicPartition

    count = 0
    with Consumer(bootstrap_servers=bootstrap, enable_auto_commit=False) as consumer:
        for number in range(0, partitions, max(1, partitions // 50)):
            partition = TopicPartition("large", number)
            consumer.assign([partition])
            consumer.seek(partition, 0)
            count += sum(map(len, consumer.poll(timeout_ms=30_000, max_records=1).values()))
    return count


def _wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while True:
        try:
            if done():
                return
        except (ZmqueueError, OSError) as error:
            last: object = error
        else:
            last = "not yet"
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: {last}")
        time.sleep(0.2)


def rss_anon(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KiB
    raise RuntimeError(f"process {pid} has no RssAnon")


# -- all of it ---------------------------------------------------------------------------------------------------

LIMITS = {
    "append": ("ratio", ">=", 0.7),
    "read": ("ratio", ">=", 0.7),
    "seek": ("offset_us_p50", "<", 100.0),
    "seek_time": ("time_us_p50", "<", 100.0),
    "reopen": ("seconds", "<", 2.0),
    "memory": ("rss_anon_mib", "<", 200.0),
}


def run(folder: Path, only: list[str], cluster: Cluster, note: Note, quick: bool) -> dict[str, Any]:
    """`quick`: small amounts, to see that it works."""
    keep_memory()  # as a broker does, for both sides of each comparison
    few = 10 if quick else 1
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "append": lambda: [append(folder, size, 19 // few + 1, 100 // few) for size in APPEND_BYTES],
        "read": lambda: [read(folder, 512 * MiB // few, size, 9 // few + 2) for size in (64 * KiB, 256 * KiB)],
        "seek": lambda: [seek(folder, 1_000 // few, 5_000 // few)],
        "reopen": lambda: [reopen(folder, 10 * GiB // few, 3 // few + 1, note)],
        "memory": lambda: [memory(folder, cluster, 1_000 // few, 100 * GiB // few, note)],
    }
    result: dict[str, Any] = {"bench": "log"}
    for name, part in parts.items():
        if not only or name in only:
            note(name)
            result[name] = part()
    result["met"] = {name: met for name in LIMITS if (met := _met(result, name)) is not None}
    return result


def _met(result: dict[str, Any], name: str) -> bool | None:
    """Whether the limit holds for every figure of its kind; None if it was not measured."""
    figure, relation, limit = LIMITS[name]
    measured = [part[figure] for part in result.get(name.partition("_")[0], []) if figure in part]
    if not measured:
        return None
    return min(measured) >= limit if relation == ">=" else max(measured) < limit
