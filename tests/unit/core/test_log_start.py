"""Records that are deleted: where logs begin, what leaders tell of it, and how followers come after."""

from __future__ import annotations

import pytest

from tests.unit.core.builders import (
    CONFIG,
    EPOCH,
    KEY,
    answer,
    established,
    fetch,
    following,
    leading,
    log_of,
    of,
    produce,
    records,
)
from zmqueue import errors
from zmqueue.core.effects import Adopt, AnswerFetch, AnswerProduce, Append, DeleteBefore, Reset, SendAck, SendBatches
from zmqueue.core.epochs import Epochs
from zmqueue.core.leader import START_BEACONS, Leader
from zmqueue.core.producers import Producers
from zmqueue.wire.messages import BeaconRow

# -- epochs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [(1, 0), (3, 10), (4, 20)]),
        (5, [(1, 5), (3, 10), (4, 20)]),
        (10, [(1, 10), (3, 10), (4, 20)]),  # whoever is just there, with epoch 1, is in agreement
        (11, [(3, 11), (4, 20)]),
        (25, [(4, 25)]),
    ],
)
def test_epochs_of_deleted_records_are_forgotten_but_the_last(start: int, expected: list[tuple[int, int]]):
    epochs = Epochs([(1, 0), (3, 10), (4, 20)])
    epochs.begin_at(start)
    assert epochs.entries == expected
    epochs.begin_at(start)
    assert epochs.entries == expected


def test_an_epoch_that_the_log_cannot_show_can_be_told():
    epochs = Epochs()
    epochs.begin_at(10, 2)
    epochs.note(5, 10)
    assert epochs.entries == [(2, 10), (5, 10)]
    assert epochs.end_of(2, 10, 30) == (2, 10)
    assert epochs.end_of(4, 10, 30) == (2, 10)
    assert epochs.end_of(5, 10, 30) == (5, 30)
    epochs.begin_at(10, 5)
    assert epochs.entries == [(2, 10), (5, 10)]


def test_the_epoch_before_an_offset():
    epochs = Epochs([(1, 0), (3, 10)])
    assert [epochs.before(offset) for offset in (0, 1, 10, 11)] == [-1, 1, 1, 3]


# -- leaders -----------------------------------------------------------------------------------------------------


def deleting(offset: int, hw: int = 10) -> Leader:
    leader = leading(isr=[1, 2], log=log_of((4, 12), hw=hw))
    assert leader.on_delete_records(offset, 0) == [DeleteBefore(KEY, hw if offset == -1 else offset)]
    return leader


def test_records_below_the_high_watermark_can_be_deleted():
    deleting(7)
    deleting(10)
    deleting(-1)


def test_what_is_not_committed_cannot_be_deleted():
    leader = leading(isr=[1, 2], log=log_of((4, 12), hw=10))
    for offset in (11, 12, 100, -2):
        with pytest.raises(errors.OffsetOutOfRange):
            leader.on_delete_records(offset, 0)


def test_what_is_deleted_already_is_no_error():
    leader = leading(isr=[1, 2], log=log_of((4, 12), log_start=5, hw=10))
    assert leader.on_delete_records(5, 0) == []
    assert leader.on_delete_records(3, 0) == []


def test_a_leader_that_may_have_been_replaced_deletes_nothing():
    leader = leading(isr=[1, 2], log=log_of((4, 12), hw=10))
    with pytest.raises(errors.LeaseExpired):
        leader.on_delete_records(5, CONFIG.write_lease_ms + 1)


def test_a_new_log_start_is_told_several_times():
    leader = leading(isr=[1], replicas=[1, 2], log=log_of((4, 10), hw=10))
    leader.on_ack(2, 1, 10, 0)
    assert leader.beacon()[1], "everybody knows everything"
    leader.log.start_at(6, 6)
    leader.on_log_start()
    told = [leader.beacon() for _ in range(START_BEACONS + 1)]
    assert [known for _, known in told] == [False] * START_BEACONS + [True]
    assert told[0][0] == BeaconRow(*KEY, EPOCH, 10, 10, 6)


def test_a_follower_is_sent_back_to_where_our_first_batch_begins():
    log = log_of((4, 30), hw=30)
    log.start_at(20, 18)
    leader = leading(isr=[1], replicas=[1, 2], log=log)
    (sent,) = of(AnswerFetch, leader.on_fetch("t", fetch(2, 17, 4), 0))
    assert (sent.response.first_offset, sent.response.log_start) == (18, 20)
    assert of(SendBatches, leader.on_fetch("t", fetch(2, 18, 4), 0))


