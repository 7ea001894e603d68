"""Building and merging files of a secondary index, beside the log and not in its way.

A job reads either batches of the log that no longer change (those below the high watermark) or index files that are to
become one. It writes a single new file under a temporary name; the log's owner gives it its name, if the log is still
what it was when the job was planned. So a job may be late, repeated or cut off anywhere, in this process or another.

`build` works in steps of a few milliseconds, and yields after each how many bytes it was about. Entries are sorted in
blocks, and blocks (or files) are merged by ranges of the hash: what lies in one range is taken from all of them and
sorted, which costs little because each part is sorted already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator

from msgspec import Struct

from zmqueue.errors import CorruptBatch, CorruptIndex
from zmqueue.log import keys
from zmqueue.log.files import Files
from zmqueue.log.keys import KeysFile, KeysWriter, Summary
from zmqueue.log.segment import segment_name
from zmqueue.model import MiB
from zmqueue.wire.batch import CONTROL, HEADER_BYTES, BatchHeader, check_body, decode, parse_header
from zmqueue.wire.fields import Field

# A block of entries is sorted in about 5 ms, and so many entries are at most in memory (about 80 bytes each).
BLOCK_ENTRIES = 8_192
JOB_ENTRIES_MAX = 1 << 19
_READ_BYTES = 1 * MiB


class IndexJob(Struct, frozen=True, tag="index"):
    """Cover offsets from `from_offset` on, at most to `end_offset`.

    From batches: `segments` has base offset and two positions, between which everything is read; the first batch holds
    `from_offset`, and the last may reach beyond `end_offset`. From index files: `segments` is empty, and `replaces` has
    their names in order. In both cases `replaces` is what the new file stands for.
    """

    folder: str
    volatile: bool  # it lies in the memory of its broker
    kind: str
    path: str
    from_offset: int
    end_offset: int
    generation: int
    segments: list[tuple[int, int, int]]
    replaces: list[str]

    @property
    def target(self) -> str:
        return f"{self.folder}/{self.from_offset:020d}-{self.end_offset:020d}{keys.TEMPORARY}"


class IndexResult(Struct, frozen=True, tag="index"):
    """The file at the job's target covers up to `end_offset`, which is `from_offset` if there is no file."""

    end_offset: int
    entries: int


Building = Generator[int, None, IndexResult]


def build(job: IndexJob, files: Files) -> Building:
    """Raises CorruptBatch or CorruptIndex where what it reads is not what the job says, StorageFull, StorageFailed."""
    sources: list[Iterator[list[bytes]]]
    if job.segments:
        blocks = _Blocks()
        end_offset = yield from _read(job, files, blocks)
        sources = [iter([block]) for block in blocks.closed()]
        count = blocks.entries
    else:
        runs = [keys.load(files, job.folder, name) for name in job.replaces]
        sources = [run.listed() for run in runs]
        count = sum(run.entries for run in runs)
        end_offset = job.end_offset
        _check_chain(job, runs)
    if end_offset == job.from_offset:
        return IndexResult(end_offset, 0)
    writer = KeysWriter(job.from_offset)
    for part in merged(sources, count):
        writer.add(part)
        yield len(part) * keys.ENTRY_BYTES
    data = writer.finish(Summary(job.from_offset, end_offset, job.kind, job.path))
    files.put(job.target, data)
    return IndexResult(end_offset, writer.entries)


def _check_chain(job: IndexJob, runs: list[KeysFile]) -> None:
    at = job.from_offset
    for run in runs:
        if run.from_offset != at or run.summary.definition != (job.kind, job.path):
            raise CorruptIndex(f"{run.path}: does not continue what ends at {at}")
        at = run.end_offset
    if at != job.end_offset:
        raise CorruptIndex(f"{job.folder}: index files end at {at}, not at {job.end_offset}")


