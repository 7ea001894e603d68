"""Groups around a coordinator: the topic, taking over, writes, answers, and what happens when things go wrong.

Broker 0 is ours; broker 1 is played by hand. The coordinator is a stand-in that says what it heard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google_crc32c import value as crc32c

from tests.unit.broker.test_shell import Shell, _registration
from zmqueue import errors
from zmqueue.broker import group_host, groups
from zmqueue.config import BrokerConfig, ClusterConfig, Config, LogConfig
from zmqueue.core import commands as c
from zmqueue.core.group_effects import Answer, GiveUp, Refuse, Write
from zmqueue.model import PartitionKey
from zmqueue.wire import group_messages as g
from zmqueue.wire import messages as m
from zmqueue.wire.batch import Batch, encode
from zmqueue.wire.frames import Operation

COMMITTED = g.CommitOffsetsResponse([0])


class Stand:
    """Stands where a coordinator is. A commit is written under its group's name; a heartbeat parks."""

    made: list[Stand] = []

    def __init__(self, *arguments: Any) -> None:
        self.replayed: list[tuple[bytes | None, bytes | None]] = []
        self.heard: list[Any] = []
        self.active_ms: int | None = None
        self.next_due_ms: int | None = None
        self.parked: list[Any] = []
        self.writing: dict[int, Any] = {}
        self.number = 0
        Stand.made.append(self)

    def replay(self, key: bytes | None, value: bytes | None) -> None:
        if key == b"unreadable":
            raise errors.InvalidRecord("nobody knows what this is")
        if key == b"future":
            raise errors.FutureFormat("written by a later version")
        self.replayed.append((key, value))

    def activate(self, now_ms: int, wall_ms: int) -> list[Any]:
        self.active_ms = now_ms
        return []

    def on_heartbeat(self, token: Any, request: Any, now_ms: int) -> list[Any]:
        self.heard.append(request)
        if request.member_id == "mistaken":
            raise ValueError("a mistake")
        self.parked.append(token)
        return []

    def on_commit(self, token: Any, request: Any, now_ms: int, wall_ms: int) -> list[Any]:
        self.number += 1
        self.writing[self.number] = token
        size = request.rows[0].offset
        return [Write(self.number, [(request.group.encode(), b"%d" % self.number + b"x" * size)])]

    def on_describe(self, token: Any, request: Any, now_ms: int) -> list[Any]:
        return [Refuse(token, errors.GroupNotFound.code, "no such group")]

    def list_groups(self) -> list[g.GroupRow]:
        return [g.GroupRow(f"group-{len(self.replayed)}", "empty", 0, 0, "sticky")]

    def on_written(self, number: int, code: int, now_ms: int) -> list[Any]:
        self.heard.append((number, code))
        if code:
            return [GiveUp("it may be in the log, or not")]
        return [Answer(self.writing.pop(number), COMMITTED)]

    def on_topics(self, now_ms: int) -> list[Any]:
        self.heard.append("topics")
        return []

    def on_tick(self, now_ms: int, wall_ms: int) -> list[Any]:
        self.heard.append(("tick", now_ms))
        self.next_due_ms = None
        return []


