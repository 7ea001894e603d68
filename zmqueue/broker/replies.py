"""Answers to clients: each request gets exactly one, and how much may wait for one is bounded.

Whoever waits is a token, that is who asked and under which head; it holds nothing else. Requests that park (a fetch
until there are records, a heartbeat until there is news for its member) are counted apart from those that are being
worked on: thousands of idle consumers must not keep others from producing. What a client has asked for and does not
read is bounded in bytes. A request beyond a bound is answered `BUSY`, which clients retry.

A client that has gone is not noticed: its requests are answered in their time, and the answers are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from zmqueue import errors
from zmqueue.broker.unread import COUNTED_BYTES_MIN, Unread
from zmqueue.config import BrokerConfig
from zmqueue.transport import Frames, Socket
from zmqueue.wire import frames as f
from zmqueue.wire.frames import Head, Operation

UNREAD = "earlier answers have not been read"
PARKING = frozenset((Operation.FETCH, Operation.GROUP_HEARTBEAT))

Token = tuple[bytes, Head]
Table = dict[Operation, Callable[[Token, Any, Frames], None]]


class Replies:
    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._socket: Socket | None = None
        self._by_connection: dict[bytes, int] = {}  # unanswered requests
        self._working = 0
        self._parked = 0
        self._unread = Unread(config.fetch_bytes_max, config.bytes_in_flight_max)

    def bind(self, socket: Socket) -> None:
        self._socket = socket

    @property
    def waiting(self) -> int:
        return self._working + self._parked

    def expect(self, token: Token) -> None:
        """This request is to be answered. Raises Busy, which is then the answer, if there are too many."""
        identity, head = token
        limits = self._config
        open_requests = self._by_connection.get(identity, 0)
        self._by_connection[identity] = open_requests + 1
        if head.operation in PARKING:
            self._parked += 1
            full = self._parked > limits.requests_parked_max
        else:
            self._working += 1
            full = self._working > limits.requests_waiting_max
        if full or open_requests >= limits.requests_per_connection_max:
            raise errors.Busy(f"{open_requests} requests of this connection are waiting")

    def answer(self, token: Token, message: Struct, raw: Frames | None = None) -> None:
        self.drop(token)
        self.send(token[0], f.response(token[1], message, raw))

    def fail(self, token: Token, code: int, text: str) -> None:
        self.drop(token)
        self.send(token[0], f.failure(token[1], code, text))

    def drop(self, token: Token) -> None:
        """No answer is expected any more."""
        identity, head = token
        if head.operation in PARKING:
            self._parked -= 1
        else:
            self._working -= 1
        if self._by_connection[identity] == 1:
            del self._by_connection[identity]
        else:
            self._by_connection[identity] -= 1

    def send(self, identity: bytes, frames: Frames) -> None:
        assert self._socket is not None
        self._socket.send([identity, *frames])  # a peer that has gone away needs no answer

    # -- records ---------------------------------------------------------------------------------------------------

    def check_unread(self, token: Token) -> None:
        """Raises Busy. Looked at again before the answer leaves; at the request it spares the disk."""
        if not self._unread.has_room(token[0]):
            raise errors.Busy(UNREAD)

    def answer_records(self, token: Token, message: Struct, raw: Frames) -> None:
        """As `answer`, for what may be many bytes."""
        identity, size = token[0], sum(map(len, raw))
        if size < COUNTED_BYTES_MIN:
            self.answer(token, message, raw)
        elif not self._unread.has_room(identity):
            self.fail(token, errors.Busy.code, UNREAD)
        else:
            self.drop(token)
            assert self._socket is not None
            departure = self._socket.send_traced([identity, *f.response(token[1], message, raw)])
            if departure is not None:
                self._unread.add(identity, size, departure)
