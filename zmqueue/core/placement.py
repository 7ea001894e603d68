"""Where replicas go: a consistent-hash ring with virtual nodes, bounded loads, and leaders in rotation.

The ring decides which brokers hold a partition, so that adding or removing one broker moves few partitions. A plain
ring is lumpy for small topics, so no broker takes more than its fair share of one topic: a full broker is passed over.
Among the replicas of a partition the preferred leader is the one that leads the fewest so far: round-robin, in effect.

Pure and the same everywhere: hashes are CRC-32C of fixed bytes, ties go to the smaller broker id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from google_crc32c import value as crc32c

VIRTUAL_NODES = 64


class Ring:
    """Brokers on a circle of hashes, each at VIRTUAL_NODES places."""

    def __init__(self, brokers: Iterable[int]) -> None:
        self.brokers = sorted(set(brokers))
        points = sorted((_hash(f"broker-{b}/{v}"), b) for b in self.brokers for v in range(VIRTUAL_NODES))
        self._hashes = [h for h, _ in points]
        self._owners = [b for _, b in points]

    def walk(self, label: str) -> list[int]:
        """All brokers in the order in which the circle meets them, from the label's place on."""
        at = bisect_left(self._hashes, _hash(label))
        around = self._owners[at:] + self._owners[:at]
        return list(dict.fromkeys(around))


def place(
    topic: str,
    partitions: range,
    replication_factor: int,
    brokers: Iterable[int],
    replicas_held: Mapping[int, int] | None = None,
    leading: Mapping[int, int] | None = None,
) -> list[list[int]]:
    """Replicas for each partition, the preferred leader first; counts already held in the same topic weigh in."""
    ring = Ring(brokers)
    assert 0 < replication_factor <= len(ring.brokers), "checked by the caller"
    held = {b: (replicas_held or {}).get(b, 0) for b in ring.brokers}
    leads = {b: (leading or {}).get(b, 0) for b in ring.brokers}
    share = -(-(sum(held.values()) + len(partitions) * replication_factor) // len(ring.brokers))
    placed = []
    for partition in partitions:
        order = ring.walk(f"{topic}/{partition}")
        # A stable sort: brokers with room first, in ring order; before them those that can fill their share only if
        # they take every partition from here on, since otherwise the last ones would find too few with room.
        left = partitions.stop - partition
        chosen = sorted(order, key=lambda b: (held[b] >= share, share - held[b] < left))[:replication_factor]
        leader = min(chosen, key=lambda b: (leads[b], b))
        for broker in chosen:
            held[broker] += 1
        leads[leader] += 1
        placed.append([leader, *(b for b in chosen if b != leader)])
    _even_out(placed, leads)
    return placed


def _even_out(placed: list[list[int]], leads: dict[int, int]) -> None:
    """Swap leaders where that makes the counts more equal. Each swap lowers the sum of squares, so it ends."""
    swapped = True
    while swapped:
        swapped = False
        for replicas in placed:
            least = min(replicas, key=lambda b: (leads[b], b))
            if leads[least] + 1 < leads[replicas[0]]:
                leads[replicas[0]] -= 1
                leads[least] += 1
                replicas.remove(least)
                replicas.insert(0, least)
                swapped = True


def _hash(label: str) -> int:
    # CRC is linear, so neighbours in name would be neighbours on the circle: the second pass spreads them.
    first: int = crc32c(label.encode())
    second: int = crc32c(first.to_bytes(4, "little") + label.encode())
    return second ^ (first * 0x9E3779B1 & 0xFFFFFFFF)
