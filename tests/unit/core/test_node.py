"""A whole broker's decisions: its registration, its replicas, its commands, its place in the cluster."""

from __future__ import annotations

from tests.unit.core.builders import (
    CLUSTER_ID,
    EPOCH,
    KEY,
    LATER_MS,
    REF,
    World,
    batch,
    fetch,
    kinds,
    log_of,
    of,
    push,
    records,
    registration,
)
from zmqueue import errors
from zmqueue.core import commands as c
from zmqueue.core.cluster import PartitionState, TopicState
from zmqueue.core.effects import (
    AnswerCommand,
    AnswerFetch,
    AnswerProduce,
    CloseLog,
    Configure,
    Effect,
    Halt,
    OpenLog,
    PublishBeacon,
    Registered,
    SendFetch,
    SendHeartbeat,
    TopicsChanged,
)
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import ISR_CHANGES_PER_COMMAND
from zmqueue.model import PartitionKey
from zmqueue.wire.messages import AckRow, Acks, Beacon, BeaconRow, HeartbeatReply


def led(**options) -> World:
    """Broker 1 leads, 2 follows; all live."""
    world = World()
    world.live()
    world.cluster.topic([1, 2], **options)
    world.cluster.state.names["t"] = KEY.topic_id
    world.node.on_opened(KEY, log_of(), world.now_ms)
    assert world.node.replicas[KEY].leading
    return world


def produce(world: World, token: str = "p", acks: int = -1) -> list[Effect]:
    return world.node.on_produce(KEY, token, batch(), acks, LATER_MS, world.now_ms)


# -- registration (A3) -------------------------------------------------------------------------------------------


def test_nothing_is_touched_before_the_own_registration_is_applied():
    world = World()
    world.cluster.topic([2, 1, 3])
    world.node.adopt_log(KEY, log_of((EPOCH, 10)))
    world.node.on_raft(2, False, 1, 0)
    effects = world.step() + world.do(c.Fence(world.cluster.refs(2)), by=3) + world.step(1_000)
    assert world.node.replicas == {}
    assert {type(e).__name__ for e in effects} == {"Propose"}
    assert world.wishes() == [world.node._registration] * len(world.proposed)


def test_after_the_registration_the_broker_remembers_it_and_takes_up_its_partitions():
    world = World()
    world.cluster.topic([2, 1])
    log = log_of((EPOCH, 10))
    world.node.adopt_log(KEY, log)
    effects = world.turn()
    assert kinds(effects)[:2] == [type(effects[0]), Registered]
    assert world.node.epoch == 1
    assert world.node.replicas[KEY].log is log
    assert of(SendFetch, effects)[0].request.broker_epoch == 1
    assert not world.node.is_live


def test_a_partition_without_a_folder_is_opened_and_then_followed():
    world = World()
    world.cluster.topic([2, 1])
    assert of(OpenLog, world.turn()) == [OpenLog(KEY, "disk", {})]
    assert world.do(c.ElectPreferred(), by=2) == []
    assert of(SendFetch, world.node.on_opened(KEY, log_of(), 0))


def test_a_log_hears_the_settings_of_its_topic_and_every_change_of_them():
    world = World()
    world.cluster.topic([2, 1])
    world.node.adopt_log(KEY, log_of((EPOCH, 10)))
    assert of(Configure, world.turn()) == [Configure(KEY, {})]
    changed = c.SetConfig("t", KEY.topic_id, 0, {"retention.ms": "5"})
    assert of(Configure, world.do(changed, by=2)) == [Configure(KEY, {"retention.ms": "5"})]
    assert of(Configure, world.do(c.ElectPreferred(), by=2)) == []


def test_settings_that_change_while_a_log_is_opened_are_not_lost():
    world = World()
    world.cluster.topic([2, 1])
    assert of(OpenLog, world.turn()) == [OpenLog(KEY, "disk", {})]
    assert world.do(c.SetConfig("t", KEY.topic_id, 0, {"retention.ms": "5"}), by=2) == []
    assert of(Configure, world.node.on_opened(KEY, log_of(), 0)) == [Configure(KEY, {"retention.ms": "5"})]


