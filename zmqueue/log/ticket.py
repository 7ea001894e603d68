"""What one flush of a log is about: handed to the flush thread, and back to the log."""

from __future__ import annotations

from zmqueue.errors import ZmqueueError
from zmqueue.log.files import Files, OpenFile


class FlushTicket:
    """What must be synced before offsets below `end` are durable. The files are pinned until it comes back."""

    __slots__ = ("_io", "end", "error", "files", "folders", "folders_version", "generation", "synced")

    def __init__(
        self,
        io: Files,
        generation: int,
        end: int,
        files: list[OpenFile],
        folders: tuple[str, ...],
        folders_version: int,
    ) -> None:
        self._io = io
        self.generation = generation
        self.end = end
        self.files = files
        self.folders = folders
        self.folders_version = folders_version
        self.synced = False
        self.error: ZmqueueError | None = None
        for file in files:
            file.pin()

    @property
    def empty(self) -> bool:
        """Nothing to sync: complete as it is."""
        return not self.files and not self.folders

    def sync(self) -> None:
        """On the flush thread. Raises StorageFailed."""
        for file in self.files:
            file.sync()
        for folder in self.folders:
            self._io.fsync_dir(folder)
        self.synced = True

    def release(self) -> None:
        """On the loop's thread: nobody will sync these files by this ticket any more."""
        files, self.files = self.files, []
        for file in files:
            file.unpin()
