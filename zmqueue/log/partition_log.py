"""The log of one partition: a list of segments, of which the last is appended to.

Offsets are exclusive ends: records are in [log_start, log_end). Batches are kept whole, so the first one may begin
before the log does, at `first_offset`.

Invariants
- first_offset <= log_start <= durable_end <= log_end.
- durable_end never passes what was synced, as far as the fsync mode promises: with `always` it follows the flusher's
  tickets; with `interval` and `os`, and in memory, tickets come back at once and it follows the writes.
- A call either changes the log as it says or, when the disk is full, leaves it as it was; StorageFailed alone leaves it
  unusable, and the broker ends.
- A crash at any point leaves a log that `recover` opens without finding corruption, with everything below durable_end.
  For this a truncation removes segments from the last to the first, each synced into the folder before the next; a
  deletion removes them from the first on, in any order that a crash may leave, after the start file tells that they are
  gone; and with `always` a segment and its name are synced before its successor exists, as otherwise the successor
  could survive a power cut that its predecessor did not, which looks like corruption.
- `generation` counts truncations. A flush that began in another generation says nothing about the bytes of this one,
  whose offsets may be the same (rule D4).

All methods belong to the loop's thread. The flush thread sees FlushTickets only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from zmqueue.config import LogConfig
from zmqueue.core.epochs import NO_EPOCH, Epochs
from zmqueue.core.producers import Producers
from zmqueue.core.topic_config import TopicSettings, settings_of
from zmqueue.errors import CorruptIndex, OffsetOutOfRange, StorageFull
from zmqueue.log.clean_point import CleanPoint, drop_clean_point, load_clean_point, save_clean_point
from zmqueue.log.files import Buffer, Files, OpenFile
from zmqueue.log.find import Finder, Found
from zmqueue.log.index import SPAN_MAX, load
from zmqueue.log.orders import read_backward
from zmqueue.log.recovery import DELETED, MARKER, Recovered, Recovery, recover, remove_folder
from zmqueue.log.retention import Row
from zmqueue.log.secondary import Secondary
from zmqueue.log.seek import TimeSeek
from zmqueue.log.segment import Segment
from zmqueue.log.start import Start, drop_start, load_start, save_start
from zmqueue.log.swap import Output, put_aside, put_in_place
from zmqueue.log.ticket import FlushTicket
from zmqueue.wire.batch import HEADER_BYTES, Batch, BatchHeader

# Where sequential readers stopped; a reader that is not found here costs a walk over a few headers.
_HINTS_MAX = 64


class PartitionLog:
    def __init__(
        self, files: Files, folder: str, config: LogConfig, recovered: Recovered, settings: TopicSettings
    ) -> None:
        self.folder = folder
        self.recovery: Recovery = recovered.recovery
        self._files = files
        self._fsync = config.fsync
        self.settings = settings
        self._segments: list[Segment] = recovered.segments
        self._bases = [segment.base_offset for segment in self._segments]
        self._deleted: list[Segment] = []  # wholly below log_start, and on the disk still
        # The segment that is appended to, and since when it has records; known only where somebody asks.
        self._filling: tuple[Segment, int] | None = None
        self._found = self._segments[-1] if self._segments[-1].size else None  # with records, when the log was opened
        self._epochs: Epochs = recovered.history.epochs
        self._producers: Producers = recovered.history.producers
        self._hints: dict[int, tuple[Segment, int]] = {}
        self._times = TimeSeek()
        self.secondary = Secondary(files, folder)
        # Somebody will sync; otherwise files need not stay open for it.
        self._synced_later = not files.volatile and config.fsync != "os"
        self.log_start = recovered.log_start
        self.first_offset = recovered.first_offset
        self._start_epoch = recovered.start_epoch
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
    def open(
        cls,
        files: Files,
        folder: str | Path,
        config: LogConfig,
        trusted: bool = True,
        settings: TopicSettings | None = None,
    ) -> PartitionLog:
        """Creates or recovers; `recovery` says what happened. Raises FutureFormat, StorageFailed, StorageFull.

        Without `settings`, which belong to a topic that may not be known yet, the broker's defaults hold.
        """
        known = settings or settings_of({}, config)
        log = cls(
            files, str(folder), config, recover(files, str(folder), config, trusted, known.index_interval_bytes), known
        )
        if settings is not None:
            log.secondary.define(settings.secondary)
        return log

    def configure(self, settings: TopicSettings) -> None:
        """From now on; what concerns segments and their indexes, from the next segment on."""
        self.settings = settings
        self.secondary.define(settings.secondary)

    # -- what there is

    @property
    def volatile(self) -> bool:
        """It lies in memory: no other process can read it."""
        return self._files.volatile

    @property
    def size_bytes(self) -> int:
        return sum([segment.size for segment in self._segments])

    @property
    def segments(self) -> Sequence[Segment]:
        """In order, for those who read them."""
        return self._segments

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
        size_max = min(self.settings.segment_bytes, SPAN_MAX)
        try:
            for header, body in batches:
                assert header.base_offset == end, f"{self.folder}: batch at {header.base_offset}, log ends at {end}"
                assert header.leader_epoch >= epoch, f"{self.folder}: epoch {header.leader_epoch} follows {epoch}"
                assert header.body_length == len(body)
                length = HEADER_BYTES + header.body_length
                following = end + header.last_offset_delta + 1
                if size and (size + length > size_max or following - segment.base_offset > SPAN_MAX):
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
        if self._fsync == "always" and not self._files.volatile:
            self._sync()
        segment = Segment(self._files, self.folder, base_offset, self.settings.index_interval_bytes)
        segment.create()
        if not self._synced_later or self._synced_end == self.log_end:
            full.close()
        full.seal(self._epochs.within(full.base_offset, full.next_offset), self._producers.encode())
        self._segments.append(segment)
        self._bases.append(base_offset)
        self._folders_version += 1
        return segment

    def roll_if_old(self, now_ms: int) -> bool:
        """Begin a new segment if the present one has had records for `segment_ms`, or if all that it has is deleted.

        StorageFull: nothing has changed.

        Age counts from when the log was first asked after the first record came; for a segment that was there when the
        log was opened, from the timestamp of its first batch, since otherwise restarts would keep it young for ever.
        """
        segment = self._segments[-1]
        if not segment.size:
            return False
        if self._filling is None or self._filling[0] is not segment:
            since_ms = now_ms
            if segment is self._found:
                first = next(segment.walk(0))[1].max_timestamp
                since_ms = min(first, now_ms) if first >= 0 else now_ms
            self._filling = segment, since_ms
        if now_ms - self._filling[1] < self.settings.segment_ms and self.log_start < self.log_end:
            return False
        self._roll(self.log_end)
        return True

    # -- read

    def read(self, offset: int, bytes_max: int, end_offset: int, records_max: int = 0) -> bytes:
        """Whole, proved batches of one segment; the first holds `offset`, none reaches beyond `end_offset`.

        At least one batch if there is any, even when it is larger than `bytes_max`; no further one is begun once
        `records_max` records (0: any number) are reached. Raises OffsetOutOfRange, CorruptLog.
        """
        if offset < self.log_start:
            raise OffsetOutOfRange(f"offset {offset} is not in {self.log_start}..{self.log_end}")
        return self.read_replica(offset, bytes_max, end_offset, records_max)

    def read_replica(self, offset: int, bytes_max: int, end_offset: int, records_max: int = 0) -> bytes:
        """As `read`, for a copy of this log: its first batch is whole there too, and begins at `first_offset`."""
        if not self.first_offset <= offset <= self.log_end:
            raise OffsetOutOfRange(f"offset {offset} is not in {self.first_offset}..{self.log_end}")
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
        from_offset = max(from_offset, self.first_offset)
        for segment in self._segments[bisect_right(self._bases, from_offset) - 1 :]:
            position = segment.locate(from_offset)[0] if from_offset > segment.base_offset else 0
            for _, header in segment.walk(position):
                yield header
                assert generation == self.generation, f"{self.folder}: truncated while its headers were read"

    def offset_for_time(self, timestamp: int, end_offset: int) -> tuple[int, int] | None:
        """Offset and timestamp of the first record below `end_offset` that is not older than `timestamp`."""
        return self._times.find(self._segments, self._bases, self.generation, timestamp, self.log_start, end_offset)

    def read_backward(self, before: int, bytes_max: int, end_offset: int) -> bytes:
        """Whole batches, of which the last holds the offset before `before` (see orders.py)."""
        return read_backward(self, before, bytes_max, end_offset)

    def find(self, value: bytes, from_offset: int, end_offset: int, limit: int, work_bytes: int) -> Found:
        """Records with this value in the field that the topic is indexed by. Raises NoSuchIndex, CorruptLog."""
        return Finder(self, value, from_offset, end_offset, limit).run(work_bytes)

    # -- truncate

    def truncate(self, end: int) -> None:
        """Drop every batch that holds or follows `end`. Durable on return, and so is all that is left."""
        if end < self.log_start:
            self.reset(end)
            return
        self.generation += 1
        self.secondary.cut(end)
        self._forget_clean(end)
        self._cut(min(end, self.log_end))
        if self.log_end < self.log_start:
            # The batch in which the log began is gone.
            self.reset(self.log_end)

    def reset(self, start: int) -> None:
        """Drop everything and begin empty at `start`. A crash in between leaves less, or nothing, from offset 0."""
        self.generation += 1
        self.secondary.cut(-1)
        self._forget_clean(0)
        self._hints.clear()
        self.remove_deleted(len(self._deleted))
        while self._segments:
            self._drop_last()
        drop_start(self._files, self.folder)
        self._files.fsync_dir(self.folder)
        segment = Segment(self._files, self.folder, start, self.settings.index_interval_bytes)
        segment.create()
        self._files.fsync_dir(self.folder)
        self._segments, self._bases = [segment], [start]
        self._epochs, self._producers = Epochs(), Producers()
        self._start_epoch = NO_EPOCH
        self.log_start = self.first_offset = self.log_end = self.durable_end = self._synced_end = start

    def _cut(self, end: int) -> None:
        self._hints.clear()
        while self._bases[-1] > end:
            self._drop_last()
        segment = self._segments[-1]
        before = self.log_end
        segment.truncate(*segment.locate(end))
        self.log_end = segment.next_offset
        self._epochs.truncate(self.log_end)
        self._epochs.begin_at(self.first_offset, self._start_epoch)
        if before != self.log_end:
            self._producers = self._producers_behind(len(self._segments))
        self._synced_end = min(self._synced_end, self.log_end)
        if not self._synced_later or self._synced_end == self.log_end:
            segment.opened().sync()  # the cut itself; otherwise it goes with the bytes before it
        if self._synced_later:
            self._sync()
        self.durable_end = self.log_end

    def _producers_behind(self, count: int) -> Producers:
        """The state behind the first `count` segments: from the newest index file, and the batches after it."""
        known = load_start(self._files, self.folder).producers
        at = count
        while at and not self._segments[at - 1].is_sealed:
            at -= 1
        if at:
            sealed = self._segments[at - 1]
            try:
                known = load(self._files, sealed.index_path, sealed.base_offset)[1].producers
            except CorruptIndex:
                at = 0
        producers = Producers.decode(known)
        for segment in self._segments[at:count]:
            for _, header in segment.walk(0):
                producers.note(header)
        return producers

    def _drop_last(self) -> None:
        self._segments.pop().remove()
        self._bases.pop()
        self._files.fsync_dir(self.folder)

    # -- compaction

    def swap(self, generation: int, outputs: list[Output]) -> bool:
        """Put new segments in place of those they were made from. False if some of these are no longer what they were.

        Deletions may have come in between, and leave outputs without use; a truncation makes all of them useless.
        CorruptIndex, StorageFull: nothing has changed.
        """
        whole = generation == self.generation
        if whole:
            interval = self.settings.index_interval_bytes
            whole, replaced = put_in_place(self._files, self.folder, outputs, self._segments, interval)
            self._deleted += replaced
            self._bases = [segment.base_offset for segment in self._segments]
            self._hints.clear()
        self._deleted += put_aside(self._files, self.folder)
        return whole

    def compacted(self, point: CleanPoint) -> None:
        """Durable on return. StorageFull: nothing has changed."""
        save_clean_point(self._files, self.folder, point)
        self.clean_point = point

    def _forget_clean(self, end: int) -> None:
        if end < self.clean_point.end:
            drop_clean_point(self._files, self.folder)
            self.clean_point = CleanPoint()

    # -- delete

    def rows(self) -> Iterator[Row]:
        """The segments to which nothing is appended any more, from the first on."""
        for s in islice(self._segments, len(self._segments) - 1):
            yield Row(s.base_offset, s.next_offset, s.size, s.max_timestamp)

    def delete_before(self, offset: int) -> None:
        """Records below `offset`, all of them committed, are gone for good. Durable on return. StorageFull: no change.

        Segments that held nothing else leave the log at once, and the disk with `remove_deleted`.
        """
        offset = max(offset, self.log_start)
        at = bisect_right(self._bases, offset) - 1
        if offset == self.log_start and not at:
            return
        assert offset <= self.durable_end, f"{self.folder}: {offset} is beyond what is durable, {self.durable_end}"
        first_offset = self._segments[at].locate(offset)[1]
        epoch = max(self._epochs.before(first_offset), self._start_epoch)
        start = Start(offset, self._producers_behind(at).encode(), epoch, self._bases[at])
        self._save_start(start, self._segments[:at])
        self.log_start, self.first_offset, self._start_epoch = offset, first_offset, epoch
        self._epochs.begin_at(first_offset, epoch)
        self._deleted += self._segments[:at]
        del self._segments[:at], self._bases[:at]

    def _save_start(self, start: Start, leaving: list[Segment]) -> None:
        try:
            save_start(self._files, self.folder, start)
        except StorageFull:
            # A full disk must not keep us from making room: the index files of what leaves are room enough.
            for segment in leaving:
                segment.unseal()
            save_start(self._files, self.folder, start)

    @property
    def deleted_segments(self) -> int:
        return len(self._deleted)

    def remove_deleted(self, segments_max: int) -> tuple[int, int]:
        """Give room back: how many segments were removed, and their bytes. Removing a large file takes its time."""
        leaving, self._deleted = self._deleted[:segments_max], self._deleted[segments_max:]
        for segment in leaving:
            segment.remove()
        return len(leaving), sum(segment.size for segment in leaving)

    def before_start(self) -> tuple[int, bytes]:
        """What a copy that begins at `first_offset` cannot know: the epoch before it, and the producers' state."""
        producers = Producers.decode(load_start(self._files, self.folder).producers)
        for _, header in self._segments[0].walk(0):
            if header.base_offset >= self.first_offset:
                break
            producers.note(header)
        return self._start_epoch, producers.encode()

    def adopt(self, epoch: int, producers: bytes) -> None:
        """Take over `before_start` of the log that this empty one becomes a copy of. StorageFull: nothing changed."""
        assert self.first_offset == self.log_end, f"{self.folder} is not empty"
        known = Producers.decode(producers)
        save_start(self._files, self.folder, Start(self.log_start, producers, epoch, self._bases[0]))
        self._producers, self._start_epoch = known, epoch
        self._epochs.begin_at(self.first_offset, epoch)

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
        for segment in (*self._deleted, *self._segments):
            segment.close()

    def delete(self) -> None:
        """Rename the folder away, then remove it: a crash in between leaves what `sweep_deleted` finds."""
        self.close(sync=False)
        nth = 0
        while self._files.exists(aside := f"{self.folder}{DELETED}-{nth}"):
            nth += 1
        self._files.rename(self.folder, aside)
        self._files.fsync_dir(str(Path(self.folder).parent))
        remove_folder(self._files, aside)
