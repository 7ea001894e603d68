"""The producer's order, and a leader's producer table, joined without a socket."""

from __future__ import annotations

import random

import pytest

from zmqueue import errors
from zmqueue.client.ordering import WINDOW_MAX, Identity, Ordered, PartitionOrder, Settled

FIRST, SECOND = Identity(7, 0), Identity(8, 0)


class B(Ordered):
    def __init__(self, name: str, count: int = 10, deadline: float = 100.0) -> None:
        super().__init__(count, deadline)
        self.name = name

    def __repr__(self) -> str:
        return self.name


def pause(_: int) -> float:
    return 0.0


def order_of(*names: str, window: int = 5, idempotent: bool = True) -> tuple[PartitionOrder[B], list[B]]:
    order: PartitionOrder[B] = PartitionOrder(window, idempotent=idempotent)
    if idempotent:
        order.take_identity(FIRST)
    batches = [B(name) for name in names]
    for batch in batches:
        order.add(batch)
    return order, batches


def send_all(order: PartitionOrder[B], now: float = 1.0) -> list[tuple[B, int]]:
    sent = []
    while (batch := order.next_to_send(now)) is not None:
        sent.append((batch, order.sent(batch)))
    return sent


def fail(order: PartitionOrder[B], sending: tuple[B, int], error: errors.ZmqueueError) -> list[Settled[B]]:
    return order.failed(*sending, error, 1.0, pause)


def names(batches: object) -> list[str]:
    return [batch.name for batch in batches]  # type: ignore[attr-defined]


def test_records_are_counted_by_sequences() -> None:
    _order, (a, b, c) = order_of("a", "b", "c")
    assert [x.base_sequence for x in (a, b, c)] == [0, 10, 20]


def test_no_more_than_the_window_is_numbered_even_when_younger_ones_are_acknowledged() -> None:
    order, batches = order_of("a", "b", "c", window=3)
    assert not order.has_room
    sent = send_all(order)
    assert order.acknowledged(*sent[1]) == [Settled(batches[1], None)]
    assert not order.has_room
    order.acknowledged(*sent[0])
    assert order.has_room
    assert names(order.unsettled) == ["c"]


@pytest.mark.parametrize(
    "error",
    [
        errors.NotLeader(),
        errors.NetworkError(),
        errors.NotEnoughReplicas(),
        errors.RequestTimedOut(),
        errors.Busy(),
        errors.StorageFull(),
        errors.BrokerFenced(),
        errors.LeaseExpired(),
        errors.UnknownTopicId(),
        errors.OutOfOrderSequence(),
    ],
    ids=lambda error: error.name,
)
def test_after_an_error_all_unanswered_are_resent_unchanged_from_the_oldest(error: errors.ZmqueueError) -> None:
    order, (_, b, _c) = order_of("a", "b", "c")
    sent = send_all(order)
    order.acknowledged(*sent[0])
    assert fail(order, sent[1], error) == []
    again = send_all(order)
    assert [(x.name, x.base_sequence, x.identity) for x, _ in again] == [("b", 10, FIRST), ("c", 20, FIRST)]
    assert b.sends == 2


def test_answers_to_earlier_sendings_are_ignored() -> None:
    order, _ = order_of("a", "b")
    first = send_all(order)
    fail(order, first[0], errors.NetworkError())
    again = send_all(order)
    assert order.acknowledged(*first[0]) == []
    assert fail(order, first[1], errors.CorruptBatch()) == []
    assert names(order.unsettled) == ["a", "b"]
    assert len(order.acknowledged(*again[0])) == 1


def test_nothing_is_sent_while_the_partition_pauses() -> None:
    order, _ = order_of("a")
    sent = send_all(order)
    order.failed(*sent[0], errors.Busy(), 10.0, lambda failures: 0.5)
    assert order.next_to_send(10.4) is None
    assert order.next_to_send(10.5) is not None


def test_the_pause_grows_with_failures_in_a_row_and_starts_over_after_success() -> None:
    order, _ = order_of("a", "b")
    seen: list[int] = []

    def note(failures: int) -> float:
        seen.append(failures)
        return 0.0

    for _ in range(3):
        sending = send_all(order)[0]
        order.failed(*sending, errors.Busy(), 1.0, note)
    a, b = send_all(order)
    order.acknowledged(*a)
    order.failed(*b, errors.Busy(), 1.0, note)
    assert seen == [0, 1, 2, 0]


