"""Typed requests and responses between clients and brokers, and among brokers.

Each is a Struct whose CBOR form is a map of its field names (an array, where hundreds travel in one message). What
arrives is checked against the type: exact keys, exact types, ranges. Raw record batches never go inside a message; they
follow it as frames of their own (see frames.py), in the order of the entries they belong to.

Clients name partitions by topic id, as brokers do, so that a request can never reach a topic that was deleted and made
again under the same name. Offsets are exclusive ends unless named `last_`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

TopicId = Annotated[bytes, Meta(min_length=16, max_length=16)]
PartitionNumber = Annotated[int, Meta(ge=0, le=99_999)]
BrokerId = Annotated[int, Meta(ge=-1, le=999)]
Offset = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Epoch = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ErrorCode = Annotated[int, Meta(ge=-1, le=9_999)]
Name = Annotated[str, Meta(max_length=249)]
TEXT_MAX = 4096
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Id64 = Annotated[int, Meta(ge=-1, le=2**62)]


class Message(Struct, forbid_unknown_fields=True):
    """Base of all messages: a map on the wire."""


class Row(Struct, array_like=True, forbid_unknown_fields=True):
    """An entry that travels by the hundreds: an array on the wire."""


class Failure(Message):
    """What a request gets back when it failed as a whole."""

    code: ErrorCode
    message: Text = ""


class Done(Message):
    """What a request gets back when there is nothing else to tell."""


# -- cluster and topics ------------------------------------------------------------------------------------------


class MetadataRequest(Message):
    """The cluster, and these topics (all of them when None)."""

    topics: list[Name] | None = None


class BrokerInfo(Message):
    id: BrokerId
    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]
    epoch: Epoch
    fenced: bool


class PartitionInfo(Message):
    partition: PartitionNumber
    leader: BrokerId
    leader_epoch: Epoch
    replicas: list[BrokerId]
    isr: list[BrokerId]
    elr: list[BrokerId]


class TopicInfo(Message):
    name: Name
    topic_id: TopicId
    replication_factor: Count
    min_insync_replicas: Count
    storage: Name
    config: dict[str, str]
    partitions: list[PartitionInfo]
    config_version: Count = 0


class MetadataResponse(Message):
    """`index` counts the metadata commands applied by the broker that answers: a larger one is never older."""

    cluster_id: Name
    controller: BrokerId
    index: Id64
    brokers: list[BrokerInfo]
    topics: list[TopicInfo]


class CreateTopicRequest(Message):
    """With an id of the client's choice (random), a retry is known for what it is, however late it arrives."""

    name: Name
    partitions: Count | None = None
    replication_factor: Count | None = None
    config: dict[Name, Text] = field(default_factory=dict)
    topic_id: TopicId | None = None


class CreateTopicResponse(Message):
    topic_id: TopicId
    partitions: Count
    replication_factor: Count


class DeleteTopicRequest(Message):
    """With its id, only that topic is meant, and not another that got its name since."""

    name: Name
    topic_id: TopicId | None = None


class CreatePartitionsRequest(Message):
    """Let the topic have `total` partitions, which it may have already; one that has more refuses."""

    name: Name
    topic_id: TopicId
    total: Count


class AlterTopicRequest(Message):
    """Change these settings, None taking one back, if they are still those of `config_version`."""

    name: Name
    topic_id: TopicId
    config_version: Count
    changes: dict[Name, Text | None]


class ElectUncleanRequest(Message):
    """Let a broker lead a partition that has no leader, though its copy may lack acknowledged records."""

    topic_id: TopicId
    partition: PartitionNumber
    broker: BrokerId


class StatusRequest(Message):
    """How the broker itself is doing; answered even while it is fenced."""


class StatusResponse(Message):
    broker: BrokerId
    epoch: Epoch
    fenced: bool
    pid: Count
    uptime_ms: Id64
    controller: BrokerId
    term: Id64
    index: Id64
    voting: bool
    partitions: Count
    leading: Count
    under_replicated: Count
    offline: Count
    bad_frames: Id64


