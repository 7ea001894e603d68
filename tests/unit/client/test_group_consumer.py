"""Consumers that share topics, against a scripted coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from unit.client.fake_broker import FakeCluster, Partition
from unit.client.test_consumer import fill

from zmqueue import Consumer, ConsumerRebalanceListener, TopicPartition
from zmqueue.wire.frames import Operation

PATIENCE_S = 20.0
MANY = [TopicPartition("many", number) for number in range(4)]


class Told(ConsumerRebalanceListener):
    """What a listener was told, in order, with what the coordinator had seen by then."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.on_revoked: Callable[[list[TopicPartition]], None] = lambda partitions: None
        self._cluster = cluster

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self.calls.append(("assigned", [partition.partition for partition in assigned]))

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self.calls.append(("revoked", [partition.partition for partition in revoked]))
        self.on_revoked(revoked)

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self.calls.append(("lost", [partition.partition for partition in lost]))


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Consumer] = []

    def make(*topics: str, **settings: Any) -> Consumer:
        defaults = {
            "bootstrap_servers": cluster.bootstrap,
            "group_id": "g",
            "auto_offset_reset": "earliest",
            "fetch_max_wait_ms": 50,
            "heartbeat_interval_ms": 100,
        }
        consumer = Consumer(*topics, **(defaults | settings))
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.close(timeout_ms=500)


def poll_until(ready: Callable[[], Any], *consumers: Consumer) -> list[Any]:
    """Poll them in turn; what they handed out."""
    deadline = time.monotonic() + PATIENCE_S
    records = []
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        for consumer in consumers:
            records += [record for part in consumer.poll(20).values() for record in part]
    return records


