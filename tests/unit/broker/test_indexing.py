"""The chore that keeps secondary indexes up to date: what it plans, and what becomes of its jobs."""

from __future__ import annotations

import msgspec
import pytest
from unit.log.fakes import SMALL
from unit.log.test_secondary import HEADER, found, key_files, opened, tagged

from zmqueue.broker.indexing import RETRY_MS, IndexChore
from zmqueue.errors import CorruptIndex, StorageFull
from zmqueue.log import secondary
from zmqueue.log.index_build import IndexResult
from zmqueue.log.jobs import Failed, Pace, job_decoder, result_decoder, run
from zmqueue.log.memory import MemoryFiles
from zmqueue.log.partition_log import PartitionLog

NOW_MS = 1_000_000
PACE = Pace(1 << 40)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secondary, "CHUNK_BYTES", 300)
    monkeypatch.setattr(secondary, "JOB_BYTES", 3_000)
    monkeypatch.setattr(secondary, "FAN", 3)


def filled(files: MemoryFiles, count: int = 200) -> PartitionLog:
    log = opened(files)
    log.append([tagged(nth, b"%d" % (nth % 3)) for nth in range(count)])
    return log


def test_a_log_without_an_index_is_left_alone():
    log = PartitionLog.open(MemoryFiles(), "/p", SMALL)
    assert IndexChore(lambda: NOW_MS).plan(log, 0, NOW_MS) is None


def test_jobs_and_results_travel_between_processes_until_nothing_is_left_to_do():
    files = MemoryFiles()
    log, chore = filled(files), IndexChore(lambda: NOW_MS)
    kinds = set()
    while (job := chore.plan(log, log.log_end, NOW_MS)) is not None:
        assert job.volatile
        kinds.add(bool(job.segments))
        sent = job_decoder.decode(msgspec.msgpack.encode(job))
        assert sent == job
        result = run(sent, files, PACE)
        chore.finish(log, job, result_decoder.decode(msgspec.msgpack.encode(result)))
    assert kinds == {True, False}, "some were built from the log, some merged"
    assert log.secondary.stats(log).lag_bytes < 300
    assert found(log, b"1") == list(range(1, 200, 3))


def test_after_a_failure_it_pauses():
    files = MemoryFiles()
    log, chore = filled(files), IndexChore(lambda: NOW_MS)
    job = chore.plan(log, log.log_end, NOW_MS)
    chore.finish(log, job, Failed(StorageFull.code, "no room"))
    assert chore.plan(log, log.log_end, NOW_MS + RETRY_MS - 1) is None
    again = chore.plan(log, log.log_end, NOW_MS + RETRY_MS)
    assert again == job
    chore.finish(log, again, run(again, files, PACE))
    assert chore.plan(log, log.log_end, NOW_MS) is not None


def test_a_job_that_failed_because_the_log_was_cut_is_planned_again_at_once():
    files = MemoryFiles()
    log, chore = filled(files), IndexChore(lambda: NOW_MS)
    job = chore.plan(log, log.log_end, NOW_MS)
    log.truncate(150)
    chore.finish(log, job, Failed(StorageFull.code, "no such file"))
    assert chore.plan(log, log.log_end, NOW_MS) is not None


def test_files_that_cannot_be_merged_are_made_anew():
    files = MemoryFiles()
    log, chore = filled(files), IndexChore(lambda: NOW_MS)
    while (job := chore.plan(log, log.log_end, NOW_MS)) is not None and job.segments:
        chore.finish(log, job, run(job, files, PACE))
    assert job is not None
    broken = f"/p/{job.replaces[0]}"
    data = bytearray(files.read_small(broken))
    data[5] ^= 1
    files.put(broken, bytes(data))
    result = run(job, files, PACE)
    assert isinstance(result, Failed)
    assert result.code == CorruptIndex.code
    chore.finish(log, job, result)
    assert not set(job.replaces) & set(key_files(files))
    while (job := chore.plan(log, log.log_end, NOW_MS + RETRY_MS)) is not None:
        result = run(job, files, PACE)
        assert isinstance(result, IndexResult)
        chore.finish(log, job, result)
    assert log.secondary.field.definition == HEADER
    assert found(log, b"2") == list(range(2, 200, 3))
