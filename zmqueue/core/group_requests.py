"""What requests of groups ask for, held against the limits, and what answers say. Raises a ZmqueueError to refuse."""

from __future__ import annotations

from collections.abc import Mapping

from zmqueue import errors
from zmqueue.config import GroupsConfig
from zmqueue.core.assignors import Assignor
from zmqueue.core.cluster import Cluster
from zmqueue.core.group import Group, Member, Subscription, by_topic
from zmqueue.core.group_offsets import Offsets
from zmqueue.model import PartitionKey, check_topic_name
from zmqueue.wire.group_messages import (
    AssignedRow,
    AssignedTopic,
    CommitOffsetsRequest,
    CommitRow,
    DescribeGroupResponse,
    GroupHeartbeatRequest,
    MemberInfo,
)
from zmqueue.wire.messages import PartitionEntry


def subscription_of(
    request: GroupHeartbeatRequest, config: GroupsConfig, assignors: Mapping[str, Assignor]
) -> Subscription:
    if request.topics is None:
        raise errors.InvalidRequest("a member that joins says what it subscribes to")
    for topic in request.topics:
        check_topic_name(topic, internal=True)
    session_ms, least, most = request.session_timeout_ms, config.session_timeout_ms_min, config.session_timeout_ms_max
    if not least <= session_ms <= most:
        raise errors.InvalidSessionTimeout(f"session_timeout_ms={session_ms} must be in {least}..{most}")
    rebalance_ms = request.rebalance_timeout_ms or session_ms
    if rebalance_ms > config.rebalance_timeout_ms_max:
        limit = config.rebalance_timeout_ms_max
        raise errors.InvalidRequest(f"rebalance_timeout_ms={rebalance_ms} must be at most {limit}")
    assignor = request.assignor or config.assignor
    if assignor not in assignors:
        known = ", ".join(sorted(assignors))
        raise errors.UnsupportedAssignor(f"no assignor {assignor!r}; this broker has {known}")
    return Subscription(tuple(sorted(set(request.topics))), assignor, session_ms, rebalance_ms)


def check_row(
    row: CommitRow, request: CommitOffsetsRequest, member: Member | None, config: GroupsConfig, cluster: Cluster
) -> int:
    """The code of one row of a commit: of a member that owns the partition, or of nobody for one that exists."""
    if len(row.metadata.encode()) > config.metadata_bytes_max:
        return errors.OffsetMetadataTooLarge.code
    key = PartitionKey(row.topic_id, row.partition)
    if member is None:
        return 0 if cluster.partition(key) is not None else errors.UnknownTopicId.code
    held = member.held.get(key)
    # An older generation than that of the tenure: sent before the partition came to somebody else and back.
    return 0 if held is not None and request.generation >= held.since else errors.IllegalGeneration.code


def assignment(group: Group, member: Member, offsets: Offsets) -> list[AssignedTopic]:
    """All that the member may hold, with what is committed for it at this moment."""
    found = []
    for topic_id, numbers in by_topic(member.assigned()):
        name = group.name_of(topic_id)
        rows = []
        for number in numbers:
            row = AssignedRow(number, fresh=number >= group.topics[name].fresh_from)
            committed = offsets.committed.get(PartitionKey(topic_id, number))
            if committed is not None:
                row.offset, row.leader_epoch = committed.offset, committed.leader_epoch
            rows.append(row)
        found.append(AssignedTopic(topic_id, name, rows))
    return sorted(found, key=lambda topic: topic.name)


def description(group: Group) -> DescribeGroupResponse:
    members = [
        MemberInfo(
            member.member_id,
            member.instance_id,
            member.client_id,
            list(member.subscription.topics),
            _entries(member.assigned()),
            _entries(sorted(member.target)),
            member.subscription.session_timeout_ms,
        )
        for member in group.members.values()
    ]
    return DescribeGroupResponse(group.name, group.state, group.generation, group.assignor, members)


def _entries(keys: list[PartitionKey]) -> list[PartitionEntry]:
    return [PartitionEntry(*key) for key in keys]
