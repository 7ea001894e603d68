"""Consumers that share topics, against a scripted coordinator."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from unit.client.fake_broker import DROP, SILENCE, FakeCluster, Partition, Seen
from unit.client.fake_coordinator import FakeCoordinator
from unit.client.test_consumer import fill, lose

from zmqueue import Consumer, ConsumerRebalanceListener, OffsetAndMetadata, TopicPartition, errors
from zmqueue.wire.frames import Operation

PATIENCE_S = 20.0
MANY = [TopicPartition("many", number) for number in range(4)]


class Told(ConsumerRebalanceListener):
    """What a listener was told, in order, with what the coordinator had seen by then."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.on_revoked: Callable[[list[TopicPartition]], None] = lambda partitions: None
        self._cluster = cluster

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self.calls.append(("assigned", [partition.partition for partition in assigned]))

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self.calls.append(("revoked", [partition.partition for partition in revoked]))
        self.on_revoked(revoked)

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self.calls.append(("lost", [partition.partition for partition in lost]))


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Consumer] = []

    def make(*topics: str, **settings: Any) -> Consumer:
        defaults = {
            "bootstrap_servers": cluster.bootstrap,
            "group_id": "g",
            "auto_offset_reset": "earliest",
            "fetch_max_wait_ms": 50,
            "heartbeat_interval_ms": 100,
        }
        consumer = Consumer(*topics, **(defaults | settings))
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.close(timeout_ms=500)


def poll_until(ready: Callable[[], Any], *consumers: Consumer) -> list[Any]:
    """Poll them in turn; what they handed out."""
    deadline = time.monotonic() + PATIENCE_S
    records = []
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        for consumer in consumers:
            records += [record for part in consumer.poll(20).values() for record in part]
    return records


