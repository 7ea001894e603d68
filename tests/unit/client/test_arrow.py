"""Columns as Arrow and pandas have them: sent as they are, read as one table."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pandas
import pyarrow
import pytest
from unit.client.fake_broker import FakeCluster

from zmqueue import Consumer, Producer, TopicPartition, errors
from zmqueue.client.records import to_arrow, to_pandas

WAIT_S = 10.0
UTC = datetime.UTC
COLUMNS = ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]


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
def read(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Consumer] = []

    def read(count: int, **settings: Any) -> list[Any]:
        made.append(Consumer(bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest", **settings))
        made[-1].assign([TopicPartition("t", 0)])
        batches: list[Any] = []
        while sum(map(len, batches)) < count:
            more = made[-1].poll_batches(WAIT_S * 1000)
            assert more, "nothing came in time"
            batches += more
        return batches

    yield read
    for each in made:
        each.close()


VALUES = [b"a", None, b"", "é".encode()]
TEXTS = ["a", None, "", "é"]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(VALUES, pyarrow.binary()),
        pyarrow.array(VALUES, pyarrow.large_binary()),
        pyarrow.array(TEXTS, pyarrow.string()),
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(["x", *TEXTS, "y"]).slice(1, 4),
        pyarrow.chunked_array([TEXTS[:1], TEXTS[1:]]),
        pyarrow.array(TEXTS).dictionary_encode(),
        pandas.Series(VALUES, index=[9, 8, 7, 6]),
        pandas.Series(TEXTS),
        pandas.Series(TEXTS, dtype="category"),
        numpy.array(VALUES, dtype=object),
    ],
    ids=lambda column: f"{type(column).__name__} of {getattr(column, 'type', None) or column.dtype}",
)
def test_a_column_goes_as_it_is(cluster: FakeCluster, producer: Any, column: Any) -> None:
    assert len(producer().send_many("t", column).get(WAIT_S)) == 4
    assert cluster.values() == VALUES


def test_keys_headers_and_times_are_columns_as_well(producer: Any, read: Any) -> None:
    pair = pyarrow.struct([("name", pyarrow.string()), ("value", pyarrow.binary())])
    rows = [[{"name": "h", "value": b"1"}, {"name": "n", "value": None}], None]
    times = [datetime.datetime(2024, 1, 1, tzinfo=UTC), datetime.datetime(2024, 1, 2, tzinfo=UTC)]
    producer().send_many(
        "t",
        pyarrow.array([b"v", b"w"]),
        keys=pyarrow.array(["k", None]),
        headers=pyarrow.array(rows, pyarrow.list_(pair)),
        timestamps_ms=pyarrow.array(times, pyarrow.timestamp("us", tz="UTC")),
    ).get(WAIT_S)
    (batch,) = read(2)
    assert batch.keys == [b"k", None]
    assert [record.headers for record in batch.records()] == [[("h", b"1"), ("n", None)], []]
    assert batch.timestamps == [int(time.timestamp() * 1000) for time in times]


@pytest.mark.parametrize("times", [pyarrow.array([5, 6]), pandas.Series([5, 6]), numpy.array([5, 6])])
def test_times_may_be_numbers(producer: Any, times: Any) -> None:
    assert [m.timestamp for m in producer().send_many("t", [b"v", b"w"], timestamps_ms=times).get(WAIT_S)] == [5, 6]


def test_headers_may_be_a_map(producer: Any, read: Any) -> None:
    column = pyarrow.array([[("h", b"1")], None], pyarrow.map_(pyarrow.string(), pyarrow.binary()))
    producer().send_many("t", [b"v", b"w"], headers=column).get(WAIT_S)
    assert read(2)[0].headers == [[["h", b"1"]], None]


def test_a_serializer_gets_what_arrow_holds(cluster: FakeCluster, producer: Any) -> None:
    rows = [{"a": 1, "b": ["x"]}, None]
    producer(value_serializer="json").send_many("t", pyarrow.array(rows)).get(WAIT_S)
    producer(value_serializer="json").send_many("t", pyarrow.array(["text"])).get(WAIT_S)
    assert cluster.values() == [b'{"a":1,"b":["x"]}', None, b'"text"']


def test_what_is_not_bytes_and_has_no_serializer_is_refused(producer: Any) -> None:
    with pytest.raises(errors.InvalidRecord, match="value_serializer"):
        producer().send_many("t", pyarrow.array([1, 2]))
    with pytest.raises(errors.InvalidRecord, match="null"):
        producer().send_many("t", [b"v"], timestamps_ms=pyarrow.array([None], pyarrow.int64()))
    with pytest.raises(errors.InvalidRecord, match="columns of 1 and 2"):
        producer().send_many("t", pyarrow.array([b"v"]), keys=pyarrow.array([b"k", b"k"]))


def test_what_was_read_becomes_one_table(producer: Any, read: Any) -> None:
    sending = producer()
    sending.send_many("t", [b"v", None], keys=[b"k", None], timestamps_ms=1_000).get(WAIT_S)
    sending.send("t", b"w", headers=[("h", b"1"), ("n", None)], timestamp_ms=2_000).get(WAIT_S)
    table = to_arrow(read(3))
    assert table.column_names == COLUMNS
    assert table.to_pydict() == {
        "topic": ["t"] * 3,
        "partition": [0] * 3,
        "offset": [0, 1, 2],
        "timestamp": [datetime.datetime.fromtimestamp(s, UTC) for s in (1, 1, 2)],
        "key": [b"k", None, None],
        "value": [b"v", None, b"w"],
        "headers": [None, None, [{"name": "h", "value": b"1"}, {"name": "n", "value": None}]],
    }


def test_a_table_of_nothing_has_the_columns() -> None:
    table = to_arrow([])
    assert (table.num_rows, table.column_names) == (0, COLUMNS)
    assert list(to_pandas([]).columns) == COLUMNS


def test_what_was_read_goes_back_as_it_came(cluster: FakeCluster, producer: Any, read: Any) -> None:
    producer().send_many("t", [b"v", b"w"], keys=[b"k", None], headers=[[("h", b"1")], None]).get(WAIT_S)
    table = to_arrow(read(2))
    producer().send_many(
        "t", table["value"], keys=table["key"], headers=table["headers"], timestamps_ms=table["timestamp"]
    ).get(WAIT_S)
    again = to_arrow(read(4)).slice(2)
    for name in ("key", "value", "headers", "timestamp"):
        assert again[name].to_pylist() == table[name].to_pylist()


def test_deserialized_columns_have_the_type_of_what_they_hold(producer: Any, read: Any) -> None:
    sending = producer(value_serializer="json", key_serializer="string")
    sending.send_many("t", [{"n": 1}, {"n": 2}], keys=["a", "b"]).get(WAIT_S)
    sending.send("t", {"n": 2.5}, key="c").get(WAIT_S)
    frame = to_pandas(read(3, value_deserializer="json", key_deserializer="string"))
    assert frame["key"].tolist() == ["a", "b", "c"]
    assert [row["n"] for row in frame["value"]] == [1, 2, 2.5]


def test_objects_without_a_common_type_are_refused_by_name(producer: Any, read: Any) -> None:
    producer(value_serializer="json").send_many("t", [1, "one"]).get(WAIT_S)
    (batch,) = read(2, value_deserializer="json")
    with pytest.raises(errors.IllegalState, match="common Arrow type"):
        batch.to_arrow()


def test_a_batch_alone_becomes_a_table_or_a_frame(producer: Any, read: Any) -> None:
    producer().send_many("t", [b"v", b"w"]).get(WAIT_S)
    (batch,) = read(2)
    assert batch.to_arrow().column("value").to_pylist() == [b"v", b"w"]
    assert batch.to_pandas()["offset"].tolist() == [0, 1]


def test_without_the_extra_the_error_says_what_to_install(
    producer: Any, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer().send("t", b"v").get(WAIT_S)
    (batch,) = read(1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.IllegalState, match=r"pip install 'zmqueue\[arrow\]'"):
        batch.to_arrow()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(errors.IllegalState, match=r"pip install 'zmqueue\[pandas\]'"):
        batch.to_pandas()
