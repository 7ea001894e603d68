"""Answers that have not left for the network: records, lent to the socket, of clients that do not read.

A fetch is a few bytes and its answer may be megabytes, so what a client can leave lying here must be bounded apart from
how many requests it may have open. Counted is what a connection has been sent and what has not gone since; small
answers are not, as the socket's own queue bounds them.
"""

from __future__ import annotations

from zmqueue.model import KiB
from zmqueue.transport import Departure

COUNTED_BYTES_MIN = 16 * KiB


class Unread:
    def __init__(self, connection_bytes_max: int, bytes_max: int) -> None:
        self._connection_bytes_max = connection_bytes_max
        self._bytes_max = bytes_max
        self._rows: dict[bytes, list[tuple[Departure, int]]] = {}
        self._bytes = 0

    def has_room(self, identity: bytes) -> bool:
        """Whether this connection may be sent more. One answer may be on its way, whatever its size."""
        if self._swept(identity) > self._connection_bytes_max:
            return False
        if self._bytes > self._bytes_max:
            for other in list(self._rows):
                self._swept(other)
        return self._bytes <= self._bytes_max

    def add(self, identity: bytes, size: int, departure: Departure) -> None:
        self._rows.setdefault(identity, []).append((departure, size))
        self._bytes += size

    def _swept(self, identity: bytes) -> int:
        """The bytes of this connection that are still here. What belongs to a lost connection is gone with it."""
        rows = self._rows.get(identity)
        if rows is None:
            return 0
        left = [row for row in rows if not row[0].done]
        size = sum(size for _, size in left)
        self._bytes -= sum(size for _, size in rows) - size
        if left:
            self._rows[identity] = left
        else:
            del self._rows[identity]
        return size
