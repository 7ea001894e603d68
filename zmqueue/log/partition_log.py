"""The log of one partition: a list of segments, of which the last is appended to.

Offsets are exclusive ends: records are in [log_start, log_end).

Invariants
- log_start <= durable_end <= log_end.
- durable_end never passes what was synced, as far as the fsync mode promises: with `always` it follows the flusher's
  tickets; with `interval` and `os`, and in memory, tickets come back at once and it follows the writes.
- A call either changes the log as it says or, when the disk is full, leaves it as it was; StorageFailed alone leaves it
  unusable, and the broker ends.
- A crash at any point leaves a log that `recover` opens without finding corruption, with everything below durable_end.
  For this segments vanish from the last to the first, each synced into the folder before the next; and with `always` a
  segment and its name are synced before its successor exists, as otherwise the successor could survive a power cut
  that its predecessor did not, which looks like corruption.
- `generation` counts truncations. A flush that began in another generation says nothing about the bytes of this one,
  whose offsets may be the same (rule D4).

All methods belong to the loop's thread. The flush thread sees FlushTickets only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path

from zmqueue.config import LogConfig
from zmqueue.core.epochs import Epochs
from zmqueue.core.producers import Producers
from zmqueue.errors import CorruptBatch, CorruptIndex, CorruptLog, OffsetOutOfRange, StorageFull, ZmqueueError
from zmqueue.log.clean_point import CleanPoint, drop_clean_point, load_clean_point, save_clean_point
from zmqueue.log.files import Buffer, Files, OpenFile
from zmqueue.log.index import SPAN_MAX, load
from zmqueue.log.recovery import MARKER, Recovered, Recovery, recover
from zmqueue.log.segment import Segment
from zmqueue.log.start import load_start
from zmqueue.log.swap import Output, discard, put_in_place
from zmqueue.wire.batch import HEADER_BYTES, Batch, BatchHeader, check_body, decode

DELETED = ".deleted"
# Where sequential readers stopped; a reader that is not found here costs a walk over a few headers.
_HINTS_MAX = 64


class FlushTicket:
    """What must be synced before offsets below `end` are durable. The files are pinned until it comes back."""

    __slots__ = ("_io", "end", "error", "files", "folders", "folders_version", "generation", "synced")

    def __init__(
        self,
        io: Files,
        generation: int,
        end: int,
        files: list[OpenFile],
        folders: tuple[str, ...],
        folders_version: int,
    ) -> None:
        self._io = io
        self.generation = generation
        self.end = end
        self.files = files
        self.folders = folders
        self.folders_version = folders_version
        self.synced = False
        self.error: ZmqueueError | None = None
        for file in files:
            file.pin()

    @property
    def empty(self) -> bool:
        """Nothing to sync: complete as it is."""
        return not self.files and not self.folders

    def sync(self) -> None:
        """On the flush thread. Raises StorageFailed."""
        for file in self.files:
            file.sync()
        for folder in self.folders:
            self._io.fsync_dir(folder)
        self.synced = True

    def release(self) -> None:
        """On the loop's thread: nobody will sync these files by this ticket any more."""
        files, self.files = self.files, []
        for file in files:
            file.unpin()


