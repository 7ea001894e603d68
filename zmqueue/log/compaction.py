"""Compaction by key: of the records with one key only the latest is kept. A job on sealed segments (see jobs.py).

It goes twice over them. First it notes the last offset of each key in the part that is not compacted yet, as far as its
memory allows; `clean_end` is how far that was. Then it copies every batch below that point, from the first segment on,
without the records of which it knows a later one, into new files beside the old. `swap.py` puts them in place.

Invariants
- Offsets, leader epochs and sequences stay. A batch that lost records says which are left; of one that lost all, the
  offsets must still be covered, so that the log stays contiguous: it stays as an empty batch if it is the last of its
  producer, whose state is made from the log (rule E1), and else is merged with its neighbours of one leader epoch.
- A new segment covers exactly one or more whole old ones. Each can be put in place without the others: a record goes
  only for a later one that stays, or as a tombstone whose key has nothing older left in the log.
- Kept as they are: records without a key, control batches, and batches whose body does not open (undamaged, so their
  producer closed them wrongly).
- Tombstones (no value) go like others when replaced, and otherwise when they have stood for long enough, which is what
  `tombstones_end` says (see clean_point.py).

Job functions are generators: they yield how many bytes they have read and written since the last time, so that whoever
drives them sets the pace, and return their result.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from hashlib import blake2b
from itertools import compress
from operator import le
from typing import cast

import msgspec
from msgspec import Struct

from zmqueue.core.epochs import Epochs
from zmqueue.core.producers import Producers
from zmqueue.errors import CorruptBatch, CorruptIndex, CorruptLog, JobFailed
from zmqueue.log.files import Files
from zmqueue.log.index import SPAN_MAX, load
from zmqueue.log.recovery import Fault, proved
from zmqueue.log.segment import Segment
from zmqueue.log.start import load_start
from zmqueue.log.swap import CLEANED, Output, discard
from zmqueue.model import MiB
from zmqueue.wire.batch import (
    CONTROL,
    HEADER_BYTES,
    Batch,
    BatchHeader,
    Columns,
    decode,
    emptied,
    thinned,
    void,
)

# What a key costs in the map: its name, its offset and its place in the table, which is up to half empty.
KEY_BYTES = 256
# A key that is not shorter is known by its hash of this length, so a name of one kind is never one of the other.
_NAME_BYTES = 32
# Often, as what one process has left for the disk to write is what another one's sync waits for.
_SYNC_BYTES = 4 * MiB

_logger = logging.getLogger(__name__)

Steps = Generator[int, None, "Compacted"]


class SegmentRef(Struct, frozen=True, array_like=True):
    """A sealed segment, as it was when the job was planned."""

    base_offset: int
    next_offset: int
    log_bytes: int


class CompactionJob(Struct, frozen=True, tag="compact"):
    """`segments`: all that may be compacted, from the first of the log on. Below `dirty_from` that is done already."""

    folder: str
    volatile: bool
    generation: int
    segments: list[SegmentRef]
    dirty_from: int
    horizon_ends: list[int]
    tombstones_end: int
    segment_bytes_max: int
    index_interval_bytes: int
    map_bytes: int


class Compacted(Struct, frozen=True, tag="compacted"):
    """`tombstones` are those kept, by horizon of the job and behind the last. Segments that stay have no output."""

    clean_end: int
    outputs: list[Output]
    tombstones: list[int]


def compact(job: CompactionJob, files: Files) -> Steps:
    """Raises CorruptLog, StorageFull, StorageFailed; what it has written by then is for `swap.discard`."""
    discard(files, job.folder)
    latest, clean_end = yield from _latest_offsets(job, files)
    segments = [ref for ref in job.segments if ref.base_offset < clean_end]
    last_batches = Producers.decode((yield from _producers_at_end(job, files, segments))).last_batches()
    thinner = _Thinner(job, latest, clean_end, last_batches)
    outputs = _Outputs(job, files)
    try:
        for ref in segments:
            thinner.changed = False
            outputs.begin(ref)
            for batch in read_batches(files, job, ref):
                yield batch.header.total_bytes + outputs.add(thinner.take(batch))
            outputs.add(thinner.flush())
            outputs.end(ref, thinner.changed)
        return Compacted(clean_end, outputs.finished(), thinner.tombstones)
    finally:
        outputs.close()


def read_batches(files: Files, job: CompactionJob, ref: SegmentRef) -> Iterator[Batch]:
    """All batches of a segment, proved. Raises CorruptLog."""
    path = _segment(files, job, ref).path
    offset = ref.base_offset
    try:
        for position, header, body in proved(files, path, ref.log_bytes):
            if header.base_offset != offset:
                raise CorruptLog(f"{path}: at {position} lies offset {header.base_offset}, not {offset}")
            yield Batch(header, body)
            offset = header.next_offset
    except Fault as fault:
        raise CorruptLog(f"{path}: damaged at {fault.position}: {fault.reason}") from fault
    if offset != ref.next_offset:
        raise CorruptLog(f"{path}: ends with offset {offset}, not {ref.next_offset}")


def _segment(files: Files, job: CompactionJob, ref: SegmentRef) -> Segment:
    segment = Segment(files, job.folder, ref.base_offset, job.index_interval_bytes)
    segment.size, segment.next_offset = ref.log_bytes, ref.next_offset
    return segment


# -- what is known before the copying begins ---------------------------------------------------------------------


def _names(keys: list[bytes | None]) -> list[bytes | None]:
    """What stands for these keys in the map; nothing does for none."""
    if None not in keys and max(map(len, cast(list[bytes], keys))) < _NAME_BYTES:
        return keys
    return [key if key is None or len(key) < _NAME_BYTES else _hash(key) for key in keys]


def _hash(key: bytes) -> bytes:
    return blake2b(key, digest_size=_NAME_BYTES).digest()


def _offsets(batch: Batch, columns: Columns) -> Sequence[int]:
    base = batch.header.base_offset
    if columns.offset_deltas is None:
        return range(base, base + batch.header.record_count)
    return [base + delta for delta in columns.offset_deltas]


def _opened(batch: Batch) -> Columns | None:
    """The columns of a batch in which records may be replaced."""
    header = batch.header
    if not header.record_count or header.attributes & CONTROL:
        return None
    try:
        columns = decode(header, batch.body)
    except CorruptBatch as error:
        _logger.warning("the batch at offset %d stays as it is: %s", header.base_offset, error)
        return None
    return columns if columns.keys is not None else None


def _latest_offsets(job: CompactionJob, files: Files) -> Generator[int, None, tuple[dict[bytes | None, int], int]]:
    """By name of key, its last offset from `dirty_from` on; and up to where there was room for them."""
    latest: dict[bytes | None, int] = {}
    room = max(1, job.map_bytes // KEY_BYTES)
    end = job.dirty_from
    for ref in job.segments:
        if ref.next_offset <= job.dirty_from:
            continue
        for batch in read_batches(files, job, ref):
            header = batch.header
            if header.next_offset <= job.dirty_from:
                continue
            columns = _opened(batch)
            if columns is not None:
                if latest and len(latest) + header.record_count > room:
                    latest.pop(None, None)
                    return latest, end
                assert columns.keys is not None
                # Of several offsets for one name the last stays, as it should.
                latest.update(zip(_names(columns.keys), _offsets(batch, columns), strict=True))
            end = header.next_offset
            yield header.total_bytes
    latest.pop(None, None)
    return latest, end


def _producers_at_end(job: CompactionJob, files: Files, segments: list[SegmentRef]) -> Generator[int, None, bytes]:
    """The state of the producers behind the last of these segments, from their index files as far as there are any."""
    known, at = None, len(segments)
    while at and known is None:
        at -= 1
        known = _producers_told(job, files, segments[at])
    if known is not None:
        at += 1
    producers = Producers.decode(_producers_before(job, files) if known is None else known)
    for ref in segments[at:]:
        for _, header in _segment(files, job, ref).walk(0):
            producers.note(header)
            yield HEADER_BYTES
    return producers.encode()


def _producers_before(job: CompactionJob, files: Files) -> bytes:
    """Their state before the first segment. Raises JobFailed if that was deleted since the job was planned."""
    start = load_start(files, job.folder)
    if job.segments and start.base > job.segments[0].base_offset:
        raise JobFailed(f"records below {start.log_start} were deleted meanwhile")
    return start.producers


def _producers_told(job: CompactionJob, files: Files, ref: SegmentRef) -> bytes | None:
    path = _segment(files, job, ref).index_path
    if files.volatile or not files.exists(path):
        return None
    try:
        summary = load(files, path, ref.base_offset)[1]
        Producers.decode(summary.producers)
    except (CorruptIndex, msgspec.MsgspecError):
        return None
    fits = (summary.log_bytes, summary.next_offset) == (ref.log_bytes, ref.next_offset)
    return summary.producers if fits else None


# -- what is left of a batch -------------------------------------------------------------------------------------


class _Thinner:
    """Batches in, in order; out come those to write. `changed`: they are not the same."""

    def __init__(
        self, job: CompactionJob, latest: dict[bytes | None, int], clean_end: int, last_batches: dict[int, int]
    ) -> None:
        self._latest = latest
        self._clean_end = clean_end
        self._last_batches = last_batches
        self._tombstones_end = job.tombstones_end
        self._horizon_ends = job.horizon_ends
        self.tombstones = [0] * (len(job.horizon_ends) + 1)
        self.changed = False
        self._void: Batch | None = None  # offsets without records, to which more may be added

    def take(self, batch: Batch) -> list[Batch]:
        left = self._left(batch)
        if left is None:
            header = batch.header
            if self._last_batches.get(header.producer_id) != header.base_offset:
                return self._voided(batch)
            left = emptied(header)
        self.changed = self.changed or left != batch
        return [*self.flush(), left]

    def flush(self) -> list[Batch]:
        done, self._void = self._void, None
        return [] if done is None else [done]

    def _voided(self, batch: Batch) -> list[Batch]:
        """Only the offsets of this batch have to stay."""
        header = batch.header
        if self._void is not None and self._void.header.leader_epoch == header.leader_epoch:
            before, body = self._void
            merged = msgspec.structs.replace(
                before,
                last_offset_delta=header.next_offset - 1 - before.base_offset,
                base_timestamp=min(before.base_timestamp, header.base_timestamp),
                max_timestamp=max(before.max_timestamp, header.max_timestamp),
            )
            self._void, self.changed = Batch(merged, body), True
            return []
        done = self.flush()
        self._void = void(header)
        self.changed = self.changed or self._void != batch
        return done

    def _left(self, batch: Batch) -> Batch | None:
        """The batch without what goes, the same if nothing does; None if nothing stays."""
        columns = _opened(batch)
        if columns is None:
            return batch if batch.header.record_count else None
        keep = self._kept(batch, columns)
        if len(keep) == batch.header.record_count:
            return batch
        return thinned(batch.header, columns, keep) if keep else None

    def _kept(self, batch: Batch, columns: Columns) -> list[int]:
        assert columns.keys is not None
        offsets = _offsets(batch, columns)
        # Without a loop in Python, as this is done for every record: the last offset of a name that is not known is
        # the one asked about.
        last = map(self._latest.get, _names(columns.keys), offsets)
        keep = list(compress(range(len(offsets)), map(le, last, offsets)))
        if None not in columns.values:
            return keep
        keys, values = columns.keys, columns.values
        return [at for at in keep if keys[at] is None or values[at] is not None or self._stays(offsets[at])]

    def _stays(self, offset: int) -> bool:
        """Of a tombstone that is the latest record of its key."""
        if offset < self._tombstones_end:
            return False
        if offset < self._clean_end:
            self.tombstones[bisect_right(self._horizon_ends, offset)] += 1
        return True


# -- the new segments --------------------------------------------------------------------------------------------


class _Outputs:
    """Writes new segments, each instead of as many old ones as fit."""

    def __init__(self, job: CompactionJob, files: Files) -> None:
        self._job = job
        self._files = files
        self._outputs: list[Output] = []
        # The segment being written, and what goes into its index.
        self._segment: Segment | None = None
        self._epochs = Epochs()
        self._synced = 0
        # The old ones that it holds whole, whether any of them has changed, and the producers behind them.
        self._whole: list[SegmentRef] = []
        self._changed = False
        self._producers = _producers_before(job, files)
        # Where the present old one begins in it.
        self._mark = 0

    def begin(self, ref: SegmentRef) -> None:
        segment = self._segment
        if segment is not None:
            limit = self._job.segment_bytes_max
            # One that is half full is not worth the copying that a wrong guess costs (see _divide).
            full = segment.size + ref.log_bytes > limit and segment.size > limit // 2
            if full or ref.next_offset - segment.base_offset > SPAN_MAX:
                self._finish()
        if self._segment is None:
            self._segment = self._created(ref.base_offset)
        self._mark = self._segment.size

    def add(self, batches: list[Batch]) -> int:
        """The bytes written."""
        written = 0
        for header, body in batches:
            assert self._segment is not None
            if self._mark and self._segment.size + header.total_bytes > self._job.segment_bytes_max:
                self._divide()
            self._append(header, header.pack() + body)
            written += header.total_bytes
        return written

    def end(self, ref: SegmentRef, changed: bool) -> None:
        self._producers = self._producers_after(ref)
        self._whole.append(ref)
        self._changed = self._changed or changed

    def finished(self) -> list[Output]:
        if self._segment is not None:
            self._finish()
        return self._outputs

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def _created(self, base_offset: int) -> Segment:
        segment = Segment(self._files, self._job.folder, base_offset, self._job.index_interval_bytes, CLEANED)
        segment.create()
        self._epochs = Epochs()
        self._synced = 0
        return segment

    def _append(self, header: BatchHeader, data: bytes) -> None:
        segment = self._segment
        assert segment is not None
        file = segment.opened()
        file.append([data], len(data))
        self._epochs.note(header.leader_epoch, header.base_offset)
        segment.note(header)
        if segment.size - self._synced >= _SYNC_BYTES:
            file.sync()
            self._synced = segment.size

    def _divide(self) -> None:
        """The present old one does not fit in with those before: it moves into a segment of its own."""
        full, position = self._segment, self._mark
        assert full is not None
        offset = self._whole[-1].next_offset
        epochs = self._epochs
        self._segment = self._created(offset)
        for at, header in full.walk(position):
            self._append(header, full.pread(header.total_bytes, at))
        fresh, moved, synced = self._segment, self._epochs, self._synced
        full.truncate(position, offset)
        epochs.truncate(offset)
        self._segment, self._epochs = full, epochs
        self._finish()
        self._segment, self._epochs, self._synced = fresh, moved, synced
        self._mark = 0

    def _finish(self) -> None:
        segment = self._segment
        assert segment is not None
        if len(self._whole) == 1 and not self._changed:
            segment.remove()
        else:
            segment.opened().sync()
            self._files.put(segment.index_path, segment.index_file(self._epochs.entries, self._producers))
            segment.close()
            replaced = sum(ref.log_bytes for ref in self._whole)
            self._outputs.append(Output(segment.base_offset, segment.next_offset, segment.size, replaced))
        self._segment, self._whole, self._changed = None, [], False

    def _producers_after(self, ref: SegmentRef) -> bytes:
        """As they were before the compaction, which is more than the batches that are left can tell."""
        if self._files.volatile:
            return b""  # an index that is never loaded
        told = _producers_told(self._job, self._files, ref)
        if told is not None:
            return told
        producers = Producers.decode(self._producers)
        for _, header in _segment(self._files, self._job, ref).walk(0):
            producers.note(header)
        return producers.encode()
