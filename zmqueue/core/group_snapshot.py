"""A group as the record that its next coordinator finds, and back.

What is left out is of no use to another coordinator: clocks start anew, and nobody waits there.
"""

from __future__ import annotations

from collections.abc import Mapping

from zmqueue.config import GroupsConfig
from zmqueue.core.cluster import Cluster
from zmqueue.core.group import Group, Held, Known, Member, Subscription, by_topic, partitions_of
from zmqueue.model import PartitionKey
from zmqueue.wire.group_records import (
    GROUP_TOPICS_MAX,
    PARTITION_BYTES_MAX,
    GroupState,
    KnownTopic,
    MemberState,
    Run,
    Waiting,
    encode,
)


def snapshot(group: Group) -> GroupState:
    ids = {known.topic_id: number for number, known in enumerate(group.topics.values()) if known.topic_id is not None}
    names = {name: number for number, name in enumerate(group.topics)}
    return GroupState(
        group.generation,
        group.assignor,
        group.emptied_ms,
        [KnownTopic(name, k.topic_id, k.partitions, k.fresh_from) for name, k in group.topics.items()],
        [_member_state(member, ids, names) for member in group.members.values()],
    )


def _member_state(member: Member, ids: Mapping[bytes, int], names: Mapping[str, int]) -> MemberState:
    about = member.subscription
    return MemberState(
        member.member_id,
        member.instance_id,
        member.replaced,
        member.client_id,
        [names[topic] for topic in about.topics],
        about.assignor,
        about.session_timeout_ms,
        about.rebalance_timeout_ms,
        member.revision,
        _runs(member, ids),
        [Waiting(ids[topic_id], numbers) for topic_id, numbers in by_topic(member.waiting())],
    )


def _runs(member: Member, ids: Mapping[bytes, int]) -> list[Run]:
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    for key, held in sorted(member.held.items()):
        alike.setdefault((ids[key.topic_id], held.since, held.given, held.revoked), []).append(key.partition)
    return [Run(*conditions, numbers) for conditions, numbers in alike.items()]


def restore(name: str, state: GroupState) -> Group:
    """`state` is one that `decode_group` let pass."""
    group = Group(name)
    group.generation, group.assignor, group.emptied_ms = state.generation, state.assignor, state.emptied_ms
    group.topics = {known.name: Known(known.topic_id, known.partitions, known.fresh_from) for known in state.topics}
    for member in state.members:
        group.members[member.member_id] = _member(member, state.topics)
    return group


def _member(state: MemberState, topics: list[KnownTopic]) -> Member:
    def keys(topic: int, numbers: list[int]) -> list[PartitionKey]:
        topic_id = topics[topic].topic_id
        assert topic_id is not None, "checked when it was decoded"
        return [PartitionKey(topic_id, number) for number in numbers]

    about = Subscription(
        tuple(topics[number].name for number in state.topics),
        state.assignor,
        state.session_timeout_ms,
        state.rebalance_timeout_ms,
    )
    member = Member(state.member_id, state.instance_id, state.client_id, about, state.revision, state.replaced)
    for run in state.held:
        for key in keys(run.topic, run.partitions):
            member.held[key] = Held(run.since, run.given, run.revoked)
    waiting = {key for some in state.waiting for key in keys(some.topic, some.partitions)}
    member.target = frozenset(waiting.union(member.assigned()))
    return member


def fits(group: Group, joining: Member, replaced: Member | None, config: GroupsConfig, cluster: Cluster) -> bool:
    """Whether the group stays within its limits with this member in it, or in the place of another.

    Counted at the worst: it must be possible to write the group down whatever its members may come to hold.
    """
    others = [m for m in group.members.values() if m is not replaced and m.member_id != joining.member_id]
    members = [*others, joining]
    names = {name for member in members for name in member.subscription.topics}
    numbers = {name: number for number, name in enumerate(sorted({*names, *group.topics}))}
    partitions = partitions_of(names, cluster)
    if len(members) > config.members_max or partitions > config.partitions_max or len(numbers) > GROUP_TOPICS_MAX:
        return False
    state = GroupState(
        2**31 - 1,
        "x" * 249,
        -1,
        [KnownTopic(name, bytes(16), 99_999, 99_999) for name in numbers],
        [_member_state(_bare(member), {}, numbers) for member in members],
    )
    return len(encode(state)) + PARTITION_BYTES_MAX * partitions <= config.write_bytes_max


def _bare(member: Member) -> Member:
    """Without what it holds, but with the longest revision and its own name once more."""
    replaced = [*member.replaced, member.member_id]
    return Member(member.member_id, member.instance_id, member.client_id, member.subscription, 2**31 - 1, replaced)
