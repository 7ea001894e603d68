"""What a producer counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unit.client.fake_broker import FakeCluster

from zmqueue import Producer, errors
from zmqueue.client.metrics import WINDOW_S, Rate
from zmqueue.wire.frames import Operation

WAIT_S = 10.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "u": 1}) as cluster:
        yield cluster


def test_a_rate_is_that_of_the_window():
    rate = Rate(now=0.0)
    assert rate.per_second(10.0) == 0
    for second in range(1, 11):
        rate.add(5, float(second))
    assert rate.per_second(10.0) == 5
    assert rate.per_second(10.0 + 100 * WINDOW_S) < 0.1
    rate.add(60, 1000.0)
    assert rate.total == 110
    assert rate.per_second(1000.0 + WINDOW_S) == 2


def test_a_rate_remembers_no_more_than_its_window():
    rate = Rate(now=0.0)
    for second in range(10_000):
        rate.add(1, float(second))
    assert len(rate._slots) <= WINDOW_S + 2


def test_what_was_written_is_counted_by_topic(cluster: FakeCluster) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap, compression_type="gzip") as producer:
        producer.send_many("t", [bytes(1000)] * 5).get(WAIT_S)
        producer.send("u", bytes(1000)).get(WAIT_S)
        found = producer.metrics()
    everything, topic = found["producer-metrics"], found["producer-topic-metrics.t"]
    assert (everything["record-send-total"], topic["record-send-total"]) == (6, 5)
    assert everything["record-error-total"] == everything["record-retry-total"] == 0
    assert topic["byte-total"] > 5000
    assert topic["compression-rate"] < 0.2
    assert everything["request-total"] >= 2
    assert everything["records-per-batch-avg"] == 3
    assert everything["request-latency-max"] >= everything["request-latency-avg"] > 0
    assert everything["buffer-available-bytes"] == everything["buffer-total-bytes"]
    assert everything["requests-in-flight"] == 0


def test_retries_and_failures_are_counted(cluster: FakeCluster) -> None:
    verdicts = [errors.NotEnoughReplicas.code, errors.InvalidRecord.code]

    def script(seen):
        return verdicts.pop(0) if seen.operation == Operation.PRODUCE and verdicts else None

    cluster.script = script
    with Producer(bootstrap_servers=cluster.bootstrap, retry_backoff_ms=1) as producer:
        with pytest.raises(errors.InvalidRecord):
            producer.send("t", b"v").get(WAIT_S)
        found = producer.metrics()["producer-metrics"]
    assert (found["record-retry-total"], found["record-error-total"], found["record-send-total"]) == (1, 1, 0)
