"""Rules C1-C7 as a follower of one partition keeps them."""

from __future__ import annotations

import pytest

from tests.unit.core.builders import (
    CONFIG,
    EPOCH,
    KEY,
    answer,
    batch,
    established,
    following,
    kinds,
    log_of,
    of,
    push,
    records,
)
from zmqueue import errors
from zmqueue.core.effects import Append, Flush, Reset, SendAck, SendFetch, Truncate
from zmqueue.core.follower import Follower
from zmqueue.core.producers import Producers
from zmqueue.wire.batch import Batch, emptied, void
from zmqueue.wire.messages import BeaconRow


def pushed(follower: Follower, first: int, end: int, *, prev: int = EPOCH, now_ms: int = 0, **options) -> list:
    batches = records(first, end)
    return follower.on_push(push(batches, prev, **options), batches, now_ms)


def truncated(follower: Follower, log_end: int, log_start: int = 0) -> list:
    """The order to truncate was carried out."""
    follower.log.epochs.truncate(log_end)
    follower.log.restate(log_start, log_end, follower.log.epochs, Producers())
    return follower.on_truncated(0)


# -- the first fetch (C1, C3) ------------------------------------------------------------------------------------


def test_a_follower_begins_by_asking_where_its_log_ends():
    follower = Follower(KEY, 2, 3, "c", log_of((4, 10), durable_end=8), 1, EPOCH, CONFIG)
    (sent,) = of(SendFetch, follower.begin(0))
    request = sent.request
    assert sent.leader == 1
    assert (request.log_end, request.last_epoch, request.durable_end) == (10, 4, 8)
    assert (request.leader_epoch, request.broker, request.broker_epoch) == (EPOCH, 2, 3)


def test_nothing_pushed_before_the_first_answer_is_appended_or_acknowledged():
    """C4: the log may have left the leader's history, and a push that fits its end would hide that."""
    follower = following(log_of((4, 10)))
    assert pushed(follower, 10, 12, prev=4) == []
    assert follower.on_flushed() == []
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 10, 10, 0), 0) == []
    assert follower.log.log_end == 10
    assert follower.log.high_watermark == 0


def test_a_refused_first_fetch_does_not_open_the_way_for_pushes():
    follower = following(log_of((4, 10)))
    answer(follower, error=errors.NotLeader.code)
    assert pushed(follower, 10, 12, prev=4) == []
    assert follower.log.log_end == 10


@pytest.mark.parametrize(
    ("diverged", "end"),
    [
        ((3, 6), 6),  # the leader has less of epoch 3 than we
        ((3, 99), 8),  # our own epoch 3 ends earlier
        ((2, 5), 4),  # we have nothing of epoch 2: back to the end of what comes before it
        ((1, 3), 3),
        ((-1, 0), 0),  # nothing in common
    ],
)
def test_a_follower_cuts_back_to_where_the_histories_part(diverged: tuple[int, int], end: int):
    follower = following(log_of((1, 4), (3, 8), (4, 10)))
    assert answer(follower, diverged=diverged) == [Truncate(KEY, end)]
    assert not follower.established


def test_after_cutting_back_it_asks_again_before_it_believes_anything():
    follower = following(log_of((3, 8), (4, 10)))
    answer(follower, diverged=(3, 8))
    (sent,) = of(SendFetch, truncated(follower, 8))
    assert (sent.request.log_end, sent.request.last_epoch, sent.request.durable_end) == (8, 3, 8)
    assert not follower.established
    answer(follower, records(8, 9))
    assert follower.established


def test_what_a_truncation_leaves_is_acknowledged_although_flushes_of_before_no_longer_count():
    """A leader that was deposed in the middle of a sync, and lacks nothing: no append of its own would flush again."""
    follower = following(log_of((3, 10), durable_end=6))
    assert answer(follower, diverged=(3, 8)) == [Truncate(KEY, 8)]
    assert Flush(KEY) in truncated(follower, 8)
    answer(follower)
    follower.log.durable_end = 8  # as the flush reports
    assert follower.on_flushed() == [SendAck(KEY, 1, EPOCH, 8)]


def test_the_high_watermark_is_never_a_point_to_truncate_to():
    follower = following(log_of((3, 8), hw=2))
    assert answer(follower, diverged=(3, 6)) == [Truncate(KEY, 6)]


