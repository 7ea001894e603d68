"""Plain values that every layer and every user shares. No behaviour beyond checks of their own shape."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from zmqueue.errors import InvalidGroup, InvalidTopic, ReservedName

KiB = 1024
MiB = 1024 * KiB

NO_BROKER = -1
EARLIEST = -2
LATEST = -1

ACKS_NONE = 0
ACKS_LEADER = 1
ACKS_ALL = -1

CREATE_TIME = 0
LOG_APPEND_TIME = 1


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class PartitionKey(NamedTuple):
    """A partition as brokers name it: by topic id, so that a topic deleted and created again is another topic."""

    topic_id: bytes
    partition: int

    def __str__(self) -> str:
        return f"{self.topic_id.hex()[:8]}-{self.partition}"


class OffsetAndMetadata(NamedTuple):
    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp: int
    leader_epoch: int = -1


class GroupMetadata(NamedTuple):
    """A consumer as its group knows it at a moment; member_id is empty while it is no member."""

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None = None


class RecordMetadata(msgspec.Struct, frozen=True, gc=False):
    """Where a record was written. `replicas` is how many replicas held it when it was acknowledged."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    leader_epoch: int = -1
    replicas: int = 0


class ProducerRecord(NamedTuple):
    """One record as it was given to `send`."""

    topic: str
    value: Any = None
    key: Any = None
    headers: Any = None
    partition: int | None = None
    timestamp_ms: int | None = None


class ConsumerRecord(msgspec.Struct, frozen=True, gc=False):
    """One record as a consumer sees it; the fields stand in kafka-python's order."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: Any
    value: Any
    headers: list[tuple[str, bytes]]


INTERNAL_PREFIX = "__"
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")


def check_topic_name(name: str, *, internal: bool = False) -> str:
    """Kafka's rules for topic names; `__` is kept for internal topics."""
    if name in (".", "..") or not _TOPIC_NAME.match(name):
        raise InvalidTopic(f"topic name {name!r:.80} is not allowed: 1 to 249 of letters, digits, '.', '_' and '-'")
    if name.startswith(INTERNAL_PREFIX) and not internal:
        raise ReservedName(f"topic name {name!r} is reserved: names that begin with '__' belong to zmqueue")
    return name


GROUP_NAME_MAX = 249


def check_group_name(name: str) -> str:
    """Any text of 1 to 249 characters, as Kafka has it."""
    if not 0 < len(name) <= GROUP_NAME_MAX:
        raise InvalidGroup(f"group {name!r:.80} is not allowed: a group's name has 1 to {GROUP_NAME_MAX} characters")
    return name
