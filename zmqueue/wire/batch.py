"""The record batch: the unit of everything, in the client's buffer, on the wire, on disk and in replication.

A batch is a fixed header of 76 bytes and a body. The body is one CBOR array of columns, compressed as a whole or not:

    [timestamp deltas | null, keys | null, values, headers | null, offset deltas | null]

Two checksums (CRC-32C) protect it: one over the header, one over the body. The leader gives a batch its base offset and
leader epoch by writing the header anew; the body's bytes never change between producer and consumer, and a broker never
opens them on the hot path.

Header, little-endian:

     0  magic "ZQ"          16 record_count       48 producer_id
     2  version             20 last_offset_delta  56 base_sequence
     3  reserved, zero      24 base_offset        64 leader_epoch
     4  attributes          32 base_timestamp     68 body_crc
     6  producer_epoch      40 max_timestamp      72 header_crc, over bytes 0..72
     8  body_length
    12  raw_length (of the body before compression)

Attributes: bits 0-2 codec, bit 3 timestamp type (0 create, 1 append), bit 4 transactional, bit 5 control; others zero.
A producer leaves base_offset and leader_epoch at -1. Without idempotence producer_id, producer_epoch and base_sequence
are -1. Sequences count records and never wrap (64 bits).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cramjam
import msgspec
from google_crc32c import value as crc32c
from msgspec import Struct

from zmqueue.errors import BadFrame, CorruptBatch, FutureFormat, InvalidRecord
from zmqueue.model import MiB
from zmqueue.wire import cbor

MAGIC = b"ZQ"
VERSION = 1
_LAYOUT = struct.Struct("<2sBBHhIIIIqqqqqiII")
_CHECKED = struct.Struct("<2sBBHhIIIIqqqqqiI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size
_CRC_AT = HEADER_BYTES - 4
assert HEADER_BYTES == 76

UNASSIGNED = -1
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_CODEC_LAST = max(CODECS.values())
_CODEC_MASK = 0b111
_NONE = type(None)
TIMESTAMP_TYPE = 1 << 3
TRANSACTIONAL = 1 << 4
CONTROL = 1 << 5
_KNOWN_ATTRIBUTES = _CODEC_MASK | TIMESTAMP_TYPE | TRANSACTIONAL | CONTROL
HEADERS_PER_RECORD_MAX = 64
# A body opens into at most this many times the size limit of a batch, and never into more than RAW_BYTES_MAX: a byte of
# CBOR can become an object of 64, so this also bounds what a small hostile batch costs its reader.
RAW_RATIO_MAX = 4
RAW_BYTES_MAX = 256 * MiB
_TIMESTAMP_MAX = 1 << 62


class BatchHeader(Struct, gc=False):
    """A parsed header. Offsets of its records run from base_offset to next_offset, exclusive."""

    attributes: int
    producer_epoch: int
    body_length: int
    raw_length: int
    record_count: int
    last_offset_delta: int
    base_offset: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    base_sequence: int
    leader_epoch: int
    body_crc: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        return self.base_sequence + self.last_offset_delta

    @property
    def total_bytes(self) -> int:
        return HEADER_BYTES + self.body_length

    @property
    def codec(self) -> int:
        return self.attributes & _CODEC_MASK

    @property
    def timestamp_type(self) -> int:
        return 1 if self.attributes & TIMESTAMP_TYPE else 0

    def pack(self) -> bytes:
        checked = _CHECKED.pack(
            MAGIC,
            VERSION,
            0,
            self.attributes,
            self.producer_epoch,
            self.body_length,
            self.raw_length,
            self.record_count,
            self.last_offset_delta,
            self.base_offset,
            self.base_timestamp,
            self.max_timestamp,
            self.producer_id,
            self.base_sequence,
            self.leader_epoch,
            self.body_crc,
        )
        return checked + _CRC.pack(crc32c(checked))


class Batch(NamedTuple):
    """A header and the body's bytes, still closed."""

    header: BatchHeader
    body: bytes


class Columns(NamedTuple):
    """An opened body. Each column has one entry per record; a column that is None is absent for all of them."""

    timestamp_deltas: list[int] | None
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[list[list[Any]] | None] | None
    offset_deltas: list[int] | None


def parse_header(data: bytes, at: int = 0) -> BatchHeader:
    """Read and prove one header. Raises CorruptBatch, or FutureFormat for a version that is not ours to judge."""
    if len(data) - at < HEADER_BYTES:
        raise CorruptBatch(f"a batch header has {HEADER_BYTES} bytes, not {max(0, len(data) - at)}")
    fields = _LAYOUT.unpack_from(data, at)
    if fields[0] != MAGIC:
        raise CorruptBatch("not a record batch: wrong magic")
    if fields[16] != crc32c(data[at : at + _CRC_AT]):
        raise CorruptBatch("the batch header does not match its checksum")
    if fields[1] != VERSION:
        raise FutureFormat(f"record batch of version {fields[1]}; this build reads version {VERSION}")
    header = BatchHeader(*fields[3:16])
    if fields[2] or header.attributes & ~_KNOWN_ATTRIBUTES:
        raise CorruptBatch("the batch header has reserved bits set")
    codec = header.attributes & _CODEC_MASK
    if header.record_count > header.last_offset_delta + 1 or codec > _CODEC_LAST:
        raise CorruptBatch("the batch header contradicts itself")
    if codec == 0 and header.raw_length != header.body_length:
        raise CorruptBatch("an uncompressed body has two lengths")
    return header


