"""Rules B1-B9 and E2 as the leader of one partition keeps them."""

from __future__ import annotations

import pytest

from tests.unit.core.builders import (
    EPOCH,
    KEY,
    LATER_MS,
    batch,
    broker_state,
    fetch,
    flush,
    kinds,
    leading,
    log_of,
    of,
    partition_state,
    produce,
)
from zmqueue import errors
from zmqueue.core.commands import BrokerRef, IsrChange
from zmqueue.core.effects import Advanced, AnswerFetch, AnswerProduce, Append, Flush, ProposeIsr, Publish, SendBatches
from zmqueue.core.leader import Leader
from zmqueue.core.producers import Producers
from zmqueue.wire.messages import BeaconRow

ALL, ONE, NONE = -1, 1, 0


def ack(leader: Leader, replica: int, end: int, *, broker_epoch: int = 1, now_ms: int = 0) -> list:
    return leader.on_ack(replica, broker_epoch, end, now_ms)


def codes(effects: list) -> list[int]:
    return [effect.result.error for effect in of(AnswerProduce, effects)]


def result(leader: Leader, isr: list[int], *, applied: bool = True, now_ms: int = 0) -> list:
    """The pending proposal is applied here, accepted or refused."""
    effects = []
    if applied:
        partition = partition_state(isr, leader.replicas, version=leader.partition_epoch + 1)
        effects += leader.on_metadata(partition, leader.min_insync, now_ms)
    return effects + leader.on_isr_result()


# -- taking over (B1) --------------------------------------------------------------------------------------------


def test_a_new_leader_syncs_its_log_and_never_cuts_it():
    leader = leading(log_end=10)
    leader.log.high_watermark = 4
    assert kinds(leader.begin()) == [Flush]
    assert (leader.log.log_end, leader.log.high_watermark, leader.start_end) == (10, 4, 10)
    assert leader.followers == {}


def test_a_leader_that_is_alone_in_sync_commits_what_it_has_made_durable():
    leader = leading(isr=[1], log=log_of((4, 10), durable_end=6))
    assert kinds(leader.begin()) == [Flush, Advanced]
    assert leader.log.high_watermark == 6


def test_a_new_leader_knows_the_producers_of_its_log():
    log = log_of((4, 2))
    log.producers = Producers([batch(0, 2, 4, pid=7, sequence=0).header])
    leader = leading(isr=[1], log=log)
    leader.begin()
    answers = of(AnswerProduce, produce(leader, 2, pid=7, sequence=0))
    assert [(a.result.error, a.result.base_offset) for a in answers] == [(0, 0)]
    assert leader.log.log_end == 2


# -- producing (B2, B6) ------------------------------------------------------------------------------------------


def test_a_batch_gets_the_next_offset_and_the_leaders_epoch_and_is_pushed_before_it_is_synced():
    leader = leading(log_end=10)
    sent = batch(records=3)
    effects = leader.on_produce("p", sent, ALL, LATER_MS, 0)
    assert effects == [
        Append(KEY, [sent]),
        Publish(KEY, EPOCH, 10, EPOCH - 1, 0, 13, [sent]),
        Flush(KEY),
    ]
    assert (sent.header.base_offset, sent.header.leader_epoch) == (10, EPOCH)


def test_nothing_is_pushed_where_nobody_follows():
    leader = leading(isr=[1])
    assert kinds(produce(leader)) == [Append, Flush]


def test_too_few_in_sync_replicas_refuse_before_anything_is_appended():
    leader = leading(isr=[1], replicas=[1, 2], min_insync=2)
    assert codes(produce(leader)) == [errors.NotEnoughReplicas.code]
    assert leader.log.log_end == 0


def test_too_few_in_sync_replicas_do_not_concern_a_producer_that_waits_for_the_leader_only():
    leader = leading(isr=[1], replicas=[1, 2], min_insync=2)
    assert kinds(produce(leader, acks=ONE)) == [Append, Publish, Flush]
    assert codes(flush(leader)) == [0]


