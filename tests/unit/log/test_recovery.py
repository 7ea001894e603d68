from __future__ import annotations

import itertools
import logging
import random
import struct
from pathlib import Path

import pytest
from google_crc32c import value as crc32c
from unit.log.fakes import SMALL, FakeDisk, batch, batches, content, disk_with, raw

from zmqueue.config import LogConfig
from zmqueue.errors import CorruptLog, FutureFormat, StorageFailed
from zmqueue.log.files import DiskFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.segment import segment_name
from zmqueue.wire.batch import Batch

ONE = LogConfig(segment_bytes_max=1 << 20, index_interval_bytes=256)


def written(folder: Path, *segments: list[Batch]) -> list[Path]:
    """A folder as a broker left it, one file per list."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part in segments:
        paths.append(folder / segment_name(part[0].header.base_offset))
        paths[-1].write_bytes(b"".join(map(raw, part)))
    return paths


def reopened(folder: Path) -> PartitionLog:
    """Opened, closed and opened once more: the second time there must be nothing left to repair."""
    first = PartitionLog.open(DiskFiles(), folder, ONE)
    found, end, corrupt = content(first), first.log_end, first.recovery.corrupt
    first.close()
    second = PartitionLog.open(DiskFiles(), folder, ONE)
    assert (second.recovery.truncated_bytes, second.recovery.quarantined) == (0, [])
    assert second.recovery.corrupt == corrupt
    assert (content(second), second.log_end) == (found, end)
    second.close()
    return first


def ends(made: list[Batch]) -> list[int]:
    return list(itertools.accumulate(one.header.total_bytes for one in made))


# -- torn tails --------------------------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_cut():
    made = batches(4)
    whole, last = b"".join(map(raw, made[:3])), raw(made[3])
    for kept in range(1, len(last)):
        for tail in (b"", bytes(37), bytes(len(last) - kept)):
            disk = disk_with({0: whole + last[:kept] + tail})
            log = PartitionLog.open(disk, "p", ONE)
            assert (content(log), log.recovery.corrupt) == (made[:3], False)
            assert log.recovery.truncated_bytes == kept + len(tail)
            log.append([made[3]])
            log.close()
            assert disk.read_small(f"p/{segment_name(0)}") == whole + last


def test_a_tail_of_zeros_is_torn(tmp_path: Path):
    (path,) = written(tmp_path, batches(3))
    for zeros in (1, 75, 76, 4096, 3 << 20):
        with path.open("ab") as file:
            file.write(bytes(zeros))
        log = reopened(tmp_path)
        assert (log.log_end, log.recovery.truncated_bytes, log.recovery.corrupt) == (9, zeros, False)


def test_a_torn_batch_that_carries_batches_as_values_is_still_torn(tmp_path: Path):
    """Its records hold what looks like a valid batch, but not one that could have stood in its place."""
    inner = [batch(0, 2), batch(3, 2), Batch(batch(500).header, b"cut")]
    inner[0].header.base_offset = -1
    outer = batch(3, 1, value=b"".join(map(raw, inner)))
    (path,) = written(tmp_path, [*batches(1), outer])
    path.write_bytes(path.read_bytes()[:-2])
    log = reopened(tmp_path)
    assert (log.log_end, log.recovery.corrupt) == (3, False)


def test_an_empty_last_segment_is_where_the_log_goes_on(tmp_path: Path):
    written(tmp_path, batches(2))
    (tmp_path / segment_name(6)).touch()
    log = reopened(tmp_path)
    assert (log.log_end, log.segment_count, log.recovery.corrupt) == (6, 2, False)


# -- corruption --------------------------------------------------------------------------------------------------


def test_damage_with_a_valid_batch_behind_it_is_put_aside(tmp_path: Path):
    made = batches(5)
    (path,) = written(tmp_path, made)
    bad = bytearray(path.read_bytes())
    at = 2 * len(raw(made[0])) + 90
    bad[at] ^= 1
    path.write_bytes(bad)
    log = reopened(tmp_path)
    assert (log.log_end, log.recovery.corrupt) == (6, True)
    assert log.recovery.quarantined == [f"{path}.corrupt-0"]
    assert Path(f"{path}.corrupt-0").read_bytes() == bad


@pytest.mark.parametrize("distance", [1, 1 << 20, (1 << 20) - 10, (1 << 20) + 1, 3 << 20])
def test_a_batch_however_far_behind_the_damage_is_found(distance: int):
    damage = (b"ZQ" * 2_000).ljust(distance, b"\0")[-distance:]
    log = PartitionLog.open(disk_with({0: b"".join(map(raw, batches(2))) + damage + raw(batch(60))}), "p", ONE)
    assert (log.log_end, log.recovery.corrupt) == (6, True)


@pytest.mark.parametrize(
    "strange",
    [[batch(9)], [batch(3, epoch=1)], [batch(6, epoch=0)], [batch(6, epoch=-1)]],
    ids=["gap", "overlap", "older epoch", "no epoch"],
)
def test_a_whole_batch_where_it_does_not_belong_is_corruption(tmp_path: Path, strange: list[Batch]):
    made = batches(2, epoch=1)
    written(tmp_path, made + strange)
    log = reopened(tmp_path)
    assert (log.log_end, log.recovery.corrupt) == (6, True)


@pytest.mark.parametrize("start", [3, 9])
def test_segments_that_do_not_join_are_corruption(tmp_path: Path, start: int):
    written(tmp_path, batches(2), batches(2, start=start), batches(2, start=start + 6))
    log = reopened(tmp_path)
    assert (log.log_end, log.segment_count, log.recovery.corrupt) == (6, 1, True)
    assert len(log.recovery.quarantined) == 2


def test_damage_before_the_last_segment_takes_all_behind_it_aside(tmp_path: Path):
    parts = [batches(3), batches(3, start=9), batches(3, start=18), batches(3, start=27)]
    paths = written(tmp_path, *parts)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    log = reopened(tmp_path)
    assert (log.log_end, log.segment_count, log.recovery.corrupt) == (15, 2, True)
    assert log.recovery.quarantined == [f"{path}.corrupt-0" for path in paths[1:]]
    # It happens again to what was written since: nothing that was put aside is overwritten.
    paths = written(tmp_path, [batch(15, 3)], [batch(19, 3)])
    assert reopened(tmp_path).recovery.quarantined == [f"{paths[1]}.corrupt-0"]
    assert len(list(tmp_path.glob("*.corrupt-*"))) == 4


def test_a_log_damaged_from_its_first_byte_keeps_its_start(tmp_path: Path):
    paths = written(tmp_path, batches(3, start=30), batches(3, start=39))
    paths[0].write_bytes(b"XX" + paths[0].read_bytes()[2:])
    log = reopened(tmp_path)
    assert (log.log_start, log.log_end, log.recovery.corrupt, log.recovery.created) == (30, 30, True, False)


def test_the_verdict_stays_until_the_cluster_has_it(tmp_path: Path):
    written(tmp_path, batches(2), batches(2, start=9))
    for _ in range(3):
        log = PartitionLog.open(DiskFiles(), tmp_path, ONE)
        assert log.recovery.corrupt
        log.close()
    log.corruption_registered()
    assert not log.recovery.corrupt
    log.corruption_registered()
    assert not PartitionLog.open(DiskFiles(), tmp_path, ONE).recovery.corrupt


def test_any_flipped_bit_is_found_and_never_served():
    parts = [batches(3), batches(2, start=9)]
    chance = random.Random(7)
    for nth, part in enumerate(parts):
        for at in range(ends(part)[-1]):
            files = {one[0].header.base_offset: bytearray(b"".join(map(raw, one))) for one in parts}
            files[9 * nth][at] ^= 1 << chance.randrange(8)
            log = PartitionLog.open(disk_with(files), "p", ONE)
            whole = [one for one, end in zip(part, ends(part), strict=True) if end <= at]
            assert content(log) == parts[0] * nth + whole
            torn = nth == 1 and at >= ends(part)[0]
            assert log.recovery.corrupt is not torn
            assert bool(log.recovery.truncated_bytes) is torn


# -- other formats, other files ----------------------------------------------------------------------------------


def of_version(made: Batch, version: int) -> bytes:
    checked = bytearray(made.header.pack()[:-4])
    checked[2] = version
    return bytes(checked) + struct.pack("<I", crc32c(bytes(checked))) + made.body


def test_a_future_version_is_refused_and_left_untouched(tmp_path: Path):
    paths = written(tmp_path, batches(2), batches(2, start=6))
    paths[1].write_bytes(paths[1].read_bytes() + of_version(batch(12), 2) + b"torn")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FutureFormat):
        PartitionLog.open(DiskFiles(), tmp_path, ONE)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_foreign_files_are_left_alone_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    written(tmp_path, batches(2))
    for name in ("notes.txt", "7.log", f"{segment_name(6)}.bak"):
        (tmp_path / name).write_text("mine")
    with caplog.at_level(logging.WARNING):
        log = reopened(tmp_path)
    assert (log.log_end, log.recovery.corrupt) == (6, False)
    for name in ("notes.txt", "7.log", f"{segment_name(6)}.bak"):
        assert (tmp_path / name).read_text() == "mine"
        assert name in caplog.text


def test_a_sealed_segment_whose_index_proves_is_not_read(tmp_path: Path):
    paths = written(tmp_path, batches(4), batches(2, start=12))
    reopened(tmp_path).close()
    bad = bytearray(paths[0].read_bytes())
    bad[90] ^= 1
    paths[0].write_bytes(bad)
    log = PartitionLog.open(DiskFiles(), tmp_path, ONE)
    assert (log.log_end, log.recovery.corrupt) == (18, False)
    with pytest.raises(CorruptLog):
        log.read(0, 1 << 20, 18)
    assert PartitionLog.open(DiskFiles(), tmp_path, ONE, trusted=False).recovery.corrupt


def test_a_damaged_page_of_an_index_is_noticed_by_whoever_asks_it_first(tmp_path: Path):
    """The file as a whole proves, so that the log is opened by it; its pages prove when they are looked at."""
    made = [batch(3 * nth, 3, time=1000 + 10 * nth) for nth in range(9)]
    for ask in (
        lambda log: log.read(made[7].header.base_offset, 100, 60) == raw(made[7]),
        lambda log: log.offset_for_time(1071, 60) == (22, 1071),
        lambda log: [header.base_offset for header in log.headers(13)][:1] == [12],
        lambda log: log.truncate(13) is None and log.log_end == 12,
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        written(folder, made, batches(2, start=27))
        reopened(folder)
        (path,) = folder.glob("*.index")
        data = bytearray(path.read_bytes())
        data[3000] ^= 4
        path.write_bytes(data)
        log = PartitionLog.open(DiskFiles(), folder, ONE)
        assert ask(log)
        log.close()


def test_what_was_recovered_is_synced_before_it_counts():
    disk = FakeDisk()
    log = PartitionLog.open(disk, "p", LogConfig(fsync="os", segment_bytes_max=1024, batch_bytes_max=1024))
    log.append(batches(40))
    # The process is killed: the page cache survives, though nothing was ever synced.
    assert PartitionLog.open(disk, "p", SMALL).durable_end == 120
    for seed in range(10):
        assert PartitionLog.open(disk.after_power_cut(random.Random(seed)), "p", SMALL).log_end == 120
    disk.sync_error = True
    with pytest.raises(StorageFailed):
        PartitionLog.open(disk, "p", SMALL)


def test_a_full_disk_does_not_stop_the_start_of_a_corrupt_log():
    data = b"".join(map(raw, [*batches(2), batch(60)]))
    disk = disk_with({0: data})
    disk.room = 10
    log = PartitionLog.open(disk, "p", SMALL)
    assert (log.log_start, log.log_end, log.recovery.corrupt) == (0, 0, True)
    assert disk.read_small(log.recovery.quarantined[0]) == data
