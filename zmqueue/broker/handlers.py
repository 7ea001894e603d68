"""Requests of clients: each checked, handed to the core or answered from what the broker knows, and always answered.

A request that waits (a produce for its acknowledgement, a command for Raft, a fetch for records) holds nothing but its
token: who asked, and under which head. How much may wait is bounded: per connection, in all, and in bytes of records,
those on their way in as well as those that a client has asked for and does not read; a request beyond that is answered
`BUSY`, which clients retry.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from zmqueue import errors
from zmqueue.broker.fetches import Fetches
from zmqueue.broker.logs import Logs
from zmqueue.broker.unread import COUNTED_BYTES_MIN, Unread
from zmqueue.config import Config
from zmqueue.core import commands as c
from zmqueue.core import topic_config
from zmqueue.core.effects import Effect
from zmqueue.core.node import Node
from zmqueue.core.replica import Replica
from zmqueue.errors import ZmqueueError
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import ACKS_NONE, EARLIEST, LATEST, NO_BROKER, KiB, PartitionKey, check_topic_name
from zmqueue.transport import Frames, Socket
from zmqueue.wire import frames as f
from zmqueue.wire import messages as m
from zmqueue.wire.batch import Batch, check_body, check_produced, parse_header
from zmqueue.wire.frames import Head, Operation

_logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 100
COMMAND_TIMEOUT_MS = 15_000
PRODUCER_IDS_PER_BLOCK = 1_000
# What one find request may open: a few milliseconds of the loop's time. Its client goes on with the next.
FIND_WORK_BYTES = 256 * KiB
UNREAD = "earlier answers have not been read"

Token = tuple[bytes, Head]


class Produce(Struct, eq=False):
    """A produce request until each of its entries has a result."""

    token: Token
    results: list[m.ProduceResult | None]
    remaining: int
    size: int
    silent: bool


class Handlers:
    def __init__(
        self,
        node: Node,
        logs: Logs,
        config: Config,
        storage: str,
        status: Callable[[], m.StatusResponse],
        low_disk: Callable[[], bool],
        run: Callable[[list[Effect]], None],
        clock: Callable[[], int],
    ) -> None:
        self.bad_frames = 0
        self.fetches = Fetches(node, logs, config.broker, self._answer_fetch)
        self._node = node
        self._logs = logs
        self._config = config
        self._storage = storage
        self._status = status
        self._low_disk = low_disk
        self._run = run
        self._clock = clock
        self._socket: Socket | None = None
        self._waiting: dict[bytes, int] = {}  # unanswered requests by connection
        self._waiting_total = 0
        self._bytes_in_flight = 0
        self._unread = Unread(config.broker.fetch_bytes_max, config.broker.bytes_in_flight_max)
        self._producer_ids = iter(range(0))
        self._producer_id_waiters: list[Token] = []
        self._table: dict[Operation, Callable[[Token, Any, Frames], None]] = {
            Operation.METADATA: self._metadata,
            Operation.STATUS: lambda token, request, raw: self._answer(token, self._status()),
            Operation.CREATE_TOPIC: self._create_topic,
            Operation.DELETE_TOPIC: self._delete_topic,
            Operation.PRODUCER_ID: self._producer_id,
            Operation.PRODUCE: self._produce,
            Operation.FETCH: self._fetch,
            Operation.LIST_OFFSETS: self._list_offsets,
            Operation.DESCRIBE_PARTITIONS: self._describe_partitions,
            Operation.ELECT_UNCLEAN: self._elect_unclean,
            Operation.DELETE_RECORDS: self._delete_records,
            Operation.ALTER_TOPIC: self._alter_topic,
            Operation.FIND: self._find,
            Operation.FETCH_BACKWARD: self._fetch_backward,
        }

    def bind(self, socket: Socket) -> None:
        self._socket = socket

    # -- in and out ----------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        assert self._socket is not None
        for _ in range(MESSAGES_PER_TURN):
            frames = self._socket.receive()
            if frames is None:
                return
            self._on_message(frames)

    def _on_message(self, frames: Frames) -> None:
        identity, *message = frames
        head = None
        try:
            head = f.parse_head(message)
            request = f.parse_request(head, message)
            if head.operation not in self._table:
                raise errors.UnknownOperation(f"operation {head.operation.name} is for brokers among themselves")
        except ZmqueueError as error:
            self.bad_frames += 1
            head = head or f.echo(message)
            if head is not None:
                self._send(identity, f.failure(head, error.code, str(error)))
            return
        token = (identity, head)
        waiting = self._waiting.get(identity, 0)
        limits = self._config.broker
        self._waiting[identity] = waiting + 1
        self._waiting_total += 1
        try:
            if waiting >= limits.requests_per_connection_max or self._waiting_total > limits.requests_waiting_max:
                raise errors.Busy(f"{waiting} requests of this connection are waiting")
            if not self._node.is_registered and head.operation not in (Operation.STATUS, Operation.METADATA):
                raise errors.BrokerFenced("this broker is starting")
            self._table[head.operation](token, request, message[2:])
        except ZmqueueError as error:
            self._fail(token, error.code, str(error))
        except Exception:
            # A mistake of ours must not take the broker down, nor leave the client without an answer.
            _logger.exception("request %s failed", head.operation.name)
            self._fail(token, errors.UnknownServerError.code, "the broker failed; see its log")

    def _send(self, identity: bytes, frames: Frames) -> None:
        assert self._socket is not None
        self._socket.send([identity, *frames])  # a peer that has gone away needs no answer

    def _done(self, token: Token) -> None:
        identity = token[0]
        self._waiting_total -= 1
        if self._waiting[identity] == 1:
            del self._waiting[identity]
        else:
            self._waiting[identity] -= 1

    def _answer(self, token: Token, message: Struct, raw: Frames | None = None) -> None:
        self._done(token)
        self._send(token[0], f.response(token[1], message, raw))

    def _fail(self, token: Token, code: int, text: str) -> None:
        self._done(token)
        self._send(token[0], f.failure(token[1], code, text))

    def _fetch(self, token: Token, request: m.FetchRequest, raw: Frames) -> None:
        if not self._unread.has_room(token[0]):  # looked at again before the answer leaves; here it spares the disk
            raise errors.Busy(UNREAD)
        self.fetches.on_fetch(token, request, self._clock())

    def _answer_fetch(self, token: Token, response: m.FetchResponse, raw: Frames) -> None:
        identity, size = token[0], sum(map(len, raw))
        if size < COUNTED_BYTES_MIN:
            self._answer(token, response, raw)
        elif not self._unread.has_room(identity):
            self._fail(token, errors.Busy.code, UNREAD)
        else:
            self._done(token)
            assert self._socket is not None
            departure = self._socket.send_traced([identity, *f.response(token[1], response, raw)])
            if departure is not None:
                self._unread.add(identity, size, departure)

    @property
    def waiting(self) -> int:
        return self._waiting_total

    # -- records -------------------------------------------------------------------------------------------------

    def _produce(self, token: Token, request: m.ProduceRequest, raw: Frames) -> None:
        entries = request.entries
        if len(raw) != 2 * len(entries) or not entries:
            raise errors.InvalidRequest(f"{len(entries)} entries need {2 * len(entries)} frames, not {len(raw)}")
        size = sum(map(len, raw))
        if size > self._config.broker.request_bytes_max:
            raise errors.MessageTooLarge(f"a request of {size} bytes is larger than broker.request_bytes_max")
        if self._bytes_in_flight + size > self._config.broker.bytes_in_flight_max:
            raise errors.Busy("too many bytes of records are waiting to be acknowledged")
        now_ms = self._clock()
        silent = request.acks == ACKS_NONE
        pending = Produce(token, [None] * len(entries), len(entries), size, silent)
        self._bytes_in_flight += size
        for at, entry in enumerate(entries):
            header_bytes, body = raw[2 * at], raw[2 * at + 1]
            try:
                header = parse_header(header_bytes)
                check_produced(header, self._config.log.batch_bytes_max)
                check_body(header, body)
            except ZmqueueError as error:
                self.on_produced((pending, at), m.ProduceResult(error.code))
                continue
            key = PartitionKey(entry.topic_id, entry.partition)
            deadline_ms = now_ms + request.timeout_ms
            batch = Batch(header, body)
            full = self._over_quota(key)
            self._run(
                self._node.on_produce(key, (pending, at), batch, request.acks, deadline_ms, now_ms, over_quota=full)
            )
            if silent and pending.results[at] is None:
                self.on_produced((pending, at), m.ProduceResult(0))

    def _over_quota(self, key: PartitionKey) -> bool:
        log = self._logs.get(key)
        return log is not None and 0 <= log.settings.quota_bytes <= log.size_bytes

    def on_produced(self, token: tuple[Produce, int], result: m.ProduceResult) -> None:
        pending, at = token
        if pending.results[at] is not None:
            return
        pending.results[at] = result
        pending.remaining -= 1
        if pending.remaining:
            return
        self._bytes_in_flight -= pending.size
        if pending.silent:
            self._done(pending.token)
        else:
            self._answer(pending.token, m.ProduceResponse([r for r in pending.results if r is not None]))

    def _leading(self, key: PartitionKey) -> Replica:
        replica = self._node.replicas.get(key)
        if replica is None or replica.leading is None:
            raise self._absent(key)
        return replica

    def _absent(self, key: PartitionKey) -> ZmqueueError:
        return errors.UnknownTopicId() if self._node.state.partition(key) is None else errors.NotLeader()

    def _list_offsets(self, token: Token, request: m.ListOffsetsRequest, raw: Frames) -> None:
        self._answer(token, m.ListOffsetsResponse([self._offset(entry) for entry in request.entries]))

    def _offset(self, entry: m.OffsetEntry) -> m.OffsetResult:
        key = PartitionKey(entry.topic_id, entry.partition)
        try:
            replica = self._readable(key)
            log = replica.log
            if entry.timestamp == EARLIEST:
                return m.OffsetResult(0, log.log_start, -1, replica.leader_epoch)
            if entry.timestamp == LATEST:
                return m.OffsetResult(0, log.high_watermark, -1, replica.leader_epoch)
            found = self._logs[key].offset_for_time(entry.timestamp, log.high_watermark)
        except ZmqueueError as error:
            return m.OffsetResult(error.code)
        offset, timestamp = found or (-1, -1)
        return m.OffsetResult(0, offset, timestamp, replica.leader_epoch)

    def _delete_records(self, token: Token, request: m.DeleteRecordsRequest, raw: Frames) -> None:
        key = PartitionKey(request.topic_id, request.partition)
        self._run(self._node.on_delete_records(key, request.offset, self._clock()))
        log_start = self._leading(key).log.log_start
        if log_start < request.offset:
            raise errors.StorageFull("there is no room to write down where the log begins")
        self._answer(token, m.DeleteRecordsResponse(log_start))

    def _readable(self, key: PartitionKey) -> Replica:
        replica = self._leading(key)
        if not self._node.readable(self._clock()):
            raise errors.LeaseExpired()
        return replica

    def _find(self, token: Token, request: m.FindRequest, raw: Frames) -> None:
        key = PartitionKey(request.topic_id, request.partition)
        replica = self._readable(key)
        view = replica.log
        with self._undamaged(key):
            found = self._logs[key].find(
                request.value, request.offset, view.high_watermark, request.limit, FIND_WORK_BYTES
            )
        response = m.FindResponse(
            found.offsets, found.scanned_to, view.high_watermark, view.log_start, replica.leader_epoch
        )
        self._answer(token, response, [b"".join(found.batches)])

    def _fetch_backward(self, token: Token, request: m.FetchBackwardRequest, raw: Frames) -> None:
        key = PartitionKey(request.topic_id, request.partition)
        replica = self._readable(key)
        view = replica.log
        if request.before > view.log_end:
            raise errors.OffsetOutOfRange(f"offset {request.before} is not in {view.log_start}..{view.high_watermark}")
        before = view.high_watermark if request.before < 0 else min(request.before, view.high_watermark)
        bytes_max = min(request.bytes_max, self._config.broker.fetch_bytes_max)
        with self._undamaged(key):
            data = self._logs[key].read_backward(before, bytes_max, view.high_watermark)
        response = m.FetchBackwardResponse(before, view.high_watermark, view.log_start, replica.leader_epoch)
        self._answer(token, response, [data])

    @contextmanager
    def _undamaged(self, key: PartitionKey) -> Iterator[None]:
        """Damage that a reader meets is reported to the cluster; the client hears that this disk failed."""
        try:
            yield
        except errors.CorruptLog as error:
            _logger.error("partition %s: %s", key, error)
            self._node.on_lost(key)
            raise errors.StorageFailed(str(error)) from error

    def _describe_partitions(self, token: Token, request: m.DescribePartitionsRequest, raw: Frames) -> None:
        rows = [self._health(entry, request.own) for entry in request.entries]
        self._answer(token, m.DescribePartitionsResponse(rows))

    def _health(self, entry: m.PartitionEntry, own: bool) -> m.PartitionHealth:
        key = PartitionKey(entry.topic_id, entry.partition)
        replica = self._node.replicas.get(key)
        if replica is None or not (own or replica.leading):
            return m.PartitionHealth(self._absent(key).code)
        view, log = replica.log, self._logs[key]
        return m.PartitionHealth(
            0,
            view.log_start,
            view.high_watermark,
            view.log_end,
            log.segment_count,
            log.size_bytes,
            view.epochs.last,
            _index_health(log),
        )

    # -- the cluster ---------------------------------------------------------------------------------------------

    def _metadata(self, token: Token, request: m.MetadataRequest, raw: Frames) -> None:
        state = self._node.state
        if not state.brokers:
            raise errors.BrokerFenced("this broker is starting, and has not heard of any cluster yet")
        if request.topics is None:
            topics = list(state.topics.values())
        else:
            topics = [topic for name in request.topics if (topic := state.topic_named(name)) is not None]
        self._answer(
            token,
            m.MetadataResponse(
                cluster_id=self._node.cluster_id,
                controller=self._node.controller_id,
                index=state.index,
                brokers=[m.BrokerInfo(b.id, b.host, b.client_port, b.epoch, b.fenced) for b in state.brokers.values()],
                topics=[
                    m.TopicInfo(
                        name=topic.name,
                        topic_id=topic.topic_id,
                        replication_factor=topic.replication_factor,
                        min_insync_replicas=topic.min_insync_replicas,
                        storage=topic.storage,
                        config=topic.config,
                        config_version=topic.config_version,
                        partitions=[
                            m.PartitionInfo(n, p.leader, p.leader_epoch, p.replicas, p.isr, p.elr)
                            for n, p in enumerate(topic.partitions)
                        ],
                    )
                    for topic in topics
                ],
            ),
        )

    def _submit(self, command: c.AnyCommand, done: Callable[[c.Outcome], None]) -> None:
        self._run(self._node.submit(command, done, self._clock() + COMMAND_TIMEOUT_MS))

    def on_command(self, done: Callable[[c.Outcome], None], outcome: c.Outcome) -> None:
        done(outcome)

    def _create_topic(self, token: Token, request: m.CreateTopicRequest, raw: Frames) -> None:
        check_topic_name(request.name)
        topic_config.check(request.config)
        if self._low_disk():
            raise errors.StorageFull("the disk is nearly full: no topics are created until there is room")
        defaults, state = self._config.topics, self._node.state
        partitions = defaults.default_partitions if request.partitions is None else request.partitions
        if not 1 <= partitions <= defaults.partitions_max - sum(len(t.partitions) for t in state.topics.values()):
            raise errors.InvalidPartitions(
                f"{partitions} partitions: at least 1, and at most {defaults.partitions_max} in the cluster"
            )
        if len(state.topics) >= defaults.topics_max:
            raise errors.InvalidTopic(f"the cluster has {defaults.topics_max} topics, its limit")
        factor = request.replication_factor
        if factor is None:
            factor = max(1, min(defaults.replication_factor, len(state.live_brokers())))
        mode = topic_config.storage(request.config, self._storage)
        command = c.CreateTopic(
            name=request.name,
            topic_id=request.topic_id or secrets.token_bytes(16),
            partitions=partitions,
            replication_factor=factor,
            min_insync_replicas=topic_config.min_insync_replicas(request.config, factor, mode),
            storage=mode,
            config=dict(request.config),
        )

        def done(outcome: c.Outcome) -> None:
            if outcome.code:
                self._fail(token, outcome.code, outcome.message)
            else:
                self._answer(token, m.CreateTopicResponse(command.topic_id, partitions, factor))

        self._submit(command, done)

    def _alter_topic(self, token: Token, request: m.AlterTopicRequest, raw: Frames) -> None:
        check_topic_name(request.name)
        topic = self._node.state.topics.get(request.topic_id)
        if topic is not None:
            topic_config.altered(topic.config, request.changes)  # to refuse what cannot be before Raft is asked
        # On a full disk too: less retention is what makes room.
        command = c.SetConfig(request.name, request.topic_id, request.config_version, dict(request.changes))
        self._submit(command, self._when_done(token))

    def _delete_topic(self, token: Token, request: m.DeleteTopicRequest, raw: Frames) -> None:
        check_topic_name(request.name)

        self._submit(c.DeleteTopic(request.name, request.topic_id), self._when_done(token))

    def _elect_unclean(self, token: Token, request: m.ElectUncleanRequest, raw: Frames) -> None:
        partition = c.PartitionRef(request.topic_id, request.partition)
        self._submit(c.UncleanElect(partition, request.broker), self._when_done(token))

    def _when_done(self, token: Token) -> Callable[[c.Outcome], None]:
        def done(outcome: c.Outcome) -> None:
            if outcome.code:
                self._fail(token, outcome.code, outcome.message)
            else:
                self._answer(token, m.Done())

        return done

    def _producer_id(self, token: Token, request: m.ProducerIdRequest, raw: Frames) -> None:
        """Ids come from Raft in blocks, so that most producers start without waiting for it."""
        producer_id = next(self._producer_ids, None)
        if producer_id is not None:
            self._answer(token, m.ProducerIdResponse(producer_id, 0))
            return
        self._producer_id_waiters.append(token)
        if len(self._producer_id_waiters) == 1:
            self._submit(c.AllocateProducerIds(PRODUCER_IDS_PER_BLOCK), self._on_producer_ids)

    def _on_producer_ids(self, outcome: c.Outcome) -> None:
        waiters, self._producer_id_waiters = self._producer_id_waiters, []
        if not outcome.code:
            self._producer_ids = iter(range(outcome.value, outcome.value + PRODUCER_IDS_PER_BLOCK))
        for token in waiters:
            if outcome.code:
                self._fail(token, outcome.code, outcome.message)
            else:
                self._producer_id(token, m.ProducerIdRequest(), [])


def _index_health(log: PartitionLog) -> m.IndexHealth | None:
    stats = log.secondary.stats(log)
    if stats is None:
        return None
    kind, path, *numbers = stats
    return m.IndexHealth(f"{kind}:{path}", *numbers)


def own_status(node: Node, uptime_ms: int, term: int, voting: bool, bad_frames: int) -> m.StatusResponse:
    """How this broker is doing, and how the partitions that it leads or replicates are."""
    leading = [r.leading for r in node.replicas.values() if r.leading]
    offline = sum(1 for r in node.replicas.values() if r.leader == NO_BROKER)
    return m.StatusResponse(
        broker=node.broker,
        epoch=node.epoch,
        fenced=not node.is_live,
        pid=os.getpid(),
        uptime_ms=uptime_ms,
        controller=node.controller_id,
        term=term,
        index=node.state.index,
        voting=voting,
        partitions=len(node.replicas),
        leading=len(leading),
        under_replicated=sum(1 for leader in leading if len(leader.isr) < len(leader.replicas)),
        offline=offline,
        bad_frames=bad_frames,
    )
