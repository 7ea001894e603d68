"""Values on a real cluster: poison records in a group, and columns from Arrow to Arrow."""

from __future__ import annotations

from typing import Any

import pyarrow
import pytest

from zmqueue import Admin, Consumer, Producer, TopicPartition
from zmqueue.client.records import to_arrow
from zmqueue.errors import DeserializationError
from zmqueue.testing import Cluster

pytestmark = pytest.mark.integration

WAIT_S = 60.0
WAIT_MS = 60_000


def create(cluster: Cluster, topic: str, partitions: int) -> None:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions, 2)


def test_a_group_gets_past_a_poison_record_once_and_for_all(cluster: Cluster) -> None:
    create(cluster, "poisoned", 1)
    with Producer(bootstrap_servers=cluster.bootstrap_servers) as producer:
        producer.send_many("poisoned", [b"0", b"1", b"{poison", b"3"]).get(WAIT_S)
    settings: dict[str, Any] = {
        "bootstrap_servers": cluster.bootstrap_servers,
        "group_id": "careful",
        "auto_offset_reset": "earliest",
        "value_deserializer": "json",
        "consumer_timeout_ms": WAIT_MS,
    }
    with Consumer("poisoned", **settings) as consumer:
        assert [next(consumer).value for _ in range(2)] == [0, 1]
        with pytest.raises(DeserializationError):
            next(consumer)
    # Nobody has seeked, so the next member meets it as well; it is not committed by accident.
    with Consumer("poisoned", **settings) as consumer:
        with pytest.raises(DeserializationError) as caught:
            next(consumer)
        error = caught.value
        assert (error.offset, error.record.value) == (2, b"{poison")
        consumer.seek(TopicPartition(error.topic, error.partition), error.offset + 1)
        consumer.commit()
    with Consumer("poisoned", **settings) as consumer:
        assert next(consumer).value == 3


def test_a_table_goes_through_the_cluster_unchanged(cluster: Cluster) -> None:
    create(cluster, "tables", 4)
    count = 20_000
    values = pyarrow.array([f"value {n}" for n in range(count)])
    keys = pyarrow.array([f"key {n % 100}" if n % 3 else None for n in range(count)])
    times = pyarrow.array(range(1_000, 1_000 + count)).cast(pyarrow.timestamp("ms", tz="UTC"))
    with Producer(bootstrap_servers=cluster.bootstrap_servers, compression_type="zstd") as producer:
        assert len(producer.send_many("tables", values, keys=keys, timestamps_ms=times).get(WAIT_S)) == count
    batches: list[Any] = []
    with Consumer("tables", bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        while sum(map(len, batches)) < count:
            more = consumer.poll_batches(WAIT_MS)
            assert more, "nothing came in time"
            batches += more
    found = to_arrow(batches).sort_by("timestamp")
    assert found["value"].cast(pyarrow.string()).to_pylist() == values.to_pylist()
    assert found["key"].cast(pyarrow.string()).to_pylist() == keys.to_pylist()
    assert found["timestamp"].to_pylist() == times.to_pylist()
