"""Storage mode memory: the same log on anonymous memory.

Bytes are kept in large blocks that are used again, so that a log which grows at one end and shrinks at the other costs
no page faults. No view of a block ever leaves this module: reads are copies, so a block given back is free at once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from zmqueue.errors import DataFolderInUse, StorageFailed, StorageFull
from zmqueue.log.files import Buffer, Lock, OpenFile
from zmqueue.model import MiB

_BLOCK_BYTES = 1 * MiB
_FREE_BLOCKS_MAX = 64


class _Content:
    """The bytes of one file of memory: whole blocks, the last one partly filled."""

    __slots__ = ("blocks", "size")

    def __init__(self) -> None:
        self.blocks: list[mmap.mmap] = []
        self.size = 0


class MemoryFile(OpenFile):
    __slots__ = ("_content", "_files")

    def __init__(self, path: str, content: _Content, files: MemoryFiles) -> None:
        super().__init__(path, content.size)
        self._content = content
        self._files = files

    def append(self, buffers: Sequence[Buffer], total: int) -> None:
        content = self._content
        self._files.grow(self.path, content, content.size + total)
        at, blocks = content.size, content.blocks
        for buffer in buffers:
            taken, length = 0, len(buffer)
            while taken < length:
                block, start = divmod(at, _BLOCK_BYTES)
                count = min(length - taken, _BLOCK_BYTES - start)
                part = buffer if count == length else memoryview(buffer)[taken : taken + count]
                blocks[block][start : start + count] = part
                taken += count
                at += count
        assert at == content.size + total
        self.size = content.size = at

    def pread(self, count: int, position: int) -> bytes:
        return read_blocks(self._content, count, position)

    def truncate(self, size: int) -> None:
        self._files.shrink(self._content, size)
        self.size = size

    def sync(self) -> None:
        """Nothing outlives the process."""

    def _release(self) -> None:
        """The bytes belong to the name, not to the open file."""


def read_blocks(content: _Content, count: int, position: int) -> bytes:
    end = min(position + count, content.size)
    if position >= end:
        return b""
    block, start = divmod(position, _BLOCK_BYTES)
    if start + end - position <= _BLOCK_BYTES:
        return content.blocks[block][start : start + end - position]
    parts = []
    while position < end:
        block, start = divmod(position, _BLOCK_BYTES)
        # Views, so that the bytes are copied once, by join; they are gone when this returns.
        part = memoryview(content.blocks[block])[start : start + end - position]
        parts.append(part)
        position += len(part)
    return b"".join(parts)


class _Held:
    def __init__(self, held: set[str], path: str) -> None:
        self._held, self._path = held, path

    def release(self) -> None:
        self._held.discard(self._path)


class MemoryFiles:
    """Files in anonymous memory.

    Names live as long as this object: a log closed and opened again finds its bytes, one of a new process does not.
    `bytes_max` bounds the blocks in use, 0 does not.
    """

    volatile = True

    def __init__(self, bytes_max: int = 0) -> None:
        self._contents: dict[str, _Content] = {}
        self._folders: set[str] = set()
        self._held: set[str] = set()
        self._free: list[mmap.mmap] = []
        self._blocks_max = bytes_max // _BLOCK_BYTES if bytes_max else 0
        self.blocks_used = 0

    def grow(self, path: str, content: _Content, size: int) -> None:
        """Make room before anything is copied, so that a full memory leaves the file as it was."""
        missing = -(-size // _BLOCK_BYTES) - len(content.blocks)
        if missing <= 0:
            return
        if self._blocks_max and self.blocks_used + missing > self._blocks_max:
            raise StorageFull(f"{path}: all {self._blocks_max} blocks of memory are in use")
        try:
            fresh = [self._free.pop() if self._free else mmap.mmap(-1, _BLOCK_BYTES) for _ in range(missing)]
        except OSError as error:
            raise StorageFull(f"{path}: {error.strerror}") from error
        content.blocks += fresh
        self.blocks_used += missing

    def shrink(self, content: _Content, size: int) -> None:
        keep = -(-size // _BLOCK_BYTES)
        for block in content.blocks[keep:]:
            self.blocks_used -= 1
            if len(self._free) < _FREE_BLOCKS_MAX:
                self._free.append(block)
            else:
                block.close()
        del content.blocks[keep:]
        content.size = size

    def map(self, path: str) -> memoryview:
        return memoryview(read_blocks(self._content(path), self.size(path), 0))

    def put(self, path: str, data: bytes) -> None:
        if self.exists(path):
            self.remove(path)
        self.create(path).append([data], len(data))

    def _content(self, path: str) -> _Content:
        try:
            return self._contents[path]
        except KeyError:
            raise StorageFailed(f"{path}: no such file in memory") from None

    def create(self, path: str) -> OpenFile:
        if path in self._contents:
            raise StorageFailed(f"{path}: exists already")
        content = self._contents[path] = _Content()
        return MemoryFile(path, content, self)

    def open_append(self, path: str) -> OpenFile:
        return MemoryFile(path, self._content(path), self)

    def pread(self, path: str, count: int, position: int) -> bytes:
        return read_blocks(self._content(path), count, position)

    def size(self, path: str) -> int:
        return self._content(path).size

    def exists(self, path: str) -> bool:
        return path in self._contents or path in self._folders

    def rename(self, path: str, to: str) -> None:
        if path in self._contents:
            self._contents[to] = self._contents.pop(path)
            return
        for name in [name for name in self._contents if name.startswith(path + "/")]:
            self._contents[to + name[len(path) :]] = self._contents.pop(name)
        inside = {name for name in self._folders if name == path or name.startswith(path + "/")}
        self._folders -= inside
        self._folders |= {to + name[len(path) :] for name in inside}

    def remove(self, path: str) -> None:
        if path in self._folders:
            self._folders.discard(path)
        else:
            self.shrink(self._content(path), 0)
            del self._contents[path]

    def listdir(self, path: str) -> list[str]:
        inside = path + "/"
        names = (name[len(inside) :] for name in (*self._contents, *self._folders) if name.startswith(inside))
        return sorted({name.partition("/")[0] for name in names})

    def mkdir(self, path: str) -> None:
        while path and path not in self._folders and path != os.path.dirname(path):
            self._folders.add(path)
            path = os.path.dirname(path)

    def fsync_dir(self, path: str) -> None:
        """Nothing outlives the process."""

    def replace(self, path: str, data: bytes) -> None:
        fresh = _Content()
        MemoryFile(path, fresh, self).append([data], len(data))
        if path in self._contents:
            self.shrink(self._contents[path], 0)
        self._contents[path] = fresh

    def read_small(self, path: str) -> bytes | None:
        content = self._contents.get(path)
        return None if content is None else read_blocks(content, content.size, 0)

    def lock(self, path: str) -> Lock:
        if path in self._held:
            raise DataFolderInUse(f"{os.path.dirname(path)} is in use by this process")
        self._held.add(path)
        return _Held(self._held, path)

    def close(self) -> None:
        for content in self._contents.values():
            self.shrink(content, 0)
        self._contents.clear()
        while self._free:
            self._free.pop().close()