def test_acks_all_is_answered_when_the_slowest_in_sync_replica_has_it():
    leader = leading(isr=[1, 2, 3])
    produce(leader)
    assert flush(leader) == []
    assert ack(leader, 2, 1) == []
    effects = ack(leader, 3, 1)
    assert kinds(effects) == [Advanced, AnswerProduce]
    answer = of(AnswerProduce, effects)[0].result
    assert (answer.error, answer.base_offset, answer.leader_epoch, answer.replicas) == (0, 0, EPOCH, 3)
    assert not answer.degraded


def test_an_answer_says_when_fewer_replicas_than_wanted_hold_the_record():
    leader = leading(isr=[1], replicas=[1, 2])
    produce(leader)
    answer = of(AnswerProduce, flush(leader))[0].result
    assert (answer.error, answer.replicas, answer.degraded) == (0, 1, True)


def test_answers_go_out_in_the_order_of_offsets():
    leader = leading(isr=[1, 2])
    for token in "abc":
        produce(leader, token=token)
    flush(leader)
    assert [a.token for a in of(AnswerProduce, ack(leader, 2, 2))] == ["a", "b"]
    assert [a.token for a in of(AnswerProduce, ack(leader, 2, 3))] == ["c"]


def test_what_waits_while_the_isr_falls_below_the_minimum_hears_that_its_fate_is_open():
    leader = leading(isr=[1, 2], min_insync=2)
    produce(leader)
    effects = leader.on_metadata(partition_state([1], [1, 2], version=8), 2, 0)
    assert codes(effects) == [errors.NotEnoughReplicasAfterAppend.code]
    assert leader.log.log_end == 1


def test_acks_one_is_answered_after_the_leaders_own_sync():
    leader = leading(isr=[1, 2])
    assert of(AnswerProduce, produce(leader, acks=ONE)) == []
    assert codes(flush(leader)) == [0]


def test_acks_none_is_never_answered():
    leader = leading(isr=[1])
    assert of(AnswerProduce, produce(leader, acks=NONE) + flush(leader)) == []


def test_a_produce_that_waits_too_long_is_told_so():
    leader = leading(isr=[1, 2])
    leader.on_produce("p", batch(), ALL, 100, 0)
    assert leader.on_tick(99) == []
    assert codes(leader.on_tick(100)) == [errors.RequestTimedOut.code]
    flush(leader)
    assert codes(ack(leader, 2, 1)) == []


def test_an_append_that_failed_is_answered_and_earlier_ones_still_wait():
    leader = leading(isr=[1, 2])
    produce(leader, token="kept")
    produce(leader, token="failed")
    leader.log.restate(0, 1, leader.log.epochs, leader.log.producers)
    effects = leader.on_append_failed(errors.StorageFull.code)
    assert [(a.token, a.result.error) for a in of(AnswerProduce, effects)] == [("failed", errors.StorageFull.code)]
    flush(leader)
    assert [a.token for a in of(AnswerProduce, ack(leader, 2, 1))] == ["kept"]


# -- the lease (B9) ----------------------------------------------------------------------------------------------


def test_without_a_lease_a_leader_appends_nothing_for_acks_one():
    leader = leading()
    assert codes(produce(leader, acks=ONE, now_ms=1_001)) == [errors.LeaseExpired.code]
    assert leader.log.log_end == 0


def test_the_lease_is_checked_again_before_the_answer():
    """The process may have been stopped between append and sync."""
    leader = leading(isr=[1])
    produce(leader, acks=ONE, now_ms=500)
    assert codes(flush(leader, now_ms=1_001)) == [errors.LeaseExpired.code]


def test_acks_all_needs_no_lease():
    leader = leading(isr=[1, 2])
    produce(leader, now_ms=60_000)
    flush(leader, now_ms=60_000)
    assert codes(ack(leader, 2, 1, now_ms=60_000)) == [0]


# -- the high watermark (B3, B4) ---------------------------------------------------------------------------------


