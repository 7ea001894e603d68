"""Sockets. The only module that imports zmq, and the place where its errors become ours.

A `Transport` belongs to one thread: it makes sockets, polls them together with plain file descriptors, and calls the
handler that each was given. Only `Waker.wake` may be called from other threads. Every socket has bounded queues, drops
what it cannot deliver at close, refuses frames over its size limit, and never blocks: `send` says False when the peer
is gone or its queue is full, `receive` says None when nothing is there.

Polling is epoll on the sockets' own descriptors, which costs what has happened and not what could. Such a descriptor
tells of news only until ZeroMQ has looked at them, which every call on the socket may do: a socket that was used since
the last poll, and not seen empty by `receive`, is therefore asked directly.
"""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Callable
from typing import Any, Protocol, cast

import zmq
import zmq.backend
from zmq.utils.monitor import parse_monitor_message

from zmqueue.errors import NetworkError, PortInUse
from zmqueue.model import KiB, MiB

QUEUE_FRAMES_MAX = 1_000
FRAME_BYTES_MAX = 16 * MiB
HANDSHAKE_MS = 2_000
KEEPALIVE_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 15_000
RECONNECT_MS = 20
RECONNECT_MS_MAX = 500

LENT_BYTES_MIN = 128 * KiB

Frames = list[bytes]

# The calls beneath zmq.Socket's own, with their flags as plain numbers: several times a record batch, each counts.
_send: Any = zmq.backend.Socket.send
_receive: Any = zmq.backend.Socket.recv
_NOW = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_REFUSED = object()


class Departure(Protocol):
    """What was sent: `done` when its bytes have gone to the network, or were dropped with their connection."""

    @property
    def done(self) -> bool: ...


class Socket:
    """One ZeroMQ socket with the behaviour described above."""

    def __init__(self, raw: zmq.Socket[bytes], used: dict[Socket, None], monitor: Socket | None = None) -> None:
        self._raw = raw
        self._used = used
        self._monitor = monitor

    def send(self, frames: Frames) -> bool:
        # A large frame is cheaper to lend to ZeroMQ than to copy.
        return self._put(frames, len(frames[-1]) < LENT_BYTES_MIN, False) is not _REFUSED

    def send_traced(self, frames: Frames) -> Departure | None:
        """As `send`, where it matters when the bytes are gone; None where that says False. Frames leave in their order,
        so the last one, lent whatever its size, tells of all."""
        sent = self._put(frames, False, True)
        return None if sent is _REFUSED else sent

    def _put(self, frames: Frames, copied: bool, traced: bool) -> Any:
        self._used[self] = None
        send, raw = _send, self._raw
        *first, last = frames
        try:
            for frame in first:
                send(raw, frame, _MORE)
            return send(raw, last, _NOW, copied, traced)
        except zmq.Again:
            return _REFUSED  # only ever of the first frame: a message is queued whole or not at all
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return _REFUSED
            raise NetworkError(str(error)) from error

    def receive(self) -> Frames | None:
        self._used[self] = None
        receive, raw = _receive, self._raw
        try:
            frame = receive(raw, _NOW, False)
        except zmq.Again:
            del self._used[self]
            return None
        except zmq.ZMQError as error:
            raise NetworkError(str(error)) from error
        frames = [frame.bytes]
        while frame.more:
            frame = receive(raw, _NOW, False)
            frames.append(frame.bytes)
        return frames

    def has_news(self) -> bool:
        """Whether there is something to receive."""
        return not self._raw.closed and bool(cast(int, self._raw.get(zmq.EVENTS)) & zmq.POLLIN)

    def subscribe(self, prefix: bytes) -> None:
        self._used[self] = None
        self._raw.setsockopt(zmq.SUBSCRIBE, prefix)

    def unsubscribe(self, prefix: bytes) -> None:
        self._used[self] = None
        self._raw.setsockopt(zmq.UNSUBSCRIBE, prefix)

    def connect(self, host: str, port: int) -> None:
        self._used[self] = None
        try:
            self._raw.connect(_address(host, port))
        except zmq.ZMQError as error:
            raise NetworkError(f"cannot connect to {host}:{port}: {error}") from error

    def disconnect(self, host: str, port: int) -> None:
        self._used[self] = None
        try:
            self._raw.disconnect(_address(host, port))
        except zmq.ZMQError as error:
            raise NetworkError(f"not connected to {host}:{port}: {error}") from error


