"""The administrator against a scripted cluster: consumer groups, their offsets, and how far they are behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.fake_broker import DROP, SILENCE, FakeCluster, Seen
from unit.client.fake_groups import FakeGroups

from zmqueue import Admin, OffsetAndMetadata, TopicPartition, errors
from zmqueue.client.descriptions import GroupSummary, PartitionLag
from zmqueue.wire import batch as wire_batch
from zmqueue.wire import frames, messages
from zmqueue.wire.frames import Operation


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 3}) as cluster:
        yield cluster


@pytest.fixture
def groups(cluster: FakeCluster) -> FakeGroups:
    return FakeGroups(cluster)


@pytest.fixture
def admin(cluster: FakeCluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap, request_timeout_ms=30_000) as admin:
        yield admin


def once(operation: Operation, *verdicts: Any) -> Any:
    """A script that answers the first requests of this kind like so, and leaves the others alone."""
    left = list(verdicts)
    return lambda seen: left.pop(0) if seen.operation == operation and left else None


# -- groups ------------------------------------------------------------------------------------------------------


def test_groups_are_those_of_every_broker(groups: FakeGroups, admin: Admin) -> None:
    groups.add("b", coordinator=1)
    groups.add("a", coordinator=0)
    groups.join("a", "m1", "t", [0])
    listing = admin.list_groups()
    assert list(listing) == [GroupSummary("a", "stable", 1, 1, "sticky"), GroupSummary("b", "empty", 0, 1, "sticky")]
    assert (len(listing), listing.unanswered) == (2, [])


def test_a_broker_that_is_loading_is_asked_again(groups: FakeGroups, admin: Admin) -> None:
    groups.add("a", coordinator=1)
    groups.before = once(Operation.LIST_GROUPS, *[errors.CoordinatorLoading.code] * 3)
    assert [group.group for group in admin.list_groups()] == ["a"]


def test_a_listing_says_which_brokers_did_not_answer(cluster: FakeCluster, groups: FakeGroups) -> None:
    groups.add("a", coordinator=0)
    groups.add("b", coordinator=1)
    groups.before = lambda seen: SILENCE if seen.operation == Operation.LIST_GROUPS and seen.broker == 1 else None
    with Admin(bootstrap_servers=cluster.bootstrap, request_timeout_ms=1_000) as admin:
        listing = admin.list_groups()
    assert ([group.group for group in listing], listing.unanswered) == (["a"], [1])


def test_a_group_is_described_with_the_names_of_what_its_members_hold(groups: FakeGroups, admin: Admin) -> None:
    groups.add("g", coordinator=1)
    groups.join("g", "m2", "many", [2])
    groups.join("g", "m1", "many", [1, 0])
    described = admin.describe_group("g")
    assert (described.state, described.coordinator, described.assignor) == ("stable", 1, "sticky")
    assert [(member.member_id, member.client_id, member.topics) for member in described.members] == [
        ("m1", "client-m1", ["many"]),
        ("m2", "client-m2", ["many"]),
    ]
    assert described.members[0].assignment == [TopicPartition("many", 0), TopicPartition("many", 1)]


def test_the_coordinator_is_looked_for_again_when_it_has_moved(groups: FakeGroups, admin: Admin) -> None:
    groups.add("g", coordinator=1)
    groups.believed = [0, -1]
    groups.before = once(Operation.DESCRIBE_GROUP, None, errors.CoordinatorLoading.code)
    assert admin.describe_group("g").coordinator == 1
    asked = [seen.broker for seen in groups.cluster.seen if seen.operation == Operation.DESCRIBE_GROUP]
    assert asked == [0, 1, 1], "who was wrongly said to be it; who was still loading; and then it answered"


def test_a_coordinator_that_stays_away_ends_the_call_with_its_error(cluster: FakeCluster, groups: FakeGroups) -> None:
    groups.add("g")
    groups.before = lambda seen: (
        errors.CoordinatorNotAvailable.code if seen.operation == Operation.DESCRIBE_GROUP else None
    )
    with (
        Admin(bootstrap_servers=cluster.bootstrap, request_timeout_ms=300) as admin,
        pytest.raises((errors.CoordinatorNotAvailable, errors.RequestTimedOut)),
    ):
        admin.describe_group("g")


def test_a_group_that_is_not_there(groups: FakeGroups, admin: Admin) -> None:
    for call in (admin.describe_group, admin.delete_group, admin.group_offsets, admin.group_lag):
        with pytest.raises(errors.GroupNotFound):
            call("nope")
        with pytest.raises(errors.InvalidGroup):
            call("")
        with pytest.raises(errors.InvalidGroup):
            call("g" * 250)


def test_an_empty_group_is_deleted_and_one_with_members_is_not(groups: FakeGroups, admin: Admin) -> None:
    groups.add("empty")
    groups.join("busy", "m", "t", [0])
    admin.delete_group("empty")
    with pytest.raises(errors.NonEmptyGroup):
        admin.delete_group("busy")
    assert list(groups.groups) == ["busy"]


def test_a_group_that_an_attempt_without_an_answer_has_deleted_is_deleted(groups: FakeGroups, admin: Admin) -> None:
    groups.add("g")

    def carried_out_and_dropped(seen: Seen) -> Any:
        return DROP if seen.operation == Operation.DELETE_GROUP and groups.groups.pop("g", None) else None

    groups.before = carried_out_and_dropped
    admin.delete_group("g")
    assert groups.cluster.count(Operation.DELETE_GROUP) == 2


# -- offsets -----------------------------------------------------------------------------------------------------


def test_offsets_of_topics_that_were_deleted_are_left_out(groups: FakeGroups, admin: Admin) -> None:
    groups.commit("g", "many", 2, 7)
    groups.commit("g", "many", 0, 5)
    groups.commit("g", "gone", 0, 9)
    assert admin.group_offsets("g") == {
        TopicPartition("many", 0): OffsetAndMetadata(5, "", 1),
        TopicPartition("many", 2): OffsetAndMetadata(7, "", 1),
    }


def test_offsets_are_set_for_a_group_without_members(groups: FakeGroups, admin: Admin) -> None:
    groups.commit("g", "t", 0, 9)
    groups.commit("g", "many", 1, 9)
    admin.set_group_offsets("g", {TopicPartition("t", 0): 4, TopicPartition("many", 0): OffsetAndMetadata(5, "why")})
    assert [groups.offset_of("g", "t", 0), groups.offset_of("g", "many", 0)] == [4, 5]
    assert groups.offset_of("g", "many", 1) == 9, "what was not named stays"
    asked = next(seen.message for seen in groups.cluster.seen if seen.operation == Operation.COMMIT_OFFSETS)
    assert (asked.member_id, asked.generation) == ("", -1)
    groups.join("g", "m", "t", [0])
    with pytest.raises(errors.NonEmptyGroup):
        admin.set_group_offsets("g", {TopicPartition("t", 0): 0})


def test_offsets_are_set_for_partitions_that_exist_only(groups: FakeGroups, admin: Admin) -> None:
    for partition in (TopicPartition("nope", 0), TopicPartition("t", 1)):
        with pytest.raises(errors.UnknownTopicOrPartition, match=f"{partition.topic}-{partition.partition}"):
            admin.set_group_offsets("g", {TopicPartition("t", 0): 0, partition: 0})
    assert groups.cluster.count(Operation.COMMIT_OFFSETS) == 0


def test_a_commit_that_was_refused_in_part_is_made_again_or_raised(groups: FakeGroups, admin: Admin) -> None:
    from zmqueue.wire.group_messages import CommitOffsetsResponse

    refusals = [errors.CoordinatorNotAvailable.code, errors.OffsetMetadataTooLarge.code]

    def script(seen: Seen) -> Any:
        if seen.operation == Operation.COMMIT_OFFSETS and refusals:
            return frames.response(seen.head, CommitOffsetsResponse([0, refusals.pop(0)]))
        return None

    groups.before = script
    with pytest.raises(errors.OffsetMetadataTooLarge, match="many-2"):
        admin.set_group_offsets("g", {TopicPartition("t", 0): 1, TopicPartition("many", 2): 1})
    assert groups.cluster.count(Operation.COMMIT_OFFSETS) == 2


# -- lag -----------------------------------------------------------------------------------------------------------


def fill(cluster: FakeCluster, topic: str, number: int, ages_s: list[int], size: int = 2) -> None:
    """Records of these ages, in batches of `size`."""
    now_ms = int(time.time() * 1000)
    for at in range(0, len(ages_s), size):
        stamps = [now_ms - age_s * 1000 for age_s in ages_s[at : at + size]]
        deltas = [stamp - stamps[0] for stamp in stamps]
        header, body = wire_batch.encode([b"v"] * len(stamps), base_timestamp=stamps[0], timestamp_deltas=deltas)
        cluster.partition(topic, number).append(header, body)


def lag_of(admin: Admin, partition: int = 0, topic: str = "many") -> PartitionLag:
    return next(row for row in admin.group_lag("g") if (row.topic, row.partition) == (topic, partition))


def about(age_s: float) -> Any:
    """The age of a record grows while a test runs."""
    return pytest.approx(age_s + 45, abs=45)


def test_lag_is_counted_in_records_and_in_the_age_of_the_first_of_them(
    cluster: FakeCluster, groups: FakeGroups, admin: Admin
) -> None:
    fill(cluster, "many", 0, [9000, 8000, 7000, 6000, 5000])
    fill(cluster, "many", 1, [9000, 8000])
    groups.commit("g", "many", 0, 3)
    groups.commit("g", "many", 1, 2)
    groups.join("g", "m", "many", [0, 2])
    behind, caught_up, nothing_there = admin.group_lag("g")
    assert (behind.committed, behind.log_start, behind.log_end, behind.lag) == (3, 0, 5, 2)
    assert behind.lag_seconds == about(6000), "by the record itself, which is not the first of its batch"
    assert (behind.member_id, behind.client_id) == ("m", "client-m")
    assert (caught_up.lag, caught_up.lag_seconds, caught_up.member_id) == (0, 0, None)
    assert (nothing_there.committed, nothing_there.lag, nothing_there.lag_seconds) == (None, 0, 0)
    assert (nothing_there.partition, nothing_there.member_id) == (2, "m")


def test_where_nothing_is_committed_a_group_may_begin_anywhere_so_its_lag_is_not_known(
    cluster: FakeCluster, groups: FakeGroups, admin: Admin
) -> None:
    fill(cluster, "many", 0, [9000])
    groups.join("g", "m", "many", [0])
    row = lag_of(admin)
    assert (row.committed, row.log_end, row.lag, row.lag_seconds) == (None, 1, None, None)


def test_records_that_retention_removed_count_no_longer(cluster: FakeCluster, groups: FakeGroups, admin: Admin) -> None:
    fill(cluster, "many", 0, [9000, 8000, 7000, 6000, 5000])
    groups.commit("g", "many", 0, 1)
    cluster.partition("many", 0).log_start = 4
    row = lag_of(admin)
    assert (row.committed, row.log_start, row.lag) == (1, 4, 1)
    assert row.lag_seconds == about(5000)
    cluster.partition("many", 0).log_start = 5
    row = lag_of(admin)
    assert (row.lag, row.lag_seconds) == (0, 0)


def test_records_that_retention_removes_meanwhile_are_stepped_over(
    cluster: FakeCluster, groups: FakeGroups, admin: Admin
) -> None:
    fill(cluster, "many", 0, [9000, 8000, 7000])
    groups.commit("g", "many", 0, 0)

    def remove_before_the_fetch(seen: Seen) -> Any:
        if seen.operation == Operation.FETCH:
            cluster.partition("many", 0).log_start = 2
        return None

    groups.before = remove_before_the_fetch
    assert lag_of(admin).lag_seconds == about(7000)


def test_records_that_compaction_removed_have_no_age(cluster: FakeCluster, groups: FakeGroups, admin: Admin) -> None:
    fill(cluster, "many", 0, [9000, 8000, 7000, 6000, 5000, 4000])
    partition = cluster.partition("many", 0)
    first, second, third = [wire_batch.Batch(*one) for one in partition.batches]
    partition.batches[0] = wire_batch.thinned(first.header, wire_batch.decode(*first), [0])
    partition.batches[1] = wire_batch.emptied(second.header)
    groups.commit("g", "many", 0, 1)
    row = lag_of(admin)
    assert row.lag == 5, "an upper bound: the offsets are there, most of their records are not"
    assert row.lag_seconds == about(5000)
    partition.batches[2] = wire_batch.emptied(third.header)
    row = lag_of(admin)
    assert (row.lag, row.lag_seconds) == (5, 0)


def test_a_group_that_is_ahead_of_a_log_that_lost_records_has_no_lag(
    cluster: FakeCluster, groups: FakeGroups, admin: Admin
) -> None:
    fill(cluster, "many", 0, [9])
    groups.commit("g", "many", 0, 7)
    row = lag_of(admin)
    assert (row.lag, row.lag_seconds) == (0, 0)


def test_what_only_a_leader_that_is_away_knows_is_left_out(
    cluster: FakeCluster, groups: FakeGroups, admin: Admin
) -> None:
    fill(cluster, "many", 1, [9, 9])  # led by broker 1
    groups.commit("g", "many", 1, 1)
    groups.commit("g", "many", 0, 0)
    groups.before = lambda seen: (
        errors.BrokerFenced.code if seen.operation == Operation.DESCRIBE_PARTITIONS and seen.broker == 1 else None
    )
    row = lag_of(admin, 1)
    assert (row.committed, row.log_end, row.lag, row.lag_seconds) == (1, None, None, None)
    assert lag_of(admin, 0).lag == 0


def test_an_age_that_cannot_be_read_is_unknown_and_the_rest_is_told(
    cluster: FakeCluster, groups: FakeGroups, admin: Admin
) -> None:
    fill(cluster, "many", 0, [9000, 8000])
    fill(cluster, "many", 1, [9000, 8000])
    groups.commit("g", "many", 0, 1)
    groups.commit("g", "many", 1, 1)

    def refuse(seen: Seen) -> Any:
        if seen.operation == Operation.FETCH and seen.broker == 0:
            results = [messages.FetchResult(errors.LeaseExpired.code)] * len(seen.message.entries)
            return frames.response(seen.head, messages.FetchResponse(results), [b""] * len(results))
        return None

    groups.before = refuse
    assert [(row.lag, row.lag_seconds) for row in admin.group_lag("g")] == [(1, None), (1, about(8000)), (0, 0)]
