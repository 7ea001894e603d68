"""An ISR change that is under way for long, while the brokers that it names do not stay what they were (B8)."""

from __future__ import annotations

from tests.unit.core.builders import (
    CONFIG,
    KEY,
    World,
    broker_state,
    flush,
    leading,
    log_of,
    partition_state,
    produce,
)
from zmqueue.core import commands as c


def test_a_proposal_sent_again_is_the_one_that_was_made():
    """Rebuilt, it would name the new life of a follower whose former life had qualified, and which lost everything."""
    world = World()
    world.live()
    world.cluster.topic([1, 2], isr=[1])
    world.node.on_opened(KEY, log_of(), world.now_ms)
    world.ack(2, 0)
    world.step()
    first = world.proposed[-1]
    world.cluster.start(2, life=2, unclean=True)
    world.step(CONFIG.proposal_timeout_ms)
    assert world.proposed[-1] == first
    assert c.decode(first).command.changes[0].isr == [c.BrokerRef(1, 1), c.BrokerRef(2, 1)]
    world.commit()
    assert world.cluster.partition.isr == [1]


def test_whom_a_proposal_under_way_would_add_counts_until_its_result_is_known():
    """Also after other changes of metadata: it may be applied at any time, and then they must be complete."""
    brokers = {b: broker_state(b) for b in (1, 2, 3)}
    leader = leading(isr=[1, 3], replicas=[1, 2, 3], brokers=brokers)
    leader.on_ack(2, 1, 0, 0)
    proposed = leader.pending
    assert proposed is not None
    brokers[2].fenced = True  # which changes nothing of the partition: 2 is not in its ISR yet
    leader.on_metadata(partition_state([1, 3], [1, 2, 3]), 1, 0)
    assert leader.pending is proposed
    produce(leader)
    flush(leader)
    leader.on_ack(3, 1, 1, 0)
    assert leader.log.high_watermark == 0
    leader.on_isr_result()
    assert leader.log.high_watermark == 1
