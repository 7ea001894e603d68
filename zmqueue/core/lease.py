"""How long this broker may believe that it still leads what it led.

Counted, on this broker's own monotonic clock, from when the last heartbeat that was answered had been sent. Writes with
acks=1 need the short lease, which ends before the controller can have replaced us; reads have a longer one, so that a
change of controller does not stop reading everywhere. acks=all needs neither: followers refuse a deposed leader.
"""

from __future__ import annotations

from zmqueue.config import ReplicationConfig

NEVER = -(1 << 62)


class Lease:
    def __init__(self, config: ReplicationConfig) -> None:
        self._config = config
        self.granted_ms = NEVER

    def grant(self, sent_ms: int) -> None:
        self.granted_ms = max(self.granted_ms, sent_ms)

    def writable(self, now_ms: int) -> bool:
        return now_ms - self.granted_ms <= self._config.write_lease_ms

    def readable(self, now_ms: int) -> bool:
        return now_ms - self.granted_ms <= self._config.read_lease_ms
