from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zmqueue.errors import DataFolderInUse, StorageFailed, StorageFull
from zmqueue.log.files import DELAY_VARIABLE, LEDGER_VARIABLE, DiskFiles, Files, open_files
from zmqueue.log.memory import MemoryFiles
from zmqueue.model import KiB, MiB


@pytest.fixture(params=["disk", "memory"])
def files(request: pytest.FixtureRequest) -> Files:
    return open_files(request.param, {})


@pytest.fixture
def folder(files: Files, tmp_path: Path) -> str:
    path = f"{tmp_path}/a/b"
    files.mkdir(path)
    return path


def open_descriptors(path: str) -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and os.readlink(link).startswith(path) for link in links)


def test_what_is_appended_is_read_at_its_position(files: Files, folder: str):
    file = files.create(f"{folder}/x")
    file.append([b"hello ", memoryview(b"wor"), bytearray(b"ld")], 11)
    file.append([b"!"], 1)
    assert (file.size, files.size(file.path)) == (12, 12)
    assert file.pread(5, 6) == b"world"
    assert files.pread(file.path, 100, 6) == b"world!"
    assert file.pread(5, 12) == b""
    file.close()
    assert files.open_append(f"{folder}/x").size == 12


def test_more_buffers_than_one_call_takes(files: Files, folder: str):
    file = files.create(f"{folder}/x")
    buffers = [b"%05d" % i for i in range(3000)]
    file.append(buffers, 15_000)
    assert file.pread(15_000, 0) == b"".join(buffers)


def test_a_truncated_file_goes_on_where_it_was_cut(files: Files, folder: str):
    file = files.create(f"{folder}/x")
    file.append([b"0123456789"], 10)
    file.truncate(4)
    file.append([b"abc"], 3)
    assert (file.size, file.pread(100, 0)) == (7, b"0123abc")


def test_an_existing_file_is_not_created_again(files: Files, folder: str):
    files.create(f"{folder}/x")
    with pytest.raises(StorageFailed):
        files.create(f"{folder}/x")
    with pytest.raises(StorageFailed):
        files.open_append(f"{folder}/none")
    with pytest.raises(StorageFailed):
        files.pread(f"{folder}/none", 1, 0)


def test_names_can_be_listed_moved_and_removed(files: Files, folder: str):
    for name in ("z", "x", "y"):
        files.create(f"{folder}/{name}").close()
    files.replace(f"{folder}/small", b"one")
    files.replace(f"{folder}/small", b"two")
    files.remove(f"{folder}/y")
    files.rename(f"{folder}/z", f"{folder}/a")
    assert files.listdir(folder) == ["a", "small", "x"]
    assert files.read_small(f"{folder}/small") == b"two"
    assert files.read_small(f"{folder}/none") is None
    assert files.listdir(f"{folder}/none") == []
    files.rename(folder, folder + "2")
    assert (files.exists(folder), files.listdir(folder + "2")) == (False, ["a", "small", "x"])
    assert files.listdir(os.path.dirname(folder)) == ["b2"]
    for name in files.listdir(folder + "2"):
        files.remove(f"{folder}2/{name}")
    files.remove(folder + "2")
    assert files.listdir(os.path.dirname(folder)) == []


def test_a_read_by_name_sees_the_file_that_now_has_it(files: Files, folder: str):
    for name, data in (("x", b"old"), ("y", b"new")):
        files.create(f"{folder}/{name}").append([data], 3)
    assert files.pread(f"{folder}/x", 3, 0) == b"old"
    files.rename(f"{folder}/y", f"{folder}/x")
    assert files.pread(f"{folder}/x", 3, 0) == b"new"


def test_the_lock_is_held_once(files: Files, folder: str):
    lock = files.lock(f"{folder}/lock")
    with pytest.raises(DataFolderInUse):
        files.lock(f"{folder}/lock")
    lock.release()
    files.lock(f"{folder}/lock").release()


# -- disk --------------------------------------------------------------------------------------------------------


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path):
    program = (
        "import sys; from zmqueue.log.files import DiskFiles; lock = DiskFiles().lock(sys.argv[1]);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, f"{tmp_path}/lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(DataFolderInUse, match=f"process {process.pid}"):
            DiskFiles().lock(f"{tmp_path}/lock")
        process.kill()
    DiskFiles().lock(f"{tmp_path}/lock").release()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_storage_full_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    file = DiskFiles().create(f"{tmp_path}/x")
    file.append([b"kept"], 4)

    def fail(fd: int, buffers: list[bytes], at: int) -> int:
        os.pwrite(fd, b"half", at)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        with pytest.raises(StorageFull):
            file.append([b"gone"], 4)
    assert (file.size, Path(file.path).read_bytes()) == (4, b"kept")
    file.append([b"more"], 4)
    assert Path(file.path).read_bytes() == b"keptmore"


@pytest.mark.parametrize("count", [3, 3000])
def test_a_short_write_is_storage_full_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    file = DiskFiles().create(f"{tmp_path}/x")
    file.append([b"kept"], 4)
    real = os.pwritev
    monkeypatch.setattr(
        os,
        "pwritev",
        lambda fd, buffers, at: real(fd, buffers, at) if len(buffers) == 1024 else os.pwrite(fd, b"!", at),
    )
    with pytest.raises(StorageFull, match=r"1 of \d+ bytes"):
        file.append([b"gone"] * count, 4 * count)
    assert (file.size, Path(file.path).read_bytes()) == (4, b"kept")


def test_a_real_limit_on_file_size_is_storage_full(tmp_path: Path):
    program = (
        "import resource, signal, sys; from zmqueue.log.files import DiskFiles, StorageFull\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "file = DiskFiles().create(sys.argv[1]); file.append([bytes(900)], 900)\n"
        "for _ in range(2):\n"
        "    try: file.append([bytes(80), bytes(80)], 160)\n"
        "    except StorageFull: print(file.size)\n"
    )
    out = subprocess.run([sys.executable, "-c", program, f"{tmp_path}/x"], capture_output=True, text=True, check=True)
    assert (out.stdout, os.path.getsize(tmp_path / "x")) == ("900\n900\n", 900)


def test_anything_else_is_storage_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = DiskFiles().create(f"{tmp_path}/x")
    for name in ("pwritev", "pread", "fdatasync", "fsync"):
        monkeypatch.setattr(os, name, fail)
    for call in (
        lambda: file.append([b"x"], 1),
        lambda: file.pread(1, 0),
        file.sync,
        lambda: DiskFiles().pread(file.path, 1, 0),
        lambda: DiskFiles().fsync_dir(str(tmp_path)),
        lambda: DiskFiles().replace(f"{tmp_path}/y", b"y"),
    ):
        with pytest.raises(StorageFailed, match=str(tmp_path)):
            call()


def test_no_room_at_a_sync_is_not_merely_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    file = DiskFiles().create(f"{tmp_path}/x")
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageFailed):
        file.sync()


