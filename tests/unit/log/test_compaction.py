from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.log.fakes import SMALL, Crash, FakeDisk, flush

from zmqueue.core.producers import Producers
from zmqueue.errors import CorruptLog, StorageFull
from zmqueue.log.clean_point import HORIZONS_MAX, CleanPoint, Horizon, load_clean_point
from zmqueue.log.compaction import KEY_BYTES, Compacted, CompactionJob, SegmentRef
from zmqueue.log.files import Files
from zmqueue.log.jobs import PACE_S_MIN, Failed, Pace, Result, run
from zmqueue.log.memory import MemoryFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.wire.batch import CONTROL, Batch, BatchHeader, decode, encode, split

FOLDER = "data/p"


class Fast(Pace):
    def __init__(self) -> None:
        super().__init__(1, clock=lambda: 0.0, sleep=lambda _: None)


class Row(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: Any = None
    timestamp: int = 1000


def opened(files: Files) -> PartitionLog:
    return PartitionLog.open(files, FOLDER, SMALL)


def disk() -> FakeDisk:
    made = FakeDisk()
    made.mkdir("data")
    return made


class Writer:
    """Appends batches, each sealed by its own flush, with sequences as a producer would count them."""

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.sequences: dict[int, int] = {}

    def put(self, *rows: Row, producer: int = -1, epoch: int = 0, codec: int = 0, attributes: int = 0) -> None:
        base = min(row.timestamp for row in rows)
        made = encode(
            [row.value for row in rows],
            keys=[row.key for row in rows],
            headers=[row.headers for row in rows],
            timestamp_deltas=[row.timestamp - base for row in rows],
            base_timestamp=base,
            codec=codec,
            attributes=attributes,
            producer_id=producer,
            producer_epoch=0 if producer >= 0 else -1,
            base_sequence=self.sequences.get(producer, 0) if producer >= 0 else -1,
        )
        if producer >= 0:
            self.sequences[producer] = made.header.last_sequence + 1
        made.header.base_offset = self.log.log_end
        made.header.leader_epoch = epoch
        self.log.append([made])
        flush(self.log)

    def fill(self, count: int = 8) -> None:
        """Enough for whatever was written before to be sealed."""
        for _ in range(count):
            self.put(Row(b"filler", bytes(300)))


def job_of(log: PartitionLog, **changes: Any) -> CompactionJob:
    point = log.clean_point
    values: dict[str, Any] = {
        "folder": log.folder,
        "volatile": log._files.volatile,
        "generation": log.generation,
        "segments": [SegmentRef(one.base_offset, one.next_offset, one.size) for one in log._segments[:-1]],
        "dirty_from": point.end,
        "horizon_ends": [horizon.end for horizon in point.horizons],
        "tombstones_end": 0,
        "segment_bytes_max": SMALL.segment_bytes_max,
        "index_interval_bytes": SMALL.index_interval_bytes,
        "map_bytes": 1 << 20,
    }
    return CompactionJob(**(values | changes))


def finish(log: PartitionLog, job: CompactionJob, result: Result, now_ms: int = 0) -> None:
    assert isinstance(result, Compacted), result
    assert log.swap(job.generation, result.outputs)
    log.compacted(log.clean_point.advanced(result.clean_end, now_ms, result.tombstones))
    log.remove_deleted(log.deleted_segments)


def compacted(log: PartitionLog, now_ms: int = 0, **changes: Any) -> Compacted:
    job = job_of(log, **changes)
    result = run(job, log._files, Fast())
    finish(log, job, result, now_ms)
    assert isinstance(result, Compacted)
    return result


def batches(log: PartitionLog, bytes_max: int = 700) -> list[Batch]:
    found: list[Batch] = []
    offset = log.log_start
    while data := log.read(offset, bytes_max, log.log_end):
        found += split(data)
        offset = found[-1].header.next_offset
    assert offset == log.log_end
    return found


def rows_of(batch: Batch) -> dict[int, Row]:
    header = batch.header
    columns = decode(header, batch.body)
    deltas = columns.offset_deltas if columns.offset_deltas is not None else range(header.record_count)
    rows = {}
    for nth, delta in enumerate(deltas):
        rows[header.base_offset + delta] = Row(
            columns.keys[nth] if columns.keys else None,
            columns.values[nth],
            columns.headers[nth] if columns.headers else None,
            header.base_timestamp + (columns.timestamp_deltas[nth] if columns.timestamp_deltas else 0),
        )
    return rows


def rows(log: PartitionLog) -> dict[int, Row]:
    return {offset: row for batch in batches(log) for offset, row in rows_of(batch).items()}


def expected(before: dict[int, Row], dirty_from: int, clean_end: int, tombstones_end: int = 0) -> dict[int, Row]:
    latest = {row.key: offset for offset, row in before.items() if dirty_from <= offset < clean_end}
    return {
        offset: row
        for offset, row in before.items()
        if row.key is None
        or (latest.get(row.key, -1) <= offset and (row.value is not None or offset >= tombstones_end))
    }


def headers_of(log: PartitionLog) -> list[BatchHeader]:
    return [batch.header for batch in batches(log)]


def check_shape(log: PartitionLog) -> None:
    end, epoch = log.log_start, 0
    for header in headers_of(log):
        assert header.base_offset == end
        assert header.leader_epoch >= epoch
        end, epoch = header.next_offset, header.leader_epoch
    assert end == log.log_end


def last_written(headers: list[BatchHeader]) -> dict[int, tuple[int, int, int]]:
    """Of each producer, what a leader needs to recognise its next batch."""
    written = {one.producer_id: (one.producer_epoch, one.last_sequence, one.next_offset) for one in headers}
    written.pop(-1, None)
    return written


# -- against a model ---------------------------------------------------------------------------------------------

KEYS = [
    None,
    b"",
    b"a",
    b"b",
    b"c",
    b"a key of exactly thirty-two byte",
    b"a key that is longer than any hash of it would be",
]
row_shapes = st.builds(
    Row,
    key=st.sampled_from(KEYS),
    value=st.one_of(st.none(), st.binary(max_size=120)),
    headers=st.one_of(st.none(), st.just([["name", b"x"], ["none", None]])),
    timestamp=st.integers(0, 2000),
)
batch_shapes = st.tuples(
    st.lists(row_shapes, min_size=1, max_size=5),
    st.sampled_from([-1, -1, 7, 8, 9]),  # producer
    st.integers(0, 4).map(lambda n: n == 0),  # a new leader epoch
    st.sampled_from([0, 1, 2, 3, 4]),  # codec
)


def written(log: PartitionLog, shapes: list[Any]) -> None:
    writer, epoch = Writer(log), log.last_epoch
    for made, producer, elected, codec in shapes:
        epoch = max(epoch + elected, 0)
        writer.put(*made, producer=producer, epoch=epoch, codec=codec)


@settings(max_examples=120, deadline=None)
@given(
    shapes=st.lists(batch_shapes, min_size=8, max_size=40),
    memory=st.booleans(),
    keys=st.integers(1, 20),
    tombstones=st.integers(0, 60),
    later=st.lists(batch_shapes, max_size=12),
)
def test_of_each_key_the_latest_record_stays(shapes, memory, keys, tombstones, later):
    files: Files = MemoryFiles() if memory else disk()
    log = opened(files)
    written(log, shapes)
    for _ in range(2):
        before, batches_before = rows(log), headers_of(log)
        producers, epochs = log.producers.encode(), list(log.epochs)
        dirty_from, tombstones_end = log.clean_point.end, min(tombstones, log.clean_point.end)
        result = compacted(log, map_bytes=keys * KEY_BYTES, tombstones_end=tombstones_end)
        full_end = max((one.next_offset for one in log._segments[:-1]), default=0)
        assert dirty_from <= result.clean_end <= full_end
        assert result.clean_end > dirty_from or dirty_from == full_end
        assert rows(log) == expected(before, dirty_from, result.clean_end, tombstones_end)
        check_shape(log)
        assert last_written(headers_of(log)) == last_written(batches_before)
        assert (log.producers.encode(), log.epochs) == (producers, epochs)
        after = rows(log)
        log.close()
        if memory:
            log = opened(files)
        else:
            assert isinstance(files, FakeDisk)
            log = opened(files)
            assert log.producers.encode() == producers
            for name in files.listdir(FOLDER):
                if name.endswith(".index"):
                    files.remove(f"{FOLDER}/{name}")
            log.close()
            log = opened(files)
        assert not log.recovery.corrupt
        assert (rows(log), log.epochs) == (after, epochs)
        assert log.producers.last_batches() == Producers.decode(producers).last_batches()
        written(log, later)


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(batch_shapes, min_size=8, max_size=40))
def test_compacting_what_is_compacted_changes_nothing(shapes):
    log = opened(disk())
    written(log, shapes)
    compacted(log)
    # Segments that have become small are put together, and empty batches that are then neighbours.
    for _ in range(3):
        before, result = rows(log), compacted(log)
        assert rows(log) == before
    assert result.outputs == []


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(batch_shapes, min_size=8, max_size=30), bytes_max=st.integers(1, 3000), data=st.data())
def test_a_reader_finds_its_place_at_any_offset(shapes, bytes_max, data):
    log = opened(disk())
    written(log, shapes)
    before_swap = data.draw(st.integers(0, log.log_end - 1))
    log.read(before_swap, bytes_max, log.log_end)
    compacted(log)
    left = rows(log)
    for offset in range(log.log_end):
        first, *_ = split(log.read(offset, bytes_max, log.log_end))
        assert first.header.base_offset <= offset < first.header.next_offset
        for at, row in rows_of(first).items():
            assert left[at] == row
    timestamp = data.draw(st.integers(0, 2100))
    found = [(offset, row.timestamp) for offset, row in left.items() if row.timestamp >= timestamp]
    assert log.offset_for_time(timestamp, log.log_end) == (found[0] if found else None)


