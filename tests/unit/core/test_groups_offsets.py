"""Committed offsets of consumer groups: whose commits count, when they do, and how long they are kept."""

from __future__ import annotations

import pytest

from tests.unit.core.groups_rig import SESSION_MS, WALL_MS, Rig, key, partitions, topic_id
from zmqueue import errors
from zmqueue.core.group_effects import Write
from zmqueue.wire.group_messages import CommitOffsetsRequest, CommitRow, FetchOffsetsRequest
from zmqueue.wire.messages import PartitionEntry

T = [key("t", number) for number in range(4)]
ILLEGAL = errors.IllegalGeneration.code
DAY_MS = 86_400_000


def one() -> Rig:
    """Member a has all of t, under generation 1."""
    rig = Rig()
    rig.join("a")
    return rig


def moving() -> tuple[Rig, list[object], list[object]]:
    """Member a is told to let go of what b is to get: the rig, what a keeps, and what it is to let go of."""
    rig = one()
    rig.join("b")
    kept = partitions(rig.heartbeat("a", 1))
    return rig, sorted(kept), sorted(set(T) - kept)


# -- whose commits count -----------------------------------------------------------------------------------------


def test_a_member_commits_what_it_holds():
    rig = one()
    assert rig.commit("a", {T[0]: 5, T[1]: 6}, generation=1, number=1) == [0, 0]
    assert rig.committed() == {T[0]: 5, T[1]: 6}


def test_a_commit_is_acknowledged_and_seen_only_when_it_is_replicated():
    rig = one()
    rig.auto = False
    assert rig.commit("a", {T[0]: 5}, generation=1) is None
    committing = rig.token
    assert rig.committed() == {}
    rig.written()
    assert rig.said[committing].results == [0]
    assert rig.committed() == {T[0]: 5}


def test_a_commit_is_accepted_until_the_partition_is_let_go():
    rig, kept, going = moving()
    assert rig.commit("a", {going[0]: 5, kept[0]: 6}, generation=1) == [0, 0]
    rig.heartbeat("a", 2)
    assert rig.commit("a", {going[0]: 7, kept[0]: 8}, generation=2) == [ILLEGAL, 0]
    assert rig.committed() == {going[0]: 5, kept[0]: 8}


def test_the_new_owner_is_told_what_the_old_one_committed_last():
    rig, _, going = moving()
    rig.commit("a", {going[0]: 5}, generation=1)
    rig.heartbeat("a", 2)
    rows = {row.partition: row.offset for row in rig.heartbeat("b", 1).assignment[0].partitions}
    assert rows == {going[0].partition: 5, going[1].partition: -1}


def test_who_does_not_hold_a_partition_cannot_commit_it():
    rig, kept, going = moving()
    assert rig.commit("b", {kept[0]: 5, going[0]: 5}, generation=2) == [ILLEGAL, ILLEGAL]
    assert rig.committed() == {}


def test_a_commit_of_a_former_tenure_is_refused():
    """The partition went to b and came back: what a sent before that is late, though a holds it again."""
    rig, _, going = moving()
    rig.heartbeat("a", 2)
    rig.heartbeat("b", 1)
    assert rig.commit("b", {going[0]: 9}, generation=2, number=1) == [0]
    rig.leave("b", 2)
    told = rig.heartbeat("a", 2)
    assert going[0] in partitions(told)
    assert rig.commit("a", {going[0]: 5}, generation=2, number=99) == [ILLEGAL]
    assert rig.commit("a", {going[0]: 10}, generation=told.generation, number=100) == [0]


def test_a_commit_of_an_older_generation_counts_while_the_tenure_lasts():
    rig, kept, _ = moving()
    rig.heartbeat("a", 2)
    assert rig.commit("a", {kept[0]: 5}, generation=1) == [0]


def test_a_removed_member_cannot_commit():
    rig = one()
    rig.tick(SESSION_MS)
    assert rig.commit("a", {T[0]: 5}, generation=1) == errors.UnknownMember.code
    assert rig.commit("x", {T[0]: 5}, generation=1, group="none") == errors.UnknownMember.code


def test_nobody_commits_for_a_group_without_members():
    rig = Rig()
    assert rig.commit("", {T[0]: 5}) == [0]
    rig.join("a")
    assert rig.commit("", {T[0]: 6}) == errors.NonEmptyGroup.code
    rig.leave("a")
    assert rig.commit("", {T[0]: 3}) == [0]
    assert rig.committed() == {T[0]: 3}


def test_nobody_commits_only_what_exists():
    rig = Rig()
    unknown = errors.UnknownTopicId.code
    assert rig.commit("", {key("t", 4): 1, key("x", 0): 1, T[0]: 1}) == [unknown, unknown, 0]
    assert rig.commit("", {key("x", 0): 1}, group="h") == [unknown]
    assert [row.group for row in rig.coordinator.list_groups()] == ["g"]