def test_an_agreeing_answer_is_appended_and_synced_before_it_is_acknowledged():
    follower = following(log_of((4, 2)))
    effects = answer(follower, records(2, 4))
    assert kinds(effects) == [Append, Flush]
    assert follower.established
    follower.log.durable_end = 4
    assert follower.on_flushed() == [SendAck(KEY, 1, EPOCH, 4)]


def test_more_is_fetched_at_once_while_the_leader_has_more():
    follower = following()
    effects = answer(follower, records(0, 2), log_end=5)
    assert kinds(effects) == [Append, Flush, SendFetch]
    assert of(SendFetch, effects)[0].request.log_end == 2


# -- one fetch, one answer (C2) ----------------------------------------------------------------------------------


def test_an_answer_to_an_older_fetch_is_ignored():
    follower = following(log_of((4, 10)))
    first = follower._fetch_id
    follower.on_tick(CONFIG.fetch_timeout_ms)
    assert follower._fetch_id != first
    assert answer(follower, diverged=(3, 5), fetch_id=first) == []
    assert answer(follower, records(10, 12), fetch_id=first) == []
    assert not follower.established


def test_an_answer_is_used_once():
    follower = following(log_of((3, 10)))
    number = follower._fetch_id
    assert answer(follower, diverged=(3, 5)) == [Truncate(KEY, 5)]
    assert answer(follower, diverged=(3, 5), fetch_id=number) == []


def test_a_late_duplicate_of_a_diverging_answer_never_cuts_what_was_acknowledged():
    follower = following(log_of((3, 10)))
    number = follower._fetch_id
    answer(follower, diverged=(3, 5))
    truncated(follower, 5)
    answer(follower, records(5, 9))
    assert answer(follower, diverged=(3, 5), fetch_id=number) == []
    pushed(follower, 20, 21)  # a gap: a fetch is outstanding again
    assert answer(follower, diverged=(3, 5), fetch_id=number) == []
    assert answer(follower, diverged=(3, 5)) == []  # even under the number of the newest
    assert follower.log.log_end == 9


def test_an_answer_from_another_epoch_is_ignored():
    """A5: the number alone does not tell the epochs of two leaders apart."""
    follower = following(log_of((4, 10)))
    assert answer(follower, diverged=(3, 5), epoch=EPOCH - 1) == []
    assert answer(follower, records(10, 11), epoch=EPOCH + 1) == []
    assert not follower.established


def test_an_answer_to_a_former_life_is_ignored():
    """A broker that registers again follows in the same leader epoch, and counts its fetches from the start."""
    former = following(log_of((3, 10)), broker_epoch=1)
    follower = following(log_of((3, 10)), broker_epoch=2)
    assert answer(follower, diverged=(3, 5), fetch_id=former._fetch_id) == []
    assert not follower.established


def test_fetch_ids_fit_the_wire_in_any_life():
    follower = following(broker_epoch=2**31 - 1)
    assert follower._fetch_id + 2**30 <= 2**62


def test_a_fetch_is_repeated_after_its_time_and_not_before():
    follower = following()
    assert follower.on_tick(CONFIG.fetch_timeout_ms - 1) == []
    assert kinds(follower.on_tick(CONFIG.fetch_timeout_ms)) == [SendFetch]


def test_a_refused_fetch_is_repeated_a_little_later():
    follower = following()
    assert answer(follower, error=errors.NotLeader.code, now_ms=10) == []
    assert follower.on_tick(59) == []
    assert kinds(follower.on_tick(60)) == [SendFetch]


def test_nothing_is_due_while_nothing_is_missing():
    follower = established()
    assert not follower.is_busy
    assert follower.on_tick(1 << 40) == []


# -- pushes (C4, C5) ---------------------------------------------------------------------------------------------


def test_a_push_at_the_end_is_appended():
    follower = established(log_of((EPOCH, 3)))
    assert kinds(pushed(follower, 3, 5)) == [Append, Flush]
    assert follower.log.log_end == 5


def test_a_push_that_overlaps_adds_only_what_is_new():
    follower = established(log_of((EPOCH, 3)))
    (append,) = of(Append, pushed(follower, 1, 5))
    assert [b.header.base_offset for b in append.batches] == [3, 4]


