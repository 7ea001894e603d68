"""What a killed broker may cost: time, and never a record."""

from __future__ import annotations

import time

import pytest

from tests.integration.workload import Load, check, read_all
from zmqueue.testing import Cluster

PARTITIONS = 10


def in_sync(cluster: Cluster, topic: str) -> bool:
    described = cluster.json("topic", "describe", topic)
    return all(sorted(p["isr"]) == sorted(p["replicas"]) for p in described["partitions"])


def await_in_sync(cluster: Cluster, topic: str, timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not in_sync(cluster, topic):
        assert time.monotonic() < deadline, cluster.command("topic", "describe", topic).stdout


@pytest.mark.parametrize("broker", range(5))
def test_a_killed_broker_loses_no_acknowledged_record_and_returns(cluster: Cluster, broker: int) -> None:
    topic = f"kill-{broker}"
    cluster.command("topic", "create", topic, "-p", str(PARTITIONS))
    with Load(cluster.bootstrap_servers, topic, PARTITIONS) as load:
        load.wait_for(500)
        led_raft = cluster.json("status")["controller"] == broker
        killed_at = time.monotonic()
        cluster.kill(broker)
        load.wait_for(1_000)
        gap_s = load.longest_gap_s(killed_at)
        cluster.start(broker)
        load.wait_for(500)
    cluster.wait_healthy()
    await_in_sync(cluster, topic)
    check(load, read_all(cluster.bootstrap_servers, topic, PARTITIONS))
    assert gap_s <= (3.5 if led_raft else 2.5), f"no acknowledgement for {gap_s:.2f} s"


def test_a_kill_of_all_five_at_once_keeps_everything_acknowledged(cluster: Cluster) -> None:
    topic = "kill-all"
    cluster.command("topic", "create", topic, "-p", str(PARTITIONS))
    with Load(cluster.bootstrap_servers, topic, PARTITIONS) as load:
        load.wait_for(1_000)
        for broker in range(5):
            cluster.kill(broker)
        for broker in range(5):
            cluster.start(broker)
        load.wait_for(500)
    cluster.wait_healthy()
    await_in_sync(cluster, topic)
    check(load, read_all(cluster.bootstrap_servers, topic, PARTITIONS))
