"""The Raft journal against a plain list, a dying process, a dying machine, a full disk and flipped bits."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zmqueue.errors import CorruptLog, FutureFormat, StorageFailed, StorageFull
from zmqueue.log import journal as journal_module
from zmqueue.log.journal import JOURNAL_FILE, VOTE_FILE, Entry, Journal, pack_checked, unpack_checked

HEADER_BYTES = 16
RECORD_BYTES = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Journal.create(tmp_path)
    return tmp_path


def entries(first: int, last: int, term: int = 1) -> list[Entry]:
    return [(b"command %d" % index, index, term) for index in range(first, last + 1)]


def filled(folder: Path, *parts: list[Entry]) -> Journal:
    journal = Journal(folder)
    for part in parts:
        for entry in part:
            journal.add(*entry)
    journal.sync()
    return journal


def reopened(journal: Journal, folder: Path) -> Journal:
    journal.close()
    return Journal(folder)


# -- what it holds -------------------------------------------------------------------------------------------------


def test_entries_term_and_vote_survive_a_restart(folder):
    journal = filled(folder, entries(1, 3))
    journal.setCurrentTerm(7, "3")
    journal = reopened(journal, folder)
    assert journal[:] == entries(1, 3)
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (7, "3")
    journal.setCurrentTerm(8, None)
    journal = reopened(journal, folder)
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (8, None)


def test_entries_sent_again_are_neither_deleted_nor_written_again(folder):
    """PySyncObj's follower deletes from the first entry of any re-send; acknowledged ones behind it must stay."""
    journal = filled(folder, entries(1, 6))
    before = (folder / JOURNAL_FILE).stat()
    syncs = journal.syncs
    journal.deleteEntriesFrom(2)
    for entry in entries(3, 3):
        journal.add(*entry)
    journal.sync()
    assert journal[:] == entries(1, 6)
    after = (folder / JOURNAL_FILE).stat()
    assert (after.st_size, after.st_mtime_ns, journal.syncs) == (before.st_size, before.st_mtime_ns, syncs)
    assert reopened(journal, folder)[:] == entries(1, 6)


def test_a_deletion_alone_deletes_nothing(folder):
    journal = filled(folder, entries(1, 6))
    journal.deleteEntriesFrom(3)
    assert len(journal) == 6
    assert len(reopened(journal, folder)) == 6


def test_a_contradicting_entry_truncates_from_there_on(folder):
    journal = filled(folder, entries(1, 6))
    journal.deleteEntriesFrom(2)
    for entry in entries(3, 3) + entries(4, 4, term=2):
        journal.add(*entry)
    journal.sync()
    assert journal[:] == entries(1, 3) + entries(4, 4, term=2)
    assert reopened(journal, folder)[:] == entries(1, 3) + entries(4, 4, term=2)


def test_a_leader_that_contradicts_a_committed_entry_stops_the_member(folder):
    journal = filled(folder, entries(1, 6))
    journal.setRaftCommitIndex(4)
    with pytest.raises(CorruptLog, match="contradicts entry 4"):
        journal.add(b"other", 4, 2)
    assert journal[:] == entries(1, 6)
    with pytest.raises(StorageFailed):
        journal.sync()
    assert reopened(journal, folder)[:] == entries(1, 6)


def test_sync_costs_one_call_and_only_when_something_changed(folder, monkeypatch):
    journal = filled(folder, entries(1, 2))
    calls = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append(fd))
    journal.sync()
    assert calls == []
    for entry in entries(3, 9):
        journal.add(*entry)
    journal.sync()
    journal.sync()
    assert len(calls) == 1


