"""The secondary index against a plain scan of the same log, through everything that can happen to either."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.log.fakes import SMALL, Crash, FakeDisk, batch, content, flush

from zmqueue.errors import CorruptBatch, CorruptIndex, FutureFormat, NoSuchIndex, StorageFailed, StorageFull
from zmqueue.log import index_build, keys, secondary
from zmqueue.log.files import DiskFiles, Files
from zmqueue.log.index_build import IndexJob, IndexResult, build
from zmqueue.log.keys import KeysWriter, Summary
from zmqueue.log.memory import MemoryFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.secondary import describe_index
from zmqueue.wire.batch import CODECS, Batch, decode, encode, split
from zmqueue.wire.fields import Field, canonical

FOLDER = "/p"
HEADER = ("header", "k")
SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


# -- helpers -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits at which a few dozen records have files to merge."""
    monkeypatch.setattr(secondary, "CHUNK_BYTES", 300)
    monkeypatch.setattr(secondary, "JOB_BYTES", 3_000)
    monkeypatch.setattr(secondary, "FAN", 3)
    monkeypatch.setattr(secondary, "MISSES_MAX", 2)
    monkeypatch.setattr(index_build, "BLOCK_ENTRIES", 4)


def tagged(offset: int, *tags: bytes, codec: int = 0, gap: int = 1) -> Batch:
    """A record per tag, `gap` offsets apart; one without a tag has no headers."""
    made = encode(
        [b"v%d" % nth for nth in range(len(tags))],
        headers=[[["k", tag]] if tag else None for tag in tags],
        offset_deltas=[gap * nth for nth in range(len(tags))] if gap > 1 else None,
        codec=codec,
    )
    made.header.base_offset, made.header.leader_epoch = offset, 0
    return made


def finished(job: IndexJob, files: Files) -> IndexResult:
    steps = build(job, files)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def index(log: PartitionLog, files: Files, watermark: int | None = None, jobs: int = 1000) -> int:
    """Do what is worth doing; how many jobs that were."""
    for nth in range(jobs):
        job = log.secondary.plan(log, log.log_end if watermark is None else watermark)
        if job is None:
            return nth
        log.secondary.finish(log, job, finished(job, files))
    return jobs


def opened(files: Files, definition: tuple[str, str] | None = HEADER, folder: str = FOLDER) -> PartitionLog:
    log = PartitionLog.open(files, folder, SMALL)
    log.secondary.define(definition)
    return log


def found(log: PartitionLog, value: bytes, start: int = 0, limit: int = 10**9, work_bytes: int = 5_000) -> list[int]:
    """All of it, by asking again and again, and each answer held against its batches."""
    offsets: list[int] = []
    at = start
    for _ in range(100_000):
        part = log.find(value, at, log.log_end, limit - len(offsets), work_bytes)
        assert part.offsets == sorted(set(part.offsets))
        assert all(at <= offset < part.scanned_to for offset in part.offsets)
        offsets += part.offsets
        if part.scanned_to >= log.log_end or len(offsets) >= limit:
            return offsets
        assert part.scanned_to > at, "a search goes on"
        at = part.scanned_to
    raise AssertionError("endless")


def scanned(log: PartitionLog, value: bytes, start: int = 0) -> list[int]:
    field = log.secondary.field
    assert field is not None
    return [
        offset for offset, columns, nth in records(log) if value in field.of(columns, nth) and offset >= max(start, 0)
    ]


def records(log: PartitionLog) -> Iterator[tuple[int, Any, int]]:
    for header, body in content(log):
        columns = decode(header, body)
        for nth in range(header.record_count):
            offset = header.base_offset + (columns.offset_deltas[nth] if columns.offset_deltas else nth)
            if offset >= log.log_start:
                yield offset, columns, nth


def key_files(files: Files) -> list[str]:
    return [name for name in files.listdir(FOLDER) if ".keys" in name]


def memory() -> MemoryFiles:
    return MemoryFiles()


# -- what a search finds -------------------------------------------------------------------------------------------

tags = st.sampled_from([b"", b"a", b"b", b"c", b"\xff\xfe", b"long" * 5])
batches = st.tuples(st.lists(tags, min_size=1, max_size=6), st.sampled_from(sorted(CODECS.values())), st.integers(1, 3))


