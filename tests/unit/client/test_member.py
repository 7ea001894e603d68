"""The member's side of a group, without time or sockets, and joined with a coordinator that changes its mind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from zmqueue import errors
from zmqueue.client.member import Fail, Gone, Lose, Member, MemberSettings, Owned, Send, Start, State, Stop, Take
from zmqueue.model import TopicPartition
from zmqueue.wire.group_messages import AssignedRow, AssignedTopic, GroupHeartbeatResponse
from zmqueue.wire.messages import PartitionEntry

TOPIC = bytes(range(16))
A, B, C = (Owned(TOPIC, TopicPartition("t", number)) for number in range(3))
SESSION_S, WAIT_S = 10.0, 3.0


def make(**settings: Any) -> Member:
    ids = itertools.count(1)
    chosen = MemberSettings(group="g", session_s=SESSION_S, wait_s=WAIT_S, rebalance_s=300.0, **settings)
    return Member(chosen, lambda: f"m-{next(ids)}", lambda failures: 0.1 * 2**failures)


def told(revision: int, *partitions: Owned, offset: int = -1) -> GroupHeartbeatResponse:
    rows = [AssignedRow(owned.partition.partition, offset, 5) for owned in partitions]
    return GroupHeartbeatResponse(revision + 100, revision, [AssignedTopic(TOPIC, "t", rows)] if rows else [])


def unchanged(revision: int) -> GroupHeartbeatResponse:
    return GroupHeartbeatResponse(revision + 100, revision)


def sent(effects: list[Any]) -> Send:
    """The one heartbeat among these."""
    (found,) = [effect for effect in effects if isinstance(effect, Send)]
    return found


def others(effects: list[Any]) -> list[Any]:
    return [effect for effect in effects if not isinstance(effect, Send)]


def joined(*partitions: Owned, now: float = 0.0, **settings: Any) -> tuple[Member, Send]:
    """A member that holds these, and its next heartbeat."""
    member = make(**settings)
    member.want(["t"], now)
    join = sent(member.reach(True, now))
    return member, sent(member.answered(join.number, told(1, *partitions), now))


# -- joining -------------------------------------------------------------------------------------------------------


def test_nothing_is_said_before_a_coordinator_is_in_reach() -> None:
    member = make()
    assert member.want(["t", "s"], 0.0) == []
    request = sent(member.reach(True, 1.0)).request
    assert (request.member_id, request.revision, request.topics) == ("m-1", 0, ["s", "t"])
    assert (request.session_timeout_ms, request.rebalance_timeout_ms, request.assignor) == (10_000, 300_000, "sticky")
    assert member.state == State.JOINING


def test_what_is_assigned_is_taken_with_where_to_begin() -> None:
    member = make()
    member.want(["t"], 0.0)
    join = sent(member.reach(True, 0.0))
    effects = member.answered(join.number, told(1, A, offset=7), 0.5)
    assert others(effects) == [Take({A: Start(7, 5)})]
    assert (member.state, member.generation) == (State.STABLE, 101)
    beat = sent(effects).request
    assert (beat.revision, beat.topics, beat.revoking) == (1, None, [])


def test_a_join_without_an_answer_is_repeated_under_the_same_id() -> None:
    member = make()
    member.want(["t"], 0.0)
    join = sent(member.reach(True, 0.0))
    assert member.failed(join.number, errors.RequestTimedOut(), 5.0) == []
    assert member.due() == pytest.approx(5.1)
    assert member.tick(5.05) == []
    again = sent(member.tick(5.1)).request
    assert (again.member_id, again.revision) == ("m-1", 0)


def test_pauses_grow_with_failures_in_a_row() -> None:
    member, beat = joined(A)
    now = 0.0
    for pause in (0.1, 0.2, 0.4):
        assert member.failed(beat.number, errors.CoordinatorLoading(), now) == []
        assert member.due() == pytest.approx(now + pause)
        now += pause
        beat = sent(member.tick(now))


@pytest.mark.parametrize("error", [errors.GroupFull, errors.UnsupportedAssignor, errors.InvalidSessionTimeout])
def test_a_refusal_is_for_the_application_and_another_try_is_another_member(error: type[errors.ZmqueueError]) -> None:
    member = make()
    member.want(["t"], 0.0)
    join = sent(member.reach(True, 0.0))
    refusal = error()
    assert member.failed(join.number, refusal, 1.0) == [Fail(refusal)]
    assert member.state == State.OUT
    member.want(["t"], 2.0)
    assert member.member_id == "m-2"


# -- staying -------------------------------------------------------------------------------------------------------


def test_an_answered_heartbeat_is_followed_by_the_next() -> None:
    member, beat = joined(A)
    following = sent(member.answered(beat.number, unchanged(1), WAIT_S))
    assert following.number != beat.number
    assert following.request.wait_ms == 3_000


def test_one_heartbeat_at_a_time() -> None:
    member, _ = joined(A)
    assert member.tick(1.0) == []
    assert member.want(["t"], 1.0) == []
    assert member.reach(True, 1.0) == []


def test_a_coordinator_that_answers_at_once_with_nothing_is_not_asked_at_once() -> None:
    member, beat = joined(A)
    assert member.answered(beat.number, unchanged(1), 0.01) == []
    assert 0.01 < member.due() <= 0.2


def test_other_topics_are_told_at_once_and_until_they_were_heard() -> None:
    member, beat = joined(A)
    news = sent(member.want(["t", "u"], 1.0))
    assert news.request.topics == ["t", "u"]
    assert member.answered(beat.number, unchanged(1), 1.1) == [], "the older heartbeat counts no more"
    member.failed(news.number, errors.NetworkError(), 1.2)
    again = sent(member.tick(2.0))
    assert again.request.topics == ["t", "u"]
    assert sent(member.answered(again.number, unchanged(1), 5.0)).request.topics is None


def test_what_was_left_at_a_former_coordinator_is_asked_of_the_new_one() -> None:
    member, beat = joined(A)
    assert member.reach(False, 1.0) == []
    moved = sent(member.reach(True, 1.5))
    assert moved.request.revision == 1
    assert member.failed(beat.number, errors.NotCoordinator(), 1.6) == []


def test_a_coordinator_that_knows_another_revision_is_asked_for_everything() -> None:
    member, beat = joined(A)
    again = sent(member.answered(beat.number, unchanged(7), 1.0))
    assert (again.request.revision, again.request.topics) == (0, ["t"])
    assert others(member.answered(again.number, told(8, A), 1.1)) == []
    assert member.revision == 8


# -- letting go ----------------------------------------------------------------------------------------------------


def test_what_is_not_in_the_assignment_stops_and_is_held_until_it_is_let_go() -> None:
    member, beat = joined(A, B)
    effects = member.answered(beat.number, told(2, A), 1.0)
    assert others(effects) == [Stop([B])]
    assert member.state == State.REVOKING
    beat = sent(effects)
    assert (beat.request.revision, beat.request.revoking) == (2, [PartitionEntry(TOPIC, 1)])
    free = sent(member.let_go([B], 1.5))
    assert (free.request.revision, free.request.revoking) == (2, [])
    assert member.state == State.STABLE


def test_a_partition_given_back_before_it_was_let_go_begins_at_what_was_committed_since() -> None:
    member, beat = joined(A, B)
    beat = sent(member.answered(beat.number, told(2, A), 1.0))
    effects = member.answered(beat.number, told(3, A, B, offset=4), 1.2)
    assert others(effects) == [Take({B: Start(known=False)})]
    assert sent(effects).request.revoking == []
    assert member.let_go([B], 1.3) == [], "it is the member's own again"
    assert member.owned.keys() == {A, B}


def test_a_topic_made_again_under_its_name_is_another() -> None:
    member, beat = joined(A)
    anew = Owned(bytes(16), A.partition)
    answer = GroupHeartbeatResponse(9, 2, [AssignedTopic(bytes(16), "t", [AssignedRow(0)])])
    assert others(member.answered(beat.number, answer, 1.0)) == [Stop([A]), Take({anew: Start()})]


# -- losing --------------------------------------------------------------------------------------------------------


def test_a_member_out_of_touch_for_its_session_takes_everything_for_lost() -> None:
    member, beat = joined(A, B, now=100.0)
    beat = sent(member.answered(beat.number, told(2, A), 101.0))
    member.failed(beat.number, errors.NetworkError(), 102.0)
    member.reach(False, 102.0)
    # What was sent at 100 was the last to be answered: the coordinator has heard of the member then, or later.
    assert member.due() == 110.0
    assert member.tick(109.9) == []
    assert member.tick(110.0) == [Lose([A, B])]
    assert (member.state, member.member_id, member.owned, member.revoking) == (State.JOINING, "m-2", {}, {})
    request = sent(member.reach(True, 120.0)).request
    assert (request.member_id, request.revision, request.topics) == ("m-2", 0, ["t"])


def test_a_heartbeat_under_way_does_not_lengthen_the_session() -> None:
    member, _ = joined(A)
    assert others(member.tick(SESSION_S)) == [Lose([A])]


def test_a_member_that_was_expelled_joins_again_as_another() -> None:
    member, beat = joined(A)
    effects = member.failed(beat.number, errors.UnknownMember(), 4.0)
    assert others(effects) == [Lose([A])]
    assert sent(effects).request.member_id == "m-2"


def test_one_that_is_expelled_again_and_again_takes_its_time() -> None:
    member, beat = joined(A)
    beat = sent(member.failed(beat.number, errors.UnknownMember(), 4.0))
    assert member.failed(beat.number, errors.UnknownMember(), 4.0) == []
    assert member.due() > 4.0


def test_whoever_lost_its_instance_id_is_out_for_good() -> None:
    member, beat = joined(A, instance_id="rack-1")
    error = errors.FencedInstance()
    assert member.failed(beat.number, error, 1.0) == [Lose([A]), Fail(error)]
    assert member.state == State.FENCED
    assert member.want(["t"], 2.0) == []
    assert member.due() == float("inf")


# -- leaving -------------------------------------------------------------------------------------------------------


def test_leaving_is_said_at_once_and_answered_once() -> None:
    member, _ = joined(A)
    farewell = sent(member.leave(1.0, 6.0))
    assert (farewell.request.leaving, farewell.request.member_id) == (True, "m-1")
    assert member.answered(farewell.number, unchanged(1), 1.1) == [Gone()]
    assert member.state == State.OUT


def test_leaving_is_tried_for_as_long_as_it_may_take() -> None:
    member, _ = joined(A)
    farewell = sent(member.leave(1.0, 6.0))
    assert member.failed(farewell.number, errors.NetworkError(), 2.0) == []
    assert sent(member.tick(2.5)).request.leaving
    assert member.tick(6.0) == [Gone()]


def test_one_that_nobody_has_heard_of_leaves_without_a_word() -> None:
    member = make()
    member.want(["t"], 0.0)
    assert member.leave(1.0, 6.0) == [Gone()]


def test_a_static_member_stays_away_without_a_word() -> None:
    member, _ = joined(A, instance_id="rack-1")
    assert member.leave(1.0, 6.0) == [Gone()]


def test_an_application_that_does_not_poll_loses_what_it_has_and_joins_as_another() -> None:
    member, _ = joined(A)
    effects = member.idle(300.0)
    assert others(effects) == [Lose([A])]
    assert sent(effects).request.leaving
    again = sent(member.want(["t"], 301.0))
    assert (again.request.member_id, again.request.leaving) == ("m-2", False)


# -- joined with a coordinator -------------------------------------------------------------------------------------


class Group:
    """One member's share as a coordinator sees it: changed at will, answers lost at will."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.revisions: dict[str, int] = {}
        self.assigned: set[Owned] = set()
        self.revoking: set[Owned] = set()

    def change(self) -> None:
        wanted = {owned for owned in (A, B, C) if self.chance.random() < 0.5}
        if wanted != self.assigned:
            self.revoking = (self.revoking | self.assigned) - wanted
            self.assigned = wanted
            self.revisions = {member_id: revision + 1 for member_id, revision in self.revisions.items()}

    def hear(self, request: Any) -> GroupHeartbeatResponse | errors.ZmqueueError:
        revision = self.revisions.get(request.member_id)
        if revision is None:
            if request.revision:
                return errors.UnknownMember()
            self.revisions = {request.member_id: 1}
            self.revoking.clear()
            revision = 1
        if request.revision == revision:
            listed = {(entry.topic_id, entry.partition) for entry in request.revoking}
            self.revoking = {o for o in self.revoking if (o.topic_id, o.partition.partition) in listed}
            return unchanged(revision)
        return told(revision, *sorted(self.assigned))

    def expel(self) -> None:
        self.revisions.clear()


