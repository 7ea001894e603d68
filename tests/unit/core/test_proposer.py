"""The commands of one broker on their way through Raft (B8: the same bytes until the result is known)."""

from __future__ import annotations

from typing import Any

from tests.unit.core.builders import CONFIG, Cluster, of, registration
from zmqueue import errors
from zmqueue.core import commands as c
from zmqueue.core.effects import AnswerCommand, Propose
from zmqueue.core.metadata import ClusterState
from zmqueue.core.proposer import QUEUE_MAX, RETRY_MS, Proposer


def proposer() -> Proposer:
    """Of broker 1, whose registration is done elsewhere."""
    made = Proposer(1, 1001, CONFIG)
    made._number = 10
    return made


def sent(effects: list) -> list[Any]:
    return [c.decode(effect.data).command for effect in of(Propose, effects)]


def cluster() -> ClusterState:
    made = Cluster([1]).state
    made.last_commands[1].number = 10
    return made


def test_commands_go_out_one_at_a_time_in_order():
    p, state = proposer(), cluster()
    p.ask(c.Barrier(1))
    p.ask(c.Barrier(2))
    first = p.step(0)
    assert sent(first) == [c.Barrier(1)]
    assert p.step(1) == []
    command, _ = p.on_applied(state.apply(of(Propose, first)[0].data))
    assert command == c.Barrier(1)
    assert sent(p.step(2)) == [c.Barrier(2)]


def test_a_retry_is_the_same_bytes():
    p = proposer()
    change = c.AlterIsr(1, 1, [c.IsrChange(b"t" * 16, 0, 1, 1, [c.BrokerRef(1, 1)])])
    p.ask(change)
    (first,) = of(Propose, p.step(0))
    change.changes[0].isr[0].epoch = 9  # whatever happens to the object
    assert p.step(CONFIG.proposal_timeout_ms - 1) == []
    assert of(Propose, p.step(CONFIG.proposal_timeout_ms)) == [first]
    assert of(Propose, p.step(10_000)) == [first]


def test_what_raft_would_not_commit_is_sent_again_soon():
    p = proposer()
    p.ask(c.Barrier(1))
    (first,) = of(Propose, p.step(0))
    p.on_unsure(first.data, 10)
    assert p.step(10 + RETRY_MS - 1) == []
    assert of(Propose, p.step(10 + RETRY_MS)) == [first]
    p.on_unsure(b"something else", 200)
    assert p.step(200 + RETRY_MS) == []


def test_what_is_under_way_is_not_asked_for_twice():
    p = proposer()
    p.ask(c.Barrier(1))
    p.ask(c.Barrier(1))
    p.step(0)
    p.ask(c.Barrier(1))
    p.on_applied(cluster().apply(p.sent.data if p.sent else b""))
    assert p.sent is None
    assert not p.is_due(1 << 40)


def test_only_the_own_command_of_this_life_ends_the_wait():
    p, state = proposer(), cluster()
    p.ask(c.AllocateProducerIds(1))
    p.step(0)
    for broker, incarnation in [(2, 1001), (1, 7)]:
        other = c.encode(c.Envelope(broker, incarnation, 11, registration(broker)))
        assert p.on_applied(state.apply(other)) == (None, [])
    assert p.sent is not None


def test_a_client_hears_the_outcome():
    p, state = proposer(), cluster()
    p.submit(c.AllocateProducerIds(5), "token", 1_000)
    (proposal,) = of(Propose, p.step(0))
    _, effects = p.on_applied(state.apply(proposal.data))
    assert effects == [AnswerCommand("token", c.Outcome(value=1))]


def test_a_client_is_given_up_at_its_deadline_and_its_command_never_blocks_the_next():
    p, state = proposer(), cluster()
    p.submit(c.AllocateProducerIds(5), "first", 100)
    p.submit(c.AllocateProducerIds(1), "queued", 100)
    late = of(Propose, p.step(0))[0].data
    p.ask(c.Barrier(1))
    effects = p.step(100)
    unknown = {(a.token, a.outcome.code) for a in of(AnswerCommand, effects)}
    assert unknown == {("first", errors.MetadataUnavailable.code), ("queued", errors.MetadataUnavailable.code)}
    assert sent(effects) == [c.Barrier(1)]
    state.apply(of(Propose, effects)[0].data)
    assert state.apply(late).outcome.code == errors.StaleCommand.code  # it was overtaken
    assert state.next_producer_id == 1


def test_what_the_broker_needs_is_never_given_up():
    p = proposer()
    p.ask(c.Barrier(1))
    first = of(Propose, p.step(0))
    assert of(Propose, p.step(1 << 40)) == first


def test_what_the_broker_needs_goes_before_what_clients_asked_for():
    """Else a burst of clients' commands on the controller delays the fencing of a dead broker by seconds."""
    p, state = proposer(), cluster()
    for number in range(3):
        p.submit(c.AllocateProducerIds(1), number, 1_000)
    under_way = of(Propose, p.step(0))[0].data
    p.ask(c.Barrier(1))
    p.ask(c.Barrier(2))
    p.ask(c.Barrier(3), first=True)
    order = []
    while p.sent is not None:
        p.on_applied(state.apply(under_way))
        for effect in of(Propose, p.step(0)):
            under_way = effect.data
            order.append(c.decode(under_way).command)
    assert order == [c.Barrier(3), c.Barrier(1), c.Barrier(2), c.AllocateProducerIds(1), c.AllocateProducerIds(1)]


def test_the_queue_of_clients_is_bounded():
    p = proposer()
    for number in range(QUEUE_MAX):
        assert p.submit(c.AllocateProducerIds(1), number, 1_000) == []
    (refused,) = of(AnswerCommand, p.submit(c.AllocateProducerIds(1), "more", 1_000))
    assert refused.outcome.code == errors.Busy.code


def test_a_snapshot_that_holds_the_outcome_ends_the_wait():
    p, state = proposer(), cluster()
    p.submit(c.AllocateProducerIds(5), "token", 1_000)
    state.apply(of(Propose, p.step(0))[0].data)
    copy = ClusterState()
    copy.load(state.encode())
    command, outcome, effects = p.on_restored(copy)
    assert (command, outcome) == (c.AllocateProducerIds(5), c.Outcome(value=1))
    assert effects == [AnswerCommand("token", c.Outcome(value=1))]
    assert p.sent is None


def test_a_snapshot_without_the_outcome_leaves_it_under_way():
    p, state = proposer(), cluster()
    p.ask(c.AllocateProducerIds(5))
    p.step(0)
    assert p.on_restored(state)[0] is None
    assert p.on_restored(ClusterState())[0] is None
    assert p.sent is not None