# -- what stays and what goes ------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "memory"])
def log(request: pytest.FixtureRequest) -> PartitionLog:
    return opened(disk() if request.param == "disk" else MemoryFiles())


def test_records_without_a_key_and_control_batches_stay(log):
    writer = Writer(log)
    writer.put(Row(None, b"1"), Row(b"k", b"old"), Row(None, None))
    writer.put(Row(b"k", b"marker"), attributes=CONTROL)
    writer.put(Row(b"k", b"new"))
    writer.fill()
    compacted(log)
    assert {offset: row.value for offset, row in rows(log).items() if offset < 5} == {
        0: b"1",
        2: None,
        3: b"marker",
        4: b"new",
    }


def test_the_last_batch_of_a_producer_stays_without_records_and_others_merge(log):
    writer = Writer(log)
    for producer in (1, 2, 1, 2, 1):
        writer.put(Row(b"k", b"v"), producer=producer)
    writer.put(Row(b"k", b"last"))
    writer.fill()
    compacted(log)
    found = [(one.base_offset, one.next_offset, one.producer_id, one.record_count) for one in headers_of(log)]
    assert found[:4] == [(0, 3, -1, 0), (3, 4, 2, 0), (4, 5, 1, 0), (5, 6, -1, 1)]


def test_empty_batches_of_two_leaders_stay_apart(log):
    writer = Writer(log)
    for epoch in (0, 0, 1, 1):
        writer.put(Row(b"k", b"v"), epoch=epoch)
    writer.put(Row(b"k", b"last"), epoch=1)
    for _ in range(8):
        writer.put(Row(b"filler", bytes(300)), epoch=1)
    compacted(log)
    found = [(one.base_offset, one.next_offset, one.leader_epoch, one.record_count) for one in headers_of(log)]
    assert found[:3] == [(0, 2, 0, 0), (2, 4, 1, 0), (4, 5, 1, 1)]
    assert log.epochs == [(0, 0), (1, 2)]


