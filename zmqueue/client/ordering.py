"""The order of one partition's batches in a producer, as a pure state machine: what to send, resend, renumber, give up.

An idempotent producer numbers its records per partition, 0, 1, 2 …, under an identity (producer id and epoch) that the
cluster gave out. The leader appends a batch only if its number continues what it has of that identity, recognises the
last eight batches when they come again, and refuses everything else. Exactly once and in order follow from this, if the
producer keeps its side:

Invariants
1. A batch that may have been written is resent unchanged (same identity, number and bytes), or never again.
2. Batches are sent in their order: none leaves before all older ones have, and after a failure all that are unanswered
   leave again, from the oldest. Answers to earlier sendings are ignored.
3. At most `window` batches are numbered and unsettled, counted from the oldest, never more than the leader remembers.
4. Numbers of one identity have no holes. So when a batch is given up, its identity is `broken`: nothing new is numbered
   under it, older batches are settled under it first, and those behind begin anew under a fresh identity.
5. A batch behind the hole may take a new number only if it cannot have been written, which holds in two cases: it was
   never sent, or the batch that left the hole can never be written (the leader refused it for good), for then the
   leader refuses all that follow it as well.

What happens when a batch is given up:
- refused for good (too large, corrupt, invalid): 5 holds for all behind it; they are renumbered.
- over the quota: refused for good as well, but an earlier sending that is still on its way may find room by then. So
  if there was one, everything that was sent fails.
- its delivery time is over, and it was sent: it may have been written, and so may those behind it. The caller hears
  `DeliveryTimeout`, but the batch stays in the queue and goes on being resent (`reported`), so that the others can
  still succeed. Only when every batch that was sent has run out of time are all of them dropped together.
- UNKNOWN_PRODUCER for the oldest: the leader has forgotten the identity. If that was the only time it was sent, it was
  not written, nor was anything behind it: all are renumbered. Otherwise it may have been written before the leader
  forgot, and writing it again could double it: everything that was sent fails.

Without idempotence there are no numbers: what failed is resent alone, and order and uniqueness are not promised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from zmqueue.errors import (
    DeliveryTimeout,
    DuplicateSequence,
    OutOfOrderSequence,
    ProducerFenced,
    QuotaExceeded,
    UnknownProducer,
    ZmqueueError,
)

WINDOW_MAX = 8
NO_SEQUENCE = -1


class Identity(NamedTuple):
    producer_id: int
    producer_epoch: int


ANONYMOUS = Identity(-1, -1)


class Ordered:
    """What the order needs to know of a batch."""

    __slots__ = (
        "acked",
        "base_sequence",
        "count",
        "deadline",
        "flying",
        "identity",
        "renumber",
        "reported",
        "sends",
        "token",
    )

    def __init__(self, count: int, deadline: float) -> None:
        self.count = count
        self.deadline = deadline
        self.identity = ANONYMOUS
        self.base_sequence = NO_SEQUENCE
        self.sends = 0  # under its present number
        self.token = 0  # of its last sending, ever
        self.flying = False  # sent, and the answer is awaited
        self.acked = False  # settled, but something older is not
        self.reported = False  # given up before its caller, though not yet settled
        self.renumber = False  # waits for a fresh identity


B = TypeVar("B", bound=Ordered)


class Settled(NamedTuple, Generic[B]):
    """The end of a batch for its caller: an error, or None for success."""

    batch: B
    error: ZmqueueError | None


class PartitionOrder(Generic[B]):
    def __init__(self, window: int, *, idempotent: bool) -> None:
        assert 1 <= window <= WINDOW_MAX or not idempotent
        self.idempotent = idempotent
        self.window = window
        self.unsettled: deque[B] = deque()
        self.identity: Identity | None = None if idempotent else ANONYMOUS
        self.next_sequence = 0
        self.broken = False
        self.fenced: ProducerFenced | None = None
        self.blocked_until = 0.0
        self.failures = 0
        self.last_error: ZmqueueError | None = None

    # -- what can be done ----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return self.identity is not None and not self.broken and len(self.unsettled) < self.window

    @property
    def needs_identity(self) -> bool:
        """Everything numbered under the old identity is settled, and a new one is needed to go on."""
        if not self.idempotent or (self.identity is not None and not self.broken):
            return False
        return all(batch.renumber for batch in self.unsettled)

    def next_to_send(self, now: float) -> B | None:
        """The oldest batch that is not on its way, unless the partition pauses after a failure."""
        if now < self.blocked_until:
            return None
        for batch in self.unsettled:
            if batch.renumber:
                return None
            if not batch.flying and not batch.acked:
                return batch
        return None

    @property
    def waits_to_send(self) -> bool:
        return any(not (batch.flying or batch.acked or batch.renumber) for batch in self.unsettled)

    # -- events --------------------------------------------------------------------------------------------------

    def add(self, batch: B) -> None:
        """A batch that was never sent takes its place at the end."""
        assert self.has_room
        self._number(batch)
        self.unsettled.append(batch)

    def take_identity(self, identity: Identity) -> None:
        assert self.needs_identity
        assert identity != self.identity
        self.identity, self.next_sequence, self.broken = identity, 0, False
        for batch in self.unsettled:
            self._number(batch)

    def sent(self, batch: B) -> int:
        """The batch is handed to the network. The token names this sending."""
        batch.flying = True
        batch.sends += 1
        batch.token += 1
        return batch.token

    def is_current(self, batch: B, token: int) -> bool:
        return batch.flying and batch.token == token

    def acknowledged(self, batch: B, token: int) -> list[Settled[B]]:
        if not self.is_current(batch, token):
            return []
        batch.flying, batch.acked = False, True
        self.failures, self.last_error = 0, None
        while self.unsettled and self.unsettled[0].acked:
            self.unsettled.popleft()
        return [] if batch.reported else [Settled(batch, None)]

    def failed(
        self, batch: B, token: int, error: ZmqueueError, now: float, pause: Callable[[int], float]
    ) -> list[Settled[B]]:
        """A sending failed. `pause` gives the backoff for a number of failures in a row."""
        if not self.is_current(batch, token):
            return []
        if isinstance(error, DuplicateSequence):
            return self.acknowledged(batch, token)
        self.last_error = error
        if isinstance(error, ProducerFenced):
            self.fenced = error
            return self._drop_all(error)
        if isinstance(error, UnknownProducer) and self.idempotent and batch is self._oldest():
            return self._on_unknown_producer(batch, error)
        again = isinstance(error, QuotaExceeded) and self.idempotent and batch.sends > 1
        if again and batch is self._oldest():
            return self._give_up_sent(error)
        if error.retriable or again or (self.idempotent and isinstance(error, (OutOfOrderSequence, UnknownProducer))):
            self._resend(batch)
            self.blocked_until = now + pause(self.failures)
            self.failures += 1
            return []
        return self._refused_for_good(batch, error)

    def abandon(self) -> None:
        """Stop waiting for answers: all that is unanswered is to be sent again, to another leader."""
        for batch in self.unsettled:
            batch.flying = False
        self.blocked_until = 0.0

    def reset(self, error: ZmqueueError) -> list[Settled[B]]:
        """The partition is another one now (its topic was made anew): what was sent is lost, the rest starts over."""
        return self._give_up_sent(error)

    def expire(self, now: float) -> list[Settled[B]]:
        """Report the batches whose time is over, and drop those that nobody younger depends on."""
        settled: list[Settled[B]] = []
        for batch in [b for b in self.unsettled if not b.acked and not b.reported and b.deadline <= now]:
            settled.append(Settled(batch, self._timeout()))
            batch.reported = True
            if batch.sends == 0 or not self.idempotent:
                self._remove(batch)
        if settled and self.idempotent and all(b.reported or b.acked for b in self.unsettled if b.sends):
            self._give_up_sent(self._timeout())
        return settled

    # -- how -----------------------------------------------------------------------------------------------------

    def _number(self, batch: B) -> None:
        assert self.identity is not None
        batch.renumber, batch.sends, batch.identity = False, 0, self.identity
        if self.idempotent:
            batch.base_sequence = self.next_sequence
            self.next_sequence += batch.count

    def _oldest(self) -> B | None:
        return next((batch for batch in self.unsettled if not batch.acked), None)

    def _resend(self, batch: B) -> None:
        batch.flying = False
        if self.idempotent:
            self.abandon()

    def _on_unknown_producer(self, batch: B, error: ZmqueueError) -> list[Settled[B]]:
        if batch.sends > 1 or batch.reported:
            return self._give_up_sent(error)
        self._break_from(batch)
        return []

    def _refused_for_good(self, batch: B, error: ZmqueueError) -> list[Settled[B]]:
        settled = [] if batch.reported else [Settled(batch, error)]
        self._remove(batch)
        return settled

    def _remove(self, batch: B) -> None:
        """Take out a batch that is certainly not written. Those behind it get new numbers."""
        batch.flying = False
        if not self.idempotent:
            self.unsettled.remove(batch)
            return
        self._break_from(batch)
        self.unsettled.remove(batch)

    def _break_from(self, first: B) -> None:
        """Nothing from `first` on can have been written under its number."""
        self.broken = True
        behind = False
        for batch in list(self.unsettled):
            behind = behind or batch is first
            if not behind:
                continue
            batch.flying = False
            batch.renumber = True
            if batch is not first and (batch.reported or batch.acked):
                self.unsettled.remove(batch)

    def _give_up_sent(self, error: ZmqueueError) -> list[Settled[B]]:
        """Drop all that may have been written; what was never sent begins anew."""
        settled = []
        for batch in list(self.unsettled):
            batch.flying = False
            if batch.sends:
                self.unsettled.remove(batch)
                if not batch.reported and not batch.acked:
                    settled.append(Settled(batch, error))
            else:
                batch.renumber = self.idempotent
        self.broken = self.idempotent
        return settled

    def _drop_all(self, error: ZmqueueError) -> list[Settled[B]]:
        settled = [Settled(batch, error) for batch in self.unsettled if not batch.reported and not batch.acked]
        for batch in self.unsettled:
            batch.flying = False
        self.unsettled.clear()
        return settled

    def _timeout(self) -> DeliveryTimeout:
        last = f"; last error: {self.last_error.name}: {self.last_error}" if self.last_error is not None else ""
        return DeliveryTimeout(f"not acknowledged within delivery_timeout_ms; it may still have been written{last}")
