"""Consumer groups on this broker: which of them it coordinates, and requests about them.

A group belongs to one partition of `__consumer_offsets`, and is coordinated by whoever leads that. Where this broker
does, a `Host` (group_host.py) holds the coordinator; where it does not, it says NOT_COORDINATOR. Any broker tells who
does, and has the topic made when it is needed for the first time.

Everything that groups need of a turn of the loop is done in `on_turn`: results of writes go back to the coordinators,
what these want to be written is appended, those that take over read on, and what is due by time is done. Until then
results and writes wait, so that nothing is called from within what it called, and writes that come together share a
batch.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable

from zmqueue.broker.assignors import load
from zmqueue.broker.group_host import Host, Phase, World, Writing
from zmqueue.broker.logs import Logs
from zmqueue.broker.replies import Replies, Table, Token
from zmqueue.broker.topics import COMMAND_TIMEOUT_MS
from zmqueue.config import Config
from zmqueue.core import commands as c
from zmqueue.core import topic_config
from zmqueue.core.cluster import TopicState
from zmqueue.core.effects import Effect
from zmqueue.core.groups import Coordinator
from zmqueue.core.node import Node
from zmqueue.errors import CoordinatorNotAvailable, NotCoordinator, TopicExists, ZmqueueError
from zmqueue.model import NO_BROKER, MiB, PartitionKey
from zmqueue.transport import Frames
from zmqueue.wire import group_messages as g
from zmqueue.wire.frames import Operation
from zmqueue.wire.messages import ProduceResult

PARTITIONS = 10
REPLICAS_MAX = 3
# Small segments: what a new coordinator has to read is mostly the last one, which compaction leaves alone.
TOPIC_CONFIG = {"cleanup.policy": "compact", "storage.mode": "disk", "segment.bytes": str(MiB)}
# How long reading may go on in one turn of the loop, over all partitions that are taken over: one gets ready before the
# next, and each reads on a little.
READ_MS_PER_TURN = 10


class Groups:
    def __init__(
        self,
        node: Node,
        logs: Logs,
        config: Config,
        replies: Replies,
        low_disk: Callable[[], bool],
        run: Callable[[list[Effect]], None],
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
    ) -> None:
        self._node = node
        self._config = config
        self._replies = replies
        self._low_disk = low_disk
        self._run = run
        self._clock = clock
        self._wall_clock = wall_clock
        assignors = load(config.groups)
        grace_ms = config.replication.scaled(config.timing.scale).read_lease_ms

        def new_coordinator() -> Coordinator:
            return Coordinator(config.groups, node.state, assignors, node.lease, grace_ms)

        self._world = World(node, logs, replies, run, clock, wall_clock, new_coordinator, config.groups.write_bytes_max)
        self._hosts: dict[PartitionKey, Host] = {}
        self._written: deque[tuple[Writing, int]] = deque()
        self._finders: list[tuple[Token, g.FindCoordinatorRequest]] = []  # while the topic is being made
        self.table: Table = {
            Operation.FIND_COORDINATOR: self._find,
            Operation.GROUP_HEARTBEAT: self._heartbeat,
            Operation.COMMIT_OFFSETS: self._commit,
            Operation.FETCH_OFFSETS: self._fetch_offsets,
            Operation.LIST_GROUPS: self._list,
            Operation.DESCRIBE_GROUP: self._describe,
            Operation.DELETE_GROUP: self._delete,
        }

    # -- what this broker leads ------------------------------------------------------------------------------------

    def on_leading(self, key: PartitionKey) -> None:
        topic = self._node.state.topics.get(key.topic_id)
        if topic is not None and topic.name == g.OFFSETS_TOPIC:
            self._hosts[key] = Host(self._world, key)

    def on_moved(self, key: PartitionKey) -> None:
        host = self._hosts.pop(key, None)
        if host is not None:
            host.close()

    def on_topics(self) -> None:
        for host in self._hosts.values():
            host.on_topics()

    def on_produced(self, writing: Writing, result: ProduceResult) -> None:
        self._written.append((writing, result.error))

    # -- a turn of the loop ----------------------------------------------------------------------------------------

    @property
    def next_due_ms(self) -> int | None:
        """When `on_turn` has something to do, if nothing happens before."""
        due: int | None = None
        for host in self._hosts.values():
            if host.phase is Phase.READING:
                return 0
            if host.due_ms is not None and (due is None or host.due_ms < due):
                due = host.due_ms
        return due

    def on_turn(self, now_ms: int) -> None:
        for host in self._hosts.values():
            if host.due_ms is not None and host.due_ms <= now_ms:
                host.on_time(now_ms)
            host.look()
            while host.phase is Phase.READING and self._clock() - now_ms < READ_MS_PER_TURN:
                host.look()
        self._write(now_ms)

    def _write(self, now_ms: int) -> None:
        """Appending may give results at once, and results may lead to more writes."""
        while True:
            while self._written:
                writing, code = self._written.popleft()
                writing.host.on_written(writing, code)
            for host in list(self._hosts.values()):
                host.write(now_ms)
            if not self._written:
                return

    # -- requests --------------------------------------------------------------------------------------------------

    def _host(self, group: str) -> Host:
        topic = self._node.state.topic_named(g.OFFSETS_TOPIC)
        if topic is None:
            raise NotCoordinator()
        host = self._hosts.get(_key_of(topic, group))
        if host is None:
            raise NotCoordinator()
        return host

    def _heartbeat(self, token: Token, request: g.GroupHeartbeatRequest, raw: Frames) -> None:
        # A member that has gone is not noticed by its connection: what it waits for must end by itself.
        request.wait_ms = min(request.wait_ms, self._config.broker.fetch_wait_ms_max)
        host = self._host(request.group)
        host.on_request(token, host.coordinator.on_heartbeat, request, self._clock())

    def _commit(self, token: Token, request: g.CommitOffsetsRequest, raw: Frames) -> None:
        host = self._host(request.group)
        host.on_request(token, host.coordinator.on_commit, request, self._clock(), self._wall_clock())

    def _fetch_offsets(self, token: Token, request: g.FetchOffsetsRequest, raw: Frames) -> None:
        host = self._host(request.group)
        host.on_request(token, host.coordinator.on_fetch_offsets, request, self._clock())

    def _describe(self, token: Token, request: g.DescribeGroupRequest, raw: Frames) -> None:
        host = self._host(request.group)
        host.on_request(token, host.coordinator.on_describe, request, self._clock())

    def _delete(self, token: Token, request: g.DeleteGroupRequest, raw: Frames) -> None:
        host = self._host(request.group)
        host.on_request(token, host.coordinator.on_delete, request, self._clock())

    def _list(self, token: Token, request: g.ListGroupsRequest, raw: Frames) -> None:
        """Complete or not at all: of groups that are still being read nothing is known."""
        groups = [row for host in self._hosts.values() for row in host.list_groups()]
        self._replies.answer(token, g.ListGroupsResponse(sorted(groups, key=lambda row: row.group)))

    # -- where a group is ------------------------------------------------------------------------------------------

    def _find(self, token: Token, request: g.FindCoordinatorRequest, raw: Frames) -> None:
        topic = self._node.state.topic_named(g.OFFSETS_TOPIC)
        if topic is not None:
            self._replies.answer(token, self._found(topic, request.group))
            return
        command = self._creation()
        self._finders.append((token, request))
        if len(self._finders) == 1:
            self._run(self._node.submit(command, self._on_created, self._clock() + COMMAND_TIMEOUT_MS))

    def _found(self, topic: TopicState, group: str) -> g.FindCoordinatorResponse:
        key = _key_of(topic, group)
        partition = topic.partitions[key.partition]
        if partition.leader == NO_BROKER:
            raise CoordinatorNotAvailable(f"{g.OFFSETS_TOPIC}-{key.partition} has no leader")
        return g.FindCoordinatorResponse(key.partition, partition.leader, partition.leader_epoch)

    def _creation(self) -> c.CreateTopic:
        """With as many replicas as it will ever need: what is committed must survive the brokers that are up now."""
        replicas = min(REPLICAS_MAX, self._config.cluster.brokers)
        live = len(self._node.state.live_brokers())
        if live < replicas:
            raise CoordinatorNotAvailable(f"{g.OFFSETS_TOPIC} is made when {replicas} brokers are up, not {live}")
        if self._low_disk():
            raise CoordinatorNotAvailable("the disk is nearly full: no topics are created until there is room")
        return c.CreateTopic(
            name=g.OFFSETS_TOPIC,
            topic_id=secrets.token_bytes(16),
            partitions=PARTITIONS,
            replication_factor=replicas,
            min_insync_replicas=topic_config.min_insync_replicas(TOPIC_CONFIG, replicas, "disk"),
            storage="disk",
            config=dict(TOPIC_CONFIG),
        )

    def _on_created(self, outcome: c.Outcome) -> None:
        """By us, or by another broker that was asked at the same time."""
        finders, self._finders = self._finders, []
        topic = self._node.state.topic_named(g.OFFSETS_TOPIC)
        for token, request in finders:
            try:
                if topic is None or outcome.code not in (0, TopicExists.code):
                    raise CoordinatorNotAvailable(outcome.message)
                self._replies.answer(token, self._found(topic, request.group))
            except ZmqueueError as error:
                self._replies.fail(token, error.code, str(error))


def _key_of(topic: TopicState, group: str) -> PartitionKey:
    return PartitionKey(topic.topic_id, g.group_partition(group, len(topic.partitions)))
