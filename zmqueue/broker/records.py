"""Requests about records: producing them, reading them, and asking what there is to read.

A produce waits until each of its entries has a result; the bytes of all that wait are bounded. Reads stop at the high
watermark and need this broker's read lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from zmqueue import errors
from zmqueue.broker.fetches import Fetches
from zmqueue.broker.logs import Logs
from zmqueue.broker.replies import Replies, Table, Token
from zmqueue.config import Config
from zmqueue.core.effects import Effect
from zmqueue.core.node import Node
from zmqueue.core.replica import Replica
from zmqueue.errors import ZmqueueError
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import ACKS_NONE, EARLIEST, INTERNAL_PREFIX, LATEST, KiB, PartitionKey
from zmqueue.transport import Frames
from zmqueue.wire import messages as m
from zmqueue.wire.batch import Batch, check_body, check_produced, parse_header
from zmqueue.wire.frames import Operation

_logger = logging.getLogger(__name__)

# What one find request may open: a few milliseconds of the loop's time. Its client goes on with the next.
FIND_WORK_BYTES = 256 * KiB


class Produce(Struct, eq=False):
    """A produce request until each of its entries has a result."""

    token: Token
    results: list[m.ProduceResult | None]
    remaining: int
    size: int
    silent: bool


class RecordRequests:
    def __init__(
        self,
        node: Node,
        logs: Logs,
        config: Config,
        replies: Replies,
        run: Callable[[list[Effect]], None],
        clock: Callable[[], int],
    ) -> None:
        self.fetches = Fetches(node, logs, config.broker, replies.answer_records)
        self._node = node
        self._logs = logs
        self._config = config
        self._replies = replies
        self._run = run
        self._clock = clock
        self._bytes_in_flight = 0
        self._internal: frozenset[bytes] = frozenset()  # topics that brokers alone write to
        self.table: Table = {
            Operation.PRODUCE: self._produce,
            Operation.FETCH: self._fetch,
            Operation.LIST_OFFSETS: self._list_offsets,
            Operation.DESCRIBE_PARTITIONS: self._describe_partitions,
            Operation.DELETE_RECORDS: self._delete_records,
            Operation.FIND: self._find,
            Operation.FETCH_BACKWARD: self._fetch_backward,
        }

    # -- producing -------------------------------------------------------------------------------------------------

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
            if entry.topic_id in self._internal:
                self.on_produced((pending, at), m.ProduceResult(errors.ReservedName.code))
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

    def on_topics(self) -> None:
        names = self._node.state.names
        self._internal = frozenset(topic_id for name, topic_id in names.items() if name.startswith(INTERNAL_PREFIX))

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
            self._replies.drop(pending.token)
        else:
            self._replies.answer(pending.token, m.ProduceResponse([r for r in pending.results if r is not None]))

    # -- reading ---------------------------------------------------------------------------------------------------

    def _fetch(self, token: Token, request: m.FetchRequest, raw: Frames) -> None:
        self._replies.check_unread(token)
        self.fetches.on_fetch(token, request, self._clock())

    def _leading(self, key: PartitionKey) -> Replica:
        replica = self._node.replicas.get(key)
        if replica is None or replica.leading is None:
            raise self._absent(key)
        return replica

    def _absent(self, key: PartitionKey) -> ZmqueueError:
        return errors.UnknownTopicId() if self._node.state.partition(key) is None else errors.NotLeader()

    def _list_offsets(self, token: Token, request: m.ListOffsetsRequest, raw: Frames) -> None:
        self._replies.answer(token, m.ListOffsetsResponse([self._offset(entry) for entry in request.entries]))

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
        if request.topic_id in self._internal:
            raise errors.ReservedName("the records of an internal topic are the brokers' own")
        key = PartitionKey(request.topic_id, request.partition)
        self._run(self._node.on_delete_records(key, request.offset, self._clock()))
        log_start = self._leading(key).log.log_start
        if log_start < request.offset:
            raise errors.StorageFull("there is no room to write down where the log begins")
        self._replies.answer(token, m.DeleteRecordsResponse(log_start))

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
        self._replies.answer(token, response, [b"".join(found.batches)])

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
        self._replies.answer(token, response, [data])

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
        self._replies.answer(token, m.DescribePartitionsResponse(rows))

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


def _index_health(log: PartitionLog) -> m.IndexHealth | None:
    stats = log.secondary.stats(log)
    if stats is None:
        return None
    kind, path, *numbers = stats
    return m.IndexHealth(f"{kind}:{path}", *numbers)