def test_the_high_watermark_waits_for_the_leaders_own_sync():
    leader = leading(isr=[1, 2])
    produce(leader, 5)
    assert ack(leader, 2, 5) == []
    flush(leader)
    assert leader.log.high_watermark == 5


def test_the_high_watermark_waits_for_a_member_that_has_said_nothing_in_this_epoch():
    leader = leading(isr=[1, 2, 3], log_end=10)
    ack(leader, 2, 10)
    assert leader.log.high_watermark == 0


def test_the_high_watermark_never_goes_back():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 2, 8)
    ack(leader, 2, 3)
    ack(leader, 2, 3, broker_epoch=2)
    assert leader.log.high_watermark == 8


def test_the_high_watermark_stands_still_while_too_few_are_in_sync():
    """Else a replica in the ELR would miss what is committed."""
    leader = leading(isr=[1], replicas=[1, 2], min_insync=2, log_end=10)
    leader.begin()
    ack(leader, 2, 10)
    assert leader.log.high_watermark == 0


def test_a_follower_about_to_join_holds_the_high_watermark_back_already():
    """B3: the change may be applied elsewhere before it is applied here."""
    leader = leading(isr=[1, 2], replicas=[1, 2, 3], log_end=10)
    ack(leader, 2, 10)
    assert of(ProposeIsr, ack(leader, 3, 10))
    produce(leader, 5)
    flush(leader)
    ack(leader, 2, 15)
    assert leader.log.high_watermark == 10
    ack(leader, 3, 12)
    assert leader.log.high_watermark == 12


def test_a_follower_about_to_go_is_waited_for_until_it_is_gone():
    leader = leading(isr=[1, 2, 3], log_end=10)
    ack(leader, 2, 10)
    produce(leader)
    flush(leader)
    ack(leader, 2, 11)
    assert of(ProposeIsr, leader.on_tick(1_001))
    assert leader.log.high_watermark == 0
    effects = result(leader, [1, 2], now_ms=1_100)
    assert leader.log.high_watermark == 11
    assert codes(effects) == [0]


def test_a_refused_proposal_no_longer_counts():
    leader = leading(isr=[1, 2], replicas=[1, 2, 3], log_end=10)
    ack(leader, 3, 10)
    leader._brokers[3].fenced = True  # why it was refused
    ack(leader, 2, 10)
    produce(leader, 5)
    flush(leader)
    ack(leader, 2, 15)
    result(leader, [1, 2], applied=False)
    assert leader.log.high_watermark == 15


# -- whose word counts (B5) --------------------------------------------------------------------------------------


def test_a_position_beyond_the_leaders_log_does_not_count():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 2, 11)
    assert leader.followers == {}


def test_strangers_do_not_count():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 9, 10)
    assert of(AnswerFetch, leader.on_fetch("f", fetch(9, 10, 4), 0))[0].response.error == errors.InvalidRequest.code
    assert leader.followers == {}


def test_a_new_life_of_a_follower_replaces_what_its_former_life_acknowledged():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 2, 8)
    ack(leader, 2, 3, broker_epoch=2)
    assert (leader.followers[2].broker_epoch, leader.followers[2].acked_end) == (2, 3)


def test_a_former_life_of_a_follower_does_not_count():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 2, 3, broker_epoch=2)
    ack(leader, 2, 10, broker_epoch=1)
    assert leader.followers[2].acked_end == 3
    refused = of(AnswerFetch, leader.on_fetch("f", fetch(2, 10, 4, broker_epoch=1), 0))
    assert refused[0].response.error == errors.FencedEpoch.code


def test_only_what_a_follower_has_made_durable_counts():
    leader = leading(isr=[1, 2], log_end=10)
    leader.on_fetch("f", fetch(2, 10, 4, durable_end=6), 0)
    assert leader.log.high_watermark == 6


# -- fetches and divergence (C3, C7) -----------------------------------------------------------------------------


