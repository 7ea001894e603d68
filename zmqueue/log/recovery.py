"""From whatever a crash left behind to a log that may be served (rule D2).

Every batch is proved: header and body against their checksums, offsets without gaps within and between segments,
epochs never decreasing. At the first that fails there are two stories:

- A torn tail: the broken batch lies in the last segment and nothing valid lies behind it. A write was cut off by a
  crash before anyone was told of it; it is cut away.
- Corruption: anything else. Bytes that were once valid changed, and acknowledged records may be among them. The broken
  segment and all behind it are renamed, never deleted; what lies whole before the broken batch is kept as the log.

The verdict "corrupt" must reach the cluster: this replica may lack records that it once acknowledged, so it must not be
elected on the strength of them. After the renaming the log looks whole, and a crash before the broker has told anyone
would lose the verdict. So a marker is made durable before anything is renamed, and stays until the broker says that the
cluster knows (`PartitionLog.corruption_registered`).

A valid batch of a version that this build does not read raises FutureFormat, and nothing in the folder is touched.

Where records were deleted, the start file was durable before the first segment went: segments before the one that it
names are what a crash left of the deletion, with gaps or without, and go now.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from zmqueue.config import LogConfig
from zmqueue.core.epochs import NO_EPOCH, Epochs
from zmqueue.core.producers import Producers
from zmqueue.errors import CorruptBatch, CorruptIndex, CorruptLog, FutureFormat, StorageFull
from zmqueue.log.clean_point import CLEAN_FILE
from zmqueue.log.files import Files
from zmqueue.log.index import load
from zmqueue.log.keys import TEMPORARY, parse_name
from zmqueue.log.segment import Segment, index_name, segment_name
from zmqueue.log.start import START_FILE, Start, drop_start, load_start
from zmqueue.log.swap import recover_swaps
from zmqueue.model import MiB
from zmqueue.wire.batch import HEADER_BYTES, MAGIC, BatchHeader, check_body, parse_header

MARKER = "corrupt"
DELETED = ".deleted"
SALVAGE = ".salvage"
_READ_BYTES = 1 * MiB
_SEGMENT = re.compile(r"(\d{20})\.log\Z")
_INDEX = re.compile(r"\d{20}\.index\Z")
_OURS = re.compile(
    rf"({MARKER}|{START_FILE}|{CLEAN_FILE}|\d{{20}}\.index|\d{{20}}-\d{{20}}\.keys|\d{{20}}\.log\.corrupt-\d+|.*\.tmp)\Z"
)

_logger = logging.getLogger(__name__)


class Recovery(Struct):
    """What opening a log found and did. `created`: there was no log, which a replica that once had one must report."""

    truncated_bytes: int = 0
    corrupt: bool = False
    quarantined: list[str] = field(default_factory=list)
    created: bool = False


class History(NamedTuple):
    """What the batches read so far tell: who led when, and what each producer last wrote."""

    epochs: Epochs
    producers: Producers

    def note(self, header: BatchHeader) -> None:
        self.epochs.note(header.leader_epoch, header.base_offset)
        self.producers.note(header)


class Recovered(NamedTuple):
    """`segments` in order, never empty; those that existed before are synced.

    The first batch that is left begins at `first_offset`, before `log_start` where that lies within a batch; the record
    before it was of `start_epoch`.
    """

    segments: list[Segment]
    log_start: int
    history: History
    recovery: Recovery
    first_offset: int
    start_epoch: int


class Fault(Exception):
    """Where a log stops being one. `misplaced`: a whole batch where it does not belong, which no torn write leaves."""

    def __init__(self, position: int, reason: str, misplaced: bool = False) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason
        self.misplaced = misplaced


def recover(
    files: Files, folder: str, config: LogConfig, trusted: bool = True, interval_bytes: int | None = None
) -> Recovered:
    """Open the log in `folder`, made if absent.

    A segment that is not the last was synced whole before its successor was made, unless the fsync mode does not sync
    and the machine went down: then `trusted` is false. If its index file proves and fits, its batches are not read.
    """
    interval = config.index_interval_bytes if interval_bytes is None else interval_bytes
    recovery = Recovery(corrupt=files.exists(f"{folder}/{MARKER}"))
    bases = _segments_in(files, folder)
    if not bases and not recovery.corrupt:
        files.mkdir(folder)
        recovery.created = True
    start = load_start(files, folder) if bases else Start()
    deleted = [base for base in bases if base < start.base]
    bases = bases[len(deleted) :]
    history = History(Epochs(), Producers.decode(start.producers))
    segments: list[Segment] = []
    unsealed: list[tuple[Segment, list[tuple[int, int]], bytes]] = []
    for nth, base in enumerate(bases):
        segment = Segment(files, folder, base, interval)
        last = nth == len(bases) - 1
        if segments and segments[-1].next_offset != base:
            fault = Fault(0, f"the segment before it ends at offset {segments[-1].next_offset}", misplaced=True)
        else:
            if trusted and not last and _restore(files, segment, history, bases[nth + 1]):
                segments.append(segment)
                continue
            found = _scan(files, segment, history)
            if found is None:
                segments.append(segment)
                if not last:
                    epochs = history.epochs.within(base, segment.next_offset)
                    unsealed.append((segment, epochs, history.producers.encode()))
                continue
            fault = found
        if last and not fault.misplaced and not _valid_behind(files, segment, fault.position, history.epochs.last):
            recovery.truncated_bytes = files.size(segment.path) - fault.position
            _logger.warning("%s: cut %d torn bytes: %s", segment.path, recovery.truncated_bytes, fault.reason)
            segment.opened().truncate(fault.position)
            segments.append(segment)
        else:
            _logger.error("%s: corrupt at %d: %s", segment.path, fault.position, fault.reason)
            recovery.corrupt = True
            recovery.quarantined = _quarantine(files, folder, bases[nth:], fault.position, keep=nth == 0)
            if files.exists(segment.path):
                segments.append(segment)
        break
    # Nothing was touched before this line if a future version is among the batches.
    if segments and segments[-1].next_offset < start.log_start:
        # The disk forgot what was not synced, or it is damaged. All that is left was deleted.
        deleted += [segment.base_offset for segment in segments]
        segments = []
    for base in deleted:
        files.remove(f"{folder}/{segment_name(base)}")
    if not segments:
        first = Segment(files, folder, max(start.log_start, *bases[:1], 0), interval)
        # Nothing is known of what was before it, and its name says where it begins.
        start, history = Start(), History(Epochs(), Producers())
        drop_start(files, folder)
        first.create()
        segments.append(first)
    for segment, epochs, producers in unsealed:
        if segment is not segments[-1]:
            segment.seal(epochs, producers)
    segments[-1].unseal()
    _remove_orphans(files, folder, segments)
    if not recovery.created and not files.volatile:
        _sync(files, folder, segments)
    return _begun(segments, start, history, recovery)


def _begun(segments: list[Segment], start: Start, history: History, recovery: Recovery) -> Recovered:
    """Where the log begins: where its start file says, or with its first segment if that lies behind."""
    base = segments[0].base_offset
    log_start, first_offset, epoch = base, base, NO_EPOCH
    if start.log_start >= base:
        log_start, epoch = start.log_start, start.epoch
        try:
            first_offset = segments[0].locate(log_start)[1]
        except CorruptLog as error:
            # Whoever reads it will find the same, and say so.
            _logger.error("%s", error)
    history.epochs.begin_at(first_offset, epoch)
    return Recovered(segments, log_start, history, recovery, first_offset, epoch)


def _restore(files: Files, segment: Segment, history: History, next_base: int) -> bool:
    if files.volatile or not files.exists(segment.index_path):
        return False
    try:
        index, summary = load(files, segment.index_path, segment.base_offset)
        producers = Producers.decode(summary.producers)
    except (CorruptIndex, msgspec.MsgspecError) as error:
        _logger.warning("%s: made anew: %s", segment.index_path, error)
        return False
    if (files.size(segment.path), next_base) != (summary.log_bytes, summary.next_offset):
        _logger.warning("%s: made anew: it is of another log than lies there", segment.index_path)
        return False
    if summary.epochs and summary.epochs[0][0] < history.epochs.last:
        return False
    segment.restore(index, summary)
    for epoch, start in summary.epochs:
        history.epochs.note(epoch, start)
    history.producers.replace(producers)
    return True


def _remove_orphans(files: Files, folder: str, segments: list[Segment]) -> None:
    """Index files that no sealed segment stands behind, and files of keys that reach beyond the log or have no name.

    The log may grow to where such a file ends, with other records: it must not be there then.
    """
    sealed = {index_name(segment.base_offset) for segment in segments if segment.is_sealed}
    end = segments[-1].next_offset
    for name in files.listdir(folder):
        covered = parse_name(name)
        beyond = covered is not None and covered[1] > end
        if beyond or name.endswith(TEMPORARY) or (_INDEX.match(name) and name not in sealed):
            files.remove(f"{folder}/{name}")


def _segments_in(files: Files, folder: str) -> list[int]:
    """Base offsets of the segments in order; a swap or a salvage that a crash interrupted is finished first."""
    recover_swaps(files, folder)
    names = files.listdir(folder)
    for name in names:
        if name.endswith(SALVAGE) and _SEGMENT.match(name.removesuffix(SALVAGE)):
            whole = name.removesuffix(SALVAGE)
            if whole in names:
                files.remove(f"{folder}/{name}")
            else:
                files.rename(f"{folder}/{name}", f"{folder}/{whole}")
    bases = []
    for name in files.listdir(folder):
        if match := _SEGMENT.match(name):
            bases.append(int(match[1]))
        elif not _OURS.match(name):
            _logger.warning("%s/%s: not a file of zmqueue, ignored", folder, name)
    return bases


def _sync(files: Files, folder: str, segments: list[Segment]) -> None:
    """The process before this one may have left pages unwritten: nothing counts as durable before this."""
    for segment in segments:
        segment.opened().sync()
        segment.close()
    files.fsync_dir(folder)


def proved(files: Files, path: str, size: int) -> Iterator[tuple[int, BatchHeader, bytes]]:
    """The batches in the first `size` bytes of a file, with their positions. The first that fails raises a Fault."""
    data, start, position = b"", 0, 0
    while position < size:
        if position + HEADER_BYTES > start + len(data):
            data, start = files.pread(path, min(_READ_BYTES, size - position), position), position
        try:
            header = parse_header(data, position - start)
            stop = position + header.total_bytes
            if stop > size:
                raise Fault(position, f"the batch ends at {stop}, the file at {size}")
            if stop > start + len(data):
                count = min(max(_READ_BYTES, header.total_bytes), size - position)
                data, start = files.pread(path, count, position), position
            body = data[position + HEADER_BYTES - start : stop - start]
            check_body(header, body)
        except CorruptBatch as error:
            raise Fault(position, str(error)) from error
        yield position, header, body
        position = stop


def _scan(files: Files, segment: Segment, history: History) -> Fault | None:
    """Prove the batches of a file one by one into `segment` and `history`; the first that fails ends it."""
    try:
        for position, header, _ in proved(files, segment.path, files.size(segment.path)):
            check_follows(position, header, segment.next_offset, history.epochs.last)
            history.note(header)
            segment.note(header)
    except Fault as fault:
        return fault
    return None


def check_follows(position: int, header: BatchHeader, next_offset: int, epoch: int) -> None:
    if header.base_offset != next_offset:
        raise Fault(position, f"offset {header.base_offset} follows {next_offset}", misplaced=True)
    if header.leader_epoch < max(epoch, 0):
        raise Fault(position, f"epoch {header.leader_epoch} follows {epoch}", misplaced=True)


def _valid_behind(files: Files, segment: Segment, position: int, epoch: int) -> bool:
    """Whether a batch that could have followed the broken one at `position` lies whole anywhere behind it.

    A record may itself hold the bytes of a batch; only one with an offset and an epoch that fit counts.
    """
    size = files.size(segment.path)
    start = position + 1
    while start + HEADER_BYTES <= size:
        data = files.pread(segment.path, _READ_BYTES + HEADER_BYTES, start)
        at = data.find(MAGIC)
        while 0 <= at < _READ_BYTES:
            if _fits(files, segment, data, at, start + at, size, epoch):
                return True
            at = data.find(MAGIC, at + 1)
        start += _READ_BYTES
    return False


def _fits(files: Files, segment: Segment, data: bytes, at: int, position: int, size: int, epoch: int) -> bool:
    try:
        header: BatchHeader = parse_header(data, at)
        if header.base_offset <= segment.next_offset or header.leader_epoch < epoch:
            return False
        if position + header.total_bytes > size:
            return False
        check_body(header, files.pread(segment.path, header.body_length, position + HEADER_BYTES))
    except FutureFormat:
        return True
    except CorruptBatch:
        return False
    return True


def _quarantine(files: Files, folder: str, bases: list[int], position: int, keep: bool) -> list[str]:
    """Rename the segments of `bases`; of the first, copy what lies before `position` back under its own name.

    A crash in between leaves a log with holes, which the next recovery puts aside in its turn. `keep` demands that the
    first stays even if empty, for its name says where the log begins.
    """
    files.replace(f"{folder}/{MARKER}", b"")
    first = f"{folder}/{segment_name(bases[0])}"
    salvaged = (position > 0 or keep) and _copy_prefix(files, first, first + SALVAGE, position)
    quarantined = []
    for base in reversed(bases):
        path = f"{folder}/{segment_name(base)}"
        nth = 0
        while files.exists(aside := f"{path}.corrupt-{nth}"):
            nth += 1
        files.rename(path, aside)
        quarantined.append(aside)
        if files.exists(index := f"{folder}/{index_name(base)}"):
            files.remove(index)
    # Before its name is taken again: if only the renaming below survived a crash, the broken file would be lost.
    files.fsync_dir(folder)
    if salvaged:
        files.rename(first + SALVAGE, first)
        files.fsync_dir(folder)
    return quarantined[::-1]


def _copy_prefix(files: Files, path: str, to: str, size: int) -> bool:
    copy = files.create(to)
    try:
        while copy.size < size:
            data = files.pread(path, min(_READ_BYTES, size - copy.size), copy.size)
            copy.append([data], len(data))
        copy.sync()
    except StorageFull as error:
        # The bytes are safe in the renamed file, and another replica has them; a full disk must not stop the start.
        _logger.warning("%s: the part before the damage is not kept: %s", path, error)
        files.remove(to)
        return False
    finally:
        copy.close()
    return True


def sweep_deleted(files: Files, parent: str | Path) -> list[str]:
    """Remove the folders in `parent` whose deletion a crash interrupted; their names."""
    deleted = [name for name in files.listdir(str(parent)) if name.rpartition("-")[0].endswith(DELETED)]
    for name in deleted:
        remove_folder(files, f"{parent}/{name}")
    return deleted


def remove_folder(files: Files, folder: str) -> None:
    for name in files.listdir(folder):
        files.remove(f"{folder}/{name}")
    files.remove(folder)
