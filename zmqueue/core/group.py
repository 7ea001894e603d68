"""One consumer group: its members, what each may hold, and who gets what next.

Every partition has at most one holder. A member *holds* a partition from when it is given to it until it says that it
has let go, leaves or is removed; while it is told to let go the partition is *revoked*, and its commits still count.
The *target* is where things shall go; `settle` moves them there as far as holders allow:

    held, not in the target   -> revoked, under the member's next revision
    in the target, not held   -> given, under its next revision, as soon as nobody holds it

Invariants, after `settle`:
- a partition is in the `held` of at most one member and in the `target` of at most one;
- what a member holds and is not revoked is in its target; what is in its target and not held, it waits for;
- a change of what a member may hold goes with a new revision of that member, and of nobody else;
- `since` of a partition is a generation that no commit of an earlier tenure of the same member can carry: between two
  tenures lies a new target, and every new target is a new generation.

Not here: when a change may be told (groups.py), committed offsets (group_offsets.py), bytes (wire/group_records.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from zmqueue.core.assignors import Assignor, checked
from zmqueue.core.cluster import Cluster
from zmqueue.core.effects import Token
from zmqueue.model import PartitionKey, TopicPartition
from zmqueue.wire.messages import PartitionEntry

REPLACED_MAX = 8  # former ids of a static member that are still recognised
GONE_MAX = 100  # ids of members that left or were removed, likewise: none of them joins again

NOT_REVOKED = -1


class Held(Struct):
    """See `group_records.Run`."""

    since: int
    given: int
    revoked: int = NOT_REVOKED


class Parked(NamedTuple):
    """A heartbeat whose answer waits for something to tell, or for `due_ms`."""

    token: Token
    revision: int
    due_ms: int


class Subscription(NamedTuple):
    """What a member says of itself when it joins, and may change later."""

    topics: tuple[str, ...]  # in their order, each once
    assignor: str
    session_timeout_ms: int
    rebalance_timeout_ms: int


class Member(Struct):
    member_id: str
    instance_id: str | None
    client_id: str
    subscription: Subscription
    revision: int = 0
    replaced: list[str] = field(default_factory=list)
    held: dict[PartitionKey, Held] = field(default_factory=dict)
    target: frozenset[PartitionKey] = frozenset()
    heard_ms: int = 0
    excused: bool = False  # its session was begun anew since it was heard, because it was us who did not listen
    named: int = 0  # the newest revision that the member named to this coordinator
    met: bool = False  # it has been heard by this coordinator
    parked: Parked | None = None
    condemned: bool = False  # it did not, so its session runs out whatever it says, but that it has let go
    deadline_ms: int | None = None  # until when it must let go of something; None before it could have heard so

    @property
    def expires_ms(self) -> int:
        return self.heard_ms + self.subscription.session_timeout_ms

    def assigned(self) -> list[PartitionKey]:
        """What it may hold, in order."""
        return sorted(key for key, held in self.held.items() if held.revoked == NOT_REVOKED)

    def waiting(self) -> list[PartitionKey]:
        """What it will get once others have let go, in order."""
        return sorted(key for key in self.target if key not in self.held)

    def is_letting_go(self) -> bool:
        return any(held.revoked != NOT_REVOKED for held in self.held.values())

    def is_settled(self) -> bool:
        return len(self.held) == len(self.target) and not self.is_letting_go()


class Known(Struct):
    """A topic, as the group last saw it; see `group_records.KnownTopic`."""

    topic_id: bytes | None
    partitions: int
    fresh_from: int


class Group:
    def __init__(self, name: str) -> None:
        self.name = name
        self.generation = 0
        self.assignor = ""
        self.emptied_ms = -1
        self.topics: dict[str, Known] = {}
        self.members: dict[str, Member] = {}
        self.gone: dict[str, None] = {}
        self._unbalanced = False

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if not self.members:
            return "empty"
        return "stable" if all(member.is_settled() for member in self.members.values()) else "moving"

    def instance(self, instance_id: str | None) -> Member | None:
        """The member that this static instance is at present."""
        if instance_id is None:
            return None
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    def was_replaced(self, member_id: str) -> bool:
        """Whether another process of the same static instance has taken this member's place."""
        return any(member_id in member.replaced for member in self.members.values())

    def subscribed(self) -> list[str]:
        return sorted({name for member in self.members.values() for name in member.subscription.topics})

    def name_of(self, topic_id: bytes) -> str:
        return next(name for name, known in self.topics.items() if known.topic_id == topic_id)

    # -- membership ----------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        self.members[member.member_id] = member
        self._unbalanced = True

    def take_over(self, old: Member, new: Member) -> None:
        """Another process of a static instance: what the old one held is the new one's, and nobody else notices."""
        new.revision = old.revision + 1
        new.replaced = [*old.replaced, old.member_id][-REPLACED_MAX:]
        new.held, new.target = old.held, old.target
        for held in new.held.values():
            held.given = new.revision
        self.members = {m.member_id: m for m in (new if m is old else m for m in self.members.values())}
        self._unbalanced |= new.subscription != old.subscription

    def subscribe(self, member: Member, subscription: Subscription) -> bool:
        """Whether that changes anything."""
        if subscription == member.subscription:
            return False
        self._unbalanced |= (subscription.topics, subscription.assignor) != member.subscription[:2]
        member.subscription = subscription
        return True

    def remove(self, member: Member) -> None:
        """It has left, or is not heard any more: what it held is free."""
        del self.members[member.member_id]
        self.gone[member.member_id] = None
        if len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]
        self._unbalanced = True

    def let_go(self, member: Member, revision: int, revoking: Iterable[PartitionEntry]) -> bool:
        """The member, having heard the assignment of this revision, still has `revoking` beyond it.

        A late message does no harm: what was given to the member after it was sent is revoked, if at all, by a later
        revision than it names.
        """
        if revision > member.revision:
            return False
        kept = {PartitionKey(entry.topic_id, entry.partition) for entry in revoking}
        free = [key for key, held in member.held.items() if NOT_REVOKED < held.revoked <= revision and key not in kept]
        for key in free:
            del member.held[key]
            member.deadline_ms = None
        return bool(free)

    # -- topics --------------------------------------------------------------------------------------------------

    def misses_topics(self, cluster: Cluster, partitions_max: int) -> bool:
        """Whether the topics that members subscribe to are others than the target was made for."""
        names = self.subscribed()
        seen = _shapes(names, cluster, partitions_max)
        return any(
            (known := self.topics.get(name)) is None or (known.topic_id, known.partitions) != seen[name]
            for name in names
        )

    def unread(self, cluster: Cluster) -> Iterator[tuple[str, int, int]]:
        """Topics of which the group reads only as many partitions as its limit allows, and how many they have."""
        for name in self.subscribed():
            topic, known = cluster.topic_named(name), self.topics[name]
            if topic is not None and len(topic.partitions) > known.partitions:
                yield name, known.partitions, len(topic.partitions)

    def note_topics(self) -> None:
        """They have changed: a new target is due."""
        self._unbalanced = True

    def _look_at_topics(self, cluster: Cluster, partitions_max: int) -> None:
        seen = _shapes(self.subscribed(), cluster, partitions_max)
        for name, (topic_id, partitions) in seen.items():
            known = self.topics.get(name)
            if known is None:
                self.topics[name] = Known(topic_id, partitions, fresh_from=partitions)
            else:
                if known.topic_id != topic_id:
                    known.topic_id, known.fresh_from = topic_id, 0
                known.partitions = partitions
        for member in self.members.values():
            gone = [key for key in member.held if cluster.partition(key) is None]
            for key in gone:
                del member.held[key]
            if gone:
                member.revision += 1
        held = {key.topic_id for member in self.members.values() for key in member.held}
        self.topics = {name: known for name, known in self.topics.items() if name in seen or known.topic_id in held}

    # -- who gets what -------------------------------------------------------------------------------------------

    def rebalance(
        self, cluster: Cluster, assignors: Mapping[str, Assignor], fallback: str, partitions_max: int
    ) -> str | None:
        """Make a new target if anything has changed, and move towards it. Returns what went wrong with the assignor."""
        problem = None
        if self._unbalanced and self.members:
            self._look_at_topics(cluster, partitions_max)
            problem = self._aim(assignors, fallback)
        self._unbalanced = False
        self._settle()
        return problem

    def _aim(self, assignors: Mapping[str, Assignor], fallback: str) -> str | None:
        self.assignor = self._chosen(fallback)
        ids = {name: known.topic_id for name, known in self.topics.items() if known.topic_id is not None}
        names = {topic_id: name for name, topic_id in ids.items()}
        partitions = {name: self.topics[name].partitions for name in self.subscribed() if name in ids}
        members = {
            member.member_id: {name for name in member.subscription.topics if name in partitions}
            for member in self.members.values()
        }
        owned = {
            member.member_id: {
                TopicPartition(names[key.topic_id], key.partition)
                for key in member.target
                if names.get(key.topic_id) in members[member.member_id]
                and key.partition < partitions[names[key.topic_id]]
            }
            for member in self.members.values()
        }
        chosen, problem = checked(assignors, self.assignor, members, partitions, owned)
        for member in self.members.values():
            found = chosen[member.member_id]
            member.target = frozenset(PartitionKey(ids[each.topic], each.partition) for each in found)
        self.generation += 1
        return problem

    def _chosen(self, fallback: str) -> str:
        """The assignor that most members name; of several the present one, or the first by name."""
        votes: dict[str, int] = {}
        for member in self.members.values():
            name = member.subscription.assignor or fallback
            votes[name] = votes.get(name, 0) + 1
        return min(votes, key=lambda name: (-votes[name], name != self.assignor, name))

    def _settle(self) -> None:
        holders = {key: member for member in self.members.values() for key in member.held}
        for member in self.members.values():
            revision = member.revision + 1
            changed = member.revision == 0
            for key, held in member.held.items():
                if held.revoked == NOT_REVOKED and key not in member.target:
                    held.revoked = revision
                    changed = True
            for key in sorted(member.target):
                holder = holders.get(key)
                if holder is None:
                    member.held[key] = Held(self.generation, revision)
                    holders[key] = member
                    changed = True
                elif holder is member and member.held[key].revoked != NOT_REVOKED:
                    # Nobody else had it meanwhile: its tenure goes on.
                    held = member.held[key]
                    held.given, held.revoked = revision, NOT_REVOKED
                    changed = True
            if changed:
                member.revision = revision


def _shapes(names: Iterable[str], cluster: Cluster, partitions_max: int) -> dict[str, tuple[bytes | None, int]]:
    """Id and partitions of each topic, as far as the limit allows: what does not fit stays unread."""
    found: dict[str, tuple[bytes | None, int]] = {}
    room = partitions_max
    for name in names:
        topic = cluster.topic_named(name)
        count = min(len(topic.partitions), room) if topic is not None else 0
        found[name] = (topic.topic_id if topic is not None else None, count)
        room -= count
    return found


def partitions_of(names: Iterable[str], cluster: Cluster) -> int:
    topics = (cluster.topic_named(name) for name in names)
    return sum(len(topic.partitions) for topic in topics if topic is not None)


def by_topic(keys: Iterable[PartitionKey]) -> Iterator[tuple[bytes, list[int]]]:
    """Partitions in order, together by topic."""
    found: dict[bytes, list[int]] = {}
    for key in sorted(keys):
        found.setdefault(key.topic_id, []).append(key.partition)
    yield from found.items()
