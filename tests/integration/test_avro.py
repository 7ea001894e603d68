"""Avro on a real cluster: what a schema has to survive, and readers that expect other fields than writers wrote."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from zmqueue import Admin, AvroDeserializer, AvroSerializer, Consumer, Producer, TopicPartition
from zmqueue.client.schemas import SCHEMAS_TOPIC
from zmqueue.testing import Cluster, running_cluster

pytestmark = pytest.mark.integration

WAIT_S = 60.0
RECORDS = 50
GONE = 30
P = TopicPartition("orders", 0)
NEWEST = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "number", "aliases": ["id"], "type": "long"},
        {"name": "currency", "type": "string", "default": "EUR"},
    ],
}


def order(*more: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}, *more]}


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("avro") / "data", brokers=3) as cluster:
        yield cluster


def test_records_outlive_those_that_were_first_with_their_schema(cluster: Cluster) -> None:
    """Four producers begin at once, each with a schema of its own; the first records go; and so does a broker."""
    servers = cluster.bootstrap_servers
    with Admin(bootstrap_servers=servers) as admin:
        admin.create_topic("orders", 1, 3)
        failures: list[BaseException] = []

        def write(number: int) -> None:
            schema = order({"name": f"extra{number}", "type": "string"})
            rows = [{"id": number * RECORDS + at, f"extra{number}": "x"} for at in range(RECORDS)]
            try:
                with Producer(bootstrap_servers=servers, value_serializer=AvroSerializer(schema)) as producer:
                    producer.send_many("orders", rows).get(WAIT_S)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert failures == []

        described = admin.describe_topic(SCHEMAS_TOPIC)
        assert (described.replication_factor, described.config["cleanup.policy"]) == (3, "compact")
        admin.delete_records({P: GONE})
        leader = described.partitions[0].leader
    cluster.kill(leader)
    with Consumer(
        "orders",
        bootstrap_servers=servers,
        auto_offset_reset="earliest",
        value_deserializer=AvroDeserializer(NEWEST),
        consumer_timeout_ms=WAIT_S * 1000,
    ) as consumer:
        values = [next(consumer).value for _ in range(4 * RECORDS - GONE)]
    assert all(value["currency"] == "EUR" for value in values)
    assert len({value["number"] for value in values} & set(range(4 * RECORDS))) == 4 * RECORDS - GONE
