"""The administrator against a scripted cluster: topics and brokers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.fake_broker import DROP, FakeCluster, Partition, Seen

from zmqueue import Admin, TopicPartition, errors
from zmqueue.wire import batch as wire_batch
from zmqueue.wire import frames, messages
from zmqueue.wire.frames import Operation


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 4}) as cluster:
        yield cluster


def fill(cluster: FakeCluster, topic: str, number: int, count: int) -> None:
    cluster.partition(topic, number).append(*wire_batch.encode([b"v"] * count))


@pytest.fixture
def admin(cluster: FakeCluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        yield admin


def test_topics_are_created_described_listed_and_deleted(cluster: FakeCluster, admin: Admin) -> None:
    admin.create_topic("new", num_partitions=3, config={"retention_ms": "1"})
    assert admin.list_topics() == ["many", "new", "t"]
    fill(cluster, "new", 1, 7)
    described = admin.describe_topic("new")
    assert (described.name, described.replication_factor, described.min_insync_replicas) == ("new", 1, 1)
    assert [(p.partition, p.leader, p.high_watermark) for p in described.partitions] == [
        (0, 0, 0),
        (1, 1, 7),
        (2, 0, 0),
    ]
    admin.delete_topic("new")
    assert "new" not in admin.list_topics()
    with pytest.raises(errors.UnknownTopicOrPartition):
        admin.describe_topic("new")


def test_create_waits_until_every_partition_has_a_leader(cluster: FakeCluster, admin: Admin) -> None:
    answers = [0]

    def script(seen: Seen) -> Any:
        if seen.operation != Operation.METADATA or seen.message.topics != ["new"]:
            return None
        answers[0] += 1
        cluster.partition("new").leader = 0 if answers[0] > 2 else -1
        return None

    cluster.script = script
    assert admin.create_topic("new", num_partitions=1).partitions[0].leader == 0
    assert answers[0] == 3


def test_an_answer_older_than_one_before_is_asked_for_again(cluster: FakeCluster, admin: Admin) -> None:
    assert admin.list_topics() == ["many", "t"]
    former, stale = cluster.index, [3]

    def script(seen: Seen) -> Any:
        cluster.index = former
        if seen.operation == Operation.METADATA and stale[0]:
            stale[0] -= 1
            cluster.index = former - 1
        return None

    cluster.script = script
    admin.describe_cluster()
    assert stale[0] == 0


def test_errors_of_a_command_come_back_typed(cluster: FakeCluster, admin: Admin) -> None:
    cluster.script = lambda seen: errors.TopicExists.code if seen.operation == Operation.CREATE_TOPIC else None
    with pytest.raises(errors.TopicExists):
        admin.create_topic("t")
    with pytest.raises(errors.ReservedName):
        admin.create_topic("__t")
    with pytest.raises(errors.InvalidTopic):
        admin.create_topic("a b")
    cluster.script = lambda seen: (
        errors.UnknownTopicOrPartition.code if seen.operation == Operation.DELETE_TOPIC else None
    )
    with pytest.raises(errors.UnknownTopicOrPartition):
        admin.delete_topic("nope")


def test_a_command_that_may_have_been_carried_out_is_repeated_as_the_same_command(
    cluster: FakeCluster, admin: Admin
) -> None:
    asked: list[Any] = []

    def script(seen: Seen) -> Any:
        if seen.operation == Operation.CREATE_TOPIC:
            asked.append(seen.message)
            if len(asked) == 1:
                return DROP
        return None

    cluster.script = script
    assert len(admin.create_topic("new", num_partitions=2).partitions) == 2
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert asked[0].topic_id is not None


def test_settings_are_altered_against_those_that_were_seen(cluster: FakeCluster, admin: Admin) -> None:
    assert admin.alter_topic_config("t", {"retention.ms": "5", "quota.bytes": "9"}) == {
        "retention.ms": "5",
        "quota.bytes": "9",
    }
    assert admin.alter_topic_config("t", {"quota.bytes": None}) == {"retention.ms": "5"}
    assert admin.describe_topic("t").config == {"retention.ms": "5"}


def test_settings_that_somebody_else_changed_are_looked_at_again(cluster: FakeCluster, admin: Admin) -> None:
    stale = [True]

    def script(seen: Seen) -> Any:
        if seen.operation == Operation.ALTER_TOPIC and stale:
            stale.clear()
            cluster.configs["t"] = ({"segment.ms": "1"}, 7)
            return errors.StaleCommand.code
        return None

    cluster.script = script
    assert admin.alter_topic_config("t", {"retention.ms": "5"}) == {"retention.ms": "5", "segment.ms": "1"}


def test_a_change_whose_answer_was_lost_is_recognised(cluster: FakeCluster, admin: Admin) -> None:
    asked: list[Any] = []

    def script(seen: Seen) -> Any:
        if seen.operation == Operation.ALTER_TOPIC:
            asked.append(seen.message)
            if len(asked) == 1:
                cluster.configs["t"] = ({"retention.ms": "5"}, 1)
                return DROP
            return errors.StaleCommand.code
        return None

    cluster.script = script
    assert admin.alter_topic_config("t", {"retention.ms": "5"}) == {"retention.ms": "5"}
    assert asked[0] == asked[1], "the same request, so that it cannot take effect twice"


def test_records_are_deleted_at_whoever_leads(cluster: FakeCluster, admin: Admin) -> None:
    fill(cluster, "many", 1, 7)
    refused = [errors.NotLeader.code, errors.LeaseExpired.code]
    cluster.script = lambda seen: refused.pop() if seen.operation == Operation.DELETE_RECORDS and refused else None
    assert admin.delete_records({TopicPartition("many", 1): 4, TopicPartition("many", 0): -1}) == {
        TopicPartition("many", 1): 4,
        TopicPartition("many", 0): 0,
    }
    assert [seen.broker for seen in cluster.seen if seen.operation == Operation.DELETE_RECORDS] == [1, 1, 1, 0]
    cluster.script = lambda seen: errors.OffsetOutOfRange.code if seen.operation == Operation.DELETE_RECORDS else None
    with pytest.raises(errors.OffsetOutOfRange):
        admin.delete_records({TopicPartition("many", 1): 99})
    with pytest.raises(errors.UnknownTopicOrPartition):
        admin.delete_records({TopicPartition("many", 99): 0})


def test_retriable_errors_are_retried_until_the_time_is_over(cluster: FakeCluster) -> None:
    failures = [2]

    def script(seen: Seen) -> Any:
        if seen.operation == Operation.CREATE_TOPIC and failures[0]:
            failures[0] -= 1
            return errors.NotController.code
        return None

    cluster.script = script
    with Admin(bootstrap_servers=cluster.bootstrap) as patient:
        patient.create_topic("new")
    failures[0] = 10**9
    with (
        Admin(bootstrap_servers=cluster.bootstrap, request_timeout_ms=500) as hasty,
        pytest.raises((errors.NotController, errors.RequestTimedOut)),
    ):
        hasty.create_topic("other")


def test_the_cluster_and_its_brokers(cluster: FakeCluster, admin: Admin) -> None:
    described = admin.describe_cluster()
    assert (described.cluster_id, described.controller_id, described.index) == ("fake", 0, cluster.index)
    assert [(b.id, b.port, b.fenced, b.epoch) for b in described.brokers] == [
        (0, cluster.ports[0], False, 1),
        (1, cluster.ports[1], False, 1),
    ]
    assert admin.broker_status(1).broker == 1
    assert admin.broker_status(address=f"127.0.0.1:{cluster.ports[1]}").broker == 1
    assert admin.broker_status().broker in (0, 1)


def test_a_starting_broker_tells_its_status_before_anybody_knows_the_cluster(
    cluster: FakeCluster, admin: Admin
) -> None:
    cluster.script = lambda seen: errors.BrokerFenced.code if seen.operation == Operation.METADATA else None
    assert admin.broker_status(0).broker == 0


def test_no_broker_at_all() -> None:
    with Admin(bootstrap_servers="127.0.0.1:1", request_timeout_ms=300) as admin:
        for call in (admin.list_topics, admin.describe_cluster, admin.broker_status):
            with pytest.raises((errors.NoBrokersAvailable, errors.NetworkError)):
                call()


# -- more partitions ---------------------------------------------------------------------------------------------


def grow(cluster: FakeCluster, total: int, *, leaders_after: int = 0) -> Any:
    """A script that adds partitions when it is asked to; they get leaders after so many more answers of metadata."""
    answers = [0]

    def script(seen: Seen) -> Any:
        partitions = cluster.topics["t"][1]
        if seen.operation == Operation.CREATE_PARTITIONS:
            assert seen.message == messages.CreatePartitionsRequest("t", cluster.topics["t"][0], total)
            if len(partitions) >= total:
                return errors.InvalidPartitions.code
            for number in range(len(partitions), total):
                partitions[number] = Partition(-1 if leaders_after else 0)
            cluster.index += 1
            return frames.response(seen.head, messages.Done())
        if seen.operation == Operation.METADATA and len(partitions) == total:
            answers[0] += 1
            if answers[0] > leaders_after:
                for partition in partitions.values():
                    partition.leader = 0
        return None

    return script


def test_partitions_are_added_and_waited_for(cluster: FakeCluster, admin: Admin) -> None:
    cluster.script = grow(cluster, 3, leaders_after=2)
    described = admin.create_partitions("t", 3)
    assert [(p.partition, p.leader) for p in described.partitions] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("total", [0, 1, 4])
def test_a_topic_cannot_get_fewer_partitions_or_as_many_as_it_has(
    cluster: FakeCluster, admin: Admin, total: int
) -> None:
    with pytest.raises(errors.InvalidPartitions, match="topic many has 4 partitions"):
        admin.create_partitions("many", total)
    assert cluster.count(Operation.CREATE_PARTITIONS) == 0


def test_partitions_that_an_attempt_without_an_answer_has_added_are_enough(cluster: FakeCluster, admin: Admin) -> None:
    script = grow(cluster, 3)

    def drop_first(seen: Seen) -> Any:
        answer = script(seen)
        first = seen.operation == Operation.CREATE_PARTITIONS and cluster.count(Operation.CREATE_PARTITIONS) == 1
        return DROP if first else answer

    cluster.script = drop_first
    assert len(admin.create_partitions("t", 3).partitions) == 3
    assert cluster.count(Operation.CREATE_PARTITIONS) == 2


def test_more_partitions_for_a_topic_that_is_not_there(admin: Admin) -> None:
    with pytest.raises(errors.UnknownTopicOrPartition):
        admin.create_partitions("nope", 3)
