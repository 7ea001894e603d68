"""Consumers' fetches: read what is there, and wait for more where too little is.

A fetch that finds fewer bytes than it wants is parked under every partition it names; it is tried again when one of
them has more to read, and answered with whatever is there at its deadline, or at once when a partition has moved away.
Reads stop at the high watermark, and at the read lease of this broker. A reader that says which epoch the record before
its offset was of hears where its history and the log's part, if they do: after an unclean election offsets are used
again, and it would go on among records that are not those it knew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from msgspec import Struct

from zmqueue import errors
from zmqueue.broker.logs import Logs
from zmqueue.config import BrokerConfig
from zmqueue.core.epochs import NO_EPOCH
from zmqueue.core.node import Node
from zmqueue.errors import ZmqueueError
from zmqueue.model import PartitionKey
from zmqueue.wire.frames import Head
from zmqueue.wire.messages import FetchEntry, FetchRequest, FetchResponse, FetchResult

_logger = logging.getLogger(__name__)

Reply = Callable[[tuple[bytes, Head], FetchResponse, list[bytes]], None]


class Parked(Struct, eq=False):
    token: tuple[bytes, Head]
    request: FetchRequest
    deadline_ms: int
    done: bool = False


class Fetches:
    def __init__(self, node: Node, logs: Logs, config: BrokerConfig, reply: Reply) -> None:
        self._node = node
        self._logs = logs
        self._config = config
        self._reply = reply
        self._parked: dict[PartitionKey, dict[Parked, None]] = {}
        self._deadlines: list[tuple[int, int, Parked]] = []
        self._order = count()
        self.waiting = 0

    def on_fetch(self, token: tuple[bytes, Head], request: FetchRequest, now_ms: int) -> None:
        wait_ms = min(request.wait_ms, self._config.fetch_wait_ms_max)
        parked = Parked(token, request, now_ms + wait_ms)
        if self._try(parked, now_ms, last=wait_ms == 0):
            return
        self.waiting += 1
        for entry in request.entries:
            self._parked.setdefault(PartitionKey(entry.topic_id, entry.partition), {})[parked] = None
        heappush(self._deadlines, (parked.deadline_ms, next(self._order), parked))

    def on_advanced(self, key: PartitionKey, now_ms: int) -> None:
        for parked in list(self._parked.get(key, ())):
            if self._try(parked, now_ms):
                self._unpark(parked)

    def on_moved(self, key: PartitionKey, now_ms: int) -> None:
        for parked in list(self._parked.get(key, ())):
            self._try(parked, now_ms, last=True)
            self._unpark(parked)

    def on_tick(self, now_ms: int) -> None:
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now_ms):
            parked = heappop(self._deadlines)[2]
            if not parked.done:
                self._try(parked, now_ms, last=True)
                self._unpark(parked)

    @property
    def next_deadline_ms(self) -> int | None:
        return self._deadlines[0][0] if self._deadlines else None

    def _unpark(self, parked: Parked) -> None:
        parked.done = True
        self.waiting -= 1
        for entry in parked.request.entries:
            key = PartitionKey(entry.topic_id, entry.partition)
            waiting = self._parked.get(key)
            if waiting is not None:
                waiting.pop(parked, None)
                if not waiting:
                    del self._parked[key]

    def _try(self, parked: Parked, now_ms: int, *, last: bool = False) -> bool:
        """Answer if there is enough, if something is wrong, or if this is the last chance."""
        request = parked.request
        bytes_left = min(request.bytes_max, self._config.fetch_bytes_max)
        records_max = request.records_max
        results: list[FetchResult] = []
        frames: list[bytes] = []
        total = 0
        failed = False
        for entry in request.entries:
            # Once the request's limit is used up the other partitions get nothing; the first always gets a batch.
            limit = min(entry.bytes_max, bytes_left) if bytes_left > 0 else 0
            result, data = self._read(entry, limit, records_max, now_ms) if limit or not total else (None, b"")
            if result is None:
                result = self._describe(entry)
            failed = failed or result.error != 0
            total += len(data)
            bytes_left -= len(data)
            results.append(result)
            frames.append(data)
        if not (last or failed or total >= max(1, request.bytes_min)):
            return False
        self._reply(parked.token, FetchResponse(results), frames)
        return True

    def _describe(self, entry: FetchEntry) -> FetchResult:
        """A partition that this answer has no room for."""
        replica = self._node.replicas.get(PartitionKey(entry.topic_id, entry.partition))
        if replica is None or replica.leading is None:
            return self._elsewhere(PartitionKey(entry.topic_id, entry.partition))
        return FetchResult(0, replica.log.high_watermark, replica.log.log_start, replica.leader_epoch, replica.leader)

    def _elsewhere(self, key: PartitionKey) -> FetchResult:
        partition = self._node.state.partition(key)
        if partition is None:
            return FetchResult(errors.UnknownTopicId.code)
        return FetchResult(errors.NotLeader.code, -1, -1, partition.leader_epoch, partition.leader)

    def _read(self, entry: FetchEntry, limit: int, records_max: int, now_ms: int) -> tuple[FetchResult, bytes]:
        key = PartitionKey(entry.topic_id, entry.partition)
        replica = self._node.replicas.get(key)
        if replica is None or replica.leading is None:
            return self._elsewhere(key), b""
        log = replica.log
        result = FetchResult(0, log.high_watermark, log.log_start, replica.leader_epoch, replica.leader)
        if not self._node.readable(now_ms):
            result.error = errors.LeaseExpired.code
            return result, b""
        if entry.last_epoch > replica.leader_epoch:
            # The reader was served by a later leader than we are: we know nothing about what it has read.
            result.error = errors.UnknownEpoch.code
            return result, b""
        if entry.offset >= log.log_start and entry.last_epoch != NO_EPOCH:
            parting = log.epochs.parting(entry.last_epoch, entry.offset, log.first_offset, log.log_end)
            if parting is not None:
                result.error, result.truncated_to = errors.LogTruncated.code, parting
                return result, b""
        if not log.log_start <= entry.offset <= log.log_end:
            result.error = errors.OffsetOutOfRange.code
            return result, b""
        # Between watermark and end, as after an election: readable soon, so the reader just waits.
        if entry.offset >= log.high_watermark:
            return result, b""
        try:
            return result, self._logs[key].read(entry.offset, limit, log.high_watermark, records_max)
        except errors.CorruptLog as error:
            _logger.error("partition %s: %s", key, error)
            self._node.on_lost(key)
            result.error = errors.StorageFailed.code
        except ZmqueueError as error:
            result.error = error.code
        return result, b""
