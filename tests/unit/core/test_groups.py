"""Membership of consumer groups: who may hold what, and when anybody hears of it."""

from __future__ import annotations

from tests.unit.core.groups_rig import (
    Rig,
    key,
    partitions,
)

T = [key("t", number) for number in range(8)]


# -- joining -----------------------------------------------------------------------------------------------------


def test_the_first_member_gets_every_partition():
    rig = Rig()
    said = rig.join("a")
    assert partitions(said) == set(T[:4])
    assert (said.generation, said.revision) == (1, 1)
    assert [(topic.name, [row.offset for row in topic.partitions]) for topic in said.assignment] == [("t", [-1] * 4)]


def test_nobody_hears_of_a_generation_before_it_is_replicated():
    rig = Rig(auto=False)
    assert rig.join("a") is None
    assert rig.said == {}
    rig.written()
    [said] = rig.said.values()
    assert partitions(said) == set(T[:4])


def test_a_newcomer_gets_nothing_before_others_have_let_go():
    rig = Rig()
    first = rig.join("a")
    a = rig.heartbeat("a", first.revision)
    assert a is None
    parked = rig.token
    assert partitions(rig.join("b")) == set()
    kept = partitions(rig.said[parked])
    assert len(kept) == 2
    gone = set(T[:4]) - kept
    rig.heartbeat("b", 1)
    b = rig.token
    rig.heartbeat("a", 2, revoking=gone)
    assert b not in rig.said
    rig.heartbeat("a", 2)
    assert partitions(rig.said[b]) == gone


def test_that_a_partition_was_let_go_is_replicated_before_the_new_owner_hears_of_it():
    rig = Rig()
    rig.join("a")
    rig.join("b")
    kept = partitions(rig.heartbeat("a", 1))
    rig.heartbeat("b", 1)
    b = rig.token
    rig.auto = False
    rig.heartbeat("a", 2)
    assert b not in rig.said
    rig.written()
    assert partitions(rig.said[b]) == set(T[:4]) - kept
