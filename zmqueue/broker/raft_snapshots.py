"""The snapshot of the replicated state: made, kept, sent to a member that fell behind, and installed there.

PySyncObj's own serialiser pickles objects, never syncs, replaces the file with whatever arrived and reports success
before it read it. This one takes its place behind the same interface.

Invariants
- The file at `path` is whole: it was verified before it replaced the older one, and synced before it is relied on.
- A snapshot is installed only if it leads beyond the local log. An older one would take the state back, and would cost
  this member entries that it has acknowledged.
- The state is serialised in the caller's thread, between two commands; only bytes go to the writing thread, which
  mostly waits for the disk.

Content: the checked-file format of the journal around msgpack of (last entry applied, the entry before it, state).
PySyncObj's log begins with exactly these two entries after a compaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from zmqueue.errors import CorruptLog, ZmqueueError
from zmqueue.log.journal import Entry, pack_checked, read_checked, replace_file, unpack_checked
from zmqueue.model import KiB, MiB

log = logging.getLogger(__name__)

SNAPSHOT_FILE = "snapshot"
SNAPSHOT_BYTES_MAX = 256 * MiB
CHUNK_BYTES = 64 * KiB

_MAGIC = b"ZMQRAFTS"
_INTERVAL_S_MIN = 1.0

# PySyncObj's SERIALIZER_STATE
_IDLE, _WRITING, _DONE, _FAILED = 0, 1, 2, 3


class Machine(Protocol):
    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes) -> None: ...


class Snapshot(NamedTuple):
    last: Entry
    before: Entry
    state: bytes


def _pack(snapshot: Snapshot) -> bytes:
    return pack_checked(_MAGIC, msgspec.msgpack.encode(snapshot))


def _unpack(payload: bytes, name: str) -> Snapshot:
    try:
        return msgspec.msgpack.decode(payload, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"{name} is not a snapshot: {error}") from error


def load_snapshot(path: Path) -> Snapshot | None:
    """The stored snapshot, verified; nothing if there is none yet."""
    return _unpack(read_checked(path, _MAGIC), str(path)) if path.exists() else None


class Snapshots:
    """PySyncObj's `Serializer`, by its names.

    `wanted(last entry)` decides about installing. `on_broken` hears of a snapshot that the machine could not restore:
    the member must stop then, as its state is undefined.
    """

    def __init__(
        self,
        path: Path,
        machine: Machine,
        *,
        index: int,
        wanted: Callable[[Entry], bool],
        on_broken: Callable[[str], None],
        on_installed: Callable[[int], None],
    ) -> None:
        self._path = path
        self._machine = machine
        self._wanted = wanted
        self._on_broken = on_broken
        self._on_installed = on_installed
        self._writer: threading.Thread | None = None
        self._written: bool | None = None
        self._began = -_INTERVAL_S_MIN
        self._id: int | None = None
        self._sending: dict[object, BinaryIO] = {}
        self._receiving: bytearray | None = None
        self.index = index

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join()
        for file in self._sending.values():
            file.close()
        self._sending.clear()

    # -- making one, by PySyncObj's names --------------------------------------------------------------------------

    def serialize(self, data: tuple[object, Entry, Entry, object], id: int) -> None:
        """Begin to store the state as of the entry `data[1]`. After a failure or a success the next one waits a bit."""
        now = time.monotonic()
        if self._writer is not None or now - self._began < _INTERVAL_S_MIN:
            return
        self._began = now
        self._id = id
        try:
            snapshot = Snapshot(data[1], data[2], self._machine.snapshot())
        except Exception:
            log.exception("the state could not be serialised; the journal goes on growing")
            return
        self._written = None
        self._writer = threading.Thread(target=self._write, args=(snapshot,), name="raft-snapshot", daemon=True)
        self._writer.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            replace_file(self._path, _pack(snapshot))
            self.index = snapshot.last[1]
            self._written = True
        except ZmqueueError as error:
            log.error("%s", error)
            self._written = False

    def checkSerializing(self) -> tuple[int, int | None]:
        if self._writer is None:
            return _IDLE, None
        if self._writer.is_alive():
            return _WRITING, self._id
        self._writer = None
        self._close_sending()
        return (_DONE if self._written else _FAILED), self._id

    # -- sending one -----------------------------------------------------------------------------------------------

    def getTransmissionData(self, transmissionID: object) -> tuple[bytes, bool, bool] | None:
        """The next chunk for a member: bytes, whether it is the first, whether it is the last (then empty)."""
        if self._writer is not None:
            return None
        file = self._sending.get(transmissionID)
        first = file is None
        try:
            if file is None:
                file = self._sending[transmissionID] = self._path.open("rb")
            data = file.read(CHUNK_BYTES)
        except OSError as error:
            log.error("%s could not be sent: %s", self._path, error)
            self.cancelTransmisstion(transmissionID)
            return None
        if not data:
            self.cancelTransmisstion(transmissionID)
        return data, first, not data

    def cancelTransmisstion(self, id: object) -> None:
        if (file := self._sending.pop(id, None)) is not None:
            file.close()

    def _close_sending(self) -> None:
        for member in list(self._sending):
            self.cancelTransmisstion(member)

    # -- installing one --------------------------------------------------------------------------------------------

    def setTransmissionData(self, data: tuple[bytes, bool, bool] | None) -> bool:
        """Take one chunk. True once a whole, wanted snapshot has replaced the stored one."""
        if data is None:
            return False
        chunk, first, last = data
        if first:
            self._receiving = bytearray()
        if self._receiving is None:
            return False
        self._receiving += chunk
        if len(self._receiving) > SNAPSHOT_BYTES_MAX:
            log.error("a snapshot of more than %d bytes is refused", SNAPSHOT_BYTES_MAX)
            self._receiving = None
            return False
        if not last:
            return False
        received, self._receiving = bytes(self._receiving), None
        try:
            snapshot = _unpack(unpack_checked(_MAGIC, received, "the leader's snapshot"), "the leader's snapshot")
            if not self._wanted(snapshot.last):
                log.info("the leader's snapshot of entry %d brings nothing new", snapshot.last[1])
                return False
            if self._writer is not None:
                self._writer.join()  # or an older snapshot of ours could replace this one
            replace_file(self._path, received)
        except ZmqueueError as error:
            log.error("the leader's snapshot was not installed: %s", error)
            return False
        self.index = snapshot.last[1]
        return True

    def deserialize(self) -> tuple[None, Entry, Entry, tuple[()]]:
        """Restore the machine from the stored snapshot. PySyncObj swallows what is raised here, hence `on_broken`."""
        try:
            snapshot = _unpack(read_checked(self._path, _MAGIC), str(self._path))
            self._machine.restore(snapshot.state)
        except Exception as error:
            self._on_broken(f"{self._path} could not be restored: {error!r}")
            raise
        log.info("state restored from the snapshot of entry %d", snapshot.last[1])
        self._on_installed(snapshot.last[1])
        return None, snapshot.last, snapshot.before, ()
