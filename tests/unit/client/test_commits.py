"""Which offsets go out next, and which calls have ended, without time or sockets."""

from __future__ import annotations

from typing import Any

import pytest

from zmqueue import errors
from zmqueue.client.commits import Commit, CommitQueue
from zmqueue.client.member import Owned
from zmqueue.model import TopicPartition
from zmqueue.wire.group_messages import PARTITIONS_MAX, CommitRow

TOPIC = bytes(16)
REFUSED, LATER = errors.IllegalGeneration.code, errors.CoordinatorNotAvailable.code


def commit(deadline: float = 10.0, member: str = "m", **offsets: int) -> Commit:
    """`commit(p3=7)`: offset 7 for partition 3."""
    rows = {}
    for name, offset in offsets.items():
        number = int(name[1:])
        rows[Owned(TOPIC, TopicPartition("t", number))] = CommitRow(TOPIC, number, offset)
    return Commit(rows, member, deadline, lambda error: None)


def queue_of(*commits: Commit) -> CommitQueue:
    queue = CommitQueue()
    for each in commits:
        queue.add(each)
    return queue


def offsets(rows: list[CommitRow]) -> dict[int, int]:
    return {row.partition: row.offset for row in rows}


def outcomes(ended: list[tuple[Commit, Any]]) -> list[tuple[Commit, type[errors.ZmqueueError] | None]]:
    return [(each, None if error is None else type(error)) for each, error in ended]


def test_what_waits_leaves_together_and_the_latest_offset_counts() -> None:
    first, second = commit(p0=1, p1=1), commit(p1=2, p2=2)
    queue = queue_of(first, second)
    assert offsets(queue.take()) == {0: 1, 1: 2, 2: 2}
    assert outcomes(queue.answered([0, 0, 0])) == [(first, None), (second, None)]
    assert len(queue) == 0


def test_numbers_grow_with_every_request() -> None:
    queue = queue_of(commit(p0=1))
    queue.take()
    assert queue.number == 1
    queue.failed(errors.NetworkError())
    queue.take()
    assert queue.number == 2


def test_a_request_that_failed_goes_before_what_came_meanwhile() -> None:
    first, second = commit(p0=5), commit(p0=3)
    queue = queue_of(first)
    queue.take()
    queue.add(second)
    assert queue.failed(errors.NetworkError()) == []
    assert queue.again
    assert offsets(queue.take()) == {0: 3}, "the later call has the last word, though its offset is lower"


def test_each_call_hears_of_its_own_rows() -> None:
    first, second, third = commit(p0=1), commit(p1=1), commit(p2=1)
    queue = queue_of(first, second, third)
    queue.take()
    assert outcomes(queue.answered([0, REFUSED, LATER])) == [(first, None), (second, errors.CommitFailed)]
    assert offsets(queue.take()) == {2: 1}
    assert outcomes(queue.answered([0])) == [(third, None)]


def test_rows_that_were_taken_are_not_sent_again() -> None:
    queue = queue_of(commit(p0=1, p1=1))
    queue.take()
    assert queue.answered([0, LATER]) == []
    assert offsets(queue.take()) == {1: 1}


@pytest.mark.parametrize("error", [errors.UnknownMember, errors.FencedInstance, errors.NonEmptyGroup])
def test_lost_ownership_is_one_error_whatever_way_it_was_lost(error: type[errors.ZmqueueError]) -> None:
    only = commit(p0=1)
    queue = queue_of(only)
    queue.take()
    assert outcomes(queue.failed(error())) == [(only, errors.CommitFailed)]


def test_other_refusals_keep_their_names() -> None:
    only = commit(p0=1)
    queue = queue_of(only)
    queue.take()
    assert outcomes(queue.answered([errors.OffsetMetadataTooLarge.code])) == [(only, errors.OffsetMetadataTooLarge)]


def test_what_is_late_ends_with_the_last_error_there_was() -> None:
    early, late = commit(deadline=1.0, p0=1), commit(deadline=9.0, p1=1)
    queue = queue_of(early, late)
    queue.take()
    queue.failed(errors.CoordinatorLoading())
    assert outcomes(queue.expire(2.0)) == [(early, errors.CoordinatorLoading)]
    assert offsets(queue.take()) == {1: 1}
    waiting = commit(deadline=3.0, p2=1)
    queue.add(waiting)
    assert outcomes(queue.expire(4.0)) == [(waiting, errors.RequestTimedOut)]


def test_what_waits_for_partitions_that_went_is_refused() -> None:
    gone, stays = commit(p0=1, p1=1), commit(p2=1)
    queue = queue_of(gone, stays)
    assert outcomes(queue.refuse(gone.rows.keys())) == [(gone, errors.CommitFailed)]
    assert offsets(queue.take()) == {2: 1}


def test_two_lives_never_share_a_request() -> None:
    queue = queue_of(commit(member="m-1", p0=1), commit(member="m-2", p1=1))
    assert offsets(queue.take()) == {0: 1}
    queue.answered([0])
    assert offsets(queue.take()) == {1: 1}


def test_a_request_has_no_more_rows_than_one_may_have() -> None:
    half = PARTITIONS_MAX // 2 + 1
    first = commit(**{f"p{number}": 1 for number in range(half)})
    second = commit(**{f"p{number}": 2 for number in range(half, 2 * half)})
    queue = queue_of(first, second)
    assert len(queue.take()) == half


def test_one_without_rows_ends_after_those_before_it() -> None:
    first, flush = commit(p0=1), commit()
    queue = queue_of(first, flush)
    assert offsets(queue.take()) == {0: 1}
    assert outcomes(queue.answered([0])) == [(first, None), (flush, None)]
