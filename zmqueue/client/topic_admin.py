"""The administrator's calls about topics."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from zmqueue.client.asking import ATTEMPT_S_MIN, NOT_FOUND_S, Asking
from zmqueue.client.descriptions import PartitionDescription, ReplicaDescription, TopicDescription
from zmqueue.errors import (
    ConfigError,
    InvalidPartitions,
    InvalidRequest,
    LeaderNotAvailable,
    StaleCommand,
    UnknownTopicOrPartition,
    ZmqueueError,
)
from zmqueue.model import NO_BROKER, TopicPartition, check_topic_name
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation


class TopicAdmin(Asking):
    def create_topic(
        self,
        name: str,
        num_partitions: int | None = None,
        replication_factor: int | None = None,
        config: dict[str, str] | None = None,
    ) -> TopicDescription:
        """Create a topic, and return when brokers know it and every partition has a leader."""
        check_topic_name(name)
        for what, number in (("num_partitions", num_partitions), ("replication_factor", replication_factor)):
            if number is not None and number < 1:
                raise ConfigError(f"{what}: {number} is below 1")
        settings = {str(key): str(value) for key, value in (config or {}).items()}
        deadline = time.monotonic() + self._timeout_s
        # The id is ours, so that each attempt is the same request to the cluster, through whichever broker it comes.
        topic_id = secrets.token_bytes(16)
        request = messages.CreateTopicRequest(name, num_partitions, replication_factor, settings, topic_id)
        self._command(Operation.CREATE_TOPIC, request, deadline)
        return _described(self._wait_for_leaders(name, deadline), {})

    def create_partitions(self, name: str, total: int) -> TopicDescription:
        """Let a topic have `total` partitions, and return when brokers know them and each has a leader.

        From then on most keys belong to another partition than before: the order of a key's records holds within what
        was written before, and within what is written since. Raises InvalidPartitions if it has as many already.
        """
        check_topic_name(name, internal=True)
        deadline = time.monotonic() + self._timeout_s
        view = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
        if total <= len(view.partitions):
            raise InvalidPartitions(f"topic {name} has {len(view.partitions)} partitions; {total} would not be more")
        doubts: list[ZmqueueError] = []
        try:
            request = messages.CreatePartitionsRequest(name, view.topic_id, total)
            self._command(Operation.CREATE_PARTITIONS, request, deadline, doubts)
        except InvalidPartitions:
            there = len(self._find(name, deadline, deadline).partitions)
            if not doubts or there != total:
                raise
        return _described(self._wait_for_leaders(name, deadline, total), {})

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records, and return when the broker that was asked no longer knows it."""
        check_topic_name(name, internal=True)
        deadline = time.monotonic() + self._timeout_s
        meant = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
        doubts: list[ZmqueueError] = []
        try:
            # By its id: an attempt that arrives late must not delete a topic that got the name since.
            self._command(Operation.DELETE_TOPIC, messages.DeleteTopicRequest(name, meant.topic_id), deadline, doubts)
        except UnknownTopicOrPartition:
            if not doubts:
                raise UnknownTopicOrPartition(f"no topic {name!r}") from None

    def alter_topic_config(self, name: str, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Change settings of a topic, None taking one back to its default; its settings as they are then.

        Raises InvalidConfig. Others who change settings at the same time are not overridden: each change is made to
        settings that were seen, and looked at again if they were others by then.
        """
        check_topic_name(name, internal=True)
        wanted = {str(key): None if value is None else str(value) for key, value in changes.items()}
        deadline = time.monotonic() + self._timeout_s
        doubts: list[ZmqueueError] = []
        while True:
            view = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
            if doubts and all(view.config.get(key) == value for key, value in wanted.items()):
                return view.config
            request = messages.AlterTopicRequest(name, view.topic_id, view.config_version, wanted)
            try:
                self._command(Operation.ALTER_TOPIC, request, deadline, doubts)
                break
            except StaleCommand:
                if time.monotonic() >= deadline - ATTEMPT_S_MIN:
                    raise
                self._pause(deadline)
        # Whoever is asked next may not have heard of it yet.
        while view.config_version <= request.config_version and time.monotonic() < deadline - ATTEMPT_S_MIN:
            self._pause(deadline)
            view = self._find(name, deadline, deadline)
        return view.config

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete, for good, the records of each partition below its offset; -1: all that consumers may read.

        Returns the first offset that each then has. Raises OffsetOutOfRange for one beyond the high watermark; what
        comes before it in the mapping is deleted then.
        """
        deadline = time.monotonic() + self._timeout_s
        return {
            partition: self._delete_records(partition.topic, partition.partition, offset, deadline)
            for partition, offset in before.items()
        }

    def _delete_records(self, name: str, number: int, offset: int, deadline: float) -> int:
        """To whoever leads. Deleting twice does no harm, so every retriable error is one."""
        check_topic_name(name, internal=True)
        while True:
            view = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
            found = next((p for p in view.partitions if p.partition == number), None)
            if found is None:
                raise UnknownTopicOrPartition(f"topic {name} has no partition {number}")
            request = messages.DeleteRecordsRequest(view.topic_id, number, offset)
            try:
                if found.leader == NO_BROKER:
                    raise LeaderNotAvailable(f"{name}-{number} has no leader")
                answer: messages.DeleteRecordsResponse = self._attempt(
                    found.leader, Operation.DELETE_RECORDS, request, deadline
                )
                return answer.log_start
            except ZmqueueError as error:
                if not error.retriable or time.monotonic() >= deadline - ATTEMPT_S_MIN:
                    raise
            self._pause(deadline)

    def list_topics(self, *, internal: bool = False) -> list[str]:
        """The names of the topics; those of zmqueue itself only if asked for."""
        answer = self._metadata(None, time.monotonic() + self._timeout_s)
        return sorted(topic.name for topic in answer.topics if internal or not topic.name.startswith("__"))

    def describe_topic(self, name: str) -> TopicDescription:
        """A topic with what its leaders know of each partition. Raises UnknownTopicOrPartition."""
        check_topic_name(name, internal=True)
        deadline = time.monotonic() + self._timeout_s
        view = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
        return _described(view, self._health(view, deadline))

    def describe_replicas(self, name: str) -> list[ReplicaDescription]:
        """Every copy of a topic's partitions, as the brokers have them that can be asked, leaders or not."""
        check_topic_name(name, internal=True)
        deadline = time.monotonic() + self._timeout_s
        view = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
        by_broker: dict[int, list[int]] = {}
        for partition in view.partitions:
            for broker in partition.replicas:
                by_broker.setdefault(broker, []).append(partition.partition)
        found = [
            ReplicaDescription(number, broker, row.log_start, row.log_end, row.last_epoch)
            for broker, number, row in self._rows(view, by_broker, deadline, own=True)
        ]
        return sorted(found, key=lambda replica: (replica.partition, replica.broker))

    def elect_unclean(self, name: str, partition: int, broker: int) -> None:
        """Let `broker` lead a partition that has no leader, with the records it has. Others are lost for good.

        Raises InvalidRequest if the partition has a leader, LeaderNotAvailable if the broker cannot lead it.
        """
        check_topic_name(name, internal=True)
        deadline = time.monotonic() + self._timeout_s
        view = self._find(name, min(deadline, time.monotonic() + NOT_FOUND_S), deadline)
        doubts: list[ZmqueueError] = []
        try:
            request = messages.ElectUncleanRequest(view.topic_id, partition, broker)
            self._command(Operation.ELECT_UNCLEAN, request, deadline, doubts)
        except InvalidRequest:
            leads = any(p.partition == partition and p.leader == broker for p in self.describe_topic(name).partitions)
            if not doubts or not leads:
                raise

    def _wait_for_leaders(self, name: str, deadline: float, count: int = 1) -> messages.TopicInfo:
        while True:
            view = self._find(name, deadline, deadline)
            if len(view.partitions) >= count and all(partition.leader != NO_BROKER for partition in view.partitions):
                return view
            if time.monotonic() >= deadline:
                raise LeaderNotAvailable(f"topic {name} is there, but not every partition has a leader yet")
            self._pause(deadline)


def _described(view: messages.TopicInfo, health: dict[int, messages.PartitionHealth]) -> TopicDescription:
    partitions = []
    for seen in sorted(view.partitions, key=lambda partition: partition.partition):
        row = health.get(seen.partition, messages.PartitionHealth(0))
        partitions.append(
            PartitionDescription(
                seen.partition,
                seen.leader,
                seen.leader_epoch,
                seen.replicas,
                seen.isr,
                seen.elr,
                row.log_start,
                row.high_watermark,
                row.log_end,
                row.segments,
                row.bytes,
            )
        )
    return TopicDescription(
        view.name,
        view.topic_id,
        view.replication_factor,
        view.min_insync_replicas,
        view.storage,
        view.config,
        partitions,
    )
