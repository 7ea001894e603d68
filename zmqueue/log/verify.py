"""The proof of a folder: everything that can be known to be wrong with it, without a change to it.

Of a partition: both checksums of every batch, offsets without gaps within and between segments, epochs that never fall;
that every index page proves, every entry is a true boundary with the time before it, and the summary says what the
batches say; the start file; and that nothing lies there that does not belong to a log at rest. Of a broker: its small
files and its Raft folder too.

A folder in use is proved as far as it stands still: the unfinished end of the last segment, files that come and go, and
segments that vanish are then no problems.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, field

from zmqueue.core.epochs import Epochs
from zmqueue.core.producers import Producers
from zmqueue.errors import CorruptIndex, CorruptLog, FutureFormat, StorageFailed
from zmqueue.log.clean_point import CLEAN_FILE, parse_clean_point
from zmqueue.log.files import Files, lock_holder
from zmqueue.log.index import NO_TIMESTAMP, GrowingIndex, Summary, load
from zmqueue.log.inspect import (
    LOCK_FILE,
    PARTITION_NAME,
    PARTITIONS,
    SEGMENT_NAME,
    Place,
    segments_in,
)
from zmqueue.log.journal import JOURNAL_FILE, check_file, read_entries
from zmqueue.log.keys import parse_name
from zmqueue.log.recovery import MARKER, SALVAGE, Fault, check_follows, proved
from zmqueue.log.secondary import describe_index
from zmqueue.log.segment import index_name, segment_name
from zmqueue.log.session import check_file as check_small_file
from zmqueue.log.start import START_FILE, Start, parse_start
from zmqueue.log.swap import CLEANED
from zmqueue.model import MiB

_INDEX_NAME = re.compile(r"(\d{20})\.index\Z")
_RAFT_FILES = ("vote", "meta", "snapshot")
_TOLD_EVERY_BYTES = 4 * MiB


class Problem(Struct):
    path: str
    problem: str
    position: int | None = None

    def __str__(self) -> str:
        at = "" if self.position is None else f" at byte {self.position}"
        return f"{self.path}{at}: {self.problem}"


class Verified(Struct):
    """What was read, and what is wrong with it."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, other: Verified) -> None:
        self.partitions += other.partitions
        self.segments += other.segments
        self.batches += other.batches
        self.records += other.records
        self.bytes += other.bytes
        self.problems += other.problems

    def wrong(self, path: str, problem: str, position: int | None = None) -> None:
        self.problems.append(Problem(path, problem, position))


Told = Callable[[Verified], None]


def verify_partition(files: Files, place: Place, verified: Verified, told: Told = lambda _: None) -> None:
    in_use = place.holder is not None
    found = _Partition(files, place.folder, in_use, Verified(), told).verify()
    if in_use and found.problems:
        # Files may have been replaced between two looks at them. What is really wrong is so twice.
        found = _Partition(files, place.folder, in_use, Verified(), told).verify()
    verified.add(found)


