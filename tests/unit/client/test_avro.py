"""Avro: schemas that evolve, that travel by fingerprint, and that cannot be lost."""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import fastavro
import pytest
from unit.client.fake_broker import FakeCluster

from zmqueue import Consumer, Producer, TopicPartition, errors
from zmqueue.client import schemas
from zmqueue.client.avro import DEPTH_MAX, AvroDeserializer, AvroSerializer
from zmqueue.client.avro_bounds import depth_of
from zmqueue.client.schemas import SCHEMAS_TOPIC, SchemaStore, canonical, fingerprint_of

WAIT_S = 10.0
T = TopicPartition("t", 0)

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "int"}, {"name": "item", "type": "string"}],
}
# Renamed, widened, with something new, and without what nobody needs any more.
ORDER_2 = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "number", "aliases": ["id"], "type": "long"},
        {"name": "currency", "type": "string", "default": "EUR"},
    ],
}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1}) as cluster:
        yield cluster


@pytest.fixture
def producer(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Producer] = []

    def make(**settings: Any) -> Producer:
        made.append(Producer(bootstrap_servers=cluster.bootstrap, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close(timeout=0.1)


@pytest.fixture
def consumer(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Consumer] = []

    def make(**settings: Any) -> Consumer:
        settings = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 50} | settings
        made.append(Consumer(bootstrap_servers=cluster.bootstrap, **settings))
        made[-1].assign([T])
        return made[-1]

    yield make
    for each in made:
        each.close()


def read(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        polled = consumer.poll(WAIT_S * 1000)
        assert polled, "nothing came in time"
        found += [record.value for records in polled.values() for record in records]
    return found


def test_a_value_is_its_avro_body_and_the_header_has_the_fingerprint(
    cluster: FakeCluster, producer: Any, consumer: Any
) -> None:
    serializer = AvroSerializer(ORDER)
    producer(value_serializer=serializer).send("t", {"id": 1, "item": "tea"}, headers=[("mine", b"0")]).get(WAIT_S)
    assert cluster.values() == [b"\x02\x06tea"]
    assert cluster.values(SCHEMAS_TOPIC) == [canonical(ORDER).encode()]
    (record,) = consumer(value_deserializer="avro").poll(WAIT_S * 1000)[T]
    assert record.value == {"id": 1, "item": "tea"}
    assert record.headers == [("mine", b"0"), ("avro", serializer.fingerprint)]


def test_a_reader_schema_makes_old_records_look_new(producer: Any, consumer: Any) -> None:
    producer(value_serializer=AvroSerializer(json.dumps(ORDER))).send("t", {"id": 1, "item": "tea"}).get(WAIT_S)
    producer(value_serializer=AvroSerializer(ORDER_2)).send("t", {"number": 2**40, "currency": "CHF"}).get(WAIT_S)
    assert read(consumer(value_deserializer=AvroDeserializer(ORDER_2)), 2) == [
        {"number": 1, "currency": "EUR"},
        {"number": 2**40, "currency": "CHF"},
    ]
    assert read(consumer(value_deserializer=AvroDeserializer()), 2) == [
        {"id": 1, "item": "tea"},
        {"number": 2**40, "currency": "CHF"},
    ]


def test_a_record_that_the_reader_schema_cannot_take_is_a_poison_record(producer: Any, consumer: Any) -> None:
    needy = {"type": "record", "name": "Order", "fields": [{"name": "must", "type": "string"}]}
    producer(value_serializer=AvroSerializer(ORDER)).send("t", {"id": 1, "item": "tea"}).get(WAIT_S)
    reading = consumer(value_deserializer=AvroDeserializer(needy))
    with pytest.raises(errors.DeserializationError) as caught:
        read(reading, 1)
    assert caught.value.record.value == b"\x02\x06tea"


@pytest.mark.parametrize("data", [b"", b"\x02", b"\x02\x06tea!", b"\x02\xff\xff\xff\xff\x0f"])
def test_wrong_bytes_are_a_poison_record(producer: Any, consumer: Any, data: bytes) -> None:
    serializer = AvroSerializer(ORDER)
    sending = producer(value_serializer=serializer)
    sending.send("t", {"id": 1, "item": "tea"}).get(WAIT_S)
    producer().send("t", data, headers=[("avro", serializer.fingerprint)]).get(WAIT_S)
    sending.send("t", {"id": 2, "item": "cup"}).get(WAIT_S)
    reading = consumer(value_deserializer="avro")
    assert read(reading, 1) == [{"id": 1, "item": "tea"}]
    with pytest.raises(errors.DeserializationError) as caught:
        read(reading, 1)
    reading.seek(T, caught.value.offset + 1)
    assert read(reading, 1) == [{"id": 2, "item": "cup"}]


def test_the_schema_is_there_for_who_starts_behind_the_first_record(producer: Any, consumer: Any) -> None:
    sending = producer(value_serializer=AvroSerializer(ORDER))
    sending.send_many("t", [{"id": n, "item": ""} for n in range(10)]).get(WAIT_S)
    reading = consumer(value_deserializer="avro")
    reading.seek(T, 7)
    assert [value["id"] for value in read(reading, 3)] == [7, 8, 9]


def test_a_schema_is_stored_once_by_whoever_comes_first(cluster: FakeCluster, producer: Any) -> None:
    for _ in range(3):
        sending = producer(value_serializer=AvroSerializer(ORDER))
        sending.send("t", {"id": 1, "item": ""}).get(WAIT_S)
        sending.send("t", {"id": 2, "item": ""}).get(WAIT_S)
    assert len(cluster.values(SCHEMAS_TOPIC)) == 1


def test_a_schema_that_comes_later_is_found(producer: Any, consumer: Any) -> None:
    reading = consumer(value_deserializer="avro")
    producer(value_serializer=AvroSerializer(ORDER)).send("t", {"id": 1, "item": ""}).get(WAIT_S)
    assert read(reading, 1) == [{"id": 1, "item": ""}]
    producer(value_serializer=AvroSerializer(ORDER_2)).send("t", {"number": 2, "currency": ""}).get(WAIT_S)
    assert read(reading, 1) == [{"number": 2, "currency": ""}]


def test_nothing_is_sent_before_its_schema_is_stored(
    cluster: FakeCluster, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> None:
        raise errors.NoBrokersAvailable

    sending = producer(value_serializer=AvroSerializer(ORDER))
    with monkeypatch.context() as patched:
        patched.setattr(SchemaStore, "_create_topic", unreachable)
        with pytest.raises(errors.NoBrokersAvailable):
            sending.send("t", {"id": 1, "item": ""})
    sending.send("t", {"id": 2, "item": ""}).get(WAIT_S)
    assert cluster.values() == [b"\x04\x00"]


def test_a_schema_that_nobody_has_stored_makes_a_poison_record(
    producer: Any, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "NOT_FOUND_S", 0.0)
    producer().send("t", b"\x02\x00", headers=[("avro", bytes(16))]).get(WAIT_S)
    with pytest.raises(errors.DeserializationError, match="0000") as caught:
        read(consumer(value_deserializer="avro"), 1)
    assert isinstance(caught.value.__cause__, errors.UnknownSchema)


def test_what_does_not_have_its_fingerprint_as_key_is_no_schema(
    producer: Any, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "NOT_FOUND_S", 0.0)
    fingerprint = fingerprint_of(canonical(ORDER))
    other = producer(value_serializer=AvroSerializer(ORDER_2))
    other.send("t", {"number": 1, "currency": ""}).get(WAIT_S)
    producer().send(SCHEMAS_TOPIC, b'"bytes"', key=fingerprint).get(WAIT_S)
    producer().send("t", b"\x02\x00", headers=[("avro", fingerprint)]).get(WAIT_S)
    reading = consumer(value_deserializer="avro")
    assert read(reading, 1) == [{"number": 1, "currency": ""}]
    with pytest.raises(errors.DeserializationError):
        read(reading, 1)


def test_records_without_a_fingerprint_need_a_writer_schema(producer: Any, consumer: Any) -> None:
    producer().send("t", b"\x02\x06tea").get(WAIT_S)
    with pytest.raises(errors.DeserializationError, match="writer_schema"):
        read(consumer(value_deserializer="avro"), 1)
    reading = consumer(value_deserializer=AvroDeserializer(ORDER_2, writer_schema=ORDER))
    assert read(reading, 1) == [{"number": 1, "currency": "EUR"}]


def test_keys_and_values_have_schemas_of_their_own(producer: Any, consumer: Any) -> None:
    sending = producer(key_serializer=AvroSerializer('"long"'), value_serializer=AvroSerializer(ORDER))
    sending.send_many("t", [{"id": 1, "item": ""}, None], keys=[7, 8], headers=[[("h", b"")], None]).get(WAIT_S)
    records = consumer(key_deserializer="avro", value_deserializer="avro").poll(WAIT_S * 1000)[T]
    assert [(record.key, record.value) for record in records] == [(7, {"id": 1, "item": ""}), (8, None)]
    assert [name for name, _ in records[0].headers] == ["h", "avro-key", "avro"]


def test_logical_types_survive(producer: Any, consumer: Any) -> None:
    when = {"type": "long", "logicalType": "timestamp-millis"}
    now = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    producer(value_serializer=AvroSerializer(when)).send("t", now).get(WAIT_S)
    producer(value_serializer=AvroSerializer("long")).send("t", 5).get(WAIT_S)
    assert read(consumer(value_deserializer="avro"), 2) == [now, 5]


@pytest.mark.parametrize("value", [{"id": "one", "item": ""}, {"id": 1}, {"id": 1, "item": "", "itme": ""}, 5])
def test_a_value_that_does_not_fit_its_schema_is_refused(cluster: FakeCluster, producer: Any, value: Any) -> None:
    sending = producer(value_serializer=AvroSerializer(ORDER))
    with pytest.raises(errors.SerializationError):
        sending.send("t", value)
    with pytest.raises(errors.SerializationError):
        sending.send_many("t", [{"id": 1, "item": ""}, value])
    assert cluster.values() == []


@pytest.mark.parametrize("schema", ["{", {"type": "nonsense"}, {"type": "array", "items": "nothing"}, 5, None])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(errors.ConfigError):
        AvroSerializer(schema)


def test_a_serializer_belongs_to_one_cluster(cluster: FakeCluster, producer: Any) -> None:
    serializer = AvroSerializer(ORDER)
    producer(value_serializer=serializer)
    producer(value_serializer=serializer)
    with pytest.raises(errors.ConfigError):
        producer(key_serializer=serializer)
    with pytest.raises(errors.ConfigError):
        Producer(bootstrap_servers="127.0.0.1:1", value_serializer=serializer)
    with pytest.raises(errors.IllegalState):
        AvroSerializer(ORDER).serialize("t", {})


def test_one_schema_has_one_text_however_it_is_written() -> None:
    spaced = json.loads(json.dumps(ORDER, indent=4))
    reordered = {key: ORDER[key] for key in reversed(ORDER)}
    assert canonical(spaced) == canonical(reordered) == canonical(ORDER | {"__fastavro_parsed__": True})
    assert fingerprint_of(canonical(ORDER)).hex() == "f7725412e47c0d21d9deaea441aa8d28"


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)
    for make in (lambda: AvroSerializer(ORDER), AvroDeserializer):
        with pytest.raises(errors.IllegalState, match=r"pip install 'zmqueue\[avro\]'"):
            make()


# -- what a few bytes can do


LIST = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}


def deserialized(schema: Any, data: bytes, reader_schema: Any = None) -> tuple[list[Any], Exception | None]:
    return AvroDeserializer(reader_schema, writer_schema=schema).deserialize_many("t", [data], None)


@pytest.mark.parametrize("reader_schema", [None, {"type": "record", "name": "L", "fields": []}])
def test_a_value_that_nests_deeply_is_an_error_and_not_the_end_of_the_process(reader_schema: Any) -> None:
    found, failure = deserialized(LIST, b"\x02" * 900_000 + b"\x00", reader_schema)
    assert found == []
    assert isinstance(failure, RecursionError)


def test_a_value_that_nests_a_little_is_read() -> None:
    (found,), failure = deserialized(LIST, b"\x02" * 50 + b"\x00")
    assert failure is None
    for _ in range(50):
        found = found["next"]
    assert found == {"next": None}


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "record", "name": "Nothing", "fields": []},
        {"type": "record", "name": "Nulls", "fields": [{"name": "a", "type": "null"}]},
        {"type": "fixed", "name": "Zero", "size": 0},
    ],
)
def test_arrays_of_nothing_are_refused(items: Any) -> None:
    with pytest.raises(errors.ConfigError, match="without bytes"):
        AvroDeserializer(writer_schema={"type": "array", "items": items})


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        ("int", 1),
        ({"type": "long", "logicalType": "timestamp-millis"}, 1),
        (["null", "int"], 2),
        ({"type": "map", "values": {"type": "array", "items": "int"}}, 3),
        (ORDER, 2),
        (LIST, math.inf),
        (
            {"type": "record", "name": "T", "fields": [{"name": "more", "type": {"type": "array", "items": "T"}}]},
            math.inf,
        ),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, 1),
    ],
)
def test_how_deep_a_schema_can_nest_is_known(schema: Any, depth: float) -> None:
    assert depth_of(fastavro.parse_schema(schema)) == depth


def test_a_long_chain_of_types_counts_as_deep() -> None:
    schema: Any = "int"
    for number in range(400):
        schema = {"type": "record", "name": f"R{number}", "fields": [{"name": "f", "type": schema}]}
    assert depth_of(fastavro.parse_schema(schema)) > DEPTH_MAX
