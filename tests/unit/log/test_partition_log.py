from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from unit.log.fakes import SMALL, FakeDisk, batch, content, flush, raw

from zmqueue.config import LogConfig
from zmqueue.errors import CorruptLog, OffsetOutOfRange, StorageFailed, StorageFull
from zmqueue.log.files import DiskFiles, Files, open_files
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.recovery import sweep_deleted
from zmqueue.wire.batch import Batch, split


@pytest.fixture(params=["disk", "memory"])
def files(request: pytest.FixtureRequest) -> Files:
    return open_files(request.param, {})


@pytest.fixture
def log(files: Files, tmp_path: Path) -> PartitionLog:
    return PartitionLog.open(files, tmp_path / "topic-0", SMALL)


def fill(log: PartitionLog, count: int, records: int = 3, epoch: int = 0) -> list[Batch]:
    made = []
    for _ in range(count):
        made.append(batch(log.log_end, records, epoch))
        log.append(made[-1:])
    return made


# -- append and roll ---------------------------------------------------------------------------------------------


def test_segments_roll_by_size_and_are_named_by_their_first_offset(log: PartitionLog, files: Files):
    made = fill(log, 30)
    names = [name for name in files.listdir(log.folder) if name.endswith(".log")]
    assert len(names) == log.segment_count > 3
    starts = {one.header.base_offset for one in made}
    assert all(int(name.removesuffix(".log")) in starts and len(name) == 24 for name in names)
    assert all(files.size(f"{log.folder}/{name}") <= SMALL.segment_bytes_max for name in names)


def test_one_append_may_fill_several_segments(log: PartitionLog):
    batches = [batch(3 * nth, 3) for nth in range(30)]
    log.append(batches)
    assert log.segment_count > 3
    assert content(log) == batches


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(log: PartitionLog):
    batches = [batch(0), batch(1, value=bytes(3000)), batch(2)]
    log.append(batches)
    assert log.segment_count == 3
    assert content(log) == batches


def test_a_segment_never_spans_more_offsets_than_its_index_counts(log: PartitionLog):
    far = batch(1)
    far.header.last_offset_delta = (1 << 32) - 2
    batches = [batch(0), far, batch(far.header.next_offset)]
    log.append(batches)
    assert log.segment_count == 3
    assert list(log.headers()) == [one.header for one in batches]


@pytest.mark.parametrize("wrong", [batch(4), batch(2), batch(3, epoch=1), batch(3, epoch=-1)])
def test_a_batch_that_does_not_follow_is_our_own_mistake(log: PartitionLog, wrong: Batch):
    fill(log, 1, epoch=2)
    with pytest.raises(AssertionError):
        log.append([wrong])
    assert (log.log_end, len(content(log))) == (3, 1)


def test_many_segments_hold_few_descriptors(tmp_path: Path):
    files = DiskFiles(readers_max=4)
    log = PartitionLog.open(files, tmp_path / "p", SMALL)
    fill(log, 300)
    flush(log)
    assert log.segment_count > 30
    content(log)
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.islink(link)]
    assert sum(path.startswith(str(tmp_path)) and path.endswith(".log") for path in held) <= 5


@pytest.mark.parametrize("fsync", ["always", "interval", "os"])
def test_segments_that_are_full_and_flushed_are_closed(fsync: str):
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", LogConfig(fsync=fsync, segment_bytes_max=1024, batch_bytes_max=1024))  # type: ignore[arg-type]
    fill(log, 100)
    flush(log)
    assert disk.open_files == 1
    ticket = log.begin_flush()
    log.close()
    ticket.release()
    assert disk.open_files == 0