class _Partition:
    def __init__(self, files: Files, folder: str, in_use: bool, verified: Verified, told: Told) -> None:
        self._files = files
        self._folder = folder
        self._in_use = in_use
        self._verified = verified
        self._told = told
        self._told_bytes = 0
        self._start = Start()
        self._epochs = Epochs()
        # None: unknown, because what told of it is damaged or was removed.
        self._producers: Producers | None = None
        # What compaction has removed told of producers too: only the summaries know it since.
        self._compacted = False

    def verify(self) -> Verified:
        listed = self._files.listdir(self._folder)
        self._read_start()
        bases = []
        for base in segments_in(self._files, self._folder):
            if base >= self._start.base:
                bases.append(base)
            elif not self._in_use:
                self._verified.wrong(f"{self._folder}/{segment_name(base)}", "deleted, and left behind by a crash")
        end = bases[0] if bases else 0
        for nth, base in enumerate(bases):
            path = f"{self._folder}/{segment_name(base)}"
            last = nth == len(bases) - 1
            if base != end:
                self._verified.wrong(path, f"the segment before it ends at offset {end}")
            next_base = None if last else bases[nth + 1]
            try:
                end = self._segment(path, base, next_base)
            except StorageFailed:
                if not self._in_use or self._files.exists(path):
                    raise
                end, self._producers = base if last else bases[nth + 1], None  # removed meanwhile
        log_start = self._start.log_start
        if log_start > end:
            self._verified.wrong(f"{self._folder}/{START_FILE}", f"begins at {log_start}, the log ends at {end}")
        self._clean_point()
        self._secondary(end)
        self._strangers(listed, bases)
        self._verified.partitions = 1
        return self._verified

    def _read_start(self) -> None:
        path = f"{self._folder}/{START_FILE}"
        data = self._files.read_small(path)
        try:
            self._start = Start() if data is None else parse_start(data)
            self._producers = Producers.decode(self._start.producers)
        except ValueError as error:
            self._verified.wrong(path, str(error))

    def _clean_point(self) -> None:
        path = f"{self._folder}/{CLEAN_FILE}"
        data = self._files.read_small(path)
        if data is not None:
            try:
                parse_clean_point(data)
            except ValueError as error:
                self._verified.wrong(path, str(error))

    def _secondary(self, end: int) -> None:
        """A file that reaches beyond the log could be taken for true when other records have come there."""
        for found in describe_index(self._files, self._folder):
            path = f"{self._folder}/{found.name}"
            if found.error:
                self._verified.wrong(path, found.error)
            elif found.end_offset > end and not self._in_use:
                self._verified.wrong(path, f"covers offsets up to {found.end_offset}, the log ends at {end}")

    def _segment(self, path: str, base: int, next_base: int | None) -> int:
        """Where it ends. The index is walked beside the batches, so that neither has to be kept."""
        size = self._files.size(path)
        loaded = self._index(base) if next_base is not None else None
        entries = _Entries(loaded[0], base) if loaded is not None else None
        end, highest, walked = base, NO_TIMESTAMP, 0
        try:
            for position, header, _ in proved(self._files, path, size):
                check_follows(position, header, end, self._epochs.last)
                if entries is not None:
                    entries.pass_boundary(position, header.base_offset, highest)
                self._epochs.note(header.leader_epoch, header.base_offset)
                self._compacted = self._compacted or header.record_count <= header.last_offset_delta
                if self._producers is not None:
                    self._producers.note(header)
                end, highest = header.next_offset, max(highest, header.max_timestamp)
                walked = position + header.total_bytes
                self._verified.batches += 1
                self._verified.records += header.record_count
                self._read(header.total_bytes)
        except FutureFormat as error:
            self._verified.wrong(path, str(error))
            self._producers = loaded = None
        except Fault as fault:
            self._fault(path, size, fault, last=next_base is None)
            # What the missing batches told is unknown.
            self._producers = loaded = None
        self._verified.segments += 1
        if loaded is not None and entries is not None:
            index_path = f"{self._folder}/{index_name(base)}"
            for position in entries.wrong():
                self._verified.wrong(index_path, f"an entry for byte {position}, where no such batch begins")
            self._summary(index_path, loaded[1], base, end, walked, highest, entries.index.gap_bytes_max(walked))
        return end

    def _fault(self, path: str, size: int, fault: Fault, last: bool) -> None:
        if last and self._in_use and not fault.misplaced:
            return  # being written
        kind = f"a tail of {size - fault.position} bytes is no batch: " if last and not fault.misplaced else ""
        self._verified.wrong(path, f"{kind}{fault.reason}", fault.position)

    def _index(self, base: int) -> tuple[GrowingIndex, Summary] | None:
        path = f"{self._folder}/{index_name(base)}"
        if not self._files.exists(path):
            # It is a cache: a full disk or a crash leave none, and the next start makes it.
            return None
        try:
            index, summary = load(self._files, path, base)
            index.verify()
            return index.grown(0), summary
        except (CorruptIndex, FutureFormat) as error:
            self._verified.wrong(path, str(error))
            return None

    def _summary(self, path: str, summary: Summary, base: int, end: int, size: int, highest: int, gap: int) -> None:
        found = {
            "base_offset": base,
            "next_offset": end,
            "log_bytes": size,
            "max_timestamp": highest,
            "gap_bytes_max": gap,
            # Of what was deleted, index and batches may tell differently.
            "epochs": _from(self._start.log_start, self._epochs.within(base, end)),
        }
        for name, value in found.items():
            said = getattr(summary, name)
            if name == "epochs":
                said = _from(self._start.log_start, said)
            if said != value:
                self._verified.wrong(path, f"says {name} {said}, the batches say {value}")
        self._check_producers(path, summary)

    def _check_producers(self, path: str, summary: Summary) -> None:
        try:
            told = Producers.decode(summary.producers)
        except msgspec.MsgspecError as error:
            self._verified.wrong(path, f"producers: {error}")
            return
        known = self._producers
        if known is not None and not self._compacted and told.encode() != known.encode():
            self._verified.wrong(path, "says of the producers what the batches do not say")
        self._producers = told

    def _strangers(self, listed: list[str], bases: list[int]) -> None:
        sealed = set(bases[:-1])
        still = self._files.listdir(self._folder) if self._in_use else listed
        for name in listed:
            path = f"{self._folder}/{name}"
            if name not in still or name in (START_FILE, CLEAN_FILE) or SEGMENT_NAME.match(name) or parse_name(name):
                continue
            index = _INDEX_NAME.match(name)
            if index is not None:
                if int(index[1]) not in sealed and not self._in_use:
                    self._verified.wrong(path, "an index without a full segment")
            elif name == MARKER:
                self._verified.wrong(path, "damage was found here, and the cluster does not know of it yet")
            elif ".corrupt-" in name:
                self._verified.wrong(path, "was found damaged and put aside")
            elif name.endswith((".tmp", CLEANED, SALVAGE)) or ".swap." in name:
                if not self._in_use:
                    self._verified.wrong(path, "left behind by a crash")
            else:
                self._verified.wrong(path, "not a file of zmqueue")

    def _read(self, count: int) -> None:
        self._verified.bytes += count
        self._told_bytes += count
        if self._told_bytes >= _TOLD_EVERY_BYTES:
            self._told_bytes = 0
            self._told(self._verified)


