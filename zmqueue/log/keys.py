"""Where the records with a certain value lie: one immutable file per range of offsets, `FROM-END.keys`.

The file has the shape that pages.py tells. An entry is 16 bytes: a hash of the value, then the record's offset, both
big-endian, so that entries sort as bytes do: by hash, and the offsets of one value in their order. A page has 255 of
them, a fence is the first one. The summary says which offsets the file covers and by what field they are indexed.

What a file says by having no entry must be as true as what it says by having one, so a file is used for the range that
it covers and for nothing else, and each page is proved each time it is read. The other way round an entry proves
nothing: two values may share a hash, and a record may have been compacted away since. Whoever finds an entry reads the
record and compares. Offsets never move, so compaction and deletion make a file larger than it need be, never wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b

import msgspec
from msgspec import Struct

from zmqueue.errors import CorruptIndex
from zmqueue.log import pages as paged
from zmqueue.log.files import Files
from zmqueue.log.pages import PAGE_BYTES

SUFFIX = ".keys"
TEMPORARY = SUFFIX + ".tmp"
HASH_BYTES = 8
ENTRY_BYTES = 16
PAGE_ENTRIES = paged.ROOM_BYTES // ENTRY_BYTES
_KIND = paged.Kind(b"ZQKY", 1, PAGE_ENTRIES, ENTRY_BYTES)
_NAME = re.compile(r"(\d{20})-(\d{20})\.keys\Z")


class Summary(Struct, frozen=True):
    from_offset: int
    end_offset: int
    kind: str
    path: str

    @property
    def definition(self) -> tuple[str, str]:
        return self.kind, self.path


def file_name(from_offset: int, end_offset: int) -> str:
    return f"{from_offset:020d}-{end_offset:020d}{SUFFIX}"


def parse_name(name: str) -> tuple[int, int] | None:
    """The range that a file of this name covers; None for another kind of file."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


def key_of(value: bytes) -> bytes:
    return blake2b(value, digest_size=HASH_BYTES).digest()


def entry_of(value: bytes, offset: int) -> bytes:
    return blake2b(value, digest_size=HASH_BYTES).digest() + offset.to_bytes(8, "big")


class KeysWriter:
    """Takes entries in order, and makes the file of them."""

    def __init__(self, from_offset: int) -> None:
        self.entries = 0
        self._base = from_offset
        self._parts: list[bytes] = []
        self._fences: list[bytes] = []
        self._open: list[bytes] = []

    def add(self, entries: list[bytes]) -> None:
        self.entries += len(entries)
        waiting = self._open + entries if self._open else entries
        whole = len(waiting) - len(waiting) % PAGE_ENTRIES
        for at in range(0, whole, PAGE_ENTRIES):
            self._close(waiting[at : at + PAGE_ENTRIES])
        self._open = waiting[whole:]

    def _close(self, entries: list[bytes]) -> None:
        self._parts.append(paged.seal(self._base, len(self._fences), len(entries), b"".join(entries)))
        self._fences.append(entries[0])

    def finish(self, summary: Summary) -> bytes:
        assert summary.from_offset == self._base
        if self._open:
            self._close(self._open)
        told = msgspec.msgpack.encode(summary)
        fences = b"".join(self._fences)
        self._parts.append(paged.tail(_KIND, self._base, len(self._fences), self.entries, fences, told))
        return b"".join(self._parts)


class KeysFile:
    """One file, proved as far as it is read. The fences stay in memory: 16 bytes for 255 entries."""

    __slots__ = ("_fences", "_files", "entries", "misses", "pages", "path", "size", "summary")

    def __init__(self, files: Files, path: str, tail: paged.Tail, summary: Summary) -> None:
        self._files = files
        self._fences = tail.fences
        self.path = path
        self.pages = tail.pages
        self.entries = tail.entries
        self.size = tail.pages * PAGE_BYTES + len(tail.fences) + len(tail.told)
        self.summary = summary
        self.misses = 0  # entries that were found and whose record was not

    @property
    def from_offset(self) -> int:
        return self.summary.from_offset

    @property
    def end_offset(self) -> int:
        return self.summary.end_offset

    def lookup(self, key: bytes, from_offset: int) -> Iterator[int]:
        """Offsets from `from_offset` on at which a value of this hash was. Raises CorruptIndex."""
        wanted = key + from_offset.to_bytes(8, "big")
        for number in range(max(0, _below(self._fences, wanted) - 1), self.pages):
            page = self._page(number)
            for at in range(_below(page, wanted) * ENTRY_BYTES, len(page), ENTRY_BYTES):
                if page[at : at + HASH_BYTES] != key:
                    return
                yield int.from_bytes(page[at + HASH_BYTES : at + ENTRY_BYTES], "big")

    def listed(self) -> Iterator[list[bytes]]:
        """All entries, a page at a time. Raises CorruptIndex."""
        for number in range(self.pages):
            page = self._page(number)
            yield [page[at : at + ENTRY_BYTES] for at in range(0, len(page), ENTRY_BYTES)]

    def verify(self) -> None:
        """Every page. Raises CorruptIndex."""
        for number in range(self.pages):
            self._page(number)

    def _page(self, number: int) -> bytes:
        page = self._files.pread(self.path, PAGE_BYTES, number * PAGE_BYTES)
        entries = paged.prove(self.path, _KIND, self.from_offset, number, page)
        return page[: entries * ENTRY_BYTES]


def _below(entries: bytes, wanted: bytes) -> int:
    """How many of these sorted entries are below `wanted`."""
    low, high = 0, len(entries) // ENTRY_BYTES
    while low < high:
        middle = (low + high) // 2
        if entries[middle * ENTRY_BYTES : (middle + 1) * ENTRY_BYTES] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def load(files: Files, folder: str, name: str) -> KeysFile:
    """Raises CorruptIndex, and FutureFormat for a newer build's file."""
    covered = parse_name(name)
    assert covered is not None, name
    return load_as(files, f"{folder}/{name}", *covered)


def load_as(files: Files, path: str, from_offset: int, end_offset: int) -> KeysFile:
    """A file that may have another name yet."""
    tail = paged.load_tail(files, path, _KIND, from_offset)
    try:
        summary = msgspec.msgpack.decode(tail.told, type=Summary)
    except msgspec.MsgspecError as error:
        raise CorruptIndex(f"{path}: {error}") from error
    if (summary.from_offset, summary.end_offset) != (from_offset, end_offset):
        raise CorruptIndex(f"{path}: covers {summary.from_offset} to {summary.end_offset}")
    return KeysFile(files, path, tail, summary)
