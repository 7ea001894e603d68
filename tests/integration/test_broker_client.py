"""Message Broker's own usage examples, as its page has them, and what they promise; the programs of our pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zmqueue import BrokerClient
from zmqueue.testing import Cluster, running_cluster

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
MESSAGES = 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("broker-client") / "data", brokers=3) as cluster:
        yield cluster


@pytest.fixture
def address(cluster: Cluster) -> dict[str, Any]:
    host, port = cluster.bootstrap_servers.split(",")[0].split(":")
    return {"host": host, "port": int(port)}


def wait_for(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_publisher_and_subscriber(address: dict[str, Any]) -> None:
    client = BrokerClient(**address, client_id="publisher-1")
    client.connect()
    assert client.create_topic("events") is True
    assert client.create_topic("events") is False
    client.publish_text("events", "Hello, World!")
    client.publish_text("events", "Another message", custom_property="value")
    client.disconnect()

    received = []

    def message_handler(message: Any) -> None:
        received.append((message.body.decode("utf-8"), message.properties))

    client = BrokerClient(**address, client_id="subscriber-1")
    client.connect()
    assert client.create_subscription("my-consumer-group", "events", start_offset=0) is True
    assert client.create_subscription("my-consumer-group", "events", start_offset=0) is False
    client.subscribe_to_subscription("my-consumer-group", handler=message_handler)
    wait_for(lambda: len(received) == 2)
    client.unsubscribe_from_subscription("my-consumer-group")
    (known,) = [each for each in client.list_subscriptions() if each.name == "my-consumer-group"]
    assert (known.topics, sum(known.offsets.values()), known.subscribers) == (["events"], 2, 0)
    assert client.delete_subscription("my-consumer-group") is True
    assert client.delete_subscription("my-consumer-group") is False
    client.disconnect()
    assert sorted(received, key=str) == [("Another message", {"custom_property": "value"}), ("Hello, World!", {})]


def test_two_subscribers_share_a_subscription_and_each_subscription_gets_everything(address: dict[str, Any]) -> None:
    received: dict[str, list[str]] = {"subscriber-1": [], "subscriber-2": [], "alone": []}
    lock = threading.Lock()

    def subscriber(name: str, subscription: str) -> BrokerClient:
        def message_handler(message: Any) -> None:
            with lock:
                received[name].append(message.body.decode())

        client = BrokerClient(**address, client_id=name)
        client.connect()
        client.create_subscription(subscription, "shared")
        client.subscribe_to_subscription(subscription, handler=message_handler)
        return client

    with BrokerClient(**address) as publisher:
        publisher.create_topic("shared", partitions=10)
        clients = [
            subscriber("subscriber-1", "shared-group"),
            subscriber("subscriber-2", "shared-group"),
            subscriber("alone", "other-group"),
        ]
        sent: list[str] = []

        def publish_until(ready: Callable[[], Any]) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while not ready():
                assert time.monotonic() < deadline, "it did not happen in time"
                sent.append(f"message {len(sent)}")
                publisher.publish_text("shared", sent[-1])

        publish_until(lambda: len(sent) >= MESSAGES and received["subscriber-1"] and received["subscriber-2"])
        wait_for(lambda: len(received["alone"]) == len(sent))
        wait_for(lambda: len(received["subscriber-1"]) + len(received["subscriber-2"]) == len(sent))
        assert sorted(received["alone"]) == sorted(sent)
        assert sorted(received["subscriber-1"] + received["subscriber-2"]) == sorted(sent)

        # One goes: the other gets all that comes.
        clients[0].disconnect()
        before = len(received["subscriber-1"])
        sent += [f"late {n}" for n in range(20)]
        for text in sent[-20:]:
            publisher.publish_text("shared", text)
        wait_for(lambda: set(sent[-20:]) <= set(received["subscriber-2"]))
        assert len(received["subscriber-1"]) == before
        for client in clients[1:]:
            client.disconnect()


def test_a_killed_broker_loses_no_message_of_a_subscription(cluster: Cluster, address: dict[str, Any]) -> None:
    received: set[str] = set()
    with BrokerClient(**address) as publisher, BrokerClient(**address, client_id="steady") as subscriber:
        publisher.create_topic("survives")
        subscriber.create_subscription("steady-group", "survives")
        subscriber.subscribe_to_subscription("steady-group", lambda message: received.add(message.body.decode()))
        sent = []
        for n in range(120):
            if n == 40:
                cluster.kill(2)
            sent.append(f"message {n}")
            publisher.publish_text("survives", sent[-1])
        wait_for(lambda: received == set(sent))
    cluster.start(2)
    cluster.wait_healthy()


@pytest.mark.parametrize("page", ["asyncio", "broker_client"])
def test_the_programs_of_a_page_work_as_written(cluster: Cluster, page: str) -> None:
    if page == "asyncio":
        cluster.command("topic", "create", "async-events")
    first = cluster.bootstrap_servers.split(",")[0]
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert programs
    printed = ""
    for program in programs:
        program = program.replace("127.0.0.1:9092", first).replace("port=9092", f"port={first.split(':')[1]}")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        printed += done.stdout
    expected = {"asyncio": "10000 records written\n10000 records, then", "broker_client": "Received: Hello, World!"}
    assert expected[page] in printed
