"""The Raft journal: entries, current term and vote of one broker, kept so that a crash can lose nothing promised.

Invariants
- What `sync()` returned for is on the disk. Nothing is acknowledged, voted or replicated before it (the caller's part).
- Entries are consecutive: each index is one above its predecessor, terms never fall.
- An entry goes only when a leader's entry with the same index contradicts it (Raft's log matching rule), or as part of
  a prefix that a snapshot covers. PySyncObj deletes a follower's tail on every re-send and adds the same entries again;
  a kill between the two would lose acknowledged entries. Here the deletion does nothing, `add` recognises an identical
  entry and keeps what stands behind it, and only a difference truncates. Entries that a leader has not confirmed may
  therefore follow confirmed ones, as in Raft's own description: the caller must not commit past what a message covers.
- Files change in three ways only: a record is appended, the tail is truncated and made durable before anything is
  written behind it, or a whole new file replaces the old one (write, fsync, rename, fsync of the folder).

On disk, little-endian. `journal`: magic, version, crc of both; then records of crc32c, payload length, index, term,
payload, where the crc covers all that follows it. `vote` and other small files: magic, version, payload length, crc of
the payload, crc of the header, payload.

Opening cuts a torn tail: bytes after the last whole record, if no whole record lies behind them. Anything worse raises
and leaves the file as it is, because a journal that guesses can vote away what others rely on.

Plain writes, never mmap: a full disk is then an error of one call and not a signal that ends the process.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeAlias, overload

import google_crc32c

from zmqueue.errors import CorruptLog, FutureFormat, StorageFailed, StorageFull, ZmqueueError
from zmqueue.model import MiB

log = logging.getLogger(__name__)

Entry: TypeAlias = tuple[bytes, int, int]
"""Command, index, term, in the order in which PySyncObj hands them over."""

VERSION = 1
RECORD_BYTES_MAX = 1 * MiB

JOURNAL_FILE = "journal"
VOTE_FILE = "vote"

_JOURNAL_MAGIC = b"ZMQRAFTJ"
_VOTE_MAGIC = b"ZMQRAFTV"

_FILE_HEADER = struct.Struct("<8sI")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _FILE_HEADER.size + _CRC.size
_RECORD = struct.Struct("<IQQ")
_RECORD_BYTES = _CRC.size + _RECORD.size
_CHECKED = struct.Struct("<8sIII")
_CHECKED_BYTES = _CHECKED.size + _CRC.size
_VOTE = struct.Struct("<Q?")


def _crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def storage_error(error: OSError, what: str) -> StorageFull | StorageFailed:
    """The typed error for what the disk said."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (StorageFull if full else StorageFailed)(f"{what}: {error.strerror or error}")


# -- whole files ---------------------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view = view[written:]
        position += written


