"""Consumers in groups on a real cluster, each a process of its own where it has to die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from zmqueue import Admin, Consumer, ConsumerRebalanceListener, Producer, TopicPartition
from zmqueue.testing import Cluster

pytestmark = pytest.mark.integration

PARTITIONS = 4
SESSION_MS = 3_000

# Writes down what it holds and every record, as soon as it has it.
READER = """
import json, sys
from zmqueue import Consumer, errors
path, topic, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
consumer = Consumer(topic, **settings)
with open(path, "w", buffering=1) as out:
    held = None
    while True:
        found = consumer.poll(200)
        for part in found.values():
            for record in part:
                out.write(json.dumps([record.partition, record.offset]) + "\\n")
        if consumer.assignment() != held:
            held = consumer.assignment()
            out.write(json.dumps({"held": sorted(each.partition for each in held)}) + "\\n")
"""


def until(ready: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Reader:
    """A member in another process."""

    def __init__(self, cluster: Cluster, folder: Path, topic: str, name: str, **settings: Any) -> None:
        self._path = folder / name
        chosen = {
            "bootstrap_servers": cluster.bootstrap_servers,
            "group_id": f"readers-of-{topic}",
            "auto_offset_reset": "earliest",
            "session_timeout_ms": SESSION_MS,
            "heartbeat_interval_ms": 500,
            **settings,
        }
        self.process = subprocess.Popen([sys.executable, "-c", READER, str(self._path), topic, json.dumps(chosen)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def _lines(self) -> list[Any]:
        assert self.process.poll() in (None, -signal.SIGKILL), "the reader has failed"
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def records(self) -> list[tuple[int, int]]:
        return [tuple(line) for line in self._lines() if isinstance(line, list)]

    @property
    def held(self) -> list[int]:
        return next((line["held"] for line in reversed(self._lines()) if isinstance(line, dict)), [])


def write(cluster: Cluster, topic: str, count: int) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap_servers) as producer:
        for number in range(PARTITIONS):
            producer.send_many(topic, [b"v"] * count, partition=number).get(timeout=30)


def created(cluster: Cluster, topic: str) -> str:
    cluster.command("topic", "create", topic, "-p", str(PARTITIONS), "-r", "2")
    return topic


def test_the_survivor_takes_over_what_a_killed_member_read(cluster: Cluster, tmp_path: Path) -> None:
    topic = created(cluster, "survivor")
    everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(20)}
    with Reader(cluster, tmp_path, topic, "first") as first, Reader(cluster, tmp_path, topic, "second") as second:
        until(lambda: len(first.held) == len(second.held) == 2, "they share the topic")
        write(cluster, topic, 10)
        until(lambda: len(first.records) + len(second.records) >= 10 * PARTITIONS, "both read")
        assert len(first.records) + len(second.records) == 10 * PARTITIONS, "nobody reads what the other reads"
        second.process.kill()
        write(cluster, topic, 10)
        until(lambda: first.held == list(range(PARTITIONS)), "the survivor has everything")
        until(lambda: {*first.records, *second.records} == everything, "no record is left out")


def test_what_auto_commit_committed_is_not_read_again(cluster: Cluster, tmp_path: Path) -> None:
    topic = created(cluster, "resumed")
    write(cluster, topic, 10)
    group = f"readers-of-{topic}"
    with (
        Admin(bootstrap_servers=cluster.bootstrap_servers) as admin,
        Reader(cluster, tmp_path, topic, "first", auto_commit_interval_ms=100) as first,
    ):
        until(lambda: len(first.records) == 10 * PARTITIONS, "it reads")
        until(
            lambda: sum(found.offset for found in admin.group_offsets(group).values()) == 10 * PARTITIONS, "it commits"
        )
    write(cluster, topic, 5)
    with Reader(cluster, tmp_path, topic, "second") as second:
        until(lambda: len(second.records) >= 5 * PARTITIONS, "it reads on")
        assert min(offset for _, offset in second.records) == 10


class Counts(ConsumerRebalanceListener):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self.calls.append("assigned")

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self.calls.append("revoked")

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self.calls.append("lost")


def test_a_killed_coordinator_costs_neither_partitions_nor_a_commit(cluster: Cluster) -> None:
    topic = created(cluster, "coordinated")
    write(cluster, topic, 10)
    listener = Counts()
    with (
        Admin(bootstrap_servers=cluster.bootstrap_servers) as admin,
        Consumer(
            bootstrap_servers=cluster.bootstrap_servers,
            group_id="coordinated",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=20_000,
        ) as consumer,
    ):
        consumer.subscribe([topic], listener=listener)
        count = 0

        def read(wanted: int) -> bool:
            nonlocal count
            count += sum(map(len, consumer.poll(100).values()))
            return count >= wanted

        until(lambda: read(10 * PARTITIONS), "it reads")
        coordinator = admin.describe_group("coordinated").coordinator
        cluster.kill(coordinator)
        consumer.commit(timeout_ms=30_000)
        write(cluster, topic, 10)
        until(lambda: read(20 * PARTITIONS), "it reads on")
        consumer.commit(timeout_ms=30_000)
        assert count == 20 * PARTITIONS
        assert listener.calls == ["assigned"]
        committed = admin.group_offsets("coordinated")
        assert [found.offset for found in committed.values()] == [20] * PARTITIONS
        cluster.start(coordinator)
        cluster.wait_healthy(60)


def test_a_stopped_member_reads_nothing_of_what_others_got_meanwhile(cluster: Cluster, tmp_path: Path) -> None:
    topic = created(cluster, "stopped")
    with Reader(cluster, tmp_path, topic, "first") as first, Reader(cluster, tmp_path, topic, "second") as second:
        until(lambda: len(first.held) == len(second.held) == 2, "they share the topic")
        second.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: first.held == list(range(PARTITIONS)), "the other takes over")
            write(cluster, topic, 10)
            until(lambda: len(first.records) == 10 * PARTITIONS, "the other reads everything")
        finally:
            second.process.send_signal(signal.SIGCONT)
        until(lambda: len(first.held) == len(second.held) == 2 and len(second._lines()) > 1, "they share again")
        write(cluster, topic, 5)
        until(lambda: len(first.records) + len(second.records) >= 15 * PARTITIONS, "both read")
        assert len({*first.records, *second.records}) == 15 * PARTITIONS
        assert len(first.records) + len(second.records) == 15 * PARTITIONS
