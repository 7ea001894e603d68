"""Membership of consumer groups: who may hold what, when anybody hears of it, and who is a member no more."""

from __future__ import annotations

import pytest

from tests.unit.core.groups_rig import (
    GRACE_MS,
    REBALANCE_MS,
    SESSION_MS,
    Rig,
    key,
    partitions,
    topic_id,
    warnings,
)
from zmqueue import errors
from zmqueue.core.groups import STALL_MS
from zmqueue.model import TopicPartition
from zmqueue.wire.messages import Done, PartitionEntry

T = [key("t", number) for number in range(8)]
UNKNOWN, FENCED = errors.UnknownMember.code, errors.FencedInstance.code


def pair(rig: Rig | None = None, **more: object) -> Rig:
    """Members a and b, two partitions each, all at rest: a at revision 2, b at 2."""
    rig = rig or Rig()
    rig.join("a", **more)
    rig.join("b", **more)
    kept = partitions(rig.heartbeat("a", 1))
    rig.heartbeat("a", 2)
    assert partitions(rig.heartbeat("b", 1)) == set(T[:4]) - kept
    return rig


def held(rig: Rig, member: str) -> set[object]:
    """What the coordinator lets a member hold."""
    [found] = [m for m in rig.describe().members if m.member_id == member]
    return {key("t", entry.partition) for entry in found.assignment}


# -- joining -----------------------------------------------------------------------------------------------------


def test_the_first_member_gets_every_partition():
    rig = Rig()
    said = rig.join("a")
    assert partitions(said) == set(T[:4])
    assert (said.generation, said.revision) == (1, 1)
    assert [(topic.name, [row.offset for row in topic.partitions]) for topic in said.assignment] == [("t", [-1] * 4)]


def test_nobody_hears_of_a_generation_before_it_is_replicated():
    rig = Rig(auto=False)
    assert rig.join("a") is None
    assert rig.said == {}
    rig.written()
    [said] = rig.said.values()
    assert partitions(said) == set(T[:4])


def test_a_newcomer_gets_nothing_before_others_have_let_go():
    rig = Rig()
    rig.join("a")
    assert rig.heartbeat("a", 1) is None
    parked = rig.token
    assert partitions(rig.join("b")) == set()
    kept = partitions(rig.said[parked])
    assert len(kept) == 2
    gone = set(T[:4]) - kept
    rig.heartbeat("b", 1)
    b = rig.token
    rig.heartbeat("a", 2, revoking=gone)
    assert b not in rig.said
    rig.heartbeat("a", 2)
    assert partitions(rig.said[b]) == gone


def test_partitions_are_let_go_one_by_one():
    rig = Rig()
    rig.join("a")
    rig.join("b")
    first, second = sorted(set(T[:4]) - partitions(rig.heartbeat("a", 1)))
    rig.heartbeat("a", 2, revoking=[second])
    assert partitions(rig.heartbeat("b", 1)) == {first}
    rig.heartbeat("a", 2)
    assert partitions(rig.heartbeat("b", 2)) == {first, second}


def test_that_a_partition_was_let_go_is_replicated_before_the_new_owner_hears_of_it():
    rig = Rig()
    rig.join("a")
    rig.join("b")
    kept = partitions(rig.heartbeat("a", 1))
    rig.heartbeat("b", 1)
    b = rig.token
    rig.auto = False
    rig.heartbeat("a", 2)
    assert b not in rig.said
    rig.written()
    assert partitions(rig.said[b]) == set(T[:4]) - kept


def test_a_message_sent_before_the_member_heard_does_not_let_go():
    rig = Rig()
    rig.join("a")
    rig.join("b")
    rig.heartbeat("a", 1)
    rig.heartbeat("a", 1)
    assert rig.describe().state == "moving"
    assert partitions(rig.heartbeat("b", 0)) == set()


def test_several_that_join_while_a_write_is_under_way_share_the_next_generation():
    rig = Rig(auto=False)
    rig.join("a")
    for name in "bcd":
        rig.join(name)
    assert len(rig.writes) == 1
    rig.written()
    rig.written()
    assert not rig.writes
    assert {said.generation for said in rig.said.values()} == {2}
    assert len(rig.said) == 4


