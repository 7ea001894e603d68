"""What applications hang into the path of every record: tracing, audits, redaction.

A producer's interceptor may have `on_send(record) -> record`, called in the thread that sends and before anything is
serialized, and `on_acknowledgement(metadata, error)`, called in the producer's IO thread when a record that was taken
has met its fate. A consumer's may have `on_consume(records) -> records`, called in the thread that polls and after
everything was deserialized, and `on_commit(offsets)`, called when offsets were committed. Each sees what the one before
it returned.

Invariant: an interceptor changes nothing but what it returns. One that raises, or returns something else than what it
was given, is logged and counted, and the record goes on as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zmqueue.client.futures import BulkFuture, Delivery, RecordFuture
from zmqueue.client.network import log
from zmqueue.errors import ConfigError, ZmqueueError
from zmqueue.model import ConsumerRecord, OffsetAndMetadata, ProducerRecord, RecordMetadata, TopicPartition

Records = dict[TopicPartition, list[ConsumerRecord]]


class ProducerInterceptor:
    """Made to derive from; an object with one of these methods does."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: ZmqueueError | None) -> None:
        """`metadata` is None exactly if there is an error."""


class ConsumerInterceptor:
    def on_consume(self, records: Records) -> Records:
        return records

    def on_commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        pass


class ProducerInterceptors:
    """All of a producer's, in their order."""

    def __init__(self, interceptors: Sequence[Any]) -> None:
        self.errors = 0  # by several threads, so only nearly exact
        self._on_send = _methods(interceptors, "on_send")
        self._on_acknowledgement = _methods(interceptors, "on_acknowledgement")
        _check(interceptors, "on_send", "on_acknowledgement")

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        for on_send in self._on_send:
            try:
                found = on_send(record)
                if not isinstance(found, ProducerRecord):
                    raise TypeError(f"on_send returned {type(found).__name__}, not a ProducerRecord")
                record = found
            except Exception:
                self._failed("on_send")
        return record

    def on_send_many(self, records: Iterable[ProducerRecord]) -> list[ProducerRecord]:
        """Topic and partition belong to the whole call: one that changes them has failed for that record."""
        seen = []
        for record in records:
            found = self.on_send(record)
            if (found.topic, found.partition) != (record.topic, record.partition):
                self.errors += 1
                log.error("an interceptor may not move a record of send_many; it goes on as it was")
                found = record
            seen.append(found)
        return seen

    def watch(self, future: RecordFuture) -> None:
        if self._on_acknowledgement:
            self._watch(future.delivery, range(future.index, future.index + 1))

    def watch_many(self, future: BulkFuture) -> None:
        if self._on_acknowledgement:
            for part in future.parts:
                self._watch(part.delivery, range(part.start, part.start + part.count))

    def _watch(self, delivery: Delivery, indexes: range) -> None:
        def ended() -> None:
            error = delivery.error
            for index in indexes:
                metadata = delivery.metadata(index) if error is None else None
                for on_acknowledgement in self._on_acknowledgement:
                    try:
                        on_acknowledgement(metadata, error)
                    except Exception:
                        self._failed("on_acknowledgement")

        delivery.when_done(ended)

    def _failed(self, method: str) -> None:
        self.errors += 1
        log.exception("%s of an interceptor failed; the record goes on without it", method)


class ConsumerInterceptors:
    def __init__(self, interceptors: Sequence[Any]) -> None:
        self.errors = 0
        self._on_consume = _methods(interceptors, "on_consume")
        self._on_commit = _methods(interceptors, "on_commit")
        _check(interceptors, "on_consume", "on_commit")

    def on_consume(self, records: Records) -> Records:
        for on_consume in self._on_consume:
            try:
                found = on_consume(records)
                if not isinstance(found, dict):
                    raise TypeError(f"on_consume returned {type(found).__name__}, not a dict of records")
                records = found
            except Exception:
                self._failed("on_consume")
        return records

    def on_commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        for on_commit in self._on_commit:
            try:
                on_commit(offsets)
            except Exception:
                self._failed("on_commit")

    def _failed(self, method: str) -> None:
        self.errors += 1
        log.exception("%s of an interceptor failed", method)


def _methods(interceptors: Sequence[Any], name: str) -> list[Callable[..., Any]]:
    return [getattr(each, name) for each in interceptors if hasattr(each, name)]


def _check(interceptors: Sequence[Any], *methods: str) -> None:
    for each in interceptors:
        if not any(hasattr(each, method) for method in methods):
            raise ConfigError(f"interceptors: {type(each).__name__} has none of the methods {', '.join(methods)}")
