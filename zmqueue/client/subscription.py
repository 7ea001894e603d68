"""What is read without a group: partitions that were named, or all partitions of topics that were named.

Partitions that a topic gets later are read from their beginning, because their records are all younger than the
consumer.
"""

from __future__ import annotations

from collections.abc import Iterable

from zmqueue.client.fetcher import Fetcher
from zmqueue.client.questions import NOT_FOUND_S
from zmqueue.client.routing import Router
from zmqueue.model import EARLIEST, TopicPartition, check_topic_name


class Subscription:
    def __init__(self, router: Router, fetcher: Fetcher, reset: int | None, timeout_s: float) -> None:
        self.topics: dict[str, int] = {}  # how many partitions of each are assigned
        self._router = router
        self._fetcher = fetcher
        self._reset = reset
        self._timeout_s = timeout_s

    @property
    def complete(self) -> bool:
        """Whether every topic was found."""
        return 0 not in self.topics.values()

    def subscribe(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            check_topic_name(name, internal=True)
        self.topics = dict.fromkeys(names, 0)
        self._fetcher.assign([], self._reset)
        self._router.watch(names)
        self.follow()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self.topics = {}
        self._fetcher.assign(partitions, self._reset)

    def follow(self) -> None:
        """Assign partitions of subscribed topics that have appeared."""
        metadata = self._router.metadata
        for topic, assigned in self.topics.items():
            partitions = metadata.topic_partitions(topic)
            if not partitions:
                self._router.network.post(self._router.refresh)
            elif len(partitions) != assigned:
                self.topics[topic] = len(partitions)
                reset = EARLIEST if assigned else self._reset
                self._fetcher.assign([*self._fetcher.slots, *partitions], reset)

    def wait(self) -> None:
        """Give the cluster a moment to say which partitions the topics have."""
        if not self.complete:
            metadata = self._router.metadata
            self._router.wait_for(lambda: metadata.known or None, self._timeout_s)
            self._router.wait_for(lambda: all(name in metadata.topics for name in self.topics) or None, NOT_FOUND_S)
        self.follow()