def test_a_member_whose_partitions_stay_is_not_disturbed():
    rig = Rig()
    rig.topics.set("u", 1)
    rig.join("a", "t")
    rig.heartbeat("a", 1)
    parked = rig.token
    rig.join("b", "u")
    assert parked not in rig.said
    rig.tick(3_000)
    assert (rig.said[parked].generation, rig.said[parked].revision, rig.said[parked].assignment) == (2, 1, None)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"topics": None}, errors.InvalidRequest),
        ({"topics": ["no/such"]}, errors.InvalidTopic),
        ({"session_timeout_ms": 999}, errors.InvalidSessionTimeout),
        ({"session_timeout_ms": 1_800_001}, errors.InvalidSessionTimeout),
        ({"rebalance_timeout_ms": 3_600_001}, errors.InvalidRequest),
        ({"assignor": "mine"}, errors.UnsupportedAssignor),
    ],
)
def test_a_wrong_request_to_join_is_refused_and_leaves_nothing_behind(asked, error):
    rig = Rig()
    request = {"topics": ["t"], "session_timeout_ms": SESSION_MS, "rebalance_timeout_ms": REBALANCE_MS, **asked}
    assert rig.heartbeat("a", 0, **request) == error.code
    assert rig.coordinator.list_groups() == []


def test_a_member_that_nobody_knows_is_told_so():
    rig = Rig()
    assert rig.heartbeat("a", 3) == UNKNOWN
    pair(rig)
    assert rig.heartbeat("c", 3) == UNKNOWN


def test_before_everything_is_replayed_requests_are_refused():
    rig = Rig()
    rig.coordinator._active = False
    loading = errors.CoordinatorLoading.code
    assert [rig.join("a"), rig.commit("a", {T[0]: 1}), rig.describe(), rig.delete()] == [loading] * 4


# -- limits ------------------------------------------------------------------------------------------------------


def test_a_group_that_is_full_refuses_more_members_but_not_those_it_has():
    rig = Rig(members_max=2)
    pair(rig)
    assert rig.join("c") == errors.GroupFull.code
    assert partitions(rig.join("b")) != set()


def test_a_static_member_of_a_full_group_may_come_back():
    rig = Rig(members_max=1)
    rig.join("a", instance_id="i")
    assert partitions(rig.join("b", instance_id="i")) == set(T[:4])


def test_there_are_no_more_groups_than_the_limit():
    rig = Rig(groups_max=1)
    rig.join("a")
    assert rig.join("b", group="h") == errors.GroupFull.code
    assert rig.commit("", {T[0]: 1}, group="h") == errors.GroupFull.code


def test_more_partitions_than_the_limit_are_refused_and_those_that_grow_beyond_it_stay_unread():
    rig = Rig(partitions_max=5)
    rig.topics.set("u", 2)
    assert rig.join("a", "t", "u") == errors.GroupFull.code
    assert partitions(rig.join("a", "t")) == set(T[:4])
    rig.topics.set("t", 8)
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    assert partitions(rig.heartbeat("a", 1)) == set(T[:5])
    assert warnings(rig) == ["group g reads only 5 of 8 partitions of t"]


def test_a_group_that_could_not_be_written_down_is_refused():
    rig = Rig(write_bytes_max=16 * 1024)
    topics = [f"{number:0249d}" for number in range(40)]
    assert partitions(rig.join("a", *topics)) == set()
    assert rig.join("b", *(name.replace("0", "1", 1) for name in topics)) == errors.GroupFull.code
    assert partitions(rig.join("c", *topics)) == set()


# -- silence, leaving and coming back ----------------------------------------------------------------------------


