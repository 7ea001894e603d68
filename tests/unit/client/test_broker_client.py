"""Message Broker's client, against a scripted cluster."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from unit.client.fake_broker import FakeCluster
from unit.client.test_consumer import fill

from zmqueue import BrokerClient, Consumer, errors
from zmqueue.client.broker_client import Message

PATIENCE_S = 20.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "many": 4}) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Callable[..., BrokerClient]]:
    made: list[BrokerClient] = []

    def make(client_id: str | None = None) -> BrokerClient:
        client = BrokerClient(host="127.0.0.1", port=cluster.ports[0], client_id=client_id, request_timeout=10)
        assert client.connect() is True
        made.append(client)
        return client

    yield make
    for client in made:
        client.disconnect()


class Handler:
    """Keeps what it is given; `fails` says of which messages it raises first."""

    def __init__(self, fails: Callable[[Message], bool] = lambda message: False) -> None:
        self.messages: list[Message] = []
        self.fails = fails
        self._changed = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        if self.fails(message):
            raise KeyError("the handler's own trouble")

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(message.partition, message.sequence_number) for message in self.messages]

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, PATIENCE_S), self.places


def wait_for(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def committed(cluster: FakeCluster) -> list[int]:
    return sorted(row.offset for row in cluster.coordinator.offsets.values())


def test_what_is_published_arrives_with_its_properties(make: Callable[..., BrokerClient]) -> None:
    publisher, subscriber = make("publisher-1"), make("subscriber-1")
    assert publisher.publish_text("t", "Hello, World!").offset == 0
    assert publisher.publish("t", b"\xff", custom_property="value", number=3).offset == 1
    assert subscriber.create_subscription("group", "t", start_offset=0)
    handler = Handler()
    subscriber.subscribe_to_subscription("group", handler=handler)
    handler.wait(2)
    first, second = handler.messages
    assert (first.topic, first.partition, first.sequence_number) == ("t", 0, 0)
    assert (first.body, first.properties, first.message_type) == (b"Hello, World!", {}, "DATA")
    assert abs(first.timestamp - time.time() * 1000) < 600_000
    assert (second.body, second.properties) == (b"\xff", {"custom_property": "value", "number": "3"})


def test_messages_go_round_the_partitions(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    publisher = make()
    assert Counter(publisher.publish_text("many", "v").partition for _ in range(40)) == dict.fromkeys(range(4), 10)


def test_messages_are_ordinary_records(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    make().publish_text("t", "text", name="value")
    with Consumer("t", bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        record = next(consumer)
        assert (record.value, record.headers) == (b"text", [("name", b"value")])


def test_topics_are_made_once(make: Callable[..., BrokerClient]) -> None:
    client = make()
    assert client.create_topic("events", partitions=2) is True
    assert "events" in client.list_topics()


def test_a_subscription_begins_where_it_was_made_to(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    fill(cluster, [b"%d" % n for n in range(20)])
    client = make()
    assert client.create_subscription("group", "t", start_offset=15) is True
    assert client.create_subscription("group", "t", start_offset=0) is False
    with pytest.raises(errors.IllegalState, match="one of topic t"):
        client.create_subscription("group", "many")
    with pytest.raises(errors.ConfigError):
        client.create_subscription("other", "t", start_offset=-1)
    handler = Handler()
    client.subscribe_to_subscription("group", handler)
    handler.wait(5)
    assert handler.places == [(0, n) for n in range(15, 20)]


def test_an_offset_beyond_the_end_begins_at_the_end(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    fill(cluster, [b"old"] * 10)
    client, handler = make(), Handler()
    client.create_subscription("group", "t", start_offset=99)
    client.subscribe_to_subscription("group", handler)
    client.publish_text("t", "new")
    handler.wait(1)
    assert handler.places == [(0, 10)]


def test_a_message_is_acknowledged_when_its_handler_has_returned(
    cluster: FakeCluster, make: Callable[..., BrokerClient]
) -> None:
    fill(cluster, [b"%d" % n for n in range(3)])
    client = make()
    client.create_subscription("group", "t")
    seen: list[list[int]] = []
    goes_on = threading.Event()

    def slow(message: Message) -> None:
        if message.sequence_number == 1:
            wait_for(lambda: committed(cluster) == [1])
            seen.append(committed(cluster))
            assert goes_on.wait(PATIENCE_S)

    client.subscribe_to_subscription("group", slow)
    wait_for(lambda: seen)
    leaving = threading.Thread(target=client.unsubscribe_from_subscription, args=("group",))
    leaving.start()
    goes_on.set()
    leaving.join(PATIENCE_S)
    assert not leaving.is_alive()
    # What it was at is done and counts; what came behind was not begun.
    assert committed(cluster) == [2]
    handler = Handler()
    client.subscribe_to_subscription("group", handler)
    handler.wait(1)
    assert handler.places[0] == (0, 2)


def test_a_message_whose_handler_raises_comes_again_and_others_go_on(
    cluster: FakeCluster, make: Callable[..., BrokerClient]
) -> None:
    for number in range(4):
        fill(cluster, [b"%d" % n for n in range(5)], "many", number)
    tries: Counter[tuple[int, int]] = Counter()

    def fails(message: Message) -> bool:
        place = message.partition, message.sequence_number
        tries[place] += 1
        return place == (2, 1) and tries[place] < 3

    client, handler = make(), Handler(fails)
    client.create_subscription("group", "many")
    client.subscribe_to_subscription("group", handler)
    handler.wait(22)
    assert [at for number, at in handler.places if number == 2] == [0, 1, 1, 1, 2, 3, 4]
    assert Counter(handler.places) == tries
    assert all(count == 1 for place, count in tries.items() if place != (2, 1))
    wait_for(lambda: committed(cluster) == [5, 5, 5, 5])


def test_what_a_dead_subscriber_had_not_done_goes_to_another(
    cluster: FakeCluster, make: Callable[..., BrokerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cluster, [b"%d" % n for n in range(3)])
    client = make("first")
    client.create_subscription("group", "t")
    stuck, ended = threading.Event(), threading.Event()

    def hangs(message: Message) -> None:
        if message.sequence_number == 1:
            stuck.set()
            ended.wait(PATIENCE_S)

    client.subscribe_to_subscription("group", hangs)
    assert stuck.wait(PATIENCE_S)
    wait_for(lambda: committed(cluster) == [1])
    cluster.do(lambda: cluster.coordinator.expel(next(iter(cluster.coordinator.members))))
    other, handler = make("second"), Handler()
    other.subscribe_to_subscription("group", handler)
    handler.wait(2)
    assert handler.places == [(0, 1), (0, 2)]
    ended.set()


def test_a_handler_may_leave_by_itself(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    fill(cluster, [b"%d" % n for n in range(3)])
    client = make()
    client.create_subscription("group", "t")
    left: list[bool] = []
    client.subscribe_to_subscription(
        "group", lambda message: left.append(client.unsubscribe_from_subscription("group"))
    )
    wait_for(lambda: committed(cluster) == [1])
    assert left == [True]
    assert client.unsubscribe_from_subscription("group") is False


def test_the_legacy_way_makes_a_subscription_of_the_clients_own(
    cluster: FakeCluster, make: Callable[..., BrokerClient]
) -> None:
    fill(cluster, [b"%d" % n for n in range(4)])
    first = make("reader")
    handler = Handler()
    assert first.subscribe("t", handler, start_offset=2) == "reader:t"
    handler.wait(2)
    assert handler.places == [(0, 2), (0, 3)]
    assert first.unsubscribe("t")
    first.publish_text("t", "while it was away")
    again = Handler()
    first.subscribe("t", again)
    again.wait(1)
    assert again.places == [(0, 4)]


def test_what_cannot_be_is_said(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    client = make()
    with pytest.raises(errors.GroupNotFound, match="create it first"):
        client.subscribe_to_subscription("nothing", Handler())
    client.create_subscription("group", "t")
    client.subscribe_to_subscription("group", Handler())
    with pytest.raises(errors.IllegalState, match="already"):
        client.subscribe_to_subscription("group", Handler())
    client.disconnect()
    client.disconnect()
    for call in (client.list_topics, lambda: client.publish_text("t", "v"), lambda: client.subscribe("t", Handler())):
        with pytest.raises(errors.IllegalState, match="not connected"):
            call()
    cluster.kill(0)
    lonely = BrokerClient(host="127.0.0.1", port=cluster.ports[0], request_timeout=0.2)
    with pytest.raises(errors.NoBrokersAvailable):
        lonely.connect()


def test_leaving_ends_the_threads(cluster: FakeCluster, make: Callable[..., BrokerClient]) -> None:
    client = make("leaver")
    client.create_subscription("group", "t")
    client.subscribe_to_subscription("group", Handler())
    client.disconnect()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "leaver" in name or "subscription" in name]
