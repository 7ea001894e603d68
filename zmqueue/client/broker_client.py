"""`BrokerClient`: Message Broker's client, method for method, on this cluster.

    client = BrokerClient(client_id="publisher-1")
    client.connect()
    client.create_topic("events")
    client.publish_text("events", "Hello, World!", custom_property="value")
    client.disconnect()

`host` and `port` name one broker of the cluster; the others are heard of from it. The default is localhost:9092, where
`zmqueue up` begins (Message Broker's own was 9999). Properties are headers, the body is the record's value, and the
sequence number its offset, so whatever is published here is read by a `Consumer`, and the other way round.

What differs from Message Broker
- A topic has partitions (ten, or what the cluster is set to). `publish` goes round them, and messages are in order
  within one. `partitions=1` gives one sequence for the whole topic.
- Subscribers of one subscription share it by partition, and not message by message: each partition's messages go to
  one of them, as long as it is there. With one partition one subscriber gets them all and the others stand by.
- A message is acknowledged when its handler has returned; it comes again if that raised, or if the process died.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

from msgspec import Struct

from zmqueue.client.admin import Admin
from zmqueue.client.broker_subscriptions import Subscriber, Subscription, Subscriptions
from zmqueue.client.producer import Producer
from zmqueue.errors import IllegalState, TopicExists
from zmqueue.model import ConsumerRecord, RecordMetadata

DEFAULT_PORT = 9092


class Message(Struct, frozen=True):
    """A message as a handler gets it. `sequence_number` counts within the partition, `timestamp` is in milliseconds."""

    topic: str
    partition: int
    sequence_number: int
    timestamp: int
    properties: dict[str, str]
    body: bytes
    message_type: str = "DATA"


MessageHandler = Callable[[Message], Any]


class _Connection:
    """What a connected client has."""

    def __init__(self, bootstrap: str, client_id: str, timeout_s: float) -> None:
        timeout_ms = int(timeout_s * 1000)
        self.admin = Admin(bootstrap_servers=bootstrap, client_id=client_id, request_timeout_ms=timeout_ms)
        try:
            self.admin.describe_cluster()
        except BaseException:
            self.admin.close()
            raise
        # Message by message to another partition, so that those who share a subscription get them nearly in turns.
        self.producer = Producer(
            bootstrap_servers=bootstrap,
            client_id=client_id,
            linger_ms=0,
            max_block_ms=timeout_ms,
            partitioner="round_robin",
        )
        self.subscriptions = Subscriptions(self.admin, bootstrap, client_id)

    def close(self) -> None:
        self.producer.close()
        self.admin.close()


class BrokerClient:
    def __init__(
        self,
        host: str = "localhost",
        port: int = DEFAULT_PORT,
        client_id: str | None = None,
        request_timeout: float = 30,
    ) -> None:
        """`request_timeout` is in seconds. A client without an id gets one, and leaves nothing behind under it."""
        self.client_id = client_id or f"client-{uuid.uuid4().hex[:12]}"
        self._named = client_id is not None
        self._bootstrap = f"{host}:{port}"
        self._timeout_s = request_timeout
        self._connection: _Connection | None = None
        self._subscribers: dict[str, Subscriber] = {}
        self._lock = threading.Lock()

    def connect(self) -> bool:
        """Find the cluster. Raises NoBrokersAvailable."""
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self._bootstrap, self.client_id, self._timeout_s)
        return True

    def disconnect(self) -> None:
        """Leave all subscriptions, when the handlers have returned from what they are at, and end."""
        with self._lock:
            connection, self._connection = self._connection, None
            subscribers, self._subscribers = self._subscribers, {}
        for subscriber in subscribers.values():
            subscriber.stop()
        if connection is not None:
            if not self._named:
                for name in subscribers:
                    if name.startswith(self._legacy_name("")):
                        connection.subscriptions.delete(name)
            connection.close()

    def __enter__(self) -> BrokerClient:
        self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.disconnect()

    def _connected(self) -> _Connection:
        connection = self._connection
        if connection is None:
            raise IllegalState("this client is not connected: call connect() first")
        return connection

    # -- topics and messages -----------------------------------------------------------------------------------------

    def create_topic(self, topic: str, partitions: int | None = None) -> bool:
        """True if it is new, False if it was there, as it is. Without `partitions`, as many as the cluster gives."""
        try:
            self._connected().admin.create_topic(topic, partitions)
        except TopicExists:
            return False
        return True

    def list_topics(self) -> list[str]:
        return self._connected().admin.list_topics()

    def publish(self, topic: str, body: bytes, /, **properties: Any) -> RecordMetadata:
        """Returns when the message is safe on all replicas that are in sync: where it is, `.offset` above all."""
        headers = [(name, str(value).encode()) for name, value in properties.items()]
        return self._connected().producer.send(topic, body, headers=headers).get(self._timeout_s)

    def publish_text(self, topic: str, text: str, /, **properties: Any) -> RecordMetadata:
        return self.publish(topic, text.encode(), **properties)

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def create_subscription(self, name: str, topic: str, start_offset: int = 0) -> bool:
        """True if it is new. One that is there stays where it is (False); of another topic, it raises IllegalState.

        `start_offset` holds for each partition, cut to what is there.
        """
        return self._connected().subscriptions.create(name, topic, start_offset)

    def delete_subscription(self, name: str) -> bool:
        """False if there is none. Raises NonEmptyGroup while somebody is subscribed."""
        return self._connected().subscriptions.delete(name)

    def list_subscriptions(self) -> list[Subscription]:
        """Every subscription, and with them every consumer group, which is the same thing today."""
        return self._connected().subscriptions.list()

    def subscribe_to_subscription(self, name: str, handler: MessageHandler) -> None:
        """Call `handler(message)` for messages of the subscription, in a thread of its own, until it is left.

        Raises GroupNotFound if there is no such subscription.
        """
        connection = self._connected()
        with self._lock:
            if name in self._subscribers:
                raise IllegalState(f"this client has subscribed to {name!r} already")
            self._subscribers[name] = connection.subscriptions.join(name, lambda record: handler(_message(record)))

    def unsubscribe_from_subscription(self, name: str) -> bool:
        """Returns when the handler has returned from what it is at. False if this client was not subscribed."""
        with self._lock:
            subscriber = self._subscribers.pop(name, None)
        if subscriber is not None:
            subscriber.stop()
        return subscriber is not None

    # -- without naming a subscription -------------------------------------------------------------------------------

    def subscribe(self, topic: str, handler: MessageHandler, start_offset: int = 0) -> str:
        """Get everything of a topic: makes a subscription of this client's own, and returns its name.

        A client with an id finds it again and goes on where it was.
        """
        name = self._legacy_name(topic)
        self.create_subscription(name, topic, start_offset)
        self.subscribe_to_subscription(name, handler)
        return name

    def unsubscribe(self, topic: str) -> bool:
        name = self._legacy_name(topic)
        left = self.unsubscribe_from_subscription(name)
        if left and not self._named:
            self.delete_subscription(name)
        return left

    def _legacy_name(self, topic: str) -> str:
        return f"{self.client_id}:{topic}"


def _message(record: ConsumerRecord) -> Message:
    properties = {name: value.decode(errors="replace") for name, value in record.headers}
    body = b"" if record.value is None else record.value
    return Message(record.topic, record.partition, record.offset, record.timestamp, properties, body)
