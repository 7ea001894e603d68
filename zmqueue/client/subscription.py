"""What is read without a group: partitions that were named, or all partitions of topics that were named.

Partitions that a topic gets later are read from their beginning, because their records are all younger than the
consumer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zmqueue.client.fetcher import Fetcher
from zmqueue.client.questions import NOT_FOUND_S
from zmqueue.client.routing import Router
from zmqueue.client.slots import Reset
from zmqueue.model import EARLIEST, TopicPartition, check_topic_name

# How often topics are looked at anew for a pattern.
PATTERN_S = 10.0


def matches(pattern: re.Pattern[str], router: Router) -> list[str]:
    """Topics that match from the start of their names, as in kafka-python; internal ones never do."""
    return sorted(name for name in list(router.metadata.topics) if pattern.match(name) and not name.startswith("__"))


class Subscription:
    def __init__(
        self, router: Router, fetcher: Fetcher, reset: Reset, timeout_s: float, *, asks_group: bool = False
    ) -> None:
        """`asks_group`: partitions that are named begin where their group left off."""
        self.topics: dict[str, int] = {}  # how many partitions of each are assigned
        self.assigned = False  # whether partitions were named
        self._pattern: re.Pattern[str] | None = None
        self._asks_group = asks_group
        self._router = router
        self._fetcher = fetcher
        self._reset = reset
        self._timeout_s = timeout_s

    @property
    def complete(self) -> bool:
        """Whether every topic was found."""
        return 0 not in self.topics.values()

    @staticmethod
    def checked(names: Iterable[str]) -> list[str]:
        return [check_topic_name(name, internal=True) for name in names]

    def subscribe(self, names: Iterable[str], pattern: str | None = None) -> None:
        names = self.checked(names)
        self._pattern = re.compile(pattern) if pattern is not None else None
        self.topics, self.assigned = dict.fromkeys(names, 0), False
        self._fetcher.assign([], self._reset)
        if pattern is not None:
            self._router.watch_all()
            self._router.network.post(self._look_for_topics)
        self._router.watch(names)
        self.follow()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        wanted = list(partitions)
        self.topics, self._pattern, self.assigned = {}, None, bool(wanted)
        self._fetcher.assign(wanted, self._reset, asks_group=self._asks_group)

    def _look_for_topics(self) -> None:
        if self._pattern is not None:
            self._router.refresh()
            self._router.network.call_later(PATTERN_S, self._look_for_topics)

    def _match(self) -> None:
        """What matches by now."""
        if self._pattern is None:
            return
        matching = matches(self._pattern, self._router)
        gone = self.topics.keys() - set(matching)
        if gone:
            kept = [partition for partition in self._fetcher.slots if partition.topic not in gone]
            self.topics = {topic: count for topic, count in self.topics.items() if topic not in gone}
            self._fetcher.assign(kept, self._reset)
        for topic in matching:
            self.topics.setdefault(topic, 0)

    def follow(self) -> None:
        """Assign partitions of subscribed topics that have appeared."""
        self._match()
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
