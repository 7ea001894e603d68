"""Files that are written whole, never changed, and believed only where a checksum proves them.

    pages      4,096 bytes each: content, page number, entries, 0, CRC
    fences     the first entry of each page
    summary    what the file is about
    trailer    magic, version, pages, entries, bytes of the summary, CRC over fences, summary and trailer

A lookup bisects the fences and reads one page. The CRCs begin with an offset that is also the file's name, so that a
file under another's name proves nothing. Two kinds of index have this shape: index.py and keys.py.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from google_crc32c import extend as crc32c_extend

from zmqueue.errors import CorruptIndex, FutureFormat
from zmqueue.log.files import Files

PAGE_BYTES = 4096
_PAGE_END = struct.Struct("<IIII")  # number, entries, zero, CRC
ROOM_BYTES = PAGE_BYTES - _PAGE_END.size
_TRAILER = struct.Struct("<4sHHIIII")  # magic, version, zero, pages, entries, bytes of the summary, CRC


class Kind(NamedTuple):
    magic: bytes
    version: int
    page_entries: int
    fence_bytes: int


class Tail(NamedTuple):
    """What stands behind the pages, proved."""

    pages: int
    entries: int
    fences: bytes
    told: bytes


def crc(base_offset: int, *parts: bytes | memoryview) -> int:
    value = crc32c_extend(0, base_offset.to_bytes(8, "little", signed=True))
    for part in parts:
        value = crc32c_extend(value, bytes(part))
    return int(value)


def seal(base_offset: int, number: int, entries: int, content: bytes) -> bytes:
    """One page."""
    page = content.ljust(ROOM_BYTES, b"\0") + _PAGE_END.pack(number, entries, 0, 0)[:-4]
    return page + crc(base_offset, page).to_bytes(4, "little")


def entries_of(page: bytes | memoryview) -> int:
    return int(_PAGE_END.unpack_from(page, ROOM_BYTES)[1])


def prove(path: str, kind: Kind, base_offset: int, number: int, page: bytes | memoryview) -> int:
    """How many entries the page has. Raises CorruptIndex."""
    if len(page) != PAGE_BYTES:
        raise CorruptIndex(f"{path}: ends within page {number}")
    found, entries, _, told = _PAGE_END.unpack_from(page, ROOM_BYTES)
    if told != crc(base_offset, page[:-4]) or found != number or not 0 < entries <= kind.page_entries:
        raise CorruptIndex(f"{path}: page {number} is damaged")
    return int(entries)


def tail(kind: Kind, base_offset: int, pages: int, entries: int, fences: bytes, told: bytes) -> bytes:
    assert len(fences) == pages * kind.fence_bytes
    trailer = _TRAILER.pack(kind.magic, kind.version, 0, pages, entries, len(told), 0)[:-4]
    return b"".join([fences, told, trailer, crc(base_offset, fences, told, trailer).to_bytes(4, "little")])


def load_tail(files: Files, path: str, kind: Kind, base_offset: int) -> Tail:
    """Raises CorruptIndex, and FutureFormat for a newer build's file."""
    size = files.size(path)
    if size < _TRAILER.size:
        raise CorruptIndex(f"{path}: {size} bytes")
    magic, version, _, pages, entries, told_bytes, told_crc = _TRAILER.unpack(
        files.pread(path, _TRAILER.size, size - _TRAILER.size)
    )
    if magic != kind.magic:
        raise CorruptIndex(f"{path}: no index")
    start = pages * PAGE_BYTES
    behind = files.pread(path, size - start, start) if start < size else b""
    fences_bytes = pages * kind.fence_bytes
    if len(behind) != fences_bytes + told_bytes + _TRAILER.size or told_crc != crc(base_offset, behind[:-4]):
        raise CorruptIndex(f"{path}: damaged")
    if version != kind.version:
        raise FutureFormat(f"{path}: version {version}; this build reads {kind.version}")
    if -(-entries // kind.page_entries) != pages:
        raise CorruptIndex(f"{path}: {entries} entries in {pages} pages")
    return Tail(pages, entries, behind[:fences_bytes], behind[fences_bytes : fences_bytes + told_bytes])
