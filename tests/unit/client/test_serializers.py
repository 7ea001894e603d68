"""What keys and values may be, and what becomes of those that cannot be read."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import fractions
import re
import uuid
from collections.abc import Iterator
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.client.fake_broker import FakeCluster

from zmqueue import Consumer, Producer, TopicPartition, errors
from zmqueue.client import serializers
from zmqueue.client.serializers import (
    CborDeserializer,
    CborSerializer,
    Deserializer,
    Deserializing,
    JsonDeserializer,
    JsonSerializer,
    Serializer,
    Serializing,
    StringSerializer,
)

WAIT_S = 10.0
T = TopicPartition("t", 0)
UTC = datetime.UTC


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1}) as cluster:
        yield cluster


@pytest.fixture
def producer(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Producer] = []

    def make(**settings: Any) -> Producer:
        made.append(Producer(bootstrap_servers=cluster.bootstrap, linger_ms=20, **settings))
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


def round_trip(name: str, value: Any) -> Any:
    data = Serializing("value", name).one("t", value)
    return Deserializing("value", name).many("t", [data], None)[0][0]


def polled(consumer: Consumer) -> list[Any]:
    return [record.value for records in consumer.poll(WAIT_S * 1000).values() for record in records]


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("name", ["json", "cbor"])
@given(value=PLAIN)
def test_plain_values_come_back_as_they_were(name: str, value: Any) -> None:
    assert round_trip(name, value) == value


@given(st.text())
def test_text_comes_back_as_it_was(text: str) -> None:
    assert round_trip("string", text) == text


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2024, 2, 29, 12, 30, 1, 250_000, tzinfo=UTC),
        datetime.date(2024, 2, 29),
        decimal.Decimal("-12.345"),
        uuid.UUID(int=7),
        {1, 2, 3},
        2**200,
        -(2**200),
        {1: "one", b"raw": [b"bytes"]},
        float("inf"),
    ],
    ids=repr,
)
def test_cbor_keeps_its_ordinary_types(value: Any) -> None:
    assert round_trip("cbor", value) == value


@pytest.mark.parametrize("value", [fractions.Fraction(1, 3), re.compile("a"), cbor2.CBORTag(4000, 1), object()])
def test_cbor_refuses_to_write_what_it_would_refuse_to_read(value: Any) -> None:
    with pytest.raises(errors.SerializationError):
        Serializing("value", "cbor").one("t", value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes.fromhex("d81c81d81d00"), id="a list that holds itself"),
        pytest.param(cbor2.dumps(re.compile("(a+)+$")), id="a pattern"),
        pytest.param(bytes.fromhex("c5821a3b9ac9ff03"), id="3 * 2**999999999"),
        pytest.param(cbor2.dumps(fractions.Fraction(1, 3)), id="a fraction"),
        pytest.param(cbor2.dumps(cbor2.CBORTag(4000, 1)), id="an unknown tag"),
        pytest.param(cbor2.dumps(cbor2.CBORTag(25, 0)), id="a reference to text"),
        pytest.param(b"\x81" * 1000 + b"\x00", id="deep"),
        pytest.param(b"\x01\x02", id="two values"),
        pytest.param(b"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff", id="a huge list"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff", id="a break"),
    ],
)
def test_cbor_that_is_not_plain_is_refused(data: bytes) -> None:
    found, failure = Deserializing("value", "cbor").many("t", [data], None)
    assert found == []
    assert failure is not None


@pytest.mark.parametrize("name", ["bytes", "cbor", "json", "string"])
@given(data=st.binary(max_size=64))
def test_no_bytes_are_worse_than_an_error(name: str, data: bytes) -> None:
    found, failure = Deserializing("value", name).many("t", [data], None)
    assert len(found) == (failure is None)


def test_cbor_can_be_told_to_take_text_and_bytes_alone_as_keys() -> None:
    data = CborSerializer().serialize("t", {1: 2})
    assert data is not None
    assert CborDeserializer().deserialize("t", data) == {1: 2}
    with pytest.raises(cbor2.CBORDecodeError):
        CborDeserializer(strict_keys=True).deserialize("t", data)


@dataclasses.dataclass
class Order:
    id: int
    item: str = "none"


def test_json_writes_dataclasses_and_reads_them_back_checked() -> None:
    data = JsonSerializer().serialize("t", Order(3, "tea"))
    assert data == b'{"id":3,"item":"tea"}'
    reader = Deserializing("value", JsonDeserializer(Order))
    found, failure = reader.many("t", [data, None, b'{"id": 4}', b'{"id": "four"}'], None)
    assert found == [Order(3, "tea"), None, Order(4)]
    assert "int" in str(failure)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", object()),
        ("json", "\ud800"),
        ("string", 5),
        ("string", b"x"),
        ("bytes", "x"),
        ("bytes", 5),
        ("cbor", int),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(name: str, value: Any) -> None:
    with pytest.raises(errors.SerializationError, match="value for t"):
        Serializing("value", name).one("t", value)


@pytest.mark.parametrize("name", sorted(serializers.SERIALIZERS))
def test_none_is_a_tombstone(name: str) -> None:
    assert Serializing("value", name).one("t", None) is None
    assert list(Serializing("value", name).many("t", [None])) == [None]
    assert Deserializing("value", name).many("t", [None], None) == ([None], None)


class Shouting(Serializer):
    def __init__(self) -> None:
        self.closed = False

    def serialize(self, topic: str, value: Any) -> bytes:
        return f"{topic}:{value}!".upper().encode()

    def close(self) -> None:
        self.closed = True


class InBulk(Shouting):
    calls = 0

    def serialize_many(self, topic: str, values: Any) -> list[bytes | None]:
        self.calls += 1
        return [self.serialize(topic, value) for value in values]


@pytest.mark.parametrize("given", [Shouting, Shouting(), lambda value: f"T:{value}!".upper().encode()])
def test_a_serializer_is_a_class_an_object_or_a_callable(cluster: FakeCluster, producer: Any, given: Any) -> None:
    sending = producer(value_serializer=given, key_serializer="string")
    sending.send("t", "a", key="k").get(WAIT_S)
    sending.send_many("t", ["b", "c"], keys=["k", None]).get(WAIT_S)
    assert cluster.values() == [b"T:A!", b"T:B!", b"T:C!"]


def test_send_many_asks_a_bulk_serializer_once(cluster: FakeCluster, producer: Any) -> None:
    serializer = InBulk()
    sending = producer(value_serializer=serializer)
    sending.send_many("t", list("abc")).get(WAIT_S)
    assert serializer.calls == 1
    assert cluster.values() == [b"T:A!", b"T:B!", b"T:C!"]
    sending.close()
    assert serializer.closed


def test_a_bulk_serializer_that_loses_values_is_found_out() -> None:
    serializer = InBulk()
    serializer.serialize_many = lambda topic, values: []  # type: ignore[method-assign]
    with pytest.raises(errors.SerializationError, match="0 of 2"):
        Serializing("value", serializer).many("t", [1, 2])


def test_nothing_is_sent_of_a_call_with_a_value_that_does_not_fit(cluster: FakeCluster, producer: Any) -> None:
    sending = producer(value_serializer="json")
    with pytest.raises(errors.SerializationError):
        sending.send("t", object())
    with pytest.raises(errors.SerializationError):
        sending.send_many("t", [1, object()])
    sending.send("t", {"a": 1}).get(WAIT_S)
    assert cluster.values() == [b'{"a":1}']


def test_errors_of_the_applications_own_serializer_keep_their_cause() -> None:
    with pytest.raises(errors.SerializationError) as caught:
        Serializing("key", lambda value: 1 // 0).one("t", 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("given", ["yaml", 5])
def test_what_is_no_serializer_is_refused(given: Any) -> None:
    with pytest.raises(errors.ConfigError, match="value_serializer"):
        Serializing("value", given)
    with pytest.raises(errors.ConfigError, match="key_deserializer"):
        Deserializing("key", given)


class ByTopic(Deserializer):
    def deserialize(self, topic: str, data: bytes) -> Any:
        return topic, data


def test_a_consumer_takes_names_objects_and_callables(producer: Any, consumer: Any) -> None:
    producer(value_serializer="json", key_serializer="string").send("t", {"a": 1}, key="k").get(WAIT_S)
    for key, value, expected in [
        ("string", "json", ("k", {"a": 1})),
        (bytes.decode, ByTopic, ("k", ("t", b'{"a":1}'))),
        (None, JsonDeserializer(dict[str, int]), (b"k", {"a": 1})),
    ]:
        (records,) = consumer(key_deserializer=key, value_deserializer=value).poll(WAIT_S * 1000).values()
        assert [(record.key, record.value) for record in records] == [expected]


# -- poison records


@pytest.fixture
def poisoned(producer: Any) -> None:
    """Offset 2 is no JSON; all in one batch."""
    sending = producer()
    rows = [b"0", b"1", b"{poison", b"3", b"4"]
    sending.send_many("t", rows, keys=[b"k"] * 5, headers=[[("h", b"x")]] * 5, timestamps_ms=[7] * 5).get(WAIT_S)


@pytest.mark.usefixtures("poisoned")
def test_records_before_a_poison_record_are_handed_out_first(consumer: Any) -> None:
    reading = consumer(value_deserializer="json")
    assert polled(reading) == [0, 1]
    assert reading.position(T) == 2
    with pytest.raises(errors.DeserializationError) as caught:
        polled(reading)
    error = caught.value
    assert (error.topic, error.partition, error.offset) == ("t", 0, 2)
    assert (error.record.value, error.record.key, error.record.headers) == (b"{poison", b"k", [("h", b"x")])
    assert error.record.timestamp == 7
    assert "t-0 at offset 2" in str(error)
    assert "value" in str(error)
    assert error.__cause__ is not None


@pytest.mark.usefixtures("poisoned")
def test_a_poison_record_is_met_again_until_it_is_skipped(consumer: Any) -> None:
    reading = consumer(value_deserializer="json")
    assert polled(reading) == [0, 1]
    for _ in range(3):
        with pytest.raises(errors.DeserializationError) as caught:
            polled(reading)
        assert caught.value.offset == reading.position(T) == 2
    reading.seek(T, caught.value.offset + 1)
    assert polled(reading) == [3, 4]


@pytest.mark.usefixtures("poisoned")
def test_an_iteration_goes_on_behind_a_poison_record(consumer: Any) -> None:
    reading = consumer(value_deserializer="json", consumer_timeout_ms=200)
    found: list[Any] = []
    while True:
        try:
            found += [record.value for record in [next(reading)]]
        except errors.DeserializationError as error:
            found.append(error.record.value)
            reading.seek(T, error.offset + 1)
        except StopIteration:
            break
    assert found == [0, 1, b"{poison", 3, 4]


@pytest.mark.usefixtures("poisoned")
def test_batches_end_before_a_poison_record(consumer: Any) -> None:
    reading = consumer(value_deserializer="json")
    (batch,) = reading.poll_batches(WAIT_S * 1000)
    assert (batch.values, list(batch.offsets), batch.next_offset, len(batch.keys)) == ([0, 1], [0, 1], 2, 2)
    with pytest.raises(errors.DeserializationError):
        reading.poll_batches(WAIT_S * 1000)
    reading.seek(T, 3)
    (batch,) = reading.poll_batches(WAIT_S * 1000)
    assert batch.values == [3, 4]


def test_a_poison_key_counts_like_a_poison_value(producer: Any, consumer: Any) -> None:
    producer().send_many("t", [b"0", b"x", b"2"], keys=[b"0", b"1", b"y"]).get(WAIT_S)
    reading = consumer(value_deserializer="json", key_deserializer=int)
    assert polled(reading) == [0]
    with pytest.raises(errors.DeserializationError, match="value") as caught:
        polled(reading)
    assert caught.value.record.key == b"1"
    reading.seek(T, 2)
    with pytest.raises(errors.DeserializationError, match="key") as caught:
        polled(reading)
    assert (caught.value.record.key, caught.value.record.value) == (b"y", b"2")


def test_what_may_pass_is_no_fault_of_the_record(producer: Any, consumer: Any) -> None:
    producer().send("t", b"v").get(WAIT_S)
    tries = []

    def deserialize(data: bytes) -> bytes:
        tries.append(data)
        if len(tries) == 1:
            raise errors.NoBrokersAvailable
        return data

    reading = consumer(value_deserializer=deserialize)
    with pytest.raises(errors.NoBrokersAvailable):
        polled(reading)
    assert polled(reading) == [b"v"]


def test_a_string_serializer_has_an_encoding() -> None:
    assert StringSerializer("utf-16-le").serialize("t", "a") == b"a\x00"