def test_a_duplicate_too_old_to_be_remembered_is_a_success() -> None:
    order, (a,) = order_of("a")
    (sending,) = send_all(order)
    assert fail(order, sending, errors.DuplicateSequence()) == [Settled(a, None)]


@pytest.mark.parametrize(
    "error",
    [errors.MessageTooLarge(), errors.CorruptBatch(), errors.InvalidRecord()],
    ids=lambda error: error.name,
)
def test_behind_a_batch_refused_for_good_everything_is_renumbered_under_a_new_identity(
    error: errors.ZmqueueError,
) -> None:
    order, (a, _b, _c) = order_of("a", "b", "c")
    sent = send_all(order)
    assert fail(order, sent[0], error) == [Settled(a, error)]
    assert order.next_to_send(1.0) is None
    assert not order.has_room
    assert order.needs_identity
    order.take_identity(SECOND)
    assert [(x.name, x.identity, x.base_sequence) for x, _ in send_all(order)] == [("b", SECOND, 0), ("c", SECOND, 10)]
    assert order.next_sequence == 20


def test_older_batches_are_settled_under_the_old_identity_before_the_new_one_is_taken() -> None:
    order, (_a, _b, _c) = order_of("a", "b", "c")
    sent = send_all(order)
    fail(order, sent[1], errors.InvalidRecord())
    assert not order.needs_identity
    assert order.next_to_send(1.0) is None, "a is under way, c waits for its number"
    fail(order, sent[0], errors.NetworkError())
    again = send_all(order)
    assert [(x.name, x.identity, x.base_sequence) for x, _ in again] == [("a", FIRST, 0)]
    order.acknowledged(*again[0])
    assert order.needs_identity
    order.take_identity(SECOND)
    assert [(x.name, x.base_sequence) for x, _ in send_all(order)] == [("c", 0)]


def test_the_last_batch_refused_for_good_also_breaks_the_identity() -> None:
    order, (_a,) = order_of("a")
    (sending,) = send_all(order)
    fail(order, sending, errors.InvalidRecord())
    assert not order.has_room, "a batch numbered behind the hole would be refused for ever"
    assert order.needs_identity


def test_a_batch_that_was_sent_and_timed_out_is_reported_but_still_resent_for_those_behind_it() -> None:
    order, (a, b) = order_of("a", "b")
    a.deadline, b.deadline = 5.0, 50.0
    sent = send_all(order)
    (settled,) = order.expire(6.0)
    assert settled.batch is a
    assert isinstance(settled.error, errors.DeliveryTimeout)
    fail(order, sent[0], errors.NetworkError())
    again = send_all(order)
    assert [(x.name, x.base_sequence) for x, _ in again] == [("a", 0), ("b", 10)]
    assert order.acknowledged(*again[0]) == [], "its caller has heard already"
    assert order.acknowledged(*again[1]) == [Settled(b, None)]


def test_when_all_that_was_sent_has_timed_out_only_the_unsent_begin_anew() -> None:
    order, (a, b) = order_of("a", "b")
    a.deadline = b.deadline = 5.0
    sent = send_all(order)
    c = B("c", deadline=50.0)
    order.add(c)
    assert names(settled.batch for settled in order.expire(6.0)) == ["a", "b"]
    assert names(order.unsettled) == ["c"]
    assert order.needs_identity
    order.take_identity(SECOND)
    assert (c.identity, c.base_sequence) == (SECOND, 0)
    assert order.acknowledged(*sent[0]) == [], "a late answer changes nothing"


def test_an_unsent_batch_that_timed_out_leaves_no_hole() -> None:
    order, (_a,) = order_of("a")
    (sending,) = send_all(order)
    b, c = B("b", deadline=5.0), B("c")
    order.add(b)
    order.add(c)
    assert names(s.batch for s in order.expire(6.0)) == ["b"]
    order.acknowledged(*sending)
    order.take_identity(SECOND)
    assert [(x.name, x.base_sequence) for x, _ in send_all(order)] == [("c", 0)]


