"""Clients whose every operation goes into the history.

  w1   idempotent producers with acks=all and consumers that were assigned their partitions
  w4   the same with acks=1 and without idempotence, on a topic of its own
  w5   topics created and deleted, each under a new name

What a client is told is recorded as it is: an acknowledgement is `ok`. A send that raised before its record was taken
over is `fail`, for it cannot have been sent. Any other error is `info`: an earlier attempt of the same record may have
been written. A value is the record's number, unique in the run.

Final reads come after healing, by two consumers that share nothing with those before.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from chaos.history import FAIL, INFO, INVOKE, OK, Recorder
from zmqueue import Admin, Consumer, Producer, TopicPartition
from zmqueue.errors import InvalidRecord, MessageTooLarge, ZmqueueError

POLL_MS = 200
SAMPLE_S = 0.5
CHURN_S = 0.5
CHURN_YOUNG, CHURN_OLD = 3, 43  # how many topics later one is deleted; both leave the same remainder of four
FLUSH_S_MAX = 40.0
JOIN_S_MAX = 60.0
FINAL_S_MAX = 90.0

# Process numbers in the history, by what they do.
PRODUCER, CONSUMER, SAMPLER, FINAL, CHURN = 0, 100, 200, 300, 400

# Refused by the client itself, before anything could have been sent.
_CERTAIN = (MessageTooLarge, InvalidRecord)


def key(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


class Workload:
    """Starts and ends its threads together. `errors` counts what operations ended with."""

    def __init__(self, recorder: Recorder, bootstrap: str, delivery_timeout_ms: int = 30_000) -> None:
        self.recorder = recorder
        self._delivery_timeout_ms = delivery_timeout_ms
        self.bootstrap = bootstrap
        self.errors: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._producing: list[threading.Thread] = []
        self._reading: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def add_producer(self, p: int, topic: str, partitions: int, per_second: int, acks: str) -> None:
        self._add(self._producing, lambda: self._produce(p, topic, partitions, per_second, acks))

    def add_consumer(self, p: int, topic: str, partitions: int) -> None:
        self._add(self._reading, lambda: self._consume(p, topic, partitions))

    def add_sampler(self, p: int, topic: str, partitions: int) -> None:
        self._add(self._reading, lambda: self._sample(p, topic, partitions))

    def add_churn(self, p: int) -> None:
        self._add(self._producing, lambda: self._churn(p))

    def _add(self, to: list[threading.Thread], work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failures.append(error)
                raise

        to.append(threading.Thread(target=run, daemon=True))

    def start(self) -> None:
        for thread in [*self._producing, *self._reading]:
            thread.start()

    def stop(self) -> None:
        """Ends the load and waits until every operation has ended. A client that failed or hangs is an error here."""
        self._stop.set()
        for thread in [*self._producing, *self._reading]:
            if thread.ident is not None:
                thread.join(JOIN_S_MAX)
                if thread.is_alive():
                    raise RuntimeError("a client of the workload does not end")
        if self._failures:
            raise RuntimeError(f"a client of the workload failed: {self._failures[0]!r}") from self._failures[0]

    def _note(self, error: ZmqueueError) -> str:
        self.errors[error.name] += 1
        return error.name

    # -- sending ---------------------------------------------------------------------------------------------------

    def _produce(self, p: int, topic: str, partitions: int, per_second: int, acks: str) -> None:
        producer = Producer(
            bootstrap_servers=self.bootstrap,
            acks=acks,
            max_block_ms=5_000,
            delivery_timeout_ms=self._delivery_timeout_ms,
            request_timeout_ms=min(10_000, self._delivery_timeout_ms // 2),
        )
        add, a = self.recorder.add, 1 if acks == "1" else -1
        due = time.monotonic()
        try:
            for n in itertools.count(p):
                due = max(
                    due + 1 / per_second, time.monotonic() - 1.0
                )  # after an outage, no more than a second's worth
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    break
                v, partition = next(self._numbers), n % partitions
                k = key(topic, partition)
                add(p, INVOKE, "send", k=k, v=v, a=a)
                try:
                    future = producer.send(topic, b"%d" % v, partition=partition)
                except ZmqueueError as error:
                    add(p, FAIL, "send", k=k, v=v, x=self._note(error))
                    continue
                future.add_callback(
                    lambda meta, k=k, v=v: add(p, OK, "send", k=k, v=v, o=meta.offset, r=meta.replicas, a=a)
                )
                future.add_errback(lambda error, k=k, v=v: self._unsent(p, k, v, error))
        finally:
            producer.close(timeout=FLUSH_S_MAX)

    def _unsent(self, p: int, k: str, v: int, error: ZmqueueError) -> None:
        self.recorder.add(p, FAIL if isinstance(error, _CERTAIN) else INFO, "send", k=k, v=v, x=self._note(error))

    # -- reading ---------------------------------------------------------------------------------------------------

    def _consume(self, p: int, topic: str, partitions: int) -> None:
        with Consumer(bootstrap_servers=self.bootstrap, auto_offset_reset="earliest") as consumer:
            assign(self.recorder, consumer, p, topic, partitions)
            while not self._stop.is_set():
                poll(self.recorder, consumer, p, self._note)

    def _sample(self, p: int, topic: str, partitions: int) -> None:
        wanted = [TopicPartition(topic, n) for n in range(partitions)]
        with Consumer(bootstrap_servers=self.bootstrap, request_timeout_ms=5_000) as consumer:
            while not self._stop.wait(SAMPLE_S):
                self.recorder.add(p, INVOKE, "hw")
                try:
                    ends = consumer.end_offsets(wanted)
                except ZmqueueError as error:
                    self.recorder.add(p, INFO, "hw", x=self._note(error))
                    continue
                rows = [(key(*partition), [end]) for partition, end in ends.items()]
                self.recorder.add(p, OK, "hw", rows=rows)

    # -- topics ----------------------------------------------------------------------------------------------------

    def _churn(self, p: int) -> None:
        with Admin(bootstrap_servers=self.bootstrap, request_timeout_ms=10_000) as admin:
            for n in itertools.count():
                if self._stop.wait(CHURN_S):
                    return
                name = f"churn-{n}"
                self._topic(p, name, "create", partial(admin.create_topic, name, 3, 2))
                # One in four stays for a while, and not for ever: a longer run must not be one of a larger cluster.
                before = n - (CHURN_YOUNG if n % 4 else CHURN_OLD)
                if before >= 0:
                    old = f"churn-{before}"
                    self._topic(p, old, "delete", partial(admin.delete_topic, old))

    def _topic(self, p: int, name: str, what: str, do: Callable[[], object]) -> None:
        self.recorder.add(p, INVOKE, "topic", k=name, x=what)
        end = OK
        try:
            do()
        except ZmqueueError as error:
            end = INFO
            self._note(error)
        self.recorder.add(p, end, "topic", k=name, x=what)


def assign(recorder: Recorder, consumer: Consumer, p: int, topic: str, partitions: int, x: str = "") -> None:
    wanted = [TopicPartition(topic, n) for n in range(partitions)]
    consumer.assign(wanted)
    for partition in wanted:
        consumer.seek(partition, 0)
    recorder.add(p, OK, "assign", ks=[key(*partition) for partition in wanted], os=[0] * partitions, x=x)


def poll(recorder: Recorder, consumer: Consumer, p: int, note: Callable[[ZmqueueError], str]) -> None:
    recorder.add(p, INVOKE, "poll")
    try:
        found = consumer.poll(timeout_ms=POLL_MS)
    except ZmqueueError as error:
        recorder.add(p, INFO, "poll", x=note(error))
        return
    rows = [
        (key(*partition), [number for record in records for number in (record.offset, int(record.value))])
        for partition, records in found.items()
    ]
    recorder.add(p, OK, "poll", rows=rows)


def final_read(recorder: Recorder, bootstrap: str, topic: str, partitions: int, p: int) -> None:
    """All that is there, from the start of every partition to its end as it is now."""
    deadline = time.monotonic() + FINAL_S_MAX
    wanted = [TopicPartition(topic, n) for n in range(partitions)]
    with Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", max_poll_records=5_000) as consumer:
        ends = consumer.end_offsets(wanted)
        assign(recorder, consumer, p, topic, partitions, x="final")
        while any(consumer.position(partition) < ends[partition] for partition in wanted):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the final read of {topic} did not end within {FINAL_S_MAX:g} s")
            poll(recorder, consumer, p, lambda error: error.name)
    for partition, end in ends.items():
        recorder.add(p, OK, "final", k=key(*partition), o=end)


def final_topics(recorder: Recorder, admin: Admin) -> None:
    recorder.add(CHURN, OK, "topics", ks=admin.list_topics())
