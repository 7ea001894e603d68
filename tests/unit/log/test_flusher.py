from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from unit.log.fakes import SMALL, FakeDisk, FakeFile, Inode, batch

from zmqueue.config import LogConfig
from zmqueue.errors import StorageFailed
from zmqueue.log.files import OpenFile, open_files
from zmqueue.log.flusher import Flusher
from zmqueue.log.partition_log import PartitionLog

WAIT_S = 10


class GatedFile(FakeFile):
    __slots__ = ()

    def sync(self) -> None:
        assert isinstance(self._disk, GatedDisk)
        self._disk.syncs.append(self.path)
        self._disk.begun.release()
        assert self._disk.gate.acquire(timeout=WAIT_S)
        super().sync()


class GatedDisk(FakeDisk):
    """A disk whose syncs wait until they are let through, and say when they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.syncs: list[str] = []

    def _opened(self, path: str, inode: Inode) -> OpenFile:
        self.open_files += 1
        return GatedFile(self, path, inode)

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)

    def let(self, count: int = 1) -> None:
        self.gate.release(count)


class Loop:
    """The broker's loop, as far as the flusher knows it."""

    def __init__(self, mode: str = "always", interval_ms: int = 50) -> None:
        self.woken = threading.Semaphore(0)
        self.flusher = Flusher(self.woken.release, mode, interval_ms)  # type: ignore[arg-type]
        self.results: list[tuple[object, bool]] = []

    def next(self) -> None:
        """Sleep until something was flushed, then take it."""
        before = len(self.results)
        while len(self.results) == before:
            assert self.woken.acquire(timeout=WAIT_S)
            self.take()

    def take(self) -> None:
        for key, log, ticket in self.flusher.drain():
            self.results.append((key, log.flushed(ticket)))


@pytest.fixture
def disk() -> Iterator[GatedDisk]:
    made = GatedDisk()
    yield made
    made.let(1000)


@pytest.fixture
def loop(disk: GatedDisk) -> Iterator[Loop]:
    made = Loop()
    yield made
    disk.let(1000)
    made.flusher.close()
    assert not made.flusher._thread.is_alive()


def opened(disk: GatedDisk, name: str = "p", config: LogConfig = SMALL) -> PartitionLog:
    """A log whose first segment is behind it, so that only what a test appends is synced."""
    return PartitionLog.open(disk, name, config)


def grow(log: PartitionLog, count: int = 1) -> None:
    for _ in range(count):
        log.append([batch(log.log_end, 1)])


def test_what_is_submitted_becomes_durable(disk: GatedDisk, loop: Loop):
    log = opened(disk)
    grow(log, 2)
    loop.flusher.submit("p", log)
    disk.wait_begun()
    loop.take()
    assert log.durable_end == 0
    disk.let()
    loop.next()
    assert (log.durable_end, loop.results) == (2, [("p", True)])


def test_appends_during_a_sync_wait_for_the_next(disk: GatedDisk, loop: Loop):
    log = opened(disk)
    grow(log)
    loop.flusher.submit("p", log)
    disk.wait_begun()
    grow(log)
    loop.flusher.submit("p", log)
    disk.let()
    loop.next()
    assert log.durable_end == 1
    disk.wait_begun()
    disk.let()
    loop.next()
    assert log.durable_end == 2


def test_everything_submitted_before_a_round_is_covered_by_one_sync(disk: GatedDisk, loop: Loop):
    busy, log = opened(disk, "busy"), opened(disk)
    grow(busy)
    loop.flusher.submit("busy", busy)
    disk.wait_begun()
    for _ in range(5):
        grow(log)
        loop.flusher.submit("p", log)
    disk.let(2)
    loop.next()
    while not log.durable_end:
        loop.next()
    assert log.durable_end == 5
    assert disk.syncs == [f"busy/{0:020d}.log", f"p/{0:020d}.log"]


def test_logs_do_not_wait_for_the_rest_of_their_round(disk: GatedDisk, loop: Loop):
    logs = [opened(disk, name) for name in "abc"]
    for log in logs:
        grow(log)
    loop.flusher.submit("a", logs[0])
    disk.wait_begun()
    loop.flusher.submit("b", logs[1])
    loop.flusher.submit("c", logs[2])
    disk.let(2)
    for _ in range(2):
        disk.wait_begun()
    while not logs[1].durable_end:
        loop.next()
    assert (logs[1].durable_end, logs[2].durable_end) == (1, 0)


def test_a_log_truncated_during_its_sync_is_not_durable_by_it(disk: GatedDisk, loop: Loop):
    log = opened(disk)
    grow(log, 5)
    loop.flusher.submit("p", log)
    disk.wait_begun()
    disk.let(2)  # the truncation syncs as well
    log.truncate(2)
    grow(log, 2)
    loop.next()
    assert (log.durable_end, loop.results) == (2, [("p", False)])