def test_a_body_that_does_not_open_stays_as_it_is(log):
    made = encode([b"v"], keys=[b"k"])
    wrong = made.header
    wrong.record_count, wrong.last_offset_delta = 2, 1
    wrong.base_offset = wrong.leader_epoch = 0
    log.append([made])
    writer = Writer(log)
    writer.put(Row(b"k", b"new"))
    writer.fill()
    compacted(log)
    assert list(split(log.read(0, 1, log.log_end))) == [made]


def test_replaced_segments_are_removed_a_few_at_a_time_or_when_the_log_is_opened(log):
    writer = Writer(log)
    for _ in range(20):
        writer.put(Row(b"k", bytes(300)))
    replaced = log.segment_count - 1
    for _ in range(2):
        job = job_of(log)
        result = run(job, log._files, Fast())
        assert isinstance(result, Compacted)
        assert log.swap(job.generation, result.outputs)
        log.compacted(log.clean_point.advanced(result.clean_end, 0, result.tombstones))
    assert log.deleted_segments >= replaced
    assert log.remove_deleted(2)[0] == 2
    before = rows(log)
    log.close()
    again = opened(log._files)
    assert rows(again) == before
    assert not any("replaced" in name for name in log._files.listdir(FOLDER))


def test_segments_that_have_become_small_are_put_together(log):
    writer = Writer(log)
    for _ in range(30):
        writer.put(Row(b"k", bytes(300)))
    count = log.segment_count
    compacted(log)
    assert count > 8
    assert log.segment_count < count
    compacted(log)
    assert log.segment_count == 2
    assert log.size_bytes < 2 * SMALL.segment_bytes_max


