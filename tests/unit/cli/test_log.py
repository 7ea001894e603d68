"""`zmqueue log`: on folders as brokers leave them, with nobody to ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.cli.test_commands import run
from unit.log.fakes import SMALL, flush

from zmqueue.broker.raft_folder import REGULAR, format_folder
from zmqueue.core import commands
from zmqueue.log.files import DiskFiles
from zmqueue.log.journal import Journal
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.segment import segment_name
from zmqueue.wire.batch import encode

ORDERS = bytes(range(16))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for broker in (0, 1):
        folder = tmp_path / f"broker-{broker}"
        format_folder(folder / "raft", "c1", broker)
        journal = Journal(folder / "raft")
        create = commands.CreateTopic("orders", ORDERS, 2, 1, 1, "disk")
        journal.add(REGULAR + commands.encode(commands.Envelope(broker, 1, 1, create)), 1, 1)
        journal.sync()
        journal.close()
        fill(folder / "partitions" / f"{ORDERS.hex()}-{broker}")
    return tmp_path


def fill(folder: Path) -> None:
    log = PartitionLog.open(DiskFiles(), folder, SMALL)
    for nth in range(30):
        made = encode(
            [b"text", b"\xff\x00", None],
            keys=[b"k", None, b"\xfe"],
            headers=[[["a", b"1"], ["a", None]], None, None],
            timestamp_deltas=[0, 1, 2],
            base_timestamp=1_700_000_000_000 + nth,
            codec=nth % 2 * 4,
        )
        made.header.base_offset, made.header.leader_epoch = log.log_end, 0
        log.append([made])
    flush(log)
    log.close()


def test_segments_of_a_topic_are_listed_by_its_name(data: Path):
    done = run("log", "segments", "--data-dir", str(data), "--topic", "orders", "-p", "1")
    assert done.exit_code == 0, done.stderr
    title, headers, *rows = done.stdout.splitlines()
    assert title.startswith(f"broker 1: orders-1, {data}/broker-1/partitions/")
    assert headers.split()[:5] == ["BASE", "NEXT", "RECORDS", "BATCHES", "BYTES"]
    assert [row.split()[8] for row in rows] == ["sealed"] * (len(rows) - 1) + ["active"]
    assert "2023-11-14T22:13:20.000Z" in rows[0]
    assert "none:" in rows[0]
    assert "zstd:" in rows[0]
    found = json.loads(run("log", "segments", str(data), "-o", "json").stdout)
    assert [(place["topic"], place["partition"], place["in_use_by"]) for place in found] == [
        ("orders", 0, None),
        ("orders", 1, None),
    ]
    assert sum(segment["records"] for segment in found[0]["segments"]) == 90


def test_a_topic_is_also_found_by_its_id(data: Path):
    assert run("log", "index", str(data), "--topic", ORDERS.hex()[:6], "--broker", "0").exit_code == 0
    done = run("log", "index", str(data), "--topic", "other")
    assert (done.exit_code, done.stderr) == (3, f"zmqueue: no such partition in {data}\n")


def test_indexes_are_listed(data: Path):
    found = json.loads(run("log", "index", str(data / "broker-0"), "-o", "json").stdout)
    assert [index["state"] for index in found[0]["indexes"]][-2:] == ["ok", "memory"]
    assert run("log", "index", str(data)).stdout.count("BYTES/ENTRY") == 2


def test_a_dump_has_a_line_for_each_batch_or_record(data: Path):
    place = str(next((data / "broker-0" / "partitions").iterdir()))
    lines = [json.loads(line) for line in run("log", "dump", place).stdout.splitlines()]
    assert [line["offset"] for line in lines] == list(range(0, 90, 3))
    assert (lines[0]["records"], lines[0]["codec"], lines[1]["codec"]) == (3, "none", "zstd")
    records = [json.loads(line) for line in run("log", "dump", place, "--records", "-n", "3").stdout.splitlines()]
    assert records == [
        {
            "offset": 0,
            "timestamp": 1_700_000_000_000,
            "key": "k",
            "value": "text",
            "headers": [["a", "1"], ["a", None]],
        },
        {"offset": 1, "timestamp": 1_700_000_000_001, "key": None, "value": {"base64": "/wA="}, "headers": []},
        {"offset": 2, "timestamp": 1_700_000_000_002, "key": {"base64": "/g=="}, "value": None, "headers": []},
    ]
    some = run("log", "dump", str(data), "-p", "1", "--records", "--from", "40", "--to", "44").stdout.splitlines()
    assert [json.loads(line)["offset"] for line in some] == [40, 41, 42, 43]


def test_a_dump_ends_at_damage(data: Path):
    place = next((data / "broker-0" / "partitions").iterdir())
    path = place / segment_name(0)
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    done = run("log", "dump", str(place), "--records")
    assert done.exit_code == 1
    assert "damaged at" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["offset"] > 0


def test_verify_says_what_is_wrong_and_ends_with_1(data: Path):
    done = run("log", "verify", "--data-dir", str(data))
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("2 partitions, ")
    assert done.stderr.endswith("no problems\n")
    (data / "broker-1" / "raft" / "vote").write_bytes(b"?")
    path = next((data / "broker-0" / "partitions").iterdir()) / "notes"
    path.touch()
    done = run("log", "verify", str(data))
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        f"{path}: not a file of zmqueue",
        f"{data}/broker-1/raft/vote: {data}/broker-1/raft/vote is shorter than its header",
    ]
    found = json.loads(run("log", "verify", str(data), "--broker", "0", "-o", "json").stdout)
    assert [problem["path"] for problem in found["problems"]] == [str(path)]
    assert run("log", "verify", str(data), "-p", "1").exit_code == 0


def test_what_is_no_folder_of_ours_is_said_to_be_none(tmp_path: Path):
    done = run("log", "verify", str(tmp_path))
    assert (done.exit_code, done.stdout) == (3, "")
    assert "is no folder of a partition, of a broker or of a cluster" in done.stderr
