"""What a topic no longer keeps, on real processes: by size, by age, on demand; what readers and writers see of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.integration.workload import Load
from zmqueue import Admin, Consumer, Producer, TopicPartition, errors
from zmqueue.client.descriptions import PartitionDescription
from zmqueue.testing import Cluster


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        yield admin


def until(what: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def described(admin: Admin, topic: str) -> PartitionDescription:
    return admin.describe_topic(topic).partitions[0]


def write(cluster: Cluster, topic: str, count: int, size: int = 1_000) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap_servers, linger_ms=0) as producer:
        for number in range(count):
            producer.send(topic, b"%d " % number + b"v" * size, partition=0).get(30)


def starts(admin: Admin, topic: str) -> list[int]:
    return [replica.log_start for replica in admin.describe_replicas(topic)]


def test_retention_is_altered_live_while_readers_read(cluster: Cluster, admin: Admin) -> None:
    cluster.command("topic", "create", "sized", "-p", "1", "-r", "2", "-c", "segment.bytes=10000")
    partition = TopicPartition("sized", 0)
    with (
        Load(cluster.bootstrap_servers, "sized", 1, per_second=300) as load,
        Consumer(bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="earliest") as reader,
    ):
        reader.assign([partition])
        load.wait_for(500)
        assert described(admin, "sized").log_start == 0
        altered = cluster.command("topic", "alter", "sized", "-c", "retention.bytes=20000")
        assert "retention.bytes=20000" in altered.stdout
        assert "retention.bytes=20000" in cluster.command("topic", "describe", "sized").stdout
        until(lambda: all(start > 0 for start in starts(admin, "sized")))
        numbers = []

        def read_on() -> bool:
            for records in reader.poll(timeout_ms=200).values():
                numbers.extend((record.offset, int(record.value)) for record in records)
            return bool(numbers) and numbers[-1][0] > load.acked[0][-1][0] - 50

        until(read_on)
        load.wait_for(200)
    acked = dict(load.acked[0])
    assert not load.failed
    assert all(acked[offset] == number for offset, number in numbers)
    offsets = [offset for offset, _ in numbers]
    assert offsets == sorted(set(offsets))
    until(lambda: described(admin, "sized").bytes < 45_000)
    with Consumer(bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="none") as strict:
        strict.assign([partition])
        strict.seek(partition, 0)
        with pytest.raises(errors.OffsetOutOfRange):
            until(lambda: strict.poll(timeout_ms=200))


def test_an_idle_partition_is_emptied_by_age(cluster: Cluster, admin: Admin) -> None:
    cluster.command("topic", "create", "aged", "-p", "1", "-r", "2")
    write(cluster, "aged", 20)
    assert described(admin, "aged").log_start == 0
    cluster.command("topic", "alter", "aged", "-c", "segment.ms=500", "-c", "retention.ms=1000")
    until(lambda: starts(admin, "aged") == [20, 20])
    write(cluster, "aged", 1)
    assert described(admin, "aged").high_watermark == 21


def test_deleted_records_stay_deleted(cluster: Cluster, admin: Admin) -> None:
    cluster.command("topic", "create", "purged", "-p", "1", "-r", "2", "-c", "segment.bytes=10000")
    with Producer(bootstrap_servers=cluster.bootstrap_servers, linger_ms=0) as producer:
        for _ in range(50):
            producer.send("purged", b"v" * 1_000, partition=0).get(30)
        done = cluster.command("topic", "delete-records", "purged", "-p", "0", "--before", "33", "--yes")
        assert done.stdout == "purged-0 begins at offset 33\n"
        assert admin.delete_records({TopicPartition("purged", 0): 10}) == {TopicPartition("purged", 0): 33}
        with pytest.raises(errors.OffsetOutOfRange):
            admin.delete_records({TopicPartition("purged", 0): 51})
        until(lambda: starts(admin, "purged") == [33, 33])

        leader = described(admin, "purged").leader
        cluster.kill(leader)
        until(lambda: described(admin, "purged").leader not in (-1, leader))
        assert described(admin, "purged").log_start == 33
        # The producer goes on where it was: whoever leads now knows what it wrote, deleted or not.
        assert producer.send("purged", b"v", partition=0).get(30).offset == 50
        cluster.start(leader)
        cluster.wait_healthy()
        assert starts(admin, "purged") == [33, 33]

        admin.delete_records({TopicPartition("purged", 0): -1})
        until(lambda: starts(admin, "purged") == [51, 51])
        cluster.down()
        cluster.up()
        cluster.wait_healthy()
        assert starts(admin, "purged") == [51, 51]
        assert producer.send("purged", b"v", partition=0).get(30).offset == 51
    with Consumer(bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="earliest") as reader:
        partition = TopicPartition("purged", 0)
        reader.assign([partition])
        found: list[int] = []

        def read_on() -> bool:
            for records in reader.poll(timeout_ms=200).values():
                found.extend(record.offset for record in records)
            return reader.position(partition) == 52

        until(read_on)
        assert found == [51]


def test_a_replica_that_was_away_while_records_were_deleted_comes_back_without_them(
    cluster: Cluster, admin: Admin
) -> None:
    cluster.command("topic", "create", "behind", "-p", "1", "-r", "2", "-c", "segment.bytes=10000")
    with Producer(bootstrap_servers=cluster.bootstrap_servers, linger_ms=0) as producer:
        producer.send("behind", b"v" * 1_000, partition=0).get(30)
        found = described(admin, "behind")
        (follower,) = set(found.replicas) - {found.leader}
        cluster.kill(follower)
        for _ in range(40):
            producer.send("behind", b"v" * 1_000, partition=0).get(30)
        admin.delete_records({TopicPartition("behind", 0): 41})
        cluster.start(follower)
        until(lambda: len(described(admin, "behind").isr) == 2)
        assert starts(admin, "behind") == [41, 41]
        cluster.kill(found.leader)
        # It has not one batch of this producer, and knows it all the same.
        assert producer.send("behind", b"v", partition=0).get(30).offset == 41
        cluster.start(found.leader)
        cluster.wait_healthy()


def test_a_quota_refuses_records_until_there_is_room(cluster: Cluster, admin: Admin) -> None:
    cluster.command(
        "topic", "create", "full", "-p", "1", "-r", "2", "-c", "segment.bytes=10000", "-c", "quota.bytes=30000"
    )
    with Producer(bootstrap_servers=cluster.bootstrap_servers, linger_ms=0) as producer:
        sent = [producer.send("full", b"v" * 1_000, partition=0) for _ in range(100)]
        producer.flush(timeout=30)
        written = sum(future.exception is None for future in sent)
        assert {type(future.exception) for future in sent[written:]} == {errors.QuotaExceeded}
        assert 0 < written < 100
        assert described(admin, "full").high_watermark == written
        admin.delete_records({TopicPartition("full", 0): -1})
        until(lambda: described(admin, "full").bytes == 0)
        assert producer.send("full", b"v", partition=0).get(30).offset == written
