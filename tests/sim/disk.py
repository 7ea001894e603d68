"""A disk that forgets what was not synced.

It keeps two views of everything: what a running process sees, and what would be there after a power cut. A file's bytes
become durable by `sync`, a name in a folder by `fsync_dir` of that folder. A power cut keeps, of each file, a prefix of
the unsynced bytes that ends anywhere (its last byte may be garbage), and of each folder a prefix of its unsynced
changes. An unsynced truncation may be undone.

`kill -9` loses nothing: the page cache survives the process. `crash_in` ends the process in the middle of whatever it
is doing, at the n-th operation that changes the disk from now on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from zmqueue.errors import StorageFailed, StorageFull
from zmqueue.log.files import Buffer, OpenFile


class Crashed(BaseException):
    """The process ends here. Not an Exception: no code under test may handle it."""


class Inode:
    __slots__ = ("before", "data", "synced")

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = 0  # this many bytes survive a power cut
        self.before: bytes | None = None  # the durable content, while a truncation of it is not synced

    def sync(self) -> None:
        self.synced = len(self.data)
        self.before = None

    def cut_power(self, chance: Random) -> None:
        if self.before is not None and chance.random() < 0.5:
            self.data = bytearray(self.before)
        elif self.synced < len(self.data):
            keep = chance.randint(self.synced, len(self.data))
            del self.data[keep:]
            if keep > self.synced and chance.random() < 0.3:
                self.data[-1] ^= 0xFF
        self.sync()

    def copy(self) -> Inode:
        twin = Inode()
        twin.data = bytearray(self.data)
        twin.sync()
        return twin


class Folder:
    __slots__ = ("changes", "durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, Inode | Folder] = {}
        self.durable: dict[str, Inode | Folder] = {}
        self.changes: list[tuple[tuple[str, Inode | Folder | None], ...]] = []  # each happens as a whole

    def change(self, *entries: tuple[str, Inode | Folder | None]) -> None:
        _put(self.entries, entries)
        self.changes.append(entries)

    def sync(self) -> None:
        if self.changes:
            self.durable = dict(self.entries)
            self.changes.clear()

    def cut_power(self, chance: Random) -> None:
        if self.changes:
            for entries in self.changes[: chance.randint(0, len(self.changes))]:
                _put(self.durable, entries)
            self.entries = dict(self.durable)
            self.changes.clear()
        for child in self.entries.values():
            child.cut_power(chance)

    def copy(self) -> Folder:
        twin = Folder()
        twin.entries = {name: child.copy() for name, child in self.entries.items()}
        twin.durable = dict(twin.entries)
        return twin


def _put(table: dict[str, Inode | Folder], entries: tuple[tuple[str, Inode | Folder | None], ...]) -> None:
    for name, node in entries:
        if node is None:
            del table[name]
        else:
            table[name] = node


class SimFile(OpenFile):
    __slots__ = ("_disk", "_inode")

    def __init__(self, path: str, inode: Inode, disk: Disk) -> None:
        super().__init__(path, len(inode.data))
        self._inode = inode
        self._disk = disk

    @property
    def is_synced(self) -> bool:
        return self._inode.synced == len(self._inode.data)

    def append(self, buffers: Sequence[Buffer], total: int) -> None:
        disk, data = self._disk, self._inode.data
        if disk.full or disk.full_once:
            disk.full_once = False
            raise StorageFull(f"{self.path}: No space left on device")
        before = len(data)
        for buffer in buffers:
            data += buffer
        assert len(data) == before + total, "the caller says how much it writes"
        self.size = len(data)
        if disk.crash_in:
            disk.operation()

    def pread(self, count: int, position: int) -> bytes:
        return bytes(self._inode.data[position : position + count])

    def truncate(self, size: int) -> None:
        inode = self._inode
        if size < inode.synced:
            if inode.before is None:
                inode.before = bytes(inode.data[: inode.synced])
            inode.synced = size
        del inode.data[size:]
        self.size = size
        if self._disk.crash_in:
            self._disk.operation()

    def sync(self) -> None:
        disk = self._disk
        if disk.crash_in:
            disk.operation()
        if disk.broken:
            disk.broken = False
            disk.damaged.append(self._inode)
            raise StorageFailed(f"{self.path}: fsync failed: Input/output error")
        self._inode.sync()

    def _release(self) -> None:
        """The bytes belong to the inode, not to the open file."""


@lru_cache(10_000)
def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name and name != "."]


class _Held:
    def release(self) -> None:
        """There is one process per disk."""


class Disk:
    """The `Files` of one broker's machine."""

    volatile = False

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.full = False
        self.full_once = False  # only the next append fails
        self.broken = False  # the next sync fails
        self.damaged: list[Inode] = []  # files with pages that could not be written
        self.crash_in = 0  # operations until the process ends; 0: it does not
        self._root = Folder()

    # -- faults

    def operation(self) -> None:
        self.crash_in -= 1
        if self.crash_in == 0:
            raise Crashed

    def cut_power(self) -> None:
        self._root.cut_power(self.chance)

    def drop_damaged(self) -> None:
        """The process has ended, and what could not be written is dropped from memory too."""
        for inode in self.damaged:
            inode.cut_power(self.chance)
        self.damaged.clear()

    def wipe(self) -> None:
        self._root = Folder()

    def copy(self) -> Folder:
        return self._root.copy()

    def put_back(self, copy: Folder) -> None:
        self._root = copy.copy()

    # -- Files

    def _find(self, path: str) -> Inode | Folder | None:
        node: Any = self._root
        try:
            for name in _names(path):
                node = node.entries[name]
        except (KeyError, AttributeError):  # no such entry, or one in a file
            return None
        found: Inode | Folder = node
        return found

    def _folder(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        folder = self._find(parent)
        if not isinstance(folder, Folder):
            raise StorageFailed(f"{path}: No such file or directory")
        return folder, name

    def _inode(self, path: str) -> Inode:
        node = self._find(path)
        if not isinstance(node, Inode):
            raise StorageFailed(f"{path}: No such file or directory")
        return node

    def create(self, path: str) -> OpenFile:
        folder, name = self._folder(path)
        if name in folder.entries:
            raise StorageFailed(f"{path}: File exists")
        if self.full:
            raise StorageFull(f"{path}: No space left on device")
        inode = Inode()
        folder.change((name, inode))
        if self.crash_in:
            self.operation()
        return SimFile(path, inode, self)

    def open_append(self, path: str) -> OpenFile:
        return SimFile(path, self._inode(path), self)

    def pread(self, path: str, count: int, position: int) -> bytes:
        return bytes(self._inode(path).data[position : position + count])

    def map(self, path: str) -> memoryview:
        return memoryview(bytes(self._inode(path).data))

    def put(self, path: str, data: bytes) -> None:
        if self.full:
            raise StorageFull(f"{path}: No space left on device")
        folder, name = self._folder(path)
        inode = Inode()
        inode.data += data
        folder.change((name, inode))
        if self.crash_in:
            self.operation()

    def size(self, path: str) -> int:
        return len(self._inode(path).data)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def rename(self, path: str, to: str) -> None:
        folder, name = self._folder(path)
        target, new_name = self._folder(to)
        assert folder is target, "nothing is moved between folders"
        folder.change((name, None), (new_name, folder.entries[name]))
        if self.crash_in:
            self.operation()

    def remove(self, path: str) -> None:
        folder, name = self._folder(path)
        folder.change((name, None))
        if self.crash_in:
            self.operation()

    def listdir(self, path: str) -> list[str]:
        node = self._find(path)
        return sorted(node.entries) if isinstance(node, Folder) else []

    def mkdir(self, path: str) -> None:
        folder = self._root
        names = _names(path)
        for nth, name in enumerate(names):
            child = folder.entries.get(name)
            if child is None:
                child = Folder()
                folder.change((name, child))
                if nth < len(names) - 1:
                    folder.sync()
            assert isinstance(child, Folder)
            folder = child
        if self.crash_in:
            self.operation()

    def fsync_dir(self, path: str) -> None:
        if self.crash_in:
            self.operation()
        node = self._find(path)
        if isinstance(node, Folder):
            node.sync()

    def replace(self, path: str, data: bytes) -> None:
        if self.crash_in:
            self.operation()
        folder, name = self._folder(path)
        inode = Inode()
        inode.data += data
        inode.sync()
        folder.change((name, inode))
        folder.sync()
        if self.crash_in:
            self.operation()

    def read_small(self, path: str) -> bytes | None:
        node = self._find(path)
        return bytes(node.data) if isinstance(node, Inode) else None

    def lock(self, path: str) -> _Held:
        return _Held()

    def close(self) -> None:
        """Nothing is kept open."""