@SLOW
@given(st.lists(st.one_of(batches, st.integers(1, 3)), max_size=60), st.integers(0, 200), st.integers(1, 5))
def test_an_index_finds_what_a_scan_finds(steps, start, limit):
    """Appends and jobs in any order, batches with gaps and compressed ones, a log start in the middle."""
    files = memory()
    log = opened(files)
    for step in steps:
        if isinstance(step, int):
            index(log, files, jobs=step)
        else:
            names, codec, gap = step
            log.append([tagged(log.log_end, *names, codec=codec, gap=gap)])
    log.log_start = min(start // 4, log.log_end)
    for value in [b"a", b"b", b"\xff\xfe", b"long" * 5, b"absent"]:
        expected = scanned(log, value, start)
        assert found(log, value, start) == expected
        assert found(log, value, start, limit, work_bytes=1) == expected[:limit]
    index(log, files)
    for value in [b"a", b"long" * 5]:
        assert found(log, value, start) == scanned(log, value, start)


@SLOW
@given(
    st.sampled_from(["json", "cbor"]),
    st.sampled_from(["a", "a.b", "/a"]),
    st.lists(
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 1.0, "1", "true", "ü"])),
            lambda inner: st.dictionaries(st.sampled_from(["a", "b"]), inner) | st.lists(inner, max_size=2),
            max_leaves=4,
        ),
        min_size=1,
        max_size=80,
    ),
    st.data(),
)
def test_fields_of_json_and_cbor_are_found_as_by_a_scan(kind, path, documents, data):
    files = memory()
    log = opened(files, (kind, path))
    dumps = cbor2.dumps if kind == "cbor" else lambda value: json.dumps(value).encode()
    for at in range(0, len(documents), 3):
        values: list[bytes | None] = [dumps(document) for document in documents[at : at + 3]]
        values += [None, b"not a document", b""]
        made = encode(values)
        made.header.base_offset, made.header.leader_epoch = log.log_end, 0
        log.append([made])
        index(log, files, jobs=data.draw(st.integers(0, 2)))
    for value in (None, True, 1, 0.5, "1", "true", "ü", -3):
        form = canonical(value)
        assert found(log, form) == scanned(log, form)


def test_offsets_of_a_compacted_batch_are_those_of_its_records():
    files = memory()
    log = opened(files)
    made = encode([b"x", b"y"], headers=[[["k", b"a"]], [["k", b"a"]]], offset_deltas=[2, 5])
    header = made.header
    header.base_offset, header.leader_epoch, header.last_offset_delta = 0, 0, 9
    log.append([made])
    assert found(log, b"a") == [2, 5]
    log.append([tagged(10 + nth, b"b" * 50) for nth in range(30)])
    assert index(log, files)
    assert log.secondary.covering(0)[0] is not None
    assert found(log, b"a") == [2, 5]


def test_records_that_share_a_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(keys, "key_of", lambda value: b"same----")
    monkeypatch.setattr(keys, "entry_of", lambda value, offset: b"same----" + offset.to_bytes(8, "big"))
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"%d" % (nth % 7)) for nth in range(100)])
    assert index(log, files)
    assert found(log, b"3") == list(range(3, 100, 7))


def test_a_topic_without_an_index_says_so():
    with pytest.raises(NoSuchIndex):
        opened(memory(), None).find(b"a", 0, 10, 1, 1000)


def test_nothing_from_the_end_offset_on_is_found():
    files = memory()
    log = opened(files)
    log.append([tagged(nth * 2, b"a", b"a") for nth in range(50)])
    index(log, files, watermark=80)
    answer = log.find(b"a", 0, 60, 1000, 1 << 20)
    assert (answer.offsets, answer.scanned_to) == (list(range(60)), 60)
    # An end within a batch, which no watermark is, ends before that batch and does not hang.
    answer = log.find(b"a", 0, 61, 1000, 1 << 20)
    assert answer.offsets[-1] < 61
    assert answer.scanned_to in (60, 61)


def test_one_call_does_a_bounded_amount_of_work():
    log = opened(memory())
    log.append([tagged(nth, b"%d" % nth) for nth in range(1000)])
    answer = log.find(b"999", 0, 1000, 10, 40_000)
    assert answer.offsets == []
    assert 5 <= answer.scanned_to <= 15  # each look counts 4 KiB


