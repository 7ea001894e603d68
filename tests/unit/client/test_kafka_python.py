"""What kafka-python's users expect of names, signatures and futures, and what they are told where it is otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.fake_broker import SILENCE, FakeCluster

from zmqueue import Consumer, Producer, errors
from zmqueue.client.partitioners import (
    DefaultPartitioner,
    RoundRobinPartitioner,
    StickyPartitioner,
    find_partitioner,
)
from zmqueue.wire.frames import Operation

WAIT_S = 10.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "many": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Producer] = []

    def make(**settings: Any) -> Producer:
        made.append(Producer(bootstrap_servers=[cluster.bootstrap], **settings))
        return made[-1]

    yield make
    cluster.script = lambda seen: None
    for each in made:
        each.close(timeout=0.1)


@pytest.mark.parametrize("client", [Producer, Consumer])
def test_an_unknown_option_names_the_nearest_known_one(client: Any) -> None:
    with pytest.raises(TypeError, match="'bootstrap_server'; did you mean 'bootstrap_servers'"):
        client(bootstrap_server="127.0.0.1:9092")
    with pytest.raises(TypeError, match=r"no option 'qqq'$"):
        client(qqq=1)


@pytest.mark.parametrize(
    "option", ["api_version", "security_protocol", "ssl_cafile", "sasl_mechanism", "metric_reporters"]
)
def test_an_option_that_could_not_be_honoured_is_refused_with_the_reason(option: str) -> None:
    with pytest.raises(TypeError, match=f"leave out '{option}', which is Kafka's: "):
        Producer(**{option: "x"})


def test_send_takes_its_arguments_in_kafka_pythons_order(make: Any) -> None:
    metadata = make().send("many", b"value", b"key", [("h", b"1")], 2, 1234).get(timeout=60)
    assert (metadata.topic, metadata.partition, metadata.offset, metadata.timestamp) == ("many", 2, 0, 1234)


def test_callbacks_take_more_arguments_and_chain(make: Any) -> None:
    found: list[Any] = []
    done = threading.Event()
    future = make().send("t", b"v")
    chained = future.add_callback(lambda tag, metadata, end: found.append((tag, metadata.offset, end)), "tag", end=1)
    assert chained.add_errback(found.append).add_both(lambda _: done.set()) is future
    assert done.wait(WAIT_S)
    assert found == [("tag", 0, 1)]


def test_errbacks_get_the_error(cluster: FakeCluster, make: Any) -> None:
    cluster.script = lambda seen: errors.InvalidRecord.code if seen.operation == Operation.PRODUCE else None
    found: list[Any] = []
    done = threading.Event()
    future = make().send("t", b"v").add_callback(found.append)
    future.add_errback(lambda tag, error: found.append((tag, type(error))), "tag").add_errback(lambda _: done.set())
    assert done.wait(WAIT_S)
    assert found == [("tag", errors.InvalidRecord)]
    assert (future.failed(), future.succeeded(), future.is_done, future.value) == (True, False, True, None)
    assert isinstance(future.exception, errors.InvalidRecord)
    assert not future.retriable()


def test_a_future_has_its_value_once_it_has_succeeded(cluster: FakeCluster, make: Any) -> None:
    cluster.script = lambda seen: SILENCE if seen.operation == Operation.PRODUCE else None
    producer = make(request_timeout_ms=200)
    future = producer.send("t", b"v")
    assert (future.value, future.exception, future.is_done, future.retriable()) == (None, None, False, False)
    cluster.script = lambda seen: None
    assert future.get(WAIT_S) == future.value


def test_a_future_of_many_has_callbacks_as_well(cluster: FakeCluster, make: Any) -> None:
    found: list[Any] = []
    done = threading.Event()
    producer = make()
    future = producer.send_many("t", [b"a", b"b"])
    future.add_callback(lambda tag, many: found.append((tag, many[1].offset)), "tag").add_errback(found.append)
    future.add_both(lambda _: done.set())
    assert done.wait(WAIT_S)
    assert found == [("tag", 1)]
    assert future.value is not None
    cluster.script = lambda seen: errors.InvalidRecord.code if seen.operation == Operation.PRODUCE else None
    failed = threading.Event()
    future = producer.send_many("t", [b"a"]).add_callback(found.append).add_errback(lambda _: failed.set())
    assert failed.wait(WAIT_S)
    assert (found, future.value, future.retriable()) == ([("tag", 1)], None, False)


def test_a_new_producer_is_connected_where_there_is_a_broker(make: Any) -> None:
    assert make().bootstrap_connected()


def test_a_producer_without_brokers_is_not_connected() -> None:
    with Producer(bootstrap_servers="127.0.0.1:1") as producer:
        assert not producer.bootstrap_connected()


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd", "none", None])
def test_codecs_go_by_kafkas_names(cluster: FakeCluster, make: Any, codec: str | None) -> None:
    make(compression_type=codec).send_many("t", [bytes(1000)] * 3).get(WAIT_S)
    with Consumer("t", bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        assert [next(consumer).value for _ in range(3)] == [bytes(1000)] * 3


# -- partitioners


def test_the_default_partitioner_is_the_producer_itself() -> None:
    assert find_partitioner(None) is None
    assert find_partitioner("default") is None
    assert find_partitioner(DefaultPartitioner) is None
    assert find_partitioner(DefaultPartitioner()) is None


@pytest.mark.parametrize("given", ["round_robin", RoundRobinPartitioner, RoundRobinPartitioner()])
def test_round_robin_takes_turns_whatever_the_key(make: Any, given: Any) -> None:
    producer = make(partitioner=given)
    numbers = [producer.send("many", b"v", key=b"same").get(WAIT_S).partition for _ in range(8)]
    assert sorted(numbers) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("given", ["sticky", StickyPartitioner, StickyPartitioner(records=3)])
def test_sticky_stays_for_a_while_whatever_the_key(given: Any) -> None:
    stick = find_partitioner(given)
    assert stick is not None
    records = 3 if isinstance(given, StickyPartitioner) else 500
    runs = [{stick(b"%d" % n, range(4), [0, 1, 3]) for n in range(records)} for _ in range(3)]
    assert [len(run) for run in runs] == [1, 1, 1]
    assert runs[0] != runs[1] != runs[2]


def test_sticky_leaves_a_partition_that_has_lost_its_leader() -> None:
    stick = StickyPartitioner()
    first = stick(None, [0, 1], [0, 1])
    assert stick(None, [0, 1], [1 - first]) == 1 - first


def test_a_custom_partitioner_has_kafka_pythons_signature(make: Any) -> None:
    seen: list[Any] = []

    def last(key_bytes: bytes, all_partitions: list[int], available_partitions: list[int]) -> int:
        seen.append((key_bytes, all_partitions, available_partitions))
        return all_partitions[-1]

    producer = make(partitioner=last, key_serializer="string")
    assert producer.send("many", b"v", key="k").get(WAIT_S).partition == 3
    assert producer.send_many("many", [b"v"], keys=["k"]).get(WAIT_S)[0].partition == 3
    assert seen == [(b"k", [0, 1, 2, 3], [0, 1, 2, 3])] * 2


@pytest.mark.parametrize("given", ["random", 5])
def test_what_is_no_partitioner_is_refused(given: Any) -> None:
    with pytest.raises(errors.ConfigError, match="partitioner"):
        find_partitioner(given)


def test_sticking_for_no_records_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="0 records"):
        StickyPartitioner(records=0)
