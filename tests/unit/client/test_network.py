"""Requests over real sockets, against a cluster that misbehaves on command."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from unit.client.fake_broker import DROP, GARBAGE, SILENCE, FakeCluster, Seen, free_port

from zmqueue import errors
from zmqueue.client.network import Address, Answer, Network
from zmqueue.client.routing import Router, parse_bootstrap
from zmqueue.wire import frames, messages
from zmqueue.wire.frames import Operation


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as cluster:
        yield cluster


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network("test", connect_timeout_ms=300)
    yield network
    network.close()


class Ask:
    """One request from the test's thread, and what became of it."""

    def __init__(self, network: Network, port: int, timeout_s: float = 5.0, message: object = None) -> None:
        self.results: list[Answer | errors.ZmqueueError] = []
        self.done = threading.Event()

        def start() -> None:
            self.request = network.request(
                Address("127.0.0.1", port),
                Operation.STATUS,
                messages.StatusRequest(),
                message,  # type: ignore[arg-type]
                timeout_s,
                self.finish,
            )

        network.post(start)

    def finish(self, result: Answer | errors.ZmqueueError) -> None:
        self.results.append(result)
        self.done.set()

    def result(self) -> Answer | errors.ZmqueueError:
        assert self.done.wait(5)
        assert len(self.results) == 1
        return self.results[0]


def test_a_request_is_answered(cluster: FakeCluster, network: Network) -> None:
    answer = Ask(network, cluster.ports[1]).result()
    assert isinstance(answer, Answer)
    assert answer.message.broker == 1


def test_many_requests_are_under_way_at_once_and_matched_by_their_ids(cluster: FakeCluster, network: Network) -> None:
    held: list[Seen] = []
    cluster.script = lambda seen: held.append(seen) or SILENCE
    asks = [Ask(network, cluster.ports[0]) for _ in range(10)]
    cluster.wait_for(lambda: len(held) == 10)
    status = messages.StatusResponse(0, 1, False, 1, 1, 0, 1, 0, True, 1, 1, 0, 0, 0)
    for number, seen in reversed(list(enumerate(held))):
        status.uptime_ms = number
        cluster.do(lambda seen=seen: cluster.answer(seen, status))  # type: ignore[misc]
    assert [ask.result().message.uptime_ms for ask in asks] == list(range(10))  # type: ignore[union-attr]


def test_a_failure_comes_back_as_its_error(cluster: FakeCluster, network: Network) -> None:
    cluster.script = lambda seen: errors.BrokerFenced.code
    assert isinstance(Ask(network, cluster.ports[0]).result(), errors.BrokerFenced)


def test_when_the_connection_is_lost_all_requests_on_it_fail_at_once(cluster: FakeCluster, network: Network) -> None:
    cluster.script = lambda seen: SILENCE if len(cluster.seen) < 3 else DROP
    started = time.monotonic()
    asks = [Ask(network, cluster.ports[0], timeout_s=30) for _ in range(3)]
    assert all(isinstance(ask.result(), errors.NetworkError) for ask in asks)
    assert time.monotonic() - started < 5


def test_a_connection_comes_back_by_itself(cluster: FakeCluster, network: Network) -> None:
    cluster.script = lambda seen: DROP if len(cluster.seen) == 1 else None
    assert isinstance(Ask(network, cluster.ports[0]).result(), errors.NetworkError)
    network.connect_timeout_s = 5.0
    assert isinstance(Ask(network, cluster.ports[0]).result(), Answer)


def test_an_unanswered_request_ends_with_its_time(cluster: FakeCluster, network: Network) -> None:
    cluster.script = lambda seen: SILENCE
    assert isinstance(Ask(network, cluster.ports[0], timeout_s=0.1).result(), errors.RequestTimedOut)


def test_where_nobody_listens_a_request_ends_with_the_connect_timeout(network: Network) -> None:
    ask = Ask(network, free_port(), timeout_s=30)
    assert isinstance(ask.result(), errors.NetworkError)
    assert not ask.request.on_wire


