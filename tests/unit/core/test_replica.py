"""One partition on one broker: which part it plays, A5 and B10 on the wire, and what failures of its log lead to."""

from __future__ import annotations

import pytest

from tests.unit.core.builders import (
    CLUSTER_ID,
    CONFIG,
    EPOCH,
    KEY,
    LATER_MS,
    REF,
    Cluster,
    batch,
    fetch,
    kinds,
    log_of,
    of,
    push,
    records,
)
from zmqueue import errors
from zmqueue.core.commands import Resign
from zmqueue.core.effects import AnswerFetch, AnswerProduce, Append, Ask, Flush, Follow, Moved, SendAck, SendFetch
from zmqueue.core.epochs import Epochs
from zmqueue.core.lease import Lease
from zmqueue.core.log_view import LogView
from zmqueue.core.producers import Producers
from zmqueue.core.replica import Replica
from zmqueue.wire.messages import AckRow, BeaconRow, ReplicaFetchResponse


def replica(cluster: Cluster, broker: int = 1, log: LogView | None = None) -> Replica:
    lease = Lease(CONFIG)
    lease.grant(0)
    made = Replica(KEY, broker, CLUSTER_ID, log or log_of(), cluster.state, lease, CONFIG)
    made.on_metadata(0)
    return made


def pair(**options) -> Cluster:
    cluster = Cluster()
    cluster.topic([1, 2], **options)
    return cluster


def test_the_part_follows_the_metadata():
    cluster = pair()
    one, two = replica(cluster, 1), replica(cluster, 2)
    assert one.leading
    assert two.following
    cluster.fence(1)
    effects = one.on_metadata(0)
    assert kinds(effects) == [Moved, Follow, SendFetch]
    assert one.following
    assert kinds(two.on_metadata(0))[:2] == [Follow, Flush]
    assert two.leading
    cluster.fence(2)
    assert two.on_metadata(0)[-1] == Moved(KEY)
    assert two.part is None


def test_metadata_of_the_same_epoch_keeps_the_part():
    cluster = pair()
    one, two = replica(cluster, 1), replica(cluster, 2)
    parts = one.part, two.part
    cluster.alter_isr(1)
    one.on_metadata(0)
    two.on_metadata(0)
    assert (one.part, two.part) == parts
    assert one.leading
    assert one.leading.isr == [1]


def test_a_new_epoch_of_the_same_leader_starts_from_its_log_alone():
    """C1, B1: nobody's position carries over, and nothing held is used."""
    cluster = pair(isr=[1, 2])
    one = replica(cluster, 1, log_of((4, 10)))
    two = replica(cluster, 2, log_of((4, 10)))
    one.on_ack(2, 1, AckRow(*KEY, EPOCH, 10), 0)
    pushed = records(12, 13)
    two.on_push(push(pushed, EPOCH), pushed, 0)
    old = two.following
    cluster.partition.leader_epoch += 1
    one.on_metadata(0)
    assert kinds(two.on_metadata(0)) == [Follow, Follow, SendFetch]
    assert one.leading
    assert one.leading.followers == {}
    assert one.leading.start_end == 10
    assert two.following is not old
    assert two.following
    assert not two.following.established
    assert not two.following._held


def test_whoever_does_not_lead_says_who_does():
    cluster = pair()
    two = replica(cluster, 2)
    (answer,) = of(AnswerProduce, two.on_produce("p", batch(), -1, LATER_MS, 0))
    assert (answer.result.error, answer.result.leader) == (errors.NotLeader.code, 1)


# -- epochs on the wire (A5, B10) --------------------------------------------------------------------------------


@pytest.mark.parametrize(("epoch", "error"), [(EPOCH - 1, errors.FencedEpoch), (EPOCH + 1, errors.UnknownEpoch)])
def test_a_fetch_of_another_epoch_is_refused_and_counts_for_nothing(epoch: int, error: type[errors.ZmqueueError]):
    one = replica(pair(), 1, log_of((4, 10)))
    effects = one.on_follower_fetch("f", fetch(2, 10, 4, leader_epoch=epoch), 0)
    (answer,) = of(AnswerFetch, effects)
    assert answer.response.error == error.code
    assert answer.response.leader_epoch == epoch  # so that its sender knows it for an answer
    assert one.log.high_watermark == 0


def test_a_fetch_to_one_who_does_not_lead_is_refused():
    two = replica(pair(), 2)
    (answer,) = of(AnswerFetch, two.on_follower_fetch("f", fetch(3, 0), 0))
    assert answer.response.error == errors.NotLeader.code


def test_an_acknowledgement_of_an_older_epoch_counts_for_nothing():
    """A5: in the older epoch the follower may have held other records at these offsets."""
    one = replica(pair(), 1, log_of((4, 10)))
    assert one.on_ack(2, 1, AckRow(*KEY, EPOCH - 1, 10), 0) == []
    assert one.leading
    assert one.leading.followers == {}
    assert one.log.high_watermark == 0


