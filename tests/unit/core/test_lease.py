"""B9: how long a leader may believe in itself."""

from __future__ import annotations

from zmqueue.config import ReplicationConfig
from zmqueue.core.lease import Lease

CONFIG = ReplicationConfig()


def test_there_is_no_lease_before_the_first_answered_heartbeat():
    lease = Lease(CONFIG)
    assert not lease.writable(0)
    assert not lease.readable(0)


def test_the_lease_counts_from_when_the_answered_heartbeat_was_sent():
    lease = Lease(CONFIG)
    lease.grant(1_000)
    assert lease.writable(1_000 + CONFIG.write_lease_ms)
    assert not lease.writable(1_001 + CONFIG.write_lease_ms)
    assert lease.readable(1_000 + CONFIG.read_lease_ms)
    assert not lease.readable(1_001 + CONFIG.read_lease_ms)


def test_a_late_answer_does_not_shorten_a_lease():
    lease = Lease(CONFIG)
    lease.grant(1_000)
    lease.grant(500)
    assert lease.granted_ms == 1_000


def test_writing_ends_before_the_controller_can_have_replaced_us():
    assert CONFIG.write_lease_ms < CONFIG.session_ms