# -- a full disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 50, 200, 900, 1100, 2500])
def test_a_full_disk_leaves_the_log_as_it_was(room: int):
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    before = fill(log, 8)
    out = log.begin_flush()
    disk.room = room
    with pytest.raises(StorageFull):
        log.append([batch(24 + 3 * nth, 3, epoch=4, time=9999) for nth in range(30)])
    assert (log.log_end, log.epochs, content(log)) == (24, [(0, 0)], before)
    assert log.offset_for_time(5000, 100) is None
    # Nothing of the refused batches comes back after a power cut, and flushes under way still count.
    for seed in range(20):
        assert content(PartitionLog.open(disk.after_power_cut(random.Random(seed)), "p", SMALL)) == before
    out.sync()
    assert log.flushed(out)
    disk.room = None
    after = fill(log, 3, epoch=4)
    assert content(log) == before + after
    log.close()
    assert content(PartitionLog.open(disk, "p", SMALL)) == before + after


# -- reading -----------------------------------------------------------------------------------------------------


def test_offsets_outside_the_log_are_refused(log: PartitionLog):
    log.reset(10)
    fill(log, 2)
    for offset in (-1, 9, 17):
        with pytest.raises(OffsetOutOfRange, match=r"10\.\.16"):
            log.read(offset, 1000, 16)
    assert log.read(16, 1000, 16) == b""
    assert log.read(13, 1000, 13) == b""


def test_a_reader_at_the_end_goes_on_in_the_next_segment(log: PartitionLog):
    """The place where it stopped is remembered, but the next batch may not lie there."""
    seen = []
    for _ in range(40):
        made = fill(log, 1)
        seen += split(log.read(made[0].header.base_offset, 1000, log.log_end))
    assert log.segment_count > 3
    assert seen == content(log)


def test_where_a_reader_stopped_means_nothing_after_a_truncation(log: PartitionLog):
    fill(log, 2)
    log.read(0, 1, 6)
    log.truncate(0)
    log.append([batch(0, 3, value=b"another length"), batch(3, 3)])
    assert [one.header.base_offset for one in split(log.read(3, 1000, 6))] == [3]


def test_a_damaged_batch_is_named_and_never_served(tmp_path: Path):
    log = PartitionLog.open(DiskFiles(), tmp_path / "p", SMALL)
    made = fill(log, 5)
    size = made[0].header.total_bytes
    path = tmp_path / "p" / f"{0:020d}.log"
    for at in range(size, 2 * size):
        bad = bytearray(b"".join(map(raw, made)))
        bad[at] ^= 0x10
        with path.open("r+b") as file:
            file.write(bad)
        assert list(split(log.read(0, size, 15))) == made[:1]
        for offset, bytes_max in ((3, 1), (0, 10_000)):
            with pytest.raises(CorruptLog, match=rf"{path}: damaged at {size}"):
                log.read(offset, bytes_max, 15)


def test_the_time_of_a_record_is_found_in_a_damaged_batch_only_as_an_error(tmp_path: Path):
    log = PartitionLog.open(DiskFiles(), tmp_path / "p", SMALL)
    fill(log, 2)
    with (tmp_path / "p" / f"{0:020d}.log").open("r+b") as file:
        file.seek(80)
        file.write(b"\xff\xff")
    with pytest.raises(CorruptLog, match="damaged at 0"):
        log.offset_for_time(1001, 6)


def test_a_body_that_its_producer_closed_wrongly_is_found_by_its_header(log: PartitionLog):
    wrong = batch(0)
    body = b"\x00" * wrong.header.body_length
    from google_crc32c import value

    wrong.header.body_crc = value(body)
    log.append([Batch(wrong.header, body)])
    assert log.offset_for_time(1000, 5) == (0, 1000)


def test_headers_notice_a_truncation_under_them(log: PartitionLog):
    fill(log, 5)
    headers = log.headers()
    next(headers)
    log.truncate(6)
    with pytest.raises(AssertionError):
        next(headers)


# -- what is durable ---------------------------------------------------------------------------------------------


