"""One group at its coordinator: what of it is written, who waits for an answer, and what falls due.

A member's heartbeat is parked until there is something to tell, or its wait is over. It is answered only while the
group is clean, and then with all that the member may hold, if the member named another revision than it has. Whatever
else depends on the group as it is now is *gated*: said when the group is clean the next time.

Clocks, all of this coordinator's own: a session runs from the arrival of the member's last heartbeat (or from when we
could last have answered it, if it was us who were late); the time to let go runs from when the member could first have
heard that it must. Whoever exceeds that is answered no more, and removed when its session is over: a member may read on
until a session after its last answered heartbeat, so nothing that it holds is free any sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct, structs

from zmqueue import errors
from zmqueue.config import GroupsConfig
from zmqueue.core.assignors import Assignor
from zmqueue.core.cluster import Cluster
from zmqueue.core.effects import Effect, Token
from zmqueue.core.group import NOT_REVOKED, Group, Member, Parked
from zmqueue.core.group_effects import Answer, Log, Refuse, Write, refusal, served
from zmqueue.core.group_offsets import Offsets
from zmqueue.core.group_requests import assignment, subscription_of
from zmqueue.core.group_snapshot import fits, snapshot
from zmqueue.core.lease import Lease
from zmqueue.errors import ZmqueueError
from zmqueue.model import PartitionKey
from zmqueue.wire.group_messages import GroupHeartbeatRequest, GroupHeartbeatResponse
from zmqueue.wire.group_records import GroupKey, encode


class Around(Struct):
    """What all groups of a coordinator share. `wall_ahead_ms`: how far the wall clock is ahead of ours."""

    config: GroupsConfig
    cluster: Cluster
    assignors: Mapping[str, Assignor]
    lease: Lease
    write: Callable[[Desk, list[tuple[bytes, bytes | None]]], Write]
    wall_ahead_ms: int = 0


Later = Callable[[int], list[Effect]]


class Desk:
    def __init__(self, name: str, around: Around) -> None:
        self.group = Group(name)
        self.offsets = Offsets(name)
        self.deletions = 0  # under way
        self.written_last = 0  # the number of the group's last write
        self.due_ms: int | None = None
        self._around = around
        self._dirty = False
        self._writing = False
        self._retry_ms: int | None = None
        self._failed: tuple[int, str] | None = None  # why the last write was none
        self._told_generation = 0
        self._gated: list[Answer | Refuse] = []
        self._later: list[tuple[Token, Later]] = []
        self._held_back: dict[str, None] = {}  # members whose answer waits for commits of what it would give them

    def begin(self, now_ms: int, grace_ms: int) -> list[Effect]:
        """The group as it was found. Sessions begin when the former coordinator can no longer have answered anybody."""
        self._told_generation = self.group.generation
        for member in self.group.members.values():
            member.heard_ms = now_ms + grace_ms
            self._set_deadline(member, now_ms + grace_ms)
        self._set_due()
        return self.on_topics(now_ms)

    @property
    def clean(self) -> bool:
        return not self._dirty and not self._writing

    @property
    def unused(self) -> bool:
        """There is nothing to remember, or to wait for."""
        group = self.group
        return self.clean and not (group.members or group.generation or self.offsets or self.deletions)

    # -- members -------------------------------------------------------------------------------------------------

    def on_heartbeat(self, token: Token, request: GroupHeartbeatRequest, now_ms: int) -> list[Effect]:
        member = self.group.members.get(request.member_id)
        try:
            if member is None:
                return self._on_stranger(token, request, now_ms)
            return self._on_member(member, token, request, now_ms)
        except ZmqueueError as error:
            return [Refuse(token, error.code, str(error))]

    def _on_member(self, member: Member, token: Token, request: GroupHeartbeatRequest, now_ms: int) -> list[Effect]:
        if request.leaving:
            effects = self._release_parked(member, now_ms)
            self._remove(member, now_ms)
            effects += self.gate(Answer(token, self._nothing_new(request.revision)))
            return effects + self._advance(now_ms)
        # What a member subscribes to, it tells in order; one that names less than it did before comes late.
        if request.topics is not None and request.revision >= member.named:
            self._subscribe(member, request)
        # Who has just found us may have waited long at the former coordinator, and is told soon that all is well.
        wait_ms = request.wait_ms if member.met else 0
        if request.revision <= member.revision:
            member.named = max(member.named, request.revision)
        if self.group.let_go(member, request.revision, request.revoking):
            self._dirty, member.condemned = True, False
        if member.condemned:
            return [refusal(token, _too_late(member)), *(self._advance(now_ms) if self._dirty else ())]
        member.heard_ms, member.excused, member.met = max(member.heard_ms, now_ms), False, True
        effects = self._park(member, token, request.revision, wait_ms, now_ms)
        return effects + (self._answer(member, now_ms) if self.clean else self._advance(now_ms))

    def _subscribe(self, member: Member, request: GroupHeartbeatRequest) -> None:
        around = self._around
        subscription = subscription_of(request, around.config, around.assignors)
        if subscription != member.subscription:
            self._check_limits(structs.replace(member, subscription=subscription), None)
            self.group.subscribe(member, subscription)
            self._dirty = True

    def _on_stranger(self, token: Token, request: GroupHeartbeatRequest, now_ms: int) -> list[Effect]:
        group = self.group
        if group.was_replaced(request.member_id):
            return self.gate(refusal(token, errors.FencedInstance("another process of this instance has joined")))
        if request.leaving:
            return self.gate(Answer(token, self._nothing_new(request.revision)))
        present = group.instance(request.instance_id)
        if request.revision > 0 or request.member_id in group.gone:
            if present is not None:
                return self.gate(refusal(token, errors.FencedInstance("another process of this instance has joined")))
            return self.gate(refusal(token, errors.UnknownMember()))
        return self._join(present, token, request, now_ms)

    def _join(self, present: Member | None, token: Token, request: GroupHeartbeatRequest, now_ms: int) -> list[Effect]:
        around = self._around
        subscription = subscription_of(request, around.config, around.assignors)
        member = Member(request.member_id, request.instance_id, request.client_id, subscription)
        member.heard_ms, member.met = now_ms, True
        self._check_limits(member, present)
        effects: list[Effect] = []
        self._dirty = True
        if present is None:
            self.group.join(member)
        else:
            self.group.take_over(present, member)
            if present.parked is not None:
                gone = errors.FencedInstance("another process of this instance has joined")
                effects += self.gate(refusal(present.parked.token, gone))
            effects.append(Log(f"group {self.group.name}: {member.member_id} takes the place of {present.member_id}"))
        self.group.emptied_ms = -1
        return [*effects, *self._park(member, token, request.revision, request.wait_ms, now_ms), *self._advance(now_ms)]

    def _check_limits(self, member: Member, replaced: Member | None) -> None:
        if not fits(self.group, member, replaced, self._around.config, self._around.cluster):
            raise errors.GroupFull(f"group {self.group.name} has no room for this member and its topics")

    def _remove(self, member: Member, now_ms: int) -> None:
        """Its heartbeat, if one is parked, hears so when the group is clean."""
        self.group.remove(member)
        if member.parked is not None:
            self._gated.append(refusal(member.parked.token, errors.UnknownMember()))
        if not self.group.members:
            self.group.emptied_ms = now_ms + self._around.wall_ahead_ms
        self._dirty = True

    # -- what members are told -----------------------------------------------------------------------------------

    def _park(self, member: Member, token: Token, revision: int, wait_ms: int, now_ms: int) -> list[Effect]:
        """An older heartbeat of the member has nothing more to wait for."""
        effects = self._release_parked(member, now_ms)
        wait_ms = min(wait_ms, member.subscription.session_timeout_ms // 2)
        member.parked = Parked(token, revision, now_ms + wait_ms)
        self._due_by(member.parked.due_ms)
        self._due_by(member.expires_ms)
        return effects

    def _release_parked(self, member: Member, now_ms: int) -> list[Effect]:
        """That it was heard, which includes what it said of subscriptions, is said when the group is clean."""
        older, member.parked = member.parked, None
        if older is None:
            return []
        if self.clean:
            return [served(self._around.lease, older.token, self._nothing_new(older.revision), now_ms)]
        return self.gate(Answer(older.token, self._nothing_new(older.revision)))

    def _answer(self, member: Member, now_ms: int) -> list[Effect]:
        """What the member is to hear now, if anything. The group is clean."""
        parked = member.parked
        if parked is None:
            return []
        if parked.revision == member.revision:
            if now_ms < parked.due_ms:
                return []
            message = self._nothing_new(parked.revision)
        else:
            if any(self.offsets.is_pending(key) for key in _given_after(member, parked.revision)):
                self._held_back[member.member_id] = None
                return []
            held = assignment(self.group, member, self.offsets)
            message = GroupHeartbeatResponse(self._told_generation, member.revision, held)
        if now_ms > parked.due_ms:
            member.heard_ms = max(member.heard_ms, now_ms)
        member.parked = None
        return [served(self._around.lease, parked.token, message, now_ms)]

    def on_commits_written(self, now_ms: int) -> list[Effect]:
        """Answers that waited for them can be given."""
        if not self._held_back or not self.clean:
            return []
        members = [self.group.members[name] for name in self._held_back]
        self._held_back.clear()
        effects = [effect for member in members for effect in self._answer(member, now_ms)]
        self._set_due()
        return effects

    def _nothing_new(self, revision: int) -> GroupHeartbeatResponse:
        return GroupHeartbeatResponse(self._told_generation, revision)

    def gate(self, effect: Answer | Refuse) -> list[Effect]:
        """Say it when the group is clean; while it cannot be written, that instead."""
        if self.clean:
            return [effect]
        if self._failed is not None:
            return [Refuse(effect.token, *self._failed)]
        if len(self._gated) >= self._around.config.commits_waiting_max:
            return [refusal(effect.token, errors.Busy("the group is being written"))]
        self._gated.append(effect)
        return []

    def when_clean(self, token: Token, later: Later, now_ms: int) -> list[Effect]:
        """Look at a request when nothing is under way that could change the answer."""
        if self.clean:
            return later(now_ms)
        if self._failed is not None:
            return [Refuse(token, *self._failed)]
        if len(self._later) >= self._around.config.commits_waiting_max:
            return [refusal(token, errors.Busy("the group is being written"))]
        self._later.append((token, later))
        return []

    # -- writing -------------------------------------------------------------------------------------------------

    def _advance(self, now_ms: int) -> list[Effect]:
        """Work out what follows from what has changed, and write the group down."""
        if not self._dirty or self._writing or (self._retry_ms is not None and now_ms < self._retry_ms):
            self._set_due()
            return []
        around, group, config = self._around, self.group, self._around.config
        generation = group.generation
        problem = group.rebalance(around.cluster, around.assignors, config.assignor, config.partitions_max)
        effects: list[Effect] = []
        if problem is not None:
            effects.append(Log(f"group {group.name}: {problem}; sticky decides instead", warning=True))
        if group.generation != generation:
            effects.append(Log(f"group {group.name}: generation {group.generation}, {len(group.members)} members"))
            for name, reads, has in group.unread(around.cluster):
                effects.append(
                    Log(f"group {group.name} reads only {reads} of {has} partitions of {name}", warning=True)
                )
        self._dirty, self._writing, self._retry_ms = False, True, None
        write = around.write(self, [(encode(GroupKey(group.name)), encode(snapshot(group)))])
        self.written_last = write.number
        self._set_due()
        return [*effects, write]

    def on_written(self, code: int, text: str, now_ms: int) -> list[Effect]:
        """The group's write has ended: it is replicated (code 0), or the log does not have it."""
        self._writing = False
        if code != 0:
            return self._on_failed(code, text, now_ms)
        self._failed = None
        if self._dirty:
            return self._advance(now_ms)
        return self._on_clean(now_ms)

    def _on_clean(self, now_ms: int) -> list[Effect]:
        self._told_generation = self.group.generation
        effects: list[Effect] = [*self._gated]
        self._gated = []
        self._held_back.clear()
        for member in self.group.members.values():
            self._set_deadline(member, now_ms)
            effects += self._answer(member, now_ms)
        self._set_due()
        later, self._later = self._later, []
        for token, look in later:
            effects += self.when_clean(token, look, now_ms)
        return effects

    def _on_failed(self, code: int, text: str, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        if self._failed is None:
            effects.append(Log(f"group {self.group.name} cannot be written, and waits: {text}", warning=True))
        self._failed = (code, text)
        self._dirty = True
        self._retry_ms = now_ms + self._around.config.write_retry_ms
        tokens = [effect.token for effect in self._gated] + [token for token, _ in self._later]
        self._gated, self._later = [], []
        effects += [Refuse(token, code, text) for token in tokens]
        self._set_due()
        return effects

    def tokens(self) -> Iterator[Token]:
        """Everybody who waits here."""
        yield from (effect.token for effect in self._gated)
        yield from (token for token, _ in self._later)
        yield from (member.parked.token for member in self.group.members.values() if member.parked is not None)

    def forget(self) -> None:
        """The group is deleted, and its log says so."""
        self.group = Group(self.group.name)
        self._told_generation = 0

    # -- time ----------------------------------------------------------------------------------------------------

    def on_topics(self, now_ms: int) -> list[Effect]:
        group, around = self.group, self._around
        if group.members and group.misses_topics(around.cluster, around.config.partitions_max):
            group.note_topics()
            self._dirty = True
            return self._advance(now_ms)
        return []

    def on_due(self, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        if self._failed is not None:
            effects += self._refuse_overdue(now_ms, *self._failed)
        if not self.clean:
            return effects + self._advance(now_ms)
        for member in self.group.members.values():
            effects += self._answer(member, now_ms)
        for member in list(self.group.members.values()):
            if member.deadline_ms is not None and now_ms >= member.deadline_ms:
                effects += self._condemn(member)
            if now_ms >= member.expires_ms:
                silent = f"not heard for {member.subscription.session_timeout_ms} ms"
                why = str(_too_late(member)) if member.condemned else silent
                self._remove(member, now_ms)
                effects.append(Log(f"group {self.group.name}: {member.member_id} is removed: {why}", warning=True))
        return effects + self._advance(now_ms)

    def _condemn(self, member: Member) -> list[Effect]:
        """It goes when its session is over, as it may go on reading for so long without hearing from us."""
        member.condemned, member.deadline_ms = True, None
        parked, member.parked = member.parked, None
        return [refusal(parked.token, _too_late(member))] if parked is not None else []

    def _refuse_overdue(self, now_ms: int, code: int, text: str) -> list[Effect]:
        """The group cannot be written, so there is nothing to tell; but nobody waits for ever."""
        effects: list[Effect] = []
        for member in self.group.members.values():
            parked = member.parked
            if parked is not None and now_ms >= parked.due_ms:
                member.parked, member.heard_ms = None, max(member.heard_ms, now_ms)
                effects.append(Refuse(parked.token, code, text))
        return effects

    def excuse(self, now_ms: int) -> None:
        """We have not listened: every session begins anew, once."""
        for member in self.group.members.values():
            if not member.excused:
                member.heard_ms, member.excused = max(member.heard_ms, now_ms), True
        self._set_due()

    def _set_deadline(self, member: Member, from_ms: int) -> None:
        if not member.is_letting_go():
            member.deadline_ms, member.condemned = None, False
        elif member.deadline_ms is None and not member.condemned:
            member.deadline_ms = from_ms + member.subscription.rebalance_timeout_ms

    def _due_by(self, due_ms: int) -> None:
        self.due_ms = due_ms if self.due_ms is None else min(self.due_ms, due_ms)

    def _set_due(self) -> None:
        """While a write is under way nothing falls due: its end is an event."""
        self.due_ms = None
        if self._writing:
            return
        if self._dirty:
            assert self._retry_ms is not None, "what is dirty is being written, or waits for its next try"
            self.due_ms = self._retry_ms
        for member in self.group.members.values():
            if member.parked is not None and member.member_id not in self._held_back:
                self._due_by(member.parked.due_ms)
            if self.clean:
                self._due_by(member.expires_ms)
                if member.deadline_ms is not None:
                    self._due_by(member.deadline_ms)


def _given_after(member: Member, revision: int) -> Iterator[PartitionKey]:
    """What the member does not hold as far as it knows: where it begins to read is told with the partition."""
    for key, held in member.held.items():
        if held.revoked == NOT_REVOKED and not held.given <= revision <= member.revision:
            yield key


def _too_late(member: Member) -> ZmqueueError:
    limit = member.subscription.rebalance_timeout_ms
    return errors.CoordinatorNotAvailable(f"member {member.member_id} has not let go of partitions in {limit} ms")