ADD, RESEND, CONFLICT, DROP, CLEAR, SYNC, REOPEN = range(7)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30), st.binary(max_size=40)), max_size=30))
def test_it_behaves_like_a_list(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("journal")
    Journal.create(folder)
    journal, model, term = Journal(folder), [(b"\x01", 1, 0)], 0
    journal.add(*model[0])
    for step, number, data in steps:
        position = number % len(model)
        if step == ADD:
            model.append((data, model[-1][1] + 1, term))
            journal.add(*model[-1])
        elif step == RESEND:
            journal.deleteEntriesFrom(position)
            for entry in model[position : position + 1 + number % 3]:
                journal.add(*entry)
        elif step == CONFLICT and position > 0:
            term += 1
            journal.deleteEntriesFrom(position)
            model = [*model[:position], (data, model[position][1], term)]
            journal.add(*model[-1])
        elif step == DROP:
            journal.deleteEntriesTo(position)
            model = model[position:]
        elif step == CLEAR:
            journal.clear()
            model = [(data, number + 5, term), (data, number + 6, term)]
            for entry in model:
                journal.add(*entry)
        elif step == SYNC:
            journal.sync()
        elif step == REOPEN:
            journal = reopened(journal, folder)
        assert journal[:] == model
        assert (journal[0], journal[-1], len(journal)) == (model[0], model[-1], len(model))
        assert all(journal.find(entry[1]) == entry for entry in model)
    assert reopened(journal, folder)[:] == model
    shutil.rmtree(folder)


# -- damage --------------------------------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_cut_and_can_be_written_over(folder):
    filled(folder, entries(1, 3)).close()
    whole = (folder / JOURNAL_FILE).read_bytes()
    third = len(whole) - RECORD_BYTES - len(b"command 3")
    for length in range(third, len(whole)):
        (folder / JOURNAL_FILE).write_bytes(whole[:length])
        journal = Journal(folder)
        assert journal[:] == entries(1, 2)
        assert (folder / JOURNAL_FILE).stat().st_size == third
        journal.add(b"other", 3, 2)
        assert reopened(journal, folder)[:] == [*entries(1, 2), (b"other", 3, 2)]


def test_a_tail_of_zeroes_is_cut(folder):
    filled(folder, entries(1, 3)).close()
    with (folder / JOURNAL_FILE).open("ab") as file:
        file.write(bytes(4096))
    assert Journal(folder)[:] == entries(1, 3)


def test_every_flipped_bit_is_refused_or_cut_and_never_read(folder):
    filled(folder, entries(1, 3)).close()
    path = folder / JOURNAL_FILE
    whole = path.read_bytes()
    third = len(whole) - RECORD_BYTES - len(b"command 3")
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if bit // 8 >= third:
            assert Journal(folder)[:] == entries(1, 2)  # nothing tells it from a torn write
        else:
            with pytest.raises(CorruptLog):
                Journal(folder)
            assert path.read_bytes() == damaged


def test_a_hole_between_whole_entries_is_refused(folder):
    filled(folder, entries(1, 3)).close()
    path = folder / JOURNAL_FILE
    whole = path.read_bytes()
    size = RECORD_BYTES + len(b"command 1")
    path.write_bytes(whole[: HEADER_BYTES + size] + whole[HEADER_BYTES + 2 * size :])
    with pytest.raises(CorruptLog, match="follows"):
        Journal(folder)


def test_a_journal_of_a_newer_version_is_left_alone(folder):
    header = struct.pack("<8sI", b"ZMQRAFTJ", 99)
    data = header + struct.pack("<I", google_crc32c.value(header)) + b"whatever comes"
    (folder / JOURNAL_FILE).write_bytes(data)
    with pytest.raises(FutureFormat):
        Journal(folder)
    assert (folder / JOURNAL_FILE).read_bytes() == data


@pytest.mark.parametrize("name", [JOURNAL_FILE, VOTE_FILE])
@pytest.mark.parametrize("content", [None, b"", b"ZMQ", bytes(64)])
def test_a_missing_or_emptied_file_is_refused(folder, name, content):
    filled(folder, entries(1, 3)).close()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(CorruptLog):
        Journal(folder)


def test_a_flipped_bit_in_term_or_vote_is_refused(folder):
    journal = Journal(folder)
    journal.setCurrentTerm(5, "12")
    journal.close()
    whole = (folder / VOTE_FILE).read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / VOTE_FILE).write_bytes(damaged)
        with pytest.raises(CorruptLog):
            Journal(folder)


def test_a_checked_file_of_a_newer_version_says_so():
    data = bytearray(pack_checked(b"ZMQTESTS", b"payload"))
    struct.pack_into("<I", data, 8, 2)
    struct.pack_into("<I", data, 20, google_crc32c.value(bytes(data[:20])))
    with pytest.raises(FutureFormat):
        unpack_checked(b"ZMQTESTS", bytes(data), "it")


# -- crashes -------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here: no handler of the journal may mend anything."""


CHANGES = ("open", "pwrite", "ftruncate", "fsync", "fdatasync", "rename")


