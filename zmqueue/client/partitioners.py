"""Which partition a record goes to.

With a key: Kafka's murmur2, so that the same key lands on the same partition number as with Kafka's own clients. A
custom partitioner is any callable `(key, partitions, available) -> partition`, as kafka-python has them: all partition
numbers, and those that have a leader at the moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from zmqueue.wire.murmur2 import partition_for_key

Partitioner = Callable[[bytes | None, Sequence[int], Sequence[int]], int]


class DefaultPartitioner:
    """By hash of the key; records without one go to any partition that has a leader."""

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
