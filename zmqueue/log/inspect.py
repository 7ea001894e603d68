"""What lies in a log's folder, for people: read without a broker, or beside a running one.

Nothing is written, cut, renamed or locked here. Sealed segments never change, so they are read as they are. The last
one may grow while it is looked at: it is read up to the size it had, and what is no whole batch at its end is called a
tail: a write under way if a broker runs, one that a crash cut off otherwise. A broker also removes segments (retention)
and replaces them; one that vanishes between listing and reading is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec import Struct, field

from zmqueue.errors import CorruptBatch, CorruptIndex, CorruptLog, StorageFailed
from zmqueue.log.files import Files, lock_holder
from zmqueue.log.index import load
from zmqueue.log.recovery import Fault, proved
from zmqueue.log.segment import Segment, index_name, segment_name
from zmqueue.wire.batch import CODECS, BatchHeader, decode

PARTITIONS = "partitions"
LOCK_FILE = "lock"
SEGMENT_NAME = re.compile(r"(\d{20})\.log\Z")
PARTITION_NAME = re.compile(r"([0-9a-f]{32})-([0-9]{1,5})\Z")
_BROKER_NAME = re.compile(r"broker-([0-9]+)\Z")
_CODEC_NAMES = {number: name for name, number in CODECS.items()}


class Place(NamedTuple):
    """The folder of a partition, and whose it is as far as names tell."""

    folder: str
    broker: int | None = None
    topic_id: str = ""
    partition: int | None = None
    broker_folder: str | None = None

    @property
    def holder(self) -> int | None:
        """The process of the broker that runs on it."""
        return lock_holder(f"{self.broker_folder}/{LOCK_FILE}") if self.broker_folder is not None else None


def find(files: Files, path: str) -> list[Place]:
    """The partitions in `path`: a partition's own folder, a broker's, or the data folder of a cluster."""
    path = path.rstrip("/") or "/"
    names = files.listdir(path)
    brokers = [name for name in names if _BROKER_NAME.match(name)]
    if brokers:
        return [place for name in brokers for place in _of_broker(files, f"{path}/{name}")]
    if PARTITIONS in names:
        return _of_broker(files, path)
    if path.endswith(f"/{PARTITIONS}"):
        return _of_broker(files, path.removesuffix(f"/{PARTITIONS}"))
    if any(map(SEGMENT_NAME.match, names)):
        return [_place(path)]
    return []


def broker_folders(files: Files, path: str) -> list[str]:
    path = path.rstrip("/")
    names = files.listdir(path)
    found = [f"{path}/{name}" for name in names if _BROKER_NAME.match(name)]
    return found or ([path] if PARTITIONS in names else [])


def broker_of(folder: str) -> int | None:
    match = _BROKER_NAME.match(folder.rpartition("/")[2])
    return int(match[1]) if match else None


def _of_broker(files: Files, folder: str) -> list[Place]:
    names = [name for name in files.listdir(f"{folder}/{PARTITIONS}") if PARTITION_NAME.match(name)]
    return [_place(f"{folder}/{PARTITIONS}/{name}") for name in names]


def _place(folder: str) -> Place:
    parent, _, name = folder.rpartition("/")
    match = PARTITION_NAME.match(name)
    if match is None:
        return Place(folder)
    own = parent.removesuffix(f"/{PARTITIONS}") if parent.endswith(f"/{PARTITIONS}") else None
    return Place(folder, broker_of(own) if own is not None else None, match[1], int(match[2]), own)


def segments_in(files: Files, folder: str) -> list[int]:
    return [int(match[1]) for match in map(SEGMENT_NAME.match, files.listdir(folder)) if match]


# -- segments ----------------------------------------------------------------------------------------------------


class SegmentInfo(Struct):
    """`bytes` and `next_offset` count whole batches; `tail_bytes` are what follows them, `damage` why it does."""

    base_offset: int
    next_offset: int
    records: int = 0
    batches: int = 0
    bytes: int = 0
    tail_bytes: int = 0
    first_timestamp: int | None = None
    last_timestamp: int | None = None
    active: bool = False
    codecs: dict[str, int] = field(default_factory=dict)
    damage: str | None = None


def describe_segments(files: Files, folder: str) -> Iterator[SegmentInfo]:
    """From the headers, which are proved; bodies are not read."""
    bases = segments_in(files, folder)
    for nth, base in enumerate(bases):
        info = _describe(files, folder, base, nth == len(bases) - 1)
        if info is not None:
            yield info


def _describe(files: Files, folder: str, base: int, active: bool) -> SegmentInfo | None:
    info = SegmentInfo(base, base, active=active)
    try:
        segment = opened(files, folder, base)
        try:
            for position, header in segment.walk(0):
                if position + header.total_bytes > segment.size:
                    info.damage = f"the batch at {position} ends behind the file"
                    break
                _count(info, header)
        except CorruptLog as error:
            info.damage = str(error)
        info.tail_bytes = segment.size - info.bytes
    except StorageFailed:
        if files.exists(f"{folder}/{segment_name(base)}"):
            raise
        return None  # removed meanwhile
    return info


def opened(files: Files, folder: str, base: int) -> Segment:
    """A segment to be walked, up to the size that its file has now."""
    segment = Segment(files, folder, base, 0)
    segment.size = files.size(segment.path)
    return segment


def _count(info: SegmentInfo, header: BatchHeader) -> None:
    info.batches += 1
    info.records += header.record_count
    info.bytes += header.total_bytes
    info.next_offset = header.next_offset
    codec = _CODEC_NAMES[header.codec]
    info.codecs[codec] = info.codecs.get(codec, 0) + 1
    if info.first_timestamp is None or header.base_timestamp < info.first_timestamp:
        info.first_timestamp = header.base_timestamp
    if info.last_timestamp is None or header.max_timestamp > info.last_timestamp:
        info.last_timestamp = header.max_timestamp


# -- indexes -----------------------------------------------------------------------------------------------------


class IndexInfo(Struct):
    """The index of one segment. `state`: ok, missing, stale (of another log than lies there), damaged, or in memory for
    the segment that is appended to. `behind_bytes`: from the last entry to the end of the log."""

    base_offset: int
    state: str
    file_bytes: int = 0
    entries: int = 0
    interval_bytes: int = 0
    log_bytes: int = 0
    bytes_per_entry: float | None = None
    entries_per_batch: float | None = None
    behind_bytes: int | None = None
    gap_bytes_max: int | None = None
    problem: str | None = None


def describe_indexes(files: Files, folder: str) -> Iterator[IndexInfo]:
    bases = segments_in(files, folder)
    for nth, base in enumerate(bases):
        try:
            segment = opened(files, folder, base)
            if nth == len(bases) - 1:
                yield IndexInfo(base, "memory", log_bytes=segment.size)
            else:
                yield _describe_index(files, folder, segment, bases[nth + 1])
        except StorageFailed:
            if files.exists(f"{folder}/{segment_name(base)}"):
                raise


def _describe_index(files: Files, folder: str, segment: Segment, next_base: int) -> IndexInfo:
    path = f"{folder}/{index_name(segment.base_offset)}"
    info = IndexInfo(segment.base_offset, "missing", log_bytes=segment.size)
    if not files.exists(path):
        return info
    info.file_bytes = files.size(path)
    try:
        index, summary = load(files, path, segment.base_offset)
        entries = index.grown(0)
    except CorruptIndex as error:
        info.state, info.problem = "damaged", str(error)
        return info
    info.state = "ok"
    if (summary.log_bytes, summary.next_offset) != (segment.size, next_base):
        info.state = "stale"
        info.problem = f"of {summary.log_bytes} bytes up to offset {summary.next_offset}"
    info.entries = len(entries)
    info.interval_bytes = summary.interval_bytes
    info.behind_bytes = segment.size - (entries.positions[-1] if len(entries) else 0)
    info.gap_bytes_max = entries.gap_bytes_max(segment.size)
    if len(entries):
        info.bytes_per_entry = segment.size / len(entries)
    log = _describe(files, folder, segment.base_offset, active=False)
    if log is not None and log.batches:
        info.entries_per_batch = len(entries) / log.batches
    return info


# -- batches -----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A batch where it lies. The body is there if it was asked for, and is proved then."""

    base_offset: int  # of its segment
    position: int
    header: BatchHeader
    body: bytes | None


