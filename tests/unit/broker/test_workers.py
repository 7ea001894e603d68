"""The worker process and the slices in memory, driven as the broker's loop drives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unit.log.fakes import SMALL, flush
from unit.log.test_compaction import Row, Writer, expected, job_of, rows

from zmqueue.broker import workers as module
from zmqueue.broker.workers import Workers
from zmqueue.config import LogConfig
from zmqueue.errors import CorruptLog, JobFailed
from zmqueue.log.compaction import Compacted
from zmqueue.log.files import DiskFiles
from zmqueue.log.jobs import Failed, Result
from zmqueue.log.memory import MemoryFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.transport import Transport

WAIT_S = 30


class Loop:
    def __init__(self, config: LogConfig = SMALL) -> None:
        self.transport = Transport()
        self.memory = MemoryFiles()
        self.now_ms = 0
        self.workers = Workers(self.transport, config, self.memory, lambda: self.now_ms)
        self.results: list[Result] = []

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not ready():
            assert time.monotonic() < deadline, "nothing came in time"
            self.transport.poll(20)
            self.now_ms += 20
            self.workers.on_tick(self.now_ms)

    def done(self, log: PartitionLog, **changes: object) -> Result:
        count = len(self.results)
        self.workers.submit(job_of(log, **changes), self.results.append)
        assert len(self.results) == count
        self.until(lambda: len(self.results) > count)
        return self.results[-1]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.workers.close()
    made.transport.close()


@pytest.fixture
def log(tmp_path: Path) -> PartitionLog:
    return filled(PartitionLog.open(DiskFiles(), tmp_path / "p", SMALL))


def filled(log: PartitionLog, count: int = 20) -> PartitionLog:
    writer = Writer(log)
    for _ in range(count):
        writer.put(Row(b"k", bytes(300)))
    flush(log)
    return log


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_job_is_done_by_another_process_which_then_stays(loop: Loop, log: PartitionLog):
    before = rows(log)
    result = loop.done(log)
    assert isinstance(result, Compacted)
    assert log.swap(0, result.outputs)
    assert rows(log) == expected(before, 0, result.clean_end)
    pid = loop.workers.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    assert os.getpgid(pid) != os.getpgid(0)
    # The same names are other files now.
    again = loop.done(log)
    assert isinstance(again, Compacted)
    assert log.swap(0, again.outputs)
    assert rows(log) == expected(before, 0, result.clean_end)
    assert loop.workers.pid == pid


def test_jobs_wait_for_each_other(loop: Loop, log: PartitionLog):
    for _ in range(5):
        loop.workers.submit(job_of(log), loop.results.append)
    loop.until(lambda: len(loop.results) == 5)
    assert all(isinstance(result, Compacted) for result in loop.results)


def test_what_goes_wrong_in_a_job_is_its_result(loop: Loop, log: PartitionLog):
    path = Path(log._segments[1].path)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    result = loop.done(log)
    assert isinstance(result, Failed)
    assert result.code == CorruptLog.code
    assert loop.workers.restarts == 0


def test_a_worker_killed_in_the_middle_of_a_job_is_replaced_after_a_pause(tmp_path: Path):
    # So slow that it is never done.
    loop = Loop(LogConfig(segment_bytes_max=1024, batch_bytes_max=1024, maintenance_bytes_per_s=2000))
    try:
        log = filled(PartitionLog.open(DiskFiles(), tmp_path / "p", SMALL))
        before = rows(log)
        loop.workers.submit(job_of(log, dirty_from=log.log_end), loop.results.append)
        loop.until(lambda: any(name.endswith(".cleaned") for name in os.listdir(log.folder)))
        pid = loop.workers.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        loop.until(lambda: bool(loop.results))
        (failed,) = loop.results
        assert isinstance(failed, Failed)
        assert failed.code == JobFailed.code
        assert loop.workers.pid is None
        assert rows(log) == before
        assert log.swap(0, [])
        assert not any(name.endswith(".cleaned") for name in os.listdir(log.folder))
        loop.workers.submit(job_of(log), loop.results.append)
        loop.workers.on_tick(loop.now_ms)
        assert loop.workers.pid is None
        loop.now_ms += module.PAUSE_MS
        loop.until(lambda: loop.workers.pid is not None)
    finally:
        loop.workers.close()
        loop.transport.close()


def test_a_worker_does_not_heed_interrupts_and_ends_with_its_broker(tmp_path: Path):
    script = """
import os, signal, sys, time
from unit.broker.test_workers import *
loop = Loop(LogConfig(segment_bytes_max=1024, batch_bytes_max=1024, maintenance_bytes_per_s=2000))
log = filled(PartitionLog.open(DiskFiles(), sys.argv[1], SMALL))
loop.workers.submit(job_of(log), loop.results.append)
loop.until(lambda: loop.workers.pid is not None)
print(loop.workers.pid, flush=True)
time.sleep(60)
"""
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    broker = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "p")], stdout=subprocess.PIPE, env=env, cwd=root
    )
    try:
        assert broker.stdout is not None
        pid = int(broker.stdout.readline())
        wait_until(lambda: ignores_interrupts(pid))
        os.kill(pid, signal.SIGINT)
        assert not gone(pid)
    finally:
        broker.kill()
        broker.wait()
        broker.stdout.close()
    wait_until(lambda: gone(pid))


def ignores_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) & 1 << (signal.SIGINT - 1))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_ends_the_process_and_drops_what_waits(log: PartitionLog):
    loop = Loop()
    loop.done(log)
    pid = loop.workers.pid
    assert pid is not None
    loop.workers.submit(job_of(log), loop.results.append)
    loop.workers.close()
    loop.transport.close()
    assert gone(pid)
    assert len(loop.results) == 1


def test_jobs_in_memory_are_done_in_slices_of_a_turn(loop: Loop, monkeypatch: pytest.MonkeyPatch):
    log = filled(PartitionLog.open(loop.memory, "p", SMALL), 200)
    before = rows(log)
    monkeypatch.setattr(module, "SLICE_S", 0.0001)
    loop.workers.submit(job_of(log), loop.results.append)
    turns = 0

    def ready() -> bool:
        nonlocal turns
        turns += 1
        return bool(loop.results)

    loop.until(ready)
    assert turns > 5
    assert loop.workers.pid is None
    (result,) = loop.results
    assert isinstance(result, Compacted)
    assert log.swap(0, result.outputs)
    assert rows(log) == expected(before, 0, result.clean_end)
    log.remove_deleted(log.deleted_segments)
    assert loop.memory.listdir("p") == [f"{segment.base_offset:020d}.log" for segment in log._segments]
