"""Finding records by value and reading backwards, on a real cluster whose brokers index what they hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.test_failover import await_in_sync
from zmqueue import Consumer, Producer, TopicPartition
from zmqueue.errors import NoSuchIndex
from zmqueue.log.files import DiskFiles
from zmqueue.log.secondary import describe_index
from zmqueue.testing import Cluster, running_cluster

RECORDS = 12_000
CUSTOMERS = 100
P = TopicPartition("orders", 0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("find") / "data", brokers=3) as cluster:
        for topic, storage in (("orders", "disk"), ("fleeting", "memory")):
            settings = ("-c", "index.secondary=header:customer", "-c", "segment.bytes=400000")
            cluster.command("topic", "create", topic, "-p", "1", "-r", "3", "-c", f"storage.mode={storage}", *settings)
        yield cluster


def write(cluster: Cluster, topic: str, first: int, count: int) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap_servers, acks="all", linger_ms=5) as producer:
        for n in range(first, first + count):
            headers = [("customer", b"c%d" % (n % CUSTOMERS))]
            value = json.dumps({"order": {"id": n, "city": f"city {n % 7}"}, "padding": "x" * 60}).encode()
            producer.send(topic, value, headers=headers, partition=0)
        producer.flush(timeout=60)


def folders(cluster: Cluster, topic: str) -> list[Path]:
    topic_id = cluster.json("topic", "describe", topic)["topic_id"]
    return list(cluster.data_dir.glob(f"broker-*/partitions/{topic_id}-0"))


def covered(cluster: Cluster, topic: str, kind: str) -> list[int]:
    """Of each replica, how far its index goes without a gap."""
    ends = []
    for folder in folders(cluster, topic):
        end = 0
        files = [each for each in describe_index(DiskFiles(), str(folder)) if not each.error and each.kind == kind]
        for each in sorted(files, key=lambda each: (each.from_offset, -each.end_offset)):
            if each.from_offset <= end:
                end = max(end, each.end_offset)
        ends.append(end)
    return ends


def eventually(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def found(cluster: Cluster, topic: str, value: object, limit: int = 10_000) -> list[int]:
    with Consumer(bootstrap_servers=cluster.bootstrap_servers) as consumer:
        return [record.offset for record in consumer.find(topic, value, limit=limit)]


@pytest.mark.integration
@pytest.mark.parametrize("topic", ["orders", "fleeting"])
def test_every_record_of_a_value_is_found_whether_it_is_indexed_or_not(cluster: Cluster, topic: str):
    expected = list(range(7, RECORDS, CUSTOMERS))
    write(cluster, topic, 0, RECORDS)
    assert found(cluster, topic, "c7") == expected
    if topic == "orders":
        eventually(lambda: min(covered(cluster, topic, "header")) > RECORDS // 2)
        assert len(folders(cluster, topic)) == 3
    assert found(cluster, topic, "c7") == expected
    assert found(cluster, topic, b"c7", limit=5) == expected[:5]
    assert found(cluster, topic, "nobody") == []


@pytest.mark.integration
def test_another_leader_finds_the_same(cluster: Cluster):
    leader = cluster.json("topic", "describe", "orders")["partitions"][0]["leader"]
    cluster.kill(leader)
    try:
        assert found(cluster, "orders", "c42") == list(range(42, RECORDS, CUSTOMERS))
    finally:
        cluster.start(leader)
        cluster.wait_healthy()
    await_in_sync(cluster, "orders", 3)
    # The index of before is still there, and is used.
    assert min(covered(cluster, "orders", "header")) > RECORDS // 2


@pytest.mark.integration
def test_the_newest_come_first(cluster: Cluster):
    with Consumer(bootstrap_servers=cluster.bootstrap_servers) as consumer:
        records = consumer.read_backward(P, count=RECORDS + 5)
        assert [record.offset for record in records] == list(range(RECORDS - 1, -1, -1))
        assert [record.offset for record in consumer.read_backward(P, before=100, count=3)] == [99, 98, 97]


@pytest.mark.integration
def test_the_command_line_finds_and_goes_back(cluster: Cluster):
    printed = cluster.command("consume", "orders", "--where", "c3", "-n", "3", "-f", r"%o\n").stdout
    assert printed.split() == ["3", "103", "203"]
    printed = cluster.command("consume", "orders", "--reverse", "-n", "2", "-f", r"%o\n").stdout
    assert printed.split() == [str(RECORDS - 1), str(RECORDS - 2)]


@pytest.mark.integration
def test_another_field_can_be_indexed_while_the_topic_is_used(cluster: Cluster):
    cluster.command("topic", "alter", "orders", "-c", "index.secondary=json:order.city")
    expected = list(range(3, RECORDS, 7))

    def is_known() -> bool:
        """Settings reach a broker in their own time; before that the answer is that of the field before."""
        return found(cluster, "orders", "city 3") == expected

    eventually(is_known)
    eventually(lambda: min(covered(cluster, "orders", "json")) > RECORDS // 2)
    assert found(cluster, "orders", "city 3") == expected
    write(cluster, "orders", RECORDS, 100)
    assert found(cluster, "orders", "city 3") == list(range(3, RECORDS + 100, 7))
    cluster.command("topic", "alter", "orders", "--unset", "index.secondary")

    def is_gone() -> bool:
        try:
            found(cluster, "orders", "city 3")
        except NoSuchIndex:
            return True
        return False

    eventually(is_gone)
    eventually(lambda: not any(list(folder.glob("*.keys")) for folder in folders(cluster, "orders")))