# -- how the index grows -------------------------------------------------------------------------------------------


def test_little_news_waits_and_a_full_segment_does_not():
    files = memory()
    log = opened(files)
    log.append([tagged(0, b"a")])
    assert log.secondary.plan(log, log.log_end) is None
    while log.segment_count == 1:
        log.append([tagged(log.log_end, b"a")])
    job = log.secondary.plan(log, log.log_end)
    assert job is not None
    assert job.from_offset == 0


def test_nothing_above_the_high_watermark_is_indexed():
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(100)])
    index(log, files, watermark=57)
    stats = log.secondary.stats(log)
    assert 40 < stats.covered_to <= 57
    assert stats.lag_records == 100 - stats.covered_to
    assert 0 < stats.lag_bytes < log.size_bytes


def test_small_files_become_large_ones():
    files = memory()
    log = opened(files)
    for nth in range(2_000):
        log.append([tagged(nth, b"%d" % (nth % 10))])
        if nth % 5 == 0:
            index(log, files)
    stats = log.secondary.stats(log)
    assert stats.entries == stats.covered_to > 1_990
    assert stats.files < 25
    assert len(key_files(files)) == stats.files
    assert found(log, b"7") == list(range(7, 2_000, 10))


def test_files_below_the_log_start_are_removed():
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(300)])
    index(log, files, jobs=3)
    log.log_start = 290
    index(log, files)
    assert all(keys.parse_name(name)[1] > 290 for name in key_files(files))
    assert found(log, b"a") == list(range(290, 300))


def test_a_job_that_comes_back_after_a_truncation_counts_for_nothing():
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(100)])
    job = log.secondary.plan(log, 100)
    result = finished(job, files)
    log.truncate(10)
    log.append([tagged(nth, b"b") for nth in range(10, 100)])
    assert not log.secondary.finish(log, job, result)
    assert key_files(files) == []
    assert found(log, b"a") == list(range(10))
    assert found(log, b"b") == list(range(10, 100))


def test_a_truncation_takes_the_files_that_reach_beyond_it():
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(100)])
    index(log, files)
    log.truncate(50)
    log.append([tagged(nth, b"b") for nth in range(50, 100)])
    assert found(log, b"a") == list(range(50))
    index(log, files)
    assert found(log, b"b") == list(range(50, 100))
    log.reset(1_000)
    assert key_files(files) == []
    assert found(log, b"a") == []


def test_a_job_whose_log_is_another_now_fails():
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(100)])
    job = log.secondary.plan(log, 100)
    log.reset(0)
    log.append([batch(0, 40, value=b"other" * 30)])
    with pytest.raises((CorruptBatch, StorageFailed)):
        finished(job, files)


def test_another_definition_makes_another_index():
    files = memory()
    log = opened(files)
    log.append([encode_both(nth) for nth in range(100)])
    index(log, files)
    job_before = log.secondary.plan(log, 100)
    assert job_before is None
    log.secondary.define(("json", "x"))
    assert key_files(files) == []
    assert found(log, b"7") == [7]
    index(log, files)
    assert found(log, b"7") == [7]
    assert {d.kind for d in describe_index(files, FOLDER)} == {"json"}
    log.secondary.define(None)
    assert key_files(files) == []
    assert log.secondary.stats(log) is None


def encode_both(offset: int) -> Batch:
    made = encode([b'{"x": %d}' % offset], headers=[[["k", b"h%d" % offset]]])
    made.header.base_offset, made.header.leader_epoch = offset, 0
    return made


def test_a_job_of_another_definition_counts_for_nothing():
    files = memory()
    log = opened(files)
    log.append([encode_both(nth) for nth in range(100)])
    job = log.secondary.plan(log, 100)
    result = finished(job, files)
    log.secondary.define(("json", "x"))
    assert not log.secondary.finish(log, job, result)
    assert key_files(files) == []


