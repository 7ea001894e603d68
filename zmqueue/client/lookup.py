"""Records asked for by value, or from the end backwards: single questions to a partition's leader, waited for.

Neither has to do with what the consumer is assigned or where it stands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msgspec import Struct

from zmqueue.client.network import Answer
from zmqueue.client.records import RecordBatch, deserialized, open_batches
from zmqueue.client.routing import Router
from zmqueue.client.serializers import Deserializing
from zmqueue.errors import CorruptBatch, IllegalState, RequestTimedOut, UnknownTopicOrPartition, ZmqueueError
from zmqueue.model import NO_BROKER, ConsumerRecord, KiB, TopicPartition
from zmqueue.wire import messages
from zmqueue.wire.batch import parse_header
from zmqueue.wire.fields import canonical
from zmqueue.wire.frames import Operation

ATTEMPT_S = 5.0
PAUSE_S = 0.05
FIND_LIMIT_MAX = 10_000
# A few records need few bytes; whoever reads on gets more at once.
BACKWARD_BYTES_MIN = 64 * KiB


class RecordLookup:
    def __init__(
        self,
        router: Router,
        timeout_s: float,
        closing: threading.Event,
        bytes_max: int,
        key: Deserializing | None,
        value: Deserializing | None,
    ) -> None:
        self._router = router
        self._timeout_s = timeout_s
        self._closing = closing
        self._bytes_max = bytes_max
        self._deserializers = key, value

    # -- by value

    def find(self, starts: dict[TopicPartition, int], value: Any, limit: int) -> list[ConsumerRecord]:
        form = canonical(value)
        if form is None:
            raise IllegalState(f"{type(value).__name__} is not a value that a field can have")
        if limit < 1:
            raise IllegalState(f"limit: {limit} is below 1")
        found: list[ConsumerRecord] = []
        for partition, start in starts.items():
            self._find_in(partition, form, start, limit, found)
            if len(found) >= limit:
                break
        return found

    def _find_in(
        self, partition: TopicPartition, form: bytes, start: int, limit: int, found: list[ConsumerRecord]
    ) -> None:
        """Up to what was the end when it began. Each answer says from where to go on."""
        at, end = start, -1
        while len(found) < limit and (end < 0 or at < end):
            left = min(limit - len(found), FIND_LIMIT_MAX)
            request = partial(messages.FindRequest, partition=partition.partition, value=form, offset=at, limit=left)
            answer = self._ask(partition, Operation.FIND, request)
            told: messages.FindResponse = answer.message
            end = told.high_watermark if end < 0 else end
            if told.offsets:
                found += self._picked(partition, answer.raw[0] if answer.raw else b"", told.offsets)
            if told.scanned_to <= at and at >= told.log_start:
                return
            at = told.scanned_to

    def _picked(self, partition: TopicPartition, data: bytes, offsets: list[int]) -> list[ConsumerRecord]:
        wanted = set(offsets)
        records = self._records(open_batches(*partition, data, 0), wanted)
        if len(records) != len(wanted):
            raise CorruptBatch(f"{partition.topic}-{partition.partition}: an answer without the records that it names")
        return records

    # -- backwards

    def backward(self, partition: TopicPartition, before: int | None, count: int) -> list[ConsumerRecord]:
        """The newest first."""
        if count < 1 or (before is not None and before < 0):
            raise IllegalState(f"count {count}, before {before}: neither may be negative, nor count 0")
        found: list[ConsumerRecord] = []
        at = -1 if before is None else before
        bytes_max = min(BACKWARD_BYTES_MIN, self._bytes_max)
        while len(found) < count and at != 0:
            request = partial(
                messages.FetchBackwardRequest, partition=partition.partition, before=at, bytes_max=bytes_max
            )
            answer = self._ask(partition, Operation.FETCH_BACKWARD, request)
            told: messages.FetchBackwardResponse = answer.message
            data = answer.raw[0] if answer.raw else b""
            if not data:
                break
            batches = list(open_batches(*partition, data, told.log_start))
            offsets = [offset for batch in batches for offset in batch.offsets if offset < told.before]
            found += reversed(self._records(batches, set(offsets[len(found) - count :])))
            at = parse_header(data).base_offset
            if at <= told.log_start:
                break
            bytes_max = min(2 * bytes_max, self._bytes_max)
        return found

    # -- both

    def _records(self, batches: Iterable[RecordBatch], wanted: set[int]) -> list[ConsumerRecord]:
        """Those at these offsets. Nobody has asked for the others, so whether they can be deserialized is no matter."""
        picked = (batch.only(wanted) for batch in batches)
        return [record for batch in deserialized(picked, *self._deserializers) for record in batch.records()]

    def _ask(self, partition: TopicPartition, operation: Operation, request: Callable[[bytes], Struct]) -> Answer:
        """Of whoever leads the partition, again after every failure that may pass. `request` takes the topic's id."""
        deadline = time.monotonic() + self._timeout_s
        router = self._router
        router.watch([partition.topic])
        last: ZmqueueError | None = None
        while True:
            router.network.check()
            leader = router.wait_for(partial(self._leader, partition), deadline - time.monotonic())
            if leader is None:
                name = f"{partition.topic}-{partition.partition}"
                raise last or UnknownTopicOrPartition(f"no leader of {name} is known")
            message = request(leader[1])
            answer = router.call(leader[0], operation, message, min(self._timeout_s, ATTEMPT_S))
            if isinstance(answer, Answer):
                return answer
            if not answer.retriable:
                raise answer
            last = answer
            if time.monotonic() >= deadline:
                raise last or RequestTimedOut(f"{operation.name} was not answered in time")
            router.network.post(router.refresh)
            self._closing.wait(PAUSE_S)

    def _leader(self, partition: TopicPartition) -> tuple[int, bytes] | None:
        metadata = self._router.metadata
        leader, _ = metadata.leader(*partition)
        view = metadata.topics.get(partition.topic)
        return (leader, view.topic_id) if leader != NO_BROKER and view is not None else None
