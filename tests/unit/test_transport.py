"""Sockets on the loopback. Nothing sleeps: `until` polls, as the event loop does, and fails after a limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from zmqueue.errors import NetworkError, PortInUse
from zmqueue.model import KiB, MiB
from zmqueue.transport import QUEUE_FRAMES_MAX, Frames, Socket, Transport, Waker

HOST = "127.0.0.1"
LIMIT_S = 10


@pytest.fixture
def transport() -> Iterator[Transport]:
    made = Transport()
    yield made
    made.close()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def until(transport: Transport, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, "nothing came in time"
        transport.poll(20)


class Peer:
    """A socket together with what it has received and what its link has said."""

    def __init__(self) -> None:
        self.received: list[Frames] = []
        self.links: list[bool] = []
        self.socket: Socket

    def on_ready(self) -> None:
        while (frames := self.socket.receive()) is not None:
            self.received.append(frames)

    @property
    def linked(self) -> bool:
        return bool(self.links) and self.links[-1]


def router(transport: Transport, port: int, frame_bytes_max: int = 64 * KiB) -> Peer:
    peer = Peer()
    peer.socket = transport.router(HOST, port, peer.on_ready, frame_bytes_max=frame_bytes_max)
    return peer


def dealer(transport: Transport, port: int) -> Peer:
    peer = Peer()
    peer.socket = transport.dealer(HOST, port, peer.on_ready, on_link=peer.links.append)
    return peer


def joined(transport: Transport, port: int, frame_bytes_max: int = 64 * KiB) -> tuple[Peer, Peer]:
    server, client = router(transport, port, frame_bytes_max), dealer(transport, port)
    until(transport, lambda: client.linked)
    return server, client


# -- requests ----------------------------------------------------------------------------------------------------


def test_a_request_reaches_the_router_and_its_answer_the_dealer(transport, port):
    server, client = joined(transport, port)
    assert client.socket.send([b"head", b"", b"body"])
    until(transport, lambda: server.received)
    who, *request = server.received[0]
    assert request == [b"head", b"", b"body"]
    assert server.socket.send([who, b"answer"])
    until(transport, lambda: client.received)
    assert client.received == [[b"answer"]]


def test_answers_go_to_the_dealer_that_asked(transport, port):
    server = router(transport, port)
    clients = [dealer(transport, port) for _ in range(3)]
    until(transport, lambda: all(client.linked for client in clients))
    for number, client in enumerate(clients):
        assert client.socket.send([bytes([number])])
    until(transport, lambda: len(server.received) == 3)
    for who, payload in server.received:
        assert server.socket.send([who, payload])
    until(transport, lambda: all(client.received for client in clients))
    assert [client.received for client in clients] == [[[b"\0"]], [[b"\1"]], [[b"\2"]]]


def test_large_frames_arrive_whole_and_in_order(transport, port):
    server, client = joined(transport, port, frame_bytes_max=1024 * KiB)
    bodies = [bytes([number]) * 1024 * KiB for number in range(8)]
    for body in bodies:
        assert client.socket.send([b"head", body])
    until(transport, lambda: len(server.received) == len(bodies))
    assert [frames[2] for frames in server.received] == bodies


def test_a_traced_message_is_done_when_it_has_left(transport, port):
    server, client = joined(transport, port)
    assert client.socket.send([b"request"])
    until(transport, lambda: server.received)
    who = server.received[0][0]
    for last in (b"", b"small", b"large" * 50_000):
        departure = server.socket.send_traced([who, b"head", last])
        until(transport, lambda departure=departure: departure.done)
    until(transport, lambda: len(client.received) == 3)
    assert server.socket.send_traced([b"nobody", b"head"]) is None


def test_a_traced_message_is_not_done_while_the_peer_does_not_read(transport, port):
    """A peer that is stopped: its socket takes a few megabytes, the rest stays here until the connection is lost."""
    server = router(transport, port)
    raw = socket.create_connection((HOST, port))
    with raw:
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        raw.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
        # What follows the handshake before the other side has ended its own would be refused.
        heard = b""
        while b"READY" not in heard:
            heard += raw.recv(4096)
        raw.sendall(b"\x00\x02hi")
        until(transport, lambda: server.received)
        who = server.received[0][0]
        departures = [server.socket.send_traced([who, bytes(MiB), b""]) for _ in range(32)]
        assert not all(departure is None or departure.done for departure in departures)
    until(transport, lambda: all(departure is None or departure.done for departure in departures))


def test_nothing_there_is_none(transport, port):
    server, client = joined(transport, port)
    assert server.socket.receive() is None
    assert client.socket.receive() is None


def test_without_a_connection_nothing_is_queued_for_later(transport, port):
    client = dealer(transport, port)
    assert not client.socket.send([b"early"])
    server = router(transport, port)
    until(transport, lambda: client.linked)
    assert client.socket.send([b"late"])
    until(transport, lambda: server.received)
    assert [frames[1] for frames in server.received] == [b"late"]


def test_a_send_to_a_peer_that_never_was_says_false(transport, port):
    server = router(transport, port)
    assert not server.socket.send([b"nobody", b"answer"])


def test_a_send_to_a_vanished_peer_says_false(transport, port):
    server, client = joined(transport, port)
    assert client.socket.send([b"request"])
    until(transport, lambda: server.received)
    who = server.received[0][0]
    transport.close_socket(client.socket)
    until(transport, lambda: not server.socket.send([who, b"answer"]))


def test_a_full_queue_says_false_instead_of_blocking(transport, port):
    _, client = joined(transport, port)
    body = bytes(64 * KiB)
    # Nobody reads: both ends' queues and the kernel's buffers fill up.
    sent = next(n for n in range(100 * QUEUE_FRAMES_MAX) if not client.socket.send([body]))
    assert sent >= QUEUE_FRAMES_MAX


# -- links -------------------------------------------------------------------------------------------------------


def test_a_link_reports_when_it_is_lost_and_when_it_is_back(transport, port):
    server, client = joined(transport, port)
    transport.close_socket(server.socket)
    until(transport, lambda: client.links == [True, False])
    router(transport, port)
    until(transport, lambda: client.links == [True, False, True])


def test_nothing_sent_to_a_dead_peer_reaches_its_successor(transport, port):
    server, client = joined(transport, port)
    transport.close_socket(server.socket)
    until(transport, lambda: not client.linked)
    # The loss is told a moment before ZeroMQ has taken the connection down: until then a send may still say True.
    until(transport, lambda: not client.socket.send([b"to the dead"]))
    successor = router(transport, port)
    until(transport, lambda: client.linked)
    assert client.socket.send([b"to the successor"])
    until(transport, lambda: successor.received)
    assert [frames[1] for frames in successor.received] == [b"to the successor"]


def test_a_handler_may_close_the_socket_whose_link_was_lost(transport, port):
    server, client = router(transport, port), Peer()

    def on_link(up: bool) -> None:
        client.links.append(up)
        if not up:
            transport.close_socket(client.socket)

    client.socket = transport.dealer(HOST, port, client.on_ready, on_link=on_link)
    until(transport, lambda: client.linked)
    transport.close_socket(server.socket)
    until(transport, lambda: client.links == [True, False])
    transport.poll(0)


def test_a_frame_over_the_limit_ends_the_connection_and_nothing_else(transport, port):
    server, client = joined(transport, port, frame_bytes_max=1000)
    other = dealer(transport, port)
    until(transport, lambda: other.linked)
    assert client.socket.send([bytes(1001)])
    until(transport, lambda: client.links == [True, False, True])
    assert client.socket.send([bytes(1000)])
    assert other.socket.send([b"unharmed"])
    until(transport, lambda: len(server.received) == 2)
    assert sorted(frames[1] for frames in server.received) == [bytes(1000), b"unharmed"]
    assert other.links == [True]


def test_a_dealer_that_is_back_before_its_loss_was_noticed_is_heard(port):
    """The router's thread is busy elsewhere while a connection breaks and returns under the same routing id."""
    ours, theirs = Transport(), Transport()
    server, client = router(ours, port, frame_bytes_max=1000), dealer(theirs, port)
    until(theirs, lambda: client.linked)
    assert client.socket.send([b"before"])
    assert client.socket.send([bytes(1001)])
    until(theirs, lambda: client.links == [True, False, True])
    assert client.socket.send([b"after"])
    until(ours, lambda: server.received and server.received[-1][1] == b"after")
    assert server.socket.send([server.received[-1][0], b"answer"])
    until(theirs, lambda: client.received == [[b"answer"]])
    theirs.close()
    ours.close()