def test_a_segment_never_grows_beyond_its_limit_by_being_put_together(log):
    writer = Writer(log)
    for nth in range(40):
        writer.put(Row(b"%d" % (nth % 30), bytes(150)))
    for _ in range(3):
        compacted(log)
        assert all(one.size <= SMALL.segment_bytes_max for one in log._segments[:-1])
    check_shape(log)


# -- tombstones --------------------------------------------------------------------------------------------------


def test_a_tombstone_stays_until_it_has_stood_alone_for_long_enough(log):
    writer = Writer(log)
    writer.put(Row(b"k", b"value"))
    writer.put(Row(b"k", None))
    writer.fill()
    compacted(log, now_ms=1000)
    assert 0 not in rows(log)
    assert rows(log)[1] == Row(b"k", None)
    assert log.clean_point.tombstones_end(now_ms=1099, delete_retention_ms=100) == 0
    end = log.clean_point.tombstones_end(now_ms=1100, delete_retention_ms=100)
    assert end > 1
    writer.put(Row(b"k2", None))
    writer.fill()
    compacted(log, now_ms=1100, tombstones_end=end)
    assert 1 not in rows(log)
    (horizon,) = log.clean_point.horizons
    assert (horizon.since_ms, horizon.tombstones) == (1100, 1)


def test_a_tombstone_that_was_replaced_goes_at_once(log):
    writer = Writer(log)
    writer.put(Row(b"k", None))
    writer.put(Row(b"k", b"again"))
    writer.fill()
    compacted(log)
    assert next(iter(rows(log))) == 1
    assert log.clean_point.horizons == ()


def test_horizons_are_bounded_and_only_ever_get_later():
    point = CleanPoint()
    for nth in range(HORIZONS_MAX + 10):
        kept = [horizon.tombstones for horizon in point.horizons]
        point = point.advanced((nth + 1) * 10, nth, [*kept, 1])
    assert len(point.horizons) == HORIZONS_MAX
    assert point.horizons[0] == Horizon(110, 10, 11)
    assert point.end == (HORIZONS_MAX + 10) * 10


def test_a_truncation_takes_back_what_was_known_of_the_part_it_cuts(log):
    writer = Writer(log)
    writer.put(Row(b"k", None))
    writer.fill()
    compacted(log)
    end = log.clean_point.end
    log.truncate(end)
    assert log.clean_point.end == end
    log.truncate(end - 1)
    assert log.clean_point == load_clean_point(log._files, FOLDER) == CleanPoint()
    log.close()
    assert opened(log._files).clean_point == CleanPoint()


# -- what happens meanwhile --------------------------------------------------------------------------------------


def test_the_result_of_a_job_from_before_a_truncation_is_thrown_away(log):
    writer = Writer(log)
    for _ in range(10):
        writer.put(Row(b"k", bytes(300)))
    job = job_of(log)
    result = run(job, log._files, Fast())
    assert isinstance(result, Compacted)
    log.truncate(9)
    before = rows(log)
    assert not log.swap(job.generation, result.outputs)
    assert rows(log) == before
    assert not any("cleaned" in name for name in log._files.listdir(FOLDER))