def test_a_pinned_file_stays_open_until_the_last_pin_is_returned(tmp_path: Path):
    file = DiskFiles().create(f"{tmp_path}/x")
    file.pin()
    file.pin()
    file.close()
    file.unpin()
    file.sync()
    assert open_descriptors(file.path) == 1
    file.unpin()
    assert open_descriptors(file.path) == 0
    file.close()


def test_readers_are_bounded(tmp_path: Path):
    files = DiskFiles(readers_max=8)
    for nth in range(50):
        file = files.create(f"{tmp_path}/{nth}")
        file.append([b"%02d" % nth], 2)
        file.close()
    for nth in [*range(50), *range(50)]:
        assert files.pread(f"{tmp_path}/{nth}", 2, 0) == b"%02d" % nth
        assert open_descriptors(str(tmp_path)) <= 8
    files.close()
    assert open_descriptors(str(tmp_path)) == 0


# -- watched -----------------------------------------------------------------------------------------------------


def test_the_ledger_says_what_was_synced_and_no_more(tmp_path: Path):
    files = open_files("disk", {LEDGER_VARIABLE: f"{tmp_path}/ledger"})
    file = files.create(f"{tmp_path}/x")
    file.append([b"1234"], 4)
    file.sync()
    file.append([b"5678"], 4)
    files.fsync_dir(str(tmp_path))
    files.replace(f"{tmp_path}/small", b"abc")
    files.rename(f"{tmp_path}/x", f"{tmp_path}/y")
    files.close()
    assert [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()] == [
        {"op": "sync", "path": f"{tmp_path}/x", "size": 4},
        {"op": "sync_dir", "path": str(tmp_path)},
        {"op": "sync_dir", "path": str(tmp_path)},
        {"op": "sync", "path": f"{tmp_path}/small", "size": 3},
        {"op": "rename", "path": f"{tmp_path}/x", "to": f"{tmp_path}/y"},
    ]


def test_syncs_are_as_slow_as_the_delay_file_says_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    files = open_files("disk", {DELAY_VARIABLE: f"{tmp_path}/delay"})
    file = files.create(f"{tmp_path}/x")
    file.sync()
    (tmp_path / "delay").write_text("500\n")
    file.sync()
    (tmp_path / "delay").write_text("0")
    file.sync()
    assert [second for second in slept if second] == [0.5]


def test_nobody_pays_for_what_nobody_asked_for():
    assert type(open_files("disk", {})) is DiskFiles


# -- memory ------------------------------------------------------------------------------------------------------


def test_bytes_cross_from_block_to_block():
    files = MemoryFiles()
    file = files.create("x")
    data = os.urandom(3 * MiB + 17)
    for at in range(0, len(data), 300 * KiB + 1):
        part = data[at : at + 300 * KiB + 1]
        file.append([part[:5], part[5:]], len(part))
    assert file.pread(len(data), 0) == data
    for at in (0, MiB - 1, MiB, 2 * MiB - 10, 3 * MiB + 10):
        assert files.pread("x", 20, at) == data[at : at + 20]


def test_blocks_are_used_again():
    files = MemoryFiles()
    for _ in range(5):
        file = files.create("x")
        file.append([bytes(5 * MiB)], 5 * MiB)
        assert files.blocks_used == 5
        file.truncate(MiB + 1)
        assert files.blocks_used == 2
        file.append([b"x"], 1)
        assert file.pread(10, MiB - 1) == bytes(2) + b"x"
        files.remove("x")
        assert files.blocks_used == 0


def test_full_memory_leaves_the_file_as_it_was():
    files = MemoryFiles(bytes_max=2 * MiB)
    file = files.create("x")
    file.append([b"kept"], 4)
    with pytest.raises(StorageFull):
        file.append([bytes(2 * MiB)], 2 * MiB)
    assert (file.size, files.size("x"), files.blocks_used) == (4, 4, 1)
    file.append([b"more"], 4)
    assert file.pread(10, 0) == b"keptmore"