class GroupShell(Shell):
    def __init__(self, folder: Path, brokers: int = 2, **config: Any) -> None:
        super().__init__(folder, Config(cluster=ClusterConfig(brokers=brokers), log=LogConfig(fsync="os"), **config))

    def lead(self) -> None:
        super().lead()
        self.now_ms += 1

    def turn(self) -> None:
        super().turn()
        self.handlers.groups.on_turn(self.now_ms)
        self.executor.end_turn()
        self.executor.on_flushed()
        self.handlers.groups.on_turn(self.now_ms)

    def find(self, group: str) -> None:
        self.ask(Operation.FIND_COORDINATOR, g.FindCoordinatorRequest(group))

    def make_topic(self) -> None:
        self.find("any")
        self.turn()
        assert isinstance(self.answer, g.FindCoordinatorResponse)
        self.turn()

    @property
    def topic(self) -> Any:
        return self.state.topic_named(g.OFFSETS_TOPIC)

    def group(self, leader: int = 0, nth: int = 0) -> str:
        """One that this broker coordinates."""
        names = (f"group-{number}" for number in range(10_000))
        mine = [name for name in names if self.topic.partitions[g.group_partition(name, 10)].leader == leader]
        return [name for name in mine if self.key(name) == self.key(mine[0])][nth]

    def key(self, group: str) -> PartitionKey:
        return PartitionKey(self.topic.topic_id, g.group_partition(group, 10))

    def beat(self, group: str, member: str = "member", wait_ms: int = 1_000) -> None:
        self.ask(Operation.GROUP_HEARTBEAT, g.GroupHeartbeatRequest(group, member, 0, wait_ms))

    def commit_offset(self, group: str, size: int = 0) -> None:
        row = g.CommitRow(b"x" * 16, 0, size)
        self.ask(Operation.COMMIT_OFFSETS, g.CommitOffsetsRequest(group, [row]))

    def acknowledge(self, group: str) -> None:
        """Broker 1 has everything too."""
        key = self.key(group)
        replica = self.node.replicas[key]
        row = m.AckRow(*key, replica.leader_epoch, replica.log.log_end)
        self.executor.run(self.node.on_acks(m.Acks("cluster", 1, 1, [row]), self.now_ms))
        self.handlers.groups.on_turn(self.now_ms)

    def away_and_back(self, group: str, lacking: bool = True) -> None:
        """Broker 1 leads for a while, and gives it back; what it has acknowledged is forgotten."""
        self.other(c.Fence([c.BrokerRef(0, 1)]))
        self.other(c.Unfence(0, 1))
        key = self.key(group)
        partition = self.state.partition(key)
        assert partition is not None
        assert partition.leader == 1
        both = [c.BrokerRef(broker, 1) for broker in partition.replicas]
        change = c.IsrChange(*key, partition.leader_epoch, partition.partition_epoch, both)
        self.other(c.AlterIsr(1, 1, [change]))
        self.other(c.Resign(1, 1, c.PartitionRef(*key), partition.leader_epoch))
        assert self.state.partition(key).leader == 0  # type: ignore[union-attr]

    def host(self, group: str) -> group_host.Host:
        return self.handlers.groups._hosts[self.key(group)]

    def stand(self, group: str) -> Stand:
        return self.host(group).coordinator  # type: ignore[return-value]

    @property
    def codes(self) -> list[int]:
        """What was answered since, as error codes."""
        codes = [getattr(message, "code", 0) for _, message, _ in self.answers.sent]
        self.answers.sent.clear()
        return codes


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    Stand.made = []
    monkeypatch.setattr(groups, "Coordinator", Stand)


@pytest.fixture
def shell(tmp_path: Path) -> GroupShell:
    shell = GroupShell(tmp_path)
    shell.lead()
    return shell


@pytest.fixture
def coordinating(shell: GroupShell) -> GroupShell:
    shell.make_topic()
    return shell


# -- where a group is ------------------------------------------------------------------------------------------------


def test_the_topic_of_offsets_is_made_when_somebody_asks_for_a_coordinator(shell: GroupShell) -> None:
    shell.find("one")
    shell.find("two")
    assert not shell.answers.sent
    shell.turn()
    topic = shell.topic
    assert (len(topic.partitions), topic.replication_factor, topic.storage) == (10, 2, "disk")
    assert topic.config["cleanup.policy"] == "compact"
    for group in ("one", "two"):
        _, response, _ = shell.answers.sent.pop(0)
        number = g.group_partition(group, 10)
        assert response == g.FindCoordinatorResponse(number, topic.partitions[number].leader, 0)
    assert shell.handlers.waiting == 0


def test_two_brokers_that_make_the_topic_at_once_end_with_one(shell: GroupShell) -> None:
    shell.find("group")
    topic_id = b"o" * 16
    shell.other(c.CreateTopic(g.OFFSETS_TOPIC, topic_id, 10, 2, 1, "disk"))
    shell.turn()
    assert isinstance(shell.answer, g.FindCoordinatorResponse)
    assert shell.topic.topic_id == topic_id


def test_the_topic_waits_for_as_many_brokers_as_it_shall_have_replicas(tmp_path: Path) -> None:
    shell = GroupShell(tmp_path, brokers=3)
    shell.lead()
    shell.find("group")
    assert shell.codes == [errors.CoordinatorNotAvailable.code]
    shell.other(_registration(2))
    shell.other(c.Unfence(2, 1))
    shell.make_topic()
    assert (shell.topic.replication_factor, shell.topic.min_insync_replicas) == (3, 2)