def test_a_follower_in_agreement_gets_the_records_it_lacks():
    leader = leading(isr=[1, 2], log=log_of((3, 6), (4, 10)))
    effects = leader.on_fetch("f", fetch(2, 6, 3), 0)
    sent = of(SendBatches, effects)[0]
    assert (sent.token, sent.offset, sent.response.log_end, sent.response.error) == ("f", 6, 10, 0)
    assert (sent.response.diverged_epoch, sent.response.diverged_end) == (-1, -1)


@pytest.mark.parametrize(
    ("log_end", "last_epoch", "expected"),
    [
        (8, 3, (3, 6)),  # wrote more in epoch 3 than we have of it
        (8, 2, (1, 4)),  # has an epoch that we never saw
        (12, 4, (4, 10)),  # is longer than our log
        (4, 0, (-1, 0)),  # shares nothing with us
    ],
)
def test_a_follower_that_left_our_history_is_told_where(log_end: int, last_epoch: int, expected: tuple[int, int]):
    leader = leading(isr=[1, 2], log=log_of((1, 4), (3, 6), (4, 10)))
    effects = leader.on_fetch("f", fetch(2, log_end, last_epoch), 0)
    assert kinds(effects) == [AnswerFetch]
    response = of(AnswerFetch, effects)[0].response
    assert (response.diverged_epoch, response.diverged_end) == expected
    assert leader.followers == {}


def test_a_follower_behind_our_log_start_is_told_where_to_begin_and_does_not_count():
    leader = leading(isr=[1, 2], log=log_of((4, 10), log_start=5))
    response = of(AnswerFetch, leader.on_fetch("f", fetch(2, 3, 4), 0))[0].response
    assert (response.log_start, response.error, response.diverged_end) == (5, 0, -1)
    assert leader.followers == {}


# -- shrinking (B7) ----------------------------------------------------------------------------------------------


def test_a_follower_too_far_behind_for_too_long_leaves_the_isr():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 2, 10, now_ms=0)
    produce(leader, now_ms=500)
    assert leader.on_tick(1_500) == []
    change = of(ProposeIsr, leader.on_tick(1_501))[0].change
    assert change == IsrChange(*KEY, EPOCH, 7, [BrokerRef(1, 1)])


def test_a_follower_that_keeps_pace_stays_though_it_is_never_quite_at_the_end():
    leader = leading(isr=[1, 2])
    ack(leader, 2, 0)
    for now_ms in range(0, 5_000, 100):
        produce(leader, now_ms=now_ms)
        ack(leader, 2, leader.log.log_end - 1, now_ms=now_ms)
        assert of(ProposeIsr, leader.on_tick(now_ms)) == []


def test_a_follower_that_acknowledges_ever_older_records_leaves_though_it_always_acknowledges():
    leader = leading(isr=[1, 2])
    ack(leader, 2, 0)
    shrunk = False
    for turn in range(50):
        produce(leader, 10, now_ms=turn * 100)
        ack(leader, 2, turn, now_ms=turn * 100)
        shrunk = shrunk or bool(of(ProposeIsr, leader.on_tick(turn * 100)))
    assert shrunk


def test_nobody_is_late_while_there_is_nothing_to_wait_for():
    leader = leading(isr=[1, 2], log_end=10)
    ack(leader, 2, 10, now_ms=0)
    assert leader.on_tick(60_000) == []
    produce(leader, now_ms=60_000)
    assert leader.on_tick(60_500) == []


def test_a_stall_of_our_own_makes_nobody_late():
    leader = leading(isr=[1, 2, 3], log_end=10)
    ack(leader, 2, 10)
    produce(leader)
    leader.on_stall(5_000)
    assert leader.on_tick(5_900) == []
    assert of(ProposeIsr, leader.on_tick(6_001))


def test_a_shrink_waits_for_the_proposal_under_way():
    leader = leading(isr=[1, 2], replicas=[1, 2, 3])
    ack(leader, 2, 0)
    first = of(ProposeIsr, ack(leader, 3, 0))
    produce(leader)
    assert len(first) == 1
    assert leader.on_tick(5_000) == []
    assert leader.pending == first[0].change