def test_a_push_of_what_is_known_adds_nothing():
    follower = established(log_of((EPOCH, 3)))
    assert pushed(follower, 1, 3) == []


@pytest.mark.parametrize(("first", "prev"), [(4, EPOCH), (3, EPOCH - 1)])
def test_after_a_gap_or_another_past_nothing_is_appended_and_the_rest_is_fetched(first: int, prev: int):
    follower = established(log_of((EPOCH, 3)))
    assert kinds(pushed(follower, first, 6, prev=prev)) == [SendFetch]
    assert follower.log.log_end == 3


def test_pushes_during_a_fetch_are_held_and_continue_the_log_after_it():
    follower = established(log_of((EPOCH, 3)))
    pushed(follower, 5, 6)
    assert pushed(follower, 6, 8) == []
    assert pushed(follower, 8, 9) == []
    effects = answer(follower, records(3, 5))
    appended = [b.header.base_offset for a in of(Append, effects) for b in a.batches]
    assert appended == [3, 4, 5, 6, 7, 8]
    assert follower.log.log_end == 9


def test_a_gap_between_the_answer_and_the_held_pushes_is_fetched_at_once():
    follower = established(log_of((EPOCH, 3)))
    pushed(follower, 7, 8)
    effects = answer(follower, records(3, 5))
    assert kinds(effects) == [Append, Flush, SendFetch]
    effects = answer(follower, records(5, 7))
    assert follower.log.log_end == 8
    assert of(SendFetch, effects) == []


def test_held_pushes_that_the_fetch_brought_already_are_skipped():
    follower = established(log_of((EPOCH, 3)))
    pushed(follower, 4, 5)
    pushed(follower, 5, 7)
    effects = answer(follower, records(3, 6))
    assert [b.header.base_offset for a in of(Append, effects) for b in a.batches] == [3, 4, 5, 6]
    assert follower._held_bytes == 0


def test_a_held_push_with_another_past_is_dropped():
    follower = following(log_of((4, 3)))
    pushed(follower, 3, 5, prev=3)
    assert answer(follower) == []
    assert follower.log.log_end == 3
    assert not follower._held


def test_held_pushes_are_bounded():
    follower = following()
    size = batch(0, 1, EPOCH).header.total_bytes
    follower._held_bytes = CONFIG.held_bytes_max - size
    pushed(follower, 0, 1, prev=-1)
    pushed(follower, 1, 2)
    assert len(follower._held) == 1


@pytest.mark.parametrize("options", [{"epoch": EPOCH - 1}, {"epoch": EPOCH + 1}, {"leader": 3}])
def test_pushes_of_another_epoch_or_another_broker_are_ignored(options: dict):
    """A5: a deposed leader's push may fit our log exactly."""
    follower = established(log_of((EPOCH, 3)))
    assert pushed(follower, 3, 4, **options) == []
    assert not follower._held


def test_batches_of_an_impossible_epoch_are_not_appended():
    follower = established(log_of((EPOCH, 3)))
    for epoch in (EPOCH - 1, EPOCH + 1):
        wrong = [batch(3, 1, epoch)]
        assert follower.on_push(push(wrong, EPOCH), wrong, 0) == []


def test_only_a_contiguous_prefix_is_appended():
    follower = following()
    effects = answer(follower, [*records(0, 2), *records(3, 4)], log_end=2)
    assert [b.header.base_offset for b in of(Append, effects)[0].batches] == [0, 1]


# -- beacons -----------------------------------------------------------------------------------------------------


def test_a_beacon_beyond_the_end_means_that_pushes_were_lost():
    follower = established(log_of((EPOCH, 3)))
    assert kinds(follower.on_beacon(BeaconRow(*KEY, EPOCH, 4, 0, 0), 0)) == [SendFetch]
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 4, 0, 0), 0) == []  # one fetch at a time


def test_a_beacon_that_repeats_what_we_have_asks_for_a_lost_acknowledgement():
    follower = established(log_of((EPOCH, 3)))
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 3, 3, 0), 0) == [SendAck(KEY, 1, EPOCH, 3)]


def test_what_is_not_synced_is_not_acknowledged_to_a_beacon():
    follower = established(log_of((EPOCH, 3), durable_end=2))
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH, 3, 0, 0), 0) == []


