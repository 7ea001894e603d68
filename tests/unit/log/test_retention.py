"""What a topic no longer keeps: which segments go, and how a log loses its beginning without losing anything else."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.unit.log.fakes import SMALL, Crash, FakeDisk, batch, content, flush
from zmqueue.config import LogConfig
from zmqueue.core.topic_config import TopicSettings, settings_of
from zmqueue.errors import OffsetOutOfRange, StorageFull
from zmqueue.log.files import DiskFiles, open_files
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.retention import Row, start_after
from zmqueue.log.start import START_FILE, load_start
from zmqueue.wire.batch import encode, split

ROWS = [Row(10 * nth, 10 * nth + 10, 100, 1_000 * nth) for nth in range(5)]  # and 50 bytes that are appended to
BYTES = 550


def settings(policy: str = "delete", ms: int = -1, size: int = -1) -> TopicSettings:
    config = {"cleanup.policy": policy, "retention.ms": str(ms), "retention.bytes": str(size)}
    return settings_of(config, LogConfig())


def started(given: TopicSettings, committed: int = 50, now_ms: int = 10_000) -> int:
    return start_after(ROWS, BYTES, given, committed, now_ms)


# -- decisions ---------------------------------------------------------------------------------------------------


def test_without_limits_everything_stays():
    assert started(settings()) == -1
    assert started(settings("compact", ms=0, size=0)) == -1, "who only compacts does not delete"
    assert start_after([], 50, settings(ms=0, size=0), 100, 10_000) == -1


@pytest.mark.parametrize(("ms", "expected"), [(0, 50), (6_000, 40), (6_001, 40), (7_000, 30), (10_000, -1)])
def test_segments_go_when_their_youngest_record_is_too_old(ms: int, expected: int):
    assert started(settings(ms=ms)) == expected


def test_where_the_oldest_segment_stays_no_other_is_looked_at():
    rows = iter(ROWS)
    assert start_after(rows, BYTES, settings(ms=10_000, size=BYTES), 50, 10_000) == -1
    assert next(rows) is ROWS[1]


def test_age_stops_at_the_first_segment_that_is_young_or_of_unknown_age():
    rows = [ROWS[0], ROWS[1]._replace(max_timestamp=9_999), ROWS[2]]
    assert start_after(rows, 300, settings(ms=5_000), 50, 10_000) == 10
    rows[1] = ROWS[1]._replace(max_timestamp=-1)
    assert start_after(rows, 300, settings(ms=5_000), 50, 10_000) == 10


@pytest.mark.parametrize(("size", "expected"), [(550, -1), (451, -1), (450, 10), (149, 40), (50, 50), (0, 50)])
def test_segments_go_as_long_as_enough_bytes_are_left(size: int, expected: int):
    assert started(settings(size=size)) == expected


def test_the_stricter_rule_decides():
    assert started(settings(ms=7_500, size=150)) == 40
    assert started(settings(ms=5_000, size=450)) == 50


@pytest.mark.parametrize(("committed", "expected"), [(50, 50), (49, 40), (10, 10), (9, -1), (0, -1)])
def test_nothing_goes_that_is_not_committed_as_a_whole(committed: int, expected: int):
    assert started(settings(ms=0, size=0), committed) == expected


# -- the log -----------------------------------------------------------------------------------------------------


def filled(files: FakeDisk | DiskFiles, folder: str = "p", count: int = 20, **changes: object) -> PartitionLog:
    """Batches of 3 records in several small segments, of two epochs, durable."""
    log = PartitionLog.open(files, folder, SMALL)
    log.configure(replace(log.settings, **changes))
    for nth in range(count):
        log.append([batch(log.log_end, 3, epoch=nth // 10, value=b"value" * 8, time=1_000 * nth)])
    flush(log)
    return log


def reopened(disk: FakeDisk, seed: int = 0) -> PartitionLog:
    return PartitionLog.open(disk.after_power_cut(random.Random(seed)), "p", SMALL)


def state(log: PartitionLog) -> tuple:
    return log.log_start, log.first_offset, log.log_end, log.epochs, log.producers.encode()


def test_deleted_records_are_gone_also_after_a_restart():
    disk = FakeDisk()
    log = filled(disk)
    kept = content(log)[6:]
    log.delete_before(18)
    with pytest.raises(OffsetOutOfRange):
        log.read(17, 1_000, log.log_end)
    assert (log.log_start, log.first_offset, content(log)) == (18, 18, kept)
    for seed in range(10):
        after = reopened(disk, seed)
        assert state(after) == state(log)
        assert content(after) == kept


def test_a_log_that_begins_within_a_batch_keeps_that_batch_for_its_copies():
    log = filled(FakeDisk())
    log.delete_before(19)
    assert (log.log_start, log.first_offset) == (19, 18)
    (first, *_) = split(log.read(19, 1_000, log.log_end))
    assert first.header.base_offset == 18
    (first, *_) = split(log.read_replica(18, 1_000, log.log_end))
    assert first.header.base_offset == 18
    with pytest.raises(OffsetOutOfRange):
        log.read(18, 1_000, log.log_end)
    with pytest.raises(OffsetOutOfRange):
        log.read_replica(17, 1_000, log.log_end)


def test_times_are_looked_up_among_what_is_left():
    log = filled(FakeDisk())
    assert log.offset_for_time(0, log.log_end) == (0, 0)
    log.delete_before(19)
    assert log.offset_for_time(0, log.log_end) == (19, 6_001)
    assert log.offset_for_time(6_002, log.log_end) == (20, 6_002)


def test_segments_leave_the_log_at_once_and_the_disk_a_few_at_a_time():
    disk = FakeDisk()
    log = filled(disk)
    before, size = log.segment_count, log.size_bytes
    log.delete_before(list(log.rows())[2].base)
    assert (log.segment_count, log.deleted_segments) == (before - 2, 2)
    assert log.size_bytes < size
    count, freed = log.remove_deleted(1)
    assert (count, log.deleted_segments) == (1, 1)
    assert log.remove_deleted(9)[0] == 1
    assert log.remove_deleted(9) == (0, 0)
    names = [name for name in disk.listdir("p") if name.endswith(".log")]
    assert len(names) == before - 2
    assert log.size_bytes == sum(disk.size(f"p/{name}") for name in names)
    assert freed > 0


def test_deleting_everything_leaves_an_empty_log_that_knows_its_last_epoch():
    disk = FakeDisk()
    log = filled(disk)
    log.delete_before(60)
    assert (log.log_start, log.log_end, log.last_epoch, content(log)) == (60, 60, 1, [])
    assert log.roll_if_old(0)
    log.delete_before(60)
    log.append([batch(60, 1, epoch=4)])
    flush(log)
    assert log.epochs == [(1, 60), (4, 60)]
    assert state(reopened(disk)) == state(log)
    log.truncate(60)
    assert log.epochs == [(1, 60)]


def test_producers_are_remembered_beyond_their_records():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    for nth in range(20):
        made = encode([b"v" * 80] * 2, producer_id=nth % 4, producer_epoch=0, base_sequence=nth // 4 * 2)
        made.header.base_offset, made.header.leader_epoch = log.log_end, 0
        log.append([made])
    flush(log)
    known = log.producers.encode()
    log.delete_before(39)
    log.roll_if_old(0)
    assert log.roll_if_old(10**15)
    log.remove_deleted(99)
    assert log.producers.encode() == known
    assert reopened(disk).producers.encode() == known
    copy = PartitionLog.open(FakeDisk(), "copy", SMALL)
    copy.reset(log.first_offset)
    copy.adopt(*log.before_start())
    copy.append(list(split(log.read_replica(log.first_offset, 10_000, log.log_end))))
    assert (copy.epochs, copy.producers.encode()) == (log.epochs, known)


def test_a_segment_that_ended_after_all_of_it_was_deleted_goes_with_what_it_told_of_producers_kept():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    for nth in range(3):
        made = encode([b"v"], producer_id=1, producer_epoch=0, base_sequence=nth)
        made.header.base_offset, made.header.leader_epoch = nth, 0
        log.append([made])
    flush(log)
    known = log.producers.encode()
    log.delete_before(3)
    assert log.roll_if_old(0), "there is nothing left in it"
    for seed in range(10):
        assert reopened(disk, seed).producers.encode() == known
    log.delete_before(3)
    assert (log.segment_count, log.remove_deleted(9)[0]) == (1, 1)
    for seed in range(10):
        assert reopened(disk, seed).producers.encode() == known


def test_what_is_cut_off_behind_deleted_records_is_forgotten_of_producers_too():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    states = []
    for nth in range(20):
        states.append(log.producers.encode())
        made = encode([b"v" * 80], producer_id=1, producer_epoch=0, base_sequence=nth)
        made.header.base_offset, made.header.leader_epoch = nth, 0
        log.append([made])
    flush(log)
    log.delete_before(9)
    for end in (15, 10, 9):
        log.truncate(end)
        assert log.producers.encode() == states[end]
        assert reopened(disk).producers.encode() == states[end]


def test_a_reset_forgets_where_the_log_began():
    disk = FakeDisk()
    log = filled(disk)
    log.delete_before(40)
    log.reset(7)
    assert not disk.exists(f"p/{START_FILE}")
    log.append([batch(7, 1, epoch=2)])
    flush(log)
    assert state(reopened(disk)) == state(log) == (7, 7, 8, [(2, 7)], log.producers.encode())


def test_a_log_cut_off_before_its_start_is_empty():
    log = filled(FakeDisk())
    log.delete_before(19)
    log.truncate(19)  # which lies in a batch, and the whole batch goes
    assert (log.log_start, log.first_offset, log.log_end) == (18, 18, 18)
    log.append([batch(18, 2, epoch=3)])
    assert len(content(log)) == 1


def test_a_disk_that_forgot_what_is_behind_the_start_leaves_an_empty_log_there():
    config = LogConfig(fsync="os", segment_bytes_max=1024, batch_bytes_max=1024)
    for seed in range(30):
        disk = FakeDisk()
        log = PartitionLog.open(disk, "p", config)
        for _ in range(30):
            log.append([batch(log.log_end, 3)])
        log.flushed(log.begin_flush())
        log.delete_before(88)
        survivor = disk.after_power_cut(random.Random(seed))
        after = PartitionLog.open(survivor, "p", config, trusted=False)
        assert after.first_offset <= after.log_start <= after.log_end
        assert after.log_start in (0, 88) or after.recovery.corrupt
        after.append([batch(after.log_end, 1, epoch=9)])
        after.close()
        assert state(PartitionLog.open(survivor, "p", config)) == state(after)


def test_a_lost_start_file_brings_back_no_more_than_the_segments_that_are_left():
    disk = FakeDisk()
    log = filled(disk)
    first = list(log.rows())[2].base
    log.delete_before(first + 1)
    log.remove_deleted(99)
    disk.replace(f"p/{START_FILE}", b"nonsense")
    after = reopened(disk)
    assert (after.log_start, after.log_end) == (first, 60)
    assert not after.recovery.corrupt


def test_a_full_disk_keeps_nobody_from_making_room():
    disk = FakeDisk()
    log = filled(disk)
    replace_file, tries = disk.replace, []

    def full(path: str, data: bytes) -> None:
        tries.append(path)
        if len(tries) == 1:
            raise StorageFull(path)
        replace_file(path, data)

    disk.replace = full  # type: ignore[method-assign]
    log.delete_before(list(log.rows())[2].base)
    assert len(tries) == 2
    assert log.remove_deleted(9)[0] == 2


def test_a_disk_that_is_full_for_good_changes_nothing():
    disk = FakeDisk()
    log = filled(disk)
    before, kept = state(log), content(log)

    def full(path: str, data: bytes) -> None:
        raise StorageFull(path)

    disk.replace = full  # type: ignore[method-assign]
    with pytest.raises(StorageFull):
        log.delete_before(40)
    assert (state(log), content(log), log.deleted_segments) == (before, kept, 0)
    log.append([batch(60, 1, epoch=3)])
    assert state(reopened(disk))[:2] == before[:2]


def test_memory_forgets_too():
    log = filled(open_files("memory"))
    blocks = log.size_bytes
    log.delete_before(40)
    log.remove_deleted(99)
    assert (log.log_start, log.first_offset) == (40, 39)
    assert log.size_bytes < blocks
    assert content(log)[0].header.base_offset == 39


# -- crashes -----------------------------------------------------------------------------------------------------


class Story:
    """Appends, deletions and cuts on a disk that stops at some step; what was told is what must be found."""

    def __init__(self, disk: FakeDisk) -> None:
        self.disk = disk
        self.starts = [0]  # where the log may begin: where it was told to, or where it was just being told to
        self.promised = 0
        self.log: PartitionLog | None = None

    def run(self) -> None:
        log = self.log = PartitionLog.open(self.disk, "p", SMALL)
        log.configure(replace(log.settings, segment_ms=1))
        for nth in range(12):
            self.append(4, nth // 3)
            if nth % 3 == 2:
                self.delete(log.durable_end - 7)
                log.remove_deleted(1)
            if nth == 7:
                log.roll_if_old(0)
                log.roll_if_old(5)
                self.delete(log.durable_end)
        log.remove_deleted(99)
        self.starts.append(log.log_start)
        log.truncate(log.log_end - 2)
        self.promised = log.durable_end
        self.delete(log.durable_end - 1)
        log.remove_deleted(99)

    def append(self, count: int, epoch: int) -> None:
        assert self.log is not None
        for _ in range(count):
            self.log.append([batch(self.log.log_end, 2, epoch=epoch)])
        flush(self.log)
        self.promised = self.log.durable_end

    def delete(self, offset: int) -> None:
        assert self.log is not None
        self.starts = [self.log.log_start, offset]
        self.log.delete_before(offset)
        self.starts = [offset]

    def check(self, survivor: FakeDisk) -> None:
        log = PartitionLog.open(survivor, "p", SMALL)
        assert not log.recovery.corrupt
        assert log.log_start in self.starts
        assert log.log_end >= self.promised or self.log is None or self.log.generation
        assert log.first_offset <= log.log_start <= log.log_end
        assert [b.header.base_offset for b in content(log)] == list(range(log.first_offset, log.log_end, 2))
        assert state(PartitionLog.open(survivor, "p", SMALL)) == state(log)
        names = [int(name[:20]) for name in survivor.listdir("p") if name.endswith(".log")]
        assert min(names) >= load_start(survivor, "p").base, "what was deleted is removed"


def test_a_power_cut_at_any_step_of_deleting_leaves_a_legal_log():
    whole = Story(FakeDisk())
    whole.run()
    assert load_start(whole.disk, "p").log_start > 80
    assert whole.disk.steps > 100
    for crash_at in range(1, whole.disk.steps + 1):
        story = Story(FakeDisk(crash_at))
        with pytest.raises(Crash):
            story.run()
        for seed in range(5):
            story.check(story.disk.after_power_cut(random.Random(1000 * crash_at + seed)))


# -- age ---------------------------------------------------------------------------------------------------------


def test_a_segment_ends_when_it_has_had_records_for_long_enough():
    log = filled(FakeDisk(), count=1, segment_ms=100)
    assert not log.roll_if_old(5_000)  # from here on its age counts
    assert not log.roll_if_old(5_099)
    assert log.roll_if_old(5_100)
    assert log.segment_count == 2
    assert not log.roll_if_old(9_000), "an empty one never ends"
    log.append([batch(3, 1, epoch=1)])
    assert not log.roll_if_old(9_000)
    assert log.roll_if_old(9_100)


def test_the_age_of_a_segment_survives_a_restart():
    disk = FakeDisk()
    filled(disk, count=1).close()  # its first batch is of 0 ms, and reaches to 2 ms
    log = PartitionLog.open(disk, "p", SMALL)
    log.configure(replace(log.settings, segment_ms=100))
    assert not log.roll_if_old(101)
    assert log.roll_if_old(102)


def test_a_clock_ahead_of_ours_makes_no_segment_younger_than_now():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    log.append([batch(0, 1, time=10**12)])
    log.close()
    log = PartitionLog.open(disk, "p", SMALL)
    log.configure(replace(log.settings, segment_ms=100))
    assert not log.roll_if_old(1_000)
    assert log.roll_if_old(1_100)


def test_a_full_disk_leaves_an_old_segment_as_it_is(monkeypatch: pytest.MonkeyPatch):
    disk = FakeDisk()
    log = filled(disk, count=1, segment_ms=100)
    log.roll_if_old(0)

    def full(path: str) -> None:
        raise StorageFull(path)

    monkeypatch.setattr(disk, "create", full)
    with pytest.raises(StorageFull):
        log.roll_if_old(100)
    log.append([batch(3, 1)])
    assert (log.segment_count, log.log_end) == (1, 4)


# -- settings ----------------------------------------------------------------------------------------------------


def test_settings_hold_from_the_next_segment_on():
    log = filled(FakeDisk(), count=10)
    count = log.segment_count
    log.configure(replace(log.settings, segment_bytes=10_000, index_interval_bytes=0))
    for _ in range(10):
        log.append([batch(log.log_end, 3)])
    assert log.segment_count == count
    log.configure(replace(log.settings, segment_bytes=1))
    log.append([batch(log.log_end, 3)])
    log.append([batch(log.log_end, 3)])
    assert log.segment_count == count + 2


def test_a_log_is_opened_with_the_settings_of_its_topic():
    given = settings_of({"segment.bytes": "2048", "index.type": "dense"}, SMALL)
    log = PartitionLog.open(FakeDisk(), "p", SMALL, settings=given)
    assert log.settings is given
    for _ in range(3):
        log.append([batch(log.log_end, 3)])
    assert len(log._segments[0].index) == 2, "an entry for every batch but the first"
