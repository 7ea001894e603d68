"""Mistakes put into the coordinator on purpose, one rule taken out each: the model test must notice every one.

Some need a schedule so rare that a test of its own stands in for it: those are `DIRECTED` to that test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zmqueue.core import group, group_desk, group_offsets, groups
from zmqueue.core.group import NOT_REVOKED, Group, Member
from zmqueue.core.group_desk import Desk
from zmqueue.core.group_effects import Answer
from zmqueue.core.groups import Coordinator
from zmqueue.wire.group_messages import CommitOffsetsResponse

Patch = tuple[Any, str, Any]
Make = Callable[[], list[Patch]]
MISTAKES: dict[str, Make] = {}
DIRECTED: dict[str, str] = {}
_ALL: dict[str, Make] = {}


def mistake(make: Make) -> Make:
    name = make.__name__.replace("_", " ")
    MISTAKES[name] = _ALL[name] = make
    return make


def directed(test: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        name = make.__name__.replace("_", " ")
        DIRECTED[name], _ALL[name] = test, make
        return make

    return add


@contextmanager
def made(name: str) -> Iterator[None]:
    patches = _ALL[name]()
    before = [(where, what, vars(where)[what]) for where, what, _ in patches]
    for where, what, new in patches:
        setattr(where, what, new)
    try:
        yield
    finally:
        for where, what, old in before:
            setattr(where, what, old)


@mistake
def members_hear_before_the_group_is_replicated() -> list[Patch]:
    advance = Desk._advance

    def hasty(self: Desk, now_ms: int) -> list[Any]:
        effects = advance(self, now_ms)
        self._told_generation = self.group.generation
        return effects + [e for member in self.group.members.values() for e in self._answer(member, now_ms)]

    return [(Desk, "_advance", hasty)]


@mistake
def who_is_no_member_hears_so_before_that_is_replicated() -> list[Patch]:
    return [(Desk, "gate", lambda self, effect: [effect])]


@mistake
def a_partition_is_given_away_before_its_owner_let_go() -> list[Patch]:
    settle = Group._settle

    def hasty(self: Group) -> None:
        settle(self)
        for member in self.members.values():
            member.held = {key: held for key, held in member.held.items() if held.revoked == NOT_REVOKED}
        settle(self)

    return [(Group, "_settle", hasty)]


@mistake
def what_is_not_listed_counts_as_let_go_whatever_the_member_has_heard() -> list[Patch]:
    def credulous(self: Group, member: Member, revision: int, revoking: Any) -> bool:
        kept = {(entry.topic_id, entry.partition) for entry in revoking}
        free = [key for key, held in member.held.items() if held.revoked != NOT_REVOKED and key not in kept]
        for key in free:
            del member.held[key]
        return bool(free)

    return [(Group, "let_go", credulous)]


@mistake
def any_member_may_commit_anything() -> list[Patch]:
    return [(groups, "check_row", lambda *_: 0)]


@directed("test_a_commit_of_a_former_tenure_is_refused")
def commits_of_a_former_tenure_count() -> list[Patch]:
    check_row = groups.check_row

    def careless(row: Any, request: Any, member: Any, *more: Any) -> int:
        request = type(request)(request.group, request.rows, request.member_id, 2**31 - 1, request.number)
        return check_row(row, request, member, *more)

    return [(groups, "check_row", careless)]


@mistake
def late_commits_count() -> list[Patch]:
    return [(group_offsets, "_is_older", lambda *_: False)]


@mistake
def commits_are_acknowledged_before_they_are_replicated() -> list[Patch]:
    commit = Coordinator._commit

    def hasty(self: Coordinator, token: Any, desk: Any, member: Any, request: Any, now_ms: int) -> list[Any]:
        effects = commit(self, token, desk, member, request, now_ms)
        if any(isinstance(effect, Answer) for effect in effects):
            return effects
        done = [groups.check_row(row, request, member, self._config, self._cluster) for row in request.rows]
        return [*effects, Answer(token, CommitOffsetsResponse(done))]

    return [(Coordinator, "_commit", hasty)]


@directed("test_a_partition_that_comes_back_is_told_with_the_commit_under_way")
def a_partition_is_given_while_a_commit_of_it_is_under_way() -> list[Patch]:
    return [(group_offsets.Offsets, "is_pending", lambda *_: False)]


@directed("test_a_new_coordinator_waits_until_the_old_one_can_no_longer_answer")
def a_new_coordinator_forgets_that_the_old_one_may_still_answer() -> list[Patch]:
    begin = Desk.begin
    return [(Desk, "begin", lambda self, now_ms, grace_ms: begin(self, now_ms, 0))]


@directed("test_a_coordinator_without_lease_does_not_say_that_all_is_well")
def a_coordinator_without_lease_goes_on_answering() -> list[Patch]:
    return [(group_desk, "served", lambda lease, token, message, now_ms: Answer(token, message))]


@directed("test_when_it_is_not_known_whether_the_log_has_a_write_the_coordinator_gives_up")
def a_write_of_unknown_fate_is_taken_for_failed() -> list[Patch]:
    on_written = Coordinator.on_written

    def careless(self: Coordinator, number: int, code: int, now_ms: int) -> list[Any]:
        return on_written(self, number, groups.errors.NotEnoughReplicas.code if code else 0, now_ms)

    return [(Coordinator, "on_written", careless)]


@directed("test_a_new_coordinator_knows_where_things_were_going")
def targets_are_not_written_down() -> list[Patch]:
    return [(group.Member, "waiting", lambda self: [])]


@directed("test_a_member_that_does_not_let_go_in_time_is_answered_no_more_and_removed_after_a_session")
def who_does_not_let_go_in_time_is_removed_at_once() -> list[Patch]:
    condemn = Desk._condemn

    def hasty(self: Desk, member: Member) -> list[Any]:
        effects = condemn(self, member)
        member.heard_ms = -member.subscription.session_timeout_ms
        return effects

    return [(Desk, "_condemn", hasty)]
