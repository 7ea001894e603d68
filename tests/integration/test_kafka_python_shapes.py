"""Programs in the shapes of kafka-python's examples, with only their imports changed, on a real cluster."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

import msgspec
import pytest

from zmqueue import Admin, ConsumerRebalanceListener, OffsetAndMetadata, TopicPartition
from zmqueue import Consumer as KafkaConsumer
from zmqueue import Producer as KafkaProducer
from zmqueue.errors import ZmqueueError as KafkaError
from zmqueue.testing import Cluster

pytestmark = pytest.mark.integration

WAIT_S = 60.0
WAIT_MS = 60_000


@pytest.fixture
def servers(cluster: Cluster) -> list[str]:
    return cluster.bootstrap_servers.split(",")


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, of two partitions."""
    name = re.sub(r"[\W_]+", "-", request.node.name)
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        admin.create_topic(name, num_partitions=2, replication_factor=2)
    return name


def write(servers: list[str], topic: str, *values: bytes, **settings: Any) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    for value in values:
        producer.send(topic, value, **settings)
    producer.flush()
    producer.close()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"


# -- producing


def test_send_and_wait_for_the_result(servers: list[str], topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    future = producer.send(topic, b"raw_bytes")
    try:
        record_metadata = future.get(timeout=60)
    except KafkaError as error:
        pytest.fail(f"not written: {error}")
    assert record_metadata.topic == topic
    assert record_metadata.partition in (0, 1)
    assert record_metadata.offset == 0


def test_send_a_hundred_and_flush(servers: list[str], topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    futures = [producer.send(topic, b"msg %d" % n) for n in range(100)]
    producer.flush()
    assert all(future.is_done and future.succeeded() for future in futures)
    producer.close(timeout=10)


def test_keys_decide_the_partition(servers: list[str], topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers, key_serializer=str.encode)
    metadata = [producer.send(topic, key="ping", value=b"1234").get(timeout=60) for _ in range(5)]
    assert len({m.partition for m in metadata}) == 1
    assert producer.partitions_for(topic) == {0, 1}


def test_callbacks_and_errbacks(servers: list[str], topic: str) -> None:
    found: list[Any] = []
    done = threading.Event()

    def on_send_success(record_metadata: Any) -> None:
        found.append((record_metadata.topic, record_metadata.offset))
        done.set()

    def on_send_error(excp: Exception) -> None:
        found.append(excp)
        done.set()

    producer = KafkaProducer(bootstrap_servers=servers, retries=5)
    producer.send(topic, b"raw_bytes").add_callback(on_send_success).add_errback(on_send_error)
    producer.flush()
    assert done.wait(WAIT_S)
    assert found == [(topic, 0)]


def test_a_failed_send_raises_an_error_of_the_family(servers: list[str], topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    with pytest.raises(KafkaError):
        producer.send(topic, bytes(2 * 1024 * 1024)).get(timeout=60)
    with pytest.raises(KafkaError):
        producer.send(topic, b"v", partition=99).get(timeout=60)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_compression(servers: list[str], topic: str, compression: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers, compression_type=compression)
    for n in range(100):
        producer.send(topic, b"msg %d" % n)
    producer.flush()
    consumer = KafkaConsumer(
        topic, bootstrap_servers=servers, auto_offset_reset="earliest", consumer_timeout_ms=WAIT_MS
    )
    assert {next(consumer).value for _ in range(100)} == {b"msg %d" % n for n in range(100)}


def test_headers(servers: list[str], topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    producer.send(topic, value=b"c29tZSB2YWx1ZQ==", headers=[("content-encoding", b"base64")]).get(timeout=60)
    consumer = KafkaConsumer(
        topic, bootstrap_servers=servers, auto_offset_reset="earliest", consumer_timeout_ms=WAIT_MS
    )
    assert next(consumer).headers == [("content-encoding", b"base64")]


def test_metrics_are_a_dict_of_dicts(servers: list[str], topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    assert producer.bootstrap_connected()
    producer.send(topic, b"value").get(timeout=60)
    metrics = producer.metrics()
    assert metrics["producer-metrics"]["record-send-total"] == 1
    assert all(isinstance(value, int | float) for group in metrics.values() for value in group.values())


# -- consuming, alone


def test_iterate_until_nothing_comes(servers: list[str], topic: str) -> None:
    write(servers, topic, b"a", b"b", key=b"k")
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=servers,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=2000,
    )
    found = [f"{message.topic}:{message.offset}: key={message.key} value={message.value}" for message in consumer]
    assert found == [f"{topic}:0: key=b'k' value=b'a'", f"{topic}:1: key=b'k' value=b'b'"]


def test_assign_and_take_the_next(servers: list[str], topic: str) -> None:
    write(servers, topic, b"first", b"second", partition=1)
    consumer = KafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest", consumer_timeout_ms=WAIT_MS)
    consumer.assign([TopicPartition(topic, 1)])
    msg = next(consumer)
    assert (msg.partition, msg.value) == (1, b"first")
    assert consumer.position(TopicPartition(topic, 1)) == 1


@pytest.mark.parametrize(
    ("serializer", "deserializer"),
    [
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
        (lambda v: json.dumps(v).encode("utf-8"), lambda m: json.loads(m.decode("utf-8"))),
        ("json", "json"),
        ("cbor", "cbor"),
    ],
    ids=["msgpack", "lambdas", "json", "cbor"],
)
def test_serializers_and_deserializers(servers: list[str], topic: str, serializer: Any, deserializer: Any) -> None:
    producer = KafkaProducer(bootstrap_servers=servers, value_serializer=serializer)
    producer.send(topic, {"key": ["value", 1]}).get(timeout=60)
    consumer = KafkaConsumer(
        bootstrap_servers=servers,
        value_deserializer=deserializer,
        auto_offset_reset="earliest",
        consumer_timeout_ms=WAIT_MS,
    )
    consumer.subscribe([topic])
    assert isinstance(next(consumer).value, dict)


def test_poll_by_partition_and_seek(servers: list[str], topic: str) -> None:
    write(servers, topic, b"0", b"1", b"2", partition=0)
    consumer = KafkaConsumer(bootstrap_servers=servers)
    tp = TopicPartition(topic, 0)
    consumer.assign([tp])
    consumer.seek(tp, 1)
    msg_pack = consumer.poll(timeout_ms=60_000, max_records=1)
    assert [(tp, [m.value for m in messages]) for tp, messages in msg_pack.items()] == [(tp, [b"1"])]
    consumer.seek_to_beginning(tp)
    assert consumer.poll(timeout_ms=60_000)[tp][0].offset == 0
    assert consumer.beginning_offsets([tp]) == {tp: 0}
    assert consumer.end_offsets([tp]) == {tp: 3}
    assert topic in consumer.topics()


# -- consuming, in groups


def test_what_a_group_committed_its_next_member_begins_with(servers: list[str], topic: str) -> None:
    write(servers, topic, b"a", b"b", b"c", partition=0)
    tp = TopicPartition(topic, 0)
    settings: dict[str, Any] = {
        "group_id": "my-group-" + topic,
        "bootstrap_servers": servers,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "consumer_timeout_ms": WAIT_MS,
    }
    consumer = KafkaConsumer(topic, **settings)
    msg = next(consumer)
    consumer.commit({tp: OffsetAndMetadata(msg.offset + 1, "half way")})
    assert consumer.committed(tp) == 1
    consumer.close()
    with KafkaConsumer(topic, **settings) as consumer:
        assert next(consumer).value == b"b"


def test_committing_by_itself(servers: list[str], topic: str) -> None:
    write(servers, topic, b"a", b"b", partition=0)
    settings: dict[str, Any] = {
        "group_id": "auto-" + topic,
        "bootstrap_servers": servers,
        "auto_offset_reset": "earliest",
    }
    with KafkaConsumer(topic, auto_commit_interval_ms=100, **settings) as consumer:
        assert next(consumer).value == b"a"
    with KafkaConsumer(topic, **settings) as consumer:
        assert next(consumer).value == b"b"


def test_a_pattern_takes_what_matches(servers: list[str], topic: str) -> None:
    write(servers, topic, b"matched")
    consumer = KafkaConsumer(
        bootstrap_servers=servers,
        group_id="pattern-" + topic,
        auto_offset_reset="earliest",
        consumer_timeout_ms=WAIT_MS,
    )
    consumer.subscribe(pattern="^test-a-pattern.*")
    with consumer:
        message = next(consumer)
    assert (message.topic, message.value) == (topic, b"matched")


def test_two_consumers_of_a_group_share_the_partitions(servers: list[str], topic: str) -> None:
    write(servers, topic, *(b"%d" % n for n in range(20)), partition=0)
    write(servers, topic, *(b"%d" % n for n in range(20, 40)), partition=1)
    stop = threading.Event()
    held: dict[int, set[TopicPartition]] = {}
    found: list[bytes] = []

    def run(number: int) -> None:
        consumer = KafkaConsumer(
            topic,
            group_id="shared-" + topic,
            bootstrap_servers=servers,
            auto_offset_reset="earliest",
            max_poll_records=1,
        )
        while not stop.is_set():
            for records in consumer.poll(timeout_ms=100).values():
                found.extend(record.value for record in records)
            held[number] = set(consumer.assignment())
        consumer.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: sorted(map(len, held.values())) == [1, 1] and held[0] != held[1])
        until(lambda: len(set(found)) == 40)
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)


def test_a_listener_hears_what_comes_and_goes(servers: list[str], topic: str) -> None:
    heard: list[Any] = []

    class Listener(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: Any) -> None:
            heard.append(("assigned", set(assigned)))

        def on_partitions_revoked(self, revoked: Any) -> None:
            heard.append(("revoked", set(revoked)))

    both = {TopicPartition(topic, 0), TopicPartition(topic, 1)}
    consumer = KafkaConsumer(group_id="listened-" + topic, bootstrap_servers=servers)
    consumer.subscribe([topic], listener=Listener())
    deadline = time.monotonic() + WAIT_S
    while not heard and time.monotonic() < deadline:
        consumer.poll(timeout_ms=100)
    consumer.close()
    came = set().union(*(what for kind, what in heard if kind == "assigned"))
    gone = set().union(*(what for kind, what in heard if kind == "revoked"))
    assert (came, gone) == (both, both)


# -- in processes of their own


def produce(servers: list[str], topic: str, stop: Event) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    while not stop.is_set():
        producer.send(topic, b"test")
        producer.send(topic, b"\xc2Hola, mundo!")
        stop.wait(0.05)
    producer.close()


def consume(servers: list[str], topic: str, stop: Event, counted: Any) -> None:
    consumer = KafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest", consumer_timeout_ms=1000)
    consumer.subscribe([topic])
    while not stop.is_set():
        for _ in consumer:
            counted.value += 1
            if stop.is_set():
                break
    consumer.close()


def test_a_producer_and_a_consumer_in_processes(servers: list[str], topic: str) -> None:
    context = multiprocessing.get_context("spawn")
    stop, counted = context.Event(), context.Value("i", 0)
    tasks = [
        context.Process(target=produce, args=(servers, topic, stop)),
        context.Process(target=consume, args=(servers, topic, stop, counted)),
    ]
    for task in tasks:
        task.start()
    try:
        until(lambda: counted.value >= 20)
    finally:
        stop.set()
        for task in tasks:
            task.join(WAIT_S)
    assert [task.exitcode for task in tasks] == [0, 0]
