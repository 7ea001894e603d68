"""Compaction by key on a real cluster: logs shrink at every replica, and of each key the latest record stays."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.test_failover import await_in_sync
from zmqueue import Consumer, Producer, TopicPartition
from zmqueue.testing import Cluster

KEYS = 50
SEGMENT_BYTES = 65_536
CONFIG = ("-c", "cleanup.policy=compact", "-c", f"segment.bytes={SEGMENT_BYTES}", "-c", "segment.ms=1000")

Model = dict[bytes, bytes | None]


def write(cluster: Cluster, topic: str, model: Model, count: int, seed: int) -> None:
    chance = random.Random(seed)
    with Producer(bootstrap_servers=cluster.bootstrap_servers, acks="all", linger_ms=5, batch_size=4000) as producer:
        for _ in range(count):
            key = b"key-%d" % chance.randrange(KEYS)
            value = None if chance.random() < 0.05 else chance.randbytes(200)
            producer.send(topic, value, key=key, partition=0)
            model[key] = value
        producer.flush(timeout=60)


def read(cluster: Cluster, topic: str) -> tuple[Model, int]:
    """What a reader of all of it knows at the end, and how many records it took."""
    partition = TopicPartition(topic, 0)
    found: Model = {}
    count = 0
    with Consumer(bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([partition])
        end = consumer.end_offsets([partition])[partition]
        consumer.seek(partition, 0)
        deadline, last = time.monotonic() + 60, -1
        while consumer.position(partition) < end:
            assert time.monotonic() < deadline
            for record in consumer.poll(500).get(partition, []):
                assert record.offset > last
                last = record.offset
                found[record.key] = record.value
                count += 1
    return found, count


def values(model: Model) -> Model:
    return {key: value for key, value in model.items() if value is not None}


def log_bytes(cluster: Cluster, topic: str) -> list[int]:
    """Of each replica, the full segments of partition 0."""
    topic_id = cluster.json("topic", "describe", topic)["topic_id"]
    folders = list(cluster.data_dir.glob(f"broker-*/partitions/{topic_id}-0"))
    while True:
        try:
            return [sum(path.stat().st_size for path in folder.glob("*.log")) for folder in folders]
        except FileNotFoundError:
            continue  # put in place by another while we looked


def eventually(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def leader_of(cluster: Cluster, topic: str) -> int:
    return cluster.json("topic", "describe", topic)["partitions"][0]["leader"]


def test_a_compacted_topic_shrinks_at_every_replica_and_keeps_the_latest_of_each_key(cluster: Cluster) -> None:
    topic = "state"
    cluster.command("topic", "create", topic, "-p", "1", "-r", "2", *CONFIG)
    model: Model = {}
    write(cluster, topic, model, 4_000, seed=1)
    eventually(lambda: all(size < 3 * SEGMENT_BYTES for size in log_bytes(cluster, topic)))
    assert len(log_bytes(cluster, topic)) == 2
    found, count = read(cluster, topic)
    assert values(found) == values(model)
    assert count < 1_500

    # A replica that was away comes back to a leader whose log is no longer the one it knew.
    leader = leader_of(cluster, topic)
    replicas = cluster.json("topic", "describe", topic)["partitions"][0]["replicas"]
    follower = next(broker for broker in replicas if broker != leader)
    cluster.kill(follower)
    write(cluster, topic, model, 4_000, seed=2)
    eventually(lambda: min(log_bytes(cluster, topic)) < 3 * SEGMENT_BYTES)
    cluster.start(follower)
    await_in_sync(cluster, topic)
    cluster.kill(leader)
    eventually(lambda: leader_of(cluster, topic) == follower)
    found, _ = read(cluster, topic)
    assert values(found) == values(model)
    write(cluster, topic, model, 500, seed=3)
    cluster.start(leader)
    await_in_sync(cluster, topic)
    found, _ = read(cluster, topic)
    assert values(found) == values(model)


def test_a_topic_in_memory_is_compacted_too(cluster: Cluster) -> None:
    topic = "cache"
    cluster.command("topic", "create", topic, "-p", "1", "-r", "2", "-c", "storage.mode=memory", *CONFIG)
    model: Model = {}
    write(cluster, topic, model, 4_000, seed=4)
    eventually(lambda: read(cluster, topic)[1] < 1_500)
    assert values(read(cluster, topic)[0]) == values(model)


def test_a_worker_that_is_killed_costs_nothing(cluster: Cluster) -> None:
    topic = "survives"
    cluster.command("topic", "create", topic, "-p", "1", "-r", "3", *CONFIG)
    model: Model = {}
    write(cluster, topic, model, 2_000, seed=5)
    eventually(lambda: bool(workers(cluster)))
    for pid in workers(cluster):
        os.kill(pid, signal.SIGKILL)
    write(cluster, topic, model, 2_000, seed=6)
    eventually(lambda: all(size < 3 * SEGMENT_BYTES for size in log_bytes(cluster, topic)))
    assert values(read(cluster, topic)[0]) == values(model)
    cluster.wait_healthy()


def workers(cluster: Cluster) -> list[int]:
    """The worker processes of this cluster's brokers."""
    brokers = {str(broker["pid"]) for broker in cluster.json("status")["brokers"] if broker.get("pid")}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"zmqueue.log.worker" in command and command[command.index(b"--parent") + 1].decode() in brokers:
            found.append(int(folder.name))
    return found
