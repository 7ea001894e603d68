"""Links between the members of the Raft group: sealed, bounded, watched through one file descriptor.

PySyncObj's own TCP transport unpickles what strangers send, reads any length they announce, closes an idle link at the
first message instead of sending it, and stops listening for good when one accept fails. This one takes its place
behind the same interface.

The member with the higher id dials. What passes over a link, and who may, is raft_channel's part; a link that has not
greeted within `silence_s_max` is closed, and only `STRANGERS_MAX` may be greeting at a time.

An empty frame is a ping. Every link carries one whenever it was quiet for `ping_s`, and a link that brought nothing for
`silence_s_max` is closed and dialled again.

Messages may be lost with their link; Raft expects no more. Within one link they arrive once and in order.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from zmqueue.broker.raft_channel import Channel
from zmqueue.errors import BadFrame, ConfigError, ZmqueueError
from zmqueue.model import KiB, MiB

log = logging.getLogger(__name__)

OUTGOING_BYTES_MAX = 64 * MiB
STRANGERS_MAX = 32
SECRET_BYTES_MIN = 16

_RECV_BYTES = 64 * KiB
_RECVS_PER_EVENT = 16
_ACCEPTS_PER_EVENT = 16
_ACCEPT_PAUSE_S = 1.0
_RESOLVED_S = 10.0
_SELDOM_S = 10.0
_SELDOM_LINES_MAX = 32

Message = dict[str, Any]


class Node(Protocol):
    """PySyncObj's name for a member; its id is the broker id in decimal."""

    @property
    def id(self) -> str: ...


class Seldom:
    """A line that would come at every tick, or as often as a stranger likes, is written once in ten seconds."""

    def __init__(self) -> None:
        self._written: dict[str, float] = {}

    def log(self, level: int, text: str, *, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now - self._written.get(text, -_SELDOM_S) < _SELDOM_S:
            return
        self._written = {line: when for line, when in self._written.items() if now - when < _SELDOM_S}
        if len(self._written) < _SELDOM_LINES_MAX:
            self._written[text] = now
            log.log(level, "%s", text, exc_info=exc_info)


# -- polling -------------------------------------------------------------------------------------------------------


class Poller:
    """PySyncObj's poller over one epoll, whose descriptor the broker's own poller can watch."""

    READ, WRITE, ERROR = 1, 2, 4  # PySyncObj's numbers

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Callable[[int, int], None], int]] = {}
        self._serial = 0
        self.dispatched = 0

    def fileno(self) -> int:
        return self._epoll.fileno()

    def subscribe(self, descr: int, callback: Callable[[int, int], None], eventMask: int) -> None:
        mask = (select.EPOLLIN if eventMask & self.READ else 0) | (select.EPOLLOUT if eventMask & self.WRITE else 0)
        known = self._watched.get(descr)
        if known is not None and known[0] == callback:
            self._epoll.modify(descr, mask)
            return
        self._serial += 1
        self._watched[descr] = (callback, self._serial)
        if known is not None:
            self._epoll.modify(descr, mask)
        else:
            self._epoll.register(descr, mask)

    def unsubscribe(self, descr: int) -> None:
        """Before the descriptor is closed, or its number may already mean another file."""
        if self._watched.pop(descr, None) is not None:
            self._epoll.unregister(descr)

    def poll(self, timeout: float) -> None:
        newest = self._serial
        for descr, found in self._epoll.poll(timeout):
            callback, serial = self._watched.get(descr, (None, 0))
            if callback is None or serial > newest:
                continue  # closed by an earlier callback of this round, perhaps reused since
            mask = (self.READ if found & select.EPOLLIN else 0) | (self.WRITE if found & select.EPOLLOUT else 0)
            if found & (select.EPOLLERR | select.EPOLLHUP):
                mask |= self.ERROR
            self.dispatched += 1
            callback(descr, mask)

    def close(self) -> None:
        self._watched.clear()
        self._epoll.close()


# -- one link with its socket --------------------------------------------------------------------------------------


