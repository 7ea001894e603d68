"""What the core asks of the world. Each effect is an order to the shell, which reports back by an event.

Effects of one step are performed in their order. If an `Append` fails, the rest of the step is dropped and the replica
hears `on_append_failed` instead, so that nothing is published, acknowledged or flushed that was not written.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from zmqueue.core.commands import AnyCommand, IsrChange, Outcome
from zmqueue.model import PartitionKey
from zmqueue.wire.batch import Batch
from zmqueue.wire.messages import BeaconRow, ProduceResult, ReplicaFetchRequest, ReplicaFetchResponse

Token = Any  # the shell's own handle for whoever waits for an answer; the core only hands it back


class Effect(Struct, gc=False):
    """Base of all effects."""


# -- the log -----------------------------------------------------------------------------------------------------


class OpenLog(Effect):
    """Open or create a partition's log, with the settings of its topic; then `on_opened`."""

    key: PartitionKey
    storage: str
    config: dict[str, str]


class Configure(Effect):
    """The settings of a partition's topic are these now."""

    key: PartitionKey
    config: dict[str, str]


class CloseLog(Effect):
    """Stop serving a partition, and remove its files if it is deleted."""

    key: PartitionKey
    delete: bool


class Append(Effect):
    key: PartitionKey
    batches: list[Batch]


class Truncate(Effect):
    """Cut the log back to this end, durably; then `on_truncated`."""

    key: PartitionKey
    end: int


class Reset(Effect):
    """Drop the whole log and begin anew at this offset; then `on_truncated`."""

    key: PartitionKey
    start: int


class DeleteBefore(Effect):
    """Delete the records below this offset, for good; then `on_log_start`. If there is no room to do it, it is not."""

    key: PartitionKey
    offset: int


class Adopt(Effect):
    """Keep what the leader knows of the records before our log, which is empty and begins where the leader's does."""

    key: PartitionKey
    epoch: int
    producers: bytes


class Flush(Effect):
    """Make durable what is appended; then `on_flushed`."""

    key: PartitionKey


# -- among brokers -----------------------------------------------------------------------------------------------


class Publish(Effect):
    """Push new batches to whoever follows."""

    key: PartitionKey
    leader_epoch: int
    base_offset: int
    prev_epoch: int
    high_watermark: int
    log_end: int
    batches: list[Batch]


class PublishBeacon(Effect):
    rows: list[BeaconRow]


class Follow(Effect):
    """Receive (or no longer receive) what is pushed for this partition."""

    key: PartitionKey
    on: bool


class SendAck(Effect):
    key: PartitionKey
    leader: int
    leader_epoch: int
    durable_end: int


class SendFetch(Effect):
    leader: int
    request: ReplicaFetchRequest


class AnswerFetch(Effect):
    """To a follower, without records."""

    token: Token
    response: ReplicaFetchResponse


class SendBatches(Effect):
    """To a follower, with the records from this offset on, read from the log.

    `fresh`: it has nothing, so with what it cannot read there: the epoch and the producers before the log's start.
    """

    token: Token
    key: PartitionKey
    offset: int
    bytes_max: int
    response: ReplicaFetchResponse
    fresh: bool = False


class SendHeartbeat(Effect):
    controller: int


# -- clients -----------------------------------------------------------------------------------------------------


class AnswerProduce(Effect):
    token: Token
    result: ProduceResult


class Advanced(Effect):
    """More records can be read: waiting fetches may be answered."""

    key: PartitionKey


class Leading(Effect):
    """This broker leads the partition, in an epoch that begins now."""

    key: PartitionKey


class Moved(Effect):
    """This broker no longer leads the partition, or leads it in another epoch: whoever waits here hears so."""

    key: PartitionKey


class AnswerCommand(Effect):
    token: Token
    outcome: Outcome


# -- metadata ----------------------------------------------------------------------------------------------------


class ProposeIsr(Effect):
    key: PartitionKey
    change: IsrChange


class Ask(Effect):
    """A command this broker wants committed, once; asking again while it is under way changes nothing."""

    command: AnyCommand


class Propose(Effect):
    """Hand these bytes to Raft. The same bytes may be proposed again."""

    data: bytes


class Registered(Effect):
    """Our registration is applied: remember it on disk before anything is served."""

    incarnation: int


class TopicsChanged(Effect):
    """There are other topics than before, or more partitions of one."""


class Halt(Effect):
    """Stop the process: going on would be wrong."""

    reason: str