def batches_in(files: Files, folder: str, start: int, end: int | None, bodies: bool) -> Iterator[Found]:
    """From the batch that holds `start` to the one before `end`. Raises CorruptLog where the log ends to be one."""
    bases = segments_in(files, folder)
    for nth, base in enumerate(bases):
        if nth + 1 < len(bases) and bases[nth + 1] <= start:
            continue
        if end is not None and base >= end:
            return
        segment = opened(files, folder, base)
        batches = (
            proved(files, segment.path, segment.size)
            if bodies
            else ((position, header, None) for position, header in segment.walk(0))
        )
        try:
            for position, header, body in batches:
                if end is not None and header.base_offset >= end:
                    return
                if header.next_offset > start:
                    yield Found(base, position, header, body)
        except Fault as fault:
            raise CorruptLog(f"{segment.path}: damaged at {fault.position}: {fault.reason}") from fault


def batch_fields(found: Found) -> dict[str, Any]:
    """A batch as a line of `dump`."""
    header = found.header
    fields: dict[str, Any] = {
        "offset": header.base_offset,
        "next_offset": header.next_offset,
        "records": header.record_count,
        "segment": found.base_offset,
        "position": found.position,
        "bytes": header.total_bytes,
        "codec": _CODEC_NAMES[header.codec],
        "raw_bytes": header.raw_length,
        "epoch": header.leader_epoch,
        "timestamp": header.base_timestamp,
        "max_timestamp": header.max_timestamp,
    }
    if header.timestamp_type:
        fields["timestamp_type"] = "append"
    if header.producer_id >= 0:
        fields |= {"producer": header.producer_id, "producer_epoch": header.producer_epoch}
        fields["sequence"] = header.base_sequence
    return fields


class Record(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[list[Any]] | None


def records_in(found: Found) -> Iterator[Record]:
    """The records of a batch that was found with its body. Raises CorruptLog for one that was closed wrongly."""
    header = found.header
    assert found.body is not None, "bodies were not asked for"
    try:
        columns = decode(header, found.body)
    except CorruptBatch as error:
        raise CorruptLog(f"the batch at offset {header.base_offset} does not open: {error}") from error
    for nth, value in enumerate(columns.values):
        delta = columns.timestamp_deltas[nth] if columns.timestamp_deltas else 0
        yield Record(
            header.base_offset + (columns.offset_deltas[nth] if columns.offset_deltas else nth),
            header.max_timestamp if header.timestamp_type else header.base_timestamp + delta,
            columns.keys[nth] if columns.keys else None,
            value,
            columns.headers[nth] if columns.headers else None,
        )
