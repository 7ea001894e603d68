"""Consumer groups on a real cluster: sharing, dying members, dying coordinators, and what outlives them all."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration.members import Held, Member, until
from zmqueue import Admin, OffsetAndMetadata, TopicPartition, errors
from zmqueue.testing import Cluster
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import OFFSETS_TOPIC, FetchOffsetsRequest, group_partition

PARTITIONS = 4
READ_LEASE_S = 3.0  # so long a leader that was replaced may still answer readers


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        yield admin


def topic(cluster: Cluster, name: str, partitions: int = PARTITIONS) -> Held:
    cluster.command("topic", "create", name, "-p", str(partitions), "-r", "2")
    return {(name, number) for number in range(partitions)}


def share(everything: Held, *members: Member) -> bool:
    """Whether they hold all of it, no partition twice and everyone some."""
    held = [partition for member in members for partition in member.held]
    return sorted(held) == sorted(everything) and all(member.held for member in members)


def coordinator_of(admin: Admin, group: str) -> int:
    return admin.describe_group(group).coordinator


def committed(admin: Admin, group: str) -> dict[TopicPartition, int]:
    return {partition: found.offset for partition, found in admin.group_offsets(group).items()}


def kill_and_start(cluster: Cluster, broker: int) -> None:
    cluster.kill(broker)
    cluster.start(broker)
    cluster.wait_healthy(60)


def test_members_share_a_topic_and_the_dead_ones_leave_theirs_to_the_others(cluster: Cluster) -> None:
    everything = topic(cluster, "shared")
    servers = cluster.bootstrap_servers
    with Member(servers, "sharers", "shared") as first:
        until(lambda: first.held == everything)
        with Member(servers, "sharers", "shared") as second, Member(servers, "sharers", "shared") as third:
            until(lambda: share(everything, first, second, third))
            second.end(leave=True)
            until(lambda: share(everything, first, third))
            assert first.lives == third.lives == 1
        # The third ended without a word.
        until(lambda: first.held == everything)
        assert first.lives == 1


def test_partitions_that_are_added_come_to_the_group_and_are_read_from_their_beginning(
    cluster: Cluster, admin: Admin
) -> None:
    topic(cluster, "grows", 2)
    with Member(cluster.bootstrap_servers, "growers", "grows") as member:
        until(lambda: len(member.held) == 2)
        assert not member.fresh
        admin.create_partitions("grows", 4)
        until(lambda: len(member.held) == 4)
        assert member.fresh == {("grows", 2), ("grows", 3)}


def test_a_coordinator_that_dies_costs_members_nothing_and_no_commit(cluster: Cluster, admin: Admin) -> None:
    everything = topic(cluster, "steady")
    servers = cluster.bootstrap_servers
    with Member(servers, "steady", "steady") as first, Member(servers, "steady", "steady") as second:
        until(lambda: share(everything, first, second))
        until(lambda: first.generation == second.generation)
        assert {*first.commit(7, 1), *second.commit(7, 1)} == {0}
        before = (first.held, second.held, first.generation)
        told = len(first.told) + len(second.told)
        coordinator = coordinator_of(admin, "steady")
        cluster.kill(coordinator)
        until(lambda: coordinator_of(admin, "steady") != coordinator)
        assert {*first.commit(8, 2), *second.commit(8, 2)} == {0}
        assert (first.held, second.held, first.generation) == before
        assert first.lives == second.lives == 1
        assert len(first.told) + len(second.told) == told, "nobody was told anything new"
        cluster.start(coordinator)
        cluster.wait_healthy(60)
    assert committed(admin, "steady") == {TopicPartition(*partition): 8 for partition in everything}


def test_a_coordinator_that_hung_answers_nobody_from_what_it_remembers(cluster: Cluster, admin: Admin) -> None:
    everything = topic(cluster, "hung", 1)
    with Member(cluster.bootstrap_servers, "hung", "hung") as member:
        until(lambda: member.held == everything)
        assert member.commit(7, 1) == [0]
        coordinator = coordinator_of(admin, "hung")
        cluster.pause(coordinator)
        paused = time.monotonic()
        try:
            until(lambda: member.commit(8, 2) == [0])
            until(lambda: time.monotonic() - paused > READ_LEASE_S)
            # It lies there when the broker wakes, and is the first thing that it sees.
            request = FetchOffsetsRequest("hung")
            asked = admin._router.begin(coordinator, Operation.FETCH_OFFSETS, request, 30)
        finally:
            cluster.resume(coordinator)
        refusal = asked.result()
        assert isinstance(refusal, errors.ZmqueueError), refusal
        assert refusal.retriable
        cluster.wait_healthy(60)
        assert member.held == everything
        assert member.lives == 1
    assert committed(admin, "hung") == {TopicPartition("hung", 0): 8}


def test_commits_of_a_member_that_was_expelled_are_refused(cluster: Cluster, admin: Admin) -> None:
    everything = topic(cluster, "zombie", 1)
    servers = cluster.bootstrap_servers
    with Member(servers, "zombie", "zombie") as first:
        until(lambda: first.held == everything)
        assert first.commit(1, 1) == [0]
        first.end(leave=True)
        with Member(servers, "zombie", "zombie") as second:
            until(lambda: second.held == everything)
            assert second.commit(5, 1) == [0]
            with Admin(bootstrap_servers=servers) as again:
                first._admin = again
                with pytest.raises(errors.UnknownMember):
                    first.commit(2, 2)
    assert committed(admin, "zombie") == {TopicPartition("zombie", 0): 5}


def test_what_groups_wrote_is_compacted_and_read_by_the_next_coordinator(cluster: Cluster, admin: Admin) -> None:
    count, group = 40, "seekers"
    topic(cluster, "compacted", count)
    partitions = [TopicPartition("compacted", number) for number in range(count)]
    admin.set_group_offsets(group, {partitions[0]: 0})
    number = group_partition(group, 10)
    topic_id = cluster.json("topic", "describe", OFFSETS_TOPIC)["topic_id"]

    def full_segments() -> int:
        """Bytes of them, on the broker that has most."""
        sizes = []
        for folder in cluster.data_dir.glob(f"broker-*/partitions/{topic_id}-{number}"):
            sizes.append(0)
            for path in sorted(folder.glob("*.log"))[:-1]:
                try:
                    sizes[-1] += path.stat().st_size
                except FileNotFoundError:
                    continue  # put in place by another while we looked
        return max(sizes)

    round_ = 0
    while full_segments() == 0:
        round_ += 1
        assert round_ < 200
        admin.set_group_offsets(group, {partition: OffsetAndMetadata(round_, "x" * 4_000) for partition in partitions})
    until(lambda: 0 < full_segments() < 1_000_000)
    kill_and_start(cluster, coordinator_of(admin, group))
    assert committed(admin, group) == dict.fromkeys(partitions, round_)


def test_a_group_is_deleted_for_good(cluster: Cluster, admin: Admin) -> None:
    everything = topic(cluster, "left", 1)
    with Member(cluster.bootstrap_servers, "leavers", "left") as member:
        until(lambda: member.held == everything)
        assert member.commit(3, 1) == [0]
        with pytest.raises(errors.NonEmptyGroup):
            admin.delete_group("leavers")
        member.end(leave=True)
    until(lambda: admin.describe_group("leavers").state == "empty")
    assert "leavers" in [row.group for row in admin.list_groups().groups]
    coordinator = coordinator_of(admin, "leavers")
    admin.delete_group("leavers")
    kill_and_start(cluster, coordinator)
    with pytest.raises(errors.GroupNotFound):
        admin.describe_group("leavers")
    assert "leavers" not in [row.group for row in admin.list_groups().groups]


def test_groups_outlive_a_restart_of_the_whole_cluster(cluster: Cluster, admin: Admin) -> None:
    everything = topic(cluster, "restarted")
    with Member(cluster.bootstrap_servers, "patient", "restarted") as member:
        until(lambda: member.held == everything)
        assert {*member.commit(11, 1)} == {0}
        for broker in range(3):
            cluster.kill(broker)
        for broker in range(3):
            cluster.start(broker)
        cluster.wait_healthy(90)
        until(lambda: {*member.commit(12, 2)} == {0})
        assert member.held == everything
        assert member.lives == 1
    assert committed(admin, "patient") == {TopicPartition(*partition): 12 for partition in everything}
