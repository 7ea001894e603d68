"""Which partition a record goes to.

With a key: Kafka's murmur2, so that the same key lands on the same partition number as with Kafka's own clients. A
custom partitioner is any callable `(key, partitions, available) -> partition`, as kafka-python has them: all partition
numbers, and those that have a leader at the moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Partitioner = Callable[[bytes | None, Sequence[int], Sequence[int]], int]

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2, unsigned."""
    length = len(data)
    h = _SEED ^ length
    words = length & ~3
    for at in range(0, words, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if words != length:
        h = (h ^ int.from_bytes(data[words:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_for_key(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


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
