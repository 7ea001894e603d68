"""When a log is compacted, and what becomes of the result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from unit.log.fakes import SMALL
from unit.log.test_compaction import Fast, Row, Writer, disk, opened, rows

from zmqueue.broker.compaction import RETRY_MS, CompactionChore
from zmqueue.core.topic_config import settings_of
from zmqueue.errors import CorruptLog, StorageFull
from zmqueue.log.jobs import Failed, run
from zmqueue.log.partition_log import PartitionLog

NOW_MS = 1_000_000


class Scene:
    def __init__(self, **config: str) -> None:
        self.log: PartitionLog = opened(disk())
        self.now_ms = NOW_MS
        self.chore = CompactionChore(SMALL, lambda: self.now_ms)
        self.writer = Writer(self.log)
        self.configure(**config)

    def configure(self, **config: str) -> None:
        names = {name.replace("_", "."): text for name, text in config.items()}
        self.log.configure(settings_of({"cleanup.policy": "compact", "segment.bytes": "1024"} | names, SMALL))

    def write(self, count: int, key: bytes = b"k", time: int = 0, **more: Any) -> None:
        for _ in range(count):
            self.writer.put(Row(key, bytes(300), timestamp=time), **more)

    def plan(self, high_watermark: int | None = None):
        return self.chore.plan(self.log, self.log.log_end if high_watermark is None else high_watermark, self.now_ms)

    def compact(self) -> None:
        job = self.plan()
        assert job is not None
        self.chore.finish(self.log, job, run(job, self.log._files, Fast()))


def test_only_topics_that_compact_are_compacted():
    scene = Scene()
    scene.write(10)
    assert scene.plan() is not None
    scene.configure(cleanup_policy="delete")
    assert scene.plan() is None
    scene.configure(cleanup_policy="compact,delete")
    assert scene.plan() is not None


def test_neither_the_last_segment_nor_what_is_not_committed_is_touched():
    scene = Scene()
    scene.write(10)
    every = scene.plan()
    assert every is not None
    assert every.segments[-1].next_offset == scene.log._segments[-1].base_offset
    some = scene.plan(high_watermark=every.segments[1].next_offset + 1)
    assert some is not None
    assert some.segments == every.segments[:2]
    assert scene.plan(high_watermark=1) is None


def test_what_is_younger_than_the_lag_waits():
    scene = Scene(min_compaction_lag_ms="500")
    scene.write(6, time=NOW_MS - 600)
    scene.write(6, time=NOW_MS - 400)
    job = scene.plan()
    assert job is not None
    assert job.segments[-1].next_offset <= 6
    scene.now_ms += 200
    job = scene.plan()
    assert job is not None
    assert job.segments[-1].next_offset == scene.log._segments[-1].base_offset


def test_the_dirty_part_must_be_large_enough():
    scene = Scene(min_cleanable_dirty_ratio="0.5")
    for nth in range(30):
        scene.write(1, b"%d" % nth)
    scene.compact()
    clean_bytes = scene.log.clean_point.end and sum(row.bytes for row in scene.log.rows())
    assert scene.plan() is None
    while (job := scene.plan()) is None:
        scene.write(1)
    dirty_bytes = sum(ref.log_bytes for ref in job.segments if ref.next_offset > job.dirty_from)
    assert clean_bytes <= dirty_bytes < 1.2 * clean_bytes


def test_tombstones_go_when_their_time_has_come_although_nothing_new_was_written():
    scene = Scene(delete_retention_ms="5000")
    scene.write(1, b"gone")
    scene.writer.put(Row(b"gone", None))
    scene.write(6)
    job = scene.plan()
    assert job is not None
    # The time counts from when the old records are gone, however long the job took.
    scene.now_ms += 700
    scene.chore.finish(scene.log, job, run(job, scene.log._files, Fast()))
    assert rows(scene.log)[1].value is None
    scene.now_ms += 4999
    assert scene.plan() is None
    scene.now_ms += 1
    scene.compact()
    assert 1 not in rows(scene.log)
    assert scene.log.clean_point.horizons == ()
    assert scene.plan() is None


def test_after_a_restart_it_waits_for_word_of_what_is_committed():
    scene = Scene(delete_retention_ms="0")
    scene.write(1, b"gone")
    scene.writer.put(Row(b"gone", None))
    scene.write(10)
    scene.compact()
    scene.now_ms += 1
    assert scene.plan(high_watermark=3) is None
    assert scene.plan() is not None


def test_a_failed_job_is_tried_again_later_and_leaves_nothing_behind():
    scene = Scene()
    scene.write(10)
    job = scene.plan()
    assert job is not None
    files = scene.log._files
    files.room = 400  # type: ignore[attr-defined]
    result = run(job, files, Fast())
    assert result == Failed(StorageFull.code, "full")
    files.room = None  # type: ignore[attr-defined]
    assert any("cleaned" in name for name in files.listdir(scene.log.folder))
    scene.chore.finish(scene.log, job, result)
    assert not any("cleaned" in name for name in files.listdir(scene.log.folder))
    assert scene.plan() is None
    scene.now_ms += RETRY_MS
    scene.compact()
    assert scene.plan() is None


def test_damage_that_a_job_finds_is_told():
    scene = Scene()
    scene.write(10)
    job = scene.plan()
    assert job is not None
    with pytest.raises(CorruptLog, match="damaged"):
        scene.chore.finish(scene.log, job, Failed(CorruptLog.code, "damaged at 7"))


@pytest.mark.parametrize("what", ["truncated", "deleted"])
def test_damage_in_what_is_no_longer_there_is_none(what: str):
    scene = Scene()
    scene.write(10)
    job = scene.plan()
    assert job is not None
    if what == "truncated":
        scene.log.truncate(4)
    else:
        scene.log.delete_before(6)
    scene.chore.finish(scene.log, job, Failed(CorruptLog.code, "damaged at 7"))


def test_segments_deleted_meanwhile_do_not_come_back():
    scene = Scene()
    for nth in range(20):
        scene.write(1, b"%d" % (nth % 7))
    job = scene.plan()
    assert job is not None
    result = run(job, scene.log._files, Fast())
    scene.log.delete_before(8)
    scene.log.remove_deleted(100)
    before = rows_from(scene.log, 8)
    scene.chore.finish(scene.log, job, result)
    left = rows_from(scene.log, 8)
    assert left.items() <= before.items()
    assert {row.key for row in left.values()} == {row.key for row in before.values()}
    scene.log.close()
    again = opened(scene.log._files)
    assert not again.recovery.corrupt
    assert rows_from(again, 8) == left


def rows_from(log: PartitionLog, start: int) -> dict[int, Row]:
    assert log.log_start == start
    return {offset: row for offset, row in rows(log).items() if offset >= start}


def test_an_index_that_does_not_prove_is_not_put_in_place():
    scene = Scene()
    scene.write(10)
    job = scene.plan()
    assert job is not None
    files = scene.log._files
    result = run(job, files, Fast())
    before = rows(scene.log)
    path = next(name for name in files.listdir(scene.log.folder) if name.endswith(".index.cleaned"))
    files.put(f"{scene.log.folder}/{path}", b"not an index, but long enough to look at")
    scene.chore.finish(scene.log, job, result)
    assert rows(scene.log) == before
    assert scene.log.clean_point.end == 0


def test_a_job_is_plain_data():
    scene = Scene()
    scene.write(10)
    job = scene.plan()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=type(job)) == job
