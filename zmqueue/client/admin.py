"""The administrator's client: topics and the cluster, each call with a bounded time.

Any broker takes any request and forwards what only the Raft leader can do, so a call goes to one that seems well and,
where the error is retriable, again to another until `request_timeout_ms` is over. A command whose answer was lost may
have taken effect: creating a topic then finds it there, and deleting one finds it gone. Both count as success if an
earlier attempt of the same call may have done it.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from msgspec import Struct

from zmqueue.client.network import Address, Answer, Network
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.errors import (
    ConfigError,
    InvalidRequest,
    LeaderNotAvailable,
    MetadataUnavailable,
    NoBrokersAvailable,
    StaleCommand,
    UnknownTopicOrPartition,
    ZmqueueError,
)
from zmqueue.model import NO_BROKER, TopicPartition, check_topic_name
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

# One attempt; a broker that takes longer is given up for another.
ATTEMPT_S = 5.0
# With less time left, an attempt would only replace a clear error by a timeout.
ATTEMPT_S_MIN = 0.05
PAUSE_S = 0.1
# So long a topic that was not found may still be on its way to the broker that was asked.
NOT_FOUND_S = 0.5


class PartitionDescription(Struct, frozen=True):
    """Offsets are -1 where the leader did not answer."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    elr: list[int]
    log_start: int = -1
    high_watermark: int = -1
    log_end: int = -1
    segments: int = 0
    bytes: int = 0


class ReplicaDescription(Struct, frozen=True):
    """One broker's copy of a partition. The one with the larger (last_epoch, log_end) has more of its history."""

    partition: int
    broker: int
    log_start: int
    log_end: int
    last_epoch: int


class TopicDescription(Struct, frozen=True):
    name: str
    topic_id: bytes
    replication_factor: int
    min_insync_replicas: int
    storage: str
    config: dict[str, str]
    partitions: list[PartitionDescription]


class BrokerDescription(Struct, frozen=True):
    id: int
    host: str
    port: int
    fenced: bool
    epoch: int


class ClusterDescription(Struct, frozen=True):
    cluster_id: str
    controller_id: int
    index: int
    brokers: list[BrokerDescription]


