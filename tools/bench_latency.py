"""How long a record takes from `send` in one process to `poll` in another, at a steady rate.

Every record carries the moment at which it was sent, by the machine's monotonic clock, which both processes read. The
producer does not wait for acknowledgements and does not fall into step with them: each record leaves at its own time,
and where the producer is late the record is dated by when it should have left, so that a stall counts for every record
that it delayed.

Beside it, in the same run: one record appended to a file and synced, and one sent to another process and back, by
ZeroMQ alone. No record can be faster than two syncs side by side and three hops.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_pipe import Shape, bare_fdatasync, bare_round_trip, percentiles, temporary_folder  # noqa: E402

WARM_UP_S = 2.0
STALLED_S = 60
_SENT = struct.Struct("<q")


def run(bootstrap: str, topic: str, shape: Shape, rate: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Latencies in ms, after a warm-up whose records do not count."""
    records, warm_up = int(rate * seconds), int(rate * WARM_UP_S)
    reader = _Reader(bootstrap, topic, shape.partitions, records + warm_up)
    try:
        acknowledged = _send(bootstrap, topic, shape.value_bytes, rate, records + warm_up)
        received = reader.samples()
    finally:
        reader.end()
    with temporary_folder(folder) as place:
        disk = bare_fdatasync(place, shape.value_bytes)
    trip = bare_round_trip(shape.value_bytes)
    return {
        "records_per_s": rate,
        "records": records,
        **percentiles("send_to_ack", acknowledged[warm_up:]),
        **percentiles("send_to_poll", received[warm_up:]),
        **disk,
        **trip,
    }


def _send(bootstrap: str, topic: str, value_bytes: int, rate: int, count: int) -> list[float]:
    """Returns how long each acknowledgement took, in ms, in the order of the records."""
    from zmqueue import Producer

    padding = os.urandom(max(0, value_bytes - _SENT.size))
    took = [0.0] * count

    def note(number: int, sent_ns: int) -> Any:
        def acknowledged(_: Any) -> None:
            took[number] = (time.monotonic_ns() - sent_ns) / 1e6

        return acknowledged

    with Producer(bootstrap_servers=bootstrap, acks="all", linger_ms=0) as producer:
        producer.partitions_for(topic)
        begun = time.monotonic_ns()
        futures = []
        for number in range(count):
            due = begun + number * 1_000_000_000 // rate
            while (early := due - time.monotonic_ns()) > 0:
                time.sleep(early / 1e9)
            future = producer.send(topic, _SENT.pack(due) + padding)
            futures.append(future.add_callback(note(number, due)))
        for future in futures:
            future.get(timeout=STALLED_S)
    return took


class _Reader:
    """The consumer, in a process of its own. It says when it is ready, and at the end what it has seen."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, count: int) -> None:
        arguments = json.dumps([bootstrap, topic, partitions, count])
        command = [sys.executable, __file__, arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the reader of the latency run has failed, see above")
        return json.loads(line)

    def samples(self) -> list[float]:
        return self._hear()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _read(bootstrap: str, topic: str, partitions: int, count: int) -> None:
    from zmqueue import Consumer, TopicPartition

    seen: list[tuple[int, float]] = []
    assigned = [TopicPartition(topic, number) for number in range(partitions)]
    with Consumer(bootstrap_servers=bootstrap) as consumer:
        consumer.assign(assigned)
        consumer.seek_to_end(*assigned)
        for partition in assigned:
            consumer.position(partition)
        print("true", flush=True)
        while len(seen) < count:
            polled = consumer.poll(timeout_ms=STALLED_S * 1000)
            now = time.monotonic_ns()
            if not polled:
                raise RuntimeError(f"nothing came for {STALLED_S} s after {len(seen)} of {count} records")
            for records in polled.values():
                for record in records:
                    (sent,) = _SENT.unpack_from(record.value)
                    seen.append((sent, (now - sent) / 1e6))
    print(json.dumps([took for _, took in sorted(seen)]), flush=True)


if __name__ == "__main__":
    _read(*json.loads(sys.argv[1]))
