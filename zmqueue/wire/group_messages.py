"""Typed requests and responses about consumer groups, between clients and a group's coordinator.

The coordinator of a group is whoever leads its partition of `__consumer_offsets`. A member joins, stays and leaves by
heartbeats alone:

    join       revision 0, with what it subscribes to
    stay       the revision of the assignment it heard last, and the partitions that it still holds beyond it
    leave      `leaving` set; a static member that comes back just stays away

An answer waits at the coordinator until the member's assignment changes, or `wait_ms` are over, so a change reaches
every member at once and an idle group costs a request per member and interval. A `revision` counts the assignments
that one member was told; whoever names another one than the coordinator remembers is told again, so neither a lost
answer nor a coordinator that took over leaves the two sides with different ideas.

A partition is given to a member only when no other holds it: first its old owner is told an assignment without it,
then that member says, by a heartbeat of that revision which does not list it in `revoking`, that it has let it go.
With a partition come the offset that was committed for it and the leader epoch of the record before, as of that moment.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from zmqueue.wire.messages import (
    BrokerId,
    Count,
    Epoch,
    ErrorCode,
    Id64,
    Message,
    Name,
    Offset,
    PartitionEntry,
    PartitionNumber,
    Row,
    Text,
    TopicId,
)
from zmqueue.wire.murmur2 import partition_for_key

OFFSETS_TOPIC = "__consumer_offsets"

GroupName = Annotated[str, Meta(min_length=1, max_length=249)]
MemberId = Annotated[str, Meta(min_length=1, max_length=249)]
InstanceId = Annotated[str, Meta(min_length=1, max_length=249)]
PARTITIONS_MAX = 10_000
TOPICS_MAX = 1_000
Partitions = Annotated[list[PartitionEntry], Meta(max_length=PARTITIONS_MAX)]
Topics = Annotated[list[Name], Meta(max_length=TOPICS_MAX)]


def group_partition(group: str, partitions: int) -> int:
    """Which partition of `__consumer_offsets` a group belongs to. Brokers and clients must agree, for ever."""
    return partition_for_key(group.encode(errors="surrogatepass"), partitions)


class FindCoordinatorRequest(Message):
    """Of any broker. The topic of committed offsets is made if there is none yet."""

    group: GroupName


class FindCoordinatorResponse(Message):
    """The partition of `__consumer_offsets` that the group belongs to, and who leads it, as far as is known."""

    partition: PartitionNumber
    broker: BrokerId
    leader_epoch: Epoch


class GroupHeartbeatRequest(Message):
    """`topics`, the timeouts and the assignor are looked at when the member joins, and whenever `topics` is given."""

    group: GroupName
    member_id: MemberId
    revision: Count
    wait_ms: Count
    revoking: Partitions = field(default_factory=list)
    leaving: bool = False
    instance_id: InstanceId | None = None
    client_id: Name = ""
    topics: Topics | None = None
    assignor: Name = ""
    session_timeout_ms: Count = 0
    rebalance_timeout_ms: Count = 0


class AssignedRow(Row):
    """`offset` -1: nothing was committed. `fresh`: the partition is younger than the group's interest in its topic,
    so that without a committed offset it is read from its beginning."""

    partition: PartitionNumber
    offset: Offset = -1
    leader_epoch: Epoch = -1
    fresh: bool = False


class AssignedTopic(Row):
    topic_id: TopicId
    name: Name
    partitions: list[AssignedRow]


class GroupHeartbeatResponse(Message):
    """`assignment` None: as it was. `generation` grows with every new assignment of the group as a whole."""

    generation: Count
    revision: Count
    assignment: list[AssignedTopic] | None = None


class CommitRow(Row):
    """`leader_epoch` is that of the record before `offset`, where the consumer knows it."""

    topic_id: TopicId
    partition: PartitionNumber
    offset: Annotated[int, Meta(ge=0, le=2**62)]
    leader_epoch: Epoch = -1
    metadata: Text = ""


CommitRows = Annotated[list[CommitRow], Meta(max_length=PARTITIONS_MAX)]


class CommitOffsetsRequest(Message):
    """From a member; or from nobody (no `member_id`, generation -1), which an empty group alone accepts.

    `number` counts the commits of one member: an older one that arrives late changes nothing.
    """

    group: GroupName
    rows: CommitRows
    member_id: Name = ""
    generation: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    number: Id64 = 0


class CommitOffsetsResponse(Message):
    """A code for each row, in order."""

    results: list[ErrorCode]


class FetchOffsetsRequest(Message):
    """What is committed for these partitions, or for all that the group has committed."""

    group: GroupName
    entries: Partitions | None = None


class CommittedRow(Row):
    topic_id: TopicId
    partition: PartitionNumber
    offset: Offset
    leader_epoch: Epoch
    metadata: Text
    committed_ms: Id64


class FetchOffsetsResponse(Message):
    """Those for which something is committed."""

    rows: list[CommittedRow]


class ListGroupsRequest(Message):
    """Of every broker: each knows the groups that it coordinates."""


class GroupRow(Row):
    group: GroupName
    state: Name
    generation: Count
    members: Count
    assignor: Name


class ListGroupsResponse(Message):
    groups: list[GroupRow]


class DescribeGroupRequest(Message):
    group: GroupName


class MemberInfo(Message):
    """`assignment` is what the member may hold now, `target` what it will once others have let go."""

    member_id: MemberId
    instance_id: InstanceId | None
    client_id: Name
    topics: list[Name]
    assignment: list[PartitionEntry]
    target: list[PartitionEntry]
    session_timeout_ms: Count


class DescribeGroupResponse(Message):
    """`state`: empty, stable (every member holds its target) or moving."""

    group: GroupName
    state: Name
    generation: Count
    assignor: Name
    members: list[MemberInfo]


class DeleteGroupRequest(Message):
    """A group without members, and all that it has committed."""

    group: GroupName