def test_a_beacon_of_another_epoch_is_ignored():
    follower = established(log_of((EPOCH, 3)))
    assert follower.on_beacon(BeaconRow(*KEY, EPOCH + 1, 9, 9, 0), 0) == []


# -- the high watermark (C6) -------------------------------------------------------------------------------------


def test_the_high_watermark_is_bounded_by_the_own_log_and_never_goes_back():
    follower = established(log_of((EPOCH, 3)))
    follower.on_beacon(BeaconRow(*KEY, EPOCH, 9, 9, 0), 0)
    assert follower.log.high_watermark == 3
    answer(follower, records(3, 5), hw=4)
    assert follower.log.high_watermark == 4
    pushed(follower, 5, 6, hw=1)
    assert follower.log.high_watermark == 4


# -- a leader that has deleted what we lack (C7) -----------------------------------------------------------------


def test_behind_the_leaders_log_start_it_starts_anew_and_has_to_prove_agreement_again():
    follower = established(log_of((EPOCH, 3)))
    pushed(follower, 60, 61)
    assert answer(follower, log_start=50, log_end=61) == [Reset(KEY, 50)]
    assert not follower.established
    follower.log.restate(50, 50, log_of().epochs, Producers())
    (sent,) = of(SendFetch, follower.on_truncated(0))
    assert (sent.request.log_end, sent.request.last_epoch, sent.request.durable_end) == (50, -1, 50)
    effects = answer(follower, records(50, 61), log_start=50)
    assert of(Append, effects)[0].batches[0].header.base_offset == 50


def test_a_leader_whose_history_parts_from_ours_before_our_first_record_is_followed_from_its_start():
    """As after an unclean election: to cut back to our own start would be asked of us for ever."""
    follower = following(log_of((3, 80), log_start=50))
    assert answer(follower, diverged=(-1, 0), log_start=0, log_end=100) == [Reset(KEY, 0)]
    assert not follower.established


def test_an_empty_log_that_begins_beyond_the_leaders_end_starts_anew():
    follower = following(log_of(log_start=50))
    assert answer(follower, diverged=(-1, 10), log_start=10, log_end=30) == [Reset(KEY, 10)]


# -- a full disk -------------------------------------------------------------------------------------------------


def test_a_failed_append_is_tried_again_later_from_the_log_as_it_is():
    follower = established(log_of((EPOCH, 3)))
    pushed(follower, 3, 5)
    follower.log.restate(0, 3, log_of((EPOCH, 3)).epochs, Producers())
    assert follower.on_append_failed(100) == []
    assert follower.on_tick(100 + CONFIG.fetch_timeout_ms - 1) == []
    (sent,) = of(SendFetch, follower.on_tick(100 + CONFIG.fetch_timeout_ms))
    assert sent.request.log_end == 3


# -- a leader whose log is compacted -----------------------------------------------------------------------------


def void_batch(first: int, end: int, epoch: int = EPOCH) -> Batch:
    return void(batch(first, end - first, epoch).header)


def test_of_offsets_without_records_a_follower_takes_those_it_lacks():
    """Compaction merges what it empties, so such a batch may begin where the follower still has records."""
    follower = following(log_of((EPOCH, 10)))
    (append, _) = answer(follower, [void_batch(5, 20), *records(20, 22)], hw=22)
    assert [(one.header.base_offset, one.header.next_offset) for one in append.batches] == [
        (10, 20),
        (20, 21),
        (21, 22),
    ]
    assert follower.log.log_end == 22


def test_offsets_without_records_that_a_follower_has_are_no_news():
    follower = following(log_of((EPOCH, 10)))
    (append, _) = answer(follower, [void_batch(2, 10), *records(10, 11)])
    assert [one.header.base_offset for one in append.batches] == [10]


def test_a_batch_with_records_is_never_cut():
    follower = following(log_of((EPOCH, 10)))
    effects = answer(follower, [batch(8, 4, EPOCH)])
    assert of(Append, effects) == []
    assert follower.log.log_end == 10


def test_a_batch_that_lost_its_records_still_tells_of_its_producer():
    follower = following(log_of((EPOCH, 10)))
    answer(follower, [emptied(batch(10, 3, EPOCH, pid=7, sequence=0).header)])
    assert follower.log.producers.check(batch(records=1, pid=7, sequence=3).header) is None