def test_a_timeout_names_the_last_error() -> None:
    order, (a,) = order_of("a")
    (sending,) = send_all(order)
    fail(order, sending, errors.NotEnoughReplicas())
    a.deadline = 0.0
    (settled,) = order.expire(1.0)
    assert "NOT_ENOUGH_REPLICAS" in str(settled.error)


def test_unknown_producer_fails_what_may_have_been_written_and_renumbers_the_rest() -> None:
    order, (a, b) = order_of("a", "b")
    sent = send_all(order)
    fail(order, sent[0], errors.NetworkError())
    again = send_all(order)
    c = B("c")
    order.add(c)
    error = errors.UnknownProducer()
    assert fail(order, again[0], error) == [Settled(a, error), Settled(b, error)]
    order.take_identity(SECOND)
    assert [(x.name, x.base_sequence) for x, _ in send_all(order)] == [("c", 0)]


def test_unknown_producer_on_a_first_sending_loses_nothing() -> None:
    order, _ = order_of("a")
    order.acknowledged(*send_all(order)[0])
    for name in ("b", "c"):
        order.add(B(name))
    sent = send_all(order)
    assert fail(order, sent[0], errors.UnknownProducer()) == []
    assert order.needs_identity
    order.take_identity(SECOND)
    assert [(x.name, x.base_sequence) for x, _ in send_all(order)] == [("b", 0), ("c", 10)]


def test_unknown_producer_for_a_younger_batch_waits_for_the_oldest_to_be_judged() -> None:
    order, _ = order_of("a", "b")
    sent = send_all(order)
    assert fail(order, sent[1], errors.UnknownProducer()) == []
    assert names(x for x, _ in send_all(order)) == ["a", "b"]


def test_over_the_quota_only_what_is_refused_fails() -> None:
    order, (a, _b) = order_of("a", "b")
    sent = send_all(order)
    error = errors.QuotaExceeded()
    assert fail(order, sent[0], error) == [Settled(a, error)]
    order.take_identity(SECOND)
    assert [(x.name, x.base_sequence) for x, _ in send_all(order)] == [("b", 0)]


def test_over_the_quota_when_sent_again_all_that_was_sent_fails_as_an_earlier_sending_may_find_room() -> None:
    order, (a, b) = order_of("a", "b")
    order_sent = send_all(order)
    assert fail(order, order_sent[0], errors.NotLeader()) == []
    again = send_all(order)
    error = errors.QuotaExceeded()
    assert fail(order, again[1], error) == [], "the older one is judged first"
    again = send_all(order)
    assert fail(order, again[0], error) == [Settled(a, error), Settled(b, error)]


def test_fencing_is_the_end() -> None:
    order, (_a, _b) = order_of("a", "b")
    sent = send_all(order)
    error = errors.ProducerFenced()
    assert names(s.batch for s in fail(order, sent[0], error)) == ["a", "b"]
    assert order.fenced is error
    assert not order.unsettled


def test_abandoned_batches_are_sent_again_at_once() -> None:
    order, _ = order_of("a", "b")
    first = send_all(order)
    order.abandon()
    assert names(x for x, _ in send_all(order)) == ["a", "b"]
    assert order.acknowledged(*first[0]) == []


def test_a_topic_made_anew_loses_what_was_sent_and_keeps_the_rest() -> None:
    order, (a, _b) = order_of("a", "b")
    order.sent(a)
    error = errors.UnknownTopicId()
    assert order.reset(error) == [Settled(a, error)]
    order.take_identity(SECOND)
    assert [(x.name, x.base_sequence) for x, _ in send_all(order)] == [("b", 0)]


def test_without_idempotence_only_what_failed_is_resent() -> None:
    order, (a, b) = order_of("a", "b", idempotent=False)
    sent = send_all(order)
    fail(order, sent[0], errors.NetworkError())
    assert names(x for x, _ in send_all(order)) == ["a"]
    assert order.acknowledged(*sent[1]) == [Settled(b, None)]
    assert a.base_sequence == -1


