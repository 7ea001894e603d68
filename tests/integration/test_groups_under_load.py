"""Groups of consumers under load, while members and coordinators are killed: nothing is lost, and who is not concerned
is not disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.members import until
from tests.integration.workload import Load
from zmqueue import Admin, Consumer, ConsumerRebalanceListener, TopicPartition
from zmqueue.testing import Cluster, running_cluster

PARTITIONS = 4
Found = set[tuple[int, int]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("group-consumers") / "data", brokers=3) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        yield admin


def acked(load: Load) -> Found:
    return {(partition, offset) for partition, rows in load.acked.items() for offset, _ in rows}


class Reader(ConsumerRebalanceListener):
    """A consumer in a thread of its own, and all that happened to it."""

    def __init__(self, cluster: Cluster, topic: str, group: str) -> None:
        self.read: list[tuple[int, int]] = []
        self.revoked = 0
        self.failures: list[BaseException] = []
        self.consumer = Consumer(
            bootstrap_servers=cluster.bootstrap_servers,
            group_id=group,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=200,
            session_timeout_ms=6_000,
            heartbeat_interval_ms=500,
        )
        self.consumer.subscribe([topic], listener=self)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self.revoked += 1

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                for partition, records in self.consumer.poll(timeout_ms=100).items():
                    self.read += [(partition.partition, record.offset) for record in records]
        except BaseException as error:
            self.failures.append(error)
            raise

    @property
    def share(self) -> set[TopicPartition]:
        return set(self.consumer.assignment())

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.consumer.close()
        assert not self.failures


def test_a_coordinator_that_is_killed_under_load_disturbs_no_consumer(cluster: Cluster, admin: Admin) -> None:
    cluster.command("topic", "create", "calm", "-p", str(PARTITIONS), "-r", "3")
    with Load(cluster.bootstrap_servers, "calm", PARTITIONS, per_second=200) as load:
        readers = [Reader(cluster, "calm", "calm") for _ in range(2)]
        until(lambda: all(len(reader.share) == 2 for reader in readers))
        revoked = [reader.revoked for reader in readers]
        generation = admin.describe_group("calm").generation
        load.wait_for(200)
        coordinator = admin.describe_group("calm").coordinator
        cluster.kill(coordinator)
        until(lambda: admin.describe_group("calm").coordinator != coordinator)
        load.wait_for(400)
        cluster.start(coordinator)
        load.wait_for(200)
    until(lambda: acked(load) <= {where for reader in readers for where in reader.read})
    assert [reader.revoked for reader in readers] == revoked
    assert admin.describe_group("calm").generation == generation
    read = [where for reader in readers for where in reader.read]
    assert len(set(read)) == len(read), "nothing was read twice"
    for reader in readers:
        reader.close()
    ends = admin.describe_topic("calm").partitions
    committed = {partition.partition: found.offset for partition, found in admin.group_offsets("calm").items()}
    assert committed == {partition.partition: partition.high_watermark for partition in ends}
    cluster.wait_healthy(60)


@contextlib.contextmanager
def command_line_member(cluster: Cluster, topic: str, group: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "zmqueue", "consume", topic, "-g", group, "-o", "start", "-f", "json"]
    env = {**os.environ, "ZMQUEUE_BOOTSTRAP": cluster.bootstrap_servers}
    with out.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_consumer_that_is_killed_leaves_nothing_unread(cluster: Cluster, tmp_path: Path) -> None:
    cluster.command("topic", "create", "killed", "-p", str(PARTITIONS), "-r", "2")

    def printed(*names: str) -> Found:
        lines = [line for name in names for line in (tmp_path / name).read_bytes().split(b"\n")[:-1]]
        return {(row["partition"], row["offset"]) for row in map(json.loads, lines)}

    with (
        command_line_member(cluster, "killed", "killers", tmp_path / "victim") as victim,
        command_line_member(cluster, "killed", "killers", tmp_path / "heir"),
    ):
        with Load(cluster.bootstrap_servers, "killed", PARTITIONS, per_second=200) as load:
            until(lambda: printed("victim") and printed("heir"))
            load.wait_for(200)
            victim.kill()
            load.wait_for(200)
        until(lambda: acked(load) <= printed("victim", "heir"))
        assert {partition for partition, _ in printed("heir")} == set(range(PARTITIONS))


def test_a_group_goes_on_where_it_stood_after_a_restart_of_all_brokers(cluster: Cluster, admin: Admin) -> None:
    cluster.command("topic", "create", "later", "-p", str(PARTITIONS), "-r", "2")
    with Load(cluster.bootstrap_servers, "later", PARTITIONS, per_second=300) as load:
        load.wait_for(300)
    first = Reader(cluster, "later", "later")
    until(lambda: acked(load) <= set(first.read))
    first.close()
    cluster.command("restart", "all")
    cluster.wait_healthy(90)
    with Load(cluster.bootstrap_servers, "later", PARTITIONS, per_second=300) as more:
        more.wait_for(100)
    second = Reader(cluster, "later", "later")
    until(lambda: acked(more) <= set(second.read))
    second.close()
    assert not set(first.read) & set(second.read)
