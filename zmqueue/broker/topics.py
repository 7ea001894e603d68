"""Requests about the cluster: its metadata, and what changes it by way of Raft.

A command waits for Raft until its deadline. What cannot be is refused before Raft is asked, as far as this broker
knows; what counts is decided when the command is applied.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from zmqueue import errors
from zmqueue.broker.replies import Replies, Table, Token
from zmqueue.config import TopicsConfig
from zmqueue.core import commands as c
from zmqueue.core import topic_config
from zmqueue.core.effects import Effect
from zmqueue.core.node import Node
from zmqueue.model import check_topic_name
from zmqueue.transport import Frames
from zmqueue.wire import messages as m
from zmqueue.wire.frames import Operation

COMMAND_TIMEOUT_MS = 15_000
PRODUCER_IDS_PER_BLOCK = 1_000


class ClusterRequests:
    def __init__(
        self,
        node: Node,
        config: TopicsConfig,
        storage: str,
        replies: Replies,
        low_disk: Callable[[], bool],
        run: Callable[[list[Effect]], None],
        clock: Callable[[], int],
    ) -> None:
        self._node = node
        self._config = config
        self._storage = storage
        self._replies = replies
        self._low_disk = low_disk
        self._run = run
        self._clock = clock
        self._producer_ids = iter(range(0))
        self._producer_id_waiters: list[Token] = []
        self.table: Table = {
            Operation.METADATA: self._metadata,
            Operation.CREATE_TOPIC: self._create_topic,
            Operation.CREATE_PARTITIONS: self._create_partitions,
            Operation.DELETE_TOPIC: self._delete_topic,
            Operation.ALTER_TOPIC: self._alter_topic,
            Operation.PRODUCER_ID: self._producer_id,
            Operation.ELECT_UNCLEAN: self._elect_unclean,
        }

    def _metadata(self, token: Token, request: m.MetadataRequest, raw: Frames) -> None:
        state = self._node.state
        if not state.brokers:
            raise errors.BrokerFenced("this broker is starting, and has not heard of any cluster yet")
        if request.topics is None:
            topics = list(state.topics.values())
        else:
            topics = [topic for name in request.topics if (topic := state.topic_named(name)) is not None]
        self._replies.answer(
            token,
            m.MetadataResponse(
                cluster_id=self._node.cluster_id,
                controller=self._node.controller_id,
                index=state.index,
                brokers=[m.BrokerInfo(b.id, b.host, b.client_port, b.epoch, b.fenced) for b in state.brokers.values()],
                topics=[
                    m.TopicInfo(
                        name=topic.name,
                        topic_id=topic.topic_id,
                        replication_factor=topic.replication_factor,
                        min_insync_replicas=topic.min_insync_replicas,
                        storage=topic.storage,
                        config=topic.config,
                        config_version=topic.config_version,
                        partitions=[
                            m.PartitionInfo(n, p.leader, p.leader_epoch, p.replicas, p.isr, p.elr)
                            for n, p in enumerate(topic.partitions)
                        ],
                    )
                    for topic in topics
                ],
            ),
        )

    def _submit(self, command: c.AnyCommand, done: Callable[[c.Outcome], None]) -> None:
        self._run(self._node.submit(command, done, self._clock() + COMMAND_TIMEOUT_MS))

    def on_command(self, done: Callable[[c.Outcome], None], outcome: c.Outcome) -> None:
        done(outcome)

    def _create_topic(self, token: Token, request: m.CreateTopicRequest, raw: Frames) -> None:
        check_topic_name(request.name)
        topic_config.check(request.config)
        self._check_room()
        defaults, state = self._config, self._node.state
        partitions = defaults.default_partitions if request.partitions is None else request.partitions
        self._check_partitions(partitions)
        if len(state.topics) >= defaults.topics_max:
            raise errors.InvalidTopic(f"the cluster has {defaults.topics_max} topics, its limit")
        factor = request.replication_factor
        if factor is None:
            factor = max(1, min(defaults.replication_factor, len(state.live_brokers())))
        mode = topic_config.storage(request.config, self._storage)
        command = c.CreateTopic(
            name=request.name,
            topic_id=request.topic_id or secrets.token_bytes(16),
            partitions=partitions,
            replication_factor=factor,
            min_insync_replicas=topic_config.min_insync_replicas(request.config, factor, mode),
            storage=mode,
            config=dict(request.config),
        )

        def done(outcome: c.Outcome) -> None:
            if outcome.code:
                self._replies.fail(token, outcome.code, outcome.message)
            else:
                self._replies.answer(token, m.CreateTopicResponse(command.topic_id, partitions, factor))

        self._submit(command, done)

    def _create_partitions(self, token: Token, request: m.CreatePartitionsRequest, raw: Frames) -> None:
        check_topic_name(request.name)
        self._check_room()
        topic = self._node.state.topics.get(request.topic_id)
        if topic is not None and request.total > len(topic.partitions):
            self._check_partitions(request.total - len(topic.partitions))
        command = c.CreatePartitions(request.name, request.topic_id, request.total)
        self._submit(command, self._when_done(token))

    def _check_room(self) -> None:
        if self._low_disk():
            raise errors.StorageFull("the disk is nearly full: no partitions are created until there is room")

    def _check_partitions(self, fresh: int) -> None:
        partitions_max = self._config.partitions_max
        if not 1 <= fresh <= partitions_max - sum(len(t.partitions) for t in self._node.state.topics.values()):
            raise errors.InvalidPartitions(
                f"{fresh} more partitions: at least 1, and at most {partitions_max} in the cluster"
            )

    def _alter_topic(self, token: Token, request: m.AlterTopicRequest, raw: Frames) -> None:
        check_topic_name(request.name)
        topic = self._node.state.topics.get(request.topic_id)
        if topic is not None:
            topic_config.altered(topic.config, request.changes)  # to refuse what cannot be before Raft is asked
        # On a full disk too: less retention is what makes room.
        command = c.SetConfig(request.name, request.topic_id, request.config_version, dict(request.changes))
        self._submit(command, self._when_done(token))

    def _delete_topic(self, token: Token, request: m.DeleteTopicRequest, raw: Frames) -> None:
        check_topic_name(request.name)

        self._submit(c.DeleteTopic(request.name, request.topic_id), self._when_done(token))

    def _elect_unclean(self, token: Token, request: m.ElectUncleanRequest, raw: Frames) -> None:
        partition = c.PartitionRef(request.topic_id, request.partition)
        self._submit(c.UncleanElect(partition, request.broker), self._when_done(token))

    def _when_done(self, token: Token) -> Callable[[c.Outcome], None]:
        def done(outcome: c.Outcome) -> None:
            if outcome.code:
                self._replies.fail(token, outcome.code, outcome.message)
            else:
                self._replies.answer(token, m.Done())

        return done

    def _producer_id(self, token: Token, request: m.ProducerIdRequest, raw: Frames) -> None:
        """Ids come from Raft in blocks, so that most producers start without waiting for it."""
        producer_id = next(self._producer_ids, None)
        if producer_id is not None:
            self._replies.answer(token, m.ProducerIdResponse(producer_id, 0))
            return
        self._producer_id_waiters.append(token)
        if len(self._producer_id_waiters) == 1:
            self._submit(c.AllocateProducerIds(PRODUCER_IDS_PER_BLOCK), self._on_producer_ids)

    def _on_producer_ids(self, outcome: c.Outcome) -> None:
        waiters, self._producer_id_waiters = self._producer_id_waiters, []
        if not outcome.code:
            self._producer_ids = iter(range(outcome.value, outcome.value + PRODUCER_IDS_PER_BLOCK))
        for token in waiters:
            if outcome.code:
                self._replies.fail(token, outcome.code, outcome.message)
            else:
                self._producer_id(token, m.ProducerIdRequest(), [])