def test_bytes_that_are_not_zeromq_do_no_harm(transport, port):
    server, client = joined(transport, port)
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
        stranger.settimeout(LIMIT_S)
        try:
            while stranger.recv(1000):
                continue
        except ConnectionResetError:
            pass  # as good an end as any
    assert client.socket.send([b"request"])
    until(transport, lambda: server.received)
    assert len(server.received) == 1


# -- publications ------------------------------------------------------------------------------------------------


def subscribed(transport: Transport, port: int, *prefixes: bytes) -> Peer:
    peer = Peer()
    peer.socket = transport.subscriber(peer.on_ready)
    for prefix in prefixes:
        peer.socket.subscribe(prefix)
    peer.socket.connect(HOST, port)
    return peer


def publish_until(transport: Transport, publisher: Socket, frames: Frames, done: Callable[[], object]) -> None:
    """Subscriptions take effect some time after they are asked for: publish until they have."""

    def attempt() -> object:
        assert publisher.send(frames)
        return done()

    until(transport, attempt)


def test_subscribers_receive_what_begins_with_their_prefix(transport, port):
    publisher = transport.publisher(HOST, port)
    one, both = subscribed(transport, port, b"a"), subscribed(transport, port, b"a", b"b")
    publish_until(transport, publisher, [b"a1", b"body"], lambda: one.received and both.received)
    publish_until(transport, publisher, [b"b1", b"body"], lambda: [b"b1", b"body"] in both.received)
    assert {frames[0] for frames in one.received} == {b"a1"}


