"""The Raft folder of a broker: who it belongs to, whether it may be trusted, and bytes kept for a full disk.

A member whose folder is gone or damaged has forgotten what it promised: with its vote a majority could elect a leader
that lacks committed entries. So the first `up` formats every folder, and one that is not formatted or does not hold
together later is not voted from. Such a member follows as a learner, in a folder below, until an operator admits it.

`meta` names cluster and broker and is written last when a folder is formatted: where it stands, the rest was there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from zmqueue.broker.raft_snapshots import SNAPSHOT_FILE, Snapshot, load_snapshot
from zmqueue.core.commands import CreateTopic, decode
from zmqueue.core.metadata import ClusterState
from zmqueue.errors import CorruptLog, WrongCluster
from zmqueue.log.journal import (
    JOURNAL_FILE,
    VOTE_FILE,
    Journal,
    pack_checked,
    read_checked,
    read_entries,
    replace_file,
    sync_folder,
)

log = logging.getLogger(__name__)

META_FILE = "meta"
LEARNER_FOLDER = "learner"
RESERVE_FILE = "reserve"
LOW_DISK_FRACTION = 0.05
REGULAR = b"\x00"
"""PySyncObj's first byte of a command that is not its own."""

_META_MAGIC = b"ZMQRAFTM"


class _Meta(msgspec.Struct, frozen=True):
    cluster_id: str
    broker_id: int


def format_folder(folder: Path, cluster_id: str, broker_id: int, *, admit: bool = False) -> None:
    """Make `folder` the Raft folder of a new member. A folder that already is one stays as it is.

    With `admit`, an operator lets a broker whose folder was lost or damaged vote again. That is safe only while all
    other members are up and this one has caught up with them; its learner's journal becomes the journal, and what was
    damaged is kept beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / META_FILE).exists() and not admit:
        if _read_meta(folder) != _Meta(cluster_id, broker_id):
            raise WrongCluster(f"{folder} belongs to {_read_meta(folder)}")
        return
    learner = folder / LEARNER_FOLDER
    if admit and (learner / JOURNAL_FILE).exists():
        for name in (META_FILE, JOURNAL_FILE, VOTE_FILE, SNAPSHOT_FILE):
            if (folder / name).exists():
                (folder / name).rename(folder / f"{name}.refused-{time.time_ns()}")
            if (learner / name).exists():
                (learner / name).rename(folder / name)
        sync_folder(folder)
    elif not (folder / JOURNAL_FILE).exists():
        Journal.create(folder)
    elif _has_entries(folder):
        raise CorruptLog(f"{folder} has a journal but no {META_FILE} file: who wrote it is unknown")
    # Last, because its presence says that all the rest is there.
    replace_file(folder / META_FILE, pack_checked(_META_MAGIC, msgspec.json.encode(_Meta(cluster_id, broker_id))))


def _has_entries(folder: Path) -> bool:
    journal = Journal(folder)
    journal.close()
    return len(journal) > 0


def _read_meta(folder: Path) -> _Meta:
    try:
        return msgspec.json.decode(read_checked(folder / META_FILE, _META_MAGIC), type=_Meta)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"{folder / META_FILE}: {error}") from error


def topic_names(folder: Path) -> dict[bytes, str]:
    """The topics that snapshot and journal tell of, by id. For reading beside a broker or without.

    Also those that were deleted, refused or never committed: no folder of a partition has their id.
    """
    names: dict[bytes, str] = {}
    snapshot = load_snapshot(folder / SNAPSHOT_FILE)
    if snapshot is not None:
        state = ClusterState()
        state.load(snapshot.state)
        names = {topic_id: topic.name for topic_id, topic in state.topics.items()}
    for entry, _, _ in read_entries(folder)[0]:
        if entry[:1] == REGULAR:
            command = decode(entry[1:]).command
            if isinstance(command, CreateTopic):
                names[command.topic_id] = command.name
    return names


class Storage(NamedTuple):
    folder: Path
    journal: Journal
    voting: bool
    snapshot_index: int


def open_storage(folder: Path, broker_id: int, on_full: Callable[[], bool]) -> Storage:
    """The folder's own journal if it can be trusted, otherwise the learner's."""
    try:
        meta = _read_meta(folder)
        if meta.broker_id != broker_id:
            raise WrongCluster(f"{folder} belongs to broker {meta.broker_id}, this is {broker_id}")
        return _open(folder, True, on_full)
    except CorruptLog as error:
        log.error("broker %d takes no part in Raft votes until it is admitted: %s", broker_id, error)
    learner = folder / LEARNER_FOLDER
    learner.mkdir(exist_ok=True)
    if (learner / JOURNAL_FILE).exists():
        try:
            return _open(learner, False, on_full)
        except CorruptLog as error:
            # No vote of a learner ever relied on its journal, so it may begin anew at any time.
            log.error("the learner's journal begins anew: %s", error)
    (learner / SNAPSHOT_FILE).unlink(missing_ok=True)
    Journal.create(learner)
    return _open(learner, False, on_full)


def _open(folder: Path, voting: bool, on_full: Callable[[], bool]) -> Storage:
    journal = Journal(folder, on_full=on_full)
    try:
        snapshot = load_snapshot(folder / SNAPSHOT_FILE)
        _reconcile(journal, snapshot, folder)
    except BaseException:
        journal.close()
        raise
    return Storage(folder, journal, voting, snapshot.last[1] if snapshot else 0)


def _reconcile(journal: Journal, snapshot: Snapshot | None, folder: Path) -> None:
    """Let the journal begin with the snapshot's two entries, as PySyncObj expects; otherwise it would clear it.

    A crash between storing a snapshot and shortening the journal leaves a longer one: its first part goes. A crash
    while a leader's snapshot was installed leaves one that ends before the snapshot or contradicts it: all of it goes.
    """
    if snapshot is None:
        if len(journal) and journal[0][1] != 1:
            raise CorruptLog(f"{folder}: the journal begins at entry {journal[0][1]}, but there is no snapshot")
        return
    last, before = snapshot.last, snapshot.before
    if len(journal) and journal[0][1] > before[1]:
        raise CorruptLog(f"{folder}: the journal begins at entry {journal[0][1]}, the snapshot ends at {last[1]}")
    if journal.find(before[1]) == before and journal.find(last[1]) == last:
        if journal[0] != before:
            journal.reset(journal[before[1] - journal[0][1] :])
    else:
        journal.reset([before, last])


class Reserve:
    """Bytes kept aside, given up when the journal finds the disk full, so that the group can still say so."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self.low = False
        self.check()

    def check(self) -> None:
        """Look at the disk; take the reserve (again) once there is plenty."""
        try:
            disk = os.statvfs(self._path.parent)
            free = disk.f_bavail / max(1, disk.f_blocks)
            if free > 2 * LOW_DISK_FRACTION and not self._path.exists():
                self._take()
        except OSError as error:
            log.warning("%s: %s", self._path, error)
            free = 0.0
        self.low = free < LOW_DISK_FRACTION or not self._path.exists()

    def _take(self) -> None:
        if self._size_bytes == 0:
            self._path.touch()
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size_bytes)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(fd)

    def release(self) -> bool:
        self.low = True
        if not self._path.exists():
            return False
        self._path.unlink()
        log.error("the disk is full: %s is given up for the Raft journal", self._path)
        return True