class DyingDisk:
    """Forwards to `os` until its last call; that one is done in part (a write) or not at all."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.used = 0

    def namespace(self) -> SimpleNamespace:
        forwarded = {name: getattr(os, name) for name in dir(os) if not name.startswith("__")}
        return SimpleNamespace(**forwarded | {name: self._counted(name) for name in CHANGES})

    def _counted(self, name: str):
        real = getattr(os, name)

        def call(*args, **kwargs):
            self.used += 1
            if self.used > self.calls:
                if name == "pwrite":
                    os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                raise Crash
            return real(*args, **kwargs)

        return call


def workload(folder: Path, promised: dict[str, object]) -> None:
    """Every kind of change; `promised` says at each moment what a peer may have been told."""

    def promise(journal: Journal) -> None:
        journal.sync()
        promised["entries"] = journal[:]
        promised["vote"] = (journal.getCurrentTerm(), journal.getVotedForNodeId())

    journal = Journal(folder)
    for entry in entries(1, 4):
        journal.add(*entry)
    promise(journal)
    journal.setCurrentTerm(2, "4")
    promise(journal)
    journal.deleteEntriesFrom(1)
    for entry in entries(2, 3):
        journal.add(*entry)
    promise(journal)
    promised["entries"] = entries(1, 3)  # the leader of term 2 is about to replace the fourth, so it is not committed
    for entry in entries(4, 5, term=2):
        journal.add(*entry)
    promise(journal)
    promised["entries"] = journal[2:]  # a snapshot covers the others from now on
    journal.deleteEntriesTo(2)
    promise(journal)
    for entry in entries(6, 7, term=2):
        journal.add(*entry)
    journal.setCurrentTerm(3, None)
    promise(journal)
    promised["entries"] = []  # a leader's snapshot has been stored
    journal.clear()
    for entry in entries(20, 21, term=3):
        journal.add(*entry)
    promise(journal)
    journal.close()


def is_contained(promised: list[Entry], found: list[Entry]) -> bool:
    return not promised or any(found[i : i + len(promised)] == promised for i in range(len(found)))


def test_a_crash_at_any_call_keeps_what_was_promised(tmp_path, monkeypatch):
    calls = 0
    while True:
        folder = tmp_path / str(calls)
        folder.mkdir()
        Journal.create(folder)
        promised: dict[str, object] = {"entries": [], "vote": (0, None)}
        disk = DyingDisk(calls)
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "os", disk.namespace())
            try:
                workload(folder, promised)
                finished = True
            except Crash:
                finished = False
        journal = Journal(folder)
        assert is_contained(promised["entries"], journal[:]), f"crash at call {calls}"
        term, vote = promised["vote"]
        assert journal.getCurrentTerm() >= term
        assert journal.getCurrentTerm() > term or journal.getVotedForNodeId() == vote
        journal.close()
        if finished:
            break
        calls += 1
    assert calls > 20


def test_a_power_cut_keeps_what_was_synced_and_nothing_in_between(folder):
    """Without a sync the machine may lose any part of the tail, or have it written as noise."""
    filled(folder, entries(1, 3)).close()
    path = folder / JOURNAL_FILE
    synced = path.stat().st_size
    journal = Journal(folder)
    for entry in entries(4, 6):
        journal.add(*entry)
    journal.close()
    whole = path.read_bytes()
    for kept in range(synced, len(whole) + 1):
        path.write_bytes(whole[:kept] + bytes(len(whole) - kept))
        journal = Journal(folder)
        assert journal[:3] == entries(1, 3)
        assert journal[:] == entries(1, len(journal))
        journal.close()


# -- a disk that says no -------------------------------------------------------------------------------------------


def failing(name: str, code: int, partial: int = 0):
    real = getattr(os, name)

    def call(*args, **kwargs):
        if partial:
            real(args[0], bytes(args[1])[:partial], *args[2:])
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("partial", [0, 1, 30])
def test_a_full_disk_refuses_the_entry_and_leaves_no_part_of_it(folder, monkeypatch, partial):
    journal = filled(folder, entries(1, 2))
    size = (folder / JOURNAL_FILE).stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing("pwrite", errno.ENOSPC, partial))
        with pytest.raises(StorageFull):
            journal.add(b"too much", 3, 1)
    assert journal.full
    assert journal[:] == entries(1, 2)
    assert (folder / JOURNAL_FILE).stat().st_size == size
    journal.add(*entries(3, 3)[0])
    assert not journal.full
    assert reopened(journal, folder)[:] == entries(1, 3)


def test_a_full_disk_is_tried_again_after_the_reserve_was_given_up(folder, monkeypatch):
    real = os.pwrite
    given = []

    def release() -> bool:
        monkeypatch.setattr(os, "pwrite", real)
        given.append(True)
        return True

    journal = Journal(folder, on_full=release)
    monkeypatch.setattr(os, "pwrite", failing("pwrite", errno.ENOSPC, 5))
    journal.add(b"fits now", 1, 1)
    assert given == [True]
    assert reopened(journal, folder)[:] == [(b"fits now", 1, 1)]


def test_after_a_failed_sync_nothing_is_promised_any_more(folder, monkeypatch):
    journal = filled(folder, entries(1, 2))
    journal.add(*entries(3, 3)[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing("fdatasync", errno.EIO))
        with pytest.raises(StorageFailed):
            journal.sync()
    assert journal.failed is not None
    with pytest.raises(StorageFailed):
        journal.sync()  # the kernel may call the lost pages clean by now
    with pytest.raises(StorageFailed):
        journal.add(*entries(4, 4)[0])


def test_a_vote_that_cannot_be_stored_holds_back_the_next_sync(folder, monkeypatch):
    journal = filled(folder, entries(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing("pwrite", errno.ENOSPC))
        journal.setCurrentTerm(4, "2")
        with pytest.raises(StorageFull):
            journal.sync()
    journal.sync()
    journal = reopened(journal, folder)
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (4, "2")


def test_a_compaction_without_space_keeps_the_journal(folder, monkeypatch):
    journal = filled(folder, entries(1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing("fsync", errno.ENOSPC))
        journal.deleteEntriesTo(5)
    assert journal[:] == entries(1, 9)
    journal.add(*entries(10, 10)[0])
    assert reopened(journal, folder)[:] == entries(1, 10)
    assert sorted(path.name for path in folder.iterdir()) == [JOURNAL_FILE, VOTE_FILE]