class PartitionLog:
    def __init__(self, files: Files, folder: str, config: LogConfig, recovered: Recovered) -> None:
        self.folder = folder
        self.recovery: Recovery = recovered.recovery
        self._files = files
        self._config = config
        self._segment_bytes_max = min(config.segment_bytes_max, SPAN_MAX)
        self._segments: list[Segment] = recovered.segments
        self._bases = [segment.base_offset for segment in self._segments]
        self._epochs: Epochs = recovered.history.epochs
        self._producers: Producers = recovered.history.producers
        self._hints: dict[int, tuple[Segment, int]] = {}
        # Somebody will sync; otherwise files need not stay open for it.
        self._synced_later = not files.volatile and config.fsync != "os"
        self.log_start = recovered.log_start
        self.log_end = self.durable_end = self._segments[-1].next_offset
        self.generation = 0
        # Really synced, whatever the fsync mode calls durable.
        self._synced_end = self.log_end
        # Folder entries: how often they changed, and up to which change they are synced.
        self._folders_version = 1 if self.recovery.created and not files.volatile else 0
        self._folders_synced = 0
        self.clean_point: CleanPoint = load_clean_point(files, folder)
        self._forget_clean(self.log_end)

    @classmethod
    def open(cls, files: Files, folder: str | Path, config: LogConfig, trusted: bool = True) -> PartitionLog:
        """Creates or recovers; `recovery` says what happened. Raises FutureFormat, StorageFailed, StorageFull."""
        return cls(files, str(folder), config, recover(files, str(folder), config, trusted))

    # -- what there is

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """Each leader epoch in the log with its first offset."""
        return self._epochs.entries

    @property
    def last_epoch(self) -> int:
        """The epoch of the last batch, -1 if there is none."""
        return self._epochs.last

    @property
    def producers(self) -> Producers:
        """What each producer last wrote, including what retention has removed since."""
        return self._producers

    # -- append

    def append(self, batches: list[Batch]) -> None:
        """Batches with offset and epoch assigned, contiguous from log_end. StorageFull: none of them is in the log."""
        segment = self._segments[-1]
        before = end = self.log_end
        epoch = max(self._epochs.last, 0)
        headers: list[BatchHeader] = []
        buffers: list[Buffer] = []
        size = segment.size
        try:
            for header, body in batches:
                assert header.base_offset == end, f"{self.folder}: batch at {header.base_offset}, log ends at {end}"
                assert header.leader_epoch >= epoch, f"{self.folder}: epoch {header.leader_epoch} follows {epoch}"
                assert header.body_length == len(body)
                length = HEADER_BYTES + header.body_length
                following = end + header.last_offset_delta + 1
                if size and (size + length > self._segment_bytes_max or following - segment.base_offset > SPAN_MAX):
                    self._write(segment, headers, buffers, size)
                    segment = self._roll(end)
                    headers, buffers, size = [], [], 0
                headers.append(header)
                buffers.append(header.pack())
                buffers.append(body)
                size += length
                end, epoch = following, header.leader_epoch
            self._write(segment, headers, buffers, size)
        except StorageFull:
            # Whole batches may have reached the file before it was cut back; synced, they cannot come back in a crash.
            self._cut(before)
            raise

    def _write(self, segment: Segment, headers: list[BatchHeader], buffers: list[Buffer], size: int) -> None:
        if not headers:
            return
        file = segment.file or segment.opened()
        file.append(buffers, size - segment.size)
        epochs, producers = self._epochs, self._producers
        for header in headers:
            epochs.note(header.leader_epoch, header.base_offset)
            producers.note(header)
            segment.note(header)
        self.log_end = segment.next_offset

    def _roll(self, base_offset: int) -> Segment:
        full = self._segments[-1]
        if self._config.fsync == "always" and not self._files.volatile:
            self._sync()
        if not self._synced_later or self._synced_end == self.log_end:
            full.close()
        full.seal(self._epochs.within(full.base_offset, full.next_offset), self._producers.encode())
        segment = Segment(self._files, self.folder, base_offset, self._config.index_interval_bytes)
        segment.create()
        self._segments.append(segment)
        self._bases.append(base_offset)
        self._folders_version += 1
        return segment

    # -- read

    def read(self, offset: int, bytes_max: int, end_offset: int, records_max: int = 0) -> bytes:
        """Whole, proved batches of one segment; the first holds `offset`, none reaches beyond `end_offset`.

        At least one batch if there is any, even when it is larger than `bytes_max`; no further one is begun once
        `records_max` records (0: any number) are reached. Raises OffsetOutOfRange, CorruptLog.
        """
        if not self.log_start <= offset <= self.log_end:
            raise OffsetOutOfRange(f"offset {offset} is not in {self.log_start}..{self.log_end}")
        end_offset = min(end_offset, self.log_end)
        if offset >= end_offset:
            return b""
        segment = self._segment_of(offset)
        hint = self._hints.get(offset)
        # The end of a segment that was full when the next batch came is not where that batch lies.
        position = hint[1] if hint is not None and hint[0] is segment else segment.locate(offset)[0]
        data, position, following = segment.read(position, offset, bytes_max, end_offset, records_max)
        if len(self._hints) >= _HINTS_MAX:
            del self._hints[next(iter(self._hints))]
        self._hints[following] = segment, position
        return data

    def _segment_of(self, offset: int) -> Segment:
        if offset >= self._bases[-1]:
            return self._segments[-1]
        return self._segments[bisect_right(self._bases, offset) - 1]

    def headers(self, from_offset: int = 0) -> Iterator[BatchHeader]:
        """Headers from the batch that holds `from_offset` on. Appends may go on meanwhile, truncations may not."""
        generation = self.generation
        if from_offset >= self.log_end:
            return
        from_offset = max(from_offset, self.log_start)
        for segment in self._segments[bisect_right(self._bases, from_offset) - 1 :]:
            position = segment.locate(from_offset)[0] if from_offset > segment.base_offset else 0
            for _, header in segment.walk(position):
                yield header
                assert generation == self.generation, f"{self.folder}: truncated while its headers were read"

    def offset_for_time(self, timestamp: int, end_offset: int) -> tuple[int, int] | None:
        """Offset and timestamp of the first record below `end_offset` that is not older than `timestamp`."""
        for segment in self._segments:
            if segment.base_offset >= end_offset:
                return None
            if segment.max_timestamp < timestamp:
                continue
            for position, header in segment.walk(segment.index.position_before_time(timestamp)):
                if header.base_offset >= end_offset:
                    return None
                if header.max_timestamp < timestamp:
                    continue
                body = segment.pread(header.body_length, position + HEADER_BYTES)
                found = _first_at(segment, position, header, body, timestamp)
                if found is not None:
                    return found if found[0] < end_offset else None
        return None

    # -- truncate

    def truncate(self, end: int) -> None:
        """Drop every batch that holds or follows `end`. Durable on return, and so is all that is left."""
        if end < self.log_start:
            self.reset(end)
            return
        self.generation += 1
        self._forget_clean(end)
        self._cut(min(end, self.log_end))

    def reset(self, start: int) -> None:
        """Drop everything and begin empty at `start`. A crash in between leaves less, or nothing, from offset 0."""
        self.generation += 1
        self._forget_clean(0)
        self._hints.clear()
        while self._segments:
            self._drop_last()
        segment = Segment(self._files, self.folder, start, self._config.index_interval_bytes)
        segment.create()
        self._files.fsync_dir(self.folder)
        self._segments, self._bases = [segment], [start]
        self._epochs, self._producers = Epochs(), Producers()
        self.log_start = self.log_end = self.durable_end = self._synced_end = start

    def _cut(self, end: int) -> None:
        self._hints.clear()
        while self._bases[-1] > end:
            self._drop_last()
        segment = self._segments[-1]
        before = self.log_end
        segment.truncate(*segment.locate(end))
        self.log_end = segment.next_offset
        self._epochs.truncate(self.log_end)
        if before != self.log_end:
            self._producers = self._producers_read()
        self._synced_end = min(self._synced_end, self.log_end)
        if not self._synced_later or self._synced_end == self.log_end:
            segment.opened().sync()  # the cut itself; otherwise it goes with the bytes before it
        if self._synced_later:
            self._sync()
        self.durable_end = self.log_end

    def _producers_read(self) -> Producers:
        """From the batches of the last segment, on top of what is known of those before."""
        known = load_start(self._files, self.folder).producers
        at = len(self._segments) - 1
        while at and not self._segments[at - 1].is_sealed:
            at -= 1
        if at:
            sealed = self._segments[at - 1]
            try:
                known = load(self._files, sealed.index_path, sealed.base_offset)[1].producers
            except CorruptIndex:
                at = 0
        producers = Producers.decode(known)
        for segment in self._segments[at:]:
            for _, header in segment.walk(0):
                producers.note(header)
        return producers

    def _drop_last(self) -> None:
        self._segments.pop().remove()
        self._bases.pop()
        self._files.fsync_dir(self.folder)

    # -- compaction

    def full_segments(self) -> list[Segment]:
        """In order, those that nothing is appended to and nobody has to sync any more."""
        full = self._segments[:-1]
        return full if not self._synced_later else [one for one in full if one.next_offset <= self._synced_end]

    def swap(self, generation: int, outputs: list[Output]) -> bool:
        """Put new segments in place of those they were made from. False if some of these are no longer what they were.

        Deletions may have come in between, and leave outputs without use; a truncation makes all of them useless.
        CorruptIndex, StorageFull: nothing has changed.
        """
        fitting = [one for one in outputs if generation == self.generation and self._replaced(one) is not None]
        if fitting:
            made = put_in_place(self._files, self.folder, fitting, self._config.index_interval_bytes)
            for output, segment in zip(fitting, made, strict=True):
                place = self._replaced(output)
                assert place is not None
                self._segments[place], self._bases[place] = [segment], [segment.base_offset]
            self._hints.clear()
        discard(self._files, self.folder)
        return generation == self.generation and all(
            one in fitting or one.next_offset <= self._bases[0] for one in outputs
        )

    def _replaced(self, output: Output) -> slice | None:
        """Where the segments are that an output stands for, if they are still as they were."""
        at, end = bisect_left(self._bases, output.base_offset), bisect_left(self._bases, output.next_offset)
        if end == len(self._bases) or (self._bases[at], self._bases[end]) != (output.base_offset, output.next_offset):
            return None
        same = sum(segment.size for segment in self._segments[at:end]) == output.replaced_bytes
        return slice(at, end) if same else None

    def compacted(self, point: CleanPoint) -> None:
        """Durable on return. StorageFull: nothing has changed."""
        save_clean_point(self._files, self.folder, point)
        self.clean_point = point

    def _forget_clean(self, end: int) -> None:
        if end < self.clean_point.end:
            drop_clean_point(self._files, self.folder)
            self.clean_point = CleanPoint()

    # -- flush

    def begin_flush(self) -> FlushTicket:
        """What must be synced now. In every mode the ticket is handed back to `flushed`."""
        files: list[OpenFile] = []
        folders: tuple[str, ...] = ()
        if self._synced_later:
            if self._synced_end < self.log_end:
                files = [segment.opened() for segment in self._unsynced()]
            if self._folders_synced < self._folders_version:
                folders = self._folders()
        return FlushTicket(self._files, self.generation, self.log_end, files, folders, self._folders_version)

    def flushed(self, ticket: FlushTicket) -> bool:
        """A ticket came back. False if it is of another generation; its error, if it has one, is raised."""
        ticket.release()
        if ticket.error is not None:
            raise ticket.error
        if ticket.generation != self.generation:
            return False
        self.durable_end = max(self.durable_end, ticket.end)
        if ticket.synced:
            for segment in self._unsynced():
                if segment.next_offset <= ticket.end and segment is not self._segments[-1]:
                    segment.close()
            self._synced_end = max(self._synced_end, ticket.end)
            self._folders_synced = max(self._folders_synced, ticket.folders_version)
        return True

    def _unsynced(self) -> list[Segment]:
        """From the last backwards; mostly it is that one alone."""
        segments, at = [], len(self._segments)
        while at and self._segments[at - 1].next_offset > self._synced_end:
            at -= 1
            segments.append(self._segments[at])
        return segments

    def _folders(self) -> tuple[str, ...]:
        # The folder's own entry was made together with its first segment.
        parent = self.folder.rpartition("/")[0] or "."
        return (self.folder, parent) if self.recovery.created and not self._folders_synced else (self.folder,)

    def _sync(self) -> None:
        """All of the log, here and now."""
        if self._files.volatile:
            return
        for segment in self._unsynced():
            segment.opened().sync()
            if segment is not self._segments[-1]:
                segment.close()
        if self._folders_synced < self._folders_version:
            for folder in self._folders():
                self._files.fsync_dir(folder)
        self._synced_end = self.log_end
        self._folders_synced = self._folders_version

    # -- the end

    def corruption_registered(self) -> None:
        """The cluster knows that this replica lost records: from now on it is like any other that has to catch up."""
        if self.recovery.corrupt:
            self.recovery.corrupt = False
            self._files.remove(f"{self.folder}/{MARKER}")
            self._files.fsync_dir(self.folder)

    def close(self, sync: bool = True) -> None:
        """Tickets that are still out come back as stale. Without `sync` only what was durable is promised."""
        if sync:
            self._sync()
        self.generation += 1
        for segment in self._segments:
            segment.close()

    def delete(self) -> None:
        """Rename the folder away, then remove it: a crash in between leaves what `sweep_deleted` finds."""
        self.close(sync=False)
        nth = 0
        while self._files.exists(aside := f"{self.folder}{DELETED}-{nth}"):
            nth += 1
        self._files.rename(self.folder, aside)
        self._files.fsync_dir(str(Path(self.folder).parent))
        _remove_folder(self._files, aside)


