"""A partition's log against a plain list of batches: every step is done to both, and after each they must agree.

What compaction may leave is not one thing only: there the log is judged record by record, and the list becomes what the
log is.

Three disks: a real one, memory, and one that forgets. On the last a power cut may come between any two steps; what
then comes back must be a beginning of the list that has all that was durable, and the list goes on from there. What
happens within a step is the business of test_crash_points.
"""

from __future__ import annotations

import os
import random
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit.log.fakes import FakeDisk, batch, content, flush
from unit.log.test_compaction import Row, compacted, rows_of

from zmqueue.config import LogConfig
from zmqueue.core.producers import Producers
from zmqueue.log.files import Files, open_files
from zmqueue.log.inspect import Place
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.verify import Verified, verify_partition
from zmqueue.wire.batch import Batch, BatchHeader, split

CONFIGS = [
    LogConfig(segment_bytes_max=segment_bytes, batch_bytes_max=segment_bytes, index_interval_bytes=interval)
    for segment_bytes in (700, 1024, 3000)
    for interval in (1, 256, 5000)
]
SHM = "/dev/shm"
TIMES = st.integers(0, 60)


class AgainstAList(RuleBasedStateMachine):
    storage = "disk"

    @initialize(config=st.sampled_from(CONFIGS))
    def start(self, config: LogConfig) -> None:
        # In memory, if there is such a folder: nothing here depends on what a sync really does.
        self.temporary = tempfile.TemporaryDirectory(dir=SHM if os.path.isdir(SHM) else None)
        self.folder = f"{self.temporary.name}/p"
        self.config = config
        self.files: Files = FakeDisk() if self.storage == "fake" else open_files(self.storage, {})
        self.log = PartitionLog.open(self.files, self.folder, config)
        assert self.log.recovery.created
        self.model: list[Batch] = []
        self.history: list[BatchHeader] = []  # of all batches since the beginning, deleted ones too
        self.start_offset = 0
        self.committed = 0  # below this nothing is ever truncated
        self.deleted = self.compacted = False
        self.generation = 0
        self.durable = 0
        self.harmed = False

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            self.log.close()
            self.files.close()
            self.temporary.cleanup()

    @property
    def end(self) -> int:
        return self.model[-1].header.next_offset if self.model else self.start_offset

    @property
    def rows(self) -> dict[int, Row]:
        found = {offset: row for one in self.model for offset, row in rows_of(one).items()}
        return {offset: row for offset, row in found.items() if offset >= self.start_offset}

    def began_anew(self, start: int) -> None:
        self.model, self.history = [], []
        self.start_offset = self.committed = self.durable = start
        self.deleted = self.compacted = False

    # -- changes

    @rule(
        shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 400)), min_size=1, max_size=6),
        epochs=st.integers(0, 2),
        time=TIMES,
        producer=st.integers(-1, 2),
        keys=st.integers(0, 4),
    )
    def append(self, shapes: list[tuple[int, int]], epochs: int, time: int, producer: int, keys: int) -> None:
        epoch = max(self.log.last_epoch, 0) + epochs
        offset, batches = self.end, []
        for records, size in shapes:
            # Sequences are as good as any that only grow.
            who = (producer, epoch, offset) if producer >= 0 else (-1, -1, -1)
            names = [b"k%d" % ((offset + nth) % keys) for nth in range(records)] if keys else None
            value = bytes(size // records)
            batches.append(batch(offset, records, epoch, value=value, time=time, producer=who, keys=names))
            offset += records
        self.log.append(batches)
        self.model += batches
        self.history += [one.header for one in batches]

    @rule(back=st.integers(0, 40))
    def truncate(self, back: int) -> None:
        end = max(self.committed, self.end - back)
        first = self.model[0].header.base_offset if self.model else self.start_offset
        self.log.truncate(end)
        self.forget_from(end)
        self.generation += 1
        self.durable = self.end
        if not self.model and first < self.start_offset:
            # The batch within which the log began is gone, and so is the log.
            self.generation += 1
            self.began_anew(first)

    def forget_from(self, end: int) -> None:
        while self.model and self.model[-1].header.next_offset > end:
            self.model.pop()
        while self.history and self.history[-1].next_offset > end:
            self.history.pop()

    @rule(start=st.integers(0, 200))
    def reset(self, start: int) -> None:
        self.log.reset(start)
        self.began_anew(start)
        self.generation += 1

    @rule()
    def flush(self) -> None:
        flush(self.log)
        self.durable = self.end

    @rule(back=st.integers(0, 10))
    def stale_flush(self, back: int) -> None:
        ticket = self.log.begin_flush()
        self.truncate(back)
        ticket.sync()
        assert not self.log.flushed(ticket)

    # -- maintenance, which touches only what is committed

    @rule(share=st.floats(0, 1), at_once=st.booleans())
    def delete(self, share: float, at_once: bool) -> None:
        self.flush()
        offset = self.start_offset + int(share * (self.end - self.start_offset))
        self.log.delete_before(offset)
        if at_once:
            self.log.remove_deleted(100)
        self.model = [one for one in self.model if one.header.next_offset > offset]
        self.start_offset, self.committed, self.deleted = offset, max(offset, self.committed), True

    @rule()
    def compact(self) -> None:
        self.flush()
        self.committed = self.end
        before, end = self.rows, self.log.segments[-1].base_offset
        result = compacted(self.log, segment_bytes_max=self.config.segment_bytes_max)
        self.model, self.compacted = content(self.log), True
        after = self.rows
        assert after.items() <= before.items()
        latest = {row.key: offset for offset, row in before.items() if offset < end}
        for offset, row in before.items():
            replaced = row.key is not None and offset < end and latest[row.key] > offset
            assert replaced if offset not in after else not replaced or offset >= result.clean_end

    # -- other lives

    def reopened(self) -> None:
        self.log = PartitionLog.open(self.files, self.folder, self.config)
        recovery = self.log.recovery
        assert (recovery.corrupt, recovery.quarantined, recovery.created) == (False, [], False)
        self.generation = 0

    @rule(config=st.sampled_from(CONFIGS))
    def reopen(self, config: LogConfig) -> None:
        """Settings may be others than before."""
        self.log.close()
        self.config = config
        self.reopened()
        assert self.log.recovery.truncated_bytes == 0
        self.durable = self.end

    @rule()
    def kill(self) -> None:
        """The process is gone, what it wrote is not: nothing is lost, and what was not synced is by the next."""
        self.log.close(sync=False)
        self.reopened()
        assert self.log.recovery.truncated_bytes == 0
        self.durable = self.end

    @precondition(lambda self: self.storage == "fake")
    @rule(seed=st.integers(0, 1 << 30))
    def power_cut(self, seed: int) -> None:
        assert isinstance(self.files, FakeDisk)
        self.files = self.files.after_power_cut(random.Random(seed))
        was_there = self.durable > self.start_offset or self.generation > 0
        if not was_there and self.folder not in self.files.folders:
            self.files.mkdir(self.folder)
        self.log = PartitionLog.open(self.files, self.folder, self.config)
        assert not self.log.recovery.corrupt
        assert not self.log.recovery.quarantined
        assert self.log.log_end >= self.durable
        self.forget_from(self.log.log_end)
        self.generation, self.durable = 0, self.end

    @precondition(lambda self: self.storage != "memory")
    @rule(seed=st.integers(0, 1 << 30), harm=st.sampled_from(["delete", "flip", "shorten", "exchange"]))
    def harm_indexes(self, seed: int, harm: str) -> None:
        """Between two lives: they are caches, so nobody may notice."""
        self.log.close()
        chance = random.Random(seed)
        paths = [f"{self.folder}/{name}" for name in self.files.listdir(self.folder) if name.endswith(".index")]
        for path in paths:
            data = bytearray(self.files.read_small(path) or b"")
            match harm:
                case "delete":
                    self.files.remove(path)
                    continue
                case "flip":
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                case "shorten":
                    del data[chance.randrange(len(data)) :]
                case "exchange":
                    data = bytearray(self.files.read_small(chance.choice(paths)) or b"")
            self.files.put(path, bytes(data))
        self.reopened()
        self.harmed = self.harmed or harm == "flip"
        self.durable = self.end

    # -- questions

    @precondition(lambda self: self.model)
    @rule(data=st.data(), bytes_max=st.integers(1, 2000), records_max=st.integers(0, 10))
    def read(self, data: st.DataObject, bytes_max: int, records_max: int) -> None:
        offset = data.draw(st.integers(self.log.log_start, self.end - 1))
        nth = next(i for i, one in enumerate(self.model) if one.header.next_offset > offset)
        last = data.draw(st.integers(nth, len(self.model)))
        end_offset = self.model[last].header.base_offset if last < len(self.model) else self.end + 5
        found = list(split(self.log.read(offset, bytes_max, end_offset, records_max)))
        assert found == self.model[nth : nth + len(found)]
        assert nth + len(found) <= last
        if last > nth:
            assert found
            assert len(found) == 1 or sum(one.header.total_bytes for one in found) <= bytes_max
            assert not records_max or sum(one.header.record_count for one in found[:-1]) < records_max

    @rule()
    def read_all(self) -> None:
        """Not after each step: reading also repairs indexes, and others must not rely on it."""
        assert content(self.log) == self.model

    @rule(time=TIMES, back=st.integers(0, 30))
    def offset_for_time(self, time: int, back: int) -> None:
        end_offset = self.end - back
        rows = ((offset, row.timestamp) for offset, row in self.rows.items())
        wanted = (found for found in rows if found[1] >= time and found[0] < end_offset)
        assert self.log.offset_for_time(time, end_offset) == next(wanted, None)

    @rule(data=st.data())
    def headers(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.end + 1))
        expected = [one.header for one in self.model if one.header.next_offset > start]
        assert list(self.log.headers(start)) == expected

    @precondition(lambda self: self.storage != "memory")
    @rule()
    def verify(self) -> None:
        self.log.remove_deleted(100)
        verified = Verified()
        verify_partition(self.files, Place(self.folder), verified)
        # The pages of an index are looked at when they are needed, so harm to them may still be there.
        assert [problem for problem in verified.problems if not (self.harmed and ".index" in problem.path)] == []
        assert verified.bytes == self.log.size_bytes
        assert self.deleted or verified.batches == len(self.model)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert (log.log_start, log.log_end, log.generation) == (self.start_offset, self.end, self.generation)
        assert log.durable_end == self.durable
        size = sum(one.header.total_bytes for one in self.model)
        assert log.size_bytes >= size if self.deleted else log.size_bytes == size
        epochs: dict[int, int] = {}
        for one in self.model:
            # Where the batch begins in which the log does is nobody's business: it may have become one with others.
            epochs.setdefault(one.header.leader_epoch, max(one.header.base_offset, self.start_offset))
        expected = list(epochs.items())
        # The epoch before a start within the log may be known.
        known = [(epoch, max(start, self.start_offset)) for epoch, start in log.epochs]
        assert known[len(known) - len(expected) :] == expected
        assert len(log.epochs) <= len(expected) + self.deleted
        assert log.last_epoch == max(epochs, default=log.last_epoch if self.deleted else -1)
        producers = Producers(self.history)
        assert log.producers.last_batches() == producers.last_batches()
        # Of a compacted log, less is known once an index is lost.
        assert self.compacted or log.producers.encode() == producers.encode()


class MemoryAgainstAList(AgainstAList):
    storage = "memory"


class ForgetfulAgainstAList(AgainstAList):
    storage = "fake"


for machine, examples in ((AgainstAList, 60), (MemoryAgainstAList, 40), (ForgetfulAgainstAList, 120)):
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestDiskAgainstAList = AgainstAList.TestCase
TestMemoryAgainstAList = MemoryAgainstAList.TestCase
TestForgetfulAgainstAList = ForgetfulAgainstAList.TestCase
