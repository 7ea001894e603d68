"""What a producer counts, by the batch: numbers that cost nothing per record.

Counters are written by the IO thread alone, and read by whoever asks. A rate is that of the last `WINDOW_S` or so.
"""

from __future__ import annotations

import time
from collections import deque

from zmqueue.client.buffer import Batch
from zmqueue.errors import ZmqueueError

WINDOW_S = 30.0
_SLOT_S = 1.0


class Rate:
    """A sum per second over a moving window, in slots of a second."""

    __slots__ = ("_slots", "total")

    def __init__(self, now: float) -> None:
        self.total = 0
        self._slots: deque[tuple[float, int]] = deque([(now, 0)])  # when each began, and the total by then

    def add(self, amount: int, now: float) -> None:
        slots = self._slots
        if now - slots[-1][0] >= _SLOT_S:
            slots.append((now, self.total))
            while len(slots) > 1 and now - slots[1][0] >= WINDOW_S:
                slots.popleft()
        self.total += amount

    def per_second(self, now: float) -> float:
        slots = list(self._slots)
        since, before = next((slot for slot in reversed(slots) if now - slot[0] >= WINDOW_S), slots[0])
        return (self.total - before) / max(now - since, _SLOT_S)


class _Group:
    """The numbers of all topics, or of one."""

    __slots__ = ("bytes", "compressed", "errors", "records", "retries")

    def __init__(self, now: float) -> None:
        self.records, self.errors, self.retries, self.bytes = Rate(now), Rate(now), Rate(now), Rate(now)
        self.compressed = 0

    def snapshot(self, now: float) -> dict[str, float]:
        named = {"record-send": self.records, "record-error": self.errors, "record-retry": self.retries}
        found: dict[str, float] = {}
        for name, rate in (named | {"byte": self.bytes}).items():
            found[f"{name}-total"] = rate.total
            found[f"{name}-rate"] = rate.per_second(now)
        found["compression-rate"] = self.compressed / self.bytes.total if self.bytes.total else 1.0
        return found


class ProducerMetrics:
    def __init__(self) -> None:
        now = time.monotonic()
        self._all = _Group(now)
        self._topics: dict[str, _Group] = {}
        self._batches = self._batch_bytes_max = self._batch_bytes = self._records = 0
        self._waited_s = self._waited_s_max = 0.0
        self._requests = Rate(now)
        self._answers = 0
        self._latency_s = self._latency_s_max = 0.0

    def encoded(self, batch: Batch, now: float) -> None:
        """Its columns have become a body: from here on it is resent, not changed."""
        header = batch.header
        assert header is not None
        for group in self._groups(batch, now):
            group.bytes.add(header.raw_length, now)
            group.compressed += header.body_length
        self._batches += 1
        self._records += batch.count
        self._batch_bytes += header.total_bytes
        self._batch_bytes_max = max(self._batch_bytes_max, header.total_bytes)
        waited_s = now - batch.created
        self._waited_s += waited_s
        self._waited_s_max = max(self._waited_s_max, waited_s)

    def requested(self, batches: list[Batch], now: float) -> None:
        """To be called before the batches know that they were sent again."""
        self._requests.add(1, now)
        for batch in batches:
            if batch.sends:
                for group in self._groups(batch, now):
                    group.retries.add(batch.count, now)

    def answered(self, latency_s: float) -> None:
        self._answers += 1
        self._latency_s += latency_s
        self._latency_s_max = max(self._latency_s_max, latency_s)

    def settled(self, batch: Batch, error: ZmqueueError | None) -> None:
        now = time.monotonic()
        for group in self._groups(batch, now):
            (group.records if error is None else group.errors).add(batch.count, now)

    def snapshot(
        self, *, buffer_used: int, buffer_total: int, requests_in_flight: int, interceptor_errors: int
    ) -> dict[str, dict[str, float]]:
        now = time.monotonic()
        batches, answers = max(1, self._batches), max(1, self._answers)
        of_all = self._all.snapshot(now) | {
            "batch-size-avg": self._batch_bytes / batches,
            "batch-size-max": self._batch_bytes_max,
            "records-per-batch-avg": self._records / batches,
            "record-queue-time-avg": 1000 * self._waited_s / batches,
            "record-queue-time-max": 1000 * self._waited_s_max,
            "request-total": self._requests.total,
            "request-rate": self._requests.per_second(now),
            "request-latency-avg": 1000 * self._latency_s / answers,
            "request-latency-max": 1000 * self._latency_s_max,
            "requests-in-flight": requests_in_flight,
            "buffer-total-bytes": buffer_total,
            "buffer-available-bytes": max(0, buffer_total - buffer_used),
            "interceptor-error-total": interceptor_errors,
        }
        topics = {f"producer-topic-metrics.{name}": each.snapshot(now) for name, each in list(self._topics.items())}
        return {"producer-metrics": of_all} | topics

    def _groups(self, batch: Batch, now: float) -> tuple[_Group, _Group]:
        topic = batch.lane.topic
        group = self._topics.get(topic)
        if group is None:
            group = self._topics[topic] = _Group(now)
        return self._all, group
