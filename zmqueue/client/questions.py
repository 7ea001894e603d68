"""What can be asked of a cluster without being assigned anything: topics, offsets, single records.

Each call is a question to whoever knows, asked again after failures that may pass, and waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from zmqueue.client.lookup import RecordLookup
from zmqueue.client.network import Answer, Network
from zmqueue.client.offsets import OffsetLookup
from zmqueue.client.routing import Router
from zmqueue.errors import IllegalState
from zmqueue.model import EARLIEST, LATEST, ConsumerRecord, OffsetAndTimestamp, TopicPartition, check_topic_name
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

ASK_PAUSE_S = 0.05
NOT_FOUND_S = 0.5


class Questions:
    """The part of a consumer that has nothing to do with what it reads."""

    _network: Network
    _router: Router
    _offsets: OffsetLookup
    _lookup: RecordLookup
    _closing: threading.Event
    _timeout_s: float

    def topics(self) -> set[str]:
        """The names of all topics, without those of zmqueue itself."""
        request = messages.MetadataRequest(None)
        answer = self._ask_any(Operation.METADATA, request)
        return {topic.name for topic in answer.topics if not topic.name.startswith("__")}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """The numbers of a topic's partitions; None if there is no such topic."""
        check_topic_name(topic, internal=True)
        self._network.check()
        self._router.watch([topic])
        metadata = self._router.metadata
        self._router.wait_for(lambda: metadata.known or None, self._timeout_s)
        view = self._router.wait_for(lambda: metadata.topics.get(topic), min(NOT_FOUND_S, self._timeout_s))
        return set(view.partitions) if view is not None else None

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        rows = self._offsets.find(dict.fromkeys(map(_partition, partitions), EARLIEST))
        return {partition: row.offset for partition, row in rows.items()}

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record that consumers may read, of each partition."""
        rows = self._offsets.find(dict.fromkeys(map(_partition, partitions), LATEST))
        return {partition: row.offset for partition, row in rows.items()}

    def offsets_for_times(
        self, timestamps: dict[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition that is at least so young (ms), or None."""
        if any(timestamp < 0 for timestamp in timestamps.values()):
            raise IllegalState("a timestamp is negative")
        rows = self._offsets.find({_partition(partition): at for partition, at in timestamps.items()})
        return {
            partition: OffsetAndTimestamp(row.offset, row.timestamp, row.leader_epoch) if row.offset >= 0 else None
            for partition, row in rows.items()
        }

    def _ask_any(self, operation: Operation, request: Any) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._router.wait_for(lambda: self._router.metadata.known or None, deadline - time.monotonic())
            answer = self._router.call(None, operation, request, min(5.0, max(0.001, deadline - time.monotonic())))
            if isinstance(answer, Answer):
                return answer.message
            if not answer.retriable or time.monotonic() >= deadline:
                raise answer
            self._closing.wait(ASK_PAUSE_S)

    def find(
        self, topic: str, value: Any, partitions: Iterable[int] | None = None, limit: int = 100, offsets: Any = None
    ) -> list[ConsumerRecord]:
        """The first records with this value (text, bytes, a number, a bool or None) where the topic is indexed by it.

        By partition and in their order; from `offsets` (by partition) on, where given. Raises NoSuchIndex.
        """
        numbers = self.partitions_for_topic(topic) if partitions is None else partitions
        wanted = [TopicPartition(topic, number) for number in sorted(numbers or ())]
        return self._lookup.find({each: (offsets or {}).get(each, 0) for each in wanted}, value, limit)

    def read_backward(
        self, partition: TopicPartition, before: int | None = None, count: int = 1
    ) -> list[ConsumerRecord]:
        """The last `count` records before an offset (None: before the end), the newest first."""
        return self._lookup.backward(_partition(partition), before, count)


def _partition(partition: tuple[str, int]) -> TopicPartition:
    return TopicPartition(*partition)