def test_an_answer_after_the_end_is_dropped(cluster: FakeCluster, network: Network) -> None:
    held: list[Seen] = []
    cluster.script = lambda seen: held.append(seen) or SILENCE if len(cluster.seen) == 1 else None
    Ask(network, cluster.ports[0], timeout_s=0.1).result()
    cluster.do(lambda: cluster.answer(held[0], messages.Done()))
    assert isinstance(Ask(network, cluster.ports[0]).result(), Answer)
    assert network.answers_unclaimed == 1


def test_garbage_is_counted_and_costs_only_the_connection(cluster: FakeCluster, network: Network) -> None:
    cluster.script = lambda seen: GARBAGE if len(cluster.seen) == 1 else None
    assert isinstance(Ask(network, cluster.ports[0]).result(), errors.NetworkError)
    assert network.answers_malformed == 1
    network.connect_timeout_s = 5.0
    assert isinstance(Ask(network, cluster.ports[0]).result(), Answer)


@pytest.mark.parametrize("body", [b"", b"\xff", frames.pack(messages.Done())], ids=["empty", "not CBOR", "other type"])
def test_an_answer_with_a_bad_body_fails_its_own_request_only(
    cluster: FakeCluster, network: Network, body: bytes
) -> None:
    cluster.script = lambda seen: (
        [frames.response(seen.head, messages.Done())[0], body] if len(cluster.seen) == 1 else None
    )
    bad, good = Ask(network, cluster.ports[0]), Ask(network, cluster.ports[0])
    assert isinstance(bad.result(), errors.NetworkError)
    assert isinstance(good.result(), Answer)
    assert network.answers_malformed == 1


def test_an_answer_to_another_operation_is_malformed(cluster: FakeCluster, network: Network) -> None:
    def script(seen: Seen) -> list[bytes]:
        return frames.response(
            frames.Head(frames.Kind.RESPONSE, Operation.DELETE_TOPIC, seen.head.correlation), messages.Done()
        )

    cluster.script = script
    assert isinstance(Ask(network, cluster.ports[0]).result(), errors.NetworkError)


def test_a_request_too_large_is_refused_before_it_leaves(cluster: FakeCluster, network: Network) -> None:
    ask = Ask(network, cluster.ports[0], message=[bytes(network.request_bytes_max)])
    assert isinstance(ask.result(), errors.MessageTooLarge)
    assert not cluster.seen


def test_timers_fire_in_their_order_and_not_when_cancelled(network: Network) -> None:
    fired: list[int] = []
    done = threading.Event()

    def start() -> None:
        network.call_later(0.02, lambda: fired.append(2))
        network.call_later(0.01, lambda: fired.append(1))
        network.call_later(0.015, lambda: fired.append(9)).cancel()
        for _ in range(200):
            network.call_later(60, lambda: None).cancel()
        network.call_later(0.03, done.set)

    network.post(start)
    assert done.wait(5)
    assert fired == [1, 2]
    assert len(network._timers) < 100, "cancelled timers do not pile up"


def test_a_callback_that_raises_does_not_end_the_thread(cluster: FakeCluster, network: Network) -> None:
    network.post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert isinstance(Ask(network, cluster.ports[0]).result(), Answer)


def test_the_loop_sleeps_when_there_is_nothing_to_do(network: Network) -> None:
    turns = []
    turn = network._turn
    network._turn = lambda: turns.append(1) or turn()  # type: ignore[method-assign, func-returns-value]
    done = threading.Event()
    network.post(lambda: network.call_later(0.2, done.set) and None)
    assert done.wait(5)
    assert len(turns) < 10


def test_close_fails_what_is_under_way_and_ends_the_thread(cluster: FakeCluster) -> None:
    network = Network("test")
    cluster.script = lambda seen: SILENCE
    ask = Ask(network, cluster.ports[0])
    cluster.wait_for(lambda: cluster.seen)
    network.close()
    assert isinstance(ask.result(), errors.ClientClosed)
    assert not network._thread.is_alive()
    network.post(lambda: None)
    network.close()
    with pytest.raises(errors.ClientClosed):
        network.check()


