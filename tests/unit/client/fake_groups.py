"""A coordinator for the scripted cluster, as far as an administrator can tell it from a real one.

It is the script of its cluster; `before` sees each request first, as a script of its own would.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field
from unit.client.fake_broker import FakeCluster, Script, Seen

from zmqueue import errors
from zmqueue.wire import frames, group_messages, messages
from zmqueue.wire.frames import Operation


class Group(Struct):
    coordinator: int = 0
    generation: int = 1
    offsets: dict[tuple[bytes, int], group_messages.CommittedRow] = field(default_factory=dict)
    members: list[group_messages.MemberInfo] = field(default_factory=list)


class FakeGroups:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.groups: dict[str, Group] = {}
        self.believed: list[int] = []  # what FIND_COORDINATOR answers instead of the truth, one after the other
        self.before: Script = lambda seen: None
        cluster.script = self

    def add(self, name: str, coordinator: int = 0) -> Group:
        return self.groups.setdefault(name, Group(coordinator))

    def commit(self, name: str, topic: str, number: int, offset: int) -> None:
        topic_id = self.cluster.topics[topic][0] if topic in self.cluster.topics else b"deleted-long-ago"
        row = group_messages.CommittedRow(topic_id, number, offset, 1, "", 1000)
        self.add(name).offsets[topic_id, number] = row

    def join(self, name: str, member_id: str, topic: str, numbers: list[int]) -> None:
        held = [messages.PartitionEntry(self.cluster.topics[topic][0], number) for number in numbers]
        member = group_messages.MemberInfo(member_id, None, f"client-{member_id}", [topic], held, held, 10_000)
        self.add(name).members.append(member)

    def offset_of(self, name: str, topic: str, number: int) -> int:
        return self.groups[name].offsets[self.cluster.topics[topic][0], number].offset

    def __call__(self, seen: Seen) -> Any:
        verdict = self.before(seen)
        if verdict is not None:
            return verdict
        if seen.operation == Operation.FIND_COORDINATOR:
            group = self.groups.get(seen.message.group, Group())
            broker = self.believed.pop(0) if self.believed else group.coordinator
            return frames.response(seen.head, group_messages.FindCoordinatorResponse(3, broker, 1))
        if seen.operation == Operation.LIST_GROUPS:
            rows = [
                group_messages.GroupRow(name, _state(group), group.generation, len(group.members), "sticky")
                for name, group in self.groups.items()
                if group.coordinator == seen.broker
            ]
            return frames.response(seen.head, group_messages.ListGroupsResponse(rows))
        if seen.operation in _OF_COORDINATOR:
            answer = self._coordinate(seen)
            return answer if isinstance(answer, int) else frames.response(seen.head, answer)
        return None

    def _coordinate(self, seen: Seen) -> Any:
        message = seen.message
        group = self.groups.get(message.group)
        if seen.broker != (group or Group()).coordinator:
            return errors.NotCoordinator.code
        if seen.operation == Operation.COMMIT_OFFSETS:
            group = group or self.add(message.group)
            if group.members and not message.member_id:
                return errors.NonEmptyGroup.code
            for row in message.rows:
                group.offsets[row.topic_id, row.partition] = group_messages.CommittedRow(
                    row.topic_id, row.partition, row.offset, row.leader_epoch, row.metadata, 1000
                )
            return group_messages.CommitOffsetsResponse([0] * len(message.rows))
        if group is None:
            return errors.GroupNotFound.code
        match seen.operation:
            case Operation.FETCH_OFFSETS:
                return group_messages.FetchOffsetsResponse(list(group.offsets.values()))
            case Operation.DESCRIBE_GROUP:
                return group_messages.DescribeGroupResponse(
                    message.group, _state(group), group.generation, "sticky", group.members
                )
        if group.members:
            return errors.NonEmptyGroup.code
        del self.groups[message.group]
        return messages.Done()


_OF_COORDINATOR = {
    Operation.COMMIT_OFFSETS,
    Operation.FETCH_OFFSETS,
    Operation.DESCRIBE_GROUP,
    Operation.DELETE_GROUP,
}


def _state(group: Group) -> str:
    return "stable" if group.members else "empty"
