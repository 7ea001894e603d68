"""`export` and `import`: what goes out comes back, byte by byte, and nothing is left out silently."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.cli.test_commands import Closing, run, somebody_listens  # noqa: F401

import zmqueue
from zmqueue.cli.records import as_line, parse_line, record_fields
from zmqueue.errors import NotEnoughReplicas
from zmqueue.model import ConsumerRecord, OffsetAndTimestamp, TopicPartition

RAW = st.one_of(st.none(), st.binary(), st.text().map(str.encode))
HEADERS = st.lists(st.tuples(st.sampled_from(["a", "é", "", "\n"]), RAW), max_size=4)


def record(
    offset: int, value: bytes | None, key: bytes | None = None, headers: Any = (), partition: int = 0
) -> ConsumerRecord:
    return ConsumerRecord("t", partition, offset, 1000 + offset, 0, key, value, list(headers))


@given(key=RAW, value=RAW, headers=HEADERS, timestamp=st.integers(0, (1 << 62) - 1), partition=st.integers(0, 99_999))
def test_a_line_gives_back_the_very_bytes(key, value, headers, timestamp, partition):
    made = ConsumerRecord("t", partition, 5, timestamp, 0, key, value, headers)
    line = as_line({"partition": partition, **record_fields(made)})
    assert line.count(b"\n") == 1
    assert parse_line(line) == (partition, timestamp, key, value, headers)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "Expecting"),
        (b"[]", "not an object"),
        (b"{}", "no value"),
        (b'{"value": 5}', "value: neither"),
        (b'{"value": {"base64": "?"}}', "base64"),
        (b'{"value": {"base64": "aa", "more": 1}}', "value: neither"),
        (b'{"value": "v", "key": []}', "key: neither"),
        (b'{"value": "v", "timestamp": -1}', "timestamp"),
        (b'{"value": "v", "timestamp": true}', "timestamp"),
        (b'{"value": "v", "partition": 1.5}', "partition"),
        (b'{"value": "v", "headers": {"a": "b"}}', "headers"),
        (b'{"value": "v", "headers": [["a"]]}', "headers"),
        (b'{"value": "\\ud800"}', "surrogates"),
        (b"\xff", "utf-8"),
        (b'{"value": ' + b"[" * 100_000, "deep"),
    ],
)
def test_what_is_no_record_is_said_to_be_none(line, problem):
    with pytest.raises(ValueError, match=problem if problem != "base64" else ".*"):
        parse_line(line)


# -- a cluster that is a list ------------------------------------------------------------------------------------


@pytest.fixture
def topic(monkeypatch) -> dict[int, list[ConsumerRecord]]:
    """Partitions with their records; offsets are positions in the list."""
    records: dict[int, list[ConsumerRecord]] = {0: [], 1: []}

    class Consumer(Closing):
        def __init__(self, **_: Any) -> None:
            self.positions: dict[TopicPartition, int] = {}

        def topics(self) -> set[str]:
            return {"t"}

        def partitions_for_topic(self, name: str) -> set[int]:
            return set(records) if name == "t" else set()

        def assign(self, partitions: list[TopicPartition]) -> None:
            self.positions = dict.fromkeys(partitions, 0)

        def seek(self, partition: TopicPartition, offset: int) -> None:
            self.positions[partition] = offset

        def seek_to_beginning(self, *partitions: TopicPartition) -> None:
            self.positions |= dict.fromkeys(partitions, 0)

        def seek_to_end(self, *partitions: TopicPartition) -> None:
            self.positions |= self.end_offsets(partitions)

        def position(self, partition: TopicPartition) -> int:
            return self.positions[partition]

        def beginning_offsets(self, partitions: Any) -> dict[TopicPartition, int]:
            return dict.fromkeys(partitions, 0)

        def end_offsets(self, partitions: Any) -> dict[TopicPartition, int]:
            return {partition: len(records[partition.partition]) for partition in partitions}

        def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
            found = {}
            for partition, time in times.items():
                younger = [one for one in records[partition.partition] if one.timestamp >= time]
                found[partition] = OffsetAndTimestamp(younger[0].offset, younger[0].timestamp) if younger else None
            return found

        def poll(self, timeout_ms: float, max_records: int | None) -> dict[TopicPartition, list[ConsumerRecord]]:
            polled = {}
            for partition, at in self.positions.items():
                polled[partition] = records[partition.partition][at : at + 3]
                self.positions[partition] += len(polled[partition])
                # Others write meanwhile: an export must come to an end all the same.
                one = record(len(records[partition.partition]), b"late", partition=partition.partition)
                records[partition.partition].append(one)
            return polled

    class Future:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def get(self) -> None:
            if self.fails:
                raise NotEnoughReplicas("one replica is not enough")

    class Producer(Closing):
        def __init__(self, **_: Any) -> None:
            """Like the real one."""

        def partitions_for(self, name: str, timeout: float) -> set[int]:
            return set(records)

        def send(self, name: str, *, value, key, headers, partition, timestamp_ms) -> Future:
            number = partition if partition is not None else 0
            offset = len(records[number])
            made = ConsumerRecord(name, number, offset, timestamp_ms or 0, 0, key, value, headers or [])
            records[number].append(made)
            return Future(value == b"fail")

        def flush(self) -> None:
            """Nothing waits."""

    monkeypatch.setattr(zmqueue, "Consumer", Consumer, raising=False)
    monkeypatch.setattr(zmqueue, "Producer", Producer, raising=False)
    return records


def test_an_export_ends_at_the_end_of_its_beginning(topic):
    topic[0] = [record(n, b"v%d" % n) for n in range(7)]
    topic[1] = [record(0, b"\xff", key=b"k", headers=[("h", b"1"), ("h", None)], partition=1)]
    done = run("export", "t")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["offset"] for line in lines if line["partition"] == 0] == list(range(7))
    assert [line for line in lines if line["partition"] == 1] == [
        {
            "partition": 1,
            "offset": 0,
            "timestamp": 1000,
            "key": "k",
            "value": {"base64": base64.b64encode(b"\xff").decode()},
            "headers": [["h", "1"], ["h", None]],
        }
    ]
    assert done.stderr.startswith("exported 8 records of 2 partitions in ")


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        (["--from", "3"], [3, 4, 5, 6]),
        (["--from", "-2"], [5, 6]),
        (["--until", "2"], [0, 1]),
        (["--until", "-5"], [0, 1]),
        (["--from", "@1002", "--until", "@1005"], [2, 3, 4]),
        (["--until", "@9999"], list(range(7))),
    ],
)
def test_a_part_of_a_topic_is_exported(topic, options, offsets):
    topic[0] = [record(n, b"v") for n in range(7)]
    done = run("export", "t", "-p", "0", *options)
    assert [json.loads(line)["offset"] for line in done.stdout.splitlines()] == offsets


def test_a_file_has_its_name_when_it_is_complete(topic, tmp_path: Path):
    topic[0] = [record(n, b"v") for n in range(7)]
    done = run("export", "t", "-o", str(tmp_path / "out"))
    assert (done.exit_code, done.stdout) == (0, "")
    assert len((tmp_path / "out").read_bytes().splitlines()) == 7
    assert not (tmp_path / "out.part").exists()


def test_what_is_not_there_cannot_be_exported(topic):
    assert run("export", "other").exit_code == 3
    assert run("export", "t", "-p", "9").exit_code == 3
    assert run("export", "t", "--from", "end").exit_code == 2
    assert "--from 'x' is none of start" in run("export", "t", "--from", "x").stderr


def test_a_round_trip_is_exact(topic, tmp_path: Path):
    values = [b"", None, b"text", "ünï\u2028".encode(), b"\x00\xff", b"\n", b"a" * 1000]
    topic[0] = [
        ConsumerRecord("t", 0, n, 10 * n, 0, key, value, [("a", value), ("a", b"2")])
        for n, (key, value) in enumerate(zip(values, reversed(values), strict=True))
    ]
    topic[1] = [ConsumerRecord("t", 1, 0, 5, 0, None, None, [])]
    before = {number: list(records) for number, records in topic.items()}
    exported = run("export", "t").stdout_bytes
    topic[0], topic[1] = [], []
    done = run("import", "t", "--keep-partitions", stdin=exported)
    assert done.stderr.startswith("imported 8 records in ")
    assert topic == before


def test_a_bad_line_ends_the_import_with_its_number(topic, tmp_path: Path):
    lines = b'{"value": "1"}\n{"value": "2"}\nnonsense\n{"value": "4"}\n'
    (tmp_path / "in").write_bytes(lines)
    done = run("import", "t", str(tmp_path / "in"))
    assert done.exit_code == 1
    assert done.stderr.startswith("zmqueue: line 3: ")
    assert "the 2 records before it have been written" in done.stderr
    assert [one.value for one in topic[0]] == [b"1", b"2"]


def test_bad_lines_are_skipped_and_counted_where_asked_for(topic):
    lines = b'{"value": "1"}\nnonsense\n{"value": "3", "partition": 7}\n{"value": "4", "partition": 1}'
    done = run("import", "t", "--skip-bad", "--keep-partitions", stdin=lines)
    assert done.exit_code == 0
    told = done.stderr.splitlines()
    assert told[0] == "line 1: partition None is not one of the topic's 2: skipped"
    assert told[-1].startswith("imported 1 records, 3 bad lines skipped in ")
    assert [one.value for one in topic[1]] == [b"4"]


def test_a_record_that_is_not_acknowledged_ends_the_import(topic):
    done = run("import", "t", stdin=b'{"value": "1"}\n{"value": "fail"}\n')
    assert done.exit_code == 1
    assert "one replica is not enough" in done.stderr


def test_a_line_may_be_longer_than_a_read(topic):
    value = "x" * 200_000
    assert run("import", "t", stdin=json.dumps({"value": value}).encode()).exit_code == 0
    assert topic[0][0].value == value.encode()