class Link:
    def __init__(self, transport: Transport, sock: socket.socket, channel: Channel, name: str) -> None:
        self._transport = transport
        self._socket: socket.socket | None = sock
        self._fd = sock.fileno()
        self.channel = channel
        self.name = name
        self.last_read = self.last_write = time.monotonic()
        transport.poller.subscribe(self._fd, self._on_event, Poller.READ | Poller.WRITE)
        self._watches_write = True

    @property
    def closed(self) -> bool:
        return self._socket is None

    def send(self, payload: bytes) -> None:
        self.channel.send(payload)
        if len(self.channel.outgoing) > OUTGOING_BYTES_MAX:
            self.close("it takes nothing any more")
            return
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes; the rest waits for the socket, not for the next message."""
        outgoing = self.channel.outgoing
        try:
            while outgoing and self._socket is not None:
                sent = self._socket.send(outgoing)
                del outgoing[:sent]
                self.last_write = time.monotonic()
        except (BlockingIOError, InterruptedError):
            pass  # the socket is full or still connecting: the poller says when it is not
        except OSError as error:
            self.close(str(error))
            return
        if self._socket is not None and bool(outgoing) != self._watches_write:
            self._watches_write = bool(outgoing)
            mask = Poller.READ | (Poller.WRITE if outgoing else 0)
            self._transport.poller.subscribe(self._fd, self._on_event, mask)

    def close(self, reason: str) -> None:
        if self._socket is None:
            return
        self._transport.poller.unsubscribe(self._fd)
        self._socket.close()
        self._socket = None
        self._transport.on_closed(self, reason)

    def _on_event(self, _descr: int, event: int) -> None:
        """Whatever goes wrong here concerns this link: it is closed and dialled again, the others go on."""
        try:
            if event & Poller.ERROR:
                assert self._socket is not None
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self.close(os.strerror(code) if code else "hung up")
                return
            if event & Poller.WRITE:
                self.flush()
            if event & Poller.READ:
                self._read()
        except BadFrame as error:
            self._transport.refused += 1
            self.close(str(error))
        except Exception as error:
            log.exception("raft link %s: a message failed", self.name)
            self.close(repr(error))

    def _read(self) -> None:
        for _ in range(_RECVS_PER_EVENT):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(_RECV_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(str(error))
                return
            if not data:
                self.close("hung up")
                return
            self.last_read = time.monotonic()
            was_up = self.channel.up
            payloads = self.channel.feed(data)
            self.flush()
            if self.channel.up and not was_up:
                self._transport.on_up(self)
            for payload in payloads:
                if payload and self._socket is not None:
                    self._transport.on_payload(self, payload)
            if len(data) < _RECV_BYTES:
                return


# -- all links -----------------------------------------------------------------------------------------------------


class Transport:
    """PySyncObj's `Transport`, by its names. `before_send` prepares a message, or withholds it by returning False."""

    def __init__(
        self,
        *,
        poller: Poller,
        own_id: int,
        members: dict[int, tuple[str, int]],
        nodes: dict[int, Node],
        secret: bytes,
        before_send: Callable[[Message], bool],
        retry_s: float,
        ping_s: float,
        silence_s_max: float,
    ) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(f"the Raft secret has {len(secret)} bytes, at least {SECRET_BYTES_MIN} are needed")
        self.poller = poller
        self.refused = 0
        self._own_id = own_id
        self._members = members
        self._nodes = nodes
        self._secret = secret
        self._before_send = before_send
        self._retry_s = retry_s
        self._ping_s = ping_s
        self._silence_s_max = silence_s_max
        self._links: dict[int, Link] = {}
        self._greeting: set[Link] = set()
        self._dialled: dict[int, float] = {}
        self._resolved: dict[int, tuple[float, Any]] = {}
        self._listener: socket.socket | None = None
        self._accepts_again: float | None = None
        self._seldom = Seldom()
        self._closing = False
        self._on_message: Callable[[Node, Message], None] | None = None
        self._on_connected: Callable[[Node], None] | None = None
        self._on_disconnected: Callable[[Node], None] | None = None

    def is_up(self, member: int) -> bool:
        return member in self._links

    # -- by PySyncObj's names --------------------------------------------------------------------------------------

    def setOnMessageReceivedCallback(self, callback: Callable[[Node, Message], None] | None) -> None:
        self._on_message = callback

    def setOnNodeConnectedCallback(self, callback: Callable[[Node], None] | None) -> None:
        self._on_connected = callback

    def setOnNodeDisconnectedCallback(self, callback: Callable[[Node], None] | None) -> None:
        self._on_disconnected = callback

    def setOnReadonlyNodeConnectedCallback(self, callback: object) -> None:
        """There are no read-only members."""

    def setOnReadonlyNodeDisconnectedCallback(self, callback: object) -> None:
        """There are no read-only members."""

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """PySyncObj would answer status and membership requests on this port; nobody needs that."""

    @property
    def ready(self) -> bool:
        return self._listener is not None

    def tryGetReady(self) -> None:
        """Listen on this member's own address and no other."""
        host, port = self._members[self._own_id]
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ConfigError(f"Raft address {host}:{port}: {error}") from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(STRANGERS_MAX)
        except OSError as error:
            listener.close()
            raise ConfigError(f"Raft address {host}:{port} cannot be listened on: {error}") from error
        self._listener = listener
        self.poller.subscribe(listener.fileno(), self._on_accept, Poller.READ)

    def send(self, node: Node, message: Message) -> bool:
        link = self._links.get(int(node.id))
        if link is None or not self._before_send(message):
            return False
        link.send(msgspec.msgpack.encode(message))
        return not link.closed

    def destroy(self) -> None:
        self._closing = True
        self._on_message = self._on_connected = self._on_disconnected = None
        for link in [*self._links.values(), *self._greeting]:
            link.close("closing")
        if self._listener is not None:
            self.poller.unsubscribe(self._listener.fileno())
            self._listener.close()
            self._listener = None

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Dial who is missing, ping who is quiet, close who is silent."""
        for link in [*self._links.values(), *self._greeting]:
            if now - link.last_read > self._silence_s_max:
                link.close(f"nothing heard for {self._silence_s_max:g} s")
            elif link.channel.up and now - link.last_write >= self._ping_s:
                link.send(b"")
        for member in self._members:
            if member < self._own_id and member not in self._links:
                self._dial(member, now)
        if self._accepts_again is not None and now >= self._accepts_again and self._listener is not None:
            self._accepts_again = None
            self.poller.subscribe(self._listener.fileno(), self._on_accept, Poller.READ)

    def _dial(self, member: int, now: float) -> None:
        calling = any(link.channel.peer == member for link in self._greeting)
        if calling or now - self._dialled.get(member, -self._retry_s) < self._retry_s:
            return
        self._dialled[member] = now
        host, port = self._members[member]
        try:
            family, kind, protocol, _, address = self._resolve(member, now)
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            log.debug("raft link to broker %d at %s:%d: %s", member, host, port, error)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._greeting.add(Link(self, sock, self._channel(member), f"to broker {member}"))

    def _resolve(self, member: int, now: float) -> Any:
        """Names are looked up in the loop, which waits for the answer: hence rarely, and never for plain addresses."""
        when, info = self._resolved.get(member, (0.0, None))
        if info is None or now - when > _RESOLVED_S:
            host, port = self._members[member]
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._resolved[member] = (now, info)
        return info

    def _channel(self, peer: int | None) -> Channel:
        return Channel(secret=self._secret, own_id=self._own_id, members=self._members, peer=peer)

    def _on_accept(self, descr: int, _event: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_PER_EVENT):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors, most likely. The listener stays readable, so it rests instead of spinning.
                log.warning("raft listener: %s", error)
                self.poller.unsubscribe(descr)
                self._accepts_again = time.monotonic() + _ACCEPT_PAUSE_S
                return
            if len(self._greeting) >= STRANGERS_MAX:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greeting.add(Link(self, sock, self._channel(None), f"from {address[0]}:{address[1]}"))

    # -- what links report -----------------------------------------------------------------------------------------

    def on_up(self, link: Link) -> None:
        peer = link.channel.peer
        assert peer is not None
        self._greeting.discard(link)
        if (old := self._links.get(peer)) is not None:
            old.close("replaced by a newer one")
        link.name = f"with broker {peer}"
        self._links[peer] = link
        log.info("raft link %s is up", link.name)
        if self._on_connected is not None:
            self._on_connected(self._nodes[peer])

    def on_payload(self, link: Link, payload: bytes) -> None:
        peer = link.channel.peer
        assert peer is not None
        try:
            message = msgspec.msgpack.decode(payload, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise BadFrame(f"not a message: {error}") from error
        if self._on_message is not None:
            try:
                self._on_message(self._nodes[peer], message)
            except BadFrame:
                raise
            except ZmqueueError as error:
                # Our disk, not their message: nothing was answered, so they will repeat it.
                self._seldom.log(logging.ERROR, f"raft messages of broker {peer} have no effect: {error}")

    def on_closed(self, link: Link, reason: str) -> None:
        self._greeting.discard(link)
        peer = link.channel.peer
        if peer is not None and self._links.get(peer) is link:
            del self._links[peer]
            if not self._closing:
                log.info("raft link %s is down: %s", link.name, reason)
            if self._on_disconnected is not None:
                self._on_disconnected(self._nodes[peer])
        elif not self._closing:
            self._seldom.log(logging.INFO, f"raft link {link.name.rpartition(':')[0] or link.name} not up: {reason}")
