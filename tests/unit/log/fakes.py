"""A disk that forgets what was not synced, stops at any step and fills up; and batches to put on it."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zmqueue.config import LogConfig
from zmqueue.errors import DataFolderInUse, StorageFailed, StorageFull
from zmqueue.log.files import Buffer, Files, OpenFile
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.segment import segment_name
from zmqueue.wire.batch import Batch, encode, split

SMALL = LogConfig(segment_bytes_max=1024, batch_bytes_max=1024, index_interval_bytes=256)


def batch(
    offset: int,
    records: int = 1,
    epoch: int = 0,
    *,
    value: bytes = b"value",
    time: int = 1000,
    step: int = 1,
    producer: tuple[int, int, int] = (-1, -1, -1),
    keys: Sequence[bytes | None] | None = None,
) -> Batch:
    """`producer`: id, epoch and the sequence of the first record."""
    producer_id, producer_epoch, sequence = producer
    made = encode(
        [value + b"-%d" % (offset + i) for i in range(records)],
        keys=keys,
        timestamp_deltas=[i * step for i in range(records)],
        base_timestamp=time,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
    )
    made.header.base_offset = offset
    made.header.leader_epoch = epoch
    return made


def batches(count: int, start: int = 0, epoch: int = 0) -> list[Batch]:
    return [batch(start + 3 * nth, 3, epoch) for nth in range(count)]


def raw(made: Batch) -> bytes:
    return made.header.pack() + made.body


def content(log: PartitionLog) -> list[Batch]:
    """All of a log, by reading it."""
    batches: list[Batch] = []
    offset = log.log_start
    while data := log.read(offset, 700, log.log_end):
        batches += split(data)
        offset = batches[-1].header.next_offset
    assert offset == log.log_end
    return batches


def flush(log: PartitionLog) -> None:
    ticket = log.begin_flush()
    if not ticket.empty:
        ticket.sync()
    assert log.flushed(ticket)


class Crash(BaseException):
    """The power went. Not an Exception: nothing may handle it."""


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    # Since the last sync: bytes appended, or the size truncated to.
    pending: list[bytes | int] = field(default_factory=list)


@dataclass
class Folder:
    entries: dict[str, Inode] = field(default_factory=dict)
    synced: dict[str, Inode] = field(default_factory=dict)
    pending: list[dict[str, Inode | None]] = field(default_factory=list)

    def change(self, changes: dict[str, Inode | None]) -> None:
        apply(self.entries, changes)
        self.pending.append(changes)


def apply(entries: dict[str, Inode], changes: dict[str, Inode | None]) -> None:
    for name, inode in changes.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


class FakeFile(OpenFile):
    __slots__ = ("_disk", "_inode")

    def __init__(self, disk: FakeDisk, path: str, inode: Inode) -> None:
        super().__init__(path, len(inode.data))
        self._disk, self._inode = disk, inode

    def append(self, buffers: Sequence[Buffer], total: int) -> None:
        data = b"".join(buffers)
        assert len(data) == total
        try:
            self._disk.step()
        except Crash:
            self._disk.cut_off = self._inode, data
            self._inode.pending.append(data)
            raise
        if self._disk.room is not None and total > self._disk.room:
            # Part of it reached the file before it was taken back.
            self._inode.pending += [data[: self._disk.room], len(self._inode.data)]
            raise StorageFull("full")
        if self._disk.room is not None:
            self._disk.room -= total
        self._inode.data += data
        self._inode.pending.append(data)
        self.size += total

    def pread(self, count: int, position: int) -> bytes:
        return bytes(self._inode.data[position : position + count])

    def truncate(self, size: int) -> None:
        self._disk.step()
        del self._inode.data[size:]
        self._inode.pending.append(size)
        self.size = size

    def sync(self) -> None:
        self._disk.step()
        if self._disk.sync_error:
            raise StorageFailed("EIO")
        self._inode.synced = bytes(self._inode.data)
        self._inode.pending = []

    def _release(self) -> None:
        self._disk.open_files -= 1


class FakeDisk:
    """`crash_at` counts steps, each a change or a sync; `room` are the bytes left."""

    volatile = False

    def __init__(self, crash_at: int | None = None) -> None:
        self.folders: dict[str, Folder] = {}
        self.steps = 0
        self.crash_at = crash_at
        self.room: int | None = None
        self.sync_error = False
        self.open_files = 0
        # The write that a crash came into.
        self.cut_off: tuple[Inode, bytes] | None = None

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.crash_at:
            raise Crash

    def after_kill(self, chance: random.Random) -> FakeDisk:
        """What another process finds when only this one ended: every step, and of the last write some part."""
        disk = copy.deepcopy(self)
        disk.crash_at, disk.steps, disk.open_files = None, 0, 0
        if disk.cut_off is not None:
            inode, data = disk.cut_off
            written = data[: chance.randint(0, len(data))]
            inode.data += written
            inode.pending[-1] = written
            disk.cut_off = None
        return disk

    def after_power_cut(self, chance: random.Random) -> FakeDisk:
        """What another process finds: all that was synced, and some of the rest."""
        disk = FakeDisk()
        for path, folder in self.folders.items():
            entries = dict(folder.synced)
            if chance.random() < 0.5:
                survived = folder.pending[: chance.randint(0, len(folder.pending))]
            else:
                survived = [change for change in folder.pending if chance.random() < 0.5]
            for change in survived:
                apply(entries, change)
            fresh = Folder({name: self._survivor(inode, chance) for name, inode in entries.items()})
            fresh.synced = dict(fresh.entries)
            disk.folders[path] = fresh
        return disk

    @staticmethod
    def _survivor(inode: Inode, chance: random.Random) -> Inode:
        data = bytearray(inode.synced)
        reached = chance.randint(0, len(inode.pending))
        for nth, change in enumerate(inode.pending[: reached + 1]):
            if isinstance(change, int):
                if nth < reached:
                    del data[change:]
            elif nth < reached:
                data += change
            else:
                torn = chance.randint(0, len(change))
                data += change[:torn] + bytes(chance.choice([0, len(change) - torn]))
        return Inode(data, bytes(data))

    def _at(self, path: str) -> tuple[Folder, str]:
        folder, name = os.path.split(path)
        if folder not in self.folders:
            raise StorageFailed(f"{folder}: no such folder")
        return self.folders[folder], name

    def _inode(self, path: str) -> Inode:
        folder, name = self._at(path)
        if name not in folder.entries:
            raise StorageFailed(f"{path}: no such file")
        return folder.entries[name]

    def _opened(self, path: str, inode: Inode) -> OpenFile:
        self.open_files += 1
        return FakeFile(self, path, inode)

    def create(self, path: str) -> OpenFile:
        folder, name = self._at(path)
        assert name not in folder.entries, f"{path} exists"
        self.step()
        folder.change({name: Inode()})
        return self._opened(path, folder.entries[name])

    def open_append(self, path: str) -> OpenFile:
        return self._opened(path, self._inode(path))

    def pread(self, path: str, count: int, position: int) -> bytes:
        return bytes(self._inode(path).data[position : position + count])

    def map(self, path: str) -> memoryview:
        return memoryview(bytes(self._inode(path).data))

    def put(self, path: str, data: bytes) -> None:
        self.step()
        folder, name = self._at(path)
        folder.change({name: Inode()})
        file = self._opened(path, folder.entries[name])
        file.append([data], len(data))
        file.close()

    def size(self, path: str) -> int:
        return len(self._inode(path).data)

    def exists(self, path: str) -> bool:
        folder, name = os.path.split(path)
        return path in self.folders or (folder in self.folders and name in self.folders[folder].entries)

    def rename(self, path: str, to: str) -> None:
        self.step()
        if path in self.folders:
            self.folders[to] = self.folders.pop(path)
            return
        folder, name = self._at(path)
        folder.change({name: None, os.path.basename(to): folder.entries[name]})

    def remove(self, path: str) -> None:
        self.step()
        if path in self.folders:
            del self.folders[path]
            return
        folder, name = self._at(path)
        assert name in folder.entries
        folder.change({name: None})

    def listdir(self, path: str) -> list[str]:
        files = self.folders[path].entries if path in self.folders else {}
        return sorted([*files, *(os.path.basename(name) for name in self.folders if os.path.dirname(name) == path)])

    def mkdir(self, path: str) -> None:
        self.folders.setdefault(path, Folder())

    def fsync_dir(self, path: str) -> None:
        self.step()
        if self.sync_error:
            raise StorageFailed("EIO")
        if path in self.folders:
            folder = self.folders[path]
            folder.synced, folder.pending = dict(folder.entries), []

    def replace(self, path: str, data: bytes) -> None:
        self.step()
        folder, name = self._at(path)
        folder.change({f"{name}.tmp": Inode()})
        file = self._opened(f"{path}.tmp", folder.entries[f"{name}.tmp"])
        file.append([data], len(data))
        file.sync()
        file.close()
        self.rename(f"{path}.tmp", path)
        self.fsync_dir(os.path.dirname(path))

    def read_small(self, path: str) -> bytes | None:
        return bytes(self._inode(path).data) if self.exists(path) else None

    def lock(self, path: str) -> _NoLock:
        raise DataFolderInUse(path)

    def close(self) -> None:
        """Nothing is held."""


def disk_with(files: Mapping[int, bytes]) -> FakeDisk:
    """A disk with these segments, all of it synced."""
    disk = FakeDisk()
    disk.mkdir("p")
    for base_offset, data in files.items():
        file = disk.create(f"p/{segment_name(base_offset)}")
        file.append([data], len(data))
        file.sync()
        file.close()
    disk.fsync_dir("p")
    disk.steps = 0
    return disk


class _NoLock:
    def release(self) -> None:
        """Never held."""


_fits: Files = FakeDisk()
