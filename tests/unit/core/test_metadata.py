"""ClusterState: rules A1, A3, A6-A9 and what the D-rules look like from the metadata."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.core.builders import EPOCH, KEY, REF, Cluster, check_invariants, registration
from zmqueue import errors
from zmqueue.core import commands as c
from zmqueue.core.metadata import ClusterState
from zmqueue.model import NO_BROKER

# -- registration (A3) -------------------------------------------------------------------------------------------


def test_a_registration_raises_the_broker_epoch_and_fences():
    cluster = Cluster([1])
    applied = cluster.register(1, life=2)
    assert applied.outcome.value == 2
    assert cluster.state.brokers[1].epoch == 2
    assert not cluster.state.is_live(1)


def test_a_quick_restart_that_nobody_noticed_costs_leadership_and_the_place_in_the_isr():
    cluster = Cluster()
    cluster.topic(min_insync=2)
    cluster.register(1, life=2)
    assert cluster.partition.isr == [2, 3]
    assert (cluster.partition.leader, cluster.partition.leader_epoch) == (2, EPOCH + 1)


def test_a_clean_restart_stays_eligible_where_the_isr_is_too_small():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2)
    cluster.register(2, life=2)
    assert (cluster.partition.isr, cluster.partition.elr) == ([1], [2])


@pytest.mark.parametrize(
    "changes",
    [
        {"unclean": True},
        {"lost": [REF]},
        {"dir_id": b"another disk"},
        {"previous": []},  # a folder restored from a copy that is older than the last registration
    ],
)
def test_a_restart_without_its_data_is_not_eligible(changes: dict[str, Any]):
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2)
    cluster.register(2, life=2, **changes)
    p = cluster.partition
    assert (p.isr, p.elr, p.last_known_elr, p.lost) == ([1], [], [2], [2])


def test_a_restart_without_its_data_leaves_the_elr_it_was_in():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2, isr=[1], elr=[2])
    cluster.register(2, life=2, unclean=True)
    assert (cluster.partition.elr, cluster.partition.last_known_elr) == ([], [2])


def test_a_partition_lost_at_registration_does_not_touch_the_others():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2)
    cluster.register(2, life=2, lost=[c.PartitionRef(b"o" * 16, 0)])
    assert cluster.partition.elr == [2]


def test_memory_is_always_lost_by_a_restart():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2, storage="memory")
    cluster.register(2, life=2)
    assert (cluster.partition.elr, cluster.partition.lost) == ([], [2])


def test_a_memory_topic_whose_every_replica_restarted_begins_anew_and_says_so():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2, storage="memory")
    cluster.register(1, life=2)
    assert cluster.partition.leader == 2
    applied = cluster.register(2, life=2)
    assert [e.what for e in applied.events if e.what == "data lost"] == ["data lost"]
    assert cluster.partition.leader == NO_BROKER
    before = cluster.partition.leader_epoch
    cluster.unfence(2)
    assert (cluster.partition.leader, cluster.partition.leader_epoch) == (2, before + 1)
    check_invariants(cluster.state)


def test_a_recruit_that_was_never_in_sync_does_not_keep_a_memory_topic_offline():
    cluster = Cluster([1, 2, 3])
    cluster.topic([1, 2], min_insync=2, storage="memory")
    cluster.fence(2)
    heal(cluster)
    cluster.start(1, life=2)
    cluster.start(2, life=2)
    assert cluster.partition.leader != NO_BROKER
    check_invariants(cluster.state)


def test_a_disk_topic_whose_every_replica_lost_its_copy_stays_offline():
    cluster = Cluster()
    cluster.topic([1, 2])
    for broker in (1, 2):
        cluster.start(broker, life=2, unclean=True)
    assert (cluster.partition.leader, cluster.partition.elr) == (NO_BROKER, [])


def test_a_late_registration_of_a_former_life_is_void():
    cluster = Cluster([1, 2])
    cluster.start(1, life=3)
    before = cluster.state.brokers[1].epoch
    outcome = cluster.register(1, life=2).outcome
    assert outcome.code == errors.StaleCommand.code
    assert cluster.state.brokers[1].epoch == before
    assert cluster.state.is_live(1)


def test_a_late_registration_does_not_silence_the_present_life():
    """Else everything that life proposes is refused as of a life that has not registered."""
    cluster = Cluster([1, 2])
    cluster.start(1, life=3)
    present, number = cluster.incarnations[1], cluster.numbers[1]
    late = c.encode(c.Envelope(1, 1002, 1, registration(1, 2)))
    cluster.state.apply(late)
    mine = c.encode(c.Envelope(1, present, number + 1, c.AllocateProducerIds(1)))
    assert cluster.state.apply(mine).outcome.code == 0


def test_a_life_before_a_wiped_disk_is_former_too():
    """Its folder is gone, so the present life cannot name it: the cluster remembers."""
    cluster = Cluster([1, 2])
    cluster.start(1, life=7, previous=[], dir_id=b"new")
    assert cluster.register(1, life=1).outcome.code == errors.StaleCommand.code
    assert cluster.state.is_live(1)


def test_the_loss_of_one_copy_while_running_is_as_that_of_an_unclean_restart():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2)
    cluster.do(c.ReplicaLost(2, 1, REF))
    p = cluster.partition
    assert (p.isr, p.elr, p.lost) == ([1], [], [2])
    assert cluster.state.is_live(2)


def test_a_loss_reported_by_a_former_life_is_refused():
    cluster = Cluster()
    cluster.topic([1, 2])
    assert cluster.do(c.ReplicaLost(2, 0, REF)).outcome.code == errors.StaleCommand.code
    assert cluster.partition.isr == [1, 2]


# -- fencing -----------------------------------------------------------------------------------------------------


def test_fencing_an_older_epoch_of_a_broker_changes_nothing():
    cluster = Cluster([1, 2])
    cluster.start(1, life=2)
    outcome = cluster.do(c.Fence([c.BrokerRef(1, 1)]), by=2).outcome
    assert outcome.code == errors.StaleCommand.code
    assert cluster.state.is_live(1)


def test_brokers_fenced_by_one_command_all_stay_eligible():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2, 3], min_insync=2)
    cluster.fence(1, 2, 3)
    assert cluster.partition.elr == [1, 2, 3]
    cluster.unfence(3)
    assert (cluster.partition.leader, cluster.partition.isr, cluster.partition.elr) == (3, [3], [1, 2])


def test_with_one_replica_enough_only_the_last_in_sync_one_can_bring_the_partition_back():
    cluster = Cluster([1, 2, 3])
    cluster.topic([1, 2])
    cluster.fence(2)
    assert (cluster.partition.isr, cluster.partition.elr) == ([1], [])
    cluster.fence(1)
    assert cluster.partition.elr == [1]
    cluster.unfence(2)
    assert cluster.partition.leader == NO_BROKER
    cluster.unfence(1)
    assert cluster.partition.leader == 1


def test_the_leaders_of_an_unfenced_brokers_partitions_hear_of_it():
    cluster = Cluster()
    cluster.topic([1, 2])
    cluster.fence(2)
    version = cluster.partition.partition_epoch
    assert list(cluster.unfence(2).partitions) == [KEY]
    assert cluster.partition.partition_epoch == version


def test_a_broker_that_leaves_hands_over_and_is_not_unfenced_in_that_epoch():
    cluster = Cluster()
    cluster.topic()
    cluster.do(c.BeginShutdown(1, 1))
    assert cluster.partition.leader == 2
    assert cluster.unfence(1).outcome.code == errors.StaleCommand.code
    cluster.start(1, life=2)
    assert cluster.state.is_live(1)


# -- election (A6, A7) -------------------------------------------------------------------------------------------


def test_the_first_live_replica_in_the_isr_leads():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 3, 2], isr=[1, 2])
    cluster.fence(1)
    assert cluster.partition.leader == 2


def test_nobody_outside_isr_and_elr_is_elected():
    cluster = Cluster()
    cluster.topic(isr=[1])
    cluster.fence(1)
    assert (cluster.partition.leader, cluster.partition.leader_epoch) == (NO_BROKER, EPOCH + 1)


def test_every_election_raises_both_epochs_once():
    cluster = Cluster()
    cluster.topic()
    version = cluster.partition.partition_epoch
    cluster.fence(1)
    assert (cluster.partition.leader_epoch, cluster.partition.partition_epoch) == (EPOCH + 1, version + 1)


def test_a_leader_elected_from_the_elr_joins_the_isr_and_the_others_stay_eligible():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2, 3], min_insync=2)
    cluster.fence(1, 2, 3)
    cluster.unfence(2)
    assert (cluster.partition.isr, cluster.partition.elr) == ([2], [1, 3])


def test_a_member_that_leaves_an_isr_that_stays_large_enough_is_not_eligible():
    cluster = Cluster()
    cluster.topic(min_insync=2)
    cluster.alter_isr(1, 2)
    assert (cluster.partition.isr, cluster.partition.elr) == ([1, 2], [])


def test_the_elr_is_emptied_when_the_isr_is_large_enough_again():
    cluster = Cluster()
    cluster.topic(min_insync=2, isr=[1], elr=[2])
    cluster.alter_isr(1, 3)
    assert (cluster.partition.isr, cluster.partition.elr) == ([1, 3], [])


def test_a_lower_minimum_ends_the_eligibility_of_those_who_will_miss_what_is_committed_now():
    cluster = Cluster()
    cluster.topic([1, 2], min_insync=2, isr=[1], elr=[2])
    version = cluster.partition.partition_epoch
    cluster.do(c.SetConfig("t", REF.topic_id, 0, {"min.insync.replicas": "1"}))
    assert cluster.partition.elr == []
    assert cluster.partition.partition_epoch == version + 1


def test_settings_are_changed_one_by_one_and_the_minimum_follows():
    cluster = Cluster()
    cluster.topic(min_insync=2)
    topic = cluster.state.topics[REF.topic_id]
    cluster.do(c.SetConfig("t", REF.topic_id, 0, {"min.insync.replicas": "3", "retention.ms": "5"}))
    assert (topic.config, topic.min_insync_replicas) == ({"min.insync.replicas": "3", "retention.ms": "5"}, 3)
    cluster.do(c.SetConfig("t", REF.topic_id, 1, {"min.insync.replicas": None}))
    assert (topic.config, topic.min_insync_replicas, topic.config_version) == ({"retention.ms": "5"}, 2, 2)


def test_settings_that_changed_meanwhile_stay_as_they_are():
    cluster = Cluster()
    cluster.topic()
    cluster.do(c.SetConfig("t", REF.topic_id, 0, {"retention.ms": "5"}))
    for version, topic_id in ((0, REF.topic_id), (2, REF.topic_id), (1, b"o" * 16)):
        applied = cluster.do(c.SetConfig("t", topic_id, version, {"retention.ms": "6"}))
        assert applied.outcome.code == errors.StaleCommand.code
    applied = cluster.do(c.SetConfig("t", REF.topic_id, 1, {"min.insync.replicas": "4"}))
    assert applied.outcome.code == errors.InvalidConfig.code
    assert cluster.state.topics[REF.topic_id].config == {"retention.ms": "5"}


def test_preferred_leaders_take_over_only_where_they_are_in_sync():
    cluster = Cluster()
    cluster.topic(isr=[2, 3]).leader = 2
    assert cluster.do(c.ElectPreferred()).outcome.value == 0
    cluster.partition.isr = [1, 2, 3]
    assert cluster.do(c.ElectPreferred()).outcome.value == 1
    assert (cluster.partition.leader, cluster.partition.leader_epoch) == (1, EPOCH + 1)


def test_a_leader_with_a_full_disk_hands_over_to_an_in_sync_replica_only():
    cluster = Cluster()
    cluster.topic([1, 2, 3], isr=[1, 3])
    cluster.do(c.Resign(1, 1, REF, EPOCH))
    assert (cluster.partition.leader, cluster.partition.isr) == (3, [1, 3])
    assert cluster.do(c.Resign(1, 1, REF, EPOCH)).outcome.code == errors.StaleCommand.code


def test_a_leader_that_is_alone_in_sync_cannot_resign():
    cluster = Cluster()
    cluster.topic(isr=[1])
    assert cluster.do(c.Resign(1, 1, REF, EPOCH)).outcome.code == errors.StaleCommand.code
    assert cluster.partition.leader == 1


# -- AlterIsr (B8, A1) -------------------------------------------------------------------------------------------


def test_an_isr_change_is_taken_once():
    cluster = Cluster()
    cluster.topic(isr=[1, 2])
    change = cluster.change(1, 2, 3)
    assert cluster.do(c.AlterIsr(1, 1, [change])).outcome.value == [0]
    assert cluster.do(c.AlterIsr(1, 1, [change])).outcome.value == [errors.StaleCommand.code]
    assert cluster.partition.isr == [1, 2, 3]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("leader_epoch", EPOCH - 1, errors.FencedEpoch),
        ("leader_epoch", EPOCH + 1, errors.FencedEpoch),
        ("partition_epoch", 99, errors.StaleCommand),
        ("partition", 1, errors.UnknownTopicOrPartition),
        ("isr", [c.BrokerRef(2, 1)], errors.InvalidRequest),  # without the leader
        ("isr", [c.BrokerRef(1, 1), c.BrokerRef(1, 1)], errors.InvalidRequest),
        ("isr", [c.BrokerRef(1, 1), c.BrokerRef(4, 1)], errors.InvalidRequest),  # not a replica
        ("isr", [c.BrokerRef(1, 1), c.BrokerRef(3, 0)], errors.StaleCommand),  # a former life (B8d)
    ],
)
def test_an_isr_change_that_does_not_fit_is_refused(field: str, value: Any, error: type[errors.ZmqueueError]):
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2, 3], isr=[1, 2])
    change = cluster.change(1, 2, 3)
    setattr(change, field, value)
    before = cluster.partition.isr[:], cluster.partition.partition_epoch
    assert cluster.do(c.AlterIsr(1, 1, [change])).outcome.value == [error.code]
    assert (cluster.partition.isr, cluster.partition.partition_epoch) == before


def test_a_follower_that_restarted_after_the_proposal_does_not_join_by_it():
    """B8d: with the epoch of its new life, or with none, a wiped disk would enter the ISR."""
    cluster = Cluster()
    cluster.topic(isr=[1, 2])
    change = cluster.change(1, 2, 3)
    cluster.start(3, life=2, unclean=True)
    change.partition_epoch = cluster.partition.partition_epoch
    assert cluster.do(c.AlterIsr(1, 1, [change])).outcome.value == [errors.StaleCommand.code]
    assert cluster.partition.isr == [1, 2]


def test_a_fenced_follower_does_not_join():
    cluster = Cluster([1, 2, 3])
    cluster.topic(isr=[1, 2])
    cluster.fence(3)
    assert cluster.alter_isr(1, 2, 3).outcome.value == [errors.StaleCommand.code]


def test_only_the_leader_changes_the_isr():
    cluster = Cluster()
    cluster.topic()
    assert cluster.alter_isr(1, 2, by=2).outcome.value == [errors.FencedEpoch.code]


def test_one_refused_change_does_not_take_the_others_with_it():
    cluster = Cluster()
    cluster.topic(isr=[1, 2])
    stale = cluster.change(1)
    stale.partition = 9
    outcome = cluster.do(c.AlterIsr(1, 1, [stale, cluster.change(1, 2, 3)])).outcome
    assert outcome.value == [errors.UnknownTopicOrPartition.code, 0]


def test_a_shrink_below_the_minimum_keeps_the_removed_ones_eligible():
    cluster = Cluster()
    cluster.topic(min_insync=2)
    cluster.alter_isr(1)
    assert (cluster.partition.isr, cluster.partition.elr) == ([1], [2, 3])


# -- unclean election (A8) ---------------------------------------------------------------------------------------


def test_an_operator_may_elect_a_live_replica_at_the_price_of_records():
    cluster = Cluster()
    cluster.topic(isr=[1])
    cluster.fence(1)
    applied = cluster.do(c.UncleanElect(REF, 2), by=3)
    assert (cluster.partition.leader, cluster.partition.isr) == (2, [2])
    assert cluster.partition.leader_epoch == EPOCH + 2
    assert "data lost" in [event.what for event in applied.events]


def test_an_unclean_election_is_refused_while_there_is_a_leader():
    cluster = Cluster()
    cluster.topic(isr=[1])
    assert cluster.do(c.UncleanElect(REF, 2), by=3).outcome.code == errors.InvalidRequest.code
    assert cluster.partition.leader == 1


def test_only_a_live_replica_can_be_elected_uncleanly():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic(isr=[1])
    cluster.fence(1, 2)
    for broker in (2, 4):
        assert cluster.do(c.UncleanElect(REF, broker), by=3).outcome.code == errors.LeaderNotAvailable.code


# -- healing and moving (A9) -------------------------------------------------------------------------------------


def heal(cluster: Cluster, version: int | None = None) -> c.Outcome:
    epoch = cluster.partition.partition_epoch if version is None else version
    return cluster.do(c.Heal(REF, epoch)).outcome


def test_healing_recruits_the_least_loaded_live_broker():
    cluster = Cluster([1, 2, 3, 4])
    cluster.do(c.CreateTopic("load", b"l" * 16, 1, 4, 1, "disk"))
    cluster.do(c.CreateTopic("more", b"m" * 16, 1, 1, 1, "disk"))
    loaded = cluster.state.topics[b"m" * 16].partitions[0].replicas[0]
    cluster.state.topics[b"m" * 16].partitions[0].replicas = [3]
    assert loaded in (1, 2, 3, 4)
    cluster.topic([1, 2])
    cluster.fence(2)
    assert heal(cluster).value == 4
    assert (cluster.partition.replicas, cluster.partition.adding) == ([1, 2, 4], [4])


def test_the_dead_replica_is_dropped_only_when_its_successor_is_in_sync():
    cluster = Cluster([1, 2, 3])
    cluster.topic([1, 2])
    cluster.fence(2)
    heal(cluster)
    assert 2 in cluster.partition.replicas
    cluster.alter_isr(1, 3)
    p = cluster.partition
    assert (p.replicas, p.isr, p.adding, p.removing) == ([1, 3], [1, 3], [], [])


def test_a_replica_that_was_let_go_and_is_added_again_acknowledges_in_a_new_epoch():
    """It has deleted its copy; its leader may remember, or hear late, what it acknowledged before."""
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2])
    cluster.do(c.Reassign(REF, [1, 3]))
    assert cluster.partition.leader_epoch == EPOCH
    cluster.alter_isr(1, 2, 3)
    p = cluster.partition
    assert (p.replicas, p.leader, p.leader_epoch) == ([1, 3], 1, EPOCH + 1)
    cluster.fence(3)
    assert heal(cluster).value == 2
    cluster.fence(2)
    assert heal(cluster).value == 4  # broker 2, still alive, is let go before it is in sync
    assert (cluster.partition.leader, cluster.partition.leader_epoch) == (1, EPOCH + 2)


def test_healing_needs_a_version_a_leader_a_dead_replica_and_a_spare_broker():
    cluster = Cluster([1, 2, 3])
    cluster.topic([1, 2])
    assert heal(cluster).code == errors.StaleCommand.code  # nobody is dead
    cluster.fence(2)
    assert heal(cluster, version=99).code == errors.StaleCommand.code
    cluster.fence(3)
    assert heal(cluster).code == errors.InvalidReplicationFactor.code
    cluster.unfence(3)
    cluster.fence(1)
    assert heal(cluster).code == errors.StaleCommand.code  # nobody has the records
    assert cluster.partition.replicas == [1, 2]


def test_a_recruit_that_dies_before_it_is_in_sync_is_replaced():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2])
    cluster.fence(2)
    assert heal(cluster).value == 3
    assert heal(cluster).code == errors.StaleCommand.code  # it is on its way
    cluster.fence(3)
    assert heal(cluster).value == 4
    p = cluster.partition
    assert (p.replicas, p.adding, p.removing) == ([1, 2, 4], [4], [2])
    cluster.alter_isr(1, 4)
    assert cluster.partition.replicas == [1, 4]
    check_invariants(cluster.state)


def test_a_dead_recruit_is_waited_for_while_enough_replicas_live():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2])
    cluster.fence(2)
    heal(cluster)
    cluster.fence(3)
    cluster.unfence(2)
    assert heal(cluster).code == errors.StaleCommand.code


def test_a_move_ends_when_all_new_replicas_are_in_sync_and_the_leader_goes_last():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2])
    cluster.do(c.Reassign(REF, [3, 4]))
    cluster.alter_isr(1, 2, 3)
    assert cluster.partition.leader == 1
    cluster.alter_isr(1, 2, 3, 4)
    p = cluster.partition
    assert (p.replicas, p.isr, p.leader, p.leader_epoch) == ([3, 4], [3, 4], 3, EPOCH + 1)


def test_a_move_to_fewer_replicas_than_the_minimum_is_refused():
    cluster = Cluster()
    cluster.topic(min_insync=2)
    assert cluster.do(c.Reassign(REF, [1])).outcome.code == errors.InvalidReplicationFactor.code
    assert cluster.partition.replicas == [1, 2, 3]


def test_a_move_can_be_taken_back():
    cluster = Cluster([1, 2, 3])
    cluster.topic([1, 2])
    cluster.do(c.Reassign(REF, [1, 3]))
    cluster.do(c.Reassign(REF, [1, 2]))
    p = cluster.partition
    assert (p.replicas, p.adding, p.removing) == ([1, 2], [], [])


# -- topics and the rest -----------------------------------------------------------------------------------------


def create(cluster: Cluster, name: str = "a", **changes: Any) -> c.Outcome:
    fields: dict[str, Any] = {
        "name": name,
        "topic_id": name.encode().ljust(16, b"-")[:16],
        "partitions": 3,
        "replication_factor": 2,
        "min_insync_replicas": 1,
        "storage": "disk",
    }
    return cluster.do(c.CreateTopic(**(fields | changes))).outcome


def test_a_new_topic_is_placed_on_live_brokers_and_all_replicas_are_in_sync():
    cluster = Cluster([1, 2, 3])
    cluster.fence(3)
    assert create(cluster).code == 0
    for _, _, p in cluster.state.all_partitions():
        assert set(p.replicas) == {1, 2}
        assert (p.isr, p.leader, p.leader_epoch) == (p.replicas, p.replicas[0], 0)


def test_a_request_that_arrives_again_makes_no_second_topic():
    cluster = Cluster([1, 2, 3])
    assert create(cluster, "t").code == 0
    before = cluster.state.topics[cluster.state.names["t"]]
    assert create(cluster, "t").code == 0
    assert cluster.state.topics == {before.topic_id: before}


def test_a_request_that_arrives_after_its_topic_was_deleted_does_not_bring_it_back():
    cluster = Cluster([1, 2, 3])
    create(cluster, "t")
    assert cluster.do(c.DeleteTopic("t")).outcome.code == 0
    assert create(cluster, "t").code == errors.StaleCommand.code
    assert not cluster.state.topics


def test_a_deletion_by_id_leaves_a_topic_that_got_the_name_since():
    cluster = Cluster([1, 2, 3])
    create(cluster, "t")
    first = cluster.state.names["t"]
    cluster.do(c.DeleteTopic("t", first))
    create(cluster, "t", topic_id=b"second".ljust(16, b"-"))
    assert cluster.do(c.DeleteTopic("t", first)).outcome.code == errors.UnknownTopicOrPartition.code
    assert "t" in cluster.state.names


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "taken", "topic_id": b"another".ljust(16, b"-")}, errors.TopicExists),
        ({"topic_id": b"taken".ljust(16, b"-")}, errors.TopicExists),
        ({"name": "a.b"}, errors.InvalidTopic),  # a_b is there
        ({"name": "no good"}, errors.InvalidTopic),
        ({"partitions": 0}, errors.InvalidPartitions),
        ({"partitions": 2**31 - 1}, errors.InvalidPartitions),  # would keep every broker busy for hours
        ({"replication_factor": 0}, errors.InvalidReplicationFactor),
        ({"replication_factor": 4}, errors.InvalidReplicationFactor),
        ({"min_insync_replicas": 0}, errors.InvalidConfig),
        ({"min_insync_replicas": 3}, errors.InvalidConfig),
    ],
)
def test_a_topic_that_cannot_be_is_refused(changes: dict[str, Any], error: type[errors.ZmqueueError]):
    cluster = Cluster([1, 2, 3])
    create(cluster, "taken")
    create(cluster, "a_b")
    before = cluster.state.names.copy()
    assert create(cluster, **changes).code == error.code
    assert cluster.state.names == before


def test_partitions_are_only_added():
    cluster = Cluster()
    create(cluster)
    old = [list(p.replicas) for _, _, p in cluster.state.all_partitions()]
    topic_id = cluster.state.names["a"]
    assert cluster.do(c.CreatePartitions("a", topic_id, 2)).outcome.code == errors.InvalidPartitions.code
    assert cluster.do(c.CreatePartitions("a", topic_id, 2**31 - 1)).outcome.code == errors.InvalidPartitions.code
    applied = cluster.do(c.CreatePartitions("a", topic_id, 5))
    assert [key.partition for key in applied.partitions] == [3, 4]
    assert [p.replicas for _, _, p in cluster.state.all_partitions()][:3] == old
    again = cluster.do(c.CreatePartitions("a", topic_id, 5))
    assert (again.outcome.code, list(again.partitions)) == (0, []), "asked for again, by way of another broker"


def test_partitions_are_added_to_the_topic_that_was_meant():
    cluster = Cluster()
    create(cluster)
    assert cluster.do(c.CreatePartitions("a", b"z" * 16, 5)).outcome.code == errors.UnknownTopicOrPartition.code
    assert len(cluster.state.topic_named("a").partitions) == 3


def test_a_deleted_topic_can_be_made_again_as_another_topic():
    cluster = Cluster()
    create(cluster)
    applied = cluster.do(c.DeleteTopic("a"))
    assert len(applied.partitions) == 3
    assert create(cluster, topic_id=b"z" * 16).code == 0
    assert cluster.do(c.DeleteTopic("b")).outcome.code == errors.UnknownTopicOrPartition.code


def test_producer_ids_are_never_given_twice():
    cluster = Cluster()
    first = cluster.do(c.AllocateProducerIds(10)).outcome.value
    assert cluster.do(c.AllocateProducerIds(1)).outcome.value == first + 10


# -- the log of commands (A1, section 1) -------------------------------------------------------------------------


def test_a_repeated_command_returns_the_first_outcome_and_changes_nothing():
    cluster = Cluster()
    data = cluster.envelope(c.AllocateProducerIds(5), by=1)
    first = cluster.state.apply(data)
    again = cluster.state.apply(data)
    assert (again.duplicate, again.outcome.value) == (True, first.outcome.value)
    assert cluster.state.next_producer_id == first.outcome.value + 5


def test_a_rejection_is_remembered_too():
    """Else a command refused at first could be accepted when it arrives a second time."""
    cluster = Cluster()
    data = cluster.envelope(c.DeleteTopic("t"), by=1)
    assert cluster.state.apply(data).outcome.code == errors.UnknownTopicOrPartition.code
    cluster.topic()
    assert cluster.state.apply(data).outcome.code == errors.UnknownTopicOrPartition.code
    assert "t" in cluster.state.names


def test_a_command_that_a_newer_one_overtook_is_never_applied():
    cluster = Cluster()
    late = cluster.envelope(c.AllocateProducerIds(5), by=1)
    cluster.do(c.AllocateProducerIds(1), by=1)
    before = cluster.state.next_producer_id
    assert cluster.state.apply(late).outcome.code == errors.StaleCommand.code
    assert cluster.state.next_producer_id == before


def test_a_life_that_has_not_registered_is_not_listened_to():
    cluster = Cluster()
    data = c.encode(c.Envelope(1, 77, 1, c.AllocateProducerIds(5)))
    assert cluster.state.apply(data).outcome.code == errors.StaleCommand.code
    assert cluster.state.next_producer_id == 1


def test_a_digest_that_differs_shows_the_divergence():
    one, other = Cluster(), Cluster()
    for cluster in (one, other):
        cluster.do(c.Digest(*cluster.state.mark()), by=1)
    other.state.next_producer_id += 1
    good = one.state.mark()
    for cluster in (one, other):
        cluster.do(c.Digest(*good), by=1)  # about the time before: all agreed then
    next_mark = one.state.mark()
    assert not one.do(c.Digest(*next_mark), by=1).diverged
    assert other.do(c.Digest(*next_mark), by=1).diverged


def test_after_a_snapshot_nothing_is_held_against_anyone_until_the_next_digest():
    cluster = Cluster()
    cluster.do(c.Digest(*cluster.state.mark()), by=1)
    copy = ClusterState()
    copy.load(cluster.state.encode())
    assert copy.mark() == (1, b"")


def test_a_snapshot_of_a_newer_format_is_refused_and_leaves_the_state_alone():
    cluster = Cluster()
    data = cluster.state.encode()
    before = cluster.state.hash()
    with pytest.raises(errors.FutureFormat):
        cluster.state.load(data.replace(b"fformat\x01", b"fformat\x02"))
    with pytest.raises(errors.BadFrame):
        cluster.state.load(data[:-1])
    assert cluster.state.hash() == before


def test_a_snapshot_is_seen_by_whoever_holds_a_table_of_the_state():
    """A leader that outlives the snapshot would judge its followers by broker epochs of long ago."""
    cluster = Cluster()
    held = cluster.state.brokers
    newer = Cluster()
    newer.start(2, life=2)
    cluster.state.load(newer.state.encode())
    assert held is cluster.state.brokers
    assert held[2].epoch == 2


# -- any commands at all -----------------------------------------------------------------------------------------

TOPIC_IDS = [bytes([n]) * 16 for n in b"abc"]


def any_command(rng: random.Random, state: ClusterState) -> Any:
    """Mostly what a broker would ask for at this moment, which is often accepted; else something well-formed."""
    return fitting_command(rng, state) if rng.random() < 0.6 else stray_command(rng)


def fitting_command(rng: random.Random, state: ClusterState) -> Any:
    known = {b.id: b.epoch for b in state.brokers.values()}
    broker = rng.choice(sorted(known))
    some = [c.BrokerRef(b, known[b]) for b in sorted(known) if rng.random() < 0.4]
    partitions = list(state.all_partitions())
    if not partitions or rng.random() < 0.05:
        size = rng.randint(1, max(1, len(state.live_brokers())))
        storage = rng.choice(["disk", "memory"])
        return c.CreateTopic(rng.choice("abc"), rng.choice(TOPIC_IDS), 2, size, rng.randint(1, size), storage)
    key, topic, p = rng.choice(partitions)
    ref = c.PartitionRef(*key)
    replica = rng.choice(p.replicas)
    isr = [c.BrokerRef(b, known[b]) for b in p.replicas if b == p.leader or (state.is_live(b) and rng.random() < 0.7)]
    return rng.choice(
        [
            registration(
                broker, rng.randint(1, 6), unclean=rng.random() < 0.3, lost=[ref] if rng.random() < 0.3 else []
            ),
            c.Fence(some),
            c.Unfence(broker, known[broker]),
            c.Unfence(broker, known[broker]),
            c.BeginShutdown(broker, known[broker]),
            c.ReplicaLost(replica, known[replica], ref),
            c.AlterIsr(p.leader, known.get(p.leader, 0), [c.IsrChange(*key, p.leader_epoch, p.partition_epoch, isr)]),
            c.AlterIsr(p.leader, known.get(p.leader, 0), [c.IsrChange(*key, p.leader_epoch, p.partition_epoch, isr)]),
            c.Resign(p.leader, known.get(p.leader, 0), ref, p.leader_epoch),
            c.Heal(ref, p.partition_epoch),
            c.Reassign(ref, [one.broker for one in some]),
            c.UncleanElect(ref, replica),
            c.SetConfig(
                topic.name,
                topic.topic_id,
                topic.config_version,
                {"min.insync.replicas": str(rng.randint(1, topic.replication_factor))},
            ),
        ]
    )


def stray_command(rng: random.Random) -> Any:
    broker, epoch, number = rng.randint(-1, 6), rng.randint(-1, 4), rng.randint(0, 4)
    ref = c.PartitionRef(rng.choice(TOPIC_IDS), number)
    refs = [c.BrokerRef(rng.randint(-1, 6), rng.randint(-1, 3)) for _ in range(rng.randint(0, 3))]
    name = rng.choice(["a", "b", "a.b", "a_b", "", "no good", "__x"])
    return rng.choice(
        [
            registration(broker, rng.randint(1, 4)),
            c.Register(broker, number, [], b"", "h", 0, 0, 0, False, [ref]),
            c.Fence(refs),
            c.Unfence(broker, epoch),
            c.BeginShutdown(broker, epoch),
            c.ReplicaLost(broker, epoch, ref),
            c.AlterIsr(broker, epoch, [c.IsrChange(ref.topic_id, number, epoch, number, refs)]),
            c.ElectPreferred(),
            c.Resign(broker, epoch, ref, epoch),
            c.Heal(ref, number),
            c.Reassign(ref, [one.broker for one in refs]),
            c.CreateTopic(name, ref.topic_id, number, rng.randint(0, 6), rng.randint(0, 4), "disk"),
            c.CreatePartitions(name, ref.topic_id, number),
            c.DeleteTopic(name),
            c.SetConfig(name, ref.topic_id, number, {"retention.ms": rng.choice([None, "x", "5"])}),
            c.AllocateProducerIds(number),
            c.UncleanElect(ref, broker),
            c.Barrier(number),
            c.Digest(number, b"x" * number),
        ]
    )


@pytest.mark.parametrize("seed", range(16))
def test_any_commands_leave_every_broker_in_the_same_sound_state(seed: int):
    rng = random.Random(seed)
    cluster = Cluster([0, 1, 2, 3])
    twin = ClusterState()
    twin.load(cluster.state.encode())
    versions: dict[Any, tuple[int, int, Any]] = {}
    for _ in range(120):
        data = cluster.envelope(any_command(rng, cluster.state), rng.randint(0, 4))
        applied = cluster.state.apply(data)
        assert twin.apply(data).outcome == applied.outcome
        assert twin.hash() == cluster.state.hash()
        check_invariants(cluster.state)
        check_epochs(cluster.state, versions)
        check_duplicate(cluster.state, twin, data, applied.outcome)
        if rng.random() < 0.05:
            copy = ClusterState()
            copy.load(cluster.state.encode())
            assert copy.hash() == cluster.state.hash()
            twin = copy


def check_epochs(state: ClusterState, versions: dict[Any, tuple[int, int, Any]]) -> None:
    """Epochs never go back, and whoever knows a partition's epochs knows its leader, ISR, ELR and replicas."""
    for key, _, p in state.all_partitions():
        shape = (p.leader, tuple(p.isr), tuple(p.elr), tuple(p.replicas))
        leader_epoch, version, old = versions.get(key, (p.leader_epoch, p.partition_epoch, shape))
        assert p.leader_epoch >= leader_epoch
        assert p.partition_epoch >= version
        assert p.partition_epoch > version or shape == old
        assert p.leader_epoch > leader_epoch or shape[0] == old[0]
        versions[key] = (p.leader_epoch, p.partition_epoch, shape)
    for gone in [key for key in versions if state.partition(key) is None]:
        del versions[gone]


def check_duplicate(state: ClusterState, twin: ClusterState, data: bytes, outcome: c.Outcome) -> None:
    index = state.index
    before = state.hash()
    again = state.apply(data)
    twin.apply(data)
    assert again.outcome == outcome
    state.index, twin.index = index, index
    assert state.hash() == before


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_applied_without_harm(noise: bytes, at: int, value: int):
    cluster = Cluster([1, 2])
    cluster.topic([1, 2])
    good = bytearray(cluster.envelope(c.AlterIsr(1, 1, [cluster.change(1)]), by=1))
    good[at % len(good)] = value
    for data in (noise, bytes(good), bytes(good[: at % len(good)])):
        applied = cluster.state.apply(data)
        assert applied.envelope is not None or applied.outcome.code == errors.InvalidRequest.code
        check_invariants(cluster.state)