def test_nothing_is_durable_before_its_ticket_is_back():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    fill(log, 2)
    ticket = log.begin_flush()
    fill(log, 1)
    assert log.durable_end == 0
    ticket.sync()
    assert log.flushed(ticket)
    assert (log.durable_end, log.log_end) == (6, 9)
    flush(log)
    assert log.durable_end == 9


def test_the_folder_is_synced_before_the_first_acknowledgement_of_a_new_segment():
    log = PartitionLog.open(FakeDisk(), "a/p", SMALL)
    fill(log, 1)
    assert log.begin_flush().folders == ("a/p", "a")
    flush(log)
    fill(log, 1)
    assert log.begin_flush().folders == ()
    while log.segment_count == 1:
        fill(log, 1)
    before = log.begin_flush()
    assert before.folders == ("a/p",)
    while log.segment_count == 2:
        fill(log, 1)
    before.sync()
    log.flushed(before)
    assert log.begin_flush().folders == ("a/p",), "the second new segment came after the ticket"


def test_a_truncation_makes_all_that_is_left_durable():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", SMALL)
    fill(log, 30)
    log.truncate(50)
    assert log.durable_end == log.log_end == 48
    assert log.begin_flush().empty
    for seed in range(10):
        assert PartitionLog.open(disk.after_power_cut(random.Random(seed)), "p", SMALL).log_end == 48


def test_a_truncation_below_the_start_begins_there(log: PartitionLog):
    log.reset(100)
    fill(log, 3)
    log.truncate(40)
    assert (log.log_start, log.log_end, log.epochs) == (40, 40, [])


def test_the_error_of_a_flush_cannot_be_overlooked():
    log = PartitionLog.open(FakeDisk(), "p", SMALL)
    fill(log, 1)
    ticket = log.begin_flush()
    ticket.error = StorageFailed("EIO")
    with pytest.raises(StorageFailed):
        log.flushed(ticket)
    assert log.durable_end == 0


@pytest.mark.parametrize("fsync", ["interval", "os"])
def test_a_clean_close_syncs_what_no_flush_did(fsync: str):
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", LogConfig(fsync=fsync, segment_bytes_max=1024, batch_bytes_max=1024))  # type: ignore[arg-type]
    fill(log, 50)
    log.flushed(log.begin_flush())
    log.close()
    for seed in range(10):
        survived = PartitionLog.open(disk.after_power_cut(random.Random(seed)), "p", SMALL)
        assert (survived.log_end, survived.recovery.truncated_bytes) == (150, 0)


def test_a_flush_that_ends_after_the_log_was_deleted_does_no_harm(tmp_path: Path):
    log = PartitionLog.open(DiskFiles(), tmp_path / "p", SMALL)
    fill(log, 3)
    ticket = log.begin_flush()
    log.delete()
    ticket.sync()
    assert not log.flushed(ticket)
    assert list(tmp_path.iterdir()) == []


def test_memory_has_nothing_to_sync(tmp_path: Path):
    log = PartitionLog.open(open_files("memory"), tmp_path / "p", SMALL)
    fill(log, 30)
    ticket = log.begin_flush()
    assert ticket.empty
    assert log.flushed(ticket)
    assert log.durable_end == log.log_end


# -- the end -----------------------------------------------------------------------------------------------------


def test_a_deleted_log_is_gone_and_its_name_free(log: PartitionLog, files: Files, tmp_path: Path):
    fill(log, 30)
    log.delete()
    assert files.listdir(str(tmp_path)) == []
    assert PartitionLog.open(files, log.folder, SMALL).recovery.created


def test_an_interrupted_deletion_is_finished(log: PartitionLog, files: Files, tmp_path: Path):
    fill(log, 30)
    other = PartitionLog.open(files, tmp_path / "topic-1", SMALL)
    log.close()
    files.rename(log.folder, log.folder + ".deleted-0")
    assert sweep_deleted(files, tmp_path) == ["topic-0.deleted-0"]
    assert files.listdir(str(tmp_path)) == ["topic-1"]
    assert other.log_end == 0
