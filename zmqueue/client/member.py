"""Membership of a consumer group, as the member sees it. Pure: events in, effects out, time as an argument (seconds).

    OUT        no member: nothing is wanted, or it left, or it was refused
    JOINING    wants in, and holds nothing; repeats its request until some coordinator answers
    STABLE     holds what it was told last
    REVOKING   holds, beyond that, partitions which it was told to let go
    LEAVING    says goodbye, for as long as that is worth it
    FENCED     for good: another has taken over its instance id

Beside the state stands whether a coordinator is in reach (`reachable`). A member that loses sight of it keeps what it
holds until its session is over. Then it must take all of it for given to others: it stops (`Lose`), and joins again
under another id, because what the old one still does must not be mistaken for its own.

Invariants
- Only the newest heartbeat counts. One is under way, or a newer one has taken its place because there was news; what
  the older would have said is told again, for the newer names the revision that the member knows.
- `owned` and `revoking` are disjoint. A partition leaves `revoking` only when it was let go, given back or lost, and as
  long as it is there every heartbeat lists it.
- The session is counted from when the last answered heartbeat was sent: the coordinator counts from its arrival, so the
  member stops before anybody else can begin.
- `revision` 0 asks to be told everything: no answer to this member id was heard yet, or none that made sense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct

from zmqueue.errors import FencedInstance, UnknownMember, ZmqueueError
from zmqueue.model import TopicPartition
from zmqueue.wire.group_messages import GroupHeartbeatRequest, GroupHeartbeatResponse
from zmqueue.wire.messages import PartitionEntry

# An answer that says nothing new, and comes at once, must not be followed by the next request at once.
EARLY_PAUSE_S = 0.1


class State(Enum):
    OUT = auto()
    JOINING = auto()
    STABLE = auto()
    REVOKING = auto()
    LEAVING = auto()
    FENCED = auto()


class Owned(NamedTuple):
    """A partition as the group knows it: of this topic, and not of another that gets its name."""

    topic_id: bytes
    partition: TopicPartition


class Start(NamedTuple):
    """Where to begin. `known` is false where the coordinator's word may be older than the member's own commits."""

    offset: int = -1
    leader_epoch: int = -1
    fresh: bool = False
    known: bool = True


class MemberSettings(Struct, frozen=True):
    group: str
    session_s: float
    wait_s: float
    rebalance_s: float
    instance_id: str | None = None
    client_id: str = ""
    assignor: str = "sticky"

    @property
    def answer_s(self) -> float:
        """How long an answer may take, so that two coordinators can be tried within a session."""
        return self.wait_s + min(2.0, max(0.2, (self.session_s - self.wait_s) / 4))


# -- effects -----------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """In place of any heartbeat that is under way."""

    number: int
    request: GroupHeartbeatRequest
    timeout_s: float


class Take(NamedTuple):
    """These may be read from now on."""

    partitions: dict[Owned, Start]


class Stop(NamedTuple):
    """These are read no longer; tell `let_go` when the application has done with them."""

    partitions: list[Owned]


class Lose(NamedTuple):
    """These belong to others by now, or must be taken for it."""

    partitions: list[Owned]


class Fail(NamedTuple):
    """The application has to hear of it: without its doing, the group cannot be joined."""

    error: ZmqueueError


class Gone(NamedTuple):
    """Left, as far as that was possible."""


Effect = Send | Take | Stop | Lose | Fail | Gone


class _Asked(NamedTuple):
    number: int
    sent_at: float
    told_topics: list[str] | None


class Member:
    def __init__(self, settings: MemberSettings, new_id: Callable[[], str], pause: Callable[[int], float]) -> None:
        """`pause` says how long to wait after so many failures in a row."""
        self.settings = settings
        self.state = State.OUT
        self.reachable = False
        self.member_id = ""
        self.generation = -1
        self.revision = 0
        self.topics: list[str] = []
        self.owned: dict[Owned, None] = {}
        self.revoking: dict[Owned, None] = {}
        self.heard_at = 0.0
        self._new_id = new_id
        self._pause = pause
        self._told = False  # whether the coordinator knows `topics`
        self._known = False  # whether the coordinator may know this id
        self._asked: _Asked | None = None
        self._number = 0
        self._news = False
        self._failures = 0
        self._retry_at = 0.0
        self._leave_until = 0.0

    # -- what the application wants ----------------------------------------------------------------------------

    def want(self, topics: Iterable[str], now: float) -> list[Effect]:
        """Be a member, for these topics."""
        wanted = sorted(topics)
        if self.state == State.FENCED:
            return []
        if self.state in (State.OUT, State.LEAVING):
            self.topics = wanted
            self._begin_anew()
            self._retry_at = min(self._retry_at, now)
        elif wanted != self.topics:
            self.topics, self._told, self._news = wanted, False, True
        return self._pump(now)

    def let_go(self, partitions: Iterable[Owned], now: float) -> list[Effect]:
        """What was to be stopped is no longer held."""
        for partition in partitions:
            if partition in self.revoking:
                del self.revoking[partition]
                self._news = True
        self._settle()
        return self._pump(now)

    def leave(self, now: float, until: float) -> list[Effect]:
        """Give up everything and go. A static member says nothing, for it may come back."""
        if self.state == State.FENCED:
            return [Gone()]
        self.owned.clear()
        self.revoking.clear()
        if self.state == State.OUT or self.settings.instance_id is not None or not self._known:
            return self._go()
        self.state, self._leave_until, self._news, self._retry_at = State.LEAVING, until, True, now
        return self._pump(now)

    def idle(self, now: float) -> list[Effect]:
        """The application has not polled for too long: others shall have its partitions."""
        return [*self._lose(), *self.leave(now, now + self.settings.session_s)]

    # -- what the coordinator says -----------------------------------------------------------------------------

    def reach(self, reachable: bool, now: float) -> list[Effect]:
        """A coordinator was found, or lost. What still waits at a former one is not waited for."""
        if reachable and not self.reachable and self._asked is not None:
            self._news = True
        self.reachable = reachable
        return self._pump(now)

    def answered(self, number: int, answer: GroupHeartbeatResponse, now: float) -> list[Effect]:
        asked = self._asked
        if asked is None or asked.number != number:
            return []
        self._asked, self._failures, self._retry_at = None, 0, now
        if self.state == State.LEAVING:
            return self._go()
        self.heard_at, self.generation = asked.sent_at, answer.generation
        if asked.told_topics == self.topics:
            self._told = True
        effects: list[Effect] = []
        if answer.assignment is not None:
            effects = self._take(answer)
        elif answer.revision != self.revision:
            self.revision = 0
        elif now - asked.sent_at < self.settings.wait_s / 2:
            self._retry_at = now + min(EARLY_PAUSE_S, self.settings.wait_s)
        self._settle()
        return effects + self._pump(now)

    def failed(self, number: int, error: ZmqueueError, now: float) -> list[Effect]:
        if self._asked is None or self._asked.number != number:
            return []
        self._asked = None
        self._retry_at = now + self._pause(self._failures)
        self._failures += 1
        if self.state == State.LEAVING:
            return self._go() if not error.retriable or now >= self._leave_until else self._pump(now)
        if error.retriable:
            return self._pump(now)
        lost = self._lose()
        if isinstance(error, UnknownMember):
            if self._failures == 1:
                self._retry_at = now
            self._begin_anew()
            return [*lost, *self._pump(now)]
        self.state = State.FENCED if isinstance(error, FencedInstance) else State.OUT
        return [*lost, Fail(error)]

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        if self.state == State.LEAVING and now >= self._leave_until:
            return self._go()
        if now < self.session_ends:
            return self._pump(now)
        lost = self._lose()
        self._begin_anew()
        return [*lost, *self._pump(now)]

    @property
    def session_ends(self) -> float:
        holds = self.state in (State.STABLE, State.REVOKING)
        return self.heard_at + self.settings.session_s if holds else float("inf")

    def due(self) -> float:
        """When `tick` has something to do."""
        due = self._leave_until if self.state == State.LEAVING else self.session_ends
        if self._wants_to_speak() and self._asked is None and self.reachable:
            due = min(due, self._retry_at)
        return due

    # -- within ------------------------------------------------------------------------------------------------

    def _take(self, answer: GroupHeartbeatResponse) -> list[Effect]:
        told = {
            Owned(topic.topic_id, TopicPartition(topic.name, row.partition)): Start(
                row.offset, row.leader_epoch, row.fresh
            )
            for topic in answer.assignment or []
            for row in topic.partitions
        }
        self.revision = answer.revision
        gone = [partition for partition in self.owned if partition not in told]
        new: dict[Owned, Start] = {}
        for partition, start in told.items():
            if partition in self.revoking:
                # Given back before it was let go, so nobody else had it; what is committed last is yet to come.
                del self.revoking[partition]
                new[partition] = Start(known=False)
            elif partition not in self.owned:
                new[partition] = start
        self.revoking.update(dict.fromkeys(gone))
        self.owned = dict.fromkeys(told)
        effects: list[Effect] = []
        if gone:
            effects.append(Stop(gone))
        if new:
            effects.append(Take(new))
        return effects

    def _settle(self) -> None:
        if self.state in (State.JOINING, State.STABLE, State.REVOKING) and self.revision:
            self.state = State.REVOKING if self.revoking else State.STABLE

    def _begin_anew(self) -> None:
        self.state, self.member_id, self.revision, self.generation = State.JOINING, self._new_id(), 0, -1
        self._asked, self._told, self._known, self._news = None, False, False, False

    def _lose(self) -> list[Effect]:
        lost = [*self.owned, *self.revoking]
        self.owned.clear()
        self.revoking.clear()
        return [Lose(lost)] if lost else []

    def _go(self) -> list[Effect]:
        self.state, self._asked, self._news, self.generation = State.OUT, None, False, -1
        return [Gone()]

    def _wants_to_speak(self) -> bool:
        return self.state not in (State.OUT, State.FENCED)

    def _pump(self, now: float) -> list[Effect]:
        if not self._wants_to_speak() or not self.reachable or (self._asked is not None and not self._news):
            return []
        if now < self._retry_at and not self._news:
            return []
        self._news = False
        self._number += 1
        self._known = True
        request = self._request()
        self._asked = _Asked(self._number, now, request.topics)
        timeout_s = self.settings.answer_s
        if self.state == State.LEAVING:
            timeout_s = max(0.05, min(timeout_s - self.settings.wait_s, self._leave_until - now))
        return [Send(self._number, request, timeout_s)]

    def _request(self) -> GroupHeartbeatRequest:
        settings = self.settings
        leaving = self.state == State.LEAVING
        request = GroupHeartbeatRequest(
            group=settings.group,
            member_id=self.member_id,
            revision=self.revision,
            wait_ms=0 if leaving else int(settings.wait_s * 1000),
            revoking=[PartitionEntry(topic_id, partition.partition) for topic_id, partition in self.revoking],
            leaving=leaving,
            instance_id=settings.instance_id,
            client_id=settings.client_id,
        )
        if not leaving and (self.revision == 0 or not self._told):
            request.topics = self.topics
            request.assignor = settings.assignor
            request.session_timeout_ms = int(settings.session_s * 1000)
            request.rebalance_timeout_ms = int(settings.rebalance_s * 1000)
        return request