def test_a_log_that_is_deleted_during_its_sync_is_closed_afterwards(disk: GatedDisk, loop: Loop):
    log = opened(disk)
    grow(log, 5)
    loop.flusher.submit("p", log)
    disk.wait_begun()
    log.delete()
    assert disk.open_files == 1
    disk.let()
    loop.next()
    assert (disk.open_files, loop.results) == (0, [("p", False)])


def test_no_descriptor_stays_behind_a_replaced_ticket(disk: GatedDisk, loop: Loop):
    busy, log = opened(disk, "busy"), opened(disk)
    grow(busy)
    loop.flusher.submit("busy", busy)
    disk.wait_begun()
    for _ in range(3):
        grow(log)
        loop.flusher.submit("p", log)
    disk.let(10)
    while not log.durable_end:
        loop.next()
    busy.close()
    log.close()
    assert disk.open_files == 0


def test_a_failed_sync_is_told_once_and_nothing_is_taken_after_it(disk: GatedDisk, loop: Loop):
    logs = [opened(disk, name) for name in "abc"]
    for log in logs:
        grow(log)
    loop.flusher.submit("a", logs[0])
    disk.wait_begun()
    loop.flusher.submit("b", logs[1])
    loop.flusher.submit("c", logs[2])
    disk.let()
    disk.wait_begun()
    loop.next()
    disk.sync_error = True
    disk.let(5)
    assert loop.woken.acquire(timeout=WAIT_S)
    loop.flusher._thread.join(WAIT_S)
    ((key, log, ticket),) = loop.flusher.drain()
    assert (key, log) == ("b", logs[1])
    assert isinstance(ticket.error, StorageFailed)
    with pytest.raises(StorageFailed):
        log.flushed(ticket)
    disk.sync_error = False
    with pytest.raises(StorageFailed, match="no more is synced"):
        loop.flusher.submit("c", logs[2])
    assert disk.syncs == [f"{name}/{0:020d}.log" for name in "ab"]
    assert loop.flusher.drain() == []


def test_a_mistake_of_ours_is_a_failure_too(loop: Loop, disk: GatedDisk, monkeypatch: pytest.MonkeyPatch):
    log = opened(disk)
    grow(log)
    monkeypatch.setattr(GatedFile, "sync", lambda _: 1 / 0)
    loop.flusher.submit("p", log)
    with pytest.raises(StorageFailed, match="ZeroDivisionError"):
        loop.next()


def test_closing_syncs_what_is_queued(disk: GatedDisk, loop: Loop):
    logs = [opened(disk, name) for name in "abc"]
    for log in logs:
        grow(log)
        loop.flusher.submit(log.folder, log)
    disk.let(10)
    loop.flusher.close()
    loop.take()
    assert [log.durable_end for log in logs] == [1, 1, 1]


def test_memory_is_done_at_once():
    loop = Loop()
    log = PartitionLog.open(open_files("memory"), "p", SMALL)
    grow(log, 3)
    loop.flusher.submit("p", log)
    assert loop.woken.acquire(blocking=False)
    loop.take()
    assert log.durable_end == 3
    loop.flusher.close()


def test_in_mode_os_nothing_is_synced_and_nothing_waits(disk: GatedDisk):
    loop = Loop("os")
    log = opened(disk, config=LogConfig(fsync="os"))
    for _ in range(3):
        grow(log)
        loop.flusher.submit("p", log)
    assert loop.woken.acquire(blocking=False)
    assert not loop.woken.acquire(blocking=False), "one call wakes for all that is there"
    loop.take()
    assert (log.durable_end, disk.syncs) == (3, [])
    loop.flusher.close()


def test_in_mode_interval_nothing_waits_and_the_sync_follows(disk: GatedDisk):
    loop = Loop("interval", interval_ms=1)
    log = opened(disk, config=LogConfig(fsync="interval"))
    grow(log, 2)
    loop.flusher.submit("p", log)
    loop.take()
    assert log.durable_end == 2
    disk.wait_begun()
    grow(log)
    loop.flusher.submit("p", log)
    loop.take()
    assert log.durable_end == 3
    disk.let(2)
    disk.wait_begun()
    loop.flusher.close()
    loop.take()
    assert len(disk.syncs) == 2
    assert log.begin_flush().empty
    log.close()
    assert disk.open_files == 0


def test_closing_does_not_sit_out_the_interval(disk: GatedDisk):
    loop = Loop("interval", interval_ms=3_600_000)
    log = opened(disk, config=LogConfig(fsync="interval"))
    disk.let(5)
    for _ in range(2):
        grow(log)
        loop.flusher.submit("p", log)
        disk.wait_begun() if log.log_end == 1 else None
    loop.flusher.close()
    loop.take()
    assert len(disk.syncs) == 2
    assert log.begin_flush().empty
