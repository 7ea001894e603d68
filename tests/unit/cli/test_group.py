"""`group ls|describe|seek|rm` as typed, against a stand-in of the administrator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit.cli.test_commands import Closing, Part, Topic, consumer, run, somebody_listens  # noqa: F401

import zmqueue
from zmqueue.client.descriptions import (
    GroupDescription,
    GroupListing,
    GroupSummary,
    MemberDescription,
    PartitionLag,
)
from zmqueue.errors import GroupNotFound, NonEmptyGroup, UnknownTopicOrPartition
from zmqueue.model import OffsetAndMetadata, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Admin(Closing):
    """Knows the groups `billing` (empty; it has committed 3 of t-0) and `busy` (two members)."""

    unanswered: list[int]
    moved: dict[str, Any]
    deleted: list[str]
    joins_late: bool

    def __init__(self, **_: Any) -> None:
        pass

    def list_groups(self) -> GroupListing:
        rows = [GroupSummary("billing", "empty", 0, 4, "sticky"), GroupSummary("busy", "stable", 2, 7, "range")]
        return GroupListing(rows, self.unanswered)

    def list_topics(self, *, internal: bool = False) -> list[str]:
        return ["t"]

    def describe_topic(self, name: str) -> Topic:
        if name != "t":
            raise UnknownTopicOrPartition(f"no topic {name!r}")
        return Topic(name, partitions=[Part(0), Part(1)])

    def describe_group(self, name: str) -> GroupDescription:
        if name not in ("billing", "busy"):
            raise GroupNotFound()
        held = [
            MemberDescription(f"{letter}123456789", f"worker-{letter}", None, ["t"], [partition], [T0, T1], 10_000)
            for letter, partition in (("a", T0), ("b", T1))
        ]
        busy = name == "busy" or (self.joins_late and self.moved)
        return GroupDescription(name, "stable", 7, "range", 2, held if busy else [])

    def group_offsets(self, name: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return {T0: OffsetAndMetadata(3)} if name != "quiet" else {}

    def group_lag(self, name: str) -> list[PartitionLag]:
        return [
            PartitionLag("t", 0, 3, 0, 5, 2, 61.0, "a123456789", "worker-a"),
            PartitionLag("t", 1, None, 2, 5, None, None, None, None),
        ]

    def set_group_offsets(self, name: str, offsets: dict[TopicPartition, int]) -> None:
        self.moved[name] = offsets
        if name == "busy" or self.joins_late:
            raise NonEmptyGroup()

    def delete_group(self, name: str) -> None:
        self.describe_group(name)
        if name == "busy":
            raise NonEmptyGroup()
        self.deleted.append(name)


@pytest.fixture(autouse=True)
def admin(monkeypatch: pytest.MonkeyPatch, consumer: None) -> type[Admin]:  # noqa: F811
    Admin.unanswered, Admin.moved, Admin.deleted, Admin.joins_late = [], {}, [], False
    monkeypatch.setattr(zmqueue, "Admin", Admin, raising=False)
    return Admin


def test_ls_shows_a_group_a_line() -> None:
    lines = [line.split() for line in run("group", "ls").stdout.splitlines()]
    assert lines == [
        ["GROUP", "STATE", "MEMBERS", "GENERATION", "ASSIGNOR"],
        ["billing", "empty", "0", "4", "sticky"],
        ["busy", "stable", "2", "7", "range"],
    ]
    document = json.loads(run("group", "ls", "-o", "json").stdout)
    assert [row["group"] for row in document["groups"]] == ["billing", "busy"]


def test_ls_without_an_answer_from_every_broker_shows_what_it_has_and_exits_4(admin: type[Admin]) -> None:
    admin.unanswered = [1, 3]
    result = run("group", "ls")
    assert (result.exit_code, len(result.stdout.splitlines())) == (4, 3)
    assert result.stderr == "zmqueue: groups may be missing: no answer from broker 1, 3\n"


def test_describe_shows_members_and_lag_in_records_and_time() -> None:
    lines = run("group", "describe", "busy").stdout.splitlines()
    assert lines[0] == "busy: stable, 2 members, generation 7, assignor range, lag 2"
    assert lines[2].split() == ["MEMBER", "CLIENT", "INSTANCE", "HOLDS", "WILL", "HOLD"]
    assert lines[3].split() == ["a123456789", "worker-a", "-", "1", "2"]
    assert lines[7].split() == ["t", "0", "3", "5", "2", "1m01s", "worker-a", "a1234567"]
    assert lines[8].split() == ["t", "1", "-", "5", "-", "-", "-"]


def test_describe_as_json_has_what_is_not_known_as_null() -> None:
    document = json.loads(run("group", "describe", "busy", "-o", "json").stdout)
    assert (document["group"], document["lag"], document["coordinator"]) == ("busy", 2, 2)
    assert document["members"][0]["assignment"] == [["t", 0]]
    assert document["partitions"][0]["lag_seconds"] == 61.0
    assert document["partitions"][1]["committed"] is None


@pytest.mark.parametrize("command", [["describe"], ["rm"], ["seek", "--to", "end"]])
def test_a_group_that_is_not_there_exits_3_and_tells_the_nearest(command: list[str]) -> None:
    result = run("group", *command, "biling")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "zmqueue: no group 'biling', the nearest is billing\n"


@pytest.mark.parametrize(
    ("to", "offset"), [("start", 2), ("end", 5), ("4", 4), ("0", 2), ("99", 5), ("-1", 4), ("@30", 3), ("@41", 5)]
)
def test_seek_moves_every_partition_of_the_topics_and_never_beyond_their_ends(
    admin: type[Admin], to: str, offset: int
) -> None:
    result = run("group", "seek", "billing", "--to", to)
    assert result.exit_code == 0
    assert admin.moved == {"billing": {T0: offset, T1: offset}}
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["TOPIC", "PARTITION", "FROM", "TO"],
        ["t", "0", "3", str(offset)],
        ["t", "1", "-", str(offset)],
    ]


def test_seek_moves_the_named_partition_only(admin: type[Admin]) -> None:
    document = json.loads(
        run("group", "seek", "billing", "--to", "start", "--topic", "t", "-p", "1", "-o", "json").stdout
    )
    assert document["partitions"] == [{"topic": "t", "partition": 1, "from": None, "to": 2}]
    assert admin.moved == {"billing": {T1: 2}}


def test_a_dry_run_changes_nothing(admin: type[Admin]) -> None:
    result = run("group", "seek", "billing", "--to", "start", "--dry-run")
    assert (result.exit_code, admin.moved) == (0, {})
    assert result.stdout.splitlines()[1].split() == ["t", "0", "3", "2"]
    assert result.stderr == "nothing was changed\n"
    result = run("group", "seek", "busy", "--to", "start", "--dry-run")
    assert (result.exit_code, admin.moved) == (0, {})
    assert result.stderr == "nothing was changed; 2 members (worker-a, worker-b) would have to stop first\n"


@pytest.mark.parametrize("joins_late", [False, True])
def test_a_group_with_members_is_not_moved_and_the_way_out_is_told(admin: type[Admin], joins_late: bool) -> None:
    admin.joins_late = joins_late
    name = "billing" if joins_late else "busy"
    result = run("group", "seek", name, "--to", "start")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"zmqueue: group {name!r} has 2 members (worker-a, worker-b), who would go on where they are: "
        "stop them, seek, and start them again\n"
    )


def test_a_new_group_is_made_where_its_topics_are_named(admin: type[Admin]) -> None:
    assert run("group", "seek", "new", "--to", "end", "--topic", "t").exit_code == 0
    assert admin.moved == {"new": {T0: 5, T1: 5}}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--topic", "tt"], "no topic 'tt', the nearest is t"),
        (["--topic", "t", "-p", "2"], "topic 't' has no partition 2: there are 0 to 1"),
    ],
)
def test_seek_of_what_is_not_there(args: list[str], problem: str) -> None:
    result = run("group", "seek", "billing", "--to", "end", *args)
    assert (result.exit_code, result.stderr) == (3, f"zmqueue: {problem}\n")


def test_a_group_without_offsets_must_be_told_its_topics(admin: type[Admin], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "group_offsets", lambda self, name: {})
    result = run("group", "seek", "billing", "--to", "end")
    assert result.exit_code == 3
    assert result.stderr == "zmqueue: group 'billing' has committed nothing: say which --topic it is to read\n"


def test_rm_deletes_an_empty_group_only(admin: type[Admin]) -> None:
    assert run("group", "rm", "billing").stdout == "deleted group billing\n"
    result = run("group", "rm", "busy")
    assert (result.exit_code, admin.deleted) == (1, ["billing"])
    assert result.stderr == "zmqueue: group 'busy' has 2 members (worker-a, worker-b): stop them first\n"
