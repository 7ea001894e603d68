"""A coordinator with a log of its own, topics to subscribe to, and short ways to say what members ask."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from zmqueue.config import GroupsConfig, ReplicationConfig
from zmqueue.core.assignors import BUILT_IN, Assignor
from zmqueue.core.cluster import Cluster, PartitionState, TopicState
from zmqueue.core.group_effects import Answer, GiveUp, Log, Refuse, Write
from zmqueue.core.groups import Coordinator
from zmqueue.core.lease import Lease
from zmqueue.model import PartitionKey
from zmqueue.wire.group_messages import (
    CommitOffsetsRequest,
    CommitRow,
    DeleteGroupRequest,
    DescribeGroupRequest,
    FetchOffsetsRequest,
    GroupHeartbeatRequest,
    GroupHeartbeatResponse,
)
from zmqueue.wire.messages import PartitionEntry

WALL_MS = 1_700_000_000_000
SESSION_MS = 10_000
REBALANCE_MS = 60_000
GRACE_MS = 3_000
NOBODY = ""


def topic_id(name: str, life: int = 0) -> bytes:
    return f"{name}/{life}".encode().ljust(16, b".")


def key(name: str, partition: int, life: int = 0) -> PartitionKey:
    return PartitionKey(topic_id(name, life), partition)


def partition_state() -> PartitionState:
    return PartitionState(replicas=[0], leader=0, leader_epoch=0, partition_epoch=0, isr=[0])


class Topics(Cluster):
    def set(self, name: str, partitions: int, life: int = 0) -> None:
        self.drop(name)
        states = [partition_state() for _ in range(partitions)]
        made = TopicState(name, topic_id(name, life), 1, 1, "disk", {}, states)
        self.topics[made.topic_id], self.names[name] = made, made.topic_id

    def drop(self, name: str) -> None:
        old = self.names.pop(name, None)
        if old is not None:
            del self.topics[old]


class Rig:
    """Writes wait in `writes` until `written`; with `auto`, each is replicated at once."""

    def __init__(self, auto: bool = True, assignors: dict[str, Assignor] | None = None, **config: Any) -> None:
        self.auto = auto
        self.config = GroupsConfig(**config)
        self.topics = Topics()
        self.topics.set("t", 4)
        self.assignors = {**BUILT_IN, **(assignors or {})}
        self.now_ms = 1_000
        self.log: list[tuple[bytes, bytes | None]] = []
        self.lines: list[Log] = []
        self.gave_up: GiveUp | None = None
        self.writes: list[Write] = []
        self.said: dict[Any, Any] = {}  # by token: the answer's message, or the code of the refusal
        self.take_over()

    def take_over(self) -> None:
        """Another broker coordinates, with what the log has."""
        self.writes.clear()
        self.lease = Lease(ReplicationConfig())
        self.lease.grant(1 << 40)
        coordinator = Coordinator(self.config, self.topics, self.assignors, self.lease, GRACE_MS)
        for record in self.log:
            coordinator.replay(*record)
        self.coordinator = coordinator
        self.perform(coordinator.activate(self.now_ms, WALL_MS + self.now_ms))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    self.writes.append(effect)
                case Answer(token, message):
                    assert token not in self.said, "answered twice"
                    self.said[token] = message
                case Refuse(token, code, _):
                    assert token not in self.said, "answered twice"
                    self.said[token] = code
                case Log():
                    self.lines.append(effect)
                case GiveUp():
                    self.gave_up = effect
        if self.auto:
            while self.writes:
                self.written()

    def written(self, code: int = 0) -> None:
        """The oldest write ends."""
        write = self.writes.pop(0)
        if code == 0:
            self.log += write.records
        self.perform(self.coordinator.on_written(write.number, code, self.now_ms))

    def tick(self, advance_ms: int = 0) -> None:
        """Time passes, and the coordinator is called whenever it wants to be."""
        end_ms = self.now_ms + advance_ms
        while (due_ms := self.coordinator.next_due_ms) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.perform(self.coordinator.on_tick(self.now_ms, WALL_MS + self.now_ms))
        self.now_ms = end_ms

    # -- requests: each returns what was said, None if nothing yet ------------------------------------------------

    def ask(self, method: str, request: Struct, *more: int) -> Any:
        token = object()
        self.token = token
        self.perform(getattr(self.coordinator, method)(token, request, self.now_ms, *more))
        return self.said.get(token)

    def heartbeat(self, member: str, revision: int, revoking: Any = (), group: str = "g", **more: Any) -> Any:
        entries = [PartitionEntry(*each) for each in revoking]
        more.setdefault("wait_ms", 3_000)
        return self.ask("on_heartbeat", GroupHeartbeatRequest(group, member, revision, revoking=entries, **more))

    def join(self, member: str, *topics: str, **more: Any) -> Any:
        more.setdefault("session_timeout_ms", SESSION_MS)
        more.setdefault("rebalance_timeout_ms", REBALANCE_MS)
        return self.heartbeat(member, 0, topics=list(topics or ("t",)), **more)

    def leave(self, member: str, revision: int = 1, **more: Any) -> Any:
        return self.heartbeat(member, revision, leaving=True, **more)

    def commit(
        self,
        member: str,
        rows: dict[PartitionKey, int],
        generation: int = -1,
        number: int = 0,
        group: str = "g",
        **more: Any,
    ) -> Any:
        made = [CommitRow(*each, offset, **more) for each, offset in rows.items()]
        request = CommitOffsetsRequest(group, made, member, generation, number)
        said = self.ask("on_commit", request, WALL_MS + self.now_ms)
        return said if said is None or isinstance(said, int) else said.results

    def committed(self, group: str = "g") -> dict[PartitionKey, int]:
        rows = self.ask("on_fetch_offsets", FetchOffsetsRequest(group)).rows
        return {PartitionKey(row.topic_id, row.partition): row.offset for row in rows}

    def describe(self, group: str = "g") -> Any:
        return self.ask("on_describe", DescribeGroupRequest(group))

    def delete(self, group: str = "g") -> Any:
        return self.ask("on_delete", DeleteGroupRequest(group))


def partitions(said: GroupHeartbeatResponse) -> set[PartitionKey]:
    """What an answer gives its member."""
    assert isinstance(said, GroupHeartbeatResponse), f"refused with {said}"
    assert said.assignment is not None, "nothing new"
    return {PartitionKey(topic.topic_id, row.partition) for topic in said.assignment for row in topic.partitions}


def warnings(rig: Rig) -> list[str]:
    return [line.text for line in rig.lines if line.warning]