@pytest.mark.parametrize("seed", range(100))
def test_a_member_never_holds_what_the_coordinator_might_give_to_another(seed: int) -> None:
    chance = random.Random(seed)
    group, member = Group(chance), make()
    now, reading, stopped = 0.0, set[Owned](), set[Owned]()
    effects: list[Any] = [*member.want(["t"], now), *member.reach(True, now)]
    asked: Send | None = None
    for _ in range(150):
        while effects:
            match effects.pop(0):
                case Send() as asked:
                    pass
                case Take(partitions):
                    reading |= partitions.keys()
                    stopped -= partitions.keys()
                case Stop(partitions):
                    reading -= set(partitions)
                    stopped |= set(partitions)
                case Lose(partitions):
                    reading -= set(partitions)
                    stopped -= set(partitions)
        assert reading == member.owned.keys()
        assert stopped == member.revoking.keys()
        assert not reading & stopped
        if member.member_id in group.revisions and member.revision:
            assert reading | stopped <= group.assigned | group.revoking, "it reads what others may have"
        now += 0.05
        match chance.randrange(8):
            case 0:
                group.change()
            case 1 if stopped:
                free = chance.choice(sorted(stopped))
                stopped.discard(free)
                effects = member.let_go([free], now)
            case 2 if asked is not None:
                effects, asked = member.failed(asked.number, errors.NetworkError(), now), None
            case 3 if asked is not None:
                group.hear(asked.request)  # and the answer is lost
                effects, asked = member.failed(asked.number, errors.RequestTimedOut(), now), None
            case 4 if chance.random() < 0.1:
                group.expel()
            case 5:
                effects = member.tick(now)
            case _ if asked is not None:
                answer, number, asked = group.hear(asked.request), asked.number, None
                if isinstance(answer, errors.ZmqueueError):
                    effects = member.failed(number, answer, now)
                else:
                    effects = member.answered(number, answer, now)
            case _:
                effects = member.tick(now)