def test_a_text_that_is_too_long_is_refused_by_its_row():
    rig = Rig(metadata_bytes_max=3)
    rows = [CommitRow(*T[0], 1, metadata="ööö"), CommitRow(*T[1], 1, 4, "abc")]
    said = rig.ask("on_commit", CommitOffsetsRequest("g", rows), WALL_MS)
    assert said.results == [errors.OffsetMetadataTooLarge.code, 0]
    [row] = rig.ask("on_fetch_offsets", FetchOffsetsRequest("g")).rows
    assert (row.partition, row.offset, row.leader_epoch, row.metadata) == (1, 1, 4, "abc")
    assert row.committed_ms == WALL_MS


# -- late and repeated commits -----------------------------------------------------------------------------------


def test_an_older_commit_that_comes_late_succeeds_and_changes_nothing():
    rig = one()
    assert rig.commit("a", {T[0]: 9}, generation=1, number=2) == [0]
    written = len(rig.log)
    assert rig.commit("a", {T[0]: 5, T[1]: 5}, generation=1, number=1) == [0, 0]
    assert rig.committed() == {T[0]: 9, T[1]: 5}
    assert len(rig.log) == written + 1


def test_it_is_known_to_be_older_after_a_change_of_coordinator_too():
    rig = one()
    rig.commit("a", {T[0]: 9}, generation=1, number=2)
    rig.take_over()
    assert rig.commit("a", {T[0]: 5}, generation=1, number=1) == [0]
    assert rig.committed() == {T[0]: 9}


def test_an_older_commit_ends_as_the_newer_one_that_is_under_way():
    rig = one()
    rig.auto = False
    for code in (0, errors.NotEnoughReplicas.code):
        number = rig.now_ms
        rig.now_ms += 10
        rig.commit("a", {T[0]: 9}, generation=1, number=number)
        newer = rig.token
        assert rig.commit("a", {T[0]: 5}, generation=1, number=number - 1) is None
        older = rig.token
        assert len(rig.writes) == 1
        rig.written(code)
        assert rig.said[newer].results == rig.said[older].results == [code]


def test_a_member_may_go_back_on_purpose():
    rig = one()
    rig.commit("a", {T[0]: 9}, generation=1, number=1)
    rig.commit("a", {T[0]: 2}, generation=1, number=2)
    assert rig.committed() == {T[0]: 2}


def test_commits_without_a_number_all_count():
    rig = one()
    for offset in (4, 9, 2):
        assert rig.commit("a", {T[0]: offset}, generation=1) == [0]
    assert rig.committed() == {T[0]: 2}


def test_another_member_counts_from_the_beginning():
    rig = one()
    rig.commit("a", {T[0]: 5}, generation=1, number=70)
    rig.leave("a")
    told = rig.join("b")
    assert rig.commit("b", {T[0]: 6}, generation=told.generation, number=1) == [0]
    assert rig.committed() == {T[0]: 6}


def test_a_partition_that_comes_back_is_told_with_the_commit_under_way():
    """a has let go and committed, b is gone before it got anything: a hears where to go on when that is written."""
    rig, _, going = moving()
    rig.auto = False
    rig.leave("b", 1)
    rig.commit("a", {going[0]: 7}, generation=2, number=1)
    rig.written()
    assert rig.heartbeat("a", 2, revoking=going) is None
    parked = rig.token
    rig.written()
    offsets = {row.partition: row.offset for row in rig.said[parked].assignment[0].partitions}
    assert offsets[going[0].partition] == 7


# -- writes ------------------------------------------------------------------------------------------------------


def test_a_commit_whose_write_fails_did_not_happen():
    rig = one()
    rig.commit("a", {T[0]: 4}, generation=1, number=1)
    rig.auto = False
    rig.commit("a", {T[0]: 5}, generation=1, number=2)
    rig.written(errors.NotEnoughReplicas.code)
    assert rig.said[rig.token].results == [errors.NotEnoughReplicas.code]
    assert rig.committed() == {T[0]: 4}
    rig.commit("a", {T[0]: 5}, generation=1, number=2)
    rig.written()
    assert rig.committed() == {T[0]: 5}


def test_many_rows_go_into_several_writes_and_are_answered_together():
    rig = Rig(write_bytes_max=16 * 1024, auto=False)
    rig.topics.set("big", 500)
    rig.commit("", {key("big", number): number for number in range(500)})
    assert len(rig.writes) > 1
    for write in rig.writes:
        assert sum(len(name) + len(value or b"") for name, value in write.records) <= 16 * 1024
    rig.written(errors.NotEnoughReplicas.code)
    assert rig.token not in rig.said
    while rig.writes:
        rig.written()
    results = rig.said[rig.token].results
    assert set(results) == {0, errors.NotEnoughReplicas.code}
    assert rig.committed() == {key("big", n): n for n, code in enumerate(results) if code == 0}
    rig.auto = True
    assert rig.delete() is not None
    assert rig.committed() == {}
    rig.take_over()
    assert rig.committed() == {}


