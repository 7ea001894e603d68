"""A thousand partitions: what they cost at rest, and how long they are away when a broker dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqueue import Admin, Producer
from zmqueue.testing import Cluster, running_cluster

PARTITIONS = 1_000
TOPIC = "many"
AWAY_S_MAX = 5.0
# Twice the tenth of a core that five idle brokers may take: cores differ, a loop that spins does not hide in that.
IDLE_CORES_MAX = 0.2
IDLE_S = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("many") / "data", brokers=5) as cluster:
        cluster.command("topic", "create", TOPIC, "-p", str(PARTITIONS))
        cluster.wait_healthy()
        yield cluster


@pytest.fixture
def producer(cluster: Cluster) -> Iterator[Producer]:
    with Producer(bootstrap_servers=cluster.bootstrap_servers, acks="all") as producer:
        write_to_all(producer)  # a partition's files are made when the first record comes
        yield producer


def write_to_all(producer: Producer) -> None:
    futures = [producer.send(TOPIC, b"value", partition=partition) for partition in range(PARTITIONS)]
    for future in futures:
        future.get(60)


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_brokers_that_have_nothing_to_do_take_hardly_any_time(cluster: Cluster) -> None:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        pids = [admin.broker_status(broker).pid for broker in range(cluster.brokers)]
    before, began = cpu_s(pids), time.monotonic()
    time.sleep(IDLE_S)
    assert (cpu_s(pids) - before) / (time.monotonic() - began) < IDLE_CORES_MAX


@pytest.mark.parametrize("victim", ["a broker", "the controller"])
def test_all_partitions_are_written_again_soon_after_a_kill(cluster: Cluster, producer: Producer, victim: str) -> None:
    controller = cluster.json("status")["controller"]
    broker = controller if victim == "the controller" else (controller + 1) % cluster.brokers
    killed = time.monotonic()
    cluster.kill(broker)
    write_to_all(producer)
    assert time.monotonic() - killed < AWAY_S_MAX
    cluster.start(broker)
    cluster.wait_healthy()