def test_a_forked_child_is_told(network: Network) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            network.check()
        except errors.ForkedClient:
            os.write(write, b"y")
        network.close()
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"y"
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("client", ["Producer", "Consumer", "Admin"])
def test_an_interpreter_that_exits_without_close_does_not_hang(cluster: FakeCluster, client: str) -> None:
    code = f"import zmqueue, sys; c = zmqueue.{client}(bootstrap_servers=sys.argv[1])\n"
    code += "c.send('t', b'x')\n" if client == "Producer" else ""
    ended = subprocess.run([sys.executable, "-c", code, cluster.bootstrap], timeout=10, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_importing_zmqueue_does_not_import_zmq() -> None:
    code = "import zmqueue, sys; assert 'zmq' not in sys.modules; assert 'Producer' in dir(zmqueue); zmqueue.Producer"
    subprocess.run([sys.executable, "-c", code], timeout=10, check=True)


# -- routing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x", []])
def test_bootstrap_servers_are_checked(servers: object) -> None:
    with pytest.raises(errors.ConfigError):
        parse_bootstrap(servers)  # type: ignore[arg-type]


def test_bootstrap_servers_are_a_string_or_a_list() -> None:
    expected = [Address("a", 1), Address("b", 2)]
    assert parse_bootstrap("a:1, b:2") == parse_bootstrap(["a:1", "b:2"]) == expected


def test_a_dead_bootstrap_server_costs_a_moment_only(cluster: FakeCluster, network: Network) -> None:
    router = Router(network, [Address("127.0.0.1", free_port()), Address("127.0.0.1", cluster.ports[1])])
    router.watch(["t"])
    assert router.wait_for(lambda: router.metadata.topics.get("t"), 5.0) is not None


def test_a_silent_broker_is_passed_over(cluster: FakeCluster, network: Network) -> None:
    cluster.script = lambda seen: SILENCE if seen.broker == 0 else None
    router = Router(network, [Address("127.0.0.1", port) for port in cluster.ports.values()])
    router.watch(["t"])
    assert router.wait_for(lambda: router.metadata.topics.get("t"), 5.0) is not None


def test_when_the_bootstrap_broker_dies_the_others_are_asked(cluster: FakeCluster, network: Network) -> None:
    router = Router(network, parse_bootstrap(cluster.bootstrap))
    router.watch(["t"])
    router.wait_for(lambda: router.metadata.topics.get("t"), 5.0)
    cluster.kill(0)
    cluster.do(lambda: cluster.move("t", 0, 1))
    assert router.wait_for(lambda: router.metadata.leader("t", 0) == (1, 2) or None, 5.0)


def test_no_brokers_available(network: Network) -> None:
    router = Router(network, [Address("127.0.0.1", free_port())])
    with pytest.raises(errors.NoBrokersAvailable, match="bootstrap servers"):
        router.wait_for(lambda: None, 0.3)


def test_a_broker_that_knows_less_is_not_the_last_one_asked(cluster: FakeCluster, network: Network) -> None:
    router = Router(network, [Address("127.0.0.1", port) for port in cluster.ports.values()])
    router.watch(["t"])
    router.wait_for(lambda: router.metadata.topics.get("t"), 5.0)
    old = cluster.metadata(["t"])
    cluster.script = lambda seen: frames.response(seen.head, old) if seen.broker == 0 else None
    cluster.do(lambda: cluster.move("t", 0, 1))
    # Broker 0 tells the old story for ever; whoever is asked first, the new one is found.
    assert router.wait_for(lambda: router.metadata.leader("t", 0) == (1, 2) or None, 5.0)


def test_calls_for_news_that_come_together_become_one_request(cluster: FakeCluster, network: Network) -> None:
    router = Router(network, parse_bootstrap(cluster.bootstrap))
    for _ in range(50):
        network.post(router.refresh)
    assert router.wait_for(lambda: router.metadata.known or None, 5.0)
    assert cluster.count(Operation.METADATA) == 1