def test_without_room_or_a_leader_there_is_no_coordinator(shell: GroupShell) -> None:
    shell.low_disk = True
    shell.find("group")
    assert shell.codes == [errors.CoordinatorNotAvailable.code]
    shell.low_disk = False
    shell.make_topic()
    for broker in (0, 1):
        shell.other(c.Fence([c.BrokerRef(broker, 1)]))
    shell.find("group")
    assert shell.codes == [errors.CoordinatorNotAvailable.code]


def test_a_broker_that_does_not_coordinate_a_group_says_so(shell: GroupShell) -> None:
    shell.beat("group")
    assert shell.codes == [errors.NotCoordinator.code], "nobody does yet"
    shell.make_topic()
    group = shell.group(leader=1)
    shell.beat(group)
    shell.commit_offset(group)
    shell.ask(Operation.FETCH_OFFSETS, g.FetchOffsetsRequest(group))
    shell.ask(Operation.DESCRIBE_GROUP, g.DescribeGroupRequest(group))
    shell.ask(Operation.DELETE_GROUP, g.DeleteGroupRequest(group))
    assert shell.codes == [errors.NotCoordinator.code] * 5


def test_clients_neither_write_to_internal_topics_nor_delete_their_records(coordinating: GroupShell) -> None:
    shell = coordinating
    header, body = encode([b"v"], keys=[b"k"])
    entry = m.ProduceEntry(*shell.key(shell.group()))
    shell.ask(Operation.PRODUCE, m.ProduceRequest(-1, 1_000, [entry]), [header.pack(), body])
    assert shell.answer.results[0].error == errors.ReservedName.code
    shell.ask(Operation.DELETE_RECORDS, m.DeleteRecordsRequest(*shell.key(shell.group()), -1))
    assert shell.codes == [errors.ReservedName.code]


# -- requests and writes ---------------------------------------------------------------------------------------------


