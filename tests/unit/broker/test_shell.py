"""The shell around the core, without sockets and without Raft: requests in, answers out, over real logs.

Broker 0 leads the only partition; broker 1 follows, and its acknowledgements are put in by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zmqueue import errors
from zmqueue.broker.executor import Executor
from zmqueue.broker.handlers import Handlers, own_status
from zmqueue.broker.logs import Logs
from zmqueue.config import BrokerConfig, Config
from zmqueue.core import commands as c
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import Node
from zmqueue.errors import StorageFull
from zmqueue.model import EARLIEST, LATEST, PartitionKey
from zmqueue.wire import frames as f
from zmqueue.wire import messages as m
from zmqueue.wire.batch import encode, split
from zmqueue.wire.frames import Kind, Operation

TOPIC_ID = b"t" * 16
KEY = PartitionKey(TOPIC_ID, 0)
CLIENT = b"client"


class Leaving:
    done = False


class Answers:
    """Stands where the ROUTER socket is."""

    def __init__(self) -> None:
        self.sent: list[tuple[f.Head, Any, list[bytes]]] = []
        self.leaving: list[Leaving] = []

    def send(self, frames: list[bytes]) -> bool:
        _, *message = frames
        head = f.parse_head(message)
        self.sent.append((head, f.parse_response(head, message), message[2:]))
        return True

    def send_traced(self, frames: list[bytes]) -> Leaving:
        self.send(frames)
        self.leaving.append(Leaving())
        return self.leaving[-1]


class Silence:
    """Stands where the other brokers are: they hear everything and say nothing."""

    def __init__(self) -> None:
        self.published: list[Any] = []

    def publish(self, effect: Any, broker_epoch: int) -> None:
        self.published.append(effect)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class Shell:
    def __init__(self, folder: Path, config: Config) -> None:
        self.now_ms = 1_000
        self.low_disk = False
        self.state = ClusterState()
        self.node = Node("cluster", _registration(0), self.state, config)
        self.logs = Logs(folder, config.log, lambda: None)
        assert not list(self.logs.recover(trusted=True))
        self.executor = Executor(self.node, self.logs, self.clock, self.proposed, lambda incarnation: None)
        self.handlers = Handlers(
            self.node,
            self.logs,
            config,
            "disk",
            lambda: own_status(self.node, 0, 0, True, 0),
            lambda: self.low_disk,
            self.executor.run,
            self.clock,
            self.wall_clock,
        )
        self.answers = Answers()
        self.peers = Silence()
        self.handlers.bind(self.answers)  # type: ignore[arg-type]
        self.executor.bind(self.peers, self.handlers)  # type: ignore[arg-type]
        self._proposals: list[bytes] = []
        self._number = 0

    def clock(self) -> int:
        return self.now_ms

    def wall_clock(self) -> int:
        return 1_700_000_000_000 + self.now_ms

    def proposed(self, data: bytes) -> None:
        self._proposals.append(data)

    def turn(self) -> None:
        """Everything proposed is committed and applied; then the end of a turn."""
        self.executor.run(self.node.step(self.now_ms))
        while self._proposals:
            self._apply(self._proposals.pop(0))
            self.executor.run(self.node.step(self.now_ms))
        self.executor.end_turn()

    def _apply(self, data: bytes) -> None:
        self.executor.run(self.node.on_applied(self.state.apply(data), self.now_ms))

    def other(self, command: Any) -> None:
        """A command of broker 1."""
        self._number += 1
        self._apply(c.encode(c.Envelope(1, 101, self._number, command)))

    def lead(self) -> None:
        self.turn()
        self.other(_registration(1))
        self.other(c.Unfence(0, 1))
        self.other(c.Unfence(1, 1))
        self.other(c.CreateTopic("t", TOPIC_ID, 1, 2, 1, "disk"))
        self.node.on_heartbeat_reply(m.HeartbeatReply(True, 0, self.now_ms))
        self.turn()

    def ask(self, operation: Operation, message: Any, raw: list[bytes] | None = None) -> None:
        self.handlers._on_message([CLIENT, *f.request(operation, 7, message, raw)])

    def produce(self, *values: bytes, acks: int = -1, timeout_ms: int = 30_000) -> None:
        header, body = encode(values)
        entry = m.ProduceEntry(TOPIC_ID, 0)
        self.ask(Operation.PRODUCE, m.ProduceRequest(acks, timeout_ms, [entry]), [header.pack(), body])
        self.executor.end_turn()

    def commit(self) -> None:
        """Both disks have everything."""
        self.logs.flusher.close()
        self.executor.on_flushed()
        row = m.AckRow(TOPIC_ID, 0, 0, self.node.replicas[KEY].log.log_end)
        self.executor.run(self.node.on_acks(m.Acks("cluster", 1, 1, [row]), self.now_ms))

    def fetch(self, offset: int, wait_ms: int = 0, bytes_min: int = 1, last_epoch: int = -1) -> None:
        entry = m.FetchEntry(TOPIC_ID, 0, offset, 1 << 20, last_epoch)
        self.ask(Operation.FETCH, m.FetchRequest(wait_ms, bytes_min, 1 << 20, 0, [entry]))

    @property
    def answer(self) -> Any:
        assert len(self.answers.sent) == 1, self.answers.sent
        return self.answers.sent.pop()[1]


def _registration(broker: int) -> c.Register:
    return c.Register(broker, 100 + broker, [], bytes([broker]) * 16, "127.0.0.1", 1, 2, 3, True)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path, Config())
    shell.lead()
    return shell


def test_a_produce_is_answered_when_both_replicas_have_it(shell: Shell) -> None:
    shell.produce(b"a", b"b")
    assert not shell.answers.sent
    assert len(shell.peers.published) == 1
    shell.commit()
    (result,) = shell.answer.results
    assert (result.error, result.base_offset, result.replicas, result.degraded) == (0, 0, 2, False)


def test_acks_zero_gets_no_answer_and_is_written(shell: Shell) -> None:
    shell.produce(b"a", acks=0)
    assert not shell.answers.sent
    assert shell.logs[KEY].log_end == 1
    assert shell.handlers.waiting == 0


def test_a_damaged_batch_is_refused_and_nothing_is_appended(shell: Shell) -> None:
    header, body = encode([b"a"])
    request = m.ProduceRequest(-1, 1000, [m.ProduceEntry(TOPIC_ID, 0)])
    shell.ask(Operation.PRODUCE, request, [header.pack(), body + b"x"])
    assert shell.answer.results[0].error == errors.CorruptBatch.code
    assert shell.logs[KEY].log_end == 0


def test_entries_and_frames_must_match(shell: Shell) -> None:
    shell.ask(Operation.PRODUCE, m.ProduceRequest(-1, 1000, [m.ProduceEntry(TOPIC_ID, 0)]), [b"one"])
    assert shell.answer.code == errors.InvalidRequest.code


def test_an_unknown_topic_is_told_from_one_that_another_broker_leads(shell: Shell) -> None:
    header, body = encode([b"a"])
    entry = m.ProduceEntry(b"u" * 16, 0)
    shell.ask(Operation.PRODUCE, m.ProduceRequest(-1, 1000, [entry]), [header.pack(), body])
    assert shell.answer.results[0].error == errors.UnknownTopicId.code
    shell.other(c.Fence([c.BrokerRef(0, 1)]))
    shell.produce(b"a")
    result = shell.answer.results[0]
    assert (result.error, result.leader) == (errors.NotLeader.code, 1)


def test_bytes_that_are_no_request_get_an_error_where_there_is_somebody_to_tell(shell: Shell) -> None:
    shell.handlers._on_message([CLIENT, b"short", b""])
    assert not shell.answers.sent
    head, _ = f.request(Operation.METADATA, 9, m.MetadataRequest())
    shell.handlers._on_message([CLIENT, head, b"\xff"])
    sent_head, failure, _ = shell.answers.sent.pop()
    assert sent_head.kind == Kind.FAILURE
    assert failure.code == errors.InvalidRequest.code
    assert shell.handlers.bad_frames == 2


def test_what_brokers_say_to_each_other_is_refused_from_clients(shell: Shell) -> None:
    shell.ask(Operation.HEARTBEAT, m.Heartbeat("cluster", 1, 1, 0, 0))
    assert shell.answer.code == errors.UnknownOperation.code


def test_a_broker_that_has_not_registered_answers_status_only(tmp_path: Path) -> None:
    shell = Shell(tmp_path, Config())
    shell.ask(Operation.STATUS, m.StatusRequest())
    assert shell.answer.fenced
    for operation, request in (
        (Operation.PRODUCER_ID, m.ProducerIdRequest()),
        (Operation.METADATA, m.MetadataRequest()),  # an empty cluster is not what the client is in
    ):
        shell.ask(operation, request)
        assert shell.answer.code == errors.BrokerFenced.code


def test_a_connection_with_too_many_open_requests_is_told_to_slow_down(tmp_path: Path) -> None:
    shell = Shell(tmp_path, Config(broker=BrokerConfig(requests_per_connection_max=2)))
    shell.lead()
    for _ in range(3):
        shell.fetch(0, wait_ms=1000)
    assert shell.answer.code == errors.Busy.code
    assert shell.handlers.waiting == 2


def test_requests_that_park_do_not_keep_others_from_being_answered(tmp_path: Path) -> None:
    limits = BrokerConfig(requests_waiting_max=1, requests_parked_max=3)
    shell = Shell(tmp_path, Config(broker=limits))
    shell.lead()
    for _ in range(4):
        shell.fetch(0, wait_ms=1000)
    assert shell.answer.code == errors.Busy.code
    shell.produce(b"a")
    shell.ask(Operation.PRODUCER_ID, m.ProducerIdRequest())
    assert shell.answer.code == errors.Busy.code
    assert shell.handlers.waiting == 4


def test_a_request_over_the_limit_is_refused(tmp_path: Path) -> None:
    shell = Shell(tmp_path, Config(broker=BrokerConfig(request_bytes_max=1 << 20)))
    shell.lead()
    header, body = encode([b"x" * 700_000])
    entries = [m.ProduceEntry(TOPIC_ID, 0)] * 2
    shell.ask(Operation.PRODUCE, m.ProduceRequest(-1, 1000, entries), [header.pack(), body] * 2)
    assert shell.answer.code == errors.MessageTooLarge.code


def test_a_fetch_reads_below_the_high_watermark_only(shell: Shell) -> None:
    shell.produce(b"a")
    shell.fetch(0)
    assert shell.answer.results[0].high_watermark == 0
    shell.commit()
    shell.answers.sent.clear()
    shell.fetch(0)
    _, response, raw = shell.answers.sent.pop()
    assert response.results[0].high_watermark == 1
    assert [batch.header.base_offset for batch in split(raw[0])] == [0]


def test_a_client_that_does_not_read_gets_no_more_records_until_it_does(tmp_path: Path) -> None:
    shell = Shell(tmp_path, Config(broker=BrokerConfig(fetch_bytes_max=1 << 16)))
    shell.lead()
    shell.produce(b"x" * 50_000)
    shell.commit()
    shell.answers.sent.clear()
    for _ in range(2):
        shell.fetch(0)
        assert not shell.answer.results[0].error
    shell.fetch(0)
    assert shell.answer.code == errors.Busy.code
    assert shell.handlers.waiting == 0
    shell.answers.leaving[0].done = True
    shell.fetch(0)
    assert not shell.answer.results[0].error


def test_fetches_that_wait_are_held_to_what_is_unread_as_well(tmp_path: Path) -> None:
    shell = Shell(tmp_path, Config(broker=BrokerConfig(fetch_bytes_max=1 << 16)))
    shell.lead()
    for _ in range(3):
        shell.fetch(0, wait_ms=500)
    shell.produce(b"x" * 50_000)
    shell.commit()
    codes = [
        getattr(answer, "code", 0) for _, answer, _ in shell.answers.sent if not isinstance(answer, m.ProduceResponse)
    ]
    assert codes == [0, 0, errors.Busy.code]
    assert shell.handlers.waiting == 0


def test_a_waiting_fetch_is_answered_as_soon_as_there_is_something(shell: Shell) -> None:
    shell.fetch(0, wait_ms=5_000)
    assert not shell.answers.sent
    shell.produce(b"a")
    shell.commit()
    operations = [head.operation for head, _, _ in shell.answers.sent]
    assert sorted(operations) == [Operation.PRODUCE, Operation.FETCH]
    assert shell.handlers.fetches.waiting == 0


def test_a_waiting_fetch_is_answered_empty_at_its_deadline(shell: Shell) -> None:
    shell.fetch(0, wait_ms=500)
    shell.now_ms += 499
    shell.handlers.fetches.on_tick(shell.now_ms)
    assert not shell.answers.sent
    shell.now_ms += 1
    shell.handlers.fetches.on_tick(shell.now_ms)
    assert shell.answer.results[0].error == 0
    assert shell.handlers.waiting == 0


def test_a_waiting_fetch_hears_that_the_leader_has_moved(shell: Shell) -> None:
    shell.fetch(0, wait_ms=5_000)
    shell.other(c.Fence([c.BrokerRef(0, 1)]))
    result = shell.answer.results[0]
    assert (result.error, result.leader) == (errors.NotLeader.code, 1)


def test_a_fetch_outside_the_log_is_out_of_range(shell: Shell) -> None:
    shell.fetch(5, wait_ms=5_000)
    assert shell.answer.results[0].error == errors.OffsetOutOfRange.code


def test_a_reader_of_records_that_were_lost_since_hears_where_to_go_on(shell: Shell) -> None:
    shell.produce(b"a", b"b")
    shell.commit()
    replica = shell.node.replicas[KEY]
    replica.leader_epoch = 2  # epoch 1 was of a leader whose records an unclean election has lost
    for offset, last_epoch, expected in [
        (2, 0, (0, -1)),
        (2, -1, (0, -1)),
        (2, 1, (errors.LogTruncated.code, 2)),
        (7, 0, (errors.LogTruncated.code, 2)),
        (7, -1, (errors.OffsetOutOfRange.code, -1)),
        (2, 3, (errors.UnknownEpoch.code, -1)),
    ]:
        shell.answers.sent.clear()
        shell.fetch(offset, last_epoch=last_epoch)
        result = shell.answer.results[0]
        assert (result.error, result.truncated_to) == expected, (offset, last_epoch)


def test_a_reader_below_the_log_start_is_out_of_range_whatever_it_remembers(shell: Shell) -> None:
    shell.produce(b"a")
    shell.produce(b"b")
    shell.commit()
    shell.ask(Operation.DELETE_RECORDS, m.DeleteRecordsRequest(TOPIC_ID, 0, 1))
    shell.answers.sent.clear()
    shell.fetch(0, last_epoch=0)
    assert shell.answer.results[0].error == errors.OffsetOutOfRange.code
    shell.fetch(1, last_epoch=0)
    assert shell.answer.results[0].error == 0


def test_reads_stop_when_the_controller_has_been_silent_for_long(shell: Shell) -> None:
    shell.now_ms += 3_001
    shell.fetch(0)
    assert shell.answer.results[0].error == errors.LeaseExpired.code


def test_offsets_are_listed_by_end_and_by_time(shell: Shell) -> None:
    header, body = encode([b"a", b"b", b"c"], timestamp_deltas=[0, 10, 20], base_timestamp=1_000)
    request = m.ProduceRequest(-1, 1000, [m.ProduceEntry(TOPIC_ID, 0)])
    shell.ask(Operation.PRODUCE, request, [header.pack(), body])
    shell.executor.end_turn()
    shell.commit()
    shell.answers.sent.clear()
    wanted = [EARLIEST, LATEST, 1_005, 9_999]
    shell.ask(Operation.LIST_OFFSETS, m.ListOffsetsRequest([m.OffsetEntry(TOPIC_ID, 0, at) for at in wanted]))
    assert [(r.error, r.offset) for r in shell.answer.results] == [(0, 0), (0, 3), (0, 1), (0, -1)]


def describe(shell: Shell, own: bool) -> m.PartitionHealth:
    shell.ask(Operation.DESCRIBE_PARTITIONS, m.DescribePartitionsRequest([m.PartitionEntry(TOPIC_ID, 0)], own))
    (row,) = shell.answer.results
    return row


def test_a_copy_is_described_by_whoever_has_it_if_that_is_asked_for(shell: Shell) -> None:
    shell.produce(b"one", b"two")
    assert describe(shell, own=False).log_end == 2
    shell.commit()
    shell.answers.sent.clear()
    shell.other(c.Fence([c.BrokerRef(0, 1)]))
    shell.turn()
    assert describe(shell, own=False).error == errors.NotLeader.code
    row = describe(shell, own=True)
    assert (row.error, row.log_end, row.last_epoch) == (0, 2, 0)


def test_an_unclean_election_is_decided_by_the_cluster(shell: Shell) -> None:
    shell.ask(Operation.ELECT_UNCLEAN, m.ElectUncleanRequest(TOPIC_ID, 0, 0))
    shell.turn()
    assert shell.answer.code == errors.InvalidRequest.code, "it has a leader"


def test_producer_ids_differ(shell: Shell) -> None:
    for _ in range(3):
        shell.ask(Operation.PRODUCER_ID, m.ProducerIdRequest())
        shell.turn()
    ids = [response.producer_id for _, response, _ in shell.answers.sent]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (m.CreateTopicRequest("t"), errors.TopicExists),
        (m.CreateTopicRequest("a/b"), errors.InvalidTopic),
        (m.CreateTopicRequest("__x"), errors.ReservedName),
        (m.CreateTopicRequest("x", partitions=0), errors.InvalidPartitions),
        (m.CreateTopicRequest("x", replication_factor=3), errors.InvalidReplicationFactor),
        (m.CreateTopicRequest("x", config={"min.insync.replica": "1"}), errors.InvalidConfig),
        (m.CreateTopicRequest("x", config={"min.insync.replicas": "3"}), errors.InvalidConfig),
    ],
)
def test_a_topic_that_cannot_be_is_refused(
    shell: Shell, request_: m.CreateTopicRequest, error: type[errors.ZmqueueError]
) -> None:
    shell.ask(Operation.CREATE_TOPIC, request_)
    shell.turn()
    assert shell.answer.code == error.code


def test_no_topic_is_created_on_a_nearly_full_disk(shell: Shell) -> None:
    shell.low_disk = True
    shell.ask(Operation.CREATE_TOPIC, m.CreateTopicRequest("x"))
    assert shell.answer.code == errors.StorageFull.code


def more(shell: Shell, total: int, name: str = "t", topic_id: bytes = TOPIC_ID) -> Any:
    shell.ask(Operation.CREATE_PARTITIONS, m.CreatePartitionsRequest(name, topic_id, total))
    shell.turn()
    return shell.answer


def test_partitions_are_added_and_asking_again_changes_nothing(shell: Shell) -> None:
    for _ in range(2):
        assert isinstance(more(shell, 3), m.Done)
        assert len(shell.state.topics[TOPIC_ID].partitions) == 3
    assert more(shell, 2).code == errors.InvalidPartitions.code


@pytest.mark.parametrize(
    ("total", "name", "topic_id", "error"),
    [
        (0, "t", TOPIC_ID, errors.InvalidPartitions),
        (10_001, "t", TOPIC_ID, errors.InvalidPartitions),
        (3, "t", b"u" * 16, errors.UnknownTopicOrPartition),
        (3, "u", TOPIC_ID, errors.UnknownTopicOrPartition),
        (20, "__consumer_offsets", TOPIC_ID, errors.ReservedName),
    ],
)
def test_partitions_that_cannot_be_are_refused(
    shell: Shell, total: int, name: str, topic_id: bytes, error: type[errors.ZmqueueError]
) -> None:
    assert more(shell, total, name, topic_id).code == error.code
    assert len(shell.state.topics[TOPIC_ID].partitions) == 1


def test_no_partitions_are_added_on_a_nearly_full_disk(shell: Shell) -> None:
    shell.low_disk = True
    assert more(shell, 3).code == errors.StorageFull.code


def test_a_log_that_finds_no_room_is_opened_when_there_is_some(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = shell.logs.open

    def full(key: PartitionKey, storage: str, config: dict[str, str]) -> Any:
        raise StorageFull

    monkeypatch.setattr(shell.logs, "open", full)
    shell.other(c.CreateTopic("late", b"l" * 16, 1, 2, 1, "disk"))
    key = PartitionKey(b"l" * 16, 0)
    assert key not in shell.node.replicas
    monkeypatch.setattr(shell.logs, "open", really_open)
    shell.now_ms += 1_000
    shell.turn()
    assert key in shell.node.replicas


def test_a_deleted_topic_leaves_no_files(shell: Shell, tmp_path: Path) -> None:
    assert list((tmp_path / "partitions").iterdir())
    shell.ask(Operation.DELETE_TOPIC, m.DeleteTopicRequest("t"))
    shell.turn()
    assert isinstance(shell.answer, m.Done)
    assert not list((tmp_path / "partitions").iterdir())


# -- by value, and backwards -----------------------------------------------------------------------------------------


def tagged(shell: Shell, *tags: bytes, flushed: bool = True) -> None:
    header, body = encode([b"v"] * len(tags), headers=[[["k", tag]] for tag in tags])
    entry = m.ProduceEntry(TOPIC_ID, 0)
    shell.ask(Operation.PRODUCE, m.ProduceRequest(1, 30_000, [entry]), [header.pack(), body])
    if flushed:
        shell.executor.end_turn()


def find(shell: Shell, value: bytes, offset: int = 0, limit: int = 10) -> None:
    shell.ask(Operation.FIND, m.FindRequest(TOPIC_ID, 0, value, offset, limit))


def backward(shell: Shell, before: int = -1, bytes_max: int = 1 << 20) -> None:
    shell.ask(Operation.FETCH_BACKWARD, m.FetchBackwardRequest(TOPIC_ID, 0, before, bytes_max))


def offsets(raw: list[bytes]) -> list[int]:
    return [o for header, _ in split(raw[0]) for o in range(header.base_offset, header.next_offset)]


def test_find_answers_with_offsets_and_their_batches_below_the_watermark(shell: Shell) -> None:
    shell.logs[KEY].secondary.define(("header", "k"))
    tagged(shell, b"a", b"b")
    tagged(shell, b"b", b"b")
    shell.commit()
    tagged(shell, b"a", flushed=False)
    shell.answers.sent.clear()
    find(shell, b"a")
    _, response, raw = shell.answers.sent.pop()
    assert response == m.FindResponse([0], 4, 4, 0, 0)
    assert offsets(raw) == [0, 1]
    find(shell, b"b", 2, 1)
    _, response, raw = shell.answers.sent.pop()
    assert (response.offsets, response.scanned_to, offsets(raw)) == ([2], 3, [2, 3])


def test_find_without_an_index_is_an_error_of_its_own(shell: Shell) -> None:
    find(shell, b"a")
    assert shell.answer.code == errors.NoSuchIndex.code


def test_backward_answers_with_what_lies_before(shell: Shell) -> None:
    for _ in range(3):
        tagged(shell, b"a", b"b")
    shell.commit()
    tagged(shell, b"a", flushed=False)
    shell.answers.sent.clear()
    for before, bytes_max, expected in [(-1, 1 << 20, range(6)), (4, 1, range(2, 4)), (7, 1, range(4, 6))]:
        backward(shell, before, bytes_max)
        _, response, raw = shell.answers.sent.pop()
        assert (response.before, response.high_watermark) == (min(before, 6) if before > 0 else 6, 6)
        assert offsets(raw) == list(expected)
    backward(shell, 8)
    assert shell.answer.code == errors.OffsetOutOfRange.code


@pytest.mark.parametrize("ask", [lambda shell: find(shell, b"a"), backward])
def test_neither_is_answered_without_a_lease_or_from_a_damaged_log(shell: Shell, monkeypatch, ask) -> None:
    shell.logs[KEY].secondary.define(("header", "k"))
    tagged(shell, b"a")
    shell.commit()
    shell.answers.sent.clear()

    def damaged(*_: Any) -> None:
        raise errors.CorruptLog("damaged")

    for name in ("find", "read_backward"):
        monkeypatch.setattr(type(shell.logs[KEY]), name, damaged)
    ask(shell)
    assert shell.answer.code == errors.StorageFailed.code
    shell.now_ms += 1_000_000
    ask(shell)
    assert shell.answer.code == errors.LeaseExpired.code


def test_an_index_is_described_with_its_partition(shell: Shell) -> None:
    shell.logs[KEY].secondary.define(("header", "k"))
    tagged(shell, b"a", b"b")
    shell.answers.sent.clear()
    shell.ask(Operation.DESCRIBE_PARTITIONS, m.DescribePartitionsRequest([m.PartitionEntry(TOPIC_ID, 0)], True))
    index = shell.answer.results[0].index
    assert (index.definition, index.covered_to, index.lag_records) == ("header:k", 0, 2)
    assert index.lag_bytes == shell.logs[KEY].size_bytes
