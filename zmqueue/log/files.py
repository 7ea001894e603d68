"""The seam between the log and the world: everything in `log` that touches a file does it through a `Files`.

Three kinds fit the same log code: `DiskFiles` (a real disk), `MemoryFiles` (storage mode memory) and the fakes of the
tests and the simulator, whose disks forget unsynced bytes, tear and fill up. Paths are plain strings with `/`.

Invariants
- A failed append leaves the file at the length it had before: nothing half written stays for a later append to follow.
- `OSError` ends here. No room left is StorageFull, after which reads go on; everything else is StorageFailed.
- An open file may be in the flush thread's hands while the loop's thread is done with it. A descriptor that is closed
  too early could be given out again, and the sync would then meet another file. So a file counts its pins, and its
  descriptor is closed by whoever comes last, `close` or the last `unpin`. Pins are taken and returned on the loop's
  thread only (tickets come back to it), so they need no lock; the flush thread calls `sync` and nothing else.
- Only files that are appended to are kept open by their users. Reads of others go through `Files.pread`, which keeps a
  small LRU of descriptors for the whole broker, so that thousands of segments do not mean thousands of descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from zmqueue.errors import DataFolderInUse, StorageFailed, StorageFull, ZmqueueError

Buffer = bytes | bytearray | memoryview

LEDGER_VARIABLE = "ZMQUEUE_FSYNC_LEDGER"
DELAY_VARIABLE = "ZMQUEUE_FSYNC_DELAY_FILE"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BUFFERS_MAX = 1024  # IOV_MAX of Linux: one writev takes no more
_READERS_MAX = 128
_MAPS_MAX = 128  # each holds a descriptor


class OpenFile:
    """A file open for appending and reading. `size` is its length as this process knows it: the only writer."""

    __slots__ = ("_closing", "_pins", "path", "size")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self._pins = 0
        self._closing = False

    def append(self, buffers: Sequence[Buffer], total: int) -> None:
        """Write the buffers, `total` bytes together, at the end; all of them, or none and an error."""
        raise NotImplementedError

    def pread(self, count: int, position: int) -> bytes:
        """Up to `count` bytes; fewer only at the end of the file."""
        raise NotImplementedError

    def truncate(self, size: int) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        """Whatever was appended or truncated before this call survives a power cut once it returns."""
        raise NotImplementedError

    def pin(self) -> None:
        assert not self._closing, f"{self.path} is closed"
        self._pins += 1

    def unpin(self) -> None:
        assert self._pins > 0, f"{self.path} was not pinned"
        self._pins -= 1
        if self._closing and not self._pins:
            self._release()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._pins:
                self._release()

    def _release(self) -> None:
        raise NotImplementedError


class Lock(Protocol):
    def release(self) -> None: ...


class Files(Protocol):
    """What the log asks of the world. All of it is called from one thread, `fsync_dir` and `OpenFile.sync` from any."""

    # Nothing survives the process, so there is nothing to sync.
    volatile: bool

    def create(self, path: str) -> OpenFile:
        """A new, empty file; one that exists already is an error."""

    def open_append(self, path: str) -> OpenFile: ...

    def pread(self, path: str, count: int, position: int) -> bytes: ...

    def map(self, path: str) -> memoryview:
        """All of a file that is never changed, in memory for as long as it is asked for now and then."""

    def put(self, path: str, data: bytes) -> None:
        """A file that can be made again: new or instead of another, not synced, and whole or short after a crash."""

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def rename(self, path: str, to: str) -> None:
        """Of a file or a folder. Durable after `fsync_dir` of the folder around it."""

    def remove(self, path: str) -> None:
        """Of a file, or of an empty folder."""

    def listdir(self, path: str) -> list[str]:
        """Names in order; an absent folder is empty."""

    def mkdir(self, path: str) -> None:
        """With its parents, which are durable at once; one that exists is fine."""

    def fsync_dir(self, path: str) -> None:
        """A folder that is gone was deleted while its flush was under way: there is nothing left to lose."""

    def replace(self, path: str, data: bytes) -> None:
        """A small file, new or as it was before and nothing in between, durable on return."""

    def read_small(self, path: str) -> bytes | None:
        """All of a small file; None if there is none."""

    def lock(self, path: str) -> Lock:
        """Held until released or the process ends, however it ends. Raises DataFolderInUse."""

    def close(self) -> None: ...


def translated(error: OSError, path: str) -> ZmqueueError:
    if error.errno in _FULL:
        return StorageFull(f"{path}: {error.strerror}")
    return StorageFailed(f"{path}: {error.strerror or error}")


# -- disk --------------------------------------------------------------------------------------------------------


class DiskFile(OpenFile):
    __slots__ = ("_fd",)

    def __init__(self, path: str, size: int, fd: int) -> None:
        super().__init__(path, size)
        self._fd = fd

    def append(self, buffers: Sequence[Buffer], total: int) -> None:
        if len(buffers) > _BUFFERS_MAX:
            self._append_in_parts(buffers, total)
            return
        try:
            # At our idea of the end, not at the file's: what a failed truncation may have left behind is overwritten.
            written = os.pwritev(self._fd, buffers, self.size)
        except OSError as error:
            self._take_back()
            raise translated(error, self.path) from error
        if written != total:
            self._take_back()
            raise StorageFull(f"{self.path}: {written} of {total} bytes were written")
        self.size += total

    def _append_in_parts(self, buffers: Sequence[Buffer], total: int) -> None:
        before = self.size
        try:
            for at in range(0, len(buffers), _BUFFERS_MAX):
                part = buffers[at : at + _BUFFERS_MAX]
                self.append(part, sum(map(len, part)))
        except ZmqueueError:
            self.size = before
            self._take_back()
            raise
        assert self.size == before + total

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._fd, self.size)
        except OSError as error:
            raise StorageFailed(f"{self.path}: a failed write could not be taken back: {error.strerror}") from error

    def pread(self, count: int, position: int) -> bytes:
        try:
            return os.pread(self._fd, count, position)
        except OSError as error:
            raise translated(error, self.path) from error

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise StorageFailed(f"{self.path}: {error.strerror}") from error
        self.size = size

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # Also for a full disk: the kernel may have dropped the pages, so what was written is gone, not waiting.
            raise StorageFailed(f"{self.path}: fsync failed: {error.strerror}") from error

    def _release(self) -> None:
        os.close(self._fd)


class _Flock:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskFiles:
    volatile = False

    def __init__(self, readers_max: int = _READERS_MAX) -> None:
        self._readers: OrderedDict[str, int] = OrderedDict()
        self._readers_max = readers_max
        self._maps: OrderedDict[str, memoryview] = OrderedDict()

    def create(self, path: str) -> OpenFile:
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_append(self, path: str) -> OpenFile:
        return self._open(path, os.O_RDWR)

    def _open(self, path: str, flags: int) -> OpenFile:
        try:
            fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise translated(error, path) from error
        try:
            return self._opened(path, os.fstat(fd).st_size, fd)
        except OSError as error:
            os.close(fd)
            raise translated(error, path) from error

    def _opened(self, path: str, size: int, fd: int) -> OpenFile:
        return DiskFile(path, size, fd)

    def pread(self, path: str, count: int, position: int) -> bytes:
        fd = self._readers.get(path)
        try:
            if fd is None:
                fd = self._readers[path] = os.open(path, os.O_RDONLY)
                if len(self._readers) > self._readers_max:
                    os.close(self._readers.popitem(last=False)[1])
            else:
                self._readers.move_to_end(path)
            return os.pread(fd, count, position)
        except OSError as error:
            raise translated(error, path) from error

    def map(self, path: str) -> memoryview:
        view = self._maps.get(path)
        if view is not None:
            self._maps.move_to_end(path)
            return view
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                # The mapping outlives the descriptor, and ends with the last view of it.
                view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(fd)
        except OSError as error:
            raise translated(error, path) from error
        self._maps[path] = view
        if len(self._maps) > _MAPS_MAX:
            self._maps.popitem(last=False)
        return view

    def put(self, path: str, data: bytes) -> None:
        self._forget(path)
        try:
            # Another inode than before: somebody may have the old one mapped.
            if os.path.lexists(path):
                os.unlink(path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                written = os.write(fd, data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")
            finally:
                os.close(fd)
        except OSError as error:
            raise translated(error, path) from error

    def _forget(self, path: str) -> None:
        """Close the readers of a path, or of everything in it: the name is about to mean something else."""
        folder = path + "/"
        for name in [name for name in self._readers if name == path or name.startswith(folder)]:
            os.close(self._readers.pop(name))
        for name in [name for name in self._maps if name == path or name.startswith(folder)]:
            del self._maps[name]

    def size(self, path: str) -> int:
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise translated(error, path) from error

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def rename(self, path: str, to: str) -> None:
        self._forget(path)
        self._forget(to)
        try:
            os.rename(path, to)
        except OSError as error:
            raise translated(error, path) from error

    def remove(self, path: str) -> None:
        self._forget(path)
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)
        except OSError as error:
            raise translated(error, path) from error

    def listdir(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise translated(error, path) from error

    def mkdir(self, path: str) -> None:
        parent = os.path.dirname(path)
        if parent and not os.path.isdir(parent):
            self.mkdir(parent)
            self.fsync_dir(os.path.dirname(parent) or ".")
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise StorageFailed(f"{path}: not a folder") from None
        except OSError as error:
            raise translated(error, path) from error

    def fsync_dir(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFailed(f"{path}: fsync failed: {error.strerror}") from error

    def replace(self, path: str, data: bytes) -> None:
        fresh = path + ".tmp"
        self._forget(path)
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                written = os.write(fd, data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(fresh, path)
        except OSError as error:
            raise translated(error, path) from error
        self.fsync_dir(os.path.dirname(path))

    def read_small(self, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translated(error, path) from error

    def lock(self, path: str) -> Lock:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise translated(error, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            # Only a hint: the holder may be about to write its own.
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            os.close(fd)
            by = f"process {holder}" if holder.isdigit() else "another process"
            raise DataFolderInUse(f"{os.path.dirname(path)} is in use by {by}") from None
        except OSError as error:
            os.close(fd)
            raise translated(error, path) from error
        return _Flock(fd)

    def __del__(self) -> None:
        # For whoever opens a folder for a moment: descriptors are numbers, and would stay open.
        self.close()

    def close(self) -> None:
        self._maps.clear()
        while self._readers:
            os.close(self._readers.popitem()[1])


def lock_holder(path: str) -> int | None:
    """The process that holds a `lock`, without touching it: to try it would be in the way of a broker that starts."""
    try:
        inode = str(os.stat(path).st_ino)
        held = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in held:
        # "1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF"
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
            return int(fields[4])
    return None


def open_files(storage: str = "disk", env: Mapping[str, str] = os.environ) -> Files:
    """The files of a broker. Those that tests watch are chosen here, so that all others pay nothing for it."""
    if storage == "memory":
        from zmqueue.log.memory import MemoryFiles

        return MemoryFiles()
    ledger, delay_file = env.get(LEDGER_VARIABLE), env.get(DELAY_VARIABLE)
    if ledger or delay_file:
        from zmqueue.log.watched import WatchedFiles

        return WatchedFiles(ledger, delay_file)
    return DiskFiles()