def test_entries_of_compacted_records_are_followed_in_vain_and_then_removed(tmp_path: Path):
    """Compaction puts another file under a segment's name, with fewer records and the same offsets."""
    files, folder = DiskFiles(), str(tmp_path / "p")
    log = opened(files, folder=folder)
    log.append([tagged(nth, b"a") for nth in range(60)])
    flush(log)
    index(log, files)
    log.close()
    for path in tmp_path.glob("p/*.log"):
        compacted = b""
        for header, body in split(path.read_bytes()):
            columns = decode(header, body)
            if header.base_offset % 10:
                smaller = encode([b""], offset_deltas=[0])
            else:
                smaller = encode(columns.values, headers=columns.headers)
            smaller.header.base_offset, smaller.header.leader_epoch = header.base_offset, 0
            compacted += smaller.header.pack() + smaller.body
        path.write_bytes(compacted)
    log = opened(files, folder=folder)
    assert found(log, b"a") == list(range(0, 60, 10))
    before = log.secondary.stats(log).entries
    index(log, files)
    assert log.secondary.stats(log).entries < before / 4
    assert found(log, b"a") == list(range(0, 60, 10))


def test_a_search_goes_on_while_records_are_appended():
    files = memory()
    log = opened(files)
    chance = random.Random(3)
    expected: list[int] = []
    at, seen = 0, []
    for nth in range(600):
        tag = chance.choice([b"a", b"b"])
        if tag == b"a":
            expected.append(nth)
        log.append([tagged(nth, tag)])
        if nth % 7 == 0:
            index(log, files, jobs=1)
        if nth % 11 == 0:
            answer = log.find(b"a", at, log.log_end, 5, 20_000)
            seen += answer.offsets
            at = answer.scanned_to
    seen += found(log, b"a", at)
    assert seen == expected


# -- files ---------------------------------------------------------------------------------------------------------


def written(entries: list[bytes], start: int = 0, end: int = 10_000) -> bytes:
    writer = KeysWriter(start)
    writer.add(entries)
    return writer.finish(Summary(start, end, *HEADER))


@SLOW
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9_999)), max_size=2_000), st.integers(0, 10_000))
def test_a_file_answers_as_a_list_would(pairs, start):
    entries = sorted({keys.entry_of(b"%d" % value, offset) for value, offset in pairs})
    files = memory()
    files.mkdir("/p")
    name = keys.file_name(0, 10_000)
    files.put(f"/p/{name}", written(entries))
    file = keys.load(files, "/p", name)
    assert [entry for part in file.listed() for entry in part] == entries
    for value in range(7):
        expected = sorted({offset for v, offset in pairs if v == value and offset >= start})
        assert list(file.lookup(keys.key_of(b"%d" % value), start)) == expected


def test_every_flipped_bit_is_found_before_it_misleads():
    files = memory()
    files.mkdir("/p")
    name = keys.file_name(0, 10_000)
    good = written(sorted(keys.entry_of(b"%d" % (nth % 50), nth) for nth in range(700)))
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        files.put(f"/p/{name}", bytes(bad))
        with pytest.raises((CorruptIndex, FutureFormat)):
            keys.load(files, "/p", name).verify()


@pytest.mark.parametrize("seed", range(3))
def test_with_any_byte_damaged_a_search_finds_the_same(seed):
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"%d" % (nth % 3)) for nth in range(120)])
    index(log, files)
    index_names = key_files(files)
    chance = random.Random(seed)
    good = {name: bytes(files.read_small(f"{FOLDER}/{name}") or b"") for name in index_names}
    for _ in range(150):
        name = chance.choice(index_names)
        bad = bytearray(good[name])
        # Some before the file is opened, some after.
        late = chance.random() < 0.5
        if late:
            log = opened(files)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        files.put(f"{FOLDER}/{name}", bytes(bad))
        if not late:
            log = opened(files)
        assert found(log, b"1") == list(range(1, 120, 3))
        for each, data in good.items():
            files.put(f"{FOLDER}/{each}", data)


def test_a_file_under_the_name_of_another_proves_nothing():
    files = memory()
    files.mkdir("/p")
    for name in (keys.file_name(0, 9_000), keys.file_name(1, 10_000)):
        files.put(f"/p/{name}", written([], 0, 10_000))
        with pytest.raises(CorruptIndex):
            keys.load(files, "/p", name)


def test_a_newer_file_is_made_anew(monkeypatch):
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(50)])
    monkeypatch.setattr(keys, "_KIND", keys._KIND._replace(version=2))
    assert index(log, files)
    monkeypatch.undo()
    assert found(opened(files), b"a") == list(range(50))


