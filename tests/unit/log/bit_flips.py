"""Flipped bits in every kind of file that a broker keeps: each must be found, and none be served as data.

Found means: whoever opens the file says so, or whoever reads it does, or `verify` does. Served means: anything but what
was written comes back as if it were.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from unit.log.fakes import SMALL, FakeDisk, batch, content, flush

from zmqueue.broker.raft_folder import format_folder
from zmqueue.broker.raft_snapshots import SNAPSHOT_FILE, Snapshot, _pack, load_snapshot
from zmqueue.errors import CorruptLog, ZmqueueError
from zmqueue.log.clean_point import CleanPoint, Horizon, save_clean_point
from zmqueue.log.files import DiskFiles
from zmqueue.log.inspect import Place
from zmqueue.log.journal import JOURNAL_FILE, VOTE_FILE, Journal, replace_file
from zmqueue.log.keys import KeysWriter, Summary, entry_of, file_name
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.session import DataFolder
from zmqueue.log.start import Start, save_start
from zmqueue.log.verify import Verified, verify_broker, verify_partition
from zmqueue.wire.batch import Batch, split

FSYNC = "always"


class Flip(NamedTuple):
    name: str  # below the broker's folder
    at: int
    bit: int


class Sample:
    """The folder of a broker as it is at rest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "broker-0"
        self.partition = self.folder / "partitions" / f"{'ab' * 16}-0"
        self._make_small_files()
        self._make_raft()
        self._make_partition()
        self.kinds = self._kinds()
        assert not self._problems_of_partition(DiskFiles(), str(self.partition))
        assert not self._problems_of_broker()

    def _make_small_files(self) -> None:
        held = DataFolder.open(self.folder, "c", 0, FSYNC)
        held.begin(5)
        held.confirm(5)
        held.close(clean=True)

    def _make_raft(self) -> None:
        raft = self.folder / "raft"
        format_folder(raft, "c", 0)
        journal = Journal(raft)
        journal.setCurrentTerm(3, "2")
        for index in range(1, 20):
            journal.add(b"\x00command %d" % index, index, 1 + index // 8)
        journal.sync()
        self.entries = journal[:]
        journal.close()
        self.snapshot = Snapshot(self.entries[1], self.entries[0], b"state" * 40)
        replace_file(raft / SNAPSHOT_FILE, _pack(self.snapshot))

    def _make_partition(self) -> None:
        log = PartitionLog.open(DiskFiles(), self.partition, SMALL)
        for nth in range(60):
            log.append([batch(log.log_end, 3, epoch=nth // 20, time=1000 + nth, producer=(nth % 3, 0, log.log_end))])
        flush(log)
        # Also what lies before the start that is set now: a log that loses that file has it again.
        self.written = content(log)
        log.close()
        files, folder = DiskFiles(), str(self.partition)
        save_start(files, folder, Start(4, b""))
        save_clean_point(files, folder, CleanPoint(30, (Horizon(20, 1_000, 3), Horizon(30, 2_000, 1))))
        keys = KeysWriter(0)
        keys.add(sorted(entry_of(b"%d" % (offset % 7), offset) for offset in range(150)))
        files.put(f"{folder}/{file_name(0, 150)}", keys.finish(Summary(0, 150, "header", "tag")))

    def _kinds(self) -> dict[str, list[str]]:
        kinds: dict[str, list[str]] = {}
        segments = sorted(path.name for path in self.partition.glob("*.log"))
        for path in sorted(self.folder.rglob("*")):
            if not path.is_file() or path.name == "lock":
                continue
            name = path.relative_to(self.folder).as_posix()
            kind = path.suffix.removeprefix(".") if path.parent == self.partition and path.suffix else name
            if path.parent == self.partition and not path.suffix:
                kind = path.name
            elif path.name == segments[-1]:
                kind = "active log"
            kinds.setdefault(kind, []).append(name)
        return kinds

    # -- flipping

    def choose(self, chance: random.Random) -> tuple[str, Flip]:
        """Kinds are alike in number, however many bytes each has."""
        kind = chance.choice(sorted(self.kinds))
        name = chance.choice(self.kinds[kind])
        size = (self.folder / name).stat().st_size
        return kind, Flip(name, chance.randrange(size), chance.randrange(8))

    def judge(self, flip: Flip) -> set[str]:
        """Who found it. Raises AssertionError if something else than what was written came back."""
        path = self.folder / flip.name
        whole = path.read_bytes()
        harmed = bytearray(whole)
        harmed[flip.at] ^= 1 << flip.bit
        if path.parent == self.partition:
            return self._judge_partition(path.name, bytes(harmed))
        path.write_bytes(harmed)
        try:
            found = {"verify"} if self._problems_of_broker() else set()
            return found | self._judge_small(flip.name)
        finally:
            for aside in path.parent.glob("*.corrupt-*"):
                aside.unlink()
            path.write_bytes(whole)

    def _judge_partition(self, name: str, harmed: bytes) -> set[str]:
        disk = FakeDisk()
        disk.mkdir("p")
        for path in self.partition.iterdir():
            disk.put(f"p/{path.name}", harmed if path.name == name else path.read_bytes())
        found = {"verify"} if self._problems_of_partition(disk, "p") else set()
        log = PartitionLog.open(disk, "p", SMALL)
        recovery = log.recovery
        if recovery.corrupt or recovery.truncated_bytes:
            found.add("open")
        seen: list[Batch] = []
        offset = log.log_start
        try:
            while data := log.read(offset, 700, log.log_end):
                seen += split(data)
                offset = seen[-1].header.next_offset
        except CorruptLog:
            found.add("read")
        originals = {one.header.base_offset: one for one in self.written}
        assert all(originals.get(one.header.base_offset) == one for one in seen), f"{name}: served what was not written"
        if not found & {"open", "read"}:
            assert seen[-1:] == self.written[-1:], f"{name}: records are missing, and nobody said so"
        return found

    def _judge_small(self, name: str) -> set[str]:
        raft = self.folder / "raft"
        try:
            if name == f"raft/{SNAPSHOT_FILE}":
                assert load_snapshot(raft / SNAPSHOT_FILE) == self.snapshot, "another snapshot was served"
            elif name in (f"raft/{JOURNAL_FILE}", f"raft/{VOTE_FILE}"):
                kept = (raft / JOURNAL_FILE).read_bytes()
                journal = Journal(raft)
                journal.close()
                assert journal[:] == self.entries[: len(journal)], "other entries were served"
                assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (3, "2"), "another vote was served"
                (raft / JOURNAL_FILE).write_bytes(kept)
                return {"open"} if len(journal) < len(self.entries) else set()
            elif name == "raft/meta":
                format_folder(raft, "c", 0)
            else:
                return self._judge_session(name)
        except ZmqueueError:
            return {"open"}
        return set()

    def _judge_session(self, name: str) -> set[str]:
        """A folder whose past is in doubt says so, and begins a new one; what was is put back afterwards."""
        kept = {path: path.read_bytes() for path in (self.folder / "meta", self.folder / "session")}
        held = DataFolder.open(self.folder, "c", 0, FSYNC)
        held.close(clean=False)
        assert held.unclean or held.previous_incarnations == [5], "another session was served"
        for path, data in kept.items():
            path.write_bytes(data)
        return {"open"} if held.unclean else set()

    # -- what is asked

    def _problems_of_partition(self, files: DiskFiles | FakeDisk, folder: str) -> bool:
        verified = Verified()
        verify_partition(files, Place(folder), verified)
        return bool(verified.problems)

    def _problems_of_broker(self) -> bool:
        verified = Verified()
        verify_broker(DiskFiles(), str(self.folder), verified)
        return bool(verified.problems)


def flip_bits(folder: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """For each kind of file, how often who found it. Raises AssertionError for a flip that nobody found."""
    sample = Sample(folder)
    chance = random.Random(seed)
    results: dict[str, Counter[str]] = {}
    for _ in range(count):
        kind, flip = sample.choose(chance)
        found = sample.judge(flip)
        assert found, f"nobody found {flip}"
        results.setdefault(kind, Counter()).update([*found, "flips"])
    return results