class _Blocks:
    """Entries as they come, in sorted blocks."""

    def __init__(self) -> None:
        self.entries = 0
        self._blocks: list[list[bytes]] = []
        self._open: list[bytes] = []

    def add(self, entries: Iterable[bytes]) -> None:
        before = len(self._open)
        self._open.extend(entries)
        self.entries += len(self._open) - before
        if len(self._open) >= BLOCK_ENTRIES:
            self._close()

    def _close(self) -> None:
        self._open.sort()
        self._blocks.append(self._open)
        self._open = []

    def closed(self) -> list[list[bytes]]:
        if self._open:
            self._close()
        return self._blocks


def _read(job: IndexJob, files: Files, blocks: _Blocks) -> Generator[int, None, int]:
    """Index batches until the job's end, or until there are entries enough. Where that was."""
    field = Field(job.kind, job.path)
    at = -1
    for base, position, stop in job.segments:
        path = f"{job.folder}/{segment_name(base)}"
        for header, body in _batches(files, path, position, stop):
            first = at < 0 and header.base_offset <= job.from_offset < header.next_offset
            if header.base_offset != at and not first:
                raise CorruptBatch(f"{path}: offset {header.base_offset}, not {max(at, job.from_offset)}")
            whole = header.base_offset >= job.from_offset and header.next_offset <= job.end_offset
            entries = entries_of(field, header, body)
            blocks.add(entries if whole else [e for e in entries if _inside(e, job)])
            at = header.next_offset
            yield header.total_bytes
            if blocks.entries >= JOB_ENTRIES_MAX:
                return min(at, job.end_offset)
    return min(at, job.end_offset) if at >= 0 else job.from_offset


def _inside(entry: bytes, job: IndexJob) -> bool:
    return job.from_offset <= int.from_bytes(entry[keys.HASH_BYTES :], "big") < job.end_offset


def _batches(files: Files, path: str, position: int, size: int) -> Iterator[tuple[BatchHeader, bytes]]:
    """Whole batches between two boundaries, each proved."""
    data, start = b"", position
    while position < size:
        at = position - start
        if at + HEADER_BYTES > len(data):
            data, start, at = files.pread(path, min(_READ_BYTES, size - position), position), position, 0
        header = parse_header(data, at)
        if at + header.total_bytes > len(data):
            data, start, at = files.pread(path, max(_READ_BYTES, header.total_bytes), position), position, 0
        body = data[at + HEADER_BYTES : at + header.total_bytes]
        check_body(header, body)
        yield header, body
        position += header.total_bytes


def entries_of(field: Field, header: BatchHeader, body: bytes) -> list[bytes]:
    """The entries of one batch. A batch that its producer closed wrongly has no records for anybody."""
    if header.attributes & CONTROL:
        return []
    try:
        columns = decode(header, body)
    except CorruptBatch:
        return []
    base, deltas, entry_of = header.base_offset, columns.offset_deltas, keys.entry_of
    if deltas is None:
        return [entry_of(value, base + nth) for nth, value in field.each(columns)]
    return [entry_of(value, base + deltas[nth]) for nth, value in field.each(columns)]


class _Cursor:
    """Sorted lists, one behind the other, taken from the front."""

    def __init__(self, lists: Iterator[list[bytes]]) -> None:
        self._lists = lists
        self._list: list[bytes] = []
        self._at = 0

    def take(self, below: bytes | None) -> list[bytes]:
        found: list[bytes] = []
        while True:
            end = len(self._list) if below is None else bisect_left(self._list, below, self._at)
            found += self._list[self._at : end]
            self._at = end
            if end < len(self._list):
                return found
            following = next(self._lists, None)
            if following is None:
                self._list, self._at = [], 0
                return found
            self._list, self._at = following, 0


def merged(sources: list[Iterator[list[bytes]]], count: int) -> Iterator[list[bytes]]:
    """The entries of sorted sources, sorted, in parts of about BLOCK_ENTRIES: hashes are spread evenly."""
    cursors = [_Cursor(source) for source in sources]
    parts = -(-count // BLOCK_ENTRIES)
    for nth in range(1, parts + 1):
        below = None if nth == parts else ((nth << 64) // parts).to_bytes(keys.HASH_BYTES, "big")
        part: list[bytes] = []
        for cursor in cursors:
            part += cursor.take(below)
        part.sort()
        yield part