# -- expanding (B8) ----------------------------------------------------------------------------------------------


def test_a_follower_that_has_caught_up_is_proposed_under_the_epochs_it_qualified_with():
    leader = leading(isr=[1], replicas=[1, 2], log_end=10)
    leader.begin()
    change = of(ProposeIsr, ack(leader, 2, 10))[0].change
    assert change == IsrChange(*KEY, EPOCH, 7, [BrokerRef(1, 1), BrokerRef(2, 1)])


def test_a_follower_below_the_high_watermark_is_not_proposed():
    leader = leading(isr=[1], replicas=[1, 2])
    produce(leader, 10)
    flush(leader)
    assert ack(leader, 2, 9) == []


def test_a_follower_below_the_start_of_this_leaders_epoch_is_not_proposed():
    """B8c: our watermark may still be behind what the leader before us had committed."""
    leader = leading(isr=[1, 3], replicas=[1, 2, 3], log_end=10)
    assert leader.log.high_watermark == 0
    assert of(ProposeIsr, ack(leader, 2, 9)) == []
    assert of(ProposeIsr, ack(leader, 2, 10))


def test_a_follower_whose_former_life_qualified_is_not_proposed():
    """B8d: metadata already knows its new life, which may have lost everything."""
    brokers = {b: broker_state(b) for b in (1, 2)}
    leader = leading(isr=[1], replicas=[1, 2], log_end=10, brokers=brokers)
    brokers[2].epoch = 2
    assert of(ProposeIsr, ack(leader, 2, 10, broker_epoch=1)) == []
    assert of(ProposeIsr, ack(leader, 2, 10, broker_epoch=2))


def test_a_fenced_follower_is_not_proposed():
    brokers = {1: broker_state(1), 2: broker_state(2, fenced=True)}
    leader = leading(isr=[1], replicas=[1, 2], brokers=brokers)
    assert of(ProposeIsr, ack(leader, 2, 0)) == []


def test_a_follower_that_caught_up_while_it_was_fenced_is_proposed_when_it_is_not():
    """Without this an idle partition stayed short of a replica after every restart."""
    brokers = {1: broker_state(1), 2: broker_state(2, fenced=True)}
    leader = leading(isr=[1], replicas=[1, 2], log_end=10, brokers=brokers)
    leader.begin()
    ack(leader, 2, 10)
    brokers[2].fenced = False
    assert len(of(ProposeIsr, leader.on_metadata(partition_state([1], [1, 2]), 1, 0))) == 1


def test_a_proposal_under_way_is_never_made_anew():
    """B8: not when the follower restarts, not when metadata changes, not after any time."""
    brokers = {b: broker_state(b) for b in (1, 2, 3)}
    leader = leading(isr=[1], replicas=[1, 2, 3], brokers=brokers)
    first = of(ProposeIsr, ack(leader, 2, 0))[0].change
    frozen = [(ref.broker, ref.epoch) for ref in first.isr]
    brokers[2] = broker_state(2, epoch=2)
    later = ack(leader, 2, 0, broker_epoch=2) + ack(leader, 3, 0)
    later += leader.on_metadata(partition_state([1], [1, 2, 3], version=8), 1, 10) + leader.on_tick(60_000)
    assert of(ProposeIsr, later) == []
    assert leader.pending is first
    assert [(ref.broker, ref.epoch) for ref in first.isr] == frozen == [(1, 1), (2, 1)]


@pytest.mark.parametrize("applied", [True, False])
def test_the_next_proposal_is_made_when_the_result_of_the_last_is_applied_here(applied: bool):
    leader = leading(isr=[1], replicas=[1, 2, 3])
    ack(leader, 2, 0)
    assert of(ProposeIsr, ack(leader, 3, 0)) == []
    again = of(ProposeIsr, result(leader, [1, 2], applied=applied))
    assert len(again) == 1
    assert again[0].change.partition_epoch == (8 if applied else 7)