def _from(offset: int, epochs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the records from `offset` on."""
    at = max(0, bisect_right(epochs, offset, key=lambda entry: entry[1]) - 1)
    return [(epoch, max(first, offset)) for epoch, first in epochs[at:]]


class _Entries:
    """The entries of an index, passed in step with the batches."""

    def __init__(self, index: GrowingIndex, base: int) -> None:
        self.index = index
        self._base = base
        self._at = 0
        self._wrong: list[int] = []

    def pass_boundary(self, position: int, offset: int, highest: int) -> None:
        index, at = self.index, self._at
        positions = index.positions
        while at < len(positions) and positions[at] < position:
            self._wrong.append(positions[at])
            at += 1
        if at < len(positions) and positions[at] == position:
            if (index.offsets[at] + self._base, index.timestamps[at]) != (offset, highest):
                self._wrong.append(position)
            at += 1
        self._at = at

    def wrong(self) -> Iterator[int]:
        yield from self._wrong
        yield from self.index.positions[self._at :]


# -- the rest of a broker's folder -------------------------------------------------------------------------------


def verify_broker(files: Files, folder: str, verified: Verified) -> None:
    """Its small files, its Raft folder, and what lies between its partitions. Not the partitions themselves."""
    in_use = lock_holder(f"{folder}/{LOCK_FILE}") is not None
    for name in ("meta", "session"):
        data = files.read_small(f"{folder}/{name}")
        if data is not None:
            try:
                check_small_file(data, f"{folder}/{name}")
            except (CorruptLog, FutureFormat) as error:
                verified.wrong(f"{folder}/{name}", str(error))
    for raft in (f"{folder}/raft", f"{folder}/raft/learner"):
        if files.exists(f"{raft}/{JOURNAL_FILE}"):
            _verify_raft(files, raft, in_use, verified)
    for name in files.listdir(f"{folder}/{PARTITIONS}"):
        if PARTITION_NAME.match(name) is None and not (in_use and not files.exists(f"{folder}/{PARTITIONS}/{name}")):
            verified.wrong(f"{folder}/{PARTITIONS}/{name}", "not the folder of a partition, or one half deleted")
    for name in files.listdir(folder):
        if ".corrupt-" in name:
            verified.wrong(f"{folder}/{name}", "was found damaged and put aside")


def _verify_raft(files: Files, folder: str, in_use: bool, verified: Verified) -> None:
    try:
        _, tail_bytes = read_entries(Path(folder))
        if tail_bytes and not in_use:
            verified.wrong(f"{folder}/{JOURNAL_FILE}", f"a tail of {tail_bytes} bytes is no entry")
    except (CorruptLog, FutureFormat) as error:
        verified.wrong(f"{folder}/{JOURNAL_FILE}", str(error))
    for name in _RAFT_FILES:
        data = files.read_small(f"{folder}/{name}")
        if data is not None:
            try:
                check_file(data, f"{folder}/{name}")
            except (CorruptLog, FutureFormat) as error:
                verified.wrong(f"{folder}/{name}", str(error))
