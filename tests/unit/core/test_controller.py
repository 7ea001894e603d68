"""Rules A2, A4 and A9 as the broker that leads Raft keeps them: when it asks for what."""

from __future__ import annotations

from typing import Any

from tests.unit.core.builders import CLUSTER_ID, CONFIG, KEY, REF, Cluster
from zmqueue.config import RaftConfig
from zmqueue.core import commands as c
from zmqueue.core.controller import Controller
from zmqueue.wire.messages import Heartbeat

RAFT = RaftConfig()


def beat(controller: Controller, broker: int, now_ms: int = 0, *, epoch: int | None = None, index: int | None = None):
    state = controller._state
    sent = Heartbeat(
        CLUSTER_ID,
        broker,
        state.brokers[broker].epoch if epoch is None else epoch,
        state.index if index is None else index,
        0,
    )
    return controller.on_heartbeat(sent, now_ms)


def fresh(cluster: Cluster) -> Controller:
    return Controller(1, cluster.state, CONFIG, RAFT)


def active(cluster: Cluster, now_ms: int = 0) -> Controller:
    controller = fresh(cluster)
    controller.on_raft(True, 1, now_ms)
    controller.on_own_command(c.Barrier(1), now_ms)
    assert controller.is_active
    return controller


def fenced(asks: list[Any]) -> list[int]:
    return [ref.broker for ask in asks if isinstance(ask, c.Fence) for ref in ask.brokers]


def keep_alive(controller: Controller, until_ms: int, brokers: tuple[int, ...], since_ms: int = 0) -> list[Any]:
    asks: list[Any] = []
    for now_ms in range(since_ms, until_ms, 250):
        for broker in brokers:
            asks += beat(controller, broker, now_ms)[1]
        asks += controller.tick(now_ms)
    return asks


# -- taking over (A2) --------------------------------------------------------------------------------------------


def test_on_taking_over_a_barrier_is_asked_for_once_per_term():
    controller = fresh(Cluster())
    assert controller.on_raft(True, 3, 0) == [c.Barrier(3)]
    assert controller.on_raft(True, 3, 10) == []
    assert controller.on_raft(True, 4, 20) == [c.Barrier(4)]


def test_before_its_barrier_is_applied_it_does_nothing():
    controller = fresh(Cluster())
    controller.on_raft(True, 3, 0)
    assert controller.tick(60_000) == []
    assert beat(controller, 2, 60_000) == (False, [])
    controller.on_own_command(c.Barrier(2), 60_000)  # of a former term
    assert not controller.is_active


def test_after_the_barrier_everyone_has_a_full_session():
    controller = fresh(Cluster())
    controller.on_raft(True, 3, 0)
    controller.on_own_command(c.Barrier(3), 10_000)
    assert fenced(controller.tick(10_000 + CONFIG.session_ms)) == []
    assert fenced(controller.tick(10_001 + CONFIG.session_ms)) == [1, 2, 3]


def test_right_after_the_barrier_a_broken_connection_still_counts():
    controller = fresh(Cluster())
    controller.on_link(3, False, 9_000)
    controller.on_raft(True, 3, 9_900)
    controller.on_own_command(c.Barrier(3), 10_000)
    assert fenced(controller.tick(10_000)) == [3], "it was the controller before, and has been silent for long"


def test_a_connection_that_broke_just_before_the_barrier_counts_from_then():
    controller = fresh(Cluster())
    controller.on_raft(True, 3, 9_900)
    controller.on_link(3, False, 9_950)
    controller.on_link(3, False, 9_990)
    controller.on_own_command(c.Barrier(3), 10_000)
    assert fenced(controller.tick(9_950 + CONFIG.silence_ms)) == []
    assert fenced(controller.tick(9_951 + CONFIG.silence_ms)) == [3]


def test_who_is_heard_before_the_barrier_has_a_full_session_although_no_connection_to_it_stands():
    controller = fresh(Cluster())
    controller.on_link(3, False, 1_000)
    controller.on_raft(True, 3, 9_900)
    assert beat(controller, 3, 9_950) == (False, [])
    controller.on_own_command(c.Barrier(3), 10_000)
    assert fenced(controller.tick(10_000 + CONFIG.session_ms)) == []