def test_a_member_that_has_just_joined_has_its_full_time():
    leader = leading(isr=[1], replicas=[1, 2], log_end=10)
    leader.begin()
    ack(leader, 2, 10, now_ms=0)
    produce(leader, now_ms=0)
    result(leader, [1, 2], now_ms=5_000)
    assert leader.on_tick(5_900) == []


# -- idempotent producers (E2) -----------------------------------------------------------------------------------


def test_a_duplicate_is_answered_with_the_first_offset_only_when_that_is_committed():
    leader = leading(isr=[1, 2])
    produce(leader, 2, token="first", pid=7, sequence=0)
    assert produce(leader, 2, token="again", pid=7, sequence=0) == []
    assert leader.log.log_end == 2
    flush(leader)
    answers = of(AnswerProduce, ack(leader, 2, 2))
    assert [(a.token, a.result.error, a.result.base_offset) for a in answers] == [("first", 0, 0), ("again", 0, 0)]
    late = of(AnswerProduce, produce(leader, 2, token="late", pid=7, sequence=0))
    assert [(a.token, a.result.base_offset) for a in late] == [("late", 0)]


@pytest.mark.parametrize(
    ("pid", "pepoch", "sequence", "error"),
    [
        (7, 1, 3, errors.OutOfOrderSequence),
        (7, 0, 2, errors.ProducerFenced),
        (8, 0, 1, errors.UnknownProducer),
    ],
)
def test_a_batch_out_of_its_producers_sequence_is_refused(
    pid: int, pepoch: int, sequence: int, error: type[errors.ZmqueueError]
):
    leader = leading(isr=[1])
    produce(leader, 2, pid=7, pepoch=1, sequence=0)
    assert codes(produce(leader, pid=pid, pepoch=pepoch, sequence=sequence)) == [error.code]
    assert leader.log.log_end == 2


# -- the beacon --------------------------------------------------------------------------------------------------


def test_the_beacon_tells_where_the_log_ends_and_whether_all_that_live_know_it():
    brokers = {1: broker_state(1), 2: broker_state(2), 3: broker_state(3, fenced=True)}
    leader = leading(isr=[1, 2], replicas=[1, 2, 3], log_end=10, brokers=brokers)
    assert leader.beacon() == (BeaconRow(*KEY, EPOCH, 10, 0, 0), False)
    ack(leader, 2, 9)
    assert leader.beacon()[1] is False
    ack(leader, 2, 10)
    assert leader.beacon() == (BeaconRow(*KEY, EPOCH, 10, 10, 0), True)


def test_what_a_former_life_of_a_follower_knew_does_not_end_the_beacons():
    brokers = {1: broker_state(1), 2: broker_state(2)}
    leader = leading(isr=[1, 2], log_end=10, brokers=brokers)
    ack(leader, 2, 10)
    assert leader.beacon()[1] is True
    brokers[2].epoch += 1
    assert leader.beacon()[1] is False
    ack(leader, 2, 10, broker_epoch=2)
    assert leader.beacon()[1] is True


def test_time_matters_to_a_leader_while_somebody_waits_or_lags():
    leader = leading(isr=[1, 2])
    ack(leader, 2, 0)
    assert not leader.is_busy
    produce(leader)
    assert leader.is_busy
    flush(leader)
    ack(leader, 2, 1)
    assert not leader.is_busy


def test_the_end_of_leadership_is_told_to_all_who_wait():
    leader = leading(isr=[1, 2])
    produce(leader, token="all")
    produce(leader, token="one", acks=ONE)
    answers = of(AnswerProduce, leader.end(2, EPOCH + 1))
    assert {a.token for a in answers} == {"all", "one"}
    assert {(a.result.error, a.result.leader, a.result.leader_epoch) for a in answers} == {
        (errors.NotLeader.code, 2, EPOCH + 1)
    }