def test_a_member_that_is_silent_for_its_session_is_removed_and_the_others_get_its_partitions():
    rig = pair()
    rig.tick(SESSION_MS - 1)
    rig.heartbeat("b", 2)
    assert held(rig, "b") != set(T[:4])
    rig.tick(3_000)
    rig.heartbeat("b", 2)
    assert held(rig, "b") == set(T[:4])
    assert rig.heartbeat("a", 2) == UNKNOWN
    assert any("a is removed: not heard" in line for line in warnings(rig))


def test_a_session_runs_from_the_arrival_of_the_last_heartbeat_also_while_it_is_parked():
    rig = Rig()
    rig.join("a")
    rig.heartbeat("a", 1, wait_ms=1 << 30)
    rig.tick(SESSION_MS // 2)
    assert rig.said[rig.token].assignment is None
    rig.tick(SESSION_MS // 2 - 1)
    assert rig.describe().members != []
    rig.tick(1)
    assert rig.describe().members == []


def test_a_heartbeat_is_answered_when_its_wait_is_over():
    rig = Rig()
    rig.join("a")
    assert rig.heartbeat("a", 1, wait_ms=1_000) is None
    rig.tick(999)
    assert rig.token not in rig.said
    rig.tick(1)
    assert (rig.said[rig.token].revision, rig.said[rig.token].assignment) == (1, None)


def test_a_newer_heartbeat_has_the_parked_one_answered():
    rig = pair()
    rig.heartbeat("a", 2)
    older = rig.token
    assert rig.heartbeat("a", 2) is None
    assert rig.said[older].assignment is None


def test_a_member_that_leaves_gives_everything_back_at_once():
    rig = pair()
    rig.heartbeat("b", 2)
    b = rig.token
    assert rig.leave("a", 2).assignment is None
    assert partitions(rig.said[b]) == set(T[:4])


def test_leaving_twice_is_fine_and_who_has_left_does_not_join_again_by_a_late_message():
    rig = pair()
    rig.leave("a", 2)
    assert rig.leave("a", 2).assignment is None
    assert rig.join("a") == UNKNOWN
    assert rig.heartbeat("a", 2) == UNKNOWN


def test_that_a_member_is_removed_is_replicated_before_it_hears_so():
    rig = pair()
    rig.tick(SESSION_MS - 1)
    rig.heartbeat("b", 2)
    rig.auto = False
    rig.tick(1)
    assert rig.heartbeat("a", 2) is None
    a = rig.token
    assert rig.commit("a", {T[0]: 5}, generation=2) is None
    rig.written()
    assert (rig.said[a], rig.said[rig.token]) == (UNKNOWN, UNKNOWN)


def letting_go_too_late() -> tuple[Rig, list[object]]:
    """Member a was to let go within 20 s and has just been heard for the last time before that; b waits."""
    rig = Rig()
    rig.join("a", rebalance_timeout_ms=20_000)
    rig.join("b")
    revoking = sorted(set(T[:4]) - partitions(rig.heartbeat("a", 1)))
    for _ in range(7):
        rig.tick(2_857)
        rig.heartbeat("a", 2, revoking=revoking)
        rig.heartbeat("b", 1)
    return rig, revoking


def test_a_member_that_does_not_let_go_in_time_is_answered_no_more_and_removed_after_a_session():
    """It may go on reading until its session is over, so its partitions are nobody else's before."""
    rig, revoking = letting_go_too_late()
    last_ms = rig.now_ms
    rig.tick(2)
    while rig.now_ms < last_ms + SESSION_MS - 1:
        assert rig.heartbeat("a", 2, revoking=revoking) == errors.CoordinatorNotAvailable.code
        rig.heartbeat("b", 1)
        rig.tick(min(1_000, last_ms + SESSION_MS - 1 - rig.now_ms))
        assert held(rig, "b") == set()
    rig.tick(1)
    assert held(rig, "b") == set(T[:4])
    assert rig.heartbeat("a", 2) == UNKNOWN
    assert any("a is removed: member a has not let go" in line for line in warnings(rig))


def test_a_member_that_lets_go_at_last_stays():
    rig, revoking = letting_go_too_late()
    rig.tick(2_000)
    assert rig.heartbeat("a", 2, revoking=revoking) == errors.CoordinatorNotAvailable.code
    assert rig.heartbeat("a", 2) is None
    rig.tick(SESSION_MS - 3_000)
    assert held(rig, "b") == set(revoking)
    assert rig.heartbeat("a", 2) is None


def test_whoever_lets_go_of_something_gets_time_for_the_rest():
    rig = Rig()
    rig.join("a", rebalance_timeout_ms=4_000)
    rig.join("b")
    first, second = sorted(set(T[:4]) - partitions(rig.heartbeat("a", 1)))
    rig.tick(3_000)
    rig.heartbeat("a", 2, revoking=[second])
    rig.tick(3_000)
    assert rig.heartbeat("a", 2, revoking=[second]) is None
    assert partitions(rig.heartbeat("b", 1)) == {first}


def test_after_a_pause_of_the_coordinator_itself_nobody_is_taken_for_dead_at_once():
    rig = pair()
    rig.now_ms += SESSION_MS + STALL_MS + 1
    rig.tick()
    assert len(rig.describe().members) == 2
    rig.tick(SESSION_MS)
    assert rig.describe().members == []


# -- answers that get lost ---------------------------------------------------------------------------------------


def test_whoever_names_another_revision_is_told_again():
    rig = pair()
    for revision in (0, 1, 7):
        assert partitions(rig.heartbeat("a", revision)) == held(rig, "a")


def test_joining_again_under_the_same_name_changes_nothing():
    rig = Rig()
    said = rig.join("a")
    assert rig.join("a") == said


def test_a_late_message_does_not_bring_an_old_subscription_back():
    rig = Rig()
    rig.topics.set("u", 1)
    rig.join("a", "t")
    rig.heartbeat("a", 1, topics=["u"], session_timeout_ms=SESSION_MS)
    assert partitions(rig.join("a", "t")) == {key("u", 0)}


# -- subscriptions and topics ------------------------------------------------------------------------------------


def test_a_member_may_change_what_it_subscribes_to():
    rig = Rig()
    rig.topics.set("u", 2)
    rig.join("a", "t")
    said = rig.heartbeat("a", 1, topics=["t", "u"], session_timeout_ms=SESSION_MS)
    assert partitions(said) == {*T[:4], key("u", 0), key("u", 1)}
    said = rig.heartbeat("a", 2, topics=["u"], session_timeout_ms=SESSION_MS)
    assert partitions(said) == {key("u", 0), key("u", 1)}
    assert rig.heartbeat("a", 3, topics=["u"], session_timeout_ms=1) == errors.InvalidSessionTimeout.code


def test_a_heartbeat_with_a_new_subscription_is_answered_when_that_is_replicated_though_a_newer_one_comes():
    rig = Rig()
    rig.join("a")
    rig.auto = False
    rig.heartbeat("a", 1, topics=["t", "u"], session_timeout_ms=SESSION_MS)
    subscribing = rig.token
    rig.heartbeat("a", 1)
    assert subscribing not in rig.said
    rig.written()
    assert rig.said[subscribing].revision == 1


def test_partitions_that_are_added_are_given_out_as_fresh():
    rig = Rig()
    rig.join("a")
    rig.topics.set("t", 6)
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    said = rig.heartbeat("a", 1)
    assert partitions(said) == set(T[:6])
    assert [row.fresh for row in said.assignment[0].partitions] == [False] * 4 + [True] * 2


def test_a_topic_subscribed_before_it_exists_is_fresh_as_a_whole():
    rig = Rig()
    assert partitions(rig.join("a", "u")) == set()
    rig.topics.set("u", 2)
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    said = rig.heartbeat("a", 1)
    assert [(topic.name, [row.fresh for row in topic.partitions]) for topic in said.assignment] == [("u", [True] * 2)]


def test_a_topic_made_again_is_another_one_and_fresh():
    rig = Rig()
    rig.join("a")
    rig.topics.set("t", 2, life=1)
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    said = rig.heartbeat("a", 1)
    assert partitions(said) == {key("t", 0, 1), key("t", 1, 1)}
    assert all(row.fresh for row in said.assignment[0].partitions)


def test_partitions_of_a_deleted_topic_are_nobodys_at_once():
    rig = pair()
    rig.topics.drop("t")
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    assert partitions(rig.heartbeat("a", 2)) == set()
    assert rig.describe().state == "stable"


def test_what_is_fresh_is_remembered_while_the_group_is_empty():
    rig = Rig()
    rig.join("a")
    rig.leave("a")
    rig.topics.set("t", 5)
    rig.take_over()
    assert [row.fresh for row in rig.join("b").assignment[0].partitions] == [False] * 4 + [True]


def test_topics_that_have_nothing_to_do_with_a_group_do_not_disturb_it():
    rig = pair()
    written = len(rig.log)
    rig.topics.set("other", 3)
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    assert len(rig.log) == written


# -- static members ----------------------------------------------------------------------------------------------


def test_a_static_member_that_comes_back_takes_over_and_nobody_else_notices():
    rig = Rig()
    rig.join("a")
    rig.join("b1", instance_id="i")
    rig.heartbeat("a", 2)
    mine = partitions(rig.heartbeat("b1", 1))
    generation = rig.describe().generation
    rig.heartbeat("a", 2)
    parked = rig.token
    said = rig.join("b2", instance_id="i")
    assert (partitions(said), said.generation) == (mine, generation)
    assert parked not in rig.said
    rig.heartbeat("b2", said.revision)
    assert rig.describe().state == "stable"


def test_the_process_that_was_replaced_is_fenced_for_good():
    rig = Rig()
    rig.join("a", instance_id="i")
    rig.heartbeat("a", 1, instance_id="i")
    parked = rig.token
    rig.join("b", instance_id="i")
    assert rig.said[parked] == FENCED
    assert rig.heartbeat("a", 1, instance_id="i") == FENCED
    assert rig.heartbeat("a", 1) == FENCED
    assert rig.join("a", instance_id="i") == FENCED
    assert rig.commit("a", {T[0]: 1}, generation=1) == FENCED
    rig.take_over()
    assert rig.heartbeat("a", 1) == FENCED
    rig.join("c", instance_id="i")
    assert (rig.heartbeat("a", 1), rig.heartbeat("b", 1)) == (FENCED, FENCED)


def test_that_a_process_was_replaced_is_replicated_before_it_hears_so():
    rig = Rig()
    rig.join("a", instance_id="i")
    rig.heartbeat("a", 1)
    parked = rig.token
    rig.auto = False
    assert rig.join("b", instance_id="i") is None
    assert parked not in rig.said
    rig.written()
    assert rig.said[parked] == FENCED


def test_a_replaced_process_that_was_to_let_go_need_not_any_more():
    rig = Rig()
    rig.join("a", instance_id="i")
    rig.join("b")
    said = rig.join("a2", instance_id="i")
    assert len(partitions(said)) == 2
    rig.heartbeat("a2", said.revision)
    assert partitions(rig.heartbeat("b", 1)) == set(T[:4]) - partitions(said)


# -- assignors ---------------------------------------------------------------------------------------------------


def test_the_assignor_is_that_which_most_members_name():
    rig = Rig()
    rig.join("a", assignor="range")
    rig.join("b", assignor="roundrobin")
    assert rig.describe().assignor == "range"
    rig.join("c", assignor="roundrobin")
    assert rig.describe().assignor == "roundrobin"


def test_a_custom_assignor_decides():
    rig = Rig(assignors={"last": lambda members, partitions, owned: {list(members)[-1]: {("t", 0)}}})
    assert partitions(rig.join("a", assignor="last")) == {T[0]}
    rig.join("b", assignor="last")
    assert partitions(rig.heartbeat("a", 1)) == set()


def test_a_failing_assignor_is_named_and_does_not_harm_the_group():
    def fails(*_: object) -> dict[str, set[TopicPartition]]:
        raise RuntimeError("no idea")

    rig = Rig(assignors={"mine": fails})
    assert partitions(rig.join("a", assignor="mine")) == set(T[:4])
    assert warnings(rig) == ["group g: assignor 'mine' failed: RuntimeError: no idea; sticky decides instead"]


# -- writes that fail --------------------------------------------------------------------------------------------


def test_a_group_that_cannot_be_written_waits_and_is_written_again():
    rig = Rig(auto=False)
    rig.join("a")
    a = rig.token
    rig.written(errors.NotEnoughReplicas.code)
    assert rig.said == {}
    rig.tick(249)
    assert not rig.writes
    rig.tick(1)
    rig.written()
    assert partitions(rig.said[a]) == set(T[:4])


def test_while_it_cannot_be_written_nobody_waits_for_ever_and_nobody_is_taken_for_dead():
    rig = pair()
    rig.auto = False
    code = errors.NotEnoughReplicas.code
    rig.leave("b", 2)
    leaving = rig.token
    for _ in range(60):
        while rig.writes:
            rig.written(code)
        said = rig.heartbeat("a", 2)
        rig.tick(500)
        assert said is None or said == code or said.assignment is None
    assert rig.said[leaving] == code
    rig.tick(250)
    rig.written()
    assert partitions(rig.heartbeat("a", 2)) == set(T[:4])


def test_when_it_is_not_known_whether_the_log_has_a_write_the_coordinator_gives_up():
    rig = pair()
    rig.heartbeat("a", 2)
    waiting = [rig.token]
    rig.auto = False
    rig.commit("b", {next(iter(held(rig, "b"))): 5}, generation=2)
    waiting.append(rig.token)
    rig.join("c")
    waiting.append(rig.token)
    rig.written(errors.NotEnoughReplicasAfterAppend.code)
    assert rig.gave_up is not None
    assert {rig.said[token] for token in waiting} == {errors.CoordinatorNotAvailable.code}
    assert rig.join("d") == errors.CoordinatorLoading.code
    rig.written()


def test_who_waits_when_leadership_is_lost_is_refused_once():
    rig = pair()
    rig.heartbeat("a", 2)
    waiting = [rig.token]
    a = dict.fromkeys(held(rig, "a"), 1)
    rig.auto = False
    for ask in (lambda: rig.join("c"), lambda: rig.leave("b", 2), lambda: rig.commit("a", a, generation=2), rig.delete):
        ask()
        waiting.append(rig.token)
    code = errors.NotCoordinator.code
    rig.perform(rig.coordinator.close(code, "another broker leads"))
    assert [rig.said[token] for token in waiting] == [code] * 5
    assert rig.coordinator.close(code, "again") == []


# -- another coordinator -----------------------------------------------------------------------------------------


def test_a_new_coordinator_goes_on_where_the_old_one_was():
    rig = pair()
    before = rig.describe()
    rig.take_over()
    assert rig.describe() == before
    assert (rig.heartbeat("a", 2).assignment, rig.heartbeat("b", 2).assignment) == (None, None)


def test_a_new_coordinator_knows_where_things_were_going():
    rig = Rig()
    rig.join("a")
    rig.join("b")
    before = rig.describe()
    assert before.state == "moving"
    rig.take_over()
    assert rig.describe() == before
    rig.heartbeat("a", 2)
    assert len(partitions(rig.heartbeat("b", 1))) == 2


def test_a_new_coordinator_answers_the_first_heartbeat_at_once():
    rig = pair()
    rig.take_over()
    assert rig.heartbeat("a", 2).assignment is None
    assert rig.heartbeat("a", 2) is None


def test_a_new_coordinator_waits_until_the_old_one_can_no_longer_answer():
    rig = pair()
    rig.take_over()
    rig.tick(GRACE_MS + SESSION_MS - 1)
    assert len(rig.describe().members) == 2
    rig.tick(1)
    assert rig.describe().members == []


def test_a_coordinator_without_lease_does_not_say_that_all_is_well():
    rig = pair()
    rig.lease.granted_ms = rig.now_ms
    rig.tick(3_001)
    gone = errors.CoordinatorNotAvailable.code
    rig.heartbeat("a", 2)
    rig.tick(3_000)
    assert rig.said[rig.token] == gone
    assert rig.heartbeat("a", 1) == gone
    assert rig.describe() == gone


def test_topics_that_changed_meanwhile_are_seen():
    rig = Rig()
    rig.join("a")
    rig.topics.set("t", 6)
    rig.take_over()
    assert partitions(rig.heartbeat("a", 1)) == set(T[:6])


def test_records_that_are_not_of_groups_are_refused_one_by_one():
    coordinator = Rig().coordinator
    for record in ((None, b"x"), (b"x", b"y"), (b"", None)):
        with pytest.raises(errors.InvalidRecord):
            coordinator.replay(*record)
    with pytest.raises(errors.FutureFormat):
        coordinator.replay(b"\x82\x18\x63\x61g", b"\x81\x01")


# -- groups as a whole -------------------------------------------------------------------------------------------


def test_groups_are_listed_and_described():
    rig = Rig()
    rig.topics.set("u", 1)
    rig.join("a", "t", group="h", client_id="c", instance_id="i")
    rig.join("b", "t", group="h")
    rig.commit("", {key("u", 0): 3}, group="g")
    assert [(g.group, g.state, g.generation, g.members, g.assignor) for g in rig.coordinator.list_groups()] == [
        ("g", "empty", 0, 0, ""),
        ("h", "moving", 2, 2, "sticky"),
    ]
    found = rig.describe("h")
    a, b = found.members
    assert (a.member_id, a.instance_id, a.client_id, a.topics, a.session_timeout_ms) == (
        "a",
        "i",
        "c",
        ["t"],
        SESSION_MS,
    )
    assert (len(a.assignment), len(a.target)) == (2, 2)
    assert (b.assignment, len(b.target)) == ([], 2)
    assert {entry.topic_id for entry in b.target} == {topic_id("t")}
    assert rig.describe("x") == errors.GroupNotFound.code


def test_a_group_without_members_can_be_deleted_with_its_offsets():
    rig = Rig()
    rig.join("a")
    rig.commit("a", {T[0]: 7}, generation=1)
    assert rig.delete() == errors.NonEmptyGroup.code
    rig.leave("a")
    assert isinstance(rig.delete(), Done)
    assert rig.coordinator.list_groups() == []
    rig.take_over()
    assert (rig.committed(), rig.coordinator.list_groups()) == ({}, [])
    assert rig.delete() == errors.GroupNotFound.code
    assert rig.join("b").assignment[0].partitions[0].offset == -1


def test_a_member_that_joins_while_the_group_is_deleted_finds_it_empty():
    rig = Rig(auto=False)
    rig.commit("", {T[0]: 7})
    rig.written()
    rig.delete()
    rig.join("a")
    a = rig.token
    while rig.writes:
        rig.written()
    assert [row.offset for row in rig.said[a].assignment[0].partitions] == [-1] * 4
    rig.take_over()
    assert (rig.describe().state, rig.committed()) == ("stable", {})


def test_a_deletion_that_fails_leaves_what_the_log_still_has():
    rig = Rig(auto=False)
    rig.commit("", {T[0]: 7})
    rig.written()
    rig.delete()
    rig.written(errors.NotEnoughReplicas.code)
    assert rig.said[rig.token] == errors.NotEnoughReplicas.code
    assert rig.committed() == {T[0]: 7}


def test_a_request_that_depends_on_the_group_being_empty_waits_until_that_is_replicated():
    rig = Rig()
    rig.join("a")
    rig.auto = False
    rig.leave("a")
    assert rig.delete() is None
    deleting = rig.token
    assert rig.commit("", {T[0]: 1}) is None
    while rig.writes:
        rig.written()
    assert isinstance(rig.said[deleting], Done)
    assert rig.said[rig.token].results == [0]


def test_entries_name_partitions_by_topic_id():
    assert pair().describe().members[0].assignment[0] == PartitionEntry(topic_id("t"), 0)
