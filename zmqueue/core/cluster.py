"""What the cluster is: its brokers, its topics, who leads each partition and who is in sync. Values and lookups only.

How they change is metadata.py's business. A snapshot holds all of it, and its hash tells whether two brokers agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, field

from zmqueue import errors
from zmqueue.core import commands as c
from zmqueue.model import NO_BROKER, PartitionKey
from zmqueue.wire import cbor

FORMAT = 1

_canonical = msgspec.json.Encoder(order="deterministic")


class BrokerState(Struct):
    id: int
    epoch: int
    fenced: bool
    leaving: bool  # shutting down by its own will: not to be unfenced again in this epoch
    dir_id: bytes
    incarnation: int
    retired: list[int]  # former lives of its process; a registration of one of them is late and void
    host: str
    client_port: int
    push_port: int
    peer_port: int
    registered_index: int  # of its registration or last fencing: it counts again once it has applied that


class PartitionState(Struct):
    replicas: list[int]  # the preferred leader first
    leader: int
    leader_epoch: int
    partition_epoch: int
    isr: list[int]
    elr: list[int] = field(default_factory=list)
    last_known_elr: list[int] = field(default_factory=list)  # were complete, then lost their copy
    lost: list[int] = field(default_factory=list)  # came back without their copy and are not in sync since
    adding: list[int] = field(default_factory=list)
    removing: list[int] = field(default_factory=list)


class TopicState(Struct):
    name: str
    topic_id: bytes
    replication_factor: int
    min_insync_replicas: int
    storage: str
    config: dict[str, str]
    partitions: list[PartitionState]
    config_version: int = 0  # how often the settings were changed


class LastCommand(Struct):
    """The newest command of a proposer and what came of it."""

    broker: int
    incarnation: int
    number: int
    outcome: c.Outcome


class Snapshot(Struct):
    format: int
    index: int
    digests: int
    next_producer_id: int
    brokers: list[BrokerState]
    topics: list[TopicState]
    deleted: list[bytes]
    last_commands: list[LastCommand]


class Event(Struct, frozen=True):
    """Something an operator wants to read about. `what` is one of a small fixed set of words."""

    what: str
    broker: int = NO_BROKER
    topic: str = ""
    partition: int = -1
    detail: str = ""


class Applied(Struct):
    """What one command did: its outcome, the partitions and brokers it touched, and events for the log."""

    envelope: c.Envelope | None
    outcome: c.Outcome
    duplicate: bool = False
    partitions: dict[PartitionKey, None] = field(default_factory=dict)  # in the order of their change
    events: list[Event] = field(default_factory=list)
    diverged: bool = False


class Cluster:
    """The tables. Whoever holds on to one of them sees every change: they are refilled, never replaced."""

    def __init__(self) -> None:
        self.index = 0
        self.digests = 0
        self.next_producer_id = 1
        self.brokers: dict[int, BrokerState] = {}
        self.topics: dict[bytes, TopicState] = {}
        self.names: dict[str, bytes] = {}
        self.deleted: dict[bytes, None] = {}  # the ids of the topics deleted last, oldest first
        self.last_commands: dict[int, LastCommand] = {}
        self._marks: dict[int, bytes] = {}  # own hash at the last few digests; local, not replicated

    # -- reading -------------------------------------------------------------------------------------------------

    def partition(self, key: PartitionKey) -> PartitionState | None:
        topic = self.topics.get(key.topic_id)
        return topic.partitions[key.partition] if topic and key.partition < len(topic.partitions) else None

    def topic_named(self, name: str) -> TopicState | None:
        topic_id = self.names.get(name)
        return self.topics[topic_id] if topic_id is not None else None

    def all_partitions(self) -> Iterator[tuple[PartitionKey, TopicState, PartitionState]]:
        for topic in self.topics.values():
            for number, partition in enumerate(topic.partitions):
                yield PartitionKey(topic.topic_id, number), topic, partition

    def is_live(self, broker: int) -> bool:
        state = self.brokers.get(broker)
        return state is not None and not state.fenced

    def live_brokers(self) -> list[int]:
        return sorted(b.id for b in self.brokers.values() if not b.fenced)

    def is_short(self, topic: TopicState, partition: PartitionState) -> bool:
        """Whether a partition misses a live replica that nobody is on the way to replace."""
        live = [b for b in partition.replicas if self.is_live(b)]
        if partition.leader == NO_BROKER or len(live) == len(partition.replicas):
            return False
        if not partition.adding:
            return True
        return not set(partition.adding) <= set(live) and len(live) < topic.replication_factor

    # -- snapshots -----------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        return cbor.dumps(msgspec.to_builtins(self.snapshot(), builtin_types=(bytes,)))

    def snapshot(self) -> Snapshot:
        return Snapshot(
            format=FORMAT,
            index=self.index,
            digests=self.digests,
            next_producer_id=self.next_producer_id,
            brokers=list(self.brokers.values()),
            topics=list(self.topics.values()),
            deleted=list(self.deleted),
            last_commands=list(self.last_commands.values()),
        )

    def load(self, data: bytes) -> None:
        """Become the state that was encoded; all of it or nothing.

        In place, since others hold on to this object and leaders to its table of brokers.
        """
        raw = cbor.loads(data)
        if isinstance(raw, dict) and raw.get("format") not in (None, FORMAT):
            raise errors.FutureFormat(f"metadata snapshot of format {raw['format']}; this build reads {FORMAT}")
        try:
            snapshot = msgspec.convert(raw, Snapshot, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise errors.BadFrame(f"not a metadata snapshot: {error}") from error
        self.index = snapshot.index
        self.digests = snapshot.digests
        self.next_producer_id = snapshot.next_producer_id
        # Leaders hold on to the table of brokers too: a new one would leave them with the old for ever.
        self.brokers.clear()
        self.brokers.update((broker.id, broker) for broker in snapshot.brokers)
        self.topics = {topic.topic_id: topic for topic in snapshot.topics}
        self.names = {topic.name: topic.topic_id for topic in snapshot.topics}
        self.deleted = dict.fromkeys(snapshot.deleted)
        self.last_commands = {last.broker: last for last in snapshot.last_commands}
        self._marks = {}

    def hash(self) -> bytes:
        """Equal for equal states. It is only compared, never decoded, so the fastest encoding will do."""
        return hashlib.blake2b(_canonical.encode(self.snapshot()), digest_size=16).digest()

    def mark(self) -> tuple[int, bytes]:
        """The newest digest and this broker's hash at it, for the next `Digest` command; hash is empty if unknown."""
        return self.digests, self._marks.get(self.digests, b"")


def _refill(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    table.clear()
    table.update(content)