def test_a_connection_that_is_there_again_counts_no_longer():
    controller = fresh(Cluster())
    controller.on_link(3, False, 1_000)
    controller.on_link(3, True, 2_000)
    controller.on_raft(True, 3, 9_900)
    controller.on_own_command(c.Barrier(3), 10_000)
    assert fenced(controller.tick(10_000 + CONFIG.session_ms)) == []


def test_who_no_longer_leads_raft_does_nothing():
    controller = active(Cluster())
    controller.on_raft(False, 2, 0)
    assert controller.tick(60_000) == []
    assert beat(controller, 2) == (False, [])


def test_a_new_term_needs_a_new_barrier():
    controller = active(Cluster())
    controller.on_raft(True, 2, 100)
    assert not controller.is_active


# -- failure detection (A4) --------------------------------------------------------------------------------------


def test_a_broker_that_is_silent_for_a_session_is_fenced_under_its_epoch():
    cluster = Cluster()
    controller = active(cluster)
    assert fenced(keep_alive(controller, 1_500, (1, 2))) == []
    (ask,) = controller.tick(1_501)
    assert ask == c.Fence([c.BrokerRef(3, 1)])


def test_a_silent_broker_whose_connection_is_closed_is_fenced_sooner():
    controller = active(Cluster())
    keep_alive(controller, 1_000, (1, 2, 3))
    controller.on_link(3, False, 750)
    assert fenced(controller.tick(750 + CONFIG.silence_ms)) == []
    assert fenced(controller.tick(751 + CONFIG.silence_ms)) == [3]


def test_a_heartbeat_that_was_under_way_when_its_sender_died_does_not_hide_the_death():
    controller = active(Cluster())
    keep_alive(controller, 1_000, (1, 2, 3))
    controller.on_link(3, False, 800)
    beat(controller, 3, 820)
    assert fenced(controller.tick(820 + CONFIG.silence_ms)) == []
    assert fenced(controller.tick(821 + CONFIG.silence_ms)) == [3]


def test_a_closed_connection_alone_is_not_enough():
    controller = active(Cluster())
    controller.on_link(3, False, 0)
    for now_ms in range(0, 5_000, 250):
        for broker in (1, 2, 3):
            beat(controller, broker, now_ms)
        assert fenced(controller.tick(now_ms + 200)) == []


def test_a_fenced_broker_is_not_fenced_again():
    cluster = Cluster()
    cluster.fence(3)
    controller = active(cluster)
    assert fenced(controller.tick(60_000)) == [1, 2]


def test_a_stall_of_the_controller_fences_nobody():
    controller = active(Cluster())
    keep_alive(controller, 1_000, (1, 2, 3))
    controller.on_link(2, False, 1_000)
    controller.on_stall(60_000)
    assert fenced(controller.tick(60_000)) == []
    assert fenced(controller.tick(60_000 + CONFIG.silence_ms)) == []


# -- unfencing (A3) ----------------------------------------------------------------------------------------------


def test_a_broker_is_unfenced_when_it_has_applied_its_registration():
    cluster = Cluster()
    controller = active(cluster)
    cluster.register(3, life=2)
    registered = cluster.state.brokers[3].registered_index
    assert beat(controller, 3, index=registered - 1)[1] == []
    assert beat(controller, 3, index=registered) == (True, [c.Unfence(3, 2)])


def test_a_broker_that_has_not_heard_of_its_fencing_is_neither_unfenced_nor_granted_a_lease():
    """B9: its heartbeats may reach us while Raft does not reach it, and it may still believe that it leads."""
    cluster = Cluster()
    controller = active(cluster)
    before = cluster.state.index
    cluster.fence(3)
    assert beat(controller, 3, index=before) == (False, [])
    assert beat(controller, 3) == (True, [c.Unfence(3, 1)])