def test_a_leader_that_sees_a_newer_epoch_resigns_at_once_and_answers_all_who_wait():
    one = replica(pair())
    one.on_produce("p", batch(), -1, LATER_MS, 0)
    effects = one.on_ack(2, 1, AckRow(*KEY, EPOCH + 1, 0), 0)
    assert kinds(effects) == [AnswerProduce, Moved]
    assert of(AnswerProduce, effects)[0].result.error == errors.NotLeader.code
    assert one.part is None
    (refused,) = of(AnswerProduce, one.on_produce("q", batch(), -1, LATER_MS, 0))
    assert refused.result.error == errors.NotLeader.code


def test_a_successors_beacon_or_push_is_enough_to_resign():
    row = BeaconRow(*KEY, EPOCH + 1, 5, 5, 0)
    one = replica(pair())
    assert kinds(one.on_beacon(row, 0)) == [Moved]
    two = replica(pair())
    pushed = records(0, 1, EPOCH + 1)
    assert kinds(two.on_push(push(pushed, -1, epoch=EPOCH + 1, leader=2), pushed, 0)) == [Moved]
    assert one.part is two.part is None


def test_a_leader_that_resigned_does_not_name_itself_as_the_leader():
    one = replica(pair())
    one.on_ack(2, 1, AckRow(*KEY, EPOCH + 1, 0), 0)
    (refused,) = of(AnswerProduce, one.on_produce("p", batch(), -1, LATER_MS, 0))
    assert refused.result.leader == -1


def test_a_leader_that_resigned_stays_so_until_metadata_has_a_newer_epoch():
    cluster = pair()
    one = replica(cluster)
    one.on_follower_fetch("f", fetch(2, 0, leader_epoch=EPOCH + 1), 0)
    assert one.on_metadata(0) == []
    assert one.part is None
    cluster.fence(1)
    one.on_metadata(0)
    assert one.following


# -- the log -----------------------------------------------------------------------------------------------------


def established(cluster: Cluster, log: LogView) -> Replica:
    two = replica(cluster, 2, log)
    assert two.following
    response = ReplicaFetchResponse(*KEY, two.following._fetch_id, EPOCH, 0, 0, 0, log.log_end)
    two.on_fetched(response, [], 0)
    return two


def test_a_sync_that_brings_nothing_new_is_not_acknowledged_again():
    two = established(pair(), log_of((4, 10), durable_end=5))
    assert two.on_flushed(10, 0) == [SendAck(KEY, 1, EPOCH, 10)]
    assert two.on_flushed(10, 0) == []
    assert two.on_flushed(7, 0) == []
    assert two.log.durable_end == 10


def test_a_truncation_takes_the_durable_end_and_the_watermark_with_it_and_the_producers_too():
    two = replica(pair(), 2, log_of((3, 10), hw=9))
    producers = Producers([batch(0, 2, 3, pid=7, sequence=0).header])
    effects = two.on_truncated(0, 6, Epochs([(3, 0)]), producers, 0)
    assert kinds(effects) == [Flush, SendFetch]
    assert (two.log.log_end, two.log.durable_end, two.log.high_watermark) == (6, 6, 6)
    assert two.log.producers is producers


def test_a_reset_forgets_the_epochs_of_before():
    two = replica(pair(), 2, log_of((3, 10)))
    (sent,) = of(SendFetch, two.on_truncated(50, 50, Epochs(), Producers(), 0))
    assert (sent.request.last_epoch, sent.request.log_end, sent.request.durable_end) == (-1, 50, 50)


def fail_append(one: Replica) -> list:
    one.on_produce("p", batch(), -1, LATER_MS, 0)
    return one.on_append_failed(errors.StorageFull.code, 0, Epochs(), Producers(), 0)


def test_a_leader_that_cannot_write_answers_so_and_asks_another_to_lead():
    """D3."""
    one = replica(pair())
    effects = fail_append(one)
    assert of(AnswerProduce, effects)[0].result.error == errors.StorageFull.code
    assert of(Ask, effects) == [Ask(Resign(1, 1, REF, EPOCH))]
    assert one.log.log_end == 0
    assert one.leading  # and reads go on


def test_a_leader_that_cannot_write_and_is_alone_stays():
    one = replica(pair(isr=[1]))
    assert of(Ask, fail_append(one)) == []


def test_a_failed_batch_leaves_no_trace_in_its_producers_sequence():
    one = replica(pair(isr=[1]))
    one.on_produce("p", batch(pid=7, sequence=0), -1, LATER_MS, 0)
    one.on_append_failed(errors.StorageFull.code, 0, Epochs(), Producers(), 0)
    again = one.on_produce("p", batch(pid=7, sequence=0), -1, LATER_MS, 0)
    assert kinds(again)[0] is Append
    assert one.log.log_end == 1


def test_nothing_is_done_for_a_part_that_is_not_played():
    one = replica(pair())
    assert one.on_push(push(records(0, 1), -1), records(0, 1), 0) == []
    assert one.on_beacon(BeaconRow(*KEY, EPOCH, 5, 5, 0), 0) == []
    assert one.on_fetched(ReplicaFetchResponse(*KEY, 1, EPOCH, 0), [], 0) == []
    assert one.leading