# -- records -----------------------------------------------------------------------------------------------------


class ProducerIdRequest(Message):
    """A fresh producer id, for idempotence."""


class ProducerIdResponse(Message):
    producer_id: Id64
    producer_epoch: Annotated[int, Meta(ge=0, le=2**15 - 1)]


class ProduceEntry(Row):
    topic_id: TopicId
    partition: PartitionNumber


class ProduceRequest(Message):
    """Two frames per entry follow: batch header, batch body."""

    acks: Annotated[int, Meta(ge=-1, le=1)]
    timeout_ms: Count
    entries: Annotated[list[ProduceEntry], Meta(max_length=1024)]


class ProduceResult(Row):
    """`leader` and `leader_epoch` tell who leads, also when the answer is that somebody else does."""

    error: ErrorCode
    base_offset: Offset = -1
    leader_epoch: Epoch = -1
    leader: BrokerId = -1
    replicas: Count = 0
    degraded: bool = False
    append_timestamp: Id64 = -1


class ProduceResponse(Message):
    results: list[ProduceResult]


class FetchEntry(Row):
    """`last_epoch` is the leader epoch of the record before `offset`, as the reader knows it, or -1: a log that lost
    records since (by an unclean election) and reuses their offsets answers LOG_TRUNCATED."""

    topic_id: TopicId
    partition: PartitionNumber
    offset: Offset
    bytes_max: Count
    last_epoch: Epoch = -1


class FetchRequest(Message):
    """Waits until `bytes_min` are there or `wait_ms` are over. Limits end at batches; one batch always comes."""

    wait_ms: Count
    bytes_min: Count
    bytes_max: Count
    records_max: Count
    entries: Annotated[list[FetchEntry], Meta(max_length=4096)]


class FetchResult(Row):
    """`truncated_to`, with LOG_TRUNCATED: where the reader's history and the log's part."""

    error: ErrorCode
    high_watermark: Offset = -1
    log_start: Offset = -1
    leader_epoch: Epoch = -1
    leader: BrokerId = -1
    truncated_to: Offset = -1


class FetchResponse(Message):
    """One frame per result follows: whole batches, the first of which holds the offset asked for; or nothing."""

    results: list[FetchResult]


class OffsetEntry(Row):
    """`timestamp` in ms, or EARLIEST (-2), or LATEST (-1: the high watermark)."""

    topic_id: TopicId
    partition: PartitionNumber
    timestamp: Offset


class ListOffsetsRequest(Message):
    entries: Annotated[list[OffsetEntry], Meta(max_length=4096)]


class OffsetResult(Row):
    """Offset -1 with no error: no record is that young."""

    error: ErrorCode
    offset: Offset = -1
    timestamp: Offset = -1
    leader_epoch: Epoch = -1


class ListOffsetsResponse(Message):
    results: list[OffsetResult]


class DeleteRecordsRequest(Message):
    """Delete the records below `offset`, for good; -1: all that consumers may read."""

    topic_id: TopicId
    partition: PartitionNumber
    offset: Offset


class DeleteRecordsResponse(Message):
    """The first offset that is left, which may be beyond what was asked for."""

    log_start: Offset


class FindRequest(Message):
    """Records from `offset` on whose indexed field has this value (in the form of wire/fields.py), at most `limit`."""

    topic_id: TopicId
    partition: PartitionNumber
    value: Annotated[bytes, Meta(max_length=65_536)]
    offset: Offset
    limit: Annotated[int, Meta(ge=1, le=10_000)]


class FindResponse(Message):
    """Offsets in order; nothing else matches before `scanned_to`, from where the caller may go on.

    A frame of the batches that hold them follows.
    """

    offsets: list[Offset]
    scanned_to: Offset
    high_watermark: Offset
    log_start: Offset
    leader_epoch: Epoch


class FetchBackwardRequest(Message):
    """What lies before `before`, or before the high watermark if that is negative."""

    topic_id: TopicId
    partition: PartitionNumber
    before: Offset
    bytes_max: Count


