"""When the first record of a range of offsets was written, read from the log itself.

The record at an offset may be gone, by retention or compaction: then it is the first that is left after it. Each round
asks every leader once, for as little as one batch per partition, and for more where that held no record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from zmqueue.client.network import Answer
from zmqueue.client.records import end_of_range, open_batches
from zmqueue.client.routing import Call, Router
from zmqueue.errors import OffsetOutOfRange, ZmqueueError
from zmqueue.model import NO_BROKER, MiB
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

ATTEMPT_S = 5.0
BYTES_MAX = 8 * MiB
ENTRIES_MAX = 1024


class FirstRecords:
    """For one topic, as metadata shows it. A partition that cannot be read now is not asked again elsewhere."""

    def __init__(self, router: Router, topic: messages.TopicInfo) -> None:
        self._router = router
        self._topic = topic
        self._leaders = {partition.partition: partition.leader for partition in topic.partitions}
        self._found: dict[int, int | None] = {}
        self._left: dict[int, range] = {}

    def timestamps(self, ranges: dict[int, range], deadline: float) -> dict[int, int | None]:
        """By partition, in ms: None where no record is left in the range. What could not be read is left out."""
        self._found = {}
        self._left = {number: left for number, left in ranges.items() if self._leaders.get(number, NO_BROKER) >= 0}
        bytes_max = 1
        while self._left and time.monotonic() < deadline:
            before = dict(self._left)
            for numbers, call in list(self._ask(bytes_max, deadline)):
                self._take(numbers, call)
            if self._left == before:
                break  # whoever answers without getting on would do so for ever
            bytes_max = min(2 * bytes_max + 4096, BYTES_MAX)
        return self._found

    def _ask(self, bytes_max: int, deadline: float) -> Iterator[tuple[list[int], Call]]:
        by_leader: dict[int, list[int]] = {}
        for number in self._left:
            by_leader.setdefault(self._leaders[number], []).append(number)
        timeout_s = max(0.001, min(ATTEMPT_S, deadline - time.monotonic()))
        for leader, numbers in by_leader.items():
            asked = numbers[:ENTRIES_MAX]
            entries = [
                messages.FetchEntry(self._topic.topic_id, number, self._left[number].start, bytes_max)
                for number in asked
            ]
            request = messages.FetchRequest(0, 1, BYTES_MAX, 0, entries)
            yield asked, self._router.begin(leader, Operation.FETCH, request, timeout_s)

    def _take(self, numbers: list[int], call: Call) -> None:
        answer = call.result()
        if not isinstance(answer, Answer) or not len(answer.message.results) == len(numbers) == len(answer.raw):
            self._give_up(numbers)
            return
        for number, result, data in zip(numbers, answer.message.results, answer.raw, strict=True):
            try:
                self._look(number, result, bytes(data))
            except ZmqueueError:
                self._give_up([number])

    def _look(self, number: int, result: messages.FetchResult, data: bytes) -> None:
        left = self._left[number]
        at = left.start
        if result.error == OffsetOutOfRange.code and result.log_start > at:
            at = result.log_start  # deleted meanwhile
        elif result.error:
            self._give_up([number])
            return
        elif data:
            for batch in open_batches(self._topic.name, number, data, at):
                if len(batch) and batch.base_offset < left.stop:
                    self._settle(number, batch.timestamps[0])
                    return
            at, _ = end_of_range(data, at)
        if at >= left.stop:
            self._settle(number, None)
        else:
            self._left[number] = range(at, left.stop)

    def _settle(self, number: int, timestamp: int | None) -> None:
        self._found[number] = timestamp
        del self._left[number]

    def _give_up(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._left.pop(number, None)
