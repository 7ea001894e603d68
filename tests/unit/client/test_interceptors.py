"""Interceptors see every record, and never harm one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.fake_broker import FakeCluster

from zmqueue import Consumer, Producer, TopicPartition, errors
from zmqueue.client.interceptors import ConsumerInterceptor, ConsumerInterceptors, ProducerInterceptor
from zmqueue.model import OffsetAndMetadata, ProducerRecord
from zmqueue.wire.batch import decode
from zmqueue.wire.frames import Operation

WAIT_S = 10.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "other": 1}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Producer] = []

    def make(*interceptors: Any, **settings: Any) -> Producer:
        made.append(Producer(bootstrap_servers=cluster.bootstrap, interceptors=interceptors, **settings))
        return made[-1]

    yield make
    cluster.script = lambda seen: None
    for each in made:
        each.close(timeout=0.1)


class Tracing(ProducerInterceptor):
    """Adds a header, and remembers what became of every record."""

    def __init__(self, expected: int = 1) -> None:
        self.ended: list[Any] = []
        self.all = threading.Event()
        self._expected = expected

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return record._replace(headers=[*(record.headers or ()), ("trace", b"1")])

    def on_acknowledgement(self, metadata: Any, error: Any) -> None:
        self.ended.append((metadata and metadata.offset, error))
        if len(self.ended) == self._expected:
            self.all.set()


class Upper:
    """Only one of the two methods, and no base class."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return record._replace(value=record.value.upper())


class Broken:
    def on_send(self, record: ProducerRecord) -> Any:
        raise RuntimeError("no")

    def on_acknowledgement(self, metadata: Any, error: Any) -> None:
        raise RuntimeError("no")


class Forgetful:
    def on_send(self, record: ProducerRecord) -> Any:
        return None


def headers_of(cluster: FakeCluster) -> list[Any]:
    return [row for header, body in cluster.partition().batches for row in decode(header, body).headers or []]


def test_a_record_is_seen_before_it_is_serialized_and_when_it_is_acknowledged(cluster: FakeCluster, make: Any) -> None:
    tracing = Tracing()
    producer = make(tracing, Upper(), value_serializer="string")
    producer.send("t", "value", headers=[("mine", b"0")]).get(WAIT_S)
    assert tracing.all.wait(WAIT_S)
    assert tracing.ended == [(0, None)]
    assert cluster.values() == [b"VALUE"]
    assert headers_of(cluster) == [[["mine", b"0"], ["trace", b"1"]]]


def test_each_record_of_send_many_is_seen(cluster: FakeCluster, make: Any) -> None:
    tracing = Tracing(expected=3)
    sent = make(Upper(), tracing).send_many("t", [b"a", b"b", b"c"], keys=[b"k", None, None], timestamps_ms=[1, 2, 3])
    assert [m.timestamp for m in sent.get(WAIT_S)] == [1, 2, 3]
    assert tracing.all.wait(WAIT_S)
    assert tracing.ended == [(0, None), (1, None), (2, None)]
    assert cluster.values() == [b"A", b"B", b"C"]
    assert headers_of(cluster) == [[["trace", b"1"]]] * 3


def test_a_record_can_be_sent_elsewhere(cluster: FakeCluster, make: Any) -> None:
    class Diverting:
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return record._replace(topic="other")

    producer = make(Diverting())
    assert producer.send("t", b"v").get(WAIT_S).topic == "other"
    # A call belongs to one topic: what would leave it goes on as it was.
    assert producer.send_many("t", [b"w"]).get(WAIT_S)[0].topic == "t"
    assert producer.metrics()["producer-metrics"]["interceptor-error-total"] == 1


@pytest.mark.parametrize("broken", [Broken(), Forgetful()])
def test_a_broken_interceptor_is_counted_and_harms_nothing(cluster: FakeCluster, make: Any, broken: Any) -> None:
    tracing = Tracing(expected=2)
    producer = make(broken, tracing, Upper())
    producer.send("t", b"a").get(WAIT_S)
    producer.send_many("t", [b"b"]).get(WAIT_S)
    assert tracing.all.wait(WAIT_S)
    assert cluster.values() == [b"A", b"B"]
    assert producer.metrics()["producer-metrics"]["interceptor-error-total"] >= 2


def test_a_failure_is_acknowledged_with_its_error(cluster: FakeCluster, make: Any) -> None:
    cluster.script = lambda seen: errors.InvalidRecord.code if seen.operation == Operation.PRODUCE else None
    tracing = Tracing()
    future = make(tracing).send("t", b"v")
    assert tracing.all.wait(WAIT_S)
    ((metadata, error),) = tracing.ended
    assert metadata is None
    assert isinstance(error, errors.InvalidRecord)
    assert future.failed()


def test_what_has_neither_method_is_refused(make: Any) -> None:
    with pytest.raises(errors.ConfigError, match="on_send"):
        make(object())


# -- consumers


class Dropping(ConsumerInterceptor):
    def on_consume(self, records: Any) -> Any:
        return {partition: [r for r in rows if r.value != b"secret"] for partition, rows in records.items()}


def test_polls_and_iterations_hand_out_what_interceptors_return(cluster: FakeCluster, make: Any) -> None:
    make().send_many("t", [b"a", b"secret", b"b"]).get(WAIT_S)
    settings: dict[str, Any] = {"bootstrap_servers": cluster.bootstrap, "auto_offset_reset": "earliest"}
    with Consumer("t", interceptors=[Dropping()], **settings) as consumer:
        (records,) = consumer.poll(WAIT_S * 1000).values()
        assert [record.value for record in records] == [b"a", b"b"]
        assert consumer.position(TopicPartition("t", 0)) == 3
    with Consumer("t", interceptors=[Dropping()], **settings) as consumer:
        assert [next(consumer).value for _ in range(2)] == [b"a", b"b"]


def test_a_broken_interceptor_of_a_consumer_is_counted_and_harms_nothing() -> None:
    class Bad:
        def on_consume(self, records: Any) -> Any:
            raise RuntimeError("no")

        def on_commit(self, offsets: Any) -> None:
            raise RuntimeError("no")

    class Nothing:
        def on_consume(self, records: Any) -> Any:
            return None

    seen = []

    class Counting(ConsumerInterceptor):
        def on_commit(self, offsets: Any) -> None:
            seen.append(offsets)

    chain = ConsumerInterceptors([Bad(), Nothing(), Counting()])
    records: Any = {TopicPartition("t", 0): []}
    assert chain.on_consume(records) is records
    offsets = {TopicPartition("t", 0): OffsetAndMetadata(5)}
    chain.on_commit(offsets)
    assert seen == [offsets]
    assert chain.errors == 3
