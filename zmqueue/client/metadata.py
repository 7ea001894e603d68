"""What a client believes about the cluster, and which news it accepts. Pure.

Any broker answers metadata requests, and one that was cut off answers with old news. Two marks order the news: `index`
counts the metadata commands behind an answer, and `leader_epoch` grows with every election of a partition. Hints (in
refused produce and fetch requests) have an epoch but no index.

Invariants
- leader_epoch and index of a partition of one topic id never go back.
- A name belongs to the topic id of the answer with the largest index; an id, once replaced, is forgotten.
- A topic disappears only by an answer that was asked for it and is not older than what made it known.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zmqueue.errors import WrongCluster
from zmqueue.model import NO_BROKER, TopicPartition
from zmqueue.wire import messages


class PartitionView(Struct):
    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    elr: list[int]
    index: int


class TopicView(Struct):
    name: str
    topic_id: bytes
    replication_factor: int
    min_insync_replicas: int
    storage: str
    config: dict[str, str]
    partitions: dict[int, PartitionView]
    index: int


class BrokerView(Struct, frozen=True):
    id: int
    host: str
    port: int
    epoch: int
    fenced: bool


class Metadata:
    """Written by one thread. Readers in others see either the old or the new state of a topic, never half of one."""

    def __init__(self) -> None:
        self.cluster_id = ""
        self.controller = NO_BROKER
        self.index = -1
        self.brokers: dict[int, BrokerView] = {}
        self.topics: dict[str, TopicView] = {}
        self.names: dict[bytes, str] = {}

    @property
    def known(self) -> bool:
        return self.index >= 0

    def update(self, news: messages.MetadataResponse, asked: Iterable[str] | None) -> None:
        """Take in an answer to a request for the topics `asked` (None: all). Raises WrongCluster."""
        if self.known and news.cluster_id != self.cluster_id:
            raise WrongCluster(f"this client belongs to cluster {self.cluster_id}, the answer to {news.cluster_id}")
        self.cluster_id = news.cluster_id
        if news.index >= self.index:
            self.index, self.controller = news.index, news.controller
            self.brokers = {b.id: BrokerView(b.id, b.host, b.port, b.epoch, b.fenced) for b in news.brokers}
        for info in news.topics:
            self._update_topic(info, news.index)
        there = {info.name for info in news.topics}
        for name in list(self.topics) if asked is None else asked:
            view = self.topics.get(name)
            if name not in there and view is not None and view.index <= news.index:
                self._forget(view)

    def _update_topic(self, info: messages.TopicInfo, index: int) -> None:
        old = self.topics.get(info.name)
        if old is not None and old.topic_id != info.topic_id:
            if index < old.index:
                return
            self._forget(old)
            old = None
        partitions = dict(old.partitions) if old is not None else {}
        for row in info.partitions:
            view = PartitionView(row.partition, row.leader, row.leader_epoch, row.replicas, row.isr, row.elr, index)
            known = partitions.get(row.partition)
            if known is None or (view.leader_epoch >= known.leader_epoch and index >= known.index):
                partitions[row.partition] = view
        if old is not None and index < old.index:
            self.topics[info.name] = _with_partitions(old, partitions)
            return
        self.names[info.topic_id] = info.name
        self.topics[info.name] = TopicView(
            info.name,
            info.topic_id,
            info.replication_factor,
            info.min_insync_replicas,
            info.storage,
            info.config,
            dict(sorted(partitions.items())),
            index,
        )

    def hint(self, topic_id: bytes, partition: int, leader: int, leader_epoch: int) -> bool:
        """A broker that refused says who leads. True if that was news."""
        view = self._partition(topic_id, partition)
        if view is None or leader not in self.brokers or leader_epoch <= view.leader_epoch:
            return False
        view.leader, view.leader_epoch = leader, leader_epoch
        return True

    def leader(self, topic: str, partition: int) -> tuple[int, int]:
        """Leader and leader epoch; NO_BROKER where none is known."""
        topic_view = self.topics.get(topic)
        view = topic_view.partitions.get(partition) if topic_view is not None else None
        return (view.leader, view.leader_epoch) if view is not None else (NO_BROKER, -1)

    def topic_partitions(self, topic: str) -> list[TopicPartition]:
        view = self.topics.get(topic)
        return [TopicPartition(topic, number) for number in view.partitions] if view is not None else []

    def _partition(self, topic_id: bytes, partition: int) -> PartitionView | None:
        name = self.names.get(topic_id)
        return self.topics[name].partitions.get(partition) if name is not None else None

    def _forget(self, view: TopicView) -> None:
        del self.topics[view.name]
        self.names.pop(view.topic_id, None)


def _with_partitions(view: TopicView, partitions: dict[int, PartitionView]) -> TopicView:
    return TopicView(
        view.name,
        view.topic_id,
        view.replication_factor,
        view.min_insync_replicas,
        view.storage,
        view.config,
        dict(sorted(partitions.items())),
        view.index,
    )
