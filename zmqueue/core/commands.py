"""The commands that change cluster metadata. Each is committed by Raft and then applied by every broker alike.

A command asks; what follows from it (who leads, who is in sync) is computed when it is applied, from replicated state
alone. Every command travels in an `Envelope` that names its proposer and its number, so that a retry after an unknown
outcome is recognised and answered with the first result.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from zmqueue.errors import BadFrame, InvalidRequest
from zmqueue.wire import cbor
from zmqueue.wire.messages import BrokerId, Count, Epoch, Name, PartitionNumber, Text, TopicId


class Command(Struct, tag_field="command", forbid_unknown_fields=True):
    """Base of all commands."""


class BrokerRef(Struct, array_like=True, forbid_unknown_fields=True):
    """A broker as somebody knew it: a command that names an older epoch of it is refused."""

    broker: BrokerId
    epoch: Epoch


class PartitionRef(Struct, array_like=True, forbid_unknown_fields=True):
    topic_id: TopicId
    partition: PartitionNumber


class Register(Command, tag="register"):
    """A broker process has started. `unclean`: its whole disk is in doubt; `lost`: only these partitions are.

    `previous` are the incarnations that its data folder remembers. If the last registered one is not among them, the
    folder is older than what the cluster knows (restored from a copy), and everything in it is in doubt.
    """

    broker: BrokerId
    incarnation: int
    previous: list[int]
    dir_id: bytes
    host: Text
    client_port: int
    push_port: int
    peer_port: int
    unclean: bool
    lost: list[PartitionRef] = field(default_factory=list)


class Fence(Command, tag="fence"):
    """These brokers are no longer heard: they lead nothing and are in no ISR until they are unfenced."""

    brokers: list[BrokerRef]


class Unfence(Command, tag="unfence"):
    broker: BrokerId
    epoch: Epoch


class BeginShutdown(Command, tag="begin_shutdown"):
    """A broker is about to stop by its own will: others take over first."""

    broker: BrokerId
    epoch: Epoch


class ReplicaLost(Command, tag="replica_lost"):
    """A running broker has found its copy of one partition damaged."""

    broker: BrokerId
    epoch: Epoch
    partition: PartitionRef


class IsrChange(Struct, array_like=True, forbid_unknown_fields=True):
    """A leader's wish. Each member carries the broker epoch under which the leader saw it qualify."""

    topic_id: TopicId
    partition: PartitionNumber
    leader_epoch: Epoch
    partition_epoch: int
    isr: list[BrokerRef]


class AlterIsr(Command, tag="alter_isr"):
    broker: BrokerId
    epoch: Epoch
    changes: list[IsrChange]


class ElectPreferred(Command, tag="elect_preferred"):
    """Give leadership back to the first replica of each partition, where it is in sync."""


class Resign(Command, tag="resign"):
    """A leader that cannot write (its disk is full) asks another in-sync replica to lead."""

    broker: BrokerId
    epoch: Epoch
    partition: PartitionRef
    leader_epoch: Epoch


class Heal(Command, tag="heal"):
    """A partition has been short of live replicas for long: recruit one. CAS on partition_epoch."""

    partition: PartitionRef
    partition_epoch: int


class Reassign(Command, tag="reassign"):
    """Move a partition to these replicas: the new ones catch up first, the old ones are dropped last."""

    partition: PartitionRef
    replicas: list[BrokerId]


class CreateTopic(Command, tag="create_topic"):
    name: Name
    topic_id: TopicId
    partitions: Count
    replication_factor: Count
    min_insync_replicas: Count
    storage: Name
    config: dict[str, str] = field(default_factory=dict)


class CreatePartitions(Command, tag="create_partitions"):
    """Let the topic have so many in all: applied a second time it changes nothing."""

    name: Name
    topic_id: TopicId
    total: Count


class DeleteTopic(Command, tag="delete_topic"):
    """`topic_id` None: whichever topic has the name."""

    name: Name
    topic_id: TopicId | None = None


class SetConfig(Command, tag="set_config"):
    """Change these settings of a topic, None taking one back. CAS on config_version: a late one changes nothing."""

    name: Name
    topic_id: TopicId
    config_version: Count
    changes: dict[str, str | None]


class AllocateProducerIds(Command, tag="allocate_producer_ids"):
    count: Count


class UncleanElect(Command, tag="unclean_elect"):
    """An operator accepts the loss of records to bring a partition back."""

    partition: PartitionRef
    broker: BrokerId


class Barrier(Command, tag="barrier"):
    """Nothing: once it is applied, everything committed before this Raft term is applied too."""

    term: int


class Digest(Command, tag="digest"):
    """What the proposer's state hashed to after digest number `of`; a broker that differs has diverged."""

    of: int
    hash: bytes


AnyCommand = (
    Register
    | Fence
    | Unfence
    | BeginShutdown
    | ReplicaLost
    | AlterIsr
    | ElectPreferred
    | Resign
    | Heal
    | Reassign
    | CreateTopic
    | CreatePartitions
    | DeleteTopic
    | SetConfig
    | AllocateProducerIds
    | UncleanElect
    | Barrier
    | Digest
)


class Envelope(Struct, forbid_unknown_fields=True):
    """Who proposed it, in which life of its process, and as its how-manieth command."""

    broker: BrokerId
    incarnation: int
    number: int
    command: AnyCommand


class Outcome(Struct, forbid_unknown_fields=True):
    """What a command came to: 0 and a value, or an error code. Kept in the state, so always small."""

    code: int = 0
    message: str = ""
    value: Any = None


def encode(envelope: Envelope) -> bytes:
    return cbor.dumps(msgspec.to_builtins(envelope, builtin_types=(bytes,)))


def decode(data: bytes) -> Envelope:
    """Raises InvalidRequest for whatever is not a command."""
    try:
        return msgspec.convert(cbor.loads(data), Envelope, builtin_types=(bytes,))
    except (BadFrame, msgspec.ValidationError) as error:
        raise InvalidRequest(f"not a command: {error}") from error
