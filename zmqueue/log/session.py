"""The data folder of one broker: whose it is, who holds it, and whether its logs can be believed (rule D1).

    lock      held by the running broker; its content is the holder's process id
    meta      cluster, broker and a random dir_id, written once: a new or foreign folder is never taken for the old one
    session   how the last run ended, and the incarnations under which it may have registered

A broker that registers tells the cluster whether its logs may lack what it once acknowledged ("unclean"). Lost bytes
leave no trace in a log that merely ends earlier, so this module infers it from the session:

- no session, or a damaged one, or a new dir_id: a fresh, wiped or swapped folder. Unclean; for a broker that never held
  anything this costs nothing.
- another boot of the machine, no clean shutdown, and syncs that did not precede acknowledgements: the page cache is
  gone, and what was acknowledged from it. Unclean. A process killed within one boot loses nothing, for the page cache
  survives it.
- an older folder put back from a copy is found by the cluster: the incarnation it knows is not among ours.

The verdict outlives crashes: `begin` writes it down with the new session, and only `confirm` takes it back, when the
registration that carried it was applied. Otherwise a broker that crashed between the two would start a second time,
find the same boot, and register clean.

Small files carry a checksum and are replaced as a whole, so they are as they were or as they should be.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
from google_crc32c import value as crc32c
from msgspec import Struct

from zmqueue.errors import ConfigError, CorruptLog, FutureFormat
from zmqueue.log.files import Files, Lock, open_files

FORMAT = 1
BOOT_ID_VARIABLE = "ZMQUEUE_BOOT_ID_FILE"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# A broker that crashes before it registers, again and again, adds one each time. The oldest of these go first; if the
# cluster knew just that one, it takes the folder for an older copy, which is safe.
_INCARNATIONS_MAX = 256


class _Meta(Struct, forbid_unknown_fields=True):
    format: int
    cluster_id: str
    broker_id: int
    dir_id: str


class _Session(Struct, forbid_unknown_fields=True):
    format: int
    boot_id: str
    fsync: str
    clean: bool
    unclean: bool  # a verdict that no registration has carried to the cluster yet
    incarnations: list[int]  # the last confirmed, then those attempted since


class _Damaged(Exception):
    """The content of a small file does not match its checksum or its shape."""


def _sealed(content: Struct) -> bytes:
    text = msgspec.json.encode(content)
    return b"%08x %s\n" % (crc32c(text), text)


def _unsealed(raw: bytes, path: str) -> dict[str, Any]:
    text = raw[9:-1]
    if raw != b"%08x %s\n" % (crc32c(text), text):
        raise _Damaged(f"{path}: does not match its checksum")
    content = msgspec.json.decode(text)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise _Damaged(f"{path}: has no format")
    if content["format"] > FORMAT:
        raise FutureFormat(f"{path}: format {content['format']} was written by a newer version of zmqueue")
    return content


def check_file(raw: bytes, path: str) -> None:
    """Prove a small file of this folder. Raises CorruptLog, FutureFormat."""
    try:
        _unsealed(raw, path)
    except (_Damaged, msgspec.DecodeError) as error:
        raise CorruptLog(str(error)) from error


def _boot_id() -> str:
    path = os.environ.get(BOOT_ID_VARIABLE, _BOOT_ID)
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the boot id: {error.strerror}") from error


class DataFolder:
    """Opened before anything else in the folder, closed after everything else."""

    def __init__(self, files: Files, path: str, lock: Lock, fsync: str) -> None:
        self.path = path
        self.dir_id = b""
        self.unclean = False
        self.previous_incarnations: list[int] = []
        self._files = files
        self._lock = lock
        self._fsync = fsync
        self._boot_id = _boot_id()
        self._incarnations: list[int] = []
        self._begun = False

    @classmethod
    def open(
        cls, path: str | Path, cluster_id: str, broker_id: int, fsync: str, files: Files | None = None
    ) -> DataFolder:
        """Lock and judge. Raises DataFolderInUse, ConfigError for another broker's folder, FutureFormat."""
        files = files or open_files("disk")
        files.mkdir(str(path))
        files.fsync_dir(os.path.dirname(path) or ".")
        lock = files.lock(f"{path}/lock")
        try:
            folder = cls(files, str(path), lock, fsync)
            folder._read_meta(cluster_id, broker_id)
            folder._read_session()
        except BaseException:
            lock.release()
            raise
        return folder

    def begin(self, incarnation: int) -> None:
        """About to register as `incarnation`. Durable on return: if the cluster learns of it, so have we."""
        first, attempted = self._incarnations[:1], self._incarnations[1:]
        self._incarnations = first + [*attempted, incarnation][1 - _INCARNATIONS_MAX :]
        self._begun = True
        self._write_session(clean=False)

    def confirm(self, incarnation: int) -> None:
        """The registration was applied: the cluster has our verdict and knows us by this incarnation."""
        assert self._begun
        assert incarnation in self._incarnations
        self._incarnations = [incarnation]
        self.unclean = False
        self._write_session(clean=False)

    def close(self, clean: bool) -> None:
        """`clean` says that every log was synced and closed."""
        if clean and self._begun:
            self._write_session(clean=True)
        self._lock.release()

    def _read_meta(self, cluster_id: str, broker_id: int) -> None:
        path = f"{self.path}/meta"
        raw = self._files.read_small(path)
        if raw is not None:
            try:
                meta = msgspec.convert(_unsealed(raw, path), _Meta)
                self.dir_id = bytes.fromhex(meta.dir_id)
            except (_Damaged, msgspec.DecodeError, ValueError):
                # Whose folder it is cannot be said. As a folder of unknown past it is used, and nothing in it trusted.
                self._put_aside(path)
            else:
                if (meta.cluster_id, meta.broker_id) != (cluster_id, broker_id):
                    raise ConfigError(
                        f"{self.path} belongs to broker {meta.broker_id} of cluster {meta.cluster_id},"
                        f" not to broker {broker_id} of cluster {cluster_id}"
                    )
                return
        self.unclean = True
        self.dir_id = secrets.token_bytes(16)
        self._files.replace(path, _sealed(_Meta(FORMAT, cluster_id, broker_id, self.dir_id.hex())))

    def _read_session(self) -> None:
        path = f"{self.path}/session"
        raw = self._files.read_small(path)
        if raw is None:
            self.unclean = True
            return
        try:
            session = msgspec.convert(_unsealed(raw, path), _Session)
        except (_Damaged, msgspec.DecodeError):
            self.unclean = True
            self._put_aside(path)
            return
        rebooted = session.boot_id != self._boot_id
        # What counts is how the acknowledgements were given, so the fsync mode of the last run and not of this one.
        if session.unclean or (rebooted and not session.clean and session.fsync != "always"):
            self.unclean = True
        self._incarnations = session.incarnations
        self.previous_incarnations = list(session.incarnations)

    def _put_aside(self, path: str) -> None:
        nth = 0
        while self._files.exists(aside := f"{path}.corrupt-{nth}"):
            nth += 1
        self._files.rename(path, aside)
        self._files.fsync_dir(self.path)

    def _write_session(self, clean: bool) -> None:
        session = _Session(FORMAT, self._boot_id, self._fsync, clean, self.unclean, self._incarnations)
        self._files.replace(f"{self.path}/session", _sealed(session))
