"""Sockets. The only module that imports zmq, and the place where its errors become ours.

A `Transport` belongs to one thread: it makes sockets, polls them together with plain file descriptors, and calls the
handler that each was given. Only `Waker.wake` may be called from other threads. Every socket has bounded queues, drops
what it cannot deliver at close, refuses frames over its size limit, and never blocks: `send` says False when the peer
is gone or its queue is full, `receive` says None when nothing is there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmqueue.errors import NetworkError, PortInUse
from zmqueue.model import MiB

QUEUE_FRAMES_MAX = 1_000
FRAME_BYTES_MAX = 16 * MiB
HANDSHAKE_MS = 2_000
KEEPALIVE_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 15_000
RECONNECT_MS = 20
RECONNECT_MS_MAX = 500

Frames = list[bytes]


class Socket:
    """One ZeroMQ socket with the behaviour described above."""

    def __init__(self, raw: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None = None) -> None:
        self._raw = raw
        self._monitor = monitor

    def send(self, frames: Frames) -> bool:
        try:
            # Frames of 64 KiB and more go out without a copy; smaller ones are cheaper to copy.
            self._raw.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise NetworkError(str(error)) from error
        return True

    def receive(self) -> Frames | None:
        try:
            return self._raw.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise NetworkError(str(error)) from error

    def subscribe(self, prefix: bytes) -> None:
        self._raw.setsockopt(zmq.SUBSCRIBE, prefix)

    def unsubscribe(self, prefix: bytes) -> None:
        self._raw.setsockopt(zmq.UNSUBSCRIBE, prefix)

    def connect(self, host: str, port: int) -> None:
        try:
            self._raw.connect(_address(host, port))
        except zmq.ZMQError as error:
            raise NetworkError(f"cannot connect to {host}:{port}: {error}") from error

    def disconnect(self, host: str, port: int) -> None:
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
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}

    def router(self, host: str, port: int, on_ready: Callable[[], None], *, frame_bytes_max: int) -> Socket:
        """Bound; the first frame of what it receives names the peer, and sends address a peer by it."""
        raw = self._make(zmq.ROUTER, frame_bytes_max)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
        # A second peer with the same routing id would be ignored for ever: ids are random, and never trusted.
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
        return Socket(raw)

    def subscriber(self, on_ready: Callable[[], None]) -> Socket:
        return self._watched(self._make(zmq.SUB, FRAME_BYTES_MAX), on_ready)

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Also poll a plain file descriptor, for reading."""
        self._handlers[fd] = on_ready
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._poller.unregister(fd)

    def poll(self, timeout_ms: int) -> None:
        """Wait for something to happen, at most so long, and call the handlers of what did."""
        for ready, _ in self._poller.poll(timeout_ms):
            handler = self._handlers.get(ready)
            if handler is not None:  # a handler before it may have closed this one
                handler()

    def close_socket(self, socket: Socket) -> None:
        """Closing a closed one does nothing. A handler may close its own socket."""
        if socket._raw.closed:
            return
        for raw in (socket._raw, socket._monitor):
            if raw is None:
                continue
            if raw in self._handlers:
                del self._handlers[raw]
                self._poller.unregister(raw)
            if raw is socket._raw and socket._monitor is not None:
                raw.disable_monitor()
            raw.close(0)

    def close(self, linger_ms: int = 0) -> None:
        """Close every socket. What is still queued for peers gets so long to leave."""
        self._context.destroy(linger=linger_ms)
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

    def _watched(
        self, raw: zmq.Socket[bytes], on_ready: Callable[[], None], monitor: zmq.Socket[bytes] | None = None
    ) -> Socket:
        self._handlers[raw] = on_ready
        self._poller.register(raw, zmq.POLLIN)
        return Socket(raw, monitor)

    def _monitored(self, raw: zmq.Socket[bytes], on_link: Callable[[bool], None]) -> zmq.Socket[bytes]:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor: zmq.Socket[bytes] = raw.get_monitor_socket(events)

        def on_ready() -> None:
            while not monitor.closed:  # on_link may close the socket
                try:
                    frames = monitor.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    return
                on_link(parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

        self._handlers[monitor] = on_ready
        self._poller.register(monitor, zmq.POLLIN)
        return monitor


def _address(host: str, port: int) -> str:
    return f"tcp://{host}:{port}"
