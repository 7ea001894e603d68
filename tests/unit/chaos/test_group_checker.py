"""The checker of a group's history: a clean one passes, each injected anomaly is called by its name."""

from __future__ import annotations

import pytest

from chaos.group_checker import GroupVerdict, check_group
from chaos.history import FAIL, INVOKE, OK, Event

A, B = "t-0", "t-1"
HARNESS, PRODUCER = 900, 1_000
ONE, TWO = 1, 2


class Story:
    """Two partitions; every event comes 10 ms after the one before."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.t = 0.0
        self._commits = 0
        self._sent = {A: 0, B: 0}

    def add(self, p: int, e: str, f: str, **more: object) -> None:
        self.t = round(self.t + 0.01, 6)
        self.events.append(Event(self.t, p, e, f, **more))

    def send(self, key: str, count: int = 1) -> None:
        for _ in range(count):
            self.add(PRODUCER, OK, "send", k=key, v=self._sent[key], o=self._sent[key])
            self._sent[key] += 1

    def assigned(self, p: int, generation: int, *keys: str, life: str = "") -> None:
        self.add(p, OK, "assigned", ks=list(keys), v=generation, x=life or f"life-{p}")

    def revoked(self, p: int, generation: int, *keys: str) -> None:
        self.add(p, OK, "revoked", ks=list(keys), v=generation, x=f"life-{p}")

    def poll(self, p: int, generation: int, key: str, *offsets: int, life: str = "") -> None:
        row = [number for offset in offsets for number in (offset, offset)]
        self.add(p, OK, "poll", rows=[(key, row)], v=generation, x=life or f"life-{p}")

    def commit(self, p: int, key: str, offset: int, e: str = OK, life: str = "") -> None:
        self._commits += 1
        self.add(p, INVOKE, "commit", o=self._commits, x=life or f"life-{p}", rows=[(key, [offset])])
        self.add(p, e, "commit", o=self._commits, x="" if e == OK else "UNKNOWN_MEMBER")

    def check(self) -> GroupVerdict:
        self.add(HARNESS, OK, "end")
        return check_group(iter(self.events), partitions=2)


def shared() -> Story:
    """Member 1 has both partitions, then member 2 joins and gets t-1 from it, in generation 2."""
    story = Story()
    story.add(ONE, INVOKE, "join")
    story.assigned(ONE, 1, A, B)
    for key in (A, B):
        story.send(key, 2)
        story.poll(ONE, 1, key, 0, 1)
        story.commit(ONE, key, 2)
    story.add(TWO, INVOKE, "join")
    story.revoked(ONE, 2, B)
    story.assigned(TWO, 2, B)
    for key, member in ((A, ONE), (B, TWO)):
        story.send(key, 2)
        story.poll(member, 2, key, 2, 3)
        story.commit(member, key, 4)
    return story


def suspended() -> Story:
    """Member 2 sleeps until the coordinator has given t-1 to member 1, in generation 3, and wakes."""
    story = shared()
    story.add(TWO, INVOKE, "suspended")
    story.t += 3.0
    story.add(TWO, OK, "removed", x="life-2")
    story.assigned(ONE, 3, B)
    story.send(B)
    story.poll(ONE, 3, B, 4)
    story.add(TWO, OK, "suspended")
    return story


def test_a_clean_history_passes_and_is_measured() -> None:
    verdict = shared().check()
    assert verdict.counts == {}
    found = verdict.measures
    assert (found["delivered"], found["commits"], found["generations"], found["rebalances"]) == (8, 4, 2, 2)
    assert found["rebalance_join_max_s"] == pytest.approx(0.02)
    assert 0 < found["unmoved_gap_s"] < 0.05


def test_an_acknowledged_record_that_nobody_got_is_missed() -> None:
    story = shared()
    story.send(A)
    verdict = story.check()
    assert verdict.counts == {"MISSED": 1}
    assert verdict.anomalies[0].key == A
    assert "offset 4" in verdict.anomalies[0].text


def test_a_partition_given_out_before_it_was_given_back_has_two_owners() -> None:
    story = Story()
    story.assigned(ONE, 1, A, B)
    story.assigned(TWO, 2, B)
    story.revoked(ONE, 3, B)
    assert story.check().counts == {"DOUBLE-OWNER": 1}


def test_a_partition_given_out_in_the_generation_that_its_dead_owner_knew_has_two_owners() -> None:
    story = shared()
    story.add(TWO, OK, "killed")
    story.assigned(ONE, 2, B)
    assert story.check().counts == {"DOUBLE-OWNER": 1}


def test_a_partition_taken_over_in_a_later_generation_has_one_owner() -> None:
    story = shared()
    story.add(TWO, OK, "killed")
    story.add(TWO, OK, "removed", x="life-2")
    story.assigned(ONE, 3, B)
    verdict = story.check()
    assert verdict.counts == {}
    assert verdict.measures["rebalance_expired_max_s"] == pytest.approx(0.01)


def test_a_commit_of_a_zombie_that_is_refused_is_as_it_should_be() -> None:
    story = suspended()
    story.commit(TWO, B, 4, FAIL)
    verdict = story.check()
    assert verdict.counts == {}
    assert (verdict.measures["zombies"], verdict.measures["zombies_refused"]) == (1, 1)


def test_a_commit_of_a_zombie_that_is_accepted_is_an_anomaly() -> None:
    story = suspended()
    story.commit(TWO, B, 4)
    verdict = story.check()
    assert verdict.counts == {"ZOMBIE-COMMIT": 1}
    assert (verdict.measures["zombies"], verdict.measures["zombies_refused"]) == (1, 0)


def test_a_member_that_got_its_partition_back_in_a_new_life_is_no_zombie() -> None:
    story = suspended()
    story.commit(TWO, B, 4, FAIL)
    story.add(TWO, OK, "lost", ks=[B], v=4, x="life-2b")
    story.revoked(ONE, 4, B)
    story.assigned(TWO, 4, B, life="life-2b")
    story.commit(TWO, B, 5, life="life-2b")
    assert story.check().counts == {}


def test_a_commit_below_an_accepted_one_is_regressed() -> None:
    story = shared()
    story.commit(ONE, A, 3)
    assert story.check().counts == {"COMMIT-REGRESSED": 1}


def test_a_new_owner_that_begins_below_what_was_committed_has_regressed() -> None:
    story = shared()
    story.add(TWO, OK, "killed")
    story.assigned(ONE, 3, B)
    story.poll(ONE, 3, B, 2, 3)
    verdict = story.check()
    assert verdict.counts == {"COMMIT-REGRESSED": 1}
    assert "began to read at 2, 4 was committed" in verdict.anomalies[0].text


def test_reading_again_what_was_not_committed_is_allowed() -> None:
    story = shared()
    story.send(B, 2)
    story.poll(TWO, 2, B, 4, 5)
    story.add(TWO, OK, "killed")
    story.assigned(ONE, 3, B)
    story.poll(ONE, 3, B, 4, 5)
    assert story.check().counts == {}


def test_a_partition_that_nobody_takes_over_is_not_settled() -> None:
    story = shared()
    story.add(TWO, INVOKE, "leave")
    story.revoked(TWO, 2, B)
    story.add(TWO, OK, "leave")
    assert story.check().counts == {"NOT-SETTLED": 1}


def test_a_member_that_is_given_nothing_is_not_settled() -> None:
    story = shared()
    story.add(3, INVOKE, "join")
    story.assigned(ONE, 3, A)
    assert "NOT-SETTLED" in story.check().counts


def test_a_member_that_goes_before_it_got_anything_leaves_nothing_unsettled() -> None:
    story = shared()
    story.add(3, INVOKE, "join")
    story.add(3, OK, "killed")
    story.assigned(ONE, 3, A)
    assert story.check().counts == {}


def test_a_membership_that_is_removed_late_takes_nothing_from_the_next() -> None:
    story = shared()
    story.add(TWO, OK, "lost", ks=[B], v=3, x="life-2b")
    story.assigned(TWO, 3, B, life="life-2b")
    story.add(TWO, OK, "removed", x="life-2")
    story.assigned(ONE, 4, A)
    assert story.check().counts == {}


def test_a_partition_that_stops_without_having_moved_is_measured() -> None:
    story = shared()
    story.send(A)
    story.t += 2.0
    story.poll(ONE, 2, A, 4)
    assert story.check().measures["unmoved_gap_s"] == pytest.approx(2.01)


def test_time_without_records_is_no_gap() -> None:
    story = shared()
    story.t += 2.0
    story.send(A)
    story.poll(ONE, 2, A, 4)
    assert story.check().measures["unmoved_gap_s"] < 0.05


def test_time_that_the_holder_slept_is_no_gap() -> None:
    story = shared()
    story.add(ONE, INVOKE, "suspended")
    story.send(A)
    story.t += 2.0
    story.add(ONE, OK, "suspended")
    story.poll(ONE, 2, A, 4)
    assert story.check().measures["unmoved_gap_s"] < 0.05


def test_what_stops_with_a_broker_is_counted_apart() -> None:
    story = shared()
    story.add(HARNESS, INVOKE, "fault", ks=[A])
    story.send(A)
    story.t += 1.5
    story.add(HARNESS, OK, "whole")
    story.poll(ONE, 2, A, 4)
    found = story.check().measures
    assert found["unmoved_gap_s"] < 0.05
    assert found["unmoved_gap_broker_s"] == pytest.approx(1.52)