def test_a_new_log_start_is_news_for_followers():
    world = led()
    world.step(10_000)
    log = world.node.replicas[KEY].log
    log.log_end = log.durable_end = log.high_watermark = 5
    world.node.on_log_start(KEY, 3, 3)
    assert log.log_start == 3
    (beacon,) = of(PublishBeacon, world.step(1_000))
    assert beacon.rows[0].log_start == 3


def test_folders_of_partitions_that_moved_away_are_removed():
    world = World()
    world.cluster.topic([2, 3])
    world.node.adopt_log(KEY, log_of((EPOCH, 10)))
    assert of(CloseLog, world.turn()) == [CloseLog(KEY, delete=True)]


def test_a_refused_registration_stops_the_broker():
    world = World()
    world.cluster.register(1, life=9)  # a later life of ours knows of us
    assert of(Halt, world.turn())


def test_a_broker_whose_metadata_differs_stops():
    world = led()
    world.do(c.Digest(0, b""), by=2)
    assert of(Halt, world.do(c.Digest(1, b"another hash"), by=2))


def test_a_late_registration_of_a_former_life_is_repaired():
    """One that the data folder does not remember, so that the cluster cannot know it for old."""
    world = led()
    produce(world)
    effects = world.do(registration(1, incarnation=77, previous=[], dir_id=b"old"))
    assert of(AnswerProduce, effects)[0].result.error == errors.NotLeader.code
    assert world.node.replicas == {}
    assert not world.node.is_registered
    world.now_ms += 1_000
    assert of(SendHeartbeat, world.node.step(world.now_ms)) == []
    world.proposed = [world.node._proposer.sent.data] if world.node._proposer.sent else []
    world.commit()
    mine = world.cluster.state.brokers[1]
    assert (mine.incarnation, mine.epoch) == (1001, 3)
    assert world.node.epoch == 3
    assert KEY in world.node.replicas


def test_a_missing_copy_is_reported_before_the_first_heartbeat():
    """The cluster counts on it: as soon as we are unfenced we could be elected, with nothing."""
    world = World(life=2)
    world.cluster.register(1)
    world.cluster.topic([2, 1], min_insync=2, isr=[2], elr=[1])
    world.node.on_raft(2, False, 1, 0)
    world.step()
    world.apply(world.proposed.pop())
    assert 1 in world.cluster.partition.elr
    effects = world.step(1_000)
    assert of(SendHeartbeat, effects) == []
    assert world.wishes() == [c.ReplicaLost(1, 2, REF)]
    world.commit()
    assert world.cluster.partition.elr == []
    assert of(SendHeartbeat, world.step(1_000)) == [SendHeartbeat(2)]


def test_a_copy_that_is_there_is_not_reported():
    world = World(life=2)
    world.cluster.register(1)
    world.cluster.topic([2, 1], min_insync=2, isr=[2], elr=[1])
    world.node.adopt_log(KEY, log_of((EPOCH, 10)))
    world.turn()
    assert world.cluster.partition.elr == [1]


def test_a_memory_partition_that_begins_anew_misses_nothing():
    """To report it would cost its eligibility, and keep it offline until another replica comes."""
    world = World(life=2)
    world.cluster.register(1)
    world.cluster.topic([2, 1], min_insync=2, storage="memory")
    world.cluster.register(2, life=2)
    world.node.on_raft(3, False, 1, 0)
    world.turn()
    assert world.cluster.partition.elr == [2, 1]
    world.do(c.Unfence(1, 2), by=3)
    assert world.cluster.partition.leader == 1


def test_a_report_of_a_former_registration_does_not_count_as_made():
    world = World(life=2)
    world.cluster.register(1)
    world.cluster.topic([2, 1], min_insync=2, isr=[2], elr=[1])
    world.node.on_raft(2, False, 1, 0)
    world.turn()
    world.node._reporting.add(KEY)
    world.node._on_own_command(c.ReplicaLost(1, 1, REF), c.Outcome(errors.StaleCommand.code), 0)
    assert of(SendHeartbeat, world.step(1_000)) == []


def test_damage_found_while_running_is_reported():
    world = led()
    world.node.on_lost(KEY)
    world.step()
    assert world.wishes() == [c.ReplicaLost(1, 1, REF)]


