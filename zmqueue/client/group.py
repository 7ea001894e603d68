"""A consumer group, as the application's thread sees it: listeners, commits, and what a poll has to do first.

A poll settles, in order, what the membership has for the application. Revoked: the listener is called, then what was
handed out is committed (with auto commit), and the partitions are let go when that has come through, which the poll
does not wait for. Assigned: the listener is called, and may seek, before the first record is handed out. Lost: others
have the partitions already, so there is nothing to commit.

What earlier polls returned counts as processed when the application polls again. That is what auto commit commits:
every auto_commit_interval_ms, and whenever partitions go.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import monotonic
from typing import Any

from zmqueue.client.commits import Commit, Committer
from zmqueue.client.coordinator import ATTEMPT_S, STEP_S, Coordinator
from zmqueue.client.fetcher import Fetcher
from zmqueue.client.handout import HandOut
from zmqueue.client.member import Member, MemberSettings, Owned, State
from zmqueue.client.membership import Change, Kind, Membership, Rows
from zmqueue.client.network import log
from zmqueue.client.routing import BACKOFF_S, BACKOFF_S_MAX, Router, jittered
from zmqueue.client.slots import Reset, Slot
from zmqueue.client.starts import Starts
from zmqueue.client.subscription import PATTERN_S, matches
from zmqueue.errors import (
    CommitFailed,
    FencedInstance,
    IllegalState,
    RequestTimedOut,
    UnknownTopicOrPartition,
    ZmqueueError,
)
from zmqueue.model import GroupMetadata, OffsetAndMetadata, TopicPartition
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import PARTITIONS_MAX, CommitRow, FetchOffsetsRequest
from zmqueue.wire.messages import TEXT_MAX, PartitionEntry

# How long a poll waits for the IO thread to see that the session is over.
SESSION_S = 1.0

Offsets = Mapping[TopicPartition, Any]
CommitCallback = Callable[[dict[TopicPartition, OffsetAndMetadata], ZmqueueError | None], Any]


class ConsumerRebalanceListener:
    """Called in the thread that polls, from within poll. Override what is of interest."""

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        """These go to others once this returns: finish with them, and commit."""

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        """These came, and none of their records was handed out yet: a seek begins elsewhere."""

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        """These have gone to others already, so nothing can be committed. As if revoked, unless overridden."""
        self.on_partitions_revoked(lost)


class Group:
    def __init__(
        self,
        router: Router,
        fetcher: Fetcher,
        handout: HandOut,
        settings: MemberSettings,
        *,
        reset: Reset,
        auto_commit_s: float | None,
        timeout_s: float,
        on_commit: Callable[[dict[TopicPartition, OffsetAndMetadata]], None] | None = None,
    ) -> None:
        self.coordinator = Coordinator(router, settings.group)
        self.committer = Committer(router.network, self.coordinator, settings.group)
        self.starts = Starts(router, self.coordinator, fetcher, settings.group, timeout_s)
        member = Member(settings, partial(_new_id, settings.client_id), _pause)
        self.membership = Membership(
            router.network, self.coordinator, self.committer, fetcher, self.starts, member, reset
        )
        self._router, self._network, self._fetcher, self._handout = router, router.network, fetcher, handout
        self._auto_commit_s, self._timeout_s = auto_commit_s, timeout_s
        self._commit_at = monotonic() + auto_commit_s if auto_commit_s is not None else float("inf")
        self._on_commit = on_commit
        self._listener: Any = None
        self._names: list[str] | None = None
        self._pattern: re.Pattern[str] | None = None
        self.membership.topics = self._topics
        self.membership.rows_of = self._auto_rows
        self.membership.iterating = lambda: bool(handout.iterated)
        router.listeners.append(self.membership.follow)

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def _topics(self) -> list[str] | None:
        """The names that are wanted by now."""
        return matches(self._pattern, self._router) if self._pattern is not None else self._names

    @property
    def subscribed(self) -> bool:
        return self._names is not None or self._pattern is not None

    def subscription(self) -> set[str] | None:
        topics = self._topics()
        return set(topics) if topics is not None else None

    def subscribe(self, names: list[str] | None, pattern: str | None, listener: Any) -> None:
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._names = names
        self._listener = listener
        self.membership.listens = listener is not None
        if pattern is not None:
            self._router.watch_all()
            self._network.post(self._look_for_topics)
        self._network.post(self.membership.follow)

    def _look_for_topics(self) -> None:
        if self._pattern is not None:
            self._router.refresh()
            self._network.call_later(PATTERN_S, self._look_for_topics)

    # -- in a poll ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        with self._fetcher.changed:
            self.membership.inside = True

    def exit(self) -> None:
        with self._fetcher.changed:
            self.membership.inside = False
            self.membership.polled_at = monotonic()

    def at_rest(self) -> bool:
        """Whether an iteration can go on with records that it has: nothing is to be settled. Asked for every record."""
        membership = self.membership
        membership.polled_at = now = monotonic()
        return (
            now < self._commit_at
            and now < membership.session_ends
            and not membership.changes
            and membership.error is None
        )

    @property
    def has_news(self) -> bool:
        return bool(self.membership.changes) or self.membership.error is not None

    def settle(self) -> None:
        """Let the application hear of what has changed. Raises what its listener raises, or why it cannot be member."""
        membership = self.membership
        if monotonic() >= membership.session_ends:
            self._network.post(membership.notice)
            self._fetcher.wait(lambda: monotonic() < membership.session_ends, SESSION_S)
        while True:
            with self._fetcher.changed:
                if not membership.changes:
                    break
                change = membership.changes.popleft()
                for slot in change.slots:
                    slot.announced = change.kind == Kind.ASSIGNED
            self._tell(change)
        with self._fetcher.changed:
            error = membership.error
            if error is not None and not isinstance(error, FencedInstance):
                membership.error = None
        if error is not None:
            raise type(error)(f"group {membership.member.settings.group}: {error}")
        if membership.out and self.subscribed:
            self._network.post(membership.join)
        now = monotonic()
        if now >= self._commit_at:
            self._auto_commit(now)

    def _tell(self, change: Change) -> None:
        partitions = sorted(slot.partition for slot in change.slots)
        listener = self._listener
        if change.kind == Kind.ASSIGNED:
            if listener is not None:
                listener.on_partitions_assigned(partitions)
        elif change.kind == Kind.LOST:
            self._handout.drop_iterated(set(partitions))
            if listener is not None:
                getattr(listener, "on_partitions_lost", listener.on_partitions_revoked)(partitions)
        else:
            life = self.membership.life
            try:
                if listener is not None:
                    listener.on_partitions_revoked(partitions)
            finally:
                rows = self._auto_rows(change.slots)
                self._handout.drop_iterated(set(partitions))
                self._network.post(partial(self.membership.release, change.slots, rows, life))

    # -- commits -----------------------------------------------------------------------------------------------------

    def commit(self, offsets: Offsets | None, timeout_s: float | None) -> None:
        """Wait until the offsets (by default: all positions) are committed."""
        rows, life = self._asked_rows(offsets)
        self._await_commit(rows, life, self._timeout_s if timeout_s is None else timeout_s)

    def commit_async(self, offsets: Offsets | None, callback: CommitCallback | None) -> None:
        rows, life = self._asked_rows(offsets)

        def done(error: ZmqueueError | None) -> None:
            if callback is None:
                _log_failure(error)
                return
            try:
                callback(_told(rows), error)
            except Exception:
                log.exception("a callback of commit_async failed")

        self._start_commit(rows, life, self._timeout_s, done)

    def _await_commit(self, rows: Rows, life: str, timeout_s: float) -> None:
        if self._network.in_io_thread:
            raise IllegalState("a commit that is waited for would wait for its own thread: use commit_async")
        ended = threading.Event()
        errors: list[ZmqueueError | None] = []

        def done(error: ZmqueueError | None) -> None:
            errors.append(error)
            ended.set()

        self._start_commit(rows, life, timeout_s, done)
        deadline = monotonic() + timeout_s
        # It ends by itself in time; the steps let a client that was closed meanwhile be noticed.
        while not ended.wait(STEP_S):
            self._network.check()
            if monotonic() > deadline + ATTEMPT_S:
                raise RequestTimedOut("the group's coordinator did not take the offsets in time")
        if errors[0] is not None:
            raise errors[0].with_traceback(None)

    def _start_commit(self, rows: Rows, life: str, timeout_s: float, done: Callable[[Any], None]) -> None:
        commit = Commit(dict(rows), life, monotonic() + timeout_s, partial(self._ended, rows, done))
        self._network.post(partial(self.committer.add, commit))

    def _asked_rows(self, offsets: Offsets | None) -> tuple[Rows, str]:
        """What an application wants committed, and the life of the member that held it."""
        self._network.check()
        named = None if offsets is None else {self._owned(partition): told for partition, told in offsets.items()}
        with self._fetcher.changed:
            life = self.membership.life
            rows = self._rows(self._handout.positions()) if named is None else {k: _row(k, v) for k, v in named.items()}
        if len(rows) > PARTITIONS_MAX:
            raise IllegalState(f"{len(rows)} partitions: at most {PARTITIONS_MAX} are committed at once")
        if self.subscribed and not life:
            raise CommitFailed("this consumer is not a member of its group at the moment: poll to join")
        return rows, life

    def _ended(self, rows: Rows, done: Callable[[ZmqueueError | None], None], error: ZmqueueError | None) -> None:
        if error is None:
            with self._fetcher.changed:
                for owned, row in rows.items():
                    slot = self._fetcher.slots.get(owned.partition)
                    if slot is not None and slot.topic_id in (None, owned.topic_id):
                        slot.committed = row.offset
            if self._on_commit is not None and rows:
                self._on_commit(_told(rows))
        done(error)

    def _auto_commit(self, now: float) -> None:
        assert self._auto_commit_s is not None
        self._commit_at = now + self._auto_commit_s
        with self._fetcher.changed:
            rows, life = self._auto_rows(self._fetcher.slots.values()), self.membership.life
        if rows and (life or not self.subscribed):
            self._start_commit(rows, life, self._timeout_s, _log_failure)

    def _auto_rows(self, slots: Iterable[Slot]) -> Rows:
        """What auto commit commits of these."""
        if self._auto_commit_s is None:
            return {}
        wanted = set(map(id, slots))
        return self._rows([at for at in self._handout.positions() if id(at[0]) in wanted and at[1] != at[0].committed])

    def _rows(self, positions: list[tuple[Slot, int, int]]) -> Rows:
        rows: Rows = {}
        for slot, offset, epoch in positions:
            view = self._router.metadata.topics.get(slot.partition.topic)
            topic_id = slot.topic_id or (view.topic_id if view is not None else None)
            if topic_id is not None:
                owned = Owned(topic_id, slot.partition)
                rows[owned] = CommitRow(topic_id, slot.partition.partition, offset, epoch)
        return rows

    def _owned(self, partition: TopicPartition) -> Owned:
        """The partition of this name that is assigned, or that there is."""
        partition = TopicPartition(*partition)
        slot = self._fetcher.slots.get(partition)
        if slot is not None and slot.topic_id is not None:
            return Owned(slot.topic_id, partition)
        self._router.watch([partition.topic])
        view = self._router.wait_for(lambda: self._router.metadata.topics.get(partition.topic), self._timeout_s)
        if view is None or partition.partition not in view.partitions:
            raise UnknownTopicOrPartition(f"no partition {partition.topic}-{partition.partition}")
        return Owned(view.topic_id, partition)

    def committed(self, partition: TopicPartition, timeout_s: float | None) -> OffsetAndMetadata | None:
        self._network.check()
        owned = self._owned(partition)
        entry = PartitionEntry(owned.topic_id, owned.partition.partition)
        request = FetchOffsetsRequest(self.membership.member.settings.group, [entry])
        answer = self.coordinator.call(
            Operation.FETCH_OFFSETS, request, self._timeout_s if timeout_s is None else timeout_s
        )
        for row in answer.message.rows:
            if (row.topic_id, row.partition) == (entry.topic_id, entry.partition):
                return OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch)
        return None

    def metadata(self) -> GroupMetadata:
        member = self.membership.member
        with self._fetcher.changed:
            life = self.membership.life
        return GroupMetadata(
            member.settings.group, member.generation if life else -1, life, member.settings.instance_id
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self, *, autocommit: bool, timeout_s: float, tell: bool = True) -> None:
        """Commit what is processed, and go; for at most so long. `tell` the listener."""
        deadline = monotonic() + timeout_s
        membership = self.membership
        with self._fetcher.changed:
            slots = [slot for slot in self._fetcher.slots.values() if slot.announced] if self.subscribed else []
        try:
            if slots and tell and self._listener is not None:
                self._listener.on_partitions_revoked(sorted(slot.partition for slot in slots))
        finally:
            self._last_commit(autocommit, deadline)
            self._names = self._pattern = None
            if membership.member.state not in (State.OUT, State.FENCED):
                gone = threading.Event()
                self._network.post(partial(membership.leave, gone, max(deadline, monotonic() + 0.1)))
                gone.wait(max(0.1, deadline - monotonic()))

    def _last_commit(self, autocommit: bool, deadline: float) -> None:
        """Also wait for what commit_async has begun."""
        with self._fetcher.changed:
            rows = self._auto_rows(self._fetcher.slots.values()) if autocommit else {}
            life = self.membership.life
        if life or not self.subscribed:
            try:
                self._await_commit(rows, life, max(0.1, deadline - monotonic()))
            except ZmqueueError as error:
                log.warning("offsets were not committed at the end: %s", error)


def _told(rows: Rows) -> dict[TopicPartition, OffsetAndMetadata]:
    return {key.partition: OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch) for key, row in rows.items()}


def _row(owned: Owned, told: Any) -> CommitRow:
    """An offset, or kafka-python's OffsetAndMetadata, or ours."""
    offset, metadata, epoch = told, "", -1
    if hasattr(told, "offset"):
        offset, metadata, epoch = told.offset, told.metadata or "", getattr(told, "leader_epoch", -1)
    if not isinstance(offset, int) or offset < 0 or not isinstance(metadata, str) or len(metadata) > TEXT_MAX:
        raise IllegalState(f"{owned.partition}: {told!r:.80} is not an offset that can be committed")
    epoch = epoch if isinstance(epoch, int) else -1
    return CommitRow(owned.topic_id, owned.partition.partition, offset, epoch, metadata)


def _new_id(client_id: str) -> str:
    return f"{client_id[:200]}-{uuid.uuid4().hex}"


def _pause(failures: int) -> float:
    return jittered(BACKOFF_S, failures, BACKOFF_S_MAX)


def _log_failure(error: ZmqueueError | None) -> None:
    if error is not None:
        log.warning("offsets were not committed: %s", error)