def test_an_unsubscribed_prefix_falls_silent(transport, port):
    publisher = transport.publisher(HOST, port)
    peer = subscribed(transport, port, b"a", b"b")
    publish_until(transport, publisher, [b"a"], lambda: [b"a"] in peer.received)
    publish_until(transport, publisher, [b"b"], lambda: [b"b"] in peer.received)
    peer.socket.unsubscribe(b"a")

    def silent() -> bool:
        """A round in which b arrives and the a before it does not."""
        peer.received.clear()
        assert publisher.send([b"a"])
        assert publisher.send([b"b", b"mark"])
        until(transport, lambda: [b"b", b"mark"] in peer.received)
        return [b"a"] not in peer.received

    until(transport, silent)


def test_a_publisher_without_subscribers_drops(transport, port):
    publisher = transport.publisher(HOST, port)
    assert all(publisher.send([b"a", bytes(64 * KiB)]) for _ in range(2 * QUEUE_FRAMES_MAX))


def test_a_publisher_drops_for_a_subscriber_that_does_not_read(transport, port):
    publisher = transport.publisher(HOST, port, queue_frames_max=10)
    peer = subscribed(transport, port, b"")
    publish_until(transport, publisher, [b"first"], lambda: peer.received)
    assert all(publisher.send([bytes(64 * KiB)]) for _ in range(2 * QUEUE_FRAMES_MAX))


def test_a_subscriber_can_leave_one_publisher(transport, port):
    publisher = transport.publisher(HOST, port)
    peer = subscribed(transport, port, b"")
    publish_until(transport, publisher, [b"first"], lambda: peer.received)
    peer.socket.disconnect(HOST, port)
    with pytest.raises(NetworkError):
        peer.socket.disconnect(HOST, port)


