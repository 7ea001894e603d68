"""Questions to the cluster, waited for: what every part of the administrator's client is made of.

Any broker takes any request and forwards what only the Raft leader can do, so a question goes to one that seems well
and, where the error is retriable, again to another until `request_timeout_ms` is over. A command whose answer was lost
may have taken effect: creating a topic then finds it there, and deleting one finds it gone. Both count as success if an
earlier attempt of the same call may have done it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from zmqueue.client.network import Address, Answer, Network
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.errors import (
    ConfigError,
    MetadataUnavailable,
    UnknownTopicOrPartition,
    ZmqueueError,
)
from zmqueue.model import NO_BROKER
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

# One attempt; a broker that takes longer is given up for another.
ATTEMPT_S = 5.0
# With less time left, an attempt would only replace a clear error by a timeout.
ATTEMPT_S_MIN = 0.05
PAUSE_S = 0.1
# So long a topic that was not found may still be on its way to the broker that was asked.
NOT_FOUND_S = 0.5


class Asking:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
