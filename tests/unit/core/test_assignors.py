"""Who gets which partition: the three built-in assignors, and what is checked of a custom one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zmqueue.core.assignors import BUILT_IN, checked
from zmqueue.core.sticky import sticky
from zmqueue.model import TopicPartition

TP = TopicPartition
Case = tuple[dict[str, set[str]], dict[str, int], dict[str, set[TopicPartition]]]


def keys(topic: str, *numbers: int) -> set[TopicPartition]:
    return {TP(topic, number) for number in numbers}


def loads(found: Any) -> list[int]:
    return [len(found[member]) for member in found]


# -- range and roundrobin ----------------------------------------------------------------------------------------


def test_range_gives_each_member_a_stretch_of_each_topic_the_first_ones_one_more():
    members = {"a": {"t", "u"}, "b": {"t", "u"}, "c": {"u"}}
    found = BUILT_IN["range"](members, {"t": 5, "u": 4}, {})
    assert found == {
        "a": keys("t", 0, 1, 2) | keys("u", 0, 1),
        "b": keys("t", 3, 4) | keys("u", 2),
        "c": keys("u", 3),
    }


def test_roundrobin_deals_all_partitions_in_a_circle():
    found = BUILT_IN["roundrobin"]({"a": {"t", "u"}, "b": {"t", "u"}}, {"t": 3, "u": 2}, {})
    assert found == {"a": keys("t", 0, 2) | keys("u", 1), "b": keys("t", 1) | keys("u", 0)}


def test_roundrobin_passes_over_members_that_do_not_subscribe():
    found = BUILT_IN["roundrobin"]({"a": {"t"}, "b": {"u"}, "c": {"t"}}, {"t": 4, "u": 1, "v": 3}, {})
    assert found == {"a": keys("t", 0, 2), "b": keys("u", 0), "c": keys("t", 1, 3)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_order_of_members_is_that_in_which_they_come(name):
    members = {"z": {"t"}, "a": {"t"}}
    assert BUILT_IN[name](members, {"t": 1}, {}) == {"z": keys("t", 0), "a": set()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_nobody_and_nothing_are_fine(name):
    assert BUILT_IN[name]({}, {}, {}) == {}
    assert BUILT_IN[name]({"a": set(), "b": {"absent"}}, {"t": 2}, {}) == {"a": set(), "b": set()}


# -- sticky ------------------------------------------------------------------------------------------------------


def test_sticky_takes_from_everybody_evenly_for_a_newcomer_and_moves_nothing_else():
    owned = {"a": keys("t", *range(6)), "b": keys("t", *range(6, 12))}
    found = sticky({"a": {"t"}, "b": {"t"}, "c": {"t"}}, {"t": 12}, owned)
    assert loads(found) == [4, 4, 4]
    assert found["a"] < owned["a"]
    assert found["b"] < owned["b"]


def test_sticky_gives_what_a_member_left_behind_to_the_others():
    owned = {"a": keys("t", 0, 1), "b": keys("t", 2, 3)}
    found = sticky({"a": {"t"}, "b": {"t"}}, {"t": 6}, owned)
    assert loads(found) == [3, 3]
    assert found["a"] > owned["a"]
    assert found["b"] > owned["b"]


def test_sticky_leaves_the_odd_partition_where_it_is():
    owned = {"a": keys("t", 0), "b": keys("t", 1, 2)}
    assert sticky({"a": {"t"}, "b": {"t"}}, {"t": 3}, owned) == owned


def test_sticky_goes_through_a_third_member_where_subscriptions_differ():
    members = {"a": {"t", "u"}, "b": {"u", "v"}, "c": {"v"}}
    owned = {"a": keys("t", 0) | keys("u", 0, 1), "b": keys("v", 0, 1), "c": set()}
    found = sticky(members, {"t": 1, "u": 2, "v": 2}, owned)
    assert sorted(loads(found)) == [1, 2, 2]
    assert TP("t", 0) in found["a"]


def test_sticky_stops_when_its_work_is_used_up_and_still_gives_everything_away():
    members = {f"m{n}": {f"t{n}", f"t{n + 1}"} for n in range(20)}
    partitions = {f"t{n}": 5 for n in range(21)}
    owned = {"m0": {TP("t0", n) for n in range(5)} | {TP("t1", n) for n in range(5)}}
    for work in (0, 200, 2_000):
        assert sum(loads(sticky(members, partitions, owned, work))) == 21 * 5


def cost(case: Case, found: Any) -> tuple[int, int]:
    """Unevenness, then moves."""
    owner = {key: member for member, held in found.items() for key in held}
    moved = sum(key in owner and owner[key] != member for member, held in case[2].items() for key in held)
    return sum(load * load for load in loads(found)), moved


def every_assignment(members: dict[str, set[str]], partitions: dict[str, int]) -> Iterator[dict[str, set[Any]]]:
    all_keys = [TP(topic, n) for topic, count in sorted(partitions.items()) for n in range(count)]
    choices = [[member for member in members if key.topic in members[member]] for key in all_keys]
    readable = [(key, choice) for key, choice in zip(all_keys, choices, strict=True) if choice]
    for picks in itertools.product(*(choice for _, choice in readable)):
        found: dict[str, set[Any]] = {member: set() for member in members}
        for (key, _), member in zip(readable, picks, strict=True):
            found[member].add(key)
        yield found


@st.composite
def cases(draw: st.DrawFn, same: bool = False) -> Case:
    """Small enough to try everything; owners of what is gone, not subscribed to, and unknown members among them."""
    topics = draw(st.dictionaries(st.sampled_from("tuv"), st.integers(0, 4), min_size=1, max_size=3))
    if sum(topics.values()) > 7:
        topics = dict(list(topics.items())[:2])
    names = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
    chosen = st.sets(st.sampled_from([*topics, "absent"]))
    shared = draw(chosen)
    members = {name: shared if same else draw(chosen) for name in names}
    owned: dict[str, set[TopicPartition]] = {}
    for key in [TP(topic, number) for topic in "tuv" for number in range(5)]:
        owner = draw(st.sampled_from([None, *names, *names, "gone"]))
        if owner is not None:
            owned.setdefault(owner, set()).add(key)
    return members, topics, owned


def still_owned(case: Case) -> Case:
    members, partitions, owned = case
    kept = {
        member: {
            key
            for key in owned.get(member, set())
            if key.topic in topics and key.partition < partitions.get(key.topic, 0)
        }
        for member, topics in members.items()
    }
    return members, partitions, kept


@settings(max_examples=300, deadline=None)
@given(st.one_of(cases(), cases(same=True)))
@example(({"a": {"t"}, "b": {"t", "u"}}, {"t": 2, "u": 2}, {"b": {TP("t", 0), TP("t", 1), TP("u", 0), TP("u", 1)}}))
def test_sticky_is_as_even_as_possible_and_moves_as_little_as_possible(case):
    case = still_owned(case)
    members, partitions, owned = case
    found = sticky(members, partitions, owned)
    assert cost(case, found) == min(cost(case, other) for other in every_assignment(members, partitions))


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(sorted(BUILT_IN)))
def test_every_assignor_gives_each_partition_to_one_subscriber_always_the_same(case, name):
    members, partitions, owned = case
    found, problem = checked(BUILT_IN, name, members, partitions, owned)
    assert problem is None
    readable = {
        TP(t, n) for t, count in partitions.items() if any(t in m for m in members.values()) for n in range(count)
    }
    assert {key for held in found.values() for key in held} == readable
    assert sum(loads(found)) == len(readable)
    assert checked(BUILT_IN, name, members, dict(reversed(partitions.items())), owned) == (found, None)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_sticky_changes_nothing_when_nothing_changed(case):
    members, partitions, _ = case
    found = sticky(members, partitions, {})
    assert sticky(members, partitions, found) == found


# -- custom assignors --------------------------------------------------------------------------------------------


def failing(*_: Any) -> Any:
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("assignor", "problem"),
    [
        (failing, "RuntimeError: no idea"),
        (lambda *_: {"x": set()}, "'x' is no member"),
        (lambda *_: {"a": {TP("u", 0)}}, "u-0 is nothing that 'a' could read"),
        (lambda *_: {"a": {TP("t", 2)}}, "t-2 is nothing that 'a' could read"),
        (lambda *_: {"a": {TP("t", -1)}}, "t--1 is nothing"),
        (lambda *_: {"a": {TP("t", True)}}, "t-True is nothing"),
        (lambda *_: {"a": {TP("t", 0)}, "b": {TP("t", 0)}}, "t-0 is given to 'a' and to 'b'"),
        (lambda *_: {"a": {"t-0"}}, "ValueError"),
        (lambda *_: {"a": None}, "TypeError"),
        (lambda *_: None, "TypeError"),
    ],
)
def test_what_a_custom_assignor_does_wrong_is_named_and_sticky_steps_in(assignor, problem):
    members = {"a": {"t"}, "b": {"t", "u"}}
    found, said = checked({"mine": assignor}, "mine", members, {"t": 2, "u": 1}, {"a": keys("t", 1)})
    assert problem in (said or "")
    assert found == sticky(members, {"t": 2, "u": 1}, {"a": keys("t", 1)})


def test_an_assignor_that_this_broker_lacks_is_named_and_sticky_steps_in():
    assert checked({}, "mine", {"a": {"t"}}, {"t": 1}, {}) == (
        {"a": keys("t", 0)},
        "this broker has no assignor 'mine'",
    )


def test_a_custom_assignor_may_leave_members_and_partitions_out_and_return_plain_pairs():
    found, problem = checked({"mine": lambda *_: {"a": {("t", 0)}}}, "mine", {"a": {"t"}, "b": {"t"}}, {"t": 2}, {})
    assert (found, problem) == ({"a": keys("t", 0), "b": set()}, None)
