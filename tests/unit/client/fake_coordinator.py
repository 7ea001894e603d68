"""A coordinator of groups for the scripted cluster: it shares partitions out evenly, and takes none from its holder.

Its rules are those of the protocol (wire/group_messages.py) and no more: members last until a test removes them,
nothing is replicated, and an assignment is worked out whenever something has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from zmqueue import errors
from zmqueue.wire import group_messages as g
from zmqueue.wire.frames import Operation

Key = tuple[bytes, int]


class FakeMember:
    def __init__(self, instance: str | None) -> None:
        self.instance = instance
        self.topics: list[str] = []
        self.revision = 0
        self.assigned: set[Key] = set()
        self.revoking: set[Key] = set()
        self.parked: tuple[float, Any] | None = None

    @property
    def held(self) -> set[Key]:
        return self.assigned | self.revoking


class FakeCoordinator:
    """One group, whatever its name. `topics` are those of the cluster; `answer` and `refuse` send."""

    OPERATIONS = (
        Operation.FIND_COORDINATOR,
        Operation.GROUP_HEARTBEAT,
        Operation.COMMIT_OFFSETS,
        Operation.FETCH_OFFSETS,
    )

    def __init__(self, topics: dict[str, Any], answer: Callable[..., None], refuse: Callable[..., None]) -> None:
        self.coordinator = 0
        self.generation = 0
        self.members: dict[str, FakeMember] = {}
        self.fenced: set[str] = set()
        self.offsets: dict[Key, g.CommitRow] = {}
        self.fresh: set[Key] = set()  # partitions younger than the group
        self.commits: list[g.CommitOffsetsRequest] = []
        self.log: list[tuple[str, str, Any]] = []  # what happened, in order
        self._topics, self._answer, self._refuse = topics, answer, refuse

    @property
    def waiting(self) -> bool:
        return any(member.parked for member in self.members.values())

    def tick(self) -> None:
        now = time.monotonic()
        for member in self.members.values():
            if member.parked is not None and member.parked[0] <= now:
                self._release(member)

    def expel(self, member_id: str) -> None:
        del self.members[member_id]
        self._share()

    def move(self, broker: int) -> None:
        """Another coordinates now, and knows all that this one knew."""
        self.coordinator = broker
        for member in self.members.values():
            if member.parked is not None:
                self._refuse(member.parked[1], errors.NotCoordinator.code)
                member.parked = None

    def handle(self, seen: Any) -> None:
        message = seen.message
        if seen.operation == Operation.FIND_COORDINATOR:
            self._answer(seen, g.FindCoordinatorResponse(0, self.coordinator, 1))
        elif seen.broker != self.coordinator:
            self._refuse(seen, errors.NotCoordinator.code)
        elif seen.operation == Operation.GROUP_HEARTBEAT:
            self._heartbeat(seen, message)
        elif seen.operation == Operation.COMMIT_OFFSETS:
            self._commit(seen, message)
        else:
            wanted = None if message.entries is None else {(e.topic_id, e.partition) for e in message.entries}
            rows = [
                g.CommittedRow(row.topic_id, row.partition, row.offset, row.leader_epoch, row.metadata, 1)
                for key, row in self.offsets.items()
                if wanted is None or key in wanted
            ]
            self._answer(seen, g.FetchOffsetsResponse(rows))

    def _heartbeat(self, seen: Any, message: g.GroupHeartbeatRequest) -> None:
        if message.member_id in self.fenced:
            self._refuse(seen, errors.FencedInstance.code)
            return
        member = self.members.get(message.member_id)
        if member is None:
            if message.revision or message.leaving:
                self._refuse(seen, errors.UnknownMember.code)
                return
            member = self.members[message.member_id] = FakeMember(message.instance_id)
            self._replace(message)
        if member.parked is not None:
            self._release(member)
        if message.leaving:
            self.log.append(("left", message.member_id, None))
            del self.members[message.member_id]
            self._answer(seen, g.GroupHeartbeatResponse(self.generation, message.revision))
            self._share()
            return
        if message.topics is not None:
            member.topics = message.topics
        if message.revision == member.revision:
            revoking = {(e.topic_id, e.partition) for e in message.revoking}
            for key in sorted(member.revoking - revoking):
                self.log.append(("let go", message.member_id, key))
            member.revoking = revoking
        self._share()
        if message.revision != member.revision:
            self._tell(seen, member)
        else:
            member.parked = time.monotonic() + message.wait_ms / 1000, seen

    def _replace(self, message: g.GroupHeartbeatRequest) -> None:
        """A static member that comes back takes the place of the one it was."""
        former = [
            member_id
            for member_id, other in self.members.items()
            if message.instance_id is not None and other.instance == message.instance_id
        ]
        for member_id in former:
            if member_id != message.member_id:
                self.fenced.add(member_id)
                gone = self.members.pop(member_id)
                if gone.parked is not None:
                    self._refuse(gone.parked[1], errors.FencedInstance.code)

    def _share(self) -> None:
        ids = sorted(self.members)
        target: dict[str, set[Key]] = {member_id: set() for member_id in ids}
        for name, (topic_id, partitions) in sorted(self._topics.items()):
            takers = [member_id for member_id in ids if name in self.members[member_id].topics]
            keys = [(topic_id, number) for number in sorted(partitions)]
            quota = -(-len(keys) // len(takers)) if takers else 0
            for member_id in takers:
                target[member_id] |= set([key for key in keys if key in self.members[member_id].assigned][:quota])
            for key in keys if takers else []:
                if not any(key in target[member_id] for member_id in takers):
                    target[min(takers, key=lambda each: len(target[each] & set(keys)))].add(key)
        for member_id, member in self.members.items():
            others = set().union(*(other.held for other in self.members.values() if other is not member))
            allowed = target[member_id] - others
            if allowed != member.assigned or member.revision == 0:
                self.generation += 1
                member.revision += 1
                member.revoking = (member.revoking | member.assigned) - allowed
                member.assigned = allowed
                if member.parked is not None:
                    seen = member.parked[1]
                    member.parked = None
                    self._tell(seen, member)

    def _release(self, member: FakeMember) -> None:
        assert member.parked is not None
        self._answer(member.parked[1], g.GroupHeartbeatResponse(self.generation, member.revision))
        member.parked = None

    def _tell(self, seen: Any, member: FakeMember) -> None:
        topics = []
        for name, (topic_id, _) in self._topics.items():
            rows = []
            for key in sorted(key for key in member.assigned if key[0] == topic_id):
                row = self.offsets.get(key)
                offset, epoch = (-1, -1) if row is None else (row.offset, row.leader_epoch)
                rows.append(g.AssignedRow(key[1], offset, epoch, key in self.fresh))
            if rows:
                topics.append(g.AssignedTopic(topic_id, name, rows))
        self._answer(seen, g.GroupHeartbeatResponse(self.generation, member.revision, topics))

    def _commit(self, seen: Any, message: g.CommitOffsetsRequest) -> None:
        self.commits.append(message)
        member = self.members.get(message.member_id)
        if member is None and (message.member_id or self.members):
            error = errors.UnknownMember if message.member_id else errors.NonEmptyGroup
            self._refuse(seen, error.code)
            return
        codes = []
        for row in message.rows:
            key = row.topic_id, row.partition
            if member is not None and key not in member.held:
                codes.append(errors.IllegalGeneration.code)
            else:
                self.offsets[key] = row
                self.log.append(("committed", message.member_id, (key, row.offset)))
                codes.append(0)
        self._answer(seen, g.CommitOffsetsResponse(codes))