def test_more_commits_than_the_limit_are_refused_as_busy():
    rig = Rig(commits_waiting_max=2, auto=False)
    assert [rig.commit("", {T[0]: 1}), rig.commit("", {T[0]: 2})] == [None, None]
    assert rig.commit("", {T[0]: 3}) == errors.Busy.code
    while rig.writes:
        rig.written()
    assert rig.commit("", {T[0]: 3}) is None


def test_the_end_of_a_write_that_nobody_asked_for_is_ignored():
    assert one().coordinator.on_written(99, 0, 0) == []


# -- reading -----------------------------------------------------------------------------------------------------


def test_offsets_are_found_for_the_partitions_asked_for():
    rig = Rig()
    rig.commit("", {T[0]: 1, T[2]: 3})
    asked = [PartitionEntry(*T[2]), PartitionEntry(*T[1]), PartitionEntry(topic_id("x"), 0)]
    [row] = rig.ask("on_fetch_offsets", FetchOffsetsRequest("g", asked)).rows
    assert (row.partition, row.offset) == (2, 3)
    assert rig.ask("on_fetch_offsets", FetchOffsetsRequest("nobody")).rows == []


# -- how long they are kept --------------------------------------------------------------------------------------


def test_offsets_of_a_deleted_topic_are_deleted():
    rig = Rig()
    rig.topics.set("u", 1)
    rig.commit("", {T[0]: 1, key("u", 0): 2})
    rig.topics.drop("t")
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    assert rig.committed() == {key("u", 0): 2}
    rig.take_over()
    assert rig.committed() == {key("u", 0): 2}


def test_a_topic_deleted_while_nobody_coordinated_is_noticed():
    rig = Rig()
    rig.commit("", {T[0]: 1})
    rig.topics.drop("t")
    rig.take_over()
    assert rig.committed() == {}


def test_a_deletion_of_offsets_that_failed_is_tried_again():
    rig = Rig(auto=False)
    rig.commit("", {T[0]: 1})
    rig.written()
    rig.topics.drop("t")
    rig.perform(rig.coordinator.on_topics(rig.now_ms))
    rig.written(errors.NotEnoughReplicas.code)
    assert rig.committed() == {T[0]: 1}
    rig.auto = True
    rig.tick(60_000)
    assert rig.committed() == {}


@pytest.mark.parametrize("take_over", [False, True])
def test_a_group_without_members_is_removed_after_its_retention(take_over):
    rig = Rig()
    rig.join("a")
    rig.commit("a", {T[0]: 1}, generation=1)
    rig.tick(SESSION_MS)
    emptied_ms = rig.now_ms
    if take_over:
        rig.take_over()
    rig.tick(7 * DAY_MS - 60_000)
    assert rig.committed() == {T[0]: 1}
    rig.tick(120_000)
    assert rig.now_ms - emptied_ms > 7 * DAY_MS
    assert (rig.committed(), rig.coordinator.list_groups()) == ({}, [])
    rig.take_over()
    assert rig.coordinator.list_groups() == []


def test_a_commit_of_nobody_begins_the_retention_anew():
    rig = Rig(offset_retention_ms=DAY_MS)
    rig.commit("", {T[0]: 1})
    rig.tick(DAY_MS - 1)
    rig.commit("", {T[1]: 1})
    rig.tick(DAY_MS - 60_001)
    assert rig.committed() == {T[0]: 1, T[1]: 1}
    rig.tick(120_000)
    assert rig.committed() == {}


def test_a_group_with_members_keeps_its_offsets():
    rig = Rig(offset_retention_ms=1_000)
    rig.join("a")
    rig.commit("a", {T[0]: 1}, generation=1)
    for _ in range(50):
        rig.tick(3_000)
        rig.heartbeat("a", 1)
    assert rig.committed() == {T[0]: 1}


def test_without_retention_offsets_stay():
    rig = Rig(offset_retention_ms=-1)
    rig.commit("", {T[0]: 1})
    rig.tick(30 * DAY_MS)
    assert rig.committed() == {T[0]: 1}


def test_writes_are_numbered_one_after_the_other():
    rig = Rig(auto=False)
    rig.commit("", {T[0]: 1})
    rig.join("a")
    assert [write.number for write in rig.writes] == [1, 2]
    assert all(isinstance(write, Write) for write in rig.writes)
