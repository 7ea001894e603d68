"""Logs that look large and are not: true batches with records of zeros, which are holes in their files.

Every header, checksum, index and summary is what a broker would have written, and every record can be read; only the
blocks between the two ends of a value were never written, so a batch of 1 MiB takes 4 to 8 KiB of a disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from google_crc32c import value as crc32c

from zmqueue.core.epochs import Epochs
from zmqueue.core.producers import Producers
from zmqueue.log.files import DiskFiles
from zmqueue.log.segment import Segment
from zmqueue.model import KiB, MiB
from zmqueue.wire.batch import HEADER_BYTES, BatchHeader, encode


class Size(NamedTuple):
    """`apparent` is what `ls` says, `real` what the files take."""

    batches: int
    segments: int
    apparent: int
    real: int

    def __add__(self, other: object) -> Size:
        assert isinstance(other, Size)
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


class Hollow(NamedTuple):
    """A batch of one record of zeros: its header, and what stands before and behind the zeros."""

    header: BatchHeader
    before: bytes
    behind: bytes


def value_bytes(batch_bytes: int) -> int:
    """Of the one record in a batch of `batch_bytes`. How long its length is written depends on it."""
    for overhead in range(HEADER_BYTES + 6, HEADER_BYTES + 16):
        if encode([bytes(batch_bytes - overhead)]).header.total_bytes == batch_bytes:
            return batch_bytes - overhead
    raise ValueError(f"no single record makes a batch of {batch_bytes} bytes")


def hollow(batch_bytes: int) -> Hollow:
    """Of exactly `batch_bytes`."""
    value = bytes(value_bytes(batch_bytes))
    header, body = encode([value])
    at = body.index(value)
    assert (header.total_bytes, header.body_crc) == (batch_bytes, crc32c(body))
    return Hollow(header, body[:at], body[at + len(value) :])


def make(
    folder: Path,
    total_bytes: int,
    *,
    segment_bytes: int = 64 * MiB,
    batch_bytes: int = 1 * MiB,
    base_time_ms: int = 0,
    index_interval_bytes: int = 64 * KiB,
) -> Size:
    """A log of `total_bytes`, with a millisecond between two batches. Its last segment is not sealed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = DiskFiles()
    one = hollow(batch_bytes)
    header, epochs, producers = one.header, Epochs(), Producers().encode()
    header.leader_epoch = 0
    offset = size = segments = real = 0
    while size < total_bytes:
        segment = Segment(files, str(folder), offset, index_interval_bytes)
        fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        while segment.size + batch_bytes <= segment_bytes and size < total_bytes:
            header.base_offset = offset
            header.base_timestamp = header.max_timestamp = base_time_ms + offset
            position = segment.size
            segment.note(header)
            epochs.note(0, offset)
            os.pwrite(fd, header.pack() + one.before, position)
            os.pwrite(fd, one.behind, segment.size - len(one.behind))
            offset, size = header.next_offset, size + batch_bytes
        if size < total_bytes:
            segment.seal(epochs.within(segment.base_offset, segment.next_offset), producers)
        real += os.fstat(fd).st_blocks * 512
        segments += 1
        os.close(fd)
    files.close()
    return Size(offset, segments, size, real)
