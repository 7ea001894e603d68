"""The producer against a scripted cluster."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.fake_broker import DROP, GARBAGE, SILENCE, FakeCluster, Partition, Seen

from zmqueue import Producer, errors
from zmqueue.client.buffer import BATCH_OVERHEAD
from zmqueue.wire import frames, messages
from zmqueue.wire.batch import decode
from zmqueue.wire.frames import Operation
from zmqueue.wire.murmur2 import partition_for_key

WAIT_S = 10.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2, {"t": 1, "many": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Any]:
    made: list[Producer] = []

    def make(**settings: Any) -> Producer:
        producer = Producer(**({"bootstrap_servers": cluster.bootstrap, "linger_ms": 0} | settings))
        made.append(producer)
        return producer

    yield make
    cluster.script = lambda seen: None
    for producer in made:
        producer.close(timeout=0.1)


def once(operation: Operation, verdict: Any, times: int = 1) -> Any:
    """A script that gives its verdict to the first requests of an operation only."""
    left = [times]

    def script(seen: Seen) -> Any:
        if seen.operation == operation and left[0]:
            left[0] -= 1
            return verdict
        return None

    return script


def test_a_record_is_written_with_all_it_has(cluster: FakeCluster, make: Any) -> None:
    future = make().send("t", b"v", key=b"k", headers=[("h", b"1"), ("n", None)], timestamp_ms=1234)
    metadata = future.get(WAIT_S)
    assert (metadata.topic, metadata.partition, metadata.offset, metadata.timestamp) == ("t", 0, 0, 1234)
    header, body = cluster.partition().batches[0]
    columns = decode(header, body)
    assert (columns.values, columns.keys, columns.headers) == ([b"v"], [b"k"], [[["h", b"1"], ["n", None]]])
    assert header.base_timestamp == 1234


def test_each_record_of_a_batch_knows_its_own_offset_and_time(make: Any) -> None:
    producer = make(linger_ms=50)
    futures = [producer.send("t", b"%d" % n, timestamp_ms=1000 + n) for n in range(5)]
    assert [(f.get(WAIT_S).offset, f.get().timestamp) for f in futures] == [(n, 1000 + n) for n in range(5)]
    assert all(f.succeeded() and f.is_done and not f.failed() for f in futures)


def test_waiting_for_a_record_ends_its_lingering(make: Any) -> None:
    assert make(linger_ms=60_000).send("t", b"v").get(WAIT_S).offset == 0


def test_flush_ends_lingering_and_waits_for_everything(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=60_000)
    futures = [producer.send("many", b"v", partition=n % 4) for n in range(8)]
    producer.flush(WAIT_S)
    assert all(future.done() for future in futures)


def test_close_flushes_and_then_refuses(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=60_000)
    future = producer.send("t", b"v")
    producer.close()
    assert future.get().offset == 0
    with pytest.raises(errors.ClientClosed):
        producer.send("t", b"v")
    producer.close()


def test_close_with_a_timeout_fails_what_is_left(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, SILENCE, 100)
    producer = make()
    future = producer.send("t", b"v")
    producer.close(timeout=0.1)
    with pytest.raises(errors.ClientClosed):
        future.get(WAIT_S)


def test_batches_close_at_batch_size(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=60_000, batch_size=1000)
    for _ in range(50):
        producer.send("t", bytes(100))
    producer.flush(WAIT_S)
    sizes = [header.total_bytes for header, _ in cluster.partition().batches]
    assert all(500 < size <= 1000 for size in sizes[:-1])


def test_records_without_key_fill_one_partition_after_the_other(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=60_000, batch_size=1000)
    for _ in range(80):
        producer.send("many", bytes(100))
    producer.flush(WAIT_S)
    counts = [[h.record_count for h, _ in cluster.partition("many", n).batches] for n in range(4)]
    assert all(counts), "every partition has its share"
    assert max(map(len, counts)) - min(map(len, counts)) <= 1


def test_partitions_without_leader_are_left_out(cluster: FakeCluster, make: Any) -> None:
    cluster.partition("many", 2).leader = -1
    producer = make(batch_size=200)
    producer.send_many("many", [bytes(100)] * 20).get(WAIT_S)
    assert not cluster.partition("many", 2).batches


def test_records_that_trickle_stay_with_one_partition_for_a_batch_of_bytes(make: Any) -> None:
    producer = make(batch_size=1_000 + BATCH_OVERHEAD, linger_ms=0)
    partitions = [producer.send("many", bytes(186)).get(WAIT_S).partition for _ in range(15)]
    assert [partitions.count(first) for first in partitions[::5]] == [5, 5, 5]
    assert partitions == sorted(partitions, key=partitions.index)


def test_a_key_decides_the_partition_as_in_kafka(make: Any) -> None:
    producer = make()
    for key in (b"a", b"b", b"21", b"foobar"):
        assert producer.send("many", b"v", key=key).get(WAIT_S).partition == partition_for_key(key, 4)


def test_keys_map_to_partitions_that_appear_later_once_the_metadata_shows_them(cluster: FakeCluster, make: Any) -> None:
    producer = make(metadata_max_age_ms=20)
    key = next(key for key in map(b"%d".__mod__, range(99)) if partition_for_key(key, 6) == 5)
    assert producer.send("many", b"v", key=key).get(WAIT_S).partition == partition_for_key(key, 4)

    def grow() -> None:
        cluster.topics["many"][1].update({4: Partition(0), 5: Partition(0)})
        cluster.index += 1

    cluster.do(grow)
    deadline = time.monotonic() + WAIT_S
    while producer.send("many", b"v", key=key).get(WAIT_S).partition != 5:
        assert time.monotonic() < deadline, "the producer never noticed"
    assert producer.send("many", b"v", partition=4).get(WAIT_S).partition == 4


def test_a_partitioner_of_ones_own(make: Any) -> None:
    producer = make(partitioner=lambda key, partitions, available: partitions[-1])
    assert producer.send("many", b"v").get(WAIT_S).partition == 3
    assert {m.partition for m in producer.send_many("many", [b"v"] * 3).get(WAIT_S)} == {3}
    with pytest.raises(errors.UnknownTopicOrPartition):
        make(partitioner=lambda key, partitions, available: 99).send("many", b"v")


def test_a_partition_that_does_not_exist(make: Any) -> None:
    with pytest.raises(errors.UnknownTopicOrPartition):
        make().send("t", b"v", partition=7)


def test_an_unknown_topic_is_waited_for(cluster: FakeCluster, make: Any) -> None:
    producer = make(max_block_ms=300)
    with pytest.raises(errors.UnknownTopicOrPartition):
        producer.send("later", b"v")
    timer = threading.Timer(0.1, lambda: cluster.do(lambda: cluster.add_topic("later", 1)))
    timer.start()
    assert make().send("later", b"v").get(WAIT_S).offset == 0
    timer.join()


def test_no_broker_at_all() -> None:
    producer = Producer(bootstrap_servers="127.0.0.1:1", max_block_ms=200)
    with producer, pytest.raises(errors.NoBrokersAvailable):
        producer.send("t", b"v")


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compression(cluster: FakeCluster, make: Any, codec: str) -> None:
    make(compression_type=codec).send_many("t", [bytes(100)] * 100).get(WAIT_S)
    header, _ = cluster.partition().batches[0]
    assert header.codec > 0
    assert header.body_length < header.raw_length
    assert cluster.values() == [bytes(100)] * 100


# -- send_many -----------------------------------------------------------------------------------------------------


def test_send_many_keeps_the_order_and_knows_every_offset(cluster: FakeCluster, make: Any) -> None:
    values = [b"%06d" % n for n in range(5000)]
    metadata = make(batch_size=4096).send_many("t", values).get(WAIT_S)
    assert cluster.values() == values
    assert [m.offset for m in metadata] == list(range(5000))
    assert len(metadata) == 5000
    assert (metadata[-1].offset, metadata[1:3][1].offset) == (4999, 2)
    assert sum(run.count for run in metadata.runs) == 5000
    with pytest.raises(IndexError):
        metadata[5000]


def test_send_many_with_keys_groups_them_by_partition(cluster: FakeCluster, make: Any) -> None:
    keys = [b"k%d" % (n % 9) for n in range(300)]
    keys[7] = None  # type: ignore[call-overload]
    metadata = (
        make().send_many("many", [b"%d" % n for n in range(300)], keys=keys, timestamps_ms=list(range(300))).get(WAIT_S)
    )
    for n, (key, record) in enumerate(zip(keys, metadata, strict=True)):
        if key is not None:
            assert record.partition == partition_for_key(key, 4)
        assert record.timestamp == n
        assert cluster.values("many", record.partition)[record.offset] == b"%d" % n


def test_send_many_joins_what_send_has_begun(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=60_000)
    first = producer.send("t", b"a")
    bulk = producer.send_many("t", [b"b", None, b"c"], headers=[None, [("h", b"x")], None])
    last = producer.send("t", b"d", key=b"k")
    producer.flush(WAIT_S)
    assert cluster.values() == [b"a", b"b", None, b"c", b"d"]
    assert len(cluster.partition().batches) == 1
    assert (first.get().offset, bulk.get()[1].offset, last.get().offset) == (0, 2, 4)


def test_send_many_of_nothing(make: Any) -> None:
    assert list(make().send_many("t", []).get(WAIT_S)) == []


@pytest.mark.parametrize(
    "columns",
    [
        {"values": ["text"]},
        {"values": [b"v"], "keys": [b"a", b"b"]},
        {"values": [b"v", b"w"], "timestamps_ms": [1]},
        {"values": [b"v"], "headers": [[("h", "text")]]},
    ],
    ids=lambda columns: ",".join(columns),
)
def test_send_many_refuses_columns_that_do_not_fit(make: Any, columns: dict[str, Any]) -> None:
    with pytest.raises((errors.InvalidRecord, ValueError)):
        make().send_many("t", **columns)


@pytest.mark.parametrize(
    "record",
    [
        {"value": "text"},
        {"value": b"", "key": 7},
        {"headers": [(b"h", b"")]},
        {"headers": [("h", b"")] * 65},
        {"timestamp_ms": -5},
    ],
    ids=lambda record: ",".join(record),
)
def test_send_refuses_what_cannot_be_written(make: Any, record: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRecord):
        make().send("t", **record)


def test_records_that_are_too_large_are_refused_at_once(make: Any) -> None:
    producer = make(max_request_size=10_000)
    with pytest.raises(errors.MessageTooLarge):
        producer.send("t", bytes(10_000))
    with pytest.raises(errors.MessageTooLarge):
        producer.send_many("t", [b"", bytes(10_000)])


def test_serializers(cluster: FakeCluster, make: Any) -> None:
    producer = make(value_serializer=str.encode, key_serializer=lambda key: b"%d" % key)
    producer.send("t", "text", key=5).get(WAIT_S)
    producer.send_many("t", ["more"], keys=[6]).get(WAIT_S)
    assert cluster.values() == [b"text", b"more"]


def test_callbacks(cluster: FakeCluster, make: Any) -> None:
    heard: list[Any] = []
    done = threading.Event()
    producer = make()
    producer.send("t", b"v").add_callback(lambda tag, m: heard.append((tag, m.offset)), "tag").add_both(
        lambda _: done.set()
    )
    assert done.wait(WAIT_S)
    assert heard == [("tag", 0)]
    ended = threading.Event()
    producer.send_many("t", [b"v"] * 3).add_done_callback(lambda future: ended.set())
    assert ended.wait(WAIT_S)
    cluster.script = once(Operation.PRODUCE, errors.InvalidRecord.code)
    failed: list[Any] = []
    future = producer.send("t", b"v")
    with pytest.raises(errors.InvalidRecord):
        future.get(WAIT_S)
    future.add_errback(failed.append)
    assert isinstance(failed[0], errors.InvalidRecord)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [DROP, GARBAGE], ids=str)
def test_a_lost_connection_neither_loses_nor_doubles_nor_reorders(
    cluster: FakeCluster, make: Any, verdict: str
) -> None:
    """The leader appends, and its answer never comes."""
    count = [0]

    def script(seen: Seen) -> Any:
        if seen.operation != Operation.PRODUCE:
            return None
        count[0] += 1
        if count[0] % 4:
            return None
        for header, body in zip(seen.headers, seen.raw[1::2], strict=True):
            cluster.partition().append(header, body)
        return verdict

    cluster.script = script
    producer = make(batch_size=300)
    values = [b"%04d" % n for n in range(150)]
    metadata = [future.get(WAIT_S) for future in [producer.send("t", value) for value in values]]
    assert cluster.values() == values
    assert [m.offset for m in metadata] == list(range(150))


@pytest.mark.parametrize(
    "error",
    [
        errors.NotEnoughReplicas,
        errors.LeaderNotAvailable,
        errors.Busy,
        errors.StorageFull,
        errors.BrokerFenced,
        errors.LeaseExpired,
        errors.RequestTimedOut,
        errors.OutOfOrderSequence,
    ],
    ids=lambda error: error.__name__,
)
def test_retriable_errors_are_retried(cluster: FakeCluster, make: Any, error: type[errors.ZmqueueError]) -> None:
    cluster.script = once(Operation.PRODUCE, error.code, 2)
    producer = make(batch_size=200, retry_backoff_ms=5)
    producer.send_many("t", [b"%04d" % n for n in range(100)]).get(WAIT_S)
    assert cluster.values() == [b"%04d" % n for n in range(100)]


def test_not_leader_with_a_hint_is_redirected_without_asking(cluster: FakeCluster, make: Any) -> None:
    producer = make(retry_backoff_ms=60_000, retry_backoff_max_ms=60_000)
    producer.send("t", b"a").get(WAIT_S)
    cluster.do(lambda: cluster.move("t", 0, 1))
    before = cluster.count(Operation.METADATA)
    assert producer.send("t", b"b").get(WAIT_S).offset == 1
    assert cluster.seen[-1].broker == 1
    # The link to broker 1 may have to be made first, and then news is asked for meanwhile.
    assert cluster.count(Operation.METADATA) <= before + 2


def test_a_dead_leader_is_replaced_by_the_next(cluster: FakeCluster, make: Any) -> None:
    producer = make()
    producer.send("t", b"a").get(WAIT_S)
    cluster.kill(0)
    future = producer.send("t", b"b")
    cluster.do(lambda: cluster.move("t", 0, 1))
    assert future.get(WAIT_S).offset == 1


def test_a_leader_that_stops_answering_is_left_when_another_leads(cluster: FakeCluster, make: Any) -> None:
    cluster.script = lambda seen: SILENCE if seen.broker == 0 and seen.operation == Operation.PRODUCE else None
    producer = make(request_timeout_ms=60_000)
    future = producer.send("t", b"a")
    cluster.wait_for(lambda: cluster.count(Operation.PRODUCE))
    cluster.do(lambda: cluster.move("t", 0, 1))
    assert future.get(WAIT_S).offset == 0
    assert cluster.values() == [b"a"]


def test_a_batch_refused_for_good_does_not_stop_those_behind_it(cluster: FakeCluster, make: Any) -> None:
    def script(seen: Seen) -> Any:
        bad = seen.operation == Operation.PRODUCE and b"bad" in decode(seen.headers[0], seen.raw[1]).values
        return errors.InvalidRecord.code if bad else None

    cluster.script = script
    producer = make(batch_size=120, linger_ms=60_000)
    futures = [producer.send("t", value) for value in (b"a", b"b", b"bad", b"c", b"d", b"e")]
    producer.flush(WAIT_S)
    good = [future for future in futures if future.succeeded()]
    assert any(isinstance(future.exception, errors.InvalidRecord) for future in futures)
    assert [cluster.values()[f.get().offset] for f in good] == [
        v for v, f in zip((b"a", b"b", b"bad", b"c", b"d", b"e"), futures, strict=True) if f in good
    ]
    assert len(cluster.values()) == len(good)
    assert producer.send("t", b"after").get(WAIT_S).offset == len(good)


def test_delivery_timeout_names_the_reason_and_the_producer_goes_on(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, errors.NotEnoughReplicas.code, 10_000)
    producer = make(delivery_timeout_ms=200, retry_backoff_ms=5, retry_backoff_max_ms=20)
    with pytest.raises(errors.DeliveryTimeout, match="NOT_ENOUGH_REPLICAS"):
        producer.send("t", b"a").get(WAIT_S)
    cluster.script = lambda seen: None
    assert producer.send("t", b"b").get(WAIT_S).offset == 0
    assert cluster.values() == [b"b"]


def test_records_that_never_left_time_out_as_well(cluster: FakeCluster, make: Any) -> None:
    cluster.partition().leader = -1
    with pytest.raises(errors.DeliveryTimeout):
        make(delivery_timeout_ms=200).send("t", b"a").get(WAIT_S)


def test_retries_can_be_bounded(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, errors.Busy.code, 10_000)
    with pytest.raises(errors.DeliveryTimeout, match="BUSY"):
        make(retries=2, retry_backoff_ms=1).send("t", b"a").get(WAIT_S)
    assert cluster.count(Operation.PRODUCE) == 3


def test_a_forgotten_producer_id_is_replaced_without_loss(cluster: FakeCluster, make: Any) -> None:
    producer = make()
    producer.send("t", b"a").get(WAIT_S)
    cluster.do(lambda: cluster.partition().producers.clear())
    assert producer.send("t", b"b").get(WAIT_S).offset == 1
    assert cluster.count(Operation.PRODUCER_ID) == 2


def test_a_duplicate_without_offset_is_a_success(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, errors.DuplicateSequence.code)
    assert make().send("t", b"a").get(WAIT_S).offset == -1


def test_fencing_ends_the_producer(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, errors.ProducerFenced.code)
    producer = make()
    with pytest.raises(errors.ProducerFenced):
        producer.send("t", b"a").get(WAIT_S)
    with pytest.raises(errors.ProducerFenced):
        producer.send("t", b"b")


def test_a_topic_deleted_and_made_anew_gets_what_was_not_sent_before(cluster: FakeCluster, make: Any) -> None:
    producer = make()
    producer.send("t", b"old").get(WAIT_S)
    cluster.do(lambda: cluster.add_topic("t", 1))
    future = producer.send("t", b"sent to the old one")
    with pytest.raises(errors.UnknownTopicId):
        future.get(WAIT_S)
    assert producer.send("t", b"new").get(WAIT_S).offset == 0


def test_an_answer_with_too_few_results_is_not_trusted(cluster: FakeCluster, make: Any) -> None:
    first = [True]

    def script(seen: Seen) -> Any:
        if seen.operation == Operation.PRODUCE and first.pop() if first else False:
            return frames.response(seen.head, messages.ProduceResponse([]))
        return None

    cluster.script = script
    assert make(retry_backoff_ms=5).send("t", b"a").get(WAIT_S).offset == 0


# -- settings --------------------------------------------------------------------------------------------------------


def test_acks_0_is_done_when_it_is_sent(cluster: FakeCluster, make: Any) -> None:
    assert make(acks=0).send("t", b"a").get(WAIT_S).offset == -1
    cluster.wait_for(lambda: cluster.values() == [b"a"])
    assert cluster.partition().batches[0][0].producer_id == -1


def test_acks_1_has_an_offset_and_no_identity(cluster: FakeCluster, make: Any) -> None:
    assert make(acks=1).send("t", b"a").get(WAIT_S).offset == 0
    assert cluster.count(Operation.PRODUCER_ID) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"acks": 2},
        {"acks": 1, "enable_idempotence": True},
        {"enable_idempotence": True, "max_in_flight_requests_per_connection": 9},
        {"compression_type": "rar"},
        {"batch_size": 0},
        {"linger_ms": -1},
        {"bootstrap_servers": "nowhere"},
        {"max_request_size": 1 << 30},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_settings_that_make_no_sense(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        make(**settings)


def test_transactions_are_refused_clearly(make: Any) -> None:
    with pytest.raises(errors.IllegalState, match="transaction"):
        make(transactional_id="x")


def test_back_pressure_blocks_and_then_refuses(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, SILENCE, 10_000)
    producer = make(buffer_memory=5_000, max_block_ms=100, batch_size=1_000)
    with pytest.raises(errors.BufferFull):
        producer.send_many("t", [bytes(100)] * 100)
    with pytest.raises(errors.BufferFull):
        producer.send("t", bytes(4_000))
    assert producer._buffer.used <= 5_000


def test_back_pressure_lets_go_when_there_is_room(cluster: FakeCluster, make: Any) -> None:
    producer = make(buffer_memory=20_000, batch_size=2_000, linger_ms=60_000)
    producer.send_many("t", [bytes(100)] * 2_000)
    for _ in range(200):
        producer.send("t", bytes(100))
    producer.flush(WAIT_S)
    assert len(cluster.values()) == 2_200
    assert producer._buffer.used == 0
    assert not producer._buffer.busy


def test_in_flight_requests_are_bounded_per_connection(cluster: FakeCluster, make: Any) -> None:
    cluster.script = once(Operation.PRODUCE, SILENCE, 10_000)
    producer = make(max_in_flight_requests_per_connection=3, batch_size=200)
    producer.send_many("t", [bytes(100)] * 20)
    cluster.wait_for(lambda: cluster.count(Operation.PRODUCE) == 3)
    producer._network.post(producer._sender.pump)
    with pytest.raises(errors.RequestTimedOut):
        producer.flush(0.1)
    assert cluster.count(Operation.PRODUCE) == 3


def test_while_a_batch_is_unanswered_records_gather_in_the_next(cluster: FakeCluster, make: Any) -> None:
    held: list[Any] = []

    def hold_the_first(seen: Any) -> int | None:
        if seen.operation == Operation.PRODUCE and not held:
            held.append(seen)
            return SILENCE
        return None

    cluster.script = hold_the_first
    producer = make(linger_ms=0)
    producer.send("t", b"0")
    cluster.wait_for(lambda: held)
    futures = [producer.send("t", b"%d" % n) for n in range(1, 10)]
    producer._network.post(producer._sender.pump)
    cluster.do(lambda: cluster._produce(held[0], None))
    assert [future.get(WAIT_S).offset for future in futures] == list(range(1, 10))
    sizes = [header.record_count for s in cluster.seen if s.operation == Operation.PRODUCE for header in s.headers]
    assert sizes == [1, 9]


def test_partitions_of_one_leader_share_a_request(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=60_000)
    for n in range(8):
        producer.send("many", b"v", partition=n % 4)
    producer.flush(WAIT_S)
    produced = [len(s.message.entries) for s in cluster.seen if s.operation == Operation.PRODUCE]
    assert sorted(produced) == [2, 2]


def test_threads_may_share_a_producer(cluster: FakeCluster, make: Any) -> None:
    producer = make(linger_ms=1, batch_size=500)
    threads = [
        threading.Thread(target=lambda t=t: [producer.send("t", b"%d-%04d" % (t, n)) for n in range(200)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    producer.flush(WAIT_S)
    for t in range(4):
        mine = [value for value in cluster.values() if value.startswith(b"%d-" % t)]
        assert mine == [b"%d-%04d" % (t, n) for n in range(200)]


def test_a_forked_child_gets_a_clear_error(make: Any) -> None:
    producer = make(linger_ms=60_000)
    future = producer.send("t", b"v")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: producer.send("t", b"v"), lambda: future.get(5), producer.flush):
            try:
                call()
            except errors.ForkedClient:
                os.write(write, b"y")
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 10) == b"yyy"
    os.close(read)


def test_a_producer_that_is_dropped_ends_its_thread(cluster: FakeCluster) -> None:
    producer = Producer(bootstrap_servers=cluster.bootstrap)
    producer.send("t", b"v").get(WAIT_S)
    thread = producer._network._thread
    del producer
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_send_many_keeps_its_order_within_a_partition_where_some_have_no_key(cluster: FakeCluster, make: Any) -> None:
    values = [b"%d" % n for n in range(6)]
    found = make().send_many("t", values, keys=[b"k", None, b"k", None, None, b"k"]).get(WAIT_S)
    assert cluster.values() == values
    assert [metadata.offset for metadata in found] == list(range(6))


def test_keyless_records_among_others_go_to_all_partitions_in_turn(make: Any) -> None:
    producer = make()
    found = [producer.send_many("many", [b"v", b"w"], keys=[None, b"k"]).get(WAIT_S)[0].partition for _ in range(8)]
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]
