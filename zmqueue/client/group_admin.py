"""The administrator's calls about consumer groups: what a group's coordinator knows, and how far the group is behind.

Who coordinates a group is asked anew for each attempt: it moves with the leader of a partition.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from zmqueue.client.asking import ATTEMPT_S, ATTEMPT_S_MIN, Asking
from zmqueue.client.descriptions import (
    GroupDescription,
    GroupListing,
    GroupSummary,
    MemberDescription,
    PartitionLag,
)
from zmqueue.client.first_records import FirstRecords
from zmqueue.client.network import Answer
from zmqueue.errors import (
    CoordinatorNotAvailable,
    GroupNotFound,
    InvalidRequest,
    UnknownTopicOrPartition,
    ZmqueueError,
    from_code,
)
from zmqueue.model import NO_BROKER, OffsetAndMetadata, TopicPartition, check_group_name
from zmqueue.wire import group_messages, messages
from zmqueue.wire.frames import Operation

Topics = dict[bytes, messages.TopicInfo]


class GroupAdmin(Asking):
    def list_groups(self) -> GroupListing:
        """Every group, as far as brokers answer: each knows those that it coordinates."""
        deadline = time.monotonic() + self._timeout_s
        brokers = {broker.id for broker in self._metadata([], deadline).brokers if not broker.fenced}
        found: dict[str, GroupSummary] = {}
        while True:
            retry = self._list_at(brokers, found, deadline)
            if not retry or time.monotonic() >= deadline - ATTEMPT_S_MIN:
                return GroupListing([found[name] for name in sorted(found)], sorted(retry))
            brokers = retry
            self._pause(deadline)

    def _list_at(self, brokers: Iterable[int], found: dict[str, GroupSummary], deadline: float) -> set[int]:
        """Asks all of them at once; those that must be asked again, or cannot be."""
        timeout_s = min(ATTEMPT_S, self._left(deadline))
        request = group_messages.ListGroupsRequest()
        calls = {broker: self._router.begin(broker, Operation.LIST_GROUPS, request, timeout_s) for broker in brokers}
        silent = set()
        for broker, call in calls.items():
            answer = call.result()
            if isinstance(answer, Answer):
                for row in answer.message.groups:
                    seen = found.get(row.group)
                    # A group that moves while we ask may be named twice: the later generation is the newer one.
                    if seen is None or row.generation >= seen.generation:
                        found[row.group] = GroupSummary(row.group, row.state, row.members, row.generation, row.assignor)
            elif answer.retriable:
                silent.add(broker)
            else:
                raise answer
        return silent

    def describe_group(self, group: str) -> GroupDescription:
        """A group and its members. Raises GroupNotFound."""
        deadline = time.monotonic() + self._timeout_s
        return self._describe_group(group, self._topics_by_id(deadline), deadline)

    def _describe_group(self, group: str, topics: Topics, deadline: float) -> GroupDescription:
        request = group_messages.DescribeGroupRequest(check_group_name(group))
        told: group_messages.DescribeGroupResponse
        coordinator, told = self._of_coordinator(group, Operation.DESCRIBE_GROUP, request, deadline)
        members = [
            MemberDescription(
                member.member_id,
                member.client_id,
                member.instance_id,
                sorted(member.topics),
                _named(member.assignment, topics),
                _named(member.target, topics),
                member.session_timeout_ms,
            )
            for member in told.members
        ]
        members.sort(key=lambda member: (member.client_id, member.member_id))
        return GroupDescription(group, told.state, told.generation, told.assignor, coordinator, members)

    def delete_group(self, group: str) -> None:
        """Delete a group without members, and all that it has committed. Raises GroupNotFound, NonEmptyGroup."""
        request = group_messages.DeleteGroupRequest(check_group_name(group))
        doubts: list[ZmqueueError] = []
        try:
            self._of_coordinator(group, Operation.DELETE_GROUP, request, time.monotonic() + self._timeout_s, doubts)
        except GroupNotFound:
            if not doubts:
                raise

    # -- offsets -----------------------------------------------------------------------------------------------------

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a group has committed, for partitions that exist. Raises GroupNotFound."""
        deadline = time.monotonic() + self._timeout_s
        return self._group_offsets(group, self._topics_by_id(deadline), deadline)

    def _group_offsets(self, group: str, topics: Topics, deadline: float) -> dict[TopicPartition, OffsetAndMetadata]:
        request = group_messages.FetchOffsetsRequest(check_group_name(group))
        told: group_messages.FetchOffsetsResponse
        _, told = self._of_coordinator(group, Operation.FETCH_OFFSETS, request, deadline)
        found = {
            TopicPartition(topics[row.topic_id].name, row.partition): OffsetAndMetadata(
                row.offset, row.metadata, row.leader_epoch
            )
            for row in told.rows
            if row.topic_id in topics
        }
        return dict(sorted(found.items()))

    def set_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
        """Commit these offsets for a group, which must have no members (NonEmptyGroup); others stay as they are.

        A group that nobody has heard of is made by it.
        """
        check_group_name(group)
        deadline = time.monotonic() + self._timeout_s
        by_name = {info.name: info for info in self._topics_by_id(deadline).values()}
        rows = [_commit_row(by_name, TopicPartition(*partition), offset) for partition, offset in offsets.items()]
        if not rows:
            return
        request = group_messages.CommitOffsetsRequest(group, rows)
        while True:
            told: group_messages.CommitOffsetsResponse
            _, told = self._of_coordinator(group, Operation.COMMIT_OFFSETS, request, deadline)
            if len(told.results) != len(rows):
                raise InvalidRequest(f"{len(told.results)} results came for {len(rows)} offsets")
            failed = [
                from_code(code, f"{partition[0]}-{partition[1]}: offset was not committed")
                for partition, code in zip(offsets, told.results, strict=True)
                if code
            ]
            if not failed:
                return
            final = next((error for error in failed if not error.retriable), None)
            if final is not None or time.monotonic() >= deadline - ATTEMPT_S_MIN:
                raise final or failed[0]
            self._pause(deadline)

    # -- lag -----------------------------------------------------------------------------------------------------

    def group_lag(self, group: str) -> list[PartitionLag]:
        """How far a group is behind, in each partition of the topics that it reads or has read. Raises GroupNotFound.

        A partition whose leader cannot be asked is there, without what only its leader knows.
        """
        deadline = time.monotonic() + self._timeout_s
        topics = self._topics_by_id(deadline)
        described = self._describe_group(group, topics, deadline)
        committed = self._group_offsets(group, topics, deadline)
        owners = {partition: member for member in described.members for partition in member.assignment}
        names = {partition.topic for partition in (*committed, *owners)}
        names.update(name for member in described.members for name in member.topics)
        views = sorted((info for info in topics.values() if info.name in names), key=lambda info: info.name)
        now_ms = time.time() * 1000
        rows = []
        for view in views:
            rows += self._topic_lag(view, committed, owners, now_ms, deadline)
        return rows

    def _topic_lag(
        self,
        view: messages.TopicInfo,
        committed: dict[TopicPartition, OffsetAndMetadata],
        owners: dict[TopicPartition, MemberDescription],
        now_ms: float,
        deadline: float,
    ) -> list[PartitionLag]:
        health = self._health(view, deadline)
        waiting: dict[int, range] = {}  # offsets that the group has yet to read
        for number, row in health.items():
            at = committed.get(TopicPartition(view.name, number))
            if at is not None or row.log_start == row.high_watermark:
                begin = row.log_start if at is None else max(at.offset, row.log_start)
                waiting[number] = range(begin, row.high_watermark)
        first_ms = FirstRecords(self._router, view).timestamps(
            {number: left for number, left in waiting.items() if left}, deadline
        )
        rows = []
        for number in sorted(partition.partition for partition in view.partitions):
            partition = TopicPartition(view.name, number)
            at, known, left, owner = (
                committed.get(partition),
                health.get(number),
                waiting.get(number),
                owners.get(partition),
            )
            seconds: float | None = None
            if left is not None and not left:
                seconds = 0.0
            elif number in first_ms:
                stamp = first_ms[number]
                seconds = 0.0 if stamp is None else max(0.0, (now_ms - stamp) / 1000)
            rows.append(
                PartitionLag(
                    view.name,
                    number,
                    at.offset if at is not None else None,
                    known.log_start if known is not None else None,
                    known.high_watermark if known is not None else None,
                    len(left) if left is not None else None,
                    seconds,
                    owner.member_id if owner is not None else None,
                    owner.client_id if owner is not None else None,
                )
            )
        return rows

    # -- the coordinator -------------------------------------------------------------------------------------------

    def _of_coordinator(
        self,
        group: str,
        operation: Operation,
        request: Struct,
        deadline: float,
        doubts: list[ZmqueueError] | None = None,
    ) -> tuple[int, Any]:
        """Which broker coordinates the group, and its answer. `doubts` collects attempts that may have taken effect."""
        while True:
            try:
                coordinator = self._coordinator(group, deadline)
                try:
                    return coordinator, self._attempt(coordinator, operation, request, deadline)
                except ZmqueueError as error:
                    if error.indeterminate and doubts is not None:
                        doubts.append(error)
                    raise
            except ZmqueueError as error:
                if not error.retriable or time.monotonic() >= deadline - ATTEMPT_S_MIN:
                    raise
            self._pause(deadline)

    def _coordinator(self, group: str, deadline: float) -> int:
        request = group_messages.FindCoordinatorRequest(group)
        found: group_messages.FindCoordinatorResponse = self._command(Operation.FIND_COORDINATOR, request, deadline)
        if found.broker == NO_BROKER:
            raise CoordinatorNotAvailable(f"partition {found.partition} of committed offsets has no leader")
        metadata = self._router.metadata
        if found.broker not in metadata.brokers:
            self._router.wait_for(
                lambda: found.broker in metadata.brokers or None, min(ATTEMPT_S, self._left(deadline))
            )
        return found.broker

    def _topics_by_id(self, deadline: float) -> Topics:
        return {info.topic_id: info for info in self._metadata(None, deadline).topics}


def _named(entries: Iterable[messages.PartitionEntry], topics: Topics) -> list[TopicPartition]:
    """Without the partitions of topics that were deleted."""
    return sorted(TopicPartition(topics[e.topic_id].name, e.partition) for e in entries if e.topic_id in topics)


def _commit_row(
    topics: Mapping[str, messages.TopicInfo], partition: TopicPartition, offset: int | OffsetAndMetadata
) -> group_messages.CommitRow:
    info = topics.get(partition.topic)
    if info is None or all(known.partition != partition.partition for known in info.partitions):
        raise UnknownTopicOrPartition(f"there is no {partition.topic}-{partition.partition}")
    at = offset if isinstance(offset, OffsetAndMetadata) else OffsetAndMetadata(offset)
    return group_messages.CommitRow(info.topic_id, partition.partition, at.offset, at.leader_epoch, at.metadata)
