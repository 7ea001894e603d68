"""Message Broker's subscriptions on this cluster: a name with a start offset, whose messages are pushed to handlers.

Today a subscription is the consumer group of its name. Making it commits the start offset for each partition of the
topic; a subscriber is a member of the group with a thread of its own, which polls, calls the handler, and commits what
the handler has returned from. So a message is delivered at least once: again if the handler raised, and again (perhaps
elsewhere) if its process died. A partition whose handler raised waits a little, longer each time; the others go on.

This module is where subscriptions that brokers deliver, message by message in turns, will take the place of groups:
`Subscriptions` and `Subscriber` are all that `BrokerClient` knows of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from zmqueue.client.admin import Admin
from zmqueue.client.consumer import Consumer
from zmqueue.client.routing import jittered
from zmqueue.errors import (
    ClientClosed,
    ConfigError,
    GroupNotFound,
    IllegalState,
    NonEmptyGroup,
    WakeupError,
    ZmqueueError,
)
from zmqueue.model import ConsumerRecord, TopicPartition

log = logging.getLogger("zmqueue.client")

RETRY_S, RETRY_S_MAX = 0.1, 10.0
POLL_S = 1.0
# Few, so that a slow handler does not keep many messages from other subscribers.
MESSAGES_PER_POLL = 50

Handler = Callable[[ConsumerRecord], Any]


class Subscription(Struct, frozen=True):
    """What is known of a subscription. `offsets` is the next message of each partition, `subscribers` their number."""

    name: str
    topics: list[str]
    offsets: dict[TopicPartition, int]
    subscribers: int


class Subscriptions:
    def __init__(self, admin: Admin, bootstrap: str, client_id: str) -> None:
        self._admin, self._bootstrap, self._client_id = admin, bootstrap, client_id

    def create(self, name: str, topic: str, start_offset: int) -> bool:
        """False if it is there already; then it stays where it is. The offset is cut to what each partition has."""
        if start_offset < 0:
            raise ConfigError(f"start_offset: {start_offset} is negative")
        found = self._offsets(name)
        if not found:
            starts = {
                TopicPartition(topic, each.partition): min(
                    max(start_offset, each.log_start), max(0, each.high_watermark)
                )
                for each in self._admin.describe_topic(topic).partitions
            }
            try:
                self._admin.set_group_offsets(name, starts)
                return True
            except NonEmptyGroup:
                # Another client was quicker, and has subscribed by now.
                found = self._offsets(name)
        topics = {partition.topic for partition in found}
        if topics and topic not in topics:
            raise IllegalState(f"subscription {name!r} is one of topic {', '.join(sorted(topics))}")
        return False

    def delete(self, name: str) -> bool:
        """False if there is none. Raises NonEmptyGroup while somebody is subscribed."""
        try:
            self._admin.delete_group(name)
            return True
        except GroupNotFound:
            return False

    def list(self) -> list[Subscription]:
        subscriptions = []
        for group in self._admin.list_groups():
            offsets = self._offsets(group.group)
            topics = sorted({partition.topic for partition in offsets})
            subscriptions.append(Subscription(group.group, topics, offsets, group.members))
        return subscriptions

    def join(self, name: str, handler: Handler) -> Subscriber:
        """Begin to deliver. Raises GroupNotFound if there is no such subscription."""
        topics = sorted({partition.topic for partition in self._offsets(name)})
        if not topics:
            raise GroupNotFound(f"there is no subscription {name!r}: create it first")
        consumer = Consumer(
            *topics,
            bootstrap_servers=self._bootstrap,
            client_id=self._client_id,
            group_id=name,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_records=MESSAGES_PER_POLL,
        )
        return Subscriber(name, consumer, handler)

    def _offsets(self, name: str) -> dict[TopicPartition, int]:
        try:
            return {partition: at.offset for partition, at in self._admin.group_offsets(name).items()}
        except GroupNotFound:
            return {}


class Subscriber:
    """One client's part in a subscription, until it is stopped."""

    def __init__(self, name: str, consumer: Consumer, handler: Handler) -> None:
        self._name, self._consumer, self._handler = name, consumer, handler
        self._stopping = threading.Event()
        self._failures: dict[TopicPartition, int] = {}
        self._again_at: dict[TopicPartition, float] = {}
        self._handled: dict[TopicPartition, int] = {}
        self._thread = threading.Thread(target=self._run, name=f"zmqueue-subscription-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deliver no more, once the handler has returned from what it is at. A handler may call this itself."""
        self._stopping.set()
        self._consumer.wakeup()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except WakeupError:
                    continue
                except ClientClosed:
                    return
                except ZmqueueError as error:
                    log.warning("subscription %s: %s: %s", self._name, error.name, error)
                    self._stopping.wait(POLL_S)
        finally:
            self._leave()

    def _turn(self) -> None:
        due = min(self._again_at.values(), default=float("inf")) - time.monotonic()
        polled = self._consumer.poll(1000 * min(POLL_S, max(0.0, due)))
        for partition, records in polled.items():
            self._deliver(partition, records)
        now = time.monotonic()
        for partition in [each for each, at in self._again_at.items() if at <= now]:
            del self._again_at[partition]
            if partition in self._consumer.assignment():
                self._consumer.resume(partition)

    def _deliver(self, partition: TopicPartition, records: list[ConsumerRecord]) -> None:
        for record in records:
            if self._stopping.is_set():
                return
            try:
                self._handler(record)
            except Exception:
                log.exception("subscription %s: the handler failed, %s again later", self._name, _place(record))
                self._deliver_again(partition, record.offset)
                return
            self._failures.pop(partition, None)
            self._handled[partition] = record.offset + 1
            self._consumer.commit_async({partition: record.offset + 1})

    def _deliver_again(self, partition: TopicPartition, offset: int) -> None:
        failures = self._failures.get(partition, 0)
        self._failures[partition] = failures + 1
        self._again_at[partition] = time.monotonic() + jittered(RETRY_S, failures, RETRY_S_MAX)
        self._consumer.seek(partition, offset)
        self._consumer.pause(partition)

    def _leave(self) -> None:
        """Commits that are under way are waited for, by one that says the same."""
        try:
            mine = self._consumer.assignment()
            handled = {partition: offset for partition, offset in self._handled.items() if partition in mine}
            if handled:
                self._consumer.commit(handled)
        except ZmqueueError as error:
            log.warning("subscription %s: messages may come again: %s: %s", self._name, error.name, error)
        finally:
            self._consumer.close()


def _place(record: ConsumerRecord) -> str:
    return f"{record.topic}-{record.partition} at {record.offset}"
