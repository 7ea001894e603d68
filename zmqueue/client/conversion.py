"""What becomes of a record between `send` and the producer's buffer: interceptors first, then serializers.

A producer that has neither has no `Conversion` either, and pays one look at None for each record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zmqueue.client.futures import BulkFuture, RecordFuture
from zmqueue.client.interceptors import ProducerInterceptors
from zmqueue.client.serializers import Serializing, serializing
from zmqueue.model import ProducerRecord


class Conversion:
    __slots__ = ("_headers", "_key", "_value", "interceptors")

    def __init__(self, key: Serializing | None, value: Serializing | None, interceptors: Sequence[Any]) -> None:
        self._key, self._value = key, value
        self.interceptors = ProducerInterceptors(interceptors) if interceptors else None
        self._headers = [pair for each in (key, value) if each is not None for pair in each.headers]

    def one(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Sequence[Any] | None,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> ProducerRecord:
        record = ProducerRecord(topic, value, key, headers, partition, timestamp_ms)
        if self.interceptors is not None:
            record = self.interceptors.on_send(record)
            topic, value, key, headers, partition, timestamp_ms = record
        if self._value is not None:
            value = self._value.one(topic, value)
        if self._key is not None and key is not None:
            key = self._key.one(topic, key)
        if self._headers:
            headers = [*(headers or ()), *self._headers]
        return ProducerRecord(topic, value, key, headers, partition, timestamp_ms)

    def many(
        self,
        topic: str,
        values: Sequence[Any],
        keys: Sequence[Any] | None,
        headers: Sequence[Any] | None,
        timestamps_ms: Sequence[int] | int | None,
        partition: int | None,
    ) -> tuple[Sequence[Any], Sequence[Any] | None, Sequence[Any] | None, Sequence[int] | int | None]:
        if self.interceptors is not None:
            values, keys, headers, timestamps_ms = self._intercepted(
                topic, values, keys, headers, timestamps_ms, partition
            )
        count = len(values)
        if self._value is not None:
            values = self._value.many(topic, values)
        if self._key is not None and keys is not None:
            keys = _serialized_keys(self._key, topic, keys)
        if self._headers:
            more = self._headers
            headers = [more] * count if headers is None else [[*(row or ()), *more] for row in headers]
        return values, keys, headers, timestamps_ms

    def _intercepted(
        self,
        topic: str,
        values: Sequence[Any],
        keys: Sequence[Any] | None,
        headers: Sequence[Any] | None,
        timestamps_ms: Sequence[int] | int | None,
        partition: int | None,
    ) -> tuple[list[Any], list[Any] | None, list[Any] | None, list[int] | None]:
        """Columns, taken apart into records and put together again from what the interceptors made of them."""
        assert self.interceptors is not None
        count = len(values)
        now_ms = int(time.time() * 1000)
        if timestamps_ms is None or isinstance(timestamps_ms, int):
            timestamps_ms = [now_ms if timestamps_ms is None else timestamps_ms] * count
        nothing = [None] * count
        columns = (values, nothing if keys is None else keys, nothing if headers is None else headers, timestamps_ms)
        records = self.interceptors.on_send_many(
            ProducerRecord(topic, value, key, pairs, partition, timestamp)
            for value, key, pairs, timestamp in zip(*columns, strict=True)
        )
        found_keys = [record.key for record in records]
        found_headers = [record.headers for record in records]
        return (
            [record.value for record in records],
            found_keys if any(key is not None for key in found_keys) else None,
            found_headers if any(found_headers) else None,
            [now_ms if record.timestamp_ms is None else record.timestamp_ms for record in records],
        )

    @property
    def text_as_bytes(self) -> tuple[bool, bool]:
        """Whether text of Arrow is to come as bytes, as (value, key): no serializer or interceptor wants to see it."""
        plain = self.interceptors is None
        return self._value is None and plain, self._key is None and plain

    def watch(self, future: RecordFuture) -> None:
        if self.interceptors is not None:
            self.interceptors.watch(future)

    def watch_many(self, future: BulkFuture) -> None:
        if self.interceptors is not None:
            self.interceptors.watch_many(future)

    def close(self) -> None:
        for each in (self._key, self._value):
            if each is not None:
                each.close()


def conversion(
    bootstrap_servers: str, key_serializer: Any, value_serializer: Any, interceptors: Sequence[Any]
) -> Conversion | None:
    key, value = serializing("key", key_serializer), serializing("value", value_serializer)
    if key is None and value is None and not interceptors:
        return None
    for each in (key, value):
        if each is not None:
            each.attach(bootstrap_servers)
    return Conversion(key, value, interceptors)


def _serialized_keys(serializer: Serializing, topic: str, keys: Sequence[Any]) -> Sequence[Any]:
    """As with `send`, a key that is None is no key and not asked about."""
    if not any(key is None for key in keys):
        return serializer.many(topic, keys)
    made = iter(serializer.many(topic, [key for key in keys if key is not None]))
    return [None if key is None else next(made) for key in keys]
