"""A consumer's membership in its group: what `member` decides, done in the IO thread, which does not wait for polls.

What the group gives and takes changes the fetcher's slots at once: a partition that was given is fetched, one that is
to be let go is fetched and handed out no longer. The application hears of it in its next poll, by `changes`, in order;
`group` is the side of it there. Letting go waits for that, since records handed out may be in work and a listener wants
to be called. It happens at once where nobody can mind: no listener, no poll and no iteration under way, and nothing
handed out that is not committed.

An application that has not polled for max_poll_interval_ms is taken for dead: its member leaves, and joins again with
the next poll.

Invariants, under the fetcher's lock
- `changes` has each slot's assignment before its end, and neither if the application heard of none of them.
- A slot is `announced` from when the application takes its assignment out of `changes` until it takes its end.
- `life` is the member id that the slots belong to. Past `session_ends` they must be taken for lost, though a process
  that was stopped for long may poll before its IO thread has come to see that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from zmqueue.client.commits import Commit, Committer
from zmqueue.client.coordinator import Coordinator
from zmqueue.client.fetcher import Fetcher
from zmqueue.client.member import Effect, Fail, Gone, Lose, Member, Owned, Send, Start, State, Stop, Take
from zmqueue.client.network import Answer, Network, Timer, log
from zmqueue.client.slots import Reset, Slot
from zmqueue.client.starts import Starts
from zmqueue.errors import ClientClosed, CoordinatorNotAvailable, FencedInstance, IllegalState, ZmqueueError
from zmqueue.model import EARLIEST
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import TOPICS_MAX, CommitRow

# How long offsets of partitions that are let go are tried to be committed.
LET_GO_S = 10.0

Rows = dict[Owned, CommitRow]


class Kind(Enum):
    ASSIGNED = auto()
    REVOKED = auto()
    LOST = auto()


class Change(NamedTuple):
    kind: Kind
    slots: list[Slot]


class Membership:
    def __init__(
        self,
        network: Network,
        coordinator: Coordinator,
        committer: Committer,
        fetcher: Fetcher,
        starts: Starts,
        member: Member,
        reset: Reset,
    ) -> None:
        self.member = member
        self.heartbeats = self.rebalances = 0
        # Shared with the application, under the fetcher's lock.
        self.changes: deque[Change] = deque()
        self.error: ZmqueueError | None = None
        self.out = True  # a poll has to ask for membership
        self.inside = False  # in a poll
        self.polled_at = time.monotonic()
        self.listens = False
        self.life = ""
        self.session_ends = float("inf")
        # Set by `group`: which topics are wanted (None: no membership), what is to be committed of slots that are let
        # go, and whether records that an iteration has yet to come to are there.
        self.topics: Callable[[], list[str] | None] = lambda: None
        self.rows_of: Callable[[Iterable[Slot]], Rows] = lambda slots: {}
        self.iterating: Callable[[], bool] = lambda: False
        self._network, self._coordinator, self._committer = network, coordinator, committer
        self._fetcher, self._starts, self._reset = fetcher, starts, reset
        self._slots: dict[Owned, Slot] = {}
        self._deferred: dict[Owned, Start] = {}  # given again before they were let go
        self._call_off: Callable[[], object] | None = None
        self._timer: Timer | None = None
        self._gone: list[threading.Event] = []
        committer.identity = lambda: (member.member_id, member.generation) if self.life else ("", -1)
        coordinator.listeners.append(self._on_coordinator)

    # -- asked for by the application --------------------------------------------------------------------------------

    def join(self) -> None:
        topics = self.topics()
        if topics:
            self.out = False
            self._on_coordinator()
            self._want(topics)

    def follow(self) -> None:
        """Other topics may be wanted by now."""
        topics = self.topics()
        if topics is not None and self.member.state in (State.JOINING, State.STABLE, State.REVOKING):
            self._want(topics)

    def _want(self, topics: list[str]) -> None:
        if len(topics) > TOPICS_MAX:
            self._fail(IllegalState(f"{len(topics)} topics: a member can subscribe to {TOPICS_MAX} at most"))
        else:
            self._run(self.member.want(topics, time.monotonic()))

    def release(self, slots: list[Slot], rows: Rows, life: str) -> None:
        """Commit, and then let go: not before the coordinator has taken the offsets, or will not."""
        done = partial(self._released, slots, life)
        self._committer.add(Commit(rows, life, time.monotonic() + LET_GO_S, done))

    def leave(self, gone: threading.Event, until: float) -> None:
        self._gone.append(gone)
        self._drop_all()
        self._run(self.member.leave(time.monotonic(), until))

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_coordinator(self) -> None:
        if self.member.state in (State.OUT, State.FENCED) and self.out:
            return
        ready = self._coordinator.ready()
        if ready != self.member.reachable:
            self._run(self.member.reach(ready, time.monotonic()))

    def _on_answer(self, number: int, result: Answer | ZmqueueError) -> None:
        now = time.monotonic()
        if isinstance(result, Answer):
            self.heartbeats += 1
            self._run(self.member.answered(number, result.message, now))
        elif not isinstance(result, ClientClosed):
            self._run(self.member.failed(number, result, now))

    def _on_time(self) -> None:
        self._timer = None
        now = time.monotonic()
        if now >= self._idle_at():
            log.warning("the application has not polled for %.0f s: its member leaves the group", now - self.polled_at)
            self._run(self.member.idle(now))
        else:
            self._run(self.member.tick(now))

    def notice(self) -> None:
        """The session may be over."""
        self._run(self.member.tick(time.monotonic()))

    def _idle_at(self) -> float:
        active = self.member.state in (State.JOINING, State.STABLE, State.REVOKING)
        if self.inside or not active:
            return float("inf")
        return self.polled_at + self.member.settings.rebalance_s

    # -- effects -----------------------------------------------------------------------------------------------------

    def _run(self, effects: list[Effect]) -> None:
        left = deque(effects)
        while left:
            match left.popleft():
                case Send() as send:
                    left.extend(self._send(send))
                case Take(partitions):
                    self._take(partitions)
                case Stop(partitions):
                    left.extend(self._stop(partitions))
                case Lose(partitions):
                    self._lose(partitions)
                case Fail(error):
                    self._fail(error)
                case Gone():
                    self._on_gone()
        with self._fetcher.changed:
            self.life = self.member.member_id if self.member.state != State.OUT else ""
            self.session_ends = self.member.session_ends
            self._fetcher.changed.notify_all()
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        # While the application is inside, somebody has to look again when it may have left.
        idle_at = now + self.member.settings.rebalance_s if self.inside else self._idle_at()
        due = min(self.member.due(), idle_at)
        if self.member.state not in (State.OUT, State.FENCED):
            self._timer = self._network.call_later(max(0.0, due - now), self._on_time)

    def _send(self, send: Send) -> list[Effect]:
        self._cancel_heartbeat()
        if not self._coordinator.ready():
            return self.member.failed(send.number, CoordinatorNotAvailable(), time.monotonic())
        self._call_off = self._coordinator.send(
            Operation.GROUP_HEARTBEAT,
            send.request,
            send.timeout_s,
            partial(self._on_answer, send.number),
            wait_s=send.request.wait_ms / 1000,
        )
        return []

    def _cancel_heartbeat(self) -> None:
        if self._call_off is not None:
            self._call_off()
            self._call_off = None

    def _take(self, partitions: dict[Owned, Start]) -> None:
        self.rebalances += 1
        slots = []
        with self._fetcher.changed:
            for owned, start in partitions.items():
                if owned.partition in self._fetcher.slots:
                    self._deferred[owned] = start
                else:
                    slots.append(self._make(owned, start))
            self._announce(slots)

    def _make(self, owned: Owned, start: Start) -> Slot:
        slot = self._slots[owned] = Slot(
            owned.partition, EARLIEST if start.fresh else self._reset, topic_id=owned.topic_id
        )
        slot.announced = False
        if not start.known:
            slot.asks_group = True
        elif start.offset >= 0:
            slot.begin(start.offset, start.leader_epoch)
        return slot

    def _announce(self, slots: list[Slot]) -> None:
        if slots:
            self.changes.append(Change(Kind.ASSIGNED, slots))
            self._fetcher.add(slots)
            self._fetcher.changed.notify_all()
            self._network.post(self._starts.pump)

    def _stop(self, partitions: list[Owned]) -> list[Effect]:
        self.rebalances += 1
        free: list[Owned] = []
        heard: list[Slot] = []
        with self._fetcher.changed:
            for owned in partitions:
                if self._deferred.pop(owned, None) is not None:
                    if owned not in self._slots:
                        free.append(owned)
                    continue
                slot = self._slots[owned]
                slot.stop()
                if slot.announced:
                    heard.append(slot)
                else:
                    free.append(owned)
            self._forget_changes(heard=[], unheard=[self._slots.pop(owned) for owned in free if owned in self._slots])
            if heard:
                if self._may_let_go(heard):
                    for slot in heard:
                        slot.announced = False
                    self._network.post(partial(self.release, heard, self.rows_of(heard), self.life))
                else:
                    self.changes.append(Change(Kind.REVOKED, heard))
            self._fetcher.changed.notify_all()
        self._fetcher.poke()
        return self.member.let_go(free, time.monotonic()) if free else []

    def _may_let_go(self, slots: list[Slot]) -> bool:
        return not (self.inside or self.listens or self.iterating()) and all(slot.untouched for slot in slots)

    def _forget_changes(self, heard: list[Slot], unheard: list[Slot]) -> None:
        """The application need not hear of these any more."""
        gone = set(map(id, [*heard, *unheard]))
        kept = [Change(kind, [slot for slot in slots if id(slot) not in gone]) for kind, slots in self.changes]
        self.changes = deque(change for change in kept if change.slots)
        self._fetcher.remove(unheard)

    def _released(self, slots: list[Slot], life: str, error: ZmqueueError | None) -> None:
        if error is not None:
            log.warning("partitions were let go, and their offsets not committed: %s", error)
        partitions = [_owned(slot) for slot in slots]
        again = []
        with self._fetcher.changed:
            self._fetcher.remove(slots)
            for slot, owned in zip(slots, partitions, strict=True):
                if self._slots.get(owned) is slot:
                    del self._slots[owned]
            for owned, start in list(self._deferred.items()):
                if owned.partition not in self._fetcher.slots:
                    del self._deferred[owned]
                    again.append(self._make(owned, start))
            self._announce(again)
        if life == self.member.member_id:
            self._committer.refuse(partitions)
            self._run(self.member.let_go(partitions, time.monotonic()))

    def _lose(self, partitions: list[Owned]) -> None:
        with self._fetcher.changed:
            for owned in partitions:
                self._deferred.pop(owned, None)
            slots = [self._slots.pop(owned) for owned in partitions if owned in self._slots]
            for slot in slots:
                slot.stop()
            heard = [slot for slot in slots if slot.announced]
            self._forget_changes(heard, slots)
            if heard:
                self.changes.append(Change(Kind.LOST, heard))
            self._fetcher.changed.notify_all()
        log.warning("the group is taken to have given %d partitions to others", len(partitions))
        self._committer.refuse(partitions)

    def _fail(self, error: ZmqueueError) -> None:
        with self._fetcher.changed:
            self.error = error
            self.out = not isinstance(error, FencedInstance)
            self._fetcher.changed.notify_all()

    def _on_gone(self) -> None:
        self._cancel_heartbeat()
        with self._fetcher.changed:
            self.out = True
        for gone in self._gone:
            gone.set()
        self._gone.clear()

    def _drop_all(self) -> None:
        """The application has left on purpose, so it need not hear of it."""
        with self._fetcher.changed:
            slots = list(self._slots.values())
            for slot in slots:
                slot.stop()
            self._slots.clear()
            self._deferred.clear()
            self.changes.clear()
            self._fetcher.remove(slots)


def _owned(slot: Slot) -> Owned:
    assert slot.topic_id is not None
    return Owned(slot.topic_id, slot.partition)
