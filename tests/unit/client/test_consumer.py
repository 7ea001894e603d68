"""The consumer against a scripted cluster."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from unit.client.fake_broker import DROP, SILENCE, FakeCluster, Seen, with_flipped_body_byte

from zmqueue import Consumer, TopicPartition, errors
from zmqueue.client.handout import BATCHES_RECORDS
from zmqueue.client.records import end_of_range
from zmqueue.model import OffsetAndMetadata, OffsetAndTimestamp
from zmqueue.wire import batch as wire_batch
from zmqueue.wire import frames, messages
from zmqueue.wire.frames import Operation

WAIT_MS = 10_000
T = TopicPartition("t", 0)


def fill(
    cluster: FakeCluster, values: list[bytes], topic: str = "t", number: int = 0, size: int = 10, **columns: Any
) -> None:
    for at in range(0, len(values), size):
        cut = {name: column[at : at + size] for name, column in columns.items()}
        batch = wire_batch.encode(values[at : at + size], base_timestamp=1000 + at, **cut)
        cluster.partition(topic, number).append(*batch)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Consumer] = []

    def make(*topics: str, **settings: Any) -> Consumer:
        defaults = {"bootstrap_servers": cluster.bootstrap, "auto_offset_reset": "earliest", "fetch_max_wait_ms": 50}
        consumer = Consumer(*topics, **(defaults | settings))
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.close()


def read(consumer: Consumer, count: int) -> list[Any]:
    records: list[Any] = []
    while len(records) < count:
        polled = consumer.poll(WAIT_MS)
        assert polled, "nothing came in time"
        records += [record for part in polled.values() for record in part]
    return records


def test_records_come_with_all_they_have(cluster: FakeCluster, make: Any) -> None:
    cluster.partition().append(
        *wire_batch.encode(
            [b"v", None],
            keys=[b"k", None],
            headers=[[["h", b"x"]], None],
            timestamp_deltas=[0, 5],
            base_timestamp=100,
        )
    )
    first, second = read(make("t"), 2)
    assert (first.topic, first.partition, first.offset, first.timestamp, first.timestamp_type) == ("t", 0, 0, 100, 0)
    assert (first.key, first.value, first.headers) == (b"k", b"v", [("h", b"x")])
    assert (second.offset, second.timestamp, second.key, second.value, second.headers) == (1, 105, None, None, [])


def test_a_topic_means_all_its_partitions(cluster: FakeCluster, make: Any) -> None:
    for number in range(4):
        fill(cluster, [b"%d" % number] * 30, "many", number)
    consumer = make("many")
    assert sorted(record.value for record in read(consumer, 120)) == sorted(
        b"%d" % n for n in range(4) for _ in range(30)
    )
    assert consumer.assignment() == {TopicPartition("many", n) for n in range(4)}
    assert consumer.subscription() == {"many"}


def test_partitions_that_appear_later_are_read_from_their_beginning(cluster: FakeCluster, make: Any) -> None:
    consumer = make("many", auto_offset_reset="latest")
    assert consumer.position(TopicPartition("many", 0)) == 0

    def grow() -> None:
        from unit.client.fake_broker import Partition

        cluster.topics["many"][1][4] = Partition(0)
        cluster.index += 1
        fill(cluster, [b"new"], "many", 4)

    cluster.do(grow)
    consumer._network.post(consumer._router.refresh)
    assert read(consumer, 1)[0].value == b"new"


def test_a_topic_that_does_not_exist_yet_is_waited_for(cluster: FakeCluster, make: Any) -> None:
    consumer = make("later")
    assert consumer.poll(50) == {}

    def add() -> None:
        cluster.add_topic("later", 1)
        fill(cluster, [b"v"], "later")

    cluster.do(add)
    assert read(consumer, 1)[0].topic == "later"


def test_max_records_cut_batches_and_the_position_follows(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(25)])
    consumer = make("t")
    seen: list[bytes] = []
    while len(seen) < 25:
        records = next(iter(consumer.poll(WAIT_MS, max_records=7).values()))
        assert len(records) <= 7
        seen += [record.value for record in records]
        assert consumer.position(T) == len(seen)
    assert seen == [b"%d" % n for n in range(25)]


def test_a_seek_into_the_middle_of_a_batch_drops_what_comes_before(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(30)])
    consumer = make()
    consumer.assign([T])
    consumer.seek(T, 17)
    assert [record.offset for record in read(consumer, 13)] == list(range(17, 30))
    consumer.seek(T, 3)
    assert consumer.position(T) == 3
    (batch, *_) = consumer.poll_batches(WAIT_MS)
    assert (batch.base_offset, list(batch.offsets), batch.values[0], batch.timestamps[0]) == (
        3,
        list(range(3, 10)),
        b"3",
        1000,
    )


def test_seek_to_the_ends(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 20)
    consumer = make("t")
    consumer.seek_to_end()
    assert consumer.position(T) == 20
    consumer.seek_to_beginning(T)
    assert consumer.position(T) == 0
    assert read(consumer, 20)[0].offset == 0


def test_batches_are_columns(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(20)])
    consumer = make("t")
    batches: list[Any] = []
    while sum(map(len, batches)) < 20:
        batches += consumer.poll_batches(WAIT_MS)
    assert [(batch.topic, batch.partition, batch.base_offset) for batch in batches] == [("t", 0, 0), ("t", 0, 10)]
    assert batches[1].values == [b"%d" % n for n in range(10, 20)]
    assert batches[1].keys is None
    assert [record.offset for record in batches[1].records()] == list(range(10, 20))
    assert consumer.position(T) == 20


def test_batches_come_in_handfuls(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 3 * BATCHES_RECORDS)
    consumer = make("t")
    sizes = []
    while sum(sizes) < 3 * BATCHES_RECORDS:
        sizes.append(sum(map(len, consumer.poll_batches(WAIT_MS))))
    assert all(0 < size < BATCHES_RECORDS + 10 for size in sizes)


def test_to_arrow_without_pyarrow_is_a_clear_error(
    cluster: FakeCluster, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cluster, [b"v"])
    (batch,) = make("t").poll_batches(WAIT_MS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.IllegalState, match="pyarrow"):
        batch.to_arrow()


def test_iteration_moves_the_position_record_by_record(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(10)])
    consumer = make("t", consumer_timeout_ms=200)
    seen = []
    for record in consumer:
        seen.append(record.value)
        assert consumer.position(T) == record.offset + 1
        if len(seen) == 4:
            break
    assert [record.value for record in consumer.poll(WAIT_MS)[T]] == [b"%d" % n for n in range(4, 10)]
    assert list(consumer) == []


def test_deserializers(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"1", b"2"], keys=[b"k", None])
    records = read(make("t", value_deserializer=int, key_deserializer=bytes.decode), 2)
    assert [(record.key, record.value) for record in records] == [("k", 1), (None, 2)]


def test_paused_partitions_hand_out_nothing(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"a"] * 5, "many", 0)
    fill(cluster, [b"b"] * 5, "many", 1)
    consumer = make("many")
    paused = TopicPartition("many", 0)
    consumer.position(paused)
    consumer.pause(paused)
    assert {record.value for record in read(consumer, 5)} == {b"b"}
    assert consumer.poll(100) == {}
    assert consumer.paused() == {paused}
    consumer.resume(paused)
    assert {record.value for record in read(consumer, 5)} == {b"a"}


def test_new_records_end_a_long_poll(cluster: FakeCluster, make: Any) -> None:
    consumer = make("t", fetch_max_wait_ms=5_000)
    consumer.position(T)
    cluster.wait_for(lambda: cluster.count(Operation.FETCH))
    cluster.do(lambda: fill(cluster, [b"v"]))
    assert read(consumer, 1)[0].value == b"v"


def test_a_consumer_that_keeps_up_has_one_fetch_at_each_leader(cluster: FakeCluster, make: Any) -> None:
    consumer = make("many", fetch_max_wait_ms=5_000)
    for partition in consumer.assignment():
        consumer.position(partition)
    cluster.wait_for(lambda: sum(len(s.message.entries) for s in cluster.seen if s.operation == Operation.FETCH) >= 4)
    consumer.poll(100)
    fetches = [s for s in cluster.seen if s.operation == Operation.FETCH]
    assert sorted(e.partition for s in fetches for e in s.message.entries) == [0, 1, 2, 3]


def test_prefetch_is_bounded(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [bytes(1000)] * 2000)
    consumer = make("t", max_partition_fetch_bytes=50_000, fetch_max_bytes=100_000)
    read(consumer, 10)
    slot = consumer._fetcher.slots[T]
    consumer._fetcher.wait(lambda: slot.bytes >= 50_000, 5)
    assert slot.bytes <= 2 * 50_000 + 11_000
    assert [record.offset for record in read(consumer, 1000)][-1] >= 999


# -- failures ------------------------------------------------------------------------------------------------------


def test_not_leader_with_a_hint_is_followed(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"a"])
    consumer = make("t")
    read(consumer, 1)
    cluster.do(lambda: cluster.move("t", 0, 1))
    cluster.do(lambda: fill(cluster, [b"b"]))
    assert read(consumer, 1)[0].value == b"b"


def test_lost_connections_lose_no_records(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(300)])
    count = [0]

    def script(seen: Seen) -> Any:
        count[0] += seen.operation == Operation.FETCH
        return DROP if seen.operation == Operation.FETCH and count[0] % 3 == 2 and count[0] < 12 else None

    cluster.script = script
    consumer = make("t", max_partition_fetch_bytes=200)
    assert [record.offset for record in read(consumer, 300)] == list(range(300))


def test_a_leader_that_stops_answering_is_left_when_another_leads(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"a"])
    cluster.script = lambda seen: SILENCE if seen.broker == 0 and seen.operation == Operation.FETCH else None
    consumer = make("t", request_timeout_ms=60_000)
    consumer.assignment()
    cluster.wait_for(lambda: cluster.count(Operation.FETCH))
    cluster.do(lambda: cluster.move("t", 0, 1))
    assert read(consumer, 1)[0].value == b"a"


@pytest.mark.parametrize(("policy", "expected"), [("earliest", 5), ("latest", 30)])
def test_an_offset_that_is_gone_resets_the_position(
    cluster: FakeCluster, make: Any, policy: str, expected: int
) -> None:
    fill(cluster, [b"v"] * 30)
    cluster.partition().log_start = 5
    consumer = make(auto_offset_reset=policy)
    consumer.assign([T])
    consumer.seek(T, 2)
    slot = consumer._fetcher.slots[T]
    assert consumer._wait(lambda: slot.position == expected, 5)


def test_without_a_policy_an_offset_that_is_gone_is_an_error(cluster: FakeCluster, make: Any) -> None:
    cluster.partition().log_start = cluster.partition().log_end = 5
    consumer = make(auto_offset_reset="none")
    consumer.assign([T])
    with pytest.raises(errors.OffsetOutOfRange, match="seek first"):
        consumer.poll(WAIT_MS)
    consumer.seek(T, 2)
    with pytest.raises(errors.OffsetOutOfRange, match="t-0: offset 2 is not in 5"):
        consumer.poll(WAIT_MS)


def test_an_offset_above_a_new_leaders_high_watermark_waits(cluster: FakeCluster, make: Any) -> None:
    """What was read was committed: the new leader has it, and will know so."""
    fill(cluster, [b"v"] * 20)
    consumer = make("t")
    read(consumer, 20)

    def script(seen: Seen) -> Any:
        if seen.operation != Operation.FETCH or len(cluster.seen) > behind:
            return None
        return frames.response(seen.head, messages.FetchResponse([messages.FetchResult(1, 10, 0)]), [b""])

    behind = len(cluster.seen) + 3
    cluster.script = script
    cluster.wait_for(lambda: len(cluster.seen) > behind)
    assert consumer.position(T) == 20
    cluster.do(lambda: fill(cluster, [b"next"]))
    assert read(consumer, 1)[0].offset == 20


def test_a_corrupt_batch_is_named_after_the_sound_ones_were_handed_out(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(20)])
    corrupt = [True]

    def script(seen: Seen) -> Any:
        if seen.operation != Operation.FETCH or not corrupt[0]:
            return None
        whole = cluster.partition().read(seen.message.entries[0].offset, 1 << 20)
        if not whole:
            return None
        at = len(whole) // 2 if seen.message.entries[0].offset == 0 else 0
        data = whole[:at] + with_flipped_body_byte(whole[at:])
        return frames.response(seen.head, messages.FetchResponse([messages.FetchResult(0, 20, 0)]), [data])

    cluster.script = script
    consumer = make("t")
    assert [record.offset for record in read(consumer, 10)] == list(range(10))
    with pytest.raises(errors.CorruptBatch, match="t-0 at offset 10"):
        consumer.poll(WAIT_MS)
    with pytest.raises(errors.CorruptBatch, match="t-0 at offset 10"):
        consumer.poll(WAIT_MS)
    corrupt[0] = False
    while True:
        try:
            records = read(consumer, 10)
            break
        except errors.CorruptBatch:
            continue  # what was fetched before the replica was healed
    assert [record.offset for record in records] == list(range(10, 20))


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:30], lambda d: d + d, lambda d: b"x" * 200])
def test_ranges_that_are_not_whole_batches_in_order_are_refused(cluster: FakeCluster, damage: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(20)])
    data = cluster.partition().read(0, 1 << 20)
    assert end_of_range(data, 0) == (20, 1)
    with pytest.raises(errors.CorruptBatch):
        end_of_range(damage(data), 0)


def test_a_damaged_range_is_an_error_and_not_a_hang(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 10)
    result = messages.FetchResponse([messages.FetchResult(0, 10, 0)])
    cluster.script = lambda seen: (
        frames.response(seen.head, result, [b"zq" * 60]) if seen.operation == Operation.FETCH else None
    )
    with pytest.raises(errors.CorruptBatch, match="t-0 at offset 0"):
        make("t").poll(WAIT_MS)


def test_what_cannot_be_done_yet_says_so(make: Any) -> None:
    with pytest.raises(errors.IllegalState, match="transactions"):
        make("t", isolation_level="read_committed")
    consumer = make("t")
    for call in (consumer.commit, consumer.commit_async, consumer.group_metadata, lambda: consumer.committed(T)):
        with pytest.raises(errors.IllegalState, match="group_id"):
            call()
    with pytest.raises(errors.IllegalState, match="not assigned"):
        consumer.seek(TopicPartition("other", 0), 1)


@pytest.mark.parametrize(
    "settings", [{"auto_offset_reset": "middle"}, {"max_poll_records": 0}, {"fetch_max_wait_ms": -1}]
)
def test_settings_that_make_no_sense(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        make(**settings)


def test_close_ends_a_poll_in_another_thread(cluster: FakeCluster, make: Any) -> None:
    consumer = make("t")
    ended: list[BaseException] = []

    def poll() -> None:
        try:
            consumer.poll(60_000)
        except errors.ClientClosed as error:
            ended.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    cluster.wait_for(lambda: cluster.count(Operation.FETCH))
    consumer.close()
    thread.join(5)
    assert len(ended) == 1


# -- offsets and topics ----------------------------------------------------------------------------------------------


def test_offsets(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"v"] * 30)
    cluster.partition().log_start = 10
    consumer = make()
    assert consumer.beginning_offsets([T]) == {T: 10}
    assert consumer.end_offsets([T, TopicPartition("many", 1)]) == {T: 30, TopicPartition("many", 1): 0}
    assert consumer.offsets_for_times({T: 1015}) == {T: OffsetAndTimestamp(20, 1020, 1)}
    assert consumer.offsets_for_times({T: 10**10}) == {T: None}
    with pytest.raises(errors.UnknownTopicOrPartition):
        make(request_timeout_ms=200).end_offsets([TopicPartition("nope", 0)])


def test_topics_and_partitions(cluster: FakeCluster, make: Any) -> None:
    cluster.do(lambda: cluster.add_topic("__internal", 1))
    consumer = make()
    assert consumer.topics() == {"t", "many"}
    assert consumer.partitions_for_topic("many") == {0, 1, 2, 3}
    assert consumer.partitions_for_topic("nope") is None


# -- compacted topics --------------------------------------------------------------------------------------------


def compacted(cluster: FakeCluster) -> None:
    """Offsets 0..29: of the first ten some are left, of the next ten none, of the last ten those before the end."""
    fill(cluster, [b"%d" % n for n in range(30)])
    partition = cluster.partition("t", 0)
    first, second, third = [wire_batch.Batch(*one) for one in partition.batches]
    partition.batches = [
        wire_batch.thinned(first.header, wire_batch.decode(*first), [2, 5]),
        wire_batch.emptied(second.header),
        wire_batch.thinned(third.header, wire_batch.decode(*third), [0, 7]),
    ]


@pytest.mark.parametrize("start", [0, 2, 3, 5, 6, 12, 20, 27, 28])
def test_records_of_a_compacted_topic_have_their_own_offsets(cluster: FakeCluster, make: Any, start: int):
    compacted(cluster)
    consumer = make()
    consumer.assign([T])
    consumer.seek(T, start)
    left = [(offset, b"%d" % offset) for offset in (2, 5, 20, 27) if offset >= start]
    assert [(record.offset, record.value) for record in read(consumer, len(left))] == left
    # Behind the last record lie offsets without any: the position passes them.
    consumer.poll(100)
    assert consumer.position(T) == 30


def test_a_position_moves_past_batches_without_records(cluster: FakeCluster, make: Any):
    compacted(cluster)
    partition = cluster.partition("t", 0)
    partition.batches[2] = wire_batch.emptied(partition.batches[2][0])
    fill(cluster, [b"new"])
    consumer = make()
    consumer.assign([T])
    consumer.seek(T, 6)
    assert [(record.offset, record.value) for record in read(consumer, 1)] == [(30, b"new")]
    assert consumer.position(T) == 31


# -- records that were lost -------------------------------------------------------------------------------------------


def lose(cluster: FakeCluster, keep: int, instead: list[bytes]) -> None:
    """As an unclean election does: the batches from `keep` on go, and others get their offsets."""
    partition = cluster.partition()
    partition.batches = partition.batches[:keep]
    partition.log_end = partition.batches[-1][0].next_offset
    partition.leader_epoch += 1
    fill(cluster, instead)


@pytest.mark.parametrize("policy", ["earliest", "latest", "none"])
def test_records_that_were_lost_are_named_and_never_passed_over(cluster: FakeCluster, make: Any, policy: str) -> None:
    fill(cluster, [b"old"] * 30)
    consumer = make(auto_offset_reset=policy)
    consumer.assign([T])
    consumer.seek(T, 0)
    assert len(read(consumer, 30)) == 30
    cluster.do(lambda: lose(cluster, 1, [b"new"] * 40))
    with pytest.raises(errors.LogTruncated, match="t-0: records from offset 10 on were lost") as raised:
        consumer.poll(WAIT_MS)
    assert (raised.value.partition, raised.value.position, raised.value.truncated_to) == (T, 30, 10)
    if policy == "none":
        with pytest.raises(errors.LogTruncated):
            consumer.poll(WAIT_MS)
        consumer.seek(T, 10)
    records = read(consumer, 40)
    assert [record.offset for record in records] == list(range(10, 50))
    assert {record.value for record in records} == {b"new"}


def test_what_was_fetched_before_the_loss_is_handed_out_first(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"old"] * 30)
    consumer = make("t", max_poll_records=5)
    read(consumer, 5)
    cluster.do(lambda: lose(cluster, 1, [b"new"] * 40))
    assert {record.value for record in read(consumer, 25)} == {b"old"}
    with pytest.raises(errors.LogTruncated):
        consumer.poll(WAIT_MS)


def test_a_seek_with_the_epoch_that_was_committed_notices_a_loss(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"old"] * 20)
    lose(cluster, 1, [b"new"] * 40)
    consumer = make()
    consumer.assign([T])
    consumer.seek(T, OffsetAndMetadata(20, "", 1))
    with pytest.raises(errors.LogTruncated):
        consumer.poll(WAIT_MS)


# -- where reading begins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reset", "first"),
    [
        (1015, 20),
        (datetime.fromtimestamp(1.015, UTC), 20),
        (timedelta(days=365_000), 0),
        (0, 0),
    ],
)
def test_reading_begins_at_a_time(cluster: FakeCluster, make: Any, reset: Any, first: int) -> None:
    fill(cluster, [b"v"] * 30)
    assert make("t", auto_offset_reset=reset).position(T) == first


@pytest.mark.parametrize("reset", [10**10, timedelta(seconds=1)])
def test_where_no_record_is_so_young_it_begins_at_the_end(cluster: FakeCluster, make: Any, reset: Any) -> None:
    fill(cluster, [b"v"] * 30)
    consumer = make("t", auto_offset_reset=reset)
    assert consumer.position(T) == 30


def test_batches_after_an_iteration_begin_where_it_stopped(cluster: FakeCluster, make: Any) -> None:
    fill(cluster, [b"%d" % n for n in range(30)])
    consumer = make("t")
    assert [next(consumer).offset for _ in range(4)] == [0, 1, 2, 3]
    batches: list[Any] = []
    while sum(map(len, batches)) < 26:
        batches += consumer.poll_batches(WAIT_MS)
    assert [offset for batch in batches for offset in batch.offsets] == list(range(4, 30))