# -- what goes wrong when a socket is made -----------------------------------------------------------------------


def test_a_port_in_use_is_named(transport, port):
    router(transport, port)
    with pytest.raises(PortInUse, match=str(port)):
        router(transport, port)
    with pytest.raises(PortInUse, match=str(port)):
        transport.publisher(HOST, port)


def test_a_port_held_by_a_stranger_is_in_use(transport):
    with socket.socket() as stranger:
        stranger.bind((HOST, 0))
        stranger.listen()
        with pytest.raises(PortInUse):
            router(transport, stranger.getsockname()[1])


def test_an_address_that_is_not_ours_cannot_be_bound(transport, port):
    with pytest.raises(NetworkError, match="cannot listen"):
        transport.publisher("192.0.2.1", port)


@pytest.mark.parametrize("host", ["a b", "a b.example", "größe"])
def test_an_address_that_makes_no_sense_is_our_error_not_that_of_zmq(transport, host):
    with pytest.raises(NetworkError, match="cannot connect"):
        transport.dealer(host, 9092, lambda: None, on_link=lambda up: None)
    transport.poll(0)


def test_a_closed_port_can_be_bound_again(transport, port):
    first = router(transport, port)
    transport.close_socket(first.socket)
    transport.close_socket(first.socket)
    until(transport, lambda: _bound(transport, port))


def _bound(transport: Transport, port: int) -> bool:
    """libzmq closes a listener in its own thread, a little after close returns."""
    try:
        router(transport, port)
    except PortInUse:
        return False
    return True


def test_a_closed_socket_says_so(transport, port):
    server = router(transport, port)
    transport.close_socket(server.socket)
    with pytest.raises(NetworkError):
        server.socket.receive()
    with pytest.raises(NetworkError):
        server.socket.send([b"a", b"b"])


def test_a_transport_closes_whatever_is_open(port):
    transport = Transport()
    joined(transport, port)
    transport.publisher(HOST, _other(port))
    transport.close()


def _other(port: int) -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        found = probe.getsockname()[1]
    assert found != port
    return found


# -- waking ------------------------------------------------------------------------------------------------------


@pytest.fixture
def waker() -> Iterator[Waker]:
    made = Waker()
    yield made
    made.close()


def test_another_thread_can_end_the_poll(transport, waker):
    woken: list[bool] = []

    def on_ready() -> None:
        waker.clear()
        woken.append(True)

    transport.watch(waker.fileno(), on_ready)
    thread = threading.Thread(target=waker.wake)
    thread.start()
    transport.poll(LIMIT_S * 1000)
    thread.join()
    assert woken == [True]
    transport.poll(0)
    assert woken == [True], "a cleared waker is quiet"


def test_many_calls_wake_once(transport, waker):
    woken: list[bool] = []
    transport.watch(waker.fileno(), lambda: (waker.clear(), woken.append(True)))
    for _ in range(1000):
        waker.wake()
    transport.poll(LIMIT_S * 1000)
    transport.poll(0)
    assert woken == [True]


def test_clearing_a_waker_that_nobody_called_does_nothing(waker):
    waker.clear()
    waker.clear()


def test_what_is_no_longer_watched_is_not_called(transport, waker):
    transport.watch(waker.fileno(), lambda: pytest.fail("not watched"))
    transport.unwatch(waker.fileno())
    waker.wake()
    transport.poll(0)


def test_a_handler_may_end_the_watch_of_another_that_is_ready(transport):
    wakers = [Waker(), Waker()]
    called: list[int] = []

    def handler(number: int) -> Callable[[], None]:
        def on_ready() -> None:
            called.append(number)
            transport.unwatch(wakers[1 - number].fileno())

        return on_ready

    for number, waker in enumerate(wakers):
        transport.watch(waker.fileno(), handler(number))
        waker.wake()
    transport.poll(0)
    assert len(called) == 1
    for waker in wakers:
        waker.close()