class Waker:
    """Lets another thread end the poll of the thread that owns the transport."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return  # nobody has called since: nothing to clear

    def close(self) -> None:
        os.close(self._fd)


class Transport:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}  # by file descriptor
        self._descriptors: dict[zmq.Socket[bytes], int] = {}
        self._used: dict[Socket, None] = {}  # those to be asked directly at the next poll

    def router(self, host: str, port: int, on_ready: Callable[[], None], *, frame_bytes_max: int) -> Socket:
        """Bound; the first frame of what it receives names the peer, and sends address a peer by it."""
        raw = self._make(zmq.ROUTER, frame_bytes_max)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer may be back before its loss was noticed here; without this it would be ignored for ever.
        raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        raw.copy_threshold = 0  # else small frames would be copied, and traced ones be done at once
        self._bind(raw, host, port)
        return self._watched(raw, on_ready)

    def dealer(
        self,
        host: str,
        port: int,
        on_ready: Callable[[], None],
        *,
        on_link: Callable[[bool], None] | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> Socket:
        """Connected. `on_link` hears True when the connection is there and False when it is lost."""
        raw = self._make(zmq.DEALER, frame_bytes_max)
        # A second peer with the same routing id would take over the first: ids are random, and never trusted.
        raw.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
        # Without a connection nothing is queued: what was meant for a dead broker must not reach its successor late.
        raw.setsockopt(zmq.IMMEDIATE, 1)
        monitor = self._monitored(raw, on_link) if on_link is not None else None
        socket = self._watched(raw, on_ready, monitor)
        try:
            socket.connect(host, port)
        except NetworkError:
            self.close_socket(socket)
            raise
        return socket

    def publisher(self, host: str, port: int, *, queue_frames_max: int = QUEUE_FRAMES_MAX) -> Socket:
        raw = self._make(zmq.PUB, FRAME_BYTES_MAX)
        raw.setsockopt(zmq.SNDHWM, queue_frames_max)
        self._bind(raw, host, port)
        return Socket(raw, {})  # nothing ever comes from a PUB socket

    def subscriber(self, on_ready: Callable[[], None]) -> Socket:
        return self._watched(self._make(zmq.SUB, FRAME_BYTES_MAX), on_ready)

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Also poll a plain file descriptor, for reading."""
        self._handlers[fd] = on_ready
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def poll(self, timeout_ms: int) -> None:
        """Wait for something to happen, at most so long, and call the handlers of what did."""
        ready: dict[int, None] = {}
        if self._used:
            ready = {self._descriptors[s._raw]: None for s in self._used if s.has_news()}
            self._used.clear()
        for fd, _ in self._epoll.poll(0 if ready else timeout_ms / 1000):
            ready[fd] = None
        for fd in ready:
            handler = self._handlers.get(fd)
            if handler is not None:  # a handler before it may have closed this one
                handler()

    def close_socket(self, socket: Socket) -> None:
        """Closing a closed one does nothing. A handler may close its own socket."""
        if socket._raw.closed:
            return
        if socket._monitor is not None:
            socket._raw.disable_monitor()
            self.close_socket(socket._monitor)
        fd = self._descriptors.pop(socket._raw, None)
        if fd is not None:
            self.unwatch(fd)
        self._used.pop(socket, None)
        socket._raw.close(0)

    def close(self, linger_ms: int = 0) -> None:
        """Close every socket. What is still queued for peers gets so long to leave."""
        self._context.destroy(linger=linger_ms)
        self._epoll.close()
        self._handlers.clear()

    def _make(self, kind: int, frame_bytes_max: int) -> zmq.Socket[bytes]:
        try:
            raw = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise NetworkError(f"cannot make a socket: {error}") from error
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        raw.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        raw.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
        raw.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        raw.setsockopt(zmq.HEARTBEAT_IVL, KEEPALIVE_MS)
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, KEEPALIVE_TIMEOUT_MS)
        raw.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        return raw

    def _bind(self, raw: zmq.Socket[bytes], host: str, port: int) -> None:
        try:
            raw.bind(_address(host, port))
        except zmq.ZMQError as error:
            raw.close(0)
            if error.errno == zmq.EADDRINUSE:
                raise PortInUse(f"port {port} on {host} is in use") from error
            raise NetworkError(f"cannot listen on {host}:{port}: {error}") from error

    def _watched(self, raw: zmq.Socket[bytes], on_ready: Callable[[], None], monitor: Socket | None = None) -> Socket:
        fd = self._descriptors[raw] = raw.fileno()
        self.watch(fd, on_ready)
        socket = Socket(raw, self._used, monitor)
        # A pipe tells of its first message only to a reader that has once found it empty.
        self._used[socket] = None
        return socket

    def _monitored(self, raw: zmq.Socket[bytes], on_link: Callable[[bool], None]) -> Socket:
        def on_ready() -> None:
            while not monitor._raw.closed:  # on_link may close the socket
                frames = monitor.receive()
                if frames is None:
                    return
                on_link(parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = self._watched(raw.get_monitor_socket(events), on_ready)
        return monitor


def _address(host: str, port: int) -> str:
    return f"tcp://{host}:{port}"