def test_records_may_be_appended_while_a_job_runs(log):
    writer = Writer(log)
    for _ in range(10):
        writer.put(Row(b"k", bytes(300)))
    job = job_of(log)
    result = run(job, log._files, Fast())
    for _ in range(10):
        writer.put(Row(b"k", bytes(300)))
    before = rows(log)
    finish(log, job, result)
    assert rows(log) == expected(before, 0, job.segments[-1].next_offset)


def test_damage_ends_a_job_and_leaves_the_log_as_it_was():
    files = disk()
    log = opened(files)
    writer = Writer(log)
    for _ in range(10):
        writer.put(Row(b"k", bytes(300)))
    data = files._inode(log._segments[2].path).data
    data[200] ^= 1
    result = run(job_of(log), files, Fast())
    assert isinstance(result, Failed)
    assert result.code == CorruptLog.code
    assert log.swap(log.generation, [])
    assert not any("cleaned" in name for name in files.listdir(FOLDER))


def test_a_full_disk_ends_a_job_and_leaves_the_log_as_it_was():
    files = disk()
    log = opened(files)
    writer = Writer(log)
    for nth in range(10):
        writer.put(Row(b"%d" % nth, bytes(300)), Row(b"k", b"v"))
    before = rows(log)
    for room in (0, 100, 500, 1500):
        files.room = room
        result = run(job_of(log), files, Fast())
        assert isinstance(result, Failed)
        assert result.code == StorageFull.code
        assert rows(log) == before
    files.room = None
    compacted(log)
    assert rows(log) == expected(before, 0, log.clean_point.end)


def test_the_pace_is_kept_on_average_and_idle_time_is_not_made_up_for():
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(1000, clock=lambda: now[0], sleep=sleep)
    for _ in range(100):
        pace.spend(50)
    assert now[0] == pytest.approx(105.0)
    assert all(seconds > PACE_S_MIN for seconds in slept)
    now[0] += 60
    pace.spend(1000)
    assert slept[-1] == pytest.approx(1.0)


# -- crashes -----------------------------------------------------------------------------------------------------


def scene(files: FakeDisk) -> PartitionLog:
    log = opened(files)
    writer = Writer(log)
    chance = random.Random(3)
    for nth in range(24):
        key = b"%d" % chance.randrange(4)
        value = None if chance.random() < 0.2 else bytes(chance.randrange(250))
        writer.put(Row(key, value), Row(None, b"%d" % nth), producer=nth % 3, epoch=nth // 10)
    return log


def latest(found: dict[int, Row]) -> dict[bytes | None, tuple[int, bytes | None]]:
    return {row.key: (offset, row.value) for offset, row in found.items() if row.key is not None}


def test_a_crash_at_any_step_leaves_every_record_or_what_compaction_leaves():
    whole = disk()
    log = scene(whole)
    start = whole.steps
    before = rows(log)
    result = compacted(log)
    after = rows(log)
    assert len(result.outputs) > 2
    assert len(after) < len(before)
    written_headers = last_written(headers_of(log))
    for crash_at in range(start + 1, whole.steps + 1):
        files = disk()
        log = scene(files)
        assert files.steps == start
        files.crash_at = crash_at
        with pytest.raises(Crash):
            compacted(log)
        for seed in range(6):
            again = files.after_power_cut(random.Random(seed))
            again.mkdir("data")
            found = crash_while_opening(again, seed)
            check_shape(found)
            kept = rows(found)
            assert kept.items() <= before.items()
            assert kept.items() >= after.items()
            assert latest(kept) == latest(before)
            assert found.epochs == log.epochs
            assert found.producers.last_batches() == log.producers.last_batches()
            assert last_written(headers_of(found)) == written_headers
            assert not any(
                "cleaned" in name or "swap" in name or "replaced" in name for name in found._files.listdir(FOLDER)
            )
            # And it can be done again.
            compacted(found)
            assert rows(found) == after


def crash_while_opening(files: FakeDisk, seed: int) -> PartitionLog:
    """Open, with the power going once more at some step of it."""
    files.crash_at = files.steps + 1 + seed
    try:
        log = opened(files)
        files.crash_at = None
    except Crash:
        files = files.after_power_cut(random.Random(seed))
        log = opened(files)
    assert (log.recovery.corrupt, log.recovery.truncated_bytes) == (False, 0)
    return log
