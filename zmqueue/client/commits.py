"""Offsets on their way to the group's coordinator: one request at a time, in the order of the calls.

What is asked for while a request is under way gathers, and leaves as one request: a later row for a partition takes the
place of an earlier one. Each request has a number, larger than any before, so an older one that arrives late changes
nothing. A request that failed for a reason that may pass is sent again, in front of what came meanwhile, until the
deadline of each call.

A commit belongs to the life (`member_id`) of the member that handed the records out, and to partitions that it has not
let go: whatever waits when that ends is refused here, and not taken for the commit of the next owner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial

from zmqueue.client.coordinator import ATTEMPT_S, Coordinator
from zmqueue.client.member import Owned
from zmqueue.client.network import Answer, Network, Timer
from zmqueue.client.routing import BACKOFF_S, BACKOFF_S_MAX, jittered
from zmqueue.errors import (
    CommitFailed,
    FencedInstance,
    IllegalGeneration,
    NetworkError,
    NonEmptyGroup,
    RequestTimedOut,
    UnknownMember,
    ZmqueueError,
    from_code,
)
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import PARTITIONS_MAX, CommitOffsetsRequest, CommitRow

_OWNERSHIP = (IllegalGeneration, UnknownMember, FencedInstance, NonEmptyGroup)
_NOT_OURS = "the group has given these partitions to others since they were read: {}"

Done = Callable[[ZmqueueError | None], None]


class Commit:
    """One call. `done` hears what became of it, once."""

    __slots__ = ("deadline", "done", "last", "member_id", "rows")

    def __init__(self, rows: dict[Owned, CommitRow], member_id: str, deadline: float, done: Done) -> None:
        self.rows, self.member_id, self.deadline, self.done = rows, member_id, deadline, done
        self.last: ZmqueueError | None = None


Ended = list[tuple[Commit, ZmqueueError | None]]


class CommitQueue:
    """Pure: which rows go out next, and which calls have ended by an answer."""

    def __init__(self) -> None:
        self.number = 0
        self.again = False  # whether something of the last request is to be sent again
        self.under_way: list[Commit] = []
        self._order: list[Owned] = []
        self._waiting: deque[Commit] = deque()

    def add(self, commit: Commit) -> None:
        self._waiting.append(commit)

    def __len__(self) -> int:
        return len(self._waiting) + len(self.under_way)

    @property
    def due(self) -> float:
        return min((commit.deadline for commit in self._waiting), default=float("inf"))

    @property
    def has_rows(self) -> bool:
        return any(commit.rows for commit in self._waiting)

    def take(self) -> list[CommitRow]:
        """The rows of the next request. Those without any are taken along."""
        assert not self.under_way
        merged: dict[Owned, CommitRow] = {}
        while self._waiting and self._fits(merged, self._waiting[0]):
            commit = self._waiting.popleft()
            merged.update(commit.rows)
            self.under_way.append(commit)
        self._order = list(merged)
        if merged:
            self.number += 1
        return list(merged.values())

    def _fits(self, merged: dict[Owned, CommitRow], commit: Commit) -> bool:
        same = not self.under_way or self.under_way[0].member_id == commit.member_id
        return same and (not merged or len(merged.keys() | commit.rows.keys()) <= PARTITIONS_MAX)

    def answered(self, codes: list[int]) -> Ended:
        told = {
            partition: from_code(code) if code else None for partition, code in zip(self._order, codes, strict=True)
        }
        ended: Ended = []
        again: list[Commit] = []
        for commit in self.under_way:
            errors = {partition: error for partition in commit.rows if (error := told.get(partition)) is not None}
            final = next((error for error in errors.values() if not error.retriable), None)
            if final is not None or not errors:
                ended.append((commit, None if final is None else _explained(final, errors)))
            else:
                commit.rows = {partition: row for partition, row in commit.rows.items() if partition in errors}
                commit.last = next(iter(errors.values()))
                again.append(commit)
        self._put_back(again)
        return ended

    def failed(self, error: ZmqueueError) -> Ended:
        ended: Ended = []
        again: list[Commit] = []
        for commit in self.under_way:
            commit.last = error
            if error.retriable:
                again.append(commit)
            else:
                ended.append((commit, _explained(error, commit.rows)))
        self._put_back(again)
        return ended

    def _put_back(self, commits: list[Commit]) -> None:
        self.under_way, self.again = [], bool(commits)
        self._waiting.extendleft(reversed(commits))

    def expire(self, now: float) -> Ended:
        late = [commit for commit in self._waiting if commit.deadline <= now]
        self._waiting = deque(commit for commit in self._waiting if commit.deadline > now)
        timed_out = RequestTimedOut("the group's coordinator did not take the offsets in time")
        return [(commit, commit.last or timed_out) for commit in late]

    def refuse(self, partitions: Collection[Owned]) -> Ended:
        """What waits for partitions that are no longer held."""
        refused = [commit for commit in self._waiting if not commit.rows.keys().isdisjoint(partitions)]
        self._waiting = deque(commit for commit in self._waiting if commit.rows.keys().isdisjoint(partitions))
        return [(commit, CommitFailed(_NOT_OURS.format(_names(partitions)))) for commit in refused]


class Committer:
    """In the IO thread: what the queue decides, done."""

    def __init__(self, network: Network, coordinator: Coordinator, group: str) -> None:
        self.commits = self.commits_failed = 0
        self.identity: Callable[[], tuple[str, int]] = lambda: ("", -1)  # member id and generation, by now
        self._network, self._coordinator, self._group = network, coordinator, group
        self._queue = CommitQueue()
        self._retry_at = 0.0
        self._failures = 0
        self._timer: Timer | None = None
        coordinator.listeners.append(self.pump)

    def add(self, commit: Commit) -> None:
        """One without rows ends when those before it have."""
        self._queue.add(commit)
        self.pump()

    def refuse(self, partitions: Collection[Owned]) -> None:
        self._end(self._queue.refuse(partitions))

    def pump(self) -> None:
        now = time.monotonic()
        self._end(self._queue.expire(now))
        while not self._queue.under_way and len(self._queue) and self._may_send(now):
            self._send(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue.under_way and len(self._queue):
            due = min(self._queue.due, self._retry_at if self._retry_at > now else float("inf"))
            self._timer = self._network.call_later(max(0.0, due - now), self.pump)

    def _may_send(self, now: float) -> bool:
        return not self._queue.has_rows or (now >= self._retry_at and self._coordinator.ready())

    def _send(self, now: float) -> None:
        rows = self._queue.take()
        commits = self._queue.under_way
        if not rows:
            self._end(self._queue.answered([]))
            return
        member_id, generation = self.identity()
        if commits[0].member_id != member_id:
            self._end(self._queue.failed(UnknownMember()))
            return
        number = self._queue.number if member_id else 0
        request = CommitOffsetsRequest(self._group, rows, member_id, generation, number)
        left_s = min(commit.deadline for commit in commits) - now
        timeout_s = min(ATTEMPT_S, max(0.05, left_s))
        self._coordinator.send(Operation.COMMIT_OFFSETS, request, timeout_s, partial(self._on_answer, len(rows)))

    def _on_answer(self, count: int, result: Answer | ZmqueueError) -> None:
        self.commits += 1
        if isinstance(result, Answer) and len(result.message.results) != count:
            result = NetworkError("an answer with a wrong number of results")
        if isinstance(result, ZmqueueError):
            ended = self._queue.failed(result)
        else:
            ended = self._queue.answered(result.message.results)
        if self._queue.again:
            self._retry_at = time.monotonic() + jittered(BACKOFF_S, self._failures, BACKOFF_S_MAX)
            self._failures += 1
        else:
            self._failures = 0
        self._end(ended)
        self.pump()

    def _end(self, ended: Ended) -> None:
        for commit, error in ended:
            if error is not None:
                self.commits_failed += 1
            commit.done(error)


def _explained(error: ZmqueueError, partitions: Iterable[Owned]) -> ZmqueueError:
    """Ownership is one error for applications, whatever way it was lost."""
    if isinstance(error, _OWNERSHIP):
        return CommitFailed(f"{_NOT_OURS.format(_names(partitions))} ({error.name})")
    return error


def _names(partitions: Iterable[Owned]) -> str:
    names = [f"{partition.topic}-{partition.partition}" for _, partition in partitions]
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