def test_without_idempotence_a_timeout_ends_a_batch_at_once() -> None:
    order, (a, _b) = order_of("a", "b", idempotent=False)
    send_all(order)
    a.deadline = 0.0
    assert names(s.batch for s in order.expire(1.0)) == ["a"]
    assert names(order.unsettled) == ["b"]


class Leader:
    """E1 and E2, in small: what a leader does with a batch."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.known: dict[Identity, list[tuple[int, int]]] = {}

    def append(self, batch: B, identity: Identity, sequence: int) -> errors.ZmqueueError | None:
        if batch.name.endswith("!"):
            return errors.InvalidRecord()
        known = self.known.get(identity)
        if known is None:
            if sequence:
                return errors.UnknownProducer()
            known = self.known[identity] = []
        if (sequence, batch.count) in known[-WINDOW_MAX:]:
            return None
        expected = sum(known[-1]) if known else 0
        if sequence != expected:
            return errors.OutOfOrderSequence() if sequence > expected else errors.DuplicateSequence()
        known.append((sequence, batch.count))
        self.log.append(batch.name)
        return None


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_every_success_is_written_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    order: PartitionOrder[B] = PartitionOrder(rng.randint(1, WINDOW_MAX), idempotent=True)
    leader = Leader()
    wire: list[tuple[B, int, Identity, int]] = []
    answers: list[tuple[B, int, errors.ZmqueueError | None]] = []
    outcome: dict[str, errors.ZmqueueError | None] = {}
    identities = iter(range(1000))
    made, now = 0, 0.0

    def settle(settled: list[Settled[B]]) -> None:
        for batch, error in settled:
            assert batch.name not in outcome, "a batch ends once"
            outcome[batch.name] = error

    def forget() -> None:
        """Leaders forget producers; not while a first batch is under way, which they would take for a new one."""
        firsts = {identity for _, _, identity, sequence in wire if sequence == 0}
        firsts |= {batch.identity for batch in order.unsettled if batch.base_sequence == 0}
        for identity in leader.known.keys() - firsts:
            del leader.known[identity]

    def step(calm: bool) -> None:
        nonlocal made, now
        now += rng.random()
        if order.needs_identity:
            order.take_identity(Identity(next(identities), 0))
        if order.has_room and not calm and rng.random() < 0.5:
            bad = "!" if rng.random() < 0.05 else ""
            order.add(B(f"{made}{bad}", count=rng.randint(1, 5), deadline=now + rng.choice([5, 20, 1000])))
            made += 1
        while (batch := order.next_to_send(now)) is not None and (calm or rng.random() < 0.8):
            wire.append((batch, order.sent(batch), batch.identity, batch.base_sequence))
        if wire:
            # Requests reach the leader in their order, or are lost; the same one may come late and again.
            batch, token, identity, sequence = wire.pop(0)
            if calm or rng.random() < 0.8:
                error = leader.append(batch, identity, sequence)
                # A refusal is answered at once, a success when it is committed.
                answers.insert(0 if error is not None else len(answers), (batch, token, error))
                if not calm and rng.random() < 0.1:
                    wire.append((batch, token, identity, sequence))
            else:
                answers.append((batch, token, errors.NetworkError()))
        if answers:
            batch, token, error = answers.pop(0)
            if not calm and rng.random() < 0.2:
                error = errors.NetworkError()
            if error is None:
                settle(order.acknowledged(batch, token))
            else:
                settle(order.failed(batch, token, error, now, lambda n: rng.random()))
        if not calm and rng.random() < 0.05:
            order.abandon()
        if not calm and rng.random() < 0.05:
            forget()
        settle(order.expire(now))

    for _ in range(200):
        step(calm=False)
    for _ in range(2000):
        step(calm=True)
    assert not order.unsettled
    assert len(outcome) == made
    assert len(leader.log) == len(set(leader.log)), "written once"
    assert [int(name) for name in leader.log] == sorted(int(name) for name in leader.log), "in order"
    assert {name for name, error in outcome.items() if error is None} <= set(leader.log)
    surely_not = (errors.InvalidRecord,)
    assert not {name for name, error in outcome.items() if isinstance(error, surely_not)} & set(leader.log)
