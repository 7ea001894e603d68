"""Where replicas go: distinct, balanced, stable, with leaders in rotation."""

from __future__ import annotations

from collections import Counter

import pytest

from zmqueue.core.placement import Ring, place

CASES = [(n, rf, brokers) for n in (1, 3, 10, 64, 200) for brokers in (1, 3, 5, 9) for rf in (1, 2, 3) if rf <= brokers]


@pytest.mark.parametrize(("partitions", "factor", "brokers"), CASES)
@pytest.mark.parametrize("topic", ["orders", "t"])
def test_replicas_are_distinct_and_balanced_and_leaders_even(topic: str, partitions: int, factor: int, brokers: int):
    placed = place(topic, range(partitions), factor, range(brokers))
    assert all(len(set(replicas)) == len(replicas) == factor for replicas in placed)
    held = Counter(b for replicas in placed for b in replicas)
    assert max(held.values()) <= -(-partitions * factor // brokers)
    leads = Counter(replicas[0] for replicas in placed)
    assert max(leads.values()) <= -(-partitions // brokers) + (factor > 1 and factor < brokers)


def test_placement_depends_on_nothing_but_its_arguments():
    assert place("a", range(20), 2, [3, 1, 2]) == place("a", range(20), 2, (b for b in (1, 2, 3)))


def test_a_broker_more_moves_few_replicas():
    """A consistent ring: about a sixth should move from five to six brokers, and not nearly everything."""
    before = place("a", range(300), 2, range(5))
    after = place("a", range(300), 2, range(6))
    moved = sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))
    assert moved < 600 * 0.35


def test_the_ring_meets_every_broker_once():
    ring = Ring([4, 2, 9])
    assert sorted(ring.walk("x")) == [2, 4, 9]


def test_what_a_topic_holds_already_weighs_in():
    placed = place("a", range(10, 20), 1, [1, 2], {1: 10}, {1: 10})
    assert all(replicas == [2] for replicas in placed)