# -- heartbeats and the lease ------------------------------------------------------------------------------------


def test_heartbeats_go_to_the_controller_in_their_time_and_at_once_to_a_new_one():
    world = led()
    assert of(SendHeartbeat, world.step(250)) == [SendHeartbeat(2)]
    assert of(SendHeartbeat, world.step(200)) == []
    world.node.on_raft(3, False, 2, world.now_ms)
    assert of(SendHeartbeat, world.step(50)) == [SendHeartbeat(3)]
    world.node.on_raft(-1, False, 2, world.now_ms)
    assert of(SendHeartbeat, world.step(1_000)) == []


def test_an_answered_heartbeat_grants_the_lease_from_when_it_was_sent():
    world = led()
    assert not world.node.readable(0)
    world.node.on_heartbeat_reply(HeartbeatReply(False, 2, 500))
    assert not world.node.readable(500)
    world.node.on_heartbeat_reply(HeartbeatReply(True, 2, 500))
    assert world.node.readable(3_500)
    assert not world.node.readable(3_501)


def test_the_controller_grants_itself_a_lease_and_answers_others():
    world = led()
    world.node.on_raft(1, True, 2, world.now_ms)
    assert not world.heartbeat(2)
    world.turn(50)  # the barrier is committed
    assert world.heartbeat(2)
    world.turn(250)
    assert world.node.readable(world.now_ms)


def test_a_heartbeat_of_another_cluster_is_refused():
    world = led()
    world.node.on_raft(1, True, 2, world.now_ms)
    world.turn(50)
    beat = world.node.heartbeat(0)
    beat.cluster_id = "other"
    assert not world.node.on_heartbeat(beat, world.now_ms).ok


def test_the_controller_fences_who_is_silent_and_unfences_who_returns():
    world = led()
    world.node.on_raft(1, True, 2, world.now_ms)
    for _ in range(10):
        world.turn(200)
        world.heartbeat(3)
    assert not world.cluster.state.is_live(2)
    assert world.cluster.state.is_live(3)
    assert world.cluster.state.is_live(1)
    world.heartbeat(2)
    world.turn(50)
    assert world.cluster.state.is_live(2)


def test_a_stall_of_the_process_fences_nobody_and_shrinks_nothing():
    world = led()
    world.node.on_raft(1, True, 2, world.now_ms)
    world.turn(50)
    produce(world)
    world.turn(60_000)
    world.turn(50)
    assert world.cluster.state.is_live(2)
    assert world.cluster.partition.isr == [1, 2]


# -- ISR changes -------------------------------------------------------------------------------------------------


def test_an_isr_change_goes_through_raft_and_ends_when_it_is_applied():
    world = led(isr=[1])
    world.ack(2, 0)
    world.step()
    (command,) = world.wishes()
    assert [[ref.broker for ref in change.isr] for change in command.changes] == [[1, 2]]
    leader = world.node.replicas[KEY].leading
    assert leader is not None
    assert leader.pending is not None
    world.commit()
    assert world.cluster.partition.isr == [1, 2]
    assert leader.pending is None
    assert leader.isr == [1, 2]


def test_a_refused_isr_change_ends_too():
    world = led(isr=[1])
    world.ack(2, 0)
    world.step()
    world.do(c.Fence(world.cluster.refs(2)), by=3)
    world.commit()
    leader = world.node.replicas[KEY].leading
    assert leader is not None
    assert leader.pending is None
    assert world.cluster.partition.isr == [1]


def many(world: World, count: int) -> list[PartitionKey]:
    """So many partitions, led by us alone, that 2 is about to join."""
    partitions = [PartitionState([1, 2], 1, EPOCH, 0, [1]) for _ in range(count)]
    topic_id = b"m" * 16
    world.cluster.state.topics[topic_id] = TopicState("m", topic_id, 2, 1, "disk", {}, partitions)
    world.cluster.state.names["m"] = topic_id
    keys = [PartitionKey(topic_id, number) for number in range(count)]
    for key in keys:
        world.node.on_opened(key, log_of(), world.now_ms)
    return keys