def test_a_commit_is_answered_when_all_replicas_have_it(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    shell.commit_offset(group)
    shell.turn()
    assert not shell.answers.sent
    shell.acknowledge(group)
    assert shell.answer == COMMITTED
    assert shell.handlers.waiting == 0


def test_what_is_written_in_one_turn_shares_a_batch_and_keeps_its_order(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    second = shell.group(nth=1)
    for name in (group, second, group):
        shell.commit_offset(name)
    shell.turn()
    log = shell.logs[shell.key(group)]
    assert [header.record_count for header in log.headers()] == [3]
    shell.acknowledge(group)
    assert shell.stand(group).heard == [(1, 0), (2, 0), (3, 0)]
    assert shell.codes == [0, 0, 0]


def test_batches_are_as_large_as_they_may_be_and_no_write_is_torn(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    for _ in range(4):
        shell.commit_offset(group, size=300 * 1024)
    shell.turn()
    assert [header.record_count for header in shell.logs[shell.key(group)].headers()] == [2, 2]
    shell.acknowledge(group)
    assert shell.stand(group).heard == [(number, 0) for number in (1, 2, 3, 4)]


def test_a_write_that_finds_no_room_is_known_to_have_failed(
    coordinating: GroupShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, group = coordinating, coordinating.group()
    stand, log = shell.stand(group), shell.logs[shell.key(group)]

    def full(*_: Any) -> None:
        raise errors.StorageFull

    monkeypatch.setattr(type(log), "append", full)
    shell.commit_offset(group)
    shell.turn()
    assert stand.heard == [(1, errors.StorageFull.code)]
    assert log.log_end == shell.node.replicas[shell.key(group)].log.log_end == 0


def test_what_the_coordinator_refuses_is_refused(coordinating: GroupShell) -> None:
    coordinating.ask(Operation.DESCRIBE_GROUP, g.DescribeGroupRequest(coordinating.group()))
    assert coordinating.codes == [errors.GroupNotFound.code]


def test_a_heartbeat_never_waits_for_longer_than_a_fetch_may(tmp_path: Path) -> None:
    shell = GroupShell(tmp_path, broker=BrokerConfig(fetch_wait_ms_max=700))
    shell.lead()
    shell.make_topic()
    group = shell.group()
    shell.beat(group, wait_ms=100_000)
    assert shell.stand(group).heard[0].wait_ms == 700


def test_members_that_wait_take_no_room_from_others(tmp_path: Path) -> None:
    limits = BrokerConfig(requests_waiting_max=2, requests_parked_max=2)
    shell = GroupShell(tmp_path, broker=limits)
    shell.lead()
    shell.make_topic()
    group = shell.group()
    for number in range(3):
        shell.beat(group, f"member-{number}")
    assert shell.codes == [errors.Busy.code]
    shell.commit_offset(group)
    shell.turn()
    shell.acknowledge(group)
    assert shell.codes == [0]


def test_a_broker_lists_the_groups_that_it_coordinates(coordinating: GroupShell) -> None:
    coordinating.ask(Operation.LIST_GROUPS, g.ListGroupsRequest())
    led = sum(1 for partition in coordinating.topic.partitions if partition.leader == 0)
    assert len(coordinating.answer.groups) == led == 5


def test_coordinators_hear_of_time_when_they_want_to(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    assert shell.handlers.groups.next_due_ms is None, "an idle broker is left alone"
    shell.stand(group).next_due_ms = shell.now_ms + 500
    shell.beat(group)
    assert shell.handlers.groups.next_due_ms == shell.now_ms + 500
    shell.stand(group).heard.clear()
    for passed, heard in ((499, []), (1, [("tick", shell.now_ms + 500)])):
        shell.now_ms += passed
        shell.handlers.groups.on_turn(shell.now_ms)
        assert shell.stand(group).heard == heard


def test_coordinators_hear_of_topics(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    topic_id = b"n" * 16
    for command in (
        c.CreateTopic("new", topic_id, 1, 2, 1, "disk"),
        c.CreatePartitions("new", topic_id, 2),
        c.DeleteTopic("new"),
    ):
        shell.stand(group).heard.clear()
        shell.other(command)
        assert shell.stand(group).heard == ["topics"]
    shell.stand(group).heard.clear()
    shell.other(c.AllocateProducerIds(1))
    assert shell.stand(group).heard == []


# -- taking over -----------------------------------------------------------------------------------------------------


def written(shell: GroupShell, group: str, count: int = 3) -> None:
    for _ in range(count):
        shell.commit_offset(group)
        shell.turn()
    shell.acknowledge(group)
    assert shell.codes == [0] * count


def values(stand: Stand) -> list[bytes | None]:
    return [value for _, value in stand.replayed]


def test_a_new_coordinator_goes_to_work_when_what_it_read_is_committed(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    written(shell, group)
    shell.commit_offset(group)
    shell.turn()
    shell.away_and_back(group)
    assert shell.codes == [errors.NotCoordinator.code]
    shell.turn()
    stand = shell.stand(group)
    assert values(stand) == [b"1", b"2", b"3", b"4"]
    assert stand.active_ms is None
    for ask in (
        lambda: shell.beat(group),
        lambda: shell.commit_offset(group),
        lambda: shell.ask(Operation.LIST_GROUPS, g.ListGroupsRequest()),
    ):
        ask()
        assert shell.codes == [errors.CoordinatorLoading.code]
    shell.now_ms += 5
    shell.acknowledge(group)
    assert stand.active_ms == shell.now_ms
    shell.beat(group)
    assert not shell.answers.sent


def test_a_long_log_is_read_in_slices_and_the_loop_goes_on_meanwhile(
    coordinating: GroupShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, group = coordinating, coordinating.group()
    for _ in range(2):
        for _ in range(3):
            shell.commit_offset(group)
        shell.turn()
    shell.acknowledge(group)
    shell.away_and_back(group)
    monkeypatch.setattr(group_host, "SLICE_RECORDS", 2)
    monkeypatch.setattr(groups, "READ_MS_PER_TURN", 0)
    counts = []
    while shell.handlers.groups.next_due_ms == 0:  # so the loop does not sleep
        shell.handlers.groups.on_turn(shell.now_ms)
        counts.append(len(shell.stand(group).replayed))
    assert counts == [2, 4, 6, 6], "also within a batch"
    assert values(shell.stand(group)) == [b"%d" % number for number in range(1, 7)]


def test_reading_goes_on_for_as_long_as_a_turn_may_take(
    coordinating: GroupShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, group = coordinating, coordinating.group()
    written(shell, group, 5)
    shell.away_and_back(group)
    monkeypatch.setattr(group_host, "SLICE_RECORDS", 1)
    shell.handlers.groups.on_turn(shell.now_ms)
    assert len(shell.stand(group).replayed) == 5


def test_whoever_waits_hears_at_once_that_the_partition_has_moved(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    shell.beat(group)
    shell.commit_offset(group)
    shell.commit_offset(group)
    shell.other(c.Fence([c.BrokerRef(0, 1)]))
    assert shell.codes == [errors.NotCoordinator.code] * 3
    assert shell.handlers.waiting == 0
    shell.turn()
    assert not shell.answers.sent
    shell.beat(group)
    assert shell.codes == [errors.NotCoordinator.code]


def test_results_of_a_former_life_reach_nobody(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    shell.commit_offset(group)
    shell.turn()
    former = shell.stand(group)
    shell.away_and_back(group)
    shell.turn()
    assert former.heard == []
    assert shell.stand(group) is not former


def test_a_coordinator_that_gives_up_is_followed_by_one_that_reads_the_log_again(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    former = shell.stand(group)
    written(shell, group, 1)
    shell.beat(group)
    shell.commit_offset(group)
    shell.turn()
    shell.now_ms += group_host.WRITE_TIMEOUT_MS
    shell.turn()
    assert shell.codes == [errors.CoordinatorLoading.code] * 2
    stand = shell.stand(group)
    assert stand is not former
    assert values(stand) == [b"1", b"2"]
    assert stand.active_ms is None, "nobody knows whether the last one stays"
    shell.acknowledge(group)
    assert stand.active_ms is not None


def test_a_mistake_costs_one_partition_a_pause_and_the_broker_nothing(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    written(shell, group, 1)
    shell.beat(group)
    shell.beat(group, "mistaken")
    assert shell.codes == [errors.CoordinatorLoading.code] * 2
    shell.turn()
    shell.beat(group)
    assert shell.codes == [errors.CoordinatorLoading.code]
    shell.now_ms += group_host.RETRY_MS
    assert shell.handlers.groups.next_due_ms == shell.now_ms
    shell.turn()
    assert shell.stand(group).active_ms is not None
    assert values(shell.stand(group)) == [b"1"]
    assert shell.handlers.waiting == 0


def append(shell: GroupShell, group: str, key: bytes, body: bytes = b"") -> None:
    header, written = encode([b"v"], keys=[key])
    if body:
        header.body_crc, header.body_length, header.raw_length = crc32c(body), len(body), len(body)
    batch = Batch(header, body or written)
    token = group_host.Writing(shell.host(group), None, [])  # type: ignore[arg-type]
    shell.executor.run(shell.node.on_produce(shell.key(group), token, batch, -1, 99_999, shell.now_ms))


def test_a_record_that_cannot_be_read_is_passed_over(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    append(shell, group, b"unreadable")
    append(shell, group, b"", body=b"no columns")
    written(shell, group, 1)
    shell.away_and_back(group)
    shell.turn()
    shell.acknowledge(group)
    assert values(shell.stand(group)) == [b"1"]
    assert shell.stand(group).active_ms is not None


def test_records_of_a_later_version_are_left_to_a_later_version(coordinating: GroupShell) -> None:
    shell, group = coordinating, coordinating.group()
    append(shell, group, b"future")
    shell.turn()
    shell.away_and_back(group)
    shell.turn()
    shell.acknowledge(group)
    shell.beat(group)
    assert shell.codes == [errors.CoordinatorLoading.code]


def test_damage_that_a_new_coordinator_meets_is_told_to_the_cluster(
    coordinating: GroupShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, group = coordinating, coordinating.group()
    written(shell, group, 1)
    shell.away_and_back(group)

    def damaged(*_: Any) -> None:
        raise errors.CorruptLog("damaged")

    monkeypatch.setattr(type(shell.logs[shell.key(group)]), "read", damaged)
    shell.turn()
    shell.turn()
    partition = shell.state.partition(shell.key(group))
    assert partition is not None
    assert partition.leader == 1
    shell.beat(group)
    assert errors.NotCoordinator.code in shell.codes