class FetchBackwardResponse(Message):
    """A frame of whole batches follows, in their order: the last holds the offset before `before`; or nothing.

    The first may reach below the log start.
    """

    before: Offset
    high_watermark: Offset
    log_start: Offset
    leader_epoch: Epoch


class PartitionEntry(Row):
    topic_id: TopicId
    partition: PartitionNumber


class DescribePartitionsRequest(Message):
    """Of the leader; or, with `own`, of whoever is asked, about the copy that it has."""

    entries: Annotated[list[PartitionEntry], Meta(max_length=4096)]
    own: bool = False


class IndexHealth(Row):
    """The secondary index of one copy: how much it holds, how far it is, and how far behind the log end that is."""

    definition: Text
    files: Count
    entries: Id64
    bytes: Id64
    covered_to: Offset
    lag_records: Id64
    lag_bytes: Id64


class PartitionHealth(Row):
    error: ErrorCode
    log_start: Offset = -1
    high_watermark: Offset = -1
    log_end: Offset = -1
    segments: Count = 0
    bytes: Id64 = 0
    last_epoch: Epoch = -1
    index: IndexHealth | None = None


class DescribePartitionsResponse(Message):
    results: list[PartitionHealth]


# -- among brokers -----------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """From a broker to the controller. `index` is how far it has applied the metadata; `sent_ms` is its own clock."""

    cluster_id: Name
    broker: BrokerId
    broker_epoch: Epoch
    index: Id64
    sent_ms: Id64


class HeartbeatReply(Message):
    """`ok` is false when the receiver does not control the cluster or knows the sender under another epoch."""

    ok: bool
    controller: BrokerId
    sent_ms: Id64


class AckRow(Row):
    topic_id: TopicId
    partition: PartitionNumber
    leader_epoch: Epoch
    durable_end: Offset


class Acks(Message):
    """From a follower to a leader, unanswered: how far its log is safe."""

    cluster_id: Name
    broker: BrokerId
    broker_epoch: Epoch
    rows: list[AckRow]


class ReplicaFetchRequest(Message):
    """From a follower to a leader: what comes after `log_end`, whose last record was written under `last_epoch`."""

    cluster_id: Name
    broker: BrokerId
    broker_epoch: Epoch
    topic_id: TopicId
    partition: PartitionNumber
    leader_epoch: Epoch
    fetch_id: Id64
    log_end: Offset
    last_epoch: Epoch
    durable_end: Offset
    bytes_max: Count


class ReplicaFetchResponse(Message):
    """`diverged_epoch` >= 0: cut back to where that epoch ends, at most `diverged_end`.

    Otherwise a frame of batches follows. `first_offset` is where the leader's first batch begins, in which `log_start`
    lies: a follower that ends before it starts anew there. One that has nothing and asks from there also hears what it
    cannot read: the epoch of the record before, and the state of producers (see core.producers) there.
    """

    topic_id: TopicId
    partition: PartitionNumber
    fetch_id: Id64
    leader_epoch: Epoch
    error: ErrorCode
    high_watermark: Offset = -1
    log_start: Offset = -1
    log_end: Offset = -1
    diverged_epoch: Epoch = -1
    diverged_end: Offset = -1
    first_offset: Offset = -1
    start_epoch: Epoch = -1
    producers: bytes = b""


class Push(Row):
    """A leader's new batches, published. Frames: routing prefix, this, then header and body of each batch."""

    cluster_id: Name
    broker: BrokerId
    broker_epoch: Epoch
    leader_epoch: Epoch
    base_offset: Offset
    prev_epoch: Epoch
    high_watermark: Offset
    log_end: Offset


class BeaconRow(Row):
    topic_id: TopicId
    partition: PartitionNumber
    leader_epoch: Epoch
    log_end: Offset
    high_watermark: Offset
    log_start: Offset


class Beacon(Message):
    """Published every 100 ms: the partitions that changed or that some follower has not acknowledged in full."""

    cluster_id: Name
    broker: BrokerId
    broker_epoch: Epoch
    rows: list[BeaconRow]
