"""Damage to a broker's folder, as chaos does it: bounded, by the seed, and never more than was asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from chaos import disk
from zmqueue.config import LogConfig
from zmqueue.log.files import open_files
from zmqueue.log.partition_log import PartitionLog
from zmqueue.wire.batch import encode

TOPIC = bytes(range(16))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A broker's folder with one segment of 10,000 bytes, a session and a Raft folder."""
    broker = tmp_path / "broker-0"
    (broker / "partitions" / "a-0").mkdir(parents=True)
    (broker / "partitions" / "a-0" / f"{0:020d}.log").write_bytes(bytes(range(250)) * 40)
    (broker / "session").write_bytes(b"session")
    (broker / "raft").mkdir()
    (broker / "raft" / "journal").write_bytes(b"journal")
    return broker


def segment(folder: Path) -> Path:
    return folder / "partitions" / "a-0" / f"{0:020d}.log"


def write_ledger(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_ledger_follows_syncs_renames_and_removals(tmp_path: Path) -> None:
    ledger = write_ledger(
        tmp_path / "ledger",
        {"op": "sync", "path": "/d/a/1.log", "size": 10},
        {"op": "sync", "path": "/d/a/1.log", "size": 20},
        {"op": "sync", "path": "/d/b/2.log", "size": 5},
        {"op": "rename", "path": "/d/a", "to": "/d/c"},
        {"op": "remove", "path": "/d/b/2.log"},
        {"op": "sync_dir", "path": "/d"},
    )
    with ledger.open("a") as file:
        file.write('{"op": "sy')
    assert disk.synced_sizes(ledger) == {"/d/c/1.log": 20}


def test_a_power_cut_keeps_what_was_synced(folder: Path, tmp_path: Path) -> None:
    whole = segment(folder).read_bytes()
    ledger = write_ledger(tmp_path / "ledger", {"op": "sync", "path": str(segment(folder)), "size": 4_000})
    kept = set()
    for seed in range(50):
        segment(folder).write_bytes(whole)
        lost = disk.cut_power(folder, ledger, random.Random(seed))
        left = segment(folder).read_bytes()
        assert len(left) + lost == len(whole)
        assert whole.startswith(left)
        kept.add(len(left))
    assert min(kept) == 4_000
    assert max(kept) == len(whole)
    assert len(kept) > 2


def test_a_torn_tail_changes_the_end_of_one_segment(folder: Path) -> None:
    whole = segment(folder).read_bytes()
    for seed in range(20):
        segment(folder).write_bytes(whole)
        disk.tear(folder, random.Random(seed))
        left = segment(folder).read_bytes()
        assert left != whole
        assert left[: len(whole) - 2 * disk.ZERO_BYTES] == whole[: len(whole) - 2 * disk.ZERO_BYTES]


def test_a_lying_disk_loses_the_end_of_every_segment(folder: Path) -> None:
    whole = segment(folder).read_bytes()
    lost = disk.shorten(folder, random.Random(1))
    assert lost > 0
    assert segment(folder).read_bytes() == whole[:-lost]


def test_flips_spare_the_raft_folder_unless_it_is_named(folder: Path) -> None:
    disk.flip(folder, random.Random(1), 100)
    assert (folder / "raft" / "journal").read_bytes() == b"journal"
    disk.flip(folder, random.Random(1), 1, raft=True)
    changed = (folder / "raft" / "journal").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(changed, b"journal", strict=True)) == 1


def test_a_wiped_folder_keeps_its_raft_folder_unless_it_is_named(folder: Path) -> None:
    disk.wipe(folder)
    assert [path.name for path in folder.iterdir()] == ["raft"]
    disk.wipe(folder, raft=True)
    assert list(folder.iterdir()) == []


def test_a_rolled_back_folder_is_as_it_was_but_for_raft(folder: Path, tmp_path: Path) -> None:
    disk.save(folder, tmp_path / "copy")
    segment(folder).write_bytes(b"newer")
    (folder / "raft" / "journal").write_bytes(b"newer")
    disk.restore(folder, tmp_path / "copy")
    assert len(segment(folder).read_bytes()) == 10_000
    assert (folder / "raft" / "journal").read_bytes() == b"newer"


def test_nothing_to_damage_is_no_error(tmp_path: Path) -> None:
    assert disk.tear(tmp_path, random.Random(0)) == "nothing to tear"
    assert disk.flip(tmp_path, random.Random(0), 1) == "nothing to flip"
    assert disk.synced_sizes(tmp_path / "none") == {}
    assert disk.dump(tmp_path, TOPIC, 0) is None


def test_a_dump_lists_the_batches_of_a_replica(tmp_path: Path) -> None:
    log = PartitionLog.open(open_files("disk"), tmp_path / "partitions" / f"{TOPIC.hex()}-3", LogConfig())
    for n in range(3):
        batch = encode([b"v%d" % n] * (n + 1), base_timestamp=1)
        batch.header.base_offset, batch.header.leader_epoch = log.log_end, 1
        log.append([batch])
    log.close()
    found = disk.dump(tmp_path, TOPIC, 3)
    assert found is not None
    start, end, row = found
    assert (start, end) == (0, 6)
    assert row[::2] == [0, 1, 3]
    assert len(set(row[1::2])) == 3