def read(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
        found += [record for part in consumer.poll(100).values() for record in part]
    return found


def fill_many(cluster: FakeCluster, count: int = 10) -> None:
    for number in range(4):
        fill(cluster, [b"%d" % n for n in range(count)], "many", number)


def committed(cluster: FakeCluster) -> dict[int, int]:
    return {key[1]: row.offset for key, row in cluster.coordinator.offsets.items()}


# -- joining and sharing -------------------------------------------------------------------------------------------


def test_a_member_alone_gets_everything_with_its_first_poll(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    consumer = make("many")
    assert consumer.assignment() == set()
    assert not cluster.count(Operation.GROUP_HEARTBEAT)
    assert len(read(consumer, 40)) == 40
    assert consumer.assignment() == set(MANY)
    assert consumer.subscription() == {"many"}
    told = consumer.group_metadata()
    assert (told.group_id, told.generation_id, told.group_instance_id) == ("g", 1, None)
    assert list(cluster.coordinator.members) == [told.member_id]


def test_reading_begins_where_the_group_left_off(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first = make("many")
    read(first, 40)
    first.close()
    cluster.do(lambda: fill(cluster, [b"new"], "many", 2))
    assert [(record.partition, record.offset) for record in read(make("many"), 1)] == [(2, 10)]


def test_two_members_share_and_each_record_is_read_once(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make("many"), make("many")
    records = poll_until(lambda: len(first.assignment()) == 4, first)
    records += poll_until(lambda: len(second.assignment()) == 2, first, second)
    assert first.assignment() | second.assignment() == set(MANY)
    cluster.do(lambda: fill_many(cluster))
    records += poll_until(
        lambda: all(c.position(p) == 20 for c in (first, second) for p in c.assignment()), first, second
    )
    seen = [(record.partition, record.offset) for record in records]
    assert sorted(seen) == [(partition, offset) for partition in range(4) for offset in range(20)]


def test_partitions_that_stay_are_fetched_on_through_a_rebalance(cluster: FakeCluster, make: Any) -> None:
    first, second = make("many", fetch_max_wait_ms=60_000), make("many")
    poll_until(lambda: len(first.assignment()) == 4, first)
    for partition in MANY:
        first.position(partition)
    slots = {partition: first._fetcher.slots[partition] for partition in MANY}
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    for partition in first.assignment():
        assert first._fetcher.slots[partition] is slots[partition]
        assert slots[partition].token == 0 or slots[partition].waits


def test_new_partitions_of_a_topic_come_through_the_coordinator(cluster: FakeCluster, make: Any) -> None:
    consumer = make("many")
    poll_until(lambda: len(consumer.assignment()) == 4, consumer)

    def grow() -> None:
        cluster.topics["many"][1][4] = Partition(0)
        cluster.index += 1

    cluster.do(grow)
    poll_until(lambda: len(consumer.assignment()) == 5, consumer)


# -- listeners -----------------------------------------------------------------------------------------------------


def test_a_listener_hears_of_partitions_before_their_records(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    consumer = make()

    class SeekTo(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
            for partition in assigned:
                consumer.seek(partition, 7)

    consumer.subscribe(["many"], listener=SeekTo())
    records = read(consumer, 12)
    assert {record.offset for record in records} == {7, 8, 9}


def test_a_revocation_is_told_then_committed_then_let_go_then_given_on(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make(), make("many")
    told = Told(cluster)
    told.on_revoked = lambda partitions: cluster.coordinator.log.append(("listener", "", None))
    first.subscribe(["many"], listener=told)
    read(first, 40)
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    assert told.calls == [("assigned", [0, 1, 2, 3]), ("revoked", [2, 3])]
    kinds = [kind for kind, _, _ in cluster.coordinator.log]
    assert kinds == ["listener", "committed", "committed", "let go", "let go"]
    assert committed(cluster) == {2: 10, 3: 10}


def test_what_is_revoked_is_not_handed_out_any_more(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make(max_poll_records=1), make("many")
    first.subscribe(["many"], listener=Told(cluster))
    read(first, 1)
    second.poll(0)
    slots = first._fetcher.slots.values()
    assert first._fetcher.wait(lambda: sum(slot.stopped for slot in slots) == 2, PATIENCE_S)
    gone = {slot.partition.partition for slot in slots if slot.stopped}
    assert not any(slot.chunks for slot in slots if slot.stopped)
    assert not any(record.partition in gone for record in read(first, 15))


def test_an_application_in_its_work_is_waited_for(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make("many"), make("many")
    read(first, 40)
    poll_until(lambda: len(cluster.coordinator.members) == 2, second)
    beats = cluster.count(Operation.GROUP_HEARTBEAT)
    poll_until(lambda: cluster.count(Operation.GROUP_HEARTBEAT) > beats + 6, second)
    assert second.assignment() == set(), "records of the first were in work all the while"
    poll_until(lambda: len(second.assignment()) == 2, first, second)


def test_nobody_waits_for_an_application_that_has_nothing_in_work(cluster: FakeCluster, make: Any) -> None:
    first, second = make("many"), make("many")
    poll_until(lambda: len(first.assignment()) == 4, first)
    for partition in MANY:
        first.position(partition)
    poll_until(lambda: len(second.assignment()) == 2, second)


def test_an_iteration_drops_what_it_was_given_of_partitions_that_went(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make("many"), make("many")
    seen = [next(first)]
    poll_until(lambda: len(cluster.coordinator.members) == 2, second)
    assert first._fetcher.wait(lambda: first._group.has_news, PATIENCE_S)
    gone = {slot.partition.partition for slot in first._fetcher.slots.values() if slot.stopped}
    after = [next(first) for _ in range(10)]
    assert not gone & {record.partition for record in after}
    seen += [*after, *poll_until(lambda: len(second.assignment()) == 2, first, second)]
    offsets = committed(cluster)
    assert all(offsets.get(partition, 0) <= 1 for partition in gone)


def test_what_a_listener_raises_is_raised_and_the_partitions_go(cluster: FakeCluster, make: Any) -> None:
    first, second = make(), make("many")
    told = Told(cluster)

    def fail(partitions: list[TopicPartition]) -> None:
        raise RuntimeError("the application's own")

    told.on_revoked = fail
    first.subscribe(["many"], listener=told)
    poll_until(lambda: len(first.assignment()) == 4, first)
    with pytest.raises(RuntimeError, match="the application's own"):
        poll_until(lambda: False, second, first)
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    told.on_revoked = lambda partitions: None
