"""What an administrator is told: topics, brokers and groups, as plain values."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from zmqueue.model import TopicPartition


class PartitionDescription(Struct, frozen=True):
    """Offsets are -1 where the leader did not answer."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    elr: list[int]
    log_start: int = -1
    high_watermark: int = -1
    log_end: int = -1
    segments: int = 0
    bytes: int = 0


class ReplicaDescription(Struct, frozen=True):
    """One broker's copy of a partition. The one with the larger (last_epoch, log_end) has more of its history."""

    partition: int
    broker: int
    log_start: int
    log_end: int
    last_epoch: int


class TopicDescription(Struct, frozen=True):
    name: str
    topic_id: bytes
    replication_factor: int
    min_insync_replicas: int
    storage: str
    config: dict[str, str]
    partitions: list[PartitionDescription]


class BrokerDescription(Struct, frozen=True):
    id: int
    host: str
    port: int
    fenced: bool
    epoch: int


class ClusterDescription(Struct, frozen=True):
    cluster_id: str
    controller_id: int
    index: int
    brokers: list[BrokerDescription]


class GroupSummary(Struct, frozen=True):
    """`state`: empty, stable, or moving (while partitions change hands)."""

    group: str
    state: str
    members: int
    generation: int
    assignor: str


class GroupListing(Struct, frozen=True):
    """The groups, by name. Those that the brokers `unanswered` coordinate are missing."""

    groups: list[GroupSummary]
    unanswered: list[int]

    def __iter__(self) -> Iterator[GroupSummary]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


class MemberDescription(Struct, frozen=True):
    """`assignment` is what the member may read now, `target` what it will once others have let go."""

    member_id: str
    client_id: str
    instance_id: str | None
    topics: list[str]
    assignment: list[TopicPartition]
    target: list[TopicPartition]
    session_timeout_ms: int


class GroupDescription(Struct, frozen=True):
    group: str
    state: str
    generation: int
    assignor: str
    coordinator: int
    members: list[MemberDescription]


class PartitionLag(Struct, frozen=True):
    """How far a group is behind in one partition. What is not known is None.

    `lag` counts offsets between what is committed and the high watermark, as far as the log still has them: an upper
    bound of the records, where a topic is compacted. `lag_seconds` is the age of the first record among them; it is 0
    when there is none. Where nothing is committed both are known only if the partition is empty.
    """

    topic: str
    partition: int
    committed: int | None
    log_start: int | None
    log_end: int | None
    lag: int | None
    lag_seconds: float | None
    member_id: str | None
    client_id: str | None