class Admin:
    def __init__(
        self,
        *,
        bootstrap_servers: str | Iterable[str] = "127.0.0.1:9092",
        client_id: str = "zmqueue-admin",
        request_timeout_ms: int = 30_000,
    ) -> None:
        if not request_timeout_ms >= 1:
            raise ConfigError(f"request_timeout_ms: {request_timeout_ms!r} is below 1")
        self._bootstrap = parse_bootstrap(bootstrap_servers)
        self._timeout_s = request_timeout_ms / 1000
        self._index = 0  # of the newest metadata that was seen
        self._closing = threading.Event()
        self._network = Network(client_id)
        self._router = Router(self._network, self._bootstrap)
        weakref.finalize(self, self._network.stop).atexit = False

    # -- topics --------------------------------------------------------------------------------------------------

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

    # -- the cluster -----------------------------------------------------------------------------------------------

    def describe_cluster(self) -> ClusterDescription:
        answer = self._metadata([], time.monotonic() + self._timeout_s)
        brokers = [BrokerDescription(b.id, b.host, b.port, b.fenced, b.epoch) for b in answer.brokers]
        return ClusterDescription(
            answer.cluster_id, answer.controller, answer.index, sorted(brokers, key=lambda broker: broker.id)
        )

    def broker_status(self, broker_id: int | None = None, address: str | None = None) -> messages.StatusResponse:
        """How one broker is doing, in its own words: the one of this id or at this address, or any."""
        deadline = time.monotonic() + self._timeout_s
        request = messages.StatusRequest()
        if address is not None:
            return self._attempt(parse_bootstrap(address)[0], Operation.STATUS, request, deadline)
        if broker_id is None:
            return self._command(Operation.STATUS, request, deadline, [])
        if broker_id not in self._router.metadata.brokers:
            # A broker that starts answers for itself before anybody knows the cluster.
            found = self._status_at_bootstrap(broker_id, deadline)
            if found is not None:
                return found
            self._router.wait_for(lambda: broker_id in self._router.metadata.brokers or None, self._left(deadline))
        if broker_id not in self._router.metadata.brokers:
            raise NoBrokersAvailable(f"the cluster has no broker {broker_id}")
        return self._attempt(broker_id, Operation.STATUS, request, deadline)

    def _status_at_bootstrap(self, broker_id: int, deadline: float) -> messages.StatusResponse | None:
        for address in self._bootstrap:
            try:
                answer = self._attempt(address, Operation.STATUS, messages.StatusRequest(), deadline)
            except ZmqueueError as error:
                if not error.retriable or len(self._bootstrap) == 1:
                    raise
                continue
            if answer.broker == broker_id:
                return answer
        return None

    # -- asking ----------------------------------------------------------------------------------------------------

    def _command(
        self, operation: Operation, message: Struct, deadline: float, doubts: list[ZmqueueError] | None = None
    ) -> Any:
        """Ask until somebody answers for good. `doubts` collects the attempts that may have taken effect."""
        last: ZmqueueError | None = None
        while last is None or time.monotonic() < deadline - ATTEMPT_S_MIN:
            try:
                return self._attempt(None, operation, message, deadline)
            except UnknownTopicOrPartition:
                raise  # retriable for those who produce, final for a command that the controller has judged
            except ZmqueueError as error:
                if not error.retriable:
                    raise
                last = error
                if error.indeterminate and doubts is not None:
                    doubts.append(error)
            self._pause(deadline)
        raise last

    def _attempt(self, target: int | Address | None, operation: Operation, message: Struct, deadline: float) -> Any:
        if target is None:
            # Without a word from anybody there is nobody to prefer.
            self._router.wait_for(lambda: self._router.metadata.known or None, self._left(deadline))
        answer = self._router.call(target, operation, message, min(ATTEMPT_S, self._left(deadline)))
        if isinstance(answer, Answer):
            return answer.message
        raise answer

    def _metadata(self, topics: list[str] | None, deadline: float) -> messages.MetadataResponse:
        """An answer that is not older than any before: a broker that starts knows what it knew when it stopped."""
        while True:
            answer: messages.MetadataResponse = self._command(
                Operation.METADATA, messages.MetadataRequest(topics), deadline
            )
            if answer.index >= self._index:
                self._index = answer.index
                # Where brokers and leaders are is part of the answer.
                self._network.post(partial(self._router.absorb, answer, topics))
                return answer
            if time.monotonic() >= deadline - ATTEMPT_S_MIN:
                raise MetadataUnavailable("the brokers that answer have older metadata than others had")
            self._pause(deadline)

    def _find(self, name: str, give_up: float, deadline: float) -> messages.TopicInfo:
        """A topic by a fresh answer; by several, until `give_up`, where the first did not know it."""
        while True:
            answer = self._metadata([name], deadline)
            for topic in answer.topics:
                if topic.name == name:
                    return topic
            if time.monotonic() >= give_up:
                raise UnknownTopicOrPartition(f"no topic {name!r}")
            self._pause(give_up)

    def _wait_for_leaders(self, name: str, deadline: float) -> messages.TopicInfo:
        while True:
            view = self._find(name, deadline, deadline)
            if all(partition.leader != NO_BROKER for partition in view.partitions):
                return view
            if time.monotonic() >= deadline:
                raise LeaderNotAvailable(f"topic {name} was created, but not every partition has a leader yet")
            self._pause(deadline)

    def _health(self, view: messages.TopicInfo, deadline: float) -> dict[int, messages.PartitionHealth]:
        """What each partition's leader knows. A leader that cannot be asked leaves its partitions out."""
        by_leader: dict[int, list[int]] = {}
        for partition in view.partitions:
            if partition.leader != NO_BROKER:
                by_leader.setdefault(partition.leader, []).append(partition.partition)
        return {number: row for _, number, row in self._rows(view, by_leader, deadline)}

    def _rows(
        self, view: messages.TopicInfo, by_broker: dict[int, list[int]], deadline: float, *, own: bool = False
    ) -> Iterator[tuple[int, int, messages.PartitionHealth]]:
        """Broker, partition, and what the one says of the other. Who cannot be asked or does not know is left out."""
        for broker, numbers in by_broker.items():
            entries = [messages.PartitionEntry(view.topic_id, number) for number in numbers]
            request = messages.DescribePartitionsRequest(entries, own)
            answer = self._router.call(
                broker, Operation.DESCRIBE_PARTITIONS, request, min(ATTEMPT_S, self._left(deadline))
            )
            if isinstance(answer, Answer) and len(answer.message.results) == len(numbers):
                for number, row in zip(numbers, answer.message.results, strict=True):
                    if not row.error:
                        yield broker, number, row

    def _left(self, deadline: float) -> float:
        return max(0.001, deadline - time.monotonic())

    def _pause(self, deadline: float) -> None:
        """A while between two attempts, cut short by close."""
        self._closing.wait(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
        self._network.check()

    def close(self) -> None:
        self._closing.set()
        self._network.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