def test_isr_changes_of_many_partitions_travel_together():
    world = led()
    keys = many(world, ISR_CHANGES_PER_COMMAND + 50)
    world.node.on_acks(Acks(CLUSTER_ID, 2, 1, [AckRow(*key, EPOCH, 0) for key in keys]), 0)
    before = world.cluster.state.index
    world.turn()
    assert world.cluster.state.index == before + 2
    assert all(p.isr == [1, 2] for p in world.cluster.state.topics[b"m" * 16].partitions)
    largest = max(len(world.cluster.envelope(command, 1)) for command in [c.AlterIsr(1, 1, alterations(world))])
    assert largest < 32 * 1024  # what Raft takes


def alterations(world: World) -> list[c.IsrChange]:
    refs = [c.BrokerRef(999, 2**31 - 1)] * 3
    return [c.IsrChange(b"m" * 16, 99_999, 2**31 - 1, 2**31, refs)] * ISR_CHANGES_PER_COMMAND


def test_isr_changes_do_not_wait_for_the_commands_of_clients():
    world = led(isr=[1])
    for token in "abc":
        world.node.submit(c.AllocateProducerIds(1), token, LATER_MS)
    world.step()
    world.ack(2, 0)
    effects = world.apply(world.proposed.pop())
    assert of(AnswerCommand, effects)
    world.step()
    assert isinstance(world.wishes()[0], c.AlterIsr)


def test_a_snapshot_ends_the_isr_change_that_it_holds():
    world = led(isr=[1])
    world.ack(2, 0)
    world.step()
    newer = ClusterState()
    newer.load(world.cluster.state.encode())
    newer.apply(world.proposed.pop())
    world.cluster.state.load(newer.encode())
    world.node.on_restored(world.now_ms)
    leader = world.node.replicas[KEY].leading
    assert leader is not None
    assert leader.pending is None
    assert leader.isr == [1, 2]


def test_a_snapshot_may_hold_anything():
    world = led()
    produce(world)
    newer = ClusterState()
    newer.load(world.cluster.state.encode())
    del newer.topics[KEY.topic_id]
    world.cluster.state.load(newer.encode())
    effects = world.node.on_restored(world.now_ms)
    assert of(AnswerProduce, effects)[0].result.error == errors.NotLeader.code
    assert of(CloseLog, effects) == [CloseLog(KEY, delete=True)]
    assert world.node.replicas == {}


def test_a_snapshot_that_holds_the_registration_completes_it():
    world = World()
    world.cluster.topic([2, 1])
    world.step()
    newer = ClusterState()
    newer.load(world.cluster.state.encode())
    newer.apply(world.proposed.pop())
    world.cluster.state.load(newer.encode())
    effects = world.node.on_restored(0)
    assert kinds(effects) == [Registered, OpenLog, TopicsChanged]
    assert world.node.epoch == 1


def test_after_a_snapshot_a_leader_judges_its_followers_by_it():
    world = led(isr=[1])
    newer = ClusterState()
    newer.load(world.cluster.state.encode())
    newer.brokers[2].epoch = 2
    world.cluster.state.load(newer.encode())
    world.node.on_restored(world.now_ms)
    world.ack(2, 0)
    world.step()
    assert [ref.epoch for ref in world.wishes()[0].changes[0].isr] == [1, 2]


# -- partitions come and go --------------------------------------------------------------------------------------


def test_a_deleted_topic_answers_who_waits_and_removes_its_files():
    world = led()
    produce(world)
    effects = world.do(c.DeleteTopic("t"), by=2)
    assert of(AnswerProduce, effects)
    assert of(CloseLog, effects) == [CloseLog(KEY, delete=True)]
    (answer,) = of(AnswerProduce, produce(world))
    assert answer.result.error == errors.UnknownTopicId.code


def test_a_topic_deleted_while_its_log_is_opened_is_closed_when_it_is_open():
    world = World()
    world.cluster.topic([2, 1])
    world.turn()
    world.do(c.DeleteTopic("t"), by=2)
    assert world.node.on_opened(KEY, log_of(), 0)[-1] == CloseLog(KEY, delete=True)


def test_a_partition_that_is_led_elsewhere_says_where():
    world = World()
    world.cluster.topic([2, 3])
    world.turn()
    (answer,) = of(AnswerProduce, produce(world))
    assert (answer.result.error, answer.result.leader) == (errors.NotLeader.code, 2)