def test_a_follower_without_anything_is_told_what_it_cannot_read_and_counts_only_then():
    log = log_of((4, 30), hw=30)
    log.start_at(30, 30)
    leader = leading(isr=[1], replicas=[1, 2], log=log)
    effects = leader.on_fetch("t", fetch(2, 30, -1), 0)
    (sent,) = of(SendBatches, effects)
    assert sent.fresh
    assert effects == [sent], "nobody proposes it for the ISR"
    assert 2 not in leader.followers
    leader.on_ack(2, 1, 30, 0)
    assert leader.followers[2].acked_end == 30
    (sent,) = of(SendBatches, leader.on_fetch("t", fetch(2, 30, 4), 0))
    assert not sent.fresh


def test_a_follower_at_the_end_of_deleted_records_is_in_agreement():
    log = log_of((4, 30), hw=30)
    log.start_at(30, 30)
    leader = leading(isr=[1, 2], log=log)
    produce(leader)
    assert log.epochs.entries == [(4, 30), (EPOCH, 30)]
    assert of(SendBatches, leader.on_fetch("t", fetch(2, 30, 4), 0))


def test_over_its_quota_a_partition_takes_only_what_it_has():
    leader = leading(isr=[1], log=log_of())
    produce(leader, pid=7, sequence=0)
    (refused,) = leader.on_produce("p", records(0, 1)[0], -1, 1, 0, over_quota=True)
    assert refused.result.error == errors.QuotaExceeded.code
    again = records(0, 1)[0]
    again.header.producer_id, again.header.producer_epoch, again.header.base_sequence = 7, 0, 0
    leader.log.durable_end = leader.log.high_watermark = 1
    (known,) = of(AnswerProduce, leader.on_produce("p", again, -1, 1, 0, over_quota=True))
    assert (known.result.error, known.result.base_offset) == (0, 0)
    assert not errors.QuotaExceeded.retriable


# -- followers ---------------------------------------------------------------------------------------------------


def test_a_follower_deletes_what_its_leader_has_deleted():
    follower = established(log_of((EPOCH, 10), hw=10))
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 10, 10, 6), 0) == [
        SendAck(KEY, 1, EPOCH, 10),
        DeleteBefore(KEY, 6),
    ]


def test_a_follower_never_deletes_beyond_its_own_watermark_or_what_it_has_synced():
    follower = established(log_of((EPOCH, 10), hw=4, durable_end=8))
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 10, 4, 6), 0) == [DeleteBefore(KEY, 4)]
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 10, 10, 9), 0) == [DeleteBefore(KEY, 8)]


def test_a_follower_learns_the_log_start_when_it_fetches():
    follower = following(log_of((EPOCH, 10), hw=10))
    effects = answer(follower, log_start=6, first_offset=5, hw=10)
    assert of(DeleteBefore, effects) == [DeleteBefore(KEY, 6)]


def test_a_follower_that_is_ahead_of_its_leaders_log_start_stays_where_it_is():
    follower = established(log_of((EPOCH, 10), log_start=8, hw=10))
    assert of(DeleteBefore, follower.on_beacon(BeaconRow(*KEY, EPOCH, 10, 10, 6), 0)) == []


def test_behind_its_leader_it_starts_anew_and_takes_over_what_it_cannot_read():
    known = Producers()
    follower = following(log_of((3, 10)))
    assert answer(follower, log_start=50, first_offset=48, log_end=61) == [Reset(KEY, 48)]
    follower.log.restate(48, 48, Epochs(), Producers())
    follower.on_truncated(0)
    effects = answer(follower, records(48, 61), log_start=50, first_offset=48, before=(4, known.encode()))
    assert effects[0] == Adopt(KEY, 4, known.encode())
    assert of(Append, effects)
    assert follower.log.epochs.entries == [(4, 48), (EPOCH, 48)]


def test_where_even_that_finds_no_room_it_is_not_established():
    follower = following(log_of(log_start=48))
    answer(follower, log_start=48, before=(4, Producers().encode()))
    assert follower.established
    follower.log.restate(48, 48, Epochs(), Producers())
    follower.on_append_failed(0)
    assert not follower.established


def test_a_state_that_is_none_is_not_believed():
    follower = following(log_of(log_start=48))
    assert answer(follower, log_start=48, before=(4, b"\xc1")) == []
    assert not follower.established