def test_a_broker_unfenced_on_behalf_of_another_controller_has_no_lease_before_it_knows_of_its_fencing():
    cluster = Cluster()
    controller = active(cluster)
    before = cluster.state.index
    cluster.fence(3)
    cluster.unfence(3)
    assert beat(controller, 3, index=before) == (False, [])


def test_a_former_life_of_a_broker_is_neither_unfenced_nor_granted_a_lease():
    cluster = Cluster()
    controller = active(cluster)
    cluster.register(3, life=2)
    assert beat(controller, 3, epoch=1) == (False, [])


def test_a_broker_that_nobody_knows_is_granted_nothing():
    controller = active(Cluster([1, 2]))
    assert controller.on_heartbeat(Heartbeat(CLUSTER_ID, 9, 1, 99, 0), 0) == (False, [])


def test_a_broker_that_is_leaving_is_not_unfenced():
    cluster = Cluster()
    controller = active(cluster)
    cluster.do(c.BeginShutdown(3, 1))
    assert beat(controller, 3)[1] == []


def test_a_live_broker_is_asked_nothing_of():
    assert beat(active(Cluster()), 2) == (True, [])


# -- healing (A9) ------------------------------------------------------------------------------------------------


def heals(asks: list[Any]) -> list[c.Heal]:
    return [ask for ask in asks if isinstance(ask, c.Heal)]


def test_a_partition_short_of_a_live_replica_is_healed_after_its_time():
    cluster = Cluster()
    cluster.topic([1, 2])
    cluster.fence(2)
    controller = active(cluster)
    assert heals(keep_alive(controller, 10_000, (1, 3))) == []
    assert heals(keep_alive(controller, 12_500, (1, 3), 10_000))[0] == c.Heal(REF, cluster.partition.partition_epoch)


def test_a_replica_that_returns_in_time_starts_the_count_anew():
    cluster = Cluster()
    cluster.topic([1, 2])
    cluster.fence(2)
    controller = active(cluster)
    keep_alive(controller, 9_000, (1, 3))
    cluster.unfence(2)
    keep_alive(controller, 11_000, (1, 2, 3), 9_000)
    cluster.fence(2)
    assert heals(keep_alive(controller, 20_000, (1, 3), 11_000)) == []


def test_without_a_broker_to_spare_nothing_is_asked():
    cluster = Cluster([1, 2])
    cluster.topic([1, 2])
    cluster.fence(2)
    assert heals(keep_alive(active(cluster), 30_000, (1,))) == []


def test_a_partition_that_nobody_leads_or_that_is_healing_is_left_alone():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2])
    cluster.fence(2)
    cluster.do(c.Heal(REF, cluster.partition.partition_epoch))
    controller = active(cluster)
    assert heals(keep_alive(controller, 15_000, (1, 3, 4))) == []
    cluster.topic([1, 2], isr=[1])
    cluster.fence(1)
    assert cluster.state.partition(KEY).leader == -1
    assert heals(keep_alive(controller, 40_000, (3, 4), 15_000)) == []


def test_a_recruit_that_dies_on_its_way_is_replaced_after_the_time():
    cluster = Cluster([1, 2, 3, 4])
    cluster.topic([1, 2])
    cluster.fence(2)
    recruit = cluster.do(c.Heal(REF, cluster.partition.partition_epoch)).outcome.value
    controller = active(cluster)
    cluster.fence(recruit)
    others = tuple({1, 3, 4} - {recruit})
    assert heals(keep_alive(controller, 10_000, others)) == []
    assert heals(keep_alive(controller, 12_500, others, 10_000))


# -- the digest --------------------------------------------------------------------------------------------------


def test_now_and_then_the_state_is_compared():
    cluster = Cluster()
    controller = active(cluster)
    assert [a for a in keep_alive(controller, RAFT.digest_ms, (1, 2, 3)) if isinstance(a, c.Digest)] == []
    digests = [a for a in controller.tick(RAFT.digest_ms) if isinstance(a, c.Digest)]
    assert digests == [c.Digest(*cluster.state.mark())]
    assert [a for a in controller.tick(RAFT.digest_ms + 1) if isinstance(a, c.Digest)] == []
