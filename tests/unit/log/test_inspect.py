"""Reading a folder for people, and proving it: what is there is told, what is wrong is found, nothing is touched."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from unit.log.fakes import SMALL, batch, flush, raw

from zmqueue.config import LogConfig
from zmqueue.errors import CorruptLog
from zmqueue.log import index as indexes
from zmqueue.log.files import DiskFiles, lock_holder
from zmqueue.log.inspect import Place, batches_in, describe_indexes, describe_segments, find, records_in
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.recovery import MARKER
from zmqueue.log.segment import index_name, segment_name
from zmqueue.log.start import START_FILE, Start, save_start
from zmqueue.log.verify import Verified, verify_broker, verify_partition

FILES = DiskFiles()  # one for all: each keeps some descriptors
TOPIC = "0123456789abcdef0123456789abcdef"


def made(folder: Path, count: int = 30, config: LogConfig = SMALL) -> PartitionLog:
    log = PartitionLog.open(FILES, folder, config)
    for nth in range(count):
        log.append([batch(log.log_end, 3, epoch=nth // 10, time=1000 + nth)])
    flush(log)
    log.close()
    return log


def problems(folder: Path) -> list[str]:
    verified = Verified()
    verify_partition(FILES, Place(str(folder)), verified)
    return [str(problem).removeprefix(f"{folder}/") for problem in verified.problems]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    FILES.close()


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# -- what is there -----------------------------------------------------------------------------------------------


def test_partitions_are_found_from_every_folder_around_them(tmp_path: Path):
    folders = [tmp_path / f"broker-{n}" / "partitions" / f"{TOPIC}-{n}" for n in (0, 1)]
    for folder in folders:
        made(folder, 1)
    both = find(FILES, str(tmp_path))
    assert [(place.folder, place.broker, place.topic_id, place.partition) for place in both] == [
        (str(folder), n, TOPIC, n) for n, folder in enumerate(folders)
    ]
    assert find(FILES, f"{tmp_path}/broker-1/") == both[1:]
    assert find(FILES, f"{tmp_path}/broker-1/partitions") == both[1:]
    assert find(FILES, str(folders[0])) == both[:1]
    assert find(FILES, f"{tmp_path}/nothing") == []


def test_segments_tell_what_they_hold(tmp_path: Path):
    log = made(tmp_path)
    found = list(describe_segments(FILES, str(tmp_path)))
    assert len(found) == log.segment_count > 3
    assert [info.active for info in found] == [False] * (len(found) - 1) + [True]
    assert found[0].base_offset == 0
    assert [info.next_offset for info in found] == [*(info.base_offset for info in found[1:]), log.log_end]
    assert (sum(info.records for info in found), sum(info.batches for info in found)) == (90, 30)
    assert sum(info.bytes for info in found) == log.size_bytes
    assert (found[0].first_timestamp, found[-1].last_timestamp) == (1000, 1031)
    assert all(info.codecs == {"none": info.batches} and info.damage is None for info in found)


def test_a_tail_that_is_no_batch_is_counted_apart(tmp_path: Path):
    made(tmp_path, 3)
    with (tmp_path / segment_name(0)).open("ab") as file:
        file.write(raw(batch(9))[:50])
    (info,) = describe_segments(FILES, str(tmp_path))
    assert (info.next_offset, info.batches, info.tail_bytes) == (9, 3, 50)


def test_indexes_tell_how_dense_and_how_good_they_are(tmp_path: Path):
    made(tmp_path)
    found = list(describe_indexes(FILES, str(tmp_path)))
    assert [info.state for info in found] == ["ok"] * (len(found) - 1) + ["memory"]
    first = found[0]
    assert first.entries > 0
    assert first.bytes_per_entry == first.log_bytes / first.entries
    assert 0 < first.entries_per_batch < 1
    assert 0 < first.behind_bytes <= first.gap_bytes_max <= SMALL.index_interval_bytes + 200
    paths = [tmp_path / index_name(info.base_offset) for info in found]
    flip(paths[0], -5)
    paths[1].unlink()
    with (tmp_path / segment_name(found[2].base_offset)).open("r+b") as file:
        file.truncate(found[2].log_bytes - len(raw(batch(0, 3))))
    assert [info.state for info in describe_indexes(FILES, str(tmp_path))] == ["damaged", "missing", "stale", "memory"]


def test_batches_and_records_are_found_by_offset(tmp_path: Path):
    log = made(tmp_path)
    assert [found.header for found in batches_in(FILES, str(tmp_path), 0, None, bodies=False)] == list(log.headers())
    some = list(batches_in(FILES, str(tmp_path), 40, 50, bodies=True))
    assert [found.header.base_offset for found in some] == [39, 42, 45, 48]
    records = [record for found in some for record in records_in(found)]
    assert [(record.offset, record.value) for record in records] == [(n, b"value-%d" % n) for n in range(39, 51)]
    assert [record.timestamp for record in records[:3]] == [1013, 1014, 1015]
    flip(tmp_path / segment_name(0), 100)
    assert next(batches_in(FILES, str(tmp_path), 0, None, bodies=False)).header.base_offset == 0
    with pytest.raises(CorruptLog, match="damaged at 0"):
        next(batches_in(FILES, str(tmp_path), 0, None, bodies=True))


def test_who_holds_a_folder_is_seen_without_asking_for_it(tmp_path: Path):
    path = str(tmp_path / "lock")
    assert lock_holder(path) is None
    held = DiskFiles().lock(path)
    assert lock_holder(path) is not None
    held.release()
    assert lock_holder(path) is None


# -- the proof ---------------------------------------------------------------------------------------------------


def test_a_whole_log_proves_and_stays_as_it_was(tmp_path: Path):
    log = made(tmp_path)
    save_start(FILES, str(tmp_path), Start(7, b""))
    before = content(tmp_path)
    verified = Verified()
    verify_partition(FILES, Place(str(tmp_path)), verified)
    assert verified.problems == []
    assert (verified.partitions, verified.segments, verified.batches) == (1, log.segment_count, 30)
    assert (verified.records, verified.bytes) == (90, log.size_bytes)
    assert content(tmp_path) == before


def test_every_flipped_bit_of_every_file_is_a_problem(tmp_path: Path):
    made(tmp_path / "p", 12)
    save_start(FILES, str(tmp_path / "p"), Start(7, b""))
    assert problems(tmp_path / "p") == []
    chance = random.Random(3)
    for path in sorted((tmp_path / "p").iterdir()):
        size = path.stat().st_size
        for at in sorted(chance.sample(range(size), min(size, 60))):
            bit = chance.randrange(8)
            flip(path, at, bit)
            assert problems(tmp_path / "p"), f"{path.name} byte {at} bit {bit}"
            flip(path, at, bit)
    assert problems(tmp_path / "p") == []


def test_an_entry_that_is_no_boundary_is_a_problem_though_its_page_proves(tmp_path: Path):
    made(tmp_path)
    path = f"{tmp_path}/{index_name(0)}"
    index, summary = indexes.load(FILES, path, 0)
    good = index.grown(0)
    for change in ("positions", "offsets", "timestamps"):
        wrong = copy.deepcopy(good)
        getattr(wrong, change)[0] += 1
        FILES.put(path, indexes.encode(wrong, summary))
        assert [text.partition(": ")[0] for text in problems(tmp_path)][:1] == [index_name(0)]
    summary = msgspec.structs.replace(summary, max_timestamp=5)
    FILES.put(path, indexes.encode(good, summary))
    assert problems(tmp_path) == [f"{index_name(0)}: says max_timestamp 5, the batches say 1010"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (MARKER, "the cluster does not know"),
        (f"{segment_name(0)}.corrupt-0", "put aside"),
        ("start.tmp", "left behind"),
        ("notes.txt", "not a file of zmqueue"),
        (index_name(7), "an index without"),
        (f"{segment_name(0)}.salvage", "left behind"),
        (f"{segment_name(0)}.cleaned", "left behind"),
        (f"{0:020d}.swap.{9:020d}", "left behind"),
    ],
)
def test_what_does_not_belong_there_is_a_problem(tmp_path: Path, name: str, problem: str):
    made(tmp_path, 3)
    (tmp_path / name).touch()
    (found,) = problems(tmp_path)
    assert found.startswith(f"{name}: ")
    assert problem in found


def test_gaps_and_older_epochs_are_problems(tmp_path: Path):
    (tmp_path / segment_name(0)).write_bytes(raw(batch(0, 3, epoch=2)) + raw(batch(4, 3, epoch=2)))
    assert problems(tmp_path) == [f"{segment_name(0)} at byte {len(raw(batch(0, 3)))}: offset 4 follows 3"]
    (tmp_path / segment_name(0)).write_bytes(raw(batch(0, 3, epoch=2)) + raw(batch(3, 3, epoch=1)))
    assert "epoch 1 follows 2" in problems(tmp_path)[0]
    (tmp_path / segment_name(0)).write_bytes(raw(batch(0, 3)))
    (tmp_path / segment_name(9)).write_bytes(raw(batch(9, 3)))
    assert problems(tmp_path) == [f"{segment_name(9)}: the segment before it ends at offset 3"]


def test_a_start_behind_the_end_is_a_problem(tmp_path: Path):
    made(tmp_path, 3)
    save_start(FILES, str(tmp_path), Start(50))
    assert problems(tmp_path) == [f"{START_FILE}: begins at 50, the log ends at 9"]


def test_a_batch_that_is_just_being_written_is_no_problem(tmp_path: Path):
    folder = tmp_path / "broker-0" / "partitions" / f"{TOPIC}-0"
    made(folder, 3)
    with (folder / segment_name(0)).open("ab") as file:
        file.write(raw(batch(9))[:50])
    (place,) = find(FILES, str(tmp_path))
    assert problems(folder) == [f"{segment_name(0)} at byte {3 * len(raw(batch(0, 3)))}: {TAIL}"]
    held = DiskFiles().lock(f"{tmp_path}/broker-0/lock")
    verified = Verified()
    verify_partition(FILES, place, verified)
    held.release()
    assert verified.problems == []


TAIL = "a tail of 50 bytes is no batch: a batch header has 76 bytes, not 50"


def test_the_small_files_of_a_broker_are_proved(tmp_path: Path):
    from zmqueue.broker.raft_folder import format_folder
    from zmqueue.log.journal import Journal
    from zmqueue.log.session import DataFolder

    folder = tmp_path / "broker-0"
    held = DataFolder.open(folder, "c", 0, "always")
    held.begin(5)
    held.close(clean=True)
    format_folder(folder / "raft", "c", 0)
    journal = Journal(folder / "raft")
    journal.setCurrentTerm(3, "2")
    journal.add(b"\x00one", 1, 2)
    journal.add(b"\x00two", 2, 3)
    journal.sync()
    journal.close()
    (folder / "partitions").mkdir()

    def wrong() -> list[str]:
        verified = Verified()
        verify_broker(FILES, str(folder), verified)
        return [problem.path for problem in verified.problems]

    assert wrong() == []
    for name in ("meta", "session", "raft/meta", "raft/vote", "raft/journal"):
        for at in range((folder / name).stat().st_size):
            flip(folder / name, at, at % 8)
            assert wrong() == [f"{folder}/{name}"], f"{name} byte {at}"
            flip(folder / name, at, at % 8)
    (folder / "partitions" / f"{TOPIC}-0.deleted-0").mkdir()
    (folder / "meta.corrupt-0").touch()
    assert wrong() == [f"{folder}/partitions/{TOPIC}-0.deleted-0", f"{folder}/meta.corrupt-0"]
