"""Partitions added to a topic that is written and read meanwhile: what clients do is what docs/operations.md says."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from zmqueue import TopicPartition

pytestmark = pytest.mark.integration

WAIT_S = 60.0
# How soon the clients of these tests look for news by themselves; five minutes otherwise.
MAX_AGE_MS = 200

Read = dict[int, list[bytes]]


def drain(consumer: Any, until: Callable[[Read], bool]) -> Read:
    read: Read = defaultdict(list)
    deadline = time.monotonic() + WAIT_S
    while not until(read):
        assert time.monotonic() < deadline, dict(read)
        for partition, records in consumer.poll(timeout_ms=200).items():
            read[partition.partition] += [record.value for record in records]
    return read


def write_until_used(producer: Any, topic: str, partitions: int) -> Read:
    """Keyed records, until every partition has one."""
    written: Read = defaultdict(list)
    deadline = time.monotonic() + WAIT_S
    number = 0
    while len(written) < partitions:
        assert time.monotonic() < deadline, f"only partitions {sorted(written)} are used"
        value = b"%d" % number
        written[producer.send(topic, value, key=value).get(WAIT_S).partition].append(value)
        number += 1
    return written


def test_producers_and_consumers_without_a_group_use_what_was_added(zmqueue_cluster: Any) -> None:
    topic = zmqueue_cluster.topic("grows", partitions=2)
    producer = zmqueue_cluster.producer(metadata_max_age_ms=MAX_AGE_MS)
    everything = zmqueue_cluster.consumer(topic, auto_offset_reset="latest", metadata_max_age_ms=MAX_AGE_MS)
    for number in range(2):
        everything.position(TopicPartition(topic, number))
    assigned = zmqueue_cluster.consumer()
    assigned.assign([TopicPartition(topic, 0)])
    before = write_until_used(producer, topic, 2)

    with zmqueue_cluster.admin() as admin:
        described = admin.create_partitions(topic, 5)
    assert [partition.leader >= 0 for partition in described.partitions] == [True] * 5
    after = write_until_used(producer, topic, 5)

    wanted = {number: before.get(number, []) + after[number] for number in range(5)}
    assert drain(everything, lambda read: sum(map(len, read.values())) >= sum(map(len, wanted.values()))) == wanted
    assert drain(assigned, lambda read: len(read[0]) >= len(wanted[0])) == {0: wanted[0]}


def test_members_of_a_group_share_what_was_added_and_read_it_from_its_beginning(zmqueue_cluster: Any) -> None:
    topic, group = zmqueue_cluster.topic("grows", partitions=2), zmqueue_cluster.name("readers")
    producer = zmqueue_cluster.producer(metadata_max_age_ms=MAX_AGE_MS)
    consumer = zmqueue_cluster.consumer(topic, group_id=group, auto_offset_reset="latest")
    drain(consumer, lambda read: len(consumer.assignment()) == 2)
    for number in range(2):
        consumer.position(TopicPartition(topic, number))

    with zmqueue_cluster.admin() as admin:
        admin.create_partitions(topic, 4)
        written = write_until_used(producer, topic, 4)
        read = drain(consumer, lambda read: sum(map(len, read.values())) >= sum(map(len, written.values())))
        assert read == written
        assert admin.describe_group(group).members[0].assignment == [TopicPartition(topic, n) for n in range(4)]
