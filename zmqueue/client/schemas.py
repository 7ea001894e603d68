"""Schemas by fingerprint, in a topic of their own.

A record names the schema that it was written with by fingerprint; the schema itself is the value of a record in a
compacted topic, with the fingerprint as its key. So it outlives whatever happens to the records that need it: a
consumer may start anywhere, retention and compaction may drop any of them, and any number of producers may write with
schemas of their own.

Invariants
- A schema is stored, and acknowledged by all in-sync replicas, before the first record that names it is sent.
- A fingerprint is of the whole schema, so what a key stands for never changes, and storing it twice is storing it once.
  What is found under a key that is not its fingerprint is left aside.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable
from typing import Any

from zmqueue.client.admin import Admin
from zmqueue.client.consumer import Consumer
from zmqueue.client.network import log
from zmqueue.client.producer import Producer
from zmqueue.errors import RequestTimedOut, SerializationError, TopicExists, UnknownSchema
from zmqueue.model import KiB, TopicPartition, check_topic_name

SCHEMAS_TOPIC = "zmqueue-schemas"
FINGERPRINT_BYTES = 16
SCHEMA_BYTES_MAX = 512 * KiB
REPLICAS_MAX = 3
TIMEOUT_S = 30.0
# So long a schema that is not there may still be on its way: a new leader learns late how far its log is committed.
NOT_FOUND_S = 2.0
_PAUSE_S = 0.1


def canonical(schema: Any) -> str:
    """One text for one schema: JSON with its keys sorted, without what parsers add (names that begin with `__`)."""
    return json.dumps(_plain(schema), sort_keys=True, separators=(",", ":"))


def fingerprint_of(text: str) -> bytes:
    """Of the whole text. Avro's own fingerprint leaves out defaults, aliases and logical types, which readers need."""
    return hashlib.sha256(text.encode()).digest()[:FINGERPRINT_BYTES]


class SchemaStore:
    """One cluster's schemas, as far as somebody here has asked for them. Any thread."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.topic = check_topic_name(topic)
        self._known: dict[bytes, str] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._lock = threading.Lock()

    def find(self, fingerprint: bytes) -> str:
        """The schema's text. Raises UnknownSchema, or what keeps the cluster from telling."""
        with self._lock:
            deadline = time.monotonic() + NOT_FOUND_S
            while (text := self._known.get(fingerprint)) is None:
                self._read()
                if fingerprint not in self._known:
                    if time.monotonic() >= deadline:
                        raise UnknownSchema(f"topic {self.topic} has no schema {fingerprint.hex()}")
                    time.sleep(_PAUSE_S)
            return text

    def store(self, text: str) -> None:
        """Returns when the schema is there to stay."""
        fingerprint = fingerprint_of(text)
        if len(text) > SCHEMA_BYTES_MAX:
            raise SerializationError(f"a schema of {len(text)} bytes exceeds {SCHEMA_BYTES_MAX}")
        with self._lock:
            if fingerprint in self._known:
                return
            self._create_topic()
            self._read()
            if fingerprint not in self._known:
                with Producer(bootstrap_servers=self.bootstrap_servers, linger_ms=0) as producer:
                    producer.send(self.topic, text.encode(), key=fingerprint).get(TIMEOUT_S)
                self._known[fingerprint] = text

    def _create_topic(self) -> None:
        with Admin(bootstrap_servers=self.bootstrap_servers) as admin:
            if self.topic in admin.list_topics():
                return
            replicas = min(REPLICAS_MAX, len(admin.describe_cluster().brokers))
            try:
                admin.create_topic(self.topic, 1, replicas, {"cleanup.policy": "compact"})
            except TopicExists:
                log.debug("somebody else created topic %s", self.topic)

    def _read(self) -> None:
        """What came to the topic since the last look."""
        with Consumer(bootstrap_servers=self.bootstrap_servers, auto_offset_reset="earliest") as consumer:
            numbers = consumer.partitions_for_topic(self.topic)
            partitions = [TopicPartition(self.topic, number) for number in numbers or ()]
            consumer.assign(partitions)
            for partition, offset in consumer.beginning_offsets(partitions).items():
                consumer.seek(partition, max(offset, self._positions.get(partition, 0)))
            ends = consumer.end_offsets(partitions)
            deadline = time.monotonic() + TIMEOUT_S
            while any(consumer.position(partition) < end for partition, end in ends.items()):
                for batch in consumer.poll_batches(1000):
                    self._learn(zip(batch.keys or (), batch.values, strict=False))
                if time.monotonic() >= deadline:
                    raise RequestTimedOut(f"topic {self.topic} was not read within {TIMEOUT_S} s")
            self._positions = {partition: consumer.position(partition) for partition in partitions}

    def _learn(self, rows: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        for key, value in rows:
            text = (value or b"").decode(errors="replace")
            if key == fingerprint_of(text):
                self._known[key] = text
            else:
                log.warning("topic %s: what is stored under key %r is not that schema", self.topic, key)


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _plain(part) for name, part in schema.items() if not str(name).startswith("__")}
    if isinstance(schema, list | tuple):
        return [_plain(part) for part in schema]
    return schema
