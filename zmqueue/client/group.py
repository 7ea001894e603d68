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
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from zmqueue.client.commits import Commit, Committer
from zmqueue.client.coordinator import Coordinator
from zmqueue.client.fetcher import Fetcher
from zmqueue.client.handout import HandOut
from zmqueue.client.member import Owned, State
from zmqueue.client.membership import Change, Kind, Membership, Rows
from zmqueue.client.network import log
from zmqueue.client.routing import Router
from zmqueue.client.slots import Slot
from zmqueue.client.starts import Starts
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

# How often topics are looked at anew for a pattern.
PATTERN_S = 10.0

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
        membership: Membership,
        committer: Committer,
        coordinator: Coordinator,
        starts: Starts,
        *,
        auto_commit_s: float | None,
        timeout_s: float,
    ) -> None:
        self._router, self._fetcher, self._handout = router, fetcher, handout
        self._membership, self._committer, self._coordinator = membership, committer, coordinator
        self.starts = starts
        self._network = router.network
        self._auto_commit_s, self._timeout_s = auto_commit_s, timeout_s
        self._commit_at = time.monotonic() + (auto_commit_s or 0.0)
        self._listener: Any = None
        self._names: list[str] | None = None
        self._pattern: re.Pattern[str] | None = None
        membership.topics = partial(_topics, router, self.wanted)
        membership.rows_of = self._auto_rows
        membership.iterating = lambda: bool(handout.iterated)

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def wanted(self) -> tuple[list[str] | None, re.Pattern[str] | None]:
        return self._names, self._pattern

    @property
    def subscribed(self) -> bool:
        return self._names is not None or self._pattern is not None

    def subscription(self) -> set[str] | None:
        topics = self._membership.topics()
        return set(topics) if topics is not None else None

    def subscribe(self, names: list[str] | None, pattern: str | None, listener: Any) -> None:
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._names = names
        self._listener = listener
        self._membership.listens = listener is not None
        if pattern is not None:
            self._router.watch_all()
            self._network.post(self._look_for_topics)
        self._network.post(self._membership.follow)

    def _look_for_topics(self) -> None:
        if self._pattern is not None:
            self._router.refresh()
            self._network.call_later(PATTERN_S, self._look_for_topics)

    # -- in a poll ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        with self._fetcher.changed:
            self._membership.inside = True

    def exit(self) -> None:
        with self._fetcher.changed:
            self._membership.inside = False
            self._membership.polled_at = time.monotonic()

    def touch(self) -> None:
        """An iteration goes on, with records that it was given."""
        self._membership.polled_at = time.monotonic()

    @property
    def has_news(self) -> bool:
        return bool(self._membership.changes) or self._membership.error is not None

    def settle(self) -> None:
        """Let the application hear of what has changed. Raises what its listener raises, or why it cannot be member."""
        membership = self._membership
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
        now = time.monotonic()
        if self._auto_commit_s is not None and now >= self._commit_at:
            self._commit_at = now + self._auto_commit_s
            self._auto_commit()

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
            life = self._membership.life
            try:
                if listener is not None:
                    listener.on_partitions_revoked(partitions)
            finally:
                rows = self._auto_rows(change.slots)
                self._handout.drop_iterated(set(partitions))
                self._network.post(partial(self._membership.release, change.slots, rows, life))

    # -- commits -----------------------------------------------------------------------------------------------------

    def commit(self, offsets: Offsets | None, timeout_s: float | None) -> None:
        """Wait until the offsets (by default: all positions) are committed."""
        if self._network.in_io_thread:
            raise IllegalState("a commit that is waited for would wait for its own thread: use commit_async")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        ended = threading.Event()
        errors: list[ZmqueueError | None] = []

        def done(error: ZmqueueError | None) -> None:
            errors.append(error)
            ended.set()

        deadline = time.monotonic() + timeout_s
        self._start_commit(offsets, deadline, done)
        while not ended.wait(0.5):
            self._network.check()
            if time.monotonic() > deadline + 5.0:
                raise RequestTimedOut("the group's coordinator did not take the offsets in time")
        if errors[0] is not None:
            raise errors[0].with_traceback(None)

    def commit_async(self, offsets: Offsets | None, callback: CommitCallback | None) -> None:
        rows: Rows = {}

        def done(error: ZmqueueError | None) -> None:
            if callback is None:
                if error is not None:
                    log.warning("offsets were not committed: %s", error)
                return
            told = {key.partition: OffsetAndMetadata(r.offset, r.metadata, r.leader_epoch) for key, r in rows.items()}
            try:
                callback(told, error)
            except Exception:
                log.exception("a callback of commit_async failed")

        rows.update(self._start_commit(offsets, time.monotonic() + self._timeout_s, done))

    def _start_commit(
        self, offsets: Offsets | None, deadline: float, done: Callable[[ZmqueueError | None], None]
    ) -> Rows:
        self._network.check()
        named = None if offsets is None else {self._owned(partition): told for partition, told in offsets.items()}
        with self._fetcher.changed:
            life = self._membership.life
            rows = self._rows(self._handout.positions()) if named is None else {k: _row(k, v) for k, v in named.items()}
        if len(rows) > PARTITIONS_MAX:
            raise IllegalState(f"{len(rows)} partitions: at most {PARTITIONS_MAX} are committed at once")
        if self.subscribed and not life:
            raise CommitFailed("this consumer is not a member of its group at the moment: poll to join")
        self._network.post(partial(self._committer.add, Commit(rows, life, deadline, partial(self._ended, rows, done))))
        return rows

    def _ended(self, rows: Rows, done: Callable[[ZmqueueError | None], None], error: ZmqueueError | None) -> None:
        if error is None:
            with self._fetcher.changed:
                for owned, row in rows.items():
                    slot = self._fetcher.slots.get(owned.partition)
                    if slot is not None and slot.topic_id in (None, owned.topic_id):
                        slot.committed = row.offset
        done(error)

    def _auto_commit(self) -> None:
        with self._fetcher.changed:
            rows, life = self._auto_rows(self._fetcher.slots.values()), self._membership.life
        if rows and (life or not self.subscribed):
            done = partial(self._ended, rows, _log_failure)
            commit = Commit(rows, life, time.monotonic() + self._timeout_s, done)
            self._network.post(partial(self._committer.add, commit))

    def _auto_rows(self, slots: Iterable[Slot]) -> Rows:
        """What auto commit commits of these."""
        if self._auto_commit_s is None:
            return {}
        wanted = set(map(id, slots))
        return self._rows(
            [at for at in self._handout.positions() if id(at[0]) in wanted and at[1] != at[0].committed]
        )

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
        request = FetchOffsetsRequest(self._membership.member.settings.group, [entry])
        answer = self._coordinator.call(
            Operation.FETCH_OFFSETS, request, self._timeout_s if timeout_s is None else timeout_s
        )
        for row in answer.message.rows:
            if (row.topic_id, row.partition) == (entry.topic_id, entry.partition):
                return OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch)
        return None

    def metadata(self) -> GroupMetadata:
        member = self._membership.member
        with self._fetcher.changed:
            life = self._membership.life
        return GroupMetadata(
            member.settings.group, member.generation if life else -1, life, member.settings.instance_id
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self, *, autocommit: bool, timeout_s: float, tell: bool = True) -> None:
        """Commit what is processed, and go; for at most so long. `tell` the listener."""
        deadline = time.monotonic() + timeout_s
        membership = self._membership
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
                self._network.post(partial(membership.leave, gone, max(deadline, time.monotonic() + 0.1)))
                gone.wait(max(0.1, deadline - time.monotonic()))

    def _last_commit(self, autocommit: bool, deadline: float) -> None:
        """Also wait for what commit_async has begun."""
        rows: Offsets | None = {}
        if autocommit and self._auto_commit_s is not None:
            rows = None
        try:
            self._network.check()
            if self._membership.life or not self.subscribed:
                self.commit(rows, max(0.1, deadline - time.monotonic()))
        except ZmqueueError as error:
            log.warning("offsets were not committed at the end: %s", error)


def _topics(router: Router, wanted: Callable[[], tuple[list[str] | None, re.Pattern[str] | None]]) -> list[str] | None:
    """The names that are wanted by now. A pattern means whole names, as kafka-python's, and never internal topics."""
    names, pattern = wanted()
    if pattern is None:
        return names
    return sorted(name for name in list(router.metadata.topics) if pattern.match(name) and not name.startswith("__"))


def _row(owned: Owned, told: Any) -> CommitRow:
    """An offset, or kafka-python's OffsetAndMetadata, or ours."""
    offset, metadata, epoch = told, "", -1
    if hasattr(told, "offset"):
        offset, metadata, epoch = told.offset, told.metadata or "", getattr(told, "leader_epoch", -1)
    if not isinstance(offset, int) or offset < 0 or not isinstance(metadata, str) or len(metadata) > TEXT_MAX:
        raise IllegalState(f"{owned.partition}: {told!r:.80} is not an offset that can be committed")
    epoch = epoch if isinstance(epoch, int) else -1
    return CommitRow(owned.topic_id, owned.partition.partition, offset, epoch, metadata)


def _log_failure(error: ZmqueueError | None) -> None:
    if error is not None:
        log.warning("auto commit failed: %s", error)