def test_a_folder_tells_of_its_index(tmp_path: Path):
    files, folder = DiskFiles(), str(tmp_path / "p")
    log = opened(files, folder=folder)
    log.append([tagged(nth, b"a") for nth in range(100)])
    index(log, files)
    names = sorted(path.name for path in tmp_path.glob("p/*.keys"))
    (tmp_path / "p" / names[0]).write_bytes(b"nonsense" * 600)
    described = describe_index(files, folder)
    assert [each.name for each in described] == names
    assert described[0].error
    assert not any(each.error for each in described[1:])
    assert all((each.kind, each.path) == HEADER for each in described[1:])


def test_it_is_opened_again_as_it_was(tmp_path: Path):
    files, folder = DiskFiles(), str(tmp_path / "p")
    log = opened(files, folder=folder)
    log.append([tagged(nth, b"%d" % (nth % 4)) for nth in range(200)])
    index(log, files)
    before = log.secondary.stats(log)
    log.close()
    again = opened(DiskFiles(), folder=folder)
    assert again.secondary.stats(again) == before
    assert found(again, b"2") == list(range(2, 200, 4))


# -- crashes -------------------------------------------------------------------------------------------------------


def story(disk: FakeDisk, chance: random.Random) -> None:
    """Appends, flushes, jobs that come back in time or too late, truncations."""
    log = opened(disk)
    for _ in range(40):
        log.append([tagged(log.log_end, b"%d" % chance.randrange(3), b"x" * 40)])
        if chance.random() < 0.5:
            flush(log)
        if chance.random() < 0.6:
            job = log.secondary.plan(log, log.durable_end)
            if job is not None:
                result = finished(job, disk)
                if chance.random() < 0.1 and log.log_end > 4:
                    log.truncate(log.log_end - 4)
                log.secondary.finish(log, job, result)
        if chance.random() < 0.1:
            log.truncate(max(0, log.log_end - chance.randrange(30)))


@pytest.mark.parametrize("seed", range(6))
def test_after_a_crash_at_any_step_a_search_finds_what_is_there(seed):
    whole = FakeDisk()
    story(whole, random.Random(seed))
    for crash_at in range(1, whole.steps, 3):
        disk = FakeDisk(crash_at)
        with contextlib.suppress(Crash):
            story(disk, random.Random(seed))
        left = disk.after_power_cut(random.Random(crash_at))
        left.mkdir(FOLDER)
        log = opened(left)
        for value in (b"0", b"1", b"2"):
            assert found(log, value) == scanned(log, value)
        # What a crash left must not meet records that come later.
        log.append([tagged(log.log_end + nth, b"new") for nth in range(40)])
        log = reopened(log, left)
        for value in (b"0", b"new"):
            assert found(log, value) == scanned(log, value)
        index(log, left)
        assert not any(name.endswith(".tmp") for name in key_files(left))
        for value in (b"0", b"1", b"2", b"new"):
            assert found(log, value) == scanned(log, value)


def reopened(log: PartitionLog, disk: FakeDisk) -> PartitionLog:
    log.close()
    return opened(disk)


def test_parts_that_a_crash_left_beside_the_whole_are_removed():
    files = memory()
    log = opened(files)
    log.append([tagged(nth, b"a") for nth in range(100)])
    parts: dict[str, bytes] = {}
    for _ in range(50):
        for name in key_files(files):
            parts[name] = bytes(files.read_small(f"{FOLDER}/{name}") or b"")
        if not index(log, files, jobs=1):
            break
    assert len(parts) > len(key_files(files))
    kept = set(key_files(files))
    for name, data in parts.items():
        files.put(f"{FOLDER}/{name}", data)
    log = opened(files)
    assert set(key_files(files)) == kept
    assert found(log, b"a") == list(range(100))


def test_a_full_disk_leaves_the_index_as_it_was():
    disk = FakeDisk()
    disk.mkdir(FOLDER)
    log = opened(disk)
    log.append([tagged(nth, b"a") for nth in range(100)])
    flush(log)
    job = log.secondary.plan(log, 100)
    disk.room = 10
    with pytest.raises(StorageFull):
        finished(job, disk)
    disk.room = None
    assert found(log, b"a") == list(range(100))
    assert index(log, disk)
    assert found(log, b"a") == list(range(100))


def test_a_field_is_what_its_definition_says():
    assert Field("json", "a.b").definition == ("json", "a.b")
