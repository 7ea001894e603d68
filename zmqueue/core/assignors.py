"""Who gets which partition of the topics that a group reads.

An assignor is a pure function of the group's members and of what they hold. What it returns need not be possible at
once: the coordinator gives a partition away only when its owner has let it go. Members come in the order in which they
joined (a static member that comes back keeps its place), so a result that follows that order changes little when
somebody joins.

    range       of each topic, one stretch for each member
    roundrobin  all partitions of all topics, dealt out in a circle
    sticky      as even as possible, and as much as possible as it was (sticky.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zmqueue.core.sticky import Assignment, Members, Owned, Partitions, sticky
from zmqueue.model import TopicPartition


class Assignor(Protocol):
    def __call__(self, members: Members, partitions: Partitions, owned: Owned) -> Assignment:
        """Every partition of a topic that somebody subscribes to goes to one of its subscribers.

        `members`: topics by member. `partitions`: how many each topic has. `owned`: what members hold by the last
        assignment, all of which exists and is subscribed to.
        """


def range_(members: Members, partitions: Partitions, owned: Owned) -> dict[str, set[TopicPartition]]:
    found: dict[str, set[TopicPartition]] = {member: set() for member in members}
    for topic in sorted(partitions):
        subscribers = [member for member, topics in members.items() if topic in topics]
        first = 0
        for number, member in enumerate(subscribers):
            share, more = divmod(partitions[topic], len(subscribers))
            end = first + share + (number < more)
            found[member].update(TopicPartition(topic, partition) for partition in range(first, end))
            first = end
    return found


def roundrobin(members: Members, partitions: Partitions, owned: Owned) -> dict[str, set[TopicPartition]]:
    found: dict[str, set[TopicPartition]] = {member: set() for member in members}
    circle = list(members)
    at = 0
    for topic in sorted(partitions):
        if not any(topic in topics for topics in members.values()):
            continue
        for partition in range(partitions[topic]):
            while topic not in members[circle[at % len(circle)]]:
                at += 1
            found[circle[at % len(circle)]].add(TopicPartition(topic, partition))
            at += 1
    return found


BUILT_IN: dict[str, Assignor] = {"range": range_, "roundrobin": roundrobin, "sticky": sticky}


def checked(
    assignors: Mapping[str, Assignor], name: str, members: Members, partitions: Partitions, owned: Owned
) -> tuple[dict[str, set[TopicPartition]], str | None]:
    """What the assignor of this name says; or what `sticky` says, with what was wrong with the one asked for."""
    assignor = assignors.get(name)
    if assignor is None:
        return sticky(members, partitions, owned), f"this broker has no assignor {name!r}"
    try:
        return _valid(assignor(members, partitions, owned), members, partitions), None
    except Exception as error:  # whatever a foreign assignor does must not harm the group
        problem = f"assignor {name!r} failed: {type(error).__name__}: {error}"
        return sticky(members, partitions, owned), problem


def _valid(found: Assignment, members: Members, partitions: Partitions) -> dict[str, set[TopicPartition]]:
    """Every partition at most once, and only to members that know of it."""
    strangers = [member for member in found if member not in members]
    if strangers:
        raise ValueError(f"{strangers[0]!r} is no member")
    taken: dict[TopicPartition, str] = {}
    for member, keys in found.items():
        for topic, partition in keys:
            if topic not in members[member] or type(partition) is not int or not 0 <= partition < partitions[topic]:
                raise ValueError(f"{topic}-{partition} is nothing that {member!r} could read")
            key = TopicPartition(topic, partition)
            if taken.setdefault(key, member) != member:
                raise ValueError(f"{topic}-{partition} is given to {taken[key]!r} and to {member!r}")
    valid: dict[str, set[TopicPartition]] = {member: set() for member in members}
    for key, member in taken.items():
        valid[member].add(key)
    return valid
