"""Offsets by time, or of a partition's ends, from the leaders that know them; waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial

from zmqueue.client.routing import Router
from zmqueue.errors import RequestTimedOut, UnknownTopicOrPartition, ZmqueueError, from_code
from zmqueue.model import NO_BROKER, TopicPartition
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

ATTEMPT_S = 5.0
PAUSE_S = 0.05


class OffsetLookup:
    def __init__(self, router: Router, timeout_s: float, closing: threading.Event) -> None:
        self._router = router
        self._timeout_s = timeout_s
        self._closing = closing

    def find(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, messages.OffsetResult]:
        """Asks leaders until every partition has its answer, or the time is over. `wanted` has timestamps."""
        deadline = time.monotonic() + self._timeout_s
        self._router.watch({partition.topic for partition in wanted})
        found: dict[TopicPartition, messages.OffsetResult] = {}
        last: ZmqueueError | None = None
        while len(found) < len(wanted):
            self._router.network.check()
            left = {partition: at for partition, at in wanted.items() if partition not in found}
            groups = self._router.wait_for(partial(self._by_leader, left), deadline - time.monotonic())
            if groups is None:
                names = ", ".join(f"{p.topic}-{p.partition}" for p in left)
                raise last or UnknownTopicOrPartition(f"no leader of {names} is known")
            for leader, partitions in groups.items():
                error = self._ask(leader, {partition: left[partition] for partition in partitions}, found)
                if error is not None and not error.retriable:
                    raise error
                last = error or last
            if len(found) < len(wanted):
                if time.monotonic() >= deadline:
                    raise last or RequestTimedOut("not every leader answered in time")
                self._router.network.post(self._router.refresh)
                self._closing.wait(PAUSE_S)
        return {partition: found[partition] for partition in wanted}

    def _by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]] | None:
        groups: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            leader, _ = self._router.metadata.leader(*partition)
            if leader != NO_BROKER:
                groups.setdefault(leader, []).append(partition)
        return groups or None

    def _ask(
        self, leader: int, wanted: dict[TopicPartition, int], found: dict[TopicPartition, messages.OffsetResult]
    ) -> ZmqueueError | None:
        """Ask one leader; the last error it gave."""
        topics = self._router.metadata.topics
        known = [(p, at, topics[p.topic].topic_id) for p, at in wanted.items() if p.topic in topics]
        request = messages.ListOffsetsRequest([messages.OffsetEntry(id_, p.partition, at) for p, at, id_ in known])
        answer = self._router.call(leader, Operation.LIST_OFFSETS, request, min(self._timeout_s, ATTEMPT_S))
        if isinstance(answer, ZmqueueError):
            return answer
        last = None
        for (partition, _, _), row in zip(known, answer.message.results, strict=False):
            if row.error:
                last = from_code(row.error, f"{partition.topic}-{partition.partition}")
            else:
                found[partition] = row
        return last
