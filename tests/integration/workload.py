"""A steady load with acks=all whose every acknowledgement is remembered, and the check of what the cluster kept."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from zmqueue import Consumer, Producer, TopicPartition
from zmqueue.model import RecordMetadata


class Load:
    """Sends numbered values to every partition in turn, from one thread, until stopped.

    `acked[partition]` holds (offset, number) of what was acknowledged; `failed` what was refused for good.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, per_second: int = 500) -> None:
        self.topic = topic
        self.partitions = partitions
        self.acked: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.acked_at: dict[int, list[float]] = defaultdict(list)
        self.failed: list[BaseException] = []
        self._pause = 1 / per_second
        self._producer = Producer(bootstrap_servers=bootstrap, acks="all", linger_ms=0)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush(timeout=60)
        self._producer.close()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(self._pause):
            partition = number % self.partitions
            future = self._producer.send(self.topic, b"%d" % number, partition=partition)
            future.add_callback(lambda metadata, n=number: self._on_acked(metadata, n))
            future.add_errback(self.failed.append)
            number += 1

    def _on_acked(self, metadata: RecordMetadata, number: int) -> None:
        with self._lock:
            self.acked[metadata.partition].append((metadata.offset, number))
            self.acked_at[metadata.partition].append(time.monotonic())

    @property
    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.acked.values()))

    def wait_for(self, more: int, timeout_s: float = 60) -> None:
        """Until so many further records are acknowledged."""
        goal, deadline = self.count + more, time.monotonic() + timeout_s
        while self.count < goal:
            assert time.monotonic() < deadline, f"only {self.count} of {goal} records acknowledged"
            self._stop.wait(0.02)

    def longest_gap_s(self, since: float) -> float:
        """The longest time any partition went without an acknowledgement after `since`."""
        gaps = [0.0]
        for times in self.acked_at.values():
            later = [since, *(t for t in times if t >= since)]
            gaps += [b - a for a, b in pairwise(later)]
        return max(gaps)


def read_all(
    bootstrap: str, topic: str, partitions: int, timeout_s: float = 60, number: Callable[[bytes], int] = int
) -> dict[int, list[tuple[int, int]]]:
    """(offset, number) of every committed record, per partition."""
    found: dict[int, list[tuple[int, int]]] = {p: [] for p in range(partitions)}
    with Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        everything = [TopicPartition(topic, p) for p in range(partitions)]
        consumer.assign(everything)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(everything)
        deadline = time.monotonic() + timeout_s
        while any(consumer.position(tp) < ends[tp] for tp in everything):
            assert time.monotonic() < deadline, f"read only up to {[consumer.position(tp) for tp in everything]}"
            for tp, records in consumer.poll(timeout_ms=200).items():
                found[tp.partition] += [(record.offset, number(record.value)) for record in records]
    return found


def check(load: Load, found: dict[int, list[tuple[int, int]]]) -> None:
    """Nothing acknowledged is lost or moved, nothing is there twice, and each partition keeps the order of sending."""
    assert not load.failed, f"{len(load.failed)} sends failed, first: {load.failed[0]!r}"
    for partition, records in found.items():
        at = dict(records)
        lost = [(offset, number) for offset, number in load.acked[partition] if at.get(offset) != number]
        assert not lost, f"partition {partition}: acknowledged and not there: {lost[:5]} of {len(lost)}"
        numbers = [number for _, number in records]
        assert len(set(numbers)) == len(numbers), f"partition {partition}: duplicates"
        assert numbers == sorted(numbers), f"partition {partition}: out of order"