def read(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
        found += [record for part in consumer.poll(100).values() for record in part]
    return found


def fill_many(cluster: FakeCluster, count: int = 10) -> None:
    for number in range(4):
        fill(cluster, [b"%d" % n for n in range(count)], "many", number)


def committed(cluster: FakeCluster) -> dict[int, int]:
    return {key[1]: row.offset for key, row in cluster.coordinator.offsets.items()}


# -- joining and sharing -------------------------------------------------------------------------------------------


def test_a_member_alone_gets_everything_with_its_first_poll(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    consumer = make("many")
    assert consumer.assignment() == set()
    assert not cluster.count(Operation.GROUP_HEARTBEAT)
    assert len(read(consumer, 40)) == 40
    assert consumer.assignment() == set(MANY)
    assert consumer.subscription() == {"many"}
    told = consumer.group_metadata()
    assert (told.group_id, told.generation_id, told.group_instance_id) == ("g", 1, None)
    assert list(cluster.coordinator.members) == [told.member_id]


def test_reading_begins_where_the_group_left_off(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first = make("many")
    read(first, 40)
    first.close()
    cluster.do(lambda: fill(cluster, [b"new"], "many", 2))
    assert [(record.partition, record.offset) for record in read(make("many"), 1)] == [(2, 10)]


def test_two_members_share_and_each_record_is_read_once(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make("many"), make("many")
    records = poll_until(lambda: len(first.assignment()) == 4, first)
    records += poll_until(lambda: len(second.assignment()) == 2, first, second)
    assert first.assignment() | second.assignment() == set(MANY)
    cluster.do(lambda: fill_many(cluster))
    records += poll_until(
        lambda: all(c.position(p) == 20 for c in (first, second) for p in c.assignment()), first, second
    )
    seen = [(record.partition, record.offset) for record in records]
    assert sorted(seen) == [(partition, offset) for partition in range(4) for offset in range(20)]


def test_partitions_that_stay_are_fetched_on_through_a_rebalance(cluster: FakeCluster, make: Any) -> None:
    first, second = make("many", fetch_max_wait_ms=60_000), make("many")
    poll_until(lambda: len(first.assignment()) == 4, first)
    for partition in MANY:
        first.position(partition)
    slots = {partition: first._fetcher.slots[partition] for partition in MANY}
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    for partition in first.assignment():
        assert first._fetcher.slots[partition] is slots[partition]
        assert slots[partition].token == 0 or slots[partition].waits


def test_new_partitions_of_a_topic_come_through_the_coordinator(cluster: FakeCluster, make: Any) -> None:
    consumer = make("many")
    poll_until(lambda: len(consumer.assignment()) == 4, consumer)

    def grow() -> None:
        cluster.topics["many"][1][4] = Partition(0)
        cluster.index += 1

    cluster.do(grow)
    poll_until(lambda: len(consumer.assignment()) == 5, consumer)


def test_a_partition_younger_than_the_group_is_read_from_its_beginning(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    cluster.coordinator.fresh = {(cluster.topics["many"][0], 3)}
    consumer = make("many", auto_offset_reset="latest")
    assert {record.partition for record in read(consumer, 10)} == {3}
    assert [consumer.position(partition) for partition in MANY[:3]] == [10] * 3


def test_a_loss_is_noticed_by_whoever_goes_on_from_a_commit(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"old"] * 20)
    first = make("t")
    read(first, 20)
    first.close()
    cluster.do(lambda: lose(cluster, 1, [b"new"] * 40))
    second = make("t")
    with pytest.raises(errors.LogTruncated):
        poll_until(lambda: False, second)
    assert read(second, 40)[0].offset == 10


# -- listeners -----------------------------------------------------------------------------------------------------


def test_a_listener_hears_of_partitions_before_their_records(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    consumer = make()

    class SeekTo(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
            for partition in assigned:
                consumer.seek(partition, 7)

    consumer.subscribe(["many"], listener=SeekTo())
    records = read(consumer, 12)
    assert {record.offset for record in records} == {7, 8, 9}


def test_a_revocation_is_told_then_committed_then_let_go_then_given_on(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make(), make("many")
    told = Told(cluster)
    told.on_revoked = lambda partitions: cluster.coordinator.log.append(("listener", "", None))
    first.subscribe(["many"], listener=told)
    read(first, 40)
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    assert told.calls == [("assigned", [0, 1, 2, 3]), ("revoked", [2, 3])]
    kinds = [kind for kind, _, _ in cluster.coordinator.log]
    assert kinds == ["listener", "committed", "committed", "let go", "let go"]
    assert committed(cluster) == {2: 10, 3: 10}


def test_what_is_revoked_is_not_handed_out_any_more(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make(max_poll_records=1), make("many")
    first.subscribe(["many"], listener=Told(cluster))
    read(first, 1)
    second.poll(0)
    slots = first._fetcher.slots.values()
    assert first._fetcher.wait(lambda: sum(slot.stopped for slot in slots) == 2, PATIENCE_S)
    gone = {slot.partition.partition for slot in slots if slot.stopped}
    assert not any(slot.chunks for slot in slots if slot.stopped)
    assert not any(record.partition in gone for record in read(first, 15))


def test_an_application_in_its_work_is_waited_for(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make("many"), make("many")
    read(first, 40)
    poll_until(lambda: len(cluster.coordinator.members) == 2, second)
    beats = cluster.count(Operation.GROUP_HEARTBEAT)
    poll_until(lambda: cluster.count(Operation.GROUP_HEARTBEAT) > beats + 6, second)
    assert second.assignment() == set(), "records of the first were in work all the while"
    poll_until(lambda: len(second.assignment()) == 2, first, second)


def test_nobody_waits_for_an_application_that_has_nothing_in_work(cluster: FakeCluster, make: Any) -> None:
    first, second = make("many"), make("many")
    poll_until(lambda: len(first.assignment()) == 4, first)
    for partition in MANY:
        first.position(partition)
    poll_until(lambda: len(second.assignment()) == 2, second)


def test_what_comes_back_before_it_was_let_go_goes_on_where_it_was(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second, told = make(), make("many"), Told(cluster)
    first.subscribe(["many"], listener=told)
    records = read(first, 40)
    poll_until(lambda: len(cluster.coordinator.members) == 2, second)
    assert first._fetcher.wait(lambda: first._group.has_news, PATIENCE_S)
    second.close()
    deferred = first._group.membership._deferred
    assert first._fetcher.wait(lambda: len(deferred) == 2, PATIENCE_S)
    cluster.do(lambda: fill_many(cluster))
    records += read(first, 40)
    assert told.calls == [("assigned", [0, 1, 2, 3]), ("revoked", [2, 3]), ("assigned", [2, 3])]
    seen = [(record.partition, record.offset) for record in records]
    assert sorted(seen) == [(partition, offset) for partition in range(4) for offset in range(20)]


def test_a_topic_that_was_made_again_is_read_from_its_own_beginning(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"old"] * 10)
    consumer, told = make(), Told(cluster)
    consumer.subscribe(["t"], listener=told)
    read(consumer, 10)

    def make_again() -> None:
        del cluster.topics["t"]
        cluster.add_topic("t", 1)
        fill(cluster, [b"new"] * 10)

    cluster.do(make_again)
    assert [(record.offset, record.value) for record in read(consumer, 10)] == [(n, b"new") for n in range(10)]
    assert told.calls == [("assigned", [0]), ("revoked", [0]), ("assigned", [0])]


def test_an_iteration_drops_what_it_was_given_of_partitions_that_went(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first, second = make("many"), make("many")
    seen = [next(first)]
    poll_until(lambda: len(cluster.coordinator.members) == 2, second)
    assert first._fetcher.wait(lambda: first._group.has_news, PATIENCE_S)
    gone = {slot.partition.partition for slot in first._fetcher.slots.values() if slot.stopped}
    after = [next(first) for _ in range(10)]
    assert not gone & {record.partition for record in after}
    seen += [*after, *poll_until(lambda: len(second.assignment()) == 2, first, second)]
    offsets = committed(cluster)
    assert all(offsets.get(partition, 0) <= 1 for partition in gone)


def test_what_a_listener_raises_is_raised_and_the_partitions_go(cluster: FakeCluster, make: Any) -> None:
    first, second = make(), make("many")
    told = Told(cluster)

    def fail(partitions: list[TopicPartition]) -> None:
        raise RuntimeError("the application's own")

    told.on_revoked = fail
    first.subscribe(["many"], listener=told)
    poll_until(lambda: len(first.assignment()) == 4, first)
    with pytest.raises(RuntimeError, match="the application's own"):
        poll_until(lambda: False, second, first)
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    told.on_revoked = lambda partitions: None


def test_a_listener_that_is_told_of_the_end_may_commit_and_not_poll(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    consumer = make(enable_auto_commit=False)
    told = Told(cluster)
    consumer.subscribe(["many"], listener=told)
    read(consumer, 40)

    def finish(_: list[TopicPartition]) -> None:
        with pytest.raises(errors.IllegalState):
            consumer.poll()
        consumer.commit()

    told.on_revoked = finish
    consumer.close()
    assert told.calls[-1] == ("revoked", [0, 1, 2, 3])
    assert sorted(row.offset for row in cluster.coordinator.offsets.values()) == [10] * 4
    with pytest.raises(errors.ClientClosed):
        consumer.commit()


# -- commits -------------------------------------------------------------------------------------------------------


def test_a_commit_is_what_was_handed_out_with_the_epoch_of_the_record_before(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    cluster.partition().leader_epoch = 4
    fill(cluster, [b"v"] * 10)
    consumer = make("t", enable_auto_commit=False, max_poll_records=15)
    read(consumer, 15)
    consumer.commit()
    (row,) = cluster.coordinator.offsets.values()
    assert (row.offset, row.leader_epoch) == (15, 4)
    assert consumer.committed(TopicPartition("t", 0)) == 15
    assert consumer.committed(TopicPartition("t", 0), metadata=True) == OffsetAndMetadata(15, "", 4)
    assert consumer.committed(MANY[0]) is None


@pytest.mark.parametrize("told", [7, OffsetAndMetadata(7, "note", 3)])
def test_offsets_of_the_applications_choice(cluster: FakeCluster, make: Any, told: Any) -> None:
    consumer = make("t", enable_auto_commit=False)
    poll_until(consumer.assignment, consumer)
    consumer.commit({TopicPartition("t", 0): told})
    found = consumer.committed(TopicPartition("t", 0), metadata=True)
    assert found == (told if isinstance(told, OffsetAndMetadata) else OffsetAndMetadata(7))
    for nonsense in (-1, "7", None):
        with pytest.raises(errors.IllegalState):
            consumer.commit({TopicPartition("t", 0): nonsense})


def test_commits_in_the_background_keep_their_order_and_travel_together(cluster: FakeCluster, make: Any) -> None:
    consumer = make("many", enable_auto_commit=False)
    poll_until(lambda: len(consumer.assignment()) == 4, consumer)
    held: list[Seen] = []

    def hold_the_first(seen: Seen) -> Any:
        if seen.operation == Operation.COMMIT_OFFSETS and not held:
            held.append(seen)
            return SILENCE
        return None

    cluster.script = hold_the_first
    ended: list[tuple[dict[TopicPartition, OffsetAndMetadata], Any]] = []
    done = threading.Semaphore(0)

    def callback(offsets: dict[TopicPartition, OffsetAndMetadata], error: Any) -> None:
        ended.append((offsets, error))
        done.release()

    consumer.commit_async({MANY[0]: 1}, callback)
    cluster.wait_for(lambda: held)
    for offset in range(2, 6):
        consumer.commit_async({MANY[0]: offset, MANY[1]: offset}, callback)
    cluster.do(lambda: cluster.coordinator.handle(held[0]))
    for _ in range(5):
        assert done.acquire(timeout=PATIENCE_S)
    assert [offsets[MANY[0]].offset for offsets, _ in ended] == [1, 2, 3, 4, 5]
    assert [error for _, error in ended] == [None] * 5
    numbers = [(commit.number, len(commit.rows)) for commit in cluster.coordinator.commits]
    assert numbers == [(1, 1), (2, 2)]
    assert committed(cluster) == {0: 5, 1: 5}


def test_auto_commit_takes_what_earlier_polls_returned(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t", auto_commit_interval_ms=1, max_poll_records=4)
    read(consumer, 4)
    assert committed(cluster).get(0, 0) == 0, "what was returned last may be in work"
    consumer.pause(TopicPartition("t", 0))
    poll_until(lambda: committed(cluster).get(0), consumer)
    assert committed(cluster) == {0: 4}


def test_an_iteration_has_processed_the_records_before(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 2_000)
    consumer = make("t", auto_commit_interval_ms=1, consumer_timeout_ms=2_000)
    for record in consumer:
        assert committed(cluster).get(0, 0) <= record.offset
        assert consumer.position(TopicPartition("t", 0)) == record.offset + 1
    assert 0 < committed(cluster)[0] <= 2_000


def test_close_commits_and_leaves(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t")
    read(consumer, 10)
    consumer.close()
    assert committed(cluster) == {0: 10}
    assert not cluster.coordinator.members
    assert [kind for kind, _, _ in cluster.coordinator.log] == ["committed", "left"]
    consumer.close()
    with pytest.raises(errors.ClientClosed):
        consumer.poll(0)


def test_close_without_auto_commit_commits_nothing(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    first, second = make("t", enable_auto_commit=False), make("t")
    read(first, 10)
    first.close()
    read(second, 10)
    second.close(autocommit=False)
    assert committed(cluster) == {}


def test_close_ends_in_its_time_though_nobody_answers(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t")
    read(consumer, 10)
    cluster.script = lambda seen: SILENCE
    began = time.monotonic()
    consumer.close(timeout_ms=300)
    assert time.monotonic() - began < 5


def test_a_coordinator_that_moves_in_the_middle_of_a_commit_is_followed(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t", enable_auto_commit=False)
    read(consumer, 10)
    moved: list[Seen] = []

    def move(seen: Seen) -> Any:
        if seen.operation == Operation.COMMIT_OFFSETS and not moved:
            moved.append(seen)
            cluster.coordinator.move(1)
            return DROP
        return None

    cluster.script = move
    consumer.commit()
    assert committed(cluster) == {0: 10}
    (commit,) = cluster.coordinator.commits
    assert commit.number == moved[0].message.number + 1, "a commit that comes late must change nothing"
    assert consumer.poll(0) == {}
    assert consumer.assignment() == {TopicPartition("t", 0)}


@pytest.mark.parametrize(
    "error", [errors.CoordinatorLoading, errors.CoordinatorNotAvailable, errors.NotCoordinator, errors.Busy]
)
def test_errors_that_pass_are_waited_out(cluster: FakeCluster, make: Any, error: type[errors.ZmqueueError]) -> None:
    failures = {Operation.COMMIT_OFFSETS: 2, Operation.GROUP_HEARTBEAT: 2, Operation.FETCH_OFFSETS: 2}

    def fail(seen: Seen) -> Any:
        if failures.get(seen.operation):
            failures[seen.operation] -= 1
            return error.code
        return None

    cluster.script = fail
    fill(cluster, [b"v"] * 10)
    consumer = make("t")
    read(consumer, 10)
    consumer.commit()
    assert consumer.committed(TopicPartition("t", 0)) == 10
    assert not any(failures.values())


def test_a_coordinator_that_is_stuck_is_left_when_there_is_another(cluster: FakeCluster, make: Any) -> None:
    consumer = make("t")
    poll_until(consumer.assignment, consumer)
    cluster.script = lambda seen: SILENCE if seen.broker == 0 and seen.operation in FakeCoordinator.OPERATIONS else None
    cluster.do(lambda: cluster.coordinator.move(1))
    consumer.commit({TopicPartition("t", 0): 3})
    (commit,) = cluster.coordinator.commits
    assert commit.rows[0].offset == 3
    poll_until(lambda: any(member.parked for member in cluster.coordinator.members.values()), consumer)


def test_a_commit_that_nobody_takes_ends_with_its_time(cluster: FakeCluster, make: Any) -> None:
    consumer = make("t")
    poll_until(consumer.assignment, consumer)
    cluster.script = lambda seen: errors.CoordinatorLoading.code if seen.operation == Operation.COMMIT_OFFSETS else None
    with pytest.raises((errors.CoordinatorLoading, errors.RequestTimedOut)):
        consumer.commit({TopicPartition("t", 0): 1}, timeout_ms=300)


def test_the_commit_of_a_zombie_is_refused(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t", enable_auto_commit=False, heartbeat_interval_ms=5_000)
    read(consumer, 10)
    member_id = consumer.group_metadata().member_id
    cluster.do(lambda: cluster.coordinator.expel(member_id))
    with pytest.raises(errors.CommitFailed):
        consumer.commit()
    assert committed(cluster) == {}


def test_a_commit_for_somebody_elses_partition_is_refused(cluster: FakeCluster, make: Any) -> None:
    first, second = make("many", enable_auto_commit=False), make("many")
    poll_until(lambda: len(first.assignment()) == 4, first)
    poll_until(lambda: len(second.assignment()) == 2, first, second)
    with pytest.raises(errors.CommitFailed, match="ILLEGAL_GENERATION"):
        first.commit(dict.fromkeys(second.assignment(), 1))


def test_who_never_polled_has_nothing_to_commit_as_a_member(cluster: FakeCluster, make: Any) -> None:
    with pytest.raises(errors.CommitFailed, match="poll to join"):
        make("t").commit({TopicPartition("t", 0): 1})


def test_partitions_assigned_by_hand_begin_where_the_group_left_off(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    first = make()
    first.assign(MANY[:1])
    assert len(read(first, 10)) == 10
    first.commit()
    first.close()
    cluster.do(lambda: fill(cluster, [b"new"], "many", 0))
    second = make()
    second.assign(MANY[:1])
    assert [record.offset for record in read(second, 1)] == [10]
    assert second.group_metadata().member_id == ""
    subscribed = make("many")
    with pytest.raises(errors.IllegalState, match="unsubscribe"):
        subscribed.assign(MANY)


def test_nobody_commits_for_a_group_that_has_members(cluster: FakeCluster, make: Any) -> None:
    member, outsider = make("t"), make()
    poll_until(member.assignment, member)
    outsider.assign(MANY[:1])
    with pytest.raises(errors.CommitFailed, match="NON_EMPTY_GROUP"):
        outsider.commit({MANY[0]: 1})


# -- losing membership ---------------------------------------------------------------------------------------------


def test_an_expelled_member_is_told_and_comes_back_as_another(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer, told = make(), Told(cluster)
    consumer.subscribe(["t"], listener=told)
    read(consumer, 10)
    consumer.commit()
    former = consumer.group_metadata().member_id
    cluster.do(lambda: cluster.coordinator.expel(former))
    poll_until(lambda: len(told.calls) == 3, consumer)
    assert told.calls == [("assigned", [0]), ("lost", [0]), ("assigned", [0])]
    assert consumer.group_metadata().member_id != former
    assert consumer.position(TopicPartition("t", 0)) == 10


def test_a_member_that_reaches_nobody_for_its_session_hands_out_nothing(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 100)
    consumer, told = make(session_timeout_ms=1_000, max_poll_records=1), Told(cluster)
    consumer.subscribe(["t"], listener=told)
    read(consumer, 1)
    group = (Operation.GROUP_HEARTBEAT, Operation.FIND_COORDINATOR, Operation.COMMIT_OFFSETS)
    cluster.script = lambda seen: SILENCE if seen.operation in group else None
    poll_until(lambda: ("lost", [0]) in told.calls, consumer)
    assert consumer.assignment() == set()
    assert consumer.poll(100) == {}
    cluster.do(cluster.coordinator.members.clear)
    cluster.script = lambda seen: None
    assert read(consumer, 1)
    assert told.calls[-1] == ("assigned", [0])


def test_a_process_that_was_stopped_past_its_session_hands_out_nothing_of_it(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    consumer, told = make(max_poll_records=1), Told(cluster)
    consumer.subscribe(["many"], listener=told)
    read(consumer, 1)
    former = consumer.group_metadata().member_id
    resumed = threading.Event()

    def stop() -> None:
        """The IO thread, as SIGSTOP would leave it: behind."""
        resumed.wait(PATIENCE_S)

    def far_away() -> None:
        consumer._group.membership.member.heard_at -= 3_600
        consumer._group.membership._run([])

    consumer._network.post(far_away)
    consumer._network.post(stop)
    assert consumer._fetcher.wait(lambda: time.monotonic() > consumer._group.membership.session_ends, PATIENCE_S)
    threading.Timer(0.1, resumed.set).start()
    assert consumer.poll(0) == {}
    assert told.calls[1][0] == "lost"
    assert consumer.group_metadata().member_id != former


def test_an_application_that_does_not_poll_gives_others_its_partitions(cluster: FakeCluster, make: Any) -> None:
    fill_many(cluster)
    slow, told, other = make(max_poll_interval_ms=500), Told(cluster), make("many")
    slow.subscribe(["many"], listener=told)
    read(slow, 40)
    poll_until(lambda: len(other.assignment()) == 4, other)
    poll_until(lambda: len(slow.assignment()) == 2, slow, other)
    assert told.calls[:2] == [("assigned", [0, 1, 2, 3]), ("lost", [0, 1, 2, 3])]


def test_a_slow_application_keeps_its_membership(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t", session_timeout_ms=1_000)
    read(consumer, 5)
    beats = cluster.count(Operation.GROUP_HEARTBEAT)
    cluster.wait_for(lambda: cluster.count(Operation.GROUP_HEARTBEAT) > beats + 12, PATIENCE_S)
    consumer.commit()


def test_a_refusal_is_raised_by_poll_and_the_next_one_tries_again(cluster: FakeCluster, make: Any) -> None:
    refuse = [errors.UnsupportedAssignor.code]
    cluster.script = lambda seen: refuse.pop() if refuse and seen.operation == Operation.GROUP_HEARTBEAT else None
    consumer = make("t", partition_assignment_strategy=["nonsense"])
    with pytest.raises(errors.UnsupportedAssignor, match="group g"):
        poll_until(consumer.assignment, consumer)
    poll_until(consumer.assignment, consumer)


# -- static members ------------------------------------------------------------------------------------------------


def test_a_static_member_comes_back_to_what_it_had(cluster: FakeCluster, make: Any) -> None:
    first, other = make("many", group_instance_id="a"), make("many", group_instance_id="b")
    poll_until(lambda: len(first.assignment()) == 4, first)
    poll_until(lambda: len(other.assignment()) == 2, first, other)
    first.close()
    assert len(cluster.coordinator.members) == 2, "it stays away without a word"
    again = make("many", group_instance_id="a")
    poll_until(lambda: len(again.assignment()) == 2, again, other)
    assert len(other.assignment()) == 2


def test_the_former_bearer_of_an_instance_id_is_out_for_good(cluster: FakeCluster, make: Any) -> None:
    former, told = make(group_instance_id="a"), Told(cluster)
    former.subscribe(["t"], listener=told)
    poll_until(former.assignment, former)
    successor = make("t", group_instance_id="a")
    poll_until(successor.assignment, successor)
    for _ in range(2):
        with pytest.raises(errors.FencedInstance):
            poll_until(lambda: False, former)
    assert told.calls == [("assigned", [0]), ("lost", [0])]


# -- patterns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_id", ["g", None])
def test_a_pattern_follows_topics_as_they_come_and_go(cluster: FakeCluster, make: Any, group_id: str | None) -> None:
    cluster.do(lambda: cluster.add_topic("__many", 1))
    consumer = make(group_id=group_id)
    consumer.subscribe(pattern="(many|__|new)")
    poll_until(lambda: consumer.assignment() == set(MANY), consumer)
    assert consumer.subscription() == {"many"}
    cluster.do(lambda: cluster.add_topic("new-topic", 1))
    consumer._network.post(consumer._router.refresh)
    poll_until(lambda: TopicPartition("new-topic", 0) in consumer.assignment(), consumer)

    def remove() -> None:
        del cluster.topics["many"]
        cluster.index += 1

    cluster.do(remove)
    consumer._network.post(consumer._router.refresh)
    poll_until(lambda: consumer.assignment() == {TopicPartition("new-topic", 0)}, consumer)


def test_more_topics_than_a_member_can_have_are_refused(cluster: FakeCluster, make: Any) -> None:
    consumer = make()
    consumer.subscribe([f"topic-{number}" for number in range(1_001)])
    with pytest.raises(errors.IllegalState, match="1001 topics"):
        poll_until(lambda: False, consumer)


def test_topics_or_a_pattern_and_a_listener_only_for_groups(make: Any) -> None:
    consumer = make(group_id=None)
    for wrong in ({"topics": []}, {"topics": ["t"], "pattern": "t"}, {"topics": ["t"], "listener": object()}):
        with pytest.raises(errors.IllegalState):
            consumer.subscribe(**wrong)


def test_other_topics_are_another_share(cluster: FakeCluster, make: Any) -> None:
    consumer = make("many")
    poll_until(lambda: len(consumer.assignment()) == 4, consumer)
    consumer.subscribe(["t"])
    poll_until(lambda: consumer.assignment() == {TopicPartition("t", 0)}, consumer)
    consumer.unsubscribe()
    assert consumer.assignment() == set()
    assert not cluster.coordinator.members


# -- polls ---------------------------------------------------------------------------------------------------------


def test_wakeup_ends_a_poll_that_waits_and_loses_nothing(cluster: FakeCluster, make: Any) -> None:
    consumer = make("t")
    poll_until(consumer.assignment, consumer)
    ended = threading.Event()

    def poll() -> None:
        with pytest.raises(errors.WakeupError):
            consumer.poll(60_000)
        ended.set()

    thread = threading.Thread(target=poll)
    thread.start()
    consumer.wakeup()
    assert ended.wait(PATIENCE_S)
    thread.join()
    cluster.do(lambda: fill(cluster, [b"v"] * 5))
    consumer.wakeup()
    with pytest.raises(errors.WakeupError):
        consumer.poll(100)
    assert [record.offset for record in read(consumer, 5)] == list(range(5))


def test_two_threads_at_once_are_told_so(cluster: FakeCluster, make: Any) -> None:
    consumer = make("t")
    poll_until(consumer.assignment, consumer)

    def poll() -> None:
        with pytest.raises(errors.WakeupError):
            consumer.poll(60_000)

    thread = threading.Thread(target=poll)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not consumer._polling:
        assert time.monotonic() < deadline
    for call in (consumer.poll, consumer.unsubscribe, lambda: consumer.seek(TopicPartition("t", 0), 1)):
        with pytest.raises(errors.IllegalState, match="another thread"):
            call()
    consumer.wakeup()
    thread.join(PATIENCE_S)


def test_a_listener_cannot_poll(cluster: FakeCluster, make: Any) -> None:
    consumer = make()

    class Polls(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
            consumer.poll(0)

    consumer.subscribe(["t"], listener=Polls())
    with pytest.raises(errors.IllegalState, match="listener"):
        poll_until(lambda: False, consumer)


def test_figures_are_in_kafka_pythons_groups(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    consumer = make("t")
    read(consumer, 10)
    consumer.commit()
    found = consumer.metrics()
    assert found["consumer-fetch-manager-metrics"]["records-consumed-total"] == 10
    assert found["consumer-fetch-manager-metrics"]["records-lag-max"] == 0
    assert found["consumer-coordinator-metrics"]["commit-total"] == 1
    assert found["consumer-coordinator-metrics"]["state"] == "stable"
    assert consumer.highwater(TopicPartition("t", 0)) == 10


@pytest.mark.parametrize(
    "settings",
    [
        {"group_id": ""},
        {"group_id": "x" * 250},
        {"group_instance_id": ""},
        {"heartbeat_interval_ms": 10_000},
        {"max_poll_interval_ms": 0},
        {"auto_commit_interval_ms": 0},
        {"partition_assignment_strategy": []},
        {"partition_assignment_strategy": object()},
        {"auto_offset_reset": -5},
        {"auto_offset_reset": True},
    ],
)
def test_settings_that_make_no_sense(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        make(**settings)


def test_a_consumer_that_is_dropped_is_no_member_for_long(cluster: FakeCluster, make: Any) -> None:
    settings = {"bootstrap_servers": cluster.bootstrap, "group_id": "g", "heartbeat_interval_ms": 100}
    consumer = Consumer("t", **settings)
    poll_until(consumer.assignment, consumer)
    thread = consumer._network._thread
    del consumer
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
