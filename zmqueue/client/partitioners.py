"""Which partition a record goes to.

With a key: Kafka's murmur2, so that the same key lands on the same partition number as with Kafka's own clients. A
custom partitioner is any callable `(key, partitions, available) -> partition`, as kafka-python has them: all partition
numbers, and those that have a leader at the moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from zmqueue.errors import ConfigError
from zmqueue.wire.murmur2 import partition_for_key

Partitioner = Callable[[bytes | None, Sequence[int], Sequence[int]], int]


class DefaultPartitioner:
    """By hash of the key; records without one fill a batch of one partition, then of the next that has a leader.

    The producer does this itself when it is given this partitioner, or none. Called from another one, which knows of no
    batches, it spreads records without a key at random.
    """

    def __call__(self, key: bytes | None, partitions: Sequence[int], available: Sequence[int]) -> int:
        if key is None:
            return random.choice(available or partitions)
        return partitions[partition_for_key(key, len(partitions))]


class RoundRobinPartitioner:
    """One after the other, whatever the key."""

    def __init__(self) -> None:
        self._next = random.randrange(1 << 16)

    def __call__(self, key: bytes | None, partitions: Sequence[int], available: Sequence[int]) -> int:
        self._next += 1
        choices = available or partitions
        return choices[self._next % len(choices)]


class StickyPartitioner:
    """Many records to one partition, then as many to another, whatever the key."""

    def __init__(self, records: int = 500) -> None:
        if records < 1:
            raise ConfigError(f"StickyPartitioner: {records} records in a row are too few")
        self._records = records
        self._left = 0
        self._chosen = -1

    def __call__(self, key: bytes | None, partitions: Sequence[int], available: Sequence[int]) -> int:
        choices = available or partitions
        if self._left == 0 or self._chosen not in choices:
            others = [choice for choice in choices if choice != self._chosen]
            self._chosen, self._left = random.choice(others or choices), self._records
        self._left -= 1
        return self._chosen


PARTITIONERS: dict[str, Callable[[], Partitioner]] = {
    "default": DefaultPartitioner,
    "round_robin": RoundRobinPartitioner,
    "sticky": StickyPartitioner,
}


def find_partitioner(given: Partitioner | type[Partitioner] | str | None) -> Partitioner | None:
    """By name, class, or as it is. None for the default one, which the producer is itself."""
    found: Any = given
    if isinstance(given, str):
        if given not in PARTITIONERS:
            raise ConfigError(f"partitioner: {given!r} is not one of {', '.join(PARTITIONERS)}")
        found = PARTITIONERS[given]
    if isinstance(found, type):
        found = found()
    if found is not None and not callable(found):
        raise ConfigError("partitioner: neither a name nor callable as (key, partitions, available)")
    return None if type(found) is DefaultPartitioner else found