def check_body(header: BatchHeader, body: bytes) -> None:
    """Prove a body against its header without opening it."""
    if len(body) != header.body_length:
        raise CorruptBatch(f"the batch body has {len(body)} bytes, its header says {header.body_length}")
    if crc32c(body) != header.body_crc:
        raise CorruptBatch("the batch body does not match its checksum")


def check_produced(header: BatchHeader, batch_bytes_max: int) -> None:
    """What a broker demands of a batch that a producer sends, beyond its checksums. Raises InvalidRecord."""
    if header.base_offset != UNASSIGNED or header.leader_epoch != UNASSIGNED:
        raise InvalidRecord("offset and epoch of a batch are given by the leader, not by the producer")
    if header.record_count == 0 or header.record_count != header.last_offset_delta + 1:
        raise InvalidRecord(f"a produced batch of {header.record_count} records spans {header.last_offset_delta + 1}")
    if header.total_bytes > batch_bytes_max:
        raise InvalidRecord(f"a batch of {header.total_bytes} bytes is larger than {batch_bytes_max}")
    if header.raw_length > RAW_RATIO_MAX * batch_bytes_max:
        raise InvalidRecord(
            f"a batch that opens into {header.raw_length} bytes: more than {RAW_RATIO_MAX} times the limit"
        )
    if header.attributes & CONTROL:
        raise InvalidRecord("control batches are written by brokers alone")
    if not -1 <= header.base_timestamp <= header.max_timestamp < _TIMESTAMP_MAX:
        raise InvalidRecord("the batch's timestamps are out of range")
    if header.producer_id < 0:
        if (header.producer_id, header.producer_epoch, header.base_sequence) != (-1, -1, -1):
            raise InvalidRecord("producer id, epoch and sequence come together")
    elif header.producer_epoch < 0 or header.base_sequence < 0:
        raise InvalidRecord("a producer's epoch and sequence are not negative")


def encode(
    values: Sequence[bytes | None],
    *,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Any] | None = None,
    timestamp_deltas: Sequence[int] | None = None,
    base_timestamp: int = 0,
    max_timestamp: int | None = None,
    offset_deltas: Sequence[int] | None = None,
    codec: int = 0,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> Batch:
    """Close records into a batch, with offset and epoch still unassigned."""
    assert len(values) > 0, "a batch has records"
    raw = _body(timestamp_deltas, keys, values, headers, offset_deltas)
    body = _compress(codec, raw)
    if max_timestamp is None:
        max_timestamp = base_timestamp + max(timestamp_deltas) if timestamp_deltas else base_timestamp
    return Batch(
        BatchHeader(
            attributes | codec,
            producer_epoch,
            len(body),
            len(raw),
            len(values),
            offset_deltas[-1] if offset_deltas else len(values) - 1,
            UNASSIGNED,
            base_timestamp,
            max_timestamp,
            producer_id,
            base_sequence,
            UNASSIGNED,
            crc32c(body),
        ),
        body,
    )


def _body(timestamps: Sequence[int] | None, *others: Sequence[Any] | None) -> bytes:
    """The CBOR of all columns as one array."""
    if timestamps is None:
        return cbor.dumps([None, *others])
    columns = b"".join(map(cbor.dumps, others))
    return cbor.array_head(1 + len(others)) + cbor.dump_integers(timestamps) + columns


def decode(header: BatchHeader, body: bytes) -> Columns:
    """Open a body that `check_body` has proved. Whatever it holds, the result has the header's shape or it raises."""
    try:
        columns = cbor.loads(_decompress(header, body))
    except BadFrame as error:
        raise CorruptBatch(str(error)) from error
    if type(columns) is not list or len(columns) != len(Columns._fields):
        raise CorruptBatch("a batch body is an array of five columns")
    _check_columns(columns, header)
    return Columns(*columns)


def thinned(header: BatchHeader, columns: Columns, keep: Sequence[int]) -> Batch:
    """The batch with only the records at these positions, some or all.

    Offsets, sequences and the codec stay. So do the timestamps: base_timestamp because others count from it, and
    max_timestamp as a limit that no record exceeds.
    """
    assert keep, "a batch without records is `emptied`"

    def pick(column: Sequence[Any] | None) -> list[Any] | None:
        return None if column is None else [column[at] for at in keep]

    offsets = range(header.record_count) if columns.offset_deltas is None else columns.offset_deltas
    timestamps, keys, values, headers, _ = columns
    raw = cbor.dumps([pick(timestamps), pick(keys), pick(values), pick(headers), pick(offsets)])
    return _with_body(header, header.codec, raw, len(keep))