def sweep_deleted(files: Files, parent: str | Path) -> list[str]:
    """Remove the folders in `parent` whose deletion a crash interrupted; their names."""
    deleted = [name for name in files.listdir(str(parent)) if name.rpartition("-")[0].endswith(DELETED)]
    for name in deleted:
        _remove_folder(files, f"{parent}/{name}")
    return deleted


def _remove_folder(files: Files, folder: str) -> None:
    for name in files.listdir(folder):
        files.remove(f"{folder}/{name}")
    files.remove(folder)


def _first_at(
    segment: Segment, position: int, header: BatchHeader, body: bytes, timestamp: int
) -> tuple[int, int] | None:
    """The first record of a batch that is not older than `timestamp`."""
    try:
        check_body(header, body)
    except CorruptBatch as error:
        raise CorruptLog(f"{segment.path}: damaged at {position}: {error}") from error
    if not header.record_count:
        return None
    if header.timestamp_type:
        return header.base_offset, header.max_timestamp
    try:
        columns = decode(header, body)
    except CorruptBatch:
        # Undamaged, so its producer closed it wrongly. The batch as a whole is the best answer there is.
        return header.base_offset, header.max_timestamp
    for nth in range(header.record_count):
        delta = columns.timestamp_deltas[nth] if columns.timestamp_deltas else 0
        if header.base_timestamp + delta >= timestamp:
            at = columns.offset_deltas[nth] if columns.offset_deltas else nth
            return header.base_offset + at, header.base_timestamp + delta
    return None
