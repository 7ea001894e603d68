"""The process or the power ends at every single step of every change to a log, and of the recovery after it.

A step is a write, a rename, a removal, a truncation or a sync, as FakeDisk counts them. Whatever then opens the folder
finds a legal log: all that was promised, nothing that was never written, no damage; and it goes on from there.
"""

from __future__ import annotations

import random

import pytest
from unit.log.fakes import SMALL, Crash, FakeDisk, batch, batches, content, disk_with, flush, raw

from zmqueue.config import LogConfig
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.recovery import MARKER
from zmqueue.wire.batch import Batch


class Story:
    """A partition's life on a disk that stops at some step, and what may be found afterwards."""

    def __init__(self, disk: FakeDisk, config: LogConfig = SMALL) -> None:
        self.disk = disk
        self.config = config
        self.all: list[Batch] = []  # as the log has it, or had it when the step that crashed began
        self.log: PartitionLog | None = None
        # Records below this were promised, and no later step took them back.
        self.promised = 0
        # Records below this were written, which is as good as long as only processes end.
        self.written = 0
        self.starts = {0}

    def run(self) -> None:
        log = self.open()
        for nth in range(12):
            self.append(2, epoch=nth // 4)
            if nth % 3 == 2:
                self.flush()
        self.append(20, epoch=3)
        self.flush()
        self.append(3, epoch=3)
        self.truncate(log.log_end - 4)
        self.append(9, epoch=4)
        self.truncate(31)
        self.append(8, epoch=6)
        self.flush()
        log.close()
        log = self.open()
        self.append(12, epoch=6)
        self.flush()
        self.reset(500)
        self.append(7, epoch=7)
        self.flush()
        self.append(1, epoch=7)

    def open(self) -> PartitionLog:
        self.log = PartitionLog.open(self.disk, "p", self.config)
        self.promised = self.log.log_end
        return self.log

    def append(self, count: int, epoch: int) -> None:
        assert self.log is not None
        made = batches(count, self.log.log_end, epoch)
        self.all += made
        self.log.append(made)
        self.written = self.log.log_end

    def flush(self) -> None:
        assert self.log is not None
        flush(self.log)
        self.promised = self.log.durable_end

    def truncate(self, end: int) -> None:
        assert self.log is not None
        self.promised, self.written = min(self.promised, end - 2), end - 2
        self.log.truncate(end)
        self.all = [one for one in self.all if one.header.next_offset <= end]
        self.promised = self.written = self.log.durable_end

    def reset(self, start: int) -> None:
        assert self.log is not None
        self.promised = self.written = 0
        self.starts.add(start)
        self.log.reset(start)
        self.all = []
        self.promised = self.written = start

    def check(self, survivor: FakeDisk, promised: int) -> None:
        log = PartitionLog.open(survivor, "p", self.config)
        assert not log.recovery.corrupt
        assert not log.recovery.quarantined
        assert log.log_end >= promised
        assert log.log_start in self.starts
        found = content(log)
        assert found == self.all[: len(found)]
        # It is a log like any other: it takes more, and keeps it.
        log.append([batch(log.log_end, 1, epoch=9)])
        flush(log)
        log.close()
        assert content(PartitionLog.open(survivor.after_power_cut(random.Random(0)), "p", self.config))[:-1] == found


def crashed_stories(config: LogConfig = SMALL) -> list[Story]:
    """One for each step."""
    whole = Story(FakeDisk(), config)
    whole.run()
    assert whole.disk.steps > 60
    stories = []
    for crash_at in range(1, whole.disk.steps + 1):
        stories.append(Story(FakeDisk(crash_at), config))
        with pytest.raises(Crash):
            stories[-1].run()
    return stories


def test_a_power_cut_at_any_step_leaves_a_legal_log_with_all_that_was_promised():
    for nth, story in enumerate(crashed_stories()):
        for seed in range(6):
            story.check(story.disk.after_power_cut(random.Random(1000 * nth + seed)), story.promised)


@pytest.mark.parametrize("fsync", ["always", "interval", "os"])
def test_a_kill_at_any_step_loses_nothing_that_was_written(fsync: str):
    config = LogConfig(
        fsync=fsync,  # type: ignore[arg-type]
        segment_bytes_max=SMALL.segment_bytes_max,
        batch_bytes_max=SMALL.batch_bytes_max,
        index_interval_bytes=SMALL.index_interval_bytes,
    )
    for nth, story in enumerate(crashed_stories(config)):
        for seed in range(3):
            story.check(story.disk.after_kill(random.Random(1000 * nth + seed)), story.written)


def test_a_crash_at_any_step_of_the_recovery_after_a_crash_is_recovered_from():
    chance = random.Random(5)
    for story in crashed_stories():
        for end in ("after_kill", "after_power_cut"):
            first: FakeDisk = getattr(story.disk, end)(chance)
            for crash_at in range(1, 200):
                disk = first.after_kill(chance)
                disk.crash_at = crash_at
                if not crashes_while_opening(disk):
                    break
                # What was unsynced before the first crash is so after a kill, and may be lost now.
                story.check(disk.after_power_cut(chance), story.promised)
            else:
                raise AssertionError("a recovery without end")


def crashes_while_opening(disk: FakeDisk) -> bool:
    try:
        PartitionLog.open(disk, "p", SMALL)
    except Crash:
        return True
    return False


def damaged_disk() -> FakeDisk:
    """Three segments, the second with a broken batch in its middle."""
    files = {12 * nth: bytearray(b"".join(map(raw, batches(4, start=12 * nth)))) for nth in range(3)}
    files[12][2 * len(raw(batch(0, 3))) + 100] ^= 1
    return disk_with(files)


def test_a_power_cut_at_any_step_of_a_quarantine_loses_neither_the_verdict_nor_a_byte():
    aside = 0
    for crash_at in range(1, 100):
        disk = damaged_disk()
        before = [bytes(inode.data) for _, inode in sorted(disk.folders["p"].entries.items())]
        disk.crash_at = crash_at
        crashed = crashes_while_opening(disk)
        for seed in range(40):
            survivor = disk.after_power_cut(random.Random(seed))
            log = PartitionLog.open(survivor, "p", SMALL)
            assert log.recovery.corrupt
            assert content(log) == batches(6)[: len(content(log))]
            assert log.log_end in ((12, 18) if crashed else (18,))
            kept = [bytes(inode.data) for inode in survivor.folders["p"].entries.values()]
            assert all(data in kept for data in before)
            assert MARKER in survivor.listdir("p")
            aside += 1
        if not crashed:
            break
    assert aside > 30
    assert not crashed