def emptied(header: BatchHeader) -> Batch:
    """The batch without its records: it still says which offsets and sequences there were."""
    return _with_body(header, 0, _NO_RECORDS, 0)


def void(header: BatchHeader) -> Batch:
    """Only the offsets of a batch: nothing tells of its producer any more."""
    return emptied(msgspec.structs.replace(header, attributes=0, producer_id=-1, producer_epoch=-1, base_sequence=-1))


def is_void(header: BatchHeader) -> bool:
    return not header.record_count and header.producer_id < 0


def void_from(batch: Batch, offset: int) -> Batch:
    """A void without the offsets below this one."""
    header = batch.header
    assert is_void(header)
    assert header.base_offset <= offset < header.next_offset
    rest = msgspec.structs.replace(header, base_offset=offset, last_offset_delta=header.next_offset - 1 - offset)
    return Batch(rest, batch.body)


_NO_RECORDS: bytes = cbor.dumps([None, None, [], None, []])


def _with_body(header: BatchHeader, codec: int, raw: bytes, record_count: int) -> Batch:
    body = _compress(codec, raw)
    changed = msgspec.structs.replace(
        header,
        attributes=header.attributes & ~_CODEC_MASK | codec,
        body_length=len(body),
        raw_length=len(raw),
        record_count=record_count,
        body_crc=crc32c(body),
    )
    return Batch(changed, body)


def split(data: bytes) -> Iterator[Batch]:
    """The batches of a byte range that holds whole ones, each proved."""
    at, end = 0, len(data)
    while at < end:
        header = parse_header(data, at)
        body = data[at + HEADER_BYTES : at + header.total_bytes]
        check_body(header, body)
        yield Batch(header, body)
        at += header.total_bytes


def _check_columns(columns: list[Any], header: BatchHeader) -> None:
    count = header.record_count
    for column in columns:
        if column is not None and (type(column) is not list or len(column) != count):
            raise CorruptBatch(f"a column does not hold {count} entries")
    timestamps, keys, values, headers, offsets = columns
    if values is None or not _holds_bytes(values):
        raise CorruptBatch("values are bytes or null")
    if keys is not None and not _holds_bytes(keys):
        raise CorruptBatch("keys are bytes or null")
    for integers in (timestamps, offsets):
        if integers is not None and set(map(type, integers)) - {int}:
            raise CorruptBatch("timestamp and offset deltas are integers")
    # Readers add the base and keep the sum in 64 bits.
    if timestamps and not -_TIMESTAMP_MAX < min(timestamps) <= max(timestamps) < _TIMESTAMP_MAX:
        raise CorruptBatch("timestamp deltas are out of range")
    _check_offsets(offsets, header)
    if headers is not None:
        for pairs in headers:
            _check_headers(pairs)


def _holds_bytes(column: list[Any]) -> bool:
    """Whether each entry is bytes or None. Of what CBOR can hold a join takes bytes alone, and is faster than asking
    for types."""
    try:
        b"".join(column)
    except TypeError:
        return set(map(type, column)) <= {bytes, _NONE}
    return True


def _check_offsets(offsets: list[int] | None, header: BatchHeader) -> None:
    if offsets is None:
        if header.record_count != header.last_offset_delta + 1:
            raise CorruptBatch("a batch with gaps does not say which offsets its records have")
    elif any(b <= a for a, b in zip([-1, *offsets], offsets, strict=False)):
        raise CorruptBatch("offset deltas do not increase")
    elif offsets and offsets[-1] > header.last_offset_delta:
        raise CorruptBatch("an offset delta is beyond the batch's last")


def _check_headers(pairs: Any) -> None:
    if pairs is None:
        return
    if type(pairs) is not list or len(pairs) > HEADERS_PER_RECORD_MAX:
        raise CorruptBatch(f"the headers of a record are a list of at most {HEADERS_PER_RECORD_MAX}")
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) not in (bytes, _NONE):
            raise CorruptBatch("a record header is a name and bytes")


_MODULES: dict[int, Any] = {1: cramjam.gzip, 2: cramjam.snappy, 3: cramjam.lz4, 4: cramjam.zstd}


def _compress(codec: int, raw: bytes) -> bytes:
    return raw if codec == 0 else bytes(_MODULES[codec].compress(raw))


def _decompress(header: BatchHeader, body: bytes) -> bytes:
    """Never allocates more than the header announces, and the header's announcement is bounded when it is produced."""
    if header.codec == 0:
        return body
    if header.raw_length > RAW_BYTES_MAX:
        raise CorruptBatch(f"a body of {header.raw_length} bytes is larger than {RAW_BYTES_MAX}")
    room = bytearray(header.raw_length)
    try:
        written = _MODULES[header.codec].decompress_into(body, room)
    except (cramjam.DecompressionError, ValueError, MemoryError) as error:
        raise CorruptBatch(f"the batch body does not decompress: {error}") from error
    if written != header.raw_length:
        raise CorruptBatch("the batch body is shorter than its header says")
    return bytes(room)
