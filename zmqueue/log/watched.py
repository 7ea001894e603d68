"""A disk that is watched: the ledger of syncs for tests of power cuts, and delays for tests of slow disks.

On one machine a power cut cannot be had, but its effect can: the harness kills a broker and then cuts every file to
some length between what the ledger says was synced and what the page cache has. Chosen by `files.open_files` when the
environment asks for it; see the variables there.
"""

from __future__ import annotations

import json
import os
import time

from zmqueue.log.files import DiskFile, DiskFiles, OpenFile


class _WatchedFile(DiskFile):
    __slots__ = ("_files",)

    def __init__(self, path: str, size: int, fd: int, files: WatchedFiles) -> None:
        super().__init__(path, size, fd)
        self._files = files

    def sync(self) -> None:
        # Only what was there when the sync began is promised.
        size = self.size
        self._files.delay()
        super().sync()
        self._files.note("sync", self.path, size=size)


class WatchedFiles(DiskFiles):
    """Keeps a ledger of what was synced, one JSON line each, and can make syncs slow.

    A test of a power cut kills the broker, then cuts every file to some length between its last ledger line and its
    real one. `delay_file` holds milliseconds and is read before each sync, so that a test can change its mind.
    """

    def __init__(self, ledger: str | None, delay_file: str | None) -> None:
        super().__init__()
        self._delay_file = delay_file
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if ledger else None

    def _opened(self, path: str, size: int, fd: int) -> OpenFile:
        return _WatchedFile(path, size, fd, self)

    def delay(self) -> None:
        if self._delay_file is None:
            return
        text = self.read_small(self._delay_file)
        if text and text.strip().isdigit():
            time.sleep(int(text) / 1000)

    def note(self, operation: str, path: str, **more: int | str) -> None:
        if self._ledger is not None:
            line = json.dumps({"op": operation, "path": os.path.abspath(path), **more}) + "\n"
            # One write to a file opened for append: lines of several threads do not mix.
            os.write(self._ledger, line.encode())

    def rename(self, path: str, to: str) -> None:
        super().rename(path, to)
        self.note("rename", path, to=os.path.abspath(to))

    def remove(self, path: str) -> None:
        super().remove(path)
        self.note("remove", path)

    def fsync_dir(self, path: str) -> None:
        self.delay()
        super().fsync_dir(path)
        self.note("sync_dir", path)

    def replace(self, path: str, data: bytes) -> None:
        super().replace(path, data)
        self.note("sync", path, size=len(data))

    def close(self) -> None:
        super().close()
        if self._ledger is not None:
            os.close(self._ledger)
            self._ledger = None
