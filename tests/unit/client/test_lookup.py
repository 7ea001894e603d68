"""Finding by value and reading backwards, against a scripted cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.fake_broker import FakeCluster

from zmqueue import Consumer, TopicPartition, errors
from zmqueue.wire import batch as wire_batch
from zmqueue.wire import frames, messages
from zmqueue.wire.frames import Operation

T = TopicPartition("t", 0)


def fill(cluster: FakeCluster, count: int, topic: str = "t", number: int = 0, size: int = 5) -> None:
    """Record n has header k = n modulo 3."""
    for at in range(0, count, size):
        numbers = range(at, min(count, at + size))
        headers = [[["k", b"%d" % (n % 3)], ["other", b"x"]] for n in numbers]
        made = wire_batch.encode([b"%d" % n for n in numbers], headers=headers, base_timestamp=1000 + at)
        cluster.partition(topic, number).append(*made)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 3}) as cluster:
        yield cluster


@pytest.fixture
def consumer(cluster: FakeCluster) -> Iterator[Consumer]:
    with Consumer(bootstrap_servers=cluster.bootstrap, request_timeout_ms=10_000) as consumer:
        yield consumer


def offsets(records: list[Any]) -> list[int]:
    return [record.offset for record in records]


def test_records_are_found_by_value(cluster, consumer):
    fill(cluster, 23)
    found = consumer.find("t", "1")
    assert offsets(found) == list(range(1, 23, 3))
    assert [record.value for record in found] == [b"%d" % n for n in range(1, 23, 3)]
    assert found[0].headers == [("k", b"1"), ("other", b"x")]
    assert consumer.find("t", 1) == consumer.find("t", b"1") == found
    assert consumer.find("t", "absent") == []


def test_a_limit_and_a_place_to_begin_at(cluster, consumer):
    fill(cluster, 30)
    assert offsets(consumer.find("t", 0, limit=3)) == [0, 3, 6]
    assert offsets(consumer.find("t", 0, limit=2, offsets={T: 7})) == [9, 12]
    assert offsets(consumer.find("t", 0, offsets={T: 28})) == []


def test_all_partitions_are_searched_or_some(cluster, consumer):
    for number in range(3):
        fill(cluster, 4, "many", number)
    assert [(r.partition, r.offset) for r in consumer.find("many", 0)] == [(p, o) for p in range(3) for o in (0, 3)]
    assert {r.partition for r in consumer.find("many", 0, partitions=[1])} == {1}
    assert len(consumer.find("many", 0, limit=3)) == 3


def test_an_empty_partition_has_nothing(cluster, consumer):
    assert consumer.find("t", 0) == []
    assert consumer.read_backward(T, count=5) == []


def test_a_topic_without_an_index_says_so(cluster, consumer):
    cluster.script = lambda seen: errors.NoSuchIndex.code if seen.operation == Operation.FIND else None
    with pytest.raises(errors.NoSuchIndex):
        consumer.find("t", 0)


def test_a_search_follows_a_leader_that_moves(cluster, consumer):
    fill(cluster, 20)
    asked = []

    def script(seen: Any) -> Any:
        if seen.operation == Operation.FIND:
            asked.append(seen.broker)
            if len(asked) == 2:
                cluster.move("t", 0, 1 - seen.broker)
        return None

    cluster.script = script
    assert offsets(consumer.find("t", 2)) == list(range(2, 20, 3))
    assert set(asked) == {0, 1}


def test_an_answer_without_the_records_that_it_names_is_refused(cluster, consumer):
    def script(seen: Any) -> Any:
        if seen.operation == Operation.FIND:
            return frames.response(seen.head, messages.FindResponse([3], 9, 9, 0, 1), [b""])
        return None

    cluster.script = script
    with pytest.raises(errors.CorruptBatch):
        consumer.find("t", 2)


def test_backward_is_forward_reversed(cluster, consumer):
    fill(cluster, 23)
    assert offsets(consumer.read_backward(T, count=100)) == list(range(22, -1, -1))
    assert offsets(consumer.read_backward(T, count=7)) == list(range(22, 15, -1))
    assert offsets(consumer.read_backward(T, before=8, count=4)) == [7, 6, 5, 4]
    assert consumer.read_backward(T, before=0, count=4) == []
    assert [record.value for record in consumer.read_backward(T)] == [b"22"]


def test_backward_ends_at_the_log_start(cluster, consumer):
    fill(cluster, 20)
    cluster.partition().log_start = 7
    assert offsets(consumer.read_backward(T, count=100)) == list(range(19, 6, -1))


@pytest.mark.parametrize("call", [lambda c: c.find("t", [1]), lambda c: c.find("t", 1, limit=0)])
def test_what_cannot_be_asked_is_refused(consumer, call):
    with pytest.raises(errors.IllegalState):
        call(consumer)


@pytest.mark.parametrize("arguments", [{"count": 0}, {"before": -5}])
def test_what_cannot_be_read_backward_is_refused(consumer, arguments):
    with pytest.raises(errors.IllegalState):
        consumer.read_backward(T, **arguments)


def refusing(*poison: bytes) -> Any:
    def deserialize(data: bytes) -> int:
        if data in poison:
            raise ValueError("poison")
        return int(data)

    return deserialize


def test_a_record_that_nobody_asked_for_may_be_poison(cluster):
    fill(cluster, 10)
    with Consumer(bootstrap_servers=cluster.bootstrap, value_deserializer=refusing(b"2", b"6")) as consumer:
        assert [record.value for record in consumer.find("t", "1")] == [1, 4, 7]
        assert [record.value for record in consumer.read_backward(T, count=3)] == [9, 8, 7]
        with pytest.raises(errors.DeserializationError) as caught:
            consumer.read_backward(T, count=5)
        assert caught.value.offset == 6
        assert [record.value for record in consumer.read_backward(T, before=6, count=3)] == [5, 4, 3]
        with pytest.raises(errors.DeserializationError):
            consumer.find("t", "2")
