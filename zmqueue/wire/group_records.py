"""Keys and values of the records in `__consumer_offsets`: what outlives a group's coordinator.

Both are CBOR arrays. A key begins with its kind (what it is about), a value with the version of its form. The topic is
compacted, so of each key the newest value counts, and none (a tombstone) means that there is nothing any more:

    offset  (group, topic id, partition) -> what is committed
    group   (group)                      -> the group as a whole in one record: no half of a change is ever seen

Keys of equal content have equal bytes. A value stays far below a batch: whoever writes one holds it against
`groups.write_bytes_max`, counting `PARTITION_BYTES_MAX` for each partition that the group may come to hold.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from zmqueue.errors import BadFrame, FutureFormat, InvalidRecord
from zmqueue.wire import cbor
from zmqueue.wire.group_messages import PARTITIONS_MAX, TOPICS_MAX, GroupName, InstanceId, MemberId
from zmqueue.wire.messages import Count, Epoch, Id64, Name, PartitionNumber, Row, Text, TopicId

VERSION = 1
PARTITION_BYTES_MAX = 35  # one that a member holds (25, if it is a run of its own) and another waits for (10)

GROUP_TOPICS_MAX = 2 * TOPICS_MAX  # that a group's members subscribe to or still hold partitions of

Index = Annotated[int, Meta(ge=0, lt=GROUP_TOPICS_MAX)]
Numbers = Annotated[list[PartitionNumber], Meta(max_length=PARTITIONS_MAX)]


class OffsetKey(Row, tag=0):
    group: GroupName
    topic_id: TopicId
    partition: PartitionNumber


class GroupKey(Row, tag=1):
    group: GroupName


class CommittedOffset(Row, tag=VERSION):
    """`member_id` and `number` are those of the commit: an older one of the same member that comes late is known."""

    offset: Annotated[int, Meta(ge=0, le=2**62)]
    leader_epoch: Epoch
    metadata: Text
    committed_ms: Id64
    member_id: Name
    number: Id64


class KnownTopic(Row):
    """A topic that members subscribe to, or hold partitions of.

    `topic_id` None and no `partitions`: there is no such topic. `fresh_from`: how many partitions it had when the group
    became interested in it; those from there on are younger than that.
    """

    name: Name
    topic_id: TopicId | None
    partitions: Count
    fresh_from: Count


class Run(Row):
    """Partitions of one topic that one member holds under the same conditions.

    Given to it under generation `since`, by its assignment of revision `given`. `revoked` is the revision that takes
    them away, or -1: from then on the member is told to let go, and holds them until it says that it has.
    """

    topic: Index
    since: Count
    given: Count
    revoked: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    partitions: Numbers


class Waiting(Row):
    """Partitions of one topic that a member will get once others have let go."""

    topic: Index
    partitions: Numbers


class MemberState(Row):
    """`replaced` are former member ids of the same instance. `topics` point into those of the group."""

    member_id: MemberId
    instance_id: InstanceId | None
    replaced: list[MemberId]
    client_id: Name
    topics: Annotated[list[Index], Meta(max_length=TOPICS_MAX)]
    assignor: Name
    session_timeout_ms: Count
    rebalance_timeout_ms: Count
    revision: Count
    held: list[Run] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


class GroupState(Row, tag=VERSION):
    """`emptied_ms`: when the last member went, by the wall clock; -1 while there are members."""

    generation: Count
    assignor: Name
    emptied_ms: Id64
    topics: Annotated[list[KnownTopic], Meta(max_length=GROUP_TOPICS_MAX)]
    members: list[MemberState]


def encode(record: Struct) -> bytes:
    """A key or a value."""
    return cbor.dumps(msgspec.to_builtins(record, builtin_types=(bytes,)))


def decode_key(data: bytes) -> OffsetKey | GroupKey:
    """Raises InvalidRecord; FutureFormat for a kind that this build does not know."""
    key: OffsetKey | GroupKey = _decode(data, OffsetKey | GroupKey, GroupKey.__struct_config__.tag)
    return key


def decode_offset(data: bytes) -> CommittedOffset:
    """Raises InvalidRecord, or FutureFormat."""
    offset: CommittedOffset = _decode(data, CommittedOffset, VERSION)
    return offset


def decode_group(data: bytes) -> GroupState:
    """Raises InvalidRecord, or FutureFormat. What it says points only to topics that it holds."""
    state: GroupState = _decode(data, GroupState, VERSION)
    for member in state.members:
        pointers = [*member.topics, *(run.topic for run in member.held), *(some.topic for some in member.waiting)]
        if pointers and max(pointers) >= len(state.topics):
            raise InvalidRecord(f"member {member.member_id!r} names topic {max(pointers)} of {len(state.topics)}")
        for pointer in (*(run.topic for run in member.held), *(some.topic for some in member.waiting)):
            if state.topics[pointer].topic_id is None:
                raise InvalidRecord(f"member {member.member_id!r} holds partitions of a topic that is not there")
    return state


def _decode(data: bytes, kind: Any, known: Any) -> Any:
    try:
        raw = cbor.loads(data)
        if isinstance(raw, list) and raw and type(raw[0]) is int and raw[0] > known:
            raise FutureFormat(f"a group's record of form {raw[0]}; this build reads {known}")
        return msgspec.convert(raw, kind, builtin_types=(bytes,))
    except (BadFrame, msgspec.ValidationError) as error:
        raise InvalidRecord(f"not a group's record: {error}") from error