# -- who is listened to (A5, B5) ---------------------------------------------------------------------------------


def test_former_lives_and_other_clusters_are_not_listened_to():
    world = led(isr=[1, 2])
    produce(world)
    world.node.on_flushed(KEY, 1, world.now_ms)
    world.do(registration(2, 2))
    world.do(c.Unfence(2, 2))
    old = Acks(CLUSTER_ID, 2, 1, [AckRow(*KEY, EPOCH, 1)])
    assert world.node.on_acks(old, 0) == []
    assert world.node.on_acks(Acks("other", 2, 2, old.rows), 0) == []
    (refused,) = of(AnswerFetch, world.node.on_follower_fetch("f", fetch(2, 0, broker_epoch=1), 0))
    assert refused.response.error == errors.FencedEpoch.code
    leader = world.node.replicas[KEY].leading
    assert leader is not None
    assert leader.followers == {}


def test_pushes_and_beacons_of_a_former_life_of_the_leader_are_not_listened_to():
    world = World()
    world.cluster.topic([2, 1])
    world.node.adopt_log(KEY, log_of())
    world.turn()
    follower = world.node.replicas[KEY].following
    assert follower is not None
    follower.established, follower._fetching = True, False
    world.cluster.state.brokers[2].epoch = 2
    batches = records(0, 1)
    assert world.node.on_push(KEY, push(batches, -1, leader=2), batches, 0) == []
    beacon = Beacon(CLUSTER_ID, 2, 1, [BeaconRow(*KEY, EPOCH, 5, 5, 0)])
    assert world.node.on_beacon(beacon, 0) == []
    beacon.broker_epoch = 2
    assert of(SendFetch, world.node.on_beacon(beacon, 0))


# -- the beacon --------------------------------------------------------------------------------------------------


def rows(effects: list[Effect]) -> list[BeaconRow]:
    return [row for effect in of(PublishBeacon, effects) for row in effect.rows]


def test_the_beacon_lists_a_partition_until_all_live_followers_have_acknowledged():
    world = led()
    produce(world)
    world.node.on_flushed(KEY, 1, world.now_ms)
    for _ in range(3):
        assert rows(world.step(100)) == [BeaconRow(*KEY, EPOCH, 1, 0, 0)]
    world.ack(2, 1)
    assert rows(world.step(100)) == [BeaconRow(*KEY, EPOCH, 1, 1, 0)]  # once more, for the watermark
    assert rows(world.step(100)) == []


def test_a_fetch_is_answered_by_a_beacon_as_well_so_that_a_lost_acknowledgement_is_repeated():
    world = led()
    produce(world)
    world.node.on_flushed(KEY, 1, world.now_ms)
    world.ack(2, 1)
    world.step(100)
    assert rows(world.step(100)) == []
    world.node.on_follower_fetch("token", fetch(2, 1, EPOCH), world.now_ms)
    assert rows(world.step(100)) == [BeaconRow(*KEY, EPOCH, 1, 1, 0)]


def test_the_beacon_does_not_wait_for_a_fenced_follower():
    world = led()
    produce(world)
    world.do(c.Fence(world.cluster.refs(2)), by=3)
    world.step(100)
    assert rows(world.step(100)) == []


def test_the_beacon_keeps_its_time():
    world = led()
    world.step(100)
    produce(world)
    assert rows(world.step(50)) == []
    assert rows(world.step(50)) != []


# -- leaving -----------------------------------------------------------------------------------------------------


def test_a_broker_that_leaves_hands_over_first():
    world = led()
    world.node.leave()
    assert not world.node.has_left
    world.turn()
    assert world.node.has_left
    assert world.cluster.partition.leader == 2


def test_a_full_disk_asks_another_to_lead():
    world = led()
    produce(world)
    log = log_of()
    effects = world.node.on_append_failed(KEY, errors.StorageFull.code, 0, log.epochs, log.producers, 0)
    assert of(AnswerProduce, effects)[0].result.error == errors.StorageFull.code
    world.turn()
    assert world.cluster.partition.leader == 2