def replace_file(path: Path, data: bytes) -> None:
    """After this returns the file holds `data`; after a crash inside, it holds either that or what it held before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, f"{path} could not be replaced") from error


def pack_checked(magic: bytes, payload: bytes) -> bytes:
    header = _CHECKED.pack(magic, VERSION, len(payload), _crc(payload))
    return header + _CRC.pack(_crc(header)) + payload


def unpack_checked(magic: bytes, data: bytes, name: str) -> bytes:
    """The payload, if every bit of it is what was written."""
    if len(data) < _CHECKED_BYTES:
        raise CorruptLog(f"{name} is shorter than its header")
    found, version, length, crc = _CHECKED.unpack_from(data)
    if found != magic or _CRC.unpack_from(data, _CHECKED.size)[0] != _crc(data[: _CHECKED.size]):
        raise CorruptLog(f"{name} has a damaged header")
    if version > VERSION:
        raise FutureFormat(f"{name} has version {version}, this program knows {VERSION}")
    payload = data[_CHECKED_BYTES:]
    if len(payload) != length or _crc(payload) != crc:
        raise CorruptLog(f"{name} does not match its checksum")
    return payload


def check_file(data: bytes, name: str) -> None:
    """Prove a checked file of whatever kind."""
    unpack_checked(data[:8], data, name)


def read_checked(path: Path, magic: bytes) -> bytes:
    return unpack_checked(magic, _read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptLog(f"{path} is missing") from error
    except OSError as error:
        raise storage_error(error, f"{path} could not be read") from error


# -- records -------------------------------------------------------------------------------------------------------


def _pack_header() -> bytes:
    header = _FILE_HEADER.pack(_JOURNAL_MAGIC, VERSION)
    return header + _CRC.pack(_crc(header))


def _check_header(data: bytes, name: str) -> None:
    if len(data) < _HEADER_BYTES:
        raise CorruptLog(f"{name} is shorter than its header")
    magic, version = _FILE_HEADER.unpack_from(data)
    if magic != _JOURNAL_MAGIC or _CRC.unpack_from(data, _FILE_HEADER.size)[0] != _crc(data[: _FILE_HEADER.size]):
        raise CorruptLog(f"{name} has a damaged header")
    if version > VERSION:
        raise FutureFormat(f"{name} has version {version}, this program knows {VERSION}")


def _pack_record(entry: Entry) -> bytes:
    command, index, term = entry
    body = _RECORD.pack(len(command), index, term) + command
    return _CRC.pack(_crc(body)) + body


def _record_at(data: bytes, position: int) -> tuple[Entry, int] | None:
    """The whole record that begins at `position` and where it ends, or nothing."""
    start = position + _RECORD_BYTES
    if start > len(data):
        return None
    length, index, term = _RECORD.unpack_from(data, position + _CRC.size)
    end = start + length
    if length > RECORD_BYTES_MAX or end > len(data):
        return None
    if _CRC.unpack_from(data, position)[0] != _crc(data[position + _CRC.size : end]):
        return None
    return (data[start:end], index, term), end


def _scan(data: bytes, name: str) -> tuple[list[Entry], list[int], int]:
    """All entries, where each begins, and where the next one goes."""
    entries: list[Entry] = []
    offsets: list[int] = []
    position = _HEADER_BYTES
    while (record := _record_at(data, position)) is not None:
        entry, end = record
        if entries and (entry[1] != entries[-1][1] + 1 or entry[2] < entries[-1][2]):
            raise CorruptLog(f"{name}: entry {entry[1]} of term {entry[2]} follows {entries[-1][1:]}")
        entries.append(entry)
        offsets.append(position)
        position = end
    # Appends reach the disk in order up to the last sync, so a whole record behind a broken one means that something
    # already promised was damaged. Byte by byte, because the broken record's own length cannot be trusted.
    for behind in range(position + 1, len(data) - _RECORD_BYTES + 1):
        if _record_at(data, behind) is not None:
            raise CorruptLog(f"{name} is damaged at byte {position}, with whole entries from byte {behind}")
    return entries, offsets, position


def read_entries(folder: Path) -> tuple[list[Entry], int]:
    """The entries of a journal that may be in use, and how many bytes behind the last are none. Nothing is touched."""
    path = folder / JOURNAL_FILE
    data = _read(path)
    _check_header(data, str(path))
    entries, _, end = _scan(data, str(path))
    return entries, len(data) - end


class Journal:
    """One broker's Raft journal, with the method names that PySyncObj calls.

    `on_full` is asked once when the disk is full; if it says that it freed space, the write is tried again.
    `failed`, once set, stays: after a failed sync the kernel may call lost pages clean, so only what a new start reads
    back can be trusted.
    """

    def __init__(self, folder: Path, *, on_full: Callable[[], bool] = lambda: False) -> None:
        self._path = folder / JOURNAL_FILE
        self._vote_path = folder / VOTE_FILE
        self._on_full = on_full
        self._term, self._vote = _unpack_vote(read_checked(self._vote_path, _VOTE_MAGIC))
        data = _read(self._path)
        _check_header(data, str(self._path))
        self._entries, self._offsets, self._end = _scan(data, str(self._path))
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._dirty = False
        self._vote_pending = False
        self._commit_index = 0
        self.failed: str | None = None
        self.full = False
        self.syncs = 0
        if self._end < len(data):
            log.warning("%s: cutting a torn tail of %d bytes", self._path, len(data) - self._end)
            self._cut(self._end)

    @classmethod
    def create(cls, folder: Path) -> None:
        """An empty journal of term 0. The journal comes last: where it exists, the vote file does."""
        replace_file(folder / VOTE_FILE, pack_checked(_VOTE_MAGIC, _pack_vote(0, None)))
        replace_file(folder / JOURNAL_FILE, _pack_header())

    @property
    def size_bytes(self) -> int:
        return self._end

    def find(self, index: int) -> Entry | None:
        position = index - self._entries[0][1] if self._entries else -1
        return self._entries[position] if 0 <= position < len(self._entries) else None

    def sync(self) -> None:
        """Entries, term and vote are durable when this returns."""
        if self.failed is not None:
            raise StorageFailed(self.failed)
        if self._vote_pending:
            self._store_vote()
        if self._dirty:
            self.syncs += 1
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._fail(error, "could not be synced")
            self._dirty = False

    def reset(self, entries: Iterable[Entry]) -> None:
        """Exactly these entries, in one step."""
        self._replace(list(entries))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- as PySyncObj calls it -------------------------------------------------------------------------------------

    def add(self, command: bytes, idx: int, term: int) -> None:
        if self._entries and idx <= self._entries[-1][1]:
            if idx < self._entries[0][1]:
                return  # a snapshot covers it, so it is committed and cannot differ
            known = self.find(idx)
            if known == (command, idx, term):
                return
            self._truncate(idx)
        assert not self._entries or idx == self._entries[-1][1] + 1, f"gap before entry {idx}"
        self._append((bytes(command), idx, term))

    def clear(self) -> None:
        self._replace([])

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        """Nothing yet: `add` truncates if what follows differs (see the module's invariants)."""

    def deleteEntriesTo(self, entryTo: int) -> None:
        """Drop the first `entryTo` entries. A disk too full for the new file keeps the old one, which is as good."""
        try:
            self._replace(self._entries[entryTo:])
        except StorageFull as error:
            log.warning("%s was not compacted: %s", self._path, error)

    @overload
    def __getitem__(self, item: int) -> Entry: ...
    @overload
    def __getitem__(self, item: slice) -> list[Entry]: ...
    def __getitem__(self, item: int | slice) -> Entry | list[Entry]:
        return self._entries[item]

    def __len__(self) -> int:
        return len(self._entries)

    def _destroy(self) -> None:
        self.close()

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        """Kept in memory only, to notice a leader that contradicts it: after a start the leader tells it again."""
        self._commit_index = max(self._commit_index, raftCommitIndex)

    def getRaftCommitIndex(self) -> int:
        return 1

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        """A disk that refuses leaves the change pending: `sync()` repeats it, and until then no message goes out."""
        self._term, self._vote, self._vote_pending = term, votedForNodeId, True
        try:
            self._store_vote()
        except ZmqueueError as error:
            log.error("term %d and its vote are not stored yet: %s", term, error)

    def getCurrentTerm(self) -> int:
        return self._term

    def getVotedForNodeId(self) -> str | None:
        return self._vote

    def onOneSecondTimer(self) -> None:
        """PySyncObj's moment for saving the commit index, which this journal does not save."""

    # -- changes on disk -------------------------------------------------------------------------------------------

    def _append(self, entry: Entry) -> None:
        if self.failed is not None:
            raise StorageFailed(self.failed)
        record = _pack_record(entry)
        try:
            self._with_space(functools.partial(self._write, record))
        except StorageFull:
            self.full = True
            raise
        self.full = False
        self._dirty = True
        self._entries.append(entry)
        self._offsets.append(self._end)
        self._end += len(record)

    def _with_space(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StorageFull:
            if not self._on_full():
                raise
            write()

    def _write(self, record: bytes) -> None:
        try:
            _write_all(self._fd, record, self._end)
        except OSError as error:
            # A part of the record may have been written; the next one must not follow it.
            self._cut(self._end)
            raise storage_error(error, f"{self._path} could not grow") from error

    def _truncate(self, index: int) -> None:
        if index <= self._commit_index:
            self.failed = f"{self._path}: the leader contradicts entry {index}, committed up to {self._commit_index}"
            log.critical("%s", self.failed)
            raise CorruptLog(self.failed)
        position = index - self._entries[0][1]
        self._cut(self._offsets[position])
        self._end = self._offsets[position]
        del self._entries[position:]
        del self._offsets[position:]

    def _cut(self, end: int) -> None:
        """Durable at once: otherwise pages of the old tail could survive behind new records and look like damage."""
        try:
            os.ftruncate(self._fd, end)
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error, "could not be truncated")
        self._dirty = False

    def _replace(self, entries: list[Entry]) -> None:
        if self.failed is not None:
            raise StorageFailed(self.failed)
        records = [_pack_record(entry) for entry in entries]
        data = _pack_header() + b"".join(records)
        try:
            self._with_space(functools.partial(replace_file, self._path, data))
        except ZmqueueError as error:
            if not os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                # Renamed, but the folder could not be synced: which of the two files a crash leaves is unknown.
                self.failed = str(error)
            raise
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._fail(error, "could not be opened again")
        os.close(self._fd)
        self._fd = fd
        self._dirty = False
        self._entries = entries
        self._offsets = []
        position = _HEADER_BYTES
        for record in records:
            self._offsets.append(position)
            position += len(record)
        self._end = position

    def _store_vote(self) -> None:
        data = pack_checked(_VOTE_MAGIC, _pack_vote(self._term, self._vote))
        self._with_space(functools.partial(replace_file, self._vote_path, data))
        self._vote_pending = False

    def _fail(self, error: OSError, what: str) -> NoReturn:
        self.failed = f"{self._path} {what}: {error.strerror or error}"
        log.critical("%s", self.failed)
        raise StorageFailed(self.failed) from error


def _pack_vote(term: int, vote: str | None) -> bytes:
    return _VOTE.pack(term, vote is not None) + (vote or "").encode()


def _unpack_vote(payload: bytes) -> tuple[int, str | None]:
    term, voted = _VOTE.unpack_from(payload)
    return term, payload[_VOTE.size :].decode() if voted else None
